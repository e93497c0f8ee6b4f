// Filters, hover and sorting. The page reads without any of it: a script only hides, shows and reads out what is there.
"use strict";

// --- a click on a column's head sorts by it: by the first number in the cells if they have one; what has none stays last
for (const table of document.querySelectorAll("table.sortable")) {
  const value = (row, i) => {
    const text = row.cells[i].firstElementChild.textContent.trim();
    const number = parseFloat(text.replace("infinite", "Infinity"));
    return Number.isNaN(number) ? (text === "–" ? null : text) : number;
  };
  table.querySelectorAll("th").forEach((head, i) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows].sort((one, other) => {
        const a = value(one, i), b = value(other, i);
        if (a === null || b === null) return (a === null) - (b === null);
        const order = typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
        return up ? order : -order;
      });
      table.tBodies[0].append(...rows);
    });
  });
}

// --- filters: one state per study, shown wherever the study has a place for them
const studies = {};
for (const place of document.querySelectorAll(".filters")) {
  const name = place.dataset.study;
  const fields = JSON.parse(place.dataset.fields);
  const study = (studies[name] ??= { off: {}, every: false, places: [] });
  study.places.push(place);
  const box = (text, checked, change) => {
    const label = document.createElement("label"), input = document.createElement("input");
    input.type = "checkbox";
    input.addEventListener("change", () => { change(input.checked); apply(name); });
    label.append(input, text);
    label.checked = () => { input.checked = checked(); };
    return label;
  };
  for (const [field, values] of Object.entries(fields)) {
    const off = (study.off[field] ??= new Set());
    const set = document.createElement("fieldset"), legend = document.createElement("legend");
    legend.textContent = field;
    set.append(legend);
    for (const value of values) {
      set.append(box(value, () => !off.has(value), (on) => (on ? off.delete(value) : off.add(value))));
    }
    place.append(set);
  }
  if (place.dataset.every !== undefined) {
    const set = document.createElement("fieldset");
    set.append(box("every setting, not only the best", () => study.every, (on) => { study.every = on; }));
    place.append(set);
  }
  place.hidden = false;
}

function apply(name) {
  const { off, every, places } = studies[name];
  for (const label of places.flatMap((place) => [...place.querySelectorAll("label")])) label.checked();
  const within = (facts) => Object.entries(facts).every(([field, value]) => !off[field]?.has(value));
  for (const part of document.querySelectorAll(`[data-of="${name}"]`)) {
    part.classList.toggle("out", !within(JSON.parse(part.dataset.facts)));
    for (const one of part.querySelectorAll("[data-facts]")) {
      one.classList.toggle("out", !within(JSON.parse(one.dataset.facts)));
      if (one.dataset.quiet !== undefined) one.classList.toggle("quiet", !every);
    }
    for (const svg of part.querySelectorAll("svg[data-higher]")) along(svg);
  }
}

// The line along the best of the dots that are seen.
function along(svg) {
  const up = svg.dataset.higher === "1";
  for (const line of svg.querySelectorAll(".best")) {
    const best = new Map();
    for (const dot of svg.querySelectorAll(".dot:not(.out)")) {
      if (JSON.parse(dot.dataset.facts).method !== line.dataset.method) continue;
      const y = Number(dot.getAttribute("cy")), slot = Number(dot.dataset.slot), old = best.get(slot);
      if (old === undefined || (up ? y < old[1] : y > old[1])) best.set(slot, [Number(dot.getAttribute("cx")), y]);
    }
    const points = [...best].sort((a, b) => a[0] - b[0]).map(([, point]) => point.join(","));
    line.setAttribute("points", points.join(" "));
  }
}
Object.keys(studies).forEach(apply);

// --- hover: the nearest point of the lines that are seen
const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
document.body.append(tip);
let hot = null;
function cool() {
  hot?.classList.remove("hot");
  hot = null;
  tip.hidden = true;
}
for (const svg of document.querySelectorAll("svg.chart")) {
  const lines = [...svg.querySelectorAll(".line")].map((line) => {
    const places = line.querySelector("polyline").getAttribute("points").split(" ");
    return [line, line.dataset.at.split(";").map((text, i) => [...places[i].split(",").map(Number), text])];
  });
  if (!lines.length) continue;
  const show = (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    let best = null, least = 40 ** 2;
    for (const [line, points] of lines) {
      if (line.matches(".out, .quiet")) continue;
      for (const [x, y, text] of points) {
        const far = (x - at.x) ** 2 + (y - at.y) ** 2;
        if (far < least) [best, least] = [[line, text], far];
      }
    }
    cool();
    if (best === null) return;
    hot = best[0];
    hot.classList.add("hot");
    tip.innerHTML = "<b></b><span></span>";
    tip.firstChild.textContent = hot.dataset.name;
    const [task, mean, error, seeds] = best[1].split(" ");
    const within = error === "nan" ? "" : ` ± ${error}`;
    tip.lastChild.textContent = `task ${task}: ${mean}${svg.dataset.unit}${within}, ${seeds} seed${seeds === "1" ? "" : "s"}`;
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
    tip.style.top = `${event.clientY + height + 24 > innerHeight ? event.clientY - height - 12 : event.clientY + 16}px`;
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", cool);
}

// --- where in the page we are
const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
const watch = new IntersectionObserver(
  (seen) => {
    for (const { target, isIntersecting } of seen) {
      if (!isIntersecting) continue;
      for (const link of links.values()) link.removeAttribute("aria-current");
      links.get(target.id)?.setAttribute("aria-current", "true");
    }
  },
  { rootMargin: "0px 0px -75% 0px" },
);
for (const id of links.keys()) {
  const target = document.getElementById(id);
  if (target) watch.observe(target);
}

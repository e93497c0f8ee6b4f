"""SWR: selective weight reinitialisation. Single weights of low utility begin anew, not whole units."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gxd import arguments
from gxd.checkpoint import Some
from gxd.methods.base import Host, Method
from gxd.methods.registry import register_method
from gxd.methods.scope import KINDS, Exclude, patterns, treated
from gxd.plan.init import Init
from gxd.reset.fresh import TABLES, Distributions, distributions, fixed_rows, without_rows
from gxd.reset.operator import MEMORIES
from gxd.reset.writes import Entries, Write

SELECTIONS = ("threshold", "proportional")
REDRAWS = ("resample", "mean")


class Weights(NamedTuple):
    """The state of :class:`SWR`.

    Attributes:
        began: what each parameter was drawn from.
        gradients: of the step that is being taken, where the utility asks for them.
        total: how many weights were redrawn so far.
    """

    step: int
    began: Distributions
    gradients: Some
    total: int


class SWR(Method):
    """Redraws weights of low utility, by magnitude: ``u = |w|``. The arguments are those of :func:`swr`."""

    tables = True  # whether it judges the weights of embeddings

    def __init__(self, every: int, factor: float, selection: str, redraw: str, memories: str, exclude: Exclude) -> None:
        self.every = arguments.every("every", every, least=0)
        self.selection = arguments.choice("selection", selection, SELECTIONS)
        self.factor = arguments.number("factor", factor, 0.0, 1.0 if selection == "proportional" else math.inf)
        self.redraw = arguments.choice("redraw", redraw, REDRAWS)
        self.memories = arguments.choice("memories", memories, MEMORIES)
        self.exclude = patterns(exclude)

    def init(self, host: Host) -> Weights:
        treated(host.model, self.exclude, KINDS)
        return Weights(0, distributions(host.model), Some(), 0)

    def after_step(self, host: Host, state: Weights) -> Weights:
        after = state._replace(step=state.step + 1, gradients=Some())
        if self.every:
            host.check_new_state()
        writes, total, fixed = [], state.total, fixed_rows(host.model) if self.due(state) else {}
        for name, parameter in self.judged(host).items() if self.due(state) else ():
            rows = fixed.get(id(parameter), ())
            where = self.chosen(self.scores(host, state, name, parameter), parameter, host, rows)
            if len(where):
                values = self.written(state, name).draw(where.shape, host.generator).to(parameter)
                writes.append(Write(parameter, Entries(where), host.processes.agree(values)))
                total += len(where)
        if writes:
            host.write(writes, self.memories)
        return after._replace(total=total)

    def due(self, state: Weights) -> bool:
        """Whether weights are redrawn after the coming step."""
        return self.every > 0 and (state.step + 1) % self.every == 0

    def judged(self, host: Host) -> dict[str, nn.Parameter]:
        """The parameters whose weights are judged, by name."""
        embeddings = [m for m in host.model.modules() if isinstance(m, TABLES)]
        left = set() if self.tables else {id(module.weight) for module in embeddings}
        wanted = treated(host.model, self.exclude, KINDS)
        return {name: p for name, p in host.parameters().items() if name in wanted and id(p) not in left}

    def scores(self, host: Host, state: Weights, name: str, parameter: Tensor) -> Tensor | None:
        """Of all weights of a parameter, in its shape; None if this step does not show it."""
        return parameter.abs()

    def chosen(self, scores: Tensor | None, parameter: Tensor, host: Host, rows: Sequence[int]) -> Tensor:
        """The numbers of the weights of a parameter that are redrawn; equal on all processes. These rows are fixed, and
        not among those that are compared.
        """
        size = without_rows(parameter, rows).numel()
        share = size * self.factor
        more = bool(torch.rand((), generator=host.generator) < share % 1)  # drawn in any case, on all processes alike
        mask = torch.zeros(size, dtype=torch.uint8, device=parameter.device)
        if scores is not None:
            flat = without_rows(scores, rows).flatten().to(torch.promote_types(scores.dtype, torch.float32))
            if self.selection == "threshold":
                mask.copy_(flat <= self.factor * flat.mean())
            else:
                mask[flat.topk(int(share) + more, largest=False).indices] = 1
        where = host.processes.agree(mask).nonzero().flatten()
        if not rows:
            return where
        numbers = torch.arange(parameter.numel(), device=parameter.device).view(parameter.shape)
        return without_rows(numbers, rows).flatten()[where]

    def written(self, state: Weights, name: str) -> Init:
        """The distribution of what a reset writes to a weight. A bias is not drawn, as in the authors' code."""
        began, is_bias = Init(*state.began[name]), "bias" in name.rpartition(".")[2]
        return Init("constant", began.mean) if is_bias or self.redraw == "mean" else began


class ByGradient(SWR):
    """``u = |w g|``, with the weight after the step and the gradient that the step was made of."""

    tables = False

    def before_step(self, host: Host, state: Weights) -> Weights:
        # Kept here, for an optimizer or the user may have cleared them when the last of several has stepped.
        names = self.judged(host) if self.due(state) else {}
        new = {name: p.grad.detach().clone() for name, p in names.items() if p.grad is not None}
        return state._replace(gradients=Some({**state.gradients, **new}))

    def scores(self, host: Host, state: Weights, name: str, parameter: Tensor) -> Tensor | None:
        gradient = shown(state.gradients, name)
        return None if gradient is None else (parameter * gradient).abs()


class ByAttribution(SWR):
    """``u = sqrt(E[(w - w_reset)^2]) |dz/dw|``, over what the reset may write; ``dz/dw`` is before the step."""

    tables = False

    def observes(self, state: Weights) -> bool:
        return self.due(state)

    def scores(self, host: Host, state: Weights, name: str, parameter: Tensor) -> Tensor | None:
        gradient = shown(host.output_gradients or {}, name)
        if gradient is None:
            return None
        reset = self.written(state, name)
        return ((parameter - reset.mean).square() + reset.deviation**2).sqrt() * gradient.abs()


def shown(gradients: Mapping[str, Tensor], name: str) -> Tensor | None:
    """The gradient of a parameter; None if this step does not show it. Zeros throughout say no more than none at all:
    ``zero_grad(set_to_none=False)`` leaves them at the head of another task.
    """
    gradient = gradients.get(name)
    return gradient if gradient is not None and gradient.any() else None


SCORES: dict[str, tuple[type[SWR], str | None]] = {
    "gradient": (ByGradient, None),
    "magnitude": (SWR, None),
    "attribution": (ByAttribution, "target"),
    "attribution_sketch": (ByAttribution, "sketch"),
}


@register_method(
    "swr",
    description="every so many steps, redraw the single weights whose utility is small next to that of their tensor",
    reference="Hernandez-Garcia, Dohare, Luo, Sutton: Reinitializing Weights vs Units for Maintaining Plasticity in "
    "Neural Networks, CoLLAs 2025",
    inert={"every": 0},
    changes="single weights",
)
def swr(
    every: int = 2048,
    factor: float = 1e-5,
    selection: str = "threshold",
    score: str = "gradient",
    redraw: str = "resample",
    memories: str = "keep",
    exclude: Exclude = (),
) -> SWR:
    """Every ``every`` steps, in each tensor, redraw the weights with ``u <= factor * mean(u)``, after the step.

    Weights, biases, norms and the head are treated alike, each tensor by itself. The weights of a dead ReLU have no
    gradient, so its whole row is redrawn. Read in the authors' optimizer; what differs here:

    - Each tensor's distribution is found from its initial values, not given: that of its layer, a uniform or a normal.
      Biases are set to its mean, so to 0, or to the constant they began with; gains of norms to 1.
    - Embeddings are left alone unless ``score`` is ``magnitude``: the gradient of a word that is not in the batch is
      zero, which says nothing of its use. So is a parameter that had no gradient in this step, or one of zeros alone.
      So is the row of a padding token (``padding_idx``), which nothing trains.
    - The authors' running average of the utility, which is off in their experiments, is left out, and so is their
      random utility.
    - A fraction of a weight is drawn from this method's generator, not from NumPy's global one.

    Args:
        every: steps between two redraws; 0: never. The paper's grid is 256 to 8192, for ViTs 64 to 254.
        factor: of the threshold, 1e-6 to 1 in the paper; or the share of each tensor that goes.
        selection: ``threshold``; ``proportional``: the ``floor(n * factor)`` lowest of n weights go, and one more with
            the probability of what is left of ``n * factor``.
        score: ``gradient``: ``|w dL/dw|``. ``magnitude``: ``|w|``. ``attribution``: ``|(w - w_reset) dz_y/dw|``,
            aligned to this reset: the first-order change of the target's logit (or of ``observe(score=...)``) if w
            became what the reset writes. Where that is drawn, it is the root mean square over the draws: to judge by
            the draw itself would prefer draws that change nothing. It takes ``observe``, and one more backward pass on
            the steps that redraw, whose gradient is that of the mean over the batch: opposite effects on two examples
            cancel, and the weights of a class without an example in the batch look free to lose. Small batches of many
            classes need ``attribution_sketch``: a random mixture of all logits of all examples, without a target.
        redraw: ``resample``; ``mean``: the mean of the distribution, so 0.
        memories: of the optimizer, of these weights: ``keep``, as in the authors' code, or ``reset``.
        exclude: names of parameters or modules that are left out, with wildcards; ``"head"`` is the last layer.
    """
    kind, output = SCORES[arguments.choice("score", score, SCORES)]
    made = kind(every, factor, selection, redraw, memories, exclude)
    made.output_gradient = output
    return made

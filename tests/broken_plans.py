"""Plans with a mistake in them, as a tracer with a bug would make them."""

from collections.abc import Iterator
from dataclasses import replace

import gxd


def broken(plan: gxd.UnitPlan, name: str) -> Iterator[tuple[str, gxd.UnitPlan]]:
    """Plans of one group, each with one mistake in it."""
    group = plan[name]
    first, *views = group.views

    def of(**changes: object) -> gxd.UnitPlan:
        return replace(plan, groups=(replace(group, **changes),))

    yield "the columns of other units", of(views=(replace(first, columns=first.columns.roll(1, 0)), *views))
    if views:
        yield "a view is missing", of(views=tuple(views))
    elif len(first.consumers) > 1:
        yield "a consumer is missing", of(views=(replace(first, consumers=first.consumers[1:]),))
    producer, *others = group.producers
    rows = {"rows": producer.rows.roll(1), "bias_rows": producer.bias_rows.roll(1)}
    yield "the rows of other units", of(producers=(replace(producer, **rows), *others))
    for number, norm in enumerate(group.norms):
        if norm.entries.numel():
            rolled = replace(norm, entries=norm.entries.roll(1, 0))
            norms = (*group.norms[:number], rolled, *group.norms[number + 1 :])
            yield f"the entries of other units in {norm.module}", of(norms=norms)

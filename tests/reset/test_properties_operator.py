"""Properties of scores and resets that must hold for any network and any optimizer, on random ones."""

import math
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, note, reject
from hypothesis import strategies as st
from torch import Tensor, nn

import gxd
from gxd.observe.clamp import clamped
from tests.random_networks import (
    EXAMPLES,
    LAYERS,
    Program,
    RandomNet,
    nets,
    networks,
    plan_of,
    quick,
    residuals,
    row_of,
)

# ---------------------------------------------------------------- the scores


@nets
@given(networks(), residuals, st.sampled_from(["gxd", "gxi", "activation", "contribution"]))
def test_the_scores_and_references_are_those_of_a_plain_loop(program: Program, residual: str, utility: str):
    net, plain = program.build(), program.build()
    plan = plan_of(net, residual)
    note(str(plan))
    assume(plan.groups)
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.0)
    seen: dict[str, Tensor] = {}
    for name, module in plain.named_modules():
        if isinstance(module, LAYERS):
            module.register_forward_pre_hook(lambda m, args, name=name: _keep(seen, name, args[0]))
    torch.manual_seed(0)
    score = _as_one(plain(plain.inputs()))
    try:
        score.sum().backward()
    except RuntimeError:  # an op has changed in place what another one needs for its gradient
        reject()
    with gxd.ContinualBackprop(net, optimizer, plan=plan, utility=utility, replacement_rate=0.0) as cbp:
        torch.manual_seed(0)
        score = _as_one(net(net.inputs()))
        cbp.observe(score=score)
        optimizer.step()
        found, references = cbp.utilities(), cbp.references()
    parameters = {name: p.detach() for name, p in plain.named_parameters(remove_duplicate=False)}
    for group in plan.groups:
        for unit in range(group.size):
            effect, local = torch.zeros(EXAMPLES, dtype=torch.float64), 0.0
            for number, view in enumerate(group.views):
                columns = view.columns[unit]
                h, r, size = None, 0.0, 0.0
                for consumer in view.consumers:
                    tensor = seen[consumer.module]
                    h = tensor.detach().movedim(view.axis, -1)[..., columns].flatten(1)
                    r = float(h.mean()) if utility == "gxd" else 0.0
                    if tensor.grad is not None:
                        effect += ((h - r) * tensor.grad.movedim(view.axis, -1)[..., columns].flatten(1)).sum(1)
                    weights = (_column(plain, parameters, consumer, int(column))[0] for column in columns)
                    size += sum(float(weight.abs().sum()) for weight in weights)
                reference = references[group.name].view(len(group.views), -1)[number, unit]
                assert float(reference) == pytest.approx(float(h.mean()), rel=1e-9, abs=1e-12)
                local += float(h.abs().mean()) * (size if utility == "contribution" else 1.0)
            expected = float(effect.abs().mean()) if utility.startswith("gx") else local
            assert float(found[group.name][unit]) == pytest.approx(expected, rel=1e-7, abs=1e-10), (group.name, unit)


def _keep(seen: dict[str, Tensor], name: str, source: Tensor) -> tuple[Tensor]:
    """Let a layer read a copy of its input, whose gradient is the one through this layer alone."""
    seen[name] = source.clone() if source.requires_grad else source.clone().requires_grad_()
    seen[name].retain_grad()
    return (seen[name],)


def _as_one(output: Any) -> Tensor:
    outputs = output if isinstance(output, tuple) else (output,)
    return torch.cat([o.flatten(1) if o.dim() > 1 else o.unsqueeze(1) for o in outputs], 1)


# ---------------------------------------------------------------- the reset operator


@st.composite
def selections(draw: st.DrawFn, plan: gxd.UnitPlan, exact: bool = False) -> dict[str, list[int]]:
    """Random units of random groups; neighbours are often reset together."""
    chosen = {}
    for group in plan.groups:
        if not (exact and group.approximate) and draw(st.booleans()):
            units = st.integers(0, group.size - 1)
            chosen[group.name] = sorted(draw(st.sets(units, min_size=1, max_size=group.size)))
    return chosen


def random_references(plan: gxd.UnitPlan, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {g.name: torch.randn(len(g.views), g.size, dtype=torch.float64, generator=generator) for g in plan.groups}


@nets
@given(st.data(), networks(), residuals)
def test_a_reset_writes_the_slices_of_its_units_and_not_one_element_more(data: Any, program: Program, residual: str):
    net = program.build()
    plan = plan_of(net, residual)
    note(str(plan))
    units = data.draw(selections(plan))
    before = {name: t.detach().clone() for name, t in net.state_dict().items()}
    gxd.reset_units(net, plan, units, references=random_references(plan, program.shuffle))
    after = net.state_dict()
    written = {name: torch.zeros_like(t, dtype=torch.bool) for name, t in before.items()}
    exactly = {name: torch.full_like(t, math.nan, dtype=torch.float64) for name, t in before.items()}
    for name, index in units.items():
        for producer in plan[name].producers:
            for row in producer.rows[index].tolist():
                row_of(net, written, producer, row).fill_(True)
            if producer.bias is not None:
                written[producer.bias][producer.bias_rows[index]] = True
                exactly[producer.bias][producer.bias_rows[index]] = 0.0
    for name, index in units.items():
        for norm in plan[name].norms:
            for tensor, value in ((norm.weight, 1), (norm.bias, 0), (norm.running_mean, 0), (norm.running_var, 1)):
                if tensor is not None:
                    entries = norm.entries[index].flatten()
                    written[tensor].view(-1)[entries] = True
                    exactly[tensor].view(-1)[entries] = value
    for name, index in units.items():
        for view in plan[name].views:
            for consumer in view.consumers:
                for column in view.columns[index].flatten().tolist():
                    _column(net, written, consumer, column)[0].fill_(True)
                    block, outputs = _column(net, exactly, consumer, column)
                    block.fill_(0.0)
                    for target in filter(None, (consumer.bias or consumer.running_mean,)):
                        written[target][outputs] = True
    for name, old in before.items():
        new = after[name]
        assert torch.equal(old[~written[name]], new[~written[name]]), f"{name} changed where it is no reset unit's"
        known = ~exactly[name].isnan()
        assert torch.equal(new[known].double(), exactly[name][known]), f"{name} is not what a reset makes it"
    for name, index in units.items():
        for producer in plan[name].producers:
            for row in producer.rows[index].tolist():
                drawn = row_of(net, exactly, producer, row).isnan()
                new, old = row_of(net, after, producer, row), row_of(net, before, producer, row)
                assert (new != old)[drawn].all(), f"{producer.module}: row {row} was not drawn again"


def _column(net: RandomNet, tensors: dict[str, Tensor], consumer: Any, column: int) -> tuple[Tensor, slice]:
    """The slice of a weight that reads a column, and the outputs that it feeds."""
    weight, module = tensors[consumer.weight], net.get_submodule(consumer.module)
    if isinstance(module, nn.Linear):
        return weight[:, column], slice(None)
    size, rows = module.in_channels // module.groups, module.out_channels // module.groups
    outputs = slice(column // size * rows, (column // size + 1) * rows)
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return weight[column], outputs
    return weight[outputs, column % size], outputs


def assert_same_outputs(left: Any, right: Any) -> None:
    for a, b in zip(*(o if isinstance(o, tuple) else (o,) for o in (left, right))):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9 * max(1.0, float(a.abs().max())))


@nets
@given(st.data(), networks(), residuals)
def test_after_a_reset_the_net_computes_what_it_computes_with_the_units_held_at_their_references(
    data: Any, program: Program, residual: str
):
    net = program.build().eval()
    plan = plan_of(net, residual)
    note(str(plan))
    units = data.draw(selections(plan, exact=True))
    references = random_references(plan, program.shuffle)
    with ExitStack() as stack, torch.no_grad():
        for name, index in units.items():
            stack.enter_context(clamped(net, plan[name], torch.tensor(index), references[name]))
        held = net(net.inputs())
    gxd.reset_units(net, plan, units, references=references)
    with torch.no_grad():
        reset = net(net.inputs())
    assert_same_outputs(held, reset)


@nets
@given(st.data(), networks(), residuals)
def test_without_coupling_norms_a_unit_held_at_zero_is_a_unit_reset_without_compensation(
    data: Any, program: Program, residual: str
):
    """Padding, transposed kernels and missing biases make a compensation inexact; without one nothing is inexact."""
    net = program.build().eval()
    plan = plan_of(net, residual)
    note(str(plan))
    loose = [g for g in plan.groups if any(n.couples for n in g.norms)]
    units = data.draw(selections(replace(plan, groups=tuple(g for g in plan.groups if g not in loose))))
    with ExitStack() as stack, torch.no_grad():
        for name, index in units.items():
            stack.enter_context(clamped(net, plan[name], torch.tensor(index), 0.0))
        held = net(net.inputs())
    gxd.reset_units(net, plan, units, compensate=False)
    with torch.no_grad():
        reset = net(net.inputs())
    assert_same_outputs(held, reset)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 0.1),
}


@nets
@given(st.data(), networks(), residuals, st.sampled_from(list(OPTIMIZERS)), st.sampled_from(["keep", "reset"]))
def test_the_optimizer_forgets_the_slices_of_reset_units_and_nothing_else(
    data: Any, program: Program, residual: str, optimizer_name: str, policy: str
):
    net = program.build()
    plan = plan_of(net, residual)
    note(str(plan))
    units = data.draw(selections(plan))
    optimizer = OPTIMIZERS[optimizer_name]([p for p in net.parameters() if p.requires_grad])
    generator = torch.Generator().manual_seed(program.shuffle)
    for _ in range(2):
        for parameter in net.parameters():
            parameter.grad = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        optimizer.step()
    before = {
        (name, key): value.clone() if isinstance(value, Tensor) else value
        for name, parameter in net.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    gxd.reset_units(net, plan, units, optimizer=optimizer, step_policy=policy)
    forgotten = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in net.named_parameters()}
    for name, index in units.items():
        for producer in plan[name].producers:
            for row in producer.rows[index].tolist():
                row_of(net, forgotten, producer, row).fill_(True)
            if producer.bias is not None:
                forgotten[producer.bias][producer.bias_rows[index]] = True
        for norm in plan[name].norms:
            for tensor in filter(None, (norm.weight, norm.bias)):
                forgotten[tensor].view(-1)[norm.entries[index].flatten()] = True
        for view in plan[name].views:
            for consumer in view.consumers:
                for column in view.columns[index].flatten().tolist():
                    _column(net, forgotten, consumer, column)[0].fill_(True)
    for name, parameter in net.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            old = before[name, key]
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                assert torch.equal(value, old.masked_fill(forgotten[name], 0.0)), f"{name}: {key}"
            elif key == "step" and policy == "reset" and forgotten[name].any():
                assert float(value) == 0
            else:
                assert torch.equal(value, old) if isinstance(value, Tensor) else value == old, f"{name}: {key}"


@quick
@given(st.data())
def test_memories_of_gradients_are_cleared_where_they_have_the_slices_and_refused_if_of_another_shape(
    data: Any,
):
    shape = data.draw(st.lists(st.integers(2, 5), min_size=1, max_size=4))
    parameter = nn.Parameter(torch.randn(shape))
    optimizer = torch.optim.SGD([parameter], 0.1)
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    index = data.draw(st.lists(st.integers(0, shape[dim] - 1), max_size=4))
    policy = data.draw(st.sampled_from(["keep", "reset"]))
    sizes = st.one_of(
        st.just(tuple(shape)),
        st.tuples(*(st.sampled_from([1, n]) for n in shape)),  # a factored moment
        st.just(()),
        st.sampled_from([(7,), (3, 9), (1, 1, 1, 1, 1)]),
    )
    keys = ["exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg"]
    states = data.draw(st.dictionaries(st.sampled_from(keys), sizes))
    optimizer.state[parameter] = {key: torch.randn(size) for key, size in states.items()}
    optimizer.state[parameter] |= {"step": torch.tensor(5.0), "count": 7, "name": "x", "none": None}
    expected = {k: v.clone() if isinstance(v, Tensor) else v for k, v in optimizer.state[parameter].items()}
    fits = lambda size: len(size) == len(shape) and all(a in (1, b) for a, b in zip(size, shape))
    refused = index and any(math.prod(size) > 1 and not fits(size) for size in states.values())
    for value in expected.values() if not refused else ():
        if isinstance(value, Tensor) and fits(value.shape) and value.shape[dim] == shape[dim]:
            for i in index:
                value.select(dim, i).fill_(0.0)
    if policy == "reset" and index and not refused:
        expected["step"] = torch.tensor(0.0)
    with pytest.raises(gxd.PlanError) if refused else nullcontext():
        gxd.reset_optimizer_state(optimizer, parameter, index, dim, step_policy=policy)
    for key, value in optimizer.state[parameter].items():
        other = expected[key]
        assert torch.equal(value, other) if isinstance(value, Tensor) else value == other, key

"""Properties of the plan that must hold for any network, on random ones."""

import random
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor, nn

import gxd
from tests.random_networks import LAYERS, Program, RandomNet, nets, networks, once_wrong, plan_of, residuals

# ---------------------------------------------------------------- the plan


@nets
@given(networks(), residuals)
@once_wrong()
def test_the_check_finds_nothing_wrong_and_passes_every_group_that_is_not_called_approximate(
    program: Program, residual: str
):
    net = program.build()
    report = gxd.verify_plan(net, net.inputs(), plan=plan_of(net, residual))
    note(f"{report.plan}\n{report}")
    for group in report.groups:
        assert group.status != "wrong", group
        if not report.plan[group.name].approximate:  # inconclusive: what comes after the units is silent
            assert group.status in ("passed", "inconclusive"), group


def _claimed(group: gxd.Group, unit: int) -> set[tuple[str, int]]:
    return {(c.module, column) for v in group.views for c in v.consumers for column in v.columns[unit].tolist()}


@nets
@given(networks(), residuals)
def test_in_single_precision_the_check_finds_nothing_wrong_either(program: Program, residual: str):
    net = program.build().float()
    x = net.inputs().float()
    report = gxd.verify_plan(net, x, plan=gxd.find_units(net, x, residual=residual))
    note(f"{report.plan}\n{report}")
    assert report.ok


@nets
@given(networks(), residuals, st.integers(0, 99))
@once_wrong(0)
def test_the_columns_of_a_unit_are_those_that_answer_when_it_is_disturbed(program: Program, residual: str, seed: int):
    """Once its outgoing weights are 0, what a unit does shows in its own columns, in all of them, and nowhere else."""
    net = program.build().eval()
    plan = plan_of(net, residual)
    note(str(plan))
    rng = random.Random(seed)
    for group in plan.groups:
        unit = rng.randrange(group.size)
        cut = program.build().eval()
        gxd.reset_units(cut, plan, {group.name: [unit]}, compensate=False)
        answers = _columns_that_answer(cut, group, unit)
        claimed = _claimed(group, unit)
        if any(norm.couples for norm in group.norms):
            assert claimed <= answers
        else:
            assert claimed == answers


@nets
@given(networks(), residuals, st.integers(0, 99))
@once_wrong(0)
def test_the_norm_entries_of_a_unit_move_its_own_columns_and_nothing_else(program: Program, residual: str, seed: int):
    plan = plan_of(program.build(), residual)
    note(str(plan))
    rng = random.Random(seed)
    for group in plan.groups:
        unit = rng.randrange(group.size)
        net = program.build().eval()
        if _norm_calls(net, group) > 1 and any(norm.couples for norm in group.norms):
            continue  # what one norm does to the unit, the next one does to others
        gxd.reset_units(net, plan, {group.name: [unit]}, compensate=False)
        before = _layer_inputs(net)
        with torch.no_grad():
            for norm in group.norms:
                for name in filter(None, (norm.weight, norm.bias, norm.running_mean, norm.running_var)):
                    net.state_dict()[name].view(-1)[norm.entries[unit]] += rng.random() + 0.5
        moved = {
            (name, int(column))
            for name, value in _layer_inputs(net).items()
            for column in ((value - before[name]).abs() > 1e-9).any(0).nonzero().flatten()
        }
        assert moved <= _claimed(group, unit)


def _norm_calls(net: RandomNet, group: gxd.Group) -> int:
    """How often the norms of a group are called, on its units or on something else."""
    calls: list[int] = []
    handles = [net.get_submodule(n.module).register_forward_hook(lambda *a: calls.append(1)) for n in group.norms]
    net(net.inputs())
    for handle in handles:
        handle.remove()
    return len(calls)


def _columns_that_answer(net: RandomNet, group: gxd.Group, unit: int) -> set[tuple[str, int]]:
    """(layer, column) of every layer input that changes when the unit does, and the outputs that change."""
    found = set()
    before = _layer_inputs(net)
    for scale in (4.0, -4.0, 40.0, -40.0):  # up and down by the same noise, so that no rectifier hides it
        handles = []
        generator = torch.Generator().manual_seed(unit + int(abs(scale)))
        for producer in group.producers:

            def disturb(module: nn.Module, args: tuple, output: Tensor, row: int = int(producer.rows[unit])) -> Tensor:
                part = output.select(-1 if isinstance(module, nn.Linear) else 1, row)
                noise = torch.randn(part.shape, dtype=part.dtype, generator=generator)  # noqa: B023
                output = output.clone()
                output.select(-1 if isinstance(module, nn.Linear) else 1, row).add_(scale * noise)  # noqa: B023
                return output

            handles.append(net.get_submodule(producer.module).register_forward_hook(disturb))
        after = _layer_inputs(net)
        for handle in handles:
            handle.remove()
        for name, value in before.items():
            changed = (value - after[name]).abs() > 1e-9 * value.abs().clamp(min=1)
            found |= {(name, int(column)) for column in changed.any(0).nonzero().flatten()}
    return found


def _layer_inputs(net: RandomNet) -> dict[str, Tensor]:
    """The input of every layer, (rows, columns), and the outputs of the net."""
    seen: dict[str, Tensor] = {}
    handles = []
    for name, module in net.named_modules():
        if isinstance(module, LAYERS):
            axis = -1 if isinstance(module, nn.Linear) else 1

            def hook(module: nn.Module, args: tuple, name: str = name, axis: int = axis) -> None:
                value = args[0].detach().movedim(axis, -1).flatten(0, -2).clone()
                seen[name] = torch.cat([seen[name], value]) if name in seen else value

            handles.append(module.register_forward_pre_hook(hook))
    with torch.no_grad():
        output = net(net.inputs())
    for handle in handles:
        handle.remove()
    outputs = output if isinstance(output, tuple) else (output,)
    return {
        **seen,
        **{
            f"output {i}": o.detach().flatten(1) if o.dim() > 1 else o.detach().unsqueeze(1)
            for i, o in enumerate(outputs)
        },
    }


@nets
@given(networks(), residuals, st.booleans())
def test_finding_units_leaves_the_model_and_the_random_state_as_they_were(
    program: Program, residual: str, training: bool
):
    net = program.build()
    rng = random.Random(program.shuffle)
    net.train(training)
    for module in net.modules():
        module.training = rng.random() < 0.5
    for parameter in net.parameters():
        if rng.random() < 0.5:
            parameter.grad = torch.ones_like(parameter)
    before = _everything(net)
    gxd.find_units(net, net.inputs(), residual=residual)
    after = _everything(net)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name], name


def _everything(net: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "grad": torch.is_grad_enabled(),
    }
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        state[name] = tensor.detach().clone()
        state[name + " id"] = (id(tensor), tensor.data_ptr(), tensor._version, tensor.requires_grad)
        state[name + " grad"] = None if tensor.grad is None else tensor.grad.clone()
    for name, module in net.named_modules():
        state[name + " mode"] = module.training
        state[name + " hooks"] = (
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            len(module._backward_hooks),
        )
        state[name + " attributes"] = sorted(vars(module))
    return state


@nets
@given(networks(), residuals)
@once_wrong()
def test_every_layer_is_reset_or_named_with_a_reason_and_no_row_is_lost(program: Program, residual: str):
    net = program.build()
    plan = plan_of(net, residual)
    note(str(plan))
    rows: dict[str, list[int]] = {}
    for group in plan.groups:
        for producer in group.producers:
            rows.setdefault(producer.module, []).extend(producer.rows.tolist())
    reasons = {entry.name: entry.reason for entry in plan.skipped}
    assert all(reasons.values())
    for name, module in net.named_modules():
        if isinstance(module, LAYERS):
            out = module.out_features if isinstance(module, nn.Linear) else module.out_channels
            own = rows.get(name, [])
            assert len(own) == len(set(own)), f"a row of {name} is in two groups"
            partly = [entry for entry in reasons if entry.partition("[")[0] == name]
            assert len(own) == out if not partly else len(own) < out, f"{name}: {len(own)} of {out} rows, {partly}"
    for head in net.heads:
        assert head not in rows, "a layer that makes the output was taken for hidden"


@nets
@given(networks(), residuals)
@once_wrong()
def test_a_group_is_called_approximate_only_for_a_reason_that_is_there(program: Program, residual: str):
    net = program.build()
    plan = plan_of(net, residual)
    note(str(plan))
    for group in plan.groups:
        for consumer in group.consumers:
            module = net.get_submodule(consumer.module)
            zeros = getattr(module, "padding_mode", "") == "zeros" and any(module.padding)
            shared = module.bias is not None and sum(p is module.bias for p in _registered(net)) > 1
            if consumer.approximate is None:
                assert module.bias is not None or consumer.running_mean is not None
                assert not zeros and not isinstance(module, nn.modules.conv._ConvTransposeNd)
            elif consumer.approximate == "no bias to take the mean":
                assert module.bias is None
            elif consumer.approximate == "its bias is frozen":
                assert not module.bias.requires_grad
            elif "bias is also read" in consumer.approximate:
                assert shared or any(step[0] == "borrow" for step in program.steps)
            elif consumer.approximate == "padding":
                assert zeros
            else:
                assert "transposed" in consumer.approximate
                assert isinstance(module, nn.modules.conv._ConvTransposeNd)


def _registered(net: nn.Module) -> list[nn.Parameter]:
    return [parameter for module in net.modules() for parameter in module._parameters.values() if parameter is not None]


@nets
@given(networks(), residuals)
def test_the_order_of_registration_does_not_change_the_plan(program: Program, residual: str):
    net, other = program.build(), replace(program, shuffle=program.shuffle + 2).build()
    assert plan_of(net, residual).fingerprint() == plan_of(other, residual).fingerprint()


def test_memory_that_is_read_by_other_strides_is_not_mistaken_for_the_same_units():
    """The labels of a tensor do not lie in memory as the tensor does: here every column mixes units and examples."""

    class Restrided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).t().contiguous().as_strided((2, 4), (4, 1)))

    torch.manual_seed(0)
    assert gxd.verify_plan(Restrided(), torch.randn(2, 5)).ok

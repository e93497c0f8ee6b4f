"""What must hold for every model, optimizer and utility: one table, and for each invariant a bug seen in the wild."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gxd
from gxd.observe.clamp import clamped
from tests.models import MODELS, make

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
}
UTILITIES = ["contribution", "loss_gradient", "gxd", "gxd_sketch"]
CASES = [(m, o, u) for m in MODELS for o in OPTIMIZERS for u in UTILITIES]
CASES = [case for i, case in enumerate(CASES) if i % 3 == 0 or case[0] in ("mlp", "resnet_coordinates")]
EVERYWHERE = pytest.mark.parametrize(("name", "optimizer", "utility"), CASES, ids="-".join)


def attach(name, optimizer="sgd", utility="gxd", seed=0, **options):
    model, batch, plan_options = make(name, seed)
    opt = OPTIMIZERS[optimizer](model.parameters())
    plan = gxd.find_units(model, batch(2)[0], **plan_options)
    settings = {"replacement_rate": 0.05, "maturity": 3, **options}
    return model, opt, gxd.ContinualBackprop(model, opt, plan=plan, utility=utility, **settings), batch


def train(model, opt, cbp, batch, steps, size=8):
    for _ in range(steps):
        x, y = batch(size)
        logits = model(x)
        cbp.observe(logits, y)
        F.cross_entropy(logits, y).backward()
        opt.step()
        opt.zero_grad()


def reset_masks(model, selection):
    """For every tensor, the elements a reset may write: by brute force, not by the plan's layouts."""
    masks = {
        name: torch.zeros_like(t, dtype=torch.bool) for name, t in (*model.named_parameters(), *model.named_buffers())
    }
    outgoing = {name: mask.clone() for name, mask in masks.items()}
    compensated = set()
    modules = dict(model.named_modules())
    for group, index in selection:
        for producer in group.producers:
            for row in producer.rows[index].tolist():
                masks[producer.weight][row] = True
            if producer.bias:
                masks[producer.bias][producer.bias_rows[index]] = True
        for view in group.views:
            for consumer in view.consumers:
                blocks = getattr(modules[consumer.module], "groups", 1)
                weight = masks[consumer.weight]
                per_block_in, per_block_out = weight.shape[1], weight.shape[0] // blocks
                for column in view.columns[index].flatten().tolist():
                    block = column // per_block_in
                    rows = slice(block * per_block_out, (block + 1) * per_block_out)
                    weight[rows, column % per_block_in] = True
                    outgoing[consumer.weight][rows, column % per_block_in] = True
                compensated |= {consumer.bias, consumer.running_mean} - {None}
        for norm in group.norms:
            for name in {norm.weight, norm.bias, norm.running_mean, norm.running_var} - {None}:
                masks[name].view(-1)[norm.entries[index].flatten()] = True
    return masks, outgoing, compensated


@EVERYWHERE
def test_live_units_are_left_exactly_as_they_were(name, optimizer, utility):
    model, opt, cbp, batch = attach(name, optimizer, utility)
    before = {}
    # A hook that runs before the resets sees the parameters as the optimizer left them.
    handle = opt.register_step_post_hook(lambda *_: before.update(copy.deepcopy(model.state_dict())))
    opt._optimizer_step_post_hooks.move_to_end(handle.id, last=False)
    resets = 0
    for _ in range(25):
        train(model, opt, cbp, batch, 1)
        selection = [(cbp.plan[group], index) for group, index in cbp.last_resets.items()]
        masks, outgoing, compensated = reset_masks(model, selection)
        for key, after in model.state_dict().items():
            if key not in compensated:
                assert torch.equal(before[key][~masks[key]], after[~masks[key]]), key
            assert torch.all(after[outgoing[key]] == 0), f"{key}: an outgoing weight of a fresh unit is not zero"
        resets += len(selection)
    assert resets > 0


@EVERYWHERE
def test_optimizer_state_is_cleared_for_the_reset_slices_and_only_for_them(name, optimizer, utility):
    model, opt, cbp, batch = attach(name, optimizer, utility)
    train(model, opt, cbp, batch, 3)
    before = {}

    def snapshot(*_):
        before.clear()
        before.update(
            {p: {k: v.clone() for k, v in s.items() if isinstance(v, torch.Tensor)} for p, s in opt.state.items()}
        )

    handle = opt.register_step_post_hook(snapshot)
    opt._optimizer_step_post_hooks.move_to_end(handle.id, last=False)
    for _ in range(20):
        train(model, opt, cbp, batch, 1)
        masks, *_ = reset_masks(model, [(cbp.plan[group], index) for group, index in cbp.last_resets.items()])
        for key, parameter in model.named_parameters():
            for entry, value in before.get(parameter, {}).items():
                now = opt.state[parameter][entry]
                if value.shape == parameter.shape:
                    assert torch.all(now[masks[key]] == 0), f"{key}.{entry}"
                    assert torch.equal(now[~masks[key]], value[~masks[key]]), f"{key}.{entry}"
                else:
                    assert torch.equal(now, value), f"{key}.{entry} is shared by all slices"


@pytest.mark.parametrize("name", MODELS)
def test_a_compensated_reset_equals_the_clamp_to_the_reference(name):
    model, _, cbp, batch = attach(name, replacement_rate=0.0)
    train(model, cbp.optimizer, cbp, batch, 15)
    cbp.close()
    model.eval()
    x = batch(16)[0]
    for group in cbp.plan.groups:
        if group.approximate:
            continue
        index = torch.tensor([0, group.size // 2, group.size - 1])
        reference = cbp.references()[group.name].expand(len(group.views), -1)
        with clamped(model, group, index, reference.double()):
            expected = model(x).detach()
        fresh = copy.deepcopy(model)
        gxd.reset_units(fresh, cbp.plan, {group.name: index}, references=cbp.references())
        torch.testing.assert_close(
            fresh(x).detach(), expected, msg=lambda m, g=group: f"{g.name}: {m}", rtol=1e-4, atol=1e-5
        )
        bare = copy.deepcopy(model)
        gxd.reset_units(bare, cbp.plan, {group.name: index}, references=cbp.references(), compensate=False)
        if not torch.allclose(reference[:, index], torch.zeros(())):
            assert not torch.allclose(bare(x).detach(), expected, rtol=1e-4, atol=1e-5), "compensation changes nothing"


def test_compensation_is_not_a_no_op_on_every_model_in_the_table():
    exact = [name for name in MODELS if any(not g.approximate for g in attach(name)[2].plan.groups)]
    assert {"mlp", "conv", "transformer", "branches", "resnet_coordinates"} <= set(exact)


@EVERYWHERE
def test_the_output_layer_is_never_reset(name, optimizer, utility):
    _, _, cbp, _ = attach(name, optimizer, utility)
    assert "head" in {entry.name for entry in cbp.plan.skipped}
    assert "head" not in {p.module for g in cbp.plan.groups for p in g.producers}


@pytest.mark.parametrize("name", MODELS)
def test_the_number_of_resets_is_rate_times_eligible_units_times_steps(name):
    model, opt, cbp, batch = attach(name, replacement_rate=0.01, maturity=4)
    steps = 60
    train(model, opt, cbp, batch, steps)
    for group in cbp.plan.groups:
        young = sum(age <= 4 for age in cbp.ages()[group.name].tolist())
        assert 0 <= young <= group.size
    most = sum(0.01 * g.size * (steps - 4) for g in cbp.plan.groups)
    least = sum(0.01 * g.size * (steps - 4) * 0.9 - 1 for g in cbp.plan.groups)
    assert least - 1 <= cbp.total_resets <= most


@pytest.mark.parametrize("utility", ["contribution", "mc_adaptable_contribution", "loss_gradient", "gxi", "gxd"])
def test_a_ragged_last_batch_and_a_batch_of_one_are_scored_like_any_other(utility):
    model, opt, cbp, batch = attach("mlp", utility=utility, replacement_rate=0.0)
    for size in (8, 8, 3, 1, 8):
        train(model, opt, cbp, batch, 1, size)
    for value in (*cbp.utilities().values(), *cbp.references().values()):
        assert torch.isfinite(value).all()
    assert cbp.nonfinite_observations == 0


def test_the_bias_corrected_utility_of_a_constant_score_is_the_constant_at_every_age():
    @gxd.register_utility("constant_for_test")
    def constant(o):
        return torch.full((o.views[0].h.shape[-1],), 7.0)

    model, opt, cbp, batch = attach("mlp", utility="constant_for_test", replacement_rate=0.02)
    for _ in range(40):
        train(model, opt, cbp, batch, 1)
        for name, value in cbp.utilities().items():
            grown = cbp.ages()[name] > 0
            torch.testing.assert_close(value[grown], torch.full_like(value[grown], 7.0))


def test_units_are_reset_in_the_order_of_their_utility():
    model, opt, cbp, batch = attach("mlp", replacement_rate=0.0, maturity=0)
    train(model, opt, cbp, batch, 10)
    saved = cbp.state_dict()
    cbp.close()
    eager = gxd.ContinualBackprop(model, opt, plan=cbp.plan, replacement_rate=0.25, maturity=0)
    eager.load_state_dict(saved)
    train(model, opt, eager, batch, 1)
    utilities = cbp.utilities()
    for name, index in eager.last_resets.items():
        kept = torch.ones(len(utilities[name]), dtype=torch.bool)
        kept[index] = False
        assert len(index) == len(kept) // 4
        # one more step moved the averages by at most a few percent
        assert utilities[name][index].max() <= utilities[name][kept].min() * 1.5 + 1e-6


def test_positions_are_summed_with_their_sign_before_the_absolute_value():
    """The signed sum is the effect of clamping the whole channel, and at most the sum of the absolute values."""
    results = {}
    for positions in ("signed", "abs"):
        model, opt, cbp, batch = attach("conv", utility="gxd", positions=positions, replacement_rate=0.0, decay=0.0)
        train(model, opt, cbp, batch, 1)
        results[positions] = cbp.utilities()["conv1"]
    places = 36  # conv1's units are seen by conv2 at 6 x 6 positions; "abs" takes the mean over them
    assert torch.all(results["signed"] <= results["abs"] * places * (1 + 1e-5))
    assert not torch.allclose(results["signed"], results["abs"] * places, rtol=0.1)


def test_a_unit_with_infinite_utility_is_still_eligible_before_one_that_is_too_young():
    utility = torch.tensor([math.inf, 0.0, math.inf])
    eligible = torch.tensor([True, False, True])
    assert gxd.select.lowest.lowest(utility, eligible, 2).tolist() == [0, 2]


def test_adjacent_layers_reset_in_one_step_keep_the_zeroed_columns_zero():
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    plan = gxd.find_units(model, torch.randn(2, 5))
    reference = {"0": torch.randn(6), "2": torch.randn(7)}
    old = copy.deepcopy(model)
    gxd.reset_units(model, plan, {"0": [1, 4], "2": [0, 3]}, references=reference)
    assert torch.all(model[2].weight[:, [1, 4]] == 0)
    assert torch.all(model[4].weight[:, [0, 3]] == 0)
    assert torch.all(model[2].bias[[0, 3]] == 0)
    live = [1, 2, 4, 5, 6]
    expected = old[2].bias[live] + old[2].weight[live][:, [1, 4]] @ reference["0"][[1, 4]]
    torch.testing.assert_close(model[2].bias[live], expected)
    torch.testing.assert_close(model[4].bias, old[4].bias + old[4].weight[:, [0, 3]] @ reference["2"][[0, 3]])

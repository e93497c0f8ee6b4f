"""The reset-cost assay against loops written out by hand, scipy and captum."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from captum.attr import LayerFeatureAblation, LayerGradientXActivation
from scipy.stats import rankdata, spearmanr
from torch import nn
from torch.nn import functional as F

import gxd
from gxd.cost import lesion
from gxd.cost.ranks import mean_of_lowest, ranks, spearman
from gxd.observe.clamp import clamped
from tests.models import MODELS, make

CALIBRATION, PROBE = 24, 20
ONE_BY_ONE = "clamped one by one"


@pytest.fixture(scope="module", params=list(MODELS))
def case(request):
    """A model away from its initial norms, data, its plan and its reset cost, all in float64."""
    model, batch, options = make(request.param)
    model = model.double()
    generator = torch.Generator().manual_seed(5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.copy_(0.3 * torch.randn(module.running_mean.shape, generator=generator))
            module.running_var.uniform_(0.5, 2.0, generator=generator)
    x, y = batch(CALIBRATION + PROBE)
    x = x.double()
    plan = gxd.find_units(model, x[:2], **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{ONE_BY_ONE}")
        calibration = (x[:CALIBRATION], y[:CALIBRATION])
        cost = gxd.reset_cost(model, calibration, x[CALIBRATION:], plan=plan, chunk=7)
    return model.eval(), plan, x, y, cost


def inputs_of(model, plan, x):
    """What the consumers of every view read, by group and view, written down by plain hooks; and the logits."""
    found, handles = {}, []
    for group in plain_groups(plan):
        for number, view in enumerate(group.views):
            consumer = view.consumers[0]

            def keep(module, args, key=(group.name, number), port=consumer.ports[0]):
                found[key] = args[{"key": 1, "value": 2}.get(port, 0)]

            handles.append(model.get_submodule(consumer.site).register_forward_pre_hook(keep))
    logits = model(x)
    for handle in handles:
        handle.remove()
    return logits, found


def per_example(view, tensor):
    """(examples, positions, units): the columns of a unit count as positions."""
    columns = tensor.movedim(view.axis, -1)[..., view.columns]  # (..., units, k)
    batch_first = columns.movedim(view.batch_axis, 0)
    return batch_first.movedim(-2, -1).flatten(1, -2)


def plain_groups(plan):
    """Without the heads of nn.MultiheadAttention, whose output projection is not called."""
    return [g for g in plan.groups if not any("heads" in c.ports for c in g.consumers)]


def test_the_reference_is_the_exact_mean_over_the_calibration_set(case):
    model, plan, x, _, cost = case
    _, found = inputs_of(model, plan, x[:CALIBRATION])
    for group in plain_groups(plan):
        for number, view in enumerate(group.views):
            expected = per_example(view, found[group.name, number]).mean((0, 1))
            torch.testing.assert_close(cost.references[group.name][number], expected.detach())


def test_shocks_are_those_of_clamping_one_unit_after_the_other(case):
    model, plan, x, _, cost = case
    probe = x[CALIBRATION:]
    before = model(probe).detach()
    for group in plan.groups:
        for unit in range(group.size):
            with clamped(model, group, torch.tensor([unit]), cost.references[group.name]):
                after = model(probe).detach()
            l1 = sum(float((a - b).abs().sum()) for a, b in zip(before, after)) / PROBE
            p, q = before.softmax(1), after.softmax(1)
            kl = sum(float((a * (a / b).log()).sum()) for a, b in zip(p, q)) / PROBE
            assert float(cost.shocks["l1"][group.name][unit]) == pytest.approx(l1, rel=1e-6, abs=1e-12)
            assert float(cost.shocks["kl"][group.name][unit]) == pytest.approx(kl, rel=1e-5, abs=1e-13)


def test_scores_are_the_formulas_of_the_paper(case):
    model, plan, x, y, cost = case
    y = y[:CALIBRATION]
    logits, found = inputs_of(model, plan, x[:CALIBRATION])
    names = dict(model.named_parameters())
    loss = F.cross_entropy(logits, y)
    target = logits.gather(1, y[:, None]).sum()
    tensors = list(found.values())

    def pull(output):
        gradients = torch.autograd.grad(output, tensors, retain_graph=True, allow_unused=True)
        return dict(zip(found, gradients))

    by_loss, by_target = pull(loss), pull(target)
    by_class = [pull(logits[:, c].sum()) for c in range(logits.shape[1])]
    for group in plain_groups(plan):
        if len(group.views) > 1:  # a tensor further down depends on one further up: the gradients here would mix
            continue
        view = group.views[0]
        key = (group.name, 0)
        h, r = per_example(view, found[key]), cost.references[group.name][0]

        def g(gradients, view=view, key=key):
            return per_example(view, gradients[key])

        w_out = 0
        for consumer in view.consumers:
            weight, index = consumer.layout.column(names[consumer.weight], view.columns.flatten())
            w_out = w_out + weight[index].abs().flatten(1).sum(1).view(view.columns.shape).sum(1)
        w_in = sum(
            p.layout.row(names[p.weight], p.rows)[0].abs().flatten(0, 1).flatten(1).sum(1)[p.rows]
            for p in group.producers
        )
        expected = {
            "activation": h.abs().mean((0, 1)),
            "contribution": h.abs().mean((0, 1)) * w_out,
            "mc_contribution": (h - r).abs().mean((0, 1)) * w_out,
            "mc_adaptable_contribution": (h - r).abs().mean((0, 1)) * w_out / w_in,
            "loss_gradient": g(by_loss).abs().mean((0, 1)),
            "taylor": (h * g(by_loss)).sum(1).abs().mean(0),
            "gxd_loss": ((h - r) * g(by_loss)).sum(1).abs().mean(0),
            "output_gradient": g(by_target).sum(1).abs().mean(0),
            "gxi": (h * g(by_target)).sum(1).abs().mean(0),
            "gxd": ((h - r) * g(by_target)).sum(1).abs().mean(0),
            "gxd_all_logit": sum(((h - r) * g(c)).sum(1).abs().mean(0) for c in by_class) / len(by_class),
        }
        for name, values in expected.items():
            torch.testing.assert_close(cost.scores[name][group.name], values.detach(), rtol=1e-7, atol=1e-12, msg=name)


def moved(model, group, unit, references, step):
    """The logits with every view of a unit moved a step towards its reference."""
    handles = []
    for number, view in enumerate(group.views):
        columns, level = view.columns[unit], references[number, unit]

        def move(module, args, axis=view.axis, columns=columns, level=level):
            h = args[0]
            towards = h.clone().index_fill_(axis, columns, float(level))
            return (h + step * (towards - h), *args[1:])

        for consumer in view.consumers:
            handles.append(model.get_submodule(consumer.site).register_forward_pre_hook(move))
    return handles


def test_gxd_of_a_unit_with_several_views_is_the_slope_of_the_logit_when_all_of_them_move():
    model, batch, options = make("resnet_coordinates")
    model = model.double().eval()
    x, y = batch(10)
    x = x.double()
    plan = gxd.find_units(model, x[:2], **options)
    cost = gxd.reset_cost(model, (x, y), x, plan=plan, utilities="gxd")
    group = next(g for g in plan.groups if len(g.views) > 1)
    for unit in range(group.size):
        ends = []
        for step in (1e-5, -1e-5):
            handles = moved(model, group, unit, cost.references[group.name], step)
            ends.append(model(x).gather(1, y[:, None]).detach())
            for handle in handles:
                handle.remove()
        slope = (ends[0] - ends[1]).abs().mean() / 2e-5
        assert float(cost.scores["gxd"][group.name][unit]) == pytest.approx(float(slope), rel=1e-5, abs=1e-9)


def test_rank_correlations_and_lowest_shocks_are_those_of_scipy_and_of_sorting(case):
    *_, cost = case
    for metric in ("l1", "kl"):
        rho, shock, oracle = (
            cost.spearman_by_group(metric),
            cost.shock_by_group(0.2, metric),
            cost.oracle_by_group(0.2, metric),
        )
        for group, truth in cost.shocks[metric].items():
            k = math.ceil(0.2 * len(truth) - 1e-9)
            assert oracle[group] == pytest.approx(float(truth.sort().values[:k].mean()))
            for name, scores in cost.scores.items():
                s = scores[group]
                assert rho[name][group] == pytest.approx(spearmanr(s, truth).statistic, abs=1e-12, nan_ok=True)
                if len(s.unique()) == len(s):
                    assert shock[name][group] == pytest.approx(float(truth[s.argsort()[:k]].mean()))
        for name, by_group in rho.items():
            known = [value for value in by_group.values() if not math.isnan(value)]  # constant scores have no ranks
            mean = sum(known) / len(known) if known else math.nan
            assert cost.spearman(metric)[name] == pytest.approx(mean, nan_ok=True)
        assert cost.oracle(0.2, metric) == pytest.approx(sum(oracle.values()) / len(oracle))
        assert all(value >= cost.oracle(0.2, metric) - 1e-12 for value in cost.shock(0.2, metric).values())


def test_captum_ablates_and_attributes_the_same():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.SiLU(), nn.Linear(7, 4)).double().eval()
    x, y = torch.randn(30, 5, dtype=torch.float64), torch.randint(0, 4, (30,))
    cost = gxd.reset_cost(model, (x[:18], y[:18]), x[18:], utilities=["gxi", "gxd"])
    reference = cost.references["0"]
    torch.testing.assert_close(reference[0], model[1](model[0](x[:18])).mean(0).detach())
    changes = [
        LayerFeatureAblation(model, model[2]).attribute(x[18:], reference, target=c, attribute_to_layer_input=True)
        for c in range(4)
    ]
    torch.testing.assert_close(cost.shocks["l1"]["0"], torch.stack(changes).abs().sum(0).mean(0))
    product = LayerGradientXActivation(model, model[2]).attribute(x[:18], target=y[:18], attribute_to_layer_input=True)
    torch.testing.assert_close(cost.scores["gxi"]["0"], product.abs().mean(0).detach())


def test_units_in_batches_of_any_size_give_the_same_shocks(monkeypatch):
    model, batch, options = make("resnet_coordinates")
    x, y = batch(12)
    plan = gxd.find_units(model, x[:2], **options)
    whole = gxd.reset_cost(model, (x, y), x, plan=plan, utilities="activation")
    monkeypatch.setattr(lesion, "_MOST_UNITS", 3)
    monkeypatch.setattr(lesion, "_ELEMENTS_CPU", 5000)
    pieces = gxd.reset_cost(model, (x, y), x, plan=plan, utilities="activation", chunk=5)
    for group in whole.units:
        torch.testing.assert_close(pieces.shocks["l1"][group], whole.shocks["l1"][group], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(pieces.references[group], whole.references[group])


def test_many_units_are_clamped_in_one_forward_pass(monkeypatch):
    model, batch, _ = make("mlp")
    x, y = batch(16)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    plan = gxd.find_units(model, x[:2])
    calls.clear()
    gxd.reset_cost(model, (x, y), x, plan=plan, utilities="activation")
    assert plan.size == 28
    assert len(calls) <= 12  # 2 to look, 2 to score, and for each of 2 groups 1 to clamp and 3 to confirm


class InPlace(nn.Module):
    """Adds onto a tensor that does not depend on the clamped units."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down, self.head = nn.Linear(6, 8), nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.embed(x)
        x += self.down(F.relu_(self.up(x)))
        return self.head(x)


class ByValue(InPlace):
    """Its forward pass asks for a value behind the units, which is not possible for many copies at once."""

    def forward(self, x):
        x = super().forward(x)
        return x * 2 if float(x.sum()) > 1e9 else x


class Stray(InPlace):
    """Another model when it runs under vmap."""

    def forward(self, x):
        x = self.embed(x)
        h = F.relu(self.up(x))
        y = self.down(h)
        if torch._C._functorch.maybe_current_level() is not None:
            y = y * 0.5
        return self.head(x + y)


@pytest.mark.parametrize("build", [InPlace, ByValue, Stray])
def test_where_many_at_once_does_not_work_units_are_clamped_one_by_one_with_a_warning(build):
    torch.manual_seed(0)
    model = build()
    x, y = torch.randn(20, 6), torch.randint(0, 3, (20,))
    plan = gxd.find_units(InPlace(), x[:2])
    group = plan["up"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cost = gxd.reset_cost(model, (x, y), x, plan=plan, utilities="gxd")
    assert any(ONE_BY_ONE in str(w.message) for w in caught) == (build is not InPlace)
    before = model(x)
    for unit in range(group.size):
        with clamped(model, group, torch.tensor([unit]), cost.references["up"]):
            after = model(x)
        expected = float((after - before).detach().abs().sum(1).mean())
        assert float(cost.shocks["l1"]["up"][unit]) == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_the_model_is_left_as_it_was_found():
    model, batch, options = make("resnet_coordinates")
    x, y = batch(16)
    plan = gxd.find_units(model, x[:2], **options)
    model.train()
    model.block1.eval()
    model.stem.weight.requires_grad_(False)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    random = torch.random.get_rng_state()
    gxd.reset_cost(model, (x, y), x, plan=plan)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), random)
    assert not model.stem.weight.requires_grad and model.head.weight.requires_grad
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight)) and model.head.bias.grad is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.filterwarnings(f"error:.*{ONE_BY_ONE}")
def test_frozen_parameters_and_fused_attention_hide_nothing():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.3)
    model = nn.Sequential(nn.Linear(5, 8), layer, nn.Flatten(), nn.Linear(24, 3))
    x, y = torch.randn(14, 3, 5), torch.randint(0, 3, (14,))
    plan = gxd.find_units(model, x[:2])
    open_ = gxd.reset_cost(model, (x, y), x, plan=plan, utilities=["gxd", "gxi"])
    frozen = gxd.reset_cost(model.requires_grad_(False), (x, y), x, plan=plan, utilities=["gxd", "gxi"])
    assert "1.linear1" in open_.units
    for group in open_.units:
        assert float(open_.shocks["l1"][group].max()) > 1e-4
        torch.testing.assert_close(frozen.shocks["l1"][group], open_.shocks["l1"][group])
        torch.testing.assert_close(frozen.scores["gxd"][group], open_.scores["gxd"][group])


class Named(nn.Module):
    """Keyword arguments, an output object, and logits for every token."""

    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(6, 9), nn.Linear(9, 4)

    def forward(self, tokens, scale):
        return {"logits": self.head(F.gelu(self.up(tokens))) * scale}


def test_dicts_tuples_and_token_logits_are_one_and_the_same_assay():
    torch.manual_seed(0)
    model = Named().double()
    x, scale = torch.randn(16, 5, 6, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    y = torch.randint(0, 4, (16, 5))
    plan = gxd.find_units(model, (x[:2], scale))
    names = ["gxd", "loss_gradient", "gxd_all_logit", "gxd_sketch"]
    by_name = {"tokens": x[:10], "scale": scale}, {"tokens": x[10:], "scale": scale}
    cost = gxd.reset_cost(model, (by_name[0], y[:10]), by_name[1], plan=plan, utilities=names)
    by_place = (x[:10], scale), (x[10:], scale)
    same = gxd.reset_cost(model, (by_place[0], y[:10]), by_place[1], plan=plan, utilities=names)
    with_target = gxd.reset_cost(model, (by_place[0], y[:10]), (by_place[1], y[10:]), plan=plan, utilities=names)
    before = model(x[10:], scale)["logits"]
    for unit in range(9):
        with clamped(model, plan["up"], torch.tensor([unit]), cost.references["up"]):
            after = model(x[10:], scale)["logits"]
        kl = F.kl_div(after.log_softmax(-1), before.log_softmax(-1), log_target=True, reduction="sum") / 6
        assert float(cost.shocks["kl"]["up"][unit]) == pytest.approx(float(kl))
    for other in (same, with_target):
        torch.testing.assert_close(other.shocks["kl"]["up"], cost.shocks["kl"]["up"])
        for name in names:
            torch.testing.assert_close(other.scores[name]["up"], cost.scores[name]["up"])


def test_some_units_are_drawn_by_the_seed_and_ranked_among_themselves():
    model, batch, _ = make("mlp")
    x, y = batch(40)
    every = gxd.reset_cost(model, (x, y), x, utilities="gxd")
    some = gxd.reset_cost(model, (x, y), x, utilities="gxd", units_per_group=5, seed=1)
    other = gxd.reset_cost(model, (x, y), x, utilities="gxd", units_per_group=5, seed=2)
    assert any(not torch.equal(some.units[g], other.units[g]) for g in some.units)
    for group, units in some.units.items():
        assert len(units) == 5 == len(units.unique())
        torch.testing.assert_close(some.shocks["l1"][group], every.shocks["l1"][group][units], rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(some.scores["gxd"][group], every.scores["gxd"][group][units])
        expected = spearmanr(some.scores["gxd"][group], some.shocks["l1"][group]).statistic
        assert some.spearman_by_group()["gxd"][group] == pytest.approx(expected)


def test_one_backward_pass_per_class_can_be_limited_to_some_examples():
    model, batch, _ = make("mlp")
    x, y = batch(40)
    limited = gxd.reset_cost(model, (x, y), x, utilities=["gxd_all_logit", "gxd"], all_logit_examples=10)
    whole = gxd.reset_cost(model, (x, y), x, utilities="gxd")
    torch.testing.assert_close(limited.scores["gxd"], whole.scores["gxd"])
    h = torch.relu(model.fc1(x))
    gradients = [torch.autograd.functional.jacobian(lambda v: model.head(torch.relu(model.fc2(v))), v) for v in h[:10]]
    effect = ((h[:10] - h.mean(0)).unsqueeze(1) * torch.stack(gradients)).abs().mean((0, 1))
    torch.testing.assert_close(limited.scores["gxd_all_logit"]["fc1"], effect.double().detach(), rtol=1e-4, atol=1e-7)


def test_utilities_of_one_direction_share_its_backward_pass(monkeypatch):
    model, batch, _ = make("mlp")
    x, y = batch(20)
    pulled = []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **kw: pulled.append(1) or grad(*args, **kw))
    gxd.reset_cost(model, (x, y), x, utilities=["gxi", "gxd", "gxd_sketch", "loss_gradient", "activation"])
    assert len(pulled) == 3  # target, sketch, loss


def test_the_outputs_target_is_needed_only_by_those_who_ask_for_it():
    model, batch, _ = make("mlp")
    x, _ = batch(20)
    cost = gxd.reset_cost(model, (x, None), x)
    of_targets = {
        "gxd",
        "gxi",
        "output_gradient",
        "loss_gradient",
        "taylor",
        "gxd_loss",
        "gxd_second_order",
        "weight_gradient",
    }
    assert set(cost.scores) == set(gxd.utilities()) - of_targets
    with pytest.raises(ValueError, match="'gxd' needs targets"):
        gxd.reset_cost(model, (x, None), x, utilities=["gxd"])


# --- ties and what is undefined ---------------------------------------------------------------------------------------


def test_ties_share_their_rank_as_in_scipy():
    generator = torch.Generator().manual_seed(0)
    for n in (2, 5, 40):
        for levels in (2, 4, 100):
            a = torch.randint(0, levels, (n,), generator=generator).double()
            b = torch.randint(0, levels, (n,), generator=generator).double()
            assert torch.equal(ranks(a), torch.from_numpy(rankdata(a)))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = spearmanr(a, b).statistic
            assert spearman(a, b) == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_the_lowest_share_is_rounded_up_and_ties_at_its_border_are_averaged():
    scores, values = torch.tensor([0.0, 1.0, 1.0, 1.0, 2.0]), torch.tensor([10.0, 1.0, 2.0, 6.0, 99.0])
    assert mean_of_lowest(scores, values, 0.2) == 10.0
    assert mean_of_lowest(scores, values, 0.21) == pytest.approx((10 + 3) / 2)
    assert mean_of_lowest(scores, values, 0.6) == pytest.approx((10 + 3 + 3) / 3)
    assert mean_of_lowest(scores, values, 1.0) == pytest.approx(118 / 5)
    assert mean_of_lowest(torch.arange(20.0), torch.arange(20.0), 0.05) == 0.0
    assert mean_of_lowest(torch.zeros(3), values[:3], 0.05) == pytest.approx(13 / 3)  # any unit may go
    assert math.isnan(mean_of_lowest(torch.tensor([1.0, math.nan]), values[:2], 0.05))


def test_dead_units_tie_at_zero_and_cost_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 3))
    with torch.no_grad():
        model[0].bias[:10] = -1e3
        model[2].bias[5:9] = -1e3
    x, y = torch.randn(64, 6), torch.randint(0, 3, (64,))
    cost = gxd.reset_cost(model, (x, y), x)
    assert float(cost.shocks["l1"]["0"][:10].max()) < 1e-6 and float(cost.shocks["l1"]["2"][5:9].max()) == 0.0
    for name in ("activation", "gxd", "gxi", "mc_contribution"):
        assert float(cost.scores[name]["0"][:10].abs().max()) == 0.0
        assert cost.shock(0.05)[name] < 1e-6


def test_what_cannot_be_ranked_is_nan_left_out_of_the_mean_and_named():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 1), nn.Tanh(), nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 3))
    x, y = torch.randn(32, 6), torch.randint(0, 3, (32,))
    cost = gxd.reset_cost(model, (x, y), x, utilities=["gxd", "activation"])
    assert math.isnan(cost.spearman_by_group()["gxd"]["0"])
    assert cost.spearman()["gxd"] == cost.spearman_by_group()["gxd"]["2"]
    assert cost.undefined() == {"gxd": ["0"], "activation": ["0"]}
    assert "gxd: no rank correlation in 1 group" in str(cost)
    assert cost.shock()["gxd"] == pytest.approx(sum(cost.shock_by_group()["gxd"].values()) / 2)


def test_a_constant_utility_has_no_rank_correlation_and_the_mean_shock():
    gxd.register_utility("test_constant")(lambda o: torch.ones(o.views[0].h.shape[-1]))
    model, batch, _ = make("mlp")
    x, y = batch(20)
    cost = gxd.reset_cost(model, (x, y), x, utilities=["test_constant", "gxd"])
    assert math.isnan(cost.spearman()["test_constant"]) and not math.isnan(cost.spearman()["gxd"])
    assert cost.undefined()["test_constant"] == ["fc1", "fc2"]
    assert cost.shock_by_group()["test_constant"]["fc1"] == pytest.approx(float(cost.shocks["l1"]["fc1"].mean()))


def test_the_table_says_what_was_measured():
    model, batch, _ = make("mlp")
    x, y = batch(20)
    text = str(gxd.reset_cost(model, (x[:12], y[:12]), (x[12:], y[12:]), utilities=["gxd", "contribution"]))
    assert "Spearman" in text and "Shock@5%" in text and "oracle" in text
    assert "2 groups, 28 units; scored on 12 examples, clamped on 8" in text


def test_progress_counts_the_clamps():
    model, batch, _ = make("mlp")
    x, y = batch(8)
    seen = []
    gxd.reset_cost(model, (x, y), x, utilities="gxd", report=lambda done, total: seen.append((done, total)))
    assert seen == [(16, 28), (28, 28)]


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"utilities": ["gdx"]}, ValueError, "unknown utility 'gdx'"),
        ({"utilities": []}, ValueError, "is empty; the registered ones are"),
        ({"units_per_group": 0}, ValueError, "units_per_group=0 must be a whole number"),
        ({"chunk": 2.5}, ValueError, r"chunk=2\.5 must be a whole number"),
        ({"positions": "sum"}, ValueError, "positions='sum' is not"),
        ({"calibration": torch.zeros(4, 6)}, TypeError, r"calibration must be \(x, y\)"),
        ({"calibration": (torch.zeros(4, 6), [1, 2])}, TypeError, "a tensor .or None. for y, got list"),
        ({"calibration": (torch.zeros(4, 6), torch.zeros(3).long())}, ValueError, "4 inputs, but targets of shape"),
        ({"probe": torch.zeros(0, 6)}, ValueError, "probe is empty"),
        ({"probe": "x"}, TypeError, "probe holds no tensor"),
        ({"probe": torch.full((4, 6), math.nan)}, ValueError, "on the probe data are not finite"),
        ({"model": nn.Linear(6, 4)}, ValueError, "no group, so there is nothing to clamp"),
        ({"model": nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1), nn.Flatten(0))}, ValueError, "expected .batch, cl"),
        ({"model": "mlp"}, TypeError, "model must be a torch.nn.Module"),
        ({"plan": "plan"}, TypeError, "plan must be a UnitPlan"),
        ({"output": lambda out: None}, TypeError, "output must return a tensor, got NoneType"),
    ],
)
def test_a_mistake_is_named_in_one_line(change, error, words):
    torch.manual_seed(0)
    model = change.pop("model", nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)))
    calibration = change.pop("calibration", (torch.randn(8, 6), torch.randint(0, 4, (8,))))
    probe = change.pop("probe", torch.randn(8, 6))
    with pytest.raises(error, match=words) as caught:
        gxd.reset_cost(model, calibration, probe, **change)
    assert "\n" not in str(caught.value)


def test_a_wrong_metric_or_fraction_is_named():
    model, batch, _ = make("mlp")
    x, y = batch(8)
    cost = gxd.reset_cost(model, (x, y), x, utilities="gxd")
    with pytest.raises(ValueError, match="metric='L2' is not one of 'l1', 'kl'"):
        cost.spearman("L2")
    with pytest.raises(ValueError, match="fraction=5 must be a number above 0, at most 1"):
        cost.shock(5)


@pytest.mark.parametrize("slow", [False, True])
def test_the_function_that_takes_the_logits_may_call_parts_of_the_model(slow, monkeypatch):
    model, batch, _ = make("mlp")
    x, y = batch(12)
    plan = gxd.find_units(model, x[:2])
    if slow:
        monkeypatch.setattr(lesion, "can_clamp_many", lambda group: False)
    whole = gxd.reset_cost(model, (x, y), x, plan=plan, utilities="gxd")
    head, model.head = model.head, nn.Identity()
    model.last = head  # in place of the head, but called by the function alone
    text = {"head.weight": "last.weight", "head.bias": "last.bias"}
    groups = tuple(
        replace(g, views=tuple(replace(v, consumers=tuple(_renamed(c, text) for c in v.consumers)) for v in g.views))
        for g in plan.groups
    )
    moved = replace(plan, groups=groups, shapes={text.get(n, n): s for n, s in plan.shapes.items()})
    parts = gxd.reset_cost(model, (x, y), x, plan=moved, utilities="gxd", output=model.last)
    for name, shocks in whole.shocks["l1"].items():
        torch.testing.assert_close(parts.shocks["l1"][name], shocks)


def _renamed(consumer, text):
    if consumer.module != "head":
        return consumer
    return replace(consumer, module="last", site="last", weight=text[consumer.weight], bias=text[consumer.bias])


def test_the_gradient_of_weights_is_that_of_the_loss_over_all_calibration_examples():
    model, batch, _ = make("mlp")
    x, y = batch(24)
    cost = gxd.reset_cost(model, (x, y), x, utilities=["weight_gradient"], chunk=7)
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y), [model.fc1.weight])
    torch.testing.assert_close(cost.scores["weight_gradient"]["fc1"].float(), gradient.abs().mean(1))
    assert model.fc1.weight.grad is None

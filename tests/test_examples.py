"""What counts as one example: folded axes, views of different lengths, the axis of the classes, batches of one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gxd
from gxd.observe.consumers import replace_heads

TOKENS = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(1))
NEXT = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(2))


class LanguageModel(nn.Module):
    def __init__(self, batch_first=True, classes=11):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.hidden = nn.Linear(8, 16)
        self.out = nn.Linear(16, classes)

    def forward(self, index):
        h = self.embed(index)
        return self.out(self.hidden(self.attend(h, h, h)[0]).relu())


def scores(model, x, y, observe, utility="gxd", **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plan = gxd.find_units(model, x, batch_dim=options.pop("batch_dim", 0))
    cbp = gxd.ContinualBackprop(model, optimizer, plan=plan, utility=utility, replacement_rate=0, **options)
    logits = model(x)
    observe(cbp, logits, y)
    F.cross_entropy(logits.flatten(0, -2), y.flatten()).backward()
    optimizer.step()
    return cbp.utilities()


def as_is(cbp, logits, y):
    cbp.observe(logits, y)


def heads_by_the_equation():
    """E_b |sum_t (h - r) dz_y/dh| of the heads, whose values lie in memory as (tokens, batch)."""
    model = LanguageModel()
    h = model.embed(TOKENS)
    attended, _ = model.attend(h, h, h)
    seen = []
    replace_heads(model.attend, (attended, None), lambda source: seen.append(source) or source)
    (source,) = seen
    logit = model.out(model.hidden(attended).relu()).gather(-1, NEXT[..., None]).sum()
    (gradient,) = torch.autograd.grad(logit, source)
    h, g = (tensor.detach().view(6, 4, 8).transpose(0, 1) for tensor in (source, gradient))
    return ((h - h.mean((0, 1))) * g).sum(1).abs().mean(0)


@pytest.mark.parametrize(
    "observe",
    [
        as_is,
        lambda cbp, logits, y: cbp.observe(logits.flatten(0, 1), y.flatten()),
        lambda cbp, logits, y: cbp.observe(score=logits.gather(-1, y[..., None]).sum()),
    ],
    ids=["as they are", "flattened", "as a sum"],
)
def test_how_the_logits_are_given_does_not_change_what_an_example_is(observe):
    found = scores(LanguageModel(), TOKENS, NEXT, observe)
    torch.testing.assert_close(found["attend"], heads_by_the_equation())


def test_a_model_with_its_tokens_first_scores_as_one_with_its_batch_first():
    first = scores(LanguageModel(), TOKENS, NEXT, as_is)
    second = scores(LanguageModel(batch_first=False), TOKENS.t(), NEXT.t(), as_is, batch_dim=1)
    assert first.keys() == second.keys()
    for name, expected in first.items():
        torch.testing.assert_close(second[name], expected)


class TwoViews(nn.Module):
    """Units read once per token, and once per example."""

    def __init__(self, flat):
        super().__init__()
        torch.manual_seed(0)
        self.flat, self.a, self.tokens, self.pooled = flat, nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        h = self.a(x).relu()
        tokens = self.tokens(h.flatten(0, 1)).unflatten(0, x.shape[:2]) if self.flat else self.tokens(h)
        return tokens.mean(1) + self.pooled(h.mean(1))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("positions", ["signed", "abs"])
def test_local_utilities_add_over_views_of_different_lengths(flat, positions):
    torch.manual_seed(1)
    x, y = torch.randn(4, 5, 6), torch.tensor([0, 1, 2, 0])
    model = TwoViews(flat)
    h = model.a(x).relu().detach()
    expected = h.abs().mean((0, 1)) * model.tokens.weight.abs().sum(0)
    expected += h.mean(1).abs().mean(0) * model.pooled.weight.abs().sum(0)
    found = scores(model, x, y, as_is, "contribution", positions=positions)["a"]
    torch.testing.assert_close(found, expected.detach())


@pytest.mark.parametrize("utility", ["gxd", "loss_gradient", "mc_contribution"])
@pytest.mark.parametrize("positions", ["signed", "abs"])
def test_folding_the_tokens_into_the_batch_changes_no_score(utility, positions):
    torch.manual_seed(1)
    x, y = torch.randn(4, 5, 6), torch.tensor([0, 1, 2, 0])
    one, other = (scores(TwoViews(flat), x, y, as_is, utility, positions=positions)["a"] for flat in (False, True))
    torch.testing.assert_close(one, other)


# --- classes ----------------------------------------------------------------------------------------------------------


def test_as_many_tokens_as_classes_need_the_axis_to_be_said():
    x, y = TOKENS, NEXT % 6
    with pytest.raises(ValueError, match=r"class_dim=1 or class_dim=-1"):
        scores(LanguageModel(classes=6), x, y, as_is)
    last = scores(LanguageModel(classes=6), x, y, lambda cbp, z, y: cbp.observe(z, y, class_dim=-1))
    flat = scores(LanguageModel(classes=6), x, y, lambda cbp, z, y: cbp.observe(z.flatten(0, 1), y.flatten()))
    second = scores(LanguageModel(classes=6), x, y, lambda cbp, z, y: cbp.observe(z.mT, y, class_dim=1))
    for name, expected in flat.items():
        torch.testing.assert_close(last[name], expected)
        torch.testing.assert_close(second[name], expected)


@pytest.mark.parametrize("given", [0, 2.0, True, 5])
def test_an_axis_that_cannot_be_that_of_the_classes_is_refused(given):
    with pytest.raises(ValueError, match="is not the second axis"):
        scores(LanguageModel(), TOKENS, NEXT, lambda cbp, z, y: cbp.observe(z, y, class_dim=given))


def test_reset_cost_asks_for_the_axis_of_the_classes_where_nothing_tells():
    model = nn.Sequential(nn.Conv1d(3, 6, 1), nn.ReLU(), nn.Conv1d(6, 5, 1))
    x, y = torch.randn(12, 3, 8), torch.randint(0, 5, (12, 8))
    with pytest.raises(ValueError, match="class_dim=1"):
        gxd.reset_cost(model, (x, None), x, utilities=["activation"])
    told = gxd.reset_cost(model, (x, None), x, utilities=["activation"], class_dim=1)
    seen = gxd.reset_cost(model, (x, y), x, utilities=["activation"])
    torch.testing.assert_close(told.shocks["kl"]["0"], seen.shocks["kl"]["0"])


# --- batches of one ---------------------------------------------------------------------------------------------------


class Folded(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.b(self.a(x.flatten(0, 1)).relu()).relu()
        return self.out(h.unflatten(0, x.shape[:2]).mean(1))


def test_a_batch_of_one_finds_what_a_batch_of_two_finds():
    model, x = Folded(), torch.randn(4, 5, 6)
    one, two = gxd.find_units(model, x[:1]), gxd.find_units(model, x[:2])
    assert str(one) == str(two) and one.fingerprint() == two.fingerprint()
    assert [v.fold for g in one.groups for v in g.views] == [v.fold for g in two.groups for v in g.views]
    assert "major" in [v.fold for g in one.groups for v in g.views]


def test_an_axis_of_one_that_is_no_batch_is_taken_as_it_is():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    assert gxd.find_units(model, torch.zeros(1, 8, 8)).size == 4

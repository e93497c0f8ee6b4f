"""SWR against loops over single weights: which are redrawn, with what, and that all others are left alone."""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist

import gxd
from gxd.testing import LAWS, Case, laws
from tests.methods.contract import case_of
from tests.models import make
from tests.processes import WARM
from tests.rig import same

X = torch.randn(6, 2, 4, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])
SCORES = ("gradient", "magnitude", "attribution")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.fc, self.ln, self.head = nn.Linear(16, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        nn.init.normal_(self.head.weight, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.ln(self.fc(F.relu(self.bn(self.conv(x))).flatten(1)))))


MEAN = {"bn.weight": 1.0, "ln.weight": 1.0}  # of what each parameter began with, where it is not 0


# Of what a weight is drawn from; of the normal, that of its values. Biases and norms are not drawn.
DEVIATION = {
    "conv.weight": 18**-0.5 / 3**0.5,
    "fc.weight": 16**-0.5 / 3**0.5,
    "head.weight": Net().head.weight.detach().square().mean().sqrt().item(),
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def attached(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd, model: nn.Module | None = None, **options: Any
) -> tuple[Any, torch.optim.Optimizer, gxd.Attachment]:
    model = Net() if model is None else model
    made = optimizer(model)
    method = gxd.method("swr", **{"every": 1, **options})
    return model, made, gxd.attach(model, made, method)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, attachment: gxd.Attachment | None = None) -> None:
    optimizer.zero_grad()
    logits = model(X)
    if attachment is not None:
        attachment.observe(logits, Y)
    F.cross_entropy(logits, Y).backward()
    optimizer.step()


def total(attachment: gxd.Attachment) -> int:
    return attachment._parts[0].state.total


def mean_output_gradients(model: nn.Module) -> dict[str, Tensor]:
    """dz_y/dw, one example after the other through the whole batch (BatchNorm), then their mean."""
    model = copy.deepcopy(model)
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for example in range(len(X)):
        logit = model(X)[example, Y[example]]
        for (name, _), gradient in zip(model.named_parameters(), torch.autograd.grad(logit, list(model.parameters()))):
            sums[name] += gradient / len(X)
    return sums


def naive_scores(score: str, redraw: str, name: str, p: Tensor, gradient: Tensor, output: Tensor) -> list[float]:
    found = []
    for w, g, dz in zip(p.flatten().tolist(), gradient.flatten().tolist(), output.flatten().tolist()):
        if score == "gradient":
            found.append(abs(w * g))
        elif score == "magnitude":
            found.append(abs(w))
        else:
            deviation = 0.0 if redraw == "mean" else DEVIATION.get(name, 0.0)
            found.append(((w - MEAN.get(name, 0.0)) ** 2 + deviation**2) ** 0.5 * abs(dz))
    return found


@pytest.mark.parametrize("redraw", ["resample", "mean"])
@pytest.mark.parametrize("score", SCORES)
def test_what_is_small_next_to_its_tensors_mean_begins_anew_and_all_else_is_left_alone(score: str, redraw: str):
    model, optimizer, attachment = attached(score=score, redraw=redraw, factor=0.3)
    redrawn = 0
    for _ in range(4):
        plain = copy.deepcopy(model)
        outputs = mean_output_gradients(model)
        step(plain, sgd(plain))
        step(model, optimizer, attachment)
        for (name, after), p in zip(plain.named_parameters(), model.parameters()):
            u = naive_scores(score, redraw, name, after, after.grad, outputs[name])
            low = [one <= 0.3 * sum(u) / len(u) for one in u]
            redrawn += sum(low)
            for number, (new, old) in enumerate(zip(p.flatten().tolist(), after.flatten().tolist())):
                if not low[number]:
                    assert new == old, f"{name}[{number}]"
                elif redraw == "mean" or name not in DEVIATION:
                    assert new == MEAN.get(name, 0.0), f"{name}[{number}]"
                else:
                    assert new != old and abs(new) < 5 * DEVIATION[name], f"{name}[{number}]"
    assert redrawn == total(attachment) > 50


@pytest.mark.parametrize("score", SCORES)
def test_of_a_proportion_the_lowest_go_and_one_more_now_and_then(score: str):
    """0.37 of the 18 weights of the head are 6.66."""
    model, optimizer, attachment = attached(score=score, factor=0.37, selection="proportional", redraw="mean")
    extra = []
    for _ in range(30):
        plain = copy.deepcopy(model)
        outputs = mean_output_gradients(model)
        step(plain, sgd(plain))
        before = total(attachment)
        step(model, optimizer, attachment)
        least = 0
        for (name, after), p in zip(plain.named_parameters(), model.parameters()):
            share = int(after.numel() * 0.37)
            least += share
            u = naive_scores(score, "mean", name, after, after.grad, outputs[name])
            order = sorted(range(len(u)), key=u.__getitem__)
            values, old = p.flatten().tolist(), after.flatten().tolist()
            changed = [n for n in order if values[n] != old[n]]
            assert u[order[share]] >= max((u[n] for n in changed), default=0.0)
            same_as_mean = [n for n in order[:share] if u[n] < u[order[share]]]  # but for ties
            assert all(values[n] == MEAN.get(name, 0.0) for n in same_as_mean), name
        extra.append(total(attachment) - before - least)
    fractions = [p.numel() * 0.37 % 1 for p in model.parameters()]
    assert 0 <= min(extra) < max(extra) <= len(fractions)
    assert abs(sum(extra) / len(extra) - sum(fractions)) < 1.0  # three standard errors


def test_a_fraction_of_a_weight_goes_with_its_probability():
    """A quarter of nine weights are two and a quarter."""
    model = nn.Linear(9, 1, bias=False)
    _, optimizer, attachment = attached(model=model, score="magnitude", selection="proportional", factor=0.25)
    counts = []
    for _ in range(300):
        before = total(attachment)
        optimizer.step()
        counts.append(total(attachment) - before)
    assert set(counts) == {2, 3} and abs(sum(counts) / 300 - 2.25) < 0.1


def test_the_fresh_weights_follow_the_distribution_that_the_tensor_began_with():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 300), nn.ReLU(), nn.Linear(300, 3))
    nn.init.normal_(model[2].weight, std=0.7)
    nn.init.constant_(model[2].bias, -4.6)  # as of a rare class
    _, optimizer, _ = attached(model=model, factor=1e9)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(3.0)
    model(torch.randn(4, 100)).sum().backward()
    optimizer.step()
    first, last = model[0].weight.detach().flatten(), model[2].weight.detach().flatten()
    assert first.abs().max() <= 0.1 and abs(float(first.std()) - 0.1 / 3**0.5) < 0.002
    assert abs(float(last.std()) - 0.7) < 0.06 and last.abs().max() > 1.4
    assert not model[0].bias.any() and torch.equal(model[2].bias, torch.full((3,), -4.6))


def test_a_dead_relu_comes_alive():
    """Its gradients are zero, so its whole row is redrawn; live rows and the rest of the network stay."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))
    x = torch.randn(32, 8)
    with torch.no_grad():
        model[0].weight[2] = -model[0].weight[2].abs()
        model[0].bias[2] = -30.0
    _, optimizer, attachment = attached(model=model, every=3, factor=1e-5)
    plain = copy.deepcopy(model)
    plainly = sgd(plain)
    for number in range(3):
        assert not model[1](model[0](x))[:, 2].any()
        for one, made in ((model, optimizer), (plain, plainly)):
            made.zero_grad()
            F.cross_entropy(one(x), torch.arange(32) % 3).backward()
            made.step()
        assert total(attachment) == (12 if number == 2 else 0)  # eight weights, the bias, three that read it
    assert 0 < (model[0](x)[:, 2] > 0).float().mean() < 1
    assert model[0].bias[2] == 0
    live = [0, 1, 3, 4]
    assert torch.equal(model[0].weight[live], plain[0].weight[live])
    assert torch.equal(model[2].weight[:, live], plain[2].weight[:, live])
    before = model[0].weight[2].detach().clone()
    optimizer.zero_grad()
    F.cross_entropy(model(x), torch.arange(32) % 3).backward()
    optimizer.step()
    assert not torch.equal(model[0].weight[2], before)  # it learns again


@pytest.mark.parametrize("memories", ["keep", "reset"])
def test_what_the_optimizer_remembers_of_redrawn_weights_is_kept_or_begins_anew(memories: str):
    adam = lambda model: torch.optim.Adam(model.parameters(), 0.01)
    model, optimizer, attachment = attached(adam, every=2, factor=0.5, memories=memories)
    step(model, optimizer)
    plain = copy.deepcopy(model)
    plainly = adam(plain)
    plainly.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(plain, plainly)
    step(model, optimizer)
    assert total(attachment) > 20
    for p, q in zip(model.parameters(), plain.parameters()):
        redrawn = p != q
        for key in ("exp_avg", "exp_avg_sq"):
            here, there = optimizer.state[p][key], plainly.state[q][key]
            assert torch.equal(here[~redrawn], there[~redrawn]) or memories == "reset"  # redrawn as it was
            assert torch.equal(here[redrawn], there[redrawn] if memories == "keep" else 0 * there[redrawn])


def test_gradients_are_there_though_they_were_cleared_when_the_last_optimizer_has_stepped():
    ends = []
    for clear in (False, True):
        model = Net()
        optimizers = [torch.optim.SGD(p, 0.1) for p in (list(model.parameters())[:4], list(model.parameters())[4:])]
        attachment = gxd.attach(model, optimizers, gxd.method("swr", every=1, factor=0.3))
        F.cross_entropy(model(X), Y).backward()
        for one in optimizers:
            one.step()
            if clear:
                one.zero_grad(set_to_none=False)
        ends.append((model.state_dict(), total(attachment)))
    assert same(*ends) and ends[0][1] > 10


def test_a_parameter_without_a_gradient_is_left_alone():
    """The head of another task: nothing is known of it."""
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "one": nn.Linear(4, 2), "two": nn.Linear(4, 2)})
    _, optimizer, attachment = attached(model=model, factor=1e9)
    before = copy.deepcopy(model["two"].state_dict())
    model["one"](model["body"](torch.ones(2, 4))).sum().backward()
    optimizer.step()
    assert same(before, model["two"].state_dict()) and total(attachment) == 4 * 4 + 4 + 4 * 2 + 2


def test_patterns_leave_parameters_out_and_one_that_matches_nothing_is_refused():
    model, optimizer, attachment = attached(factor=1e9, exclude=["head.*", "*.bias"])
    plain = Net()
    step(plain, sgd(plain))
    step(model, optimizer)
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        if name.startswith("head") or name.endswith("bias"):
            assert torch.equal(p, q), name
    assert total(attachment) == sum(layer.weight.numel() for layer in (model.conv, model.bn, model.fc, model.ln))
    with pytest.raises(ValueError, match=r"exclude='haed' names no parameter and no module of the model.*'head"):
        attached(exclude="haed")


def test_weights_in_another_memory_layout_are_redrawn_alike():
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        model = Net().double().to(memory_format=layout)
        adam = lambda model: torch.optim.Adam(model.parameters(), 0.01)
        _, optimizer, attachment = attached(adam, model=model, factor=0.5, memories="reset")
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(X.double()), Y).backward()
            optimizer.step()
        ends.append((dict(model.named_parameters()), total(attachment)))
    torch.testing.assert_close(*ends)
    assert not model.conv.weight.is_contiguous()


# ---- judged by what the reset changes


def test_the_attribution_is_the_change_of_the_target_logit_where_the_model_is_linear():
    """Of the head: the mean over the batch of z_y with w set to its mean, against z_y."""
    model, _, attachment = attached(score="attribution", redraw="mean", factor=0.0)
    part = attachment._parts[0]
    model.eval()  # what BatchNorm does is not the head's
    inputs: list[Tensor] = []
    hook = model.head.register_forward_hook(lambda _, given, __: inputs.append(given[0].detach()))
    attachment.observe(model(X), Y)
    hook.remove()
    found = {**part.outputs.finish(part.host.parameters(), part.host.device)}
    w, h = model.head.weight.detach(), inputs[0]
    for c, i in itertools.product(range(3), range(6)):
        changed = w.clone()
        changed[c, i] = 0.0
        effect = F.linear(h, w - changed)[torch.arange(6), Y].mean()
        torch.testing.assert_close((w[c, i] * found["head.weight"][c, i]), effect)


def test_passes_that_are_accumulated_count_by_their_examples():
    whole, parts = (attached(score="attribution", redraw="mean", factor=0.3) for _ in range(2))
    for (model, optimizer, attachment), sizes in ((whole, [6]), (parts, [1, 2, 3])):
        model.bn.eval()
        for x, y in zip(X.split(sizes), Y.split(sizes)):
            logits = model(x)
            attachment.observe(logits, y)
            F.cross_entropy(logits, y, reduction="sum").backward()
        optimizer.step()
    assert total(whole[2]) == total(parts[2]) > 10
    torch.testing.assert_close(whole[0].state_dict(), parts[0].state_dict())


def two_ranks(rank: int, folder: str) -> None:
    """They have other examples, and other numbers of them; the first does not see one of the heads."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model, optimizer, attachment = attached(model=two_heads(), score="attribution", factor=0.5)
    attachment.observe(seen_by(model, rank), Y.split([2, 4])[rank])
    part = attachment._parts[0]
    pulled = copy.deepcopy(part.outputs).finish(part.host.parameters(), part.host.device)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.save((pulled, model.state_dict(), total(attachment)), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def two_heads() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"body": nn.Linear(32, 8), "one": nn.Linear(8, 3), "two": nn.Linear(8, 3)})


def seen_by(model: nn.Module, rank: int) -> Tensor:
    h = torch.tanh(model["body"](X.flatten(1).split([2, 4])[rank]))
    return model["one"](h) + (model["two"](h) if rank else 0.0)


def test_two_processes_see_the_mean_over_the_examples_of_both_and_write_the_same(tmp_path: Path):
    processes = [WARM.Process(target=two_ranks, args=(rank, str(tmp_path))) for rank in range(2)]
    for one in processes:
        one.start()
    for one in processes:
        one.join(120)
    here, there = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert same(here, there) and here[2] > 50
    model = two_heads()
    picked = [seen_by(model, rank).gather(1, Y.split([2, 4])[rank][:, None]).sum() for rank in range(2)]
    (sum(picked) / 6).backward()
    torch.testing.assert_close(here[0], {name: p.grad for name, p in model.named_parameters()})


def test_a_parameter_that_the_observed_output_does_not_depend_on_is_left_alone():
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "policy": nn.Linear(4, 2), "value": nn.Linear(4, 1)})
    _, optimizer, attachment = attached(model=model, factor=1e9, score="attribution", redraw="mean")
    h = torch.tanh(model["body"](torch.ones(2, 4)))
    attachment.observe(model["policy"](h), torch.tensor([0, 1]))
    (model["policy"](h).sum() + model["value"](h).sum()).backward()
    optimizer.step()
    assert not model["policy"].weight.any() and not model["body"].weight.any() and model["value"].weight.all()


def test_without_a_target_a_sketch_of_the_logits_or_a_score_is_enough():
    for options, given in (("attribution_sketch", {}), ("attribution", {"score": True})):
        model, optimizer, attachment = attached(score=options, factor=0.3)
        logits = model(X)
        attachment.observe(score=logits.sum(1)) if given else attachment.observe(logits)
        logits.sum().backward()
        optimizer.step()
        assert total(attachment) > 10


def test_a_step_that_redraws_and_was_not_observed_is_reported_and_others_need_not_be():
    model, optimizer, attachment = attached(score="attribution", every=2, factor=0.3)
    step(model, optimizer)
    before = copy.deepcopy(attachment.state_dict())
    with pytest.raises(gxd.ObservationError, match=r"swr needs attached.observe\(logits, target\)"):
        step(model, optimizer)
    assert same(attachment.state_dict(), before)
    step(model, optimizer, attachment)
    assert total(attachment) > 10
    model = Net()
    optimizer = sgd(model)
    method = gxd.method("swr", score="attribution", every=1, factor=0.3)
    quiet = gxd.attach(model, optimizer, method, on_unobserved="skip")
    step(model, optimizer)
    assert total(quiet) == 0


def test_an_output_of_another_model_and_an_empty_batch_are_refused():
    _, _, attachment = attached(score="attribution")
    with pytest.raises(gxd.ObservationError, match="depends on no trained parameter"):
        attachment.observe(Net()(X), Y)
    with pytest.raises(gxd.ObservationError, match="the batch is empty"):
        attachment.observe(torch.zeros(0, 3, requires_grad=True), Y[:0])


@pytest.mark.parametrize("way", ["discard", "scale"])
def test_what_a_skipped_step_has_shown_is_forgotten(way: str):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, other = Net(), Net()
    method = gxd.method("swr", score="attribution", every=1, factor=0.3)
    optimizers = [sgd(model), sgd(other)]
    seen, plain = (gxd.attach(m, o, method, scaler=scaler) for m, o in zip((model, other), optimizers))
    seen.observe(model(X) * 3, Y.flip(0))
    if way == "discard":
        seen.discard()
    else:
        scaler._scale = torch.tensor(512.0)  # as after an overflow
        scaler._growth_tracker = torch.tensor(0)
    for attachment, one in ((seen, model), (plain, other)):
        one.bn.running_mean.zero_()
        attachment.observe(one(X), Y)
    assert same(*(a._parts[0].outputs.pulled for a in (seen, plain)))


def test_a_saved_observation_of_another_model_is_refused_and_nothing_is_changed():
    _, _, attachment = attached(score="attribution")
    attachment.observe(attachment.model(X), Y)
    state = attachment.state_dict()
    state["methods"]["0.swr"]["observed"]["sums"]["fc.weight"] = torch.zeros(2, 2)
    _, _, other = attached(score="attribution")
    before = other.state_dict()
    with pytest.raises(gxd.PlanError, match=r"observed.sums.fc.weight does not fit"):
        other.load_state_dict(state)
    assert same(other.state_dict(), before)


# ---- the contract, of what a default does not show

OTHERS = [
    case_of("swr", "by magnitude", score="magnitude"),
    case_of("swr", "a proportion", selection="proportional", factor=0.05, memories="reset"),
    case_of("swr", "by attribution", score="attribution"),
    case_of("swr", "by a sketch", score="attribution_sketch", redraw="mean"),
]
OF_OBSERVED = (  # a law that takes what has no utility for what need not be observed, and one that names before_step
    laws.calls_that_a_method_does_not_need_are_harmless,
    laws.a_compiled_step_does_the_same_or_says_why_it_is_eager,
)


@pytest.mark.parametrize("case", OTHERS, ids=str)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_law_holds(law: Callable[[Case], None], case: Case):
    if not case.make().needs_observe or law not in OF_OBSERVED:
        law(case)


def test_a_compiled_step_says_that_output_gradients_make_it_eager():
    make = partial(gxd.method, "swr", score="attribution", every=2, factor=0.3)
    assert "swr reads gradients of the output" in str(laws.is_compiled_alike(lambda: [make()]))


# ---- other models


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", ["resnet", "transformer"])
def test_residual_networks_and_transformers_learn_on(name: str, score: str):
    model, batch, _ = make(name)
    _, optimizer, attachment = attached(model=model, score=score, factor=0.01, every=5)
    x, y = batch()
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        logits = model(x)
        attachment.observe(logits, y)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert total(attachment) > 0 and losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_words_that_are_not_in_the_batch_keep_their_embedding_unless_it_is_judged_by_size(score: str, sparse: bool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8, sparse=sparse), nn.Flatten(), nn.Linear(24, 3))
    before = model[0].weight.detach().clone()
    _, optimizer, attachment = attached(model=model, score=score, factor=0.1)
    logits = model(torch.arange(6).reshape(2, 3))
    attachment.observe(logits, torch.tensor([0, 1]))
    F.cross_entropy(logits, torch.tensor([0, 1])).backward()
    optimizer.step()
    assert torch.equal(model[0].weight[6:], before[6:]) == (score != "magnitude")
    assert total(attachment) > 0


@pytest.mark.parametrize("selection", ["threshold", "proportional"])
@pytest.mark.parametrize("score", ["gradient", "attribution"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_head_of_another_task_is_left_alone_whether_its_gradient_is_none_or_zero(
    set_to_none: bool, score: str, selection: str
):
    """``zero_grad(set_to_none=False)`` leaves zeros where nothing was computed: they say nothing of a weight's use."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(4, 8), "one": nn.Linear(8, 3), "two": nn.Linear(8, 3)})
    _, optimizer, attachment = attached(model=model, score=score, selection=selection, factor=0.3)
    for task in ("one", "two"):
        before = copy.deepcopy(model["one"].state_dict())
        redrawn = total(attachment)
        for number in range(3):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad(set_to_none=set_to_none)
            logits = model[task](model["body"](x).relu())
            attachment.observe(logits + 0.0 * model["one"](model["body"](x)), Y)
            F.cross_entropy(logits, Y).backward()
            optimizer.step()
        assert total(attachment) > redrawn
    assert same(model["one"].state_dict(), before)


# ---- bad input


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"every": -1}, ValueError, "every=-1 must be a whole number of steps, 0 or more"),
        ({"every": 1.5}, ValueError, "every=1.5"),
        ({"factor": -0.1}, ValueError, "factor=-0.1 must be a number, 0 or more"),
        ({"factor": 1.5, "selection": "proportional"}, ValueError, "factor=1.5 must be a number, from 0 to 1"),
        ({"selection": "treshold"}, ValueError, "selection='treshold' is not one of.*Did you mean 'threshold'"),
        ({"score": "gradients"}, ValueError, "score='gradients' is not one of.*Did you mean 'gradient'"),
        ({"redraw": "zero"}, ValueError, "redraw='zero' is not one of 'resample', 'mean'"),
        ({"memories": True}, ValueError, "memories=True is not one of 'reset', 'peers', 'keep'"),
        ({"exclude": [1]}, TypeError, r"exclude=\[1\] must be a name of parameters or modules"),
        ({"exclude": None}, TypeError, "exclude=None must be a name"),
        ({"frequency": 3}, TypeError, "swr has no option 'frequency'"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(options: dict[str, Any], error: Any, word: str):
    with pytest.raises(error, match=word):
        gxd.method("swr", **options)


def test_optimizer_state_that_a_redraw_cannot_follow_is_refused_when_it_appears():
    class Keeps(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            super().step(closure)
            for p in self.param_groups[0]["params"]:
                self.state[p]["mystery"] = p.detach().clone()

    model = Net()
    optimizer = Keeps(model.parameters(), 0.1)
    gxd.attach(model, optimizer, gxd.method("swr", every=1000))
    with pytest.raises(gxd.PlanError, match="mystery"):
        step(model, optimizer)

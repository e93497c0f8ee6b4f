"""Ways to train: every optimizer, accumulation, several forwards per step, evaluation in between.

The truth comes from elsewhere: plain training without gxd, a run that differs only in what must not matter,
indexing by hand, or the naive oracle.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import gxd
from tests.oracle import View, naive_scores

KINDS = ("activation", "gxd", "loss_gradient", "gxd_sketch", "gxd_all_logit")  # one utility per kind of gradient
Batch = tuple[Tensor, Tensor]


def mlp(seed: int = 0, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Groups "0" (8 units, read by layer 2) and "2" (6 units, read by layer 4)."""
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 8, bias), nn.ReLU(), nn.Linear(8, 6, bias), nn.Tanh(), nn.Linear(6, 3, bias)]
    return nn.Sequential(*layers).to(dtype)


def batches(steps: int, examples: int = 8, shape: tuple[int, ...] = (4,), dtype: torch.dtype = torch.float32):
    make = torch.Generator().manual_seed(1)
    return [
        (torch.randn(examples, *shape, generator=make).to(dtype), torch.randint(3, (examples,), generator=make))
        for _ in range(steps)
    ]


def attach(model: nn.Module, optimizer: Optimizer, **options: Any) -> gxd.ContinualBackprop:
    if "plan" not in options:
        options.setdefault("example_inputs", torch.zeros(2, 4, dtype=next(model.parameters()).dtype))
    return gxd.ContinualBackprop(model, optimizer, **{"replacement_rate": 0.1, "maturity": 2, **options})


def attached(seed: int = 0, **options: Any) -> tuple[nn.Sequential, Optimizer, gxd.ContinualBackprop]:
    model = mlp(seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return model, optimizer, attach(model, optimizer, **options)


def train(model: nn.Module, optimizer: Optimizer, cbp: gxd.ContinualBackprop | None, data: list[Batch]) -> None:
    for x, y in data:
        logits = model(x)
        if cbp is not None:
            cbp.observe(logits, y)
        F.cross_entropy(logits, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def same(left: Any, right: Any) -> bool:
    """Equal to the last bit, through dicts and sequences."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def close(left: Mapping[str, Tensor], right: Mapping[str, Tensor], tolerance: float = 1e-5) -> bool:
    return left.keys() == right.keys() and all(
        torch.allclose(left[key], right[key].to(left[key].dtype), rtol=tolerance, atol=tolerance * 1e-2) for key in left
    )


def clone(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    return {key: clone(value) for key, value in tree.items()} if isinstance(tree, Mapping) else tree


# ---- optimizers


def strange(parameters: Any) -> Optimizer:
    """SGD that keeps something without slices like its parameter's."""
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    keep = lambda *_: [s.setdefault("sketch", torch.ones(3, 7)) for s in optimizer.state.values()]
    optimizer.register_step_post_hook(keep)
    return optimizer


class Nested(torch.optim.SGD):
    """Calls the step of its parent, which torch hooks as well."""

    def step(self, closure=None):
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "sgd_foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 0.02, weight_decay=0.1),
    "adam_foreach": lambda p: torch.optim.Adam(p, 0.02, weight_decay=0.1, foreach=True),
    "adam_fused": lambda p: torch.optim.Adam(p, 0.02, weight_decay=0.1, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.02, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.1),
    "adamw_fused": lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.1, amsgrad=True, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.02, weight_decay=0.1),
    "muon": lambda p: torch.optim.Muon(p, 0.02, weight_decay=0.1),
}
KNOWN = list(OPTIMIZERS)
OPTIMIZERS["strange"] = strange


def trained_with(name: str, **options: Any):
    """An MLP trained until units of both groups are reset in one step, and copies from just before that reset."""
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("no Muon in this torch")
    model = mlp(bias=name != "muon")  # Muon takes matrices only
    weights = {"params": [p for p in model.parameters() if p.dim() == 2]}
    biases = {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 1e-3, "weight_decay": 0.0}
    optimizer = OPTIMIZERS[name]([weights, biases] if biases["params"] else [weights])
    copies: dict[str, Any] = {}

    def copy(*_: Any) -> None:  # registered before gxd's own hook, so it runs before the reset
        copies["parameters"] = clone(dict(model.named_parameters()))
        copies["state"] = {name: clone(optimizer.state[p]) for name, p in model.named_parameters()}

    optimizer.register_step_post_hook(copy)
    cbp = attach(model, optimizer, maturity=5, replacement_rate=0.4, **options)
    train(model, optimizer, cbp, batches(6))
    assert {name: len(index) for name, index in cbp.last_resets.items()} == {"0": 3, "2": 2}
    return model, optimizer, cbp, copies


ROWS = {"0": "0", "2": "2"}  # layer -> the group whose incoming weights are its rows
COLUMNS = {"2": "0", "4": "2"}  # layer -> the group whose outgoing weights are its columns


def expected_after_reset(layer: str, shape: torch.Size, tensor: Tensor, resets: Mapping[str, Tensor]) -> Tensor:
    """State of a weight or bias with the slices of the reset units zeroed, by hand."""
    tensor = tensor.clone()
    if layer in ROWS and tensor.shape[:1] == shape[:1]:
        tensor[resets[ROWS[layer]]] = 0.0
    if layer in COLUMNS and len(shape) == 2 and tensor.dim() == 2 and tensor.shape[1] == shape[1]:
        tensor[:, resets[COLUMNS[layer]]] = 0.0
    return tensor


@pytest.mark.parametrize("name", KNOWN)
def test_a_reset_clears_the_optimizer_state_of_exactly_the_reset_slices(name: str):
    model, optimizer, cbp, before = trained_with(name)
    for parameter, p in model.named_parameters():
        layer = parameter.split(".")[0]
        old, new = before["state"][parameter], optimizer.state[p]
        assert old.keys() == new.keys()
        for key in old:
            if not isinstance(old[key], Tensor) or old[key].numel() == 1:
                assert same(old[key], new[key])
            else:
                assert same(expected_after_reset(layer, p.shape, old[key], cbp.last_resets), new[key]), (parameter, key)


@pytest.mark.parametrize("name", KNOWN)
def test_outgoing_weights_of_fresh_units_are_zero_until_gradient_arrives(name: str):
    model, optimizer, cbp, before = trained_with(name)
    for layer, group in COLUMNS.items():
        weight, old = model[int(layer)].weight.detach(), before["parameters"][f"{layer}.weight"]
        live = torch.ones_like(weight, dtype=torch.bool)
        live[:, cbp.last_resets[group]] = False
        if layer in ROWS:
            live[cbp.last_resets[ROWS[layer]]] = False
        assert torch.equal(weight[live], old[live])  # live rows and columns: not a bit moves
        assert old[:, cbp.last_resets[group]].all()
    cbp.close()
    for step in range(4):
        for layer, group in COLUMNS.items():
            assert not model[int(layer)].weight[:, cbp.last_resets[group]].any(), f"after {step} steps without gradient"
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()


@pytest.mark.parametrize("name", ["adam", "adam_foreach", "adam_fused", "amsgrad"])
@pytest.mark.parametrize("policy", ["keep", "reset"])
def test_the_step_of_adam_follows_the_policy(name: str, policy: str):
    model, optimizer, _, _ = trained_with(name, step_policy=policy)
    steps = {parameter: int(optimizer.state[p]["step"]) for parameter, p in model.named_parameters()}
    touched = 6 if policy == "keep" else 0
    assert steps == {**dict.fromkeys(steps, touched), "4.bias": 6}  # the output bias belongs to no unit


def test_optimizer_state_of_unknown_shape_is_refused():
    with pytest.raises(gxd.PlanError, match="SGD keeps 'sketch'"):
        trained_with("strange")


@pytest.mark.parametrize("score_every", [1, 3])
def test_a_step_that_raised_and_was_caught_does_not_end_the_count(score_every: int):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    cbp = attach(model, optimizer, score_every=score_every, maturity=100)
    fails = []

    def failing(*_: Any) -> None:  # after gxd's own, as when memory runs out for the optimizer's state
        if fails:
            raise RuntimeError("out of memory")

    optimizer.register_step_pre_hook(failing)
    for step, batch in enumerate(batches(9)):
        fails[:] = [True] * (step in (1, 5))
        with suppress(RuntimeError):
            train(model, optimizer, cbp, [batch])
    assert {int(age) for ages in cbp.ages().values() for age in ages} == {7}


@pytest.mark.parametrize("score_every", [1, 3])
def test_an_optimizer_that_calls_the_step_of_its_parent_takes_one_step(score_every: int):
    model = mlp()
    optimizer = Nested(model.parameters(), 0.1)
    cbp = attach(model, optimizer, score_every=score_every, maturity=100)
    train(model, optimizer, cbp, batches(6))
    assert {int(age) for ages in cbp.ages().values() for age in ages} == {6}


def test_factored_state_of_a_depthwise_convolution_is_cleared():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Conv2d(6, 6, 3, groups=6), nn.Tanh(), nn.Conv2d(6, 2, 1)]
    model, x = nn.Sequential(*layers), torch.randn(2, 3, 8, 8)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(x).square().mean().backward()
    optimizer.step()
    gxd.reset_units(model, gxd.find_units(model, x), {"0": [0], "2": [1, 4]}, optimizer=optimizer)
    for key in ("row_var", "col_var"):  # (6, 1, 3, 1) and (6, 1, 1, 3)
        state = optimizer.state[model[2].weight][key]
        assert not state[[0, 1, 4]].any()
        assert state[[2, 3, 5]].all()


@pytest.mark.parametrize("first", ["scheduler", "gxd"])
def test_a_learning_rate_scheduler_does_not_lose_the_hook(first: str):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    make = lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)
    if first == "scheduler":
        scheduler, cbp = make(), attach(model, optimizer)
    else:
        cbp, scheduler = attach(model, optimizer), make()
    for batch in batches(12):
        train(model, optimizer, cbp, [batch])
        scheduler.step()
    _, _, plain = attached()
    train(plain.model, plain.optimizer, plain, batches(12))
    assert repr(cbp).split("step=")[1] == repr(plain).split("step=")[1]
    assert cbp.total_resets == plain.total_resets > 0


def test_a_closure_given_to_step_is_observed_like_any_other_step():
    (model, optimizer, cbp), (_, _, plain) = attached(), attached()
    for x, y in batches(8):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            logits = model(x)
            cbp.observe(logits, y)
            loss = F.cross_entropy(logits, y)
            loss.backward()
            return loss

        optimizer.step(closure)
    train(plain.model, plain.optimizer, plain, batches(8))
    assert same(cbp.state_dict(), plain.state_dict())
    assert same(model.state_dict(), plain.model.state_dict())
    assert cbp.total_resets > 0


# ---- accumulation, and several forwards per step


def hidden(model: nn.Sequential, x: Tensor) -> dict[str, Tensor]:
    first = model[1](model[0](x))
    return {"0": first, "2": model[3](model[2](first))}


def test_accumulated_references_are_the_mean_over_both_micro_batches():
    model, optimizer, cbp = attached()
    (x1, y1), (x2, y2) = batches(1, 5)[0], batches(1, 3)[0]
    with torch.no_grad():
        h = hidden(model, torch.cat([x1, x2]))
    for x, y in ((x1, y1), (x2, y2)):
        logits = model(x)
        cbp.observe(logits, y)
        (F.cross_entropy(logits, y) / 2).backward()
        assert {int(age) for ages in cbp.ages().values() for age in ages} == {0}
    optimizer.step()
    assert close(cbp.references(), {name: value.mean(0) for name, value in h.items()}, 1e-6)
    assert {int(age) for ages in cbp.ages().values() for age in ages} == {1}


def test_an_accumulated_score_is_the_mean_over_examples_with_the_reference_so_far():
    model, optimizer, cbp = attached(utility="gxd")
    parts, total, seen = [batches(1, 5)[0], batches(1, 3)[0]], torch.zeros(6), []
    for x, y in parts:
        logits = model(x)
        cbp.observe(logits, y)
        h = hidden(model, x)["2"].detach()[:, None]
        seen.append(h)
        gradient = model[4].weight.detach()[y][:, None]  # dz_y/dh of the last hidden layer
        scores = naive_scores("gxd", [View(h, gradient, torch.cat(seen).mean((0, 1)))])
        total += torch.tensor(scores) * len(x)
        F.cross_entropy(logits, y).backward()
    optimizer.step()
    torch.testing.assert_close(cbp.utilities()["2"], total / 8, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("utility", KINDS)
def test_accumulation_resets_as_many_units_as_whole_batches(utility: str):
    (model, optimizer, cbp), (_, _, plain) = attached(utility=utility), attached(utility=utility)
    data = batches(20)
    train(plain.model, plain.optimizer, plain, data)
    for x, y in data:
        for part in (slice(0, 6), slice(6, 8)):
            logits = model(x[part])
            cbp.observe(logits, y[part])
            (F.cross_entropy(logits, y[part], reduction="sum") / 8).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert cbp.total_resets == plain.total_resets > 10


def test_forwards_may_be_observed_in_any_order_and_one_never():
    (a, b, c), whole = batches(3, 4), torch.cat
    (model, optimizer, cbp), (_, _, plain) = attached(utility="gxi"), attached(utility="gxi")
    z_a, z_c, z_b = model(a[0]), model(c[0]), model(b[0])  # c is never observed
    cbp.observe(z_b, b[1])
    cbp.observe(z_a, a[1])
    (F.cross_entropy(z_a, a[1]) + F.cross_entropy(z_b, b[1]) + 0 * z_c.sum()).div(2).backward()
    optimizer.step()
    train(plain.model, plain.optimizer, plain, [(whole([a[0], b[0]]), whole([a[1], b[1]]))])
    assert close(cbp.references(), plain.references())
    assert close(cbp.utilities(), plain.utilities())


def test_the_order_of_forwards_does_not_matter_only_that_of_observations():
    (a, b), states = batches(2, 4), []
    for interleaved in (True, False):
        model, optimizer, cbp = attached(utility="gxd")
        if interleaved:
            z_a, z_b = model(a[0]), model(b[0])
            cbp.observe(z_b, b[1])
        else:
            z_b = model(b[0])
            cbp.observe(z_b, b[1])
            z_a = model(a[0])
        cbp.observe(z_a, a[1])
        (z_a + z_b).sum().backward()
        optimizer.step()
        states.append(cbp.state_dict())
    assert same(*states)


# ---- evaluation in between


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    model.eval()
    yield
    model.train()


MODES = {"eval": evaluation, "no_grad": lambda _: torch.no_grad(), "inference": lambda _: torch.inference_mode()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("utility", KINDS)
def test_an_evaluation_between_steps_leaves_no_trace(utility: str, mode: str):
    runs = []
    for inner in (MODES[mode], None):
        model, optimizer, cbp = attached(utility=utility)

        def peek(inner=inner, model=model) -> None:
            with inner(model) if inner else nullcontext():
                if inner:
                    model(torch.full((3, 4), 7.0))

        for x, y in batches(6):
            peek()
            logits = model(x)
            peek()
            cbp.observe(logits, y)
            peek()
            F.cross_entropy(logits, y).backward()
            peek()
            optimizer.step()
            optimizer.zero_grad()
        runs.append((cbp.state_dict(), model.state_dict()))
        assert cbp.total_resets > 0
    assert same(*runs)

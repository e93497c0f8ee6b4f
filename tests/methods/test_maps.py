"""What all maps and penalties have in common: the models that they train, their precision, and tied parameters."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gxd
from gxd.checkpoint import mapped
from gxd.testing.laws import tensors
from tests import models
from tests.rig import same

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "l2": ("l2", {"strength": 0.1}),
    "l2_init": ("l2_init", {"strength": 0.1}),
    "l2_init wasserstein": ("l2_init", {"strength": 0.1, "norm": "wasserstein"}),
    "l2_init redrawn": ("l2_init", {"strength": 0.1, "norm": "huber", "anchor": "redrawn"}),
    "spectral": ("spectral", {"strength": 0.01}),
    "parseval": ("parseval", {"strength": 0.01}),
    "nap": ("nap", {}),
    "nap project": ("nap", {"affine": "project"}),
    "weight_clipping": ("weight_clipping", {"zeta": 2.0}),
    "kumar": ("shrink_and_perturb", {"variant": "kumar"}),
    "lop": ("shrink_and_perturb", {"variant": "lop"}),
    "ash_adams": ("shrink_and_perturb", {}),
}
ALL = pytest.mark.parametrize("label", list(METHODS))


def method(label: str) -> gxd.Method:
    name, options = METHODS[label]
    return gxd.method(name, **options)


def run(model: nn.Module, attachment: gxd.Attachment, x: torch.Tensor, y: torch.Tensor, steps: int) -> float:
    """The loss of the last step."""
    optimizer: Any = attachment.optimizer
    for number in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        if number == 2:
            attachment.boundary()
    return loss.item()


def batch(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    build, shape, _ = models.MODELS[name]
    return build().to(dtype), torch.randn(16, *shape).to(dtype), torch.arange(16) % 4


@ALL
@pytest.mark.parametrize("name", ["resnet", "transformer"])
def test_a_residual_net_with_batch_norm_and_a_transformer_learn_with_it(name: str, label: str):
    model, x, y = batch(name)
    attachment = gxd.attach(model, torch.optim.Adam(model.parameters(), 1e-2), method(label))
    first = run(model, attachment, x, y, 1)
    assert run(model, attachment, x, y, 40) < 0.9 * first
    assert all(p.isfinite().all() for p in model.parameters())


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_is_kept_and_what_is_summed_up_is_not_in_it(dtype: torch.dtype, label: str):
    model, x, y = batch("mlp_layer_norm", dtype)
    attachment = gxd.attach(model, torch.optim.SGD(model.parameters(), 0.05), method(label))
    before = copy.deepcopy(model.state_dict())
    run(model, attachment, x, y, 4)
    for name, p in model.named_parameters():
        assert p.dtype == dtype and p.isfinite().all() and not torch.equal(p, before[name]), name
    if METHODS[label][0] in ("spectral", "nap"):
        assert {t.dtype for t in tensors(attachment._parts[0].state)} == {torch.float32}


def test_a_spectral_norm_in_half_precision_is_that_of_single_precision():
    torch.manual_seed(0)
    half = nn.Linear(60, 50).to(torch.bfloat16)
    tops = []
    for model in (half, copy.deepcopy(half).float()):
        attachment = gxd.attach(model, torch.optim.SGD(model.parameters(), 0.1), gxd.method("spectral"))
        tops.append(attachment._parts[0].state["weight"])
    assert same(*tops)


@pytest.mark.parametrize("label", ["l2", "l2_init", "lop"])
def test_a_tied_parameter_is_treated_once(label: str):
    """Tied or not, the weight goes where one treatment takes it."""
    ends = []
    for tied in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False))
        start = model[0].weight.detach().clone()
        if tied:
            model[1].weight = model[0].weight
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        gxd.attach(model, optimizer, method(label))
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(start + 1.0)
                p.grad = torch.zeros_like(p)
        optimizer.step()
        ends.append(model[0].weight.detach())
    assert same(*ends)


@ALL
def test_a_model_on_the_meta_device_is_not_computed_on(label: str):
    """There are no values, but nothing that would ask for one is asked."""
    with torch.device("meta"):
        model = models.Mlp(norm=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    attachment = gxd.attach(model, optimizer, method(label))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    attachment.boundary()
    devices: set[str] = set()
    mapped(attachment._parts[0].state, lambda tensor: devices.add(tensor.device.type) or tensor)
    assert devices <= {"meta"}


@ALL
def test_weights_of_zero_do_no_harm(label: str):
    model, x, y = batch("mlp_layer_norm")
    for layer in (model.fc2, model.head):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    attachment = gxd.attach(model, torch.optim.SGD(model.parameters(), 0.05), method(label))
    run(model, attachment, x, y, 5)
    assert all(p.isfinite().all() for p in model.parameters())

"""What holds for all frameworks: one that is missing or too old, optimizers as they wrap them, lazy imports."""

import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gxd
import gxd.integrations
from gxd.integrations.base import required
from tests.processes import run_script
from tests.rig import X, Y, mlp, plan_of, same

PACKAGES = {
    "lightning": ("lightning", "lightning"),
    "transformers": ("transformers", "transformers"),
    "stable_baselines3": ("stable-baselines3", "stable-baselines3"),
    "avalanche": ("avalanche-lib", "avalanche"),
}


def found(monkeypatch: pytest.MonkeyPatch, package: str, installed: str | None) -> None:
    version = metadata.version

    def look(name: str) -> str:
        if name != package:
            return version(name)
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(metadata, "version", look)


def not_imported(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delitem(sys.modules, f"gxd.integrations.{name}", raising=False)
    monkeypatch.delitem(vars(gxd.integrations), name, raising=False)


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize(("installed", "words"), [(None, "is not installed"), ("0.1.2", "0.1.2 is installed")])
def test_a_framework_that_is_missing_or_too_old_is_said_with_the_extra(
    monkeypatch: pytest.MonkeyPatch, name: str, installed: str | None, words: str
):
    package, extra = PACKAGES[name]
    found(monkeypatch, package, installed)
    not_imported(monkeypatch, name)
    with pytest.raises(ImportError, match=words) as caught:
        getattr(gxd.integrations, name)
    assert f"gxd[{extra}]" in str(caught.value) and f"gxd.integrations.{name}" in str(caught.value)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_that_is_there_but_cannot_be_imported_is_said_with_the_extra(
    monkeypatch: pytest.MonkeyPatch, name: str
):
    package, extra = PACKAGES[name]
    found(monkeypatch, package, "99.0")
    not_imported(monkeypatch, name)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"needs {package}, which is not installed: pip install 'gxd\[{extra}\]'"):
        getattr(gxd.integrations, name)


def test_what_a_framework_itself_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "half_there.py").write_text("import nowhere_to_be_found")
    monkeypatch.syspath_prepend(tmp_path)
    found(monkeypatch, "half-there", "2.2")
    with pytest.raises(ImportError, match="needs nowhere_to_be_found, which is not installed"):
        required("half-there", "2.2", "some")


def test_transformers_without_accelerate_says_so(monkeypatch: pytest.MonkeyPatch):
    found(monkeypatch, "accelerate", None)
    not_imported(monkeypatch, "transformers")
    with pytest.raises(ImportError, match=r"needs accelerate, which is not installed.*gxd\[transformers\]"):
        gxd.integrations.transformers  # noqa: B018


@pytest.mark.parametrize(("version", "fine"), [("2.2", True), ("2.10.0rc1", True), ("3.0", True), ("2.1.9", False)])
def test_versions_are_compared_as_numbers(monkeypatch: pytest.MonkeyPatch, version: str, fine: bool):
    found(monkeypatch, "some", version)
    if fine:
        required("some", "2.2", "some", module="torch")
    else:
        with pytest.raises(ImportError, match=r"needs some 2.2 or later"):
            required("some", "2.2", "some", module="torch")


def test_no_framework_is_imported_before_it_is_asked_for(tmp_path: Path):
    look = """
        import sys, gxd.integrations
        sys.exit(len({"lightning", "transformers", "gymnasium", "stable_baselines3"} & set(sys.modules)))
    """
    assert run_script(look, tmp_path)[0] == 0


def test_an_unknown_framework_is_an_attribute_error_that_names_the_known():
    with pytest.raises(AttributeError, match="avalanche, lightning"):
        gxd.integrations.keras  # noqa: B018


# --- optimizers as frameworks wrap them -------------------------------------------------------------------------------


def wrapped(kind: str, model: Any, optimizer: Any) -> tuple[Any, Any]:
    if kind == "accelerate":
        accelerate = pytest.importorskip("accelerate")
        return accelerate.Accelerator(cpu=True).prepare(model, optimizer)
    if kind == "fabric":
        fabric = pytest.importorskip("lightning.fabric")
        return fabric.Fabric(accelerator="cpu", devices=1).setup(model, optimizer)
    module = pytest.importorskip("lightning.pytorch.core.optimizer")
    made = module.LightningOptimizer(optimizer)
    made._strategy = type("Strategy", (), {"optimizer_step": lambda self, o, closure, **_: o.step(closure)})()
    return model, made


@pytest.mark.parametrize("kind", ["accelerate", "fabric", "lightning"])
@pytest.mark.parametrize("name", ["gxd", "continual_backprop"])
def test_a_wrapped_optimizer_trains_as_the_one_inside(kind: str, name: str):
    def train(wrap: bool) -> Any:
        model = mlp()
        inside = torch.optim.Adam(model.parameters(), 0.01)
        called, optimizer = wrapped(kind, model, inside) if wrap else (model, inside)
        method = gxd.method(name, maturity=1, replacement_rate=0.1)
        cbp = gxd.attach(model, optimizer, method, plan=plan_of())
        if name != "gxd":
            cbp.observe_output(target=lambda *_: Y)
        for _ in range(8):
            optimizer.zero_grad()
            F.cross_entropy(called(X), Y).backward()
            optimizer.step()
        assert cbp.total_resets > 4
        return model.state_dict(), inside.state_dict(), cbp.state_dict()

    assert same(train(True), train(False))

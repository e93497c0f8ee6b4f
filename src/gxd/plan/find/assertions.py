"""Forward passes that look at values: assertions and logs can be traced, branches cannot."""

from __future__ import annotations

import ast
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gxd.plan.find.marks import mark_kept, node_of

# Where torch itself hands a question about a value on; its other files ask them, as distributions do of arguments.
_MACHINERY = tuple(
    os.path.join(os.path.dirname(torch.__file__), name)
    for name in (
        *("_compile.py", "_dynamo", "_export", "_functorch", "_ops.py", "_subclasses", "_tensor.py"),
        *("export", "fx", "overrides.py", "utils"),
    )
)


class BranchOnValues(RuntimeError):
    """The forward takes another path for other values."""


@contextmanager
def values_known(model: nn.Module) -> Iterator[None]:
    """Within this context, tensors of a trace carry their values, and the forward may ask for them: if nothing but an
    error or a message depends on the answer.
    """
    real = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}

    def fill(module: nn.Module, args: Any) -> None:
        """torch leaves the values of parameters, as it leaves those of every subclass of a tensor, as memory has
        them.
        """
        fakes = dict(model.named_parameters(remove_duplicate=False))
        with _plain():
            for name, parameter in real.items():
                if isinstance(value := getattr(fakes[name], "real_tensor", None), Tensor):
                    value.copy_(parameter)

    handle = model.register_forward_pre_hook(fill, prepend=True)
    try:
        with torch._functorch.config.patch(fake_tensor_propagate_real_tensors=True), _Answer():
            yield
    finally:
        handle.remove()


@contextmanager
def _plain() -> Iterator[None]:
    """Outside of all that watches a trace."""
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        yield


class _Answer(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        value = getattr(args[0], "real_tensor", None) if func in _QUESTIONS else None
        if isinstance(value, Tensor) and (func in _YES_OR_NO or value.is_floating_point()):
            with _plain():
                number = value.item()
            if func in _YES_OR_NO:
                _insist_on_assertion()
                return bool(number)
            if func is Tensor.item:
                return Number(number, [node_of(args[0])])
            if not is_report(*_asked_at()):  # float(tensor) makes a plain number, which is lost from sight
                mark_kept([node_of(args[0])])
            return number
        for one in (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Number)):
            mark_kept(one.nodes)  # a number that was read off a tensor goes back into the computation
        args, kwargs = tree_map_only(Number, float, (args, kwargs or {}))
        return func(*args, **kwargs)


_YES_OR_NO = (Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero)
_QUESTIONS = (*_YES_OR_NO, Tensor.item, Tensor.__float__)


class Number(float):
    """A number that was read off tensors of a trace, and knows their nodes. It may be reported, not decide."""

    nodes: Sequence[fx.Node | None]

    def __new__(cls, value: float, nodes: Sequence[fx.Node | None]) -> Number:
        one = super().__new__(cls, value)
        one.nodes = nodes
        return one


def _computes(name: str) -> Callable[..., Any]:
    def compute(self: Number, *others: Any) -> Any:
        result = getattr(float, name)(self, *others)
        nodes = [node for one in (self, *others) if isinstance(one, Number) for node in one.nodes]
        return Number(result, nodes) if isinstance(result, float) else result

    return compute


def _decides(name: str) -> Callable[..., Any]:
    def decide(self: Number, *others: Any) -> Any:
        _insist_on_assertion()
        return getattr(float, name)(self, *others)

    return decide


for _name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow"]:
    setattr(Number, f"__{_name}__", _computes(f"__{_name}__"))
    setattr(Number, f"__r{_name}__", _computes(f"__r{_name}__"))
for _name in ["neg", "pos", "abs"]:
    setattr(Number, f"__{_name}__", _computes(f"__{_name}__"))
for _name in ["lt", "le", "gt", "ge", "eq", "ne", "bool", "int", "round", "trunc", "floor", "ceil", "hash"]:
    setattr(Number, f"__{_name}__", _decides(f"__{_name}__"))


def _insist_on_assertion() -> None:
    filename, line = _asked_at()
    if not is_assertion(filename, line):
        raise BranchOnValues(f"the path of the forward pass is data-dependent ({filename}:{line})")


def _asked_at() -> tuple[str, int]:
    """The file and the line that ask for a value."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((__file__, *_MACHINERY)):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def is_assertion(filename: str, line: int) -> bool:
    """Whether the statement at a line of a file is an ``assert``, or an ``if`` that only raises or reports."""
    statement = _statement(filename, line)
    if isinstance(statement, ast.Assert):
        return True
    if not isinstance(statement, ast.If) or line > (statement.test.end_lineno or 0):
        return False
    return all(map(_only_reports, (*statement.body, *statement.orelse)))


def is_report(filename: str, line: int) -> bool:
    """Whether the statement at a line of a file only tells somebody: ``print``, ``warnings.warn``, a logger, a list."""
    statement = _statement(filename, line)
    return statement is not None and _only_reports(statement)


@lru_cache(maxsize=1024)
def _statement(filename: str, line: int) -> ast.stmt | None:
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return None
    around = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and n.lineno <= line <= (n.end_lineno or 0)]
    return max(around, key=lambda n: (n.lineno, -(n.end_lineno or 0)), default=None)


def _only_reports(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        return (function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")) in _REPORTS
    return isinstance(statement, (ast.Raise, ast.Pass, ast.Assert))


_REPORTS = {"print", "warn", "warning", "warning_once", "info", "debug", "error", "exception", "log", "log_dict"}
_REPORTS |= {"add_scalar", "append"}

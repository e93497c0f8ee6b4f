"""All of ATen, called with arguments made from the schemas: what each op does with numbers, whatever it is called."""

import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

SHAPE = (3, 4)  # examples, units
PROBES = [(0, 3), (2, 1)]  # elements that are changed to see what depends on them
_PLAIN = {"number": 0.5, "float": 0.5, "int": 1, "bool": False, "str": "floor", "List[int]": [1]}


def overloads() -> Iterator[Any]:
    """Every public op that returns a result of its own, or writes to its first operand; no backward passes."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        name, _, overload = name.removeprefix("aten::").partition(".")
        packet = getattr(torch.ops.aten, name, None)
        if packet is None or "_backward" in name or (name.startswith("_") and not name.startswith("__")):
            continue
        op = getattr(packet, overload or "default", None)
        if op is not None and not iskeyword(overload) and not any(a.is_out for a in op._schema.arguments):
            yield op


def tensor_of(kind: str, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    values = torch.rand(SHAPE, generator=generator)
    if kind == "bool":
        return values > 0.5
    return values * 0.8 + 0.1 if kind == "float" else (3 * values).long()


@dataclass(frozen=True)
class Call:
    """An op with arguments that it takes: a kind of tensor for each operand, a plain value for the rest."""

    op: Any
    kinds: tuple[str, ...]
    rest: dict[str, Any]

    def __str__(self) -> str:
        return str(self.op).removeprefix("aten.")

    @cached_property
    def operands(self) -> list[Tensor]:
        return [tensor_of(kind, number) for number, kind in enumerate(self.kinds)]

    def __call__(self, *operands: Tensor) -> Tensor:
        """The first result. A random op draws the same numbers every time."""
        left, args, kwargs = iter(operands), [], {}
        for place, argument in enumerate(self.op._schema.arguments):
            if str(argument.type) == "Tensor":
                value = next(left)
            elif argument.name in self.rest:
                value = self.rest[argument.name]
            else:
                continue  # left at its default: what follows is given by name
            if argument.kwarg_only or place > len(args):
                kwargs[argument.name] = value
            else:
                args.append(value)
        result = self.op(*args, **kwargs)
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        if not isinstance(first, Tensor) or first.layout != torch.strided or first.is_quantized:
            raise TypeError("no plain tensor")
        return first

    @property
    def writes(self) -> bool:
        """Whether it writes to an operand."""
        return any(a.alias_info is not None and a.alias_info.is_write for a in self.op._schema.arguments)

    def takes_units(self, place: int) -> bool:
        """Whether an operand may come from a layer in training, and the op can be traced then."""
        try:
            for mode in (nullcontext(), FakeTensorMode(allow_non_fake_inputs=True)):
                with mode:
                    operands = [operand.clone() for operand in self.operands]
                    operands[place] = 1.0 * operands[place].requires_grad_()
                    self(*operands)
        except Exception:
            return False
        return True

    def run(self, *operands: Tensor) -> Tensor:
        torch.manual_seed(0)
        return self(*(operand.clone() for operand in operands)).detach().clone()

    @cached_property
    def reach(self) -> list[Tensor] | None:
        """For each operand, which elements of the result the elements (0, 3) and (2, 1) have a say in; None where the
        result has another shape.
        """
        before, found = self.run(*self.operands), []
        if before.shape != SHAPE:
            return None
        for number, kind in enumerate(self.kinds):
            reached = torch.zeros(2, *SHAPE, dtype=torch.bool)
            for which, step in itertools.product((0, 1), (0.37, -5.0) if kind == "float" else (1,)):
                operands = [operand.clone() for operand in self.operands]
                old = operands[number][PROBES[which]]
                operands[number][PROBES[which]] = ~old if kind == "bool" else old + step
                try:
                    reached[which] |= _differ(before, self.run(*operands))
                except (RuntimeError, IndexError):
                    continue  # a value that the op does not take
            found.append(reached)
        return found

    @property
    def is_pointwise(self) -> bool:
        """Whether an element of any operand has a say in the same element of the result alone."""
        own = torch.zeros(2, *SHAPE, dtype=torch.bool)
        own[0][PROBES[0]] = own[1][PROBES[1]] = True
        return self.reach is not None and not any((reached & ~own).any() for reached in self.reach)

    def reads(self, place: int) -> bool:
        """Whether the result depends on an operand at all: not, if it is overwritten or only gives its shape."""
        return self.reach is not None and bool(self.reach[place].any())


def _differ(one: Tensor, other: Tensor) -> Tensor:
    return ~((one == other) | ((one != one) & (other != other)))


def calls() -> list[Call]:
    """Every op that can be called with up to three tensors, of which one is of floats.

    They are tried in a process of their own: some ops take it down when they are given what they do not expect. The one
    that did so is left out, and the rest tried in another.
    """
    ops, kinds = {str(op): op for op in overloads()}, {}
    left = list(ops)
    while left:
        run = subprocess.run(
            [sys.executable, "-m", __name__, left[0]],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        lines = [line.split() for line in run.stdout.splitlines()]
        kinds |= {name: tuple(rest) for name, *rest in lines if rest}
        left = left[left.index(lines[-1][0]) + 1 :]
    return [Call(ops[name], found, _rest(ops[name])) for name, found in kinds.items()]


def _rest(op: Any) -> dict[str, Any]:
    """Plain values for the arguments that are no tensors and have no default."""
    arguments = [a for a in op._schema.arguments if str(a.type) != "Tensor" and not a.has_default_value()]
    return {a.name: None if str(a.type).startswith("Optional") else _PLAIN[str(a.type)] for a in arguments}


def _kinds(op: Any) -> tuple[str, ...]:
    """The first kinds of tensors that an op takes; none if it takes none."""
    count = sum(str(argument.type) == "Tensor" for argument in op._schema.arguments)
    for kinds in itertools.product(("float", "bool", "int"), repeat=count) if 0 < count < 4 else ():
        if "float" in kinds:
            try:
                call = Call(op, kinds, _rest(op))
                call.run(*call.operands)
            except Exception:  # ops refuse in many ways what they cannot take
                continue
            return kinds
    return ()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for one in itertools.dropwhile(lambda op: str(op) != sys.argv[1], overloads()):
        print(one, end=" ", flush=True)
        print(*_kinds(one), flush=True)

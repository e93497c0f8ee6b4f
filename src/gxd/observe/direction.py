"""Which change of the output counts: the target logit, every logit, a random mixture of logits, the log-probability of
a random label, or a score of the user's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gxd.errors import ObservationError

IGNORED = -100  # as in F.cross_entropy
MOST_ROWS = 1024  # of an identity matrix that is kept: its rows are one-hot vectors
RANDOM = ("sketch", "kl")  # gradients that draw random numbers

Draw = Callable[[Tensor], Tensor]


class Direction(NamedTuple):
    """An output and the cotangents to pull back through it, one at a time.

    Attributes:
        output: ``(batch, ...)``.
        cotangents: yields tensors of the output's shape.
        examples: the number of examples in the output.
        several: whether there is more than one cotangent.
        probabilities: whether the target has to lie in [0, 1], see :func:`check_probabilities`.
    """

    output: Tensor
    cotangents: Callable[[], Iterator[Tensor]]
    examples: int
    several: bool = False
    probabilities: bool = False

    def stacked(self) -> Tensor:
        """All cotangents in one tensor, ``(directions, *output.shape)``."""
        return torch.stack(list(self.cotangents()))


def direction_of(
    gradient: str | None,
    logits: Tensor | None,
    target: Tensor | None,
    score: Tensor | None,
    draw: Draw,
    class_dim: int | None = None,
    ignored: int = IGNORED,
    traced: bool = False,
) -> Direction:
    """The direction a utility asks for, from what the user gave.

    Args:
        gradient: the utility's.
        logits, target, score, class_dim: as for :meth:`gxd.ContinualBackprop.observe`.
        draw: random numbers for a tensor like the given one, see :func:`noise`.
        ignored: the class that does not count.
        traced: the values are not to be looked at.
    """
    if score is not None:
        if logits is not None or target is not None:
            raise ValueError("observe(score=...) takes the place of logits and target: give one or the other")
        _check_output(score, "score")
        return Direction(score, lambda: iter([torch.ones_like(score)]), score.shape[0] if score.dim() else 1)
    if logits is None:
        raise ValueError("observe() needs logits (and for 'gxd' and 'gxi' the target), or score=...")
    _check_output(logits, "logits")
    if logits.dim() < 2:
        raise ValueError(
            f"observe(): logits have shape {tuple(logits.shape)}, expected (batch, classes); of a binary problem "
            "(batch, 1), as logits.unsqueeze(1) is; for any other single output use observe(score=...)"
        )
    if gradient == "sketch":
        mixture = draw(logits)
        return Direction(logits, lambda: iter([mixture]), logits.shape[0])
    if gradient in ("all", "kl"):
        dim = class_axis(logits, None if target is None else _checked_target(target), class_dim)
        if gradient == "kl":
            away = _of_own_label(logits.detach(), dim, draw(logits.select(dim, 0)).unsqueeze(dim))
            return Direction(logits, lambda: iter([away]), logits.shape[0])
        return Direction(logits, lambda: _each_class(logits, dim), logits.shape[0], several=logits.shape[dim] > 1)
    if target is None:
        raise ValueError("observe(logits, target): this utility needs the target classes; or give observe(score=...)")
    cotangent, probabilities = _of_target(logits, target, class_dim, ignored, traced)
    return Direction(logits, lambda: iter([cotangent]), logits.shape[0], probabilities=probabilities)


def noise(gradient: str | None, generator: torch.Generator) -> Draw:
    """What a direction is drawn with, on the host so that it is the same on every device: +1 or -1 (``sketch``), or a
    number in [0, 1) (``kl``), for every entry.
    """
    if gradient == "kl":  # in single precision also for a model in half: 256 different numbers are too few
        return lambda like: torch.rand(like.shape, generator=generator).to(like.device)
    signs = lambda like: torch.randint(0, 2, like.shape, generator=generator, dtype=torch.int8)  # noqa: E731
    return lambda like: signs(like).mul_(2).sub_(1).to(like)


def _check_output(output: Tensor, name: str) -> None:
    if not isinstance(output, Tensor):
        raise TypeError(
            f"observe(): {name} must be a tensor, got {type(output).__name__}; a model output object has .logits"
        )
    if not output.is_floating_point():
        raise TypeError(f"observe(): {name} must be floating point, got {output.dtype}")
    if output.dim() and not output.shape[0]:
        raise ObservationError(f"observe(): the batch is empty, {name} has shape {tuple(output.shape)}: skip this step")
    if not output.requires_grad:
        raise ObservationError(
            f"observe(): {name} has no graph: it was computed under no_grad(), detached, or is not the model's output"
        )


def _checked_target(target: Tensor) -> Tensor:
    if not isinstance(target, Tensor):
        raise TypeError(f"observe(): target must be a tensor, got {type(target).__name__}")
    return target


def _of_target(
    logits: Tensor, target: Tensor, class_dim: int | None, ignored: int, traced: bool
) -> tuple[Tensor, bool]:
    """1 at the target class of every example (and position), or the class probabilities; and whether the target has to
    lie in [0, 1].
    """
    _checked_target(target)
    plain = target.dtype == torch.int64 and logits.dim() == 2 and target.shape == logits.shape[:1]
    if plain and ignored < 0 and not traced and target.device.type == "cpu" and 1 < logits.shape[1] <= MOST_ROWS:
        try:
            return _identity(logits.shape[1], logits.dtype, logits.device).index_select(0, target), False
        except (RuntimeError, IndexError):
            pass  # ignored ones, or a mistake: see below
    dim = class_axis(logits, target, class_dim)
    one_logit = logits.shape[dim] == 1
    if target.is_complex() or not (one_logit or _is_integer(target) or target.shape == logits.shape):
        raise TypeError(
            f"observe(): target has dtype {target.dtype}, expected integer class indices (or probabilities "
            "of the logits' shape "
            f"{tuple(logits.shape)}); for regression use observe(score=...)"
        )
    if one_logit:
        return _sign(logits, target.detach().reshape(logits.shape), ignored, traced), True
    if target.is_floating_point():
        return _marked(target.detach().to(logits.dtype), target, ignored, traced), True
    if target.shape == logits.shape:
        raise TypeError(
            f"observe(): target of shape {tuple(target.shape)} and dtype {target.dtype} is neither class indices "
            f"{(logits.shape[0], *logits.shape[2:])} nor probabilities, which are floating point: target.float()"
        )
    return _one_hot(logits, target, dim, ignored, traced), False


def _one_hot(logits: Tensor, target: Tensor, dim: int, ignored: int, traced: bool) -> Tensor:
    """1 at the target class, 0 where it is ignored."""
    index = target.detach().long().unsqueeze(dim)
    # Elsewhere an index out of range ends the process, so ignored ones must go first.
    if index.device.type == "cpu" and ignored < 0 and not traced:
        try:
            return torch.zeros_like(logits).scatter_(dim, index, 1.0)
        except RuntimeError:
            pass
    kept = index != ignored
    try:
        return torch.zeros_like(logits).scatter_(dim, index.where(kept, 0), kept.to(logits.dtype))
    except RuntimeError as error:
        low, high = int(target.min()), int(target.max())
        raise ValueError(
            f"observe(): target classes range from {low} to {high}, but there are {logits.shape[dim]} logits (0 to "
            f"{logits.shape[dim] - 1}), and {ignored} is ignored. If {low if low < 0 else high} is padding, say "
            f"ignore_index={low if low < 0 else high}, as of F.cross_entropy"
        ) from error


def _of_own_label(logits: Tensor, dim: int, u: Tensor) -> Tensor:
    """``onehot(y) - p``, the gradient of log p_y by the logits, with y drawn from p, the model's own prediction.

    Args:
        u: uniform in [0, 1), one for each label, with a class axis of length 1.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    if logits.shape[dim] == 1:  # the log-odds of a binary problem
        p = logits.to(wide).sigmoid()
        return ((u < p).to(wide) - p).to(logits.dtype)
    p = logits.softmax(dim, dtype=wide)
    label = (p.cumsum(dim) <= u).sum(dim, keepdim=True).clamp(max=logits.shape[dim] - 1)  # they may sum to less than 1
    return p.neg().scatter_add(dim, label, torch.ones_like(p)).to(logits.dtype)


def _sign(logits: Tensor, target: Tensor, ignored: int, traced: bool) -> Tensor:
    """For the single logit z of a binary problem: ``2 t - 1``, 0 where it is ignored.

    It is the two-class problem with the logits (-z / 2, z / 2), up to a factor: class 1 counts z, class 0 counts -z.
    """
    sign = 2 * target.to(logits.dtype) - 1
    sign = sign if target.is_floating_point() else sign.where(target != ignored, 0.0)
    return _marked(sign, target, ignored, traced)


def _marked(direction: Tensor, target: Tensor, ignored: int, traced: bool) -> Tensor:
    """The direction, if the target is in [0, 1]. Where a look at its values is impossible (in a trace), or would have
    to wait for the device, a wrong one makes the observation non-finite: it is left out, with a warning.
    """
    if traced or target.device.type != "cpu":
        return direction.where(_in_unit_interval(target, ignored), math.nan)
    check_probabilities(target, ignored)
    return direction


def check_probabilities(target: Tensor, ignored: int = IGNORED) -> None:
    """Raise ValueError unless a target on the CPU is in [0, 1], or ignored where it is of integers."""
    if target.device.type == "cpu" and not bool(_in_unit_interval(target, ignored).all()):
        low, high = target.min().item(), target.max().item()
        meant = (
            "class probabilities (all 0 where a position is masked), or the classes 0 and 1 of a single logit "
            f"({ignored} is ignored if it is an integer)"
        )
        raise ValueError(
            f"observe(): target ranges from {low:g} to {high:g}, expected values in [0, 1]: {meant}; for regression "
            "use observe(score=...)"
        )


def _in_unit_interval(target: Tensor, ignored: int) -> Tensor:
    if not target.is_floating_point():
        return (target == 0) | (target == 1) | (target == ignored)
    slack = 4 * torch.finfo(target.dtype).eps  # a mixture of two targets may round to a little more than 1
    return (target >= -slack) & (target <= 1 + slack)


def _is_integer(target: Tensor) -> bool:
    return not (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool)


@lru_cache(maxsize=8)
def _identity(classes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.eye(classes, dtype=dtype, device=device)


def class_axis(logits: Tensor, target: Tensor | None, given: int | None = None) -> int:
    """The axis of the classes: the one given, or the one that the shapes tell: the second as in ``F.cross_entropy``, or
    the last. Raises ValueError if they do not tell.
    """
    shape, last = tuple(logits.shape), logits.dim() - 1
    without = {dim: (*shape[:dim], *shape[dim + 1 :]) for dim in (1, last)}
    if given is not None:
        if not isinstance(given, int) or isinstance(given, bool) or given not in (1, -1, last):
            raise ValueError(
                f"class_dim={given!r} is not the second axis (1) or the last (-1) of logits of shape {shape}"
            )
        dim = given % logits.dim()
    elif last == 1:
        dim = 1
    elif target is None:
        raise ValueError(
            f"logits of shape {shape} may have their classes on the second axis or on the last: say class_dim=1 or "
            "class_dim=-1, or give a target of class indices, whose shape tells"
        )
    elif _is_open(shape, target):
        raise ValueError(
            f"logits of shape {shape} with a target of shape {tuple(target.shape)} may have their classes on the "
            "second axis or on the last: say class_dim=1 or class_dim=-1"
        )
    else:  # a target of the logits' shape has them on the second axis, as in F.cross_entropy
        dim = last if target.shape == without[last] else 1
    if target is not None and target.shape not in (without[dim], shape):
        raise ValueError(
            f"the target has shape {tuple(target.shape)}, which does not go with logits of shape {shape}; expected "
            f"{without[dim]}"
        )
    return dim


def _is_open(shape: tuple[int, ...], target: Tensor) -> bool:
    """Whether a target goes with classes on the second axis and, with another meaning, on the last."""
    if shape[1] == shape[-1] == 1:
        return False
    if target.shape == shape:  # probabilities of several classes, or one logit at several positions?
        return shape[-1] == 1 or (len(shape) == 3 and shape[1] == 1)
    return target.shape == (shape[0], *shape[2:]) == shape[:-1]


def _each_class(logits: Tensor, dim: int) -> Iterator[Tensor]:
    for index in range(logits.shape[dim]):
        cotangent = torch.zeros_like(logits)
        cotangent.select(dim, index).fill_(1.0)
        yield cotangent

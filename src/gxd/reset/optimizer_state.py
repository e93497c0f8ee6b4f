"""What is known of the state of optimizers: which of it remembers gradients, and which is a copy of the weights.

An optimizer keeps tensors by parameter and key. To reset slices of a parameter, one has to know what each key means:
a memory of gradients begins anew, a copy of the weights is written as the weights are. Names tell the two apart, not
values, so the table is strict: a key that is not in it is refused. docs/optimizers.md is this table for people.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gxd.sharded import local

GRADIENT, WEIGHTS, KEEP = KINDS = ("gradient", "weights", "keep")
COUNTER, REFUSED = "counter", "refused"


@dataclass(frozen=True)
class Known:
    """The meaning of a key.

    Attributes:
        kind: ``gradient``: a memory of gradients. ``weights``: a copy of the weights. ``keep``: nothing that a reset
            must change. ``counter``: a number for the whole parameter. ``refused``: a reset cannot be carried over.
        begin: what it is for a new parameter, or the option of the parameter group that says so.
        lacks: the axes one of which is summed over, and left out, in a factored memory of gradients.
        squared: whether it is an average of squared gradients, which steps are divided by the root of.
        flat: whether it is kept as ``(numel,)``, or as one number where all elements are equal.
        why: it is refused.
    """

    kind: str
    begin: float | str = 0.0
    lacks: tuple[int, ...] = ()
    squared: bool = False
    flat: bool = False
    why: str = ""


_TABLE: dict[str, dict[str, Known]] = {}  # key -> pattern of the optimizer's class ("*": any) -> meaning


def _enter(keys: str, known: Known, optimizers: str = "*") -> None:
    for key in keys.split():
        _TABLE.setdefault(key, {}).update(dict.fromkeys(optimizers.split(), known))


def register_optimizer_state(key: str, kind: str, optimizer: type | str | None = None) -> None:
    """Say what an optimizer of yours keeps under a key of its state, so that units can be reset.

    Args:
        key: of ``optimizer.state[parameter]``, or the name of an attribute of the optimizer that holds tensors.
        kind: ``gradient``: a memory of gradients that begins with 0; slices that are reset are set to 0. ``weights``: a
            copy of the weights; it is written as the weights are. ``keep``: it is left as it is.
        optimizer: the class, or its name, if the key means this there only.

    Example::

        gxd.register_optimizer_state("velocity", "gradient", optimizer=MyOptimizer)
    """
    if not isinstance(key, str) or not key:
        raise TypeError(f"key={key!r} must be a key of optimizer.state[parameter], a string")
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is not one of {KINDS}")
    name = optimizer.__name__ if isinstance(optimizer, type) else optimizer
    if name is not None and (not isinstance(name, str) or not name):
        raise TypeError(f"optimizer={optimizer!r} must be a class of optimizers, the name of one, or None for all")
    _TABLE.setdefault(key, {})[name or "*"] = Known(kind)
    meaning_of.cache_clear()


@lru_cache(maxsize=1024)
def meaning_of(key: str, classes: tuple[str, ...]) -> Known | None:
    """What a key means to an optimizer of these classes, the most derived first; None if that is not known."""
    entries = _TABLE.get(key)
    if entries is None:
        return None
    for name in classes if len(entries) > 1 or "*" not in entries else ():
        for pattern, known in entries.items():
            if pattern != "*" and fnmatchcase(name, pattern):
                return known
    return entries.get("*")


class NotUnderstood(Exception):
    """A reset cannot be carried over to a value of an optimizer's state. The message says why."""


class Memory(NamedTuple):
    """A value of an optimizer's state, understood.

    Attributes:
        tensor: the value with the axes of its parameter; None if it is one number for the whole parameter.
    """

    known: Known
    tensor: Tensor | None = None


KEPT = Memory(Known(KEEP))
_NUMBERS = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
_WHOLE = {torch.int32, torch.int64}


def understand(key: Any, value: Any, parameter: Tensor, classes: tuple[str, ...]) -> Memory:
    """What an optimizer keeps of a parameter under a key. Raises NotUnderstood where a reset would have to guess."""
    known = meaning_of(key, classes) if isinstance(key, str) else None
    if known is not None and known.kind == KEEP:
        return KEPT
    if not isinstance(value, Tensor):
        if not is_plain(value):
            raise NotUnderstood(known.why if known is not None and known.why else _why_not(value))
        return Memory(known) if known is not None and known.kind == COUNTER and value is not None else KEPT
    shape = parameter.shape
    if value.numel() == 1 and (known is None or known.kind == COUNTER or value.shape != shape):  # shared by all slices
        return Memory(known) if known is not None and (known.kind == COUNTER or known.flat) else KEPT
    if known is None or known.why or _is_coded(value, known):
        raise NotUnderstood(known.why if known is not None and known.why else _why_not(value))
    if known.kind == COUNTER:  # each element has its own, which begins anew with its slice as a memory does
        known = Known(GRADIENT, known.begin)
    seen = value if value.shape == shape else _with_axes_of(shape, value, known)
    if seen is None:
        raise NotUnderstood("it has not the shape of its parameter, so its slices are not the parameter's")
    return Memory(known, seen)


def _is_coded(value: Tensor, known: Known | None = None) -> bool:
    """Whether the elements of a tensor are something else than the numbers they stand for, or cannot be written."""
    value = local(value)
    plain = type(value) is Tensor or type(value) is nn.Parameter
    whole = known is not None and known.kind == COUNTER and value.dtype in _WHOLE
    return not plain or not (whole or value.dtype in _NUMBERS) or value.layout != torch.strided or value.is_meta


def _why_not(value: Any) -> str:
    if not isinstance(value, Tensor):
        return "it is no tensor and no number, and may hold anything"
    if _is_coded(value):
        return "its elements are codes (8-bit, quantised): to write 0 need not make it 0; keep it in 32 bits"
    return "gxd does not know whether it remembers gradients or is a copy of the weights"


def is_plain(value: Any) -> bool:
    """Whether it is a number, a word or the like, or a few of them: nothing that could be a copy of weights."""
    if value is None or isinstance(value, (Number, str, torch.dtype, torch.device)):
        return True
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return isinstance(value, (list, tuple)) and all(map(is_plain, value))


def _with_axes_of(shape: torch.Size, value: Tensor, known: Known) -> Tensor | None:
    """A view of the value whose axes are the parameter's, of size 1 where all slices share what it holds."""
    if known.kind == GRADIENT and value.dim() == len(shape):
        return value if all(a in (1, b) for a, b in zip(value.shape, shape, strict=True)) else None
    if known.flat and value.shape == (shape.numel(),):
        return value.view(shape)
    axes = {axis % len(shape) for axis in known.lacks if -len(shape) <= axis < len(shape)}
    fitting = [axis for axis in axes if value.shape == (*shape[:axis], *shape[axis + 1 :])]
    return value.unsqueeze(fitting[0]) if len(fitting) == 1 else None  # two: which of them is open


# --- the table --------------------------------------------------------------------------------------------------------

_ZERO, _SQUARED, _COPY = Known(GRADIENT), Known(GRADIENT, squared=True), Known(WEIGHTS)

# torch.optim
_enter("exp_avg", _ZERO)  # Adam, AdamW, NAdam, RAdam, Adamax; and most of the others
_enter("exp_avg_sq max_exp_avg_sq", _SQUARED)  # the same
_enter("exp_inf", _SQUARED)  # Adamax
_enter("momentum_buffer", _ZERO)  # SGD, RMSprop, Muon
_enter("square_avg", _SQUARED)  # RMSprop, Adadelta
_enter("grad_avg acc_delta", _ZERO)  # the same
_enter("row_var col_var variance", _ZERO)  # Adafactor
_enter("sum", Known(GRADIENT, "initial_accumulator_value"), "Adagrad")
_enter("prev", _ZERO, "Rprop")
_enter("step_size", Known(GRADIENT, "lr"), "Rprop")
_enter("ax", _COPY, "ASGD")
_enter("step", Known(COUNTER))
_enter("mu_product", Known(COUNTER, 1.0))  # NAdam
_enter("eta", Known(COUNTER, "lr"), "ASGD")
_enter("mu", Known(COUNTER, 1.0), "ASGD")

# Memories of gradients elsewhere
_enter("exp_avg_var max_exp_avg_var", _SQUARED)  # AdaBelief
_enter("exp_avg_diff neg_pre_grad pre_grad prev_grad previous_grad last_grad", _ZERO)  # Adan, diffGrad, MARS
_enter("exp_avg_slow", _ZERO)  # AdEMAMix
_enter("exp_avg_lr", _ZERO)  # AdaMod
_enter("hessian hessian_moment exp_hessian_diag_sq", _ZERO)  # Sophia, AdaHessian
_enter("momentum moments", _ZERO)  # SGDP, Sophia, NovoGrad
_enter("slow_momentum cached_mom", _ZERO)  # Lookahead
_enter("grad_ma neg_grad_ma variance_ma variance_ma_belief max_variance_ma", _ZERO)  # Ranger21
_enter("m v", _ZERO)  # Adan, Adam by other names
_enter("n", _ZERO, "Adan")
_enter("grad_sum_sq", _ZERO)  # MADGRAD
_enter("s", _ZERO, "MADGRAD DAdapt*")
_enter("s", Known(GRADIENT, flat=True), "Prodigy*")
_enter("state1 state2", _ZERO)  # bitsandbytes, where they are kept in 32 bits
_enter("kahan_comp compensation", _ZERO)  # what rounding to 16 bits has cut off
_enter("e_w", _ZERO)  # the step of SAM towards higher loss
_enter("exp_avg_sq_row exp_avg_res_row", Known(GRADIENT, lacks=(-1, 1)))  # Adafactor, CAME; some factor axes 0 and 1
_enter("exp_avg_sq_col exp_avg_res_col", Known(GRADIENT, lacks=(-2, 0)))
_enter("exp_avg_sq_r exp_avg_sq_c", _ZERO)  # Adafactor of Big Vision

# Memories that do not begin with 0: near it, they would make a step of any length
_enter("square_avg", Known(GRADIENT, 1.0), "RMSpropTF RMSPropTF")
_enter("exp_avg_sq", Known(KEEP), "ADOPT Adopt")  # begins with the square of the first gradient
_enter("exp_avg_sq", Known(REFUSED, why="each step projects the rows to a norm and a mean, zero columns too"), "Nero")

# Copies of the weights
_enter("slow_buffer slow_param slow_params slow_weights lookahead_slow_buff", _COPY)  # Lookahead, Ranger
_enter("cached_params lookahead_params la_param backup_params", _COPY)  # Lookahead, Ranger
_enter("z", _COPY, "*ScheduleFree* MirrorMADGRAD DAdaptSGD")
_enter("x y", _COPY, "*ScheduleFree*")
_enter("x0", _COPY)  # MADGRAD, D-Adaptation
_enter("p0", Known(WEIGHTS, flat=True))  # Prodigy
_enter("old_p", _COPY)  # SAM
_enter("momentum_buffer", _COPY, "AccSGD")
_enter("master_param master_params fp32_param", _COPY)  # in 32 bits, of 16-bit parameters

# Neither
_enter("name2qmap", Known(KEEP))  # bitsandbytes: what the 8-bit codes stand for

# Known, and refused
_CODES = "its states are 8-bit codes. Keep them in 32 bits (optim_bits=32, or the class without 8bit)"
_ROTATED = "its moments live in a basis that mixes the slices, so that no slice of them is one of the parameter's"
_enter("z n", Known(REFUSED, why="z and n determine the weight itself, and a step undoes the reset"), "FTRL Ftrl")
_enter("qmap1 qmap2 absmax1 absmax2 max1 max2 new_max1 new_max2", Known(REFUSED, why=_CODES))
_enter("projector ortho_matrix", Known(REFUSED, why=_ROTATED))  # GaLore
_enter("Q GG Q_cache", Known(REFUSED, why=_ROTATED))  # SOAP, PSGD
_enter("d al old_dirs old_stps prev_flat_grad", Known(REFUSED, why="L-BFGS mixes all parameters in its state"), "LBFGS")

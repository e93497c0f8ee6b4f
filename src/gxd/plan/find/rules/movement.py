"""Ops that only move data are executed on the labels themselves."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from gxd.plan.find.engine import Engine, base_name, flatten, op_name, rule, substitute, unknown
from gxd.plan.find.labels import CONST, STATISTIC, UNKNOWN, Value, regroup


@rule(
    """
    view reshape _unsafe_view view_as reshape_as flatten unflatten permute transpose t numpy_T mT mH
    movedim moveaxis swapaxes swapdims adjoint squeeze unsqueeze expand expand_as broadcast_to
    broadcast_tensors select slice narrow cat concat concatenate stack hstack vstack dstack column_stack
    split split_with_sizes tensor_split chunk unbind unsafe_chunk unsafe_split unsafe_split_with_sizes
    hsplit vsplit dsplit repeat tile repeat_interleave roll flip rot90 unfold im2col pixel_shuffle
    pixel_unshuffle channel_shuffle native_channel_shuffle index_select diagonal atleast_1d
    atleast_2d atleast_3d fliplr flipud ravel block_diag tril triu slice_scatter select_scatter
    diagonal_scatter index_copy row_stack
    """,
    statistics=True,
)
def move(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run the op on the labels: what stands where afterwards is what the op says."""
    values, place = list(flatten((args, kwargs))), _INDEX.get(base_name(node), len(args))
    for index in flatten(args[place : place + 1]):
        engine.block(index, f"read by {op_name(node)} as an index, which is not a layer")
    unit = _execute(engine, node, args, kwargs, "unit", CONST)
    example = _execute(engine, node, args, kwargs, "example", UNKNOWN)
    if unit is None or example is None:
        return unknown(engine, node, args, kwargs)
    parameter, rows, selected = None, None, values[0].selected if len(values) == 1 else None
    if len(values) == 1 and values[0].rows is not None:
        parameter, rows = values[0].parameter, _execute(engine, node, args, kwargs, "rows", 0)
    if isinstance(unit, Tensor):
        return Value(unit, example, parameter, rows, selected=selected)
    many_rows = rows if rows is not None else [None] * len(unit)
    parts = zip(unit, example, many_rows, strict=True)
    return [Value(u, e, parameter, r, selected=selected) for u, e, r in parts]


@rule("pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d")
def pad(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Padding with a constant adds constants; the other modes move data."""
    mode = args[2] if len(args) > 2 and isinstance(args[2], str) else kwargs.get("mode", "constant")
    if op_name(node) not in ("pad", "constant_pad_nd") or mode != "constant":
        return move(engine, node, args, kwargs)
    value, widths, shape = args[0], args[1], node.meta["val"].shape
    padded = {value.unit.dim() - 1 - i // 2 for i, width in enumerate(widths) if width}

    def fill(label: Tensor, filling: int) -> Tensor:
        once = [d for d in range(label.dim()) if d not in padded and label.stride(d) == 0]
        return torch.ops.aten.constant_pad_nd(_first(label, once), widths, filling).expand(shape)

    # A padded row of the batch axis belongs to no example; other padding belongs to the example around it.
    example = fill(value.example, UNKNOWN) if 0 in padded else _first(value.example, padded).expand(shape)
    return Value(fill(value.unit, CONST), example)


@rule("index")
def index(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Indexing by known indices is movement; by unknown ones, it keeps labels that are constant along the indexed
    axes.
    """
    value, indices = args[0], args[1]
    if all(i is None or i.concrete is not None for i in indices):
        return move(engine, node, args, kwargs)
    dims = [d for d, i in enumerate(indices) if i is not None]
    known = [i for i in indices if i is not None]
    if any(i.has_units() for i in known) or any(is_mask(node)):
        return unknown(engine, node, args, kwargs)
    kept = engine.reduce(value, dims, f"selected by computed indices in {node.name}")
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    target = node.meta["val"].shape
    rank = len(target) - (value.unit.dim() - len(dims))
    place = dims[0] if adjacent else 0
    unit = _respread(kept.unit, dims, place, rank).expand(target)
    example = _respread(kept.example, dims, place, rank).expand(target)
    return Value(unit, example, selected=value.parameter if value.parameter in engine.parameters else value.selected)


def is_mask(node: fx.Node) -> list[bool]:
    """Which of the indices of ``x[indices]`` say where by yes and no."""
    return [i is not None and i.meta["val"].dtype in (torch.bool, torch.uint8) for i in node.args[1]]  # type: ignore[union-attr]


def _respread(label: Tensor, dims: list[int], place: int, rank: int) -> Tensor:
    label = label.squeeze(dims)
    return regroup(label, (*label.shape[:place], *[1] * rank, *label.shape[place:]))


@rule("gather", "take_along_dim", carries=1)
def gather(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Gathering along an axis keeps labels that are constant along it."""
    value, dim = args[0], args[1] if len(args) > 1 and isinstance(args[1], int) else args[2]
    shape = node.meta["val"].shape
    kept = engine.reduce(value, [dim], f"gathered by computed indices in {node.name}")
    slices = tuple(slice(0, 1 if d == dim % len(shape) else s) for d, s in enumerate(shape))
    return Value(kept.unit[slices].expand(shape), kept.example[slices].expand(shape))


@rule(
    """
    contiguous clone to _to_copy convert_element_type type_as detach alias lift lift_fresh data requires_grad dropout
    feature_dropout alpha_dropout feature_alpha_dropout native_dropout float half double bfloat16 cpu cuda identity
    positive resolve_conj resolve_neg dequantize to_dense
    """,
    carries=1,
    statistics=True,
)
def identity(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The labels of the first operand pass unchanged."""
    fakes = node.meta["val"]
    return args[0] if isinstance(fakes, Tensor) else [args[0] for _ in fakes]


@rule(
    """
    prelu _prelu_kernel rrelu rrelu_with_noise rrelu_with_noise_functional fill_diagonal
    fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask
    _fake_quantize_per_tensor_affine_cachemask_tensor_qparams _fake_quantize_learnable_per_tensor_affine
    _fake_quantize_learnable_per_channel_affine
    """,
    carries=1,
)
def function_of_the_first(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Element by element, with parameters beside: a slope, a scale, a diagonal."""
    return identity(engine, node, [Value(args[0].unit, args[0].example)], kwargs)


_INDEX = {
    "index": 1,
    "index_select": 2,
    "index_copy": 2,
    "index_put": 1,
    "repeat_interleave": 1,
}  # the operand that says where, not what
_RESHAPES = {"view", "reshape", "_unsafe_view", "view_as", "reshape_as", "flatten", "unflatten", "ravel"}


def _execute(engine: Engine, node: fx.Node, args: list[Any], kwargs: dict[str, Any], label: str, filling: int) -> Any:
    """Run the node's op on one kind of label; None if it does not run or does not give the traced shape."""
    fakes = node.meta["val"]
    # Labels are run shifted to above 0, so that what an op fills in (zeros) can be told from them.
    shift = len(engine.units.statistics) - STATISTIC
    if base_name(node) in _RESHAPES:
        return regroup(getattr(args[0], label), fakes.shape)
    if _is_view(node):
        found = _run(node, args, kwargs, lambda value: getattr(value, label))
        return found if found is None or isinstance(fakes, Tensor) else list(found)
    dims = _untouched(node, args, kwargs, label)
    for dtype in (torch.int64, torch.float64):

        def shifted(value: Value, dtype: torch.dtype = dtype) -> Tensor:
            return (_first(getattr(value, label), dims) + shift).to(dtype)

        found = _run(node, args, kwargs, shifted)
        if found is None:
            continue
        results = [found] if isinstance(found, Tensor) else list(found)
        shapes = [fakes.shape] if isinstance(fakes, Tensor) else [f.shape for f in fakes]
        if [r.dim() for r in results] != [len(shape) for shape in shapes]:
            return None
        results = [torch.where(r == 0, filling, r.long() - shift) for r in results]
        results = [r.expand(shape) for r, shape in zip(results, shapes, strict=True)]
        return results[0] if isinstance(fakes, Tensor) else results
    return None


def _run(node: fx.Node, args: list[Any], kwargs: dict[str, Any], function: Any, move: Any = lambda index: index) -> Any:
    place = _INDEX.get(base_name(node))
    labels = [substitute(a, (lambda v: move(v.concrete)) if i == place else function) for i, a in enumerate(args)]
    try:
        return node.target(*labels, **substitute(kwargs, function))  # type: ignore[operator]
    except (RuntimeError, NotImplementedError, IndexError, TypeError):
        return None


def _is_view(node: fx.Node) -> bool:
    alias = node.target._schema.returns[0].alias_info  # type: ignore[union-attr]
    return alias is not None and not alias.is_write


def _is_by_place(node: fx.Node, args: list[Any]) -> bool:
    """Whether what becomes of an element depends on its place along all axes."""
    name = base_name(node)
    return name in ("tril", "triu", "block_diag") or (name == "roll" and (len(args) < 3 or not args[2]))


def _first(label: Tensor, dims: Collection[int]) -> Tensor:
    return label[tuple(slice(0, 1) if d in dims else slice(None) for d in range(label.dim()))]


def _untouched(node: fx.Node, args: list[Any], kwargs: dict[str, Any], label: str) -> list[int]:
    """The axes along which the labels repeat and which the op leaves alone: shrunk to size 1 they shrink its result."""
    place = _INDEX.get(base_name(node))
    labels = [getattr(v, label) for v in flatten([a for i, a in enumerate(args) if i != place])]
    if len({one.dim() for one in labels}) != 1 or _is_by_place(node, args):
        return []
    fakes = node.meta["val"]
    shapes = [fakes.shape] if isinstance(fakes, Tensor) else [f.shape for f in fakes]
    found = []
    for dim in range(labels[0].dim()):
        if any(one.stride(dim) or one.shape[dim] < 2 for one in labels):
            continue

        def shrunk(value: Value, dim: int = dim) -> Tensor:
            shape = value.shape
            return torch.empty([1 if d == dim else size for d, size in enumerate(shape)], device="meta")

        results = _run(node, args, kwargs, shrunk, lambda index: index.to("meta"))
        results = [results] if isinstance(results, Tensor) else results or []
        pairs = [
            [(a, b) for a, b in zip(r.shape, s, strict=False) if a != b] for r, s in zip(results, shapes, strict=False)
        ]
        if pairs and all(pair == [(1, labels[0].shape[dim])] for pair in pairs):
            found.append(dim)
    return found

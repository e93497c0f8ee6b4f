"""CIFAR-100's files, in the binary and in the python layout. Nothing but numbers and text is ever unpickled."""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gxd.lab.errors import UserError

IMAGE = (3, 32, 32)
PIXELS = 3 * 32 * 32
RECORD = 2 + PIXELS  # coarse label, fine label, red plane, green plane, blue plane


def read_binary(path: Path, remedy: str = "") -> tuple[Tensor, Tensor]:
    """Images ``(n, 3, 32, 32)`` uint8 and fine labels ``(n,)`` int64 of ``train.bin`` or ``test.bin``."""
    content = path.read_bytes()
    if not content or len(content) % RECORD:
        raise UserError(
            f"{path} has {len(content)} bytes, which is no whole number of {RECORD}-byte records: it is truncated or "
            f"damaged{remedy}"
        )
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, RECORD)
    return _checked(path, records[:, 2:].reshape(-1, *IMAGE).contiguous(), records[:, 1].long(), remedy)


def read_python(path: Path, remedy: str = "") -> tuple[Tensor, Tensor]:
    """Images ``(n, 3, 32, 32)`` uint8 and fine labels ``(n,)`` int64 of the pickled ``train`` or ``test``."""
    content = restricted_load(path, remedy)
    data, labels = (content.get(b"data"), content.get(b"fine_labels")) if isinstance(content, dict) else (None, None)
    images = data.pixels() if isinstance(data, _Array) else None
    if (
        images is None
        or images.shape[1:] != (PIXELS,)
        or not isinstance(labels, list)
        or len(labels) != len(images)
        or not all(isinstance(label, int) and 0 <= label < 256 for label in labels)
    ):
        raise UserError(f"{path} does not hold CIFAR-100's data and fine_labels{remedy}")
    return _checked(path, images.reshape(-1, *IMAGE), torch.tensor(labels, dtype=torch.int64), remedy)


def restricted_load(path: Path, remedy: str = "") -> Any:
    """Unpickle plain containers, text, bytes, numbers and arrays of bytes; refuse everything else."""
    content = path.read_bytes()
    try:
        return _Restricted(io.BytesIO(content), encoding="bytes").load()
    except _Refused as error:
        raise UserError(
            f"{path} asks to load {error}, which no CIFAR-100 file does: it is not trusted{remedy}"
        ) from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise UserError(f"{path} is truncated or damaged{remedy}") from error


def _checked(path: Path, images: Tensor, labels: Tensor, remedy: str) -> tuple[Tensor, Tensor]:
    if len(labels) and int(labels.max()) > 99:
        raise UserError(f"{path} has a label {int(labels.max())}, but the classes are 0 to 99: it is damaged{remedy}")
    return images, labels


# --- what a pickled array is made of ----------------------------------------------------------------------------------
# numpy's own classes would trust the description of the memory that the file gives. These stand in for them.


class _Refused(pickle.UnpicklingError):
    """Something that may not be loaded, by name."""


class _Dtype:
    """Stands in for ``numpy.dtype``: only its name counts."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.name = name.decode("latin1") if isinstance(name, bytes) else name

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment, which bytes have none of."""


class _Array:
    """Stands in for ``numpy.ndarray``."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def pixels(self) -> Tensor | None:
        """The array as a uint8 tensor; None if it is not an array of bytes in rows."""
        _, shape, dtype, by_columns, content = self.state
        if not isinstance(dtype, _Dtype) or dtype.name != "u1" or not isinstance(content, bytes) or by_columns:
            return None
        if len(content) != math.prod(shape):
            return None
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(shape)


def _encode(text: str, codec: str) -> bytes:
    """Stands in for ``_codecs.encode``, which Python 3 writes for bytes in the protocol of these files."""
    if codec not in ("latin1", b"latin1"):
        raise _Refused(f"the codec {codec!r}")
    return text.encode("latin1")


_ADMITTED: dict[tuple[str, str], Any] = {
    # The module's name depends on the numpy that wrote the file.
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): "ndarray",  # an argument of _reconstruct
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}


class _Restricted(pickle.Unpickler):
    """An unpickler that knows only what a CIFAR-100 file contains."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise _Refused(f"{module}.{name}")
        return _ADMITTED[module, name]

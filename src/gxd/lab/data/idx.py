"""MNIST's IDX files: a header of big-endian numbers, then the bytes of the array."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from gxd.lab.errors import Elsewhere

UNSIGNED_BYTE = 0x08  # the only element type that MNIST uses


def read(path: Path, remedy: str = "") -> Tensor:
    """The array of an IDX file of bytes, plain or gzipped, as a uint8 tensor. ``remedy`` ends the error messages."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            content = file.read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise Elsewhere(f"{path} is not a complete gzip file{remedy}") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != UNSIGNED_BYTE:
        raise Elsewhere(f"{path} is not an IDX file of bytes{remedy}")
    axes, start = content[3], 4 + 4 * content[3]
    if len(content) < start:
        raise Elsewhere(f"{path} ends within its header{remedy}")
    shape = struct.unpack(f">{axes}I", content[4:start])
    if len(content) != start + math.prod(shape):
        raise Elsewhere(
            f"{path} has {len(content)} bytes, but its header promises {start + math.prod(shape)}: it is truncated or "
            f"damaged{remedy}"
        )
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).reshape(shape)

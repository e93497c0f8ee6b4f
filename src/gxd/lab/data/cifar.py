"""CIFAR-100's files in the binary layout: records of bytes, so that nothing from outside is ever unpickled."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from gxd.lab.errors import Elsewhere

IMAGE = (3, 32, 32)
RECORD = 2 + 3 * 32 * 32  # coarse label, fine label, red plane, green plane, blue plane


def read(path: Path, remedy: str = "") -> tuple[Tensor, Tensor]:
    """Images ``(n, 3, 32, 32)`` uint8 and fine labels ``(n,)`` int64 of ``train.bin`` or ``test.bin``."""
    content = path.read_bytes()
    if not content or len(content) % RECORD:
        raise Elsewhere(
            f"{path} has {len(content)} bytes, which is no whole number of {RECORD}-byte records: it is truncated or "
            f"damaged{remedy}"
        )
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, RECORD)
    labels = records[:, 1].long()
    if int(labels.max()) > 99:
        raise Elsewhere(f"{path} has a label {int(labels.max())}, but the classes are 0 to 99: it is damaged{remedy}")
    return records[:, 2:].reshape(-1, *IMAGE).contiguous(), labels

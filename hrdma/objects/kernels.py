"""Element-wise sums of blocks of bytes with the core's kernels, any number of inputs at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hrdma import _core
from hrdma.types import DTYPES, OPS

__all__ = ["check", "fold", "reduced", "scale"]

WIDEST = 64  # inputs that one pass of a kernel takes


def check(op: str, dtype: str) -> None:
    """Raises ValueError or TypeError where the core has no such reduction."""
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}: one of {', '.join(OPS)}")
    if dtype not in DTYPES:
        raise TypeError(f"dtype {dtype!r} cannot be reduced: one of {', '.join(DTYPES)} can")
    _core.reduce(op, dtype, bytearray(8), [bytearray(8)])


def fold(op: str, dtype: str, out: Any, blocks: Sequence[Any]) -> None:
    """``out = blocks[0] op blocks[1] op ...``, left to right; for "avg" the sum. `out` may be the first block."""
    plain = "sum" if op == "avg" else op
    _core.reduce(plain, dtype, out, blocks[:WIDEST])
    for start in range(WIDEST, len(blocks), WIDEST - 1):
        _core.reduce(plain, dtype, out, [out, *blocks[start : start + WIDEST - 1]])


def scale(dtype: str, out: Any, count: int) -> None:
    """Divides a sum by how many are in it; of integers rounded toward zero."""
    _core.reduce("avg", dtype, out, [out], scale=1.0 / count)


def reduced(op: str, meta: dict[str, Any], contents: Sequence[bytes]) -> bytes:
    """The content of the reduction of objects that are all described by `meta`, in this order."""
    out = bytearray(meta["nbytes"])
    if out:
        fold(op, meta["dtype"], out, contents)
        if op == "avg":
            scale(meta["dtype"], out, len(contents))
    return bytes(out)

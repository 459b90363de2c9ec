"""Known values: what every rank puts in, what must come out, and how many elements of a result differ from it.

A contribution repeats after PERIOD elements and each rank's is shifted against the others':

    value(i, rank) = table[(i + STEP * rank) mod PERIOD]      table: hashed, from 1 to a top that depends on type and op

PERIOD is prime, so that a result that is off by a block, a page or a segment does not match by accident. Because of the
period an expectation is a small table, computed in 64 bits; buffers of any size are filled and compared with it in
blocks and need no second buffer of their size. The top is chosen so that sums of all ranks are exact in the type,
whatever the order of the additions.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PERIOD", "Values", "dtype_of"]

PERIOD = 1021
STEP = 37
BLOCK = 1 << 18  # elements compared at a time
# Whole numbers up to here are exact, with all sums that stay below it.
EXACT = {"float16": 1 << 11, "bfloat16": 1 << 8, "float32": 1 << 24, "float64": 1 << 53}

_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def dtype_of(name: str) -> np.dtype:
    """The numpy type of a name of `hrdma.types.DTYPES`; bfloat16 needs ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def _hashed(index: np.ndarray) -> np.ndarray:
    """Numbers below 2^31 without a pattern: two shifted copies agree no more often than by chance."""
    for multiplier in (0x9E3779B1, 0x85EBCA6B):
        index = index * np.uint64(multiplier) & np.uint64(0xFFFFFFFF)
        index ^= index >> np.uint64(15)
    return index >> np.uint64(1)


class Values:
    """The values of one element type, one operator and one number of ranks.

    Parameters
    ----------
    dtype : str
        Name of the element type.
    size : int
        Number of ranks.
    op : str or None
        The reduction; None where nothing is reduced.
    """

    def __init__(self, dtype: str, size: int, op: str | None = None) -> None:
        self.dtype = dtype_of(dtype)
        self.size = size
        self.op = op
        self._floating = dtype in EXACT
        top = 127 if dtype == "int8" else 251
        self._tolerance = 0.0
        if op == "prod":
            top = 2
        elif op in ("sum", "avg") and self._floating:
            top = max(1, min(top, EXACT[dtype] // size))
            if size > EXACT[dtype]:
                self._tolerance = size / EXACT[dtype]
        if op == "avg" and self._floating:
            self._tolerance = max(self._tolerance, 4 / EXACT[dtype])  # dividing and multiplying by 1/n round apart
        self._table = _hashed(np.arange(PERIOD, dtype=np.uint64)).astype(np.int64) % top + 1
        self._bits = np.dtype(f"u{self.dtype.itemsize}")

    def _shifted(self, first: int, rank: int) -> np.ndarray:
        return np.roll(self._table, -((first + STEP * rank) % PERIOD))

    def of(self, rank: int, first: int = 0) -> np.ndarray:
        """What a rank puts in, from element first on: one period."""
        return self._shifted(first, rank).astype(self.dtype)

    def reduced(self, first: int = 0) -> np.ndarray:
        """The reduction of all ranks' contributions, from element first on: one period."""
        assert self.op is not None
        kind = np.float64 if self._floating else np.int64
        with np.errstate(over="ignore"):
            parts = (self._shifted(first, rank).astype(kind) for rank in range(self.size))
            total: np.ndarray = functools.reduce(_FUNCTIONS[self.op], parts)
            if self.op == "avg" and not self._floating:  # the sum wraps, then it is cut toward zero
                total = np.trunc(total.astype(self.dtype) / self.size)
            elif self.op == "avg":
                total = total / self.size
            return total.astype(self.dtype)

    def fill(self, buffer: np.ndarray, rank: int) -> None:
        """Writes a rank's contribution."""
        block = self._block(self.of(rank))
        for at in range(0, buffer.size, block.size):
            part = buffer[at : at + block.size]
            part[:] = block[: part.size]

    def count_wrong(self, found: np.ndarray, expected: np.ndarray) -> int:
        """How many elements differ from a period of expected values; to the bit, averages to the last places."""
        block = self._block(expected)
        wrong = 0
        for at in range(0, found.size, block.size):
            part = found[at : at + block.size]
            wanted = block[: part.size]
            if self._tolerance:
                distance = np.abs(part.astype(np.float64) - wanted.astype(np.float64))
                good = distance <= self._tolerance * np.abs(wanted.astype(np.float64))  # nan is not good
                wrong += part.size - int(np.count_nonzero(good))
            else:
                wrong += int(np.count_nonzero(part.view(self._bits) != wanted.view(self._bits)))
        return wrong

    @staticmethod
    def _block(period: np.ndarray) -> np.ndarray:
        return np.tile(period, BLOCK // PERIOD)

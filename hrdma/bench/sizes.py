"""Sizes in bytes: reading "256M", stepping from one to the next, rounding to whole elements and whole shares."""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["counts", "parse_size", "show_size"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes of "8", "64K", "1.5M" or "1G" (powers of 1024; a trailing B or iB is allowed)."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise ValueError(f"{text!r} is not a size: bytes, or a number with K, M or G, such as 64K")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def show_size(nbytes: int) -> str:
    """The largest unit in which it is a short number: "256 MiB"."""
    for unit in ("GiB", "MiB", "KiB"):
        one = _UNITS[unit[0]]
        if nbytes >= one:
            return f"{nbytes / one:.4g} {unit}"
    return f"{nbytes} B"


def counts(begin: int, end: int, factor: int, itemsize: int, shares: int = 1) -> Iterator[int]:
    """Element counts from begin, begin * factor, ... to end, each once.

    Parameters
    ----------
    begin, end : int
        Bytes. What is not 0 is at least one element for each share.
    factor : int
        From one size to the next; the last one is end itself.
    itemsize : int
        Bytes of an element.
    shares : int
        Counts are multiples of it: leftovers that the ranks could not share evenly are cut off.
    """
    size, last = begin, -1
    while True:
        size = min(size, end)
        count = size // itemsize // shares * shares
        if size > 0:
            count = max(count, shares)
        if count != last:
            yield count
        last = count
        if size >= end:
            return
        size = max(size * factor, 1)

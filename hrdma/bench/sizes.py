"""Sizes in bytes: reading "256M" and stepping from one to the next."""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["parse_size", "sizes"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes of "8", "64K", "1.5M" or "1G" (powers of 1024; a trailing B or iB is allowed)."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise ValueError(f"{text!r} is not a size: bytes, or a number with K, M or G")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def sizes(begin: int, end: int, factor: int) -> Iterator[int]:
    """begin, begin * factor, ... and end itself as the last one."""
    size = begin
    while size < end:
        yield size
        size = max(size * factor, 1)
    yield end

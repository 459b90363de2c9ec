"""Rates, sizes and times with their units: ``"10gbit"``, ``"1.9MB"``, ``"20s"``.

A bare number is refused, and so is ``10gbps``: tc reads it as bytes per second, nearly everybody else as bits.
"""

from __future__ import annotations

import re

__all__ = ["rate_text", "rate_value", "seconds_value", "size_value"]

_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_PREFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_RATES = {f"{prefix}bit": factor / 8 for prefix, factor in _PREFIX.items()}
_SIZES = {
    "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30,
}  # fmt: skip
_TIMES = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def _split(text: object, what: str, example: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text) if isinstance(text, str) else None
    if match is None or not match[2]:
        raise ValueError(f"{what} {text!r} is not a number with a unit; write for example {example!r}")
    return float(match[1]), match[2]


def rate_value(text: object) -> int:
    """Bytes per second of a rate such as ``"10gbit"`` or ``"2.5Mbit"``.

    Raises
    ------
    ValueError
        No unit, an unknown or ambiguous one, or a rate below one byte per second.
    """
    number, unit = _split(text, "rate", "10gbit")
    lower = unit.lower()
    if lower.endswith("bps"):
        prefix = lower[:-3]
        raise ValueError(
            f"rate {text!r} is ambiguous: tc reads it as bytes per second, which would be {number * 8:g}{prefix}bit;"
            f" for bits per second write {number:g}{prefix}bit"
        )
    if lower not in _RATES:
        raise ValueError(f"rate {text!r} has the unknown unit {unit!r}; use one of {', '.join(_RATES)}")
    value = round(number * _RATES[lower])
    if value < 1:
        raise ValueError(f"rate {text!r} is zero; it has to be at least 8bit")
    return value


def size_value(text: object) -> int:
    """Bytes of a size such as ``"1.9MB"`` or ``"64KiB"``; ValueError otherwise."""
    number, unit = _split(text, "size", "1.9MB")
    if unit not in _SIZES:
        raise ValueError(f"size {text!r} has the unknown unit {unit!r}; use one of {', '.join(_SIZES)}")
    return round(number * _SIZES[unit])


def seconds_value(text: object) -> float:
    """Seconds of a time such as ``"20s"`` or ``"500ms"``; ValueError otherwise."""
    number, unit = _split(text, "time", "20s")
    if unit not in _TIMES:
        raise ValueError(f"time {text!r} has the unknown unit {unit!r}; use one of {', '.join(_TIMES)}")
    return number * _TIMES[unit]


def rate_text(rate: float) -> str:
    """A rate in bytes per second as tc writes it: ``rate_text(1.25e9)`` is ``"10gbit"``."""
    bits = rate * 8
    for prefix, factor in reversed(_PREFIX.items()):
        if bits >= factor and (bits / factor == round(bits / factor) or bits >= 1e4 * factor or factor == 1):
            return f"{bits / factor:.10g}{prefix}bit"
    return f"{bits:.10g}bit"

"""Numbers with units, for people."""

from __future__ import annotations

__all__ = ["in_bytes", "in_seconds"]


def in_bytes(n: float) -> str:
    """Bytes, in the largest binary unit that leaves at least one."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if n >= unit:
            return f"{n / unit:.4g} {name}"
    return f"{n:.4g} B"


def in_seconds(t: float) -> str:
    """Seconds, milliseconds or microseconds."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if t >= unit:
            return f"{t / unit:.3g} {name}"
    return f"{t * 1e6:.3g} us"

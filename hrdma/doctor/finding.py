"""One thing that was looked at: whether it is well, what was found, and the command that mends it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["ERROR", "OK", "WARNING", "Finding", "Level", "worst"]

Level = Literal["ok", "warning", "error"]
OK: Level = "ok"
WARNING: Level = "warning"
ERROR: Level = "error"
LEVELS: tuple[Level, ...] = (OK, WARNING, ERROR)


@dataclass(frozen=True)
class Finding:
    """What was found.

    Attributes
    ----------
    level : {"ok", "warning", "error"}
        ``warning``: it works, and slower or with less than it could; ``error``: something that was asked for does not.
    subject : str
        What was looked at: ``"memlock"``, ``"rxe0:1 exchange"``.
    text : str
    mend : str
        Command or setting that helps; empty where nothing is to be done.
    figures : mapping of str to float
        What was measured: ``latency`` in seconds, ``bandwidth`` in bytes per second, limits in bytes.
    """

    level: Level
    subject: str
    text: str
    mend: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


def worst(findings: list[Finding]) -> Level:
    """The worst level there is; ``"ok"`` of none."""
    return max((finding.level for finding in findings), key=LEVELS.index, default=OK)

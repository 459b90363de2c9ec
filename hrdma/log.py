"""The library's logger: one line a record, with the rank, at the level of HRDMA_LOG_LEVEL.

Records go to the logger ``hrdma``. Where the application has set up logging, its handlers get them; else a handler on
stderr is added, once.
"""

from __future__ import annotations

import logging
import sys

__all__ = ["TRACE", "configure", "logger"]

TRACE = 5
logging.addLevelName(TRACE, "TRACE")
logger = logging.getLogger("hrdma")


class _Line(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("hrdma %(levelname)s: %(message)s")
        self.rank: int | None = None

    def format(self, record: logging.LogRecord) -> str:
        text = " | ".join(super().format(record).splitlines())
        return text if self.rank is None else f"[{self.rank}] {text}"


_line = _Line()
_handler: logging.Handler | None = None


def configure(level: str, rank: int | None = None) -> None:
    """Sets level and rank of the log. May be called again: the last call counts.

    Parameters
    ----------
    level : str
        One of ``hrdma.config.LOG_LEVELS``.
    rank : int, optional
        Shown in front of each line.
    """
    global _handler
    _line.rank = rank
    logger.setLevel(TRACE if level == "trace" else level.upper())
    if _handler is None and not logging.getLogger().handlers and not logger.handlers:
        _handler = logging.StreamHandler(sys.stderr)
        _handler.setFormatter(_line)
        logger.addHandler(_handler)
        logger.propagate = False

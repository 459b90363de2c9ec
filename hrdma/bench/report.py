"""How results are shown: the columns of nccl-tests, one JSON document, and signs of life on stderr."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hrdma.bench.measure import Row
    from hrdma.bench.options import Options

__all__ = ["Progress", "document", "foot", "head", "line"]

COLUMNS = "{:>12} {:>11} {:>8} {:>5} {:>4} {:>10} {:>7} {:>7} {:>6}"
QUIET_SECONDS = 3.0


def head(options: Options, ranks: int, transports: list[str]) -> str:
    """What is measured, and the columns' titles."""
    from hrdma import __version__

    titles = COLUMNS.format("size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong")
    units = COLUMNS.format("(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", "")
    place = f", {'in' if options.where == 'in' else 'out of'} place" if len(options.pattern.places) > 1 else ""
    rounds = f"{options.rounds} rounds" if options.rounds > 1 else "1 round"
    left_out = f"# without {', '.join(options.left_out())}: pip install hrdma[bf16]\n" if options.left_out() else ""
    return (
        f"# {options.case} on {ranks} rank{'s' if ranks > 1 else ''} over {' and '.join(transports)}, "
        f"{options.memory} memory{place}\n"
        f"# hrdma {__version__}; median of {rounds}, the slowest rank counts; GB = 1e9 bytes\n{left_out}"
        f"#{titles[1:]}\n#{units[1:].rstrip()}"
    )


def line(row: Row) -> str:
    """One row."""
    return COLUMNS.format(
        row.size,
        row.count,
        row.type,
        row.redop,
        row.root,
        _number(row.time_us),
        _number(row.algbw),
        _number(row.busbw),
        "N/A" if row.wrong < 0 else row.wrong,
    )


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 1000 else f"{value:.1f}"


def foot(rows: list[Row]) -> str:
    """The average, and whether the results can be trusted."""
    wrong = sum(max(row.wrong, 0) for row in rows)
    unchecked = sum(row.wrong < 0 for row in rows)
    checked = f"# wrong elements: {wrong}" if unchecked < len(rows) else "# results were not checked"
    if 0 < unchecked < len(rows):
        checked += f" ({unchecked} rows were not checked)"
    if wrong:
        checked += ": THE TRANSPORT OR THE SCHEDULE IS BROKEN"
    average = f"# average bus bandwidth: {_average(rows):.3f} GB/s\n" if any(row.busbw for row in rows) else ""
    return average + checked


def _average(rows: list[Row]) -> float:
    return sum(row.busbw for row in rows) / len(rows)


def document(options: Options, ranks: int, transports: list[str], rows: list[Row]) -> str:
    """The same as JSON: an object with what was asked for, ``rows``, ``average_busbw`` and ``wrong``."""
    from hrdma import __version__

    found: dict[str, Any] = {
        "case": options.case,
        "ranks": ranks,
        "transports": transports,
        "memory": options.memory,
        "place": options.where,
        "deterministic": options.deterministic,
        "rounds": options.rounds,
        "version": __version__,
        "rows": [asdict(row) for row in rows],
        "average_busbw": _average(rows),
        "wrong": sum(max(row.wrong, 0) for row in rows),
    }
    return json.dumps(found, indent=2)


class Progress:
    """Says on stderr every few seconds what a long measurement is doing.

    The thread sleeps but for one line in `QUIET_SECONDS`, so that what is measured does not feel it.

    Parameters
    ----------
    shown : bool
        False: nothing is ever written and no thread is started.
    """

    def __init__(self, shown: bool, every: float = QUIET_SECONDS) -> None:
        self._every = every
        self._what = self._doing = ""
        self._since = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hrdma-bench-progress", daemon=True) if shown else None

    def __enter__(self) -> Progress:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def begin(self, what: str) -> None:
        """A new row is begun; nothing is written before it has taken a while."""
        self._what, self._since = what, time.monotonic()

    def __call__(self, doing: str) -> None:
        self._doing = doing

    def _run(self) -> None:
        while not self._ended.wait(self._every):
            seconds = time.monotonic() - self._since
            if seconds >= self._every / 2:
                sys.stderr.write(f"# {self._what}: {self._doing}, {seconds:.0f} s so far\n")
                sys.stderr.flush()

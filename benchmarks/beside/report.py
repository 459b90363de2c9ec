"""What a run found: medians and ranges over the rounds, ratios, and how they are written down.

A round's figure is the median of its repetitions; a cell shows the median of its rounds and their range. Ratios are of times in
this one run: how many times faster than the fastest peer of that cell, and how many times the limit's time.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from beside.cells import CASES, Cell
from beside.roster import ROWS, Row
from hrdma.bench.sizes import show_size

__all__ = ["Figure", "Table", "busy_cores", "busy_share", "document", "markdown", "ticks"]

SETTLED = 1.25  # times the fastest round


@dataclass
class Figure:
    """A row's findings in one cell; seconds of one operation, a list for each round."""

    rounds: list[list[float]] = field(default_factory=list)
    wrong: int = 0

    @property
    def each(self) -> list[float]:
        """One figure of each round, in seconds."""
        return [statistics.median(repetitions) for repetitions in self.rounds]

    @property
    def seconds(self) -> float:
        return statistics.median(self.each)


@dataclass
class Table:
    """All that was found.

    Attributes
    ----------
    figures : dict
        By row and cell.
    failures : dict
        Why a row has no figure, or no further one, in a cell.
    absent : dict
        Why a row could not be had at all.
    versions : dict
        What each row says that it is.
    lines : dict
        By cell, for each round: seconds that 8 bytes took from one core to another as it began.
    """

    figures: dict[tuple[str, Cell], Figure] = field(default_factory=dict)
    failures: dict[tuple[str, Cell], str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    lines: dict[Cell, list[float]] = field(default_factory=dict)

    def add(self, row: str, cell: Cell, seconds: list[float], wrong: int) -> None:
        """One round's repetitions and wrong elements."""
        figure = self.figures.setdefault((row, cell), Figure())
        figure.rounds.append(seconds)
        figure.wrong += wrong

    def cells(self) -> list[Cell]:
        """The cells that any row was asked for, in their order."""
        return list(dict.fromkeys(cell for _, cell in (*self.figures, *self.failures)))

    def rows(self, cells: Iterable[Cell]) -> list[Row]:
        """The rows that were asked for any of these cells, in the roster's order."""
        wanted = set(cells)
        named = {name for name, cell in (*self.figures, *self.failures) if cell in wanted}
        return [row for row in ROWS.values() if row.name in named]

    def best(self, cell: Cell) -> str | None:
        """The fastest peer whose results were right; None where there is none."""
        peers = [
            (figure.seconds, name)
            for (name, where), figure in self.figures.items()
            if where == cell and ROWS[name].kind == "peer" and not figure.wrong
        ]
        return min(peers)[1] if peers else None

    def gain(self, row: str, cell: Cell) -> float | None:
        """How many times faster than the best peer; None where either has no figure."""
        best, mine = self.best(cell), self.figures.get((row, cell))
        return self.figures[best, cell].seconds / mine.seconds if best and mine else None

    def distance(self, row: str, cell: Cell) -> float | None:
        """Time over the limit's time; None where either has no figure."""
        mine = self.figures.get((row, cell))
        for limit in ROWS.values():
            if limit.bound and mine and (found := self.figures.get((limit.name, cell))):
                return mine.seconds / found.seconds
        return None

    def unsettled(self, cell: Cell) -> list[str]:
        """What a cell's ratios are made of, if rounds of one of them differ by much: own rows, the limit, the two fastest peers and
        every other that was as fast in one round."""
        here = {
            name: figure
            for (name, where), figure in self.figures.items()
            if where == cell and not figure.wrong and (name, cell) not in self.failures
        }
        peers = sorted(figure.seconds for name, figure in here.items() if ROWS[name].kind == "peer")[:2]
        names = [
            name
            for name, figure in here.items()
            if (
                min(figure.each) <= peers[-1]
                if ROWS[name].kind == "peer"
                else ROWS[name].kind == "own" or ROWS[name].bound
            )
        ]
        return names if any(max(here[name].each) > SETTLED * min(here[name].each) for name in names) else []

    @property
    def wrong(self) -> int:
        """Wrong elements in all."""
        return sum(figure.wrong for figure in self.figures.values())


def scaled(seconds: float, cell: Cell) -> float:
    """A time in the unit in which its case is shown."""
    unit = CASES[cell.case].unit
    return cell.nbytes / seconds / 1e9 if unit == "GB/s" else seconds * {"us": 1e6, "ms": 1e3}[unit]


def short(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}" if value >= 0.001 else f"{value:.5f}"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def shown(figure: Figure, cell: Cell) -> str:
    """Median, and the range of the rounds: "0.369 (0.360-0.412)"."""
    text = short(scaled(figure.seconds, cell)) + extent([scaled(seconds, cell) for seconds in figure.each])
    return text + (f" **{figure.wrong} wrong**" if figure.wrong else "")


def extent(values: Sequence[float]) -> str:
    """The range, behind a median."""
    return f" ({short(min(values))}-{short(max(values))})" if len(values) > 1 else ""


def apart(seconds: Sequence[float]) -> str:
    """Median and range in ns."""
    values = [1e9 * value for value in seconds]
    return short(statistics.median(values)) + extent(values) if values else ""


def _table(table: Table, cells: Sequence[Cell]) -> Iterator[str]:
    """The lines of one case's table."""
    yield f"| | {' | '.join(show_size(cell.nbytes) for cell in cells)} |"
    yield f"|---{'|---' * len(cells)}|"
    rows = table.rows(cells)
    for row in rows:
        words = []
        for cell in cells:
            figure = table.figures.get((row.name, cell))
            text = "failed" if (row.name, cell) in table.failures else shown(figure, cell) if figure else ""
            words.append(f"**{text}**" if table.best(cell) == row.name and "**" not in text else text)
        yield f"| {row.title} | {' | '.join(words)} |"
    for row in rows:
        for what, of in (("faster than the best peer", table.gain), ("the limit's time", table.distance)):
            words = [ratio(of(row.name, cell)) for cell in cells]
            if row.kind == "own" and any(words):
                yield f"| *{row.title}: {what}* | {' | '.join(words)} |"
    if any(table.lines.get(cell) for cell in cells):
        words = [apart(table.lines.get(cell, [])) for cell in cells]
        yield f"| *8 bytes from core to core, ns* | {' | '.join(words)} |"


def markdown(table: Table, how: str) -> str:
    """All tables, each case's on its own, under a sentence that says how it was measured."""
    lines = ["# Side by side", "", f"{machine()}. {how}", ""]
    lines += [
        "Median (range of the rounds); every result was verified, what was wrong says so. Bold: the best peer. Ratios are of times. "
        "Last in a table, where there are cores to look at: how far apart two of them were as a cell's rounds began.",
    ]
    blocks = groupby(table.cells(), key=lambda cell: (cell.transport, cell.world, cell.case))
    for (transport, world, case), group in blocks:
        lines += ["", f"## {transport}, {world} ranks: {case}, {CASES[case].unit}", "", *_table(table, list(group))]
    lines += ["", "## What took part", ""]
    lines += [
        f"- {ROWS[name].title}: {version}" for name, version in table.versions.items() if ROWS[name].kind != "limit"
    ]
    lines += [f"- {ROWS[name].title}: left out: {why}" for name, why in table.absent.items()]
    lines += [f"- {ROWS[name].title} failed at {cell}: {why}" for (name, cell), why in table.failures.items()]
    return "\n".join(lines) + "\n"


def machine() -> str:
    """Cores, kernel, interpreter and the settings that matter."""
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    congestion = control.read_text().strip() if control.exists() else "unknown"
    return (
        f"{os.cpu_count()} cores, {platform.system()} {platform.release()} {platform.machine()}, "
        f"Python {platform.python_version()}, the system's congestion control: {congestion}"
    )


def busy_cores(seconds: float = 0.5) -> float:
    """How many cores other work keeps busy; asked while nothing is measured. A busy machine is no place to measure."""

    before = ticks()
    time.sleep(seconds)
    return (os.cpu_count() or 1) * busy_share(before, ticks())


def ticks() -> tuple[int, int]:
    """What all cores have done so far: all of it, and idle, also while something waits for a disk. Units of 10 ms."""
    numbers = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return sum(numbers[:8]), numbers[3] + numbers[4]


def busy_share(before: tuple[int, int], after: tuple[int, int]) -> float:
    """The part of all cores that was busy between two looks at `ticks`."""
    total, idle = (b - a for a, b in zip(before, after))
    return 1 - idle / max(total, 1)


def document(table: Table, how: str) -> dict[str, Any]:
    """All figures, for other programs; times in seconds."""
    return {
        "machine": machine(),
        "how": how,
        "versions": table.versions,
        "absent": table.absent,
        "wrong": table.wrong,
        "lines": [{**vars(cell), "rounds": seconds} for cell, seconds in table.lines.items()],
        "failures": [{"row": name, **vars(cell), "why": why} for (name, cell), why in table.failures.items()],
        "figures": [
            {
                "row": name,
                "title": ROWS[name].title,
                "kind": ROWS[name].kind,
                **vars(cell),
                "size": show_size(cell.nbytes),
                "seconds": figure.seconds,
                "shown": scaled(figure.seconds, cell),
                "unit": CASES[cell.case].unit,
                "rounds": figure.rounds,
                "wrong": figure.wrong,
                "faster_than_best": table.gain(name, cell),
                "over_limit": table.distance(name, cell),
            }
            for (name, cell), figure in table.figures.items()
        ],
    }

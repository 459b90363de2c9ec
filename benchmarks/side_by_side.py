"""hrdma, its peers and the machine's limits side by side: one run, peers interleaved, every figure verified.

    python benchmarks/side_by_side.py --transport shm --world 2 --cases allreduce --sizes 4K,256K --peers hrdma,openmpi

Tables go to standard output, what is happening to standard error. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from beside import across
from beside import cells as asked
from beside.cells import Cell, Selection
from beside.environments import ROOT, Unavailable, compiled, environment, run
from beside.job import Failure, Job, Program
from beside.report import Table, busy_cores, document, markdown
from beside.roster import QUICK_ROWS, ROWS, Row

REPETITIONS = 5
PICTURE_SECONDS = 60
LINE = Cell("shm", 2, "pingpong", 8)
LINE_SECONDS = 0.01
BUSY = 0.2  # cores; less is what a machine does on its own
EXIT_WRONG = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked; a wrong one ends the process with status 2."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="the short selection: shm, 2 and 4 ranks, three cases, the MPIs"
    )
    parser.add_argument("--transport", help=f"of {','.join(asked.TRANSPORTS)}")
    parser.add_argument("--world", help="numbers of ranks, such as 2,4,8")
    parser.add_argument("--cases", help=f"of {','.join(asked.CASES)}")
    parser.add_argument("--sizes", help="such as 4K,256K,64M; the table's own where not given")
    parser.add_argument("--peers", help=f"rows, of {','.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=3, help="how often each cell is measured, in turn (default: 3)")
    parser.add_argument(
        "--more",
        type=int,
        help="so many rounds more of what ratios are made of, where rounds differ (default: 4, quick 0)",
    )
    parser.add_argument("--seconds", type=float, help="time of one cell in one round (default: 0.2, quick 0.06)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which a cell counts as hung")
    for name, what in (
        ("json", "all figures"),
        ("markdown", "the tables"),
        ("picture", "a drawing of them (png, svg)"),
    ):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"write {what}")
    options = parser.parse_args(words)
    base = asked.QUICK if options.quick else asked.FULL
    if options.seconds is None:
        options.seconds = 0.06 if options.quick else 0.2
    if options.more is None:
        options.more = 0 if options.quick else 4
    try:
        options.selection = Selection(
            asked.parse_list(options.transport) if options.transport else base.transports,
            tuple(int(world) for world in asked.parse_list(options.world)) if options.world else base.worlds,
            asked.parse_list(options.cases) if options.cases else base.cases,
            asked.parse_sizes(options.sizes) if options.sizes else (),
        )
        options.selection.validate()
        named = asked.parse_list(options.peers, ROWS) if options.peers else QUICK_ROWS if options.quick else ROWS
        options.rows = [ROWS[name] for name in named]
        if options.rounds < 1 or options.seconds <= 0 or options.limit <= 0 or options.more < 0:
            raise ValueError("--rounds, --seconds and --limit must be positive, --more not negative")
    except ValueError as error:
        parser.error(str(error))
    return options


class Progress:
    """Signs of life on standard error: one line that is written over on a terminal, else one line for each round."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._live = sys.stderr.isatty()

    def say(self, text: str) -> None:
        """Something to keep."""
        clear = "\r\x1b[K" if self._live else ""
        print(f"{clear}# {time.monotonic() - self._begin:5.0f} s  {text}", file=sys.stderr, flush=True)

    def now(self, text: str) -> None:
        """What is being done at the moment."""
        if self._live:
            print(f"\r\x1b[K# {text}", end="", file=sys.stderr, flush=True)


class Bench:
    """One run: the jobs that are alive, and what they have said."""

    def __init__(self, options: argparse.Namespace, progress: Progress) -> None:
        self.table = Table()
        self._options = options
        self._progress = progress
        self._jobs: dict[str, Job | Program] = {}
        self._block: list[Cell] = []
        self._blind = False

    def run(self) -> None:
        """Measures all that was selected; ends every job, also when it is interrupted."""
        selected = asked.cells(self._options.selection)
        for (transport, world), group in groupby(selected, key=lambda cell: (cell.transport, cell.world)):
            self._block = list(group)
            try:
                place = self._enter(transport)
            except (OSError, RuntimeError) as error:
                self._left_out(transport, str(error))
                continue
            try:
                for number in range(1, self._options.rounds + self._options.more + 1):
                    of = f"of {self._options.rounds}" if number <= self._options.rounds else "of what has not settled"
                    self._progress.say(f"{transport}, {world} ranks: round {number} {of}")
                    for nth, cell in enumerate(self._block):
                        self._round(number, nth, cell)
            finally:
                with contextlib.ExitStack() as ends:  # all of them, also where the user has no patience with the first
                    ends.callback(self._leave, place)
                    for job in self._jobs.values():
                        ends.callback(job.end)
                self._jobs.clear()

    def _round(self, number: int, nth: int, cell: Cell) -> None:
        """Each row once, always beginning with another: the first would gain or lose."""
        rows = self._options.rows
        if number > self._options.rounds:
            names = self.table.unsettled(cell)
            rows = [row for row in rows if row.name in names]
        if not rows:
            return
        self._look(cell)
        first = (number - 1 + nth) % len(rows)
        for row in rows[first:] + rows[:first]:
            self._measure(row, cell)

    def _enter(self, transport: str) -> contextlib.ExitStack:
        """What has to be there while ranks of a transport run."""
        with contextlib.ExitStack() as stack:
            if transport == across.TRANSPORT:
                stack.enter_context(across.joined())
            return stack.pop_all()

    def _leave(self, place: contextlib.ExitStack) -> None:
        try:
            place.close()
        except (OSError, RuntimeError) as error:  # what was found stays
            self._progress.say(f"not all was cleaned up: {error}")

    def _left_out(self, transport: str, why: str) -> None:
        self._progress.say(f"{transport} is left out: {why}")
        for row in self._options.rows:
            for cell in self._block:
                if row.has(cell):
                    self.table.failures[row.name, cell] = why

    def _look(self, cell: Cell) -> None:
        """How far apart two cores are: those of a virtual machine share a cache at one time and none at another."""
        if len(os.sched_getaffinity(0)) < LINE.world or self._blind:
            return
        try:
            found = Program(compiled("limit_shm")).measure(LINE, LINE_SECONDS, 1, self._options.limit)
            self.table.lines.setdefault(cell, []).extend(found.seconds)
        except (Unavailable, Failure) as error:
            self._blind = True
            self._progress.say(f"how far apart the cores are is not told: {error}")

    def _measure(self, row: Row, cell: Cell) -> None:
        """One figure of one row; a failure is kept in the table, and the row is not asked for that cell again."""
        table, options = self.table, self._options
        if not row.has(cell) or row.name in table.absent or (row.name, cell) in table.failures:
            return
        self._progress.now(f"{cell}: {row.title}")
        try:
            if row.name not in self._jobs:
                job = self._jobs[row.name] = row.open(cell.transport, cell.world, self._progress.say)
                table.versions[row.name] = job.version
            found = self._jobs[row.name].measure(cell, options.seconds, REPETITIONS, options.limit)
            table.add(row.name, cell, found.seconds, found.wrong)
        except Unavailable as error:
            table.absent[row.name] = str(error)
            self._progress.say(f"{row.title} is left out: {error}")
        except Failure as error:
            if failing := self._jobs.pop(row.name, None):
                failing.end()
                failed = [cell]
            else:  # it will not start for its other cells either
                failed = [other for other in self._block if row.has(other)]
            for one in failed:
                table.failures[row.name, one] = str(error)
            self._progress.say(f"{row.title} failed at {cell}: {error}")


def draw(source: Path, target: Path, say: Callable[[str], None]) -> None:
    """Has the picture drawn by an environment of its own.

    Raises
    ------
    Unavailable
        It cannot be had, or failed.
    """
    python = environment("picture", ["matplotlib"], say) / "bin" / "python"
    run([python, ROOT / "benchmarks" / "picture.py", source.resolve(), target.resolve()], PICTURE_SECONDS)


def write(options: argparse.Namespace, table: Table, how: str, say: Callable[[str], None]) -> None:
    """Prints the tables, and leaves the files that were asked for."""
    text = markdown(table, how)
    print(text, flush=True)
    found = json.dumps(document(table, how), indent=1)
    for path, what in ((options.markdown, text), (options.json, found + "\n")):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(what)
    if options.picture:
        options.picture.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(found)
            file.flush()
            draw(Path(file.name), options.picture, say)


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    progress = Progress()
    bench = Bench(options, progress)
    interrupted = False
    before = busy_cores()
    if before > BUSY:
        progress.say(f"other work keeps {before:.1f} cores busy: the figures will say so too")
    try:
        bench.run()
    except KeyboardInterrupt:
        interrupted = True
    more = f", and {options.more} more of own rows, the limit and the fastest peers in cells where rounds differed by a quarter"
    how = (
        f"{options.rounds} rounds, the rows in turn in each{more if options.more else ''}; a cell takes about {options.seconds:g} s in a round"
        f"{'; interrupted' if interrupted else ''}. Other work kept {before:.1f} cores busy as it began and "
        f"{busy_cores():.1f} as it ended."
    )
    try:
        write(options, bench.table, how, progress.say)
    except Unavailable as error:
        progress.say(f"there is no picture: {error}")
    if interrupted:
        return EXIT_INTERRUPTED
    own = any(ROWS[name].kind == "own" for name, _ in bench.table.failures)
    return EXIT_WRONG if bench.table.wrong or own else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())

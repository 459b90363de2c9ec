"""Starting ranks, their memory and what they cost while idle: hrdma beside MPICH (mpi4py), in turns.

    python benchmarks/bench_start.py                                4 ranks, shared memory, five rounds
    python benchmarks/bench_start.py --ranks 2 4 8 --idle 1         what each further idle connection costs
    python benchmarks/bench_start.py --transport tcp

A round starts a job of each, one after the other. *start*: ranks come with numpy and the library imported (of hrdma also
what init would import), are told to start together, and have called init and a barrier; the slowest rank counts.
*imports*: of the library, before that, all ranks at once. *command*: from the launcher's start to the end of the barrier,
everything included. *memory* of a rank after the barrier and after one allreduce of 1 MiB of a
plain array, mean of the ranks: its proportional share (PSS) without hrdma's arenas, these apart, and what no other
process has (own). *idle*: processor time of all its threads in a second in which nothing is called. *ping*: 8 bytes one
way between two of the ranks, while the others sleep. Medians of rounds, with the range of start.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import defaultdict
from statistics import mean, median
from typing import Any

from beside.environments import ROOT, Unavailable, environment
from beside.job import Failure, Job, Start
from beside.report import busy_cores
from beside.roster import MPICH, mpi_packages

LIMIT = 60.0  # seconds for one step
CACHE = ROOT / "build" / "bench" / "pycache"  # so that all find compiled files, from the second round on
RANK = str(ROOT / "benchmarks" / "peers" / "start_rank.py")
TIMES = ("start", "imports", "command")
COLUMNS = (*TIMES, "memory", "arenas", "own", "after", "arenas after", "own after", "idle", "ping")
HEAD = (
    "| ranks | | start, ms | imports, ms | command, ms | memory, MB | arenas | own | after allreduce, MB | arenas | own "
    "| idle, ms/s | ping, us |"
)
SCALES = dict.fromkeys(COLUMNS, 1e-6) | dict.fromkeys((*TIMES, "idle"), 1e3) | {"ping": 1e6}
Samples = dict[str, list[float]]  # of each column, one figure of each round


def start_of(library: str, ranks: int, transport: str) -> Start:
    """How a job of a library is started.

    Raises
    ------
    Unavailable
        Its packages cannot be installed.
    """
    env = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(CACHE)}
    if library == "hrdma":
        command = [sys.executable, "-m", "hrdma", "run", "-n", str(ranks), RANK, "hrdma", "{socket}"]
        return Start([command], env | {"HRDMA_TRANSPORT": transport, "HRDMA_REQUIRE": transport})
    folder = environment("mpich", mpi_packages("mpich"), lambda text: print(f"# {text}", file=sys.stderr)) / "bin"
    command = [str(folder / "mpiexec"), "-n", str(ranks), str(folder / "python"), RANK, "mpi", "{socket}"]
    path = os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])
    return Start([command], env | {"PYTHONPATH": str(ROOT), "PATH": path} | MPICH.get(transport, {}))


def turn(start: Start, ranks: int, idle: float) -> dict[str, float]:
    """One job from its start to its end; a figure for each column.

    Raises
    ------
    Failure
        It did not start or answer in time, or a sum was wrong.
    """

    def figures(key: str, step: str, **how: Any) -> list[float]:
        return [answer[key] for answer in job.ask({"step": step, **how}, LIMIT) if key in answer]

    begin = time.perf_counter()
    with Job(start, ranks) as job:
        answers = job.ask({"step": "start"}, LIMIT)
        found = {"command": time.perf_counter() - begin}
        found["start"], found["imports"] = (max(answer[key] for answer in answers) for key in ("seconds", "imports"))
        for when in ("", " after"):
            if when and (wrong := sum(figures("wrong", "allreduce", size=ranks))):
                raise Failure(f"{wrong:g} elements of the sum were wrong")
            answers = job.ask({"step": "memory"}, LIMIT)
            arenas = mean(answer["arenas"] for answer in answers)
            found["after" if when else "memory"] = mean(answer["pss"] for answer in answers) - arenas
            found["arenas" + when], found["own" + when] = arenas, mean(answer["own"] for answer in answers)
        found["idle"] = mean(figures("cpu", "idle", seconds=idle)) / idle
        found["ping"] = max(figures("seconds", "pingpong"))
        return found


def table(found: dict[tuple[int, str], Samples]) -> str:
    """Markdown: medians, and under each two rows ours over theirs."""

    def text(column: str, each: list[float]) -> str:
        each = sorted(SCALES[column] * value for value in each)
        spread = f" ({each[0]:.0f} to {each[-1]:.0f})" if column == "start" else ""
        return f"{median(each):.{0 if column in TIMES else 2 if column in ('idle', 'ping') else 1}f}{spread}"

    lines = [HEAD, "|---:|---|" + "---:|" * len(COLUMNS)]
    for (ranks, name), samples in found.items():
        lines.append(f"| {ranks} | {name} | " + " | ".join(text(each, samples[each]) for each in COLUMNS) + " |")
        ours, theirs = found.get((ranks, "hrdma")), found.get((ranks, "mpich"))
        if name == "mpich" and ours and theirs:
            cells = [
                f"{median(ours[each]) / median(theirs[each]):.2f}" if median(theirs[each]) else "" for each in COLUMNS
            ]
            lines.append(f"| {ranks} | *hrdma over MPICH* | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4])
    parser.add_argument("--transport", choices=("shm", "tcp"), default="shm")
    parser.add_argument("--libraries", nargs="+", choices=("hrdma", "mpich"), default=["hrdma", "mpich"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle", type=float, default=5.0, help="seconds of idleness in each job (default: 5)")
    options = parser.parse_args()
    if min(options.ranks) < 2:
        parser.error("--ranks: at least 2")
    busy = busy_cores()
    found: dict[tuple[int, str], Samples] = {}
    missing: dict[str, str] = {}
    for number in range(options.rounds):
        for ranks in options.ranks:
            for name in options.libraries:
                if name in missing:
                    continue
                print(f"# round {number + 1}, {ranks} ranks, {name}", file=sys.stderr, flush=True)
                try:
                    figures = turn(start_of(name, ranks, options.transport), ranks, options.idle)
                except (Failure, Unavailable) as why:
                    missing[name] = str(why)
                    continue
                samples = found.setdefault((ranks, name), defaultdict(list))
                for column, value in figures.items():
                    samples[column].append(value)
    print(f"{options.transport}, {options.rounds} rounds; other work kept {busy:.1f} cores busy as it began\n")
    print(table(found))
    for name, why in missing.items():
        print(f"\n{name}: {why}")
    return 1 if "hrdma" in missing else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())

"""Runs every algorithm by force and prints what the planner chose beside what was best.

    python benchmarks/bench_planning.py [--ranks 2,4] [--transport shm,tcp] [--collective allreduce,...] [--memory plain]
    python benchmarks/bench_planning.py --times        how long planning, lowering and proving take

A row is a call: predicted and measured time of the choice, the best that was measured, and how much slower the choice was.
With -v every candidate has a line. Each candidate has a communicator of its own; rounds of all candidates alternate, so
that a loaded machine is unkind to all alike, and the fastest round of the slowest rank counts. Every job measures its
costs anew. The last line says how many choices were within 10 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

COLLECTIVES = (
    "allreduce",
    "reduce",
    "broadcast",
    "allgather",
    "reduce_scatter",
    "gather",
    "scatter",
    "alltoall",
    "barrier",
)
ROOTED = ("reduce", "broadcast", "gather", "scatter")
SIZES = [64 << 2 * i for i in range(11)]  # 64 B to 64 MiB
SOME = [1 << 10, 128 << 10, 16 << 20]
ROUND_SECONDS = 0.002  # shorter than a time slice, so that some rounds are not interrupted
LEAST_ROUNDS = 4
GOOD = 1.1
HEAD = f"{'collective':15} {'bytes':>10}  {'chosen':14} {'predicted':>10} {'measured':>10}  {'best':14} {'':>10} {'ratio':>6}"


def best(work: Callable[[], object], seconds: float = 0.2) -> float:
    """Shortest of the runs that fit in a time."""
    shortest, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        work()
        now = time.perf_counter()
        shortest = min(shortest, now - start)
        if now > end:
            return shortest


# -- choices ---------------------------------------------------------------------------------------------------------------


class Candidate:
    """One way to do a call, with a communicator that knows no other."""

    def __init__(self, comm, call, between, name: str, parts: int, predicted: float) -> None:
        self.world = comm
        self.comm = comm.dup()
        self.comm._plan_override = name, parts
        self.call = call
        self.between = between
        self.name = f"{name}/{parts}" if parts > 1 else name
        self.predicted = predicted
        self.seconds = float("inf")

    def round(self, seconds: float) -> float:
        """Seconds per call on this rank; about so many seconds of them, as the fastest round so far says."""
        iters = max(1, min(10_000, int(seconds / self.seconds)))
        self.world.barrier()
        start = time.perf_counter()
        for _ in range(iters):
            self.call(self.comm)
            self.between()
        return (time.perf_counter() - start) / iters


def call_of(collective: str, nbytes: int, size: int, new: Callable[[int], object]) -> Callable[[object], object]:
    """The call on buffers of its own; nbytes as the planner counts them."""
    count = nbytes // 4
    share = max(1, count // size)
    if collective == "barrier":
        return lambda comm: comm.barrier()
    if collective in ("allreduce", "reduce", "broadcast"):
        x = new(count)
        return lambda comm: getattr(comm, collective)(x)
    if collective in ("allgather", "gather"):
        x, out = new(share), new(share * size)
        return lambda comm: getattr(comm, collective)(
            x, out=out if collective == "allgather" or comm.rank == 0 else None
        )
    if collective == "alltoall":
        x, out = new(share * size), new(share * size)
        return lambda comm: comm.alltoall(x, out)
    x, out = new(share * size), new(share)
    return lambda comm: getattr(comm, collective)(x if collective != "scatter" or comm.rank == 0 else None, out=out)


def worker(options: argparse.Namespace) -> None:
    """On every rank: measures all candidates of each call; rank 0 prints a JSON line for each."""
    import numpy as np

    import hrdma
    from hrdma.topo.choice import choose

    with hrdma.init() as comm:
        new = (lambda n: hrdma.zeros(n)) if options.memory == "registered" else lambda n: np.zeros(n, np.float32)
        cost, mapped = comm._costs(), comm._mapped()
        if comm.rank == 0:
            print(json.dumps(["cost", 0, cost.to_dict()]), flush=True)
        for collective in options.collective:
            sizes = options.sizes or (SIZES if collective == "allreduce" else [0] if collective == "barrier" else SOME)
            for nbytes in sizes:
                call = call_of(collective, nbytes, comm.size, new)
                table = choose(collective, comm.size, nbytes, cost, mapped=mapped).table
                # ranks that only send or only receive would run ahead into the next call
                between = comm.barrier if collective in ROOTED else lambda: None
                candidates = [Candidate(comm, call, between, *line) for line in table]
                times = np.zeros(len(candidates) + 1)
                number, start = 0, time.perf_counter()
                while number < LEAST_ROUNDS or times[-1] < options.seconds:
                    for i, candidate in enumerate(candidates):
                        times[i] = candidate.round(0.0 if number == 0 else ROUND_SECONDS)
                    times[-1] = time.perf_counter() - start
                    comm.allreduce(times, "max")
                    for candidate, seconds in zip(candidates, times.tolist()):
                        candidate.seconds = min(candidate.seconds, seconds)
                    number += 1
                if comm.rank == 0:
                    found = [(one.name, one.predicted, one.seconds) for one in candidates]
                    print(json.dumps([collective, nbytes, found]), flush=True)
                for candidate in candidates:
                    candidate.comm.close()


def choices(options: argparse.Namespace) -> None:
    good = total = 0
    for transport in options.transport:
        for ranks in options.ranks:
            print(f"\n{transport}, {ranks} ranks, {options.memory} memory")
            argv = [
                sys.executable,
                "-m",
                "hrdma",
                "run",
                "-n",
                str(ranks),
                "--no-prefix",
                sys.executable,
                __file__,
                "--worker",
            ]
            argv += sys.argv[1:]
            with (
                tempfile.TemporaryDirectory() as folder,
                subprocess.Popen(
                    argv,
                    stdout=subprocess.PIPE,
                    env=os.environ | {"HRDMA_TRANSPORT": transport, "HRDMA_CACHE_DIR": folder},
                ) as job,
            ):
                assert job.stdout is not None
                for line in job.stdout:
                    collective, nbytes, found = json.loads(line)
                    if collective == "cost":
                        print(
                            " ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in found.items())
                        )
                        print(HEAD)
                        continue
                    chosen, quickest = found[0], min(found, key=lambda one: one[2])
                    ratio = chosen[2] / quickest[2]
                    good += ratio <= GOOD
                    total += 1
                    row = f"{collective:15} {nbytes:10}  {chosen[0]:14} {chosen[1] * 1e6:10.1f} {chosen[2] * 1e6:10.1f}"
                    print(f"{row}  {quickest[0]:14} {quickest[2] * 1e6:10.1f} {ratio:6.2f}", flush=True)
                    for name, predicted, seconds in found[1:] if options.verbose else ():
                        print(f"{'':28}{name:14} {predicted * 1e6:10.1f} {seconds * 1e6:10.1f}")
            if job.returncode:
                sys.exit(f"the job ended with {job.returncode}")
    print(f"\n{good} of {total} choices within {GOOD - 1:.0%} of the best")


# -- times -----------------------------------------------------------------------------------------------------------------


def times() -> None:
    from hrdma.planning import lower, plan
    from hrdma.topo.algorithms import ALGORITHMS, build
    from hrdma.topo.verify import check_programs

    print("plan() of one rank")
    print(f"{'collective':15} {'ranks':>5} {'bytes':>10} {'mapped':>6}  {'algorithm':>16} {'instrs':>6} {'ms':>8}")
    for collective in ("allreduce", "reduce_scatter", "allgather", "broadcast", "alltoall", "barrier"):
        for size in (2, 8, 64):
            for nbytes in (64, 64 << 10, 64 << 20):
                for mapped in (False, True):
                    count = nbytes // 4 // (size if collective in ("reduce_scatter", "allgather", "alltoall") else 1)

                    def work(count=count, size=size, mapped=mapped, collective=collective):
                        return plan(
                            collective, size=size, rank=0, counts=count, itemsize=4, dtype="float32", mapped=mapped
                        )

                    made = work()
                    name = f"{made.choice.algorithm}/{made.choice.parts}"
                    row = f"{collective:15} {size:5} {nbytes:10} {mapped!s:>6}  {name:>16} {len(made.instrs):6}"
                    print(f"{row} {best(work, 0.05) * 1e3:8.3f}")
    print("\nlower() of one rank, 8 ranks, 64 MiB allreduce")
    for name, algorithm in ALGORITHMS.items():
        if "allreduce" in algorithm.collectives:
            schedule = build(name, "allreduce", 8, parts=16, rank=0)
            seconds = best(lambda schedule=schedule: lower(schedule, 0, 16 << 20, 4, in_place=True), 0.1)
            print(f"{name:15} {len(schedule.table):6} transfers {seconds * 1e3:8.3f} ms")
    print("\nproofs of an allreduce")
    for name, size in (("ring", 64), ("ring", 256), ("direct", 64), ("halving", 256)):
        start = time.perf_counter()
        schedule = build(name, "allreduce", size)
        schedule.check()
        checked = time.perf_counter()
        programs = [lower(schedule, r, 1 << 20, 4) for r in range(size)]
        lowered = time.perf_counter()
        check_programs(programs)
        proved = time.perf_counter()
        print(
            f"{name:10} {size:4} ranks: schedule {checked - start:6.2f} s, lowering all {lowered - checked:6.2f} s,"
            f" programs {proved - lowered:6.2f} s"
        )


def main() -> None:
    def listed(kind):
        return lambda text: [kind(item) for item in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=listed(int), default=[2, 3, 4, 8])
    parser.add_argument("--transport", type=listed(str), default=["shm", "tcp"])
    parser.add_argument("--collective", type=listed(str), default=list(COLLECTIVES))
    parser.add_argument("--sizes", type=listed(int), default=[])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row (1.0)")
    parser.add_argument("--memory", choices=("registered", "plain"), default="registered")
    parser.add_argument("--times", action="store_true")
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
    elif options.times:
        times()
    else:
        choices(options)


if __name__ == "__main__":
    main()

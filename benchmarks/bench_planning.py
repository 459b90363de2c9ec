"""Prints how long planning, lowering and proving take: python benchmarks/bench_planning.py"""

from __future__ import annotations

import time
from collections.abc import Callable

from hrdma.planning import lower, plan
from hrdma.topo.algorithms import ALGORITHMS, build
from hrdma.topo.verify import check_programs


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


def main() -> None:
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


if __name__ == "__main__":
    main()

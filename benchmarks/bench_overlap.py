"""How much of an allreduce is hidden behind computing: two hosts of a lab, TCP, `async_op=True`. Needs root.

    sudo python benchmarks/bench_overlap.py                         64 MiB on a link of 4 Gbit/s, seven rounds
    sudo python benchmarks/bench_overlap.py --rate 1gbit --size 16M
    sudo python benchmarks/bench_overlap.py --packet 64K            without BIG TCP

Two network namespaces joined by one link, whose NICs take packets of 448 KiB (BIG TCP): the timer of the link's
bucket costs 20 to 40 us of a virtual machine's processor for each packet, and a link of hardware has none. Each round
measures the allreduce alone, a loop of numpy's matmul alone (one thread, about as long as the allreduce), and both:
the allreduce is started, the loop runs, the allreduce is waited for. Each time both ranks begin together and the
slower one counts. *both over longer*: 1 hides all, 2 nothing. *processor*: what the allreduce took of this rank's
processor time while the loop ran, most of which is the kernel's copying; where the ranks have but one core each, so
much of it cannot be hidden. Sums and products are checked in full.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np

import hrdma
from hrdma.bench.sizes import parse_size
from hrdma.lab.lab import Lab
from hrdma.lab.traffic import check_wires
from hrdma.topo.fabrics import parse

SIDE = 384  # of the square matrices: a product takes a few milliseconds, so that loops have the length that is wanted
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
LIMIT = 300.0  # seconds for everything


class Rank:
    """One rank: the vector, the matrices, and the clock."""

    def __init__(self, comm: hrdma.Communicator, count: int) -> None:
        self.comm = comm
        self.x = hrdma.empty(count, "float32")
        self.pattern = np.arange(count, dtype=np.float32) % 1021
        random = np.random.default_rng(1)
        self.a, self.b = (random.random((SIDE, SIDE), np.float32) for _ in range(2))
        self.product = np.empty((SIDE, SIDE), np.float32)
        self.want = self.a @ self.b
        self.loops = 1

    def reduce(self) -> None:
        self.comm.allreduce(self.x)

    def multiply(self) -> None:
        for _ in range(self.loops):
            np.matmul(self.a, self.b, out=self.product)

    def both(self) -> None:
        request = self.comm.allreduce(self.x, async_op=True)
        self.multiply()
        request.wait()

    def time(self, what: Callable[[], None]) -> tuple[float, float]:
        """Seconds of the slower rank, and of this rank's processor; checks what came out."""
        np.multiply(self.pattern, self.comm.rank + 1, out=self.x)
        self.product.fill(0)
        self.comm.barrier()
        begin, used = time.perf_counter(), time.process_time()
        what()
        used = time.process_time() - used
        slower = np.array([time.perf_counter() - begin])
        if what != self.multiply and not np.array_equal(self.x, self.pattern * sum(range(1, self.comm.size + 1))):
            raise RuntimeError("the sum is wrong")
        if what != self.reduce and not np.array_equal(self.product, self.want):
            raise RuntimeError("the product is wrong")
        self.comm.allreduce(slower, "max")
        return float(slower[0]), used

    def balance(self) -> None:
        """Has the loop take as long as the allreduce."""
        reduces = [self.time(self.reduce)[0] for _ in range(4)]
        alone = median(reduces[1:])  # the first one finds memory and the link's rate
        while self.time(self.multiply)[0] < alone / 2:
            self.loops *= 2
        self.loops = max(1, round(self.loops * alone / median(self.time(self.multiply)[0] for _ in range(3))))


def rank_main(nbytes: int, rounds: int) -> None:
    with hrdma.init() as comm:
        rank = Rank(comm, nbytes // 4)
        rank.balance()
        found = []
        for _ in range(rounds):
            (reduce, _), (loop, idle), (both, busy) = (
                rank.time(what) for what in (rank.reduce, rank.multiply, rank.both)
            )
            found.append((reduce, loop, both, both / max(reduce, loop), busy - idle))
        check_wires(comm)
        if comm.rank == 0:
            print(f"{comm.info()['transports'][1]}, {nbytes} B, {rank.loops} products; ms, medians (range)\n")
            print("| allreduce alone | matmul alone | both | both over longer | processor |\n" + "|---:" * 5 + "|")
            cells = []
            for scale, digits, each in zip((1e3, 1e3, 1e3, 1, 1e3), (1, 1, 1, 2, 1), zip(*found)):
                low, middle, high = (f"{scale * value:.{digits}f}" for value in (min(each), median(each), max(each)))
                cells.append(f"{middle} ({low} to {high})")
            print(f"| {' | '.join(cells)} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="4gbit")
    parser.add_argument("--size", default="64M", help="of the vector")
    parser.add_argument("--packet", default="448K", help="most that a NIC takes as one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--name", default=f"overlap-{os.getpid()}", help="of the lab")
    options = parser.parse_args()
    env = {**ONE_THREAD, "HRDMA_SPIN_US": os.environ.get("HRDMA_SPIN_US", "-1")}  # as where there is no lab
    with Lab.up(parse("mesh:2", rate=options.rate, latency=0), options.name, parse_size(options.packet)) as lab:
        command = [__file__, "--rank", str(parse_size(options.size)), str(options.rounds)]
        return lab.run(command, timeout=LIMIT, prefix=False, env=env)


if __name__ == "__main__":
    try:
        sys.exit(rank_main(int(sys.argv[2]), int(sys.argv[3])) if sys.argv[1:2] == ["--rank"] else main())
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"bench_overlap: {error}")

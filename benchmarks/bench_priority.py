"""Latency of urgent 4 KiB messages while bulk is on its way to the same peer.

    hrdma run -n 2 -m benchmarks.bench_priority            (or: python benchmarks/bench_priority.py under any launcher)
    HRDMA_TRANSPORT=tcp hrdma run -n 2 -m benchmarks.bench_priority --repeat 200

Rank 0 sends a bulk message with isend, and meanwhile urgent messages with a time stamp at random moments; rank 1 has
an irecv for the bulk and receives the urgent ones meanwhile. With --listen it waits for the bulk, and a second thread
receives the urgent ones: then the scheduler's waking of that thread is in the figures too, which on as many cores as
ranks must take one from a rank that is busy. Both ranks must share a clock, that is, run on one machine (network
namespaces are fine). `bulks_within_ms`: in how many of the bulk messages the slowest urgent one took less than that.
`late_ms_waited_ms`: each message of more than 5 ms, and for how long the two ranks were ready to run and had no processor
(the kernel's count: for the sender during its call, for the receiver since the message before).
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

import hrdma

URGENT, BULK, READY, LAST = 1, 2, 3, 4
BOUNDS_MS = (0.5, 1, 2, 3, 5, 10)
LATE_MS = 5


class Arrival(NamedTuple):
    """Of an urgent message: seconds from its stamp, and for how many of them its sender and receiver had no processor."""

    seconds: float
    waited: float


def waited() -> float:
    """Seconds for which threads of this process were ready to run, and others ran."""
    return (
        sum(int(task.joinpath("schedstat").read_text().split()[1]) for task in Path("/proc/self/task").iterdir()) * 1e-9
    )


def sender(comm: hrdma.Communicator, bulk: np.ndarray, count: int, gap: float) -> float:
    """Sends the bulk and count urgent messages; seconds that the bulk took."""
    stamp = hrdma.zeros(512, "float64")
    random = np.random.default_rng(1)
    comm.recv(stamp, 1, READY)
    begin = time.perf_counter()
    request = comm.isend(bulk, 1, BULK, priority=6)
    for _ in range(count):
        time.sleep(gap * random.uniform(0.5, 1.5))
        before = waited()
        stamp[0] = -1.0 if request.done else time.clock_gettime(time.CLOCK_MONOTONIC)
        comm.send(stamp, 1, URGENT, priority=0)
        stamp[1] = waited() - before  # travels with the next one
    request.wait()
    took = time.perf_counter() - begin
    comm.send(stamp, 1, LAST)
    return took


def receive(comm: hrdma.Communicator, stamp: np.ndarray, count: int, arrivals: list[Arrival]) -> None:
    """Takes the urgent messages; adds those that were sent while the bulk was on its way."""
    before, took, here = waited(), -1.0, 0.0
    for number in range(count + 1):
        comm.recv(stamp, 0, URGENT if number < count else LAST, priority=0)
        now = time.clock_gettime(time.CLOCK_MONOTONIC)
        if took >= 0:
            arrivals.append(Arrival(took, here + stamp[1]))
        took = now - stamp[0] if stamp[0] >= 0 and number < count else -1.0
        here, before = waited() - before, waited()


def receiver(comm: hrdma.Communicator, bulk: np.ndarray, count: int, listen: bool) -> list[Arrival]:
    """Receives the bulk and the urgent messages."""
    arrivals: list[Arrival] = []
    stamp = hrdma.zeros(512, "float64")  # the first one makes an arena, which takes milliseconds
    request = comm.irecv(bulk, 0, BULK)
    thread = threading.Thread(target=receive, args=(comm, stamp, count, arrivals))
    if listen:
        thread.start()
    comm.send(np.zeros(1), 0, READY)
    if not listen:
        receive(comm, stamp, count, arrivals)
    request.wait()
    if listen:
        thread.join()
    return arrivals


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bulk", type=int, default=256 << 20, help="bytes")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument(
        "--gap", type=float, default=0.0, help="seconds between urgent messages; 0: spread over the bulk"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--listen", action="store_true", help="receive urgent messages in a thread of their own")
    options = parser.parse_args()
    with hrdma.init() as comm:
        if comm.size != 2:
            parser.error(f"this is for 2 ranks, not {comm.size}: hrdma run -n 2 benchmarks/bench_priority.py")
        arrivals: list[Arrival] = []
        slowest: list[float] = []
        bulk = hrdma.zeros(options.bulk, "uint8")
        bulk[:] = 1  # so that what is measured is not the system finding memory
        gap = options.gap or 0.002
        seconds = 0.0
        for _ in range(options.repeat):
            if comm.rank == 0:
                seconds = sender(comm, bulk, options.count, gap)
            else:
                found = receiver(comm, bulk, options.count, options.listen)
                arrivals += found
                slowest.append(max((arrival.seconds for arrival in found), default=0.0) * 1e3)
            comm.barrier()
            if not options.gap:
                spread = np.array([seconds])
                comm.broadcast(spread, 0)
                gap = float(spread[0]) / options.count * 0.8
        if comm.rank == 1:
            ms = np.sort([arrival.seconds for arrival in arrivals]) * 1e3
            late = [arrival for arrival in arrivals if arrival.seconds * 1e3 > LATE_MS]
            row = {
                "transport": comm.info()["transports"][0],
                "receiver": "thread" if options.listen else "same thread",
                "messages": len(ms),
                "median_ms": float(np.median(ms)),
                "p99_ms": float(np.percentile(ms, 99)),
                "max_ms": float(ms.max()),
                "bulks": len(slowest),
                "bulks_within_ms": {str(bound): int(np.sum(np.array(slowest) < bound)) for bound in BOUNDS_MS},
                "median_waited_ms": float(np.median([arrival.waited for arrival in arrivals])) * 1e3,
                "late_ms_waited_ms": [[round(value * 1e3, 2) for value in arrival] for arrival in late],
                "bulk_bytes_per_s": options.bulk / gap / options.count * 0.8,
            }
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

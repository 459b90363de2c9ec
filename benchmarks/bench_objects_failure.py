"""A reduce loop while one of its workers is killed and comes back: reductions in each second.

    python benchmarks/bench_objects_failure.py                      8 workers, sums of the first 7 of them
    python benchmarks/bench_objects_failure.py --count 8            all are needed: it waits for the one that is gone
    python benchmarks/bench_objects_failure.py --size 4M --seconds 5 10 15

Each worker and its node are processes; the network is loopback. In each round every worker puts an array, and a node of its own
reduces the first that arrive. Then a worker and its node are killed (SIGKILL), as a host that is lost, and later started anew.
Every result is checked against its contributors.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from bench_objects import TOKEN

from hrdma.bench.sizes import parse_size
from hrdma.objects import Client, ObjectLost, connect

PATIENCE = 60.0


def work(node: str, number: int, n: int, first: int) -> None:
    """A worker: puts its array of each round as soon as the round is open, until it is killed."""
    client = connect(node=node, token=TOKEN, timeout=PATIENCE, start=False)
    mine = np.full(n, number + 1, "float32")
    for turn in range(first, 1 << 30):
        try:
            client.get(client.ref(f"open {turn}"))
        except ObjectLost:
            continue  # that round is long over
        client.put(mine, id=f"{turn}.{number}")


class Host:
    """A node and, but for the server's, a worker."""

    def __init__(self, name: str, join: str | None, worker: tuple[int, int, int] | None) -> None:
        environment = {**os.environ, "HRDMA_TOKEN": TOKEN, "HRDMA_HEARTBEAT": "1"}
        command = [sys.executable, "-m", "hrdma.objects", f"--node={name}", f"--capacity={1 << 30}"]
        command += [f"--join={join}"] if join else []
        self.running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)]
        assert self.running[0].stdout is not None
        self.address: str = json.loads(self.running[0].stdout.readline())["up"]
        if worker is not None:
            words = [str(word) for word in (name, *worker)]
            self.running.append(subprocess.Popen([sys.executable, __file__, "--work", *words], env=environment))

    def kill(self) -> None:
        for process in self.running:
            process.send_signal(signal.SIGKILL)
        for process in self.running:
            process.wait()


class Loop:
    """The server's side."""

    def __init__(self, client: Client, workers: int, count: int) -> None:
        self.client, self.workers, self.count = client, workers, count
        self.turn = 0
        client.put(b"go", id="open 0")

    def round(self) -> None:
        client, turn = self.client, self.turn
        refs = [client.ref(f"{turn}.{number}") for number in range(self.workers)]
        total = client.reduce(refs, count=self.count)
        found = client.get(total, timeout=PATIENCE)
        expected = sum(int(ref.id.partition(".")[2]) + 1 for ref in client.contributors(total))
        assert found[0] == found[-1] == expected, f"round {turn}: {found[0]} is not {expected}"
        self.turn += 1
        client.put(b"go", id=f"open {self.turn}")
        client.delete(total)
        for old in [f"open {turn - 3}", *(f"{turn - 3}.{number}" for number in range(self.workers))]:
            client.delete(client.ref(old))  # a worker that is later than that misses some


def main() -> int:
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], *map(int, sys.argv[3:]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--count", type=int, default=7)
    parser.add_argument("--size", type=parse_size, default=1 << 20)
    parser.add_argument(
        "--seconds", type=float, nargs=3, default=[5, 10, 15], help="when one is killed, comes back, and all ends"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the hosts end on the way out
    lost, back, end = options.seconds
    prefix, n = f"failure.{os.getpid()}.", options.size // 4
    hosts = [Host(prefix + "server", None, None)]
    over = threading.Event()
    try:
        join = hosts[0].address
        hosts += [Host(f"{prefix}{i}", join, (i, n, 0)) for i in range(options.workers)]
        done: list[float] = []
        with connect(node=prefix + "server", token=TOKEN, timeout=PATIENCE, start=False) as client:
            loop = Loop(client, options.workers, options.count)
            for _ in range(5):
                loop.round()
            begin = time.monotonic()

            def fate() -> None:
                if not over.wait(lost):
                    hosts[-1].kill()
                if not over.wait(begin + back - time.monotonic()):
                    hosts[-1] = Host(f"{prefix}back", join, (options.workers - 1, n, loop.turn))

            thread = threading.Thread(target=fate)
            thread.start()
            try:
                while time.monotonic() < begin + end:
                    loop.round()
                    done.append(time.monotonic() - begin)
            finally:
                over.set()
                thread.join()
    finally:
        for host in hosts:
            host.kill()
    found = summary(done, options.seconds)
    print(json.dumps(found) if options.json else text_of(found, options.seconds))
    return 0


def summary(done: Sequence[float], seconds: Sequence[float]) -> dict[str, Any]:
    """What happened in each second, and before, without and after the one that was killed.

    Parameters
    ----------
    done : sequence of float
        When each round was done, since the beginning.
    seconds : (float, float, float)
        When one was killed, came back, and all ended.
    """
    lost, back, end = seconds
    longest = max((b - a, b) for a, b in zip([0.0, *done], done))
    each = Counter(int(at) for at in done)
    return {
        "per_second": [each[second] for second in range(int(end))],
        "before": sum(at < lost for at in done) / lost,
        "during": sum(lost <= at < back for at in done) / (back - lost),
        "after": sum(back <= at < end for at in done) / (end - back),
        "longest_pause": longest[0],
        "longest_pause_ended": longest[1],
    }


def text_of(found: dict[str, Any], seconds: Sequence[float]) -> str:
    """A bar for each second, and the summary in a line."""
    lost, back, _ = seconds
    lines, most = [], max(found["per_second"])
    for second, number in enumerate(found["per_second"]):
        note = "  <- killed" if second == int(lost) else "  <- back" if second == int(back) else ""
        lines.append(f"{second:3d} s {number:5d} {'#' * (40 * number // max(1, most))}{note}")
    lines.append(
        f"reductions a second: {found['before']:.1f} before, {found['during']:.1f} without the one, {found['after']:.1f} after; "
        f"longest pause {found['longest_pause'] * 1e3:.0f} ms, which ended at {found['longest_pause_ended']:.2f} s"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

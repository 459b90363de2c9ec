"""Objects on one host: through the store alone, and between nodes that are processes of this host.

    python benchmarks/bench_objects.py                 sizes from 1 KiB to 32 MiB, 4 nodes
    python benchmarks/bench_objects.py --store         put and get only; --readers processes get a 64 MiB object
    python benchmarks/bench_objects.py --nodes 8 --sizes 1M,32M --stagger 0.05 --json

Store: seconds of a put (which copies once) beside numpy's copy of the same array in the same run, and of a get (which copies
nothing). Between nodes every byte goes over loopback TCP. Objects are put before the clock starts, except with --stagger, where
object i is put i times so many seconds later and the time from the last put on is shown as well. Medians; every value is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hrdma.bench.sizes import parse_size
from hrdma.objects import Client, ObjectRef, connect

TOKEN = "benchmark"
READERS_SIZE = 64 << 20

READER = """
import sys, time
from hrdma.objects import ObjectRef, connect
client = connect(node=sys.argv[1], token="benchmark", timeout=60, start=False)
ref = ObjectRef.parse(sys.argv[2])
print("ready", flush=True)
while sys.stdin.readline().strip() == "get":
    begin = time.perf_counter()
    view = client.get(ref)
    seconds = time.perf_counter() - begin
    assert view[-1] == view.size - 1
    del view
    print(seconds, flush=True)
"""


class Nodes:
    """Node processes of one cluster, and a client of each."""

    def __init__(self, count: int, capacity: int) -> None:
        self.prefix = f"bench.{os.getpid()}."
        self.processes: list[subprocess.Popen[str]] = []
        self.clients: list[Client] = []
        environment = {**os.environ, "HRDMA_TOKEN": TOKEN}
        join: list[str] = []
        for i in range(count):
            command = [sys.executable, "-m", "hrdma.objects", f"--node={self.prefix}{i}", f"--capacity={capacity}"]
            process = subprocess.Popen(
                command + join, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environment
            )
            self.processes.append(process)
            assert process.stdout is not None
            up = json.loads(process.stdout.readline())
            join = join or [f"--join={up['up']}"]
            self.clients.append(connect(node=f"{self.prefix}{i}", token=TOKEN, timeout=120, start=False))
        while any(len(client.info()["nodes"]) < count for client in self.clients):
            time.sleep(0.05)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    value = work()
    return time.perf_counter() - begin, value


def store(client: Client, nbytes: int, repeat: int) -> dict[str, float]:
    """Seconds of put, get and of a plain copy of the same array."""
    array = np.arange(nbytes // 4, dtype="uint32")
    copies, puts, gets = [], [], []
    for _ in range(repeat):
        copies.append(timed(array.copy)[0])
        seconds, ref = timed(lambda: client.put(array))
        puts.append(seconds)
        seconds, view = timed(lambda ref=ref: client.get(ref))
        gets.append(seconds)
        assert np.array_equal(view, array)
        del view
        client.delete(ref)
    return {"copy": statistics.median(copies), "put": statistics.median(puts), "get": statistics.median(gets)}


def readers(nodes: Nodes, count: int, rounds: int) -> dict[str, Any]:
    """Several processes get one object at the same time, round after round: seconds, and what the node moved for it.

    The first round is each process's first get, and counts like the others.
    """
    client = nodes.clients[0]
    ref = client.put(np.arange(READERS_SIZE // 4, dtype="uint32"))
    before = client.info()
    command = [sys.executable, "-c", READER, f"{nodes.prefix}0", str(ref)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    found: list[list[float]] = []
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for _ in range(rounds):
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("get\n")
                process.stdin.flush()
            found.append([float(process.stdout.readline()) for process in processes if process.stdout is not None])
        after = client.info()
    finally:
        for process in processes:
            process.communicate("\n")
    moved = sum(after[key] - before[key] for key in ("sent", "received"))
    return {
        "first": max(found[0]),
        "median_of_slowest": statistics.median(map(max, found)),
        "median": statistics.median(seconds for each in found for seconds in each),
        "bytes_of_memory": after["used"] - before["used"],
        "bytes_moved": moved,
    }


class Case:
    """One operation at one size: objects put, ready or staggered, and the clock."""

    def __init__(self, clients: list[Client], nbytes: int, stagger: float) -> None:
        self.clients, self.n, self.stagger = clients, max(1, nbytes // 4), stagger
        self.last = 0.0

    def put(self, clients: list[Client]) -> tuple[list[ObjectRef], Callable[[], None]]:
        """References of one object a client; the second starts the puts and returns when the clock may start."""
        names = [os.urandom(8).hex() for _ in clients]
        refs = [client.ref(name) for client, name in zip(clients, names)]

        def one(i: int) -> None:
            time.sleep(i * self.stagger)
            clients[i].put(np.full(self.n, i + 1, "float32"), id=names[i])
            self.last = max(self.last, time.perf_counter())

        def start() -> None:
            self.last = 0.0
            threads = [threading.Thread(target=one, args=(i,)) for i in range(len(clients))]
            for thread in threads:
                thread.start()
            if not self.stagger:
                for thread in threads:
                    thread.join()

        return refs, start

    def run(self, operation: str) -> tuple[float, float]:
        """Seconds in all, and from the last put on."""
        first, clients = self.clients[0], self.clients
        refs, start = self.put([first] if operation == "broadcast" else clients)
        start()
        begin = time.perf_counter()
        total = len(clients) * (len(clients) + 1) / 2
        if operation == "broadcast":
            values = self.wait([client.get(refs[0], async_op=True) for client in clients[1:]])
            expected = [1.0] * len(values)
        elif operation == "gather":
            values = self.wait([first.get(ref, async_op=True) for ref in refs])
            expected = [i + 1.0 for i in range(len(refs))]
        else:
            result = first.reduce(refs)
            refs = [*refs, result]
            values = self.wait(
                [client.get(result, async_op=True) for client in clients[: 1 if operation == "reduce" else None]]
            )
            expected = [total] * len(values)
        end = time.perf_counter()
        for value, right in zip(values, expected):
            assert value[0] == value[-1] == right and np.all(value == right), f"{operation}: wrong value"
        del values
        for ref in refs:
            first.delete(ref)
        return end - begin, end - max(begin, self.last)

    @staticmethod
    def wait(requests: list[Any]) -> list[Any]:
        return [request.wait() for request in requests]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--sizes", default="1K,32K,1M,32M")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--stagger", type=float, default=0.0, help="seconds between arrivals")
    parser.add_argument("--capacity", type=parse_size, default=2 << 30)
    parser.add_argument("--store", action="store_true", help="leave out what goes between nodes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = [parse_size(text) for text in options.sizes.split(",")]
    rows: list[dict[str, Any]] = []
    nodes = Nodes(1 if options.store else options.nodes, options.capacity)
    try:
        for nbytes in sizes:
            rows.append({"operation": "store", "bytes": nbytes, **store(nodes.clients[0], nbytes, options.repeat)})
        rows.append(
            {"operation": "readers", "bytes": READERS_SIZE, **readers(nodes, options.readers, 4 * options.repeat)}
        )
        for operation in () if options.store else ("broadcast", "gather", "reduce", "allreduce"):
            for nbytes in sizes:
                case = Case(nodes.clients, nbytes, options.stagger)
                runs = [case.run(operation) for _ in range(options.repeat)]
                all_, tail = (statistics.median(column) for column in zip(*runs))
                row = {"operation": operation, "bytes": nbytes, "nodes": options.nodes, "seconds": all_}
                rows.append(row | ({"after_last_put": tail} if options.stagger else {}))
    finally:
        nodes.close()
    for row in rows:
        print(json.dumps(row) if options.json else text_of(row))
    return 0


def text_of(row: dict[str, Any]) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, float):
            return f"{value * 1e3:.3f} ms"
        return "[" + ", ".join(map(shown, value)) + "]" if isinstance(value, list) else str(value)

    rest = "  ".join(f"{key} {shown(value)}" for key, value in row.items() if key not in ("operation", "bytes"))
    return f"{row['operation']:10} {row['bytes']:>11} B  {rest}"


if __name__ == "__main__":
    sys.exit(main())

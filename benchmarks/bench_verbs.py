"""RDMA from Python beside perftest's programs, on one device, in one run.

    HRDMA_TRANSPORT=verbs HRDMA_DEVICES=rxe0 hrdma run -n 2 benchmarks/bench_verbs.py
    HRDMA_TRANSPORT=verbs HRDMA_DEVICES=sim hrdma run -n 2 benchmarks/bench_verbs.py      (without perftest's column)
    python benchmarks/bench_verbs.py --instructions                                       (valgrind; on device sim)

Both ranks run on one host. In each round every row is measured, ours and then perftest's (ib_write_bw, ib_send_bw,
ib_read_bw, ib_send_lat, which rank 0 starts, both ends, while rank 1 waits); a figure is the median of the rounds. Bytes are
checked after the timed part. Instructions are those of one call, from the difference of two runs of callgrind that differ
in nothing but the number of calls.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import hrdma
from hrdma import verbs

SIZES = (64 << 10, 1 << 20)
BATCH, DEPTH = 16, 4  # work requests of one post, and posts under way
ALLREDUCE = 4 << 20
PORT = 18516
LIMIT = 120.0  # seconds for one program of perftest
WANTED = {"write": 0.95, "send": 0.95, "read": 0.95, "latency": 2.0, "allreduce": 0.8}


class Pair:
    """A queue pair of `hrdma.verbs` to the other rank's, with memory of its own and the other's address."""

    def __init__(self, comm: hrdma.Communicator, device: verbs.Device, nbytes: int) -> None:
        self.comm, self.nbytes = comm, nbytes
        self.pd, self.cq = verbs.ProtectionDomain(device), verbs.CompletionQueue(device, 1024)
        self.qp = verbs.QueuePair(self.pd, self.cq, sends=128, recvs=128)
        self.array = hrdma.empty(nbytes, "uint8")
        self.array[:] = comm.rank + 1
        self.region = verbs.MemoryRegion(self.pd, self.array, remote_read=True, remote_write=True)
        card = json.dumps([*self.qp.address, self.region.address, self.region.rkey]).encode().ljust(256)
        theirs = bytearray(256)
        comm.sendrecv(card, 1 - comm.rank, theirs, 1 - comm.rank)
        *address, self.remote, self.rkey = json.loads(bytes(theirs))
        self.qp.connect(address)
        comm.barrier()

    def ended(self) -> None:
        found = self.cq.poll(1, timeout=30)
        if not found:
            raise TimeoutError("no completion within 30 s")
        found[0].check()

    def stream(self, kind: str, count: int) -> float:
        """Seconds for so many messages of the whole memory; only the last of a post is told."""
        post: dict[str, Callable[[bool], None]] = {
            "write": lambda told: self.qp.write(self.region, self.remote, self.rkey, signaled=told),
            "read": lambda told: self.qp.read(self.region, self.remote, self.rkey, signaled=told),
            "send": lambda told: self.qp.post_send(self.region, signaled=told),
        }
        start, under_way = time.perf_counter(), 0
        for number in range(1, count + 1):
            told = number % BATCH == 0 or number == count
            post[kind](told)
            under_way += told
            if under_way == DEPTH:
                self.ended()
                under_way -= 1
        for _ in range(under_way):
            self.ended()
        return time.perf_counter() - start

    def receive(self, count: int) -> None:
        """The other end of "send": as many receives as fit are posted, and posted again when they end."""
        room = min(count, 100)
        self.qp.post_recv([self.region] * room)
        self.comm.barrier()
        left, ended = count - room, 0
        while ended < count:
            found = self.cq.poll(64, timeout=30)
            if not found:
                raise TimeoutError(f"{ended} of {count} messages came within 30 s")
            for one in found:
                one.check()
            ended += len(found)
            again = min(left, len(found))
            self.qp.post_recv([self.region] * again)
            left -= again


def bandwidth(comm: hrdma.Communicator, device: verbs.Device, kind: str, nbytes: int, count: int) -> float:
    """Bytes per second by queue pairs; 0 on rank 1."""
    pair = Pair(comm, device, nbytes)
    seconds = 0.0
    if kind == "send" and comm.rank == 1:
        pair.receive(count)
    elif comm.rank == 0:
        if kind == "send":
            comm.barrier()
        seconds = pair.stream(kind, count)
    comm.barrier()
    target = 0 if kind == "read" else 1
    if comm.rank == target and not (pair.array == 2 - target).all():
        raise ValueError(f"{kind} of {nbytes} bytes did not bring them")
    pair.pd.close()
    return count * nbytes / seconds if seconds else 0.0


def by_endpoint(comm: hrdma.Communicator, nbytes: int, count: int) -> float:
    """Bytes per second of `Endpoint.write`, eight under way; 0 on rank 1."""
    end = hrdma.Endpoint(comm, 1 - comm.rank)
    x = hrdma.empty(nbytes, "uint8")
    x[:] = comm.rank + 1
    with end.expose(x, write=True) as memory:
        text = bytearray(len(bytes(memory)))
        comm.sendrecv(bytes(memory), 1 - comm.rank, text, 1 - comm.rank)
        seconds = 0.0
        if comm.rank == 0:
            remote, requests = end.remote(text), []
            start = time.perf_counter()
            for number in range(count):
                requests.append(end.write(x, remote, notify=1 if number == count - 1 else None, async_op=True))
                if len(requests) == 8:
                    requests.pop(0).wait()
            for request in requests:
                request.wait()
            seconds = time.perf_counter() - start
        elif end.notified() != 1 or not (x == 1).all():
            raise ValueError("the endpoint's writes did not come")
        comm.barrier()
    return count * nbytes / seconds if seconds else 0.0


def latency(comm: hrdma.Communicator, count: int) -> float:
    """Seconds one way of 8 bytes: a write with a notification there, and one back."""
    end = hrdma.Endpoint(comm, 1 - comm.rank)
    x, y = hrdma.zeros(8, "uint8"), hrdma.zeros(8, "uint8")
    with end.expose(x, write=True) as memory:
        text = bytearray(len(bytes(memory)))
        comm.sendrecv(bytes(memory), 1 - comm.rank, text, 1 - comm.rank)
        remote = end.remote(text)
        comm.barrier()
        times = []
        for number in range(count):
            start = time.perf_counter()
            if comm.rank == 0:
                end.write(y, remote, notify=number)
            if end.notified() != number:
                raise ValueError("notifications out of order")
            if comm.rank == 1:
                end.write(y, remote, notify=number)
            times.append(time.perf_counter() - start)
        comm.barrier()
    return statistics.median(times) / 2


def by_message(comm: hrdma.Communicator, count: int) -> float:
    """Seconds one way of a message of 8 bytes."""
    x, times, other = hrdma.zeros(8, "uint8"), [], 1 - comm.rank
    comm.barrier()
    for _ in range(count):
        start = time.perf_counter()
        if comm.rank == 0:
            comm.send(x, dst=other)
        comm.recv(x, src=other)
        if comm.rank == 1:
            comm.send(x, dst=other)
        times.append(time.perf_counter() - start)
    return statistics.median(times) / 2


def allreduce(comm: hrdma.Communicator, count: int) -> float:
    """Bytes per second and direction of an allreduce of two ranks."""
    x = hrdma.empty(ALLREDUCE // 4, "float32")
    times = []
    for _ in range(count):
        x[:] = comm.rank + 1
        comm.barrier()
        start = time.perf_counter()
        comm.allreduce(x)
        times.append(time.perf_counter() - start)
        if not (x == 3).all():
            raise ValueError("allreduce is wrong")
    return ALLREDUCE / statistics.median(times)


def perftest(device: verbs.Device, program: str, options: str, column: int) -> float | None:
    """One number of the only row that a program of perftest prints; None where it cannot be had."""
    if device.name == "sim" or not shutil.which(program):
        return None
    command = [program, "-d", device.name, "-x", str(device.gid_index), "-p", str(PORT), "-F", *options.split()]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            stop = time.monotonic() + 20
            listens = f":{PORT:04X} 00000000:0000 0A"
            while listens not in Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text().replace(
                "00000000000000000000000000000000", "00000000"
            ):
                if time.monotonic() > stop or server.poll() is not None:
                    raise TimeoutError(f"{program} does not listen")
                time.sleep(0.05)
            done = subprocess.run([*command, "127.0.0.1"], capture_output=True, text=True, timeout=LIMIT)
            server.wait(10)
        finally:
            server.kill()
    rows = re.findall(r"^ *\d+ +\d+ +[\d.]+ .*$", done.stdout, re.MULTILINE)
    if done.returncode or len(rows) != 1:
        raise RuntimeError(f"{program} failed: {done.stdout}{done.stderr}")
    return float(rows[0].split()[column])


def measure(comm: hrdma.Communicator, rounds: int, scale: float) -> dict[str, dict[str, list[float]]]:
    """Figures by row, ours and perftest's; on rank 1 they mean nothing."""
    found: dict[str, dict[str, list[float]]] = {}

    def note(row: str, whose: str, value: float | None) -> None:
        if value is not None:
            found.setdefault(row, {}).setdefault(whose, []).append(value)

    def beside(row: str, ours: float, program: str, options: str, column: int, unit: float) -> None:
        note(row, "ours", ours)
        if comm.rank == 0:
            value = perftest(device, program, options, column)
            note(row, "perftest", None if value is None else value * unit)
        comm.barrier(timeout=LIMIT * 2)

    name, _, port = (os.environ.get("HRDMA_DEVICES") or "sim").partition(":")
    with verbs.Device(name, int(port or 1)) as device:
        for _ in range(rounds):
            for nbytes in SIZES:
                count = max(BATCH * DEPTH, int(scale * (64 << 20) / nbytes))
                options = f"-s {nbytes} -n {count}"
                size = f"{nbytes >> 10} KiB"
                for kind in ("write", "send", "read"):
                    ours = bandwidth(comm, device, kind, nbytes, count)
                    beside(f"{kind} {size}", ours, f"ib_{kind}_bw", options, 3, 1 << 20)
                note(f"Endpoint.write {size}", "ours", by_endpoint(comm, nbytes, count))
            count = max(100, int(scale * 1000))
            beside("latency 8 B, Endpoint", latency(comm, count), "ib_send_lat", f"-s 8 -n {count}", 4, 1e-6)
            note("latency 8 B, send", "ours", by_message(comm, count))
            ours = allreduce(comm, max(5, int(scale * 10)))
            count = max(BATCH * DEPTH, int(scale * 1000))
            beside("allreduce 4 MiB", ours, "ib_write_bw", f"-b -s 65536 -n {count}", 3, (1 << 20) / 2)
    return found


def show(found: dict[str, dict[str, list[float]]]) -> None:
    print(f"{'':24}{'hrdma':>14}{'perftest':>14}{'ratio':>8}  wanted")
    for row, figures in found.items():
        ours = statistics.median(figures["ours"])
        is_time = row.startswith("latency")
        wanted = WANTED.get(row.split()[0])

        def text(value: float, is_time: bool = is_time) -> str:
            return f"{value * 1e6:.1f} us" if is_time else f"{value / 1e6:.1f} MB/s"

        line = f"{row:24}{text(ours):>14}"
        if "perftest" in figures:
            theirs = statistics.median(figures["perftest"])
            line += f"{text(theirs):>14}{ours / theirs:8.2f}"
            line += f"  {'at most' if is_time else 'at least'} {wanted}" if wanted else ""
        print(line)


# --- instructions ---

CALLS = {
    "QueuePair.write 8 B, posted and polled": "here.write(source, target.address, target.rkey); cq.poll(1, timeout=5)",
    "Endpoint.write 8 B, to oneself": "end.write(x, remote)",
    "Endpoint.read 8 B, to oneself": "end.read(x, remote)",
}
PROGRAM = """
import hrdma
from hrdma import verbs
comm = hrdma.init(0, 1, timeout=60)
device = verbs.Device("sim")
pd, cq = verbs.ProtectionDomain(device), verbs.CompletionQueue(device)
here, there = verbs.QueuePair(pd, cq), verbs.QueuePair(pd, cq)
here.connect(there.address)
there.connect(here.address)
source, target = verbs.MemoryRegion(pd, bytes(8)), verbs.MemoryRegion(pd, bytearray(8), remote_write=True)
end, x = hrdma.Endpoint(comm, 0), hrdma.zeros(8, "uint8")
memory = end.expose(x, write=True)
remote = end.remote(bytes(memory))
for _ in range({count}):
    {call}
"""


def instructions(few: int = 1000, many: int = 21000) -> None:
    """Instructions of one call, all threads, from the difference of two runs."""
    print(f"{'instructions of one call':44}{'':>10}")
    for name, call in CALLS.items():
        totals = []
        for count in (few, many):
            with tempfile.TemporaryDirectory() as folder:
                done = subprocess.run(
                    ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out", sys.executable, "-c",
                     PROGRAM.format(count=count, call=call)],
                    capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONHASHSEED": "0"},
                )  # fmt: skip
            match = re.search(r"Collected : (\d+)", done.stderr)
            if done.returncode or not match:
                raise RuntimeError(f"callgrind failed: {done.stderr[-2000:]}")
            totals.append(int(match[1]))
        print(f"{name:44}{(totals[1] - totals[0]) / (many - few):10.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of messages")
    parser.add_argument("--instructions", action="store_true", help="count instructions on device sim, and end")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    asked = parser.parse_args()
    if asked.instructions:
        instructions()
        return
    with hrdma.init() as comm:
        if comm.size != 2:
            parser.error("two ranks are wanted: hrdma run -n 2 benchmarks/bench_verbs.py")
        found = measure(comm, asked.rounds, asked.scale)
        if comm.rank == 0:
            show(found)
            if asked.json:
                asked.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

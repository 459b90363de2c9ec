"""RDMA from Python beside perftest's programs, on one device, in one run.

    HRDMA_DEVICES=rxe0 HRDMA_SPIN_US=999999 hrdma run -n 2 benchmarks/bench_verbs.py
    HRDMA_DEVICES=rxe0 hrdma run -n 4 benchmarks/bench_verbs.py            allreduce alone, beside two pairs
    HRDMA_DEVICES=sim hrdma run -n 2 benchmarks/bench_verbs.py             without perftest's column
    python benchmarks/bench_verbs.py --instructions                        valgrind; on device sim

All ranks run on one host, each on a processor as long as there are any, and so do perftest's ends. In each round every
row is measured, ours and then perftest's (ib_write_bw, ib_send_bw, ib_read_bw, ib_send_lat, which rank 0 starts, both
ends, while the others sleep); allreduces come last, when the others have ended. A figure is the median of the rounds, a
ratio the median of the rounds' ratios. Latencies and allreduces are those of programs that were just started, ours as
perftest's: what a process has done before changes them by a fifth where the machine is translated. Bytes are checked
after the timed part. perftest polls and never sleeps: HRDMA_SPIN_US=999999 has us do the same.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from verbs_instructions import instructions

import hrdma
from hrdma import verbs

SIZES = (64 << 10, 1 << 20)
BATCH, DEPTH = 16, 4  # messages of one post, and posts under way
ALLREDUCE = 4 << 20
STREAMS = 3  # of a kind and perftest's in a round
PAIRS = 5  # of allreduces and perftest in a round: one differs from the next by a tenth
WARM_UP = 2  # allreduces that are not counted: the first is planned, and its memory registered
PORT = 18516
LIMIT = 120.0  # seconds for one program of perftest
WANTED = {"write": 0.95, "send": 0.95, "read": 0.95, "latency Endpoint": 2.0, "latency C": 1.2, "allreduce": 0.8}
IN_C = Path(__file__).parents[1] / "build" / "c" / "plain" / "bench_verbs"
SPIN_US = int(os.environ.get("HRDMA_SPIN_US") or -1)  # of a wait by messages; less than 0: adaptive
CPUS = sorted(os.sched_getaffinity(0))
DEVICE, _, DEVICE_PORT = (os.environ.get("HRDMA_DEVICES") or "sim").partition(":")


class Pair:
    """A queue pair of `hrdma.verbs` to the other rank's, with memory for a post and the other's address."""

    def __init__(self, comm: hrdma.Communicator, device: verbs.Device, nbytes: int) -> None:
        self.comm = comm
        self.pd, self.cq = (
            verbs.ProtectionDomain(device),
            verbs.CompletionQueue(device, 1024, spin_us=50 if SPIN_US < 0 else SPIN_US),
        )
        self.qp = verbs.QueuePair(self.pd, self.cq, sends=128, recvs=128)
        self.array = hrdma.empty(BATCH * nbytes, "uint8")
        self.array[:] = comm.rank + 1
        self.region = verbs.MemoryRegion(self.pd, self.array, remote_read=True, remote_write=True)
        self.pieces = [self.region[:nbytes]] * BATCH  # all from or to one place, as perftest's
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
        """Seconds for so many messages, in posts of `BATCH`; only the last of a post is told."""
        post: dict[str, Callable[[Any, int, bool], None]] = {
            "write": lambda what, at, told: self.qp.write(what, self.remote + at, self.rkey, signaled=told),
            "read": lambda what, at, told: self.qp.read(what, self.remote + at, self.rkey, signaled=told),
            "send": lambda what, _, told: self.qp.post_send(what, signaled=told),
        }
        pieces, nbytes = self.pieces[:-1], len(self.pieces[0])
        start, under_way = time.perf_counter(), 0
        for _ in range(count // BATCH):
            post[kind](pieces, 0, False)
            post[kind](self.pieces[-1], len(pieces) * nbytes, True)
            under_way += 1
            if under_way == DEPTH:
                self.ended()
                under_way -= 1
        for _ in range(under_way):
            self.ended()
        return time.perf_counter() - start

    def receive(self, count: int) -> None:
        """The other end of "send": as many receives as fit are posted, and posted again when they end."""
        room = min(count, 100)
        self.qp.post_recv((self.pieces * room)[:room])
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
            self.qp.post_recv([self.pieces[0]] * again)
            left -= again


def bandwidth(comm: hrdma.Communicator, device: verbs.Device, kind: str, nbytes: int, count: int) -> float:
    """Bytes per second by queue pairs; 0 on rank 1."""
    pair = Pair(comm, device, nbytes)
    seconds = 0.0
    if kind != "send":  # the other end has nothing to do, and sleeps, as perftest's does
        seconds = alone(comm, lambda: pair.stream(kind, count)) or 0.0
    elif comm.rank == 1:
        pair.receive(count)
    else:
        comm.barrier()
        seconds = pair.stream(kind, count)
    comm.barrier()
    target = 0 if kind == "read" else 1
    brought = pair.array if kind == "write" else pair.array[:nbytes]
    if comm.rank == target and not (brought == 2 - target).all():
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
        write, notified, times, clock = end.write, end.notified, [], time.perf_counter
        comm.barrier()
        if comm.rank == 0:
            for number in [i % 100 for i in range(count)]:  # such integers are there already
                start = clock()
                write(y, remote, notify=number)
                back = notified()
                times.append(clock() - start)
                if back != number:
                    raise ValueError("notifications out of order")
        else:
            for _ in range(count):
                write(y, remote, notify=notified())
        comm.barrier()
    return statistics.median(times) / 2 if times else 0.0


def by_message(comm: hrdma.Communicator, count: int) -> float:
    """Seconds one way of a message of 8 bytes."""
    x, times, clock, other = hrdma.zeros(8, "uint8"), [], time.perf_counter, 1 - comm.rank
    send, recv = comm.send, comm.recv
    comm.barrier()
    if comm.rank == 0:
        for _ in range(count):
            start = clock()
            send(x, dst=other)
            recv(x, src=other)
            times.append(clock() - start)
    else:
        for _ in range(count):
            recv(x, src=other)
            send(x, dst=other)
    return statistics.median(times) / 2 if times else 0.0


def allreduce(comm: hrdma.Communicator, count: int) -> float:
    """Bytes per second that each rank sends in an allreduce."""
    x = hrdma.empty(ALLREDUCE // 4, "float32")
    times = []
    for _ in range(WARM_UP + count):
        x[:] = comm.rank + 1
        comm.barrier()
        start = time.perf_counter()
        comm.allreduce(x)
        times.append(time.perf_counter() - start)
        if not (x == comm.size * (comm.size + 1) / 2).all():
            raise ValueError("allreduce is wrong")
    return 2 * ALLREDUCE * (comm.size - 1) / comm.size / statistics.median(times[WARM_UP:])


def counted(comm: hrdma.Communicator) -> tuple[int, float]:
    """What the device's domain has counted, from its text: registrations, and the most MB that were pinned at a time."""
    found = re.search(r"; (\d+) registrations, at most ([\d.]+) MB pinned", comm.info()["domains"]["verbs"])
    assert found
    return int(found[1]), float(found[2])


def memory(comm: hrdma.Communicator, nbytes: int) -> list[str]:
    """What registering costs: one array used twice, and one of more than may be pinned that nobody registered."""
    x = hrdma.zeros(ALLREDUCE // 4, "float32")
    seen = [counted(comm)[0]]
    for _ in range(2):
        comm.allreduce(x)
        seen.append(counted(comm)[0])
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # the sender's, not written to, take no memory
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    y = np.frombuffer(pages, "uint8")
    y[:: 1 << 20] = 1 - comm.rank
    comm.barrier()
    start = time.perf_counter()
    if comm.rank == 0:
        comm.send(y, dst=1, timeout=300)
    elif comm.rank == 1:
        comm.recv(y, src=0, timeout=300)
        if not (y[:: 1 << 20] == 1).all():
            raise ValueError("what was received is wrong")
    comm.barrier()
    took = time.perf_counter() - start
    return [
        f"registrations by an allreduce of an array, and by a second one: {seen[1] - seen[0]}, {seen[2] - seen[1]}",
        f"{nbytes >> 20} MiB of a plain array, by buffers: {nbytes / took / 1e6:.1f} MB/s, at most "
        f"{counted(comm)[1]:.1f} MB pinned",
    ]


# --- perftest ---


def listens(port: int) -> bool:
    """Whether a socket listens there, as the kernel's tables have it (state 0A, any address)."""
    tables = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    return bool(re.search(rf"[0-9A-F]+:{port:04X} 0+:0000 0A", tables))


def perftest(device: verbs.Device, program: str, options: str, column: int, pairs: int = 1) -> float | None:
    """One number of the only row that a program of perftest prints, the mean of pairs at once; None: cannot be had."""
    if device.name == "sim" or not shutil.which(program):
        return None
    words = [program, "-d", device.name, "-x", str(device.gid_index), "-F", *options.split()]
    running: list[subprocess.Popen[str]] = []

    def start(number: int, *more: str) -> subprocess.Popen[str]:
        cpu = CPUS[len(running) % len(CPUS)]
        command = ["taskset", "-c", str(cpu), *words, "-p", str(PORT + number), *more]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return running[-1]

    try:
        servers = [start(number) for number in range(pairs)]
        stop = time.monotonic() + 20
        while not all(listens(PORT + number) for number in range(pairs)):
            if time.monotonic() > stop or any(server.poll() is not None for server in servers):
                raise TimeoutError(f"{program} does not listen on {PORT}")
            time.sleep(0.05)
        clients = [start(number, "127.0.0.1") for number in range(pairs)]
        told = [client.communicate(timeout=LIMIT)[0] for client in clients]
        for server in servers:
            server.communicate(timeout=10)
    finally:
        for one in running:
            one.kill()
            one.wait()
    found = []
    for client, text in zip(clients, told, strict=True):
        rows = re.findall(r"^ *\d+ +\d+ +[\d.]+ .*$", text, re.MULTILINE)
        if client.returncode or len(rows) != 1:
            raise RuntimeError(f"{program} failed: {text}")
        found.append(float(rows[0].split()[column]))
    return statistics.mean(found)


def in_python(ranks: int, kind: str, count: int) -> dict[str, float]:
    """Figures from ranks of their own."""
    command = ["taskset", "-c", ",".join(map(str, CPUS)), sys.executable, "-m", "hrdma", "run", "-n", f"{ranks}"]
    command += ["--timeout", str(LIMIT), __file__, "--only", kind, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT + 20)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stdout}{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout[done.stdout.index("{") :])
    return found


def in_c(device: verbs.Device, count: int) -> dict[str, float]:
    """Seconds by kind from bench_verbs.c, where it was built."""
    if not IN_C.exists():
        return {}
    done = subprocess.run([IN_C, device.name, str(count)], capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        raise RuntimeError(f"{IN_C} failed: {done.stderr}")
    return {f"C {line.split()[0]}": float(line.split()[1]) * 1e-6 for line in done.stdout.splitlines()}


# --- turns ---


def alone(comm: hrdma.Communicator, work: Callable[[], Any]) -> Any:
    """What rank 0 does meanwhile, the others sleep: who waits in a call may be polling."""
    word, result = hrdma.zeros(1, "uint8"), None
    if comm.rank == 0:
        result = work()
        for rank in range(1, comm.size):
            comm.send(word, dst=rank)
        return result
    said, stop = comm.irecv(word, src=0), time.monotonic() + 4 * LIMIT
    while not said.done:
        if time.monotonic() > stop:
            raise TimeoutError("rank 0 says nothing")
        time.sleep(0.2)  # each time it wakes takes from who is measured
    said.wait()
    return None


Note = Callable[[str, str, float | None], None]


def point_to_point(comm: hrdma.Communicator, device: verbs.Device, scale: float, note: Note) -> None:
    for nbytes in SIZES:
        count = BATCH * max(DEPTH, int(scale * (160 << 20) / nbytes / BATCH))
        options, size = f"-s {nbytes} -n {count}", f"{nbytes >> 10} KiB"
        for kind in ("write", "send", "read") * STREAMS:
            note(f"{kind} {size}", "ours", bandwidth(comm, device, kind, nbytes, count))
            theirs = alone(comm, lambda p=f"ib_{kind}_bw", o=options: perftest(device, p, o, 3))
            note(f"{kind} {size}", "perftest", theirs and theirs * (1 << 20))
        note(f"Endpoint.write {size}", "ours", by_endpoint(comm, nbytes, count))
    count = max(100, int(scale * 1000))
    theirs = alone(comm, lambda: perftest(device, "ib_send_lat", f"-s 8 -n {count}", 4))
    ours = alone(comm, lambda: in_python(2, "latencies", count) | in_c(device, count)) or {}
    for name, seconds in ours.items():
        note(f"latency 8 B, {name}", "ours", seconds)
        note(f"latency 8 B, {name}", "perftest", theirs and theirs * 1e-6)


def allreduces(ranks: int, asked: argparse.Namespace, note: Note) -> None:
    """By rank 0 when the others have ended: a process that sleeps beside them costs them a fiftieth."""
    row, options = f"allreduce 4 MiB, {ranks} ranks", f"-b -s 65536 -n {max(64, int(asked.scale * 1000))}"
    with verbs.Device(DEVICE, int(DEVICE_PORT or 1)) as device:
        for _ in range(asked.rounds * PAIRS):
            ours = in_python(ranks, "allreduce", max(5, int(asked.scale * 30)))
            note(row, "ours", ours["ours"])
            note(row, "tcp", ours["tcp"])
            theirs = perftest(device, "ib_write_bw", options, 3, ranks // 2)
            note(row, "perftest", theirs and theirs * (1 << 20) / 2)


def only(kind: str, count: int) -> dict[str, float]:
    """What `in_python` starts."""
    with hrdma.init(transport="verbs", devices=DEVICE) as comm:
        if kind == "latencies":
            return {"Endpoint": latency(comm, count), "send": by_message(comm, count)}
        found = {"ours": allreduce(comm, count)}
    hrdma.finalize()
    with hrdma.init(transport="tcp", devices="") as comm:
        return found | {"tcp": allreduce(comm, count)}


def measure(asked: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Figures by row, ours, perftest's and those of provider tcp; on other ranks than 0 they mean nothing."""
    found: dict[str, dict[str, list[float]]] = {}

    def note(row: str, whose: str, value: float | None) -> None:
        if value is not None:
            found.setdefault(row, {}).setdefault(whose, []).append(value)

    for _ in range(asked.rounds):
        with (
            hrdma.init(transport="verbs", devices=DEVICE) as comm,
            verbs.Device(DEVICE, int(DEVICE_PORT or 1)) as device,
        ):
            if comm.size % 2:
                raise SystemExit("an even number of ranks is wanted: hrdma run -n 2 benchmarks/bench_verbs.py")
            if comm.size == 2:
                point_to_point(comm, device, asked.scale, note)
        hrdma.finalize()
    if comm.size == 2:
        with hrdma.init(transport="verbs", devices=DEVICE) as comm:
            told = memory(comm, max(1, int(asked.scale * 1024)) << 20)
        hrdma.finalize()
        if comm.rank == 0:
            print(*told, sep="\n")
    if comm.rank == 0:
        allreduces(comm.size, asked, note)
    return found


def show(found: dict[str, dict[str, list[float]]]) -> None:
    print(f"{'':30}{'hrdma':>12}{'perftest':>12}{'ratio':>7}  of the rounds     wanted")
    for row, figures in found.items():
        is_time = row.startswith("latency")
        what = f"latency {row.split(', ')[1].split()[0]}" if is_time else row.split()[0]
        wanted = WANTED.get(what)

        def text(whose: str, figures: dict[str, list[float]] = figures, is_time: bool = is_time) -> str:
            value = statistics.median(figures[whose])
            return f"{value * 1e6:.1f} us" if is_time else f"{value / 1e6:.1f} MB/s"

        line = f"{row:30}{text('ours'):>12}"
        if "perftest" in figures:
            ratios = [ours / theirs for ours, theirs in zip(figures["ours"], figures["perftest"], strict=True)]
            line += f"{text('perftest'):>12}{statistics.median(ratios):7.2f}  {min(ratios):.2f} to {max(ratios):.2f}"
            if wanted:
                line = f"{line:78} {'at most' if is_time else 'at least'} {wanted}"
        print(line)
        if "tcp" in figures:
            ratio = statistics.median(figures["ours"]) / statistics.median(figures["tcp"])
            print(f"{'  the same by tcp':30}{text('tcp'):>12}{'':12}{ratio:7.2f}  times as fast as that")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of messages")
    parser.add_argument("--instructions", action="store_true", help="count instructions on device sim, and end")
    parser.add_argument(
        "--only", nargs=2, metavar=("KIND", "N"), help="N latencies, or N of allreduce, as JSON, and end"
    )
    parser.add_argument("--json", type=Path, help="write the figures there too")
    asked = parser.parse_args()
    if asked.instructions:
        instructions()
        return
    rank = int(os.environ.get("RANK", "0"))
    os.sched_setaffinity(0, {CPUS[rank % len(CPUS)]})
    if asked.only:
        figures = only(asked.only[0], int(asked.only[1]))
        if rank == 0:
            print(json.dumps(figures))
        return
    found = measure(asked)
    if rank == 0:
        show(found)
        if asked.json:
            asked.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

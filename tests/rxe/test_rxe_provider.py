"""The verbs provider on a device that is not simulated: its contract, collectives, messages, a rank that is lost."""

from __future__ import annotations

import mmap
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import harness
import hrdma

ROOT = Path(__file__).parents[2]
CONFORMANCE = "build/c/plain/conformance"


@pytest.mark.parametrize("threads", [[], ["--threads"]], ids=["one", "two"])
def test_the_contract(device, threads):
    if "HOSTS" not in os.environ:  # in guests it was built outside
        subprocess.run(["make", "-s", "-f", "tests/core/Makefile", CONFORMANCE], cwd=ROOT, check=True, timeout=300)
    command = [ROOT / CONFORMANCE, "--device", device, *threads, "verbs"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100)
    assert done.returncode == 0, done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 40, done.stdout


def collectives(comm):
    n, me = comm.size, comm.rank
    for count, place in ((7, np.zeros), (100_003, np.zeros), (100_003, hrdma.zeros)):
        what = f"{count} in {place.__module__} on rank {me}"
        parts = np.array([np.arange(count) * n + rank for rank in range(n)], "int64")
        x = place(count, "int64")
        x[:] = parts[me]
        assert (comm.allreduce(x, out=place(count, "int64")) == parts.sum(0)).all(), f"allreduce of {what}"
        assert (comm.allgather(x) == parts.reshape(-1)).all(), f"allgather of {what}"
        mine = [count // n + (rank < count % n) for rank in range(n)]
        wanted = parts.sum(0)[sum(mine[:me]) : sum(mine[: me + 1])]
        assert (comm.reduce_scatter(x, counts=mine) == wanted).all(), f"reduce_scatter of {what}"
        comm.broadcast(x, root=1)
        assert (x == parts[1]).all(), f"broadcast of {what}"


def messages(comm):
    other = 1 - comm.rank
    for size in (0, 8, 4096, 8193, 65_537, 1 << 20):
        sent = np.arange(size, dtype="uint32") * 2 + comm.rank
        got = np.zeros(size, "uint32")
        comm.sendrecv(sent, other, got, other, tag=size)
        assert (got == np.arange(size, dtype="uint32") * 2 + other).all(), size
    with pytest.raises(TimeoutError):
        comm.recv(np.zeros(1 << 20, "uint8"), other, tag=1, timeout=0.2)
    for size in (9, 1 << 20):
        sending = comm.isend(np.ones(size, "uint8"), other, tag=2)
        with pytest.raises(hrdma.RequestError, match="larger than the buffer"):
            comm.recv(np.zeros(8, "uint8"), other, tag=2)
        sending.wait()


LARGE = 1 << 30
PINNED = 64 << 20


def pinned():
    """Bytes that devices have pinned of this process, as the kernel counts them."""
    return int(re.search(r"VmPin:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def large(comm):
    """An array that nobody registered, of more than may be pinned: the most that was pinned meanwhile, beyond what was before."""
    marks = slice(0, None, (1 << 20) + 1)
    pages = mmap.mmap(-1, LARGE)
    pages.madvise(mmap.MADV_NOHUGEPAGE)  # the sender's is one page of zeros, but for the marks: two GiB would not fit
    x = np.frombuffer(pages, "uint8")
    if comm.rank == 0:
        x[marks] = np.arange(len(x[marks])) % 251
    before, most, over = pinned(), 0, threading.Event()

    def look():
        nonlocal most
        while not over.wait(0.005):
            most = max(most, pinned() - before)

    looks = threading.Thread(target=look)
    comm.barrier()
    looks.start()
    comm.send(x, 1, timeout=60) if comm.rank == 0 else comm.recv(x, 0, timeout=60)
    over.set()
    looks.join()
    if comm.rank == 1:
        assert (x[marks] == np.arange(len(x[marks])) % 251).all()
        x[marks] = 0
        assert not any(part.any() for part in np.split(x, 64))
    peers = comm.stats()["peers"][1 - comm.rank]
    return [most, before, peers]


@pytest.mark.timeout(100)
def test_a_large_array_goes_through_staging_that_is_bounded(device):
    env = {"HRDMA_TRANSPORT": "verbs", "HRDMA_DEVICES": device}
    for most, before, peers in harness.ranks(large, 2, env=env, timeout=90):
        print(most, before, peers)
        assert 0 < before + most <= PINNED, (most, before, peers)


def job(comm):
    """One job for all of it: in a guest to start ranks costs most."""
    collectives(comm)
    if comm.rank < 2:
        messages(comm)
    comm.barrier()
    used = sorted(set(comm.info()["transports"].values()) - {"loop"})
    comm.barrier()
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(hrdma.PeerError) as caught:
        while True:
            comm.allreduce(np.ones(100_000))
    took = time.monotonic() - start
    assert (caught.value.rank, caught.value.transport) == (2, "verbs")
    rest = comm.shrink(20.0)
    assert rest.allreduce(np.ones(3), out=np.zeros(3))[0] == 2
    return [used, took]


def test_collectives_messages_and_a_killed_rank(device):
    env = {"HRDMA_TRANSPORT": "verbs", "HRDMA_DEVICES": device}
    found = harness.outcomes(job, 3, env=env, timeout=110)
    assert [one.status for one in found] == [0, 0, -signal.SIGKILL], found
    for one in found[:2]:
        used, took = one.value
        assert used == ["verbs"] and took < 10, found

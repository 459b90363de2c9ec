"""The verbs provider on a device that is not simulated: its contract, collectives, messages, a rank that is lost."""

from __future__ import annotations

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


def output(name: str, *arguments: str, **env: str) -> str:
    """What a C program prints, all of whose tests must pass."""
    program = f"build/c/plain/{name}"
    if "HOSTS" not in os.environ:  # in guests it was built outside
        subprocess.run(["make", "-s", "-f", "tests/core/Makefile", program], cwd=ROOT, check=True, timeout=300)
    done = subprocess.run(
        [ROOT / program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        env=os.environ | env,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def passed(text: str) -> int:
    return int(re.findall(r"(\d+) passed", text)[-1])


@pytest.mark.parametrize("threads", [[], ["--threads"]], ids=["one", "two"])
def test_the_contract(device, threads):
    # Seconds for what takes milliseconds on a quiet machine: two threads on translated processors wake each other 3000 times.
    assert passed(output("conformance", "--limit", "40", "--device", device, *threads, "verbs")) > 40


@pytest.mark.parametrize(("program", "least"), [("test_verbs_completions", 64), ("test_verbs_states", 24)])
def test_completions_are_those_of_the_simulated_device(device, program, least):
    """One table, of which every line is said here as it is there."""
    simulated, here = (output(program, HR_TEST_SAY="1", HR_TEST_DEVICE=name) for name in ("sim_rxe", device))
    assert passed(here) >= least
    assert here == simulated


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


def registrations(comm):
    return int(re.search(r"; (\d+) registrations, ", comm.info()["domains"]["verbs"])[1])


def repeated(comm):
    """How often memory was registered, after each round of the same operations on the same arrays."""
    x, y, found = np.ones((2, 150_000)), np.ones(150_000), []
    for turn in range(4):
        comm.allreduce(x[turn % 2], op="max")
        comm.sendrecv(x[turn % 2], 1 - comm.rank, y, 1 - comm.rank)
        found.append(registrations(comm))
    return found


LARGE = 18 << 20
PINNED = 16 << 20


def pinned():
    """Bytes that devices have pinned of this process, as the kernel counts them."""
    return int(re.search(r"VmPin:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def large(comm):
    """An array of more than may be pinned, which nobody registered: the most that was pinned while it was moved."""
    sent, most, over = np.tile(np.arange(256, dtype="uint8"), LARGE >> 8), 0, threading.Event()
    x = sent if comm.rank == 0 else np.zeros_like(sent)

    def look():
        nonlocal most
        while not over.wait(0.02):
            most = max(most, pinned())

    looks = threading.Thread(target=look)
    comm.barrier()
    looks.start()
    try:
        comm.send(x, 1, timeout=60) if comm.rank == 0 else comm.recv(x, 0, timeout=60)
    finally:
        over.set()
        looks.join()
    assert (x == sent).all()
    return most


@pytest.mark.timeout(100)
def test_a_large_array_goes_through_buffers(device):
    """As tests/api/test_devices.py has it with a GiB on the simulated device."""
    env = {"HRDMA_TRANSPORT": "verbs", "HRDMA_DEVICES": device, "HRDMA_VERBS": f"pin={PINNED}"}
    for most in harness.ranks(large, 2, env=env, timeout=90):
        assert 0 < most <= PINNED, most


def job(comm):
    """One job for all of it: in a guest to start ranks costs most."""
    collectives(comm)
    pair = comm.split(0 if comm.rank < 2 else 1)
    counts = []
    if comm.rank < 2:
        messages(comm)
        counts = repeated(pair)
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
    return [used, took, counts]


def test_collectives_messages_and_a_killed_rank(device):
    env = {"HRDMA_TRANSPORT": "verbs", "HRDMA_DEVICES": device}
    found = harness.outcomes(job, 3, env=env, timeout=110)
    assert [one.status for one in found] == [0, 0, -signal.SIGKILL], found
    for one in found[:2]:
        used, took, counts = one.value
        assert used == ["verbs"] and took < 10, found
        assert counts[0] > 0 and len(set(counts)) == 1, found  # of plain arrays, too

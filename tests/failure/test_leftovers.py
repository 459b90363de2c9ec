"""After any end nothing is left: no shared-memory file, no process, no listening port, no Unix socket."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from ports import free_port
from rankside import Me, attempt

import hrdma

TRANSPORTS = ("shm", "tcp", "verbs")
LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp


def busy(me: Me, how: str) -> None:
    comm = hrdma.init()
    x, plain = hrdma.empty(1 << 20), np.empty(1 << 20)
    comm.allreduce(x)
    comm.barrier()
    me.tell("busy")
    if how == "exit":
        me.hear()
        return
    if how == "raise" and me.rank == 1:
        me.hear()
        raise RuntimeError("on purpose")
    for _ in range(1_000_000):
        comm.allreduce(x)
        comm.allreduce(plain)


def sockets(pid: int) -> set[int]:
    """Inodes of the sockets that a process has open."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return found


def ports(inodes: set[int]) -> set[int]:
    """TCP ports that these sockets listen on."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and int(fields[9]) in inodes:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


def names(inodes: set[int] | None) -> set[str]:
    """Names of these Unix sockets; of all when None."""
    found = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and (inodes is None or int(fields[6]) in inodes):
            found.add(fields[7])
    return found


def children(pid: int) -> set[int]:
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        found.update(int(word) for word in (task / "children").read_text().split())
    return found


def files() -> set[str]:
    found = set()
    for folder in ("/dev/shm", "/run/shm", os.environ.get("TMPDIR", "/tmp")):
        if os.path.isdir(folder):
            found.update(f"{folder}/{name}" for name in os.listdir(folder) if name.startswith(("hrdma", ".hrdma")))
    return {name for name in found if not name.partition("hrdma-failure-")[1]}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("how", ["kill all", "kill one", "terminate", "interrupt", "exit", "raise"])
def test_nothing_is_left(start, transport, how):
    before = files()
    port = free_port()
    job = start(busy, 3, transport=transport, how=how, port=port)
    for rank in job:
        rank.event("busy")
    inodes = set().union(*(sockets(rank.pid) for rank in job))
    listening, named = ports(inodes), names(inodes)
    family = set().union(*(children(rank.pid) for rank in job)) | {rank.pid for rank in job}
    assert port in listening, "the control plane listens, so the check could see it"
    assert len(listening) >= 3 and (transport == "tcp" or len(named) >= 3), (listening, named)
    assert files() == before, "files do not exist even while the job runs"
    if how == "kill all":
        for rank in job:
            rank.signal(signal.SIGKILL)
    elif how == "kill one":
        job[2].signal(signal.SIGKILL)
    elif how in ("terminate", "interrupt"):
        for rank in job:
            rank.signal(signal.SIGTERM if how == "terminate" else signal.SIGINT)
    else:
        for rank in job:
            rank.say("go")
    for rank in job:
        rank.ended(8)
    until = time.monotonic() + 5.0
    while time.monotonic() < until and any(os.path.exists(f"/proc/{pid}") for pid in family):
        time.sleep(0.01)
    assert not [pid for pid in family if os.path.exists(f"/proc/{pid}")]
    # by inode: another program may have got the same number meanwhile
    assert not ports(inodes) and not names(inodes), (ports(inodes), names(inodes))
    assert files() == before
    # and the next job may have the port
    again = start(quick, 2, transport=transport, port=port)
    assert [rank.value() for rank in again] == [2.0, 2.0]


def quick(me: Me) -> float:
    with hrdma.init() as comm:
        return float(comm.allreduce(np.ones(10))[0])


def refused(me: Me, change: dict[str, dict[str, str]]) -> None:
    os.environ.update(change.get(str(me.rank), {}))
    me.tell("raised", **(attempt(me, lambda: hrdma.init(timeout=3)) or {"error": None}))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"2": {"RANK": "1"}}, "two processes claim to be rank 1"),
        ({"2": {"RANK": "0"}}, ""),
        ({"1": {"WORLD_SIZE": "4"}}, "rank 1 was started with a world size of 4, rank 0 with 3"),
        ({"2": {"WORLD_SIZE": "5", "RANK": "4"}}, "rank 4 was started with a world size of 5, rank 0 with 3"),
    ],
    ids=["duplicate rank", "duplicate rank 0", "larger world", "rank beyond"],
)
def test_a_wrong_world_is_refused_on_all_ranks(start, change, text):
    """Nobody waits for the deadline, and what was opened is closed again: the same processes could try anew."""
    job = start(refused, 3, change=change)
    for rank in job:
        raised = rank.event("raised")
        if text:
            assert raised["error"] == "ValueError" and text in raised["text"], job.shown()
        else:  # one of the two has the port; the other one says so
            assert raised["error"] in ("HrdmaError", "TimeoutError", "PeerError"), job.shown()


def again_and_again(me: Me) -> int:
    for number in range(6):
        comm = hrdma.init()
        comm.allreduce(np.ones(1))
        if me.rank == number % 3:
            time.sleep(0.05)
        hrdma.finalize()
    return 6


def test_the_next_job_may_begin_while_the_last_one_ends(start):
    """A rank that is quick to leave meets those who still do, at the same port."""
    job = start(again_and_again, 3)
    assert [rank.value() for rank in job] == [6, 6, 6]

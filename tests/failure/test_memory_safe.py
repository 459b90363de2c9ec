"""Once a call has raised, nothing that a lost or late peer does can change the caller's memory."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from jobs import Job
from rankside import Me, attempt

import hrdma
from hrdma.cli.probe import siblings_may_read

TRANSPORTS = ("shm", "tcp", "verbs")
PATTERN = 0x5A
COUNT = 1 << 21  # doubles: 16 MiB, many times what is in flight


def make(registered: bool, count: int) -> np.ndarray:
    return (hrdma.empty if registered else np.empty)(count, "float64")


def resumed(me: Me, operation: str, registered: bool, fault: str = "") -> None:
    """Rank 1 is stopped from outside while data is on its way, or by a fault; the others refill their memory after the error."""
    if fault and me.rank == 1:
        os.environ["HRDMA_FAULT"] = fault
    comm = hrdma.init()
    x, out = make(registered, COUNT), make(registered, COUNT)
    x[:] = me.rank + 1
    others = [rank for rank in range(comm.size) if rank != 1]
    comm.barrier()
    me.tell("begins")

    def work() -> None:
        while True:
            if operation == "allreduce":
                comm.allreduce(x, out=out)
            elif operation == "allreduce in place":
                comm.allreduce(out)
            elif operation == "alltoall":
                comm.alltoall(x[: COUNT // comm.size * comm.size], out[: COUNT // comm.size * comm.size])
            elif me.rank == 1:
                for other in others:
                    comm.send(x, other)
            else:
                comm.recv(out, 1)

    error = attempt(me, work)
    x.view("uint8")[:] = PATTERN
    out.view("uint8")[:] = PATTERN
    me.tell("raised", **(error or {"error": None}))
    if me.rank == 1:
        return
    me.hear()
    me.tell("checked", changed=int((x.view("uint8") != PATTERN).sum() + (out.view("uint8") != PATTERN).sum()))


def cases() -> list:
    """All at night; otherwise each operation with each kind of memory, over one transport or the other."""
    return [
        pytest.param(transport, registered, operation, marks=[] if (i + j + k) % 2 else pytest.mark.nightly)
        for i, transport in enumerate(TRANSPORTS)
        for j, registered in enumerate((True, False))
        for k, operation in enumerate(("recv", "allreduce", "allreduce in place", "alltoall"))
    ]


@pytest.mark.parametrize(("transport", "registered", "operation"), cases())
def test_the_stopped_rank_that_wakes_up_changes_nothing(start, transport, registered, operation):
    job = start(resumed, 3, transport=transport, operation=operation, registered=registered)
    for rank in job:
        rank.event("begins")
    time.sleep(0.01 + 0.01 * registered)
    job[1].signal(signal.SIGSTOP)
    changes_nothing_later(job)


@pytest.mark.parametrize("puts", (1, 2, 30))
@pytest.mark.parametrize(("operation", "ranks"), [("allreduce in place", 3), ("recv", 2)], ids=["result", "help"])
def test_who_is_stopped_as_it_is_about_to_put_changes_nothing(start, operation, ranks, puts):
    """It has been told that it may write into the memory of a peer, and calls the kernel when it is awake again."""
    permitted, why = siblings_may_read()
    if not permitted:
        pytest.skip(f"processes may not write to each other's memory here: {why}")
    fault = f"shm:stop=after:{puts},ops=put"
    job = start(resumed, ranks, transport="shm", operation=operation, registered=False, fault=fault)
    changes_nothing_later(job)


def changes_nothing_later(job: Job) -> None:
    """Rank 1 is stopped, or about to be, and goes on when the others have raised and refilled their memory."""
    job[1].event("stopped")
    for rank in job.survivors(1):
        raised = rank.event("raised")
        assert (raised["error"], raised["rank"]) == ("PeerError", 1), job.shown()
    job[1].signal(signal.SIGCONT)
    assert job[1].event("raised")["error"] == "PeerError", job.shown()
    time.sleep(0.3)
    for rank in job.survivors(1):
        rank.say("check")
        assert rank.event("checked")["changed"] == 0, job.shown()


MESSAGES = 24


def late(me: Me, registered: bool) -> None:
    """Rank 1 stops for a moment in the middle of large messages; a receive gives up meanwhile, and nobody is lost."""
    comm = hrdma.init()
    x = make(registered, COUNT)
    comm.barrier()
    if me.rank == 1:
        me.fall_later("stop", 0.02)
        for number in range(MESSAGES):
            x[:] = number
            comm.send(x, 0)
        comm.allreduce(x)
        return
    found = []

    def receive(timeout: float) -> None:
        comm.recv(x, 1, timeout=timeout)
        found.append(x[-1])
        assert (x == x[-1]).all()

    error = attempt(me, lambda: [receive(0.15) for _ in range(MESSAGES)])
    x.view("uint8")[:] = PATTERN
    me.tell("raised", **(error or {"error": None}))
    me.hear()
    me.tell("checked", changed=int((x.view("uint8") != PATTERN).sum()))
    while not found or found[-1] < MESSAGES - 1:  # the connection has not suffered: all that was sent since comes
        receive(5.0)
    x[:] = 1
    comm.allreduce(x)
    me.tell("went on", lost=MESSAGES - len(found), right=bool((x == MESSAGES).all()))


def gives_up_and_checks(start, transport: str, registered: bool) -> Job:
    """A job whose rank 0 has given up a receive from rank 1, which stopped and has gone on: nothing was written since."""
    job = start(late, 2, transport=transport, registered=registered, env={"HRDMA_HEARTBEAT": "10"})
    job[1].event("stopped")
    assert job[0].event("raised")["error"] == "TimeoutError", job.shown()
    job[1].signal(signal.SIGCONT)
    time.sleep(0.3)
    job[0].say("check")
    assert job[0].event("checked")["changed"] == 0, job.shown()
    return job


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "plain"])
def test_a_receive_that_gave_up_is_not_written_to_over_verbs_at_the_price_of_the_connection(start, registered):
    """A device cannot be told to stop writing, and a provider that is stopped cannot answer."""
    job = gives_up_and_checks(start, "verbs", registered)
    assert job[0].event("failed", "went on").get("error", "PeerError") == "PeerError", job.shown()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("registered", [True, False], ids=["registered", "plain"])
def test_a_receive_that_gave_up_is_not_written_to_any_more(start, transport, registered):
    job = gives_up_and_checks(start, transport, registered)
    went_on = job[0].event("went on")
    assert went_on["right"] and went_on["lost"] <= 1, job.shown()
    assert [rank.ended() for rank in job] == [0, 0], job.shown()

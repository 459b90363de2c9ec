"""Calls that do not match raise on every rank, name who differs, within 3 s; nothing hangs, nothing outside is written."""

from __future__ import annotations

import time

import numpy as np
import pytest
from jobs import in_time
from machine import took
from rankside import Me, describe_error
from windows import unless_starved

import hrdma

TRANSPORTS = ("shm", "tcp", "verbs")
GUARD = 64
SECONDS = 3.0


def guarded(count: int, dtype: str, registered: bool) -> tuple[np.ndarray, np.ndarray]:
    """An array, and the memory around it."""
    whole = (hrdma.empty if registered else np.empty)(count + 2 * GUARD, dtype)
    whole.view("uint8")[:] = 0x77
    return whole[GUARD : GUARD + count], whole


def intact(part: np.ndarray, whole: np.ndarray) -> bool:
    size = GUARD * whole.itemsize
    raw = whole.view("uint8")
    return bool((raw[:size] == 0x77).all() and (raw[len(raw) - size :] == 0x77).all())


def call(comm: hrdma.Communicator, which: str, other: bool, count: int, arrays: list) -> None:
    """One collective; differently where `other`."""
    size = comm.size

    def new(n: int, dtype: str = "float32") -> np.ndarray:
        arrays.append(guarded(n, dtype, count % 2 == 0))
        return arrays[-1][0]

    if which == "collective":
        comm.allgather(new(count), new(count * size)) if other else comm.allreduce(new(count))
    elif which == "dtype":
        comm.allreduce(new(count, "float64" if other else "float32"))
    elif which == "size of the same bytes":
        comm.allreduce(new(count, "int16") if other else new(count // 2, "int32"))
    elif which == "size":
        comm.allreduce(new(count // 2 if other else count))
    elif which == "larger":
        comm.allreduce(new(count * 2 if other else count))
    elif which == "op":
        comm.allreduce(new(count), "max" if other else "sum")
    elif which == "deterministic":
        comm.allreduce(new(count), deterministic=other)
    elif which == "root of broadcast":
        comm.broadcast(new(count), 1 if other else 0)
    elif which == "root of reduce":
        comm.reduce(new(count), 1 if other else 0)
    elif which == "size of broadcast":
        comm.broadcast(new(count // 2 if other else count), 0)
    elif which == "size of gather":
        x = new(count // 2 if other else count)
        comm.gather(x, 0, out=new(len(x) * size) if comm.rank == 0 else None)
    elif which == "size of scatter":
        n = count // 2 if other else count
        comm.scatter(new(n * size) if comm.rank == 0 else None, 0, out=new(n))
    elif which == "counts":
        counts = [count] * size
        if other:
            counts[0] += 1
        comm.reduce_scatter(new(sum(counts)), out=new(counts[comm.rank]), counts=counts)
    elif which == "size of alltoall":
        n = count // (2 if other else 1) * size
        comm.alltoall(new(n), new(n))
    elif which == "counts of alltoall":
        sends, takes = [count] * size, [count] * size
        if other:
            sends[(comm.rank + 1) % size] += 1
        comm.alltoall(new(sum(sends)), new(sum(takes)), counts=(sends, takes))
    elif which == "barrier":
        comm.barrier() if other else comm.broadcast(new(count), 0)
    elif which == "order":
        for op in ("max", "sum") if other else ("sum", "max"):
            comm.allreduce(new(count), op)
    else:
        raise AssertionError(which)


def mismatched(me: Me, which: str, odd: int, count: int) -> None:
    comm = hrdma.init()
    side = comm.dup()
    arrays: list[tuple[np.ndarray, np.ndarray]] = []
    comm.barrier()
    me.tell("ready")
    me.hear()
    started = time.monotonic()
    found = {"error": None, "text": ""}
    try:
        call(comm, which, me.rank == odd, count, arrays)
        comm.barrier()  # a rank that only sends has done its part: it is told at the latest here
    except Exception as error:
        found = describe_error(error)
    me.tell("raised", took=time.monotonic() - started, intact=all(intact(*pair) for pair in arrays), **found)
    try:
        comm.barrier(timeout=5)
        me.tell("again", error=None)
    except Exception as error:
        me.tell("again", **describe_error(error))
    x = np.ones(1000)
    me.tell("side", sum=float(side.allreduce(x)[0]))
    rest = comm.shrink(5.0)
    me.tell("rest", sum=float(rest.allreduce(np.ones(100_000))[-1]))
    me.hear()  # the others have it, too: what a process that ends has under way goes with it


WHICH = [
    "collective",
    "dtype",
    "size of the same bytes",
    "size",
    "larger",
    "op",
    "deterministic",
    "root of broadcast",
    "root of reduce",
    "size of broadcast",
    "size of gather",
    "size of scatter",
    "counts",
    "size of alltoall",
    "counts of alltoall",
    "barrier",
    "order",
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every way for small and large, each over one of the transports; over both at night."""
    if "odd" in metafunc.fixturenames:
        nightly = metafunc.config.getoption("--nightly", default=False)
        cases = [
            (which, odd, count, transport)
            for number, which in enumerate(WHICH)
            for kind, count in enumerate((100, 1_000_000))
            for odd in ((0, 1, 2) if nightly else ((number + kind) % 3,))
            for turn, transport in enumerate(TRANSPORTS)
            if nightly or (number // 3 + kind + turn) % 2
        ]
        metafunc.parametrize(("which", "odd", "count", "transport"), cases)


def test_every_rank_is_told_who_differs(start, which, odd, count, transport):
    job = start(mismatched, 3, transport=transport, which=which, odd=odd, count=count)
    for rank in job:
        rank.event("ready")
    for rank in job:
        rank.say("go")
    for rank in job:
        raised = rank.event("raised", seconds=10)
        assert raised["error"] == "CollectiveMismatchError", job.shown()
        assert f"rank {odd} calls" in raised["text"], job.shown()
        assert took(raised["time"] - raised["took"], raised["time"]) < SECONDS, job.shown()
        assert raised["intact"], job.shown()
        assert rank.event("again")["error"] == "CollectiveMismatchError", job.shown()
        assert rank.event("side")["sum"] == 3.0, job.shown()
        assert rank.event("rest")["sum"] == 3.0, job.shown()
    for rank in job:
        rank.say("end")


def through(me: Me, which: str) -> None:
    """As `mismatched`, small, and whoever has done its part calls nothing more until all are known.

    Who has returned cannot raise: it is told at its next call, as thoroughly.
    """
    comm = hrdma.init()
    comm.barrier()
    me.tell("ready")
    me.hear()
    started = time.monotonic()
    for turn in range(2):
        found = {"error": None, "text": ""}
        try:
            if turn == 1:
                comm.barrier()
            elif which == "root of broadcast":
                comm.broadcast(np.zeros(4), 2 if me.rank == 1 else 0)
            elif which == "nothing to reduce":
                comm.reduce(np.zeros(0 if me.rank == 1 else 4))
            elif which == "nothing to gather":
                comm.gather(np.zeros(0 if me.rank == 1 else 4))
            elif which == "nothing for one":  # rank 1 sends nothing to rank 2, which expects 3 as from the others
                sends = [3, 3, 0] if me.rank == 1 else [3, 3, 3]
                comm.alltoall(np.zeros(sum(sends)), counts=(sends, [3, 3, 3]))
            else:
                comm.allreduce(np.zeros(0 if me.rank == 1 else 4))
        except Exception as error:
            found = describe_error(error)
        me.tell("called", took=time.monotonic() - started, **found)
        me.hear()


WHICH_THROUGH = ["root of broadcast", "nothing to reduce", "nothing to gather", "nothing to sum", "nothing for one"]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("which", WHICH_THROUGH)
def test_who_waits_for_those_who_are_through_is_told_in_time(start, which, transport):
    unless_starved(lambda: told(start, which, transport))


def told(start, which, transport):
    job = start(through, 3, transport=transport, which=which)
    for rank in job:
        rank.event("ready")
    for rank in job:
        rank.say("go")
    first = [rank.event("called", seconds=10) for rank in job]
    assert any(one["error"] for one in first), job.shown()
    for rank, one in zip(job, first):
        if one["error"]:
            assert one["error"] == "CollectiveMismatchError" and "rank 1 calls" in one["text"], job.shown()
            in_time(job, rank, one["time"] - one["took"], one, SECONDS)
    for rank in job:
        rank.say("go")
    for rank in job:
        second = rank.event("called", count=2)
        assert second["error"] == "CollectiveMismatchError" and "rank 1 calls" in second["text"], job.shown()
        if which == "nothing for one":
            assert "rank 1 sends nothing to rank 2, which expects something" in second["text"], job.shown()
        rank.say("go")


def late_but_right(me: Me) -> None:
    comm = hrdma.init()
    for _ in range(3):
        if me.rank == 1:
            time.sleep(1.4)
        comm.allreduce(np.ones(10))
        comm.broadcast(np.ones(1_000_000), 1)
    comm.barrier()


def test_a_slow_rank_is_not_accused(start):
    job = start(late_but_right, 3)
    for rank in job:
        rank.value()

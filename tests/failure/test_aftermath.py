"""What holds after a failure: what breaks and what goes on, who is lost and who is not, and going on with the survivors."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
import time

import numpy as np
import pytest
from machine import took
from rankside import Me, attempt
from windows import one_good

import hrdma

TRANSPORTS = ("shm", "tcp", "verbs")
over_each_transport = pytest.mark.parametrize("transport", TRANSPORTS)


def night(*cases: tuple) -> list:
    return [pytest.param(*case, marks=pytest.mark.nightly) for case in cases]


def total(comm: hrdma.Communicator, value: int) -> int:
    """An allreduce that goes through the network in earnest."""
    x = np.full(100_000, value)
    comm.allreduce(x)
    assert (x == x[0]).all()
    return int(x[0])


def together(comm: hrdma.Communicator, me: Me, victim: int) -> None:
    """A barrier that all have left when the victim goes on."""
    comm.barrier()
    if me.rank == victim:
        time.sleep(0.1)


def report(me: Me, event: str, call) -> None:
    me.tell(event, **(attempt(me, call) or {"error": None}))


# -- what breaks, and what does not ---------------------------------------------------------------------------------------------


def halves(me: Me) -> None:
    world = hrdma.init()
    half = world.split(me.rank // 2)
    pair = world.split(me.rank % 2)
    other = half.dup()
    together(world, me, 3)
    if me.rank == 3:
        me.fall("kill")
    report(me, "world", world.barrier)
    report(me, "half", lambda: total(half, 1))
    report(me, "dup", lambda: total(other, 1))
    report(me, "pair", lambda: total(pair, 1))
    report(me, "message", lambda: world.send(b"x", (me.rank + 1) % 2) if me.rank < 2 else world.barrier())
    if me.rank < 2:
        hrdma.finalize()


@over_each_transport
def test_a_lost_rank_breaks_exactly_the_communicators_that_contain_it(start, transport):
    job = start(halves, 4, transport=transport)
    for rank in job.survivors(3):
        broken = {"world", "message"} | ({"half", "dup"} if rank.rank == 2 else {"pair"} if rank.rank == 1 else set())
        for name in ("world", "half", "dup", "pair", "message"):
            found = rank.event(name)
            assert (found["error"] == "PeerError") == (name in broken), f"{name}\n{job.shown()}"
            if name in broken:
                # in the communicator's own ranks: of the half and of the pair it is the second one
                assert found["rank"] == (3 if name in ("world", "message") else 1), job.shown()


def all_waits(me: Me, ways: list[str]) -> None:
    """Every way of waiting at once, each on a communicator of its own."""
    world = hrdma.init()
    comms = {way: world.dup() for way in ways}
    x, out = np.zeros(1 << 20), np.zeros(1 << 20)
    together(world, me, 1)
    if me.rank == 1:
        time.sleep(0.1)
        me.fall("kill")

    def gather() -> None:
        async def both() -> None:
            await comms["await"].irecv(out, 1)

        asyncio.run(both())

    def later(request: hrdma.Request) -> None:
        time.sleep(0.5)
        request.wait()

    calls = {
        "send": lambda: comms["send"].send(x, 1),
        "recv": lambda: comms["recv"].recv(bytearray(8), 1),
        "any": lambda: comms["any"].recv(bytearray(8)),
        "allreduce": lambda: comms["allreduce"].allreduce(x.copy()),
        "async": lambda: comms["async"].allreduce(x.copy(), async_op=True).wait(),
        "late": lambda: later(comms["late"].barrier(async_op=True)),
        "await": gather,
    }
    threads = [threading.Thread(target=report, args=(me, way, calls[way])) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report(me, "posted after", lambda: comms["any"].irecv(bytearray(8)).wait())


@over_each_transport
def test_whoever_waits_however_is_told(start, transport):
    ways = ["send", "recv", "any", "allreduce", "async", "late", "await"]
    job = start(all_waits, 2, transport=transport, ways=ways)
    fell = job[1].event("ended")["time"]
    for way in ways:
        found = job[0].event(way)
        assert (found["error"], found["rank"], found["transport"]) == ("PeerError", 1, transport), job.shown()
        assert took(fell, found["at"]) < 1.0, job.shown()
    assert job[0].event("posted after")["error"] == "PeerError", job.shown()


def leaves_early(me: Me) -> None:
    comm = hrdma.init()
    comm.barrier()
    if me.rank == 2:
        comm.send(b"12345678", 0)
        comm.close()
        return
    if me.rank == 1:
        comm.send(b"12345678", 0)
    buffer = bytearray(8)
    if me.rank == 0:
        # what they had sent is received after they are gone, whoever it was
        time.sleep(0.3)
        sources = sorted(comm.recv(buffer).source for _ in range(2))
        me.tell("received", sources=sources)
        comm.send(b"x", 1, tag=1)
        report(me, "any", lambda: comm.recv(buffer, tag=5))
        report(me, "any again", lambda: comm.irecv(buffer, tag=5).wait())
        report(me, "send", lambda: comm.send(buffer, 2))
    else:
        comm.recv(buffer, 0, tag=1)
        comm.close()


@over_each_transport
def test_leaving_early_in_good_order_fails_only_what_needs_it(start, transport):
    job = start(leaves_early, 3, transport=transport)
    assert job[0].event("received")["sources"] == [1, 2], job.shown()
    for event in ("any", "any again", "send"):
        assert job[0].event(event)["error"] == "PeerError", job.shown()
    assert [rank.ended() for rank in job] == [0, 0, 0], job.shown()


# -- deadlines -----------------------------------------------------------------------------------------------------------------


def deadlines(me: Me) -> None:
    world = hrdma.init()
    side = world.split(0 if me.rank < 2 else 1)
    comm = world.dup()
    world.barrier()
    if me.rank == 0:
        report(me, "recv", lambda: world.recv(np.zeros(10), 1, tag=3, timeout=0.2))
        report(me, "send", lambda: world.send(np.zeros(1 << 20), 1, tag=4, timeout=0.2))
    world.barrier()
    me.tell("world goes on", sum=total(world, 1))
    if me.rank == 2:
        world.recv(bytearray(1), 1, tag=5)  # late: the others have given up, and word of it came before this message
    report(me, "collective", lambda: comm.allreduce(np.zeros(100), timeout=0.5 if me.rank == 0 else 8.0))
    if me.rank == 1:
        world.send(b"x", 2, tag=5)
    report(me, "broken", lambda: comm.barrier(timeout=8.0))
    me.tell("side goes on", sum=total(side, 1))
    me.tell("world still goes on", sum=total(world, 1))
    rest = comm.shrink(5.0)
    me.tell("shrunk", members=list(rest.members), sum=total(rest, 1))


@over_each_transport
def test_deadlines_of_messages_and_of_collectives(start, transport):
    """A timed-out message ends alone; a timed-out collective breaks its communicator, on all ranks, and no other."""
    job = start(deadlines, 3, transport=transport)
    for event in ("recv", "send"):
        assert job[0].event(event)["error"] == "TimeoutError", job.shown()
    first = job[0].event("collective")
    assert first["error"] == "TimeoutError", job.shown()
    for rank in job:
        assert rank.event("world goes on")["sum"] == 3, job.shown()
        found, again = rank.event("collective"), rank.event("broken")
        if rank.rank:
            assert found["error"] == again["error"] == "CollectiveTimeoutError", job.shown()
            assert "rank 0" in found["text"] and "allreduce" in found["text"], job.shown()
        assert again["error"] and took(found["time"], again["time"]) < 0.5, job.shown()
        assert rank.event("side goes on")["sum"] == (1 if rank.rank == 2 else 2), job.shown()
        assert rank.event("world still goes on")["sum"] == 3, job.shown()
        assert rank.event("shrunk")["members"] == [0, 1, 2], job.shown()
    assert took(first["at"], job[1].event("collective")["at"]) < 0.5, job.shown()


def unopened(me: Me) -> None:
    world = hrdma.init()
    world.barrier()
    if me.rank == 1:
        world.recv(bytearray(1), 0)  # the other has given up, and word of it came before this message
    comm = world.dup()  # costs no traffic, so rank 1 has it only now
    report(me, "barrier", lambda: comm.barrier(timeout=0.3 if me.rank == 0 else 8.0))
    if me.rank == 0:
        world.send(b"x", 1)
    world.barrier()


@over_each_transport
def test_a_communicator_that_broke_before_it_was_opened_here_is_broken(start, transport):
    job = start(unopened, 2, transport=transport)
    assert job[0].event("barrier")["error"] == "TimeoutError", job.shown()
    found = job[1].event("barrier")
    assert found["error"] == "CollectiveTimeoutError" and "rank 0" in found["text"], job.shown()


# -- who is lost and who is not ---------------------------------------------------------------------------------------------------


def holds(me: Me, busy: int, seconds: float) -> None:
    comm = hrdma.init()
    comm.barrier()
    if me.rank == busy:
        me.tell("holds")
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # PyDLL keeps the interpreter's lock
    x = np.full(1 << 18, 1.0)
    comm.allreduce(x)
    me.tell("sum", value=float(x[-1]))
    comm.barrier()


@pytest.mark.parametrize(("busy", "transport"), [(0, "shm"), (1, "tcp"), *night((1, "shm"), (0, "tcp"))])
def test_a_rank_that_holds_the_interpreter_for_long_is_not_lost(start, request, transport, busy):
    """20 s with a heartbeat of 5 s at night; the same in proportion otherwise."""
    heartbeat, seconds = (5.0, 20.0) if request.config.getoption("--nightly", default=False) else (0.6, 2.4)
    env = {"HRDMA_HEARTBEAT": str(heartbeat), "HRDMA_TIMEOUT": "60"}
    job = start(holds, 3, transport=transport, busy=busy, seconds=seconds, env=env)
    held = job[busy].event("holds")["time"]
    for rank in job:
        found = rank.event("sum", seconds=seconds + 15)
        assert found["value"] == 3.0 and found["time"] - held >= seconds * 0.9, job.shown()
    assert [rank.ended() for rank in job] == [0, 0, 0], job.shown()


def waits(me: Me) -> None:
    comm = hrdma.init()
    comm.barrier()
    me.tell("waits")
    report(me, "raised", comm.barrier if me.rank != 1 else lambda: comm.recv(bytearray(1), 0))


@pytest.mark.parametrize("transport", ["tcp", *night(("shm",))])
def test_the_default_heartbeat_finds_a_frozen_rank(start, transport):
    job = start(waits, 3, transport=transport, env={"HRDMA_HEARTBEAT": ""})
    for rank in job:
        rank.event("waits")
    stopped = job[1].signal(signal.SIGSTOP)
    for rank in job.survivors(1):
        found = rank.event("raised")
        assert (found["error"], found["rank"]) == ("PeerError", 1), job.shown()
        assert found["at"] - stopped > 2.0 and took(stopped, found["at"]) < 5.5, job.shown()


@over_each_transport
def test_a_short_stop_is_no_loss(start, transport):
    job = start(holds, 3, transport=transport, busy=-1, seconds=0, env={"HRDMA_HEARTBEAT": "2"})
    for _ in range(3):
        job[1].signal(signal.SIGSTOP)
        time.sleep(0.4)
        job[1].signal(signal.SIGCONT)
        time.sleep(0.1)
    assert [rank.ended() for rank in job] == [0, 0, 0], job.shown()


def has_a_child(me: Me) -> None:
    comm = hrdma.init()
    comm.barrier()
    if me.rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
        me.tell("child", pid=child)
        time.sleep(0.1)
        me.fall("kill")
    report(me, "raised", lambda: comm.recv(bytearray(1), 1))


@over_each_transport
def test_a_forked_child_does_not_hide_the_end_of_its_parent(start, transport):
    """Workers of a data loader hold copies of the sockets of a killed rank."""
    job = start(has_a_child, 2, transport=transport)
    child = job[1].event("child")["pid"]
    try:
        fell = job[1].event("falls")["time"]
        found = job[0].event("raised")
        assert found["error"] == "PeerError" and took(fell, found["at"]) < 1.0, job.shown()
    finally:
        os.kill(child, signal.SIGKILL)


# -- going on -----------------------------------------------------------------------------------------------------------------------


def shrinks(me: Me, order: list[int], how: str) -> None:
    comm = hrdma.init()
    for number, victim in enumerate(order):
        together(comm, me, victim)
        if me.rank == victim:
            me.fall(how)
        report(me, "raised", lambda comm=comm: [comm.allreduce(np.ones(50_000)) for _ in range(1_000_000)])
        if me.rank == victim:  # it was only stopped
            # whether or not it still finds somebody's old message that agrees, there is nobody to go on with
            report(me, "shrink", lambda comm=comm: comm.shrink(2.0).barrier())
            return
        started = time.monotonic()
        comm = comm.shrink(timeout=8.0)
        during = started, time.monotonic()
        me.tell(f"shrunk {number}", members=list(comm.members), during=during, sum=total(comm, me.rank))
    me.hear()
    hrdma.finalize()


@over_each_transport
@pytest.mark.parametrize(
    ("order", "how"),
    [
        ([0, 3], "kill"),
        ([1, 2], "kill"),
        ([3, 0], "stop"),
        *night(([3, 0], "kill"), ([0, 3], "stop"), ([1, 2], "stop")),
    ],
)
def test_survivors_go_on_twice_in_a_row(start, transport, order, how):
    job = start(shrinks, 4, transport=transport, order=order, how=how)
    left = {0, 1, 2, 3}
    for number, victim in enumerate(order):
        left -= {victim}
        for rank in sorted(left):
            found = job[rank].event(f"shrunk {number}")
            assert found["members"] == sorted(left) and found["sum"] == sum(left), job.shown()
            assert took(*found["during"]) < 1.0, job.shown()
    if how == "stop":
        for victim in order:
            job[victim].signal(signal.SIGCONT)
            assert job[victim].event("raised")["error"] == "PeerError", job.shown()
            assert job[victim].event("shrink")["error"] == "PeerError", job.shown()
    for rank in left:
        job[rank].say("end")
    assert [job[rank].ended() for rank in left] == [0, 0], job.shown()


def old_frames(me: Me, large: bool) -> None:
    """Rank 1 fills what rank 2 may hold of messages that nobody has asked for, before rank 0 dies."""
    comm = hrdma.init()
    comm.barrier()
    old, new, out = np.full(1 << 18, 1.0), np.full(1 << 18, 2.0), np.zeros(1 << 18)
    size = 1 << 18 if large else 512
    requests = []
    if me.rank == 1:
        requests = [comm.isend(old[:size], 2, tag=7) for _ in range(2000)]
        time.sleep(0.2)
        comm.send(b"x", 0, tag=1)
    if me.rank == 0:
        comm.recv(bytearray(1), 1, tag=1)
        me.fall("kill")
    report(me, "raised", lambda: comm.recv(bytearray(1), 0))
    if me.rank == 1:
        time.sleep(0.3)  # rank 2 is there first: what comes late is dropped as well
    ends = [attempt(me, request.wait) for request in requests]
    assert all(end is None or end["error"] == "PeerError" for end in ends)
    rest = comm.shrink(8.0)
    if me.rank == 1:
        for _ in range(300):
            rest.send(new[:size], 1, tag=7)
    else:
        for _ in range(300):
            rest.recv(out[:size], 0, tag=7)
            assert (out[:size] == 2.0).all()
    me.tell("went on", sum=total(rest, 1), drops=comm.stats()["counters"]["frames_stale"])


@over_each_transport
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_frames_of_the_old_epoch_are_dropped_and_hold_nothing_up(start, transport, large):
    # Nobody is silent here, and who moves half a gigabyte on a busy machine shall not be taken for it.
    job = start(old_frames, 3, transport=transport, large=large, env={"HRDMA_HEARTBEAT": "5"})
    for rank in job.survivors(0):
        assert rank.event("raised")["rank"] == 0, job.shown()
        assert rank.event("went on")["sum"] == 2, job.shown()


def absent(me: Me) -> None:
    comm = hrdma.init()
    together(comm, me, 0)
    if me.rank == 0:
        me.fall("kill")
    report(me, "raised", comm.barrier)
    if me.rank == 1:
        report(me, "shrink", lambda: comm.shrink(timeout=0.7))
    me.hear()


def test_shrink_names_who_did_not_call_it(start):
    def measure() -> str:
        """The coordinator is asked just before the time is up, and a busy machine makes the answer late."""
        job = start(absent, 3)
        found = job[1].event("shrink")
        assert found["error"] == "TimeoutError" and "rank 1 did" not in found["text"], job.shown()
        for rank in job.survivors(0):
            rank.say("end")
        return found["text"]

    one_good(measure, lambda text: "rank 2" in text, 5)

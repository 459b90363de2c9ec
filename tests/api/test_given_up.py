"""Calls that are given up when their deadline has passed: what later calls on a broken communicator say, and `done`."""

import pickle
import time

import numpy as np
import pytest

import harness
import hrdma


def said(call):
    start = time.monotonic()
    try:
        call()
    except (TimeoutError, hrdma.HrdmaError) as error:
        return [type(error).__name__, str(error), time.monotonic() - start]
    return None


def timed_out(comm):
    other, x = comm.dup(), np.zeros(3)
    if comm.rank == 1:
        other.recv(bytearray(1), 0)
        return [said(comm.barrier), said(comm.barrier)]
    pending = comm.irecv(x, 1, tag=9)
    found = [said(lambda: comm.allreduce(x, timeout=0.2)), said(pending.wait)]
    found += [said(lambda: comm.send(x, 1)), said(lambda: comm.recv(x, 1)), said(lambda: comm.isend(x, 1).wait())]
    found += [said(lambda: comm.allreduce(x)), said(lambda: comm.barrier(timeout=7)), said(lambda: comm.recv(x))]
    other.send(b"x", 1)
    return found


def test_calls_on_what_a_deadline_broke_name_it():
    """They said that they themselves had taken too long, by a deadline that had not begun."""
    mine, theirs = harness.ranks(timed_out, 2)
    late = "allreduce(float64, 3, sum) #0 did not complete within 0.2 s"
    assert mine[0][0] == "TimeoutError" and mine[0][1].startswith(late)
    starts = ("irecv #", "send #", "recv #", "isend #", "allreduce(", "barrier() #", "recv #")
    assert len(mine) == 1 + len(starts)
    for (kind, text, took), start in zip(mine[1:], starts):
        assert kind == "TimeoutError" and took < 5 and text.startswith(start)
        assert text.partition(": ")[2] == (
            f"the communicator is broken: {late} (comm.shrink(), on all ranks, makes a new one)"
        )
    for (kind, text, took), start in zip(theirs, ("barrier() #0: ", "barrier() #1: ")):
        assert kind == "CollectiveTimeoutError" and took < 5
        assert text.startswith(start) and text.endswith(
            "the communicator is broken: rank 0 gave up barrier() #0, which did not complete within its deadline "
            "(comm.shrink(), on all ranks, makes a new one)"
        )


def canceled(comm):
    other = comm.dup()
    if comm.rank == 1:
        other.recv(bytearray(1), 0)
        return said(comm.barrier)
    request = comm.barrier(async_op=True)
    assert request.cancel()
    other.send(b"x", 1)
    return [said(request.wait), said(comm.barrier)]


def test_calls_on_what_was_canceled_name_it():
    (first, later), other = harness.ranks(canceled, 2)
    assert first[:2] == ["RequestError", "barrier() #0: canceled"]
    assert later[0] == "RequestError" and later[1].startswith(
        "barrier() #1: the communicator is broken: barrier() #0 was canceled"
    )
    assert other[0] == "RequestError"
    assert other[1].startswith("barrier() #0: the communicator is broken: rank 0 canceled barrier() #0 (comm.shrink()")


def told(comm):
    """Ranks 1 and 2 have called what rank 0 gives up, rank 3 not yet; 2 waits for a message, and for another collective."""
    other = comm.dup()
    comm.barrier()
    if comm.rank == 3:
        other.recv(bytearray(1), 0)
    pending = comm.irecv(np.zeros(1), 1) if comm.rank == 2 else None
    requests = [comm.allreduce(np.zeros(3), async_op=True, timeout=0.3 if comm.rank == 0 else 20) for _ in range(1)]
    if comm.rank == 2:
        requests += [comm.barrier(async_op=True), pending]
    found = []
    for request in requests:
        try:
            request.wait()
        except TimeoutError as raised:
            error = pickle.loads(pickle.dumps(raised))  # as it goes to whoever started the ranks
            found.append([type(error).__name__, *map(vars(error).get, ("rank", "operation", "sequence")), str(error)])
    if comm.rank == 0:
        other.send(b"x", 3)
    return found, len(comm.shrink(10).members)


def test_the_others_are_told_who_gave_up_what():
    """They got an error that did not say that a deadline was the cause, nor of which call."""
    first, *others = harness.ranks(told, 4)
    assert first[0][0][:4] == ["TimeoutError", None, None, None]
    assert [len(found) for found, _ in others] == [1, 3, 1]
    for rank, (found, size) in enumerate(others, 1):
        assert size == 4
        for kind, blamed, operation, sequence, text in found:
            assert (kind, blamed, sequence) == ("CollectiveTimeoutError", 0, 1)
            name = "collective #1" if rank == 3 and not operation else "allreduce(float64, 3, sum) #1"
            assert f"rank 0 gave up {name}, which did not complete within its deadline" in text


def polled(comm, collective):
    other = comm.dup()
    if comm.rank == 1:
        other.recv(bytearray(1), 0)
        return None
    x = np.zeros(3)
    start = time.monotonic()
    request = comm.allreduce(x, async_op=True, timeout=0.3) if collective else comm.irecv(x, 1, timeout=0.3)
    seen = [request.done]
    while not request.done and time.monotonic() - start < 10:
        time.sleep(0.01)
    took = time.monotonic() - start
    seen.append(request.done)
    other.send(b"x", 1)
    return seen, took, said(request.wait), comm._state() is None


@pytest.mark.parametrize("collective", [False, True])
def test_done_keeps_the_deadline(collective):
    """Whoever only asks whether it is done would ask for ever."""
    (seen, took, (kind, text, waited), whole), _ = harness.ranks(polled, 2, collective=collective)
    assert seen == [False, True] and 0.3 <= took < 5 and waited < 1
    assert kind == "TimeoutError" and "did not complete within 0.3 s" in text
    assert whole is not collective, "a collective breaks its communicator, a receive does not"

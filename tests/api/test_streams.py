"""HRDMA_TCP=streams=N: several tcp connections for each pair of ranks, and what happens when one of them breaks."""

import os
import socket
import time

import numpy as np
import pytest

import harness
import hrdma

STREAMS = {"HRDMA_TRANSPORT": "tcp", "HRDMA_TCP": "streams=3"}


def accepted(comm):
    """The data connections that this rank has accepted, as sockets that share their descriptors' connections."""
    listening, found = set(), []
    for name in os.listdir("/proc/self/fd"):
        try:
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        try:
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening.add(one.getsockname())
            elif one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
                one.getpeername()
                found.append(one)
        except OSError:
            pass
    text = comm.info()["domains"]["tcp"]
    return [one for one in found if one.getsockname() in listening and str(one.getsockname()[1]) in text]


def large(comm):
    n, me = comm.size, comm.rank
    right, left = (me + 1) % n, (me - 1) % n
    for size in (100, 200_000, 9_000_001):
        for new in (hrdma.empty, np.empty):
            x, out = new(size, "uint8"), np.zeros(size, "uint8")
            x[:] = (np.arange(size) * n + me) % 251
            assert comm.sendrecv(x, right, out, left, tag=3) == (left, size)
            assert (out == (np.arange(size) * n + left) % 251).all()
            # several at once, in both directions: segments of all share the streams
            outs = [np.zeros(size, "uint8") for _ in range(3)]
            requests = [comm.irecv(one, left, tag=tag) for tag, one in enumerate(outs)]
            requests += [comm.isend(x, right, tag=tag) for tag in range(3)]
            for request in requests:
                request.wait()
            assert all((one == out).all() for one in outs)
            y = np.arange(size // 4, dtype="float32") % 1000 + me
            comm.allreduce(y)
            assert (y == (np.arange(size // 4) % 1000) * n + n * (n - 1) / 2).all()
    streams = len(accepted(comm))
    comm.barrier()
    return streams


@pytest.mark.parametrize("n", [2, 4])
def test_large_messages_over_three_streams(n):
    # the lower rank of a pair calls the higher one
    assert harness.ranks(large, n, env=STREAMS) == [3 * rank for rank in range(n)]


def unequal(comm):
    x = np.full(1_000_000, comm.rank + 1.0)
    comm.allreduce(x)
    assert (x == 3).all()
    streams = len(accepted(comm))
    comm.barrier()
    return streams


def unequal_settings(rank):
    os.environ["HRDMA_TCP"] = f"streams={2 + rank}"
    with hrdma.init() as comm:
        return unequal(comm)


def test_the_smaller_number_counts():
    assert harness.ranks(unequal_settings, 2, init=False, env={"HRDMA_TRANSPORT": "tcp"}) == [0, 2]


def killed(comm, which, operation):
    x = np.ones(3_000_000, "float32")
    with pytest.raises(hrdma.PeerError) as caught:
        for turn in range(50):
            if operation == "allreduce":
                comm.allreduce(x)
            elif comm.rank == 0:
                comm.send(x, 1)
            else:
                comm.recv(x, 0)
            if comm.rank == 1 and turn == 0:
                accepted(comm)[which].shutdown(socket.SHUT_RDWR)
                start = time.monotonic()
    assert caught.value.rank == 1 - comm.rank and caught.value.transport == "tcp"
    assert comm.rank == 0 or time.monotonic() - start < 5
    with pytest.raises(hrdma.PeerError):
        comm.send(x, 1 - comm.rank)


@pytest.mark.parametrize("operation", ["allreduce", "send"])
@pytest.mark.parametrize("which", range(3))
def test_a_stream_that_breaks_is_the_peer_lost(which, operation):
    harness.ranks(killed, 2, env=STREAMS, which=which, operation=operation)


def test_the_number_is_checked():
    for text in ("0", "5", "x"):
        with pytest.raises((ValueError, hrdma.DeviceError), match=f"streams={text}.*1 to 4"):
            hrdma.init(rank=0, size=1, transport="tcp", tcp=f"streams={text}")


def unasked(comm):
    """Whether a message of 128 KiB went so, once the path was measured; its bytes are right either way."""
    x, y, until, other = np.zeros(16 << 10), np.zeros(16 << 10), time.monotonic() + 20, 1 - comm.rank
    for turn in range(1_000_000):
        x[:] = turn
        before = comm.stats()["counters"]["messages_eager"]
        comm.sendrecv(x, other, y, other)
        went = np.array([comm.stats()["counters"]["messages_eager"] - before, time.monotonic() > until])
        assert (y == turn).all()
        comm.allreduce(went)
        if went[0] == 2 or went[1]:
            return int(went[0])
    return -1


def test_longer_messages_go_unasked_where_each_rank_has_a_core():
    expected = 2 if len(os.sched_getaffinity(0)) > 1 else 0
    assert harness.ranks(unasked, 2, env={"HRDMA_TRANSPORT": "tcp"}) == [expected] * 2

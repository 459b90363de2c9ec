"""hrdma.Endpoint on a device that is not simulated: writes, reads, atomics and notifications, checked at both ends."""

from __future__ import annotations

import numpy as np
import pytest

import harness
import hrdma
from hrdma.errors import PeerError, RequestError

SIZES = (1, 8, 192, 193, 4097, 8500, 100_003, 1_000_000)  # around inline data, a packet and a buffer
ROOM = 1 << 20
COUNTER = ROOM - 16
ADDS = 50


def pattern(nbytes, seed):
    return ((np.arange(nbytes) * 7 + seed) % 251).astype("uint8")


def opened(comm):
    """Both ranks expose zeros: the endpoint, the array, its exposure (to be kept), the peer's."""
    end = hrdma.Endpoint(comm, 1 - comm.rank)
    x = hrdma.zeros(ROOM, "uint8")
    memory = end.expose(x, write=True, atomic=True)
    theirs = bytearray(len(bytes(memory)))
    comm.sendrecv(bytes(memory), 1 - comm.rank, theirs, 1 - comm.rank)
    return end, x, memory, end.remote(theirs)


def writes_and_reads(comm, end, x, remote):
    """Both write into each other's memory at once, see what came when told, and read their own back."""
    for turn, (nbytes, place) in enumerate((n, place) for n in SIZES for place in (np.empty, hrdma.empty)):
        mine, theirs = pattern(nbytes, 2 * turn + comm.rank), pattern(nbytes, 2 * turn + 1 - comm.rank)
        data, offset = place(nbytes, "uint8"), 7 * turn
        data[:] = mine
        end.write(data, remote, offset, notify=turn)
        assert end.notified(timeout=30) == turn
        assert (x[offset : offset + nbytes] == theirs).all(), f"{nbytes} bytes of {place.__module__} came wrong"
        back = place(nbytes, "uint8")
        back[:] = 0
        end.read(back, remote, offset)
        assert (back == mine).all(), f"{nbytes} bytes of {place.__module__} were read wrong"
        comm.barrier()
        x[offset : offset + nbytes] = 0
        assert not x.any(), f"of {nbytes} bytes some went elsewhere"
        comm.barrier()


def many_notices(comm, end, x, remote):
    """More than the peer has receives for, with messages between them: in order, and none is lost."""
    y, word = hrdma.zeros(8, "uint8"), np.zeros(1, "int64")
    for number in range(0, 300, 100):
        if comm.rank == 0:
            for value in range(number, number + 100):
                end.write(y, remote, notify=0xFFFFFFFF - value)
            comm.send(np.array([number]), dst=1)
        else:
            comm.recv(word, src=0)
            assert word[0] == number
            assert [end.notified(timeout=30) for _ in range(100)] == [0xFFFFFFFF - number - i for i in range(100)]
    comm.barrier()


def atomics(comm, end, x, remote):
    """Each adds to the other's counter, and sees its own when both have ended."""
    assert [end.fetch_add(remote, COUNTER, 3) for _ in range(ADDS)] == list(range(0, 3 * ADDS, 3))
    assert end.compare_swap(remote, COUNTER + 8, 1, 9) == 0
    assert end.compare_swap(remote, COUNTER + 8, 0, 9 + comm.rank) == 0
    comm.barrier()
    assert x[COUNTER:].view("uint64").tolist() == [3 * ADDS, 9 + 1 - comm.rank]
    comm.barrier()


def job(comm):
    """One job for all of it: in a guest to start ranks costs most."""
    end, x, memory, remote = opened(comm)
    writes_and_reads(comm, end, x, remote)
    many_notices(comm, end, x, remote)
    atomics(comm, end, x, remote)
    with pytest.raises(ValueError, match="are not within"):
        end.write(bytes(9), remote, ROOM - 8)
    memory.close()
    comm.barrier()
    with pytest.raises((RequestError, PeerError)):
        end.fetch_add(remote, COUNTER, 1, timeout=20)
    return [sorted(set(comm.info()["transports"].values()) - {"loop"}), x[COUNTER:].view("uint64").tolist()[0]]


def test_both_ends(device):
    env = {"HRDMA_TRANSPORT": "verbs", "HRDMA_DEVICES": device}
    assert harness.ranks(job, 2, env=env, timeout=110) == [[["verbs"], 3 * ADDS]] * 2

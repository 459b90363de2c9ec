"""hrdma.Endpoint over every transport: reads, writes, atomics, notifications, what is refused, lost peers, kept memory."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import harness
import hrdma

TRANSPORTS = ("shm", "tcp", "verbs")
SIZE = 6_000_000
SIZES = (1, 8, 4096, 100_003, 5_000_000)
BYTES = 64  # of a descriptor


def over(transport):
    return {"HRDMA_TRANSPORT": transport}


def exchanged(comm, mine=None):
    """Descriptors to and from the other of two ranks."""
    text = np.frombuffer(bytes(mine) if mine else bytes(BYTES), "uint8")
    theirs = np.zeros(len(text), "uint8")
    comm.sendrecv(text, 1 - comm.rank, theirs, 1 - comm.rank)
    return theirs.tobytes()


def damaged(text, place):
    """With one bit of that byte changed."""
    return text[:place] + bytes([text[place] ^ 1 << place % 8]) + text[place + 1 :]


def facing(comm):
    """Both of two ranks expose a MiB of zeros: the endpoint, the array, its exposure (to be kept), the peer's."""
    end = hrdma.Endpoint(comm, 1 - comm.rank)
    x = hrdma.zeros(1 << 20, "uint8")
    memory = end.expose(x, write=True, atomic=True)
    return end, x, memory, end.remote(exchanged(comm, memory))


def pattern(nbytes, seed):
    return ((np.arange(nbytes) * 7 + seed) % 251).astype("uint8")


def every_size(comm):
    """Rank 1 writes into rank 0's memory and reads it back; both from arenas and from other memory."""
    end = hrdma.Endpoint(comm, 1 - comm.rank)
    x = hrdma.empty(SIZE, "uint8")
    x[:] = 0
    memory = end.expose(x, read=True, write=True, atomic=True)
    remote = end.remote(exchanged(comm, memory))
    assert len(remote) == SIZE == len(memory)
    for turn, (nbytes, registered) in enumerate((n, r) for n in SIZES for r in (True, False)):
        offset = 13 * turn
        if comm.rank == 1:
            data = hrdma.empty(nbytes, "uint8") if registered else np.empty(nbytes, "uint8")
            data[:] = pattern(nbytes, turn)
            end.write(data, remote, offset, notify=turn)
            end.fetch_add(remote, SIZE - 8, 0)  # after the write
            back = hrdma.empty(nbytes, "uint8") if registered else np.zeros(nbytes, "uint8")
            end.read(back, remote, offset)
            assert (back == data).all(), (nbytes, registered)
        else:
            assert end.notified() == turn
            assert (x[offset : offset + nbytes] == pattern(nbytes, turn)).all(), (nbytes, registered)
            assert not x[offset + nbytes :].any() or turn > 1
        comm.barrier()
    if comm.rank == 1:
        end.write(b"", remote, SIZE, notify=0xFFFFFFFF)
        end.read(bytearray(0), remote, SIZE)
    else:
        assert end.notified() == 0xFFFFFFFF
    comm.barrier()


def atomics(comm, turns):
    end = hrdma.Endpoint(comm, 0)
    counter = hrdma.zeros(4, "uint64")
    if comm.rank == 0:
        ends = [hrdma.Endpoint(comm, rank) for rank in (1, 2)]
        memories = [one.expose(counter, atomic=True, read=False) for one in ends]
        for rank, memory in enumerate(memories, 1):
            comm.send(bytes(memory), dst=rank)
        comm.barrier()
        assert counter.tolist() == [2 * turns, 0, 77, 0]
        return []
    text = bytearray(BYTES)
    comm.recv(text, src=0)
    remote = end.remote(text)
    seen = [end.fetch_add(remote, 0, 1) for _ in range(turns)]
    if comm.rank == 1:
        assert end.compare_swap(remote, 16, 5, 9) == 0
        assert end.compare_swap(remote, 16, 0, 76) == 0
        assert end.fetch_add(remote, 16, 1, async_op=True).wait() == 76
        assert end.compare_swap(remote, 8, 0, (1 << 64) - 1, async_op=True).result() == 0
        assert end.fetch_add(remote, 8, 1) == (1 << 64) - 1
    comm.barrier()
    return seen


def passive(comm):
    """The owner holds the interpreter and calls nothing until the other is through: its memory is served all the same."""
    end, x, _memory, remote = facing(comm)
    comm.barrier()
    if comm.rank == 0:
        stop = time.monotonic() + 20
        while x[5] != 8 and time.monotonic() < stop:
            pass
        served = int(x[5])
        comm.barrier()
        return served
    time.sleep(0.2)
    end.write(np.full(1 << 20, 9, "uint8"), remote)
    assert end.fetch_add(remote, 0, 0) == 0x0909090909090909
    back = np.zeros(1 << 20, "uint8")
    end.read(back, remote)
    assert (back == 9).all()
    end.write(b"\x08", remote, 5)
    comm.barrier()
    return None


def asynchronous(comm):
    end, x, _memory, remote = facing(comm)
    if comm.rank == 0:
        asked = [end.notified(async_op=True) for _ in range(3)]
        found = [request.wait() for request in asked]
        assert (x[: 1 << 18] == 1).all() and (x[1 << 18 : 1 << 19] == 2).all()

        async def later():
            return await end.notified(async_op=True)

        found.append(asyncio.run(later()))
        comm.barrier()
        return found
    data = [np.full(1 << 18, i + 1, "uint8") for i in range(3)]
    requests = [end.write(one, remote, i << 18, notify=40 + i, async_op=True) for i, one in enumerate(data)]
    assert [request.wait() for request in requests] == [None] * 3

    end.fetch_add(remote, 0, 0)  # after the writes

    async def together():
        back = [np.zeros(1 << 18, "uint8") for _ in data]
        await asyncio.gather(*[end.read(one, remote, i << 18, async_op=True) for i, one in enumerate(back)])
        return all((one == i + 1).all() for i, one in enumerate(back))

    assert asyncio.run(together())
    time.sleep(0.1)
    end.write(b"", remote, notify=99)
    comm.barrier()
    return []


def refusals(comm):
    end = hrdma.Endpoint(comm, 1 - comm.rank)
    x = hrdma.zeros(1000, "uint8")
    for_reading = end.expose(x)
    text = exchanged(comm, for_reading)
    remote = end.remote(text)
    before = end.remote(exchanged(comm, end_memory := end.expose(x, write=True)))
    assert len(bytes(end_memory)) == BYTES
    for call, error, words in (
        (lambda: end.write(b"no", remote), ValueError, "is not for write"),
        (lambda: end.fetch_add(before, 0, 1), ValueError, "is not for atomic"),
        (lambda: end.write(bytes(1001), before), ValueError, "1001 bytes at offset 0 are not within"),
        (lambda: end.read(bytearray(2), remote, 999), ValueError, "2 bytes at offset 999"),
        (lambda: end.read(bytearray(2), remote, -1), ValueError, "offset -1"),
        (lambda: end.read(b"constant", remote), (ValueError, BufferError, TypeError), "read-only|writable|writeable"),
        (lambda: end.write(b"x", before, notify=1 << 32), ValueError, "notify="),
        (lambda: end.write(b"x", None), TypeError, "remote is None"),
        (lambda: end.remote(b"short"), ValueError, "5 bytes are no descriptor"),
        (lambda: end.remote(bytes(BYTES)), ValueError, "no descriptor"),
        *[
            (lambda i=i: end.remote(damaged(text, i)), ValueError, "damaged" if i > 3 else "no desc")
            for i in range(BYTES)
        ],
        (lambda: end.remote(bytes(for_reading)), ValueError, "is of no use"),  # one's own
        (lambda: end.expose(x, read=False), ValueError, "all False"),
        (lambda: end.expose(b"", read=True), ValueError, "empty"),
        (lambda: end.expose(b"constant", write=True), (ValueError, BufferError, TypeError), "read-only|writ"),
        (lambda: hrdma.Endpoint(comm, 2), ValueError, "out of range"),
        (lambda: hrdma.Endpoint(comm, comm.rank).read(bytearray(2), remote), ValueError, "not of this endpoint"),
        (lambda: end.notified(timeout=-1), ValueError, "timeout"),
    ):
        with pytest.raises(error, match=words):
            call()
    with pytest.raises(TimeoutError, match=r"notified #\d+ with rank . did not complete within 0.1 s"):
        end.notified(timeout=0.1)
    comm.barrier()
    end.write(b"good", before, 5, notify=3)
    assert end.notified() == 3 and x[5:9].tobytes() == b"good"
    comm.barrier()
    with pytest.raises(ValueError, match="closed"):
        comm.close()
        end.write(b"late", before)


def taken_back(comm):
    """After close() nothing changes the memory, and the connection goes on."""
    end = hrdma.Endpoint(comm, 1 - comm.rank)
    x = hrdma.zeros(1 << 16, "uint8")
    memory = end.expose(x, write=True)
    remote = end.remote(exchanged(comm, memory))
    if comm.rank == 0:
        memory.close()
        memory.close()
        assert memory.closed
    comm.barrier()
    if comm.rank == 1:
        try:
            end.write(np.ones(1 << 16, "uint8"), remote, notify=5)
        except hrdma.RequestError:
            pass
    comm.barrier()
    time.sleep(0.2)
    assert not x.any()
    y = np.array([comm.rank])
    assert comm.allreduce(y)[0] == 1


def lost(comm, how):
    """Rank 1 dies while rank 0 waits for its notification, or before it is written to."""
    end, x, _memory, remote = facing(comm)
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(hrdma.PeerError) as found:
        if how == "notified":
            end.notified(timeout=20)
        else:
            stop = time.monotonic() + 20
            while time.monotonic() < stop:
                end.write(x, remote) if how == "write" else end.fetch_add(remote, 0, 1)
    assert found.value.rank == 1
    with pytest.raises(hrdma.PeerError):
        end.write(b"x", remote)
    with pytest.raises(hrdma.PeerError):
        end.expose(x)
    return found.value.operation


def flood(comm):
    """Nobody takes them: what is kept has a bound, and then the connection ends with the reason."""
    end = hrdma.Endpoint(comm, 0)
    memory = end.expose(hrdma.zeros(8, "uint8"), write=True)
    remote = end.remote(bytes(memory))
    for _ in range(1 << 16):
        end.write(b"", remote, notify=1)
    for _ in range(10):
        assert end.notified() == 1
    for _ in range(10):
        end.write(b"", remote, notify=2)
    with pytest.raises(hrdma.PeerError, match="more notifications than are kept"):
        stop = time.monotonic() + 20
        while time.monotonic() < stop:
            end.write(b"", remote, notify=3)
    return True


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_size(transport):
    harness.ranks(every_size, 2, env=over(transport))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_atomics_of_two_peers_lose_nothing(transport):
    found = harness.ranks(atomics, 3, env=over(transport), turns=200)
    assert sorted(found[1] + found[2]) == list(range(400))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_owner_takes_no_part(transport):
    assert harness.ranks(passive, 2, env=over(transport)) == [8, None]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_asynchronous_and_awaited(transport):
    assert harness.ranks(asynchronous, 2, env=over(transport))[0] == [40, 41, 42, 99]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_refused(transport):
    harness.ranks(refusals, 2, env=over(transport))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_memory_that_was_taken_back_does_not_change(transport):
    harness.ranks(taken_back, 2, env=over(transport))


@pytest.mark.parametrize("how", ["notified", "write"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_lost_peer(transport, how):
    found = harness.outcomes(lost, 2, env=over(transport), how=how)
    assert found[0].status == 0 and found[0].value == how, found[0]


def farewell(comm):
    """What had come before the peer said goodbye is given, and then its end."""
    end = hrdma.Endpoint(comm, 1 - comm.rank)
    memory = end.expose(hrdma.zeros(8, "uint8"), write=True)
    remote = end.remote(exchanged(comm, memory))
    comm.barrier()
    if comm.rank == 1:
        end.write(b"last", remote, notify=7)
        return None
    time.sleep(1)
    first = end.notified(timeout=20)
    with pytest.raises(hrdma.PeerError):
        end.notified(timeout=20)
    return first


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_notification_outlives_a_farewell(transport):
    assert harness.ranks(farewell, 2, env=over(transport))[0] == 7


def piled_up(comm, most):
    """As many notifications of oneself as are kept: the peer's has room of its own."""
    mine, other = hrdma.Endpoint(comm, comm.rank), hrdma.Endpoint(comm, 1 - comm.rank)
    x = hrdma.zeros(8, "uint8")
    own = mine.expose(x, write=True)
    remote = mine.remote(bytes(own))
    memory = other.expose(x, write=True)
    there = other.remote(exchanged(comm, memory))
    if comm.rank == 0:
        for value in range(most):
            mine.write(b"", remote, notify=value)
    comm.barrier()
    if comm.rank == 1:
        other.write(b"", there, notify=5)
    else:
        assert other.notified(timeout=20) == 5 and mine.notified(timeout=20) == 0
    comm.barrier()


def test_notifications_that_pile_up_are_counted_for_each_rank():
    harness.ranks(piled_up, 2, env=over("shm"), most=65536)


def test_notifications_that_nobody_takes_are_bounded():
    assert harness.ranks(flood, 1) == [True]


# --- with oneself ---


def test_with_oneself(comm):
    end = hrdma.Endpoint(comm, 0)
    x = hrdma.zeros(100, "uint8")
    memory = end.expose(x, write=True, atomic=True)
    remote = end.remote(bytes(memory))
    end.write(b"hello", remote, 7, notify=1)
    back = bytearray(5)
    end.read(back, remote, 7)
    assert (bytes(back), end.notified()) == (b"hello", 1)
    assert end.fetch_add(remote, 16, 5) == 0 and end.fetch_add(remote, 16, 0) == 5
    with pytest.raises(ValueError, match="multiple of 8"):
        end.fetch_add(remote, 20, 1)
    for value in (-1, 1 << 64):
        for call, name in (
            (lambda value=value: end.fetch_add(remote, 16, value), "value"),
            (lambda value=value: end.compare_swap(remote, 16, value, 1), "compare"),
            (lambda value=value: end.compare_swap(remote, 16, 5, value), "swap"),
        ):
            with pytest.raises(ValueError, match=f"^{name}={value}: 0 to "):
                call()
    assert end.fetch_add(remote, 16, 0) == 5
    with pytest.raises(ValueError, match="4 bytes after a multiple of 8"):
        end.expose(x[4:], atomic=True)
    end.expose(x[4:], write=True).close()
    assert "read, write, atomic" in repr(remote) and "rank 0" in repr(end) and "100 bytes" in repr(memory)


def test_exposed_memory_is_kept_until_it_is_closed_or_dropped(comm):
    end = hrdma.Endpoint(comm, 0)
    for ends in (lambda memory: memory.close(), lambda memory: memory.__exit__(), lambda memory: None):
        array = bytearray(50)
        memory = end.expose(array, read=False, write=True)
        with pytest.raises(BufferError):
            array.append(1)
        ends(memory)
        del memory
        gc.collect()
        array.append(1)


def test_a_closed_communicator_takes_memory_back(comm):
    other = comm.dup()
    end = hrdma.Endpoint(other, 0)
    array = bytearray(50)
    memory = end.expose(array, write=True, read=False)
    remote = end.remote(bytes(memory))
    other.close()
    assert memory.closed
    with pytest.raises(ValueError, match="closed"):
        end.write(b"late", remote)
    memory.close()
    array.append(1)


CLOSED_BY_TWO = """
import random, sys, threading, time
import hrdma
sys.setswitchinterval(1e-6)
with hrdma.init(timeout=5) as comm:
    middle, stop = 0, time.monotonic() + 8
    while middle < 60 and time.monotonic() < stop:
        other = comm.dup()
        end = hrdma.Endpoint(other, 0)
        x = hrdma.zeros(64, "uint8")
        memories = [end.expose(x, write=True) for _ in range(600)]
        go, left = threading.Event(), [6]
        def close(part):
            go.wait()
            for memory in part:
                memory.close()
            left[0] -= 1
        threads = [threading.Thread(target=close, args=(memories[i::6],)) for i in range(6)]
        for thread in threads:
            thread.start()
        go.set()
        time.sleep(random.random() * 0.002)
        middle += left[0] > 0
        other.close()
        for thread in threads:
            thread.join()
        assert all(memory.closed for memory in memories)
print(middle)
"""


def test_memory_is_closed_while_its_communicator_is():
    """In a process of its own: what goes wrong here is a crash."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, "-c", CLOSED_BY_TWO], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and int(done.stdout) > 0, done.stdout + done.stderr


def test_notifications_of_two_communicators_do_not_mix(comm):
    other = comm.dup()
    ends = [hrdma.Endpoint(one, 0) for one in (comm, other)]
    x = hrdma.zeros(10, "uint8")
    memories = [end.expose(x, write=True) for end in ends]
    for number in (1, 2):
        for which, (end, memory) in enumerate(zip(ends, memories)):
            end.write(b"x", end.remote(bytes(memory)), notify=10 * which + number)
    assert [ends[1].notified(), ends[1].notified(), ends[0].notified(), ends[0].notified()] == [11, 12, 1, 2]
    other.close()


def test_a_forked_child_is_refused(comm):
    end = hrdma.Endpoint(comm, 0)
    x = hrdma.zeros(10, "uint8")
    memory = end.expose(x, write=True)
    remote = end.remote(bytes(memory))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(20)
            with pytest.raises(ValueError, match="fork"):
                end.write(b"x", remote)
            memory.close()
            code = 0
        finally:  # whatever happens, it is no second pytest
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    end.write(b"y", remote)
    assert x[0] == ord("y")

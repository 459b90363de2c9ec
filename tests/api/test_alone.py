"""Everything that one rank can do by itself: validation, messages and collectives to oneself, requests, asyncio, fork."""

import asyncio
import gc
import os
import sys
import threading
import time
import traceback

import numpy as np
import pytest
from ports import free_port

import harness
import hrdma
from hrdma import _core


class Fake:
    """A tensor that speaks DLPack alone, made from an array that must stay contiguous unless said otherwise."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device = array, device

    def __dlpack__(self, **how):
        return self.array.__dlpack__(**how)

    def __dlpack_device__(self):
        return self.device


class OldFake(Fake):
    """One from before versions came into DLPack."""

    def __dlpack__(self):
        return self.array.__dlpack__()


READ_ONLY = np.arange(4.0)
READ_ONLY.flags.writeable = False
GAPS = np.zeros((4, 4))[:, ::2]


# -- what is refused, before anything is sent -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda c: c.send(np.zeros(2), 0), ValueError, "rank 0 sends to itself.*use isend"),
        (lambda c: c.send(np.zeros(2), 1), ValueError, "dst 1 is out of range.*ranks 0 to 0"),
        (lambda c: c.send(np.zeros(2), -1), ValueError, "dst -1 is out of range"),
        (lambda c: c.isend(np.zeros(2), 2**40), ValueError, "dst 1099511627776 is out of range"),
        (lambda c: c.isend(np.zeros(2), "0"), TypeError, "integer"),
        (lambda c: c.recv(np.zeros(2), 5), ValueError, "src 5 is out of range"),
        (lambda c: c.recv(np.zeros(2), -2), ValueError, "src -2 is out of range"),
        (lambda c: c.isend(np.zeros(2), 0, -1), ValueError, "tag -1 is out of range: 0 to 2"),
        (lambda c: c.isend(np.zeros(2), 0, 2**31), ValueError, "tag 2147483648 is out of range"),
        (lambda c: c.isend(np.zeros(2), 0, 1.0), TypeError, "tag 1.0 is not an integer"),
        (lambda c: c.recv(READ_ONLY), ValueError, "ndarray is read-only and this call writes into it"),
        (lambda c: c.recv(b"abcd"), ValueError, "bytes is read-only"),
        (lambda c: c.irecv(Fake(READ_ONLY)), ValueError, "Fake is read-only"),
        (lambda c: c.isend(GAPS, 0), ValueError, r"not C-contiguous: pass numpy.ascontiguousarray\(x\)"),
        (lambda c: c.isend(np.asfortranarray(np.zeros((3, 3))), 0), ValueError, "not C-contiguous"),
        (lambda c: c.isend(Fake(GAPS), 0), ValueError, r"not C-contiguous: pass x.contiguous\(\)"),
        (lambda c: c.isend(Fake(np.zeros(3), (2, 1)), 0), TypeError, r"on device \(2, 1\): only CPU memory"),
        (lambda c: c.isend([1, 2], 0), TypeError, "a list has no memory to work on"),
        (lambda c: c.isend(None, 0), TypeError, "a NoneType has no memory"),
        (lambda c: c.isend(np.zeros(2), 0, priority=8), ValueError, "priority 8: 0 .most urgent. to 7"),
        (lambda c: c.isend(np.zeros(2), 0, priority="high"), ValueError, "priority 'high'"),
        (lambda c: c.recv(np.zeros(2), timeout=-1), ValueError, "timeout -1: seconds"),
        (lambda c: c.recv(np.zeros(2), timeout="soon"), TypeError, "timeout 'soon'"),
        (lambda c: c.recv(np.zeros(2), timeout=float("nan")), ValueError, "timeout nan"),
        (lambda c: c.allreduce(np.zeros(2, complex)), TypeError, r"\(16 bytes\) cannot be reduced"),
        (lambda c: c.allreduce(np.zeros(2, bool)), TypeError, "cannot be reduced"),
        (lambda c: c.allreduce(np.zeros(2, ">f4")), TypeError, "cannot be reduced"),
        (lambda c: c.allreduce(np.zeros(2), "median"), ValueError, "unknown op 'median': one of sum, prod"),
        (lambda c: c.allreduce(np.zeros(2), "bor"), TypeError, "op 'bor' is not defined for float64"),
        (lambda c: c.allreduce(READ_ONLY), ValueError, "read-only"),
        (lambda c: c.allreduce(GAPS), ValueError, "not C-contiguous"),
        (lambda c: c.allreduce(np.zeros(2), out=np.zeros(3)), ValueError, "out has 3 elements, 2 are wanted"),
        (lambda c: c.allreduce(np.zeros(2), out=np.zeros(2, "f4")), TypeError, "out holds float32, x float64"),
        (lambda c: c.reduce(np.zeros(2), 3), ValueError, "root 3 is out of range"),
        (lambda c: c.broadcast(np.zeros(2), -1), ValueError, "root -1 is out of range"),
        (lambda c: c.allgather(np.zeros(2), counts=[3]), ValueError, r"x has 2 elements, counts\[0\] is 3"),
        (lambda c: c.allgather(np.zeros(2), counts=[1, 1]), ValueError, "counts has 2 entries, the communicator 1"),
        (lambda c: c.allgather(np.zeros(2), counts=[-2]), ValueError, "counts are 0 or more"),
        (lambda c: c.allgather(np.zeros(2), counts="xy"), TypeError, "a sequence of 1 integers"),
        (lambda c: c.reduce_scatter(np.zeros(2), counts=[3]), ValueError, "x has 2 elements, counts add up to 3"),
        (lambda c: c.scatter(None), ValueError, "scatter needs x on its root"),
        (lambda c: c.alltoall(np.zeros(2), counts=[2]), TypeError, "a pair"),
        (lambda c: c.alltoall(np.zeros(2), counts=([3], [3])), ValueError, "the send counts add up to 3"),
        (lambda c: c.alltoall(np.zeros(2), counts=([2], [1])), ValueError, "sends itself 2 elements but expects 1"),
        (lambda c: c.split("red"), TypeError, "integer"),
        (lambda c: hrdma.init(), ValueError, r"called before.*hrdma.finalize\(\) first"),
    ],
)
def test_refused(comm, call, error, text):
    with pytest.raises(error, match=text):
        call(comm)
    assert comm.allreduce(np.ones(1))[0] == 1, "the communicator goes on"


def test_overlap_is_refused(comm):
    x = np.zeros(10)
    with pytest.raises(ValueError, match="x and out overlap"):
        comm.allreduce(x[:5], out=x[2:7])
    with pytest.raises(ValueError, match="x and out overlap"):
        comm.sendrecv(x, 0, x)


# -- buffers -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        np.arange(6, dtype="float32"),
        np.arange(6, dtype="float32").reshape(2, 3),
        np.arange(6, dtype=">i4"),
        np.array([True, False]),
        np.zeros(3, dtype=[("a", "i4"), ("b", "f8")]),
        np.float64(3.5),
        np.zeros((0, 3)),
        b"bytes",
        bytearray(b"bytearray"),
        memoryview(b"memoryview"),
        __import__("array").array("d", [1.0, 2.0]),
        Fake(np.arange(5, dtype="int16")),
        OldFake(np.arange(5, dtype="int16")),
        Fake(READ_ONLY),
    ],
    ids=lambda x: type(x).__name__,
)
def test_any_contiguous_memory_is_sent(comm, source):
    raw = np.asarray(source.array if isinstance(source, Fake) else source).tobytes()
    out = bytearray(len(raw) + 8)
    request = comm.isend(source, 0)
    assert comm.recv(out, 0) == (0, len(raw))
    assert request.wait() is None
    assert bytes(out[: len(raw)]) == raw
    assert bytes(out[len(raw) :]) == bytes(8)


def test_dlpack_is_written_into(comm):
    x = np.zeros(4, "int32")
    comm.isend(np.arange(4, dtype="int32"), 0)
    comm.recv(Fake(x), 0)
    assert x.tolist() == [0, 1, 2, 3]
    tensor = Fake(x)
    assert comm.allreduce(tensor, "sum") is tensor
    out = comm.allgather(Fake(x))
    assert isinstance(out, np.ndarray) and out.dtype == np.int32 and out.tolist() == [0, 1, 2, 3]


def test_buffers_are_held_while_a_request_is_on_its_way_and_no_longer(comm):
    x = bytearray(8)
    request = comm.irecv(x, 0, tag=99)
    with pytest.raises(BufferError):
        x.append(1)
    request.cancel()
    x.append(1)
    y = bytearray(8)
    request = comm.isend(y, 0, tag=98)
    comm.recv(bytearray(8), 0, tag=98)
    request.wait()
    y.append(1)
    z = np.zeros(4)
    before = sys.getrefcount(z)
    request = comm.irecv(z, 0, tag=97)
    with pytest.raises(ValueError, match="resize"):
        z.resize(8)
    request.cancel()
    assert sys.getrefcount(z) == before


def test_a_dropped_request_goes_on(comm):
    x = np.zeros(3)
    comm.irecv(x, 0, tag=5)
    gc.collect()
    comm.isend(np.ones(3), 0, tag=5)
    gc.collect()
    comm.isend(b"", 0, tag=5)
    comm.recv(bytearray(0), 0, tag=5)  # in order: the first has come too
    assert x.tolist() == [1, 1, 1]


def test_many_dropped_requests_are_let_go(comm):
    x = bytearray(8)
    for _ in range(200):
        comm.isend(b"12345678", 0, tag=6)
        last = comm.irecv(x, 0, tag=6)
    last.wait()
    assert comm.irecv(bytearray(1), 0, tag=7).cancel()
    x.append(1)


# -- messages ----------------------------------------------------------------------------------------------------------------------


def test_tags_match_in_order(comm):
    for i in range(4):
        comm.isend(np.array([i]), 0, tag=i % 2)
    out = np.zeros(1, int)
    got = []
    for tag in (1, 0, 1, 0):
        comm.recv(out, 0, tag)
        got.append(int(out[0]))
    assert got == [1, 0, 3, 2]


def test_sendrecv_with_oneself(comm):
    out = np.zeros(3)
    assert comm.sendrecv(np.arange(3.0), 0, out, 0, tag=1) == (0, 24)
    assert out.tolist() == [0, 1, 2]
    comm.isend(b"x", 0, tag=3)
    with pytest.raises(TimeoutError):
        comm.sendrecv(b"y", 0, bytearray(1), 0, tag=4, recv_tag=5, timeout=0.05)
    comm.recv(bytearray(1), 0, tag=3)
    comm.recv(bytearray(1), 0, tag=4)


def test_recv_times_out_and_leaves_the_buffer_alone(comm):
    x = np.full(3, 7.0)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"recv #\d+ with rank 0 did not complete within 0.2 s"):
        comm.recv(x, 0, tag=11, timeout=0.2)
    assert 0.2 <= time.monotonic() - start < 2
    with pytest.raises(TimeoutError, match="from any source"):
        comm.recv(x, tag=11, timeout=0)
    comm.isend(np.ones(3), 0, tag=11)
    assert x.tolist() == [7, 7, 7]
    comm.recv(x, hrdma.ANY_SOURCE, tag=11)
    assert x.tolist() == [1, 1, 1]


def test_a_message_too_long_is_an_error_of_its_receive_alone(comm):
    comm.isend(np.zeros(10), 0, tag=12)
    with pytest.raises(hrdma.RequestError, match="larger than the buffer"):
        comm.recv(np.zeros(2), 0, tag=12)
    comm.isend(np.zeros(2), 0, tag=12)
    assert comm.recv(np.zeros(4), 0, tag=12).nbytes == 16


# -- requests ---------------------------------------------------------------------------------------------------------------------


def test_request_wait_and_cancel(comm):
    x = np.zeros(2)
    request = comm.irecv(x, 0, tag=21)
    assert not request.done
    assert "pending" in repr(request)
    with pytest.raises(TimeoutError, match="it goes on"):
        request.wait(0.05)
    assert not request.done
    comm.isend(np.ones(2), 0, tag=21)
    assert request.wait(5) == hrdma.Status(0, 16)
    assert request.done and request.result() == (0, 16)
    assert not request.cancel()
    withdrawn = comm.irecv(x, 0, tag=22)
    assert withdrawn.cancel()
    with pytest.raises(hrdma.RequestError):
        withdrawn.result()
    comm.isend(np.zeros(2), 0, tag=22)
    assert x.tolist() == [1, 1], "a withdrawn receive changes nothing"
    comm.recv(np.zeros(2), 0, tag=22)


def test_request_has_a_deadline_of_its_own(comm):
    with pytest.raises(TimeoutError, match=r"within 0\.1 s"):
        comm.irecv(bytearray(1), 0, tag=23, timeout=0.1).wait()


def test_await(comm):
    async def exchange(i):
        x = np.zeros(3)
        received, sent = comm.irecv(x, 0, tag=i), comm.isend(np.full(3, float(i)), 0, tag=i)
        await sent
        assert await received == (0, 24)
        return float(x[0])

    async def together():
        values = await asyncio.gather(*(exchange(i) for i in range(50)))
        total = await comm.allreduce(np.ones(3), async_op=True)
        with pytest.raises(TimeoutError, match=r"within 0\.1 s"):
            await comm.irecv(bytearray(1), 0, tag=77, timeout=0.1)
        request = comm.irecv(bytearray(1), 0, tag=78)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_await(request), 0.05)
        assert request.done, "cancelling the task withdraws the request"
        return values, total.tolist()

    for _ in range(2):  # two loops, one after the other
        values, total = asyncio.run(together())
        assert values == list(range(50)) and total == [1, 1, 1]


async def _await(request):
    return await request


def test_loops_of_two_threads(comm):
    failures = []

    async def body(base):
        for i in range(30):
            received = comm.irecv(bytearray(4), 0, tag=base + i)
            await asyncio.sleep(0)
            comm.isend(b"1234", 0, tag=base + i)
            assert (await received).nbytes == 4

    def thread(base):
        try:
            asyncio.run(body(base))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=thread, args=(1000 * i,)) for i in (1, 2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(30)
    assert not failures


# -- collectives of one rank --------------------------------------------------------------------------------------------------------


def test_shapes_of_results(comm):
    x = np.arange(6.0).reshape(2, 3)
    for result in (comm.allgather(x), comm.gather(x), comm.reduce_scatter(x), comm.scatter(x), comm.alltoall(x)):
        assert result.shape == (2, 3) and hrdma.is_registered(result) and (result == x).all()
    assert comm.allgather(x, counts=[6]).shape == (6,)
    assert comm.allgather(np.float64(2)).shape == (1,)
    assert comm.allreduce(x) is x and comm.broadcast(x) is x and comm.reduce(x) is x
    out = np.zeros(6)
    assert comm.allreduce(x, out=out) is out and comm.barrier() is None
    assert comm.allreduce(x, async_op=True).wait() is x
    assert comm.broadcast(np.array([1 + 2j, True])).dtype == complex


def test_children(comm):
    a, b, c = comm.split(0), comm.dup(), comm.split(None)
    assert c is None and len({comm.id, a.id, b.id}) == 3
    a.timeout = 1
    assert a.dup().timeout == 1 and b.timeout == comm.timeout
    for child in (a, b):
        assert child.allreduce(np.ones(1))[0] == 1
        child.close()
        assert child.closed
        for call in (lambda c=child: c.allreduce(np.ones(1)), child.dup, child.barrier, child.shrink):
            with pytest.raises(ValueError, match="this communicator is closed"):
                call()


def test_settings_of_a_communicator(comm):
    with comm.dup() as child:
        child.priority = 2
        child.deterministic = True
        child.timeout = 3
        grandchild = child.dup()
        assert (grandchild.priority, grandchild.deterministic, grandchild.timeout) == (2, True, 3)
        with pytest.raises(ValueError, match="priority 9"):
            child.priority = 9
        with pytest.raises(ValueError, match="timeout"):
            child.timeout = -2


def test_info_and_stats_can_be_read(comm):
    info = comm.info()
    assert info["size"] == 1 and info["transports"] == {0: "loop"} and "loop" in info["domains"]
    assert comm.stats()["peers"] == {}
    assert comm.stats()["counters"]


def test_closing_ends_what_waits(comm):
    child = comm.dup()
    errors = []

    def wait():
        try:
            child.recv(bytearray(1), 0, timeout=20)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    pending = child.irecv(bytearray(1), 0, tag=3)
    child.close()
    thread.join(5)
    assert not thread.is_alive()
    assert isinstance(errors[0], hrdma.HrdmaError)
    with pytest.raises(hrdma.HrdmaError, match="closed"):
        pending.wait()


def test_fork(comm):
    x = hrdma.zeros(4)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        found = []
        try:
            for call in (lambda: comm.barrier(), lambda: comm.isend(x, 0), lambda: comm.dup()):
                try:
                    call()
                    found.append("nothing was raised")
                except ValueError as error:
                    found.append(str(error))
            x[1] = 5  # the memory is shared with the parent
            comm.close()
        except BaseException as error:
            found.append(repr(error))
        os.write(write, "|".join(found).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found = pipe.read().split("|")
    os.waitpid(pid, 0)
    assert len(found) == 3 and all("used after fork" in text for text in found), found
    assert x.tolist() == [0, 5, 0, 0]
    assert comm.allreduce(np.ones(1))[0] == 1


def test_program_is_validated_by_the_core():
    with pytest.raises(ValueError, match="no program"):
        _core.Program(bytes(63), b"", b"", 0, 0, 0, 1)
    with pytest.raises(ValueError):
        _core.Program(b"\xff" * 64, b"", b"", 0, 0, 0, 1)


def test_engine_says_what_it_cannot_open():
    with pytest.raises(hrdma.DeviceError, match="no provider is called 'carrier_pigeon'"):
        _core.Engine(0, "carrier_pigeon")
    with pytest.raises(ValueError, match="no provider is called"):
        _core.provider_devices("carrier_pigeon")


def anew(rank, port):
    """What a forked child does with a job of its own."""
    with hrdma.init(rank, 2, master=f"127.0.0.1:{port}", timeout=20) as comm:
        x, y = np.full(1 << 18, rank + 1.0), hrdma.empty(1 << 18)
        y[:] = x
        comm.allreduce(x)
        comm.allreduce(y)
        return x[0] == y[-1] == 3 and hrdma.is_registered(y)


@pytest.mark.parametrize("transport", harness.transports())
def test_forked_children_make_a_job_of_their_own(comm, transport, monkeypatch):
    """Though their parent has memory, a communicator and a collective behind it."""
    for name, value in {"HRDMA_TRANSPORT": transport, **harness.devices(transport)}.items():
        monkeypatch.setenv(name, value)
    x = hrdma.zeros(1000)
    x += 1
    comm.allreduce(x)
    port, children = free_port(), []
    for rank in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                os._exit(0 if anew(rank, port) else 1)
            except BaseException:
                traceback.print_exc()
                os._exit(2)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert x[5] == 1 and hrdma.is_registered(x)
    assert comm.allreduce(np.ones(1))[0] == 1

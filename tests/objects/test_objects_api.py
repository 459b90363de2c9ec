"""What one client sees: values, views, names, deadlines, every kind of bad input."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import time

import ml_dtypes
import numpy as np
import pytest
from rig import Rig, eventually
from windows import one_good

from hrdma.errors import HrdmaError, PeerError
from hrdma.objects import Client, ObjectLost, ObjectRef, ObjectStoreFull, Request, connect

BIG = 1 << 18  # elements: float32 above the inline limit


def numbers(n: int, rank: int = 0, size: int = 1, dtype="float32") -> np.ndarray:
    return (np.arange(n) * size + rank).astype(dtype)


@pytest.mark.parametrize("dtype", ["int8", "uint64", "float16", "bfloat16", "float64", "bool", "complex128"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (300, 400)])
def test_arrays_come_back_as_they_were(client, dtype, shape):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    array = (numbers(int(np.prod(shape))) % 100).reshape(shape).astype(kind)
    back = client.get(client.put(array))
    assert back.dtype == array.dtype and back.shape == array.shape
    assert np.array_equal(back, array)
    assert not back.flags.writeable


@pytest.mark.parametrize("n", [0, 1, 1 << 16, (1 << 16) + 1, 5 << 20])
def test_bytes_come_back_as_they_were(client, n):
    data = bytes(range(256)) * (n // 256 + 1)
    assert bytes(client.get(client.put(data[:n]))) == data[:n]


def test_strided_and_foreign_order_are_copied_into_order(client):
    array = numbers(12).reshape(3, 4)
    assert np.array_equal(client.get(client.put(array.T)), array.T)
    assert np.array_equal(client.get(client.put(array[:, ::2])), array[:, ::2])
    assert np.array_equal(client.get(client.put(array.astype(">f4"))), array)


def test_a_view_is_shared_memory_and_never_changes(rig, client):
    array = numbers(16 << 20)
    ref = client.put(array)
    array[:] = 0
    others = [rig.client("a") for _ in range(3)]
    used = client.info()["used"]
    views = [other.get(ref) for other in others]

    def measure() -> float:
        started = time.perf_counter()
        views.append(client.get(ref))
        return time.perf_counter() - started

    one_good(measure, lambda seconds: seconds < 0.5)
    after = client.info()
    assert after["used"] == used == 64 << 20, "a get takes no memory"
    assert after["received"] == after["sent"] == 0, "and moves no bytes"
    assert all(view[-1] == (16 << 20) - 1 for view in views)
    with pytest.raises(ValueError, match="read-only"):
        views[0][0] = 1
    with pytest.raises(ValueError, match=r"cannot set WRITEABLE|read-only"):
        views[0].flags.writeable = True


def test_a_view_outlives_deletion_client_and_connection(rig, client):
    ref = client.put(numbers(BIG))
    other = rig.client("a")
    view = other.get(ref)
    client.delete(ref)
    other.close()
    assert view[-1] == BIG - 1
    eventually(lambda: client.info()["used"] == 0)


def test_references(client):
    ref = client.put(b"x", id="a name: with colons")
    assert ref == client.ref("a name: with colons") == ObjectRef.parse(str(ref)) == pickle.loads(pickle.dumps(ref))
    assert len({ref, client.ref("a name: with colons")}) == 1
    for text in ("", "hrdma:", "hrdma:xyz:a", "object"):
        with pytest.raises(ValueError, match="no object reference"):
            ObjectRef.parse(text)


def test_get_before_put(rig, client):
    request = client.get(client.ref("later"), async_op=True)
    assert not request.done
    rig.client("a").put(numbers(BIG), id="later")
    assert request.wait(5)[7] == 7


def test_the_same_name_twice(rig, client):
    client.put(numbers(BIG), id="big")
    client.put(b"abc", id="small")
    other = rig.client("a")
    assert other.put(numbers(BIG), id="big") == client.ref("big"), "same content: nothing happens"
    other.put(b"abc", id="small")
    with pytest.raises(ValueError, match="'big' exists already, with other content"):
        other.put(numbers(BIG) + 1, id="big")
    with pytest.raises(ValueError, match="'small' exists already"):
        other.put(b"abd", id="small")
    with pytest.raises(ValueError, match="'small' exists already"):
        other.put(np.frombuffer(b"abc", "uint8"), id="small")


def test_deadlines(client):
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="get nobody is not done after"):
        client.get(client.ref("nobody"), timeout=0.2)
    assert 0.2 <= time.monotonic() - started < 2
    with pytest.raises(TimeoutError):
        client.contributors(client.ref("nobody"), timeout=0.05)
    with pytest.raises(ValueError, match="timeout -1: seconds are wanted"):
        client.get(client.ref("nobody"), timeout=-1)


def test_wait(client):
    refs = [client.ref(f"w{i}") for i in range(4)]
    assert client.wait(refs, timeout=0.05) == ([], refs)
    client.put(b"1", id="w2")
    client.put(numbers(BIG), id="w0")
    assert client.wait(refs, 2, timeout=5) == ([refs[0], refs[2]], [refs[1], refs[3]])
    with pytest.raises(ValueError, match="count 5 of 4"):
        client.wait(refs, 5)


def test_delete(client):
    refs = [client.put(b"small"), client.put(numbers(BIG))]
    for ref in refs:
        client.delete(ref)
        with pytest.raises(ObjectLost, match="was deleted"):
            client.get(ref)
        assert client.wait([ref], timeout=5)[0] == [ref]
    assert client.info()["used"] == 0
    waiting = client.get(client.ref("soon deleted"), async_op=True)
    client.delete(client.ref("soon deleted"))
    with pytest.raises(ObjectLost):
        waiting.wait(5)
    request = client.delete(client.put(b"another"), async_op=True)
    assert isinstance(request, Request) and request.wait(5) is None


@pytest.mark.parametrize("n", [5, BIG])
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "avg"])
def test_reduce(client, op, n):
    parts = [numbers(n, rank, 4) % 7 + 1 for rank in range(4)]
    result = client.get(client.reduce([client.put(part) for part in parts], op))
    exact = {"sum": np.sum, "prod": np.prod, "min": np.min, "max": np.max, "avg": np.mean}[op](parts, axis=0)
    assert np.array_equal(result, exact)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "float16", "bfloat16", "float64"])
def test_reduce_any_type(client, dtype):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    refs = [client.put(np.full(100_000, rank + 1, kind)) for rank in range(3)]
    assert np.all(client.get(client.reduce(refs)) == 6)
    if dtype != "bfloat16" and "float" not in dtype:
        assert np.all(client.get(client.reduce(refs, "bxor")) == 0)


@pytest.mark.parametrize("n", [3, BIG])
def test_the_first_that_arrive(client, n):
    refs = [client.ref(f"g{i}") for i in range(5)]
    result = client.reduce(refs, count=3, id="first three")
    for i in (4, 1, 2):
        client.put(np.full(n, 10**i, "int64"), id=f"g{i}")
    assert np.all(client.get(result) == 10**4 + 10**1 + 10**2)
    client.put(np.full(n, 1, "int64"), id="g0")
    assert set(client.contributors(result)) == {refs[4], refs[1], refs[2]}
    assert client.reduce(refs, count=3, id="first three") == result, "asked again: the same one"


def test_allreduce_is_one_reduction_for_all(rig, client):
    refs = [client.put(np.full(BIG, i, "int32")) for i in range(3)]
    requests = [rig.client("a").allreduce(refs, id="all", async_op=True) for _ in range(3)]
    assert all(np.all(request.wait() == 3) for request in requests)


def test_bad_reductions(client):
    small, big = client.put(np.zeros(4, "int32")), client.put(np.zeros(BIG, "int32"))
    with pytest.raises(ValueError, match="count 3 of 2"):
        client.reduce([small, big], count=3)
    with pytest.raises(ValueError, match="given twice"):
        client.reduce([small, small])
    with pytest.raises(ValueError, match="unknown op 'median'"):
        client.reduce([small], "median")
    other = client.put(np.zeros((2, 2), "int32"))
    with pytest.raises(ValueError, match=f"{other.id} has shape|{small.id} has shape"):
        client.get(client.reduce([small, other]))
    floats = client.put(np.zeros(BIG, "float32"))
    with pytest.raises(ValueError, match=f"{floats.id} has dtype|{big.id} has dtype"):
        client.get(client.reduce([big, floats]))
    with pytest.raises(TypeError, match="not defined for float32"):
        client.get(client.reduce([floats], "bxor"))
    flags = client.put(np.zeros(BIG, "bool"))
    with pytest.raises(TypeError, match="'bool' cannot be reduced"):
        client.get(client.reduce([flags]))
    with pytest.raises(ValueError, match="exists already"):
        client.reduce([small], id=big.id)
    client.reduce([small], id="one")
    with pytest.raises(ValueError, match="another reduction"):
        client.reduce([big], id="one")
    with pytest.raises(ValueError, match="another reduction"):
        client.allreduce([big], id="one")
    with pytest.raises(ValueError, match="result of a reduction"):
        client.put(b"", id="one")
    with pytest.raises(ValueError, match="was put"):
        client.contributors(big)


def test_bad_values_and_references(client):
    for value in ("text", None, np.array(["a"]), np.array([object()]), np.zeros(2, [("a", "i4")])):
        with pytest.raises(TypeError, match="objects are bytes or arrays of numbers"):
            client.put(value)
    with pytest.raises(TypeError, match="expected an ObjectRef"):
        client.get("hrdma:0:a")
    with pytest.raises(ValueError, match="of another job"):
        client.get(ObjectRef("0" * 16, "a"))
    for name in ("", "x" * 201):
        with pytest.raises(ValueError, match="between 1 and 200"):
            client.put(b"", id=name)


def test_a_full_store_says_who_holds_what(rig):
    rig.grow("small", capacity=4 << 20)
    client = rig.client("small")
    kept = client.put(bytes(3 << 20), id="kept")
    view = client.get(kept)
    with pytest.raises(ObjectStoreFull, match=f"kept 3145728 bytes, in use 1 times; process {os.getpid()} views kept"):
        client.put(bytes(2 << 20))
    del view
    with pytest.raises(ObjectStoreFull, match="the only copy"):
        client.put(bytes(2 << 20))
    with pytest.raises(ObjectStoreFull, match="larger than the store"):
        client.put(bytes(5 << 20))
    client.delete(kept)
    client.put(bytes(2 << 20))


def test_a_client_that_dies_gives_back_what_it_viewed_and_half_wrote(rig, client):
    ref = client.put(numbers(BIG))
    waiting = client.get(client.ref("half"), async_op=True)
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            mine = rig.client("a")
            view = mine.get(ref)
            meta = {"kind": "bytes", "dtype": "uint8", "shape": [1 << 20], "nbytes": 1 << 20}
            mine._call("put", {"id": "half", "meta": meta}, 5.0, lambda *_: None).wait()
            os.write(told, b"%d" % view[1])
            time.sleep(60)
        finally:
            os._exit(1)
    assert os.read(ready, 1) == b"1"
    assert client.info()["used"] == (BIG * 4) + (1 << 20)
    os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(ready)
    os.close(told)
    eventually(lambda: client.info()["used"] == BIG * 4)
    assert not waiting.done
    client.put(b"whole", id="half")
    assert waiting.wait(5) == b"whole"


def test_a_putter_cannot_change_what_it_put(client):
    import mmap

    meta = {"kind": "bytes", "dtype": "uint8", "shape": [1 << 20], "nbytes": 1 << 20}
    answer, descriptor = client._call("put", {"id": "mine", "meta": meta}, 5.0, lambda *both: both).wait()
    held = mmap.mmap(descriptor, 1 << 20)
    commit = client._call("commit", {"writing": answer["writing"]}, 5.0, lambda *_: None)
    with pytest.raises(ValueError, match="still mapped writable"):
        commit.wait()
    held.close()
    os.close(descriptor)
    answer, descriptor = client._call("put", {"id": "mine", "meta": meta}, 5.0, lambda *both: both).wait()
    client._call("commit", {"writing": answer["writing"]}, 5.0, lambda *_: None).wait()
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"changed", 0)
    os.close(descriptor)


def test_asyncio(client):
    async def body():
        late = client.get(client.ref("late"), async_op=True)
        ref = await client.put(numbers(BIG), id="late", async_op=True)
        first, second = await asyncio.gather(_value(late), _value(client.get(ref, async_op=True)))
        assert first[5] == second[5] == 5
        with pytest.raises(TimeoutError):
            await client.get(client.ref("never"), async_op=True, timeout=0.1)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_value(client.get(client.ref("never"), async_op=True)), 0.1)

    asyncio.run(body())
    assert not client._pending


async def _value(request):
    return await request


def test_requests(client):
    request = client.get(client.ref("r"), async_op=True)
    with pytest.raises(TimeoutError, match="it goes on"):
        request.wait(0.05)
    assert request.cancel() and not request.cancel()
    client.put(b"1", id="r")
    again = client.get(client.ref("r"), async_op=True)
    assert again.result() == b"1" and again.done and not again.cancel()


def test_views_are_released_without_another_call(client):
    ref = client.put(numbers(BIG))
    for _ in range(20):
        client.get(ref)
    gc.collect()
    client.delete(ref)
    eventually(lambda: client.info()["used"] == 0)


def test_after_fork_a_client_is_refused(client):
    child = os.fork()
    if child == 0:
        try:
            client.info()
        except ValueError as error:
            os._exit(0 if "used after fork" in str(error) else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.info()["objects"] == 0


def test_a_closed_client_and_a_node_that_is_gone(rig, client):
    other = rig.client("a")
    other.close()
    with pytest.raises(PeerError, match="closed"):
        other.put(b"")
    waiting = client.get(client.ref("x"), async_op=True)
    rig.nodes.pop("a").close()
    with pytest.raises(PeerError, match="node of this host is gone"):
        waiting.wait(5)
    with pytest.raises(PeerError, match="node of this host is gone"):
        client.info()


def test_bad_addresses():
    for text in ("host:1", "tcp://host", "tcp://host:99999", "udp://host:1"):
        with pytest.raises(ValueError, match="no address"):
            connect(text)


@pytest.mark.slow
def test_a_node_is_started_and_ends_after_its_last_client():
    name = f"auto.{os.getpid()}"
    with connect(node=name, token="t", capacity=8 << 20, timeout=30) as client:
        ref = client.put(b"here")
        with connect(node=name, token="t", timeout=30) as second:
            assert second.job == client.job and second.get(ref) == b"here"
            pid = _peer(second)
    eventually(lambda: not os.path.exists(f"/proc/{pid}") or _zombie(pid), 10)


@pytest.mark.slow
def test_the_wrong_token(rig):
    rig.grow("a")
    address = f"tcp://127.0.0.1:{rig.nodes['a'].port}"
    with pytest.raises(HrdmaError, match="does not hold our job token"):
        connect(address, node="b", token="another", timeout=20)


def _peer(client: Client) -> int:
    import socket
    import struct

    return struct.unpack("3i", client._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


def _zombie(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"


def test_rig_means_different_nodes():
    """The negative of sharing: two rigs do not see each other's objects."""
    first, second = Rig(), Rig()
    try:
        first.grow("a")
        second.grow("a")
        one, two = first.client("a"), second.client("a")
        assert one.job != two.job
        with pytest.raises(ValueError, match="another job"):
            two.get(one.put(b"x"))
    finally:
        first.close()
        second.close()

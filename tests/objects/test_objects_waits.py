"""Waiting for objects, what exists now, and what may be awaited; names and counts that cannot be."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest
from rig import eventually

BIG = 1 << 20


def numbers(n: int) -> np.ndarray:
    return np.arange(n, dtype="float32")


async def _value(request):
    return await request


def test_what_exists_now(rig, client):
    refs = [client.put(b"1"), client.ref("never"), client.put(numbers(BIG)), client.put(b"3")]
    client.delete(refs[3])
    assert client.wait(refs, timeout=0) == ([refs[0], refs[2], refs[3]], [refs[1]])
    assert client.wait(iter(refs), 4, timeout=0) == ([refs[0], refs[2], refs[3]], [refs[1]])
    assert client.wait([refs[1]], timeout=0) == client.wait([refs[1]], 1, 0) == ([], [refs[1]])
    assert "never" not in rig.nodes["a"].node.directory.entries, "nothing is kept of what was only asked about"


def test_what_is_here_now(rig):
    rig.grow("a", "b")
    rig.settle()
    here, there = rig.client("a"), rig.client("b")
    large, small = here.put(numbers(BIG)), here.put(b"small")
    assert here.get(large, timeout=0)[3] == 3
    assert [bytes(each)[:4] for each in here.get([small, large], timeout=0)] == [b"smal", bytes(4)]
    for client, ref in ((there, large), (here, here.ref("never"))):
        with pytest.raises(TimeoutError, match="is not on this host now"):
            client.get(ref, timeout=0)
        with pytest.raises(TimeoutError, match="is not on this host now"):
            client.get([ref], timeout=0, async_op=True)[0].wait()
    there.get(large)
    assert there.get(large, timeout=0, async_op=True).wait()[3] == 3


def test_what_is_given_up_together_is_withdrawn_together(client, monkeypatch):
    said: list[int] = []
    say = client._say

    def counted(*messages):
        if any(message["verb"] == "cancel" for message in messages):
            said.append(len(messages))
        say(*messages)

    monkeypatch.setattr(client, "_say", counted)
    refs = [client.ref(f"g{i}") for i in range(500)]
    with pytest.raises(TimeoutError):
        client.get(refs, timeout=0.05)
    assert client.wait(refs, timeout=0.05) == ([], refs)
    client.put(b"1", id="g7")
    assert client.wait(refs) == ([refs[7]], refs[:7] + refs[8:])
    assert sum(said) == 500 + 500 + 499 and len(said) <= 6, said
    eventually(lambda: not client._pending)


def test_all_of_it_without_blocking(client):
    async def body():
        refs = [client.ref(f"g{i}") for i in range(3)]
        waiting = client.wait(refs, 2, async_op=True)
        total = await client.reduce(refs, count=2, id="total", async_op=True)
        unnamed = await client.reduce(refs, count=1, async_op=True)
        parts = client.contributors(total, async_op=True)
        assert await client.wait(refs, 1, timeout=0.05, async_op=True) == ([], refs)
        assert not waiting.done and not parts.done
        client.put(b"\1", id="g2")
        client.put(b"\2", id="g0")
        assert await waiting == ([refs[0], refs[2]], [refs[1]])
        assert await parts == [refs[0], refs[2]]
        assert await client.get(total, async_op=True) == b"\3"
        assert await client.get(unnamed, async_op=True) in (b"\1", b"\2")
        with pytest.raises(ValueError, match="another reduction"):
            await client.reduce(refs, "max", id="total", async_op=True)
        with pytest.raises(ValueError, match="another reduction"):
            await client.allreduce(refs, "max", id="total", async_op=True)
        assert await client.allreduce(refs, count=2, id="total", async_op=True) == b"\3"
        late = client.wait([client.ref("never")], async_op=True)
        assert late.cancel() and late.canceled
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_value(client.wait([client.ref("never")], async_op=True)), 0.05)

    asyncio.run(body())
    eventually(lambda: not client._pending)


def test_names_and_counts_that_cannot_be(client):
    refs = [client.ref("r0"), client.ref("r1")]
    with pytest.raises(ValueError, match="half a surrogate pair"):
        client.put(b"", id="a\ud800")
    for call in (client.wait, client.reduce):
        with pytest.raises(ValueError, match="no references were given"):
            call([])
        with pytest.raises(TypeError, match="in a list"):
            call(refs[0])
        with pytest.raises(TypeError, match="in a list, not str"):
            call("r0")
        with pytest.raises(TypeError, match="expected an ObjectRef"):
            call(["r0"])
    with pytest.raises(TypeError, match="integer"):
        client.reduce(refs, count=1.5)
    with pytest.raises(ValueError, match="'r1' cannot be reduced into itself"):
        client.reduce(refs, id="r1")
    assert client.get(client.put(memoryview(b"abcdef")[::2])) == b"ace"


def test_a_request_that_is_dropped_drops_its_result(client):
    ref = client.put(numbers(BIG))
    gc.disable()
    try:
        request = client.allreduce([ref], id="sum", async_op=True)
        assert request.wait()[3] == 3
        del request
        for each in (ref, client.ref("sum")):
            client.delete(each)
        eventually(lambda: client.info()["used"] == 0)
    finally:
        gc.enable()


def test_an_interrupted_wait_is_withdrawn(client, monkeypatch):
    never = client.ref("never")
    client.reduce([never], id="total")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "_drive", interrupted)
    for call in (
        client.get,
        client.contributors,
        lambda ref: client.wait([ref]),
        lambda ref: client.allreduce([ref], id="x"),
    ):
        with pytest.raises(KeyboardInterrupt):
            call(never)
        eventually(lambda: not client._pending)


def test_more_references_than_a_request_holds(client):
    refs = [client.ref(f"{i:0190d}") for i in range(7000)]
    with pytest.raises(ValueError, match="too long: give fewer references at once"):
        client.reduce(refs, count=1)

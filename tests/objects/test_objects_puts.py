"""Puts that are interrupted, deleted or refused in the middle, and copies that are evicted then."""

from __future__ import annotations

import gc
import os
import threading
import time

import numpy as np
import pytest
from rig import eventually

from hrdma.objects import ObjectLost, ObjectStoreFull

BIG = 1 << 20


def numbers(n: int) -> np.ndarray:
    return np.arange(n, dtype="float32")


def test_an_interrupted_put_leaves_nothing_and_its_name_free(client, monkeypatch):
    write = os.pwrite

    def interrupted(descriptor, data, offset):
        write(descriptor, data, offset)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.put(numbers(BIG), id="again")
    monkeypatch.undo()
    eventually(lambda: client.info()["used"] == 0)
    assert client.get(client.put(numbers(BIG), id="again", timeout=5))[3] == 3


def test_a_canceled_put_stops_where_it_is(client, monkeypatch):
    write, begun, go_on, steps = os.pwrite, threading.Event(), threading.Event(), []

    def held(descriptor, data, offset):
        steps.append(offset)
        begun.set()
        go_on.wait(10)
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", held)
    request = client.put(bytes(32 << 20), id="x", async_op=True)
    assert begun.wait(10)
    assert request.cancel() and request.canceled
    go_on.set()
    eventually(lambda: client.info()["used"] == 0)
    assert steps == [0]
    client.put(b"the name is free", id="x", timeout=5)


def test_a_put_ends_by_its_deadline(client, monkeypatch):
    write = os.pwrite

    def slow(*arguments):
        time.sleep(0.1)
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", slow)
    begun = time.monotonic()
    for async_op in (False, True):
        with pytest.raises(TimeoutError, match="put x is not done after"):
            found = client.put(bytes(1 << 28), id="x", timeout=0.3, async_op=async_op)
            found.wait()
        eventually(lambda: client.info()["used"] == 0)  # it takes all room until its last step is over
    assert time.monotonic() - begun < 10, "and not 128 steps"
    monkeypatch.undo()
    client.put(b"the name is free", id="x", timeout=5)


def test_deleted_and_put_anew_in_the_middle_of_a_put(rig, client, monkeypatch):
    write, begun, go_on = os.pwrite, threading.Event(), threading.Event()

    def held(descriptor, data, offset):
        if data[0] == 1:
            begun.set()
            go_on.wait(10)
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", held)
    first = client.put(bytes([1]) * BIG, id="x", async_op=True)
    assert begun.wait(10)
    rig.client("a").delete(client.ref("x"))
    client.put(bytes([2]) * BIG, id="x")
    go_on.set()
    with pytest.raises(ObjectLost, match="was deleted while it was put"):
        first.wait()
    assert client.get(client.ref("x")) == bytes([2]) * BIG
    client.delete(client.ref("x"))
    eventually(lambda: client.info()["used"] == 0)


def test_a_refused_put_gives_back_what_it_compared_with(client):
    client.put(bytes(BIG), id="x")
    gc.disable()
    try:
        requests = [client.put(b"1" * BIG, id="x", async_op=True) for _ in range(2)]
        for request in requests:
            with pytest.raises(ValueError, match="exists already"):
                request.wait()
        client.delete(client.ref("x"))
        eventually(lambda: client.info()["used"] == 0, 5.0)
    finally:
        gc.enable()


def test_a_copy_in_use_that_is_deleted_while_it_is_evicted_goes(rig):
    rig.grow("a")
    rig.grow("b", capacity=3 << 20)
    rig.settle()
    one, two = rig.client("a"), rig.client("b")
    node = rig.nodes["b"].node
    ref = one.put(bytes(2 << 20))
    two.get(ref)
    segment, ask = node.store.objects[ref.id], node.asker.ask

    def asked(verb, name, then, **body):
        def dropped(answer):
            segment.pin()  # as a client would that gets it now
            one.delete(ref, async_op=True)
            time.sleep(0.3)
            then(answer)

        return ask(verb, name, dropped if verb == "drop" else then, **body)

    node.asker.ask = asked
    with pytest.raises(ObjectStoreFull):
        two.put(bytes(2 << 20))
    node.post(lambda: node.store.unpin(segment))
    eventually(lambda: two.info()["used"] == 0)
    two.put(bytes(2 << 20))


@pytest.mark.parametrize("patient", [False, True])
def test_what_came_of_an_object_that_will_not_be_goes_with_who_wanted_it(rig, patient):
    rig.grow("a", "b")
    rig.settle()
    one, two = rig.client("a"), rig.client("b")
    meta = {"kind": "bytes", "dtype": "uint8", "shape": [1 << 20], "nbytes": 1 << 20}
    answer, descriptor = one._call("put", {"id": "p", "meta": meta}, 5.0, lambda *both: both).wait()
    os.close(descriptor)
    waiting = two.get(two.ref("p"), async_op=True)
    one._say({"verb": "progress", "writing": answer["writing"], "progress": 1 << 19})
    eventually(lambda: one.info()["sent"] == 1 << 19)
    if patient:
        one.close()
        eventually(lambda: rig.nodes["a"].node.store.used == 0)
        time.sleep(0.1)
        assert two.info()["used"] == 1 << 20
        waiting.cancel()
    else:
        waiting.cancel()
        time.sleep(0.1)
        assert two.info()["used"] == 1 << 20, "it comes to its end"
        one.close()
    eventually(lambda: two.info()["used"] == 0)
    two.put(b"whole", id="p")
    assert two.get(two.ref("p")) == b"whole"

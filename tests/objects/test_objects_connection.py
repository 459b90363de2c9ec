"""A client's connection: who receives while several wait, and what goes when it ends."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
from rig import eventually

from hrdma.objects import Client, ObjectLost, ObjectRef

NUMBERS = np.arange(1 << 18, dtype="float32")  # above the inline limit


def test_threads_that_wait_at_once(rig, client):
    """One of them receives for all; when it has its own, or is told to stop, the others are not forgotten."""
    other = rig.client("a")
    found: dict[str, object] = {}

    def wait_for(name: str, seconds: float) -> None:
        try:
            found[name] = bytes(client.get(client.ref(name), timeout=seconds))
        except BaseException as error:
            found[name] = error

    threads = [
        threading.Thread(target=wait_for, args=(name, seconds))
        for name, seconds in {"never": 0.5, "t0": 10, "t1": 10, "t2": 10}.items()
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.05)  # in this order, so that the one in vain receives first
    for name in ("t2", "t0"):
        other.put(name.encode(), id=name)
    threads[0].join(5)
    assert isinstance(found["never"], TimeoutError)
    other.put(b"t1", id="t1")
    for thread in threads:
        thread.join(5)
    assert {name: found[name] for name in ("t0", "t1", "t2")} == {"t0": b"t0", "t1": b"t1", "t2": b"t2"}
    assert not client._pending


def test_a_waiter_is_cancelled_by_another_thread(client):
    request = client.get(client.ref("cancelled"), async_op=True, timeout=20)
    timer = threading.Timer(0.2, request.cancel)
    timer.start()
    started = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        request.wait()
    timer.join()
    assert time.monotonic() - started < 5


def test_what_an_owner_made_goes_with_it(rig, client):
    owner = rig.client("a", owner=True)
    client.put(b"not the owner's", id="first")
    big, small = owner.put(NUMBERS), owner.put(b"small", id="small")
    sums = [owner.reduce([big]), owner.reduce([big], id="shared")]
    assert owner.put(b"not the owner's", id="first") == client.ref("first")
    for ref in [big, *sums]:
        assert client.get(ref, timeout=10)[5] == 5
    view = client.get(big)
    owner.close()
    for ref in (big, small, sums[0]):
        eventually(lambda ref=ref: _lost(client, ref), what=f"the end of {ref}")
    assert bytes(client.get(client.ref("first"))) == b"not the owner's"
    assert client.get(sums[1])[5] == view[5] == 5


def _lost(client: Client, ref: ObjectRef) -> bool:
    try:
        client.get(ref, timeout=5)
    except ObjectLost:
        return True
    return False

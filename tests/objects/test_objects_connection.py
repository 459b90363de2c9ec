"""A client's connection: who receives while several wait, and what goes when it ends."""

from __future__ import annotations

import asyncio
import signal
import sys
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


class Rang(Exception):
    """Of a signal handler."""


def test_signal_handlers_that_raise(client, monkeypatch):
    """Wherever the main thread is when it is interrupted, the connection goes on, for it and for the other threads."""
    ref = client.put(b"x", id="small"), client.put(NUMBERS, id="large")
    main, ready, over, failed = threading.get_ident(), threading.Event(), threading.Event(), []
    random = np.random.default_rng(0)

    def ring() -> None:
        ready.wait()
        while not over.wait(random.uniform(1e-4, 2e-3)):
            signal.pthread_kill(main, signal.SIGUSR1)

    def beside() -> None:
        try:
            while not over.is_set():
                assert client.get(ref[1], timeout=5)[5] == 5
        except Exception as error:
            if not isinstance(error, Rang):
                failed.append(error)

    armed = []  # where the exception is caught; a second one could come while the first is handled

    def handler(*_: object) -> None:
        if armed:
            armed.clear()
            raise Rang

    swallowed = []  # where the interpreter cannot raise; a hook in Python could be interrupted itself
    monkeypatch.setattr(sys, "unraisablehook", swallowed.append)
    before = signal.signal(signal.SIGUSR1, handler)
    threads = [threading.Thread(target=ring), threading.Thread(target=beside)]
    rings, until = 0, time.monotonic() + 4
    try:
        for thread in threads:
            thread.start()
        while time.monotonic() < until:
            try:
                ready.set()
                while time.monotonic() < until:
                    armed[:] = [1]  # again, where the last one was swallowed
                    client.get(ref[0], timeout=5)  # bytes: a view's end would swallow the exception
                armed.clear()
            except Rang:
                rings += 1
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        ready.set()
        over.set()
        for thread in threads:
            thread.join(10)
        signal.signal(signal.SIGUSR1, before)
    assert rings > 50 and not failed
    assert {one.exc_type for one in swallowed} <= {Rang}, swallowed
    assert client.get(ref[1], async_op=True, timeout=5).wait()[5] == 5
    asked = client.get(ref[0], async_op=True, timeout=5)
    eventually(lambda: asked.done, what="an answer that nobody waits for")
    assert bytes(asked.wait()) == b"x"


def test_a_handler_and_a_callback_may_ask(client):
    """While their thread receives; and a callback may close."""
    client.put(b"x", id="k")
    found = []
    before = signal.signal(signal.SIGUSR1, lambda *_: found.append(bytes(client.get(client.ref("k"), timeout=5))))
    try:
        timer = threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
        timer.start()
        with pytest.raises(TimeoutError):
            client.get(client.ref("never"), timeout=0.5)
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [b"x"]
    request = client.get(client.ref("k"), async_op=True)
    request.then(client.close)
    started = time.monotonic()
    request.wait()
    assert time.monotonic() - started < 3
    eventually(lambda: not client._thread.is_alive(), what="the end of the thread")


def test_a_deadline_in_a_month(client):
    assert bytes(client.get(client.put(b"x"), timeout=3e6)) == b"x"


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


@pytest.mark.parametrize("value", [b"small", NUMBERS], ids=["small", "large"])
def test_what_somebody_deletes_is_the_owners_no_more(rig, client, value):
    """The name may be used again: the end of whoever had it first does not touch what others made of it."""
    rig.grow("b")
    rig.settle()
    owner, other = rig.client("a", owner=True), rig.client("b")
    sessions = rig.nodes["a"].sessions._sessions.values()
    for name in ("again", "gone"):
        owner.put(value, id=name)
        assert sum(len(one._owned) for one in sessions) == 1
        other.delete(other.ref(name))
        eventually(lambda: not any(one._owned for one in sessions), what="the news of the end")
    anew = other.put(b"anew", id="again")
    rig.nodes["a"].node.asker.ask("delete", "again", lambda _: None, gen="of the first")  # where no news came in time
    owner.close()
    eventually(lambda: len(sessions) == 1, what="the end of the owner")
    client.info()
    assert bytes(client.get(anew, timeout=5)) == b"anew"


def _lost(client: Client, ref: ObjectRef) -> bool:
    try:
        client.get(ref, timeout=5)
    except ObjectLost:
        return True
    return False

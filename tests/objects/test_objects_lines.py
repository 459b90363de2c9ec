"""Lines: a client asks the keeper of small objects itself, and is never worse off for it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time

import numpy as np
import pytest
from rig import Outside, eventually

from hrdma.control.wire import job_key
from hrdma.errors import HrdmaError
from hrdma.objects import ObjectLost, lines, streams

KEY = job_key("secret")


@pytest.fixture
def pair(rig):
    """Clients of two nodes; what `a` names is kept at a."""
    rig.grow("a", "b")
    rig.settle()
    return rig.client("a"), rig.client("b")


@pytest.fixture
def three(rig_of, zygote):
    rig = rig_of(Outside, heartbeat=1.0)
    rig.grow("a", "b", "c")
    rig.settle()
    return rig, {name: rig.client(name) for name in "abc"}


def asked(client) -> int:
    return client.info()["asked"]


def small(client, value: int = 7, name: str | None = None):
    """A small object that this client's node keeps."""
    return client.put(np.full(100, value, "int32"), id=name or client.ref().id)


def take_to_it(a, b) -> None:
    """As many gets as it takes for b's client to call a's node."""
    for i in range(lines.ENOUGH):
        assert b.get(small(a, i))[0] == i
    before = asked(a)
    assert b.get(small(a, 50))[0] == 50
    assert asked(a) == before + 1


def test_after_some_small_objects_the_keeper_is_asked_itself(pair):
    a, b = pair
    first = [small(a, i) for i in range(lines.ENOUGH)]
    for i, ref in enumerate(first):
        assert b.get(ref)[0] == i
        assert asked(a) == 0
    for i, ref in enumerate(first):
        found = b.get(ref)
        assert (found == i).all() and found.dtype == "int32" and not found.flags.writeable
    assert asked(a) == len(first)
    assert [found[0] for found in b.get(first[::-1])] == [1, 0]  # one question for all
    assert asked(a) == 2 * len(first)
    assert bytes(b.get(a.put(b"text", id=a.ref().id))) == b"text"
    assert a.get(first[0])[0] == 0
    assert asked(b) == 0


def test_names_that_say_nothing_of_their_keeper(pair):
    """Whoever keeps it by its hash is asked, and that may be one's own node."""
    a, b = pair
    for i in range(120):
        assert b.get(small(a, i, f"name {i}"))[0] == i
        assert a.get(b.ref(f"name {i}"))[0] == i
    assert asked(a) > 10 and asked(b) > 10


def test_it_waits_for_what_does_not_exist_yet(pair):
    a, b = pair
    take_to_it(a, b)
    ref, empty = a.ref(), a.ref()
    timer = threading.Timer(0.2, lambda: small(a, 9, ref.id))
    timer.start()
    before = asked(a)
    assert b.get(ref, timeout=10)[0] == 9
    timer.join()
    assert asked(a) == before + 1
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=empty.id):
        b.get(empty, timeout=lines.OPENING + 0.2)
    assert time.monotonic() - started > lines.OPENING
    small(a, 3, empty.id)
    assert b.get(empty)[0] == 3


def test_a_result_that_is_reduced_meanwhile(pair):
    a, b = pair
    take_to_it(a, b)
    refs = [a.ref() for _ in range(3)]
    total = a.reduce(refs)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(b.get(total)[0]))
    thread.start()
    for i, ref in enumerate(refs):
        b.put(np.full(100, 10**i, "int32"), id=ref.id)
    thread.join(10)
    assert found == [111]
    assert a.contributors(total) == refs


@pytest.mark.parametrize("early", [True, False], ids=["there", "to come"])
def test_what_is_large_comes_as_ever(pair, early):
    a, b = pair
    take_to_it(a, b)
    ref, large = a.ref(), np.arange(1 << 20, dtype="float32")
    thread = threading.Thread(target=lambda: (time.sleep(0 if early else 0.2), a.put(large, id=ref.id)))
    thread.start()
    if early:
        thread.join()
    before = asked(a)
    assert np.array_equal(b.get(ref, timeout=10), large)
    thread.join()
    assert asked(a) == before
    small_one, other = small(a), a.put(large)
    assert [len(each) for each in b.get([small_one, other])] == [100, 1 << 20]


def test_what_is_deleted_is_lost(pair):
    a, b = pair
    take_to_it(a, b)
    ref = small(a)
    assert b.get(ref)[0] == 7
    a.delete(ref)
    with pytest.raises(ObjectLost):
        b.get(ref, timeout=5)
    take_to_it(a, b)
    small(a, 8, ref.id)
    assert b.get(ref)[0] == 8


def test_many_threads(pair):
    """One at a time asks by the line; the others need not wait for it."""
    a, b = pair
    take_to_it(a, b)
    refs = [small(a, i) for i in range(200)]
    wrong: list[int] = []

    def work(offset: int) -> None:
        wrong.extend(i for i in range(offset, 200, 4) if b.get(refs[i])[0] != i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    late = a.ref()
    waiting = threading.Thread(target=lambda: b.get(late))
    waiting.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not wrong and waiting.is_alive()
    small(a, 1, late.id)
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_client_that_is_closed_ends_the_wait(pair):
    a, b = pair
    take_to_it(a, b)
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            b.get(a.ref())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    b.close()
    thread.join(5)
    assert "closed" in str(failed[0])


def test_a_change_of_nodes_in_the_middle(rig, pair):
    """Who waits at the keeper is sent away, and asks its own node."""
    a, b = pair
    take_to_it(a, b)
    ref = a.ref()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(b.get(ref)[0]))
    thread.start()
    time.sleep(0.1)
    rig.grow("c")
    rig.settle()
    small(a, 5, ref.id)
    thread.join(10)
    assert found == [5]
    take_to_it(a, b)


def test_a_forked_child_leaves_the_line_to_its_parent(pair):
    a, b = pair
    take_to_it(a, b)
    ref = small(a, 4)
    pid = os.fork()
    if pid == 0:
        try:
            b.get(ref)
        except ValueError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    before = asked(a)
    assert b.get(ref)[0] == 4
    assert asked(a) == before + 1


def test_a_killed_keeper_has_its_backup_asked(three):
    rig, clients = three
    a, b = clients["a"], clients["b"]
    take_to_it(a, b)
    ref, late = small(a), a.ref()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(b.get(late)[0]))
    thread.start()
    time.sleep(0.1)
    rig.kill("a")
    assert b.get(ref, timeout=10)[0] == 7
    small(clients["c"], 6, late.id)
    thread.join(10)
    assert found == [6]


def test_a_frozen_keeper_that_wakes_is_not_heard(three):
    """While it stood still the others went on without it and deleted what it has."""
    rig, clients = three
    a, b, c = clients["a"], clients["b"], clients["c"]
    take_to_it(a, b)
    ref, late = small(a), a.ref()
    assert b.get(ref)[0] == 7
    rig.nodes["a"].signal(signal.SIGSTOP)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(b.get(late)[0]))  # waits at the frozen one
    thread.start()
    eventually(lambda: len(b.info()["nodes"]) == 2 and len(c.info()["nodes"]) == 2, what="its loss")
    c.delete(ref)
    small(c, 6, late.id)
    thread.join(10)
    assert found == [6]
    rig.nodes["a"].signal(signal.SIGCONT)
    with pytest.raises(ObjectLost):
        b.get(ref, timeout=5)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 8,
        lines.LENGTH.pack(4) + b"HTTP",
        lines._framed([{"verb": "delete", "id": "x", "n": 1}]),
        lines._framed([{"verb": "peek", "id": 7, "n": 1}]),
        lines._framed([{"verb": "peek", "id": "x"}]),
        lines._framed([{"verb": "peek", "id": "x", "n": 2}, {"verb": "forget", "id": "x", "n": []}]),
    ],
)
def test_a_malformed_question_ends_its_line_alone(rig, pair, data):
    a, b = pair
    take_to_it(a, b)
    node = rig.nodes["a"].node
    sock = streams.open_line(KEY, ("127.0.0.1", node.feeder.port), node.cluster.me, 5.0)
    with sock:
        sock.sendall(data)
        sock.settimeout(5)
        assert sock.recv(1) == b""
    assert b.get(small(a, 8))[0] == 8


def test_who_does_not_hold_the_token_is_refused(rig, pair):
    node = rig.nodes["a"].node
    with pytest.raises(HrdmaError, match="token"):
        streams.open_line(job_key("wrong"), ("127.0.0.1", node.feeder.port), node.cluster.me, 5.0)
    with socket.create_connection(("127.0.0.1", node.feeder.port)) as sock:
        sock.sendall(lines._framed([{"verb": "peek", "id": "x", "n": 1}]))
        sock.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):  # the challenge, and the end
                pass
    assert not node.lines._lines


def test_a_client_that_does_not_read_is_hung_up_on(rig, pair, monkeypatch):
    monkeypatch.setattr(lines, "UNSENT", 1 << 20)
    a, _ = pair
    node = rig.nodes["a"].node
    ref = a.put(bytes(60_000), id=a.ref().id)
    with streams.open_line(KEY, ("127.0.0.1", node.feeder.port), node.cluster.me, 5.0) as sock:
        question = lines._framed([{"verb": "peek", "id": ref.id, "n": n} for n in range(500)])
        sock.sendall(question)
        eventually(lambda: not node.lines._lines, what="the end of the line")


def test_frames_in_pieces():
    messages = [{"verb": "peek", "id": f"{i}", "n": i} for i in range(3)]
    data = b"".join(lines._framed([message]) for message in messages)
    for step in (1, 7, len(data)):
        frames = lines._Frames()
        found = [message for at in range(0, len(data), step) for message in frames.take(data[at : at + step])]
        assert found == messages
    with pytest.raises(ValueError, match="above the limit"):
        lines._Frames().take(lines.LENGTH.pack(lines.LIMIT + 1) + b"x")


def test_a_keeper_whose_answer_trickles_is_given_up():
    """What it says of itself has a deadline as a whole: each byte in time is not enough."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        over = threading.Event()

        def trickle() -> None:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):
                for byte in b"HRCP\x03\x02\0\0\0\0\x20\0" + bytes(200):
                    sock.sendall(bytes([byte]))
                    if over.wait(0.1):
                        return

        thread = threading.Thread(target=trickle)
        thread.start()
        with pytest.raises(TimeoutError):
            streams.open_line(KEY, listener.getsockname(), 1, 0.5)
        assert thread.is_alive()  # it was not done
        over.set()
        thread.join(5)

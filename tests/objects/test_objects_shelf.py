"""The shelf: small objects that a client reads without asking its node, and the reductions that it makes of them."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from machine import took
from rig import Outside, eventually

from hrdma import _core
from hrdma.errors import PeerError
from hrdma.objects import ObjectLost, shelf
from hrdma.objects.ref import INLINE

HEARTBEAT = 1.0


@pytest.fixture
def shelves():
    memory = mmap.mmap(-1, _core.SHELF_BYTES)
    writer, reader = _core.Shelf(memory, True), _core.Shelf(memory)
    writer.hold(7, 60.0)
    return writer, reader


@pytest.fixture
def three(rig_of, zygote):
    rig = rig_of(Outside, heartbeat=HEARTBEAT)
    rig.grow("a", "b", "c")
    rig.settle()
    return rig, {name: rig.client(name) for name in "abc"}


@contextlib.contextmanager
def questions(client):
    """What a client says to its node meanwhile."""
    said: list[str] = []
    say = client._say
    client._say = lambda *messages: (said.extend(message["verb"] for message in messages), say(*messages))
    yield said
    client._say = say


def slot(name: str) -> int:
    """Where a shelf has this name: of two that have the same slot (cython/core/shelf.c) only the last is there."""
    hashed = 0xCBF29CE484222325
    for byte in name.encode():
        hashed = (hashed ^ byte) * 0x100000001B3 % 2**64
    return (hashed ^ hashed >> 32) % 8192


def are_apart(refs) -> bool:
    """Once in a thousand times five are not."""
    return len({slot(ref.id) for ref in refs}) == len(refs)


def puts(client, count: int = 4):
    while True:
        names = [client.ref() for _ in range(count)]
        if are_apart(names):
            return [client.put(np.full(100, 10**i, "int32"), id=ref.id) for i, ref in enumerate(names)]


def test_of_two_names_of_one_slot_the_last_is_there(shelves):
    writer, reader = shelves
    seen: dict[int, str] = {}
    for i in range(10_000):
        first = seen.setdefault(slot(f"n{i}"), f"n{i}")
        if first != f"n{i}":
            break
    other = next(f"m{i}" for i in range(10_000) if slot(f"m{i}") not in (slot(first), slot(f"n{i}")))
    for name in (other, first, f"n{i}"):
        writer.put(name, b"m", name.encode())
    assert reader.take([first], 7) == [None]
    assert [found and found[1] for found in reader.take([other, f"n{i}"], 7)] == [other.encode(), f"n{i}".encode()]


def test_what_is_there_is_what_was_put_last(shelves):
    writer, reader = shelves
    draw, live = random.Random(1), {}
    for _ in range(20_000):
        name = f"{draw.randrange(300)}\ud800"
        if draw.random() < 0.1:
            writer.remove(name)
            live.pop(name, None)
        else:
            live[name] = bytes([draw.randrange(256)]) * draw.randrange(3000)
            writer.put(name, b"m", live[name])
        asked = f"{draw.randrange(300)}\ud800"
        (found,) = reader.take([asked], 7)
        assert found is None or found == (b"m", live[asked])
    assert sum(found is not None for found in reader.take(list(live), 7)) > 0.9 * len(live)
    writer.clear()
    assert not any(reader.take(list(live), 7))


def test_who_may_do_what_with_a_shelf(shelves):
    writer, reader = shelves
    assert reader.take([], 7) == [] and reader.take(["x"], 8) is None
    writer.hold(7, 0.0)
    assert reader.take(["x"], 7) is None
    assert not writer.put("x", b"", bytes(1 << 20))
    for call in (
        lambda: reader.put("x", b"", b""),
        lambda: reader.remove("x"),
        reader.clear,
        lambda: reader.hold(7, 1.0),
        lambda: reader.hear(0, 1),
        lambda: reader.take([7], 7),
    ):
        with pytest.raises(TypeError):
            call()
    for place in (-1, _core.SHELF_PLACES):
        with pytest.raises(ValueError, match="place"):
            reader.heard(place)
        with pytest.raises(ValueError, match="place"):
            writer.hear(place, 1)
    with pytest.raises(ValueError, match="1000 bytes for a shelf"):
        _core.Shelf(bytes(1000))


def test_what_is_here_is_read_and_not_asked_for(client):
    values = (*(np.full(100, 10**i, "int32") for i in range(4)), bytes(INLINE), b"", np.float32(3))
    names = [client.ref() for _ in values]
    while not are_apart(names):
        names = [client.ref() for _ in values]
    refs = [client.put(value, id=ref.id) for value, ref in zip(values, names)]
    with questions(client) as said:
        found = client.get(refs)
        assert [each[0] for each in found[:4]] == [1, 10, 100, 1000]
        assert found[4] == bytes(INLINE) and found[5] == b"" and found[6] == 3 and found[6].shape == ()
        assert found[0].dtype == "int32" and not found[0].flags.writeable
        assert not said
        large = client.put(bytes(INLINE + 1))
        assert len(client.get(large)) == INLINE + 1 and "get" in said
    client.delete(refs[0])
    with pytest.raises(ObjectLost):
        client.get(refs[0], timeout=5)
    client.put(b"anew", id=refs[0].id)
    assert client.get(refs[0]) == b"anew"


def test_more_than_there_is_room_for(client):
    refs = [client.put(np.full(INLINE, i, "uint8")) for i in range(100)]
    with questions(client) as said:
        assert [found[0] for found in client.get(refs)] == list(range(100))
        assert said == ["get"] * 100
        assert client.get(refs[-1])[0] == 99
        assert len(said) == 100


@pytest.mark.parametrize("op, result", [("sum", 1111), ("max", 1000), ("prod", 1_000_000), ("avg", 277.75)])
def test_a_reduction_of_what_is_here(rig_of, op, result):
    rig = rig_of(heartbeat=20.0)  # what is there holds for so long that no busy machine comes between
    rig.grow("a", "b")
    rig.settle()
    client = rig.client("a")
    while True:
        refs = [client.put(np.full(100, 10**i, "float64")) for i in range(4)]
        with questions(client) as said:
            total = client.reduce(refs, op)
            assert (client.get(total) == result).all()
            assert client.get([total, refs[1]])[1][0] == 10
        if are_apart([*refs, total]):
            break
    assert said == ["reduce"]
    assert client.contributors(total) == refs
    assert (client.get(total) == result).all()
    assert (rig.client("b").get(total) == result).all()
    assert rig.client("b").contributors(total) == refs
    again = client.reduce([total, refs[0]], "max")
    assert client.get(again)[0] == max(result, 1)
    rig.client("b").delete(total)
    with pytest.raises(ObjectLost):
        client.get(total, timeout=5)


def test_what_a_client_leaves_to_its_node(rig, client):
    refs = puts(client)
    late = client.ref()
    for total, few in ((client.reduce(refs, count=2), 2), (client.reduce(refs, id="named"), 4)):
        assert len(client.contributors(total)) == few
        assert client.get(total)[0] == client.get(total)[99]
    waiting = client.reduce([*refs, late])
    client.put(np.full(100, 7, "int32"), id=late.id)
    assert client.get(waiting)[0] == 1118
    other = client.put(np.full(100, 1.0, "float32"))
    for wrong, why in (([refs[0], other], "dtype"), ([client.put(np.zeros(3, "int32")), refs[0]], "shape")):
        with pytest.raises(ValueError, match=f"cannot reduce: .*{why}"):
            client.get(client.reduce(wrong))
    with pytest.raises(TypeError, match="complex64"):
        client.get(client.reduce([client.put(np.zeros(3, "complex64"))]))
    nothing = [client.put(np.zeros(0, "float32")) for _ in range(2)]
    assert client.get(client.reduce(nothing)).shape == (0,)


def test_a_client_for_which_there_is_no_place(rig, client):
    shown = rig.nodes["a"].node.shelf
    taken = [shown.place() for _ in range(_core.SHELF_PLACES - 1)]
    assert None not in taken and shown.place() is None
    other = rig.client("a")
    refs = puts(other)
    assert other.get(other.reduce(refs))[0] == 1111
    client.close()
    eventually(lambda: shown._places, what="its place is free")
    third = rig.client("a")
    assert third._shelved._place is not None
    assert third.get(third.reduce(refs))[0] == 1111


def test_after_a_change_of_nodes(rig, client):
    refs, name = puts(client), client.ref()
    while not are_apart([*refs, name]):
        name = client.ref()
    rig.grow("b", "c")
    rig.settle()
    other = rig.client("b").put(b"of b", id=name.id)
    eventually(lambda: client._shelved.take([ref.id for ref in [*refs, other]]) is not None, what="all is laid out")
    with questions(client) as said:
        assert [len(each) for each in client.get([*refs, other])] == [100] * 4 + [4]
        assert not said


def test_a_result_that_the_node_has_not_heard_of(rig_of, zygote):
    """It is the client's alone; once the node has it, whoever deletes it deletes it for that client too."""
    rig = rig_of(Outside)
    rig.grow("a")
    a, other = rig.client("a"), rig.client("a")
    refs = puts(a)
    rig.nodes["a"].signal(signal.SIGSTOP)
    try:
        totals = [a.reduce(refs) for _ in range(3)]
        assert [a.get(total)[0] for total in totals] == [1111] * 3
    finally:
        rig.nodes["a"].signal(signal.SIGCONT)
    assert [each[0] for each in other.get(totals)] == [1111] * 3
    other.delete(totals[1])
    with pytest.raises(ObjectLost):
        a.get(totals[1], timeout=5)
    assert a.get(totals[2])[0] == 1111
    assert a.get(a.reduce(refs))[0] == 1111
    assert len(a._shelved._made) <= 1, "what the node has is not kept"


class Hasty:
    """A shelf whose node hears what it was told and lays it out between two looks of the client."""

    def __init__(self, real: _core.Shelf, place: int) -> None:
        self._real, self._place = real, place

    def heard(self, place: int) -> int:
        return self._real.heard(place)

    def take(self, names: list[str], home: int) -> list:
        before, there = self.heard(self._place), self._real.take(names, home)
        eventually(lambda: self.heard(self._place) > before, what="what the client has said")
        return there


def test_a_result_of_which_the_node_hears_meanwhile(rig_of, zygote):
    rig = rig_of(Outside)
    rig.grow("a")
    client = rig.client("a")
    refs, shelved = puts(client), client._shelved
    real = shelved._shelf
    with questions(client) as said:
        node = rig.nodes["a"]
        node.signal(signal.SIGSTOP)
        eventually(lambda: ") T " in Path(f"/proc/{node.pid}/stat").read_text(), what="its standstill")
        total = client.reduce(refs)
        shelved._shelf = Hasty(real, shelved._place)
        threading.Timer(0.2, node.signal, [signal.SIGCONT]).start()
        assert client.get(total)[0] == 1111
        shelved._shelf = real
        assert client.get(total)[0] == 1111
        assert said == ["reduce"]


def test_a_frozen_node_is_soon_not_believed(three):
    """While it stands still the others go on without it, and delete what it has."""
    rig, clients = three
    a, c = clients["a"], clients["c"]
    refs = puts(a)
    assert len(a.get(refs)) == 4
    rig.nodes["a"].signal(signal.SIGSTOP)
    try:
        stopped = time.monotonic()
        eventually(lambda: a._shelved.take([refs[0].id]) is None, what="the end of what holds")
        assert took(stopped, time.monotonic()) < 2 * shelf.HOLD * HEARTBEAT
        eventually(lambda: len(c.info()["nodes"]) == 2, what="its loss")
        c.delete(refs[0])
        with pytest.raises(TimeoutError):
            a.get(refs[0], timeout=0.2)
    finally:
        rig.nodes["a"].signal(signal.SIGCONT)
    eventually(lambda: len(c.info()["nodes"]) == 3, 15, "its return")
    with pytest.raises(ObjectLost):
        a.get(refs[0], timeout=10)
    assert [each[0] for each in a.get(refs[1:])] == [10, 100, 1000], "under another number it is asked"
    assert a.get(a.reduce(refs[1:]))[0] == 1110
    assert rig.client("a").get(refs[3])[0] == 1000


def test_a_killed_node_is_not_believed(three):
    rig, clients = three
    a, c = clients["a"], clients["c"]
    refs = puts(a)
    total = a.reduce(refs)
    assert a.contributors(total) == refs
    mine = a._shelved
    eventually(lambda: mine._shelf.heard(mine._place) >= mine._made[total.id][0], what="word that its backup has it")
    rig.kill("a")
    with pytest.raises(PeerError):
        a.get(refs[0])
    with pytest.raises(PeerError):
        a.reduce(refs)
    assert c.get(total)[0] == 1111, "its backup has it"


def test_after_a_fork(client):
    refs = puts(client)
    pid = os.fork()
    if pid == 0:
        for call in (lambda: client.get(refs), lambda: client.reduce(refs)):
            with contextlib.suppress(ValueError):
                call()
                os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(client.get(refs)) == 4

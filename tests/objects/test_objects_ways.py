"""Which way bytes go between nodes: RDMA where both have it, the socket else, and what happens when a way fails."""

from __future__ import annotations

import gc
import logging
import time

import numpy as np
import pytest
from rig import eventually

from hrdma import verbs
from hrdma.config import Config
from hrdma.errors import DeviceError, HrdmaError, RequestError
from hrdma.objects import ObjectLost, carriers, reads, streams
from hrdma.objects.memory import Gone, Memory
from hrdma.objects.store import Segment

SIM = {"devices": "sim"}
TCP = {"transport": "tcp"}
NBYTES = 1 << 20


def moved(client, way: str = "verbs") -> int:
    """Bytes that this node received and sent. What it sent is counted afterwards: the other may have it before."""
    stats = client.info()["ways"].get(way, {"sent": 0, "received": 0})
    return stats["sent"] + stats["received"]


def data(seed: int = 0) -> np.ndarray:
    return np.arange(NBYTES // 8) * 3 + seed


@pytest.fixture
def two(rig_of):
    """Of two nodes, with these settings."""

    def made(first, second):
        rig = rig_of()
        rig.grow("a", **first)
        rig.grow("b", **second)
        rig.settle()
        return rig, rig.client("a"), rig.client("b")

    return made


@pytest.fixture
def said(caplog):
    """What was warned of."""
    caplog.set_level(logging.WARNING, "hrdma")
    return lambda text: [record.getMessage() for record in caplog.records if text in record.getMessage()]


def queue_pairs() -> int:
    gc.collect()
    return sum(isinstance(each, verbs.QueuePair) and not each.closed for each in gc.get_objects())


def test_rdma_is_taken_where_both_have_it_and_leaves_nothing(two):
    rig, one, other = two(SIM, SIM)
    ref = one.put(data())
    assert np.array_equal(other.get(ref), data())
    eventually(lambda: (moved(one), moved(other)) == (NBYTES, NBYTES), what="the count of one object")
    assert moved(one, "tcp") == moved(other, "tcp") == 0
    eventually(lambda: not queue_pairs(), what="the end of all queue pairs")
    one.delete(ref)
    gc.collect()
    eventually(lambda: one.info()["used"] == other.info()["used"] == 0, what="an empty store")
    rails = [rail for node in rig.nodes.values() for rail in node.node.carriers.rails]
    for node in rig.nodes.values():
        node.close()
    rig.nodes.clear()
    assert len(rails) == 2 and all(rail.device.closed for rail in rails)


@pytest.mark.parametrize("first", [SIM, TCP], ids=["from", "to"])
def test_tcp_is_taken_where_one_of_them_has_no_rdma(two, said, first):
    _, one, other = two(first, TCP if first is SIM else SIM)
    for seed in range(3):
        assert np.array_equal(other.get(one.put(data(seed))), data(seed))
    eventually(lambda: moved(one, "tcp") == 3 * NBYTES, what="the count of three objects")
    assert moved(one) == moved(other) == 0 and moved(other, "tcp") == 3 * NBYTES
    assert len(said("tcp stands in")) == (first is TCP), "the node that asks for it says so, once"


def test_what_is_required_is_not_done_without(two, said):
    _, one, other = two(SIM, TCP)
    ref = one.put(data())
    assert np.array_equal(other.get(ref), data())
    _, one, other = two({**SIM, "require": "verbs"}, TCP)
    ref = one.put(data())
    with pytest.raises(TimeoutError):
        other.get(ref, timeout=0.5)
    ref = other.put(data())
    with pytest.raises(TimeoutError):
        one.get(ref, timeout=0.5)
    assert len(said("nothing stands in, as HRDMA_REQUIRE says")) == 1
    with pytest.raises(DeviceError):
        carriers.Carriers(Config.load({}, devices="nothing"))


def test_rails_take_turns(two):
    _, one, other = two({"devices": "sim,sim"}, {"devices": "sim,sim"})
    for seed in range(4):
        assert np.array_equal(other.get(one.put(data(seed))), data(seed))
    assert moved(other, "verbs") == moved(other, "verbs:1") == 2 * NBYTES


def test_a_way_that_fails_is_left(two, said, monkeypatch):
    """As when the network drops the device's packets: reads fail though the node is there."""
    _, one, other = two(SIM, SIM)
    ref = one.put(data())
    told = reads.TOLD

    class Astray:
        size, pack = told.size, told.pack

        def unpack_from(self, *where):
            there, address, key = told.unpack_from(*where)
            return there, address, key ^ 0xFFFF

    monkeypatch.setattr(reads, "TOLD", Astray())
    assert np.array_equal(other.get(ref), data())
    assert moved(other) == 0 and moved(other, "tcp") == NBYTES
    found = said("tcp stands in")
    assert len(found) == 1 and "over verbs: work request" in found[0]


@pytest.mark.parametrize("whose", ["a", "b"])
def test_memory_that_cannot_be_registered_goes_by_tcp(two, said, monkeypatch, whose):
    rig, one, other = two(SIM, SIM)
    domain = rig.nodes[whose].node.carriers.rails[0].domain
    region = Memory.region

    def refused(self, of):
        if of is domain:
            raise RequestError("cannot register: the memlock limit is 64 bytes")
        return region(self, of)

    monkeypatch.setattr(Memory, "region", refused)
    assert np.array_equal(other.get(one.put(data())), data())
    assert moved(other) == 0
    assert said("memlock limit") and said("tcp stands in")


def test_what_is_deleted_while_it_is_read_is_never_seen_changed(two, monkeypatch):
    """The feeder's queue pair goes before its memory: a read that comes late fails."""
    _, one, other = two({**SIM, "require": "verbs"}, {**SIM, "require": "verbs"})
    wait_for = Segment.wait_for

    def part(self, nbytes, timeout=None):
        there = wait_for(self, nbytes, timeout)
        time.sleep(0.01)
        return min(there, NBYTES // 2) if self.complete else there

    monkeypatch.setattr(Segment, "wait_for", part)
    ref = one.put(data())
    waiting = other.get(ref, async_op=True)
    eventually(lambda: moved(other) == NBYTES // 2, what="half of it")
    one.delete(ref)
    with pytest.raises(ObjectLost):
        waiting.wait(10)
    eventually(lambda: one.info()["used"] == other.info()["used"] == 0, what="an empty store")
    eventually(lambda: not queue_pairs(), what="the end of all queue pairs")


def test_addresses_are_believed_from_holders_of_the_token_alone(two, monkeypatch):
    """A man in the middle who has the bytes read from elsewhere."""
    _, one, other = two({**SIM, "require": "verbs"}, {**SIM, "require": "verbs"})
    ref = one.put(data())
    real = streams._send

    def changed(sock, kind, body):
        if isinstance(body.get("address"), list):
            body = {**body, "address": [*body["address"][:3], 7, 4096]}
        real(sock, kind, body)

    monkeypatch.setattr(streams, "_send", changed)
    errors = []
    opened = streams.open_stream

    def noted(*arguments):
        try:
            return opened(*arguments)
        except HrdmaError as error:
            errors.append(str(error))
            raise

    monkeypatch.setattr("hrdma.objects.node.open_stream", noted)
    with pytest.raises(TimeoutError):
        other.get(ref, timeout=0.5)
    assert errors and all("does not hold our job token" in error for error in errors)


def test_a_node_that_is_gone_is_fed_no_longer(two):
    """What a frozen node was fed by is free again when it is counted as lost, though its socket says nothing."""
    rig, one, _ = two(SIM, SIM)
    node, ref = rig.nodes["a"].node, one.put(data())
    segment = node.store.objects[ref.id]
    request = {"id": ref.id, "gen": segment.gen, "offset": 0}
    ways = carriers.Carriers(Config.load({}, **SIM))
    place = (node.cluster.me, "127.0.0.1", node.feeder.port)
    for name in ("tcp", "verbs"):
        if name == "tcp":
            ways.leave("verbs", node.cluster.me, "it is not to be taken")
            segment.advance(NBYTES // 2)  # more is to come
        stream = streams.open_stream(node.key, ways, place, request, 77, Memory(memoryview(bytearray(NBYTES))), 1)
        assert stream.read(0, NBYTES) and segment.pins == 1
        node.feeder.cut_off({78})
        assert segment.pins == 1
        node.feeder.cut_off({77})
        eventually(lambda: segment.pins == 0, what="the end of feeding")
        stream.close()
        ways._left.clear()
        segment.advance(NBYTES)
    ways.close()


def test_memory_that_is_gone_is_no_fault_of_the_way(two, said):
    rig, one, _ = two(SIM, SIM)
    ref = one.put(data())
    a, b = rig.nodes["a"].node, rig.nodes["b"].node
    source = a.store.objects[ref.id]
    target = Segment(ref.id, source.meta, source.gen)
    target.close()  # as when the object was deleted meanwhile
    with pytest.raises(Gone):
        b.stream(a.me, {"id": ref.id, "gen": source.gen, "offset": 0}, target)
    assert not said("stands in") and b.carriers.offer(a.me).name == "verbs"

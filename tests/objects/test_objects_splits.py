"""Clusters that have come of one, as when a network falls apart: each goes on, and they become one again."""

from __future__ import annotations

import functools
import socket
import threading
import time

import numpy as np
import pytest
from rig import TIMEOUT, Rig, eventually

from hrdma.config import Config
from hrdma.objects import cluster, lookout
from hrdma.objects.cluster import Cluster
from hrdma.objects.node import Node

SIZES = (10, 100_000)  # int64: in the directory, and in memory


def numbers(n: int, value: int) -> np.ndarray:
    return np.full(n, value)


@pytest.fixture
def met(monkeypatch):
    """Until it is set nobody looks for lost nodes."""
    event = threading.Event()
    look = lookout.Lookout._look
    monkeypatch.setattr(lookout.Lookout, "_look", lambda self: look(self) if event.is_set() else self._again())
    return event


def divide(rig: Rig, *sides: str) -> None:
    """No node of one side has a connection with, or counts, one of another; no control thread goes on before all are so."""
    epoch = max(node.node.cluster.epoch for node in rig.nodes.values()) + 10
    all_cut = threading.Barrier(1 + sum(map(len, sides)), timeout=10)

    def cut(cluster: Cluster, there: list[int]) -> None:
        for node in [node for node in cluster._dialogs if node not in there]:
            cluster._loop.hang_up(cluster._dialogs.pop(node))
        # One that missed the others before it came to this has asked them, and would hear that they are without it.
        while cluster._probes:
            cluster._loop.hang_up(cluster._probes.popitem()[0])
        cluster._install(epoch, {node: card for node, card in cluster.nodes.items() if node in there})
        all_cut.wait()

    for side in sides:
        there = [rig.nodes[name].node.cluster.me for name in side]
        for name in side:
            node = rig.nodes[name].node
            node.post(functools.partial(cut, node.cluster, there))
    all_cut.wait()


@pytest.mark.parametrize("sides", [("ab", "c"), ("a", "bc"), ("ab", "cd")])
def test_clusters_that_fell_apart_become_one(rig, met, sides):
    names = "".join(sides)
    rig.grow(*names)
    rig.settle()
    clients = {name: rig.client(name) for name in names}
    first, last = clients[sides[0][0]], clients[sides[1][-1]]
    before = [client.put(numbers(n, i)) for i, client in enumerate(clients.values()) for n in SIZES]
    divide(rig, *sides)
    assert len(first.info()["nodes"]) == len(sides[0])
    during = [client.put(numbers(n, i)) for i, client in enumerate(clients.values()) for n in SIZES]
    named = [client.put(numbers(n, i), id=f"{i}.{n}") for i, client in enumerate(clients.values()) for n in SIZES]
    both = [client.put(numbers(n, i), id=f"both.{n}") for i, client in enumerate((first, last)) for n in SIZES]
    waiting = [last.get(last.ref(f"0.{n}"), async_op=True) for n in SIZES]
    sums = [
        client.reduce([client.ref(f"{i}.{n}") for i in range(len(names))]) for client in (first, last) for n in SIZES
    ]
    assert not any(request.done for request in waiting)
    met.set()
    rig.settle()
    for client in clients.values():
        for refs in (before, during, named):
            for i, ref in enumerate(refs):
                assert np.array_equal(client.get(ref), numbers(SIZES[i % 2], i // 2))
    assert [request.wait()[0] for request in waiting] == [0, 0]
    for i, ref in enumerate(sums):
        assert np.array_equal(last.get(ref), numbers(SIZES[i % 2], sum(range(len(names)))))
    for ref in both[:2]:
        found = [client.get(ref) for client in clients.values()]
        assert found[0][0] in (0, 1) and all(np.array_equal(each, found[0]) for each in found), "one of the two stays"
    for ref in {*before, *during, *named, *both, *sums}:
        first.delete(ref)
    del found, waiting
    for client in clients.values():
        eventually(lambda client=client: client.info()["used"] == 0, what="an empty store")


def part(rig: Rig) -> tuple[str, str]:
    """Two clusters of two; names of one that goes on and one that will join it."""
    rig.grow("a", "b", "c", "d")
    rig.settle()
    divide(rig, "ab", "cd")
    number = {name: node.node.cluster.me for name, node in rig.nodes.items()}
    return ("ab", "cd") if min(number, key=number.get) in "ab" else ("cd", "ab")


def late(monkeypatch, node: Node, seconds: float) -> threading.Event:
    """The node joins again as much later. Returns what is set before it does."""
    cluster, begun, join = node.cluster, threading.Event(), node.cluster._join

    def wait() -> None:
        monkeypatch.setattr(cluster, "_join", join)
        cluster._loop.at("late", time.monotonic() + seconds, lambda: (begun.set(), join()))

    monkeypatch.setattr(cluster, "_join", wait)
    return begun


def test_those_who_fell_apart_join_in_one_view(rig, met, monkeypatch):
    """What only the last to come has is not lost when the others are there already."""
    stay, come = part(rig)
    late(monkeypatch, rig.nodes[come[0]].node, 0.3)
    ref = rig.client(come[0]).put(numbers(SIZES[1], 7), id="x")
    waiting = rig.client(stay[0]).get(ref, async_op=True)
    met.set()
    assert waiting.wait()[0] == 7


def test_who_does_not_come_keeps_nobody_waiting(rig_of, met, monkeypatch):
    rig = rig_of(heartbeat=0.5)
    stay, come = part(rig)
    begun = late(monkeypatch, rig.nodes[come[0]].node, 3.0)
    client = rig.client(stay[0])
    met.set()
    eventually(lambda: len(client.info()["nodes"]) == 3, what="the view of those who came")
    assert not begun.is_set()
    rig.settle()


def test_a_node_that_finds_nobody_goes_on_alone(rig_of, monkeypatch):
    rig = rig_of(heartbeat=0.2)
    monkeypatch.setattr(cluster, "REJOIN", 0.1)
    rig.grow("a")
    client = rig.client("a")
    refs = [client.put(numbers(n, 3)) for n in SIZES]
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        node = rig.nodes["a"].node
        node.post(lambda: node.cluster._rejoin([nobody.getsockname()]))
        eventually(lambda: not client.info()["nodes"], what="the search")
        assert [client.get(ref)[0] for ref in refs] == [3, 3]
    rig.settle()


def test_a_stranger_at_a_lost_nodes_address_is_left_in_peace(rig_of):
    rig = rig_of(heartbeat=0.2)
    rig.grow("a", "b")
    rig.settle()
    client = rig.client("a")
    gone = rig.nodes.pop("b")
    port = gone.port
    gone.close()
    there = Node(Config.load({}, token="another", timeout=TIMEOUT), ("127.0.0.1", port), [], 1 << 20)
    there.start(TIMEOUT)
    try:
        eventually(lambda: len(client.info()["nodes"]) == 1, what="the view")
        eventually(lambda: ("127.0.0.1", port) not in rig.nodes["a"].node.cluster._lookout._until, what="the stranger")
        assert bytes(client.get(client.put(b"here"))) == b"here"
    finally:
        there.close()


def test_who_learns_of_a_larger_cluster_from_a_stranger_joins_it(rig, met):
    """The smaller has nobody left who knows where the larger is; the larger one's question says so."""
    rig.grow("a", "b", "c")
    rig.settle()
    divide(rig, "ab", "c")
    for name in "abc":
        if name != "a":
            rig.nodes[name].node.post(rig.nodes[name].node.cluster._lookout._until.clear)
    met.set()
    rig.settle()
    assert rig.client("c").get(rig.client("b").put(numbers(10, 3)))[0] == 3


@pytest.mark.parametrize("text", [{"nodes": 7}, {"nodes": [["x", {}]], "job": 1}, {"nodes": [[1, 2, 3]]}])
def test_a_malformed_question_of_a_lost_node_harms_nobody(rig_of, caplog, text):
    rig = rig_of()
    rig.grow("a", "b")
    rig.settle()
    first, other = rig.nodes["a"].node.cluster, rig.nodes["b"].node
    other.post(lambda: other.cluster._dial("127.0.0.1", first.port, rank=0, **text))
    eventually(lambda: "malformed" in caplog.text, what="the warning")
    assert bytes(rig.client("a").get(rig.client("b").put(b"x"))) == b"x"

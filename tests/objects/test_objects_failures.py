"""Nodes in processes of their own that are killed or stopped: noticed in time, survived, nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from machine import took
from rig import Outside, eventually

from hrdma.errors import PeerError
from hrdma.objects import ObjectLost

HEARTBEAT = 1.0  # where a node stands still; else so long that nobody is lost for want of a processor


@pytest.fixture
def three(rig_of, zygote, way, request):
    rig = rig_of(Outside, heartbeat=getattr(request, "param", 5.0), **way)
    rig.grow("a", "b", "c")
    rig.settle()
    return rig, {name: rig.client(name) for name in "abc"}


some_stand_still = pytest.mark.parametrize("three", [HEARTBEAT], indirect=True, ids=["heartbeat"])


def test_a_killed_node_is_noticed_within_a_second(three):
    rig, clients = three
    only = clients["b"].put(bytes(1 << 20))
    mine = clients["b"].get(clients["b"].ref("x"), async_op=True)
    big = clients["a"].put(bytes(40 << 20))
    requests = [clients["c"].get(ref, async_op=True) for ref in (only, big)]
    for request in requests:
        request.wait()
    lost = clients["b"].put(bytes(1 << 20), id="lost")
    view = clients["b"].get(lost)
    waiting = clients["a"].get(clients["a"].ref("sum"), async_op=True)
    result = clients["a"].reduce([lost, only, clients["a"].ref("again")], count=2, id="sum")
    rig.kill("b")
    started = time.monotonic()
    with pytest.raises(PeerError, match="node of this host is gone"):
        mine.wait(5)
    with pytest.raises(ObjectLost):
        clients["a"].get(lost)
    assert took(started, time.monotonic()) < 1.0
    assert clients["a"].get(only)[0] == 0, "c has a copy"
    assert view[5] == 0, "what is mapped stays"
    clients["a"].put(bytes(1 << 20), id="again")
    assert waiting.wait(10)[0] == 0
    assert len(clients["c"].contributors(result)) == 2


@some_stand_still
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_frozen_node_is_left_behind_and_joins_again(three, name):
    """Also when it is the coordinator, "a": which, when it wakes, finds that the others went on."""
    rig, clients = three
    kept = clients[name].put(np.full(1 << 18, 7, "int32"), id="kept")
    other = clients["c"]
    rig.nodes[name].signal(signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(ObjectLost):
        other.get(kept, timeout=15)
    lost = time.monotonic()
    assert lost - started > 0.3
    assert took(started, lost) < 8 * HEARTBEAT
    put = other.put(b"meanwhile")
    rig.nodes[name].signal(signal.SIGCONT)
    eventually(lambda: len(other.info()["nodes"]) == 3, 15, "the return")
    assert other.get(kept, timeout=10)[0] == 7, "it kept its objects"
    assert clients[name].get(put, timeout=10) == b"meanwhile"


@some_stand_still
def test_a_receiver_that_stops_does_not_hold_up_the_others(three):
    rig, clients = three
    data = np.arange(4 << 20, dtype="int64")
    ref = clients["a"].put(data)
    rig.nodes["b"].signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        assert np.array_equal(clients["c"].get(ref, timeout=20), data)
        assert took(started, time.monotonic()) < 8 * HEARTBEAT
    finally:
        rig.nodes["b"].signal(signal.SIGCONT)


@some_stand_still
@pytest.mark.parametrize("name", ["a", "b"])
def test_what_is_deleted_while_a_node_is_away_goes_when_it_is_back(three, name):
    """Whoever keeps the entries then: the node that was away, one that stayed, old or new."""
    rig, clients = three
    refs = [clients[name].put(np.full(1 << 15, i, "int32"), id=f"o{i}") for i in range(12)]
    other = clients["c"]
    for ref in refs[::2]:
        other.get(ref)
    rig.nodes[name].signal(signal.SIGSTOP)
    try:
        eventually(lambda: len(other.info()["nodes"]) == 2, 15, "the loss")
        for ref in refs:
            other.delete(ref, timeout=10)
        again = other.put(np.full(1 << 15, 7, "int32"), id="o0")
    finally:
        rig.nodes[name].signal(signal.SIGCONT)
    eventually(lambda: len(other.info()["nodes"]) == 3, 15, "the return")
    eventually(lambda: clients[name].get(again, timeout=10)[0] == 7, what="the new one, not what had that name before")
    for ref in refs[1:]:
        with pytest.raises(ObjectLost):
            clients[name].get(ref, timeout=10)
    other.delete(again)
    for client in clients.values():
        eventually(lambda client=client: client.info()["used"] == 0, what="an empty store")


def test_clients_that_are_killed_leave_nothing(three):
    _, clients = three
    text = (
        "import sys; from hrdma.objects import connect\n"
        "client = connect(node=sys.argv[1], token='secret', timeout=20)\n"
        "views = [client.get(client.put(bytes(1 << 20), id=f'{sys.argv[2]}{i}')) for i in range(4)]\n"
        "print('here', flush=True)\n"
        "while True: client.get(client.put(bytes(1 << 20)))\n"
    )
    rig = three[0]
    command = [sys.executable, "-c", text, rig._prefix + "a"]
    children = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in range(2)]
    for child in children:
        assert child.stdout.readline() == "here\n"
        child.kill()
        child.wait()
        child.stdout.close()
    for i in range(2):
        assert len(clients["c"].get(clients["c"].ref(f"{i}3"))) == 1 << 20
    assert os.path.exists(f"/proc/{rig.nodes['a'].pid}")
    assert not [name for name in os.listdir("/dev/shm") if "hrdma-object" in name]


def test_every_call_of_many_threads_returns_while_nodes_die(three):
    rig, clients = three
    errors, ends = [], []

    def work(name: str, number: int) -> None:
        client = clients[name]
        try:
            for i in range(80):
                ref = client.put(np.full(40_000, i, "int32"), id=f"{number}.{i}", timeout=10)
                assert client.get(ref, timeout=10)[0] == i
        except (PeerError, ObjectLost) as error:
            if name != "b":
                errors.append(error)
        except BaseException as error:
            errors.append(error)
        ends.append(name)

    threads = [threading.Thread(target=work, args=(name, i)) for i, name in enumerate("aabbcc")]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    rig.kill("b")
    for thread in threads:
        thread.join(30)
    assert len(ends) == 6 and not errors, errors

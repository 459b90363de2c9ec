"""hrdma.objects on a device that is not simulated: two nodes, whose bytes the device reads from one's memory into the other's."""

from __future__ import annotations

import signal

import numpy as np
import pytest
from nursery import Rank, environment

from hrdma.objects import __main__, connect

WAIT = 60.0
N = 1 << 20


def node(me, arguments):
    __main__._say = lambda line: me.tell("said", **line)
    __main__.main(arguments)


@pytest.fixture
def nodes(device, monkeypatch, tmp_path):
    """Names of two nodes of this host that have no other way than the device, and their address."""
    settings = {"HRDMA_DEVICES": device, "HRDMA_REQUIRE": "verbs", "HRDMA_TOKEN": "secret"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    started: list[Rank] = []
    address = ""
    try:
        for number, name in enumerate(("a", "b")):
            arguments = [f"--node={name}", "--capacity=134217728", *([f"--join={address}"] if address else [])]
            started.append(Rank(number, tmp_path / name))
            env = environment() | settings | {"RANK": str(number), "WORLD_SIZE": "2"}
            started[-1].start(node, env, {"arguments": arguments})
            line = started[-1].event("said", seconds=WAIT)
            assert "up" in line, line
            address = address or line["up"]
        yield "a", "b"
    finally:
        for rank in started:
            rank.signal(signal.SIGTERM)
            rank.ended(WAIT)


def test_objects_are_read_by_the_device(device, nodes):
    """Put by a client, whose memory is sealed; passed on; summed."""
    clients = [connect(node=name, start=False, timeout=WAIT) for name in nodes]
    x = np.arange(N, dtype="int64")
    refs = [client.put(x * (rank + 1)) for rank, client in enumerate(clients)]
    assert all(np.array_equal(clients[1 - rank].get(ref), x * (rank + 1)) for rank, ref in enumerate(refs))
    total = clients[0].reduce([clients[1].put(x), *refs])
    assert all(np.array_equal(client.get(total), 4 * x) for client in clients)
    for client in clients:
        ways = client.info()["ways"]
        assert list(ways) == ["verbs"] and device in ways["verbs"]["text"]
        assert ways["verbs"]["received"] >= 8 * N
        client.delete(total)
        client.close()

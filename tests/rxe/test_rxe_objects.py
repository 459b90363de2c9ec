"""hrdma.objects on a device that is not simulated: two nodes, whose bytes the device reads from one's memory into the other's."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from hrdma.objects import connect

WAIT = 60.0
N = 1 << 20


@pytest.fixture
def nodes(device, monkeypatch):
    """Names of two nodes of this host that have no other way than the device, and their address."""
    environment = {"HRDMA_DEVICES": device, "HRDMA_REQUIRE": "verbs", "HRDMA_TOKEN": "secret"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    started: list[subprocess.Popen[str]] = []
    address = ""
    try:
        for name in ("a", "b"):
            command = [sys.executable, "-m", "hrdma.objects", f"--node={name}", "--capacity=134217728"]
            command += [f"--join={address}"] if address else []
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)))
            line = json.loads(started[-1].stdout.readline())
            assert "up" in line, line
            address = address or line["up"]
        yield "a", "b"
    finally:
        for process in started:
            process.terminate()
            process.wait(WAIT)
            process.stdout.close()


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

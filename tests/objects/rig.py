"""Nodes and clients for the tests of hrdma.objects: several nodes on this host, in this process or each in its own."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from hrdma.config import Config
from hrdma.control.wire import job_key
from hrdma.objects import Client, connect
from hrdma.objects.node import Node
from hrdma.objects.sessions import Sessions, local_name

TIMEOUT = 20.0
CAPACITY = 256 << 20
PR_SET_PDEATHSIG = 1


def eventually(check: Callable[[], bool], seconds: float = 10.0, what: str = "it") -> None:
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until, f"{what} did not come about within {seconds:g} s"
        time.sleep(0.01)


class Inside:
    """A node in this process."""

    def __init__(self, name: str, seeds: list[tuple[str, int]], capacity: int, heartbeat: float) -> None:
        config = Config.load({}, token="secret", timeout=TIMEOUT, heartbeat=heartbeat)
        self.node = Node(config, ("127.0.0.1", 0), seeds, capacity)
        self.node.start(TIMEOUT)
        self.sessions = Sessions(self.node, local_name(job_key("secret"), "", name), linger=None)

    @property
    def port(self) -> int:
        return self.node.cluster.port

    def close(self) -> None:
        self.sessions.close()
        self.node.close()


class Outside:
    """A node in a process of its own, which dies with this one."""

    def __init__(self, name: str, seeds: list[tuple[str, int]], capacity: int, heartbeat: float) -> None:
        command = [sys.executable, "-m", "hrdma.objects", f"--node={name}", f"--capacity={capacity}"]
        command += [f"--join=tcp://{host}:{port}" for host, port in seeds]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HRDMA_")}
        environment |= {"HRDMA_TOKEN": "secret", "HRDMA_HEARTBEAT": str(heartbeat), "HRDMA_TIMEOUT": str(TIMEOUT)}
        libc = ctypes.CDLL(None)
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment,
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )  # fmt: skip
        self._port = 0

    @property
    def port(self) -> int:
        if not self._port:
            line = json.loads(self.process.stdout.readline())
            assert "up" in line, line
            self._port = int(line["up"].rpartition(":")[2])
        return self._port

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.kill()
        self.process.stdout.close()


class Rig:
    """Nodes by name and clients of them; all end with `close`."""

    def __init__(self, kind: type = Inside, *, capacity: int = CAPACITY, heartbeat: float = 2.0) -> None:
        self._kind, self._capacity, self._heartbeat = kind, capacity, heartbeat
        self._prefix = f"{os.getpid()}.{id(self)}."
        self.nodes: dict[str, Inside | Outside] = {}
        self.clients: list[Client] = []

    def grow(self, *names: str, capacity: int | None = None) -> None:
        for name in names:
            seeds = [("127.0.0.1", node.port) for node in self.nodes.values()]
            self.nodes[name] = self._kind(self._prefix + name, seeds, capacity or self._capacity, self._heartbeat)
            if len(self.nodes) == 1:
                _ = self.nodes[name].port
        for node in self.nodes.values():
            _ = node.port

    def client(self, name: str, timeout: float = TIMEOUT) -> Client:
        client = connect(node=self._prefix + name, token="secret", timeout=timeout)
        self.clients.append(client)
        return client

    def settle(self, count: int | None = None) -> None:
        """Waits until all nodes know each other."""
        for name in self.nodes:
            with connect(node=self._prefix + name, token="secret", timeout=TIMEOUT) as client:
                eventually(lambda client=client: len(client.info()["nodes"]) == (count or len(self.nodes)), what="the view")

    def kill(self, name: str) -> None:
        self.nodes.pop(name).kill()

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for node in self.nodes.values():
            node.close()

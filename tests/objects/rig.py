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


class Zygote:
    """A process that has imported everything and forks nodes: a node is there in milliseconds. Dies with this one."""

    def __init__(self) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HRDMA_")}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def fork(self, arguments: list[str], environment: dict[str, str]) -> int:
        return self._ask({"arguments": arguments, "environment": environment})["pid"]

    def line(self, pid: int) -> dict:
        """What the node said when it was up."""
        return self._ask({"pid": pid})

    def _ask(self, question: dict) -> dict:
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


def zygote_main() -> None:
    """The zygote: one question a line, one answer a line; its children die with it."""
    from hrdma.objects import reduction
    from hrdma.objects.__main__ import main

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the nodes
    lines: dict[int, int] = {}
    for line in sys.stdin:
        question = json.loads(line)
        if "pid" in question:
            with os.fdopen(lines.pop(question["pid"])) as said:
                print(said.readline().strip() or "{}", flush=True)
            continue
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.dup2(theirs, 1)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.close(theirs)
            for other in [ours, *lines.values()]:
                os.close(other)
            os.environ.update(question["environment"])
            reduction.pieces_of = lambda *_: 3  # of an allreduce, however small the pieces are
            os._exit(main(question["arguments"]))
        os.close(theirs)
        lines[pid] = ours
        print(json.dumps({"pid": pid}), flush=True)


class Outside:
    """A node in a process of its own."""

    zygote: Zygote

    def __init__(self, name: str, seeds: list[tuple[str, int]], capacity: int, heartbeat: float) -> None:
        arguments = [f"--node={name}", f"--capacity={capacity}"]
        arguments += [f"--join=tcp://{host}:{port}" for host, port in seeds]
        environment = {"HRDMA_TOKEN": "secret", "HRDMA_HEARTBEAT": str(heartbeat), "HRDMA_TIMEOUT": str(TIMEOUT)}
        self.pid = self.zygote.fork(arguments, environment)
        self._port = 0

    @property
    def port(self) -> int:
        if not self._port:
            line = self.zygote.line(self.pid)
            assert "up" in line, line
            self._port = int(line["up"].rpartition(":")[2])
        return self._port

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        eventually(lambda: not os.path.exists(f"/proc/{self.pid}"), what="its end")

    def close(self) -> None:
        self.kill()


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

    def client(self, name: str, timeout: float = TIMEOUT, *, owner: bool = False) -> Client:
        client = connect(node=self._prefix + name, token="secret", timeout=timeout, start=False, owner=owner)
        self.clients.append(client)
        return client

    def settle(self, count: int | None = None) -> None:
        """Waits until all nodes know each other."""
        for name in self.nodes:
            with connect(node=self._prefix + name, token="secret", timeout=TIMEOUT, start=False) as client:
                eventually(
                    lambda client=client: len(client.info()["nodes"]) == (count or len(self.nodes)), what="the view"
                )

    def kill(self, name: str) -> None:
        self.nodes.pop(name).kill()

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for node in self.nodes.values():
            node.close()


if __name__ == "__main__":
    zygote_main()

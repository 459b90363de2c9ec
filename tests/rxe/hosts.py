"""The second host: tests run on host 0, and have programs run on host 1, over a wire that carries nothing else.

A connection is a program: it starts with one, gives signals to it, brings its output and exit status when it ends, and
ends it when it is closed. So nothing that a test starts over there outlives the test's process.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nursery import Rank, end_nursery, environment, nursery

PORT = 7700
FIRST = 120.0  # seconds until both hosts have met: the other one boots


class Ended(NamedTuple):
    """How a program ended."""

    status: int  #: exit status; negative: the signal
    output: str  #: standard output and errors


class Program:
    """A program on the other host; ended on the way out of its context."""

    def __init__(self, address: str, name: str, how: dict[str, object]) -> None:
        self._name = name
        self._socket = socket.create_connection((address, PORT), timeout=10)
        self._send(how)

    def _send(self, message: dict[str, object]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def signal(self, number: int) -> None:
        """Sends a signal to the program."""
        self._send({"signal": number})

    def wait(self, timeout: float) -> Ended:
        """How it ended; TimeoutError when it does not end in time, and then it is ended."""
        deadline = time.monotonic() + timeout
        data = b""
        with self._socket:
            while not data.endswith(b"\n"):
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                try:
                    more = self._socket.recv(65536)
                except TimeoutError:
                    raise TimeoutError(f"not done on the other host within {timeout} s: {self._name}") from None
                if not more:
                    raise ConnectionError(f"the other host said no end of: {self._name}")
                data += more
        return Ended(**json.loads(data))

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


class OtherHost:
    """Host 1, from host 0; while this object has its connection, host 1 serves.

    Parameters
    ----------
    address : str
        Of host 1, on the wire that carries nothing else.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        deadline = time.monotonic() + FIRST
        while True:
            try:
                self._session = socket.create_connection((address, PORT), timeout=5)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no answer of host 1 at {address} within {FIRST} s: {error}") from None
                time.sleep(0.1)

    def start(self, command: str, env: dict[str, str] | None = None) -> Program:
        """Starts a program in the checkout, in a process group of its own; words as for a shell, which is not used."""
        return Program(self._address, command, {"argv": shlex.split(command), "env": env or {}})

    def fork(self, function: Callable[..., Any], env: dict[str, str]) -> Program:
        """Starts a rank, as `nursery.Rank.start` does here: in a guest to start Python takes seconds."""
        call = {"path": function.__code__.co_filename, "function": function.__name__, "arguments": {}}
        return Program(self._address, function.__name__, {"call": call, "env": env})

    def run(self, command: str, timeout: float = 30, env: dict[str, str] | None = None) -> str:
        """Output of a program that must end well."""
        with self.start(command, env) as program:
            ended = program.wait(timeout)
        assert ended.status == 0, f"{command} on the other host: {ended.status}\n{ended.output}"
        return ended.output

    def close(self) -> None:
        self._session.close()


def serve(address: str) -> None:
    """Runs programs for host 0 until it closes its first connection, which its end does too."""
    nursery()  # here, as the zygote dies with the thread that starts it
    with socket.create_server((address, PORT)) as listener:
        listener.settimeout(FIRST)
        session, _ = listener.accept()
        with session:
            while session not in select.select([listener, session], [], [])[0]:
                connection, _ = listener.accept()
                threading.Thread(target=_serve_one, args=(connection,), daemon=True).start()
    end_nursery()


class _Forked:
    """A rank, as far as `_serve_one` uses a process."""

    def __init__(self, call: dict[str, Any], env: dict[str, str], output: str) -> None:
        self._rank = Rank(int(env["RANK"]), Path(output))
        nursery().ask("start", self._rank.who, log=output, env=environment() | env, **call)
        self.pid: int = self._rank.event("started", seconds=FIRST)["pid"]

    def signal(self, number: int) -> None:
        self._rank.signal(number)

    def wait(self) -> int:
        return self._rank.ended()


def _serve_one(connection: socket.socket) -> None:
    with connection, connection.makefile("r") as words, tempfile.NamedTemporaryFile() as output:
        asked = json.loads(words.readline())
        try:
            process = (
                _Forked(asked["call"], asked["env"], output.name)
                if "call" in asked
                else subprocess.Popen(
                    asked["argv"],
                    env={**os.environ, **asked["env"]},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        except OSError as error:
            connection.sendall(json.dumps({"status": 127, "output": str(error)}).encode() + b"\n")
            return
        ended = os.pidfd_open(process.pid)
        try:
            while ended not in (ready := select.select([ended, connection], [], [])[0]):
                line = words.readline() if connection in ready else ""
                number = json.loads(line)["signal"] if line else signal.SIGKILL
                process.signal(number) if isinstance(process, _Forked) else os.killpg(process.pid, number)
                if not line:
                    break
        finally:
            os.close(ended)
        status = process.wait()
        output.seek(0)
        told = {"status": status, "output": output.read().decode(errors="replace")}
        try:
            connection.sendall(json.dumps(told).encode() + b"\n")
        except OSError:
            pass  # nobody waits for it

"""Asks peers for figures: a job of ranks that stays and sleeps between its cells, or a program that is run for each.

Every wait has a deadline. What hangs is ended: the launcher first, so that it ends what it started, then its process group,
then each rank, known by the process id that the kernel gives for its socket. `peers/rank.py` describes what is said.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from beside.cells import Cell
from beside.environments import Unavailable, run

__all__ = ["Failure", "Found", "Job", "Program", "Start", "combine"]

START_SECONDS = 60.0
END_SECONDS = 10.0


class Failure(Exception):
    """A job gave no figure; the text says why."""


@dataclass(frozen=True)
class Start:
    """Commands, each started once with its environment added to this one's; {socket} stands for where to connect to."""

    commands: Sequence[Sequence[str]]
    env: dict[str, str] = field(default_factory=dict)
    envs: Sequence[dict[str, str]] = ()
    apart: bool = False  #: in other network namespaces, where only a socket that is a file can be reached


@dataclass(frozen=True)
class Found:
    """What a job said about a cell: seconds of one operation for each repetition, the slowest rank's; wrong elements."""

    seconds: list[float]
    wrong: int
    operations: int = 0


def combine(answers: Sequence[dict[str, Any]]) -> Found:
    """What all ranks say together.

    Raises
    ------
    Failure
        A rank failed, or they contradict each other.
    """
    for answer in answers:
        if "error" in answer:
            raise Failure(answer["error"])
    lists = [answer["seconds"] for answer in answers]
    if len({len(found) for found in lists}) != 1 or not lists[0]:
        raise Failure(f"ranks made different numbers of repetitions: {[len(found) for found in lists]}")
    wrong = sum(answer["wrong"] for answer in answers)
    return Found([max(of_one) for of_one in zip(*lists)], wrong, answers[0].get("operations", 0))


RECEIVED, SENT = 0, 8  # places in a line of net/dev


def carried(process: int, apart: bool) -> int:
    """Bytes that loopback has carried; of a process that is apart: that have gone in and out of its network namespace."""
    found = 0
    with contextlib.suppress(OSError):  # it has ended, as will be found
        for line in Path(f"/proc/{process}/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if counters and (name.strip() == "lo") != apart:
                found += sum(int(counters.split()[place]) for place in ((RECEIVED, SENT) if apart else (RECEIVED,)))
    return found


def refuse_shortcut(cell: Cell, operations: int, found: int) -> None:
    """Holds what the network carried against what a TCP transport must have sent: a peer may have shared memory left somewhere.

    Raises
    ------
    Failure
        It carried less than the whole buffer for each operation, which every case sends at least.
    """
    if cell.transport != "shm" and found < 0.9 * operations * cell.nbytes:
        least = operations * cell.nbytes
        raise Failure(
            f"not over TCP: the network carried {found} bytes for {operations} operations of {least} bytes in all"
        )


class Job:
    """Ranks of a peer. A context manager: ends what it started.

    Parameters
    ----------
    start : Start
    size : int
        How many ranks will call.

    Raises
    ------
    Failure
        They did not all call within START_SECONDS.
    """

    def __init__(self, start: Start, size: int) -> None:
        self._stack = contextlib.ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[_Line] = []
        self.version = ""
        self._apart = start.apart
        try:
            self._begin(start, size)
        except BaseException:
            self.end()
            raise

    def _begin(self, start: Start, size: int) -> None:
        self._output = self._stack.enter_context(os.fdopen(os.memfd_create("output"), "w+b"))
        listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        if start.apart:
            name = os.path.join(self._stack.enter_context(tempfile.TemporaryDirectory()), "socket")
            try:
                listener.bind(name)
            except OSError as error:
                raise Failure(f"{name}: {error}; set TMPDIR to a shorter path") from None
        else:  # the kernel gives it a name that is in no folder, so that no file is left, whatever happens
            listener.bind("")
            name = "@" + listener.getsockname()[1:].decode()
        listener.listen(size)
        for command, own in zip(start.commands, start.envs or [{}] * len(start.commands)):
            words = [word.replace("{socket}", name) for word in command]
            try:
                process = subprocess.Popen(
                    words,
                    env={**os.environ, **start.env, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise Failure(f"{words[0]}: {error.strerror}") from None
            self._processes.append(process)
        deadline = time.monotonic() + START_SECONDS
        while len(self._lines) < size:
            listener.settimeout(0.2)  # so that a launcher that failed is seen soon
            try:
                if line := _Line.of_own_user(listener.accept()[0]):
                    self._lines.append(line)
            except TimeoutError:
                if any(process.poll() is not None for process in self._processes):
                    raise Failure(f"its launcher ended: {self._said()}") from None
                if time.monotonic() > deadline:
                    raise Failure(f"{len(self._lines)} of {size} ranks came within {START_SECONDS:g} s") from None
        hellos = self._hear(deadline)
        if sorted(hello["rank"] for hello in hellos) != list(range(size)):
            raise Failure(f"ranks say that they are {hellos}")
        self.version = hellos[0]["version"]

    def measure(self, cell: Cell, seconds: float, repetitions: int, limit: float) -> Found:
        """Has one cell measured.

        Raises
        ------
        Failure
            It failed or took longer than the limit, in seconds. The job is of no use afterwards.
        """
        deadline = time.monotonic() + limit
        process = self._lines[0].process
        before = carried(process, self._apart)
        ask = {"case": cell.case, "nbytes": cell.nbytes, "seconds": seconds, "repetitions": repetitions}
        try:
            self._tell(ask)
            while "most" in (answers := self._hear(deadline))[0]:
                self._tell(max(answer["most"] for answer in answers))
        except OSError as error:
            raise Failure(f"a rank hung up: {error.strerror}; {self._said()}") from None
        found = combine(answers)
        refuse_shortcut(cell, found.operations, carried(process, self._apart) - before)
        return found

    def ask(self, what: dict[str, Any], limit: float) -> list[dict[str, Any]]:
        """What each rank answers, in any order.

        Raises
        ------
        Failure
            A rank failed, or did not answer within the limit, in seconds. The job is of no use afterwards.
        """
        try:
            self._tell(what)
            return self._hear(time.monotonic() + limit)
        except OSError as error:
            raise Failure(f"a rank hung up: {error.strerror}; {self._said()}") from None

    def _tell(self, value: object) -> None:
        for line in self._lines:
            line.socket.sendall(json.dumps(value).encode() + b"\n")

    def _hear(self, deadline: float) -> list[dict[str, Any]]:
        """One object of each rank; of fewer where one of them is an error."""
        answers: list[dict[str, Any]] = []
        with selectors.DefaultSelector() as selector:
            for line in self._lines:
                selector.register(line.socket, selectors.EVENT_READ, line)
            while len(answers) < len(self._lines):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise Failure(f"{len(answers)} of {len(self._lines)} ranks answered in time; {self._said()}")
                for key, _ in ready:
                    answer = key.data.receive()
                    if answer is None:
                        continue
                    if not answer:
                        key.data.wait(END_SECONDS)  # its last words come after it has hung up
                        raise Failure(f"a rank ended: {self._said()}")
                    if "error" in answer:
                        raise Failure(answer["error"])
                    answers.append(answer)
                    selector.unregister(key.fileobj)
        return answers

    def _said(self) -> str:
        """The last words of its output."""
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").split("\n")
        told = [line.strip() for line in lines if line.strip(" -=*")]
        return " / ".join(told[-3:])[-300:] or "it said nothing"

    def end(self) -> None:
        """Ends all processes, the willing ones gracefully; may be called twice."""
        for line in self._lines:
            line.socket.close()
        deadline = time.monotonic() + END_SECONDS
        for process in self._processes:
            for number in (None, signal.SIGTERM, signal.SIGKILL):
                if number is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
                    deadline = time.monotonic() + 2
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
                    break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for line in self._lines:
            line.kill()
        self._processes, self._lines = [], []
        self._stack.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class _Line:
    """The socket to one rank, and a handle on its process."""

    def __init__(self, connected: socket.socket, process: int, handle: int) -> None:
        self.socket = connected
        self.process = process
        self._text = b""
        self._handle = handle

    @classmethod
    def of_own_user(cls, connected: socket.socket) -> _Line | None:
        """None where somebody else's process has connected, or one that is gone already."""
        pid, user, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user == os.getuid():
            with contextlib.suppress(ProcessLookupError):
                return cls(connected, pid, os.pidfd_open(pid))
        connected.close()
        return None

    def receive(self) -> dict[str, Any] | None:
        """What has come: an object, nothing yet (None), or the end (an empty one)."""
        got = self.socket.recv(1 << 16)
        if not got:
            return {}
        self._text += got
        if not self._text.endswith(b"\n"):
            return None
        text, self._text = self._text, b""
        return json.loads(text)

    def wait(self, seconds: float) -> None:
        """Returns when the process has ended, or after so many seconds."""
        select.select([self._handle], [], [], seconds)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        os.close(self._handle)


class Program:
    """A program that measures one cell and prints {"seconds": [...], "wrong": 0}: `program CASE BYTES RANKS SECONDS REPETITIONS`."""

    def __init__(self, path: Path, *options: str) -> None:
        self._path = path
        self._options = options
        self.version = path.name

    def measure(self, cell: Cell, seconds: float, repetitions: int, limit: float) -> Found:
        """As `Job.measure`."""
        numbers = [str(value) for value in (cell.nbytes, cell.world, seconds, repetitions)]
        try:
            return combine([json.loads(run([self._path, cell.case, *numbers, *self._options], limit))])
        except (Unavailable, json.JSONDecodeError) as error:
            raise Failure(str(error)) from None

    def end(self) -> None:
        """Nothing is kept between two cells."""

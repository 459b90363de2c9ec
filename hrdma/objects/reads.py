"""One-sided reads of objects over RDMA: the device reads the feeder's segment straight into the puller's.

    puller                                      feeder
    the request of the stream, its queue pair ->
                                             <- WELCOME, its queue pair
                                             <- TOLD     bytes that are there, where in memory, key
    RDMA READ of what is there, several at a time
                                             <- TOLD     more is there, as it comes to be
    the socket's end ->

The feeder's processor takes no part in moving the bytes. Its segment is pinned and registered until the puller closes the
socket or is gone, and its queue pair is destroyed before the segment may be freed: a read that comes late fails, and never
sees other bytes. What was told is final: the bytes of a put that is over, of a fetch as far as it came, of a sum as far as it
is summed up. The puller destroys its queue pair before it goes on from elsewhere, so that nothing is written after.

Each stream has a queue pair of its own: what goes wrong on it concerns no other. `hrdma.Endpoint` is not used here since a
communicator knows its ranks beforehand and ends with the first that is lost, while nodes come, go, and come again.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hrdma import verbs
from hrdma.config import Config
from hrdma.errors import HrdmaError
from hrdma.log import logger
from hrdma.objects.carriers import BLOCK, LOOK, Counts, Source, Target, hung_up
from hrdma.objects.memory import Gone

__all__ = ["Rail", "rails"]

TOLD = struct.Struct(">QQI")  # bytes that are there, address, key
FLIGHT = 8  # reads under way on a stream
LAST_WORD = 0.5  # seconds in which the socket tells that a node is gone, where a read has failed because it is


def rails(config: Config) -> list[Rail]:
    """One for each device that the configuration means, by its number; one that will not do now is left with a warning.

    Raises
    ------
    DeviceError
        There is none, one that is named is not there, or cannot be opened.
    """
    found = verbs.choose(config.hardware(), ifname=config.ifname, gid_index=config.gid(), warn=logger.warning)
    return [Rail("verbs" if i == 0 else f"verbs:{i}", *place) for i, place in enumerate(found) if place]


class Rail:
    """A device, as a `Carrier`."""

    def __init__(self, name: str, device: str, port: int, gid_index: int) -> None:
        self.name, self.counts = name, Counts()
        self.device = verbs.Device(device, port, gid_index)
        self.domain = verbs.ProtectionDomain(self.device)
        self._lock = threading.Lock()
        self._lines = 0
        self._closing = False

    def line(self, failed: Callable[[str], None]) -> _Line:
        with self._lock:
            if self._closing:
                raise HrdmaError("this node is about to end")
            self._lines += 1
        try:
            return _Line(self, failed)
        except BaseException:
            self.left()
            raise

    def describe(self) -> str:
        return f"{self.name} ({self.device.name}:{self.device.port}, GID {self.device.gid})"

    def close(self) -> None:
        """The device goes with the last stream that uses it."""
        with self._lock:
            self._closing = True
        self._end()

    def left(self) -> None:
        """One line fewer."""
        with self._lock:
            self._lines -= 1
        self._end()

    def _end(self) -> None:
        with self._lock, contextlib.suppress(HrdmaError):
            if self._closing and not self._lines:
                self.device.close()


class _Line:
    """A queue pair."""

    _closed = False

    def __init__(self, rail: Rail, failed: Callable[[str], None]) -> None:
        self.rail, self.failed = rail, failed
        self.queue = verbs.CompletionQueue(rail.device, 2 * FLIGHT)
        self.pair = verbs.QueuePair(rail.domain, self.queue, sends=FLIGHT, recvs=1)
        self.address = list(self.pair.address)

    def meet(self, other: Any) -> None:
        self.pair.connect(other)

    def feed(self, sock: socket.socket, source: Source, offset: int) -> None:
        while not source.wait_fixed(LOOK):  # pages that a device has pinned could not be sealed
            if hung_up(sock):
                return
        try:
            region = source.region(self.rail.domain)
        except Gone:
            return
        except HrdmaError as error:
            self.failed(str(error))
            sock.sendall(TOLD.pack(0, 0, 0))
            return
        told = offset
        while told < source.nbytes:
            there = source.wait_for(told, LOOK)
            if there < 0:
                return
            if there > told:
                sock.sendall(TOLD.pack(there, region.address + source.base, region.rkey))
                self.rail.counts.sent += there - told
                told = there
            elif hung_up(sock):
                return
        sock.recv(1)  # until all of it was read

    def pull(self, sock: socket.socket, target: Target, offset: int, block: int) -> _Reads:
        return _Reads(self, sock, target, offset)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(HrdmaError):
            self.pair.close()
            self.queue.close()
        self.rail.left()


class _Reads:
    """A `Stream`."""

    def __init__(self, line: _Line, sock: socket.socket, target: Target, offset: int) -> None:
        self._line, self._sock = line, sock
        self._region, self._base = target.region(line.rail.domain), target.base
        self._there = self._next = offset  # bytes of the source that may be read; where the next read begins
        self._address = self._key = 0
        self._said = b""
        self._flying: deque[int] = deque()  # how long each read under way is
        self._over = False

    def read(self, start: int, end: int) -> int:
        try:
            while not self._over:
                self._post(self._base + start + sum(self._flying), self._base + end)
                if not self._flying:
                    self._hear(wait=True)
                elif ends := self._line.queue.poll(FLIGHT, LOOK):
                    for each in ends:
                        each.check()
                    n = sum(self._flying.popleft() for _ in ends)
                    self._line.rail.counts.received += n
                    return n
                else:
                    self._hear()
        except HrdmaError as error:
            self._fail(str(error))
        return 0

    def _post(self, at: int, end: int) -> None:
        """Begins as many reads as may be under way."""
        if self._flying and self._next == self._there:
            self._hear()
        while len(self._flying) < FLIGHT and at < end and self._next < self._there:
            n = min(BLOCK, end - at, self._there - self._next)
            self._line.pair.read(self._region[at : at + n], self._address + self._next, self._key)
            self._flying.append(n)
            self._next += n
            at += n

    def _hear(self, *, wait: bool = False) -> None:
        """Takes what the feeder has told."""
        try:
            said = self._sock.recv(64 * TOLD.size, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        self._over = self._over or not said
        self._said += said
        whole = len(self._said) // TOLD.size * TOLD.size
        if whole:
            self._there, self._address, self._key = TOLD.unpack_from(self._said, whole - TOLD.size)
            self._said = self._said[whole:]
        if whole and not self._address:
            self._line.failed("that node could not register its memory")
            self._over = True

    def _fail(self, why: str) -> None:
        """A read failed: because the other end is gone or has given it up, or since there is no way for RDMA."""
        until = time.monotonic() + LAST_WORD
        word = select.poll()  # a descriptor may be more than select can take
        word.register(self._sock, select.POLLIN)
        while not self._over and (left := until - time.monotonic()) > 0:
            if word.poll(left * 1000):
                self._hear()
        if not self._over:
            self._line.failed(why)
        self._over = True

    def cancel(self) -> None:
        self._over = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._line.close()
        self._sock.close()

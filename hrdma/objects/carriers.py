"""How the bytes of a stream get from one node's memory into another's: the ways of a node, and the one over the stream's socket.

    Carriers        which ways this node has, which of them a stream takes, how much went each way
    Carrier         one way; it makes a `Line` for each stream
    Line            one end of one stream: told to the other end, it feeds there or gives a `Stream` here

`Socket` is here; one-sided reads over RDMA are in `reads.py`. A node offers its best way in the request of a stream, and the
feeder takes it or falls back on the socket, so that nodes with and without RDMA make one cluster.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from hrdma.config import Config
from hrdma.errors import HrdmaError
from hrdma.log import logger
from hrdma.providers import chosen

__all__ = ["BLOCK", "LOOK", "Carrier", "Carriers", "Counts", "Line", "Socket", "Source", "Stream", "Target", "hung_up"]

BLOCK = 1 << 18  # bytes moved at a time, at most
LOOK = 0.1  # seconds between two looks whether the other end of a stream is there
PIECE = 1 << 20  # bytes taken from a socket at a time, at most
LEFT = 10.0  # seconds that a way to a node on which a stream failed is left for the next best


class Target(Protocol):
    """Bytes that a stream fills: memory, a segment, a part of one."""

    nbytes: int
    view: memoryview
    base: int  #: where they begin in what `region` gives

    def region(self, domain: Any) -> Any: ...


class Source(Target, Protocol):
    """Bytes that grow: a segment, a part of one."""

    def wait_for(self, nbytes: int, timeout: float | None = None) -> int: ...
    def wait_fixed(self, timeout: float) -> bool: ...


class Stream(Protocol):
    """Bytes on their way into a target: `read` until it ends, `cancel` from any thread."""

    def read(self, start: int, end: int) -> int:
        """Brings the next bytes to [start, end) of the target: how many, at least one; 0 when it ended or was cancelled.

        What is asked for after some have come begins where they end, or is another turn of the same target.
        """

    def cancel(self) -> None: ...
    def close(self) -> None:
        """By whoever reads. Nothing is written into the target after."""


class Line(Protocol):
    """One end of a stream, for one thread."""

    address: Any  #: what the other end has to know; None: nothing

    def meet(self, other: Any) -> None:
        """Takes the address of the other end."""

    def feed(self, sock: socket.socket, source: Source, offset: int) -> None: ...
    def pull(self, sock: socket.socket, target: Target, offset: int, block: int) -> Stream:
        """Whoever reads is woken once for `block` bytes, or at the end, where they come in smaller pieces."""

    def close(self) -> None: ...


class Carrier(Protocol):
    """One way for bytes between nodes. From any thread."""

    name: str
    counts: Counts

    def line(self, failed: Callable[[str], None]) -> Line:
        """`failed` is told when there is no way though the other end lives."""

    def describe(self) -> str: ...
    def close(self) -> None: ...


@dataclass
class Counts:
    """Bytes that went one way. Threads add without a lock: between reading and writing one no other thread runs."""

    sent: int = 0
    received: int = 0


def hung_up(sock: socket.socket) -> bool:
    """Whether the other end has closed the socket, or sends what it must not."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


class Socket:
    """Bytes over the stream's own socket. The kernel copies them at both ends."""

    name = "tcp"

    def __init__(self) -> None:
        self.counts = Counts()

    def line(self, failed: Callable[[str], None]) -> _SocketLine:
        return _SocketLine(self.counts)

    def describe(self) -> str:
        return self.name

    def close(self) -> None:
        pass


class _SocketLine:
    address = None

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def meet(self, other: Any) -> None:
        pass

    def feed(self, sock: socket.socket, source: Source, offset: int) -> None:
        while offset < source.nbytes:
            there = source.wait_for(offset, LOOK)
            if there < 0 or (there <= offset and hung_up(sock)):
                return
            if there <= offset:
                continue
            n = sock.send(source.view[offset : min(there, offset + BLOCK)])
            offset += n
            self._counts.sent += n

    def pull(self, sock: socket.socket, target: Target, offset: int, block: int) -> _SocketStream:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, block)
        return _SocketStream(sock, target, self._counts)

    def close(self) -> None:
        pass


class _SocketStream:
    def __init__(self, sock: socket.socket, target: Target, counts: Counts) -> None:
        self._sock, self._target, self._counts = sock, target, counts

    def read(self, start: int, end: int) -> int:
        try:
            n = self._sock.recv_into(self._target.view[start : min(end, start + PIECE)])
        except OSError:
            return 0
        self._counts.received += n
        return n

    def cancel(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


class Carriers:
    """The ways of this node, best first.

    Parameters
    ----------
    config : Config
        ``transport``, ``require``, ``devices``, ``ifname`` and ``verbs`` choose, as for communicators; RDMA is used where one
        of the first three asks for it.

    Raises
    ------
    DeviceError
        What was asked for cannot be had.
    """

    def __init__(self, config: Config) -> None:
        self.required = "verbs" in config.require
        self.rails: list[Carrier] = []  #: one by each RDMA device; streams take them in turn
        asked = config.hardware() or "verbs" in config.transport
        if asked and "verbs" in chosen(config):
            from hrdma.objects.reads import rails

            self.rails += rails(config)
        self.all: list[Carrier] = [*self.rails] if self.required else [*self.rails, Socket()]
        self._lock = threading.Lock()
        self._turn = 0
        self._left: dict[tuple[str, int], float] = {}  # carrier and node, until when
        logger.info("objects: bytes go over %s", self.describe())

    def describe(self) -> str:
        return ", ".join(carrier.describe() for carrier in self.all)

    def stats(self) -> dict[str, dict[str, Any]]:
        """By the name of the way: what it is, bytes sent and received."""
        return {carrier.name: {"text": carrier.describe(), **asdict(carrier.counts)} for carrier in self.all}

    @property
    def sent(self) -> int:
        return sum(carrier.counts.sent for carrier in self.all)

    def offer(self, node: int) -> Carrier:
        """The way that a stream from this node should take.

        Raises
        ------
        HrdmaError
            There is none at the moment.
        """
        now = time.monotonic()
        with self._lock:
            good = [each for each in self.all if self._left.get((each.name, node), 0.0) <= now]
            self._turn += 1
            found = next(iter(good[self._turn % max(1, len([each for each in good if each in self.rails])) :]), None)
        if found is None:
            raise HrdmaError(f"HRDMA_REQUIRE=verbs, and node {node:x} was not reached over it")
        return found

    def named(self, name: str | None) -> Carrier:
        """The way that was offered, else the last resort.

        Raises
        ------
        HrdmaError
            There is neither.
        """
        found = next((each for each in self.all if each.name in (name, Socket.name)), None)
        if found is None:
            raise HrdmaError("HRDMA_REQUIRE=verbs, and the other node does not use it")
        return found

    def leave(self, name: str, node: int, why: str) -> None:
        """A stream from this node failed on this way while the node lives: others take the next best for a while."""
        with self._lock:
            known = (name, node) in self._left
            self._left[name, node] = time.monotonic() + LEFT
        if not known:
            instead = "nothing stands in, as HRDMA_REQUIRE says" if self.required else "tcp stands in"
            logger.warning("objects: no bytes between this node and %x over %s: %s; %s", node, name, why, instead)

    def forget(self, nodes: set[int]) -> None:
        """These are gone."""
        with self._lock:
            self._left = {key: until for key, until in self._left.items() if key[1] not in nodes}

    def close(self) -> None:
        for carrier in self.all:
            carrier.close()

"""The sockets of the control plane: a listener for many peers, a call to one, and a waker for the thread between.

Each connection is a ZMTP connection over TCP with heartbeats, which libzmq's own thread answers: a process whose
interpreter is busy stays alive, a frozen or dead one does not. A connection that broke is never mended silently
(RECONNECT_IVL=-1): its end is what tells that the peer is gone. libzmq reports ends on a monitor socket by file
descriptor and messages by routing identity; `Listener` joins the two. The order matters, and the loop keeps it: events
are drained before messages are received, so that each message sent before a hang-up is seen before it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import socket
import struct
from typing import NamedTuple

import zmq

from hrdma.control.wire import frame_limit

__all__ = ["Call", "Link", "Listener", "Received", "Waker", "listen", "resolve", "url"]

_EVENTS = (
    zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
)
_POLLIN = int(zmq.POLLIN)
_MONITORS = itertools.count()
_BATCH = 256  # messages taken in one turn, so that timers and hang-ups get their turn too


class Received(NamedTuple):
    """A message at the listener; the address only of peers that stand for no rank yet."""

    identity: bytes
    frame: bytes
    descriptor: int
    address: str


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    """Family and numeric address of a host; IPv4 where it has both, so that all ranks choose alike."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, *_, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, str(address[0])


def url(host: str, port: int) -> str:
    """Endpoint of a numeric address as libzmq writes it."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def listen(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    """A listening socket: on this address when it is a loopback one, else on all addresses of the family.

    MASTER_ADDR need not be an address of the host of rank 0 (address translation, service names).
    """
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        wildcard = "::" if family == socket.AF_INET6 else "0.0.0.0"
        sock.bind((host if is_loopback(host) else wildcard, port))
        sock.listen(1024)
    except BaseException:
        sock.close()
        raise
    return sock


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


class Link:
    """What both kinds of socket share: options, monitor, the list of open descriptors."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: int, size: int, heartbeat: float) -> None:
        self.descriptors: set[int] = set()
        self.socket: zmq.Socket[bytes] = context.socket(kind)
        interval = max(20, int(heartbeat * 1000 / 5))
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 64),
            (zmq.MAXMSGSIZE, frame_limit(size)),
            (zmq.HEARTBEAT_IVL, interval),
            (zmq.HEARTBEAT_TIMEOUT, 4 * interval),
            (zmq.HANDSHAKE_IVL, 5 * interval),
            (zmq.CONNECT_TIMEOUT, 5 * interval),
            (zmq.RECONNECT_IVL, -1),
            (zmq.IPV6, 1),
        ):
            self.socket.setsockopt(option, value)
        name = f"inproc://monitor-{next(_MONITORS)}"
        self.socket.monitor(name, _EVENTS)
        self.monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self.monitor.setsockopt(zmq.LINGER, 0)
        self.monitor.connect(name)
        #: readable when something has happened to either socket since it was last used: then both are served
        self.signals = (int(self.socket.getsockopt(zmq.FD)), int(self.monitor.getsockopt(zmq.FD)))
        self.pending = False  #: messages are there of which nothing is signalled
        self._used = True
        _readable(self.monitor)  # what comes is signalled only once it was found to have nothing

    def look(self) -> bool:
        """Sets `pending`, and returns it: to be asked before one waits for the signals."""
        if self._used:
            self.pending, self._used = _readable(self.socket), False
        return self.pending

    def events(self) -> list[tuple[int, int]]:
        """What happened to connections since the last call, in order: (event, descriptor)."""
        found = []
        with contextlib.suppress(zmq.Again):
            while _readable(self.monitor):
                head = self.monitor.recv_multipart(zmq.NOBLOCK)[0]
                event, value = struct.unpack_from("=Hi", head)
                if event in (zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED):
                    self.descriptors.add(value)
                elif event == zmq.EVENT_DISCONNECTED:
                    self.descriptors.discard(value)
                found.append((event, value))
        return found

    def close(self, linger: float = 0.0) -> None:
        """Closes; what was sent has `linger` seconds to leave."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(int(linger * 1000))
        self.descriptors.clear()


class Listener(Link):
    """Where peers call: a ROUTER, and who of them is which rank."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], sock: socket.socket, size: int, heartbeat: float
    ) -> None:
        super().__init__(context, zmq.ROUTER, size, heartbeat)
        self.host, self.port = sock.getsockname()[:2]
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.bound = sock.detach()
        self.socket.setsockopt(zmq.USE_FD, self.bound)
        self.socket.bind(url(self.host, self.port))
        self._identity: dict[int, bytes] = {}
        self._rank: dict[bytes, int] = {}
        self._descriptor: dict[bytes, int] = {}
        self._of: dict[int, bytes] = {}
        self._silent: dict[int, str] = {}  # connections from which no message came yet, and their addresses
        self._ended: list[int] = []

    def events(self) -> list[tuple[int, int]]:
        found = super().events()
        for event, descriptor in found:
            if event == zmq.EVENT_ACCEPTED:
                self._silent[descriptor] = _address(descriptor)
            elif event == zmq.EVENT_DISCONNECTED and descriptor in self._silent:
                self._ended.append(descriptor)
        return found

    def strangers(self) -> list[str]:
        """Addresses of those whose connections ended without a message: libzmq did not take what came for one.

        To be asked after `receive`: the end of a connection is known sooner than what came before it.
        """
        ended, self._ended = self._ended, []
        return [self._silent.pop(descriptor) for descriptor in ended if descriptor in self._silent]

    def receive(self) -> list[Received]:
        """Messages that have arrived; those of several frames as one that is empty, which is none of ours."""
        found: list[Received] = []
        self._used = True
        with contextlib.suppress(zmq.Again):
            while len(found) < _BATCH and _readable(self.socket):
                identity = self.socket.recv(zmq.NOBLOCK)
                if identity in self._rank:  # who it is was found out once
                    parts = self.socket.recv_multipart(zmq.NOBLOCK)
                    frame = parts[0] if len(parts) == 1 else b""
                    found.append(Received(identity, frame, self._descriptor[identity], ""))
                    continue
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                origin = _origin(frames[0])
                if origin is not None:  # else libzmq does not know, and says so at the end: see strangers()
                    self._silent.pop(origin[0], None)
                    found.append(Received(identity, frames[0].bytes if len(frames) == 1 else b"", *origin))
        return found

    def send(self, identity: bytes, frame: bytes) -> None:
        """Sends to a peer; nothing happens when it has gone, its hang-up is on the way."""
        self._used = True
        with contextlib.suppress(zmq.ZMQError):
            self.socket.send_multipart([identity, frame], zmq.NOBLOCK)

    def bind_rank(self, identity: bytes, descriptor: int, rank: int) -> None:
        """From now on the connection stands for the rank."""
        self._identity[descriptor] = identity
        self._rank[identity] = rank
        self._descriptor[identity] = descriptor
        self._of[rank] = identity

    def rank_of(self, identity: bytes) -> int | None:
        return self._rank.get(identity)

    def identity_of(self, rank: int) -> bytes | None:
        return self._of.get(rank)

    def hung_up(self, descriptor: int) -> int | None:
        """Forgets a connection that ended; returns the rank it stood for."""
        identity = self._identity.get(descriptor)
        return None if identity is None else self.forget(identity)

    def forget(self, identity: bytes) -> int | None:
        """The connection stands for nobody any more, though its peer may not have closed it yet."""
        rank = self._rank.pop(identity, None)
        if rank is not None:
            del self._identity[self._descriptor.pop(identity)]
            if self._of.get(rank) == identity:
                del self._of[rank]
        return rank

    def same_host(self, received: Received) -> bool:
        """Whether a peer's address is loopback or that of our end of its connection: it is on this host."""
        if is_loopback(received.address):
            return True
        try:
            with socket.socket(fileno=os.dup(received.descriptor)) as copy:
                here, there = copy.getsockname()[0], copy.getpeername()[0]
        except OSError:
            return False
        return bool(here == there == received.address)


def _address(descriptor: int) -> str:
    """Where a connection of libzmq's comes from; empty where it has ended already."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            return str(copy.getpeername()[0])
    except (OSError, IndexError):  # or its number is another socket's by now
        return ""


def _readable(sock: zmq.Socket[bytes]) -> bool:
    """Whether there is something to receive: an exception that says there is nothing costs ten times as much."""
    return bool(int(sock.getsockopt(zmq.EVENTS)) & _POLLIN)


def _origin(frame: zmq.Frame) -> tuple[int, str] | None:
    """Descriptor and address from which a message came; libzmq does not know them for peers of ancient protocols."""
    try:
        return int(frame.get(zmq.SRCFD)), str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return None


class Call(Link):
    """A connection to the listener of one rank: `up` after libzmq's handshake, `down` for good after its end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, size: int, heartbeat: float) -> None:
        super().__init__(context, zmq.DEALER, size, heartbeat)
        self.up = False
        self.down = False
        self.reached = False  # something accepted the connection, hrdma or not
        self.socket.connect(endpoint)

    def poll_events(self) -> None:
        for event, _ in self.events():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.up = True
            elif event == zmq.EVENT_CONNECTED:
                self.reached = True
            elif event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
                self.down = True

    def receive(self) -> list[bytes]:
        found: list[bytes] = []
        self._used = True
        with contextlib.suppress(zmq.Again):
            while len(found) < _BATCH and _readable(self.socket):
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
                if len(parts) == 1:
                    found.append(parts[0])
        return found

    def send(self, frame: bytes) -> None:
        self._used = True
        with contextlib.suppress(zmq.ZMQError):
            self.socket.send(frame, zmq.NOBLOCK)


class Waker:
    """An eventfd: any thread rings, the control thread wakes."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        os.close(self.descriptor)

"""Bytes of objects and sums from node to node: a stream each, from any offset.

    puller                                      feeder
                                             <- CHALLENGE  nonce
    PROOF   what, HMAC("C", nonce, what)     ->
                                             <- WELCOME    HMAC("S", nonce, what and how), how; or ABORT
                                             <- bytes from the offset on, or where they can be read, as they come to be there

What is asked for says how the bytes might go (`carriers.py`): which way, and the puller's address on it. The feeder says its
own, or that they come over this socket. A client that asks for a line (`lines.py`) gets no bytes: its socket is handed on. A feeder sends what is there while the rest is still arriving, so that a chain of
nodes moves an object in the time of one hop plus a block per node. A stream that ends early is no error here: the puller asks
the directory, or tries again, from the byte that it has. Reading has no time limit of its own, since waiting for a slow source
is right; whoever owns the stream cancels it when the view says that the other node is gone. Feeding ends likewise.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from hrdma.control.link import is_loopback
from hrdma.control.wire import HEADER, FrameError, Kind, decode, encode, proof
from hrdma.errors import HrdmaError
from hrdma.log import logger
from hrdma.objects.carriers import BLOCK, Carriers, Line, Source, Stream, Target
from hrdma.objects.memory import Gone

__all__ = ["Feeder", "block_of", "open_line", "open_stream"]

LEAST_BLOCK = 1 << 14
HOP = 2e-3  # seconds that a block may take: what each hop of a chain adds to the time of the whole
LIMIT = 1 << 14  # bytes of a handshake frame
HANDSHAKE = 5.0  # seconds


def _send(sock: socket.socket, kind: Kind, body: dict[str, Any]) -> None:
    sock.sendall(encode(kind, body, limit=LIMIT))


def _receive(sock: socket.socket, until: float) -> tuple[Kind, dict[str, Any]]:
    """A frame; by this moment of the monotonic clock, however slowly its bytes come."""
    frame = b""
    want = HEADER.size
    while len(frame) < want:
        sock.settimeout(max(0.001, until - time.monotonic()))
        got = sock.recv(want - len(frame))
        if not got:
            raise ConnectionError("the other side hung up")
        frame += got
        if len(frame) == HEADER.size:
            want += struct.unpack_from(">I", frame, HEADER.size - 4)[0]
            if want > LIMIT:
                raise ConnectionError("the other side is no node")
    try:
        return decode(frame, limit=LIMIT)
    except FrameError as error:
        raise ConnectionError(f"the other side is no node: {error}") from None


class Feeder:
    """Serves streams. `find` gives the source that a request means, and what to call when it was served, or None.

    `adopt` takes over the socket of a line, and calls what it is given when it has closed it; False: it does not.
    """

    def __init__(
        self, key: bytes, find: Callable[[dict[str, Any]], tuple[Source, Callable[[], None]] | None], carriers: Carriers,
        adopt: Callable[[socket.socket, Callable[[], None]], bool], *, host: str, open_to_all: bool,
    ) -> None:  # fmt: skip
        self._key, self._find, self._carriers, self._open = key, find, carriers, open_to_all
        self._adopt = adopt
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._socks: dict[socket.socket, int] = {}  # and who asks there; 0: it did not say yet
        self._thread = threading.Thread(target=self._accept, name="hrdma-feeder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._shut(lambda node: True)

    def cut_off(self, nodes: set[int]) -> None:
        """These nodes are gone, though a frozen one would not say so: nothing is kept for them any more."""
        self._shut(nodes.__contains__)

    def _shut(self, whom: Callable[[int], bool]) -> None:
        with self._lock:
            for sock, node in self._socks.items():
                if whom(node):
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError:
                return
            if not self._open and not is_loopback(address[0]) and sock.getsockname()[0] != address[0]:
                sock.close()
                continue
            with self._lock:
                self._socks[sock] = 0
            threading.Thread(target=self._serve, args=(sock,), name="hrdma-feed", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        if self._keeps(sock):
            return
        self._forget(sock)
        sock.close()

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            self._socks.pop(sock, None)

    def _keeps(self, sock: socket.socket) -> bool:
        """Serves a caller; True when somebody else does so from here on."""
        try:
            sock.settimeout(HANDSHAKE)
            nonce = secrets.token_hex(16)
            _send(sock, Kind.CHALLENGE, {"nonce": nonce})
            kind, body = _receive(sock, time.monotonic() + HANDSHAKE)
            what = str(body.get("what"))
            mine = proof(self._key, "C", nonce.encode(), what.encode())
            if kind is not Kind.PROOF or not secrets.compare_digest(mine, str(body.get("proof"))):
                _send(sock, Kind.ABORT, {"text": "it does not hold our job token"})
                return False
            request = body["request"]
            if what != _text(request):
                return False
            with self._lock:
                self._socks[sock] = request["node"]
            if request.get("line") is True:
                self._welcome(sock, nonce, what, None)
                return self._adopt(sock, lambda: self._forget(sock))
            found = self._find(request)
            if found is None:
                _send(sock, Kind.ABORT, {"text": "not here"})
                return False
            source, served = found
            try:
                self._answer(sock, source, request, nonce, what)
            finally:
                served()
        except HrdmaError as error:
            with contextlib.suppress(OSError):
                _send(sock, Kind.ABORT, {"text": str(error)})
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return False

    def _welcome(self, sock: socket.socket, nonce: str, what: str, address: str | None) -> None:
        mine = proof(self._key, "S", nonce.encode(), f"{what};{address}".encode())
        _send(sock, Kind.WELCOME, {"proof": mine, "address": address})
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _answer(self, sock: socket.socket, source: Source, request: dict[str, Any], nonce: str, what: str) -> None:
        line = self._line(request)
        try:
            self._welcome(sock, nonce, what, line.address)
            line.feed(sock, source, request["offset"])
        finally:
            line.close()

    def _line(self, request: dict[str, Any]) -> Line:
        """How they go: the way that is offered, or the last resort."""
        node, name, address = request["node"], request["way"], request["address"]
        if address is not None:
            try:
                line = (carrier := self._carriers.named(name)).line(lambda why: self._carriers.leave(name, node, why))
                if carrier.name == name:
                    line.meet(address)
                return line
            except HrdmaError as error:
                logger.warning("objects: node %x cannot have bytes over %s: %s", node, name, error)
        return self._carriers.named(None).line(lambda why: None)


def _text(request: dict[str, Any]) -> str:
    return ",".join(f"{key}={request[key]}" for key in sorted(request))


def _introduced(key: bytes, sock: socket.socket, place: tuple[str, int], request: dict[str, Any], until: float) -> Any:
    """Says what is wanted, and proves the token; the other side's address on the way that was offered."""
    host, port = place
    kind, body = _receive(sock, until)
    if kind is not Kind.CHALLENGE:
        raise HrdmaError(f"{host}:{port} is no node")
    nonce, what = str(body["nonce"]).encode(), _text(request)
    _send(sock, Kind.PROOF, {"proof": proof(key, "C", nonce, what.encode()), "what": what, "request": request})
    kind, body = _receive(sock, until)
    if kind is not Kind.WELCOME:
        raise HrdmaError(f"{host}:{port}: {body.get('text')}")
    how = body.get("address")
    if not secrets.compare_digest(proof(key, "S", nonce, f"{what};{how}".encode()), str(body.get("proof"))):
        raise HrdmaError(f"{host}:{port} does not hold our job token")
    sock.settimeout(None)
    return how


def open_line(key: bytes, place: tuple[str, int], home: int, timeout: float) -> socket.socket:
    """A socket to a node that answers questions of a client, which belongs to the node `home` (`lines.py`).

    Raises
    ------
    OSError, HrdmaError
        As :func:`open_stream`.
    """
    until = time.monotonic() + timeout
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.create_connection(place, timeout=timeout))
        _introduced(key, sock, place, {"line": True, "node": home}, until)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        undo.pop_all()
        return sock


def block_of(bandwidth: float) -> int:
    """Bytes that a hop should take in before it passes them on: few on slow links, where a block is long on its way."""
    return max(LEAST_BLOCK, min(BLOCK, int(bandwidth * HOP) & ~(LEAST_BLOCK - 1)))


def open_stream(
    key: bytes,
    carriers: Carriers,
    place: tuple[int, str, int],
    request: dict[str, Any],
    me: int,
    target: Target,
    block: int,
) -> Stream:
    """Opens a stream from a node.

    Parameters
    ----------
    key : bytes
        Of the job token.
    carriers : Carriers
        The ways of this node.
    place : tuple of (int, str, int)
        The node, and host and port of its feeder.
    request : dict
        ``id``, ``gen``, ``offset``; for a piece also ``piece``; for a sum ``position`` and ``attempt``, too.
    me : int
        This node.
    target : Target
        Where the bytes come.
    block : int
        Bytes for which the reader is woken.

    Raises
    ------
    OSError
        It cannot be reached, or hung up.
    HrdmaError
        It has not got what was asked for, or does not hold the token, or there is no way for the bytes.
    """
    node, host, port = place
    carrier = carriers.offer(node)

    def failed(why: str) -> None:
        carriers.leave(carrier.name, node, why)

    with contextlib.ExitStack() as undo:
        try:
            line = carrier.line(failed)
        except HrdmaError as error:
            failed(str(error))
            raise
        undo.callback(line.close)
        sock = undo.enter_context(socket.create_connection((host, port), timeout=HANDSHAKE))
        request = {**request, "node": me, "way": carrier.name, "address": line.address}
        how = _introduced(key, sock, place[1:], request, time.monotonic() + HANDSHAKE)
        if line.address is not None and how is None:
            failed("that node does not use it")
            line.close()
            line = carriers.named(None).line(failed)
        try:
            if how is not None:
                line.meet(how)
            stream = line.pull(sock, target, request["offset"], block)
        except Gone:
            raise
        except HrdmaError as error:
            failed(str(error))
            raise
        undo.pop_all()
        return stream

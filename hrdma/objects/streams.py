"""Bytes of objects and sums from node to node: a stream each, over TCP, from any offset.

    puller                               feeder
                                  <-     CHALLENGE  nonce
    PROOF   what, HMAC("C", nonce, what) ->
                                  <-     WELCOME    HMAC("S", nonce, what), or ABORT
                                  <-     bytes from the offset on, as they come to be there

A feeder sends what is there while the rest is still arriving, so that a chain of nodes moves an object in the time of one
hop plus a block per node. A stream that ends early is no error here: the puller asks the directory, or tries again, from the
byte that it has. Reading has no time limit of its own, since waiting for a slow source is right; whoever owns the stream
cancels it when the view says that the other node is gone.

This is the one place that knows sockets: an endpoint of the core that two processes can open and close at any time would
take its place with the same two calls, `Feeder` and `open_stream`.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, Protocol

from hrdma.control.link import is_loopback
from hrdma.control.wire import HEADER, Kind, decode, encode, proof
from hrdma.errors import HrdmaError

__all__ = ["BLOCK", "Feeder", "Source", "Stream", "block_of", "open_stream"]

BLOCK = 1 << 18  # bytes moved at a time, at most
LEAST_BLOCK = 1 << 14
HOP = 2e-3  # seconds that a block may take: what each hop of a chain adds to the time of the whole
LIMIT = 1 << 14  # bytes of a handshake frame
HANDSHAKE = 5.0  # seconds


class Source(Protocol):
    """Bytes that grow: a segment."""

    nbytes: int
    view: memoryview

    def wait_for(self, nbytes: int, timeout: float | None = None) -> int: ...


def _send(sock: socket.socket, kind: Kind, body: dict[str, Any]) -> None:
    sock.sendall(encode(kind, body, limit=LIMIT))


def _receive(sock: socket.socket) -> tuple[Kind, dict[str, Any]]:
    frame = b""
    want = HEADER.size
    while len(frame) < want:
        got = sock.recv(want - len(frame))
        if not got:
            raise ConnectionError("the other side hung up")
        frame += got
        if len(frame) == HEADER.size:
            want += struct.unpack_from(">I", frame, HEADER.size - 4)[0]
            if want > LIMIT:
                raise ConnectionError("the other side is no node")
    return decode(frame, limit=LIMIT)


class Feeder:
    """Serves streams. `find` gives the source that a request means, and what to call when it was served, or None."""

    def __init__(
        self, key: bytes, find: Callable[[dict[str, Any]], tuple[Source, Callable[[], None]] | None],
        *, host: str, open_to_all: bool,
    ) -> None:  # fmt: skip
        self._key, self._find, self._open = key, find, open_to_all
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._socks: set[socket.socket] = set()
        self.sent = 0
        self._thread = threading.Thread(target=self._accept, name="hrdma-feeder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._socks:
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
                self._socks.add(sock)
            threading.Thread(target=self._serve, args=(sock,), name="hrdma-feed", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(HANDSHAKE)
            nonce = secrets.token_hex(16)
            _send(sock, Kind.CHALLENGE, {"nonce": nonce})
            kind, body = _receive(sock)
            what = str(body.get("what"))
            mine = proof(self._key, "C", nonce.encode(), what.encode())
            if kind is not Kind.PROOF or not secrets.compare_digest(mine, str(body.get("proof"))):
                _send(sock, Kind.ABORT, {"text": "it does not hold our job token"})
                return
            request = body["request"]
            if what != _text(request):
                return
            found = self._find(request)
            if found is None:
                _send(sock, Kind.ABORT, {"text": "not here"})
                return
            source, served = found
            try:
                _send(sock, Kind.WELCOME, {"proof": proof(self._key, "S", nonce.encode(), what.encode())})
                self._feed(sock, source, request["offset"])
            finally:
                served()
        except (OSError, ValueError, KeyError, TypeError):
            return
        finally:
            with self._lock:
                self._socks.discard(sock)
            sock.close()

    def _feed(self, sock: socket.socket, source: Source, offset: int) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while offset < source.nbytes:
            there = source.wait_for(offset)
            if there < 0:
                return
            n = sock.send(source.view[offset : min(there, offset + BLOCK)])
            offset += n
            self.sent += n


def _text(request: dict[str, Any]) -> str:
    return ",".join(f"{key}={request[key]}" for key in sorted(request))


def block_of(bandwidth: float) -> int:
    """Bytes that a hop should take in before it passes them on: few on slow links, where a block is long on its way."""
    return max(LEAST_BLOCK, min(BLOCK, int(bandwidth * HOP) & ~(LEAST_BLOCK - 1)))


class Stream:
    """An open stream: `read_into` until it ends, `cancel` from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def by(self, nbytes: int) -> None:
        """Whoever reads is woken once for so many bytes, or at the end, rather than for each packet."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def read_into(self, view: memoryview) -> int:
        """Some bytes, at least one; 0 when the stream ended or was cancelled."""
        try:
            return self._sock.recv_into(view)
        except OSError:
            return 0

    def cancel(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


def open_stream(key: bytes, host: str, port: int, request: dict[str, Any]) -> Stream:
    """Opens a stream from a node.

    Parameters
    ----------
    key : bytes
        Of the job token.
    host, port : str, int
        The node's feeder.
    request : dict
        ``id``, ``gen``, ``offset``; for a sum also ``position`` and ``attempt``.

    Raises
    ------
    OSError
        It cannot be reached, or hung up.
    HrdmaError
        It has not got what was asked for, or does not hold the token.
    """
    sock = socket.create_connection((host, port), timeout=HANDSHAKE)
    try:
        kind, body = _receive(sock)
        if kind is not Kind.CHALLENGE:
            raise HrdmaError(f"{host}:{port} is no node")
        nonce, what = str(body["nonce"]).encode(), _text(request)
        _send(sock, Kind.PROOF, {"proof": proof(key, "C", nonce, what.encode()), "what": what, "request": request})
        kind, body = _receive(sock)
        if kind is not Kind.WELCOME:
            raise HrdmaError(f"{host}:{port}: {body.get('text')}")
        if not secrets.compare_digest(proof(key, "S", nonce, what.encode()), str(body.get("proof"))):
            raise HrdmaError(f"{host}:{port} does not hold our job token")
        sock.settimeout(None)
        return Stream(sock)
    except BaseException:
        sock.close()
        raise

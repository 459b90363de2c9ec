"""Who may talk: both sides of the handshake by which two ranks prove the job token to each other.

    caller                                       acceptor
    HELLO      rank, purpose, nonce       ->
                                          <-     CHALLENGE  nonce, HMAC("A", hello, nonce)
    PROOF      private text,              ->
               HMAC("C", hello, nonce, private)

The token is never sent. The acceptor reads the private text (addresses, state) only after the proof holds. Until then
a peer is a stranger: whatever it sends besides these frames is dropped, and said once per address and reason. So is
what libzmq does not take for its protocol (`Listener.strangers`). Without
a token the key is zero and the proof says nothing, therefore only peers of this host pass unless ``HRDMA_INSECURE=1``.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hrdma.control.wire import PROTOCOL, FrameError, Kind, ProtocolError, decode, encode, proof
from hrdma.log import logger

__all__ = ["Admission", "Caller", "Gate", "TokenError"]

MAX_STRANGERS = 1024  # half-open handshakes remembered at once
MAX_NOTES = 64  # different things said about strangers


class TokenError(ValueError):
    """The other side does not hold this job's token."""


class Admission(NamedTuple):
    """A peer whose proof held."""

    identity: bytes
    descriptor: int
    address: str
    same_host: bool
    rank: int
    hello: dict[str, Any]
    private: dict[str, Any]


class Caller:
    """The caller's side of one handshake."""

    def __init__(self, key: bytes, limit: int, hello: dict[str, Any], private: dict[str, Any]) -> None:
        self._key = key
        self._limit = limit
        self._private = json.dumps(private, separators=(",", ":"))
        self.hello = encode(Kind.HELLO, {**hello, "nonce": secrets.token_hex(16)}, limit=limit)

    def answer(self, challenge: dict[str, Any]) -> bytes:
        """The PROOF frame for a CHALLENGE; `TokenError` when the acceptor's own proof is wrong."""
        nonce, theirs = challenge.get("nonce"), challenge.get("proof")
        if not isinstance(nonce, str) or not isinstance(theirs, str):
            raise TokenError("malformed challenge")
        if not hmac.compare_digest(proof(self._key, "A", self.hello, nonce.encode()).encode(), theirs.encode()):
            raise TokenError("wrong proof")
        mine = proof(self._key, "C", self.hello, nonce.encode(), self._private.encode())
        return encode(Kind.PROOF, {"proof": mine, "private": self._private}, limit=self._limit)


@dataclass
class _Stranger:
    hello: bytes
    body: dict[str, Any]
    nonce: str


class Gate:
    """The acceptor's side, for all strangers at one listener. `send` puts a frame to an identity."""

    def __init__(
        self, key: bytes, limit: int, size: int, *, open_to_all: bool, send: Callable[[bytes, bytes], None]
    ) -> None:
        self._key = key
        self._limit = limit
        self._size = size
        self._open = open_to_all
        self._send = send
        self._strangers: OrderedDict[bytes, _Stranger] = OrderedDict()
        self._notes: set[tuple[str, str]] = set()
        self.wrong_tokens = 0

    def receive(
        self, identity: bytes, frame: bytes, descriptor: int, address: str, same_host: Callable[[], bool]
    ) -> Admission | None:
        """Takes a frame of somebody not admitted yet; returns the admission when this frame completes it."""
        try:
            kind, body = decode(frame, limit=self._limit)
        except ProtocolError as error:
            self.note(address, f"it speaks {error}")
            self.refuse(identity, f"version mismatch: rank speaks control protocol {error.version}, not {PROTOCOL}")
            return None
        except FrameError as error:
            self.note(address, f"it sent something that is no control frame ({error})")
            return None
        if kind is Kind.HELLO:
            self._hello(identity, frame, body, address, same_host)
        elif kind is Kind.PROOF and identity in self._strangers:
            return self._proof(identity, body, descriptor, address, same_host())
        elif kind is Kind.GIVE_UP:
            self.wrong_tokens += 1
            self.note(address, "its job token differs from ours (HRDMA_TOKEN)")
        else:
            self.note(address, f"it sent {kind.name} before proving the job token")
        return None

    def refuse(self, identity: bytes, text: str, *, kind: str = "peer", rank: int = -1) -> None:
        """Tells a peer why it does not get in."""
        self._send(identity, encode(Kind.ABORT, {"kind": kind, "text": text, "rank": rank}, limit=self._limit))

    def note(self, address: str, reason: str) -> None:
        """Logs once that a stranger was dropped."""
        if (address, reason) not in self._notes and len(self._notes) < MAX_NOTES:
            self._notes.add((address, reason))
            logger.warning("control: dropped a peer at %s: %s", address or "an unknown address", reason)

    def _hello(
        self, identity: bytes, frame: bytes, body: dict[str, Any], address: str, same_host: Callable[[], bool]
    ) -> None:
        if type(body.get("rank")) is not int or not isinstance(body.get("nonce"), str):
            self.note(address, "its hello is malformed")
            return
        if not self._open and not same_host():
            self.note(address, "it is on another host and there is no job token")
            self.refuse(
                identity,
                "without a job token only ranks on the host of rank 0 are accepted: "
                f"set HRDMA_TOKEN on all ranks, or HRDMA_INSECURE=1 (this rank came from {address})",
            )
            return
        nonce = secrets.token_hex(16)
        self._strangers[identity] = _Stranger(frame, body, nonce)
        while len(self._strangers) > MAX_STRANGERS:
            self._strangers.popitem(last=False)
        answer = {"nonce": nonce, "proof": proof(self._key, "A", frame, nonce.encode())}
        self._send(identity, encode(Kind.CHALLENGE, answer, limit=self._limit))

    def _proof(
        self, identity: bytes, body: dict[str, Any], descriptor: int, address: str, same_host: bool
    ) -> Admission | None:
        stranger = self._strangers.pop(identity)
        theirs, text = body.get("proof"), body.get("private")
        if not isinstance(theirs, str) or not isinstance(text, str):
            self.note(address, "its proof is malformed")
            return None
        mine = proof(self._key, "C", stranger.hello, stranger.nonce.encode(), text.encode())
        if not hmac.compare_digest(mine.encode(), theirs.encode()):
            self.wrong_tokens += 1
            self.note(address, "its job token differs from ours (HRDMA_TOKEN)")
            return None
        try:
            private = json.loads(text)
        except (ValueError, RecursionError):
            private = None
        if not isinstance(private, dict):
            self.note(address, "its proof is malformed")
            return None
        return Admission(identity, descriptor, address, same_host, stranger.body["rank"], stranger.body, private)

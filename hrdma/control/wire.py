"""Frames of the control plane: encoding, strict decoding, and the proofs of the job token.

A frame is ``magic "HRCP" | protocol u8 | kind u8 | zero u16 | length u32`` (big endian) and then that many bytes of
JSON, an object; only behind an OBJECT more bytes may follow. Anything else is refused: another magic, kind or length, a
body that is not an object, trailing bytes. There is no pickle, so a frame can at worst carry wrong values, and those are checked where they are read.

The proofs authenticate a connection, not each frame, and nothing is encrypted: the token keeps strangers out of a job,
it does not hide the job from somebody who can read or rewrite its traffic.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from enum import IntEnum
from typing import Any

__all__ = ["PROTOCOL", "FrameError", "Kind", "ProtocolError", "decode", "encode", "frame_limit", "job_key", "proof"]

MAGIC = b"HRCP"
PROTOCOL = 3
HEADER = struct.Struct(">4sBBHI")
_DECODER = json.JSONDecoder()
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class Kind(IntEnum):
    """What a frame says. Up: member to coordinator. Down: coordinator to member."""

    HELLO = 1  #: up: who I am, and a nonce
    CHALLENGE = 2  #: down: proof of the token, and a nonce
    PROOF = 3  #: up: proof of the token, and what the coordinator must know of me
    WELCOME = 4  #: down: admitted; the answer to a takeover
    TABLE = 5  #: down: everybody is here
    ABORT = 6  #: down: the job cannot start, and why
    GIVE_UP = 7  #: up: my deadline has passed, or your proof is wrong
    EXPELLED = 8  #: down: you were counted as lost, the others went on
    LOST = 9  #: down: that rank is gone
    LEAVE = 10  #: up: I finish in good order
    BYE = 11  #: down: noted
    STALL = 12  #: up: I wait in this operation
    ASK = 13  #: down: where are you in this communicator
    WHERE = 14  #: down: who is where
    VERDICT = 15  #: down: these calls do not match
    AGREE = 16  #: up: my contribution
    WHO = 17  #: up: for whom are we waiting
    MISSING = 18  #: down: for these
    DECIDED = 19  #: down: the result of an agreement
    OBJECT = 20  #: between nodes and clients of hrdma.objects: the body's "verb" says what
    PROPOSE = 21  #: down: this agreement is complete; are you still mine
    CONFIRM = 22  #: up: I am


class FrameError(ValueError):
    """The bytes are not a frame."""


class ProtocolError(FrameError):
    """The bytes are a frame of another version of the protocol.

    Attributes
    ----------
    version : int
        The version that the sender speaks.
    """

    def __init__(self, version: int) -> None:
        super().__init__(f"control protocol {version}; this rank speaks {PROTOCOL}")
        self.version = version


def frame_limit(size: int) -> int:
    """Bytes of the longest frame in a world of this size: the table grows with it."""
    return (1 << 20) + (size << 13)


def encode(kind: Kind, body: dict[str, Any], *, limit: int, tail: bytes = b"") -> bytes:
    """Makes a frame. Only an OBJECT may have a tail.

    Raises
    ------
    ValueError
        The body does not fit into `limit` bytes, or JSON cannot express it.
    """
    data = _ENCODER.encode(body).encode()
    if HEADER.size + len(data) + len(tail) > limit:
        length = len(data) + len(tail)
        raise ValueError(f"control message of {length} bytes is above the limit of {limit - HEADER.size}")
    return HEADER.pack(MAGIC, PROTOCOL, kind, 0, len(data)) + data + tail


def decode(frame: bytes, *, limit: int) -> tuple[Kind, dict[str, Any]]:
    """Reads a frame. The body of an OBJECT has its tail under "tail".

    Raises
    ------
    FrameError
        The bytes are anything but one whole frame; `ProtocolError` when they are one of another version.
    """
    if len(frame) > limit:
        raise FrameError(f"{len(frame)} bytes, above the limit of {limit}")
    if len(frame) < HEADER.size:
        raise FrameError(f"{len(frame)} bytes, shorter than a header")
    magic, version, code, zero, length = HEADER.unpack_from(frame)
    if magic != MAGIC:
        raise FrameError("not a control frame")
    if version != PROTOCOL:
        raise ProtocolError(version)
    end = HEADER.size + length
    if zero or end > len(frame) or (end < len(frame) and code != Kind.OBJECT):
        raise FrameError("length does not match")
    try:
        kind = Kind(code)
        body = _DECODER.decode(str(frame[HEADER.size : end], "utf-8"))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"malformed: {type(error).__name__}") from None
    if not isinstance(body, dict):
        raise FrameError("body is not an object")
    if kind is Kind.OBJECT:
        body["tail"] = frame[end:]
    return kind, body


def job_key(token: str) -> bytes:
    """The key of the proofs: SHA-256 of the token; 32 zero bytes without one (as in ``hr/auth.h``)."""
    return hashlib.sha256(token.encode()).digest() if token else bytes(32)


def proof(key: bytes, side: str, *parts: bytes) -> str:
    """HMAC-SHA-256 over a side's name and length-prefixed parts, in hex: no two lists of parts sound the same."""
    mac = hmac.new(key, side.encode(), hashlib.sha256)
    for part in parts:
        mac.update(struct.pack(">I", len(part)) + part)
    return mac.hexdigest()

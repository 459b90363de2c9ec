"""Frames: what goes in comes out, and nothing else is taken."""

from __future__ import annotations

import json
import random

import pytest

from hrdma.control.trust import Caller, Gate, TokenError
from hrdma.control.wire import (
    HEADER,
    MAGIC,
    PROTOCOL,
    FrameError,
    Kind,
    ProtocolError,
    decode,
    encode,
    frame_limit,
    job_key,
    proof,
)

LIMIT = frame_limit(4)


def frame(body: bytes = b"{}", magic=MAGIC, version=PROTOCOL, kind=1, zero=0, length=None) -> bytes:
    return HEADER.pack(magic, version, kind, zero, len(body) if length is None else length) + body


def test_round_trip():
    for kind in Kind:
        body = {"a": [1, "ä"]} | ({"tail": b""} if kind is Kind.OBJECT else {})
        assert decode(encode(kind, {"a": [1, "ä"]}, limit=LIMIT), limit=LIMIT) == (kind, body)


def test_only_an_object_has_a_tail():
    frame = encode(Kind.OBJECT, {"tail": 5}, limit=LIMIT, tail=b"\0xy")
    assert decode(frame, limit=LIMIT) == (Kind.OBJECT, {"tail": b"\0xy"})
    with pytest.raises(FrameError, match="length"):
        decode(encode(Kind.LEAVE, {}, limit=LIMIT, tail=b"x"), limit=LIMIT)
    with pytest.raises(FrameError, match="length"):
        decode(encode(Kind.OBJECT, {"a": 1}, limit=LIMIT)[:-1], limit=LIMIT)
    with pytest.raises(ValueError, match="above the limit"):
        encode(Kind.OBJECT, {}, limit=LIMIT, tail=bytes(LIMIT))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HRCP",
        frame()[:-1],
        frame() + b" ",
        frame(magic=b"HRCQ"),
        frame(kind=0),
        frame(kind=200),
        frame(zero=1),
        frame(length=1 << 31),
        frame(b"[]"),
        frame(b"1"),
        frame(b"{"),
        frame(b"\xff\xfe"),
        frame(b"[" * 100000),
        frame(b"1" * 100000),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_anything_else_is_refused(data):
    with pytest.raises(FrameError):
        decode(data, limit=LIMIT)


def test_another_version_is_told_apart():
    with pytest.raises(ProtocolError) as caught:
        decode(frame(version=9), limit=LIMIT)
    assert caught.value.version == 9


def test_the_limit_holds_both_ways():
    with pytest.raises(ValueError, match="above the limit"):
        encode(Kind.HELLO, {"x": "y" * 100}, limit=100)
    with pytest.raises(FrameError, match="above the limit"):
        decode(frame(b'{"x":"' + b"y" * 100 + b'"}'), limit=100)
    with pytest.raises(ValueError):
        encode(Kind.HELLO, {"x": float("nan")}, limit=LIMIT)


def test_fuzzed_frames_are_refused_or_harmless():
    rng = random.Random(1)
    good = encode(Kind.PROOF, {"proof": "ab" * 32, "private": json.dumps({"card": {"pid": 1}})}, limit=LIMIT)
    taken = 0
    for _ in range(5000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        cut = bytes(data[: rng.randrange(len(data) + 1)]) if rng.random() < 0.3 else bytes(data)
        try:
            kind, body = decode(cut, limit=LIMIT)
        except FrameError:
            continue
        taken += 1
        assert isinstance(kind, Kind) and isinstance(body, dict)
    assert 0 < taken < 5000


def test_proofs_depend_on_every_part():
    key = job_key("t")
    known = proof(key, "A", b"hello", b"nonce")
    others = [
        proof(job_key("u"), "A", b"hello", b"nonce"),
        proof(key, "C", b"hello", b"nonce"),
        proof(key, "A", b"hellon", b"once"),
        proof(key, "A", b"hello", b"nonce", b""),
    ]
    assert known not in others and len(known) == 64
    assert job_key("") == bytes(32)


class Door:
    """A gate and what it answered."""

    def __init__(self, token: str = "t", *, open_to_all: bool = True) -> None:
        self.sent: list[tuple[bytes, bytes]] = []
        send = lambda identity, data: self.sent.append((identity, data))  # noqa: E731
        self.gate = Gate(job_key(token), LIMIT, 4, open_to_all=open_to_all, send=send)

    def give(self, data: bytes, *, near: bool = True):
        return self.gate.receive(b"peer", data, 9, "10.0.0.9", lambda: near)

    def answer(self) -> tuple[Kind, dict]:
        return decode(self.sent[-1][1], limit=LIMIT)


def caller(token: str = "t") -> Caller:
    return Caller(job_key(token), LIMIT, {"rank": 1, "purpose": "join"}, {"port": 5})


def test_handshake_admits_who_holds_the_token():
    door, mine = Door(), caller()
    assert door.give(mine.hello) is None
    kind, body = door.answer()
    assert kind is Kind.CHALLENGE
    peer = door.give(mine.answer(body))
    assert peer is not None and (peer.rank, peer.private, peer.descriptor) == (1, {"port": 5}, 9)


def test_a_wrong_token_is_found_out_on_both_sides(caplog):
    door, mine = Door("other"), caller()
    door.give(mine.hello)
    with pytest.raises(TokenError):
        mine.answer(door.answer()[1])
    door, mine = Door(), caller()
    door.give(mine.hello)
    forged = encode(Kind.PROOF, {"proof": "0" * 64, "private": "{}"}, limit=LIMIT)
    assert door.give(forged) is None and door.gate.wrong_tokens == 1
    assert door.give(mine.answer(door.answer()[1])) is None, "a challenge may be answered once"


def test_a_proof_does_not_fit_another_private_text():
    door, mine = Door(), caller()
    door.give(mine.hello)
    _, body = decode(mine.answer(door.answer()[1]), limit=LIMIT)
    body["private"] = '{"port":6}'
    assert door.give(encode(Kind.PROOF, body, limit=LIMIT)) is None


def test_without_a_token_only_this_host_passes():
    door = Door("", open_to_all=False)
    assert door.give(caller("").hello, near=False) is None
    kind, body = door.answer()
    assert kind is Kind.ABORT and "HRDMA_TOKEN" in body["text"] and "10.0.0.9" in body["text"]
    door.give(caller("").hello)
    assert door.answer()[0] is Kind.CHALLENGE


def test_each_reason_is_logged_once(caplog):
    door = Door()
    for _ in range(3):
        door.give(b"garbage")
        door.give(frame(version=7))
        door.give(encode(Kind.AGREE, {}, limit=LIMIT))
        door.give(encode(Kind.HELLO, {"rank": "1", "nonce": "x"}, limit=LIMIT))
    assert len(caplog.records) == 4
    kinds = {decode(data, limit=LIMIT)[1]["text"] for _, data in door.sent}
    assert kinds == {"version mismatch: rank speaks control protocol 7, not 3"}

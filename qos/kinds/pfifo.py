"""pfifo: a queue of so many packets."""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = ["KIND", "OPTION", "Pfifo", "decode", "encode", "explain"]

KIND = "pfifo"
OPTION = ("CONFIG_NET_SCH_FIFO", "it is part of every kernel with traffic control")


@dataclass(frozen=True)
class Pfifo:
    limit: int = 1000  #: packets


def encode(spec: Pfifo) -> bytes:
    return struct.pack("=I", spec.limit)


def decode(options: bytes) -> Pfifo:
    return Pfifo(*struct.unpack("=I", options))


def explain(spec: Pfifo) -> str:
    return f"limit {spec.limit}"

"""prio: bands served strictly in order, each with a qdisc of its own."""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = ["KIND", "OPTION", "Prio", "decode", "encode", "explain"]

KIND = "prio"
OPTION = ("CONFIG_NET_SCH_PRIO", "kind = 'htb' works with CONFIG_NET_SCH_HTB")
MOST_BANDS = 16


@dataclass(frozen=True)
class Prio:
    bands: int
    priomap: tuple[int, ...]  #: band of each of the 16 values of skb->priority, for what no filter knows


def encode(spec: Prio) -> bytes:
    return struct.pack("=i16B", spec.bands, *spec.priomap)


def decode(options: bytes) -> Prio:
    bands, *priomap = struct.unpack_from("=i16B", options)
    return Prio(bands, tuple(priomap))


def explain(spec: Prio) -> str:
    return f"bands {spec.bands} priomap {' '.join(map(str, spec.priomap))}"

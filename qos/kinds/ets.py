"""ets: the first bands strictly in order, the others in turns of so many bytes (enhanced transmission selection, IEEE 802.1Qaz)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from hrdma.qos.wire import NESTED, attribute, attributes, pairs

__all__ = ["KIND", "OPTION", "Ets", "decode", "encode", "explain"]

KIND = "ets"
OPTION = ("CONFIG_NET_SCH_ETS", "kind = 'htb' works with CONFIG_NET_SCH_HTB, kind = 'prio' with CONFIG_NET_SCH_PRIO")
MOST_BANDS = 16
BANDS, STRICT, QUANTA, QUANTUM, PRIOMAP, PRIORITY = range(1, 7)  # numbers of attributes


@dataclass(frozen=True)
class Ets:
    bands: int
    strict: int  #: how many of them, from the first, are served strictly
    quanta: tuple[int, ...]  #: bytes in a turn of each of the others
    priomap: tuple[int, ...]  #: band of each of the 16 values of skb->priority, for what no filter knows


def encode(spec: Ets) -> bytes:
    found = attribute(BANDS, bytes([spec.bands]))
    if spec.strict:
        found += attribute(STRICT, bytes([spec.strict]))
    if spec.quanta:
        quanta = (attribute(QUANTUM, struct.pack("=I", quantum)) for quantum in spec.quanta)
        found += attribute(QUANTA | NESTED, b"".join(quanta))
    if spec.priomap:
        bands = (attribute(PRIORITY, bytes([band])) for band in spec.priomap)
        found += attribute(PRIOMAP | NESTED, b"".join(bands))
    return found


def decode(data: bytes) -> Ets:
    attrs = attributes(data)
    # The kernel shows a quantum for every band that has turns, and nothing for the strict ones.
    quanta = tuple(struct.unpack("=I", value)[0] for _, value in pairs(attrs.get(QUANTA, b"")))
    priomap = tuple(value[0] for _, value in pairs(attrs.get(PRIOMAP, b"")))
    return Ets(attrs[BANDS][0], attrs.get(STRICT, b"\0")[0], quanta, priomap)


def explain(spec: Ets) -> str:
    words = f"bands {spec.bands} strict {spec.strict}" if spec.strict else f"bands {spec.bands}"
    words += f" quanta {' '.join(map(str, spec.quanta))}" if spec.quanta else ""
    return words + (f" priomap {' '.join(map(str, spec.priomap))}" if spec.priomap else "")

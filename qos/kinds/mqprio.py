"""mqprio: the transmit queues of a NIC divided among traffic classes; skb->priority says which class a packet has."""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = ["KIND", "OPTION", "Mqprio", "decode", "encode", "explain"]

KIND = "mqprio"
OPTION = (
    "CONFIG_NET_SCH_MQPRIO",
    "kind = 'htb' works with CONFIG_NET_SCH_HTB, on one lock for all queues",
)
QUEUES = 16


@dataclass(frozen=True)
class Mqprio:
    classes: int
    priomap: tuple[int, ...]  #: class of each of the 16 values of skb->priority
    counts: tuple[int, ...]  #: queues of each class
    offsets: tuple[int, ...]  #: first queue of each class
    hw: int = 1  #: 1: the NIC serves the classes in order; 0: it does not know of them


def encode(spec: Mqprio) -> bytes:
    padded = [*spec.priomap, *[0] * (QUEUES - len(spec.priomap))]
    counts, offsets = ([*values, *[0] * (QUEUES - len(values))] for values in (spec.counts, spec.offsets))
    return struct.pack("=B16BB16H16H", spec.classes, *padded, spec.hw, *counts, *offsets) + b"\0\0"


def decode(options: bytes) -> Mqprio:
    classes, *rest = struct.unpack_from("=B16BB16H16H", options)
    return Mqprio(classes, tuple(rest[:16]), tuple(rest[17 : 17 + classes]), tuple(rest[33 : 33 + classes]), rest[16])


def explain(spec: Mqprio) -> str:
    queues = " ".join(f"{count}@{offset}" for count, offset in zip(spec.counts, spec.offsets))
    return f"num_tc {spec.classes} map {' '.join(map(str, spec.priomap))} queues {queues} hw {spec.hw}"

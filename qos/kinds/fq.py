"""fq: a queue for each flow, served in turns, with the pacing that TCP asks for."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from hrdma.qos.wire import attribute, attributes

__all__ = ["KIND", "OPTION", "Fq", "decode", "encode", "explain"]

KIND = "fq"
OPTION = ("CONFIG_NET_SCH_FQ", "leaf = 'pfifo' works everywhere")
LIMIT, FLOW_LIMIT = 1, 2  # numbers of attributes
_NUMBER = struct.Struct("=I")


@dataclass(frozen=True)
class Fq:
    limit: int = 10_000  #: packets of all flows
    flow_limit: int = 1000  #: packets of one flow


def encode(spec: Fq) -> bytes:
    return attribute(LIMIT, _NUMBER.pack(spec.limit)) + attribute(FLOW_LIMIT, _NUMBER.pack(spec.flow_limit))


def decode(data: bytes) -> Fq:
    attrs = attributes(data)
    return Fq(*_NUMBER.unpack(attrs[LIMIT]), *_NUMBER.unpack(attrs[FLOW_LIMIT]))


def explain(spec: Fq) -> str:
    return f"limit {spec.limit} flow_limit {spec.flow_limit}"

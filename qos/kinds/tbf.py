"""tbf: a queue that lets no more than a rate through; here the first band of kinds that have no rates of their own."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from hrdma.qos.kinds.htb import ETHERNET, TICK, UINT32
from hrdma.qos.wire import attribute, attributes
from hrdma.units import rate_text

__all__ = ["KIND", "OPTION", "Tbf", "decode", "encode", "explain"]

KIND = "tbf"
OPTION = ("CONFIG_NET_SCH_TBF", "acks = 0 does without, and kind = 'htb' has rates of its own")
PARMS, RATE64 = 1, 4  # numbers of attributes
_PARMS = struct.Struct("=BBHhHI12xIII")  # tc_tbf_qopt, without the peak's rate
CELL = (3, ETHERNET, 0, -1, 0)  # as tc fills it in, of a table that the kernel does not want for Ethernet


@dataclass(frozen=True)
class Tbf:
    rate: int  #: bytes per second
    burst: int  #: ticks of 64 ns at `rate` that it may save up; a packet that takes longer is dropped
    limit: int  #: bytes that may wait


def encode(spec: Tbf) -> bytes:
    parms = attribute(PARMS, _PARMS.pack(*CELL, min(spec.rate, UINT32), spec.limit, spec.burst, 0))
    return parms + (attribute(RATE64, struct.pack("=Q", spec.rate)) if spec.rate > UINT32 else b"")


def decode(options: bytes) -> Tbf:
    attrs = attributes(options)
    rate, limit, burst, _ = _PARMS.unpack(attrs[PARMS])[len(CELL) :]
    return Tbf(struct.unpack("=Q", attrs[RATE64])[0] if RATE64 in attrs else rate, burst, limit)


def explain(spec: Tbf) -> str:
    return f"rate {rate_text(spec.rate)} burst {round(spec.burst * TICK * spec.rate)}b limit {spec.limit}b"

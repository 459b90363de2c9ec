"""HTB: the qdisc with its default class, and its classes with a rate, a ceiling and a place among their siblings.

What takes effect when on a class that has packets: its rate, ceiling, burst and quantum with the next packet; its `prio`
only when it next runs empty, since HTB keeps a busy class in the row it is in. And a class in debt stays in debt until the
time has passed that its last packets cost at the rate of then.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

from hrdma.qos.wire import attribute, attributes
from hrdma.units import rate_text

__all__ = ["KIND", "OPTION", "HtbClass", "HtbQdisc", "decode", "encode", "explain", "offloaded", "plain"]

KIND = "htb"
OPTION = ("CONFIG_NET_SCH_HTB", "kind = 'prio' works with CONFIG_NET_SCH_PRIO, without rates and rotation")
TICK = 64e-9  # seconds: PSCHED_TICKS2NS is a shift by 6
ETHERNET = 1  # TC_LINKLAYER_ETHERNET
UINT32 = (1 << 32) - 1
PARMS, INIT, RATE64, CEIL64, OFFLOAD = 1, 2, 6, 7, 9  # numbers of attributes
_INIT = struct.Struct("=5I")  # version, bytes of a rate for each of a turn, default, two that are shown
_PARMS = struct.Struct("=BBHhHI BBHhHI IIIII")  # rate and ceiling: CELL, ETHERNET, overhead, CELL, least packet, rate
CELL = (3, -1)  # as tc fills it in, of a table that the kernel does not want for Ethernet


@dataclass(frozen=True)
class HtbQdisc:
    default: int = 0  #: minor number of the class of what no filter knows; 0: straight to the device
    r2q: int = 10


@dataclass(frozen=True)
class HtbClass:
    rate: int  #: bytes per second that it may send whatever its siblings do
    ceil: int  #: bytes per second at most
    burst: int = 0  #: ticks of 64 ns at `rate` that it may save up
    cburst: int = 0  #: the same at `ceil`
    quantum: int = 0  #: bytes in a turn among equals
    prio: int = 0  #: row, 0 first
    overhead: int = 0  #: bytes that every packet costs beyond its length


@lru_cache(4096)
def encode(spec: HtbQdisc | HtbClass) -> bytes:
    if isinstance(spec, HtbQdisc):
        return attribute(INIT, _INIT.pack(3, spec.r2q, spec.default, 0, 0))
    found = b""
    for number, rate in ((RATE64, spec.rate), (CEIL64, spec.ceil)):
        if rate > UINT32:
            found += attribute(number, struct.pack("=Q", rate))
    log, align = CELL
    values: list[int] = []
    for rate in (spec.rate, spec.ceil):
        values += [log, ETHERNET, spec.overhead, align, 0, min(rate, UINT32)]
    return found + attribute(PARMS, _PARMS.pack(*values, spec.burst, spec.cburst, spec.quantum, 0, spec.prio))


def decode(options: bytes) -> HtbQdisc | HtbClass:
    attrs = attributes(options)
    if head := attrs.get(INIT):
        _, r2q, default, *_ = _INIT.unpack(head)
        return HtbQdisc(default, r2q)
    values = _PARMS.unpack(attrs[PARMS])
    rate, ceil = (
        struct.unpack("=Q", attrs[number])[0] if number in attrs else low
        for number, low in ((RATE64, values[5]), (CEIL64, values[11]))
    )
    burst, cburst, quantum, _, prio = values[12:]
    return HtbClass(rate, ceil, burst, cburst, quantum, prio, values[2])


def plain(options: bytes) -> bool:
    """Whether a class uses no more than `HtbClass` has."""
    _, layer, overhead, _, mpu, _, _, _, ceil_overhead, _, ceil_mpu, *_ = _PARMS.unpack(attributes(options)[PARMS])
    return layer == ETHERNET and overhead == ceil_overhead and not (mpu or ceil_mpu)


def offloaded(options: bytes) -> bool:
    return OFFLOAD in attributes(options)


def explain(spec: HtbQdisc | HtbClass) -> str:
    if isinstance(spec, HtbQdisc):
        return f"default {spec.default:x}" + (f" r2q {spec.r2q}" if spec.r2q != 10 else "")
    words = f"rate {rate_text(spec.rate)} ceil {rate_text(spec.ceil)}"
    for name, ticks, rate in (("burst", spec.burst, spec.rate), ("cburst", spec.cburst, spec.ceil)):
        words += f" {name} {round(ticks * TICK * rate)}b"
    words += f" overhead {spec.overhead}" if spec.overhead else ""
    return f"{words} quantum {spec.quantum} prio {spec.prio}"

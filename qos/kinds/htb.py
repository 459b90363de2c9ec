"""HTB: the qdisc with its default class, and its classes with a rate, a ceiling and a place among their siblings.

What takes effect when on a class that has packets: its rate, ceiling, burst and quantum with the next packet; its `prio`
only when it next runs empty, since HTB keeps a busy class in the row it is in. And a class in debt stays in debt until the
time has passed that its last packets cost at the rate of then.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from pyroute2.netlink.rtnl.tcmsg import sched_htb

from hrdma.qos.units import rate_text
from hrdma.qos.wire import pack, unpack

__all__ = ["KIND", "OPTION", "HtbClass", "HtbQdisc", "decode", "encode", "explain"]

KIND = "htb"
OPTION = ("CONFIG_NET_SCH_HTB", "kind = 'prio' works with CONFIG_NET_SCH_PRIO, without rates and rotation")
TICK = 64e-9  # seconds: PSCHED_TICKS2NS is a shift by 6
ETHERNET = 1  # TC_LINKLAYER_ETHERNET, in the byte that pyroute2 calls reserved
UINT32 = (1 << 32) - 1


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
        head = {"version": 3, "rate2quantum": spec.r2q, "defcls": spec.default, "debug": 0, "direct_pkts": 0}
        return pack(sched_htb.options, [("TCA_HTB_INIT", head)])
    parms = {
        "rate": min(spec.rate, UINT32), "rate_overhead": spec.overhead, "rate___reserved": ETHERNET,
        "ceil": min(spec.ceil, UINT32), "ceil_overhead": spec.overhead, "ceil___reserved": ETHERNET,
        "buffer": spec.burst, "cbuffer": spec.cburst, "quantum": spec.quantum, "prio": spec.prio,
    }  # fmt: skip
    attrs: list[tuple[str, object]] = []
    if spec.rate > UINT32:
        attrs.append(("TCA_HTB_RATE64", spec.rate))
    if spec.ceil > UINT32:
        attrs.append(("TCA_HTB_CEIL64", spec.ceil))
    return pack(sched_htb.options, [*attrs, ("TCA_HTB_PARMS", parms)])


def decode(options: bytes) -> HtbQdisc | HtbClass:
    attrs = unpack(sched_htb.options, options)
    if head := attrs.get("TCA_HTB_INIT"):
        return HtbQdisc(head["defcls"], head["rate2quantum"])
    parms = attrs["TCA_HTB_PARMS"]
    return HtbClass(
        attrs.get("TCA_HTB_RATE64", parms["rate"]), attrs.get("TCA_HTB_CEIL64", parms["ceil"]),
        parms["buffer"], parms["cbuffer"], parms["quantum"], parms["prio"], parms["rate_overhead"],
    )  # fmt: skip


def offloaded(options: bytes) -> bool:
    return "TCA_HTB_OFFLOAD" in unpack(sched_htb.options, options)


def explain(spec: HtbQdisc | HtbClass) -> str:
    if isinstance(spec, HtbQdisc):
        return f"default {spec.default:x}" + (f" r2q {spec.r2q}" if spec.r2q != 10 else "")
    words = f"rate {rate_text(spec.rate)} ceil {rate_text(spec.ceil)}"
    for name, ticks, rate in (("burst", spec.burst, spec.rate), ("cburst", spec.cburst, spec.ceil)):
        words += f" {name} {round(ticks * TICK * rate)}b"
    words += f" overhead {spec.overhead}" if spec.overhead else ""
    return f"{words} quantum {spec.quantum} prio {spec.prio}"

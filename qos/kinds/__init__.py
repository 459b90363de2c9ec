"""One module per kind of qdisc or filter: how its options become bytes, and how tc would write them.

Every module has the same names:

    KIND                what the kernel calls it
    OPTION              the kernel option (CONFIG_...) that brings it, and what works without it
    encode(spec)        options as the kernel takes them, without the header of TCA_OPTIONS
    decode(options)     the spec of what the kernel shows
    explain(spec)       the words of a tc command

A spec is a frozen dataclass of the module (two for HTB: the qdisc, and a class). To add a kind: a module, and its name here.
"""

from __future__ import annotations

from types import ModuleType

from hrdma.qos.kinds import ets, flower, fq, htb, mqprio, pfifo, prio, tbf, u32

__all__ = ["TABLE", "missing"]

TABLE: dict[str, ModuleType] = {module.KIND: module for module in (ets, flower, fq, htb, mqprio, pfifo, prio, tbf, u32)}


def missing(kind: str) -> str:
    """What to say where this kernel does not have a kind."""
    option, instead = TABLE[kind].OPTION if kind in TABLE else (f"CONFIG_NET_SCH_{kind.upper()}", "")
    text = f"this kernel does not have {kind} ({option} is not set, or its module is not installed)"
    return f"{text}; {instead}" if instead else text

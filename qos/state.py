"""What is on a device now: its traffic control as objects, its counters, and whether all of it could be put back.

Counters and numbers that the kernel hands out by itself are left out, so that two states can be compared.
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache

from hrdma.qos import dcb
from hrdma.qos.kinds import TABLE, htb, u32
from hrdma.qos.objects import INGRESS, ROOT, Dcb, Filter, Link, Object, Qdisc, TClass, handle_text
from hrdma.qos.wire import Entry, Wire, attribute, attributes

__all__ = ["Counter", "State", "chosen", "counters", "differences", "link_rate", "read", "same", "unrecreatable"]

# Kinds whose options a dump shows in the form in which they are asked for.
QDISCS = ("bfifo", "ets", "fq", "fq_codel", "htb", "mq", "pfifo", "pfifo_head_drop", "prio", "sfq", "tbf")
LEAVES = ("bfifo", "pfifo", "pfifo_head_drop")  # have neither classes nor filters
TCA_KIND, TCA_OPTIONS, TCA_STATS2, TCA_STAB = 1, 2, 7, 8
TCA_CHAIN, TCA_HW_OFFLOAD, TCA_INGRESS_BLOCK, TCA_EGRESS_BLOCK = 11, 12, 13, 14
STATS_BASIC, STATS_RATE_EST, STATS_QUEUE, STATS_RATE_EST64 = 1, 2, 3, 5
ROOT_TABLE = struct.pack("=I", 0x80000000)  # of the first u32 filter; others follow in steps of 1 << 20
ONE = struct.pack("=I", 1)
ETHTOOL_GSET, SIOCETHTOOL = 0x1, 0x8946


@dataclass(frozen=True)
class State:
    """A device's traffic control, without the counters."""

    dev: str
    index: int
    loopback: bool
    queues: int  #: for transmission
    objects: tuple[Object, ...]  #: parents first
    dcb: Dcb | None = None  #: its own priorities, where it has any


@dataclass(frozen=True)
class Counter:
    """Of a class or qdisc, since it was made."""

    nbytes: int = 0
    packets: int = 0
    drops: int = 0
    backlog: int = 0  #: bytes that wait

    def __add__(self, other: Counter) -> Counter:
        return Counter(*(one + two for one, two in zip(astuple(self), astuple(other))))


def read(wire: Wire, dev: str, every_class: bool = False) -> State:
    """Dumps a device's qdiscs, classes and filters.

    Parameters
    ----------
    every_class : bool, optional
        Ask for filters below every class too, as a tree that is to be put back needs; one request for each.

    Raises
    ------
    DeviceError
        There is no such device.
    """
    index, flags, queues = wire.link(dev)
    qdiscs = [_qdisc(dev, entry) for entry in wire.dump("qdisc", index)]
    classes = [_class(dev, entry) for entry in wire.dump("class", index)]
    ours = [qdisc for qdisc in qdiscs if qdisc.handle and qdisc.kind not in LEAVES]
    parents = [qdisc.handle for qdisc in ours]
    if any(qdisc.parent == INGRESS and qdisc.kind == "clsact" for qdisc in ours):
        parents += [INGRESS & 0xFFFF0000 | minor for minor in (0xFFF2, 0xFFF3)]
    if every_class:
        parents += [entry.handle for entry in classes]
    filters = [filter for parent in parents for filter in _filters(wire, dev, index, parent)]
    objects = [*_parents_first([*qdiscs, *classes]), *dict.fromkeys(filters)]
    return State(dev, index, bool(flags & 8), queues, tuple(objects), dcb.read(wire, dev))


def _kind(entry: Entry) -> str:
    return entry.attrs.get(TCA_KIND, b"").rstrip(b"\0").decode()


def _extras(entry: Entry) -> tuple[str, ...]:
    found = ["size table"] if TCA_STAB in entry.attrs else []
    stats = attributes(entry.attrs.get(TCA_STATS2, b""))
    return tuple([*found, "rate estimator"] if {STATS_RATE_EST, STATS_RATE_EST64} & stats.keys() else found)


def _qdisc(dev: str, entry: Entry) -> Qdisc:
    kind, options = _kind(entry), entry.attrs.get(TCA_OPTIONS, b"")
    offloaded = bool(entry.number(TCA_HW_OFFLOAD)) or (kind == "htb" and htb.offloaded(options))
    if kind == "htb":  # the head counts packets, and tells its version in another form than it takes it
        start = options.find(struct.pack("=HH", 24, 2)) + 4
        version = struct.unpack_from("=I", options, start)[0] >> 16 or 3
        options = (
            options[:start]
            + struct.pack("=I", version)
            + options[start + 4 : start + 16]
            + bytes(4)
            + options[start + 20 :]
        )
    blocks = (entry.number(TCA_INGRESS_BLOCK), entry.number(TCA_EGRESS_BLOCK))
    return Qdisc(dev, kind, entry.handle, entry.parent, options, blocks, offloaded, _extras(entry))


def _class(dev: str, entry: Entry) -> TClass:
    kind, options = _kind(entry), entry.attrs.get(TCA_OPTIONS, b"")
    # A class at the top names ROOT as its parent in a dump, and takes its qdisc's handle.
    parent = entry.handle & 0xFFFF0000 if entry.parent == ROOT else entry.parent
    return TClass(dev, kind, entry.handle, parent, _levelless(options) if kind == "htb" else options, _extras(entry))


@lru_cache(4096)
def _levelless(options: bytes) -> bytes:
    """An HTB class without its level, which is told, never taken; as it is where it uses more than HtbClass has."""
    return htb.encode(htb.decode(options)) if htb.plain(options) else options


def _filters(wire: Wire, dev: str, index: int, parent: int) -> list[Filter]:
    found = []
    for entry in wire.dump("filter", index, parent):
        if entry.handle == 0 or entry.parent != parent:
            continue
        kind, handle, options = _kind(entry), entry.handle, entry.attrs.get(TCA_OPTIONS, b"")
        if kind == "u32":
            attrs = attributes(options)
            if u32.SEL not in attrs and handle & 0xFFFFF == 0 and attrs.get(u32.DIVISOR, ONE) == ONE:
                continue  # the table that each pref has
            in_root = attrs.get(u32.HASH, ROOT_TABLE)[3] == ROOT_TABLE[3] and u32.LINK not in attrs
            if u32.SEL in attrs and in_root:
                kept = ((number, value) for number, value in sorted(attrs.items()) if number not in u32.COUNTED)
                handle, options = 0, b"".join(attribute(number, value) for number, value in kept)
        pref, protocol = entry.info >> 16, socket.ntohs(entry.info & 0xFFFF)
        found.append(Filter(dev, kind, parent, pref, protocol, handle, options, entry.number(TCA_CHAIN)))
    return found


def _parents_first(things: Sequence[Qdisc | TClass]) -> list[Qdisc | TClass]:
    """A qdisc before its classes, a class before what hangs below it."""
    parents = {thing.handle: thing.parent for thing in things if thing.handle}

    def depth(thing: Qdisc | TClass) -> int:
        above, steps = thing.parent, 0
        while above in parents and steps < len(parents):  # a ring would be a kernel that speaks in riddles
            above, steps = parents[above], steps + 1
        return steps

    return sorted(things, key=depth)


def counters(wire: Wire, dev: str) -> dict[int, Counter]:
    """Counters of every class of a device, by handle; one dump."""
    found = {}
    for entry in wire.dump("class", wire.ifindex(dev)):
        stats = attributes(entry.attrs.get(TCA_STATS2, b""))
        nbytes, packets = struct.unpack_from("=QI", stats.get(STATS_BASIC, bytes(12)))
        _, backlog, drops = struct.unpack_from("=III", stats.get(STATS_QUEUE, bytes(12)))
        found[entry.handle] = Counter(nbytes, packets, drops, backlog)
    return found


def unrecreatable(objects: Sequence[Object]) -> list[str]:
    """What of a foreign tree a dump does not say enough about to put it back."""
    found = []
    for thing in objects:
        name = "" if isinstance(thing, Link) else f"{thing.kind} {handle_text(getattr(thing, 'handle', 0))}"
        if isinstance(thing, (Qdisc, TClass)) and thing.handle:
            found += [f"{extra} of {name}" for extra in thing.extras]
        if isinstance(thing, Qdisc) and thing.handle:
            if thing.kind not in QDISCS:
                found.append(f"qdisc {name}")
            if any(thing.blocks):
                found.append(f"shared filter block {max(thing.blocks)} of qdisc {name}")
            if thing.offloaded:
                found.append(f"hardware offload of qdisc {name}")
        if isinstance(thing, Filter):
            place = f"filter {thing.kind} pref {thing.pref} of {handle_text(thing.parent)}"
            if thing.kind != "u32":
                found.append(place)
            elif thing.handle:
                found.append(f"{place}, which uses hash tables")
            elif u32.has_actions(thing.options):
                found.append(f"{place}, which has actions")
    return found


def differences(before: Sequence[Object], after: Sequence[Object]) -> list[str]:
    """What is in one of two states and not in the other, as text; empty when they are the same."""
    return [f"missing: {thing}" for thing in before if thing not in after] + [
        f"more: {thing}" for thing in after if thing not in before
    ]


def chosen(objects: Sequence[Object]) -> tuple[Object, ...]:
    """Without the qdiscs that the kernel makes by itself."""
    return tuple(thing for thing in objects if not isinstance(thing, Qdisc) or thing.handle)


def link_rate(dev: str) -> int:
    """Bytes per second of a device's link as its driver says, 0 where it says nothing."""
    answer = array.array("B", struct.pack("=I", ETHTOOL_GSET) + bytes(44))
    request = struct.pack("16sP16x", dev.encode(), answer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            fcntl.ioctl(sock, SIOCETHTOOL, request)
        except OSError:  # the driver knows no speed
            return 0
    low, high = struct.unpack_from("=H", answer, 12)[0], struct.unpack_from("=H", answer, 28)[0]
    megabits = high << 16 | low
    return 0 if megabits in (0, 0xFFFF, 0xFFFFFFFF) else megabits * 125_000


def same(one: Qdisc | TClass | Filter, other: Qdisc | TClass | Filter) -> bool:
    """Whether two objects at one place are of one kind and say the same."""
    if one.kind != other.kind:
        return False
    if one.options == other.options or one.kind not in TABLE or not (one.options and other.options):
        return one.options == other.options
    return _decoded(one.kind, one.options) == _decoded(other.kind, other.options)


@lru_cache(4096)
def _decoded(kind: str, options: bytes) -> object:
    return TABLE[kind].decode(options)

"""Long vectors in slices, one behind the other; and bounce buffers: what is sent leaves by way of scratch.

Where ranks share cores the kernel's copies between processes cost more than copies within one. A vector that is too long to
be copied as a whole and stay in the caches is cut: each slice is a vector of its own, and uses the scratch of an earlier one.
Two ranks with a core each copy nothing to scratch. But in an allreduce each sends what it has summed, and that its cache still
has if it is short.

Why the programs are right: a slice has the program of a shorter vector, which is proved. `bounced` adds copies within a rank,
and lets nothing wait for a message that did not before. `joined` lets a slice wait for earlier ones of the same rank, so by
induction over slices none waits for ever. Who bounces meets who does not. `hrdma.topo.verify` proves any set of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hrdma.topo.cells import up
from hrdma.topo.cost import Cost
from hrdma.topo.program import (
    BUF_BORROWED,
    BUF_TMP,
    COPY,
    INSTR,
    MESSAGE,
    NOP,
    NT,
    REDUCE,
    REF,
    RETURNS,
    SEND,
    ProgramSpec,
)

__all__ = ["Slicing", "bounced", "joined", "lengths", "slicing"]

_TAGS = 1 << 16  # of a slice; the core takes 2^24
_FIELDS = INSTR.names or ()


@dataclass(frozen=True)
class Slicing:
    """How a vector is cut."""

    nbytes: int  #: of a slice, of all ranks together, about
    bounces: bool = False  #: what is sent leaves by way of scratch
    ahead: int = 1  #: slices that are under way at once
    least: int = 0  #: bytes of a vector
    most: int = 1 << 62


_SHARED = Slicing(8 << 20, bounces=True)  # a cache has room for a slice of all ranks and their copies
_APART = Slicing(1 << 20)  # a half is one message, and stays with who sums it
_STREAMS = Slicing(2 << 20, ahead=2, least=(2 << 20) + 1, most=32 << 20)  # the kernel copies, while others wait


def slicing(collective: str, size: int, nbytes: int, cost: Cost, mapped: bool) -> Slicing | None:
    """How a vector of so many bytes is cut, for ranks of one host whose memory peers cannot map.

    mapped: of others they could, so they have to know what all of them have. Such vectors have bounds of their own
    (`SLICED_LEAST`, `APART_LEAST` in cython/bind).
    """
    if not cost.cores or cost.offload:
        return None
    if cost.crowd(size) > 1:
        return _SHARED if mapped and size > 2 and _SHARED.nbytes // size**2 >= MESSAGE else None
    way = _APART if mapped else _STREAMS
    return way if size == 2 and collective == "allreduce" and way.least <= nbytes <= way.most else None


def lengths(count: int, itemsize: int, size: int, nbytes: int) -> list[int]:
    """Elements of each slice of a vector that `size` ranks have, of some `nbytes` of all: all but the last alike, whole pages."""
    slices = max(1, round(size * count * itemsize / nbytes))
    each = max(1, up(-(-count * itemsize // slices)) // itemsize)
    full, rest = divmod(count, each)
    return [each] * full + [rest] * (rest > 0)


def bounced(spec: ProgramSpec, least: int = MESSAGE) -> ProgramSpec:
    """The same, but so many bytes or more of IN and OUT are copied to scratch, and sent from there: peers can map it.

    The result of a REDUCE that is sent is made there, and copied to its place. What was sent is not written back by peers: they
    send it. Other ranks need not do the same.
    """
    old = [dict(zip(_FIELDS, row)) for row in spec.instrs.tolist()]
    waits = [frozenset(others) for others in spec.waits()]
    made = {(i["dst_buf"], i["dst_off"], i["len"]): k for k, i in enumerate(old) if i["op"] == REDUCE}
    leaving: dict[int, int | None] = {}  # what is sent -> the REDUCE that makes it, if one does
    for k, i in enumerate(old):
        if i["op"] == SEND and i["src_buf"] != BUF_TMP and i["len"] >= least:
            result = made.get((i["src_buf"], i["src_off"], i["len"]))
            leaving[k] = result if waits[k] == {result} else None
    results = {*leaving.values()}
    new: list[dict[str, Any]] = []
    after: list[set[int]] = []
    place: list[int] = []  # by instruction: where it is now
    copied: dict[int, int] = {}  # instruction -> the copy of what it sends, or to where what it makes belongs
    rooms: dict[Any, tuple[int, int]] = {}  # what is sent, and after what: who puts it in scratch, and where
    tmp = up(spec.tmp_bytes)

    def add(instr: dict[str, Any], others: set[int]) -> int:
        new.append(instr)
        after.append(others)
        return len(new) - 1

    def copy(i: dict[str, Any], others: set[int], **where: int) -> int:
        row = dict.fromkeys(_FIELDS, 0) | {
            name: i[name] for name in ("len", "dst_buf", "dst_off", "src_buf", "src_off")
        }
        return add(row | {"op": COPY, "peer": -1} | where, others)

    for k, i in enumerate(old):
        others = {copied.get(other, place[other]) for other in waits[k]}
        if k in leaving:
            result = leaving[k]
            what = (i["src_buf"], i["src_off"], i["len"], waits[k]) if result is None else result
            if what not in rooms:
                rooms[what] = copy(i, others, dst_buf=BUF_TMP, dst_off=tmp), tmp
                tmp = up(tmp + i["len"])
            ready, offset = rooms[what]
            copied[k] = ready if result is None else copied[result]
            flags = i["flags"] & ~RETURNS if result is None else i["flags"]
            place.append(add(i | {"src_buf": BUF_TMP, "src_off": offset, "flags": flags}, {ready}))
        elif k in results:
            here = {"dst_buf": BUF_TMP, "dst_off": tmp}
            place.append(add(i | here | {"flags": i["flags"] & ~NT}, others))
            rooms[k] = place[k], tmp
            copied[k] = copy(i, {place[k]}, src_buf=BUF_TMP, src_off=tmp)
            tmp = up(tmp + i["len"])
        else:
            place.append(add(i, others))
    refs = spec.refs.copy()
    borrowed = refs["buf"] == BUF_BORROWED
    refs["off"][borrowed] = [place[k] for k in refs["off"][borrowed].tolist()]
    for i in new:
        if i["flags"] & RETURNS and leaving.get(i["ref"], i) is not i:
            i["flags"] &= ~RETURNS
        if i["flags"] & RETURNS:
            i["ref"] = place[i["ref"]]
        elif i["op"] != REDUCE:
            i["ref"] = 0
    instrs = np.array([tuple(i.values()) for i in new], INSTR)
    return replace(spec, instrs=instrs, unlocks=_order(instrs, after), refs=refs, tmp_bytes=tmp)


def joined(slices: Sequence[ProgramSpec], ahead: int = 1) -> ProgramSpec:
    """Programs of consecutive slices of one vector as one: so many are under way at once; each uses the scratch of one that has ended."""
    whole = np.zeros(sum(len(spec.instrs) + 1 for spec in slices), INSTR)
    refs = np.zeros(sum(len(spec.refs) for spec in slices), REF)
    after: list[set[int]] = []
    offset = base = operands = 0
    ends: list[int] = []
    tmp = up(max(spec.tmp_bytes for spec in slices))
    for number, spec in enumerate(slices):
        scratch = number % ahead * tmp
        own, rows = refs[operands : operands + len(spec.refs)], whole[base : base + len(spec.instrs)]
        own[:], rows[:] = spec.refs, spec.instrs
        for buf in ("dst", "src"):
            rows[buf + "_off"] += np.where(rows[buf + "_buf"] == BUF_TMP, scratch, offset).astype("u8")
        rows["tag"] += number * _TAGS
        rows["ref"] += np.where(rows["flags"] & RETURNS, base, operands).astype("u4")
        elsewhere = np.where(own["buf"] == BUF_TMP, scratch, offset)
        own["off"] += np.where(own["buf"] == BUF_BORROWED, base, elsewhere).astype("u8")
        before = {ends[number - ahead]} if number >= ahead else set()
        after += [{base + other for other in others} or before for others in spec.waits()]
        after.append(set((base + np.flatnonzero(rows["nunlock"] == 0)).tolist()))
        base, operands = base + len(rows) + 1, operands + len(own)
        whole["op"][base - 1], whole["peer"][base - 1] = NOP, -1
        ends.append(base - 1)
        offset += max(spec.in_bytes, spec.out_bytes)
    return replace(
        slices[0],
        instrs=whole,
        unlocks=_order(whole, after),
        refs=refs,
        in_bytes=sum(spec.in_bytes for spec in slices),
        out_bytes=sum(spec.out_bytes for spec in slices),
        tmp_bytes=ahead * tmp,
    )


def _order(instrs: np.ndarray, after: list[set[int]]) -> np.ndarray:
    """Writes into instructions how many they wait for and whom they unlock; returns the list of those."""
    unlocks: list[list[int]] = [[] for _ in instrs]
    for index, others in enumerate(after):
        for other in others:
            unlocks[other].append(index)
    instrs["after"] = [len(others) for others in after]
    instrs["nunlock"] = numbers = [len(others) for others in unlocks]
    instrs["unlock"] = np.cumsum([0, *numbers])[:-1]
    return np.array([index for others in unlocks for index in others], np.uint32)

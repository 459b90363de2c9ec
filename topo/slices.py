"""Long vectors in slices, one behind the other; and on copies, where peers cannot map them.

Where ranks share cores the kernel's copies between processes cost more than copies within one. A vector that is too long to
be copied as a whole and stay in the caches is cut: each slice is a short allreduce of a copy in scratch, of which the next one
has the same. A store to a line that another core has read is slow, one to a line that it has written is not: so peers write
the result back to each other's copies, also of a reduce, where only the root takes it from there.
Two ranks with a core each copy nothing to scratch. But in an allreduce each sends what it has summed, and that its cache still
has if it is short.

Why the programs are right: a slice has the program of a shorter vector, which is proved. `copied` adds copies within a rank,
before and after, so nothing waits for a message that did not before. `joined` lets a slice wait for earlier ones of the same
rank, so by induction over slices none waits for ever. Who copies meets who does not. `hrdma.topo.verify` proves any set of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hrdma.topo.cells import up
from hrdma.topo.cost import Cost
from hrdma.topo.program import (
    BUF_BORROWED,
    BUF_OUT,
    BUF_TMP,
    COPY,
    INSTR,
    NOP,
    NT,
    RECV,
    RECV_REDUCE,
    REDUCE,
    REF,
    RETURNS,
    ProgramSpec,
)

__all__ = ["Slicing", "copied", "joined", "lengths", "slicing"]

_TAGS = 1 << 16  # of a slice; the core takes 2^24
_MOST = 15  # ranks whose slices a cache has room for


@dataclass(frozen=True)
class Slicing:
    """How a vector is cut."""

    nbytes: int  #: of a slice, about
    copies: bool = False  #: each is worked on in scratch
    ahead: int = 1  #: slices that are under way at once
    least: int = 0  #: bytes of a vector
    most: int = 1 << 62


_SHARED = Slicing(1 << 20, copies=True)  # a cache has room for those of all ranks and their copies
_APART = Slicing(512 << 10)  # a half is one message, and stays with who sums it
_STREAMS = Slicing(1 << 20, ahead=2, least=(2 << 20) + 1, most=32 << 20)  # the kernel copies, while others wait


def slicing(collective: str, size: int, nbytes: int, cost: Cost, mapped: bool) -> Slicing | None:
    """How a vector of so many bytes is cut, for ranks of one host whose memory peers cannot map.

    mapped: of others they could, so they have to know what all of them have. Such vectors have bounds of their own
    (`SLICED_LEAST`, `APART_LEAST` in cython/bind).
    """
    if not cost.cores or cost.offload:
        return None
    if cost.crowd(size) > 1:
        return _SHARED if mapped and 2 < size <= _MOST and collective in ("allreduce", "reduce") else None
    way = _APART if mapped else _STREAMS
    return way if size == 2 and collective == "allreduce" and way.least <= nbytes <= way.most else None


def lengths(count: int, itemsize: int, nbytes: int) -> list[int]:
    """Elements of each slice of a vector, of some `nbytes`: all but the last alike, whole pages."""
    slices = max(1, round(count * itemsize / nbytes))
    each = max(1, up(-(-count * itemsize // slices)) // itemsize)
    full, rest = divmod(count, each)
    return [each] * full + [rest] * (rest > 0)


def copied(spec: ProgramSpec, in_place: bool, out: bool = True) -> ProgramSpec:
    """The program of a vector, in place, on a copy in scratch, which peers can map and write to.

    All of it is copied there before anything is sent, and the result to the caller's output, which is the input as well if it
    is `in_place`; not `out`: nothing is. Other ranks need not do the same.
    """
    at = up(spec.tmp_bytes)
    whole, refs = np.zeros(len(spec.instrs) + 2, INSTR), spec.refs.copy()
    whole["peer"] = -1
    whole[["op", "len", "dst_buf", "dst_off"]][0] = COPY, spec.in_bytes, BUF_TMP, at
    out_bytes = spec.out_bytes if out else 0
    result = (COPY, out_bytes, BUF_TMP, at, BUF_OUT) if out_bytes else (NOP, 0, 0, 0, 0)
    whole[["op", "len", "src_buf", "src_off", "dst_buf"]][-1] = result
    rows = whole[1:-1]
    rows[:] = spec.instrs
    for buf in ("dst", "src"):
        rows[buf + "_off"] += np.where(rows[buf + "_buf"] == BUF_TMP, 0, at).astype("u8")
        rows[buf + "_buf"] = BUF_TMP
    rows["ref"] += (rows["flags"] & RETURNS > 0).astype("u4")
    rows["flags"] &= ~np.uint16(NT)  # it is copied at once
    borrowed = refs["buf"] == BUF_BORROWED
    refs["off"] += np.where(borrowed, 1, np.where(refs["buf"] == BUF_TMP, 0, at)).astype("u8")
    refs["buf"][~borrowed] = BUF_TMP
    written = np.isin(rows["op"], (RECV, RECV_REDUCE, REDUCE)) & (rows["dst_off"] >= at)
    last = np.flatnonzero(written | (rows["nunlock"] == 0)) + 1  # what only an answer waits for need not be there
    after = [set(), *({other + 1 for other in others} or {0} for others in spec.waits()), set(last.tolist())]
    return replace(
        spec,
        instrs=whole,
        unlocks=_order(whole, after),
        refs=refs,
        out_bytes=out_bytes,
        tmp_bytes=up(at + spec.in_bytes),
        alias=0 if in_place and out_bytes else None,
    )


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

"""Long vectors in slices, one behind the other; and on copies, where peers cannot map them.

Where ranks share cores the kernel's copies between processes cost more than copies within one. So an allreduce is one of a
copy in scratch, and a vector whose copy would leave the caches is cut: each slice has the scratch of the one before. A store
to a line that another core has read is slow, one to a line that it has written is not: so peers write the result back to
each other's copies, also of a reduce, where only the root takes it from there.
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

from hrdma.topo.answers import apart
from hrdma.topo.cells import up
from hrdma.topo.cost import Cost
from hrdma.topo.program import (
    BORROW,
    BUF_BORROWED,
    BUF_IN,
    BUF_OUT,
    BUF_TMP,
    COPY,
    INSTR,
    NOP,
    NT,
    REDUCE,
    REF,
    RETURNS,
    SEND,
    ProgramSpec,
    accesses,
)

__all__ = ["Slicing", "copied", "joined", "lengths", "slicing"]

_FIELDS = INSTR.names or ()
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
    (`COPIED_LEAST` and those below it in cython/bind).
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
    """The program of an allreduce, in place, on a copy in scratch, which peers can map and write to.

    All is copied there before anything is sent, and the result to the caller's output, which is the input as well if it is
    `in_place`; not `out`: nothing is. But what only this rank sums stays where it is: peers write to it as little as they read it.
    Other ranks need not do the same.
    """
    own = _summed_here(spec)
    edges = [0, *(edge for place in own.values() for edge in place), spec.in_bytes]
    gaps = [(begin, end) for begin, end in zip(edges[::2], edges[1::2]) if begin < end]
    at, n = up(spec.tmp_bytes), len(gaps)
    waits, refs = spec.waits(), [tuple(ref) for ref in spec.refs.tolist()]
    copies = range(n)
    new: list[dict[str, int]] = []
    after: list[set[int]] = []

    def copy(begin: int, end: int, **where: int) -> dict[str, int]:
        return dict.fromkeys(_FIELDS, 0) | {"op": COPY, "peer": -1, "len": end - begin} | where

    for begin, end in gaps:
        new.append(copy(begin, end, src_buf=BUF_IN, src_off=begin, dst_buf=BUF_TMP, dst_off=at + begin))
        after.append(set())
    for k, row in enumerate(spec.instrs.tolist()):
        i = dict(zip(_FIELDS, row))
        stays = out and (k in own or (i["op"] == SEND and not own.keys().isdisjoint(waits[k])))
        for buf, off in (("dst_buf", "dst_off"), ("src_buf", "src_off")):
            if i[buf] != BUF_TMP:
                i[off] += 0 if stays else at
                i[buf] = BUF_OUT if stays else BUF_TMP
        for ref in range(i["ref"], i["ref"] + i["nref"]):
            buf, off = refs[ref]
            if buf == BUF_BORROWED:
                refs[ref] = buf, off + n
            elif buf != BUF_TMP:
                refs[ref] = (BUF_IN, off) if k in own and off == own[k][0] else (BUF_TMP, off + at)
        i["ref"] += n if i["flags"] & RETURNS else 0
        i["flags"] &= ~NT  # it is copied at once
        new.append(i)
        first = i["op"] != BORROW and k not in own and all(spec.instrs["op"][other] == BORROW for other in waits[k])
        after.append({other + n for other in waits[k]} | set(copies if first else ()))
    # what only an answer waits for need not be there: so what is written is waited for, not only what comes last
    ends = {
        k for k, i in enumerate(new) if i["dst_buf"] == BUF_TMP and i["dst_off"] >= at and i["op"] not in (SEND, COPY)
    }
    for begin, end in gaps if out else ():
        new.append(copy(begin, end, src_buf=BUF_TMP, src_off=at + begin, dst_buf=BUF_OUT, dst_off=begin))
        after.append(ends | {n + k for k, i in enumerate(spec.instrs) if not i["nunlock"]})
    instrs = np.array([tuple(i.values()) for i in new], INSTR)
    return replace(
        spec,
        instrs=instrs,
        unlocks=_order(instrs, after),
        refs=np.array(refs, REF),
        out_bytes=spec.out_bytes if out else 0,
        tmp_bytes=up(at + spec.in_bytes),
        alias=0 if in_place and out else None,
    )


def _summed_here(spec: ProgramSpec) -> dict[int, tuple[int, int]]:
    """REDUCE -> from where to where its result is, of those that nobody else reads or writes but who sends them back."""
    instrs, found = spec.instrs.tolist(), {}
    for group in apart(accesses(spec, instrs)[BUF_OUT]):
        writers = {index for index, writes in group if writes}
        answers = (instrs[i][0] == SEND and instrs[i][2] & RETURNS for i, _ in group if i not in writers)
        for k in writers if len(writers) == 1 and all(answers) else ():
            if instrs[k][0] == REDUCE:
                found[k] = instrs[k][13], instrs[k][13] + instrs[k][10]
    return dict(sorted(found.items(), key=lambda item: item[1]))


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

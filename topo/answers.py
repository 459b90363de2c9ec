"""Answers: messages that bring back what a peer made of a chunk, and may end without being sent (HR_INSTR_RETURNS)."""

from __future__ import annotations

from hrdma.topo import program as isa
from hrdma.topo.program import ProgramSpec, accesses

__all__ = ["answer", "apart"]


def answer(spec: ProgramSpec) -> None:
    """Marks them in a program.

    On one side a SEND, and the RECV over the same memory, which nothing else touches: the peer may write there. On the other a
    reduction, the only one to write its result, and the SEND of it to a rank from which an operand came. The first in the
    caller's memory, where the call is in place (`hrdma.topo.slices` moves it to scratch); the second in scratch, too. Whether it
    is used is decided chunk by chunk, by where the memory lies; `hrdma.topo.verify` proves that it may be.

    Cost: about 3 us per instruction.
    """
    instrs = spec.instrs.tolist()
    if not any(i[0] in (isa.RECV_REDUCE, isa.BORROW) for i in instrs):
        return
    _from_scratch(spec, instrs)
    if spec.alias is None:
        return
    for group in apart(accesses(spec, instrs)[isa.BUF_OUT]):
        writers = {index for index, writes in group if writes}
        if len(writers) != 1:
            continue
        writer = writers.pop()
        readers = [index for index, writes in group if not writes and index != writer]
        op, peer = instrs[writer][0], instrs[writer][3]
        if op == isa.RECV and len(readers) == 1:
            (send,) = readers
            if instrs[send][0] == isa.SEND and instrs[send][3] == peer and _unlocks(spec, instrs, send, writer):
                _mark(spec, writer, send)
        elif op in (isa.RECV_REDUCE, isa.REDUCE):
            sources = {peer: writer} if op == isa.RECV_REDUCE else _borrowed(spec, instrs, writer)
            for send in readers:
                source = sources.get(instrs[send][3])
                if instrs[send][0] == isa.SEND and source is not None and _unlocks(spec, instrs, writer, send):
                    _mark(spec, send, source)


def _from_scratch(spec: ProgramSpec, instrs: list[tuple]) -> None:
    """Those of results that only pass through. Their places are used again, so what counts is who waits for whom."""
    for reduce, i in enumerate(instrs):
        if i[0] != isa.REDUCE or i[11] != isa.BUF_TMP:
            continue
        sources = _borrowed(spec, instrs, reduce)
        for send in spec.unlocks[i[6] : i[6] + i[7]].tolist():
            s = instrs[send]
            if s[0] == isa.SEND and (s[12], s[14], s[10]) == (isa.BUF_TMP, i[13], i[10]) and s[3] in sources:
                _mark(spec, send, sources.pop(s[3]))


def apart(memory: list[tuple[int, int, int, bool]]) -> list[list[tuple[int, bool]]]:
    """(instruction, writes) of every range that is always touched as a whole."""
    groups: list[list[tuple[int, bool]]] = []
    bounds, whole = (0, 0), False
    for start, stop, index, writes in sorted(memory):
        if start < bounds[1]:
            if (start, stop) == bounds and whole:
                groups[-1].append((index, writes))
                continue
            if whole:
                groups.pop()
            bounds, whole = (bounds[0], max(stop, bounds[1])), False
            continue
        bounds, whole = (start, stop), True
        groups.append([(index, writes)])
    return groups


def _unlocks(spec: ProgramSpec, instrs: list[tuple], first: int, then: int) -> bool:
    return then in spec.unlocks[instrs[first][6] : instrs[first][6] + instrs[first][7]]


def _borrowed(spec: ProgramSpec, instrs: list[tuple], reduce: int) -> dict[int, int]:
    """Lender -> BORROW, of a reduction; not of lenders that lend twice."""
    operands = spec.refs[instrs[reduce][8] : instrs[reduce][8] + instrs[reduce][9]].tolist()
    borrows = [off for buf, off in operands if buf == isa.BUF_BORROWED]
    peers = [instrs[index][3] for index in borrows]
    return {peer: index for peer, index in zip(peers, borrows) if peers.count(peer) == 1}


def _mark(spec: ProgramSpec, index: int, asks: int) -> None:
    spec.instrs["flags"][index] |= isa.RETURNS
    spec.instrs["ref"][index] = asks

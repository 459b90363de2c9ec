"""The proof of programs: the messages of all ranks pair up, no memory is touched out of order, nothing can deadlock.

* Pairing: every SEND has exactly one receive of the same length at its peer, by (peer, tag).
* Hazards: two instructions of a rank that touch overlapping bytes, one of them writing, are ordered by the
dependencies. A
  SEND reads until it ends; a REDUCE reads the fallback range of what it borrowed; IN and OUT may be the same memory.
* Folding: what a RECV brings into scratch for one REDUCE may be reduced out of the message, and what a REDUCE makes there for
  one answer may be put where that would go. Then it is not there for others.
* Answers: where a peer may write back what it makes of a chunk, nothing else touches the chunk until the message that would have
  brought it, and that message is the one which the peer then does not send.
* Deadlock: with the worst choice everywhere, that is every send waits for its receive to be posted and every borrowed
one
  for the reduction that names it, the graph of who waits for whom over all ranks has no cycle. An engine that sends
  ahead under credits, and waits for the receive where credits are out, only ever waits for less: it cannot deadlock
  either.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hrdma.errors import ScheduleError
from hrdma.topo import program as isa
from hrdma.topo.program import ProgramSpec, accesses

__all__ = ["check_programs"]

_RECEIVES = (isa.RECV, isa.RECV_REDUCE, isa.BORROW)
_BUFS = ("in", "out", "tmp")


def check_programs(programs: Sequence[ProgramSpec]) -> None:
    """Proves the programs of all ranks of one schedule, in rank order.

    Raises
    ------
    ScheduleError
        With `rank`; the message names the instructions.

    Notes
    -----
    Cost: about 10 us per instruction.
    """
    listed = [spec.instrs.tolist() for spec in programs]
    answers = []
    for rank, spec in enumerate(programs):
        if spec.rank != rank or spec.size != len(programs):
            raise ScheduleError(
                f"program {rank} of {len(programs)} is that of rank {spec.rank} of {spec.size}", rank=rank
            )
        _ranges(spec, listed[rank])
        answers.append(_answers(spec, listed[rank], _hazards(spec, listed[rank])))
    pairs = _pair(listed)
    met = {(src, send): receive for src, send, _, receive in pairs}
    for src, send, dst, receive in pairs:
        back, there = answers[src].get(send), answers[dst].get(receive)
        if back is not None and there is not None and met[dst, there] != back:
            raise ScheduleError(
                f"rank {src}: {back} takes for the answer to {send} what rank {dst} sends by {there}", rank=src
            )
    _deadlock(programs, listed, pairs)


def _fields(instr: tuple) -> tuple:
    return instr[0], instr[3], instr[4], instr[10]  # op, peer, tag, len


def _pair(listed: list[list[tuple]]) -> list[tuple[int, int, int, int]]:
    """(sender, its instruction, receiver, its instruction) of every message."""
    posted: dict[tuple[int, int, int], tuple[int, int]] = {}
    for rank, instrs in enumerate(listed):
        for index, instr in enumerate(instrs):
            op, peer, tag, length = _fields(instr)
            if op in _RECEIVES:
                if (peer, rank, tag) in posted:
                    raise ScheduleError(f"rank {rank}: two receives from rank {peer} have tag {tag}", rank=rank)
                posted[peer, rank, tag] = index, length
    pairs, sent = [], set()
    for rank, instrs in enumerate(listed):
        for index, instr in enumerate(instrs):
            op, peer, tag, length = _fields(instr)
            if op != isa.SEND:
                continue
            if (rank, peer, tag) in sent:
                raise ScheduleError(f"rank {rank}: two sends to rank {peer} have tag {tag}", rank=rank)
            sent.add((rank, peer, tag))
            if (rank, peer, tag) not in posted:
                raise ScheduleError(f"rank {rank}: send {index} to rank {peer}, tag {tag}, meets no receive", rank=rank)
            other, expected = posted.pop((rank, peer, tag))
            if expected != length:
                raise ScheduleError(
                    f"rank {rank}: send {index} has {length} bytes, rank {peer} expects {expected}", rank=rank
                )
            pairs.append((rank, index, peer, other))
    for (src, dst, tag), (index, _) in posted.items():
        raise ScheduleError(f"rank {dst}: receive {index} from rank {src}, tag {tag}, meets no send", rank=dst)
    return pairs


def _ranges(spec: ProgramSpec, instrs: list[tuple]) -> None:
    rank, n = spec.rank, len(instrs)
    limits = (spec.in_bytes, spec.out_bytes, spec.tmp_bytes)
    refs, unlocks = spec.refs.tolist(), spec.unlocks.tolist()
    if max(unlocks, default=-1) >= n:
        raise ScheduleError(f"rank {rank}: an unlock names instruction {max(unlocks)} of {n}", rank=rank)
    counted = [0] * n
    for index, i in enumerate(instrs):
        op, peer, unlock, nunlock, ref, nref, length = i[0], i[3], i[6], i[7], i[8], i[9], i[10]
        if op > isa.NOP or unlock + nunlock > len(unlocks) or (op == isa.REDUCE and ref + nref > len(refs)):
            raise ScheduleError(f"rank {rank}: instruction {index} is malformed", rank=rank)
        for other in unlocks[unlock : unlock + nunlock]:
            counted[other] += 1
        places = []
        if op in (isa.SEND, isa.COPY):
            places.append((i[12], i[14]))
        if op not in (isa.SEND, isa.NOP):
            places.append((i[11], i[13]))
        if op == isa.REDUCE:
            if not 1 <= nref <= isa.REDUCE_MAX_SRC:
                raise ScheduleError(
                    f"rank {rank}: instruction {index} reduces {nref} operands; 1 to {isa.REDUCE_MAX_SRC} are allowed"
                )
            for buf, off in refs[ref : ref + nref]:
                if buf != isa.BUF_BORROWED:
                    places.append((buf, off))
                elif off >= n or instrs[off][0] != isa.BORROW or instrs[off][10] != length:
                    raise ScheduleError(
                        f"rank {rank}: instruction {index} names {off}, which borrows nothing of {length} bytes",
                        rank=rank,
                    )
        for buf, off in places:
            if buf > isa.BUF_TMP or off + length > limits[buf]:
                raise ScheduleError(
                    f"rank {rank}: instruction {index} reaches byte {off + length} of {_BUFS[min(buf, 2)]}", rank=rank
                )
        if op not in (isa.SEND, isa.NOP) and length and i[11] == isa.BUF_IN and spec.alias is None:
            raise ScheduleError(f"rank {rank}: instruction {index} writes to the caller's input", rank=rank)
        if op in (isa.SEND, *_RECEIVES) and (not 0 <= peer < spec.size or peer == rank):
            raise ScheduleError(f"rank {rank}: instruction {index} has peer {peer}", rank=rank)
    for index, i in enumerate(instrs):
        if counted[index] != i[5]:
            raise ScheduleError(
                f"rank {rank}: instruction {index} waits for {i[5]}, but {counted[index]} unlock it", rank=rank
            )


def _hazards(spec: ProgramSpec, instrs: list[tuple]) -> list[int]:
    """Bits, of each instruction: those that have ended when it starts."""
    rank, n = spec.rank, len(instrs)
    unlocks = spec.unlocks.tolist()
    waiting = [i[5] for i in instrs]
    ready = [index for index in range(n) if not waiting[index]]
    before = [0] * n  # bits: instructions that have ended when this one starts
    for index in ready:
        known = before[index] | 1 << index
        for other in unlocks[instrs[index][6] : instrs[index][6] + instrs[index][7]]:
            before[other] |= known
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    if len(ready) < n:
        raise ScheduleError(
            f"rank {rank}: instruction {next(k for k in range(n) if waiting[k])} waits for itself", rank=rank
        )
    folds, shared = _folds(spec, instrs), []
    touched = accesses(spec, instrs)
    for i in instrs:
        if i[0] == isa.RECV and i[2] & isa.RETURNS and i[8] < n:  # from when on the peer may write
            touched[i[11]].append((i[13], i[13] + i[10], i[8], True))
    for memory in touched:
        memory.sort()
        active: list[tuple[int, int, int, bool]] = []
        for access in memory:
            start, _, index, writes = access
            active = [other for other in active if other[1] > start]
            for _, _, other, wrote in active:
                if (writes or wrote) and other != index and not (before[index] >> other | before[other] >> index) & 1:
                    raise ScheduleError(
                        f"rank {rank}: instructions {min(index, other)} and {max(index, other)}"
                        " touch the same memory in no order",
                        rank=rank,
                    )
                shared += [(other, index, writes)] * (wrote and other in folds)
                shared += [(index, other, wrote)] * (writes and index in folds)
            active.append(access)
    for receive, other, writes in shared:
        if writes or other in (receive, folds[receive]) or not before[other] >> receive & 1:
            continue
        later = (w for r, w, writes in shared if r == receive and writes and w != receive)
        if not any(before[other] >> w & 1 and before[w] >> receive & 1 for w in later):
            raise ScheduleError(
                f"rank {rank}: instruction {other} reads what {receive} has for {folds[receive]} alone: an edge of its own is missing",
                rank=rank,
            )
    return before


def _answers(spec: ProgramSpec, instrs: list[tuple], before: list[int]) -> dict[int, int]:
    """What is answered -> the answer, of one rank: it asks for the result that is sent, or lies where it is received."""
    rank, refs, found = spec.rank, spec.refs.tolist(), {}
    reader = {
        off: index
        for index, i in enumerate(instrs)
        if i[0] == isa.REDUCE
        for buf, off in refs[i[8] : i[8] + i[9]]
        if buf == isa.BUF_BORROWED
    }
    touched = accesses(spec, instrs)
    moved = spec.alias or 0
    for index, i in enumerate(instrs):
        if not i[2] & isa.RETURNS:
            continue
        asks = i[8]
        other = instrs[asks] if asks < len(instrs) else i
        result = reader.get(asks, asks)
        if i[0] == isa.RECV:
            place = (isa.BUF_OUT, other[14] + moved) if other[12] == isa.BUF_IN else (other[12], other[14])
            fits = other[0] == isa.SEND and (i[11], i[13]) == place
            fits = fits and (spec.alias is not None or i[11] == isa.BUF_TMP)
            for start, stop, toucher, _ in touched[i[11]]:  # from when it is lent until it has come back
                if toucher not in (asks, index) and start < i[13] + i[10] and stop > i[13]:
                    fits = fits and bool(before[asks] >> toucher & 1 or before[toucher] >> index & 1)
        else:
            fits = i[0] == isa.SEND and other[0] in (isa.BORROW, isa.RECV_REDUCE)
            fits = fits and instrs[result][11] == i[12] != isa.BUF_IN and instrs[result][13] == i[14]
            for start, stop, writer, writes in touched[i[12]]:
                if writes and writer not in (result, asks) and start < i[14] + i[10] and stop > i[14]:
                    fits = fits and bool(before[result] >> writer & 1 or before[writer] >> index & 1)
        fits = fits and (other[3], other[10]) == (i[3], i[10]) and before[index] >> result & 1 and asks not in found
        if not fits or other[2] & isa.RETURNS:
            raise ScheduleError(f"rank {rank}: instruction {index} is no answer to {asks}", rank=rank)
        found[asks] = index
    return found


def _folds(spec: ProgramSpec, instrs: list[tuple]) -> dict[int, int]:
    """What may never come to be in scratch, and for whom alone it would be there: of a RECV, which the core may reduce out of
    the message, a REDUCE; of a REDUCE, whose result it may put where an operand lies, an answer."""
    unlocks, refs, found = spec.unlocks.tolist(), spec.refs.tolist(), {}
    for index, i in enumerate(instrs):
        if i[0] not in (isa.RECV, isa.REDUCE) or i[11] != isa.BUF_TMP or i[7] != 1:
            continue
        reduce = instrs[unlocks[i[6]]]
        if i[0] == isa.REDUCE:
            if reduce[2] & isa.RETURNS and (isa.BUF_BORROWED, reduce[8]) in refs[i[8] : i[8] + i[9]]:
                found[index] = unlocks[i[6]]
            continue
        operands = refs[reduce[8] : reduce[8] + reduce[9]]
        borrows = any(buf == isa.BUF_BORROWED for buf, _ in operands)
        if (
            reduce[0] == isa.REDUCE
            and reduce[10] == i[10]
            and operands.count((isa.BUF_TMP, i[13])) == 1
            and not borrows
        ):
            found[index] = unlocks[i[6]]
    return found


def _deadlock(programs, listed: list[list[tuple]], pairs: list[tuple[int, int, int, int]]) -> None:
    """Kahn's algorithm over starts (even nodes) and ends (odd nodes) of all instructions."""
    base = np.concatenate([[0], np.cumsum([len(instrs) for instrs in listed])]).tolist()
    edges: list[list[int]] = [[] for _ in range(2 * base[-1])]
    for rank, instrs in enumerate(listed):
        unlocks, refs = programs[rank].unlocks.tolist(), programs[rank].refs.tolist()
        for index, i in enumerate(instrs):
            node = 2 * (base[rank] + index)
            edges[node].append(node + 1)
            edges[node + 1] += [2 * (base[rank] + other) for other in unlocks[i[6] : i[6] + i[7]]]
    readers: dict[tuple[int, int], list[int]] = {}
    for rank, instrs in enumerate(listed):
        refs = programs[rank].refs.tolist()
        for index, i in enumerate(instrs):
            if i[0] == isa.REDUCE:
                for buf, off in refs[i[8] : i[8] + i[9]]:
                    if buf == isa.BUF_BORROWED:
                        readers.setdefault((rank, off), []).append(2 * (base[rank] + index) + 1)
    for src, send, dst, receive in pairs:
        a, b = 2 * (base[src] + send), 2 * (base[dst] + receive)
        edges[a].append(b + 1)
        edges[b].append(a + 1)
        for reader in readers.get((dst, receive), ()):
            edges[reader].append(a + 1)
    waiting = [0] * len(edges)
    for out in edges:
        for node in out:
            waiting[node] += 1
    ready = [node for node, count in enumerate(waiting) if not count]
    for node in ready:
        for other in edges[node]:
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    if len(ready) < len(edges):
        node = next(node for node, count in enumerate(waiting) if count)
        rank = next(rank for rank in range(len(listed)) if node < 2 * base[rank + 1])
        raise ScheduleError(
            f"rank {rank}: deadlock: instruction {node // 2 - base[rank]} can never end or start", rank=rank
        )

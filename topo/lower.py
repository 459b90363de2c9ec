"""Lowering: turns a schedule into the program that one rank's core runs.

Every rank lowers its own part alone. Both ends of a message find the same tag, its number among the messages of that
ordered pair of ranks, and the same length, from the schedule and the counts; nothing is negotiated.

What is needed to see why the programs are right:

* Each chunk has a place where it is now (IN at first, if this rank brings it) and a *home* where results go: OUT if the
  rank wants it, scratch if it only passes through. IN is never written when the call is out of place.
* Dependencies come from memory alone: who reads waits for the last writer, who writes waits for the readers since. So
  rounds of different chunks overlap as far as the data allows.
* A receive waits for nothing of its own round. Where its home is still being sent in that round (an exchange in place),
  it lands in scratch and is folded in afterwards; such operands are received, not borrowed, since two lenders that wait
  for each other's reduction would never end. So by induction over rounds no program deadlocks, with whatever credits.
* Scratch is bounded: ranges are used again once what used them has ended, in an order that is the same on every rank.

`hrdma.topo.verify` proves all this of any set of programs; the tests do so for every algorithm.
"""

from __future__ import annotations

import struct
from collections import deque

import numpy as np

from hrdma.errors import ScheduleError
from hrdma.topo import program as isa
from hrdma.topo.cells import Cells, up
from hrdma.topo.coarse import coarsen
from hrdma.topo.layout import layout
from hrdma.topo.program import INSTR, REF, ProgramSpec
from hrdma.topo.schedule import CHUNK, DST, ROUND, SRC, Schedule
from hrdma.topo.schedule import REDUCE as OP_REDUCE

__all__ = ["SCRATCH", "lower"]

SCRATCH = 8 << 20  # bytes of scratch before ranges are used again
_NT_BYTES = 32 << 20  # results this large do not stay in a cache anyway
_TAGS = 1 << 24  # the core keeps the other bits of a tag
_PACK = struct.Struct("=BBHiIIIIIIQBB6xQQ").pack


def lower(
    schedule: Schedule, rank: int, counts, itemsize: int, *, in_place: bool = False, scratch: int = SCRATCH,
    landing: int = 0, packet: int = 0,
) -> ProgramSpec:  # fmt: skip
    """One rank's program of a schedule.

    Parameters
    ----------
    schedule : Schedule
        Complete, or the view of this rank. A correct one: `Schedule.check` is the proof, not this function.
    rank : int
    counts, itemsize, in_place
        As in `plan`.
    scratch : int
        Bytes of scratch after which ranges are used again; one group of operands may need more.
    landing : int
        Bytes from which on operands of reductions land in scratch, into which a device writes them by itself; 0: all are reduced
        as they come, message by message. Other ranks need not do the same.
    packet : int
        As in `Cost`; the same on all ranks.

    Raises
    ------
    ScheduleError
        When this rank would send a chunk that it never had, or tags run out.
    ValueError
        When the counts do not fit the collective.
    """
    return _Lowering(schedule, rank, counts, itemsize, in_place, scratch, landing, packet).run()


class _Lowering(Cells):
    """State of one lowering."""

    def __init__(
        self, schedule: Schedule, rank: int, counts, itemsize: int, in_place: bool, scratch: int, landing: int, packet: int
    ) -> None:  # fmt: skip
        self.landing = landing
        self.schedule = schedule = schedule.for_rank(rank)
        table, places = schedule.table, layout(schedule, rank, counts, itemsize, in_place, packet)
        self.names: list[int] | None = None  # of joined chunks: the first that each was made of
        if schedule.collective != "alltoall":
            table, places, self.names = coarsen(table, places)
        elif hasattr(counts, "__len__"):
            block = table[:, CHUNK] // schedule.split
            relayed = (block // schedule.size != table[:, SRC]) | (block % schedule.size != table[:, DST])
            if relayed.any():
                chunk = int(table[np.argmax(relayed), CHUNK])
                raise ScheduleError(
                    f"{schedule.name or 'the schedule'} relays chunk {chunk} through ranks that do not know its length; "
                    "give one count for all blocks", rank=rank, chunk=chunk,
                )  # fmt: skip
        super().__init__(places, scratch)
        self.rank, self.alias = rank, self.layout.alias
        self.rows = table.tolist()
        self.tags = self._numbered(table)
        self.instrs: list[tuple] = []  # all fields but after, unlock, nunlock
        self.after: list[int] = []
        self.unlocks: list[list[int]] = []
        self.refs: list[tuple[int, int]] = []
        self.homes: dict[int, int] = {}  # chunk -> slot cell, for chunks that pass through
        self.retired: list[int] = []  # slots that may be used again from the next round on
        self.place = self._initial()
        self.uses, self.last_reduce = self._survey()

    def _numbered(self, table: np.ndarray) -> list[int]:
        """The tag of every row: its number among the messages from its source to its destination."""
        tags = [0] * len(table)
        sent: dict[tuple[int, int], int] = {}
        for k in np.lexsort((table[:, CHUNK], table[:, ROUND])).tolist():
            _, src, dst, *_ = self.rows[k]
            tags[k] = number = sent.get((src, dst), 0)
            sent[src, dst] = number + 1
        if tags and max(tags) >= _TAGS:
            raise ScheduleError(f"{max(tags) + 1} messages between two ranks; the core takes {_TAGS}: use fewer parts")
        return tags

    def _initial(self) -> list[int]:
        """The cell of every chunk at the start; -1: not here."""
        n, lens = self.n, self.lens
        if self.alias is None:
            return [c if off >= 0 else -1 for c, off in enumerate(self.in_off)]
        if self.schedule.collective != "alltoall":
            return [
                -1 if off < 0 else n + c if self.out_off[c] == off + self.alias and self.out_off[c] >= 0 else c
                for c, off in enumerate(self.in_off)
            ]
        # in place, blocks overlap blocks of other chunks: everything moves aside first
        self.tmp = up(self.layout.in_bytes)
        mine = [c for c, off in enumerate(self.in_off) if off >= 0 and lens[c]]
        self.fixed = {c: self.in_off[c] for c in mine}
        if mine:
            self.emit(isa.COPY, self.layout.in_bytes, set(), dst=(isa.BUF_TMP, 0), src=(isa.BUF_IN, 0))
        for c in mine:
            self.writer[2 * n + c] = 0
        for c, off in enumerate(self.out_off):
            if off >= 0 and mine:
                self.readers[n + c] = [0]
        return [2 * n + c if c in self.fixed else -1 for c in range(n)]

    def _survey(self) -> tuple[list[int], dict[int, int]]:
        """How often each chunk is used, the last round that reduces it; fixed homes for chunks of long spans."""
        uses = [0] * self.n
        last: dict[int, int] = {}
        wide = [row for row in self.rows if row[4] > 1]
        if not wide:
            for rnd, _, _, chunk, _, op, _ in self.rows:
                uses[chunk] += 1
                if op == OP_REDUCE:
                    last[chunk] = rnd
            return uses, last
        landing: set[int] = set()
        for rnd, _, dst, chunk, span, op, _ in self.rows:
            for c in range(chunk, chunk + span):
                uses[c] += 1
                if op == OP_REDUCE:
                    last[c] = rnd
            if dst == self.rank:
                landing.update(range(chunk, chunk + span))
        fixed: set[int] = set(self.fixed)
        for _, _, dst, chunk, span, _, _ in wide:
            chunks = range(chunk, chunk + span)
            if all(self.out_off[c] >= 0 for c in chunks) or (dst != self.rank and landing.isdisjoint(chunks)):
                continue
            fixed.update(chunks)
        for c in sorted(fixed.difference(self.fixed)):
            self.fixed[c] = self.tmp
            self.tmp += self.lens[c]
        self.tmp = up(self.tmp)
        return uses, last

    def home(self, chunk: int) -> int:
        """The cell for results of a chunk."""
        if chunk in self.fixed and self.schedule.collective != "alltoall":
            return 2 * self.n + chunk
        if self.out_off[chunk] >= 0:
            return self.n + chunk
        if chunk not in self.homes:
            self.homes[chunk] = self.slot(self.lens[chunk])
        return self.homes[chunk]

    def used(self, chunk: int, span: int, times: int) -> bool:
        """Counts uses down; true when none of these chunks is used again."""
        done = True
        for c in range(chunk, chunk + span):
            self.uses[c] -= times
            if self.uses[c]:
                done = False
            elif c in self.homes:
                self.retired.append(self.homes.pop(c))
        return done

    def emit(
        self, op: int, length: int, deps: set[int], *, dst=(0, 0), src=(0, 0), peer: int = -1, tag: int = 0, lane: int = 0,
        flags: int = 0, ref: int = 0, nref: int = 0,
    ) -> int:  # fmt: skip
        index = len(self.instrs)
        self.instrs.append((op, lane, flags, peer, tag, ref, nref, length, dst[0], src[0], dst[1], src[1]))
        self.after.append(len(deps))
        self.unlocks.append([])
        for dep in deps:
            self.unlocks[dep].append(index)
        return index

    def copy(self, length: int, dst_cells, dst, src_cells, src, flags: int = 0) -> None:
        index = self.emit(
            isa.COPY, length, self.to_read(src_cells) | self.to_write(dst_cells), dst=dst, src=src, flags=flags
        )
        self.has_read(index, src_cells)
        self.has_written(index, dst_cells)

    def located(self, chunk: int, rnd: int) -> int:
        cell = self.place[chunk]
        if cell < 0:
            chunk = self.names[chunk] if self.names else chunk
            raise ScheduleError(
                f"rank {self.rank} uses chunk {chunk} in round {rnd} before it has it", rank=self.rank, chunk=chunk
            )
        return cell

    def send(self, row: list[int], tag: int, fence: set[int]) -> None:
        rnd, _, dst, chunk, span, _, lane = row
        if span == 1:
            length = self.lens[chunk]
            if length:
                cell = self.located(chunk, rnd)
                deps = {self.writer[cell]} if cell in self.writer else set()
                index = self.emit(isa.SEND, length, deps | fence, src=self.address(cell), peer=dst, tag=tag, lane=lane)
                self.readers.setdefault(cell, []).append(index)
            self.used(chunk, 1, 1)
            return
        chunks = [c for c in range(chunk, chunk + span) if self.lens[c]]
        if chunks:
            length = sum(self.lens[c] for c in chunks)
            cells = [self.located(c, rnd) for c in chunks]
            if len(self.runs(chunks, cells)) > 1:
                cells = self.gathered(chunks, cells, length)
            deps = self.to_read(cells)
            index = self.emit(isa.SEND, length, deps | fence, src=self.address(cells[0]), peer=dst, tag=tag, lane=lane)
            self.has_read(index, cells)
        self.used(chunk, span, 1)

    def gathered(self, chunks: list[int], cells: list[int], length: int) -> list[int]:
        """Makes chunks contiguous for one message: at home where that suffices, else packed into a slot."""
        homes = [self.home(c) for c in chunks]
        if len(self.runs(chunks, homes)) == 1:
            for c, cell, home in zip(chunks, cells, homes):
                if cell != home:
                    self.copy(self.lens[c], [home], self.address(home), [cell], self.address(cell))
                    self.place[c] = home
            return homes
        slot = self.slot(length)
        buf, off = self.address(slot)
        packed = []
        for c, cell in zip(chunks, cells):
            packed.append(self.emit(isa.COPY, self.lens[c], self.to_read([cell]) | self.to_write([slot]),
                                    dst=(buf, off), src=self.address(cell)))  # fmt: skip
            self.has_read(packed[-1], [cell])
            off += self.lens[c]
        join = self.emit(isa.NOP, 0, set(packed))
        self.has_written(join, [slot])
        self.retired.append(slot)
        return [slot]

    def receive(
        self, rnd: int, chunk: int, span: int, op: int, sources: list[tuple[int, int, int]], first: int
    ) -> None:
        """The transfers of one round into the same chunks. `first`: the first instruction of this round."""
        chunks = [chunk] if span == 1 and self.lens[chunk] else [c for c in range(chunk, chunk + span) if self.lens[c]]
        if not chunks:
            self.used(chunk, span, len(sources))
            return
        homes = [self.home(c) for c in chunks]
        done = self.used(chunk, span, len(sources))
        length = sum(self.lens[c] for c in chunks)
        flags = (
            isa.NT
            if done and self.layout.out_bytes >= _NT_BYTES and homes[0] >= self.n and homes[0] < 2 * self.n
            else 0
        )
        conflict = any(reader >= first for home in homes for reader in self.readers.get(home, ()))
        if op == OP_REDUCE:
            owns = [self.located(c, rnd) for c in chunks]
            pieces = [(0, 1)] if span == 1 else self.runs(chunks, homes, owns)
            scaled = {self.last_reduce[c] == rnd for c in chunks}
            if len(scaled) > 1:
                raise ScheduleError(
                    f"rank {self.rank} reduces chunks {chunk} to {chunk + span - 1} in round {rnd} for the last time and not"
                    " for the last time; split the transfer", rank=self.rank, chunk=chunk,
                )  # fmt: skip
            flags |= isa.SCALE if True in scaled else 0
        else:
            owns = homes
            pieces = [(0, 1)] if span == 1 else self.runs(chunks, homes)
        simple = len(pieces) == 1 and not conflict
        lands = op == OP_REDUCE and 0 < self.landing <= length
        if simple and len(sources) == 1 and owns == homes and not lands:
            ((src, tag, lane),) = sources
            code = isa.RECV_REDUCE if op == OP_REDUCE else isa.RECV
            flags |= isa.SWAP if code == isa.RECV_REDUCE and src < self.rank else 0
            index = self.emit(
                code,
                length,
                self.to_write(homes),
                dst=self.address(homes[0]),
                peer=src,
                tag=tag,
                lane=lane,
                flags=flags,
            )
            self.has_written(index, homes)
        else:
            self.fold(chunks, homes, owns, pieces, op, sources, length, flags, simple)
        for c, home in zip(chunks, homes):
            self.place[c] = home

    def fold(self, chunks, homes, owns, pieces, op, sources, length: int, flags: int, borrow: bool) -> None:
        """Lands operands and combines them: borrowed where nothing of this round is waited for, else received."""
        landed: list[tuple[int, int, list[int]]] = []  # (rank, instruction, cells)
        slots = []
        for k, (src, tag, lane) in enumerate(sorted(sources)):
            if borrow and k == 0 and set(owns).isdisjoint(homes):
                cells = homes  # the result overwrites this operand, and nothing else is there
            else:
                slots.append(self.slot(length))
                cells = slots[-1:]
            code = isa.BORROW if borrow else isa.RECV
            index = self.emit(
                code, length, self.to_write(cells), dst=self.address(cells[0]), peer=src, tag=tag, lane=lane
            )
            self.has_written(index, cells)
            landed.append((src, index, cells))
        at = 0
        for start, stop in pieces:
            part = [self.lens[c] for c in chunks[start:stop]]
            home, own = homes[start:stop], owns[start:stop]
            operands = []  # (rank, ref, cells)
            for src, index, cells in landed:
                if borrow:
                    operands.append((src, (isa.BUF_BORROWED, index), cells))
                else:
                    buf, off = self.address(cells[0])
                    operands.append((src, (buf, off + at), cells))
            if op == OP_REDUCE:
                operands.append((self.rank, self.address(own[0]), own))
                operands.sort(key=lambda operand: operand[0])
                self.combine(operands, home, sum(part), flags)
            else:
                self.copy(sum(part), home, self.address(home[0]), operands[0][2], operands[0][1], flags)
            at += sum(part)
        for slot in slots:
            if borrow:
                self.release(slot)
            else:
                self.retired.append(slot)

    def combine(self, operands, home: list[int], length: int, flags: int) -> None:
        """REDUCE into home; more operands than one instruction takes are continued from what is there, or in scratch
        while an operand that is still to come lies there."""
        while True:
            now, operands = operands[: isa.REDUCE_MAX_SRC], operands[isa.REDUCE_MAX_SRC :]
            cells = [cell for _, _, cells in now for cell in cells]
            target = home
            if any(cell in home for _, _, cells in operands for cell in cells):
                target = [self.slot(length)]
                self.retired += target
            dst, deps = self.address(target[0]), self.to_read(cells) | self.to_write(target)
            ref = len(self.refs)
            self.refs.extend(place for _, place, _ in now)
            more = flags & ~(isa.SCALE | isa.NT) if operands else flags
            index = self.emit(isa.REDUCE, length, deps, dst=dst, flags=more, ref=ref, nref=len(now))
            self.has_read(index, [cell for cell in cells if cell not in target])
            self.has_written(index, target)
            if not operands:
                return
            operands = [(-1, dst, target), *operands]

    def run(self) -> ProgramSpec:
        if self.schedule.collective == "barrier":
            self.barrier()
            return self.spec()
        rows, total, window = self.rows, len(self.rows), self.schedule.window
        fence: set[int] = set()
        paced: deque[tuple[int, set[int]]] = deque()
        at = 0
        while at < total:
            rnd, first = rows[at][0], len(self.instrs)
            groups: dict[tuple[int, int], list[tuple[list[int], int]]] = {}
            while paced and paced[0][0] <= rnd - window:
                fence = paced.popleft()[1]
            while at < total and rows[at][0] == rnd:
                row = rows[at]
                if row[1] == self.rank:
                    self.send(row, self.tags[at], fence)
                else:
                    groups.setdefault((row[3], row[4]), []).append((row, self.tags[at]))
                at += 1
            if window and len(self.instrs) > first:
                paced.append((rnd, set(range(first, len(self.instrs)))))
            for (chunk, span), group in sorted(groups.items()):
                sources = [(row[1], tag, row[6]) for row, tag in group]
                self.receive(rnd, chunk, span, group[0][0][5], sources, first)
            for slot in self.retired:
                self.release(slot)
            self.retired.clear()
        self.deliver()
        return self.spec()

    def deliver(self) -> None:
        """Copies results that are not where the caller wants them."""
        n = self.n
        chunks = [c for c in range(n) if self.out_off[c] >= 0 and self.lens[c] and 0 <= self.place[c] != n + c]
        if not chunks:
            return
        cells, outs = [self.place[c] for c in chunks], [n + c for c in chunks]
        flags = isa.NT if self.layout.out_bytes >= _NT_BYTES else 0
        for start, stop in self.runs(chunks, cells, outs):
            length = sum(self.lens[c] for c in chunks[start:stop])
            self.copy(
                length,
                outs[start:stop],
                self.address(outs[start]),
                cells[start:stop],
                self.address(cells[start]),
                flags,
            )

    def barrier(self) -> None:
        """Messages without bytes: what a rank sends in a round says that it has heard all of the rounds before."""
        heard: set[int] = set()
        now: list[int] = []
        rnd = 0
        for row, tag in zip(self.rows, self.tags):
            if row[0] != rnd:
                heard.update(now)
                now, rnd = [], row[0]
            if row[1] == self.rank:
                self.emit(isa.SEND, 0, heard, peer=row[2], tag=tag, lane=row[6])
            else:
                now.append(self.emit(isa.RECV, 0, set(), peer=row[1], tag=tag, lane=row[6]))

    def spec(self) -> ProgramSpec:
        unlocks: list[int] = []
        packed = []
        for (op, lane, flags, peer, tag, ref, nref, length, dbuf, sbuf, doff, soff), after, out in zip(
            self.instrs, self.after, self.unlocks
        ):
            packed.append(
                _PACK(
                    op, lane, flags, peer, tag, after, len(unlocks), len(out), ref, nref, length, dbuf, sbuf, doff, soff
                )
            )
            unlocks += out
        return ProgramSpec(
            instrs=np.frombuffer(bytearray(b"".join(packed)), INSTR),
            unlocks=np.array(unlocks, np.uint32),
            refs=np.array(self.refs, REF) if self.refs else np.empty(0, REF),
            in_bytes=self.layout.in_bytes, out_bytes=self.layout.out_bytes, tmp_bytes=self.tmp,
            size=self.schedule.size, rank=self.rank, alias=self.alias,
        )  # fmt: skip

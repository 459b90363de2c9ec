"""Runs programs of all ranks in Python, in seeded random order: what the core does, as unkindly as is allowed.

Meant for tests and for trying schedules out. Unkindness: whatever may run runs in random order; a receive scribbles
over its range as soon as it is posted; a send that waits for its receive is read as late as possible, a borrowed one
when it is reduced; with `credits` sends may run ahead of their receives, that many per pair of ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from hrdma.errors import ScheduleError
from hrdma.topo import program as isa
from hrdma.topo.program import ProgramSpec

__all__ = ["execute"]

_SCRIBBLE = 0xA5


def execute(
    programs: Sequence[ProgramSpec],
    inputs: Sequence[np.ndarray],
    op: Callable[[np.ndarray, np.ndarray], np.ndarray] = np.add,
    *,
    average: bool = False,
    credits: int = 0,
    mapped: bool = False,
    strict: bool = False,
    seed: int = 0,
) -> list[np.ndarray]:
    """Runs and returns what every rank's output holds.

    Parameters
    ----------
    programs : sequence of ProgramSpec
        In rank order.
    inputs : sequence of ndarray
        Each rank's input, 1-D, all of one dtype; in place the whole of the larger buffer (the output for allgather,
        say). Not modified.
    op : callable
        Two arrays to one.
    average : bool
        Divide by the number of ranks where the program says that a reduction is the last.
    credits : int
        Messages that may run ahead of their receive, per ordered pair of ranks.
    mapped : bool
        Borrowed chunks are read in the lender's memory, and results put back where the programs say that they may be.
    strict : bool
        A message needs a credit even when its receive is posted (never with credits 0).
    seed : int

    Returns
    -------
    list of ndarray
        Output of every rank; of an in-place call the whole of the larger buffer.

    Raises
    ------
    ScheduleError
        When nothing can go on before all has ended.
    """
    return _Run(programs, inputs, op, average, credits, mapped, strict, seed).run()


class _Run:
    def __init__(self, programs, inputs, op, average, credits, mapped, strict, seed) -> None:
        self.programs, self.op, self.average, self.mapped, self.strict = programs, op, average, mapped, strict
        self.dtype = inputs[0].dtype if len(inputs) else np.dtype(np.int64)
        self.rng = random.Random(seed)
        self.instrs = [spec.instrs.tolist() for spec in programs]
        self.refs = [spec.refs.tolist() for spec in programs]
        self.unlocks = [spec.unlocks.tolist() for spec in programs]
        self.waiting = [[i[5] for i in instrs] for instrs in self.instrs]
        self.memory = [self._buffers(spec, np.ascontiguousarray(x)) for spec, x in zip(programs, inputs)]
        self.ready = [(r, k) for r, w in enumerate(self.waiting) for k, count in enumerate(w) if not count]
        self.open = sum(len(instrs) for instrs in self.instrs)
        size = len(programs)
        self.free = {(a, b): credits for a in range(size) for b in range(size)}
        self.sends: dict[tuple[int, int, int], int] = {}  # (src, dst, tag) -> posted send
        self.receives: dict[tuple[int, int, int], int] = {}
        self.eager: dict[tuple[int, int, int], bytes] = {}
        self.starved: list[tuple[int, int]] = []
        self.answers = [{i[8] for i in instrs if i[2] & isa.RETURNS} for instrs in self.instrs]  # what is answered
        self.returned: set[tuple[int, int]] = set()  # of these what was put back
        self.lent: dict[tuple[int, int], tuple[int, int, np.ndarray]] = {}  # borrow -> lender, its send, its memory

    @staticmethod
    def _buffers(spec: ProgramSpec, x: np.ndarray) -> list[np.ndarray]:
        tmp = np.full(spec.tmp_bytes, _SCRIBBLE, np.uint8)
        given = x.view(np.uint8).reshape(-1).copy()
        if spec.alias is None:
            return [given, np.full(spec.out_bytes, _SCRIBBLE, np.uint8), tmp]
        start = max(spec.alias, 0), max(-spec.alias, 0)
        return [given[start[0] :], given[start[1] :], tmp]

    def view(self, rank: int, buf: int, off: int, length: int) -> np.ndarray:
        return self.memory[rank][buf][off : off + length]

    def run(self) -> list[np.ndarray]:
        while self.open:
            if not self.ready:
                self.ready, self.starved = self.starved, []
                if not any(self.free[r, self.instrs[r][k][3]] for r, k in self.ready):
                    raise self._stuck()
            at = self.rng.randrange(len(self.ready))
            self.ready[at], self.ready[-1] = self.ready[-1], self.ready[at]
            self.start(*self.ready.pop())
        return [
            (m[isa.BUF_OUT] if s.alias is None or s.alias >= 0 else m[0]).view(self.dtype)
            for m, s in zip(self.memory, self.programs)
        ]

    def _stuck(self) -> ScheduleError:
        blocked = [f"rank {d} waits for rank {s}, tag {t}" for s, d, t in self.receives]
        blocked += [f"rank {s} sends to rank {d}, tag {t}" for s, d, t in self.sends]
        blocked += [f"rank {r} has no credit for instruction {k}" for r, k in self.ready]
        return ScheduleError(f"nothing can go on: {'; '.join(blocked[:6]) or 'dependencies wait for each other'}")

    def start(self, rank: int, index: int) -> None:
        i = self.instrs[rank][index]
        op, peer, tag, length = i[0], i[3], i[4], i[10]
        if i[2] & isa.RETURNS and (rank, i[8]) in self.returned:
            self.end(rank, index)
        elif op == isa.SEND:
            key = (rank, peer, tag)
            if self.free[rank, peer] and (self.strict or self.rng.random() < 0.7):
                self.free[rank, peer] -= 1
                self.eager[key] = self.view(rank, i[12], i[14], length).tobytes()
                self.end(rank, index)
            elif self.strict:
                self.starved.append((rank, index))
                return
            else:
                self.sends[key] = index
            self.match(key)
        elif op in (isa.RECV, isa.RECV_REDUCE, isa.BORROW):
            key = (peer, rank, tag)
            self.receives[key] = index
            if op != isa.RECV_REDUCE:
                self.view(rank, i[11], i[13], length)[:] = _SCRIBBLE
            self.match(key)
        else:
            if op == isa.COPY:
                self.view(rank, i[11], i[13], length)[:] = self.view(rank, i[12], i[14], length)
            elif op == isa.REDUCE:
                self.reduce(rank, i)
            elif op != isa.NOP:
                raise ScheduleError(f"rank {rank}: unknown opcode {op}", rank=rank)
            self.end(rank, index)

    def match(self, key: tuple[int, int, int]) -> None:
        src, dst, _ = key
        if key not in self.receives or not (key in self.eager or key in self.sends):
            return
        index = self.receives.pop(key)
        i = self.instrs[dst][index]
        target = self.view(dst, i[11], i[13], i[10])
        if key in self.eager:
            data = np.frombuffer(self.eager.pop(key), np.uint8)
            self.free[src, dst] += 1
            send = None
        else:
            send = self.sends.pop(key)
            s = self.instrs[src][send]
            data = self.view(src, s[12], s[14], s[10])
        if i[0] == isa.BORROW and self.mapped and send is not None:
            self.lent[dst, index] = src, send, data
            self.end(dst, index)
            return
        if i[0] == isa.RECV_REDUCE:
            a, b = target.view(self.dtype), data.view(self.dtype)
            self.store(target, self.op(b, a) if i[2] & isa.SWAP else self.op(a, b), i[2])
            if send is not None and self.mapped:
                self.put_back(dst, index, src, send, target, data)
        else:
            target[:] = data
        self.end(dst, index)
        if send is not None:
            self.end(src, send)

    def reduce(self, rank: int, i: tuple) -> None:
        operands, lenders = [], []
        for buf, off in self.refs[rank][i[8] : i[8] + i[9]]:
            if buf != isa.BUF_BORROWED:
                operands.append(self.view(rank, buf, off, i[10]).view(self.dtype))
            elif (rank, off) in self.lent:
                src, send, data = self.lent.pop((rank, off))
                operands.append(data.view(self.dtype))
                lenders.append((off, src, send, data))
            else:
                b = self.instrs[rank][off]
                operands.append(self.view(rank, b[11], b[13], i[10]).view(self.dtype))
        value = operands[0].copy()
        for operand in operands[1:]:
            value = self.op(value, operand)
        self.store(self.view(rank, i[11], i[13], i[10]), value, i[2])
        result = self.view(rank, i[11], i[13], i[10])
        for borrow, src, send, data in lenders:
            self.put_back(rank, borrow, src, send, result, data)
            answer = self.instrs[rank][self.unlocks[rank][i[6]]] if i[7] == 1 and i[11] == isa.BUF_TMP else i
            if answer[2] & isa.RETURNS and (rank, answer[8]) in self.returned:
                result[:] = _SCRIBBLE  # it need not have come there
            self.end(src, send)

    def put_back(self, rank: int, index: int, src: int, send: int, result: np.ndarray, data: np.ndarray) -> None:
        """What was made of a chunk goes to where the chunk lies, if both sides say that it may, and often enough."""
        if index in self.answers[rank] and send in self.answers[src] and self.rng.random() < 0.7:
            data[:] = result
            self.returned.update(((rank, index), (src, send)))

    def store(self, target: np.ndarray, value: np.ndarray, flags: int) -> None:
        if self.average and flags & isa.SCALE:
            value = value * self.dtype.type(1 / len(self.programs))
        target.view(self.dtype)[:] = value

    def end(self, rank: int, index: int) -> None:
        self.open -= 1
        i = self.instrs[rank][index]
        for other in self.unlocks[rank][i[6] : i[6] + i[7]]:
            self.waiting[rank][other] -= 1
            if not self.waiting[rank][other]:
                self.ready.append((rank, other))

"""Steps of MSCCL's threadblocks, and what they come to when they are run: who gets which chunk from whom in which round.

Where input and output are different memory, offsets count from the start of each (`Places`), inputs stay as they were, and
outputs hold nothing until something is copied or received there. In a schedule a rank's place of a chunk has from the
beginning what the rank brings, so a send from the input is one of the first round, and copying input to output is nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from hrdma.errors import ScheduleError
from hrdma.topo.schedule import COPY, REDUCE

__all__ = ["BUFFERS", "TYPES", "Block", "Places", "Reader", "Step"]

_RECEIVING = ("r", "rcs", "rrc", "rrs", "rrcs")
_SENDING = ("s", "rcs", "rrs", "rrcs")
_REDUCING = ("rrc", "rrs", "rrcs", "re")
TYPES = {*_RECEIVING, *_SENDING, "re", "cpy", "nop"}
BUFFERS = ("i", "o", "s")


@dataclass
class Step:
    """A step that is being written, or has been read."""

    kind: str
    src: tuple[str, int] = ("i", 0)
    dst: tuple[str, int] = ("i", 0)
    count: int = 0
    waits: list[tuple[int, int]] = field(default_factory=list)  # (threadblock, step)
    named: bool = False  #: somebody waits for it


@dataclass
class Block:
    """A threadblock."""

    send: int
    recv: int
    channel: int
    steps: list[Step] = field(default_factory=list)


class Places(NamedTuple):
    """Which chunk of the schedule a place in a buffer is.

    In place, and of allreduce, the offset. Else the input of an allgather and the output of a reduce-scatter are a rank's own
    block; of an alltoall, part p of what goes to rank d is at d * split + p of the input, what comes from s at s * split + p.
    """

    collective: str
    size: int
    split: int
    apart: bool  #: input and output are different memory

    def chunk(self, rank: int, place: tuple[str, int]) -> int:
        buffer, offset = place
        if not self.apart or buffer == "s":
            return offset
        if self.collective == "alltoall":
            block, part = divmod(offset, self.split)
            return (rank * self.size + block if buffer == "i" else block * self.size + rank) * self.split + part
        own = {"allgather": "i", "gather": "i", "reduce_scatter": "o", "scatter": "o"}.get(self.collective)
        return offset + rank * self.split if buffer == own else offset

    def chunks(self, rank: int, place: tuple[str, int], count: int) -> range:
        """The same for several; they must follow each other in the schedule, too."""
        first, last = self.chunk(rank, place), self.chunk(rank, (place[0], place[1] + count - 1))
        if count > 0 and last - first != count - 1:
            raise ScheduleError(
                f"gpu {rank}: {count} chunks from {place} are of several blocks, and lie apart in a schedule",
                rank=rank, chunk=first,
            )  # fmt: skip
        return range(first, first + count)


class Reader:
    """Runs the steps in one of the orders that are allowed, and notes who got what in which round."""

    def __init__(self, gpus: list[list[Block]], turned: bool, places: Places) -> None:
        self.gpus, self.turned, self.places = gpus, turned, places
        self.filled: set[tuple[int, int]] = set()  # (rank, chunk) where an output of its own memory holds something
        self.done = [[0] * len(blocks_) for blocks_ in gpus]
        self.lines: dict[tuple[int, int, int], deque[tuple[int, int, int]]] = {}  # (chunk, count, round) on the way
        self.written: dict[tuple[int, int], tuple[int, int]] = {}  # (rank, chunk) -> round, message that reduced there
        self.read: dict[tuple[int, int], int] = {}  # (rank, chunk) -> latest round in which it was sent
        self.aside: dict[
            tuple[int, int], tuple[int, int, int, int]
        ] = {}  # (rank, scratch) -> round, source, lane, chunk
        self.rows: list[tuple[int, ...]] = []

    def run(self) -> list[tuple[int, ...]]:
        order = [(rank, tb) for rank, listed in enumerate(self.gpus) for tb in range(len(listed))]
        if self.turned:
            order.reverse()
        moved = True
        while moved:
            moved = False
            for rank, tb in order:
                while self.ready(rank, tb):
                    self.step(rank, tb)
                    self.done[rank][tb] += 1
                    moved = True
        for rank, listed in enumerate(self.gpus):
            for tb, block in enumerate(listed):
                if self.done[rank][tb] < len(block.steps):
                    raise ScheduleError(
                        f"gpu {rank}, threadblock {tb}, step {self.done[rank][tb]} waits for ever", rank=rank
                    )
        for (src, dst, channel), line in self.lines.items():
            if line:
                raise ScheduleError(
                    f"gpu {src} sends chunk {line[0][0]} to gpu {dst} by channel {channel}, where nobody receives it",
                    rank=src, chunk=line[0][0],
                )  # fmt: skip
        return sorted(self.rows)

    def ready(self, rank: int, tb: int) -> bool:
        block, at = self.gpus[rank][tb], self.done[rank][tb]
        if at >= len(block.steps):
            return False
        step = block.steps[at]
        for other, index in step.waits:
            if not (0 <= other < len(self.gpus[rank]) and 0 <= index < len(self.gpus[rank][other].steps)):
                raise ScheduleError(
                    f"gpu {rank}, threadblock {tb}, step {at} waits for step {index} of threadblock {other}, "
                    "which is not there", rank=rank,
                )  # fmt: skip
            if self.done[rank][other] <= index:
                return False
        return step.kind not in _RECEIVING or bool(self.lines.get((block.recv, rank, block.channel)))

    def step(self, rank: int, tb: int) -> None:
        block = self.gpus[rank][tb]
        step = block.steps[self.done[rank][tb]]
        if step.kind in _RECEIVING:
            chunk, count, rnd = self.lines[block.recv, rank, block.channel].popleft()
            if count != step.count:
                raise ScheduleError(
                    f"gpu {rank} expects {step.count} chunks from gpu {block.recv}, which sends {count}", rank=rank
                )
            target = step.dst if step.kind != "rrs" else step.src
            buffer, place = target[0], self.places.chunk(rank, target)
            if buffer == "s" and step.kind in _REDUCING:
                raise ScheduleError(f"gpu {rank} reduces into scratch, which a schedule cannot say", rank=rank)
            if buffer == "s":
                for k in range(count):
                    self.aside[rank, place + k] = rnd, block.recv, block.channel, chunk + k
            elif place != chunk:
                raise ScheduleError(
                    f"gpu {rank} puts chunk {chunk} where chunk {place} belongs", rank=rank, chunk=chunk
                )
            elif step.kind in ("rrc", "rrcs") and (step.src[0] == "s" or self.places.chunk(rank, step.src) != place):
                raise ScheduleError(
                    f"gpu {rank} reduces what it receives of chunk {chunk} with {step.src}, which is not its own value of it",
                    rank=rank, chunk=chunk,
                )  # fmt: skip
            else:
                self.apart(rank, step, self.places.chunks(rank, target, count))
                self.land(rank, rnd, block.recv, block.channel, chunk, count, step.kind in _REDUCING)
        elif step.kind == "cpy" and self.places.apart and (step.src[0], step.dst[0]) == ("i", "o"):
            self.brought(rank, step)
        elif step.kind in ("re", "cpy"):
            rnd, source, lane, chunk = self.held(rank, step)
            self.apart(rank, step, self.places.chunks(rank, step.dst, step.count))
            self.land(rank, rnd, source, lane, chunk, step.count, step.kind == "re")
        if step.kind in _SENDING:
            origin = step.src if step.kind in ("s", "rrs") else step.dst
            if origin[0] == "s":
                raise ScheduleError(f"gpu {rank} sends from scratch, which a schedule cannot say", rank=rank)
            sent = self.places.chunks(rank, origin, step.count)
            place = sent.start
            if self.places.apart and step.kind == "s":
                if origin[0] == "i":  # as it was at the beginning, whatever is in the output meanwhile
                    self.lines.setdefault((rank, block.send, block.channel), deque()).append((place, step.count, 0))
                    return
                self.holds(rank, sent)
            rnd = max((self.written[rank, c][0] + 1 for c in range(place, place + step.count)
                       if (rank, c) in self.written), default=0)  # fmt: skip
            for c in range(place, place + step.count):
                self.read[rank, c] = max(self.read.get((rank, c), 0), rnd)
            line = self.lines.setdefault((rank, block.send, block.channel), deque())
            line.append((place, step.count, rnd))

    def holds(self, rank: int, chunks: range) -> None:
        """Refuses to use of an output what is not there."""
        for c in chunks:
            if (rank, c) not in self.filled:
                raise ScheduleError(
                    f"gpu {rank} uses its output of chunk {c}, where nothing has been put", rank=rank, chunk=c
                )

    def brought(self, rank: int, step: Step) -> None:
        """Copies what a rank brings into its output, where a schedule has it from the beginning."""
        chunks = self.places.chunks(rank, step.dst, step.count)
        if chunks != self.places.chunks(rank, step.src, step.count):
            raise ScheduleError(f"gpu {rank}: cpy from {step.src} to {step.dst} moves no chunk to its place", rank=rank)
        for c in chunks:
            if (rank, c) in self.filled:
                raise ScheduleError(f"gpu {rank} copies its input over chunk {c} of its output", rank=rank, chunk=c)
            self.filled.add((rank, c))

    def apart(self, rank: int, step: Step, chunks: range) -> None:
        """Before something is put into chunks: where input and output are different memory, what is used must be there."""
        if not self.places.apart:
            return
        reducing = step.kind in _REDUCING
        operand = step.src if step.kind in ("rrc", "rrs", "rrcs") else step.dst
        if step.kind != "rrs" and step.dst[0] == "i":
            raise ScheduleError(
                f"gpu {rank} writes into its input of chunk {chunks.start}", rank=rank, chunk=chunks.start
            )
        for c in chunks:
            if reducing and operand[0] == "i" and (rank, c) in self.written:
                raise ScheduleError(
                    f"gpu {rank} adds its input of chunk {c} to what it receives, though it has received more before, "
                    "which a schedule cannot say", rank=rank, chunk=c,
                )  # fmt: skip
        if reducing and operand[0] == "o":
            self.holds(rank, chunks)
        if step.kind != "rrs":
            self.filled.update((rank, c) for c in chunks)

    def held(self, rank: int, step: Step) -> tuple[int, int, int, int]:
        """What lies in the scratch that a step takes."""
        found = [self.aside.get((rank, step.src[1] + k)) for k in range(step.count)]
        first = found[0] if found else None
        if (
            step.src[0] != "s" or first is None or step.dst[0] == "s" or self.places.chunk(rank, step.dst) != first[3]
        ):  # fmt: skip
            raise ScheduleError(
                f"gpu {rank}: {step.kind} from {step.src} to {step.dst} moves no chunk to its place", rank=rank
            )
        if found != [(*first[:3], first[3] + k) for k in range(step.count)]:
            raise ScheduleError(
                f"gpu {rank}: {step.kind} from {step.src} joins what came in several messages", rank=rank
            )
        return first

    def land(self, rank: int, sent: int, src: int, lane: int, chunk: int, count: int, reducing: bool) -> None:
        """A message into chunks of a rank: in the round in which it was sent, or later where that is too early."""
        rnd, group = sent, chunk << 24 | count if reducing else -1
        for c in range(chunk, chunk + count):
            if (rank, c) in self.written:
                before, other = self.written[rank, c]
                # operands of one reduction come in one round, unless what they made was sent in between
                again = reducing and other == group and self.read.get((rank, c), 0) <= before
                rnd = max(rnd, before if again else before + 1)
            rnd = max(rnd, self.read.get((rank, c), 0))
        for c in range(chunk, chunk + count):
            self.written[rank, c] = rnd, group
            if rnd > sent:  # it reads its source in that round then
                if sent <= self.written.get((src, c), (-1,))[0] < rnd:
                    raise ScheduleError(
                        f"rank {rank}, chunk {c}: what gpu {src} sent is used after it has changed there, which rounds "
                        "cannot say", rank=rank, chunk=c,
                    )  # fmt: skip
                self.read[src, c] = max(self.read.get((src, c), 0), rnd)
        self.rows.append((rnd, src, rank, chunk, count, REDUCE if reducing else COPY, lane))

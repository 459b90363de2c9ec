"""Plans that travel: MSCCL's XML, written from a schedule and read back to one.

A program in that format has, per GPU (here: rank), threadblocks that each send to at most one peer and receive from at most
one, and run their steps in order; a step may wait for a step of another threadblock of its GPU.

    <algo name="ring" coll="allreduce" ngpus="4" nchannels="1" nchunksperloop="4" proto="Simple" inplace="1">
      <gpu id="0" i_chunks="4" o_chunks="4" s_chunks="0">
        <tb id="0" send="1" recv="-1" chan="0">
          <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>

Written are a threadblock per connection and direction, one step per message (``s`` send, ``r`` receive, ``rrc`` receive and
reduce), and ``nop`` steps where one wait is not enough. A chunk that a rank sends and receives in the same round lands in
scratch and is added (``re``) or copied (``cpy``) after the send. Lanes become channels. All are in-place programs on the
input buffer, which is what allreduce is there; the other collectives are named ``custom`` with their own name beside.

Read are all step types of that format, scratch, and buffers ``i`` and ``o``, as one or apart (``inplace="0"``; see
`hrdma.topo.msccl_steps`). The steps are run in two orders, as far apart as what they wait for allows; they must give the same
schedule, or something is not waited for. Rounds come back as early as the data allows, and without a window. What is read
still has to be proved (`Schedule.check`).

References
----------
Cowan et al.: MSCCLang: Microsoft Collective Communication Language, ASPLOS, 2023.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np

from hrdma.errors import ScheduleError
from hrdma.topo.msccl_steps import BUFFERS, TYPES, Block, Places, Reader, Step
from hrdma.topo.schedule import CHUNK, DST, LANE, OP, REDUCE, ROUND, SPAN, SRC, Schedule, blocks
from hrdma.types import COLLECTIVES

__all__ = ["dumps", "loads"]

# -- writing -------------------------------------------------------------------------------------------------------------


def dumps(schedule: Schedule) -> str:
    """The XML of a complete schedule.

    Raises
    ------
    ScheduleError
        One rank's view, or a schedule with weights, for which the format has no word.
    """
    if schedule.view is not None:
        raise ScheduleError(f"this is rank {schedule.view}'s view; only a complete schedule can be written")
    if schedule.weights is not None:
        raise ScheduleError("the format has chunks of equal size; this schedule has weights")
    channels = int(schedule.table[:, LANE].max(initial=0)) + 1
    known = schedule.collective == "allreduce"
    head = {
        "name": schedule.name or "schedule", "coll": schedule.collective if known else "custom",
        "hrdma_collective": schedule.collective, "root": schedule.root, "ngpus": schedule.size, "nchannels": channels,
        "nchunksperloop": schedule.chunks, "proto": "Simple", "inplace": 1,
    }  # fmt: skip
    algo = ET.Element("algo", {key: str(value) for key, value in head.items()})
    for rank in range(schedule.size):
        written, scratch = _rank(schedule, rank)
        counts = {"id": rank, "i_chunks": schedule.chunks, "o_chunks": schedule.chunks, "s_chunks": scratch}
        gpu = ET.SubElement(algo, "gpu", {key: str(value) for key, value in counts.items()})
        for number, block in enumerate(written):
            place = {"id": number, "send": block.send, "recv": block.recv, "chan": block.channel}
            tb = ET.SubElement(gpu, "tb", {key: str(value) for key, value in place.items()})
            for index, step in enumerate(block.steps):
                waits = step.waits[0] if step.waits else (-1, -1)
                values = {
                    "s": index, "type": step.kind, "srcbuf": step.src[0], "srcoff": step.src[1], "dstbuf": step.dst[0],
                    "dstoff": step.dst[1], "cnt": step.count, "depid": waits[0], "deps": waits[1],
                    "hasdep": int(step.named),
                }  # fmt: skip
                ET.SubElement(tb, "step", {key: str(value) for key, value in values.items()})
    ET.indent(algo)
    return ET.tostring(algo, encoding="unicode") + "\n"


class _Writer:
    """One rank's threadblocks as they grow: who wrote and who reads each chunk."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.where: dict[tuple[int, int, int], int] = {}
        self.writer: dict[int, tuple[int, int]] = {}
        self.readers: dict[int, list[tuple[int, int]]] = {}

    def block(self, send: int, recv: int, channel: int) -> int:
        if (send, recv, channel) not in self.where:
            self.where[send, recv, channel] = len(self.blocks)
            self.blocks.append(Block(send, recv, channel))
        return self.where[send, recv, channel]

    def add(self, number: int, step: Step, waits: set[tuple[int, int]]) -> tuple[int, int]:
        """Appends a step; it waits for one other itself, for more by steps that do nothing else before it."""
        latest: dict[int, int] = {}
        for other, index in waits:
            if other != number:
                latest[other] = max(latest.get(other, -1), index)
        listed = sorted(latest.items())
        for other, index in listed:
            self.blocks[other].steps[index].named = True
        steps = self.blocks[number].steps
        steps.extend(Step("nop", waits=[wait]) for wait in listed[1:])
        step.waits = listed[:1]
        steps.append(step)
        return number, len(steps) - 1

    def before_read(self, chunks: range) -> set[tuple[int, int]]:
        return {self.writer[c] for c in chunks if c in self.writer}

    def before_write(self, chunks: range) -> set[tuple[int, int]]:
        return self.before_read(chunks) | {reader for c in chunks for reader in self.readers.get(c, ())}

    def read(self, chunks: range, at: tuple[int, int]) -> None:
        for c in chunks:
            self.readers.setdefault(c, []).append(at)

    def written(self, chunks: range, at: tuple[int, int]) -> None:
        for c in chunks:
            self.writer[c] = at
            self.readers[c] = []


def _rank(schedule: Schedule, rank: int) -> tuple[list[Block], int]:
    """A rank's threadblocks, and the chunks of scratch that they need."""
    table = schedule.for_rank(rank).table
    table = table[np.lexsort((table[:, CHUNK], table[:, ROUND]))]
    out, scratch = _Writer(), 0
    at = 0
    while at < len(table):
        rnd = table[at, ROUND]
        rows = table[at : at + np.searchsorted(table[at:, ROUND], rnd, side="right")].tolist()
        at += len(rows)
        sent: set[int] = set()
        for row in rows:
            if row[SRC] == rank:
                chunks = range(row[CHUNK], row[CHUNK] + row[SPAN])
                place = "i", row[CHUNK]
                number = out.block(row[DST], -1, row[LANE])
                step = out.add(number, Step("s", place, place, row[SPAN]), out.before_read(chunks))
                out.read(chunks, step)
                sent.update(chunks)
        later: list[tuple[int, Step, range, tuple[int, int]]] = []
        for row in rows:
            if row[DST] != rank:
                continue
            chunks, number = range(row[CHUNK], row[CHUNK] + row[SPAN]), out.block(-1, row[SRC], row[LANE])
            place = "i", row[CHUNK]
            if sent.isdisjoint(chunks):
                kind = "rrc" if row[OP] == REDUCE else "r"
                out.written(chunks, out.add(number, Step(kind, place, place, row[SPAN]), out.before_write(chunks)))
                continue
            aside = "s", scratch
            scratch += row[SPAN]
            landed = out.add(number, Step("r", aside, aside, row[SPAN]), set())
            kind = "re" if row[OP] == REDUCE else "cpy"
            later.append((number, Step(kind, aside, place, row[SPAN]), chunks, landed))
        for number, last, chunks, landed in later:
            out.written(chunks, out.add(number, last, {landed} | out.before_write(chunks)))
    return out.blocks, scratch


# -- reading -------------------------------------------------------------------------------------------------------------


def loads(text: str) -> Schedule:
    """The schedule of an XML; not proved.

    Raises
    ------
    ScheduleError
        Not XML, not this format, steps that wait for each other, or that depend on an order which nothing enforces, a
        message that nobody receives, a step that does what a schedule cannot say.
    """
    try:
        algo = ET.fromstring(text)
        if algo.tag != "algo":
            raise ScheduleError(f"not a program of MSCCL: it begins with <{algo.tag}>, not <algo>")
        gpus = _gpus(algo)
        name, collective = algo.get("name", ""), algo.get("hrdma_collective", algo.get("coll", ""))
        root, chunks = int(algo.get("root", "0")), int(algo.attrib["nchunksperloop"])
    except ScheduleError:
        raise
    except (ET.ParseError, KeyError, ValueError) as error:
        raise ScheduleError(f"not a program of MSCCL: {type(error).__name__}: {error}") from error
    if collective not in COLLECTIVES:
        raise ScheduleError(f"unknown collective {collective!r}; known: {', '.join(COLLECTIVES)}")
    nblocks = blocks(collective, len(gpus))
    apart = algo.get("inplace", "1") == "0"
    if apart and collective == "alltoall":
        chunks *= len(gpus)  # those of a rank are counted there
    if chunks < 1 or chunks % nblocks:
        raise ScheduleError(f"{chunks} chunks are not a multiple of the {nblocks} blocks of {collective}")
    places = Places(collective, len(gpus), chunks // nblocks, apart)
    first, second = (Reader(gpus, turned, places).run() for turned in (False, True))
    if first != second:
        row = min(set(first) ^ set(second))
        raise ScheduleError(
            f"rank {row[DST]}, chunk {row[CHUNK]}: what it gets depends on the order of steps that do not wait for "
            "each other", rank=row[DST], chunk=row[CHUNK],
        )  # fmt: skip
    table = np.array(sorted(first), np.int32).reshape(-1, 7)
    return Schedule(collective, len(gpus), table, chunks // nblocks, root, name)


def _gpus(algo: ET.Element) -> list[list[Block]]:
    found: dict[int, list[Block]] = {}
    for gpu in algo.iter("gpu"):
        listed = [Block(-1, -1, 0) for _ in gpu.iter("tb")]
        if int(gpu.attrib["id"]) in found:
            raise ScheduleError(f"gpu {gpu.get('id')} is there twice")
        if sorted(int(tb.attrib["id"]) for tb in gpu.iter("tb")) != list(range(len(listed))):
            raise ScheduleError(
                f"the {len(listed)} threadblocks of gpu {gpu.get('id')} are not numbered from 0, once each"
            )
        for tb in gpu.iter("tb"):
            number = int(tb.attrib["id"])
            listed[number] = Block(int(tb.attrib["send"]), int(tb.attrib["recv"]), int(tb.get("chan", "0")))
            for index, step in enumerate(tb.iter("step")):
                if int(step.attrib["s"]) != index or step.attrib["type"] not in TYPES:
                    raise ScheduleError(
                        f"gpu {gpu.get('id')}, threadblock {number}: step {step.get('s')} of type {step.get('type')!r} "
                        f"where step {index} should be, of one of the types {' '.join(sorted(TYPES))}"
                    )
                buffers = step.get("srcbuf", "i"), step.get("dstbuf", "i")
                if not set(buffers) <= set(BUFFERS):
                    raise ScheduleError(
                        f"gpu {gpu.get('id')}, threadblock {number}, step {index}: buffers {' and '.join(buffers)}; "
                        f"known: {' '.join(BUFFERS)}"
                    )
                wait = int(step.get("depid", "-1")), int(step.get("deps", "-1"))
                listed[number].steps.append(
                    Step(
                        step.attrib["type"],
                        (buffers[0], int(step.get("srcoff", "0"))),
                        (buffers[1], int(step.get("dstoff", "0"))),
                        int(step.get("cnt", "0")),
                        [wait] if wait[0] >= 0 else [],
                    )
                )
        found[int(gpu.attrib["id"])] = listed
    if sorted(found) != list(range(int(algo.attrib["ngpus"]))):
        raise ScheduleError(f"ngpus is {algo.attrib['ngpus']}, but there are the gpus {sorted(found)}")
    return [found[rank] for rank in range(len(found))]

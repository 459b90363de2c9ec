"""MSCCL's XML: every schedule survives the way there and back; what is not that format, or races, is refused."""

from __future__ import annotations

import re

import pytest

from hrdma.errors import ScheduleError
from hrdma.topo import msccl
from hrdma.topo.algorithms.on_fabric import known, lookup, refusal
from hrdma.topo.fabrics import parse
from hrdma.topo.schedule import ROUND, Schedule, Transfer

CASES = [
    (fabric, name, collective)
    for fabric in ("bcube:3,2", "torus:2x2", "cluster:2,2,2", "star:5")
    for name in known()
    for collective in lookup(name).collectives
    if not refusal(name, collective, parse(fabric))
]


@pytest.mark.parametrize(("fabric", "name", "collective"), CASES)
def test_there_and_back(fabric: str, name: str, collective: str) -> None:
    schedule = lookup(name).build(collective, parse(fabric), 1, 1, None)
    found = msccl.loads(msccl.dumps(schedule))
    found.check()
    assert (found.collective, found.size, found.split, found.root, found.name) == (
        collective, schedule.size, schedule.split, schedule.root, schedule.name,
    )  # fmt: skip
    assert found.nrounds <= schedule.nrounds
    rows = [sorted(s.table[:, ROUND + 1 :].tolist()) for s in (found, schedule)]
    assert rows[0] == rows[1]


# Two ranks, written by hand as that project's tools do: fused steps, and the result by way of the other rank.
RING = """<algo name="pair" coll="allreduce" ngpus="2" nchannels="1" nchunksperloop="2" proto="Simple" inplace="1">
 <gpu id="0" i_chunks="2" o_chunks="0" s_chunks="0">
  <tb id="0" send="1" recv="1" chan="0">
   <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
   <step s="1" type="rrcs" srcbuf="i" srcoff="1" dstbuf="i" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
   <step s="2" type="r" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
  </tb>
 </gpu>
 <gpu id="1" i_chunks="2" o_chunks="0" s_chunks="0">
  <tb id="0" send="0" recv="0" chan="0">
   <step s="0" type="s" srcbuf="i" srcoff="1" dstbuf="i" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
   <step s="1" type="rrcs" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
   <step s="2" type="r" srcbuf="i" srcoff="1" dstbuf="i" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
  </tb>
 </gpu>
</algo>
"""


def test_fused_steps_are_read() -> None:
    found = msccl.loads(RING)
    found.check()
    assert found.rounds == (
        (Transfer(0, 1, 0, "reduce"), Transfer(1, 0, 1, "reduce")),
        (Transfer(0, 1, 1, "copy"), Transfer(1, 0, 0, "copy")),
    )


def test_an_exchange_lands_in_scratch() -> None:
    """Both ranks send the chunk into which they reduce: the text says so, and it comes back as one round."""
    schedule = Schedule.of("allreduce", 2, [[Transfer(0, 1, 0, "reduce"), Transfer(1, 0, 0, "reduce")]], name="pair")
    text = msccl.dumps(schedule)
    assert text.count('type="re"') == 2 and 's_chunks="1"' in text
    assert msccl.loads(text) == schedule


def apart(coll: str, chunks: int, *gpus: str) -> str:
    """Two ranks whose inputs and outputs are different memory; a step is ``type source destination [count]``."""
    text = f'<algo name="pair" coll="{coll}" ngpus="2" nchannels="1" nchunksperloop="{chunks}" inplace="0">'
    for rank, steps in enumerate(gpus):
        text += f'<gpu id="{rank}"><tb id="0" send="{1 - rank}" recv="{1 - rank}" chan="0">'
        for at, step in enumerate(steps.split(", ")):
            kind, src, dst, count = [*step.split(), "1"][:4]
            text += f'<step s="{at}" type="{kind}" srcbuf="{src[0]}" srcoff="{src[1:]}" dstbuf="{dst[0]}" '
            text += f'dstoff="{dst[1:]}" cnt="{count}"/>'
        text += "</tb></gpu>"
    return text + "</algo>"


@pytest.mark.parametrize(
    ("coll", "chunks", "gpus", "rounds"),
    [
        ("allreduce", 2, ("s i1 o1, rrc i0 o0, s o0 o0, r i1 o1", "s i0 o0, rrc i1 o1, s o1 o1, r i0 o0"),
         (((0, 1, 1, "reduce"), (1, 0, 0, "reduce")), ((0, 1, 0, "copy"), (1, 0, 1, "copy")))),
        ("allreduce", 1, ("cpy i0 o0, s i0 s0, r i0 s0, re s0 o0",) * 2,
         (((0, 1, 0, "reduce"), (1, 0, 0, "reduce")),)),
        ("allreduce", 1, ("cpy i0 o0, r i0 s0, re s0 o0, s i0 s0", "cpy i0 o0, s i0 s0, r i0 s0, re s0 o0"),
         (((0, 1, 0, "reduce"), (1, 0, 0, "reduce")),)),  # the input is sent after the sum is there
        ("allgather", 2, ("cpy i0 o0, s i0 o0, r i0 o1", "cpy i0 o1, s i0 o1, r i0 o0"),
         (((0, 1, 0, "copy"), (1, 0, 1, "copy")),)),
        ("reduce_scatter", 2, ("cpy i0 o0, s i1 s0, r i0 s0, re s0 o0", "cpy i1 o0, s i0 s0, r i1 s0, re s0 o0"),
         (((0, 1, 1, "reduce"), (1, 0, 0, "reduce")),)),
        ("alltoall", 2, ("cpy i0 o0, s i1 o0, r i0 o1", "cpy i1 o1, s i0 o1, r i1 o0"),
         (((0, 1, 1, "copy"), (1, 0, 2, "copy")),)),
    ],
)  # fmt: skip
def test_input_and_output_may_be_apart(coll: str, chunks: int, gpus: tuple[str, str], rounds: tuple) -> None:
    found = msccl.loads(apart(coll, chunks, *gpus))
    found.check()
    assert found.rounds == tuple(tuple(Transfer(*t) for t in transfers) for transfers in rounds)


@pytest.mark.parametrize(
    ("coll", "chunks", "first", "message"),
    [
        ("allreduce", 1, "s o0 o0", "gpu 0 uses its output of chunk 0, where nothing has been put"),
        ("allreduce", 1, "r i0 s0, re s0 o0", "gpu 0 uses its output of chunk 0, where nothing has been put"),
        ("allreduce", 1, "rrc i0 o0, cpy i0 o0", "gpu 0 copies its input over chunk 0 of its output"),
        ("allreduce", 2, "cpy i0 o1", r"gpu 0: cpy from \('i', 0\) to \('o', 1\) moves no chunk to its place"),
        ("allreduce", 1, "r i0 i0", "gpu 0 writes into its input of chunk 0"),
        ("allreduce", 1, "rrc i0 o0, rrc i0 o0", "gpu 0 adds its input of chunk 0 to what it receives, though"),
        ("alltoall", 2, "cpy i0 o0 2", "gpu 0: 2 chunks from .* are of several blocks, and lie apart in a schedule"),
    ],
)
def test_what_is_not_there_is_not_used(coll: str, chunks: int, first: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        msccl.loads(apart(coll, chunks, first, "s i0 o0, s i0 o0"))
    assert caught.value.rank == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<algo", "<plan", "mismatched tag"),
        ("algo", "plan", "begins with <plan>, not <algo>"),
        ('nchunksperloop="2"', "", "KeyError: 'nchunksperloop'"),
        ('nchunksperloop="2"', 'nchunksperloop="x"', "ValueError"),
        ('ngpus="2"', 'ngpus="3"', r"ngpus is 3, but there are the gpus \[0, 1\]"),
        ('coll="allreduce"', 'coll="allsum"', "unknown collective 'allsum'"),
        ('coll="allreduce"', 'coll="alltoall"', "2 chunks are not a multiple of the 4 blocks of alltoall"),
        ('type="rrcs"', 'type="rrx"', "of type 'rrx' where step 1 should be"),
        ('step s="2"', 'step s="3"', "step 3 of type 'r' where step 2 should be"),
        ('<tb id="0"', '<tb id="4"', "the 1 threadblocks of gpu 0 are not numbered from 0, once each"),
        ('<gpu id="1"', '<gpu id="0"', "gpu 0 is there twice"),
        ('<tb id="0" send="1"', '<tb id="0" send="7"', "gpu 0, threadblock 0, step 2 waits for ever"),
        (
            'srcbuf="i" srcoff="1"',
            'srcbuf="x" srcoff="1"',
            "gpu 0, threadblock 0, step 1: buffers x and i; known: i o s",
        ),
        (
            'srcbuf="i" srcoff="1"',
            'srcbuf="i" srcoff="0"',
            r"receives of chunk 1 with \('i', 0\), which is not its own",
        ),
        (
            'srcbuf="i" srcoff="1"',
            'srcbuf="s" srcoff="1"',
            r"receives of chunk 1 with \('s', 1\), which is not its own",
        ),
        ('srcoff="1" dstbuf="i"', 'srcoff="1" dstbuf="s"', "gpu 0 reduces into scratch, which a schedule cannot say"),
        ('depid="-1" deps="-1"', 'depid="0" deps="2"', "gpu 0, threadblock 0, step 0 waits for ever"),
        ('depid="-1" deps="-1"', 'depid="5" deps="0"', "waits for step 0 of threadblock 5, which is not there"),
        (
            'srcoff="0" dstbuf="i" dstoff="0" cnt="1"',
            'srcoff="0" dstbuf="i" dstoff="0" cnt="2"',
            "expects 1 chunks .* sends 2",
        ),
        ('dstoff="1"', 'dstoff="0"', r"gpu 0 puts chunk 1 where chunk 0 belongs"),
        ('type="s" srcbuf="i"', 'type="s" srcbuf="s"', "sends from scratch"),
    ],
)
def test_what_is_not_that_format_is_refused(old: str, new: str, message: str) -> None:
    text = RING.replace(old, new) if old == "algo" else RING.replace(old, new, 1)
    with pytest.raises(ScheduleError, match=message):
        msccl.loads(text)


def test_a_message_that_nobody_receives_is_refused() -> None:
    """One send more, after all that the result needs: it would meet the first receive of the next operation."""
    last = '   <step s="2" type="r" srcbuf="i" srcoff="0"'
    more = RING.replace(
        last, '   <step s="2" type="s" srcbuf="i" srcoff="1" dstbuf="i" dstoff="1" cnt="1"/>\n' + last, 1
    )
    more = more.replace(last, last.replace('s="2"', 's="3"'), 1)
    with pytest.raises(
        ScheduleError, match="gpu 0 sends chunk 1 to gpu 1 by channel 0, where nobody receives it"
    ) as caught:
        msccl.loads(more)
    assert (caught.value.rank, caught.value.chunk) == (0, 1)


def test_a_race_is_refused() -> None:
    """Without the word that a send waits for what it sends, the result depends on who comes first."""
    text = msccl.dumps(lookup("ring").build("allreduce", parse("star:3"), 1, 0, None))
    raced = re.sub(r'depid="\d+" deps="\d+"', 'depid="-1" deps="-1"', text)
    assert raced != text
    with pytest.raises(ScheduleError, match="is used after it has changed there"):
        msccl.loads(raced)


def test_a_wrong_program_is_read_but_not_proved() -> None:
    with pytest.raises(ScheduleError, match=r"rank \d, chunk \d"):
        msccl.loads(RING.replace('type="rrcs"', 'type="rcs"', 1)).check()


def test_what_the_format_cannot_say() -> None:
    schedule = lookup("ring").build("allreduce", parse("star:3"), 1, 0, None)
    with pytest.raises(ScheduleError, match="rank 1's view"):
        msccl.dumps(schedule.for_rank(1))
    weighted = Schedule("allreduce", 3, schedule.table, 3, weights=(1, 2, 3))
    with pytest.raises(ScheduleError, match="this schedule has weights"):
        msccl.dumps(weighted)

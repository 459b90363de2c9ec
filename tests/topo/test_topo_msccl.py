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
        ('<tb id="0"', '<tb id="4"', "threadblock 4 among 1"),
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


def test_a_race_is_refused() -> None:
    """Without the word that a send waits for what it sends, the result depends on who comes first."""
    text = msccl.dumps(lookup("ring").build("allreduce", parse("star:3"), 1, 0, None))
    raced = re.sub(r'depid="\d+" deps="\d+"', 'depid="-1" deps="-1"', text)
    assert raced != text
    with pytest.raises(ScheduleError):
        msccl.loads(raced).check()


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

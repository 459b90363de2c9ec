"""Every algorithm on every fabric that it fits: proved, lowered, proved again, run, and compared with numpy."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from topo_reference import PER_RANK, ROOTED, counts_of, run

from hrdma.errors import ScheduleError
from hrdma.topo import fabrics
from hrdma.topo.algorithms import ALGORITHMS, multitree, server
from hrdma.topo.algorithms.on_fabric import known, lookup, refusal
from hrdma.topo.lower import lower
from hrdma.topo.program import BORROW, RECV, RECV_REDUCE, SEND, ProgramSpec
from hrdma.topo.schedule import CHUNK, OP, REDUCE, ROUND, SPAN, Schedule
from hrdma.topo.verify import check_programs

parse = cache(fabrics.parse)  # of few fabrics, thousands of times
FABRICS = (
    "ring:2", "ring:5", "star:4", "star:6", "star:7", "mesh:2x3", "mesh:3x3", "torus:2x2", "torus:4x4", "torus:3x2", "torus:3x4",
    "torus:2x2x3", "bcube:2,1", "bcube:3,2", "bcube:2,3", "bcube:4x3", "fat_tree:4", "leaf_spine:4,2,2", "leaf_spine:2,3,2",
    "cluster:4,1,2", "cluster:4,3,2", "cluster:2,4,1", "cluster:1,4,1", "cluster:3,2,2",
)  # fmt: skip
OWN = [name for name in known() if name not in ALGORITHMS]
CASES = [
    (text, name, collective)
    for text in FABRICS
    for name in (*OWN, "server-2")
    for collective in lookup(name).collectives
    if not refusal(name, collective, parse(text))
]


def _parts(name: str, collective: str) -> tuple[int, ...]:
    return (1, 2) if collective in lookup(name).parts else (1,)


@pytest.mark.parametrize(("text", "name", "collective"), CASES)
def test_proved_and_one_rank_alone_builds_its_view(text: str, name: str, collective: str) -> None:
    fabric = parse(text)
    for root in {0, fabric.ranks - 1} if collective in ROOTED else {0}:
        for parts in _parts(name, collective):
            whole = lookup(name).build(collective, fabric, parts, root, None)
            whole.check()
            nics = [fabric.nics(fabric.host_of(rank)) for rank in range(fabric.ranks)]
            assert all(t.lane < nics[t.src] for transfers in whole.rounds for t in transfers)
            for rank in {0, fabric.ranks // 2, fabric.ranks - 1}:
                view = lookup(name).build(collective, fabric, parts, root, rank)
                assert view.view == rank
                assert sorted(view.table.tolist()) == sorted(whole.for_rank(rank).table.tolist())


@pytest.mark.parametrize(
    ("text", "name", "collective"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (parse(case[0]).ranks > 8))
        for case in CASES
        if parse(case[0]).ranks <= 12
    ],
)
def test_computes_what_numpy_does(text: str, name: str, collective: str) -> None:
    fabric = parse(text)
    size, case = fabric.ranks, 0
    ways = ({"credits": 0}, {"credits": 1, "mapped": True}, {"credits": 2})
    for root in {0, size - 1} if collective in ROOTED else {0}:
        schedule = lookup(name).build(collective, fabric, _parts(name, collective)[-1], root, None)
        # what is relayed must be known to who relays: only equal blocks
        kinds = ("one", "even") if collective == "alltoall" else ("zero", "few", "odd")
        for kind in kinds:
            counts = counts_of(collective, size, kind)
            for in_place in (False, True):
                programs = [lower(schedule, r, counts[r], 8, in_place=in_place) for r in range(size)]
                run(programs, collective, counts, root, in_place, seed=case, prove=kind != "zero", **ways[case % 3])
                case += 1


@pytest.mark.parametrize(
    ("fabric", "steps"),
    [("torus:2x2", 2), ("torus:4x4", 5), ("torus:8x8", 17), ("mesh:4x4", 10), ("mesh:8x8", 32), ("bcube:3,2", 6),
     ("bcube:4,2", 8), ("bcube:2,3", 3)],
)  # fmt: skip
def test_multitree_steps(fabric: str, steps: int) -> None:
    made = parse(fabric)
    edges = multitree.grow(made)
    assert edges[-1][0] + 1 == steps
    assert multitree.build("allreduce", made).nrounds == 2 * steps
    assert len({(tree, child) for _, tree, _, child, _, _ in edges}) == len(edges) == made.hosts * (made.hosts - 1)
    out = [(step, parent, nic) for step, _, parent, _, nic, _ in edges]
    into = [(step, child, nic) for step, _, _, child, _, nic in edges]
    assert len(set(out)) == len(out) and len(set(into)) == len(into)  # no link is taken twice in a step


SMALL = [case for case in CASES if 3 < parse(case[0]).ranks <= 12]
LOST = (
    r"ends without the contribution|by a rank that does not have it|holds nothing of it|an average could not be scaled"
)
TWICE = r"gets the contribution of rank \d+ twice"
CLASH = r"overlap but differ in extent|is both copied to and reduced into|is copied to from ranks"


def _sabotaged(table: np.ndarray, at: int, kind: str, chunks: int) -> np.ndarray | None:
    """The table with one transfer changed; None where that kind of change would be none."""
    bad = table.copy()
    if kind == "lost":
        return np.delete(bad, at, axis=0)
    if kind == "doubled":
        again = bad[at].copy()
        again[ROUND] = bad[-1, ROUND] + 1
        return np.vstack([bad, again]) if again[OP] == REDUCE else None  # a copy that comes twice changes nothing
    if kind == "misplaced":
        room = chunks - bad[at, SPAN]
        bad[at, CHUNK] = (bad[at, CHUNK] + 1) % (room + 1)
        return bad if room else None
    bad[at, OP] ^= 1
    return bad


@pytest.mark.parametrize(("text", "name", "collective"), SMALL)
def test_sabotage_is_caught(text: str, name: str, collective: str) -> None:
    """A lost, a doubled and a misplaced chunk in any transfer, a reduction where a copy is."""
    good = lookup(name).build(collective, parse(text), 1, 1 if collective in ROOTED else 0, None)
    good.check()
    rng = random.Random(f"{text} {name} {collective}")
    at = rng.randrange(len(good.table))
    for kind, match in (
        ("lost", LOST), ("doubled", TWICE), ("misplaced", f"{LOST}|{TWICE}|{CLASH}"),
        ("turned", f"{LOST}|{TWICE}|{CLASH}|is reduced into, which"),
    ):  # fmt: skip
        bad = _sabotaged(good.table, at, kind, good.chunks)
        if bad is None:
            continue
        with pytest.raises(ScheduleError, match=match) as caught:
            replace(good, table=bad).check()
        assert caught.value.rank is not None and caught.value.chunk is not None, kind


@pytest.mark.parametrize(("text", "name", "collective"), [case for case in SMALL if case[2] == "allreduce"])
def test_a_cycle_of_dependencies_is_caught(text: str, name: str, collective: str) -> None:
    """One that would begin by sending sends nothing before it has received everything, for which others need what it has."""
    schedule = lookup(name).build(collective, parse(text), 1, 0, None)
    programs = [lower(schedule, rank, 24 * schedule.size, 8, in_place=True) for rank in range(schedule.size)]
    check_programs(programs)
    first = [
        rank for rank, spec in enumerate(programs) if ((spec.instrs["op"] == SEND) & (spec.instrs["after"] == 0)).any()
    ]
    at = random.Random(f"{text} {name}").choice(first)
    spec = programs[at]
    sends = np.flatnonzero(spec.instrs["op"] == SEND)
    for last in np.flatnonzero(np.isin(spec.instrs["op"], (RECV, RECV_REDUCE, BORROW))).tolist():
        for send in sends.tolist():
            spec = _waiting(spec, send, last)
    with pytest.raises(ScheduleError, match=r"deadlock: instruction \d+ can never end or start|waits for itself"):
        check_programs([*programs[:at], spec, *programs[at + 1 :]])


def _waiting(spec: ProgramSpec, index: int, other: int) -> ProgramSpec:
    """The program when instruction `index` also waits for `other`."""
    instrs, unlocks = spec.instrs.copy(), spec.unlocks.tolist()
    at = int(instrs["unlock"][other]) + int(instrs["nunlock"][other])
    instrs["unlock"] += ((instrs["unlock"] >= at) & (np.arange(len(instrs)) != other)).astype(np.uint32)
    unlocks.insert(at, index)
    instrs["nunlock"][other] += 1
    instrs["after"][index] += 1
    return replace(spec, instrs=instrs, unlocks=np.array(unlocks, np.uint32))


@pytest.mark.parametrize("name", ["bml", "hips-ring", "multitree"])
def test_transfers_that_wait_for_each_other_are_caught(name: str) -> None:
    """The allgather's way backwards: everyone waits for what only the other could give."""
    table = lookup(name).build("allgather", parse("bcube:3,2"), 1, 0, None).table.copy()
    table[:, 0] = table[-1, 0] - table[:, 0]
    table = table[table[:, 0].argsort(kind="stable")]
    split = 1 if name != "bml" else 2
    with pytest.raises(ScheduleError, match=r"is sent to rank \d by a rank that does not have it"):
        Schedule("allgather", 9, table, split).check()


@pytest.mark.parametrize(
    ("name", "collective", "fabric", "why"),
    [
        ("bml", "allreduce", "torus:4x4", "it needs a bcube; torus:4x4 is none"),
        ("torus", "allreduce", "bcube:3,2", "it needs a torus or ring; bcube:3,2 is none"),
        ("cluster-ring", "allreduce", "star:4", "it needs a cluster"),
        ("hips-halving", "allreduce", "bcube:3,2", "powers of two; those of bcube:3,2 are"),
        ("multitree", "allreduce", "cluster:2,2,1", "one rank per host"),
        ("multitree", "allreduce", "torus:17x16", "272 hosts takes too long"),
        ("relay", "alltoall", "star:4", "it needs a bcube, torus or ring"),
        ("bml", "alltoall", "bcube:3,2", "cannot do alltoall"),
        ("hips-mesh", "allreduce", "star:1", "has one rank"),
        ("server-5", "allreduce", "star:4", "it has 5 servers among 4 ranks"),
    ],
)
def test_what_does_not_fit_says_why(name: str, collective: str, fabric: str, why: str) -> None:
    assert why in refusal(name, collective, parse(fabric))


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="unknown algorithm 'magic'"):
        lookup("magic")
    with pytest.raises(ValueError, match="0 servers among 4 ranks"):
        server.build(4, 0)


def test_bml_is_the_published_schedule() -> None:
    """BCube(3, 2): 18 blocks, 4 rounds, every NIC with two partners in each, 3 then 1 blocks, 1 then 3 back."""
    schedule = lookup("bml").build("allreduce", parse("bcube:3,2"), 1, 0, None)
    assert (schedule.chunks, schedule.nrounds, len(schedule.table)) == (18, 4, 9 * 2 * 2 * 4)
    for rnd, transfers in enumerate(schedule.rounds):
        assert {t.span for t in transfers} == {(3, 1, 1, 3)[rnd]}
        assert {(t.src, t.lane) for t in transfers} == {(rank, nic) for rank in range(9) for nic in range(2)}


def test_uneven_alltoall_cannot_be_relayed() -> None:
    schedule = lookup("relay").build("alltoall", parse("bcube:2,2"), 1, 0, None)
    counts = counts_of("alltoall", 4, "odd")
    for rank in range(4):
        with pytest.raises(ScheduleError, match=r"relays chunk .* give one count for all blocks"):
            lower(schedule, rank, counts[rank], 8)


def test_per_rank_blocks_stay_together() -> None:
    for name in ("bml", "torus", "multitree"):
        fabric = parse("torus:3x3" if name == "torus" else "bcube:3,2")
        for collective in set(PER_RANK) & set(lookup(name).collectives):
            schedule = lookup(name).build(collective, fabric, 1, 0, None)
            assert schedule.chunks == fabric.ranks * schedule.split

"""The proof of schedules: right ones pass, each kind of wrong one is refused with rank and chunk."""

from __future__ import annotations

import random

import pytest
from topo_reference import run

from hrdma.errors import ScheduleError
from hrdma.topo.algorithms import ALGORITHMS, build
from hrdma.topo.lower import lower
from hrdma.topo.schedule import Schedule, Transfer

CASES = [(name, collective) for name, algorithm in ALGORITHMS.items() for collective in algorithm.collectives]


def _of(collective: str, size: int, *rounds: list[Transfer], **fields) -> Schedule:
    return Schedule.of(collective, size, rounds, **fields)


def _refused(schedule: Schedule, match: str, rank: int | None = None, chunk: int | None = None, **how) -> None:
    with pytest.raises(ScheduleError, match=match) as caught:
        schedule.check(**how)
    if rank is not None:
        assert (caught.value.rank, caught.value.chunk) == (rank, chunk)


R, C = "reduce", "copy"


def test_lost() -> None:
    _refused(
        _of("allreduce", 2, [Transfer(0, 1, 0, R)]), "rank 0, chunk 0: ends without the contribution of rank 1", 0, 0
    )
    _refused(_of("broadcast", 3, [Transfer(0, 1, 0)]), "rank 2, chunk 0: ends without", 2, 0)


def test_doubled() -> None:
    twice = _of("reduce", 2, [Transfer(1, 0, 0, R)], [Transfer(1, 0, 0, R)])
    _refused(twice, "rank 0, chunk 0, round 1: gets the contribution of rank 1 twice", 0, 0)


def test_misplaced() -> None:
    _refused(
        _of("scatter", 3, [Transfer(0, 1, 2), Transfer(0, 2, 1)]),
        "rank 1, chunk 1: ends without the contribution of rank 0",
        1,
        1,
    )


def test_reordered() -> None:
    _refused(
        _of("broadcast", 3, [Transfer(1, 2, 0)], [Transfer(0, 1, 0)]),
        "sent to rank 2 by a rank that does not have it",
        1,
        0,
    )


def test_clashes_within_a_round() -> None:
    _refused(_of("allreduce", 3, [Transfer(0, 2, 0, R), Transfer(1, 2, 0, C)]), "both copied to and reduced", 2, 0)
    _refused(
        _of("broadcast", 3, [Transfer(0, 2, 0), Transfer(0, 1, 0)], [Transfer(0, 2, 0), Transfer(1, 2, 0)]),
        "at once",
        2,
        0,
    )
    overlap = [Transfer(0, 2, 0, R, span=2), Transfer(1, 2, 1, R)]
    _refused(_of("allreduce", 3, overlap, split=2), "overlap but differ", 2, 1)
    _refused(_of("allgather", 2, [Transfer(0, 1, 0, R), Transfer(1, 0, 1)]), "allgather does not do", 1, 0)


def test_out_of_range() -> None:
    _refused(_of("allreduce", 2, [Transfer(0, 2, 0, R)]), r"has destination 2, not in \[0, 2\)", 2, 0)
    _refused(_of("allreduce", 2, [Transfer(0, 1, 1, R)]), r"span 1 is not in \[0, 1\)", 1, 1)
    _refused(_of("allreduce", 2, [Transfer(0, 1, 0, R, span=0)]), "span 0", 1, 0)
    _refused(_of("allreduce", 2, [Transfer(1, 1, 0, R)]), "to itself", 1, 0)
    _refused(_of("allreduce", 2, root=2), "root 2")
    _refused(_of("allreduce", 2, weights=(1, 2)), "weights must be 1 numbers")
    _refused(_of("everything", 2), "unknown collective 'everything'")
    _refused(build("ring", "allreduce", 3).for_rank(1), "rank 1's view", 1, None)
    with pytest.raises(ScheduleError, match="not 'add'"):
        _of("allreduce", 2, [Transfer(0, 1, 0, "add")])
    table = build("ring", "allreduce", 3).table[::-1].copy()
    _refused(Schedule("allreduce", 3, table, split=3), "rounds must count up")


def test_a_partial_result_that_looks_final_is_refused() -> None:
    # rank 0 reduces 0 + 1 and hands it over as a copy: right as a sum, but an average would be scaled too early
    schedule = _of(
        "reduce",
        3,
        [Transfer(1, 0, 0, R), Transfer(2, 1, 0, C)],
        [Transfer(0, 2, 0, C)],
        [Transfer(1, 2, 0, R)],
        root=2,
    )
    _refused(schedule, "an average could not be scaled", 0, 0)


def test_order() -> None:
    chain = _of("reduce", 3, [Transfer(0, 1, 0, R)], [Transfer(1, 2, 0, R)], root=2)
    chain.check(ordered=True)
    _refused(chain, "more than one pass", 2, 0, ordered=True, single=True)
    back = _of("reduce", 3, [Transfer(2, 1, 0, R)], [Transfer(1, 0, 0, R)])
    _refused(back, "not reduced left to right", 0, 0, ordered=True)


@pytest.mark.parametrize(("name", "collective"), CASES)
def test_what_the_proof_lets_pass_is_right(name: str, collective: str) -> None:
    """Random damage: either the proof refuses it, or the damaged schedule still computes the collective."""
    refused = 0
    for seed in range(40):
        rng = random.Random(f"{name} {collective} {seed}")
        size = rng.randint(2, 6)
        good = build(
            name,
            collective,
            size,
            parts=rng.randint(1, 2),
            root=rng.randrange(size) if collective in ("reduce", "broadcast", "gather", "scatter") else 0,
        )
        table = good.table.tolist()
        row = rng.choice(table)
        kind = rng.choice(("drop", "double", "src", "dst", "chunk", "round", "op"))
        if kind == "drop":
            table.remove(row)
        elif kind == "double":
            table.append([row[0] + rng.randint(0, 2), *row[1:]])
        elif kind == "round":
            row[0] = rng.randint(0, good.nrounds)
        elif kind == "op":
            row[5] ^= 1
        else:
            row[{"src": 1, "dst": 2, "chunk": 3}[kind]] = rng.randrange(good.chunks if kind == "chunk" else size)
        table.sort(key=lambda r: r[0])
        rounds: list[list[Transfer]] = [[] for _ in range(max((r[0] for r in table), default=0) + 1)]
        for rnd, src, dst, chunk, span, op, lane in table:
            rounds[rnd].append(Transfer(src, dst, chunk, ("copy", "reduce")[op], lane, span))
        bad = _of(collective, size, *rounds, split=good.split, root=good.root)
        try:
            bad.check()
        except ScheduleError as error:
            assert error.rank is not None and error.chunk is not None
            refused += 1
            continue
        if collective == "barrier":
            continue
        counts = [60] * size
        programs = [lower(bad, r, counts[r], 8) for r in range(size)]
        run(programs, collective, counts, good.root, False, seed=seed)
    assert refused >= 15


@pytest.mark.parametrize("seed", range(60))
def test_random_right_schedules_pass_and_run(seed: int) -> None:
    """Each chunk up a random tree to a random rank and down another, in random rounds, with random spans and ops."""
    rng = random.Random(seed)
    size, split = rng.randint(2, 7), rng.randint(1, 6)
    rounds: list[list[Transfer]] = [[] for _ in range(2 * size + 4)]
    chunk = 0
    while chunk < split:
        span = rng.randint(1, min(2, split - chunk))
        order = rng.sample(range(size), size)  # order[0] is the root; parents come before children
        depth = {order[0]: 0}
        start = rng.randint(0, 2)
        up = []
        for i, rank in enumerate(order[1:], 1):
            parent = order[rng.randrange(i)]
            depth[rank] = depth[parent] + 1
            up.append((rank, parent))
        for rank, parent in up:
            rounds[start + size - 1 - depth[rank]].append(
                Transfer(rank, parent, chunk, R, lane=rng.randrange(3), span=span)
            )
        again = [order[0], *rng.sample(order[1:], size - 1)]
        level = {again[0]: 0}
        for i, rank in enumerate(again[1:], 1):
            parent = again[rng.randrange(i)]
            level[rank] = level[parent] + 1
            rounds[start + size - 1 + level[parent]].append(Transfer(parent, rank, chunk, C, span=span))
        chunk += span
    schedule = _of("allreduce", size, *rounds, split=split)
    schedule.check()
    for count in (0, 2, 333):
        for in_place in (False, True):
            programs = [lower(schedule, r, count, 8, in_place=in_place, scratch=1024) for r in range(size)]
            run(programs, "allreduce", [count] * size, 0, in_place, seed=seed, credits=seed % 3, mapped=bool(seed & 1))


def test_exchanges_and_swaps_within_a_round_do_not_deadlock() -> None:
    """Two ranks replace each other's value in one round, in place: neither may wait for the other to be read first."""
    swap = _of("reduce", 2, [Transfer(0, 1, 0, C), Transfer(1, 0, 0, C)], [Transfer(1, 0, 0, R)])
    swap.check()
    for in_place in (False, True):
        for seed in range(6):
            programs = [lower(swap, r, 50, 8, in_place=in_place) for r in range(2)]
            run(programs, "reduce", [50, 50], 0, in_place, seed=seed, mapped=bool(seed & 1), credits=seed % 3)

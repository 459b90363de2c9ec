"""Every algorithm, size, kind of counts: proved, lowered, proved again, run, and compared with numpy."""

from __future__ import annotations

import numpy as np
import pytest
from topo_reference import PER_RANK, REDUCING, ROOTED, counts_of, mixed, run

from hrdma.errors import ScheduleError
from hrdma.topo.algorithms import ALGORITHMS, build
from hrdma.topo.interpret import execute
from hrdma.topo.lower import lower
from hrdma.topo.program import REDUCE_MAX_SRC
from hrdma.topo.schedule import Schedule

CASES = [(name, collective) for name, algorithm in ALGORITHMS.items() for collective in algorithm.collectives]
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16)


def _roots(collective: str, size: int) -> list[int]:
    return sorted({0, size // 2, size - 1}) if collective in ROOTED else [0]


@pytest.mark.parametrize(("name", "collective"), CASES)
@pytest.mark.parametrize("size", SIZES)
def test_computes_what_numpy_does(name: str, collective: str, size: int) -> None:
    ways = ({"credits": 0}, {"credits": 0, "mapped": True}, {"credits": 2, "mapped": True}, {"credits": 1})
    case = 0
    for root in _roots(collective, size):
        for parts in (1, 3) if collective in ALGORITHMS[name].parts else (1,):
            schedule = build(name, collective, size, parts=parts, root=root)
            for kind in ("zero", "one", "few", "odd", "even") if size < 9 else ("few", "odd"):
                counts = counts_of(collective, size, kind)
                for in_place in (False, True):
                    lands = (0, 1, 64)[case // len(ways) % 3]  # nothing, all, what is not short; ranks may differ
                    programs = [
                        lower(schedule, r, counts[r], 8, in_place=in_place, landing=lands * (case % 5 > 0 or r % 2))
                        for r in range(size)
                    ]
                    run(programs, collective, counts, root, in_place, seed=case, **ways[case % len(ways)])
                    case += 1


@pytest.mark.parametrize(("name", "collective"), [case for case in CASES if case[1] in REDUCING])
@pytest.mark.parametrize("size", (REDUCE_MAX_SRC + 1, 2 * REDUCE_MAX_SRC + 2))
def test_more_ranks_than_an_instruction_takes_operands(name: str, collective: str, size: int) -> None:
    """In place the own operand lies where the result belongs, and may come last."""
    schedule = build(name, collective, size, root=size - 1)
    counts = [[1] * size if collective in PER_RANK else size] * size
    for in_place in (False, True):
        programs = [lower(schedule, rank, counts[rank], 8, in_place=in_place) for rank in range(size)]
        op = mixed if collective in ALGORITHMS[name].ordered else np.add
        run(programs, collective, counts, size - 1, in_place, op, prove=size < 100, mapped=in_place)


@pytest.mark.parametrize(("name", "collective"), CASES)
@pytest.mark.parametrize("size", (1, 2, 5, 8))
def test_one_rank_alone_builds_its_view(name: str, collective: str, size: int) -> None:
    for root in _roots(collective, size):
        whole = build(name, collective, size, parts=2, root=root)
        counts = counts_of(collective, size, "odd")
        for rank in range(size):
            view = build(name, collective, size, parts=2, root=root, rank=rank)
            assert view.view == rank
            assert sorted(view.table.tolist()) == sorted(whole.for_rank(rank).table.tolist())
            a, b = lower(view, rank, counts[rank], 8), lower(whole, rank, counts[rank], 8)
            assert sorted(a.instrs["tag"].tolist()) == sorted(b.instrs["tag"].tolist())


@pytest.mark.parametrize(("name", "collective"), CASES)
@pytest.mark.parametrize("size", (2, 3, 8))
def test_ordered_is_what_the_table_says(name: str, collective: str, size: int) -> None:
    schedule = build(name, collective, size, parts=2)
    schedule.check()
    if collective not in REDUCING:
        return
    if collective in ALGORITHMS[name].ordered:
        schedule.check(ordered=True, single=True)
        counts = counts_of(collective, size, "odd")
        for in_place in (False, True):
            programs = [lower(schedule, r, counts[r], 8, in_place=in_place, landing=r % 2) for r in range(size)]
            run(programs, collective, counts, 0, in_place, op=mixed, mapped=True, seed=size)
            run(programs, collective, counts, 0, in_place, op=mixed, credits=2, seed=size)
    elif size == 8:
        with pytest.raises(ScheduleError, match=r"rank \d, chunk \d"):
            schedule.check(ordered=True)


@pytest.mark.parametrize(("name", "collective"), [case for case in CASES if case[1] in REDUCING])
@pytest.mark.parametrize("size", (1, 2, 3, 6, 8))
def test_average_is_scaled_once(name: str, collective: str, size: int) -> None:
    schedule = build(name, collective, size, parts=2)
    programs = [lower(schedule, r, 40, 8) for r in range(size)]
    blocks = size if collective in PER_RANK else 1
    data = [np.arange(40.0 * blocks) + r for r in range(size)]
    outputs = execute(programs, data, average=True, seed=3)
    mean = np.mean(data, axis=0)
    for rank, out in enumerate(outputs):
        want = mean[40 * rank : 40 * rank + 40] if collective == "reduce_scatter" else mean[: len(out)]
        np.testing.assert_allclose(out, want, rtol=1e-12)


@pytest.mark.parametrize(("name", "collective"), [case for case in CASES if case[1] == "allreduce"])
@pytest.mark.parametrize("size", (2, 3, 7, 8))
def test_all_ranks_hold_the_same_bits(name: str, collective: str, size: int) -> None:
    programs = [lower(build(name, collective, size, parts=2), r, 500, 8, landing=256 * (r % 3)) for r in range(size)]
    rng = np.random.default_rng(size)
    outputs = execute(programs, [rng.integers(0, 1000, 500) for _ in range(size)], mixed, seed=1)
    assert all(np.array_equal(outputs[0], out) for out in outputs[1:])


def test_more_operands_than_one_instruction_takes() -> None:
    size = 70
    schedule = build("exchange", "allreduce", size)
    schedule.check(ordered=True)
    programs = [lower(schedule, r, 3, 8) for r in range(size)]
    run(programs, "allreduce", [3] * size, 0, False, op=mixed, credits=1)
    assert programs[0].instrs["nref"].max() == 64


def test_scratch_is_used_again_and_bounded() -> None:
    for name, collective in (
        ("direct", "allreduce"),
        ("direct", "reduce_scatter"),
        ("ring", "reduce_scatter"),
        ("ring", "reduce"),
    ):
        size, count = 6, 3 << 13
        schedule = build(name, collective, size, parts=16)
        nbytes = count * 8 * (size if collective == "reduce_scatter" else 1)
        programs = [lower(schedule, r, count, 8, scratch=nbytes // 8) for r in range(size)]
        plenty = [lower(schedule, r, count, 8, scratch=1 << 30) for r in range(size)]
        most = (
            0.4 * nbytes if (name, collective) == ("ring", "reduce_scatter") else nbytes / 4
        )  # a ring holds two shares
        assert max(p.tmp_bytes for p in programs) <= most
        assert max(p.tmp_bytes for p in plenty) > max(p.tmp_bytes for p in programs)
        for seed in range(4):
            run(programs, collective, [count] * size, 0, False, seed=seed, credits=seed % 2, mapped=seed > 1)


def test_small_exchange_is_three_instructions() -> None:
    schedule = build("exchange", "allreduce", 2)
    for in_place in (False, True):
        assert len(lower(schedule, 0, 16, 4, in_place=in_place).instrs) == 3


def test_weights_and_window() -> None:
    rounds = build("ring", "allreduce", 3).rounds
    schedule = Schedule.of("allreduce", 3, rounds, split=3, weights=(1, 0, 5), window=1)
    schedule.check()
    for seed in range(4):
        programs = [lower(schedule, r, 100, 8) for r in range(3)]
        run(programs, "allreduce", [100] * 3, 0, False, seed=seed, credits=seed % 2)
    assert {16, 84} >= set((programs[0].instrs["len"] // 8).tolist())


def test_strict_credits_suffice_when_sends_start_in_order() -> None:
    """One credit per pair, needed even when a receive is posted: nothing stalls without scratch reuse."""
    for name, collective in CASES:
        schedule = build(name, collective, 5)
        counts = counts_of(collective, 5, "odd")
        programs = [lower(schedule, r, counts[r], 8) for r in range(5)]
        run(programs, collective, counts, 0, False, credits=1, strict=True, seed=5)


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown algorithm 'tree'"):
        build("tree", "allreduce", 4)
    with pytest.raises(ValueError, match="ring cannot do alltoall"):
        build("ring", "alltoall", 4)
    with pytest.raises(ValueError, match="out of range"):
        build("ring", "broadcast", 4, root=4)

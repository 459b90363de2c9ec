"""Costs: closed forms against the critical path, and the choice that follows from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hrdma.errors import ScheduleError
from hrdma.topo.algorithms import ALGORITHMS, build
from hrdma.topo.choice import choose
from hrdma.topo.cost import DEFAULT_COST, Cost, effort, predict

WIRE = Cost(alpha=5e-6, beta=1e-9, gamma=2e-10)
EXACT = [
    ("ring", "allreduce"), ("ring", "reduce_scatter"), ("ring", "allgather"), ("ring", "broadcast"), ("ring", "reduce"),
    ("doubling", "allreduce"), ("halving", "allreduce"), ("halving", "allgather"), ("halving", "reduce_scatter"),
    ("direct", "allgather"), ("direct", "alltoall"),
    ("direct", "broadcast"), ("direct", "gather"), ("direct", "scatter"), ("pairwise", "alltoall"), ("binomial",
    "broadcast"), ("binomial", "scatter"), ("binomial", "gather"), ("dissemination", "barrier"), ("direct", "barrier"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "collective"), EXACT)
@pytest.mark.parametrize("size", (2, 4, 8, 16))
def test_closed_form_is_the_critical_path(name: str, collective: str, size: int) -> None:
    for nbytes in (0, 1 << 12, 1 << 24):
        nbytes = 0 if collective == "barrier" else nbytes
        for cost in (WIRE, Cost(5e-6, 1e-9, 0.0), Cost(1e-6, 0.0, 3e-10)):
            form = ALGORITHMS[name].work(collective, size, nbytes).seconds(size, cost)
            assert predict(build(name, collective, size), nbytes, cost) == pytest.approx(form, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(("name", "collective"), [(n, c) for n, a in ALGORITHMS.items() for c in a.collectives])
def test_closed_form_is_near_the_critical_path(name: str, collective: str) -> None:
    """Where parts, odd sizes or a many-operand reduction make the form approximate: within a factor."""
    for size in (3, 5, 8):
        for nbytes in (1 << 10, 1 << 22):
            nbytes = 0 if collective == "barrier" else nbytes
            for parts in (1, 4):
                parts = parts if collective in ALGORITHMS[name].parts else 1
                for cost in (WIRE, DEFAULT_COST["tcp"]):
                    form = ALGORITHMS[name].work(collective, size, nbytes, parts).seconds(size, cost, parts)
                    path = predict(build(name, collective, size, parts=parts), nbytes, cost)
                    assert 0.4 < form / path < 2.6, (size, nbytes, parts, form, path)


def test_the_ring_moves_least_and_exchange_starts_fastest() -> None:
    assert choose("allreduce", 8, 64, WIRE).algorithm in ("exchange", "doubling")
    large = choose("allreduce", 8, 1 << 26, WIRE)
    assert large.algorithm in ("direct", "ring", "halving") and large.parts > 1
    assert large.seconds == pytest.approx(2 * 7 / 8 * (1 << 26) * WIRE.beta, rel=0.1)


def test_deterministic_takes_only_rank_order() -> None:
    for nbytes in (64, 1 << 14, 1 << 26):
        for size in (2, 5, 64):
            for collective in ("allreduce", "reduce", "reduce_scatter"):
                names = {name for name, _, _ in choose(collective, size, nbytes, WIRE, deterministic=True).table}
                assert names <= {"direct", "exchange"}
    assert len({name for name, _, _ in choose("broadcast", 8, 1, WIRE, deterministic=True).table}) == 3


def test_shared_cores_count() -> None:
    alone = Cost(1e-6, 1e-10, 1e-10, pull=True)
    shared = Cost(1e-6, 1e-10, 1e-10, pull=True, cores=2)
    schedule = build("ring", "allreduce", 8)
    assert predict(schedule, 1 << 24, shared) == pytest.approx(4 * predict(schedule, 1 << 24, alone), rel=0.01)
    work = ALGORITHMS["ring"].work("allreduce", 8, 1 << 24)
    assert work.seconds(8, shared) == pytest.approx(4 * work.seconds(8, alone), rel=0.01)
    assert work.seconds(8, Cost(1e-6, 1e-10, 1e-10, cores=8)) == work.seconds(8, Cost(1e-6, 1e-10, 1e-10))
    # a broadcast where only the root works does not get slower by sharing
    assert ALGORITHMS["direct"].work("broadcast", 8, 0).seconds(8, shared) == pytest.approx(7e-6)


def test_where_cores_are_shared_several_peers_at_a_time_are_asked_sooner() -> None:
    tight, wide = Cost(1e-6, 0, 0, eager=1000, loose=100, cores=2), Cost(1e-6, 0, 0, eager=1000, loose=100, cores=4)
    assert tight.message(500) == 1e-6 and tight.message(500, loose=True) == pytest.approx(3e-6)
    direct, halving = (ALGORITHMS[name].work("allreduce", 4, 2000) for name in ("direct", "halving"))
    assert direct.seconds(4, wide) == pytest.approx(6e-6) and direct.seconds(4, tight) == pytest.approx(36e-6)
    assert halving.seconds(4, tight) == pytest.approx(8e-6)


def test_long_messages_ask_first() -> None:
    cost = Cost(1e-6, 0, 0, latency=1e-7, eager=1000)
    assert cost.message(1000) == 1e-6 and cost.message(1001) == pytest.approx(3.2e-6)
    assert Cost(1e-6, 0, 0, eager=1000, pull=True).message(1001) == pytest.approx(2e-6)
    for nbytes in (2000, 2002):
        form = ALGORITHMS["ring"].work("allgather", 2, nbytes).seconds(2, cost)
        assert predict(build("ring", "allgather", 2), nbytes, cost) == pytest.approx(form)
    # a few long pieces rather than many, where nothing is gained by more
    assert choose("allreduce", 2, 1 << 20, DEFAULT_COST["tcp"]).parts == 1


def test_a_step_waits_for_the_ranks_of_a_core() -> None:
    cost = Cost(0, 0, 0, latency=1e-7, switch=1e-6, cores=2)
    assert [round(cost.step(size) * 1e7) for size in (1, 2, 3, 4, 5, 8)] == [1, 1, 11, 11, 21, 31]
    for name in ("exchange", "doubling", "ring"):
        form = ALGORITHMS[name].work("allreduce", 4, 100).seconds(4, cost)
        assert predict(build(name, "allreduce", 4), 100, cost) == pytest.approx(form)


def test_ranks_that_idle_leave_their_core_to_others() -> None:
    # three ranks on two cores: one core has two of them, and doubling keeps only two busy at a time
    cost = Cost(1e-6, 0, 0, cores=2)
    assert ALGORITHMS["exchange"].work("allreduce", 3, 0).seconds(3, cost) == pytest.approx(4e-6)
    assert ALGORITHMS["doubling"].work("allreduce", 3, 0).seconds(3, cost) == pytest.approx(3e-6)
    assert choose("allreduce", 3, 0, cost).algorithm == "doubling"
    # a root whose memory is read in place does nothing, its readers all do
    pull = Cost(0, 1e-9, 0, pull=True, cores=2)
    assert ALGORITHMS["direct"].work("broadcast", 8, 1000).seconds(8, pull) == pytest.approx(7 / 2 * 1e-6)
    assert ALGORITHMS["direct"].work("gather", 8, 8000).seconds(8, pull) == pytest.approx(7e-6)


def test_short_blocks_go_in_few_messages_where_these_cost_most() -> None:
    for collective in ("allgather", "reduce_scatter"):
        for size, best in ((2, "direct"), (4, "halving"), (7, "halving"), (8, "halving"), (3, "direct")):
            assert choose(collective, size, 4096, DEFAULT_COST["tcp"]).algorithm == best
        assert choose(collective, 4, 4096, replace(DEFAULT_COST["shm"], cores=2)).algorithm == "direct"
        assert choose(collective, 4, 64 << 20, DEFAULT_COST["tcp"]).algorithm != "halving"
    assert choose("reduce_scatter", 4, 4096, DEFAULT_COST["tcp"], deterministic=True).algorithm == "direct"


def test_moving_hides_reducing_only_where_others_do_it() -> None:
    work = ALGORITHMS["ring"].work("allreduce", 8, 1 << 24, 16)
    alone, offload = (Cost(0, 1e-9, 5e-10, offload=offload) for offload in (False, True))
    assert work.seconds(8, alone, 16) == pytest.approx(work.copied * 2e-9 + work.reduced * 5e-10)
    assert work.seconds(8, offload, 16) == pytest.approx(work.copied * 2e-9 + work.reduced * 5e-10 / 16)


def test_one_algorithm_can_be_asked_for() -> None:
    forced = choose("allreduce", 4, 1 << 20, WIRE, algorithm="halving")
    assert {name for name, _, _ in forced.table} == {"halving"}
    assert choose("allreduce", 4, 1 << 20, WIRE, algorithm="ring", parts=7).table[0][:2] == ("ring", 7)
    assert choose("barrier", 4, 0, WIRE, algorithm="direct", parts=7).parts == 1
    with pytest.raises(ValueError, match=r"'ring' cannot do gather; known: direct, .*"):
        choose("gather", 4, 10, WIRE, algorithm="ring")
    with pytest.raises(ValueError, match="'ring' cannot do reduce in rank order"):
        choose("reduce", 4, 10, WIRE, algorithm="ring", deterministic=True)


def test_one_pass_over_many_operands_is_cheaper() -> None:
    assert effort(2) == 1.0
    assert effort(8) == pytest.approx(9 / 21)
    pull = Cost(1e-6, 1e-10, 1e-10, pull=True)
    assert choose("allreduce", 8, 1 << 26, pull).algorithm == "direct"


def test_mapped_overrides_pull() -> None:
    assert choose("broadcast", 8, 1 << 26, WIRE, mapped=True).algorithm == "direct"
    assert choose("broadcast", 8, 1 << 26, WIRE, mapped=False).algorithm == "ring"


def test_of_equal_allreduces_the_one_with_fewest_messages_is_taken() -> None:
    """Unless it sends more; what it reduces counts last."""
    tcp = Cost(7.4e-6, 1.5e-10, 2e-11, 0.0, 1e-6, 516 << 10, packet=65408)

    def seconds(algorithm: str, size: int, nbytes: int) -> float:
        return choose("allreduce", size, nbytes, tcp, algorithm=algorithm).seconds

    assert 1 < seconds("exchange", 2, 384 << 10) / seconds("halving", 2, 384 << 10) < 1.03
    assert choose("allreduce", 2, 384 << 10, tcp).algorithm == "exchange"
    for nbytes, taken in ((512 << 10, "exchange"), (520 << 10, "direct")):  # the longer one is asked for
        assert 1.03 < seconds("exchange", 2, 512 << 10) / seconds("direct", 2, 512 << 10) < 1.06
        assert choose("allreduce", 2, nbytes, tcp).algorithm == taken
    near = next(
        n for n in range(1 << 10, 1 << 20, 256) if 1 < seconds("halving", 4, n) / seconds("doubling", 4, n) < 1.03
    )
    assert choose("allreduce", 4, near, tcp).algorithm == "halving"  # it sends three quarters of that


def test_ranks_that_share_cores_need_no_parts() -> None:
    tcp = Cost(7e-6, 3e-10, 2.5e-11, 5e-7, 1e-6, 516 << 10, cores=2)

    def fewest(algorithm: str, size: int, cost: Cost = tcp) -> int:
        return min(parts for _, parts, _ in choose("allreduce", size, 1 << 26, cost, algorithm=algorithm).table)

    assert fewest("ring", 4) == fewest("halving", 4) == 1
    assert fewest("ring", 2) > 1 and fewest("halving", 2) > 1
    assert fewest("direct", 4) > 1  # operands of all ranks lie in scratch
    network = Cost(7e-6, 8e-10, 2.5e-11, 5e-7, 1e-6, 516 << 10, cores=2, offload=True)
    assert fewest("ring", 4, network) > 1


def test_explanation() -> None:
    text = choose("allreduce", 8, 1 << 26, DEFAULT_COST["tcp"]).explain()
    assert text.startswith("allreduce of 64 MiB on 8 ranks: ") and "predicted" in text and "else" in text
    assert "default for tcp" in text
    only = choose("scatter", 2, 10, WIRE, deterministic=True).explain()
    assert "scatter of 10 B on 2 ranks in rank order: direct" in only
    table = choose("allreduce", 8, 1 << 26, WIRE).table
    assert [s for _, _, s in table[1:]] == sorted(s for _, _, s in table[1:]) and table[0][2] <= 1.03 * table[1][2]


def test_costs_are_checked_and_round_trip() -> None:
    with pytest.raises(ValueError, match=r"alpha must be seconds in \[0, 1\), not -1"):
        Cost(-1, 0, 0)
    with pytest.raises(ValueError, match="beta must be"):
        Cost(0, float("nan"), 0)
    with pytest.raises(ValueError, match="cores must not be negative, but is -2"):
        Cost(0, 0, 0, cores=-2)
    assert Cost(**WIRE.to_dict()) == WIRE
    with pytest.raises(ValueError, match="eager must not be negative, but is -1"):
        Cost(0, 0, 0, eager=-1)
    with pytest.raises(ValueError, match="switch must be"):
        Cost(0, 0, 0, switch=2)
    assert set(DEFAULT_COST) == {"loop", "shm", "tcp", "verbs"}


def test_predicting_a_view_is_refused() -> None:
    with pytest.raises(ScheduleError, match="view of rank 1"):
        predict(build("ring", "allreduce", 4, rank=1), 10, WIRE)

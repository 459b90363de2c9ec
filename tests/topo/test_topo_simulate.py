"""The simulation: fair rates by hand and by their definition, closed forms where those are exact, trouble as an option."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from hrdma.errors import ScheduleError
from hrdma.topo.algorithms.on_fabric import lookup
from hrdma.topo.cost import Cost
from hrdma.topo.fabric import Fabric
from hrdma.topo.fabrics import parse
from hrdma.topo.planner import plan
from hrdma.topo.schedule import Schedule, Transfer
from hrdma.topo.simulate import WIRES, fair, simulate

NBYTES = 720e6
RATE = 10e9
UNIT = NBYTES * 8 / RATE  # seconds for the whole vector through one NIC: W/B
COST = Cost(5e-6, 0.0, 2e-11, latency=1e-5, offload=True)


def planned(name: str, fabric: str, collective: str = "allreduce", parts: int = 1) -> Schedule:
    return lookup(name).build(collective, parse(fabric), parts, 0, None)


def seconds(name: str, fabric: str, collective: str = "allreduce", cost: Cost = WIRES, **how) -> float:
    made = parse(fabric, latency=0.0)
    return simulate(planned(name, fabric, collective), made, NBYTES, cost, **how).seconds


@pytest.mark.parametrize(
    ("ways", "capacity", "rates"),
    [
        ([[0], [0]], [10], [5, 5]),
        ([[0, 1], [0, 2], [1, 2]], [10, 4, 10], [2, 8, 2]),
        ([[0, 1], [1, 2], [2, 3]], [1, 10, 4, 100], [1, 2, 2]),
        ([[0, 3], [1, 3]], [3, 100, 100], [3, 100]),  # 3 is no link: it fills the row up
    ],
)
def test_fair_rates_by_hand(ways: list, capacity: list, rates: list) -> None:
    assert fair(np.array(ways), np.array(capacity, float)) == pytest.approx(rates)


def test_fair_rates_by_definition() -> None:
    """No link carries more than it can, and every flow has a full link on which nobody has more."""
    rng = np.random.default_rng(3)
    for _ in range(50):
        links, flows = int(rng.integers(1, 12)), int(rng.integers(1, 40))
        capacity = rng.uniform(0.1, 10, links)
        picked = [rng.permutation(links)[: rng.integers(1, 4)].tolist() for _ in range(flows)]
        ways = np.array([way + [links] * (3 - len(way)) for way in picked])
        rates = fair(ways, capacity)
        load = np.bincount(ways.ravel(), np.repeat(rates, ways.shape[1]), links + 1)[:links]
        assert (load <= capacity * (1 + 1e-6)).all()
        for way, rate in zip(ways.tolist(), rates):
            shared = [link for link in way if link < links and load[link] >= capacity[link] * (1 - 1e-6)]
            assert any(rate >= rates[(ways == link).any(axis=1)].max() * (1 - 1e-6) for link in shared)


EXACT = [
    ("bml", "bcube:3,2", 0.8889), ("bml", "bcube:4,2", 0.9375), ("bml", "bcube:2,3", 0.5833), ("torus", "torus:4x4", 0.46875),
    ("torus", "torus:8x8", 0.4922), ("torus", "torus:3x3", 0.4444), ("ring", "star:9", 1.7778), ("direct", "star:9", 1.7778),
    ("halving", "star:8", 1.75), ("hips-mesh", "bcube:3,2", 1.7778), ("hips-ring", "bcube:3,2", 1.7778),
    ("hips-halving", "bcube:4,2", 1.875), ("server-1", "star:9", 16.0), ("server-3", "star:9", 16 / 3),
    ("multitree", "torus:4x4", 0.625), ("multitree", "torus:8x8", 0.53125), ("multitree", "mesh:4x4", 1.25),
    ("multitree", "mesh:8x8", 1.0), ("multitree", "torus:2x2", 1.0), ("cluster-ring", "cluster:4,1,2", 0.75),
    ("hips-server", "bcube:3,2", 8.0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fabric", "units"), EXACT)
def test_links_alone_take_what_the_closed_form_says(name: str, fabric: str, units: float) -> None:
    work = lookup(name).work("allreduce", parse(fabric), NBYTES)
    assert work.per_nic / NBYTES == pytest.approx(units, abs=1e-4)
    assert seconds(name, fabric) == pytest.approx(work.per_nic * 8 / RATE, rel=1e-9)


@pytest.mark.parametrize("name", ("ring", "halving", "doubling", "exchange", "binomial", "dissemination"))
@pytest.mark.parametrize("nbytes", (0, 1 << 12, 1 << 24))
def test_one_message_at_a_time_takes_what_the_closed_form_says(name: str, nbytes: int) -> None:
    """With the cores' work and the latency, where a rank has one message per round."""
    able, fabric = lookup(name), parse("star:8", latency=2e-6)
    whole = Cost(COST.alpha, 8 / RATE, COST.gamma, COST.latency + 4e-6, offload=True)
    for collective in set(able.collectives) & {"allreduce", "allgather", "reduce_scatter", "broadcast", "barrier"}:
        if (name, collective) in (("exchange", "allreduce"), ("binomial", "broadcast")):
            continue  # several at once
        length = 0 if collective == "barrier" else nbytes
        form = able.work(collective, fabric, length).seconds(8, whole)
        found = simulate(able.build(collective, fabric, 1, 0, None), fabric, length, COST)
        assert found.seconds == pytest.approx(form, rel=1e-9), collective


@pytest.mark.parametrize(("name", "fabric"), [("bml", "bcube:3,2"), ("torus", "torus:4x4"), ("direct", "star:8")])
def test_with_the_cores_it_is_near_the_closed_form(name: str, fabric: str) -> None:
    made = parse(fabric)
    whole = Cost(COST.alpha, 8 / RATE, COST.gamma, COST.latency + 2e-6, offload=True)
    form = lookup(name).work("allreduce", made, NBYTES).seconds(made.ranks, whole)
    assert simulate(planned(name, fabric), made, NBYTES, COST).seconds == pytest.approx(form, rel=0.02)


def test_contention_shows() -> None:
    """Two flows into one host share its link; hashed multipath collides where spines would suffice."""
    star = parse("star:3", latency=0.0)
    both = Schedule.of("reduce", 3, [[Transfer(1, 0, 0, "reduce"), Transfer(2, 0, 0, "reduce")]])
    assert simulate(both, star, NBYTES).seconds == pytest.approx(2 * UNIT)
    assert seconds("direct", "fat_tree:4") > 1.2 * 1.875 * UNIT
    assert seconds("ring", "fat_tree:4") == pytest.approx(1.875 * UNIT)
    assert seconds("hips-mesh", "torus:4x4") > seconds("torus", "torus:4x4")


def test_a_slow_host_and_a_failed_link() -> None:
    good = seconds("bml", "bcube:3,2")
    assert 3 * good < seconds("bml", "bcube:3,2", slow={4: 3.0}) < 5 * good  # others run ahead and share its links
    assert seconds("ring", "star:9", slow={4: 3.0}) == pytest.approx(3 * seconds("ring", "star:9"))
    assert good < seconds("bml", "bcube:3,2", failed=[0]) < 4 * good
    assert seconds("torus", "torus:4x4", failed=[0]) > 1.5 * seconds("torus", "torus:4x4")
    assert seconds("cluster-ring", "cluster:2,4,2", slow={1: 2.0}) == pytest.approx(
        2 * seconds("cluster-ring", "cluster:2,4,2"), rel=0.3
    )


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"slow": {9: 2.0}}, "bcube:3,2 has no host 9; it has 9"),
        ({"slow": {1: 0.0}}, "host 1 cannot be 0.0 times slower"),
        ({"failed": [18]}, "bcube:3,2 has no link 18; it has 18"),
        ({"failed": [0, 1]}, r"no way from host 0 to host \d without links \[0, 1\]"),
        ({"accuracy": 1.0}, "accuracy 1.0"),
    ],
)
def test_what_cannot_be_simulated(how: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        seconds("bml", "bcube:3,2", **how)


def test_the_schedule_must_be_complete_and_of_this_fabric() -> None:
    schedule = planned("ring", "star:4")
    with pytest.raises(ScheduleError, match="rank 1's view"):
        simulate(schedule.for_rank(1), parse("star:4"), 1.0)
    with pytest.raises(ScheduleError, match="for 4 ranks; star:5 has 5"):
        simulate(schedule, parse("star:5"), 1.0)
    with pytest.raises(ValueError, match=r"-1\.0 bytes"):
        simulate(schedule, parse("star:4"), -1.0)


def test_the_loads_add_up_and_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    fabric = parse("bcube:3,2", latency=0.0)
    schedule = planned("bml", "bcube:3,2")
    found = simulate(schedule, fabric, NBYTES, progress=lambda done, all_: told.append((done, all_)))
    assert found.utilisation == pytest.approx(1.0)  # every link, all the time
    assert found.link_bytes.sum() == pytest.approx(2 * 2 * 8 * NBYTES)  # out of and into a switch
    assert told[-1] == (len(schedule.table),) * 2 and [done for done, _ in told] == sorted(done for done, _ in told)
    assert list(found.round_ends) == sorted(found.round_ends) and len(found.round_ends) == 4
    assert found.finished == pytest.approx(found.seconds)


def bursting(text: str, burst: float) -> Fabric:
    """Links of 1000 bytes per second, without latency."""
    made = parse(text, 8000.0, 0.0)
    return replace(made, links=tuple(link._replace(burst=burst) for link in made.links))


@pytest.mark.parametrize(
    ("weights", "ends"), [((500,), [0.0]), ((1000,), [0.4]), ((500, 300, 1000), [0.0, 0.2, 1.2]), ((0, 600, 1), [0, 0, 1e-3])]
)  # fmt: skip
def test_a_burst_passes_at_once_and_the_rest_at_the_rate(weights: tuple[int, ...], ends: list[float]) -> None:
    rounds = [[Transfer(0, 1, chunk)] for chunk in range(len(weights))]
    schedule = Schedule.of("broadcast", 2, rounds, split=len(weights), weights=weights)
    found = simulate(schedule, bursting("star:2", 600.0), sum(weights))
    assert found.round_ends.tolist() == pytest.approx(ends)
    assert found.link_bytes.tolist() == [sum(weights), 0, 0, sum(weights)]


def test_only_links_whose_bucket_is_empty_hold_anything_up() -> None:
    """A fast link without a bucket before a slow one with it; and a full one behind two that are empty."""
    made = bursting("star:2", 600.0)
    quick = replace(made, links=(made.links[0]._replace(rate=8e6, burst=0.0), made.links[1]))
    for nbytes, seconds in ((500, 0.5e-3), (1000, 0.4)):
        assert simulate(Schedule.of("broadcast", 2, [[Transfer(0, 1, 0)]]), quick, nbytes).seconds == pytest.approx(
            seconds, rel=1e-3
        )
    rounds = [[Transfer(0, 1, 0), Transfer(1, 0, 1)], [Transfer(0, 2, 2), Transfer(1, 2, 3)]]
    star = bursting("star:3", 600.0)
    found = simulate(Schedule.of("broadcast", 3, rounds, split=4, weights=(600, 600, 500, 500)), star, 2200)
    assert found.round_ends.tolist() == pytest.approx(
        [0.0, 0.5]
    )  # 2000 bytes per second into host 2 until 1000 are there


def test_a_slow_host_has_small_bursts_and_accuracy_counts_without_them() -> None:
    schedule = Schedule.of("broadcast", 2, [[Transfer(0, 1, 0)]])
    assert simulate(schedule, bursting("star:2", 600.0), 600, slow={1: 2.0}).seconds == pytest.approx(300 / 500)
    made = parse("bcube:3,2", rate="50mbit", latency=1e-5)
    made = replace(made, links=tuple(link._replace(burst=600e3) for link in made.links))
    for name in ("tree", "ring"):
        exact, near = (
            simulate(planned(name, "bcube:3,2"), made, 65536, Cost(1e-6, 0.0, 0.0, offload=True), accuracy=a).seconds
            for a in (0, 0.1)
        )
        assert near == exact


def test_a_bucket_that_empties_in_no_time_ends_nothing() -> None:
    """Less than the clock of the simulation can tell: 2e-13 s after 20 ms."""
    made = parse("star:3", 400e9, 10e-3)
    made = replace(made, links=(*made.links[:2], made.links[2]._replace(burst=0.01)))
    schedule = Schedule.of("gather", 3, [[Transfer(0, 2, 0), Transfer(1, 2, 1)]], root=2)
    assert simulate(schedule, made, 2e6).seconds == pytest.approx(20e-3 + 4e6 / 3 / 50e9, rel=1e-6)


def test_those_of_a_moment_share_the_bucket() -> None:
    """Both go into host 2: the first finds its 600 bytes there, of which the second finds 200."""
    schedule = Schedule.of("gather", 3, [[Transfer(0, 2, 0), Transfer(1, 2, 1)]], root=2)
    found = simulate(schedule, bursting("star:3", 600.0), 1200)
    assert found.round_ends.tolist() == pytest.approx([0.2])


@pytest.mark.parametrize(("rest", "last"), [(0.0, 0.6), (0.3, 0.6), (0.5, 0.6), (0.9, 0.9)])
def test_a_bucket_fills_while_its_link_rests(rest: float, last: float) -> None:
    """There, back, and there again: in between the first link rests while host 0 reduces."""
    rounds = [[Transfer(0, 1, 0)], [Transfer(1, 0, 0, "reduce")], [Transfer(0, 1, 0)]]
    found = simulate(
        Schedule.of("allreduce", 2, rounds), bursting("star:2", 600.0), 600, Cost(0.0, 0.0, rest / 600, offload=True)
    )
    assert found.round_ends.tolist() == pytest.approx([0.0, 0.0, last])


def test_close_events_may_count_as_one() -> None:
    exact, near = (
        simulate(planned("direct", "fat_tree:4"), parse("fat_tree:4"), NBYTES, COST, accuracy=a) for a in (0, 0.01)
    )
    assert near.events < exact.events / 2
    assert exact.seconds * 0.98 < near.seconds <= exact.seconds * 1.001


def test_rounds_without_data_between_them_overlap_unless_there_is_a_window() -> None:
    """0 sends a, then b, to different ranks: at once without a window, one after the other with it."""
    rounds = [[Transfer(0, 1, 0, "copy")], [Transfer(0, 2, 1, "copy")]]
    star = parse("star:3", latency=0.0)
    ends = [simulate(Schedule.of("broadcast", 3, rounds, split=2, window=w), star, NBYTES).round_ends for w in (0, 1)]
    assert list(ends[0]) == pytest.approx([UNIT, UNIT])
    assert list(ends[1]) == pytest.approx([UNIT / 2, UNIT])


@pytest.mark.parametrize("fabric", ("star:6", "bcube:2,3", "torus:3x2", "leaf_spine:2,3,2", "cluster:3,2,2"))
def test_no_algorithm_beats_the_links(fabric: str) -> None:
    """Every schedule takes at least as long as its most loaded link, and the smallest share of what must move."""
    made, rng = parse(fabric), random.Random(fabric)
    names = [n for n in ("ring", "direct", "tree", "hips-mesh", "bml", "torus", "cluster-mesh", "multitree")
             if not lookup(n).fits(made)]  # fmt: skip
    for name in names:
        found = simulate(
            lookup(name).build("allreduce", made, 1, 0, None), made, NBYTES, COST, slow={rng.randrange(2): 1.5}
        )
        assert found.utilisation.max() <= 1 + 1e-9
        assert found.seconds >= 2 * (1 - 1 / made.hosts) * NBYTES * 8 / made.rails / RATE / made.ranks_per_host


def test_shared_cores_do_one_piece_of_work_at_a_time() -> None:
    """12 messages at once: their work, and what else would be their latency, is that of two cores; no core moves along links."""
    schedule, latency = lookup("direct").build("alltoall", parse("star:4"), 1, 0, None), 1e-3
    star, cost = parse("star:4", latency=latency), Cost(1e-4, 0.0, 0.0, latency=2e-5, cores=2)
    each, far = cost.alpha + cost.latency, 2 * latency
    assert simulate(schedule, star, 0, cost).seconds == pytest.approx(12 * each / 2 + far)
    moving = replace(cost, beta=1e-9)
    assert simulate(schedule, star, 4000, moving).seconds == pytest.approx(12 * (each + 1e-6) / 2 + far, rel=0.01)
    assert simulate(schedule, star, 0, replace(cost, cores=3)).seconds == pytest.approx(12 * each / 3 + far)
    alone = simulate(schedule, star, 0, replace(cost, cores=0)).seconds
    assert alone == pytest.approx(3 * cost.alpha + cost.latency + 2 * latency)
    assert simulate(schedule, star, 0, replace(cost, cores=4)).seconds == alone
    twice = simulate(schedule, star, 0, cost, slow=dict.fromkeys(range(4), 2.0)).seconds
    assert twice == pytest.approx(12 * 2 * each / 2 + far)


def test_on_shared_cores_few_messages_win() -> None:
    """Of short vectors BML's 144 messages keep two cores longer than the links would: a plan for hosts of one machine has fewer."""
    made, cost = parse("bcube:3,2", rate="50mbit", latency=0), Cost(1e-5, 7e-10, 2e-11, latency=1.2e-5, cores=2)
    alone, shared = (
        plan("allreduce", made, 512, kind).schedule() for kind in (replace(cost, cores=0, offload=True), cost)
    )
    assert len(shared.table) < len(alone.table)
    assert plan("allreduce", made, 32 << 20, cost).algorithm == "bml"

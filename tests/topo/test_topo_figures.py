"""Published and derived figures: growth with the number of servers, what lockstep would give, large simulations.

Steps of MultiTree, times in W/B and limits for one rank and for proofs are with the tests of those parts;
benchmarks/bench_topo.py prints them all.
"""

from __future__ import annotations

import time

import pytest

from hrdma.topo.algorithms.on_fabric import lookup
from hrdma.topo.cost import NETWORK
from hrdma.topo.fabrics import parse
from hrdma.topo.routing import Routes, link_loads
from hrdma.topo.simulate import WIRES, simulate

RATE = 10e9


def seconds(name: str, fabric: str, nbytes: float, cost=NETWORK, accuracy: float = 0.01, **how) -> float:
    made = parse(fabric)
    return simulate(
        lookup(name).build("allreduce", made, 1, 0, None), made, nbytes, cost, accuracy=accuracy, **how
    ).seconds


@pytest.mark.parametrize(("fabric", "units"), [("bcube:3,2", 12 / 9), ("bcube:4,2", 1.0), ("bcube:2,3", 0.75)])
def test_multitree_at_switches_in_lockstep(fabric: str, units: float) -> None:
    """The derived figures add up the most loaded link of every step; without lockstep steps meet, and nothing is faster."""
    made = parse(fabric, latency=0.0)
    schedule = lookup("multitree").build("allreduce", made, 1, 0, None)
    lockstep = link_loads(schedule, Routes(made), 1.0).max(axis=1).sum()
    assert lockstep == pytest.approx(units)
    free = simulate(schedule, made, 1e9, WIRES).seconds / (1e9 * 8 / RATE)
    assert units - 1e-9 <= free < 1.5 * units


def test_bml_beats_multitree_on_bcube_and_rings_beat_it_on_a_torus() -> None:
    for fabric, name in (("bcube:3,2", "bml"), ("bcube:4,2", "bml"), ("bcube:2,3", "bml"), ("torus:4x4", "torus")):
        assert seconds(name, fabric, 1e9, WIRES) < seconds("multitree", fabric, 1e9, WIRES)


def test_hips_takes_half_of_the_ring_and_less_of_a_server() -> None:
    """Published: 37.5 to 61.9 % less on BCube and 49.6 to 66.4 % less on a torus than flat schemes there."""
    for fabric, name, least in (("bcube:3,2", "bml", 0.49), ("torus:4x4", "torus", 0.66)):
        own = seconds(name, fabric, 575e6)
        assert 1 - own / seconds("ring", fabric, 575e6) > least
        assert 1 - own / seconds("server-1", fabric, 575e6) > 0.9
        assert 1 - own / seconds("direct", fabric, 575e6) > 0.3


def test_the_bytes_of_hips_grow_by_single_percents() -> None:
    """From 16 to 1024 servers, links alone: (N - 1) / N."""
    few, many = (lookup("bml").work("allreduce", parse(fabric), 1.0).per_nic for fabric in ("bcube:4,2", "bcube:32,2"))
    assert many / few - 1 == pytest.approx(0.0656, abs=1e-4)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_growth_from_16_to_1024_servers() -> None:
    """Published: 6.5 % for HiPS on BCube, 44.6 % for the ring on BCube; here for the gradient of VGG-19."""
    nbytes = 575e6
    grown = {
        n: seconds(n, "bcube:32,2", nbytes) / seconds(n, "bcube:4,2", nbytes, accuracy=0) - 1
        for n in ("hips-mesh", "ring")
    }
    assert 0.04 < grown["hips-mesh"] < 0.1
    assert grown["ring"] > 0.2


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "fabric"), [("bml", "bcube:32,2"), ("torus", "torus:32x32")])
def test_1024_hosts_are_simulated_within_a_minute(name: str, fabric: str) -> None:
    told: list[int] = []
    start = time.thread_time()
    seconds(name, fabric, 100e6, progress=lambda done, _: told.append(done))
    assert time.thread_time() - start < 60
    assert len(told) > 10 and told == sorted(told)

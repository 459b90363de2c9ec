"""Measured shares follow the plan: real packets in two namespaces, on classes that never run empty."""

from __future__ import annotations

import time

import lab
import pytest

from hrdma.qos.apply import Control
from hrdma.qos.policy import Job, Match, Policy

PORTS = [5001, 5002, 5003]
RATE = 1_000_000  # 8 Mbit/s: little to do for a busy machine


def jobs(**more) -> tuple[Job, ...]:
    return tuple(
        Job(f"j{i}", (Match(dport=port),), **{key: values[i] for key, values in more.items()})
        for i, port in enumerate(PORTS)
    )


@lab.isolated
def test_rotations_take_effect_within_a_second_and_lose_and_reorder_nothing(net):
    policy = Policy("tls-rr", jobs(), rate=RATE)
    with Control("v0", net.directory) as control:
        control.install(policy)
        with lab.Traffic(net, PORTS) as traffic:
            time.sleep(1)
            for rotation in range(8):
                first = (0 - rotation) % 3  # pos(i) = (i + r) mod m is 0 for this job
                shares = traffic.shares(0.5)
                assert shares[first] > 0.85, (rotation, first, shares)
                control.rotate()
                time.sleep(0.6)
            before = sum(stream.arrived for stream in traffic.streams)
            start = time.monotonic()
            for _ in range(20):
                control.rotate()
                time.sleep(0.05)
            rate = (sum(stream.arrived for stream in traffic.streams) - before) / (time.monotonic() - start)
            assert rate * (lab.SIZE + 42) == pytest.approx(RATE, rel=0.05)
        assert [(stream.reordered, stream.lost) for stream in traffic.streams] == [(0, 0)] * 3
        assert lab.drops() == 0


@lab.isolated
def test_prio_of_a_busy_class_would_not_do(net):
    """The negative test of the one above: what HTB does with TensorLights' classes when their prio is changed in place."""
    lab.tc("qdisc add dev v0 root handle 1: htb default 1")
    lab.tc("class add dev v0 parent 1: classid 1:1 htb rate 20mbit")
    for i, port in enumerate(PORTS[:2]):
        lab.tc(f"class add dev v0 parent 1:1 classid 1:{i + 2} htb rate 100kbit ceil 20mbit quantum 3000 prio {i}")
        lab.tc(f"qdisc add dev v0 parent 1:{i + 2} pfifo limit 1000")
        lab.tc(
            f"filter add dev v0 parent 1: protocol ip pref {i + 1} u32 match ip dport {port} 0xffff flowid 1:{i + 2}"
        )
    with lab.Traffic(net, PORTS[:2]) as traffic:
        time.sleep(0.5)
        assert traffic.shares(0.5)[0] > 0.85
        lab.tc("class change dev v0 parent 1:1 classid 1:2 htb rate 100kbit ceil 20mbit quantum 3000 prio 1")
        lab.tc("class change dev v0 parent 1:1 classid 1:3 htb rate 100kbit ceil 20mbit quantum 3000 prio 0")
        time.sleep(0.5)
        assert traffic.shares(1.0)[1] < 0.85  # read back, the second would be first


@lab.isolated
def test_strict_bands_leave_each_job_its_floor(net):
    policy = Policy("strict", jobs(band=[0, 3, 6]), rate=RATE, floor=50_000)
    with Control("v0", net.directory) as control:
        control.install(policy)
    with lab.Traffic(net, PORTS) as traffic:
        time.sleep(1)
        shares = traffic.shares(2)
        assert shares[1] == pytest.approx(0.05, rel=0.3)
        assert shares[2] == pytest.approx(0.05, rel=0.3)
        assert shares[0] > 0.85


@lab.isolated
def test_weights_are_shares(net):
    policy = Policy("weighted", jobs(weight=[1.0, 2.0, 4.0]), rate=RATE)
    with Control("v0", net.directory) as control:
        control.install(policy)
    with lab.Traffic(net, PORTS) as traffic:
        time.sleep(1)
        assert traffic.shares(3) == pytest.approx([1 / 7, 2 / 7, 4 / 7], abs=0.05)

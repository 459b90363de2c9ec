"""Measured shares follow the plan: real packets in two namespaces, on classes that never run empty."""

from __future__ import annotations

import time

import lab
import pytest
from windows import one_good

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

            def turned() -> float:
                """The share of whoever is first, from 0.6 s after that on; each window has a rotation of its own."""
                control.rotate()
                time.sleep(0.6)
                return traffic.shares(0.5)[-control.installed.rotation % 3]  # pos(i) = (i + r) mod m is 0 for it

            def quickly() -> float:
                """The rate during 20 rotations."""
                before, start = sum(stream.arrived for stream in traffic.streams), time.monotonic()
                for _ in range(20):
                    control.rotate()
                    time.sleep(0.05)
                packets = sum(stream.arrived for stream in traffic.streams) - before
                return packets * (lab.SIZE + 42) / (time.monotonic() - start)

            for _ in range(8):
                one_good(turned, lambda share: share > 0.85)
            one_good(quickly, lambda rate: rate == pytest.approx(RATE, rel=0.05))
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

        def changed() -> tuple[float, float]:
            """Share of who is first, and of who should be after a change. One that ran empty in between gets its new prio, and all is
            the other way round."""
            shares = traffic.shares(0.5)
            first = shares.index(max(shares))
            for i in range(2):
                lab.tc(
                    f"class change dev v0 parent 1:1 classid 1:{i + 2} htb rate 100kbit ceil 20mbit quantum 3000 "
                    f"prio {int(i == first)}"
                )
            time.sleep(0.5)
            return shares[first], traffic.shares(1.0)[1 - first]

        one_good(changed, lambda found: found[0] > 0.85 > found[1])  # read back, the second would be first


@lab.isolated
def test_strict_bands_leave_each_job_its_floor(net):
    policy = Policy("strict", jobs(band=[0, 3, 6]), rate=RATE, floor=50_000)
    with Control("v0", net.directory) as control:
        control.install(policy)
    with lab.Traffic(net, PORTS) as traffic:
        time.sleep(1)
        one_good(
            lambda: traffic.shares(2),
            lambda shares: shares[0] > 0.85 and shares[1:] == pytest.approx([0.05, 0.05], rel=0.3),
        )


@lab.isolated
def test_weights_are_shares(net):
    policy = Policy("weighted", jobs(weight=[1.0, 2.0, 4.0]), rate=RATE)
    with Control("v0", net.directory) as control:
        control.install(policy)
    with lab.Traffic(net, PORTS) as traffic:
        time.sleep(1)
        one_good(lambda: traffic.shares(3), lambda shares: shares == pytest.approx([1 / 7, 2 / 7, 4 / 7], abs=0.05))

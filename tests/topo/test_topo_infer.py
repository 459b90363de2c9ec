"""Measurements of a job to its fabric: what a fabric would show is turned back into it, whatever the names of its NICs."""

from __future__ import annotations

import random

import pytest

from hrdma.topo.fabric import Fabric
from hrdma.topo.fabrics import parse
from hrdma.topo.infer import Measured, Nic, Sample, infer, joined


def shown(
    fabric: Fabric, rate: float = 2e8, latency: float = 4e-5, seed: int = 1
) -> tuple[list[Measured], list[Sample]]:
    """What a job on a fabric measures: NICs in any order, a subnet per switch or cable, a sample per pair in it."""
    rng = random.Random(seed)
    subnets: dict[str, list[int]] = {}
    hosts = []
    for host in range(fabric.hosts):
        nics = []
        for directed, other, nic in fabric.around[host]:
            subnet = f"switch {other}" if other >= fabric.hosts else f"cable {directed >> 1}"
            subnets.setdefault(subnet, []).append(host)
            nics.append(Nic(f"eth{nic}", subnet))
        nics.append(Nic("lo", f"alone {host}"))
        rng.shuffle(nics)
        hosts.append(tuple(nics))
    each = fabric.ranks_per_host
    ranks = [Measured(f"host{host}", hosts[host]) for host in range(fabric.hosts) for _ in range(each)]
    samples = [
        Sample(a * each, b * each, subnet, rate, latency) for subnet, members in subnets.items() for a in members for b in members
        if a != b
    ]  # fmt: skip
    samples += [Sample(h * each, h * each + 1, "", 5e10, 2e-6) for h in range(fabric.hosts) if each > 1]
    return ranks, samples


@pytest.mark.parametrize(
    "text",
    ["star:4", "cluster:4,1,2", "cluster:3,2,2", "cluster:4,4,1", "bcube:3,2", "bcube:4,2", "bcube:3,3", "bcube:4x3", "torus:4x4",
     "torus:3x4", "torus:3x3x3", "torus:2x2x2", "mesh:3x3", "mesh:2x3", "ring:5", "ring:2",
     "cluster:2,1,2", "cluster:2,4,2"],
)  # fmt: skip
def test_gives_the_fabric_back(text: str) -> None:
    fabric = parse(text)
    found, nics = infer(*shown(fabric))
    assert (found.kind, found.shape, found.ranks) == (fabric.kind, fabric.shape, fabric.ranks)
    assert [(link.a, link.b) for link in found.links] == [(link.a, link.b) for link in fabric.links]
    assert {link.rate for link in found.links} == {2e8}
    assert {link.latency for link in found.links} == {2e-5 if fabric.switches else 4e-5}
    if fabric.kind != "cluster":  # where rails are alike, they may change places, on all hosts alike
        assert nics == tuple(tuple(f"eth{lane}" for lane in range(fabric.nics(host))) for host in range(fabric.hosts))
    if fabric.ranks_per_host > 1:
        assert (found.memory_rate, found.memory_latency) == (5e10, 2e-6)


@pytest.mark.parametrize("text", ["cluster:4,1,2", "cluster:3,2,2", "cluster:2,4,2"])
def test_a_lane_is_the_same_rail_on_all_hosts(text: str) -> None:
    _, nics = infer(*shown(parse(text)))
    assert len(set(nics)) == 1 and sorted(nics[0]) == ["eth0", "eth1"]


def test_a_bcube_of_two_is_a_torus_of_two() -> None:
    found, _ = infer(*shown(parse("bcube:2,3")))
    assert found.name == "torus:2x2x2" and found.switches == 0


def test_what_is_wired_otherwise_is_irregular() -> None:
    ranks, samples = shown(parse("bcube:3,2"))
    nics = [nic if nic.subnet != "switch 9" else Nic(nic.name, "switch 10") for nic in ranks[0].nics]
    found, names = infer([Measured("host0", tuple(nics)), *ranks[1:]], samples)
    assert found.kind == "" and (found.hosts, found.switches, found.rails) == (
        9,
        5,
        2,
    )  # two hosts are left at the first switch: a cable
    assert all(sorted(listed) == ["eth0", "eth1"] for listed in names)


def test_one_slow_nic_is_a_slow_link() -> None:
    ranks, samples = shown(parse("bcube:3,2"))
    slowed = [s._replace(rate=1e8) if 4 in (s.src, s.dst) and s.subnet == "switch 10" else s for s in samples]
    found, _ = infer(ranks, slowed)
    slow = [link for link in found.links if link.rate == 1e8]
    assert found.kind == "bcube" and [link.a for link in slow] == [(4, 0)]


def test_what_routers_join_is_one_switch() -> None:
    """Leaves are subnets of their own; a leaf of one host is no subnet that joins hosts."""
    leaves = (("a", "b"), ("c", "d"), ("e",))
    hosts = [[Nic("eth0", f"leaf {n}"), Nic("own", f"alone {host}")] for n, leaf in enumerate(leaves) for host in leaf]
    together = joined(hosts)
    (subnet,) = {listed[0].subnet for listed in together}
    assert subnet == "leaf 0 and, routed, 2 more" and [listed[1] for listed in together] == [own for _, own in hosts]
    ranks = [Measured(f"host{host}", listed) for host, listed in enumerate(together)]
    found, nics = infer(ranks, [Sample(host, (host + 1) % 5, subnet, 1e8, 1e-5) for host in range(5)])
    assert found.name == "star:5" and nics == (("eth0",),) * 5


def test_rails_that_routers_join_stay_apart() -> None:
    together = joined([[Nic("eth0", f"leaf {host // 2}"), Nic("eth1", f"other {host // 2}")] for host in range(4)])
    assert together[0] == together[3] and together[0][0].subnet != together[0][1].subnet


@pytest.mark.parametrize("text", ["bcube:3,2", "mesh:2x3", "cluster:3,1,2", "ring:2"])
def test_what_subnets_join_needs_no_routers(text: str) -> None:
    hosts = [rank.nics for rank in shown(parse(text))[0]]
    assert joined(hosts) == hosts
    assert joined([(), hosts[0]]) == [(), hosts[0]]  # without a NIC nothing can be joined


def test_one_host() -> None:
    found, nics = infer([Measured("here", ())] * 4, [Sample(0, 1, "", 1e11, 1e-6)])
    assert (found.hosts, found.ranks, found.memory_rate, nics) == (1, 4, 1e11, ((),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r, s: ([], s), "no ranks"),
        (lambda r, s: (r[:-1], s), "host host2 has 1 ranks, host host0 has 2"),
        (lambda r, s: ([r[0], r[2], r[1], *r[3:]], s), "rank 1 is on host host1; rank 0 is on host0"),
        (lambda r, s: ([r[0], r[1]._replace(nics=()), *r[2:]], s), "rank 1 sees other NICs than rank 0"),
        (
            lambda r, s: ([*r[:4], *[Measured("host2", (Nic("x", "far"),))] * 2], s),
            "host host2 has no NIC in a subnet of another",
        ),
        (
            lambda r, s: (r, [x for x in s if x.subnet != "switch 3"]),
            "subnet switch 3 joins 3 NICs, but nothing was measured",
        ),
        (lambda r, s: (r, [s[0]._replace(rate=0.0), *s]), "has rate 0.0"),
        (lambda r, s: (r, [s[0]._replace(dst=6), *s]), "to 6; there are 6 ranks"),
    ],
)
def test_what_cannot_be_inferred(change, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        infer(*change(*shown(parse("cluster:3,2,2"))))

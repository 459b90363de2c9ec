"""From measurements of a running job to its fabric: who shares a host, which NICs share a network, what each can do.

NICs with the same subnet reach each other: two are joined by a cable, more by a switch. What comes out is compared with the
constructors of `hrdma.topo.fabrics` that subnets can tell apart (star, cluster, BCube with digits of any radix, torus, mesh,
ring); where one has the same groups of hosts, it lends its kind, its shape and its numbering of NICs, so that all
algorithms for it can be had. Else the fabric is irregular. Switches inside one subnet (a fat-tree) cannot be seen: they count
as one, and so do routers, where subnets leave hosts apart (`joined`).

    hosts a b c d, subnets 1: a b   2: c d   3: a c   4: b d      groups as those of torus:2x2 (or bcube:2,2: the same wires)

A NIC's rate is the highest that was measured through it, a link's latency the lowest of its subnet (half of it where there
is a switch between).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from math import prod
from typing import Any, NamedTuple

from hrdma.topo.fabric import Fabric, Link, Port
from hrdma.topo.fabrics import bcube, cluster, mesh, ring, star, torus

__all__ = ["Inferred", "Measured", "Nic", "Sample", "infer", "joined"]


class Nic(NamedTuple):
    """A NIC as its host names it."""

    name: str
    subnet: str


class Measured(NamedTuple):
    """What a rank says of itself."""

    host: str  #: equal for ranks that share memory
    nics: tuple[Nic, ...]


class Sample(NamedTuple):
    """A measurement between two ranks; by memory where they share a host."""

    src: int
    dst: int
    subnet: str  #: empty: memory
    rate: float  #: bit/s
    latency: float  #: seconds, one way


class Inferred(NamedTuple):
    """A fabric, and what its numbers mean."""

    fabric: Fabric
    nics: tuple[tuple[str, ...], ...]  #: per host and lane, the name of the NIC


def joined(hosts: Sequence[Sequence[Nic]]) -> list[tuple[Nic, ...]]:
    """The NICs of all hosts, when routers join what subnets leave apart; whether they do is for measurements to say.

    Hosts that subnets join, in a chain too, are a part. Of several parts (the leaves of a network that routes) the first
    subnets count as one, so do the second ones, and so on, as many as each part has; a single part stays as it is.
    """
    part = list(range(len(hosts)))
    first: dict[str, int] = {}  # of each subnet its first host
    shared: set[str] = set()
    for host, listed in enumerate(hosts):
        for subnet in {nic.subnet for nic in listed}:
            other = first.setdefault(subnet, host)
            if other != host:
                shared.add(subnet)
                low, high = sorted((part[other], part[host]))
                part = [low if each == high else each for each in part]
    subnets: dict[int, dict[str, None]] = {each: {} for each in part}
    for each, listed in zip(part, hosts):
        alone = part.count(each) == 1
        subnets[each].update((nic.subnet, None) for nic in listed if alone or nic.subnet in shared)
    renamed: dict[str, str] = {}
    for together in zip(*subnets.values()) if len(subnets) > 1 else ():
        renamed |= dict.fromkeys(together, f"{together[0]} and, routed, {len(together) - 1} more")
    return [tuple(nic._replace(subnet=renamed.get(nic.subnet, nic.subnet)) for nic in listed) for listed in hosts]


Group = tuple[str, tuple[tuple[int, int], ...]]  # a subnet, and its members: (host, NIC there)


def infer(ranks: Sequence[Measured], samples: Sequence[Sample]) -> Inferred:
    """The fabric that a job runs on.

    Parameters
    ----------
    ranks : sequence of Measured
        In rank order.
    samples : sequence of Sample
        At least one for every subnet that joins two hosts, better one for every NIC.

    Raises
    ------
    ValueError
        Hosts with different numbers of ranks or with ranks that are not consecutive, ranks of a host that see other
        NICs, a host that no other reaches, a subnet without a sample, a rate or latency out of range.
    """
    hosts, per_host = _hosts(ranks)
    for sample in samples:
        if not (0 <= sample.src < len(ranks) and 0 <= sample.dst < len(ranks)):
            raise ValueError(f"a sample from rank {sample.src} to {sample.dst}; there are {len(ranks)} ranks")
        if not sample.rate > 0 or not 0 <= sample.latency < 1:
            raise ValueError(
                f"a sample from rank {sample.src} to {sample.dst} has rate {sample.rate} and latency {sample.latency}; "
                "a rate is above 0, a latency in [0, 1) s"
            )
    nics = [ranks[host * per_host].nics for host in range(len(hosts))]
    memory = [s for s in samples if s.src // per_host == s.dst // per_host and s.src != s.dst]
    inside: dict[str, Any] = {"ranks_per_host": per_host}
    if memory:
        inside |= {"memory_rate": max(s.rate for s in memory), "memory_latency": min(s.latency for s in memory)}
    if len(hosts) == 1:
        return Inferred(replace(cluster(1, per_host), **inside), ((),))
    groups = _groups(hosts, nics)
    rates, latencies = _measured(groups, samples, per_host)
    for model in _models(len(hosts), per_host, groups):
        if found := _numbered(model, groups):
            lanes, subnets = found
            links = []
            for a, b, *_ in model.links:
                link = Link(
                    a, b, _slowest(rates, subnets, lanes, (a, b)), latencies[subnets[a]] / (2 if model.switches else 1)
                )
                links.append(link)
            named = tuple(
                tuple(nics[host][lanes[host, lane]].name for lane in range(model.nics(host)))
                for host in range(len(hosts))
            )
            return Inferred(replace(model, links=tuple(links), **inside), named)
    return _irregular(hosts, nics, groups, rates, latencies, inside)


def _hosts(ranks: Sequence[Measured]) -> tuple[list[str], int]:
    """Host names in order, and how many ranks each has."""
    if not ranks:
        raise ValueError("no ranks: there is nothing to infer a fabric from")
    hosts = list(dict.fromkeys(rank.host for rank in ranks))
    counts = Counter(rank.host for rank in ranks)
    per_host = counts[hosts[0]]
    for host in hosts:
        if counts[host] != per_host:
            raise ValueError(
                f"host {host} has {counts[host]} ranks, host {hosts[0]} has {per_host}; a fabric has as many on each"
            )
    for rank, measured in enumerate(ranks):
        if measured.host != hosts[rank // per_host]:
            raise ValueError(
                f"rank {rank} is on host {measured.host}; rank {rank // per_host * per_host} is on "
                f"{hosts[rank // per_host]}: the ranks of a host must follow each other"
            )
        if measured.nics != ranks[rank // per_host * per_host].nics:
            raise ValueError(f"rank {rank} sees other NICs than rank {rank // per_host * per_host} of the same host")
    return hosts, per_host


def _groups(hosts: list[str], nics: list[tuple[Nic, ...]]) -> list[Group]:
    """Subnets that join hosts, in the order in which the hosts name them."""
    members: dict[str, list[tuple[int, int]]] = {}
    for host, listed in enumerate(nics):
        for number, nic in enumerate(listed):
            members.setdefault(nic.subnet, []).append((host, number))
    groups = [(s, tuple(listed)) for s, listed in members.items() if len({host for host, _ in listed}) > 1]
    reached = {host for _, listed in groups for host, _ in listed}
    for host, name in enumerate(hosts):
        if host not in reached:
            raise ValueError(
                f"host {name} has no NIC in a subnet of another host; it has {nics[host] or 'none at all'}"
            )
    return groups


def _measured(
    groups: list[Group], samples: Sequence[Sample], per_host: int
) -> tuple[dict[tuple[int, str], float], dict[str, float]]:
    """Rate of each (host, subnet), latency of each subnet."""
    rates: dict[tuple[int, str], float] = {}
    latencies: dict[str, float] = {}
    for src, dst, subnet, rate, latency in samples:
        for host in (src // per_host, dst // per_host):
            rates[host, subnet] = max(rates.get((host, subnet), 0.0), rate)
        latencies[subnet] = min(latencies.get(subnet, 1.0), latency)
    for subnet, members in groups:
        if subnet not in latencies:
            raise ValueError(f"subnet {subnet} joins {len(members)} NICs, but nothing was measured on it")
        best = max(rates.get((host, subnet), 0.0) for host, _ in members)
        for host, _ in members:
            rates.setdefault((host, subnet), best)
    return rates, latencies


def _models(hosts: int, per_host: int, groups: list[Group]) -> Iterator[Fabric]:
    """Constructors with as many hosts, NICs and members of a group."""
    rails = sum(1 for _, members in groups for host, _ in members if host == 0)
    sizes = [len(members) for _, members in groups for host, _ in members if host == 0]
    if all(len(members) == hosts for _, members in groups):
        if per_host > 1 or rails > 1:
            yield cluster(hosts, per_host, rails)
        else:
            yield star(hosts) if hosts > 2 else ring(hosts)
    elif per_host > 1:
        return  # the other kinds have one rank per host
    elif max(len(members) for _, members in groups) == 2:
        yield from _grids(hosts, len(groups))
    elif prod(sizes) == hosts:
        # which digit is the least significant, the numbers of the hosts tell, not those of the NICs
        for radices in sorted(set(permutations(sizes))):
            yield bcube(radices) if len(set(sizes)) > 1 else bcube(sizes[0], len(sizes))


def _grids(hosts: int, cables: int) -> Iterator[Fabric]:
    """Those with as many cables, lest all shapes of a large number of hosts are built."""
    if cables == (hosts if hosts > 2 else 1):
        yield ring(hosts)
    for shape in _products(hosts, 4):
        if len(shape) > 1 and cables == sum(hosts if side > 2 else hosts // 2 for side in shape):
            yield torus(*shape)
        if cables == sum(hosts - hosts // side for side in shape):
            yield mesh(*shape)


def _products(n: int, most: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as at most so many factors of at least 2, in every order."""
    if n > 1 and most:
        yield (n,)
        for first in range(2, n // 2 + 1):
            if n % first == 0:
                yield from ((first, *others) for others in _products(n // first, most - 1))


def _wires(model: Fabric) -> list[tuple[tuple[int, int], ...]]:
    """The groups of a model: the host ports at each switch, or at the ends of each cable."""
    if not model.switches:
        return [tuple(sorted(((a.node, a.nic), (b.node, b.nic)))) for a, b, *_ in model.links]
    return [
        tuple(sorted((model.ends(way)[1].node, model.ends(way)[1].nic) for way, _, _ in model.around[switch]))
        for switch in range(model.hosts, model.nodes)
    ]


def _numbered(model: Fabric, groups: list[Group]) -> tuple[dict[tuple[int, int], int], dict[Port, str]] | None:
    """A model's (host, lane) to the host's own number of the NIC, and its ports to subnets; None: wired otherwise."""
    wires = sorted(_wires(model))
    listed = [(members, subnet) for subnet, members in groups]
    if Counter(_who(ports) for ports in wires) != Counter(_who(members) for members, _ in listed):
        return None
    lanes: dict[tuple[int, int], int] = {}
    subnets: dict[Port, str] = {}
    for ports in wires:
        at = min(
            (k for k, (members, _) in enumerate(listed) if _who(members) == _who(ports)), key=lambda k: listed[k][0]
        )
        members, subnet = listed.pop(at)
        for (host, lane), (_, number) in zip(ports, sorted(members), strict=True):
            lanes[host, lane] = number
            subnets[Port(host, lane)] = subnet
    for a, b, *_ in model.links:
        subnets.setdefault(b, subnets.get(a, ""))
    return lanes, subnets


def _who(ports: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    return tuple(sorted(host for host, _ in ports))


def _slowest(rates, subnets: dict[Port, str], lanes, ports: tuple[Port, Port]) -> float:
    """The rate of a link: of the slower NIC at its ends."""
    return min(rates[port.node, subnets[port]] for port in ports if (port.node, port.nic) in lanes)


def _irregular(hosts, nics, groups: list[Group], rates, latencies, inside) -> Inferred:
    """A fabric of its own: the NICs in the order of their hosts, without those that lead nowhere."""
    leads = {member for _, members in groups for member in members}
    lane: dict[tuple[int, int], int] = {}
    for host, listed in enumerate(nics):
        for number in range(len(listed)):
            if (host, number) in leads:
                lane[host, number] = sum(1 for h, _ in lane if h == host)
    links, switches = [], 0
    for subnet, members in groups:
        if len(members) == 2:
            a, b = (Port(host, lane[host, number]) for host, number in members)
            links.append(Link(a, b, min(rates[a.node, subnet], rates[b.node, subnet]), latencies[subnet]))
            continue
        for socket, (host, number) in enumerate(members):
            far = Port(len(hosts) + switches, socket)
            links.append(Link(Port(host, lane[host, number]), far, rates[host, subnet], latencies[subnet] / 2))
        switches += 1
    fabric = Fabric(f"inferred, {len(hosts)} hosts", len(hosts), switches, tuple(links), **inside)
    named = tuple(
        tuple(nic.name for number, nic in enumerate(listed) if (host, number) in lane)
        for host, listed in enumerate(nics)
    )
    return Inferred(fabric, named)

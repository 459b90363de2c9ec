"""Constructors of fabrics, and `parse`, which reads them from one word such as ``bcube:3,2``.

    ring:4         star:4         mesh:2x2     torus:4x4           bcube:3,2         leaf_spine:8,2,2
    0-1-2-3-0      0 1 2 3        0-1          0-1-2-3-(0)         NIC 0 of 0 1 2 at one switch, ... of 6 7 8
                    \\\\ //         | |          | | | |             NIC 1 of 0 3 6 at one switch, ... of 2 5 8
                    switch        2-3         ...

`bcube(n, levels)` has n**levels hosts of `levels` NICs and n-port switches: NIC l of a host is at the switch of those that
differ from it only in digit l (the literature's BCube(n, k) has k + 1 levels). Sizes that are no power have digits of
different radix: ``bcube:4x3`` has a level of 4 and one of 3; `factors` finds them for a number of hosts.

Hosts of tori and meshes number their NICs by dimension, up before down; a side of 2 has one link, not two.

References
----------
Guo et al.: BCube: A High Performance, Server-centric Network Architecture for Modular Data Centers, SIGCOMM, 2009.
Al-Fares, Loukissas, Vahdat: A Scalable, Commodity Data Center Network Architecture, SIGCOMM, 2008 (the fat-tree).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from math import prod

from hrdma.topo.fabric import Fabric, Link, Port, digits
from hrdma.units import rate_value, seconds_value, size_value

__all__ = [
    "bcube",
    "burst_bytes",
    "cluster",
    "factors",
    "fat_tree",
    "latency_s",
    "leaf_spine",
    "mesh",
    "parse",
    "rate_bit_s",
    "ring",
    "star",
    "torus",
]

RATE = 10e9  # bit/s
LATENCY = 1e-6  # seconds of a link
MAX_LINKS = 1 << 20  # more take minutes and gigabytes


def _wired(pairs: Iterable[tuple[int, int]], rate: float, latency: float) -> tuple[Link, ...]:
    """Links between nodes; each takes the next free NIC at both of its ends."""
    used: dict[int, int] = {}
    links = []
    for a, b in pairs:
        ports = []
        for node in (a, b):
            ports.append(Port(node, used.get(node, 0)))
            used[node] = ports[-1].nic + 1
        links.append(Link(ports[0], ports[1], rate, latency))
    return tuple(links)


def _sides(kind: str, sides: tuple[int, ...]) -> tuple[int, ...]:
    sides = tuple(int(side) for side in sides)
    if not sides:
        raise ValueError(f"a {kind} needs at least one dimension")
    for dimension, side in enumerate(sides):
        if side < 2:
            raise ValueError(f"dimension {dimension} of a {kind} is {side}; it must be at least 2")
    return sides


def _at_least(what: str, value: int, least: int) -> int:
    if int(value) < least:
        raise ValueError(f"{what} is {value}; it must be at least {least}")
    return int(value)


def _buildable(name: str, links: int) -> None:
    if links > MAX_LINKS:
        raise ValueError(f"{name} has more links than the {MAX_LINKS} that a fabric may have")


def ring(hosts: int, rate: float = RATE, latency: float = LATENCY) -> Fabric:
    """Hosts in a cycle, a link between neighbours: a torus of one dimension."""
    _at_least("the number of hosts of a ring", hosts, 2)
    _buildable(f"ring:{hosts}", hosts)
    made = torus(hosts, rate=rate, latency=latency)
    return Fabric(f"ring:{hosts}", hosts, 0, made.links, "ring", (hosts,))


def star(hosts: int, rate: float = RATE, latency: float = LATENCY) -> Fabric:
    """All hosts at one switch."""
    hosts = _at_least("the number of hosts of a star", hosts, 1)
    _buildable(f"star:{hosts}", hosts)
    links = _wired(((host, hosts) for host in range(hosts)), rate, latency)
    return Fabric(f"star:{hosts}", hosts, 1, links, "star", (hosts,))


def _grid(sides: tuple[int, ...], wrap: bool, rate: float, latency: float) -> tuple[Link, ...]:
    """Links of a mesh or torus with the NICs numbered by dimension, up before down."""
    hosts = prod(sides)
    stride = [prod(sides[:dimension]) for dimension in range(len(sides))]
    up: dict[tuple[int, int], Port] = {}
    down: dict[tuple[int, int], Port] = {}
    for host in range(hosts):
        nic = 0
        for dimension, (digit, side) in enumerate(zip(digits(host, sides), sides)):
            around = wrap and side > 2
            if digit < side - 1 or around:
                up[host, dimension] = Port(host, nic)
                nic += 1
            if digit > 0 or around:
                down[host, dimension] = Port(host, nic)
                nic += 1
    links = []
    for (host, dimension), port in up.items():
        digit, side = digits(host, sides)[dimension], sides[dimension]
        other = host + ((digit + 1) % side - digit) * stride[dimension]
        links.append(Link(port, down[other, dimension], rate, latency))
    return tuple(links)


def mesh(*sides: int, rate: float = RATE, latency: float = LATENCY) -> Fabric:
    """A grid of hosts with a link between neighbours."""
    sides = _sides("mesh", sides)
    name = f"mesh:{'x'.join(map(str, sides))}"
    _buildable(name, prod(sides) * len(sides))
    return Fabric(name, prod(sides), 0, _grid(sides, False, rate, latency), "mesh", sides)


def torus(*sides: int, rate: float = RATE, latency: float = LATENCY) -> Fabric:
    """A grid of hosts whose edges are joined."""
    sides = _sides("torus", sides)
    name = f"torus:{'x'.join(map(str, sides))}"
    _buildable(name, prod(sides) * len(sides))
    return Fabric(name, prod(sides), 0, _grid(sides, True, rate, latency), "torus", sides)


def bcube(n: int | tuple[int, ...], levels: int | None = None, rate: float = RATE, latency: float = LATENCY) -> Fabric:
    """A BCube.

    Parameters
    ----------
    n : int, or tuple of int
        Ports of a switch; or one number for each level, then without `levels`.
    levels : int, optional
        NICs of a host.
    """
    if isinstance(n, int):
        levels = _at_least("the number of levels of a BCube", 1 if levels is None else levels, 1)
        name, shape = f"bcube:{n},{levels}", (n,) * min(levels, 21)  # of which two hosts each are too many already
    else:
        name, shape = f"bcube:{'x'.join(map(str, n))}", tuple(n)
    for level, radix in enumerate(shape):
        _at_least(f"the number of hosts at a switch of level {level} of a BCube", radix, 2)
    if not shape:
        raise ValueError("a BCube needs at least one level")
    hosts = prod(shape)
    _buildable(name, hosts * len(shape))
    pairs, first = [], [hosts]
    for radix in shape:
        first.append(first[-1] + hosts // radix)
    for host in range(hosts):
        stride = 1
        for level, radix in enumerate(shape):
            switch = host // (stride * radix) * stride + host % stride
            pairs.append((host, first[level] + switch))
            stride *= radix
    return Fabric(name, hosts, first[-1] - hosts, _wired(pairs, rate, latency), "bcube", shape)


def fat_tree(k: int, rate: float = RATE, latency: float = LATENCY) -> Fabric:
    """Three layers of k-port switches: k pods of k/2 edge and k/2 aggregation switches, (k/2)**2 cores, k**3/4 hosts."""
    if int(k) < 2 or int(k) % 2:
        raise ValueError(f"the number of ports of a fat-tree's switches is {k}; it must be even and at least 2")
    k = int(k)
    half, hosts = k // 2, k**3 // 4
    _buildable(f"fat_tree:{k}", 3 * hosts)
    edge, aggregation = hosts, hosts + k * half
    core = aggregation + k * half
    pairs = [(host, edge + host // half) for host in range(hosts)]
    pairs += [
        (edge + pod * half + e, aggregation + pod * half + a)
        for pod in range(k)
        for e in range(half)
        for a in range(half)
    ]
    pairs += [
        (aggregation + pod * half + a, core + a * half + c)
        for pod in range(k)
        for a in range(half)
        for c in range(half)
    ]
    return Fabric(f"fat_tree:{k}", hosts, k * k + half * half, _wired(pairs, rate, latency), "fat_tree", (k,))


def leaf_spine(leaves: int, per_leaf: int, spines: int, rate: float = RATE, latency: float = LATENCY) -> Fabric:
    """`leaves` switches of `per_leaf` hosts, each with one link to each of `spines` switches."""
    leaves = _at_least("the number of leaves", leaves, 1)
    per_leaf = _at_least("the number of hosts at a leaf", per_leaf, 1)
    spines = _at_least("the number of spines", spines, 1)
    hosts = leaves * per_leaf
    name = f"leaf_spine:{leaves},{per_leaf},{spines}"
    _buildable(name, hosts + leaves * spines)
    pairs = [(host, hosts + host // per_leaf) for host in range(hosts)]
    pairs += [(hosts + leaf, hosts + leaves + spine) for leaf in range(leaves) for spine in range(spines)]
    shape = (leaves, per_leaf, spines)
    return Fabric(name, hosts, leaves + spines, _wired(pairs, rate, latency), "leaf_spine", shape)


def cluster(
    hosts: int, ranks_per_host: int = 1, rails: int = 1, rate: float = RATE, latency: float = LATENCY,
    memory_rate: float = 80e9, memory_latency: float = 1e-6,
) -> Fabric:  # fmt: skip
    """Hosts of several ranks that share memory, joined by `rails` NICs each; rail i of all hosts is at switch i."""
    hosts = _at_least("the number of hosts of a cluster", hosts, 1)
    ranks_per_host = _at_least("ranks_per_host", ranks_per_host, 1)
    rails = _at_least("the number of rails", rails, 1)
    name = f"cluster:{hosts},{ranks_per_host},{rails}"
    _buildable(name, hosts * max(rails, ranks_per_host))  # through memory, too
    links = _wired(((host, hosts + rail) for host in range(hosts) for rail in range(rails)), rate, latency)
    shape = (hosts, ranks_per_host, rails)
    return Fabric(name, hosts, rails, links, "cluster", shape, ranks_per_host, memory_rate, memory_latency)


def factors(hosts: int, levels: int) -> tuple[int, ...]:
    """A number of hosts as a product of `levels` radices as equal as they can be, largest first.

    Raises
    ------
    ValueError
        When it has fewer prime factors than levels.
    """
    best: tuple[int, ...] | None = None

    def search(left: int, most: int, chosen: tuple[int, ...]) -> None:
        nonlocal best
        if len(chosen) == levels - 1:
            if 2 <= left <= most and (best is None or max(*chosen, left, left) < max(best)):
                best = (*chosen, left)
            return
        for radix in range(min(most, left // 2), 1, -1):
            if left % radix == 0:
                search(left // radix, radix, (*chosen, radix))

    search(hosts, hosts, ())
    if best is None:
        raise ValueError(f"{hosts} hosts cannot be written with {levels} digits of at least 2; take fewer levels")
    return best


CONSTRUCTORS: dict[str, tuple[Callable[..., Fabric], int, int]] = {  # and how many numbers they take; -1: any
    "ring": (ring, 1, 1),
    "star": (star, 1, 1),
    "mesh": (mesh, 1, -1),
    "torus": (torus, 1, -1),
    "bcube": (bcube, 1, 2),
    "fat_tree": (fat_tree, 1, 1),
    "leaf_spine": (leaf_spine, 3, 3),
    "cluster": (cluster, 1, 3),
}


def rate_bit_s(value: str | float) -> float:
    """A rate: a number of bit/s, or text with its unit, such as ``"200mbit"``.

    Raises
    ------
    ValueError
        Neither; or the text is of another kind, has no unit or an ambiguous one.
    """
    return 8.0 * rate_value(value) if isinstance(value, str) else _number("rate", value, "bit/s", "10gbit")


def latency_s(value: str | float) -> float:
    """A time: a number of seconds, or text with its unit, such as ``"50us"``; zero needs none. ValueError otherwise."""
    if isinstance(value, str):
        return 0.0 if value.strip() == "0" else seconds_value(value)
    return _number("latency", value, "seconds", "50us")


def burst_bytes(value: str | float) -> float:
    """A size: a number of bytes, or text with its unit, such as ``"6KB"``. ValueError otherwise."""
    return float(size_value(value)) if isinstance(value, str) else _number("burst", value, "bytes", "6KB")


def _number(what: str, value: object, unit: str, example: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{what} is {value!r}; write a number of {unit}, or for example {example!r}")
    return float(value)


def parse(text: str, rate: str | float = RATE, latency: str | float = LATENCY) -> Fabric:
    """A fabric from ``kind:numbers``; sides are joined by ``x``, other numbers by ``,``.

    Parameters
    ----------
    text : str
    rate, latency : str or float
        Of every link: as `rate_bit_s` and `latency_s` take them.

    Raises
    ------
    ValueError
        Naming what is wrong in the text.
    """
    kind, _, rest = text.strip().partition(":")
    if kind not in CONSTRUCTORS:
        raise ValueError(f"unknown fabric {kind!r} in {text!r}; known: {', '.join(CONSTRUCTORS)}")
    make, least, most = CONSTRUCTORS[kind]
    if not re.fullmatch(r"\d+([,x]\d+)*", rest):
        raise ValueError(f"numbers of {text!r} are {rest!r}; write for example bcube:3,2 or torus:4x4")
    numbers = [int(part) for part in re.split("[,x]", rest)]
    how = {"rate": rate_bit_s(rate), "latency": latency_s(latency)}
    if kind == "bcube" and "x" in rest:
        return make(tuple(numbers), **how)
    if len(numbers) < least or (0 <= most < len(numbers)):
        wanted = f"{least}" if most == least else f"{least} or more" if most < 0 else f"{least} to {most}"
        raise ValueError(f"{text!r} has {len(numbers)} numbers; {kind} takes {wanted}")
    return make(*numbers, **how)

"""The fabric: hosts, their NICs, switches, and the links between them, as immutable data.

Nodes are numbered: hosts first (0 to hosts - 1), then switches. A port is a node and one of its NICs (on a host: the
rail) or sockets (on a switch), numbered from 0 without gaps. Links are full duplex: link i carries `2 i` from a to b and
`2 i + 1` from b to a, each at the full rate; these numbers are the *directed links* of routes and loads.

`kind` and `shape` say which constructor of `hrdma.topo.fabrics` the wiring is from; algorithms and routing that need it
(digits of a BCube, dimensions of a torus) read them, so a file that claims a kind is checked against its wiring. A fabric
without a kind is irregular: it has shortest routes and MultiTree.

Ranks are the hosts, or `ranks_per_host` on each (rank r lives on host r // ranks_per_host): those of a host reach each
other through its memory and share its NICs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from typing import NamedTuple

__all__ = ["Fabric", "Link", "Port", "digits", "number"]

KINDS = ("ring", "star", "mesh", "torus", "bcube", "fat_tree", "leaf_spine", "cluster")


class Port(NamedTuple):
    """One end of a link."""

    node: int
    nic: int  #: index of the NIC on a host, of the socket on a switch


class Link(NamedTuple):
    """Two ports, full duplex."""

    a: Port
    b: Port
    rate: float  #: bit/s, each way
    latency: float  #: seconds, each way
    burst: float = 0.0  #: bytes, each way: after a rest so many pass at once (the bucket of a rate limiter, full)


def digits(value: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Digits of a mixed-radix number, least significant first."""
    found = []
    for n in shape:
        found.append(value % n)
        value //= n
    return tuple(found)


def number(listed, shape: tuple[int, ...]) -> int:
    """The inverse of `digits`."""
    value = 0
    for digit, n in zip(reversed(listed), reversed(shape)):
        value = value * n + digit
    return value


@dataclass(frozen=True)
class Fabric:
    """A network that a job runs on.

    Parameters
    ----------
    name : str
    hosts, switches : int
    links : tuple of Link
    kind : str
        One of `KINDS`, or empty: irregular.
    shape : tuple of int
        What the kind was made with: digits of a BCube and sides of a torus or mesh (level or dimension 0 first), the
        arguments of the other constructors.
    ranks_per_host : int
    memory_rate, memory_latency : float
        Between ranks of a host: bit/s that one rank can send and receive, seconds.
    interfaces : tuple of tuple of str
        For every host the names of its NICs, in their order; empty where they are not known.

    Raises
    ------
    ValueError
        A link of no rate, of a burst below 0, with itself or to a node that is not there, a NIC with two links, gaps in the
        numbers of a node's NICs, a host without a NIC, names of other NICs than there are, a fabric that is not connected. The
        message names it.

    Notes
    -----
    Cost: linear in the links.
    """

    name: str
    hosts: int
    switches: int
    links: tuple[Link, ...]
    kind: str = ""
    shape: tuple[int, ...] = ()
    ranks_per_host: int = 1
    memory_rate: float = 80e9
    memory_latency: float = 1e-6
    interfaces: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.switches < 0 or self.ranks_per_host < 1:
            raise ValueError(
                f"fabric {self.name!r}: out of range: hosts {self.hosts}, switches {self.switches}, "
                f"ranks_per_host {self.ranks_per_host}"
            )
        if self.kind and self.kind not in KINDS:
            raise ValueError(f"fabric {self.name!r}: unknown kind {self.kind!r}; known: {', '.join(KINDS)}")
        if not (self.memory_rate > 0 and isfinite(self.memory_rate)) or not 0 <= self.memory_latency < 1:
            raise ValueError(
                f"fabric {self.name!r}: memory of {self.memory_rate} bit/s, {self.memory_latency} s; "
                "a rate is above 0, a latency in [0, 1) s"
            )
        if self.nodes > 2 * len(self.links) + 1:  # before there is a list of them
            raise ValueError(
                f"fabric {self.name!r}: {self.nodes} hosts and switches, but only {len(self.links)} links; each needs one"
            )
        taken: set[Port] = set()
        sockets = [0] * self.nodes
        for index, (a, b, rate, latency, burst) in enumerate(self.links):
            what = f"fabric {self.name!r}: link {index} ({a.node}.{a.nic} to {b.node}.{b.nic})"
            if not (rate > 0 and isfinite(rate)):
                raise ValueError(f"{what} has rate {rate}; it must be above 0 bit/s")
            if not 0 <= latency < 1:
                raise ValueError(f"{what} has latency {latency}; it must be in [0, 1) s")
            if not (burst >= 0 and isfinite(burst)):
                raise ValueError(f"{what} has burst {burst}; it must be 0 bytes or more")
            if a.node == b.node:
                raise ValueError(f"{what} joins a node with itself")
            for port in (a, b):
                if not 0 <= port.node < self.nodes:
                    raise ValueError(f"{what} names node {port.node}; there are {self.nodes}")
                if port.nic < 0:
                    raise ValueError(f"{what} names NIC {port.nic}; they count from 0")
                if port in taken:
                    raise ValueError(
                        f"{what} takes NIC {port.nic} of {self.label(port.node)}, which has a link already"
                    )
                taken.add(port)
                sockets[port.node] = max(sockets[port.node], port.nic + 1)
        for node, count in enumerate(sockets):
            missing = next((nic for nic in range(count) if Port(node, nic) not in taken), None)
            if missing is not None:
                raise ValueError(f"fabric {self.name!r}: {self.label(node)} has a NIC {count - 1} but no NIC {missing}")
            if node < self.hosts and not count and self.hosts > 1:
                raise ValueError(f"fabric {self.name!r}: host {node} has no NIC")
        for host in range(self.hosts if self.interfaces else 0):
            names = self.interfaces[host] if len(self.interfaces) == self.hosts else ()
            if len(set(names)) != len(names) or len(names) != sockets[host]:
                raise ValueError(
                    f"fabric {self.name!r}: interfaces of host {host} are {list(names)}; it has {sockets[host]} NICs"
                )
        if lost := self._unreached():
            raise ValueError(f"fabric {self.name!r} is not connected: {self.label(lost)} cannot be reached from host 0")

    def _unreached(self) -> int:
        """A node that host 0 does not reach; 0: there is none."""
        reached, todo = {0}, [0]
        for node in todo:
            for _, other, _ in self.around[node]:
                if other not in reached:
                    reached.add(other)
                    todo.append(other)
        return next((node for node in range(self.nodes) if node not in reached), 0)

    @property
    def nodes(self) -> int:
        return self.hosts + self.switches

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    def host_of(self, rank: int) -> int:
        """The host on which a rank lives."""
        return rank // self.ranks_per_host

    def label(self, node: int) -> str:
        """A node's name for people: host 3, switch 0."""
        return f"host {node}" if node < self.hosts else f"switch {node - self.hosts}"

    @cached_property
    def around(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """For every node, in the order of its NICs: (directed link away, node at the other end, NIC here)."""
        found: list[list[tuple[int, int, int]]] = [[] for _ in range(self.nodes)]
        for index, (a, b, *_) in enumerate(self.links):
            found[a.node].append((2 * index, b.node, a.nic))
            found[b.node].append((2 * index + 1, a.node, b.nic))
        return tuple(tuple(sorted(ways, key=lambda way: way[2])) for ways in found)

    def nics(self, host: int) -> int:
        """Number of NICs of a host."""
        return len(self.around[host])

    @cached_property
    def rails(self) -> int:
        """NICs of the host that has most."""
        return max(len(self.around[host]) for host in range(self.hosts))

    def ends(self, directed: int) -> tuple[Port, Port]:
        """Where a directed link leaves and arrives."""
        a, b, *_ = self.links[directed >> 1]
        return (b, a) if directed & 1 else (a, b)

    def host_links(self) -> Iterator[int]:
        """The directed links that leave hosts."""
        for host in range(self.hosts):
            yield from (directed for directed, _, _ in self.around[host])

    @cached_property
    def nic_rate(self) -> float:
        """bit/s of the slowest NIC of a host."""
        return min((self.links[directed >> 1].rate for directed in self.host_links()), default=self.memory_rate)

    def without(self, *links: int) -> Fabric:
        """The fabric after links (by index) have failed; irregular, and its NICs are numbered anew.

        Raises
        ------
        ValueError
            No such link, or what is left is not connected.
        """
        for index in links:
            if not 0 <= index < len(self.links):
                raise ValueError(f"fabric {self.name!r} has no link {index}; it has {len(self.links)}")
        left = [link for index, link in enumerate(self.links) if index not in links]
        count: dict[int, int] = {}
        renamed: dict[Port, Port] = {}
        for port in sorted(port for link in left for port in (link.a, link.b)):
            renamed[port] = Port(port.node, count.setdefault(port.node, 0))
            count[port.node] += 1
        return replace(
            self,
            name=f"{self.name} without {', '.join(map(str, links))}",
            links=tuple(link._replace(a=renamed[link.a], b=renamed[link.b]) for link in left),
            kind="",
            shape=(),
            interfaces=(),
        )

    def digest(self) -> str:
        """A hash of everything but the name: equal on all ranks that mean the same fabric. Remembered."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        told = (self.hosts, self.switches, self.links, self.kind, self.shape, self.ranks_per_host)
        names = (self.interfaces,) if self.interfaces else ()
        return hashlib.sha256(repr((*told, *names, self.memory_rate, self.memory_latency)).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        slow, fast = (pick(link.rate for link in self.links) if self.links else 0 for pick in (min, max))
        rate = f"{slow / 1e9:g}" if slow == fast else f"{slow / 1e9:g} to {fast / 1e9:g}"
        each = f" of {self.ranks_per_host} ranks" if self.ranks_per_host > 1 else ""
        return (
            f"{self.name}: {self.hosts} hosts{each}, {self.switches} switches, {len(self.links)} links of {rate} Gbit/s, "
            f"up to {self.rails} NICs a host"
        )

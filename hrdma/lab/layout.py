r"""What a lab consists of: namespaces, NICs, bridges, addresses and routes, as plain data planned from a fabric.

Every node of the fabric is a network namespace, every link a veth pair between two of them. The hosts at one switch
share its bridge and a subnet, the two ends of a link between hosts (ring, torus, mesh) have a subnet of their own. A
switch that is joined to other switches also routes: its bridge has an address, the link to the next switch is a subnet.
(Bridging between switches would need a spanning tree, which closes every path but one.)

The address says where it is: ``10.<lab>.<subnet>.<host + 1>``. Subnets are counted in the order: switches, then links.
Where a host has several NICs at one switch, the first ones of all hosts share a subnet, the second ones another, and so
on: with two addresses in one subnet the kernel would send everything by one NIC.

::

    bcube:2,2                   s2      s3            h0: nic0 10.128.0.1  nic1 10.128.2.1
                               /  \    /  \           h1: nic0 10.128.0.2  nic1 10.128.3.2
    nic0 is at s0 and s1,    h0    h2 h1   h3         h2: nic0 10.128.1.3  nic1 10.128.2.3
    nic1 at s2 and s3          h0 h1    h2 h3         h3: nic0 10.128.1.4  nic1 10.128.3.4
                                \ /      \ /          h0 reaches h3: 10.128.1.4 via 10.128.0.2 (h1) by nic0,
                                s0       s1                          10.128.3.4 via 10.128.2.3 (h2) by nic1
"""

from __future__ import annotations

from dataclasses import dataclass

from hrdma.lab import PACKET
from hrdma.lab.routes import Exit, NextHops
from hrdma.topo.fabric import Fabric, Link, Port

__all__ = ["BRIDGE", "Nic", "Node", "Plan", "Route", "burst_of", "node_name", "plan"]

BRIDGE = "bridge"
MTU = 1500
FRAME = MTU + 14
SEGMENT = MTU - 52  # of it, what TCP carries
MOST_PACKET = 524280  # the kernel's, of a veth pair
BURST = 1e-3  # seconds of the rate
MAX_BURST = 1.0  # the kernel counts it in 32 bits
MAX_HOSTS = 64  # a lab is one machine; more namespaces only make it slow
PREFIX = 24
ROUTER = 254  # last octet of a switch that routes
MAX_SUBNETS = 256
MIN_RATE_BIT_S = 1e5
MAX_RATE_BIT_S = 8 * (2**32 - 1)  # the kernel's field holds bytes per second in 32 bits


@dataclass(frozen=True)
class Nic:
    """A host's NIC or a switch's port: one end of a veth pair.

    Attributes
    ----------
    name : str
        Of the interface: ``nic0``, ``port3``.
    address : str
        With prefix; empty for a port in the switch's bridge.
    peer : str
        The other end, as ``s0.port3``.
    rate_bit_s : float
        Bits per second that may leave it.
    latency : float
        Seconds that what leaves it is held back.
    burst : int
        Bytes that may leave it at once after a rest, frames and all.
    packet : int
        Bytes that it takes from TCP as one and cuts into frames: no more than pass the bucket at once.
    """

    name: str
    address: str
    peer: str
    rate_bit_s: float
    latency: float
    burst: int
    packet: int


@dataclass(frozen=True)
class Route:
    """To one address: by a gateway and an interface, or by several of them in turn of the flows."""

    target: str
    hops: tuple[tuple[str, str], ...]  #: gateway, interface


@dataclass(frozen=True)
class Node:
    """A host or a switch.

    Attributes
    ----------
    name : str
        ``h0``, ``s0``.
    nics : tuple of Nic
    bridge : tuple of str or None
        Addresses of the bridge, none for a switch that does not route; None where there is no bridge.
    routes : tuple of Route
    """

    name: str
    nics: tuple[Nic, ...]
    bridge: tuple[str, ...] | None
    routes: tuple[Route, ...]


@dataclass(frozen=True)
class Plan:
    """All of a lab; made by `plan`. The first `hosts` of `nodes` are hosts; a port is the place of a NIC in `nodes`."""

    fabric: str
    hosts: int
    nodes: tuple[Node, ...]
    wires: tuple[tuple[Port, Port], ...]


def node_name(hosts: int, node: int) -> str:
    return f"h{node}" if node < hosts else f"s{node - hosts}"


def plan(fabric: Fabric, network: int, packet: int = PACKET) -> Plan:
    """Plans the lab of a fabric.

    Parameters
    ----------
    fabric : Fabric
        Up to 64 hosts.
    network : int
        The second octet of all addresses.
    packet : int
        Bytes that a NIC takes as one at most.

    Raises
    ------
    ValueError
        The fabric is too large, or has rates or bursts that the kernel cannot give, or NICs take none so large.
    """
    if not FRAME <= packet <= MOST_PACKET:
        raise ValueError(f"packets of {packet} bytes: a lab's NICs take {FRAME} to {MOST_PACKET} as one")
    if not 1 <= fabric.hosts <= MAX_HOSTS:
        raise ValueError(f"fabric {fabric.name} has {fabric.hosts} hosts: a lab has 1 to {MAX_HOSTS}")
    for index, link in enumerate(fabric.links):
        if not MIN_RATE_BIT_S <= link.rate <= MAX_RATE_BIT_S:
            raise ValueError(
                f"link {index} of {fabric.name}: rate {link.rate:g} bit/s; a lab has {MIN_RATE_BIT_S:g} to "
                f"{MAX_RATE_BIT_S:g} (--rate 200mbit sets all)"
            )
        if link.burst > link.rate / 8 * MAX_BURST:
            raise ValueError(
                f"link {index} of {fabric.name}: burst {link.burst:g} bytes; a lab has up to {MAX_BURST:g} s of the rate"
            )
    return _Planner(fabric, network, packet).plan()


class _Planner:
    """The tables that addresses and routes are read from."""

    def __init__(self, fabric: Fabric, network: int, packet: int) -> None:
        self.fabric = fabric
        self.network = network
        self.packet = packet
        self.hosts = fabric.hosts
        self.next_hops = NextHops(fabric)
        self.links = self.next_hops.exits
        self.names = [node_name(fabric.hosts, node) for node in range(fabric.nodes)]
        self.address: dict[tuple[int, int], str] = {}  # (node, NIC) -> address
        self.bridges: dict[int, tuple[str, ...]] = {}  # switch -> its bridge's addresses
        self.at_switch: dict[tuple[int, int], list[int]] = {}  # (switch, host) -> NICs that the host has there
        self.used = 0
        for switch in range(self.hosts, fabric.nodes):
            self._switch(switch)
        for link in fabric.links:
            if (link.a.node < self.hosts) == (link.b.node < self.hosts):
                subnet = self._subnet()
                last = (link.a.node, link.b.node) if link.a.node < self.hosts else (0, 1)
                for port, number in zip((link.a, link.b), last):
                    self.address[port.node, port.nic] = self._at(subnet, number + 1)

    def _subnet(self) -> int:
        if self.used == MAX_SUBNETS:
            raise ValueError(
                f"fabric {self.fabric.name}: a lab has up to {MAX_SUBNETS} subnets (switches and direct links)"
            )
        self.used += 1
        return self.used - 1

    def _at(self, subnet: int, number: int) -> str:
        return f"10.{self.network}.{subnet}.{number}"

    def _switch(self, switch: int) -> None:
        """Subnets of a switch: one for the first NIC that each host has here, one for the second, ..."""
        subnets: list[int] = []
        attached = sorted(
            (end for end in self.links[switch] if end.node < self.hosts), key=lambda e: (e.node, e.peer_nic)
        )
        for end in attached:
            here = self.at_switch.setdefault((switch, end.node), [])
            if len(here) == len(subnets):
                subnets.append(self._subnet())
            self.address[end.node, end.peer_nic] = self._at(subnets[len(here)], end.node + 1)
            here.append(end.peer_nic)
        if attached:
            routes = len(attached) < len(self.links[switch])
            self.bridges[switch] = tuple(self._at(subnet, ROUTER) for subnet in subnets if routes)

    def plan(self) -> Plan:
        routes: list[list[Route]] = [[] for _ in self.links]
        for target in range(self.hosts):
            self._routes_to(target, routes)
        nodes = []
        for node, name in enumerate(self.names):
            bridge = tuple(f"{address}/{PREFIX}" for address in self.bridges.get(node, ()))
            nics = tuple(self._nic(node, end) for end in self.links[node])
            nodes.append(Node(name, nics, bridge if node in self.bridges else None, tuple(routes[node])))
        wires = tuple((link.a, link.b) for link in self.fabric.links)
        return Plan(self.fabric.name, self.hosts, tuple(nodes), wires)

    def _interface(self, node: int, nic: int) -> str:
        return f"nic{nic}" if node < self.hosts else f"port{nic}"

    def _nic(self, node: int, end: Exit) -> Nic:
        link = self.fabric.links[self.fabric.around[node][end.nic][0] >> 1]
        address = self.address.get((node, end.nic))
        peer = f"{self.names[end.node]}.{self._interface(end.node, end.peer_nic)}"
        shown = f"{address}/{PREFIX}" if address else ""
        burst = burst_of(link)
        packet = min(self.packet, burst * SEGMENT // FRAME)
        return Nic(self._interface(node, end.nic), shown, peer, link.rate, link.latency, burst, packet)

    def _routes_to(self, target: int, routes: list[list[Route]]) -> None:
        addresses = {end.nic: self.address[target, end.nic] for end in self.links[target]}
        for host in range(self.hosts):
            near = self._subnets(host)
            for nic, address in addresses.items():
                if host != target and _subnet_of(address) not in near:
                    path = self.next_hops.of_host(host, target, nic)
                    routes[host].append(Route(address, (self._host_hop(host, path),)))
        for switch, ends in self.next_hops.of_switches(target).items():
            if self.bridges.get(switch) != ():  # one that only joins hosts has no address, hence no routes
                near = self._subnets(switch)
                via = tuple(dict.fromkeys(self._switch_hop(switch, end) for end in ends))
                routes[switch] += [
                    Route(address, via) for address in addresses.values() if _subnet_of(address) not in near
                ]

    def _subnets(self, node: int) -> set[str]:
        """Those that a node is in, and hence needs no routes for."""
        own = [self.address[node, end.nic] for end in self.links[node] if (node, end.nic) in self.address]
        return {_subnet_of(address) for address in (*own, *self.bridges.get(node, ()))}

    def _host_hop(self, host: int, path: list[Exit]) -> tuple[str, str]:
        """Gateway and interface of the first step of a host's path: the next host, or the switch where none follows."""
        first = path[0]
        if first.node < self.hosts:
            return self.address[first.node, first.peer_nic], self._interface(host, first.nic)
        if path[1].node >= self.hosts:
            subnet = _subnet_of(self.address[host, first.nic])
            return f"{subnet}.{ROUTER}", self._interface(host, first.nic)
        own, other = self.at_switch[first.node, host], self.at_switch[first.node, path[1].node]
        number = own.index(first.nic)
        number = number if number < len(other) else 0  # only the n-th NICs of both are in one subnet
        return self.address[path[1].node, other[number]], self._interface(host, own[number])

    def _switch_hop(self, switch: int, end: Exit) -> tuple[str, str]:
        if end.node < self.hosts:
            return self.address[end.node, end.peer_nic], BRIDGE
        return self.address[end.node, end.peer_nic], self._interface(switch, end.nic)


def burst_of(link: Link) -> int:
    """Bytes of a link's bucket, two frames at least: what the fabric says, or `BURST`."""
    return max(2 * FRAME, round(link.burst or link.rate / 8 * BURST))


def _subnet_of(address: str) -> str:
    return address.rpartition(".")[0]

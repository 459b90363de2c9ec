"""Builds a planned lab in the kernel: namespaces, veth pairs, bridges, rates, addresses and routes, by netlink.

Rates: a token bucket (TBF) at both ends of every link. It counts whole Ethernet frames without preamble and checksum,
headers of every segment included where the kernel sends many at once (GSO), so that TCP gets 1448 / 1514 of the rate at
an MTU of 1500. The bucket holds what the fabric says (a link's burst), else 1 ms of the rate: more would let short messages
pass as if there were no limit. And since a bucket splits what is larger than itself, which costs the processor dearly,
NICs make nothing larger (GSO size). Above 64 KiB that is BIG TCP, whose size for IPv4 is a setting of its own.

Latency: netem above the bucket. Where the kernel has no netem a latency is refused.

The lab's kernel settings are its own and the same on every machine, whatever the machine's are: forwarding on, no
reverse-path filter (a packet for nic1 may well arrive by nic0), cubic or, where the kernel keeps that from namespaces,
reno.
"""

from __future__ import annotations

import contextlib
import errno
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from hrdma.lab import PACKET, namespaces
from hrdma.lab.layout import BRIDGE, MTU, Nic, Node, Plan
from hrdma.qos.wire import NLM_F_ACK, NLM_F_REQUEST, RTM_GETLINK, RTM_NEWLINK, Wire, attribute, attributes

__all__ = ["build"]

QUEUE = 50e-3  # seconds of the rate that wait at a link before packets are dropped
LEAST_QUEUE = 256 << 10
IFLA_GSO_IPV4_MAX_SIZE = 63  # linux/if_link.h, from Linux 6.3 on; pyroute2 0.9 does not know it
DELAY_QUEUE = 10000  # packets held back by netem
NO_NETEM = {errno.ENOENT: "this kernel has no netem (CONFIG_NET_SCH_NETEM): bring it up with --latency 0"}

SETTINGS = {
    "net/ipv4/ip_forward": "1",
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/default/rp_filter": "0",
    "net/ipv4/conf/all/send_redirects": "0",
    "net/ipv4/conf/default/send_redirects": "0",
    "net/ipv4/conf/all/arp_ignore": "1",
    "net/ipv4/conf/all/arp_announce": "2",
    "net/ipv6/conf/default/disable_ipv6": "1",
    "net/ipv4/fib_multipath_hash_policy": "1",
}
CONGESTION_CONTROLS = ("cubic", "reno")  # the first that the kernel permits here


def build(lab: str, plan: Plan) -> None:
    """Builds a lab. After an error a part of it is there: remove it by name.

    Raises
    ------
    PermissionError
        Not allowed by the kernel.
    RuntimeError
        The kernel refuses something; the message has what, where, and the kernel's reason.
    """
    for node in plan.nodes:
        with _said(f"{node.name}: namespace"):
            namespaces.create(lab, node.name)
            namespaces.inside(namespaces.path(lab, node.name), _settings)
    for step in (_join, _configure):
        for number, node in enumerate(plan.nodes):
            namespaces.inside(namespaces.path(lab, node.name), partial(step, lab, plan, number))


def _settings() -> None:
    for name, value in SETTINGS.items():
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6 or multipath routes has no such setting
            _set(name, value)
    for name in CONGESTION_CONTROLS:
        with contextlib.suppress(PermissionError, FileNotFoundError):  # not for namespaces, or not there
            _set("net/ipv4/tcp_congestion_control", name)
            break


def _set(name: str, value: str) -> None:
    with open(f"/proc/sys/{name}", "w") as file:
        file.write(value)


@contextlib.contextmanager
def _said(what: str, mends: Mapping[int, str] = MappingProxyType({})) -> Iterator[None]:
    """Errors say what was being done and why the kernel refuses it, and name the mend where there is one."""
    try:
        yield
    except (NetlinkError, OSError) as error:
        if isinstance(error, NetlinkError):
            code, why = error.code, str(error.args[-1])
        else:
            code, why = error.errno or 0, error.strerror or str(error)
            why += f": {error.filename}" if error.filename else ""
        if code in mends:
            raise RuntimeError(f"{what}: {mends[code]}") from error
        if code in (errno.EPERM, errno.EACCES):
            raise PermissionError(
                code, f"{what}: not permitted ({why}); a lab needs root (CAP_SYS_ADMIN, CAP_NET_ADMIN)"
            ) from error
        raise RuntimeError(f"{what}: {why} (errno {code})") from error


def _join(lab: str, plan: Plan, number: int) -> None:
    """In a node's namespace: makes its bridge, and the veth pairs that begin here."""
    here = plan.nodes[number]
    with IPRoute() as ip:
        if here.bridge is not None:
            with _said(f"{here.name}: bridge"):
                ip.link("add", ifname=BRIDGE, kind="bridge", br_stp_state=0, br_mcast_snooping=0)
        for near, far in plan.wires:
            if near.node != number:
                continue
            there = plan.nodes[far.node]
            name = here.nics[near.nic].name
            with _said(f"{here.name}.{name}: veth pair"), open(namespaces.path(lab, there.name)) as file:
                peer = {"ifname": there.nics[far.nic].name, "net_ns_fd": file.fileno()}
                ip.link("add", ifname=name, kind="veth", peer=peer)


def _configure(lab: str, plan: Plan, number: int) -> None:
    """In a node's namespace, once all interfaces are there: rates, addresses, routes."""
    with IPRoute() as ip:
        indices = {link.get_attr("IFLA_IFNAME"): link["index"] for link in ip.get_links()}
        _Part(ip, plan.nodes[number], indices).finish()


class _Part:
    """One node whose interfaces are there."""

    def __init__(self, ip: IPRoute, node: Node, indices: dict[str, int]) -> None:
        self.ip = ip
        self.node = node
        self.indices = indices

    def finish(self) -> None:
        self._do("lo", "up", self.ip.link, "set", index=self.indices["lo"], state="up")
        if self.node.bridge is not None:
            self._up(BRIDGE)
            for address in self.node.bridge:
                self._address(BRIDGE, address)
        for nic in self.node.nics:
            self._nic(nic)
        if self.node.bridge is not None and self.node.nics:  # what it takes is bounded by its ports
            most = max(nic.packet for nic in self.node.nics)
            self._do(BRIDGE, "settings", self.ip.link, "set", index=self.indices[BRIDGE], gso_max_size=most)
            self._take(BRIDGE, most)
        for route in self.node.routes:
            hops = [{"gateway": gateway, "oif": self.indices[interface]} for gateway, interface in route.hops]
            how: dict[str, Any] = hops[0] if len(hops) == 1 else {"multipath": hops}
            self._do(
                route.hops[0][1], f"route to {route.target}", self.ip.route, "add", dst=f"{route.target}/32", **how
            )

    def _nic(self, nic: Nic) -> None:
        index = self.indices[nic.name]
        how: dict[str, Any] = {"gso_max_size": nic.packet}
        if not nic.address:
            how["master"] = self.indices[BRIDGE]
        self._do(nic.name, "settings", self.ip.link, "set", index=index, mtu=MTU, **how)
        self._take(nic.name, nic.packet)
        self._limit(nic, index)
        self._up(nic.name)
        if nic.address:
            self._address(nic.name, nic.address)

    def _limit(self, nic: Nic, index: int) -> None:
        how: dict[str, Any] = {"handle": "1:"}
        if nic.latency > 0:
            delay = round(nic.latency * 1e6)
            with _said(f"{self.node.name}.{nic.name}: a latency of {nic.latency:g} s", NO_NETEM):
                self.ip.tc("add", "netem", index, handle="1:", delay=delay, limit=DELAY_QUEUE)
            how = {"handle": "2:", "parent": "1:1"}
        queue = max(LEAST_QUEUE, round(nic.rate_bit_s / 8 * QUEUE), 2 * nic.burst)
        rate = {"rate": round(nic.rate_bit_s / 8), "burst": nic.burst, "limit": queue}  # a number is bytes per second
        self._do(nic.name, "rate", self.ip.tc, "add", "tbf", index, **how, **rate)

    def _take(self, interface: str, nbytes: int) -> None:
        if nbytes > PACKET:
            self._do(interface, f"IPv4 packets of {nbytes} bytes", _take, self.indices[interface], nbytes)

    def _up(self, interface: str) -> None:
        self._do(interface, "up", self.ip.link, "set", index=self.indices[interface], state="up")

    def _address(self, interface: str, address: str) -> None:
        self._do(interface, f"address {address}", self.ip.addr, "add", index=self.indices[interface], address=address)

    def _do(self, interface: str, what: str, function: Callable[..., Any], *arguments: Any, **how: Any) -> None:
        with _said(f"{self.node.name}.{interface}: {what}"):
            function(*arguments, **how)


def _take(index: int, nbytes: int) -> None:
    """Has a NIC take IPv4 packets of so many bytes, more than `PACKET`."""
    link = struct.pack("=4xi8x", index)
    with Wire() as wire:
        wire.send(
            link + attribute(IFLA_GSO_IPV4_MAX_SIZE, struct.pack("=I", nbytes)), RTM_NEWLINK, NLM_F_REQUEST | NLM_F_ACK
        )
        ((_, answer),) = wire.send(link, RTM_GETLINK, NLM_F_REQUEST)
    if attributes(answer, 32).get(IFLA_GSO_IPV4_MAX_SIZE) != struct.pack("=I", nbytes):
        raise OSError(errno.EOPNOTSUPP, f"this kernel has none above {PACKET} (Linux 6.3 has): leave --packet out")

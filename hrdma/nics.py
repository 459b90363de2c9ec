"""This host's network interfaces, as rails: which are there, and which the grammar of HRDMA_IFNAME takes.

The transport has the same grammar in C, for addresses. Here whole interfaces are chosen, so that each can be a rail with a
domain of its own: those that are up and are not loopback, in the order of their names, numbers in names as numbers (nic2
before nic10).
"""

from __future__ import annotations

import fcntl
import fnmatch
import ipaddress
import re
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hrdma.topo.fabric import Fabric

__all__ = ["Nic", "nics", "rails"]

_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B  # linux/sockios.h
_IFF_UP, _IFF_LOOPBACK = 1, 8


class Nic(NamedTuple):
    """An interface and its first address: IPv4, or IPv6 where it has none."""

    name: str
    address: str
    subnet: str  #: network in CIDR form, equal for NICs that reach each other directly


def nics(ifname: str = "") -> list[Nic]:
    """Interfaces that are up, have an address and are not loopback.

    Parameters
    ----------
    ifname : str
        Name, glob, network, address, ``^`` before what is excluded, with commas between; empty: all.

    Notes
    -----
    Some system calls for each interface. Addresses beyond an interface's first one are not seen.
    """
    found = sorted(
        filter(None, map(_nic, [name for _, name in socket.if_nameindex()])), key=lambda nic: _order(nic.name)
    )
    items = [item.strip() for item in ifname.split(",") if item.strip()]
    wanted = [item for item in items if not item.startswith("^")]
    unwanted = [item[1:] for item in items if item.startswith("^")]
    return [
        nic
        for nic in found
        if (not wanted or any(_matches(item, nic) for item in wanted)) and not any(_matches(x, nic) for x in unwanted)
    ]


def rails(fabric: Fabric, rank: int, ifname: str, most: int, warn: Callable[..., None]) -> tuple[str, ...]:
    """Names of the interfaces that are a rank's rails, in the order of lanes; empty: no choice is made.

    The first rank of a host warns where there are fewer than the fabric has, or more than `most`.
    """
    host, speaks = fabric.host_of(rank), rank % fabric.ranks_per_host == 0
    wanted = fabric.nics(host)
    there = [nic.name for nic in nics(ifname)]
    found = [name for name in fabric.interfaces[host] if name in there] if fabric.interfaces else there[:wanted]
    if len(found) < wanted:
        if speaks:
            warn(
                "host %d of %s has %d NICs, this one %s: what belongs to the others goes by the first",
                host, fabric.name, wanted, f"only {' '.join(there)}" if there else "none",
            )  # fmt: skip
        found = found[:1]
    if len(found) > most:
        if speaks:
            warn(
                "host %d of %s has %d NICs, of which %d can be rails: what belongs to the others goes by %s",
                host, fabric.name, wanted, most, " ".join(found[:most]),
            )  # fmt: skip
        found = found[:most]
    return tuple(found) if len(found) > 1 or fabric.interfaces else ()


def _order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.findall(r"\d+|\D+", name)]


def _matches(item: str, nic: Nic) -> bool:
    try:
        return ipaddress.ip_address(nic.address) in ipaddress.ip_network(item, strict=False)
    except ValueError:  # a name
        return fnmatch.fnmatchcase(nic.name, item)


def _nic(name: str) -> Nic | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:

        def asked(request: int) -> bytes:
            return fcntl.ioctl(sock, request, struct.pack("16s240x", name.encode()))[16:]

        try:
            (flags,) = struct.unpack_from("=H", asked(_SIOCGIFFLAGS))
        except OSError:  # gone meanwhile
            return None
        if not flags & _IFF_UP or flags & _IFF_LOOPBACK:
            return None
        try:
            address = socket.inet_ntoa(asked(_SIOCGIFADDR)[4:8])
            mask = socket.inet_ntoa(asked(_SIOCGIFNETMASK)[4:8])
        except OSError:
            return _nic_of_ipv6(name)
        return Nic(name, address, str(ipaddress.ip_network(f"{address}/{mask}", strict=False)))


def _nic_of_ipv6(name: str) -> Nic | None:
    """The first global address: link-local ones mean nothing to another host."""
    try:
        with open("/proc/net/if_inet6") as file:
            rows = [line.split() for line in file]
    except OSError:  # no IPv6 here
        return None
    for digits, _, prefix, scope, _, of in rows:
        if of == name and scope == "00":
            address = ipaddress.IPv6Address(int(digits, 16))
            return Nic(name, str(address), str(ipaddress.ip_network(f"{address}/{int(prefix, 16)}", strict=False)))
    return None

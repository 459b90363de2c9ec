"""Soft-RoCE devices, made and removed by netlink (RDMA_NL_NLDEV): RDMA over any network card, to try and to test.

The devices that are made here are called after their network device, ``hrdma_eth0`` on eth0. That name is the only record
there is: what is called otherwise was made by others and is never removed here. Everything is of the network namespace of the calling thread.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass

from hrdma.errors import DeviceError, NetlinkError, RefusedError
from hrdma.nics import nics
from hrdma.qos.wire import NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, Wire, attribute, attributes, has_net_admin, text

__all__ = ["PREFIX", "Link", "add", "device_of", "down", "links", "port", "query", "remove", "up"]

PREFIX = "hrdma_"
KIND = "rxe"
NETLINK_RDMA = 20
CLIENT = 5  # RDMA_NL_NLDEV
GET, NEWLINK, DELLINK, PORT_GET = ((CLIENT << 10) + number for number in (1, 3, 4, 5))
DEV_INDEX, DEV_NAME, PORT_INDEX, PORT_STATE, NDEV_NAME, LINK_TYPE = 1, 2, 3, 12, 51, 65
STATES = ("nop", "down", "init", "armed", "active", "active, deferred")
HEADER = 16  # of a netlink message; these have no other


@dataclass(frozen=True)
class Link:
    """An RDMA device and its first port.

    Attributes
    ----------
    index : int
    name : str
    netdev : str
        The network device under it; empty on InfiniBand.
    state : str
        ``"active"``, ``"down"``, ...
    """

    index: int
    name: str
    netdev: str
    state: str

    @property
    def ours(self) -> bool:
        """Made by `up`."""
        return self.name == device_of(self.netdev)


def device_of(netdev: str) -> str:
    """What the device on a network device is called."""
    return f"{PREFIX}{netdev}"


def _number(attr: int, value: int) -> bytes:
    return attribute(attr, struct.pack("=I", value))


def query() -> tuple[bytes, int, int]:
    """The request for all devices: what is behind the header, type and flags."""
    return b"", GET, NLM_F_REQUEST | NLM_F_DUMP


def port(index: int) -> tuple[bytes, int, int]:
    """The request for a device's first port."""
    return _number(DEV_INDEX, index) + _number(PORT_INDEX, 1), PORT_GET, NLM_F_REQUEST


def add(netdev: str) -> tuple[bytes, int, int]:
    """The request that makes the device of a network device."""
    body = text(DEV_NAME, device_of(netdev)) + text(LINK_TYPE, KIND) + text(NDEV_NAME, netdev)
    return body, NEWLINK, NLM_F_REQUEST | NLM_F_ACK


def remove(index: int) -> tuple[bytes, int, int]:
    """The request that removes a device."""
    return _number(DEV_INDEX, index), DELLINK, NLM_F_REQUEST | NLM_F_ACK


def links() -> list[Link]:
    """All RDMA devices of this host, whoever made them; none where the kernel has no RDMA.

    Raises
    ------
    NetlinkError, TimeoutError
        The kernel does not say.
    """
    wire = _opened()
    if wire is None:
        return []
    with wire:
        return _links(wire)


def _opened() -> Wire | None:
    """None where the kernel has no RDMA."""
    try:
        return Wire(NETLINK_RDMA)
    except OSError as error:
        if error.errno in (errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT):
            return None
        raise


def _links(wire: Wire) -> list[Link]:
    found = []
    for _, body in wire.ask("list the RDMA devices", query()):
        attrs = attributes(body, HEADER)
        (index,) = struct.unpack("=I", attrs[DEV_INDEX])
        try:
            more = attributes(wire.ask(f"ask for RDMA device {index}", port(index))[0][1], HEADER)
        except (DeviceError, NetlinkError):
            more = {}  # gone meanwhile
        state = more.get(PORT_STATE, b"\0")[0]
        known = STATES[state] if state < len(STATES) else f"state {state}"
        found.append(Link(index, _text(attrs.get(DEV_NAME, b"")), _text(more.get(NDEV_NAME, b"")), known))
    return found


def _text(value: bytes) -> str:
    return value.rstrip(b"\0").decode(errors="replace")


def up(netdev: str = "") -> Link:
    """Makes the soft-RoCE device of a network device, unless it is there.

    Parameters
    ----------
    netdev : str
        Empty: the first interface that is up and not loopback.

    Raises
    ------
    DeviceError
        There is no such network device, it has an RDMA device that others made, or this kernel has no soft-RoCE, or
        none for it; nothing was made.
    RefusedError
        Not root.
    NetlinkError, TimeoutError
        The kernel refuses for another reason, or does not answer.
    """
    if not netdev:
        found = nics()
        if not found:
            raise DeviceError("no interface but loopback is up: name one with --dev, or ip link set ... up")
        netdev = found[0].name
    wire = _opened()
    if wire is None:
        raise DeviceError("this kernel has no RDMA: modprobe rdma_rxe, where it has that")
    with wire:
        link = _on(wire, netdev)
        if link is None:
            with Wire() as routes:
                routes.ifindex(netdev)
            _make(wire, netdev)
            link = _on(wire, netdev)
        if link is None:
            raise DeviceError(f"{device_of(netdev)} was made and is gone: something else removes devices here")
        return link


def _on(wire: Wire, netdev: str) -> Link | None:
    """Our device of a network device; DeviceError where others made one."""
    there = [link for link in _links(wire) if link.netdev == netdev]
    if there and not any(link.ours for link in there):
        raise DeviceError(f"{netdev} has {there[0].name}, which others made: HRDMA_DEVICES={there[0].name} uses it")
    return next((link for link in there if link.ours), None)


def _make(wire: Wire, netdev: str) -> None:
    what = f"make {device_of(netdev)} on {netdev}"
    try:
        wire.ask(what, add(netdev))
    except RefusedError:
        if not has_net_admin():
            raise
        why = f"{netdev} is a VLAN, or root here is not the host's (a user namespace)"
        raise DeviceError(f"cannot {what}: the kernel does not permit it; {why}") from None
    except NetlinkError as error:
        if error.errno == errno.EINVAL:
            raise DeviceError(
                f"cannot {what}: soft-RoCE is not there; modprobe rdma_rxe, where the kernel has it"
            ) from None
        if error.errno != errno.EEXIST or _on(wire, netdev) is None:  # else it was made at the same time
            raise


def down(netdev: str = "") -> list[Link]:
    """Removes the devices that `up` made: the one of a network device, or all. None is no error.

    Raises
    ------
    RefusedError
        Not root.
    NetlinkError, TimeoutError
        The kernel refuses. One of Linux 6.1 and before waits for every program that has the device open.
    """
    wire = _opened()
    if wire is None:
        return []
    with wire:
        gone = [link for link in _links(wire) if link.ours and netdev in ("", link.netdev)]
        for link in gone:
            try:
                wire.ask(f"remove {link.name}", remove(link.index))
            except (DeviceError, NetlinkError):
                if any(one.index == link.index for one in _links(wire)):  # else it was removed at the same time
                    raise
    return gone

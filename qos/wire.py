"""A netlink socket with deadlines and the kernel's own words, and what messages are made of.

pyroute2's sockets have no deadline per request and drop the text of an extended acknowledgement, of which the first must
not be and the second is what a user needs. To import it takes a quarter of a second of a processor, and its decoder a millisecond
for each line of a dump, of which a host has a thousand. ``TCA_OPTIONS`` is left as bytes here, `hrdma.qos.kinds` reads it.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hrdma.errors import DeviceError, NetlinkError, RefusedError
from hrdma.qos.objects import Filter, Link, Object, Qdisc, TClass, handle_text

__all__ = [
    "DUMPS",
    "NESTED",
    "NLM_F_ACK",
    "NLM_F_REQUEST",
    "Entry",
    "Wire",
    "attribute",
    "attributes",
    "framed",
    "has_net_admin",
    "message",
    "pairs",
    "text",
]

TIMEOUT = 5.0  # seconds for the kernel's answer
# linux/netlink.h
SOL_NETLINK, NETLINK_EXT_ACK = 270, 11
NLMSG_ERROR, NLMSG_DONE = 2, 3
NLM_F_REQUEST, NLM_F_MULTI, NLM_F_ACK, NLM_F_DUMP = 0x1, 0x2, 0x4, 0x300  # flags of any message
NLM_F_REPLACE, NLM_F_EXCL, NLM_F_CREATE = 0x100, 0x200, 0x400  # ... of one that makes something
NLM_F_CAPPED, NLM_F_ACK_TLVS = 0x100, 0x200  # ... of an acknowledgement
NESTED = 0x8000  # flag in an attribute's number
# linux/rtnetlink.h, linux/if_link.h
RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK = 16, 17, 18
RTM_GETROUTE = 26
RTM_NEWQDISC, RTM_DELQDISC, RTM_GETQDISC = 36, 37, 38
RTM_NEWTCLASS, RTM_DELTCLASS, RTM_GETTCLASS = 40, 41, 42
RTM_NEWTFILTER, RTM_DELTFILTER, RTM_GETTFILTER = 44, 45, 46
IFLA_IFNAME, IFLA_LINKINFO, IFLA_INFO_KIND, IFLA_NUM_TX_QUEUES = 3, 18, 1, 31
IFF_UP = 1
RTN_UNICAST, RTA_OIF = 1, 4
TCA_KIND, TCA_OPTIONS, TCA_CHAIN = 1, 2, 11
CAP_NET_ADMIN = 12
UNKNOWN = (
    "kind is unknown",
    "classifier not found",
    "Unknown device type",
)  # the kernel's words for what it does not have
NESTED_KINDS = ("ets",)  # the kernel parses their options strictly, and wants the nested flag
DUMPS = {"qdisc": RTM_GETQDISC, "class": RTM_GETTCLASS, "filter": RTM_GETTFILTER}
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
_LINK = struct.Struct("=4xiII")  # index, flags, which of them count
_ROUTE = struct.Struct("=xB5xB4x")  # bits of the destination, type
_TCMSG = struct.Struct("=4xiIII")  # index, handle, parent, info


def has_net_admin() -> bool:
    """Whether this process has CAP_NET_ADMIN in its user namespace."""
    with open("/proc/self/status") as file:
        caps = next(line.split()[1] for line in file if line.startswith("CapEff"))
    return bool(int(caps, 16) >> CAP_NET_ADMIN & 1)


def pairs(data: bytes, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Number, without the flags in it, and value of each attribute."""
    while offset + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, offset)
        yield kind & 0x3FFF, data[offset + 4 : offset + length]
        offset += max(4, (length + 3) & ~3)


def attributes(data: bytes, offset: int = 0) -> dict[int, bytes]:
    """Attributes by number; the last one counts."""
    return dict(pairs(data, offset))


def attribute(number: int, value: bytes) -> bytes:
    """One attribute with its header and padding."""
    return struct.pack("=HH", len(value) + 4, number) + value + bytes(-len(value) % 4)


def text(number: int, value: str) -> bytes:
    """An attribute that is a string."""
    return attribute(number, value.encode() + b"\0")


def framed(body: bytes, kind: int, flags: int, sequence: int = 0) -> bytes:
    """A message: its header, and what is behind that."""
    return _HEADER.pack(_HEADER.size + len(body), kind, flags, sequence, 0) + body


def message(verb: str, thing: Object, ifindex: int) -> tuple[bytes, int, int]:
    """What is behind the header of a request, its type and its flags; made without a kernel.

    Parameters
    ----------
    verb : {"add", "change", "replace", "delete"}
    thing : Object
    ifindex : int
        Of the thing's device.
    """
    flags = {"add": NLM_F_CREATE | NLM_F_EXCL, "change": 0, "replace": NLM_F_CREATE | NLM_F_REPLACE, "delete": 0}[verb]
    flags |= NLM_F_REQUEST | NLM_F_ACK
    if isinstance(thing, Link):
        name = text(IFLA_IFNAME, thing.name)
        if verb == "delete":
            return _LINK.pack(0, 0, 0) + name, RTM_DELLINK, flags
        made = attribute(IFLA_LINKINFO, text(IFLA_INFO_KIND, thing.kind))
        return _LINK.pack(thing.index, IFF_UP, IFF_UP) + name + made, RTM_NEWLINK, flags
    info = thing.pref << 16 | socket.htons(thing.protocol) if isinstance(thing, Filter) else 0
    body = _TCMSG.pack(ifindex, thing.handle, thing.parent, info) + text(TCA_KIND, thing.kind)
    if isinstance(thing, Filter) and thing.chain:
        body += attribute(TCA_CHAIN, struct.pack("=I", thing.chain))
    if thing.options and verb != "delete":
        body += attribute(TCA_OPTIONS | (NESTED if thing.kind in NESTED_KINDS else 0), thing.options)
    types = {Qdisc: (RTM_NEWQDISC, RTM_DELQDISC), TClass: (RTM_NEWTCLASS, RTM_DELTCLASS)}
    new, gone = types.get(type(thing), (RTM_NEWTFILTER, RTM_DELTFILTER))
    return body, gone if verb == "delete" else new, flags


def _describe(verb: str, thing: Object) -> str:
    if isinstance(thing, Link):
        return f"{verb} {thing.kind} {thing.name}"
    if isinstance(thing, Filter):
        return f"{verb} filter {thing.kind} pref {thing.pref} of {handle_text(thing.parent)} on {thing.dev}"
    what = "qdisc" if isinstance(thing, Qdisc) else "class"
    return f"{verb} {what} {thing.kind} {handle_text(thing.handle)} on {thing.dev}"


@dataclass(frozen=True)
class Entry:
    """A line of a dump."""

    kind: int  #: of the message
    index: int
    handle: int
    parent: int
    info: int
    attrs: Mapping[int, bytes]

    def number(self, attr: int) -> int:
        """A number of any width; 0 where there is none."""
        return int.from_bytes(self.attrs.get(attr, b""), sys.byteorder)


class Wire:
    """One netlink socket, rtnetlink's or another, in the network namespace of the thread that opens it. Not for several threads."""

    def __init__(self, protocol: int = socket.NETLINK_ROUTE) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        self._socket.settimeout(TIMEOUT)
        self._socket.setsockopt(SOL_NETLINK, NETLINK_EXT_ACK, 1)
        self._socket.bind((0, 0))
        self._sequence = 0

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, body: bytes, kind: int, flags: int) -> list[tuple[int, bytes]]:
        """Sends one request and returns the type and bytes of each answer; OSError with the kernel's words as filename."""
        self._sequence += 1
        self._socket.send(framed(body, kind, flags, self._sequence))
        return list(self._answers())

    def _answers(self) -> Iterator[tuple[int, bytes]]:
        while True:
            try:
                data = self._socket.recv(1 << 18)
            except TimeoutError:
                raise TimeoutError(f"the kernel did not answer a netlink request within {TIMEOUT:g} s") from None
            while data:
                length, kind, flags, sequence, _ = _HEADER.unpack_from(data)
                body, data = data[:length], data[(length + 3) & ~3 :]
                if sequence != self._sequence:
                    continue  # belongs to a request that was given up
                if kind == NLMSG_ERROR:
                    code = -struct.unpack_from("=i", body, 16)[0]
                    if code:
                        raise OSError(code, os.strerror(code), _words(body, flags))
                    return
                if kind == NLMSG_DONE:
                    return
                yield kind, body
                if not flags & NLM_F_MULTI:  # else more follow
                    return

    def request(self, verb: str, thing: Object) -> None:
        """Does one change.

        Raises
        ------
        NetlinkError
            The kernel refused; the change was not made.
        DeviceError
            The device is gone.
        RefusedError
            CAP_NET_ADMIN is missing.
        """
        name = "" if isinstance(thing, Link) else thing.dev
        ifindex = self.ifindex(name) if name else 0
        self.ask(_describe(verb, thing), message(verb, thing, ifindex), thing)

    def ask(self, what: str, request: tuple[bytes, int, int], thing: Object | None = None) -> list[tuple[int, bytes]]:
        """`send`, raising as `request` does; `what` would be done with it, to `thing` where it is one of qos."""
        try:
            return self.send(*request)
        except OSError as error:
            if error.errno is None:  # a deadline
                raise
            raise self.refusal(what, thing, error) from None

    def refusal(self, what: str, thing: Object | None, error: OSError) -> Exception:
        """The error of this package that an error of the kernel means."""
        words = error.filename or ""
        if error.errno in (errno.EPERM, errno.EACCES):
            return RefusedError(
                f"cannot {what}: this needs CAP_NET_ADMIN in the device's network namespace; run as root,"
                " or: setcap cap_net_admin+ep on a copy of the interpreter"
            )
        if error.errno == errno.ENODEV:
            return DeviceError(f"cannot {what}: the device is gone")
        message = f"cannot {what}: {error.strerror}{f': {words}' if words else ''}"
        unknown = error.errno in (errno.ENOENT, errno.EOPNOTSUPP) and any(text in words for text in UNKNOWN)
        if unknown and isinstance(thing, Link):
            message = (
                f"cannot {what}: this kernel does not have {thing.kind} (CONFIG_IFB); direction = 'egress' does without"
            )
        elif unknown and thing:
            from hrdma.qos.kinds import missing  # here, since every kind imports this module

            message = f"cannot {what}: {missing(thing.kind)}"
        lacked = thing.kind if unknown and thing else ""
        return NetlinkError(message, errno=error.errno or 0, words=words, missing=lacked)

    def ifindex(self, name: str) -> int:
        """Index of a device of this socket's namespace; DeviceError where there is none of this name."""
        return _LINK.unpack_from(self._link(name), _HEADER.size)[0]

    def _link(self, name: str) -> bytes:
        """The kernel's message of a device. if_nametoindex() would have it run modprobe for each name that is none's."""
        try:
            return self.send(_LINK.pack(0, 0, 0) + text(IFLA_IFNAME, name), RTM_GETLINK, NLM_F_REQUEST)[0][1]
        except OSError as error:
            if error.errno not in (errno.ENODEV, errno.EINVAL, errno.ERANGE):  # the last two: too long for a name
                raise
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise DeviceError(f"no device {name!r} in this network namespace; there are: {names}")

    def dump(self, what: str, ifindex: int, parent: int = 0) -> list[Entry]:
        """Every qdisc, class or filter of a device; of filters those of one parent."""
        found = []
        for kind, data in self.send(_TCMSG.pack(ifindex, 0, parent, 0), DUMPS[what], NLM_F_REQUEST | NLM_F_DUMP):
            index, handle, above, info = _TCMSG.unpack_from(data, _HEADER.size)
            if index == ifindex:
                attrs = attributes(data, _HEADER.size + _TCMSG.size)
                found.append(Entry(kind, index, handle, above, info, attrs))
        return found

    def link(self, name: str) -> tuple[int, int, int]:
        """A device's index, its flags, and how many queues it sends from."""
        data = self._link(name)
        index, flags, _ = _LINK.unpack_from(data, _HEADER.size)
        queues = attributes(data, _HEADER.size + _LINK.size).get(IFLA_NUM_TX_QUEUES, b"")
        return index, flags, int.from_bytes(queues, sys.byteorder) or 1

    def default_routes(self) -> set[int]:
        """Indices of the devices of default routes, IPv4 and IPv6."""
        found = set()
        for family in (socket.AF_INET, socket.AF_INET6):
            body = bytes([family]).ljust(_ROUTE.size, b"\0")
            for _, data in self.send(body, RTM_GETROUTE, NLM_F_REQUEST | NLM_F_DUMP):
                bits, kind = _ROUTE.unpack_from(data, _HEADER.size)
                out = attributes(data, _HEADER.size + _ROUTE.size).get(RTA_OIF)
                if bits == 0 and kind == RTN_UNICAST and out:
                    found.add(int.from_bytes(out, sys.byteorder))
        return found


def _words(body: bytes, flags: int) -> str:
    """The message of an extended acknowledgement."""
    if not flags & NLM_F_ACK_TLVS:
        return ""
    (length,) = struct.unpack_from("=I", body, 20)
    offset = 36 if flags & NLM_F_CAPPED else 20 + ((length + 3) & ~3)
    while offset + 4 <= len(body):
        size, kind = struct.unpack_from("=HH", body, offset)
        if kind == 1:  # NLMSGERR_ATTR_MSG
            return body[offset + 4 : offset + size].rstrip(b"\0").decode(errors="replace")
        offset += max(4, (size + 3) & ~3)
    return ""

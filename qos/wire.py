"""A netlink socket with deadlines and the kernel's own words; the messages are pyroute2's.

pyroute2's sockets have no deadline per request and drop the text of an extended acknowledgement, of which the first must
not be and the second is what a user needs; its message and attribute classes are used as they are. ``TCA_OPTIONS`` is left
as bytes here, `hrdma.qos.kinds` reads it.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pyroute2.netlink import (
    NETLINK_ROUTE,
    NLA_F_NESTED,
    NLM_F_ACK,
    NLM_F_CREATE,
    NLM_F_DUMP,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    NLM_F_REQUEST,
    NLMSG_DONE,
    NLMSG_ERROR,
    nla,
    nlmsg,
)
from pyroute2.netlink.rtnl import (
    RTM_DELLINK,
    RTM_DELQDISC,
    RTM_DELTCLASS,
    RTM_DELTFILTER,
    RTM_GETLINK,
    RTM_GETQDISC,
    RTM_GETROUTE,
    RTM_GETTCLASS,
    RTM_GETTFILTER,
    RTM_NEWLINK,
    RTM_NEWQDISC,
    RTM_NEWTCLASS,
    RTM_NEWTFILTER,
)
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg
from pyroute2.netlink.rtnl.tcmsg import tcmsg

from hrdma.errors import DeviceError, NetlinkError, RefusedError
from hrdma.qos.objects import Filter, Link, Object, Qdisc, TClass, handle_text

__all__ = ["DUMPS", "Entry", "Wire", "attribute", "attributes", "has_net_admin", "message", "pack", "rawtc", "unpack"]

TIMEOUT = 5.0  # seconds for the kernel's answer
SOL_NETLINK, NETLINK_EXT_ACK, NLM_F_CAPPED, NLM_F_ACK_TLVS = 270, 11, 0x100, 0x200
CAP_NET_ADMIN = 12
UNKNOWN = (
    "kind is unknown",
    "classifier not found",
    "Unknown device type",
)  # the kernel's words for what it does not have
NESTED_KINDS = ("ets",)  # the kernel parses their options strictly, and wants the nested flag
DUMPS = {"qdisc": RTM_GETQDISC, "class": RTM_GETTCLASS, "filter": RTM_GETTFILTER}


def _names(options: str) -> tuple[tuple[str, str], ...]:
    kinds = {"TCA_KIND": "asciiz", "TCA_OPTIONS": options}
    return (
        *((name, kinds.get(name, "hex")) for name, _ in tcmsg.nla_map),
        ("TCA_PAD", "hex"),
        ("TCA_DUMP_INVISIBLE", "flag"),
        ("TCA_CHAIN", "uint32"),
    )


class rawtc(nlmsg):
    """`tcmsg` with options as bytes, and with an attribute that came after it.

    No subclass of it: once pyroute2 has used a class, its subclasses take over the attributes of that one, not their own.
    """

    prefix, fields = tcmsg.prefix, tcmsg.fields
    nla_map = _names("cdata")


class nestedtc(nlmsg):
    """`rawtc` with the nested flag on the options."""

    prefix, fields = tcmsg.prefix, tcmsg.fields
    nla_map = _names("strict")

    class strict(nla):
        nla_flags = NLA_F_NESTED
        fields = (("value", "s"),)


def pack(kind: type[nla], attrs: list[tuple[str, Any]]) -> bytes:
    """The attributes of a nested attribute, as bytes without its own header."""
    value = kind(data=bytearray())
    value["attrs"] = attrs
    value.encode()
    return bytes(value.data[4:])


def unpack(kind: type[nla], options: bytes) -> dict[str, Any]:
    """What `pack` wrote: the first value of each attribute by its name."""
    value = kind(struct.pack("=HH", len(options) + 4, 2) + options)
    value.decode()
    found: dict[str, Any] = {}
    for name, content in value["attrs"]:
        found.setdefault(name, content)
    return found


def has_net_admin() -> bool:
    """Whether this process has CAP_NET_ADMIN in its user namespace."""
    with open("/proc/self/status") as file:
        caps = next(line.split()[1] for line in file if line.startswith("CapEff"))
    return bool(int(caps, 16) >> CAP_NET_ADMIN & 1)


def message(verb: str, thing: Object, ifindex: int) -> tuple[nlmsg, int, int]:
    """Message, type and flags of a request; made without a kernel.

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
        link = ifinfmsg()
        link["attrs"] = [("IFLA_IFNAME", thing.name)]
        if verb == "delete":
            return link, RTM_DELLINK, flags
        link["index"] = thing.index
        link["flags"] = link["change"] = 1  # IFF_UP
        link["attrs"].append(("IFLA_LINKINFO", {"attrs": [("IFLA_INFO_KIND", thing.kind)]}))
        return link, RTM_NEWLINK, flags
    msg = (nestedtc if thing.kind in NESTED_KINDS else rawtc)()
    msg["index"] = ifindex
    msg["parent"] = thing.parent
    msg["handle"] = thing.handle
    msg["attrs"] = [("TCA_KIND", thing.kind)]
    if isinstance(thing, Filter):
        msg["info"] = thing.pref << 16 | socket.htons(thing.protocol)
        if thing.chain:
            msg["attrs"].append(("TCA_CHAIN", thing.chain))
    if thing.options and verb != "delete":
        msg["attrs"].append(("TCA_OPTIONS", thing.options))
    types = {Qdisc: (RTM_NEWQDISC, RTM_DELQDISC), TClass: (RTM_NEWTCLASS, RTM_DELTCLASS)}
    new, gone = types.get(type(thing), (RTM_NEWTFILTER, RTM_DELTFILTER))
    return msg, gone if verb == "delete" else new, flags


def _describe(verb: str, thing: Object) -> str:
    if isinstance(thing, Link):
        return f"{verb} {thing.kind} {thing.name}"
    if isinstance(thing, Filter):
        return f"{verb} filter {thing.kind} pref {thing.pref} of {handle_text(thing.parent)} on {thing.dev}"
    what = "qdisc" if isinstance(thing, Qdisc) else "class"
    return f"{verb} {what} {thing.kind} {handle_text(thing.handle)} on {thing.dev}"


@dataclass(frozen=True)
class Entry:
    """A line of a dump. Split by hand: pyroute2's decoder takes a millisecond for each, and a host has a thousand."""

    kind: int  #: of the message
    index: int
    handle: int
    parent: int
    info: int
    attrs: Mapping[int, bytes]

    def number(self, attr: int) -> int:
        """A number of any width; 0 where there is none."""
        return int.from_bytes(self.attrs.get(attr, b""), sys.byteorder)


_TCMSG = struct.Struct("=4xiIII")


def attributes(data: bytes, offset: int = 0) -> dict[int, bytes]:
    """Attributes by number, without the flags in it; the last one counts."""
    found = {}
    while offset + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, offset)
        found[kind & 0x3FFF] = data[offset + 4 : offset + length]
        offset += max(4, (length + 3) & ~3)
    return found


def attribute(number: int, value: bytes) -> bytes:
    """One attribute with its header and padding."""
    return struct.pack("=HH", len(value) + 4, number) + value + bytes(-len(value) % 4)


class Wire:
    """One netlink socket, rtnetlink's or another, in the network namespace of the thread that opens it. Not for several threads."""

    def __init__(self, protocol: int = NETLINK_ROUTE) -> None:
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

    def send(self, msg: nlmsg, kind: int, flags: int) -> list[tuple[int, bytes]]:
        """Sends one request and returns the type and bytes of each answer; OSError with the kernel's words as filename."""
        self._sequence += 1
        msg["header"]["type"] = kind
        msg["header"]["flags"] = flags
        msg["header"]["sequence_number"] = self._sequence
        msg.encode()
        self._socket.send(msg.data)
        return list(self._answers())

    def _answers(self) -> Iterator[tuple[int, bytes]]:
        while True:
            try:
                data = self._socket.recv(1 << 18)
            except TimeoutError:
                raise TimeoutError(f"the kernel did not answer a netlink request within {TIMEOUT:g} s") from None
            while data:
                length, kind, flags, sequence, _ = struct.unpack_from("=IHHII", data)
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
                if not flags & 2:  # NLM_F_MULTI: more follow
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

    def ask(self, what: str, request: tuple[nlmsg, int, int], thing: Object | None = None) -> list[tuple[int, bytes]]:
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
        return struct.unpack_from("=4xi", self._link(name), 16)[0]

    def _link(self, name: str) -> bytes:
        """The kernel's message of a device. if_nametoindex() would have it run modprobe for each name that is none's."""
        msg = ifinfmsg()
        msg["attrs"] = [("IFLA_IFNAME", name)]
        try:
            return self.send(msg, RTM_GETLINK, NLM_F_REQUEST)[0][1]
        except OSError as error:
            if error.errno not in (errno.ENODEV, errno.EINVAL, errno.ERANGE):  # the last two: too long for a name
                raise
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise DeviceError(f"no device {name!r} in this network namespace; there are: {names}")

    def dump(self, what: str, ifindex: int, parent: int = 0) -> list[Entry]:
        """Every qdisc, class or filter of a device; of filters those of one parent."""
        msg = rawtc()
        msg["index"], msg["parent"] = ifindex, parent
        answers = self.send(msg, DUMPS[what], NLM_F_REQUEST | NLM_F_DUMP)
        found = []
        for kind, data in answers:
            index, handle, above, info = _TCMSG.unpack_from(data, 16)
            if index == ifindex:
                found.append(Entry(kind, index, handle, above, info, attributes(data, 36)))
        return found

    def link(self, name: str) -> ifinfmsg:
        """A device's flags, MTU, queues and kind."""
        found = ifinfmsg(self._link(name))
        found.decode()
        return found

    def default_routes(self) -> set[int]:
        """Indices of the devices of default routes, IPv4 and IPv6."""
        found = set()
        for family in (socket.AF_INET, socket.AF_INET6):
            msg = rtmsg()
            msg["family"] = family
            for _, data in self.send(msg, RTM_GETROUTE, NLM_F_REQUEST | NLM_F_DUMP):
                route = rtmsg(data)
                route.decode()
                if route["dst_len"] == 0 and route["type"] == 1 and (out := route.get_attr("RTA_OIF")):
                    found.add(out)
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

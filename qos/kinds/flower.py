"""flower: packets by named header fields; for kernels that have it and not u32.

Ports are found behind IP options too, so it matches at least what the filters of u32 do.
"""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass

from hrdma.qos.kinds import actions
from hrdma.qos.objects import handle_text
from hrdma.qos.policy import Match
from hrdma.qos.wire import attribute, attributes

__all__ = ["EVERYTHING", "KIND", "OPTION", "Flower", "decode", "encode", "explain", "filters_of"]

KIND = "flower"
OPTION = ("CONFIG_NET_CLS_FLOWER", "CONFIG_NET_CLS_U32 does for the same matches")
IPV4, IPV6 = 0x0800, 0x86DD
PROTOCOLS = {"tcp": 6, "udp": 17}
# Numbers of attributes; what is not among them is not sent, and is left alone where it is shown.
CLASSID, ACT, ETHERTYPE, PROTO, TOS, TOS_MASK = 1, 3, 8, 9, 73, 74
ADDRESSES = {4: (10, 12), 6: (14, 16)}  # of source and destination; the mask follows
PORTS = {"tcp": (18, 19), "udp": (20, 21)}


@dataclass(frozen=True)
class Flower:
    ethertype: int = 0  #: 0: any
    proto: str | None = None
    sport: int | None = None
    dport: int | None = None
    src: str | None = None
    dst: str | None = None
    dscp: int | None = None
    classid: int = 0  #: where to; 0 where an action says it
    redirect: int = 0  #: index of the device that gets the packet instead
    priority: int | None = None  #: skb->priority from here on


EVERYTHING = Flower()


def filters_of(match: Match) -> list[tuple[int, Flower]]:
    """EtherType and spec of each filter that a match takes, without where to: one for each IP version and, where ports count, each of TCP and UDP."""
    versions = {ipaddress.ip_network(text).version for text in (match.src, match.dst) if text is not None} or {4, 6}
    ported = match.sport is not None or match.dport is not None
    protos = [match.proto] if match.proto else ["tcp", "udp"] if ported else [None]
    ethertypes = [IPV4 if version == 4 else IPV6 for version in sorted(versions)]
    return [
        (ethertype, Flower(ethertype, proto, match.sport, match.dport, match.src, match.dst, match.dscp))
        for ethertype in ethertypes
        for proto in protos
    ]


def encode(spec: Flower) -> bytes:
    found = attribute(CLASSID, struct.pack("=I", spec.classid)) if spec.classid else b""
    if action := actions.encode(spec.redirect, spec.priority):
        found += attribute(ACT, action)
    if spec.proto is not None:
        found += attribute(PROTO, bytes([PROTOCOLS[spec.proto]]))
    if spec.dscp is not None:
        found += attribute(TOS, bytes([spec.dscp << 2])) + attribute(TOS_MASK, b"\xfc")
    for end, text in enumerate((spec.src, spec.dst)):
        if text is not None:
            net = ipaddress.ip_network(text)
            number = ADDRESSES[net.version][end]
            found += attribute(number, net.network_address.packed) + attribute(number + 1, net.netmask.packed)
    for end, port in enumerate((spec.sport, spec.dport)):
        if port is not None:
            found += attribute(PORTS[spec.proto or ""][end], struct.pack("!H", port))
    if spec.ethertype:
        found += attribute(ETHERTYPE, struct.pack("!H", spec.ethertype))
    return found


def decode(data: bytes) -> Flower:
    attrs = attributes(data)
    (ethertype,) = struct.unpack("!H", attrs.get(ETHERTYPE, bytes(2)))
    names = {number: name for name, number in PROTOCOLS.items()}
    proto = names.get(attrs.get(PROTO, b"\0")[0])
    addresses: list[str | None] = []
    for number in ADDRESSES[4 if ethertype == IPV4 else 6]:
        if number in attrs:
            prefix = bin(int.from_bytes(attrs[number + 1], "big")).count("1")
            addresses.append(str(ipaddress.ip_network((attrs[number], prefix))))
        else:
            addresses.append(None)
    ports = [struct.unpack("!H", attrs[number])[0] if number in attrs else None for number in PORTS[proto or "tcp"]]
    dscp = attrs[TOS][0] >> 2 if TOS in attrs else None
    (classid,) = struct.unpack("=I", attrs.get(CLASSID, bytes(4)))
    action = actions.decode(attrs.get(ACT, b""))
    return Flower(ethertype, proto, ports[0], ports[1], addresses[0], addresses[1], dscp, classid, *action)


def explain(spec: Flower) -> str:
    words = [f"ip_proto {spec.proto}"] if spec.proto else []
    words += [f"ip_tos {spec.dscp << 2:#x}/0xfc"] if spec.dscp is not None else []
    words += [f"src_ip {spec.src}"] if spec.src else []
    words += [f"dst_ip {spec.dst}"] if spec.dst else []
    words += [f"src_port {spec.sport}"] if spec.sport else []
    words += [f"dst_port {spec.dport}"] if spec.dport else []
    if spec.redirect:
        return " ".join([*words, f"action mirred egress redirect dev ifindex:{spec.redirect}"])
    if spec.priority is not None:
        return " ".join([*words, f"action skbedit priority {handle_text(spec.priority)}"])
    return " ".join([*words, f"classid {handle_text(spec.classid)}"])

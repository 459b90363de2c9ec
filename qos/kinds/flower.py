"""flower: packets by named header fields; for kernels that have it and not u32."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from pyroute2.netlink import nla

from hrdma.qos.objects import handle_text
from hrdma.qos.policy import Match
from hrdma.qos.wire import pack, unpack

__all__ = ["KIND", "OPTION", "Flower", "decode", "encode", "explain", "of_match"]

KIND = "flower"
OPTION = ("CONFIG_NET_CLS_FLOWER", "CONFIG_NET_CLS_U32 would do for the same matches")
IPV4, IPV6 = 0x0800, 0x86DD
PROTOCOLS = {"tcp": 6, "udp": 17}


@dataclass(frozen=True)
class Flower:
    ethertype: int
    proto: str | None = None
    sport: int | None = None
    dport: int | None = None
    src: str | None = None
    dst: str | None = None
    dscp: int | None = None
    classid: int = 0


# The numbers of linux/pkt_cls.h; what is not listed is not sent, and is left alone where it is shown.
class options(nla):
    nla_map = (
        (1, "TCA_FLOWER_CLASSID", "uint32"),
        (8, "TCA_FLOWER_KEY_ETH_TYPE", "be16"),
        (9, "TCA_FLOWER_KEY_IP_PROTO", "uint8"),
        (10, "TCA_FLOWER_KEY_IPV4_SRC", "cdata"),
        (11, "TCA_FLOWER_KEY_IPV4_SRC_MASK", "cdata"),
        (12, "TCA_FLOWER_KEY_IPV4_DST", "cdata"),
        (13, "TCA_FLOWER_KEY_IPV4_DST_MASK", "cdata"),
        (14, "TCA_FLOWER_KEY_IPV6_SRC", "cdata"),
        (15, "TCA_FLOWER_KEY_IPV6_SRC_MASK", "cdata"),
        (16, "TCA_FLOWER_KEY_IPV6_DST", "cdata"),
        (17, "TCA_FLOWER_KEY_IPV6_DST_MASK", "cdata"),
        (18, "TCA_FLOWER_KEY_TCP_SRC", "be16"),
        (19, "TCA_FLOWER_KEY_TCP_DST", "be16"),
        (20, "TCA_FLOWER_KEY_UDP_SRC", "be16"),
        (21, "TCA_FLOWER_KEY_UDP_DST", "be16"),
        (22, "TCA_FLOWER_FLAGS", "uint32"),
        (73, "TCA_FLOWER_KEY_IP_TOS", "uint8"),
        (74, "TCA_FLOWER_KEY_IP_TOS_MASK", "uint8"),
    )


def of_match(match: Match, classid: int) -> list[Flower]:
    """One filter for each IP version and, where ports count, each of TCP and UDP."""
    versions = {ipaddress.ip_network(text).version for text in (match.src, match.dst) if text is not None} or {4, 6}
    ported = match.sport is not None or match.dport is not None
    protos = [match.proto] if match.proto else ["tcp", "udp"] if ported else [None]
    return [
        Flower(
            IPV4 if version == 4 else IPV6, proto, match.sport, match.dport, match.src, match.dst, match.dscp, classid
        )
        for version in sorted(versions)
        for proto in protos
    ]


def encode(spec: Flower) -> bytes:
    attrs: list[tuple[str, object]] = [("TCA_FLOWER_CLASSID", spec.classid)]
    if spec.proto is not None:
        attrs.append(("TCA_FLOWER_KEY_IP_PROTO", PROTOCOLS[spec.proto]))
    if spec.dscp is not None:
        attrs += [("TCA_FLOWER_KEY_IP_TOS", spec.dscp << 2), ("TCA_FLOWER_KEY_IP_TOS_MASK", 0xFC)]
    for end, text in (("SRC", spec.src), ("DST", spec.dst)):
        if text is not None:
            net = ipaddress.ip_network(text)
            name = f"TCA_FLOWER_KEY_IPV{net.version}_{end}"
            attrs += [(name, net.network_address.packed), (f"{name}_MASK", net.netmask.packed)]
    for end, port in (("SRC", spec.sport), ("DST", spec.dport)):
        if port is not None:
            attrs.append((f"TCA_FLOWER_KEY_{(spec.proto or '').upper()}_{end}", port))
    attrs.append(("TCA_FLOWER_KEY_ETH_TYPE", spec.ethertype))
    return pack(options, attrs)


def decode(data: bytes) -> Flower:
    attrs = unpack(options, data)
    ethertype = attrs["TCA_FLOWER_KEY_ETH_TYPE"]
    names = {number: name for name, number in PROTOCOLS.items()}
    proto = names.get(attrs.get("TCA_FLOWER_KEY_IP_PROTO", 0))
    addresses: list[str | None] = []
    for end in ("SRC", "DST"):
        name = f"TCA_FLOWER_KEY_IPV{4 if ethertype == IPV4 else 6}_{end}"
        if name in attrs:
            prefix = bin(int.from_bytes(attrs[f"{name}_MASK"], "big")).count("1")
            addresses.append(str(ipaddress.ip_network((attrs[name], prefix))))
        else:
            addresses.append(None)
    ports = [attrs.get(f"TCA_FLOWER_KEY_{(proto or 'tcp').upper()}_{end}") for end in ("SRC", "DST")]
    tos = attrs.get("TCA_FLOWER_KEY_IP_TOS")
    return Flower(ethertype, proto, ports[0], ports[1], addresses[0], addresses[1], None if tos is None else tos >> 2,
                  attrs.get("TCA_FLOWER_CLASSID", 0))  # fmt: skip


def explain(spec: Flower) -> str:
    words = [f"ip_proto {spec.proto}"] if spec.proto else []
    words += [f"ip_tos {spec.dscp << 2:#x}/0xfc"] if spec.dscp is not None else []
    words += [f"src_ip {spec.src}"] if spec.src else []
    words += [f"dst_ip {spec.dst}"] if spec.dst else []
    words += [f"src_port {spec.sport}"] if spec.sport else []
    words += [f"dst_port {spec.dport}"] if spec.dport else []
    return " ".join([*words, f"classid {handle_text(spec.classid)}"])

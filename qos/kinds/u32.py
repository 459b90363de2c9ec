"""u32: packets by 32-bit words of their IP header and what follows it; here also with the two actions that the trees need.

`keys_of` turns a match of a policy into keys. Ports lie at a fixed place only behind an IPv4 header without options and
in a packet that is no later fragment, so both are asked for; anything else is nobody's and goes to the default band. For IPv6
the next header must be TCP or UDP at once, which takes one filter each.
"""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass
from functools import lru_cache

from hrdma.qos.kinds import actions
from hrdma.qos.objects import handle_text
from hrdma.qos.policy import Match
from hrdma.qos.wire import attribute, attributes

__all__ = ["EVERYTHING", "KIND", "OPTION", "U32", "bare_acks", "decode", "encode", "explain", "filters_of", "keys_of"]

KIND = "u32"
OPTION = ("CONFIG_NET_CLS_U32", "CONFIG_NET_CLS_FLOWER does for the same matches, and is tried next")
IPV4, IPV6 = 0x0800, 0x86DD
PROTOCOLS = {"tcp": 6, "udp": 17}
TCP_ACK = 0x10
TERMINAL = 1  # TC_U32_TERMINAL
CLASSID, HASH, LINK, DIVISOR, SEL, POLICE, ACT = range(1, 8)  # numbers of attributes
COUNTED = (HASH, 9, 11, 12)  # ... of those that the kernel hands out or counts: table, counters, flags, padding


@dataclass(frozen=True)
class U32:
    keys: tuple[tuple[int, int, int], ...]  #: value, mask, offset from the IP header; a multiple of 4
    classid: int = 0  #: where to; 0 where an action says it
    redirect: int = 0  #: index of the device that gets the packet instead
    priority: int | None = None  #: skb->priority from here on


EVERYTHING = U32(((0, 0, 0),))


@lru_cache(1 << 14)
def encode(spec: U32) -> bytes:
    found = attribute(CLASSID, struct.pack("=I", spec.classid)) if spec.classid else b""
    head = struct.pack("=BBBxHHhhI", TERMINAL, 0, len(spec.keys), 0, 0, 0, 0, 0)
    keys = (struct.pack("!II", mask, value) + struct.pack("=ii", offset, 0) for value, mask, offset in spec.keys)
    found += attribute(SEL, head + b"".join(keys))
    if action := actions.encode(spec.redirect, spec.priority):
        found += attribute(ACT, action)
    return found


def decode(data: bytes) -> U32 | None:
    """None for a hash table, which the kernel shows among the filters."""
    attrs = attributes(data)
    if SEL not in attrs:
        return None
    sel = attrs[SEL]
    keys = []
    for i in range(sel[2]):
        mask, value = struct.unpack_from("!II", sel, 16 + 16 * i)
        keys.append((value, mask, struct.unpack_from("=i", sel, 24 + 16 * i)[0]))
    (classid,) = struct.unpack("=I", attrs.get(CLASSID, bytes(4)))
    return U32(tuple(keys), classid, *actions.decode(attrs.get(ACT, b"")))


def has_actions(data: bytes) -> bool:
    return bool(attributes(data).keys() & {ACT, POLICE})


def explain(spec: U32) -> str:
    words = " ".join(f"match u32 {value:#010x} {mask:#010x} at {offset}" for value, mask, offset in spec.keys)
    if spec.redirect:
        return f"{words} action mirred egress redirect dev ifindex:{spec.redirect}"
    if spec.priority is not None:
        return f"{words} action skbedit priority {handle_text(spec.priority)}"
    return f"{words} flowid {handle_text(spec.classid)}"


def filters_of(match: Match) -> list[tuple[int, U32]]:
    """EtherType and spec of each filter that a match takes, without where to."""
    return [(protocol, U32(keys)) for protocol, keys in keys_of(match)]


def bare_acks() -> list[tuple[int, U32]]:
    """EtherType and spec of the filters that know TCP's acknowledgements that carry nothing: one for each length of TCP's header, 5 to 15
    words, at which the packet has no room for data.

    Nothing of the flow's data is among them, so data is never overtaken by data. Of the flags ACK alone is set (and ECN's, which count for
    nothing here): a SYN, FIN or RST waits its turn behind the data before it.
    """
    found = []
    for count in range(5, 16):
        four, six = _Words(), _Words()
        four.add(0, 1, 0x45, 0xFF)
        four.add(2, 2, 20 + 4 * count, 0xFFFF)
        four.add(6, 2, 0, 0x3FFF)  # not a fragment, the first one neither
        four.add(9, 1, PROTOCOLS["tcp"], 0xFF)
        six.add(4, 2, 4 * count, 0xFFFF)
        six.add(6, 1, PROTOCOLS["tcp"], 0xFF)
        for words, start in ((four, 20), (six, 40)):
            words.add(start + 12, 2, count << 12 | TCP_ACK, 0xF03F)
        found += [(IPV4, U32(four.keys)), (IPV6, U32(six.keys))]
    return found


def keys_of(match: Match) -> list[tuple[int, tuple[tuple[int, int, int], ...]]]:
    """EtherType and keys of each filter that a match takes: one for IPv4, two for IPv6, or those of its addresses' version."""
    versions = {ipaddress.ip_network(text).version for text in (match.src, match.dst) if text is not None}
    found = []
    if versions != {6}:
        found.append((IPV4, _ipv4(match)))
    if versions != {4}:
        ported = match.sport is not None or match.dport is not None or match.proto is not None
        protos = [match.proto] if match.proto else ["tcp", "udp"] if ported else [None]
        found += [(IPV6, _ipv6(match, proto)) for proto in protos]
    return found


class _Words:
    """Bits by byte offset, gathered into 32-bit words."""

    def __init__(self) -> None:
        self.words: dict[int, tuple[int, int]] = {}

    def add(self, offset: int, nbytes: int, value: int, mask: int) -> None:
        for i in range(nbytes):
            shift = 8 * (nbytes - 1 - i)
            word, place = (offset + i) & ~3, 8 * (3 - (offset + i) % 4)
            old_value, old_mask = self.words.get(word, (0, 0))
            byte = mask >> shift & 0xFF
            if byte:
                self.words[word] = old_value | (value >> shift & byte) << place, old_mask | byte << place

    def network(self, offset: int, text: str) -> None:
        net = ipaddress.ip_network(text)
        self.add(offset, net.max_prefixlen // 8, int(net.network_address), int(net.netmask))

    @property
    def keys(self) -> tuple[tuple[int, int, int], ...]:
        return tuple((value, mask, offset) for offset, (value, mask) in sorted(self.words.items()))


def _ports(words: _Words, match: Match, offset: int) -> None:
    for port, place in ((match.sport, offset), (match.dport, offset + 2)):
        if port is not None:
            words.add(place, 2, port, 0xFFFF)


def _ipv4(match: Match) -> tuple[tuple[int, int, int], ...]:
    words = _Words()
    if match.dscp is not None:
        words.add(1, 1, match.dscp << 2, 0xFC)
    if match.proto is not None:
        words.add(9, 1, PROTOCOLS[match.proto], 0xFF)
    for text, place in ((match.src, 12), (match.dst, 16)):
        if text is not None:
            words.network(place, text)
    if match.sport is not None or match.dport is not None:
        words.add(0, 1, 0x45, 0xFF)
        words.add(6, 2, 0, 0x1FFF)
        _ports(words, match, 20)
    return words.keys


def _ipv6(match: Match, proto: str | None) -> tuple[tuple[int, int, int], ...]:
    words = _Words()
    if match.dscp is not None:
        words.add(0, 2, match.dscp << 6, 0x0FC0)
    if proto is not None:
        words.add(6, 1, PROTOCOLS[proto], 0xFF)
    for text, place in ((match.src, 8), (match.dst, 24)):
        if text is not None:
            words.network(place, text)
    _ports(words, match, 40)
    return words.keys

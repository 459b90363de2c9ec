"""Encoders against golden bytes: what tc of iproute2 sends for the same words, taken from its sendmsg calls. No kernel needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hrdma.qos.kinds import TABLE, ets, flower, fq, htb, missing, mqprio, pfifo, prio, tbf, u32
from hrdma.qos.objects import ROOT, Filter, Qdisc, TClass, of_json, to_json
from hrdma.qos.policy import Match
from hrdma.qos.wire import attributes, message

SEVENS = (7,) * 16
ETS = (
    "050001000800000005000200050000001c00038008000400b80b000008000400701700000800040028230000840005800500"
    "0600070000000500060007000000050006000700000005000600070000000500060007000000050006000700000005000600"
    "0700000005000600070000000500060007000000050006000700000005000600070000000500060007000000050006000700"
    "0000050006000700000005000600070000000500060007000000"
)
GOLDEN = {
    "prio": (
        prio,
        prio.Prio(8, SEVENS),
        "0800000007070707070707070707070707070707",
        "bands 8 priomap " + " 7" * 16,
    ),
    "ets": (
        ets,
        ets.Ets(8, 5, (3000, 6000, 9000), SEVENS),
        ETS,
        "bands 8 strict 5 quanta 3000 6000 9000 priomap" + " 7" * 16,
    ),
    "fq": (fq, fq.Fq(10_000, 1000), "080001001027000008000200e8030000", "limit 10000 flow_limit 1000"),
    "pfifo": (pfifo, pfifo.Pfifo(1000), "e8030000", "limit 1000"),
    "mqprio": (
        mqprio,
        mqprio.Mqprio(4, (0, 0, 0, 0, 0, 0, 0, 0, 3, 2, 1, 0, 0, 0, 0, 0), (2, 2, 2, 2), (0, 2, 4, 6)),
        "0400000000000000000302010000000000010200020002000200" + "00" * 24 + "0000020004000600" + "00" * 24,
        "num_tc 4 map 0 0 0 0 0 0 0 0 3 2 1 0 0 0 0 0 queues 2@0 2@2 2@4 2@6 hw 1",
    ),
    "tbf": (
        tbf,
        tbf.Tbf(1_250_000_000, 5109, 30_720),
        "2800010003010000ffff0000807c814a00000000000000000000000000780000f513000000000000",
        "rate 10gbit burst 408720b limit 30720b",
    ),
    "htb qdisc": (htb, htb.HtbQdisc(1), "18000200030000000a000000010000000000000000000000", "default 1"),
    "htb class": (
        htb,
        htb.HtbClass(10 * 10**9, 125 * 10**9, 15, 0, 65536, 3, 24),
        "0c00060000e40b54020000000c00070000a2941a1d000000"
        "3000010003011800ffff0000ffffffff03011800ffff0000ffffffff0f00000000000000000001000000000003000000",
        "rate 80gbit ceil 1tbit burst 9600b cburst 0b overhead 24 quantum 65536 prio 3",
    ),
    "u32": (
        u32,
        u32.U32(((0x45000000, 0xFF000000, 0), (0x07D00000, 0xFFFF0000, 20)), 0x10002),
        "08000100020001003400050001000200000000000000000000000000ff000000450000000000000000000000ffff000007d000001400000000000000",
        "match u32 0x45000000 0xff000000 at 0 match u32 0x07d00000 0xffff0000 at 20 flowid 1:2",
    ),
    "u32 redirect": (
        u32,
        u32.U32(((0, 0, 0),), redirect=1),
        "38000700340001000b0001006d69727265640000240002802000020000000000000000000400000000000000000000000100000001000000"
        "240005000100010000000000000000000000000000000000000000000000000000000000",
        "match u32 0x00000000 0x00000000 at 0 action mirred egress redirect dev ifindex:1",
    ),
    "u32 priority": (
        u32,
        u32.U32(((0x45000000, 0xFF000000, 0),), priority=8),
        "38000700340001000c000100736b6265646974002400028018000200000000000000000003000000000000000000000008000300080000"
        "002400050001000100000000000000000000000000ff000000450000000000000000000000",
        "match u32 0x45000000 0xff000000 at 0 action skbedit priority 0:8",
    ),
    "u32 acks": (
        u32,
        replace(dict(u32.bare_acks()[6:7])[0x800], classid=0x10002),
        "080001000200010054000500010004000000000000000000"
        "00000000"
        "ff00ffff450000340000000000000000"
        "00003fff000000000400000000000000"
        "00ff0000000600000800000000000000"
        "f03f0000801000002000000000000000",
        "match u32 0x45000034 0xff00ffff at 0 match u32 0x00000000 0x00003fff at 4 match u32 0x00060000 0x00ff0000 at 8"
        " match u32 0x80100000 0xf03f0000 at 32 flowid 1:2",
    ),
    "u32 acks, IPv6": (
        u32,
        replace(dict(u32.bare_acks()[7:8])[0x86DD], classid=0x10002),
        "080001000200010034000500010002000000000000000000"
        "00000000"
        "ffffff00002006000400000000000000"
        "f03f0000801000003400000000000000",
        "match u32 0x00200600 0xffffff00 at 4 match u32 0x80100000 0xf03f0000 at 52 flowid 1:2",
    ),
    "flower": (
        flower,
        flower.Flower(0x0800, "tcp", 2000, 3000, "10.1.0.0/16", "10.2.0.1/32", 26, 0x10002),
        "0500090006000000050049006800000005004a00fc00000008000a000a01000008000b00ffff000008000c000a02000108000d00ffffffff"
        "0600120007d00000060013000bb80000080001000200010008001600000000000600080008000000",
        "ip_proto tcp ip_tos 0x68/0xfc src_ip 10.1.0.0/16 dst_ip 10.2.0.1/32 src_port 2000 dst_port 3000 classid 1:2",
    ),
    "flower, IPv6": (
        flower,
        flower.Flower(0x86DD, "udp", src="fd00::/16", classid=0x10002),
        "050009001100000014000e00fd00000000000000000000000000000014000f00ffff0000000000000000000000000000"
        "080001000200010008001600000000000600080086dd0000",
        "ip_proto udp src_ip fd00::/16 classid 1:2",
    ),
}
# Structures; the others are attributes, in any order. (What tc sends for prio ends with an empty nest, left out here: the kernel does
# not read it. Of tbf it sends a table of times and the burst in bytes too: the first is about link layers that are not told.)
IN_ORDER = ("prio", "pfifo", "mqprio")


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(name):
    kind, spec, text, words = GOLDEN[name]
    ours, theirs = kind.encode(spec), bytes.fromhex(text)
    if name in IN_ORDER:
        assert ours[: len(theirs)] == theirs
        assert set(ours[len(theirs) :]) <= {0}  # padding
    else:
        sent = attributes(theirs)
        assert attributes(ours) == {
            number: value for number, value in sent.items() if (name[:6], number) != ("flower", 22)
        }
        assert number_of(theirs) - len(attributes(ours)) in (0, 1)
    assert kind.decode(theirs) == spec
    assert " ".join(kind.explain(spec).split()) == " ".join(words.split())


def number_of(data: bytes) -> int:
    return len(attributes(data))


def test_other_specs_have_other_bytes():
    """The comparison above can fail."""
    assert ets.encode(ets.Ets(8, 5, (3000, 6000, 9001), SEVENS)).hex() != ETS
    assert prio.encode(prio.Prio(7, SEVENS)).hex() != GOLDEN["prio"][2]


def test_ets_is_sent_with_the_nested_flag_that_its_parser_wants():
    qdisc = Qdisc("v0", "ets", 0x48520000, ROOT, ets.encode(ets.Ets(8, 8, (), SEVENS)))
    body, _, _ = message("add", qdisc, 3)
    assert body[20 + 8 :].find(b"\x02\x80") in range(4)
    other, _, _ = message("add", Qdisc("v0", "prio", 0x48520000, ROOT, prio.encode(prio.Prio(8, SEVENS))), 3)
    assert b"\x02\x80" not in other[20:]


@pytest.mark.parametrize("kind", TABLE)
def test_a_missing_kind_names_its_option_and_what_works(kind):
    assert "CONFIG_NET_" in missing(kind)
    assert "; " in missing(kind)


def test_objects_survive_json():
    for thing in (
        Qdisc("v0", "htb", 1 << 16, ROOT, b"\1\2", (0, 3), True, ("size table",)),
        TClass("v0", "htb", 0x10001, 0x10000, b"\0\xff"),
        Filter("v0", "u32", 0x10000, 7, 0x800, options=b"x"),
    ):
        assert of_json(to_json(thing)) == thing


@pytest.mark.parametrize(
    ("match", "protocols", "keys"),
    [
        (Match(sport=2000), [0x0800, 0x86DD, 0x86DD], 3),
        (Match(dport=1, proto="udp"), [0x0800, 0x86DD], 4),
        (Match(dscp=26), [0x0800, 0x86DD], 1),
        (Match(src="10.0.0.0/8", dscp=0), [0x0800], 2),
        (Match(dst="fd00::/8"), [0x86DD], 1),
    ],
)
def test_filters_of_a_match(match, protocols, keys):
    found = u32.keys_of(match)
    assert [protocol for protocol, _ in found] == protocols
    assert len(found[0][1]) == keys


def test_ipv4_ports_ask_for_a_header_without_options_and_no_later_fragment():
    (_, keys), *_ = u32.keys_of(Match(dport=3000))
    assert keys == ((0x45000000, 0xFF000000, 0), (0, 0x1FFF, 4), (3000, 0xFFFF, 20))

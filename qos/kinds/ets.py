"""ets: the first bands strictly in order, the others in turns of so many bytes (enhanced transmission selection, IEEE 802.1Qaz)."""

from __future__ import annotations

from dataclasses import dataclass

from pyroute2.netlink import NLA_F_NESTED, nla

from hrdma.qos.wire import pack, unpack

__all__ = ["KIND", "OPTION", "Ets", "decode", "encode", "explain"]

KIND = "ets"
OPTION = ("CONFIG_NET_SCH_ETS", "kind = 'htb' works with CONFIG_NET_SCH_HTB, kind = 'prio' with CONFIG_NET_SCH_PRIO")
MOST_BANDS = 16


@dataclass(frozen=True)
class Ets:
    bands: int
    strict: int  #: how many of them, from the first, are served strictly
    quanta: tuple[int, ...]  #: bytes in a turn of each of the others
    priomap: tuple[int, ...]  #: band of each of the 16 values of skb->priority, for what no filter knows


class options(nla):
    nla_map = (
        ("TCA_ETS_UNSPEC", "none"),
        ("TCA_ETS_NBANDS", "uint8"),
        ("TCA_ETS_NSTRICT", "uint8"),
        ("TCA_ETS_QUANTA", "quanta"),
        ("TCA_ETS_QUANTA_BAND", "uint32"),
        ("TCA_ETS_PRIOMAP", "priomap"),
        ("TCA_ETS_PRIOMAP_BAND", "uint8"),
    )

    class quanta(nla):
        nla_flags = NLA_F_NESTED
        nla_map = ((4, "TCA_ETS_QUANTA_BAND", "uint32"),)

    class priomap(nla):
        nla_flags = NLA_F_NESTED
        nla_map = ((6, "TCA_ETS_PRIOMAP_BAND", "uint8"),)


def encode(spec: Ets) -> bytes:
    attrs: list[tuple[str, object]] = [("TCA_ETS_NBANDS", spec.bands)]
    if spec.strict:
        attrs.append(("TCA_ETS_NSTRICT", spec.strict))
    if spec.quanta:
        attrs.append(("TCA_ETS_QUANTA", {"attrs": [("TCA_ETS_QUANTA_BAND", quantum) for quantum in spec.quanta]}))
    if spec.priomap:
        attrs.append(("TCA_ETS_PRIOMAP", {"attrs": [("TCA_ETS_PRIOMAP_BAND", band) for band in spec.priomap]}))
    return pack(options, attrs)


def decode(data: bytes) -> Ets:
    attrs = unpack(options, data)
    quanta, priomap = (
        tuple(value for _, value in attrs[name]["attrs"]) if name in attrs else ()
        for name in ("TCA_ETS_QUANTA", "TCA_ETS_PRIOMAP")
    )
    strict = attrs.get("TCA_ETS_NSTRICT", 0)
    # The kernel shows a quantum for every band that has turns, and nothing for the strict ones.
    return Ets(attrs["TCA_ETS_NBANDS"], strict, quanta, priomap)


def explain(spec: Ets) -> str:
    words = f"bands {spec.bands} strict {spec.strict}" if spec.strict else f"bands {spec.bands}"
    words += f" quanta {' '.join(map(str, spec.quanta))}" if spec.quanta else ""
    return words + (f" priomap {' '.join(map(str, spec.priomap))}" if spec.priomap else "")

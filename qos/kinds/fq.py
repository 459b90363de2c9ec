"""fq: a queue for each flow, served in turns, with the pacing that TCP asks for."""

from __future__ import annotations

from dataclasses import dataclass

from pyroute2.netlink import nla

from hrdma.qos.wire import pack, unpack

__all__ = ["KIND", "OPTION", "Fq", "decode", "encode", "explain"]

KIND = "fq"
OPTION = ("CONFIG_NET_SCH_FQ", "leaf = 'pfifo' works everywhere")


@dataclass(frozen=True)
class Fq:
    limit: int = 10_000  #: packets of all flows
    flow_limit: int = 1000  #: packets of one flow


class options(nla):
    nla_map = (
        ("TCA_FQ_UNSPEC", "none"),
        ("TCA_FQ_PLIMIT", "uint32"),
        ("TCA_FQ_FLOW_PLIMIT", "uint32"),
        *((f"TCA_FQ_{i}", "cdata") for i in range(3, 24)),
    )


def encode(spec: Fq) -> bytes:
    return pack(options, [("TCA_FQ_PLIMIT", spec.limit), ("TCA_FQ_FLOW_PLIMIT", spec.flow_limit)])


def decode(data: bytes) -> Fq:
    attrs = unpack(options, data)
    return Fq(attrs["TCA_FQ_PLIMIT"], attrs["TCA_FQ_FLOW_PLIMIT"])


def explain(spec: Fq) -> str:
    return f"limit {spec.limit} flow_limit {spec.flow_limit}"

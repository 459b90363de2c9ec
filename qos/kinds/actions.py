"""The two actions that trees need, as both classifiers carry them: redirect to another device, and set the packet's priority.

No kind of its own: `u32` and `flower` use it.
"""

from __future__ import annotations

import struct
from typing import Any

from pyroute2.netlink import NLA_F_NESTED, nla
from pyroute2.netlink.rtnl.tcmsg import act_mirred, act_skbedit

from hrdma.qos.wire import attributes, pack

__all__ = ["actions", "decode", "encode"]

STOLEN, PIPE, EGRESS_REDIR = 4, 3, 1
MIRRED_PARMS, SKBEDIT_PRIORITY = 2, 3  # numbers of attributes


class actions(nla):
    nla_map = ((1, "TCA_ACT_1", "action"),)

    class action(nla):
        nla_map = (("TCA_ACT_UNSPEC", "none"), ("TCA_ACT_KIND", "asciiz"), ("TCA_ACT_OPTIONS", "parms"),
                   *((f"TCA_ACT_{i}", "cdata") for i in range(3, 12)))  # fmt: skip

        class parms(nla):
            nla_flags = NLA_F_NESTED
            nla_map = tuple((f"{i}", "cdata") for i in range(12))


def encode(redirect: int, priority: int | None) -> dict[str, Any] | None:
    """The value of a classifier's action attribute; None where neither is wanted.

    Parameters
    ----------
    redirect : int
        Index of the device that gets the packet; 0 is none.
    priority : int or None
        skb->priority from here on.
    """
    if redirect:
        kind, parms = "mirred", pack(act_mirred.options, [("TCA_MIRRED_PARMS", {
            "action": STOLEN, "eaction": EGRESS_REDIR, "ifindex": redirect})])  # fmt: skip
    elif priority is not None:
        kind, parms = "skbedit", pack(act_skbedit.options, [
            ("TCA_SKBEDIT_PARMS", {"action": PIPE}), ("TCA_SKBEDIT_PRIORITY", priority)])  # fmt: skip
    else:
        return None
    blobs = [(str(number), value) for number, value in attributes(parms).items()]
    return {"attrs": [("TCA_ACT_1", {"attrs": [("TCA_ACT_KIND", kind), ("TCA_ACT_OPTIONS", {"attrs": blobs})]})]}


def decode(value: dict[str, Any] | None) -> tuple[int, int | None]:
    """`redirect` and `priority` of such an attribute."""
    redirect, priority = 0, None
    if value:
        action = dict(value["attrs"][0][1]["attrs"])
        parms = dict(action["TCA_ACT_OPTIONS"]["attrs"])
        if action["TCA_ACT_KIND"] == "mirred":
            redirect = struct.unpack_from("=I", parms[str(MIRRED_PARMS)], 24)[0]
        elif action["TCA_ACT_KIND"] == "skbedit" and str(SKBEDIT_PRIORITY) in parms:
            priority = struct.unpack("=I", parms[str(SKBEDIT_PRIORITY)])[0]
    return redirect, priority

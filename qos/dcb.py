"""DCB: priorities inside the NIC, for RoCE, whose packets no qdisc sees. IEEE 802.1Qaz by the kernel's dcbnl messages.

    DSCP of a packet -> priority 0..7 -> traffic class -> strict order, or a share (ETS); PFC keeps a priority lossless

Band 0 is priority 7, band 6 is priority 1, and everything else keeps priority 0. The last traffic class is served first.
Where a NIC has fewer traffic classes than bands, the last bands share the lowest one.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hrdma.errors import PolicyError
from hrdma.qos.objects import Dcb
from hrdma.qos.order import Place
from hrdma.qos.policy import BANDS, Policy
from hrdma.qos.wire import NESTED, NLM_F_ACK, NLM_F_REQUEST, Wire, attribute, attributes, text

__all__ = ["OPTION", "alike", "commands", "decode", "query", "read", "requests", "wanted", "write"]

OPTION = ("CONFIG_DCB", "kind = 'htb' orders what passes the kernel, which RoCE does not")
RTM_GETDCB, RTM_SETDCB = 78, 79
IEEE_SET, IEEE_GET, IEEE_DEL = 20, 21, 27  # commands
IFNAME, IEEE = 1, 13  # attributes
ETS, PFC, APPS, TRUST = 1, 2, 3, 11  # ... inside IEEE
APP = 1
DSCP, DSCP_ONLY = 5, (5,)  # selector of an application, and the trust order that asks it alone
STRICT, SHARED = 0, 2  # transmission selection
PRIORITIES = 8
_ETS = struct.Struct("=3B8s8s8s8s24s")  # willing, classes, cbs, share out, in, selection, class of a priority, advice
_PFC = struct.Struct("=BBBxH2x128x")  # classes, priorities, mbc, delay, counters


def _message(dev: str, command: int, kind: int, body: bytes = b"") -> tuple[bytes, int, int]:
    head = struct.pack("=BBH", 0, command, 0) + text(IFNAME, dev)
    return head + (attribute(IEEE | NESTED, body) if body else b""), kind, NLM_F_REQUEST | NLM_F_ACK


def query(dev: str) -> tuple[bytes, int, int]:
    """The request for a device's state: what is behind the header, type and flags."""
    return _message(dev, IEEE_GET, RTM_GETDCB)


def decode(dev: str, answer: bytes) -> Dcb:
    """The state in the kernel's answer, from its netlink header on."""
    ieee = attributes(attributes(answer, 20).get(IEEE, b""))
    ets = _ETS.unpack_from(ieee.get(ETS, b"").ljust(_ETS.size, b"\0"))
    willing, classes, cbs, shares, shares_in, selection, class_of, advice = ets
    _, lossless, bypass, delay = _PFC.unpack_from(ieee.get(PFC, b"").ljust(_PFC.size, b"\0"))
    apps, table, offset = [], ieee.get(APPS, b""), 0
    while offset + 8 <= len(table):  # many attributes of one number
        selector, priority, code = struct.unpack_from("=BBH", table, offset + 4)
        if selector == DSCP:
            apps.append((code, priority))
        offset += max(4, (struct.unpack_from("=H", table, offset)[0] + 3) & ~3)
    trust = ieee.get(TRUST)
    order = None if trust is None else tuple(trust[i + 4] for i in range(0, len(trust) - 4, 8))
    return Dcb(
        dev,
        classes or PRIORITIES,
        tuple(class_of),
        tuple(selection),
        tuple(shares),
        lossless,
        tuple(sorted(apps)),
        order,
        willing,
        cbs,
        tuple(shares_in),
        tuple(advice),
        bypass,
        delay,
    )


def read(wire: Wire, dev: str) -> Dcb | None:
    """A device's own priorities; None where the driver or the kernel has no DCB."""
    try:
        answers = wire.send(*query(dev))
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENODEV, errno.EINVAL, errno.EPERM):
            return None
        raise
    return decode(dev, answers[0][1]) if answers else None


def alike(one: Dcb, other: Dcb) -> bool:
    """Whether two states agree in what every driver shows; many do not show the rest of what they take."""
    names = ("class_of", "selection", "shares", "lossless", "apps", "trust")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def write(wire: Wire, want: Dcb, have: Dcb) -> None:
    """Changes a device's own priorities; raises NetlinkError, RefusedError or DeviceError as `Wire.request` does."""
    for request in requests(want, have):
        what = f"set the priorities of {want.dev}"
        answers = wire.ask(what, request)
        # The driver's own verdict is in the answer, one byte, in either sign.
        code = next((attributes(body, 20).get(IEEE, b"\0")[0] for _, body in answers), 0)
        if code:
            number = code if code < 128 else 256 - code
            raise wire.refusal(what, None, OSError(number, os.strerror(number)))


def _apps(apps: Sequence[tuple[int, int]]) -> bytes:
    entries = b"".join(attribute(APP, struct.pack("=BBH", DSCP, priority, code)) for code, priority in apps)
    return attribute(APPS | NESTED, entries) if entries else b""


def _ets(state: Dcb) -> bytes:
    shares, selection, class_of = bytes(state.shares), bytes(state.selection), bytes(state.class_of)
    shares_in, advice = bytes(state.shares_in), bytes(state.advice)
    return _ETS.pack(state.willing, state.classes, state.cbs, shares, shares_in, selection, class_of, advice)


def _pfc(state: Dcb) -> bytes:
    return _PFC.pack(0, state.lossless, state.bypass, state.delay)


def requests(want: Dcb, have: Dcb) -> list[tuple[bytes, int, int]]:
    """The messages that lead from one state to another: what is new first, so that a DSCP is never without a priority.

    Notes
    -----
    The kernel's table may hold two priorities for one code point; the entry that is not wanted goes last.
    """
    body = b""
    if _ets(want) != _ets(have):
        body += attribute(ETS, _ets(want))
    if _pfc(want) != _pfc(have):
        body += attribute(PFC, _pfc(want))
    body += _apps([app for app in want.apps if app not in have.apps])
    if want.trust is not None and want.trust != have.trust:
        body += attribute(TRUST | NESTED, b"".join(attribute(APP, bytes([selector])) for selector in want.trust))
    gone = _apps([app for app in have.apps if app not in want.apps])
    found = [_message(want.dev, IEEE_SET, RTM_SETDCB, body)] if body else []
    return found + ([_message(want.dev, IEEE_DEL, RTM_SETDCB, gone)] if gone else [])


def wanted(policy: Policy, places: Mapping[str, Place], before: Dcb) -> Dcb:
    """The state that a policy means, given the one before it: code points and priorities of others stay as they are.

    Raises
    ------
    PolicyError
        A job is known by something else than its DSCP, or there are more weights than traffic classes.
    """
    for i, job in enumerate(policy.jobs):
        if not job.match or any(match.given.keys() != {"dscp"} for match in job.match):
            raise PolicyError(
                f"kind 'dcb' knows jobs by DSCP alone, and job {job.name!r} has {[match.given for match in job.match]}",
                key=f"job[{i}].match",
            )
    weighted = policy.policy == "weighted"
    if weighted and len(policy.jobs) >= before.classes:
        raise PolicyError(f"{before.dev} has shares for {before.classes - 1} jobs, not {len(policy.jobs)}", key="job")
    band = {job.name: i if weighted else places[job.name].band for i, job in enumerate(policy.jobs)}
    ours = {match.dscp: BANDS - band[job.name] for job in policy.jobs for match in job.match if match.dscp is not None}
    ours.update({job.answers: BANDS - band[job.name] for job in policy.jobs if job.answers is not None})
    kept = [(code, priority) for code, priority in before.apps if code not in ours]
    class_of = [0] + [max(0, before.classes - 1 - (BANDS - priority)) for priority in range(1, PRIORITIES)]
    selection, shares = [STRICT] * before.classes, [0] * before.classes
    if weighted:
        total = sum(job.weight for job in policy.jobs) + 1.0  # what is no job's weighs one
        for i, job in enumerate(policy.jobs):
            shares[before.classes - 1 - i] = max(1, int(100 * job.weight / total))
        shares[0] += 100 - sum(shares)
        selection = [SHARED if share else STRICT for share in shares]
    pad = [0] * (PRIORITIES - before.classes)
    lossless = (
        before.lossless | sum(1 << priority for priority in set(ours.values())) if policy.lossless else before.lossless
    )
    return replace(
        before,
        class_of=tuple(class_of),
        selection=(*selection, *pad),
        shares=(*shares, *pad),
        lossless=lossless,
        apps=tuple(sorted([*kept, *ours.items()])),
        trust=None if before.trust is None else DSCP_ONLY,
        willing=0,  # what the far end wishes would undo it
        cbs=0,
        shares_in=(*shares, *pad),
    )


def commands(want: Dcb) -> list[str]:
    """The dcb commands that do the same."""
    names = {STRICT: "strict", SHARED: "ets"}
    classes = range(want.classes)
    apps = " ".join(f"{code}:{priority}" for code, priority in want.apps)
    lossless = " ".join(f"{i}:{'on' if want.lossless >> i & 1 else 'off'}" for i in range(PRIORITIES))
    found = [
        f"dcb ets set dev {want.dev} prio-tc {' '.join(f'{i}:{tc}' for i, tc in enumerate(want.class_of))}"
        f" tc-tsa {' '.join(f'{i}:{names.get(want.selection[i], want.selection[i])}' for i in classes)}"
        f" tc-bw {' '.join(f'{i}:{want.shares[i]}' for i in classes)}",
        f"dcb pfc set dev {want.dev} prio-pfc {lossless}",
    ]
    found += [f"dcb app replace dev {want.dev} dscp-prio {apps}" if apps else f"dcb app flush dev {want.dev} dscp-prio"]
    return found + ([f"dcb apptrust set dev {want.dev} order dscp"] if want.trust == DSCP_ONLY else [])

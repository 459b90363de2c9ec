"""The objects that a policy means on a device, back end by back end; pure.

`htb` can do everything. The others serve a fixed order: to move a job between their queues would reorder its packets, so
policies that rotate are refused there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hrdma.errors import PolicyError, RefusedError
from hrdma.qos import dcb, ladder
from hrdma.qos.kinds import ets, fq, mqprio, pfifo, prio, u32
from hrdma.qos.objects import INGRESS, ROOT, Dcb, Filter, Link, Object, Qdisc
from hrdma.qos.order import Place
from hrdma.qos.policy import BANDS, DEFAULT_BAND, Policy

__all__ = ["IFB_INDEX", "Device", "Tree", "build", "check_kind", "ifb_name"]

ROOT_HANDLE = ladder.OUTER << 16
CLSACT_EGRESS = 0xFFFFFFF3  # TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_EGRESS)
INGRESS_HANDLE = 0xFFFF0000
ETH_P_ALL = 3
IFB_INDEX = 0x48520000  # of an IFB: this and the index of the device whose ingress it orders
ANY = tuple([DEFAULT_BAND] * 16)
MARKED = 8  # skb->priority of band 0 under mqprio; smaller ones are what everybody uses


@dataclass(frozen=True)
class Device:
    """What of a device counts for a tree."""

    name: str
    index: int
    rate: int  #: bytes per second
    queues: int = 1  #: for transmission
    dcb: Dcb | None = None  #: what its own priorities were before; for kind ``dcb``


@dataclass(frozen=True)
class Tree:
    """Objects, each after its parent, and the class that each job's packets go to."""

    kind: str
    objects: tuple[Object, ...]
    classes: Mapping[str, int]  #: of each job; several share one where the back end has only bands
    dcb: Dcb | None = None  #: the NIC's own priorities

    def marks(self, policy: Policy) -> dict[str, int]:
        """`SO_PRIORITY` of the sockets that each matched cgroup opens."""
        paths = ((match.cgroup, job.name) for job in policy.jobs for match in job.match if match.cgroup)
        return {path: self.classes[name] for path, name in paths if name in self.classes}


def ifb_name(index: int) -> str:
    return f"hrq{index}"


def check_kind(policy: Policy, kind: str) -> None:
    """Raises PolicyError where a back end cannot do what a policy asks for."""
    if kind == "htb":
        return
    if kind == "dcb" and (policy.direction == "ingress" or policy.policy == "fifo"):
        raise PolicyError(
            "kind 'dcb' is about order among jobs, at egress; for other wishes take kind = 'htb'", key="qos.kind"
        )
    if policy.rotates:
        raise PolicyError(
            f"kind {kind!r} cannot do {policy.policy!r}: its queues have a fixed order, and moving a job to another one"
            " would reorder its packets; kind = 'htb' can",
            key="qos.kind",
        )
    if policy.policy == "weighted" and kind not in ("ets", "dcb"):
        raise PolicyError(f"kind {kind!r} has no weights; kind = 'htb' and kind = 'ets' have", key="qos.kind")
    if kind == "ets" and policy.policy == "weighted" and len(policy.jobs) >= ets.MOST_BANDS:
        raise PolicyError(f"kind 'ets' has turns for {ets.MOST_BANDS - 1} jobs; kind = 'htb' for more", key="qos.kind")
    if kind == "mqprio" and policy.direction == "ingress":
        raise PolicyError("kind 'mqprio' is about transmit queues; for ingress take kind = 'htb'", key="qos.kind")
    cgroups = any(match.cgroup for job in policy.jobs for match in job.match)
    if kind == "mqprio" and cgroups:
        raise PolicyError("kind 'mqprio' knows jobs by packet alone; for cgroups take kind = 'htb'", key="qos.kind")


def build(policy: Policy, kind: str, device: Device, slots: Mapping[str, int], places: Mapping[str, Place]) -> Tree:
    """The tree of a policy.

    Parameters
    ----------
    policy : Policy
    kind : str
        Back end, not ``"auto"``.
    device : Device
    slots : mapping of str to int
        A number for each job that stays its own as long as it is there: its handles come from it.
    places : mapping of str to Place
        From `hrdma.qos.order.assign`.

    Notes
    -----
    Cost: nine objects per job under ``htb``, and one for each of its filters.
    """
    check_kind(policy, kind)
    if kind == "dcb":
        if device.dcb is None:
            raise RefusedError(
                f"{device.name} has no DCB, by its driver or by the kernel: {dcb.OPTION[0]}; {dcb.OPTION[1]}"
            )
        return Tree(kind, (), {}, dcb.wanted(policy, places, device.dcb))
    ingress = policy.direction == "ingress"
    dev = ifb_name(device.index) if ingress else device.name
    head: list[Object] = []
    if ingress:
        sink = u32.encode(u32.U32(u32.EVERYTHING, redirect=IFB_INDEX + device.index))
        head = [
            Link(dev, index=IFB_INDEX + device.index),
            Qdisc(device.name, "ingress", INGRESS_HANDLE, INGRESS),
        ]
    body, classes = _BUILDERS[kind](policy, dev, device, slots, places)
    filters = _filters(policy, dev, slots, classes, _FILTERED.get(kind, ROOT_HANDLE))
    tail: list[Object] = [Filter(device.name, "u32", INGRESS_HANDLE, 1, ETH_P_ALL, options=sink)] if ingress else []
    return Tree(kind, (*head, *body, *filters, *tail), classes)


def _queue(policy: Policy, dev: str, handle: int, parent: int) -> Qdisc:
    options = fq.encode(fq.Fq()) if policy.leaf == "fq" else pfifo.encode(pfifo.Pfifo())
    return Qdisc(dev, policy.leaf, handle, parent, options)


def _htb(
    policy: Policy, dev: str, device: Device, slots: Mapping[str, int], places: Mapping[str, Place]
) -> tuple[list[Object], dict[str, int]]:
    trunk = ladder.trunk(dev, device.rate, policy.floor)
    if policy.policy == "fifo":
        return [*trunk[:2], _queue(policy, dev, ladder.INNER << 16, ROOT_HANDLE | 1)], {}
    default = _queue(policy, dev, ladder.queue_handle(-1), ladder.DEFAULT_CLASS)
    found: list[Object] = [*trunk, default]
    classes = {}
    turn = ladder.turn_of(device.rate) / min((place.weight for place in places.values()), default=1.0)
    for job in policy.jobs:
        slot = slots[job.name]
        found += ladder.job_classes(dev, slot, places[job.name], policy.floor, turn)
        found.append(_queue(policy, dev, ladder.queue_handle(slot), ladder.leaf_of(slot)))
        classes[job.name] = ladder.leaf_of(slot)
    return found, classes


def _bands(policy: Policy, dev: str, count: int) -> list[Object]:
    return [_queue(policy, dev, ladder.queue_handle(band), ROOT_HANDLE | band + 1) for band in range(count)]


def _prio(
    policy: Policy, dev: str, device: Device, slots: Mapping[str, int], places: Mapping[str, Place]
) -> tuple[list[Object], dict[str, int]]:
    if policy.policy == "fifo":
        return [_queue(policy, dev, ROOT_HANDLE, ROOT)], {}
    root = Qdisc(dev, "prio", ROOT_HANDLE, ROOT, prio.encode(prio.Prio(BANDS + 1, ANY)))
    classes = {job.name: ROOT_HANDLE | places[job.name].band + 1 for job in policy.jobs}
    return [root, *_bands(policy, dev, BANDS + 1)], classes


def _ets(
    policy: Policy, dev: str, device: Device, slots: Mapping[str, int], places: Mapping[str, Place]
) -> tuple[list[Object], dict[str, int]]:
    if policy.policy == "fifo":
        return [_queue(policy, dev, ROOT_HANDLE, ROOT)], {}
    if policy.policy != "weighted":
        spec = ets.Ets(BANDS + 1, BANDS + 1, (), ANY)
        classes = {job.name: ROOT_HANDLE | places[job.name].band + 1 for job in policy.jobs}
    else:
        turn = ladder.turn_of(device.rate)
        lightest = min((job.weight for job in policy.jobs), default=1.0)
        quanta = (*(round(turn * job.weight / lightest) for job in policy.jobs), turn)
        spec = ets.Ets(len(quanta), 0, quanta, (len(quanta) - 1,) * 16)
        classes = {job.name: ROOT_HANDLE | i + 1 for i, job in enumerate(policy.jobs)}
    root = Qdisc(dev, "ets", ROOT_HANDLE, ROOT, ets.encode(spec))
    return [root, *_bands(policy, dev, spec.bands)], classes


def _mqprio(
    policy: Policy, dev: str, device: Device, slots: Mapping[str, int], places: Mapping[str, Place]
) -> tuple[list[Object], dict[str, int]]:
    if policy.policy == "fifo":
        return [_queue(policy, dev, ROOT_HANDLE, ROOT)], {}
    count = min(BANDS + 1, device.queues)
    if count < 2:
        raise PolicyError(f"kind 'mqprio' needs transmit queues to divide, {dev} has one; kind = 'htb' does not",
                          key="qos.kind")  # fmt: skip
    each = device.queues // count
    # The last class is the NIC's highest. Bands that have no class of their own share the lowest with everybody else.
    classes_of_bands = [max(0, count - 1 - band) for band in range(BANDS + 1)]
    spec = mqprio.Mqprio(
        count, (*[0] * MARKED, *classes_of_bands), (each,) * count, tuple(each * i for i in range(count))
    )
    root = Qdisc(dev, "mqprio", ROOT_HANDLE, ROOT, mqprio.encode(spec))
    hook = Qdisc(dev, "clsact", INGRESS_HANDLE, INGRESS)
    return [root, hook], {job.name: MARKED + places[job.name].band for job in policy.jobs}


_FILTERED = {"htb": ladder.INNER << 16, "mqprio": CLSACT_EGRESS}  # where filters are attached, if not to the root
_BUILDERS = {"htb": _htb, "prio": _prio, "ets": _ets, "mqprio": _mqprio}


def _filters(
    policy: Policy, dev: str, slots: Mapping[str, int], classes: Mapping[str, int], parent: int
) -> list[Object]:
    found: list[Object] = []
    for job in policy.jobs:
        if job.name not in classes:
            continue
        for i, match in enumerate(job.match):
            if match.cgroup is not None:
                continue
            for variant, (protocol, keys) in enumerate(u32.keys_of(match)):
                # Every filter has a pref of its own, so that it can be named without the handle that the kernel gives it.
                pref = 1 + 64 * slots[job.name] + 4 * i + variant
                marks = parent == CLSACT_EGRESS
                spec = u32.U32(keys, priority=classes[job.name]) if marks else u32.U32(keys, classes[job.name])
                found.append(Filter(dev, "u32", parent, pref, protocol, options=u32.encode(spec)))
    return found

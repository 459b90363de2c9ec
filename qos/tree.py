"""The objects that a policy means on a device, back end by back end; pure.

`htb` can do everything. The others serve a fixed order: to move a job between their queues would reorder its packets, so
policies that rotate are refused there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType

from hrdma.errors import PolicyError, RefusedError
from hrdma.qos import dcb, ladder
from hrdma.qos.kinds import ets, flower, fq, mqprio, pfifo, prio, tbf, u32
from hrdma.qos.kinds.htb import TICK
from hrdma.qos.objects import INGRESS, ROOT, Dcb, Filter, Link, Object, Qdisc
from hrdma.qos.order import Place
from hrdma.qos.policy import BANDS, DEFAULT_BAND, MOST_JOBS, Match, Policy
from hrdma.units import rate_text

__all__ = ["CLASSIFIERS", "FIRST", "IFB_INDEX", "Device", "Tree", "build", "check_kind", "ifb_name", "most_slots"]

ROOT_HANDLE = ladder.OUTER << 16
CLSACT_EGRESS = 0xFFFFFFF3  # TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_EGRESS)
INGRESS_HANDLE = 0xFFFF0000
ETH_P_ALL = 3
IFB_INDEX = 0x48520000  # of an IFB: this and the index of the device whose ingress it orders
FIRST = ROOT_HANDLE | 1  # class of prio and ets before that of band 0
ANY = tuple([DEFAULT_BAND + 1] * 16)
CLASSIFIERS = {module.KIND: module for module in (u32, flower)}  # best first: u32 is in more kernels
CARRIERS = ROOT_HANDLE | 0xFFE0  # TC_H_MIN_PRIORITY: the class of traffic class 0 of mqprio; one more for each
ACKS_LIMIT = 1 << 17  # bytes of them that may wait where they have a queue with a rate
MOST_ACKS = 4  # one byte in so many of the link is for bare acknowledgements, at most
PREFS = 64  # of filters, for each job; the first so many are for what goes before all jobs
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
    counted: Mapping[str, int] = field(default_factory=dict)  #: the class with each job's counters
    acks: int = 0  #: the class of bare acknowledgements, before all bands
    answers: Mapping[str, int] = field(
        default_factory=dict
    )  #: the class of a job's answers, where they have one of their own

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
    if policy.acks and (kind in ("mqprio", "dcb") or policy.policy == "weighted"):
        raise PolicyError(
            f"kind {kind!r} has no class before all bands for {policy.policy!r}; kind = 'htb' has", key="qos.acks"
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


def _acks_rate(policy: Policy, kind: str, rate: int, classifier: str) -> int:
    """Bytes per second at which bare acknowledgements go before all bands."""
    if policy.acks is None:
        return rate // ladder.PART if kind == "htb" and classifier == u32.KIND and policy.policy != "fifo" else 0
    if policy.acks and classifier != u32.KIND:
        raise PolicyError(
            f"filters of kind {classifier!r} do not look at lengths, by which bare acknowledgements are known; this kernel"
            f" lacks {u32.OPTION[0]}; acks = 0 does without",
            key="qos.acks",
        )
    if policy.acks > rate // MOST_ACKS:
        raise PolicyError(
            f"{rate_text(policy.acks)} is more than a quarter of the {rate_text(rate)} of the link: others would starve",
            key="qos.acks",
        )
    return policy.acks


def most_slots(policy: Policy, kind: str) -> int:
    """How many numbers for jobs there are."""
    return ets.MOST_BANDS - 1 if kind == "ets" and policy.policy == "weighted" else MOST_JOBS


def build(
    policy: Policy,
    kind: str,
    device: Device,
    slots: Mapping[str, int],
    places: Mapping[str, Place],
    classifier: str = "u32",
) -> Tree:
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
    classifier : str, optional
        One of `CLASSIFIERS`.

    Notes
    -----
    Cost: nine objects per job under ``htb``, nine more where its answers have a code point, and one for each of its filters; 24 for
    bare acknowledgements.
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
    sort = CLASSIFIERS[classifier]
    if ingress:
        sink = sort.encode(replace(sort.EVERYTHING, redirect=IFB_INDEX + device.index))
        head = [
            Link(dev, index=IFB_INDEX + device.index),
            Qdisc(device.name, "ingress", INGRESS_HANDLE, INGRESS),
        ]
    acks = _acks_rate(policy, kind, device.rate, classifier)
    body, classes = _BUILDERS[kind](policy, dev, device, slots, places, acks)
    answers = {}
    if kind == "htb" and policy.policy != "fifo":
        answers = {
            job.name: ladder.leaf_of(slots[job.name] + ladder.ANSWERS) for job in policy.jobs if job.answers is not None
        }
    filters = _filters(policy, dev, slots, classes, answers, _FILTERED.get(kind, ROOT_HANDLE), sort)
    first = (ladder.ACKS_CLASS if kind == "htb" else FIRST) if acks else 0
    if first:
        filters = [*_acks_filters(dev, first), *filters]
    tail: list[Object] = [Filter(device.name, sort.KIND, INGRESS_HANDLE, 1, ETH_P_ALL, options=sink)] if ingress else []
    counted = classes
    if kind == "mqprio":  # `classes` are values of skb->priority
        last = min(BANDS + 1, device.queues) - 1
        counted = {name: CARRIERS | max(0, last - (mark - MARKED)) for name, mark in classes.items()}
    return Tree(kind, (*head, *body, *filters, *tail), classes, counted=counted, acks=first, answers=answers)


def _queue(policy: Policy, dev: str, handle: int, parent: int) -> Qdisc:
    options = fq.encode(fq.Fq()) if policy.leaf == "fq" else pfifo.encode(pfifo.Pfifo())
    return Qdisc(dev, policy.leaf, handle, parent, options)


def _htb(
    policy: Policy, dev: str, device: Device, slots: Mapping[str, int], places: Mapping[str, Place], acks: int
) -> tuple[list[Object], dict[str, int]]:
    trunk = ladder.trunk(dev, device.rate, policy.floor, acks)
    if policy.policy == "fifo":
        return [*trunk[:3], _queue(policy, dev, ladder.INNER << 16, ROOT_HANDLE | 1)], {}
    default = _queue(policy, dev, ladder.queue_handle(-1), ladder.DEFAULT_CLASS)
    found: list[Object] = [*trunk, default]
    if acks:
        found.append(_queue(policy, dev, ladder.queue_handle(-2), ladder.ACKS_CLASS))
    classes = {}
    turn = ladder.turn_of(device.rate) / min((place.weight for place in places.values()), default=1.0)
    for job in policy.jobs:
        slot = slots[job.name]
        ladders = [(slot, ladder.floor_class(policy.floor))]
        if job.answers is not None:
            ladders.append((slot + ladder.ANSWERS, ladder.answers_class(device.rate)))
        for number, off in ladders:
            found += ladder.job_classes(dev, number, places[job.name], off, turn)
            found.append(_queue(policy, dev, ladder.queue_handle(number), ladder.leaf_of(number)))
        classes[job.name] = ladder.leaf_of(slot)
    return found, classes


def _bands(policy: Policy, dev: str, count: int) -> list[Object]:
    return [_queue(policy, dev, ladder.queue_handle(band), ROOT_HANDLE | band + 1) for band in range(count)]


def _ordered(policy: Policy, dev: str, acks: int) -> list[Object]:
    """The queues of a fixed order: what goes before all bands, up to its rate, and the bands. The first is there in any case, so that no band
    has another class where it is used and where it is not."""
    queues = _bands(policy, dev, BANDS + 2)
    if acks:
        spec = tbf.Tbf(acks, max(ladder.BURST, round(2 * ladder.TYPICAL / acks / TICK)), ACKS_LIMIT)
        queues[0] = Qdisc(dev, "tbf", ladder.queue_handle(0), FIRST, tbf.encode(spec))
    return queues


def _prio(
    policy: Policy, dev: str, device: Device, slots: Mapping[str, int], places: Mapping[str, Place], acks: int
) -> tuple[list[Object], dict[str, int]]:
    if policy.policy == "fifo":
        return [_queue(policy, dev, ROOT_HANDLE, ROOT)], {}
    root = Qdisc(dev, "prio", ROOT_HANDLE, ROOT, prio.encode(prio.Prio(BANDS + 2, ANY)))
    classes = {job.name: FIRST + 1 + places[job.name].band for job in policy.jobs}
    return [root, *_ordered(policy, dev, acks)], classes


def _ets(
    policy: Policy, dev: str, device: Device, slots: Mapping[str, int], places: Mapping[str, Place], acks: int
) -> tuple[list[Object], dict[str, int]]:
    if policy.policy == "fifo":
        return [_queue(policy, dev, ROOT_HANDLE, ROOT)], {}
    if policy.policy != "weighted":
        spec = ets.Ets(BANDS + 2, BANDS + 2, (), ANY)
        classes = {job.name: FIRST + 1 + places[job.name].band for job in policy.jobs}
        queues = _ordered(policy, dev, acks)
    else:
        turn = ladder.turn_of(device.rate)
        lightest = min((job.weight for job in policy.jobs), default=1.0)
        # By slot, so that no job's class changes when another one goes; the first is of what is no job's.
        quanta = [turn] * (max((slots[job.name] for job in policy.jobs), default=0) + 2)
        for job in policy.jobs:
            quanta[slots[job.name] + 1] = round(turn * job.weight / lightest)
        spec = ets.Ets(len(quanta), 0, tuple(quanta), (0,) * 16)
        classes = {job.name: ROOT_HANDLE | slots[job.name] + 2 for job in policy.jobs}
        queues = _bands(policy, dev, spec.bands)
    root = Qdisc(dev, "ets", ROOT_HANDLE, ROOT, ets.encode(spec))
    return [root, *queues], classes


def _mqprio(
    policy: Policy, dev: str, device: Device, slots: Mapping[str, int], places: Mapping[str, Place], acks: int
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


def _acks_filters(dev: str, target: int) -> list[Object]:
    return [
        Filter(dev, u32.KIND, ROOT_HANDLE, pref, protocol, options=u32.encode(replace(spec, classid=target)))
        for pref, (protocol, spec) in enumerate(u32.bare_acks(), 1)
    ]


def _filters(
    policy: Policy,
    dev: str,
    slots: Mapping[str, int],
    classes: Mapping[str, int],
    answers: Mapping[str, int],
    parent: int,
    sort: ModuleType,
) -> list[Object]:
    found: list[Object] = []
    for job in policy.jobs:
        if job.name not in classes:
            continue
        matches = [(match, classes[job.name]) for match in job.match]
        if job.answers is not None:
            matches.append((Match(dscp=job.answers), answers.get(job.name, classes[job.name])))
        for i, (match, where) in enumerate(matches):
            if match.cgroup is not None:
                continue
            for variant, (protocol, spec) in enumerate(sort.filters_of(match)):
                # Every filter has a pref of its own, so that it can be named without the handle that the kernel gives it.
                pref = 1 + PREFS * (slots[job.name] + 1) + 4 * i + variant
                target = {"priority" if parent == CLSACT_EGRESS else "classid": where}
                found.append(
                    Filter(dev, sort.KIND, parent, pref, protocol, options=sort.encode(replace(spec, **target)))
                )
    return found

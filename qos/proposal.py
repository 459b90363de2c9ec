"""From a policy to operations: which back ends can do it, what it means on a device, and what is to be done there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hrdma.errors import DeviceError, RefusedError
from hrdma.qos import guard
from hrdma.qos.objects import INGRESS, Link, Object, Qdisc
from hrdma.qos.order import Live, assign
from hrdma.qos.plan import Op, back, plan
from hrdma.qos.policy import Policy
from hrdma.qos.record import Record, Wish
from hrdma.qos.state import State, read
from hrdma.qos.tree import Device, check_kind, ifb_name, most_slots
from hrdma.qos.wire import Wire

__all__ = ["candidates", "crosses", "difference", "look", "slots_of", "wish_of"]


def look(wire: Wire, dev: str, every_class: bool = False) -> tuple[State, list[Object]]:
    """A device's state, and all objects on it and on the IFB that belongs to it."""
    state = read(wire, dev, every_class)
    ifb = ifb_name(state.index)
    try:
        index = wire.ifindex(ifb)
    except DeviceError:
        return state, list(state.objects)
    return state, [Link(ifb, index), *read(wire, ifb).objects, *state.objects]


def slots_of(policy: Policy, before: Mapping[str, int], most: int) -> dict[str, int]:
    """A number below `most` for each job: the one it had, else the smallest that is free."""
    kept = {job.name: before[job.name] for job in policy.jobs if before.get(job.name, most) < most}
    free = (number for number in range(len(policy.jobs)) if number not in set(kept.values()))
    return {job.name: kept[job.name] if job.name in kept else next(free) for job in policy.jobs}


def candidates(policy: Policy) -> list[str]:
    """Back ends to try, best first; PolicyError where the one that is asked for cannot do what else is asked for."""
    if policy.kind != "auto":
        check_kind(policy, policy.kind)
        return [policy.kind]
    found = ["htb"]
    for kind in ("ets", "prio"):
        try:
            check_kind(policy, kind)
            found.append(kind)
        except ValueError:
            pass
    return found


def wish_of(
    policy: Policy,
    kind: str,
    state: State,
    before: Wish | None = None,
    rotation: int | None = None,
    live: Mapping[str, Live] | None = None,
    classifier: str = "u32",
) -> Wish:
    """What a policy means on a device; slots, rotation and counters go on from the wish before, of the same back end."""
    own = before.device.dcb if before and before.kind == "dcb" else state.dcb
    known = before.device.rate if before and before.policy.rate == policy.rate else 0
    device = Device(state.dev, state.index, guard.rate_of(policy, state.dev, known), state.queues, own)
    if rotation is None:
        rotation = before.rotation if before else 0
    if live is None:
        live = before.live if before else {}
    slots = slots_of(policy, before.slots if before else {}, most_slots(policy, kind))
    counted = {job.name: live[job.name] for job in policy.jobs if policy.counts and job.name in live}
    return Wish(policy, kind, device, slots, assign(policy, rotation, counted), rotation, counted, classifier)


def crosses(before: Wish | None, after: Wish) -> bool:
    """Whether what is installed gives way to another back end or direction, which has nothing in common with it."""
    return before is not None and (before.kind, before.policy.direction) != (after.kind, after.policy.direction)


def difference(record: Record | None, have: Sequence[Object], wish: Wish, replace_root: bool) -> tuple[Op, ...]:
    """The operations from what is there to a wish; RefusedError where something of somebody else is in the way."""
    want = wish.tree.objects
    if record is None or not crosses(record.settled, wish):
        if record is None:
            _check_hooks(have, want)
        return plan(have, want, replace_root)
    _check_hooks(record.before, want)
    return (*back(have, record.before), *plan(record.before, want, True))


def _check_hooks(before: Sequence[Object], want: Sequence[Object]) -> None:
    """An ingress qdisc that is not ours may look like the one that is wanted."""
    hooks, taken = (
        [thing for thing in things if isinstance(thing, Qdisc) and thing.parent == INGRESS] for things in (want, before)
    )
    if hooks and taken:
        raise RefusedError(
            f"{taken[0].dev} has an ingress qdisc already ({taken[0].kind}), which is not ours to change"
        )

"""The difference between what is there and what is wanted, and the way back; pure.

Order: what is new from the root down, then changed rates (a job's rungs from the root down), then new filters, then old filters, then
old queues and classes from the leaves up. So a packet always finds a class; what still waits in one that goes is dropped with it, so
whoever gives a job up waits first until its packets have left.

No operation carries its own undoing. Whatever point a change was cut off at, `plan` from there to the tree before, or `back` from
there to what was on the device before this package came, says what is left to do, and says so again if that is cut off too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hrdma.errors import RefusedError
from hrdma.qos import ladder
from hrdma.qos.kinds import TABLE
from hrdma.qos.objects import INGRESS, ROOT, Filter, Link, Object, Qdisc, TClass, handle_text
from hrdma.qos.state import chosen, same, unrecreatable

__all__ = ["Op", "back", "beside", "command", "is_ours", "plan"]


@dataclass(frozen=True)
class Op:
    """One request: ``add``, ``change``, ``replace`` or ``delete`` a thing."""

    verb: str
    thing: Object


def is_ours(thing: Qdisc) -> bool:
    """Whether a root qdisc is one of this package's, by its handle."""
    return thing.handle == ladder.OUTER << 16


def _place(thing: Object) -> tuple[object, ...]:
    if isinstance(thing, Link):
        return "link", thing.name
    if isinstance(thing, Qdisc):
        return "qdisc", thing.dev, thing.parent
    if isinstance(thing, TClass):
        return "class", thing.dev, thing.handle
    return "filter", thing.dev, thing.parent, thing.pref, thing.protocol


def plan(have: Sequence[Object], want: Sequence[Object], replace: bool = False) -> tuple[Op, ...]:
    """The operations from one state to another.

    Parameters
    ----------
    have : sequence of Object
        Everything on the devices concerned.
    want : sequence of Object
        Everything that is to be there, parents first.
    replace : bool, optional
        Permission to replace a root qdisc of somebody else.

    Raises
    ------
    RefusedError
        Something of somebody else is in the way: a root qdisc without `replace`, one that could not be put back, an
        ingress qdisc.

    Notes
    -----
    Cost: linear in the number of objects. The same plan twice is empty the second time.
    """
    there = {_place(thing): thing for thing in chosen(have)}
    fresh: list[Op] = []
    changed: list[Op] = []
    filters: list[Op] = []
    for thing in want:
        old = there.pop(_place(thing), None)
        if isinstance(thing, Link):
            fresh += [] if old else [Op("add", thing)]
        elif isinstance(thing, Qdisc):
            ops = _qdisc(thing, old, have, replace)
            fresh += ops
            if isinstance(old, Qdisc) and ops and ops[-1].verb != "change":  # it takes everything below it away
                gone = _inside_of(old, there.values())
                there = {place: other for place, other in there.items() if other not in gone}
        elif isinstance(thing, TClass):
            if not isinstance(old, TClass):
                fresh.append(Op("add", thing))
            elif not same(old, thing):
                changed.append(Op("change", thing))
        elif not isinstance(old, Filter):
            filters.append(Op("add", thing))
        elif not same(old, thing):
            filters += [Op("delete", old), Op("add", thing)]
    return (*fresh, *changed, *filters, *_removal(list(there.values()), want))


def _below_root(thing: Object, dev: str) -> bool:
    return not isinstance(thing, Link) and thing.dev == dev and not beside(thing)


def _inside_of(qdisc: Qdisc, things: Iterable[Object]) -> set[Object]:
    """Classes and filters of a qdisc, and all that hangs below them."""
    majors = {qdisc.handle >> 16}
    found: set[Object] = set()
    near = [thing for thing in things if not isinstance(thing, Link) and thing.dev == qdisc.dev and not beside(thing)]
    while more := [thing for thing in near if thing not in found and thing.parent >> 16 in majors]:
        found.update(more)
        majors.update(thing.handle >> 16 for thing in more if isinstance(thing, Qdisc))
    return found


def _qdisc(thing: Qdisc, old: Object | None, have: Sequence[Object], replace: bool) -> list[Op]:
    if not isinstance(old, Qdisc):
        return [Op("add", thing)]
    if old.handle == thing.handle and old.kind == thing.kind:
        return [] if same(old, thing) else [Op("change", thing)]
    if thing.parent == INGRESS:
        raise RefusedError(f"{thing.dev} has an ingress qdisc already ({old.kind}), which is not ours to change")
    if thing.parent == ROOT and not is_ours(old):
        _may_replace(old, have, replace)
    # The kernel refuses another kind under a handle that is taken.
    return [Op("delete", old), Op("add", thing)] if old.handle == thing.handle else [Op("replace", thing)]


def _may_replace(old: Qdisc, have: Sequence[Object], replace: bool) -> None:
    what = f"{old.dev} has a root qdisc that somebody else made: {old.kind} {handle_text(old.handle)}"
    if not replace:
        raise RefusedError(f"{what}; --replace puts ours in its place, and revert puts it back")
    if lost := unrecreatable([thing for thing in have if _below_root(thing, old.dev)]):
        raise RefusedError(f"{what}; it cannot be replaced, since these could not be put back: {', '.join(lost)}")


def _removal(left: Sequence[Object], want: Sequence[Object]) -> list[Op]:
    """What of ours is there and not wanted: filters, then from the leaves up."""
    majors = {(thing.dev, thing.handle >> 16) for thing in want if isinstance(thing, Qdisc)}
    gone = [thing for thing in left if not isinstance(thing, Link) and _inside(thing, majors)]
    filters = [thing for thing in gone if isinstance(thing, Filter)]
    classes = [thing for thing in reversed(gone) if isinstance(thing, TClass)]
    return [*(Op("delete", thing) for thing in filters), *(Op("delete", thing) for thing in classes)]


def _inside(thing: Qdisc | TClass | Filter, majors: set[tuple[str, int]]) -> bool:
    """Whether a thing lies in a qdisc of ours and goes by itself: queues go with their class, bands of prio with their qdisc."""
    if isinstance(thing, TClass):
        return thing.kind == "htb" and (thing.dev, thing.handle >> 16) in majors
    return isinstance(thing, Filter) and (thing.dev, thing.parent >> 16) in majors


def back(have: Sequence[Object], before: Sequence[Object]) -> tuple[Op, ...]:
    """The operations that put a recorded state in place of ours.

    Parameters
    ----------
    have : sequence of Object
        Everything on the device, and on its IFB where there is one.
    before : sequence of Object
        Everything on the device before this package changed anything.

    Raises
    ------
    RefusedError
        The root qdisc is neither ours nor the recorded one: somebody else has been here.

    Notes
    -----
    A tree that is there in part is taken away and made anew: nothing says which part is missing.
    """
    links = [thing for thing in have if isinstance(thing, Link)]
    ours = {link.name for link in links}
    now = [thing for thing in chosen(have) if not isinstance(thing, Link) and thing.dev not in ours]
    then = [thing for thing in chosen(before) if not isinstance(thing, Link)]
    hooks = [thing for thing in now if isinstance(thing, Qdisc) and thing.parent == INGRESS]
    kept = {thing.parent for thing in then if isinstance(thing, Qdisc)}
    ops = [Op("delete", thing) for thing in hooks if thing.parent not in kept]
    ops += [Op("delete", link) for link in links]
    tree_now, tree_then = ([thing for thing in things if not beside(thing)] for things in (now, then))
    if set(tree_now) == set(tree_then):
        return tuple(ops)
    root, wanted = _root(tree_now), _root(tree_then)
    if root and not is_ours(root) and (wanted is None or (root.kind, root.handle) != (wanted.kind, wanted.handle)):
        raise RefusedError(
            f"{root.dev} has a root qdisc that is neither ours nor the one before: {root.kind} {handle_text(root.handle)};"
            " it stays, and `hrdma qos revert --forget` forgets what was there before"
        )
    ops += [Op("delete", root)] if root else []
    # Classes of all but HTB come with their qdisc.
    made = [thing for thing in tree_then if not isinstance(thing, TClass) or thing.kind == "htb"]
    return (*ops, *(Op("replace" if isinstance(thing, Qdisc) else "add", thing) for thing in made))


def _root(things: Sequence[Object]) -> Qdisc | None:
    return next((thing for thing in things if isinstance(thing, Qdisc) and thing.parent == ROOT), None)


def beside(thing: Qdisc | TClass | Filter) -> bool:
    """What hangs on the ingress hook is no part of the root's tree."""
    return thing.parent != ROOT and thing.parent >> 16 == INGRESS >> 16


def command(op: Op) -> str:
    """The tc (or ip) command that does the same.

    Notes
    -----
    Rounds as tc does: burst is in bytes there and in time here.
    """
    thing = op.thing
    if isinstance(thing, Link):
        return f"ip link {op.verb} {thing.name}" + (
            f" index {thing.index} type {thing.kind}" if op.verb == "add" else ""
        )
    what = {Qdisc: "qdisc", TClass: "class"}.get(type(thing), "filter")
    words = [f"tc {what} {op.verb} dev {thing.dev}"]
    if isinstance(thing, Filter):
        protocol = {0x0800: "ip", 0x86DD: "ipv6", 3: "all"}.get(thing.protocol, hex(thing.protocol))
        words.append(f"parent {handle_text(thing.parent)} protocol {protocol} pref {thing.pref} {thing.kind}")
    elif isinstance(thing, Qdisc):
        words.append(
            {ROOT: "root", INGRESS: thing.kind if thing.kind else ""}.get(thing.parent)
            or f"parent {handle_text(thing.parent)}"
        )
        if thing.parent != INGRESS:
            words += [f"handle {handle_text(thing.handle)}"] if thing.handle else []
            words += [thing.kind] if op.verb != "delete" and thing.kind else []
    else:
        words.append(f"parent {handle_text(thing.parent)} classid {handle_text(thing.handle)} {thing.kind}")
    if op.verb != "delete" and thing.options and thing.kind in TABLE:
        words.append(TABLE[thing.kind].explain(TABLE[thing.kind].decode(thing.options)))
    return " ".join(word for word in words if word)

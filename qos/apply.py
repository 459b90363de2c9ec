"""A device under this process's control: install, rotate, revert; each done as a whole, or undone.

Every change goes the same way: write into the record what is wanted, do the operations of the plan, read back that nothing is left to do,
write that it is done. Where that fails, the way back is planned and done at once; where the process is killed, whoever opens the
device next does it (`Control.__init__`). A record is written before the first operation, so there is none that nobody knows of.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hrdma.errors import DeviceError, HrdmaError, NetlinkError, RefusedError
from hrdma.qos import cgroup, dcb, guard
from hrdma.qos.objects import INGRESS, Dcb, Link, Object, Qdisc
from hrdma.qos.order import Live, assign
from hrdma.qos.plan import Op, back, beside, is_ours, plan
from hrdma.qos.policy import Policy
from hrdma.qos.record import DIRECTORY, Lock, Record, Wish, start_keeper, stem
from hrdma.qos.state import State, differences, read
from hrdma.qos.tree import Device, Tree, check_kind, ifb_name
from hrdma.qos.wire import Wire

__all__ = ["Control", "candidates", "forget", "look", "slots_of", "wish_of"]

log = logging.getLogger("hrdma")


def look(wire: Wire, dev: str, every_class: bool = False) -> tuple[State, list[Object]]:
    """A device's state, and all objects on it and on the IFB that belongs to it."""
    state = read(wire, dev, every_class)
    ifb = ifb_name(state.index)
    try:
        index = wire.ifindex(ifb)
    except DeviceError:
        return state, list(state.objects)
    return state, [Link(ifb, index), *read(wire, ifb).objects, *state.objects]


def slots_of(policy: Policy, before: Mapping[str, int]) -> dict[str, int]:
    """A number for each job: the one it had, else the smallest that is free."""
    kept = {job.name: before[job.name] for job in policy.jobs if job.name in before}
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
) -> Wish:
    """What a policy means on a device; slots and rotation go on from the wish before."""
    own = before.device.dcb if before else state.dcb
    device = Device(state.dev, state.index, guard.rate_of(policy, state.dev), state.queues, own)
    if rotation is None:
        rotation = before.rotation if before else 0
    slots = slots_of(policy, before.slots if before else {})
    return Wish(policy, kind, device, slots, assign(policy, rotation, live), rotation)


def forget(dev: str, directory: str = DIRECTORY) -> bool:
    """Leaves a device as it is and drops its record; whether there was one. For when somebody else has taken over."""
    lock = Lock(directory, dev)
    try:
        record = Record.load(directory, dev)
        if record:
            record.drop(directory)
        return record is not None
    finally:
        lock.release()


class Control:
    """The right to change one device, in the network namespace of the thread that opens it.

    Opening undoes what a killed process has left half done, and reverts what outlived its lease. Not for several threads.

    Parameters
    ----------
    dev : str
    directory : str, optional
        Where records are; processes exclude each other only where they share it.
    patience : float, optional
        Seconds to wait for a process that has the device.

    Raises
    ------
    RefusedError
        Another process has the device, or this one may not change it.
    DeviceError
        There is no such device.
    """

    def __init__(self, dev: str, directory: str = DIRECTORY, patience: float = 0.0) -> None:
        guard.check_permission()
        self.dev, self.directory = dev, directory
        self.wire = Wire()
        try:
            if Record.load(directory, dev) is None:
                self.wire.ifindex(dev)  # a name that is none leaves no lock behind
            self._lock = Lock(directory, dev, patience)
        except BaseException:
            self.wire.close()
            raise
        try:
            self.record = self._opened()
        except BaseException:
            self.close()
            raise

    def _opened(self) -> Record | None:
        record = Record.load(self.directory, self.dev)
        if record is None:
            return None
        try:
            index = self.wire.ifindex(self.dev)
        except DeviceError:
            record.drop(self.directory)  # it took its traffic control along
            raise
        if index != record.index:
            record.drop(self.directory)
            return None
        if record.settled is None or record.expired:
            self._leave(record)
            return None
        if record.pending is not None:
            self._go(record.settled.tree, record)
            return self._save(replace(record, pending=None))
        return record

    def close(self) -> None:
        self._lock.release()
        self.wire.close()

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what a caller wants ---

    def install(
        self,
        policy: Policy,
        *,
        replace_root: bool = False,
        anyway: bool = False,
        lease: float | None = None,
        rotation: int | None = None,
        live: Mapping[str, Live] | None = None,
    ) -> int:
        """Makes the device follow a policy, from whatever it follows now; a second time there is nothing to do.

        Parameters
        ----------
        policy : Policy
        replace_root : bool, optional
            Replace a root qdisc of somebody else; `revert` puts it back.
        anyway : bool, optional
            Also loopback, and the default route's device in an SSH session.
        lease : float, optional
            Seconds until the device is given back unless renewed; 0 is for ever. Left out: as before.
        rotation : int, optional
            Left out: as before.
        live : mapping of str to Live, optional
            See `hrdma.qos.order.assign`.

        Returns
        -------
        int
            How many operations it took.

        Raises
        ------
        RefusedError, PolicyError, NetlinkError, DeviceError
            Nothing is changed: what had been was undone.

        Notes
        -----
        Another policy of the same back end and direction changes the tree in place. Another back end or direction reverts first,
        which drops the packets that wait.
        """
        state, have = look(self.wire, self.dev)
        if self.record is None:
            guard.check_device(self.wire, state, anyway)
        kinds = candidates(policy)
        settled = self.record.settled if self.record else None
        if settled and (settled.kind not in kinds or settled.policy.direction != policy.direction):
            wish_of(policy, kinds[0], state).tree  # noqa: B018  raises before anything is given up
            self.revert()
            settled = None
            state, have = look(self.wire, self.dev)
        for kind in [settled.kind] if settled else kinds:
            try:
                count = self._settle(wish_of(policy, kind, state, settled, rotation, live), have, replace_root, lease)
            except NetlinkError as error:
                if "this kernel does not have" not in str(error) or kind == kinds[-1] or settled:
                    raise
                log.warning("%s: %s; trying the next back end", self.dev, error)
                continue
            if kind != kinds[0] and not settled:
                log.warning("%s: took back end %s", self.dev, kind)
            return count
        raise AssertionError("unreachable: the last back end returns or raises")

    def rotate(self, steps: int = 1, live: Mapping[str, Live] | None = None) -> int:
        """Moves every job `steps` positions on, or to where the counters put it; returns the number of operations.

        Raises
        ------
        RefusedError
            Nothing is installed.
        """
        settled = self.installed
        return self.install(settled.policy, rotation=settled.rotation + steps, live=live)

    def revert(self) -> bool:
        """Puts back what was there before the first `install`; whether there was anything to do.

        Raises
        ------
        RefusedError
            Somebody else has replaced the root qdisc meanwhile. Nothing was changed; `forget` drops the record.
        """
        if self.record is None:
            return False
        self._leave(self.record)
        self.record = None
        return True

    def renew(self) -> None:
        """Starts the lease anew."""
        if self.record:
            self.record = self._save(self.record.renewed())

    def remember(self, members: tuple[dict[str, Any], ...]) -> None:
        """Puts into the record who has registered, for the next controller."""
        if self.record:
            self.record = self._save(replace(self.record, members=members))

    @property
    def installed(self) -> Wish:
        """What is installed; RefusedError where nothing is."""
        if self.record is None or self.record.settled is None:
            raise RefusedError(
                f"nothing is installed on {self.dev}; `hrdma qos install POLICY --dev {self.dev}` does it"
            )
        return self.record.settled

    # --- how ---

    def _settle(self, wish: Wish, have: Sequence[Object], replace_root: bool, lease: float | None) -> int:
        tree = wish.tree
        want = tree.objects
        if self.record is None:
            _, have = look(self.wire, self.dev, every_class=True)
            orphan = next(
                (thing for thing in have if isinstance(thing, Link) or (isinstance(thing, Qdisc) and is_ours(thing))),
                None,
            )
            if orphan:
                raise RefusedError(
                    f"{self.dev} has a tree of this package and no record of it in {self.directory}: if no other folder (--state) has it,"
                    f" `tc qdisc del dev {self.dev} root` removes it"
                )
            hooks = [thing for thing in want if isinstance(thing, Qdisc) and thing.parent == INGRESS]
            taken = [thing for thing in have if isinstance(thing, Qdisc) and thing.parent == INGRESS]
            if hooks and taken:
                raise RefusedError(
                    f"{self.dev} has an ingress qdisc already ({taken[0].kind}), which is not ours to change"
                )
        # Planned before the record is written: what is refused leaves no trace.
        ops = plan(have, want, replace_root)
        record = self.record or Record(
            self.dev, wish.device.index, tuple(have), dcb=wish.device.dcb if tree.dcb else None
        )
        if lease is not None:
            record = replace(record, lease=lease)
        if not ops and record.settled and tree.dcb == record.settled.tree.dcb:
            self.record = self._save(replace(record, settled=wish).renewed())
            return 0
        marks = wish.tree.marks(wish.policy)
        record = replace(record, marked=tuple({**dict.fromkeys(record.marked), **marks}))
        self._save(replace(record, pending=wish))
        try:
            if record.lease:
                start_keeper(self.dev, self.directory)
            self._run(ops)
            if tree.dcb:
                self._set_dcb(tree.dcb)
            for path, priority in marks.items():
                cgroup.mark(path, priority)
            _, after = look(self.wire, self.dev)
            if left := plan(after, want):
                raise NetlinkError(f"the kernel took every change, yet {self.dev} is not as planned: {left[0]}")
        except BaseException:
            self._undo(record)
            raise
        for path in set(record.marked) - marks.keys():
            cgroup.unmark(path)
        self.record = self._save(replace(record, settled=wish, pending=None, marked=tuple(marks)).renewed())
        return len(ops) + bool(tree.dcb)

    def _undo(self, record: Record) -> None:
        """After a failure: to what was settled, or to what was there before."""
        try:
            if record.settled is None:
                self._leave(record)
                self.record = None
            else:
                self._go(record.settled.tree, record)
                self.record = self._save(record)
        except (HrdmaError, OSError) as error:
            log.error("%s: cannot undo: %s; the record stays, and the next command tries again", self.dev, error)

    def _leave(self, record: Record) -> None:
        """Goes back to what was there before us, and checks it; the record is dropped."""
        _, have = look(self.wire, self.dev, every_class=True)
        ops = back(have, record.before)
        self._save(replace(record, settled=None, pending=None))
        for path in record.marked:
            cgroup.unmark(path)
        self._run(ops)
        if record.dcb:
            self._set_dcb(record.dcb)
        _, after = look(self.wire, self.dev, every_class=True)
        # Filters of somebody's ingress hook are not ours to change, and what they do counts packets.
        kept, found = (
            [thing for thing in things if isinstance(thing, Link) or not beside(thing)]
            for things in (record.before, after)
        )
        if wrong := differences(kept, found):
            raise NetlinkError(f"{self.dev} is not as it was before: {wrong[0]}")
        cgroup.sweep(f"{stem(self.dev)}-")
        record.drop(self.directory)

    def _go(self, tree: Tree, record: Record) -> None:
        """To a tree that is known to be possible, from wherever the device is now."""
        self._run(plan(look(self.wire, self.dev)[1], tree.objects))
        if wanted := tree.dcb or record.dcb:
            self._set_dcb(wanted)

    def _set_dcb(self, want: Dcb) -> None:
        have = dcb.read(self.wire, self.dev)
        if have is None:
            raise DeviceError(f"{self.dev} has no DCB any more")
        dcb.write(self.wire, want, have)
        shown = dcb.read(self.wire, self.dev)
        if shown != want:
            raise NetlinkError(f"the driver of {self.dev} took the priorities, and does not show them: {shown}")

    def _run(self, ops: Sequence[Op]) -> None:
        for op in ops:
            try:
                self.wire.request(op.verb, op.thing)
            except NetlinkError as error:
                if op.verb == "delete" and error.errno == errno.ENOENT:
                    continue  # it went with what was deleted before it
                raise

    def _save(self, record: Record) -> Record:
        record.save(self.directory)
        return record

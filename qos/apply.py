"""A device under this process's control: install, rotate, revert; each done as a whole, or undone.

Every change goes the same way: write into the record what is wanted, do the operations of the plan, read back that nothing is left to do,
write that it is done. Where that fails, the way back is planned and done at once; where the process is killed, whoever opens the
device next does it (`Control.__init__`). A record is written before the first operation, so there is none that nobody knows of.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hrdma.errors import DeviceError, HrdmaError, NetlinkError, RefusedError
from hrdma.qos import cgroup, dcb, guard
from hrdma.qos.files import DIRECTORY, stem
from hrdma.qos.objects import Dcb, Link, Object, Qdisc
from hrdma.qos.order import Live
from hrdma.qos.plan import Op, back, beside, is_ours, plan
from hrdma.qos.policy import Policy
from hrdma.qos.proposal import candidates, crosses, difference, look, wish_of
from hrdma.qos.record import Lock, Record, Wish, start_keeper
from hrdma.qos.state import counters, differences
from hrdma.qos.status import Meter
from hrdma.qos.tree import CLASSIFIERS, ifb_name
from hrdma.qos.wire import Wire

__all__ = ["Control", "forget"]

log = logging.getLogger("hrdma")


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
        self.dev, self.directory = dev, os.path.abspath(directory)
        self.record: Record | None = None
        self.wire = Wire()
        try:
            if Record.load(self.directory, dev) is None:
                self.wire.ifindex(dev)  # a name that is none leaves no lock behind
            self._lock = Lock(self.directory, dev, patience)
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
            self._vanished(record)
            raise
        if index != record.index:
            self._vanished(record)
            return None
        return self._mended(record)

    def _mended(self, record: Record) -> Record | None:
        """After a change that was cut off, or could not be undone; and where a lease is over."""
        if record.settled is None or record.expired:
            self._leave(record)
            return None
        return self._go(record) if record.pending else record

    def _vanished(self, record: Record) -> None:
        """The device has taken its traffic control along, but not the IFB that was made for it."""
        ifb = ifb_name(record.index)
        try:
            self.wire.request("delete", Link(ifb, self.wire.ifindex(ifb)))
        except DeviceError:  # there was none
            pass
        for path in record.marked:
            cgroup.unmark(path)
        record.drop(self.directory)

    def close(self) -> None:
        """Gives the device out of hand; where it has gone meanwhile, what was left of it goes too."""
        try:
            if self.record:
                try:
                    self.wire.ifindex(self.dev)
                except DeviceError:
                    self._vanished(self.record)
        finally:
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
        Another policy of the same back end and direction changes the tree in place. Another back end or direction takes the old
        tree away first, which drops the packets that wait; where it then fails, the old one comes back.
        """
        if self.record and (self.record.pending or not self.record.settled):
            self.record = self._mended(self.record)
        state, have = look(self.wire, self.dev)
        if self.record is None:
            guard.check_device(self.wire, state, anyway)
        settled = self.record.settled if self.record else None
        kinds = candidates(policy)
        tries = [(kind, classifier) for kind in kinds for classifier in CLASSIFIERS]
        if settled and settled.kind in kinds and settled.policy.direction == policy.direction:
            tries = [(settled.kind, settled.classifier)]
        while True:
            kind, classifier = tries.pop(0)
            before = (
                settled if settled and settled.kind == kind and settled.policy.direction == policy.direction else None
            )
            wish = wish_of(policy, kind, state, before, rotation, live, classifier)
            try:
                return self._settle(wish, have, replace_root, lease)
            except NetlinkError as error:
                tries = [other for other in tries if error.missing not in other]
                if error.missing not in (kind, classifier) or not tries:
                    raise
                log.warning("%s: %s; trying %s with %s", self.dev, error, *tries[0])

    def rotate(self, steps: int = 1, live: Mapping[str, Live] | None = None) -> int:
        """Moves every job `steps` positions on, or to where the counters put it; returns the number of operations.

        Raises
        ------
        RefusedError
            Nothing is installed.
        """
        settled = self.installed
        if live is None and settled.policy.counts:
            meter = Meter(settled.live)
            meter.look(settled.tree, counters(self.wire, settled.carrier))
            live = meter.live
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
        """Starts the lease anew, and its keeper where that was killed."""
        if self.record:
            self.record = self._save(self.record.renewed())
            if self.record.lease:
                start_keeper(self.dev, self.directory)

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
        tree, record = wish.tree, self.record
        settled = record.settled if record else None
        if record is None or crosses(settled, wish):
            _, have = look(self.wire, self.dev, every_class=True)
        if record is None:
            self._check_orphans(have)
        # Planned before the record is written: what is refused leaves no trace.
        ops = difference(record, have, wish, replace_root)
        if record is None:
            record = Record(self.dev, wish.device.index, tuple(have))
        if tree.dcb and record.dcb is None:
            record = replace(record, dcb=wish.device.dcb)
        wanted_dcb = tree.dcb or record.dcb
        if settled and not crosses(settled, wish) and settled.tree.dcb == tree.dcb:
            wanted_dcb = None  # it is there
        marks = tree.marks(wish.policy)
        lease = record.lease if lease is None else lease
        # The lease is the new one when the change is done. Until then what counts is what was settled before.
        pending = replace(record, pending=wish, marked={**dict.fromkeys(marks, (0, 0)), **record.marked})
        self._save(pending)
        try:
            if lease:
                start_keeper(self.dev, self.directory)
            self._run(ops)
            if wanted_dcb:
                self._set_dcb(wanted_dcb)
            marked = self._mark(marks, record.marked)
            if ops:
                _, after = look(self.wire, self.dev)
                if left := plan(after, tree.objects):
                    raise NetlinkError(f"the kernel took every change, yet {self.dev} is not as planned: {left[0]}")
            done = replace(record, settled=wish, lease=lease, marked=marked, dcb=record.dcb if tree.dcb else None)
            self.record = self._save(done.renewed())
        except BaseException:
            self._undo(pending)
            raise
        return len(ops) + bool(wanted_dcb) + sum(record.marked.get(path) != mark for path, mark in marked.items())

    def _check_orphans(self, have: Sequence[Object]) -> None:
        if any(isinstance(thing, Link) or (isinstance(thing, Qdisc) and is_ours(thing)) for thing in have):
            raise RefusedError(
                f"{self.dev} has a tree of this package and no record of it in {self.directory}: if no other folder (--state) has it,"
                f" `tc qdisc del dev {self.dev} root` removes it"
            )

    def _mark(self, marks: Mapping[str, int], known: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        """Marks cgroups that are not yet, unmarks those that are not wanted; one that has gone is marked when it is back."""
        found = {path: (priority, cgroup.number(path)) for path, priority in marks.items()}
        for path, mark in found.items():
            if known.get(path) != mark and (mark[1] or path not in known):
                cgroup.mark(path, mark[0])
        for path in known.keys() - marks.keys():
            cgroup.unmark(path)
        return found

    def _undo(self, pending: Record) -> None:
        """After a failure: to what was settled, or to what was there before."""
        try:
            if pending.settled is None:
                self._leave(pending)
                self.record = None
            else:
                self.record = self._go(pending)
        except (HrdmaError, OSError) as error:
            self.record = pending
            log.error("%s: cannot undo: %s; the record stays, and the next command tries again", self.dev, error)

    def _leave(self, record: Record) -> None:
        """Goes back to what was there before us, and checks it; the record is dropped."""
        _, have = look(self.wire, self.dev, every_class=True)
        ops = back(have, record.before)
        if record.settled:  # else the record says already that this is the way, and there may be no room for another
            self._save(replace(record, settled=None, pending=None))
        self._run(ops)
        if record.dcb:
            self._set_dcb(record.dcb)
        for path in record.marked:
            cgroup.unmark(path)
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

    def _go(self, record: Record) -> Record:
        """Back to what is settled, from wherever a change to what is pending has got; the record without the latter."""
        assert record.settled is not None
        tree = record.settled.tree
        crossed = record.pending is not None and crosses(record.settled, record.pending)
        _, have = look(self.wire, self.dev, every_class=crossed)
        if crossed:
            self._run(back(have, record.before))
            _, have = look(self.wire, self.dev, every_class=True)
        self._run(plan(have, tree.objects, crossed))
        if wanted := tree.dcb or record.dcb:
            self._set_dcb(wanted)
        marked = self._mark(tree.marks(record.settled.policy), dict.fromkeys(record.marked, (0, 0)))
        return self._save(replace(record, pending=None, marked=marked, dcb=record.dcb if tree.dcb else None))

    def _set_dcb(self, want: Dcb) -> None:
        have = dcb.read(self.wire, self.dev)
        if have is None:
            raise DeviceError(f"{self.dev} has no DCB any more")
        dcb.write(self.wire, want, have)
        shown = dcb.read(self.wire, self.dev)
        if shown is None or not dcb.alike(shown, want):
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

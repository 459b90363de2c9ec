"""The control plane as the communicator sees it: join, who is lost, agreements, stalls, leaving."""

from __future__ import annotations

import functools
import json
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hrdma.control.join import Guest, Roster
from hrdma.control.link import resolve, url
from hrdma.control.loop import Dialog, Loop
from hrdma.control.meeting import meet
from hrdma.control.membership import Membership, Position
from hrdma.control.pending import Pending
from hrdma.control.trust import Admission
from hrdma.control.wire import job_key
from hrdma.errors import HrdmaError, PeerError
from hrdma.log import logger

if TYPE_CHECKING:
    from hrdma.config import Config
    from hrdma.world import World

__all__ = ["ControlPlane", "Member"]

CARD_LIMIT = 4096  # bytes of JSON
PAYLOAD_LIMIT = 4096  # bytes of JSON
WHERE_KEPT = 64  # communicators of which the coordinator's last word is kept
CLOSE_TIMEOUT = 1.0  # seconds for the control thread to end; above the linger of its sockets


class Member(NamedTuple):
    """A rank and what it told the others of itself."""

    rank: int
    card: dict[str, Any]


class ControlPlane:
    """A rank's membership in its job. Make it with `join`.

    Attributes
    ----------
    rank, size : int
        This rank, and the number of ranks that met.
    members : list of Member
        All ranks in order, those that are gone included.
    lost : dict of int to str
        Ranks that are gone, with the reason; ranks that left in good order too (``"rank 2 left"``).
    left : set of int
        Those that left in good order.

    Notes
    -----
    All methods may be called from any thread. One thread does the work and libzmq's own thread answers heartbeats: a
    rank whose interpreter is busy for long is not lost. A rank that was killed is noticed when its connection ends
    (milliseconds on one host), one that is frozen after `Config.heartbeat` seconds.

    Any rank may die, the coordinator too: then the lowest living rank takes over, and agreements go on. What is not
    survived: a rank that dies while the ranks are joining (all others raise `PeerError`), and messages that the
    coordinator has to pass on are delayed while the interpreter of the coordinator's process is held by other code.
    """

    def __init__(self, world: World, config: Config) -> None:
        self.rank = world.rank
        self.size = world.size
        self.members: list[Member] = []
        self.lost: dict[int, str] = {}
        self.left: set[int] = set()
        self._heartbeat = config.heartbeat
        self._leaving = False
        self._loop: Loop | None = None
        self._membership: Membership | None = None
        self._meeting_done = threading.Event()
        self._failure: Exception | None = None
        self._master = world
        self._lock = threading.Lock()
        self._pending: dict[str, Pending] = {}
        self._barriers = 0
        self._on_lost: Callable[[int, str], None] | None = None
        self._on_left: Callable[[int, str], None] | None = None
        self._on_verdict: Callable[[int, str], None] | None = None
        self._on_ask: Callable[[int], tuple[Any, ...] | None] | None = None
        self._early: list[Callable[[], None]] = []
        self._where: OrderedDict[int, dict[int, str]] = OrderedDict()
        self._expelled = ""
        self._gone = threading.Event()
        self._pid = os.getpid()

    @classmethod
    def join(cls, world: World, config: Config, card: dict[str, Any], *, deadline: float) -> ControlPlane:
        """Meets all other ranks and exchanges cards.

        Parameters
        ----------
        world : World
            Who we are and where rank 0 is. Without an address (`World.job`) the ranks meet through their launcher.
        config : Config
            `token`, `insecure` and `heartbeat` matter.
        card : dict
            What the others shall know of this rank; JSON of at most 4096 bytes.
        deadline : float
            On the clock of ``time.monotonic``.

        Raises
        ------
        TimeoutError
            Not all came in time; names those missing. The same text on all that came.
        ValueError
            Duplicate rank, differing world sizes, or a card that is too large.
        PeerError
            A rank was lost meanwhile, or it has another job token or version.
        HrdmaError
            Rank 0 cannot listen at its address.

        Notes
        -----
        Blocking; about 5 ms once all ranks are there. After an error nothing is left open.
        """
        if len(json.dumps(card)) > CARD_LIMIT:
            raise ValueError(f"card of {len(json.dumps(card))} bytes: at most {CARD_LIMIT} are allowed")
        world, config = meet(world, config, deadline=deadline)
        plane = cls(world, config)
        if world.size == 1:
            plane.members = [Member(0, card)]
            return plane
        loop = Loop(
            world.size,
            job_key(config.token),
            config.heartbeat,
            open_to_all=bool(config.token) or config.insecure,
            crashed=plane._crashed,
        )
        plane._loop = loop
        side = (Roster if world.rank == 0 else Guest)(loop, plane, world, card, deadline)
        _planes.add(plane)
        loop.start(side.begin)
        try:
            if not plane._meeting_done.wait(max(0.0, deadline - time.monotonic()) + CLOSE_TIMEOUT):
                plane._failure = TimeoutError(f"no answer from {world.master_addr}:{world.master_port} in time")
        except BaseException:
            plane.abandon()
            raise
        if plane._failure is not None:
            loop.post(loop.stop)
            loop.join(CLOSE_TIMEOUT)
            raise plane._failure
        return plane

    @property
    def epoch(self) -> int:
        """Number of changes of the membership known here: 0 after join, one more for each rank that is gone."""
        return len(self.lost)

    def start(
        self,
        on_lost: Callable[[int, str], None],
        on_verdict: Callable[[int, str], None],
        *,
        on_left: Callable[[int, str], None] | None = None,
        on_ask: Callable[[int], tuple[Any, ...] | None] | None = None,
    ) -> None:
        """Sets the callbacks; what happened before is delivered now. They run in the control thread and must be short.

        Parameters
        ----------
        on_lost : callable
            ``on_lost(rank, reason)``: a rank is gone without having left.
        on_verdict : callable
            ``on_verdict(comm_id, text)``: the members of a communicator called collectives that do not match. Ranks
            in the text are those of the communicator.
        on_left : callable, optional
            ``on_left(rank, reason)``: a rank left in good order; only later use of it is an error.
        on_ask : callable, optional
            ``on_ask(comm_id)`` gives ``(members, sequence, signature, text, recent)`` of the collective that this rank
            is in or was in last, or None. Without it the last report made here is given.
        """
        self._on_lost, self._on_verdict, self._on_left, self._on_ask = on_lost, on_verdict, on_left, on_ask
        if self._loop is not None:
            self._loop.post(self._deliver_early)

    def report_stall(
        self,
        comm_id: int,
        members: Sequence[int],
        sequence: int,
        signature: int,
        text: str,
        recent: Sequence[tuple[Any, ...]] = (),
    ) -> None:
        """Says that this rank has waited for long in a collective. Does not block; at most once a second, please.

        Parameters
        ----------
        members : sequence of int
            World ranks of the communicator's members, in its order.
        sequence : int
            Running number of the collective on the communicator.
        signature : int
            64 bits, equal on ranks whose calls match.
        text : str
            The call, such as ``"allreduce(float32, 1000, sum)"``.
        recent : sequence of (sequence, signature, text[, pairs])
            The calls started last: another rank may stall in one that is over here.
        """
        self._report(Position(tuple(members), sequence, signature, text, recent), comm_id, mismatch=False)

    def report_mismatch(
        self,
        comm_id: int,
        members: Sequence[int],
        sequence: int,
        signature: int,
        text: str,
        recent: Sequence[tuple[Any, ...]] = (),
    ) -> None:
        """As `report_stall`, but this rank has seen a wrong signature: the others are asked at once."""
        self._report(Position(tuple(members), sequence, signature, text, recent), comm_id, mismatch=True)

    def stalls(self, comm_id: int) -> dict[int, str]:
        """What the coordinator last said about who is where, by rank in the communicator; late ones first."""
        return dict(self._where.get(comm_id, {}))

    def agree(
        self, key: str, members: Sequence[int], payload: dict[str, Any], *, deadline: float
    ) -> dict[int, dict[str, Any]]:
        """Exchanges a payload among the living members: each of them gets the same result.

        Parameters
        ----------
        key : str
            Names the agreement; the same on all members, used once in a job.
        members : sequence of int
            World ranks that take part, this one included; the same list on all of them.
        payload : dict
            JSON of at most 4096 bytes.
        deadline : float
            On the clock of ``time.monotonic``.

        Returns
        -------
        dict of int to dict
            Payloads by rank. Ranks that were lost or left before the decision are left out.

        Raises
        ------
        TimeoutError
            A member did not come in time; the message names it. Others may still come to a result.
        ValueError
            Members differ between ranks, this rank is not among them, or the payload is too large.
        PeerError
            This rank was expelled.
        """
        decision = self._agreed(Pending(key, whole=False), members, payload, deadline)
        return {int(rank): item for rank, item in decision.items()}

    def exchange(self, key: str, payload: dict[str, Any], *, deadline: float) -> list[dict[str, Any]]:
        """What every rank of the job has to say, by rank; as `agree`, but all must come.

        Raises
        ------
        TimeoutError, ValueError
            As `agree`.
        PeerError
            A rank is gone. Others may have all, where they heard of it later.
        """
        present = self._agreed(Pending(key, whole=True), range(self.size), payload, deadline)
        if len(present) < self.size:
            raise self._incomplete(key, present)
        return [present[str(rank)] for rank in range(self.size)]

    def barrier(self, *, deadline: float) -> None:
        """Waits until all ranks have called it as often; raises as `exchange`."""
        with self._lock:
            self._barriers += 1
            key = f"barrier:{self._barriers}"
        self.exchange(key, {}, deadline=deadline)

    def watch(self, descriptor: int, call: Callable[[], None]) -> None:
        """Runs a call in the control thread whenever this descriptor is readable, until `unwatch`."""
        if self._loop is not None:
            self._loop.post(functools.partial(self._loop.watch, descriptor, call))

    def unwatch(self, descriptor: int) -> None:
        """On return it may be closed: the control thread does not look at it any more."""
        if self._loop is not None and self._pid == os.getpid():
            self._loop.forget(descriptor, CLOSE_TIMEOUT)

    def leave(self, *, deadline: float) -> None:
        """Leaves in good order: the others are told that this rank is not lost but done.

        A rank that coordinates waits up to a second for the others to leave as well, then hands over. At the deadline
        the connections are closed whatever was said. May be called twice.
        """
        loop, membership = self._loop, self._membership
        if loop is None or membership is None or self._pid != os.getpid():
            return
        self._leaving = True
        if loop.post(lambda: membership.leave(deadline)):
            self._gone.wait(max(0.0, deadline - time.monotonic()))
        self.abandon()

    def abandon(self) -> None:
        """Closes the connections without a word; the others count this rank as lost unless it left before.

        In a forked child it closes the child's copies only: the parent goes on.
        """
        loop = self._loop
        if loop is None:
            return
        if self._pid != os.getpid():
            loop.drop()
            return
        loop.post(loop.stop)
        loop.join(CLOSE_TIMEOUT)
        _planes.discard(self)

    # From the control thread

    def joined(self, table: dict[str, Any], dialog: Dialog | None, early: dict[int, Admission]) -> None:
        """The ranks have met (called by the join phase)."""
        loop = self._loop
        assert loop is not None
        _, master = resolve(self._master.master_addr, self._master.master_port)
        endpoints = [url(entry["host"] or master, entry["port"]) for entry in table["members"]]
        self.members = [Member(rank, entry["card"]) for rank, entry in enumerate(table["members"])]
        self._membership = Membership(loop, self, self.rank, endpoints, str(table["job"]), dialog, early)
        self._meeting_done.set()

    def failed(self, error: Exception) -> None:
        """The ranks cannot meet (called by the join phase)."""
        self._failure = error
        self._meeting_done.set()

    def lost_rank(self, rank: int, reason: str, left: bool) -> None:
        if left:
            self.left.add(rank)
        self.lost[rank] = reason
        self._call(lambda: self._on_left if left else self._on_lost, rank, reason)
        self.counted()
        # Last: where the log goes to a disk that stalls, those who wait for the rank have heard of it.
        logger.log(10 if left or self._leaving else 30, "control: %s", reason)

    def counted(self) -> None:
        """Ends calls that need all where one is gone: those who are left may be long in telling that they heard of it.

        Only where this rank knows another that counts it in: it may be the one that was expelled, and hears so.
        """
        membership = self._membership
        if self.lost and membership is not None and not self._gone.is_set() and membership.accompanied():
            for pending in list(self._pending.values()):
                if pending.whole:
                    pending.fail(self._incomplete(pending.key, {}))

    def mismatch(self, comm: int, text: str) -> None:
        self._call(lambda: self._on_verdict, comm, text)

    def located(self, comm: int, where: dict[int, str]) -> None:
        self._where[comm] = where
        self._where.move_to_end(comm)
        while len(self._where) > WHERE_KEPT:
            self._where.popitem(last=False)

    def decided(self, key: str, decision: dict[str, Any]) -> None:
        pending = self._pending.get(key)
        if pending is not None:
            pending.decide(decision)

    def missing(self, key: str, ranks: list[int]) -> None:
        pending = self._pending.get(key)
        if pending is not None:
            pending.missing = ranks

    def position(self, comm: int) -> Position | None:
        if self._on_ask is None:
            return None
        try:
            found = self._on_ask(comm)
        except Exception:
            logger.exception("control: the callback on_ask failed")
            return None
        return None if found is None else Position(tuple(found[0]), *found[1:])

    def expelled(self, reason: str) -> None:
        self._expelled = f"this rank was expelled: {reason}"

    def departed(self) -> None:
        self._gone.set()
        for pending in list(self._pending.values()):
            pending.fail(self._closed())

    # Helpers

    def _agreed(
        self, pending: Pending, members: Sequence[int], payload: dict[str, Any], deadline: float
    ) -> dict[str, Any]:
        """Contributes and waits: payloads by rank, as text."""
        self._check()
        key = pending.key
        if self.rank not in members:
            raise ValueError(f"rank {self.rank} is not among the members {list(members)} of agreement {key!r}")
        if len(json.dumps(payload)) > PAYLOAD_LIMIT:
            raise ValueError(f"payload of {len(json.dumps(payload))} bytes: at most {PAYLOAD_LIMIT} are allowed")
        loop, membership = self._loop, self._membership
        if loop is None or membership is None:
            return {str(self.rank): payload}
        with self._lock:
            if key in self._pending:
                raise ValueError(f"agreement {key!r} is under way in another thread")
            self._pending[key] = pending
        try:
            agreed = loop.post(lambda: membership.agree(key, list(members), payload)) and loop.post(self.counted)
            if not agreed or self._gone.is_set():
                raise self._closed()
            decision = pending.wait(deadline, lambda: loop.post(lambda: membership.who(key)))
        finally:
            with self._lock:
                del self._pending[key]
            if pending.decision is None:
                loop.post(lambda: membership.withdraw(key))
        if "error" in decision:
            raise ValueError(decision["error"])
        return decision["result"]

    def _incomplete(self, key: str, present: dict[str, Any]) -> PeerError:
        """Blames who was lost first: others may be gone because of it."""
        ranks = (*list(self.lost), *range(self.size))
        rank = next(rank for rank in ranks if str(rank) not in present)
        reason = self.lost.get(rank, f"rank {rank} is gone")
        operation = key.partition(":")[0]
        return PeerError(f"{operation}: {reason}", rank=rank, operation=operation, phase="match")

    def _crashed(self, error: Exception) -> None:
        """The control thread ended by a bug: whoever waits is told, and no other rank can be relied on any more."""
        if not self._meeting_done.is_set():
            self.failed(HrdmaError(f"the control thread failed: {error!r}"))
            return
        self._gone.set()
        for rank in range(self.size):
            if rank != self.rank and rank not in self.lost:
                self.lost_rank(rank, f"the control thread of this rank failed: {error!r}", left=False)
        self.departed()

    def _report(self, position: Position, comm: int, *, mismatch: bool) -> None:
        loop, membership = self._loop, self._membership
        if loop is not None and membership is not None and self._pid == os.getpid():
            loop.post(lambda: membership.report(comm, position, mismatch=mismatch))

    def _call(self, which: Callable[[], Callable[[int, str], None] | None], number: int, text: str) -> None:
        """Calls a callback, or keeps the call until there are callbacks."""

        def call() -> None:
            callback = which()
            if callback is not None:
                try:
                    callback(number, text)
                except Exception:
                    logger.exception("control: a callback failed")

        if self._on_lost is None:
            self._early.append(call)
        else:
            self._deliver_early()
            call()

    def _deliver_early(self) -> None:
        early, self._early = self._early, []
        for call in early:
            call()

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise HrdmaError("the control plane does not work in a forked child: call hrdma.init() in it, or spawn")
        if self._gone.is_set():
            raise self._closed()

    def _closed(self) -> Exception:
        if self._expelled:
            return PeerError(self._expelled, rank=self.rank, phase="match")
        return HrdmaError("the control plane is closed")


_planes: weakref.WeakSet[ControlPlane] = weakref.WeakSet()


def _after_fork() -> None:
    """A child that kept copies of the sockets would keep a killed parent's connections open."""
    for plane in list(_planes):
        plane.abandon()


os.register_at_fork(after_in_child=_after_fork)

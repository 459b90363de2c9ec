"""A rank as a member: it follows the coordinator, becomes it when its turn comes, and learns of every loss.

Ranks form a star around the coordinator, so a job of n ranks has n - 1 connections. Each rank listens all the same.
When the coordinator's connection ends, its members call the lowest rank that they hold for living; a rank that is
called before it has noticed anything itself keeps the caller waiting. If it then hears from the old coordinator that
the caller was lost, it expels the caller; if the old coordinator goes, it is the new one. Nobody is counted as lost
because its interpreter is silent: only the end of a connection, a refused call, or missing heartbeats count.

A coordinator on which all others have hung up may itself be the one that was away (stopped, or cut off), while they
went on without it. It asks each of them before it decides anything alone: who lives says that it is expelled. As long as
it holds some for members, these confirm what it is about to decide (`hrdma.control.coordinator`).
"""

from __future__ import annotations

import functools
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from hrdma.control.coordinator import Coordinator, Decisions
from hrdma.control.loop import Dialog, Loop
from hrdma.control.trust import Admission, TokenError
from hrdma.control.wire import Kind, ProtocolError
from hrdma.log import logger

__all__ = ["Events", "Membership", "Position"]

PROBE_AFTER = 0.1  # seconds until a new coordinator looks after those who have not come
ASK_SECONDS = 1.0  # how long those who hung up have to contradict
LEAVE_GRACE = 1.0  # seconds that a leaving coordinator waits for the others to leave as well
POSITIONS = 64  # communicators whose last position is remembered
LINGER = 0.5  # seconds that last messages have to leave


class Position(NamedTuple):
    """Where this rank is in a communicator."""

    members: tuple[int, ...]
    sequence: int
    signature: int
    text: str
    recent: Sequence[tuple[Any, ...]] = ()  # (sequence, signature, text[, pairs]) of the calls started last


class Events(Protocol):
    """What the membership tells its owner, from the control thread."""

    def lost_rank(self, rank: int, reason: str, left: bool) -> None: ...
    def counted(self) -> None: ...
    def mismatch(self, comm: int, text: str) -> None: ...
    def located(self, comm: int, where: dict[int, str]) -> None: ...
    def decided(self, key: str, decision: dict[str, Any]) -> None: ...
    def missing(self, key: str, ranks: list[int]) -> None: ...
    def position(self, comm: int) -> Position | None: ...
    def expelled(self, reason: str) -> None: ...
    def departed(self) -> None: ...


class Membership:
    """The phase after joining. Methods run in the control thread."""

    def __init__(
        self,
        loop: Loop,
        events: Events,
        rank: int,
        endpoints: list[str],
        job: str,
        dialog: Dialog | None,
        early: dict[int, Admission],
    ) -> None:
        self._loop = loop
        self._events = events
        self.rank = rank
        self.size = len(endpoints)
        self._endpoints = endpoints
        self._job = job
        self.lost: dict[int, str] = {}
        self.left: set[int] = set()
        self.chief = 0
        self._dialog = dialog
        self._connected = dialog is not None
        self._coordinator: Coordinator | None = None
        self._probes: dict[int, Dialog] = {}
        self._questions: dict[int, Dialog] = {}
        self._held: dict[int, Admission] = {}
        self._probed_by: dict[int, bytes] = {}
        self._local: deque[Callable[[], None]] = deque()
        self._decisions = Decisions(loop.limit // 4)
        self._agrees: dict[str, dict[str, Any]] = {}
        self._positions: OrderedDict[int, Position] = OrderedDict()
        self._leaving = False
        self._leave_by = 0.0
        self._over = False
        loop.phase = self
        if rank == 0:
            self._coordinate(())
        for peer in early.values():
            if loop.listener is not None and peer.descriptor in loop.listener.descriptors:
                self.admitted(peer)

    # What the owner asks for

    def report(self, comm: int, position: Position, *, mismatch: bool) -> None:
        self._positions[comm] = position
        self._positions.move_to_end(comm)
        while len(self._positions) > POSITIONS:
            self._positions.popitem(last=False)
        self._up(Kind.STALL, self._stall(comm, position, mismatch=mismatch))

    def agree(self, key: str, members: list[int], payload: dict[str, Any]) -> None:
        if key in self._decisions:
            self._events.decided(key, self._decisions[key])
            return
        self._agrees[key] = {"members": members, "payload": payload}
        self._up(Kind.AGREE, {"key": key, **self._agrees[key]})

    def withdraw(self, key: str) -> None:
        self._agrees.pop(key, None)

    def who(self, key: str) -> None:
        self._up(Kind.WHO, {"key": key})

    def leave(self, deadline: float) -> None:
        if not self._leaving and not self._over:
            self._leaving = True
            self._leave_by = min(deadline, time.monotonic() + LEAVE_GRACE)
            self._loop.at("leave", deadline, self._depart)
            self._go_on_leaving()

    def accompanied(self) -> bool:
        """Whether another rank, as far as is known here, counts this one among the living."""
        if self._over:
            return False
        if self._coordinator is None:
            return self._connected
        alone = self._coordinator.awaited | self._coordinator.asked | {self.rank}
        return any(rank not in alone for rank in self._coordinator.living())

    # Phase of the loop

    def admitted(self, peer: Admission) -> None:
        gate, listener = self._loop.gate, self._loop.listener
        assert gate is not None and listener is not None
        purpose, job, rank = peer.hello.get("purpose"), peer.hello.get("job"), peer.rank
        if purpose == "join" and (rank in self.left or self._leaving):
            gate.refuse(peer.identity, "the ranks of the job before are still leaving", kind="again")
        elif purpose not in ("takeover", "probe") or job != self._job or not 0 <= rank < self.size or rank == self.rank:
            gate.note(peer.address, f"it claims to be rank {rank}, but this job has all its ranks")
            gate.refuse(
                peer.identity,
                f"rank {rank} was refused: all {self.size} ranks of the job that runs here have arrived already",
                kind="value",
            )
        elif rank in self.lost:
            self._expel(peer.identity, rank)
        elif purpose == "takeover" and listener.identity_of(rank) is not None:
            gate.note(peer.address, f"it claims to be rank {rank}, which is connected")
            gate.refuse(peer.identity, f"rank {rank} is connected already", kind="value")
        elif purpose == "probe":
            self._probed_by[rank] = peer.identity
        elif self._coordinator is None:
            self._hold(peer)
        else:
            self._take(peer)

    def heard(self, rank: int, kind: Kind, body: dict[str, Any]) -> None:
        if self._coordinator is not None:
            self._coordinator.receive(rank, kind, body, time.monotonic())
            self._after()

    def hung_up(self, ranks: list[int]) -> None:
        for rank in ranks:
            self._held.pop(rank, None)
        gone = [rank for rank in ranks if rank not in self.lost]
        if self._coordinator is not None and gone:
            if set(self._coordinator.living()) <= {self.rank, *gone}:
                self._ask(gone)
            for rank in gone:
                self._lose(rank)

    def answered(self, dialog: Dialog, kind: Kind, body: dict[str, Any]) -> None:
        if kind is Kind.ABORT:
            # Whoever answers there is not of this job any more.
            self._loop.hang_up(dialog)
            self.ended(dialog)
            return
        if dialog is not self._dialog and kind is not Kind.EXPELLED:
            return
        try:
            self._down(kind, body)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            logger.warning("control: dropped a %s of the coordinator, rank %d: %s", kind.name, self.chief, error)

    def refused(self, dialog: Dialog, error: TokenError | ProtocolError) -> None:
        logger.warning("control: rank %d cannot coordinate: %s", dialog.rank, error)
        self._loop.hang_up(dialog)
        self.ended(dialog)

    def ended(self, dialog: Dialog) -> None:
        if self._probes.get(dialog.rank) is dialog:
            del self._probes[dialog.rank]
            self._lose(dialog.rank)
        elif self._questions.get(dialog.rank) is dialog:
            self._unanswered(dialog.rank)
        elif dialog is self._dialog:
            self._dialog = None
            self._connected = False
            self._mark(self.chief, self._silence(self.chief), left=False)
            self._take_over()

    # As a member

    def _up(self, kind: Kind, body: dict[str, Any]) -> None:
        """To the coordinator. While there is none, nothing is lost: agreements and leaving are brought to the next."""
        if self._coordinator is not None:
            self._coordinator.receive(self.rank, kind, body, time.monotonic())
            self._after()
        elif self._connected and self._dialog is not None:
            self._loop.say(self._dialog, kind, body)

    def _down(self, kind: Kind, body: dict[str, Any]) -> None:
        """From the coordinator, which may be this rank itself."""
        if kind is Kind.LOST:
            self._mark(int(body["rank"]), str(body["reason"]), left=body["left"] is True)
            self._events.counted()  # what a new coordinator knows to be decided came before this
            if int(body["rank"]) == self.chief and self._coordinator is None:
                self._forget_dialog()
                self._take_over()
        elif kind is Kind.PROPOSE:
            self._up(Kind.CONFIRM, {"key": str(body["key"]), "turn": int(body["turn"])})
        elif kind is Kind.DECIDED:
            key = str(body.pop("key"))
            self._decisions.add(key, body)
            self._agrees.pop(key, None)
            self._events.decided(key, self._decisions[key])
        elif kind is Kind.MISSING:
            self._events.missing(str(body["key"]), [int(rank) for rank in body["ranks"]])
        elif kind is Kind.VERDICT:
            self._events.mismatch(int(body["comm"]), str(body["text"]))
        elif kind is Kind.WHERE:
            self._events.located(int(body["comm"]), {int(rank): str(text) for rank, text in body["ranks"].items()})
        elif kind is Kind.ASK:
            comm = int(body["comm"])
            position = self._events.position(comm) or self._positions.get(comm)
            if position is not None:
                self._up(Kind.STALL, {**self._stall(comm, position, mismatch=False), "asked": True})
        elif kind is Kind.BYE:
            self._depart()
        elif kind is Kind.WELCOME:
            self._welcomed()
        elif kind is Kind.EXPELLED:
            self._expelled(str(body["text"]))

    def _stall(self, comm: int, position: Position, *, mismatch: bool) -> dict[str, Any]:
        return {
            "comm": comm,
            "members": list(position.members),
            "sequence": position.sequence,
            "signature": position.signature,
            "text": position.text,
            "recent": [call[:3] for call in position.recent],
            "pairs": {str(call[0]): call[3] for call in position.recent if any(call[3:])},
            "mismatch": mismatch,
        }

    def _mark(self, rank: int, reason: str, *, left: bool) -> None:
        """This rank learns that another is gone."""
        if rank in self.lost or rank == self.rank:
            return
        self.lost[rank] = reason
        if left:
            self.left.add(rank)
        held, prober = self._held.pop(rank, None), self._probed_by.pop(rank, None)
        for identity in (None if held is None else held.identity, prober):
            if identity is not None:
                self._expel(identity, rank)
        self._events.lost_rank(rank, reason, left)

    def _expelled(self, text: str) -> None:
        self._connected, self._coordinator = False, None
        for rank in range(self.size):
            self._mark(rank, f"this rank was expelled: {text}", left=False)
        self._events.expelled(text)
        self._depart()

    # A change of coordinator

    def _take_over(self) -> None:
        """The coordinator is gone: call the next one, or be it."""
        if self._over:
            return
        self.chief = min(rank for rank in range(self.size) if rank not in self.lost)
        if self.chief == self.rank:
            self._coordinate(rank for rank in range(self.size) if rank not in self.lost and rank != self.rank)
            return
        hello = {"purpose": "takeover", "rank": self.rank, "job": self._job}
        state = {
            "lost": {str(rank): reason for rank, reason in self.lost.items()},
            "left": sorted(self.left),
            "decisions": self._decisions.dump(),
            "agrees": self._agrees,
        }
        self._dialog = self._loop.dial(self.chief, self._endpoints[self.chief], hello, state)

    def _welcomed(self) -> None:
        """The new coordinator has our state as it was when we called; send what came since."""
        self._connected = True
        for key, body in self._agrees.items():
            self._up(Kind.AGREE, {"key": key, **body})
        self._go_on_leaving()

    def _forget_dialog(self) -> None:
        if self._dialog is not None:
            self._loop.hang_up(self._dialog)
        self._dialog = None
        self._connected = False

    def _hold(self, peer: Admission) -> None:
        listener = self._loop.listener
        assert listener is not None
        listener.bind_rank(peer.identity, peer.descriptor, peer.rank)
        self._held[peer.rank] = peer

    def _expel(self, identity: bytes, rank: int) -> None:
        listener = self._loop.listener
        assert listener is not None
        text = f"rank {self.rank} holds it for gone: {self.lost[rank]}"
        listener.send(identity, self._loop.frame(Kind.EXPELLED, {"text": text}))
        listener.forget(identity)

    # As the coordinator

    def _coordinate(self, awaited: Any) -> None:
        self.chief = self.rank
        # The coordinator keeps its own record of losses: this rank learns of them by a message, as the others do.
        self._coordinator = Coordinator(
            self.rank,
            self.size,
            self._send,
            lost=dict(self.lost),
            left=set(self.left),
            decisions=self._decisions,
            awaited=awaited,
            patience=self._loop.heartbeat / 2,
        )
        for key, body in self._agrees.items():
            self._coordinator.receive(self.rank, Kind.AGREE, {"key": key, **body}, time.monotonic())
        for peer in list(self._held.values()):
            self._take(peer)
        self._held.clear()
        if self._coordinator.awaited:
            self._loop.at("probe", time.monotonic() + PROBE_AFTER, self._probe)
        self._after()
        self._go_on_leaving()

    def _take(self, peer: Admission) -> None:
        """A member has come to us as its coordinator."""
        listener, coordinator = self._loop.listener, self._coordinator
        assert listener is not None and coordinator is not None
        listener.bind_rank(peer.identity, peer.descriptor, peer.rank)
        probe = self._probes.pop(peer.rank, None)
        if probe is not None:
            self._loop.hang_up(probe)
        self._send(peer.rank, Kind.WELCOME, {})
        try:
            coordinator.bring(peer.rank, peer.private)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            logger.warning("control: rank %d brought a malformed state: %s", peer.rank, error)
            coordinator.awaited.discard(peer.rank)
        self._after()
        self._events.counted()

    def _send(self, rank: int, kind: Kind, body: dict[str, Any]) -> None:
        if rank == self.rank:
            self._local.append(functools.partial(self._down, kind, dict(body)))
            return
        listener = self._loop.listener
        identity = None if listener is None else listener.identity_of(rank)
        if listener is not None and identity is not None:
            listener.send(identity, self._loop.frame(kind, body))

    def _lose(self, rank: int) -> None:
        if self._coordinator is not None:
            self._coordinator.lose(rank, self._silence(rank))
            self._after()

    def _after(self) -> None:
        """After each event at the coordinator: what it told this rank itself, its timer, and leaving."""
        while self._local:
            self._local.popleft()()
        if self._coordinator is None or self._over:
            return
        listener = self._loop.listener
        for rank, reason in list(self._coordinator.lost.items()):
            self._mark(rank, reason, left=rank in self._coordinator.left)
            identity = None if listener is None else listener.identity_of(rank)
            if identity is not None and rank not in self.left:
                # Another member was told by the old coordinator that this one is lost.
                self._expel(identity, rank)
        when = self._coordinator.next_time()
        if when is not None:
            self._loop.at("verdict", when, self._tick)
        if self._leaving:
            self._go_on_leaving()

    def _tick(self) -> None:
        if self._coordinator is not None:
            self._coordinator.tick(time.monotonic())
            self._after()

    def _probe(self) -> None:
        """Calls those who have not come: the connection tells whether they are busy or gone."""
        if self._coordinator is not None:
            hello = {"purpose": "probe", "rank": self.rank, "job": self._job}
            for rank in sorted(self._coordinator.awaited - self._probes.keys()):
                self._probes[rank] = self._loop.dial(rank, self._endpoints[rank], hello, {})

    def _ask(self, gone: list[int]) -> None:
        """Nobody but this rank is left: is it so, or have they expelled it?"""
        assert self._coordinator is not None
        hello = {"purpose": "probe", "rank": self.rank, "job": self._job}
        self._coordinator.asked = {*gone, *(rank for rank in self.lost if rank not in self.left)}
        for rank in sorted(self._coordinator.asked):
            self._questions[rank] = self._loop.dial(rank, self._endpoints[rank], hello, {})
            self._loop.at(f"ask {rank}", time.monotonic() + ASK_SECONDS, functools.partial(self._unanswered, rank))

    def _unanswered(self, rank: int) -> None:
        self._loop.hang_up(self._questions.pop(rank))
        self._loop.cancel(f"ask {rank}")
        if self._coordinator is not None:
            self._coordinator.silent(rank)
            self._after()

    def _silence(self, rank: int) -> str:
        return f"rank {rank} hung up or was silent for {self._loop.heartbeat:g} s"

    # Leaving

    def _go_on_leaving(self) -> None:
        """A member says so to the coordinator. A coordinator lets the others leave first, else hands over."""
        if not self._leaving or self._over:
            return
        if self._coordinator is None:
            self._up(Kind.LEAVE, {})
            return
        others = [rank for rank in self._coordinator.living() if rank != self.rank]
        if not others:
            self._depart()
        elif time.monotonic() < self._leave_by:
            self._loop.at("grace", self._leave_by, self._go_on_leaving)
        else:
            for rank in others:
                self._send(rank, Kind.LOST, {"rank": self.rank, "reason": f"rank {self.rank} left", "left": True})
            self._depart()

    def _depart(self) -> None:
        if not self._over:
            self._over = True
            self._events.departed()
            self._loop.stop(LINGER)

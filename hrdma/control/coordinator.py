"""The coordinator's decisions: who is gone, what was agreed, whose calls do not match. No sockets; the clock is handed in.

Rank 0 coordinates first; when it is gone, the lowest living rank does. What makes the change safe: every member keeps
the decisions that it was told and its own open contributions, and brings both to the new coordinator, which decides
nothing new until each living member has come. A decision that reached any survivor is therefore the decision of all.
One that reached none may come out differently, and nobody can tell.

A coordinator may itself have been away (stopped, or cut off) while the others went on without it, and wake up to what
they had sent before. So it decides only what all living members of the agreement have just confirmed: whoever went on has
hung up and confirms nothing. Confirmations count for less time than it takes members to lose a coordinator that is silent;
where they come later than that it asks again, and gives the next turn more time.
"""

from __future__ import annotations

import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from hrdma.control.stalls import RECENT, Report, Stalls, read_pairs
from hrdma.control.wire import Kind
from hrdma.log import logger

__all__ = ["Coordinator", "Decisions", "read_ranks"]

Send = Callable[[int, Kind, "dict[str, Any]"], None]


def read_ranks(value: Any, size: int) -> tuple[int, ...]:
    """Checks a list of ranks from the wire; ValueError when it is anything else."""
    if not isinstance(value, list) or not all(type(rank) is int and 0 <= rank < size for rank in value):
        raise ValueError("not a list of ranks")
    if len(set(value)) < len(value) or not value:
        raise ValueError("ranks are missing or twice in the list")
    return tuple(value)


class Decisions:
    """Results of agreements by key, oldest forgotten first when their text grows above `nbytes`."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._used = 0
        self._kept: OrderedDict[str, tuple[dict[str, Any], int]] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._kept

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self._kept[key][0]

    def add(self, key: str, decision: dict[str, Any]) -> None:
        """Keeps a decision; the first one for a key stands."""
        if key in self._kept:
            return
        cost = len(key) + len(json.dumps(decision))
        self._kept[key] = (decision, cost)
        self._used += cost
        while self._used > self._nbytes and len(self._kept) > 1:
            self._used -= self._kept.popitem(last=False)[1][1]

    def dump(self) -> dict[str, Any]:
        return {key: decision for key, (decision, _) in self._kept.items()}


class _Agreement:
    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.payloads: dict[int, Any] = {}
        self.turn = 0  # of asking for confirmations; 0: not yet
        self.since = -math.inf
        self.confirmed: set[int] = set()


class Coordinator:
    """Decides for all; `send` puts a message to a rank, its own included.

    Parameters
    ----------
    rank, size : int
        The rank that coordinates, and how many there were at the start.
    lost : dict
        Ranks that are gone, with the reason.
    left : set
        Those among them that left in good order.
    awaited : iterable of int
        Ranks that have not brought their state yet.
    patience : float
        Seconds for which a confirmation counts: half of what it takes to lose a rank that is silent.
    clock : callable
        Gives the time in seconds.

    Attributes
    ----------
    asked : set of int
        Lost ranks that are asked whether it is not rather this one that is lost. Meanwhile nothing is decided.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        send: Send,
        *,
        lost: dict[int, str],
        left: set[int],
        decisions: Decisions,
        awaited: Iterable[int] = (),
        patience: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.size = size
        self.lost = lost
        self.left = left
        self.awaited = set(awaited)
        self.asked: set[int] = set()
        self._decisions = decisions
        self._send = send
        self._patience = patience
        self._clock = clock
        self._stalls = Stalls()
        self._agreements: dict[str, _Agreement] = {}

    def living(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.lost]

    def lose(self, rank: int, reason: str, *, left: bool = False) -> None:
        """A rank is gone: everybody is told, and what waited for it goes on."""
        if rank in self.lost:
            return
        self.lost[rank] = reason
        if left:
            self.left.add(rank)
        self.awaited.discard(rank)
        for other in self.living():
            self._send(other, Kind.LOST, {"rank": rank, "reason": reason, "left": left})
        self._settle()

    def silent(self, rank: int) -> None:
        """A rank that was asked does not contradict."""
        self.asked.discard(rank)
        self._settle()

    def bring(self, rank: int, state: dict[str, Any]) -> None:
        """A member brings what it knows, after a change of coordinator."""
        left = state.get("left", [])
        for text, reason in state.get("lost", {}).items():
            if text.isdigit() and int(text) < self.size and int(text) not in (rank, self.rank):
                self.lose(int(text), str(reason), left=int(text) in left)
        for key, decision in state.get("decisions", {}).items():
            self._decisions.add(key, decision)
        for key, body in state.get("agrees", {}).items():
            self._agree(rank, {"key": key, **body})
        for gone, reason in self.lost.items():
            self._send(rank, Kind.LOST, {"rank": gone, "reason": reason, "left": gone in self.left})
        self.awaited.discard(rank)
        self._settle()

    def receive(self, rank: int, kind: Kind, body: dict[str, Any], now: float) -> None:
        """A message of a living member. One that makes no sense is dropped and logged."""
        if rank in self.lost:
            return
        try:
            if kind is Kind.AGREE:
                self._agree(rank, body)
            elif kind is Kind.WHO:
                self._who(rank, str(body["key"]))
            elif kind is Kind.LEAVE:
                self._send(rank, Kind.BYE, {})
                self.lose(rank, f"rank {rank} left", left=True)
            elif kind is Kind.CONFIRM:
                self._confirm(rank, str(body["key"]), int(body["turn"]))
            elif kind is Kind.STALL:
                self._stall(rank, body, now)
            else:
                raise ValueError("not for a coordinator")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            logger.warning("control: dropped a %s of rank %d: %s", kind.name, rank, error)

    def next_time(self) -> float | None:
        """When `tick` should be called."""
        return self._stalls.next_time()

    def tick(self, now: float) -> None:
        for verdict in self._stalls.due(now, self.lost):
            for rank in verdict.members:
                if rank not in self.lost:
                    self._send(rank, Kind.VERDICT, {"comm": verdict.comm, "text": verdict.text})

    def _agree(self, rank: int, body: dict[str, Any]) -> None:
        key, members = str(body["key"]), read_ranks(body["members"], self.size)
        if key in self._decisions:
            self._send(rank, Kind.DECIDED, {"key": key, **self._decisions[key]})
            return
        agreement = self._agreements.setdefault(key, _Agreement(members))
        if agreement.members != members or rank not in members:
            text = f"agreement {key!r}: rank {rank} names ranks {list(members)}, another {list(agreement.members)}"
            agreement.members = tuple(sorted({*agreement.members, *members, rank}))
            self._decide(key, {"error": text})
            return
        agreement.payloads[rank] = body["payload"]
        self._settle()

    def _settle(self) -> None:
        """Decides what can be decided."""
        if self.awaited or self.asked:
            return
        for key, agreement in list(self._agreements.items()):
            if key in self._decisions:
                self._decide(key, self._decisions[key])
            elif not self._missing(agreement):
                self._propose(key, agreement)

    def _decide(self, key: str, decision: dict[str, Any]) -> None:
        agreement = self._agreements.pop(key)
        self._decisions.add(key, decision)
        for rank in agreement.members:
            if rank not in self.lost:
                self._send(rank, Kind.DECIDED, {"key": key, **decision})

    def _missing(self, agreement: _Agreement) -> list[int]:
        return [rank for rank in agreement.members if rank not in agreement.payloads and rank not in self.lost]

    def _unconfirmed(self, agreement: _Agreement) -> list[int]:
        mine = {self.rank, *agreement.confirmed, *self.lost}
        return [rank for rank in agreement.members if rank not in mine]

    def _propose(self, key: str, agreement: _Agreement) -> None:
        """All have come. Those who still are members say so, and then it is decided."""
        # each turn has more time, for a machine on which all answers are late
        late = self._clock() > agreement.since + self._patience * agreement.turn
        if late and (not agreement.turn or (agreement.confirmed and not self._unconfirmed(agreement))):
            agreement.turn += 1
            agreement.confirmed.clear()
            agreement.since = self._clock()
            for rank in self._unconfirmed(agreement):
                self._send(rank, Kind.PROPOSE, {"key": key, "turn": agreement.turn})
        if not self._unconfirmed(agreement):
            payloads = {str(rank): item for rank, item in agreement.payloads.items() if rank not in self.lost}
            self._decide(key, {"result": payloads})

    def _confirm(self, rank: int, key: str, turn: int) -> None:
        agreement = self._agreements.get(key)
        if agreement is not None and turn == agreement.turn:
            agreement.confirmed.add(rank)
            self._settle()

    def _who(self, rank: int, key: str) -> None:
        agreement = self._agreements.get(key)
        missing = [] if agreement is None else self._missing(agreement) or self._unconfirmed(agreement)
        self._send(rank, Kind.MISSING, {"key": key, "ranks": missing or sorted(self.awaited)})

    def _stall(self, rank: int, body: dict[str, Any], now: float) -> None:
        comm, members = int(body["comm"]), read_ranks(body["members"], self.size)
        waits = body.get("asked") is not True
        pairs = {int(number): read_pairs(text) for number, text in body.get("pairs", {}).items()}

        def read(sequence: Any, signature: Any, text: Any, waits: bool = True) -> Report:
            return Report(int(sequence), int(signature), str(text)[:500], now, waits, pairs.get(int(sequence)))

        report = read(body["sequence"], body["signature"], body["text"], waits)
        recent = [read(*call) for call in body.get("recent", ())][-RECENT:]
        if rank not in members:
            raise ValueError(f"it is not a member of {list(members)}")
        verdict = self._stalls.verdict(comm)
        if verdict is not None:
            self._send(rank, Kind.VERDICT, {"comm": comm, "text": verdict.text})
            return
        for other in self._stalls.add(comm, members, rank, report, recent, mismatch=body.get("mismatch") is True):
            if other not in self.lost:
                self._send(other, Kind.ASK, {"comm": comm})
        where = self._stalls.where(comm, report.sequence, now)
        self._send(rank, Kind.WHERE, {"comm": comm, "ranks": {str(place): text for place, text in where.items()}})
        self.tick(now)

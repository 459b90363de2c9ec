"""Who waits where, and whether their calls match: what the coordinator makes of the reports of stalled ranks.

A rank that waits long in a collective reports (communicator, sequence number, signature, text). Two reports of one
communicator with the same number and different signatures are a mismatch, and so are two alltoalls of which one sends
nothing where the other expects something; different numbers alone are not, a rank may be slow. Who only sends in a collective may be several calls further when another stalls in it, so a report also tells
which calls came before. Who has been through with another call, and calls nothing more, stalls nowhere: therefore those of whom a
stalled rank's call is not known are asked, each second. A rank whose core has seen a wrong signature reports that as well, and then the others are asked where they
are. A verdict waits a moment so that it can name everybody, but never longer than `PATIENCE`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["RECENT", "Report", "Stalls", "Verdict", "read_pairs", "verdict_text"]

CONFLICT_PATIENCE = 0.3  # seconds that a found conflict waits for the remaining ranks
ASK_AGAIN = 0.9  # seconds after which those who are not there are asked again; a stalled rank reports every second
PATIENCE = 1.0  # the same where a core saw a mismatch but no two reports show it yet
FRESH = 2.5  # a stalled rank reports every second; an older report says nothing about where it is now
KEEP = 256  # communicators and verdicts remembered
RECENT = 8  # calls that a rank tells of
SEQUENCES = 32  # operations of a communicator remembered
SHOWN = 32  # ranks described to a stalled one
SHOWN_PAIRS = 8


class Pairs(NamedTuple):
    """To whom an alltoall sends something, and from whom it takes something: a bit for each rank of the communicator."""

    sends: int
    takes: int


def read_pairs(text: str) -> Pairs:
    """Of a report: two hexadecimal numbers with a colon between; ValueError when it is anything else."""
    sends, takes = str(text).split(":")
    return Pairs(int(sends, 16), int(takes, 16))


class Report(NamedTuple):
    """Where one rank said it was; where it was last, if it did not say so by itself."""

    sequence: int
    signature: int
    text: str
    when: float
    waits: bool = True
    pairs: Pairs | None = None


class Verdict(NamedTuple):
    """A mismatch, for all members of a communicator."""

    comm: int
    members: tuple[int, ...]
    text: str


@dataclass
class _Comm:
    members: tuple[int, ...]
    latest: dict[int, Report] = field(default_factory=dict)
    reports: OrderedDict[int, dict[int, Report]] = field(default_factory=OrderedDict)
    unpaired: dict[int, dict[tuple[int, int], bool]] = field(default_factory=dict)  # by sequence: (from, to): sent
    suspect: int = -1  # sequence number under suspicion
    decide_at: float = 0.0
    asked: float = float("-inf")


class Stalls:
    """Collects reports. Ranks are those of the world; texts speak of ranks in the communicator."""

    def __init__(self) -> None:
        self._comms: OrderedDict[int, _Comm] = OrderedDict()
        self._verdicts: OrderedDict[int, Verdict] = OrderedDict()

    def add(
        self,
        comm: int,
        members: tuple[int, ...],
        rank: int,
        report: Report,
        recent: Sequence[Report] = (),
        *,
        mismatch: bool,
    ) -> list[int]:
        """Takes a report; returns the ranks to ask where they are."""
        if comm in self._verdicts:
            return []
        state = self._comms.setdefault(comm, _Comm(members))
        self._comms.move_to_end(comm)
        while len(self._comms) > KEEP:
            self._comms.popitem(last=False)
        if report.waits or rank not in state.latest:
            state.latest[rank] = report
        for one in (*recent, report):
            state.reports.setdefault(one.sequence, {})[rank] = one
            _pair(state, rank, one)
        while len(state.reports) > SEQUENCES:
            state.unpaired.pop(min(state.reports), None)
            del state.reports[min(state.reports)]
        before, fresh = state.suspect, state.suspect < 0
        conflicts = [
            number
            for number, peers in state.reports.items()
            if number in state.unpaired or len({other.signature for other in peers.values()}) > 1
        ]
        if conflicts:  # the first one explains the others
            state.suspect, decide_at = min(conflicts), report.when + CONFLICT_PATIENCE
        elif mismatch and (fresh or report.sequence < state.suspect):  # who is further was told by who has seen it
            state.suspect, decide_at = report.sequence, report.when + PATIENCE
        elif not report.waits or report.when - state.asked < ASK_AGAIN or not fresh:
            return []
        else:
            return self._ask(state, report.sequence, report.when)
        state.decide_at = decide_at if fresh else min(state.decide_at, decide_at)
        return self._ask(state, state.suspect, report.when) if state.suspect != before else []

    def _ask(self, state: _Comm, sequence: int, now: float) -> list[int]:
        """Those of whom nobody knows what they called under this number."""
        state.asked = now
        return [other for other in state.members if other not in state.reports.get(sequence, {})]

    def verdict(self, comm: int) -> Verdict | None:
        """The verdict on a communicator, once there is one."""
        return self._verdicts.get(comm)

    def next_time(self) -> float | None:
        """When `due` should be asked again."""
        return min((state.decide_at for state in self._comms.values() if state.suspect >= 0), default=None)

    def due(self, now: float, gone: Collection[int]) -> list[Verdict]:
        """Verdicts whose time has come, or for which every living member has reported."""
        found = []
        for comm, state in list(self._comms.items()):
            if state.suspect < 0:
                continue
            reports = state.reports.get(state.suspect, {})
            silent = [rank for rank in state.members if rank not in reports and rank not in gone]
            if silent and now < state.decide_at:
                continue
            unpaired = state.unpaired.get(state.suspect, {})
            text = verdict_text(state.suspect, state.members, reports, state.latest, gone, unpaired)
            verdict = Verdict(comm, state.members, text)
            found.append(verdict)
            self._verdicts[comm] = verdict
            del self._comms[comm]
            while len(self._verdicts) > KEEP:
                self._verdicts.popitem(last=False)
        return found

    def where(self, comm: int, sequence: int, now: float) -> dict[int, str]:
        """Who is where, by rank in the communicator; first those that are not in this operation."""
        state = self._comms.get(comm)
        if state is None:
            return {}
        late, here = {}, {}
        for place, rank in enumerate(state.members):
            report = state.latest.get(rank)
            if report is None or not report.waits or now - report.when > FRESH:
                late[place] = "not waiting in this communicator"
            elif report.sequence != sequence:
                late[place] = f"waiting in {_name(report.text)} #{report.sequence}: {report.text}"
            else:
                here[place] = f"waiting in {_name(report.text)} #{report.sequence}: {report.text}"
        return dict(list({**late, **here}.items())[:SHOWN])


def _pair(state: _Comm, rank: int, report: Report) -> None:
    """Notes where one of two ranks of an alltoall sends what the other does not take, or takes what it does not send.

    The core sees messages that differ from what is expected, but none where one is missing.
    """
    if report.pairs is None:
        return
    here = state.members.index(rank)
    peers = state.reports[report.sequence]
    for there, other in enumerate(state.members):
        theirs = peers[other].pairs if other in peers else None
        if theirs is None:
            continue
        for source, target, sends, takes in ((here, there, report.pairs, theirs), (there, here, theirs, report.pairs)):
            sent = bool(sends.sends >> target & 1)
            if sent != bool(takes.takes >> source & 1):
                state.unpaired.setdefault(report.sequence, {})[source, target] = sent


def verdict_text(
    sequence: int,
    members: tuple[int, ...],
    reports: dict[int, Report],
    latest: dict[int, Report],
    gone: Collection[int],
    unpaired: Mapping[tuple[int, int], bool] = MappingProxyType({}),
) -> str:
    """Says who differs: minorities first, then the majority, then who is elsewhere.

    Where the signatures agree, as in an alltoall in which each rank has counts of its own, the texts tell them apart.
    """
    alike = len({report.signature for report in reports.values()}) == 1
    groups: dict[int | str, list[int]] = {}
    texts: dict[int | str, str] = {}
    for place, rank in enumerate(members):
        if rank in reports:
            key = reports[rank].text if alike else reports[rank].signature
            groups.setdefault(key, []).append(place)
            texts.setdefault(key, reports[rank].text)
    order = sorted(groups, key=lambda key: (-len(groups[key]), groups[key][0]))
    parts = [
        f"rank {source} sends to rank {target}, which expects nothing"
        if sent
        else f"rank {source} sends nothing to rank {target}, which expects something"
        for (source, target), sent in sorted(unpaired.items())[:SHOWN_PAIRS]
    ]
    parts += [_call(groups[key], texts[key]) for key in reversed(order)]
    if alike and not unpaired:
        parts.append("what a peer sent does not match")
    for place, rank in enumerate(members):
        report = latest.get(rank)
        if rank in gone or rank in reports:
            continue
        if report is not None:
            parts.append(f"rank {place} is in {_name(report.text)} #{report.sequence}: {report.text}")
        else:
            parts.append(f"rank {place} has not said where it is")
    return f"{_name(texts[order[0]])} #{sequence}: {', '.join(parts)}"


def _name(text: str) -> str:
    return text.partition("(")[0]


def _call(places: list[int], text: str) -> str:
    shown = ", ".join(str(place) for place in places[:SHOWN]) + (", ..." if len(places) > SHOWN else "")
    return f"rank {shown} calls {text}" if len(places) == 1 else f"ranks {shown} call {text}"

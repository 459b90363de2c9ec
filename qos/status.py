"""What jobs and bands do: counters beside the plan, as rows to print; and what the counters say about a job's updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hrdma.qos.ladder import DEFAULT_CLASS, SHAPER
from hrdma.qos.order import Live
from hrdma.qos.policy import DEFAULT_BAND
from hrdma.qos.record import Wish
from hrdma.qos.state import Counter
from hrdma.qos.tree import Tree

__all__ = ["Meter", "Row", "rows"]


@dataclass(frozen=True)
class Row:
    """A job, or several that share a class, or everything that is no job's."""

    job: str
    band: int  #: -1 for bare acknowledgements, which go before all bands
    nbytes: int
    rate: float  #: bytes per second
    drops: int  #: packets
    backlog: int  #: bytes that wait
    share: float  #: of all bytes in the time looked at, 0 to 1


def _whole(tree: Tree, counters: Mapping[int, Counter]) -> dict[int, Counter]:
    """The counters, those of answers in the class of their job."""
    found = dict(counters)
    for job, handle in tree.answers.items():
        found[tree.counted[job]] = counters.get(tree.counted[job], Counter()) + counters.get(handle, Counter())
    return found


def rows(wish: Wish, before: Mapping[int, Counter], after: Mapping[int, Counter], seconds: float) -> list[Row]:
    """One row for each class of the tree, best band first, from two looks at the counters.

    Parameters
    ----------
    wish : Wish
        What is installed.
    before, after : mapping of int to Counter
        By class; a class that is not there counts as zero.
    seconds : float
        Between the two.
    """
    names: dict[int, list[str]] = {}
    for job, handle in wish.tree.counted.items():
        names.setdefault(handle, []).append(job)
    places = {handle: (",".join(jobs), wish.places[jobs[0]].band) for handle, jobs in names.items()}
    if wish.kind == "htb" and wish.policy.policy != "fifo":
        places[DEFAULT_CLASS] = ("(others)", DEFAULT_BAND)
        if wish.tree.acks:
            places[wish.tree.acks] = ("(acks)", -1)
    elif wish.kind == "htb":
        places[SHAPER] = ("(all)", 0)
    before, after, nothing = _whole(wish.tree, before), _whole(wish.tree, after), Counter()
    moved = {handle: after.get(handle, nothing).nbytes - before.get(handle, nothing).nbytes for handle in places}
    total = sum(moved.values())
    found = []
    for handle, (job, band) in places.items():
        now = after.get(handle, nothing)
        share = moved[handle] / total if total else 0.0
        found.append(
            Row(job, band, now.nbytes, moved[handle] / seconds if seconds else 0.0, now.drops, now.backlog, share)
        )
    return sorted(found, key=lambda row: (row.band, row.job))


class Meter:
    """Follows each job's bytes, its answers among them: how many in all, and how many between two pauses, which is one update.

    It goes on from what an earlier one, `live`, has found.
    A pause is a look at the counters that finds nothing sent and nothing waiting since the last one: shorter ones are not seen.
    """

    def __init__(self, live: Mapping[str, Live] | None = None) -> None:
        self._current: dict[str, int] = {}
        self.live: dict[str, Live] = dict(live or {})

    def look(self, tree: Tree, counters: Mapping[int, Counter]) -> None:
        """Takes in one dump of the counters."""
        counters = _whole(tree, counters)
        for job, handle in tree.counted.items():
            counter = counters.get(handle, Counter())
            before = self.live.get(job, Live())
            anew = counter.nbytes < before.counter  # the class
            moved = counter.nbytes if anew else counter.nbytes - before.counter
            update, current = before.update, self._current.get(job, 0) + moved
            if not moved and not counter.backlog and current:
                update, current = (update + current) / 2 if update else float(current), 0
            self._current[job] = current
            self.live[job] = Live(before.attained + moved, update, counter.nbytes)
        for gone in self.live.keys() - tree.counted.keys():
            self.live.pop(gone), self._current.pop(gone, None)

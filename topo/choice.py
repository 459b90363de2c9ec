"""Chooses algorithm and parts for a call by the closed forms; pure, the same on every rank that asks the same."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hrdma.topo.algorithms import ALGORITHMS
from hrdma.topo.cost import Cost
from hrdma.units import in_bytes, in_seconds

__all__ = ["SHORT", "Choice", "choose"]

SHORT = 2 << 20  # bytes up to which some collectives are moved in few messages; then a ring is faster, in less scratch
_SEGMENTS = (2 << 20, 512 << 10, 128 << 10)  # bytes of a piece; the longest is for those that ask first, and pay for it
_OPERANDS = 8 << 20  # bytes of the operands of a reduction
_IN_PLACE = 16 << 20  # the same where they are read in place, for which room is kept all the same
_MAX_PARTS = 64
_TIE = 1.03  # the forms are not better than that,
_TIE_WHOLE = 1.06  # nor than that where two ranks exchange a whole vector unasked: their messages pass each other
_REDUCING = ("allreduce", "reduce", "reduce_scatter")


@dataclass(frozen=True)
class Choice:
    """What was chosen, and what else could have been.

    Attributes
    ----------
    algorithm : str
    parts : int
    seconds : float
        Predicted.
    table : tuple of (algorithm, parts, seconds)
        Every candidate: the chosen one, then the others, best first.
    """

    collective: str
    size: int
    nbytes: int
    deterministic: bool
    cost: Cost
    table: tuple[tuple[str, int, float], ...]

    @property
    def algorithm(self) -> str:
        return self.table[0][0]

    @property
    def parts(self) -> int:
        return self.table[0][1]

    @property
    def seconds(self) -> float:
        return self.table[0][2]

    def explain(self) -> str:
        """One line: the choice, its predicted time, and the best of each other algorithm."""
        others: dict[str, str] = {}
        for name, parts, seconds in self.table:
            if name != self.algorithm and name not in others:
                others[name] = f"{name}{f'/{parts}' if parts > 1 else ''} {in_seconds(seconds)}"
        extent = f" of {in_bytes(self.nbytes)}" if self.nbytes else ""
        order = " in rank order" if self.deterministic else ""
        cut = f" in {self.parts} parts" if self.parts > 1 else ""
        text = f"{self.collective}{extent} on {self.size} ranks{order}: {self.algorithm}{cut}"
        text += f", predicted {in_seconds(self.seconds)}"
        source = f" ({self.cost.name})" if self.cost.name else ""
        return text + (f"; else {', '.join(others.values())}" if others else "; no other can do it") + source


def choose(
    collective: str,
    size: int,
    nbytes: int,
    cost: Cost,
    *,
    deterministic: bool = False,
    mapped: bool | None = None,
    algorithm: str | None = None,
    parts: int | None = None,
    without: Collection[str] = (),
) -> Choice:
    """The cheapest algorithm for a call.

    Parameters
    ----------
    collective : str
    size : int
        Ranks.
    nbytes : int
        Of the whole vector (of all blocks together; alltoall: what one rank sends).
    cost : Cost
    deterministic : bool
        Only algorithms whose reductions are one pass in rank order.
    mapped : bool, optional
        Overrides `cost.pull`.
    algorithm : str, optional
        Only this one.
    parts : int, optional
        Only so many; with `algorithm`.
    without : collection of str
        Not these algorithms.

    Returns
    -------
    Choice

    Raises
    ------
    ValueError
        The algorithm that is asked for does not exist or cannot do this.

    Notes
    -----
    Of candidates within 3 % the first in the table is taken; where memory is not read in place, the one with fewest bytes
    to handle, then with fewest messages: it disturbs its peers less. Of an allreduce messages count before what is
    reduced: who reduces half, and then waits for the other half, is the slower (two ranks, as long as the whole goes
    unasked: within 6 %). Cost: some ten closed forms, about 30 us.
    """
    pull = cost.pull if mapped is None else mapped
    if pull != cost.pull:
        cost = Cost(**{**cost.to_dict(), "pull": pull})
    found: list[tuple[str, int, float]] = []
    burden: list[tuple[float, float, float]] = []
    for name, able in ALGORITHMS.items():
        if collective not in able.collectives or algorithm not in (None, name):
            continue
        if deterministic and collective in _REDUCING and collective not in able.ordered:
            continue
        too_long = collective in able.short and nbytes > SHORT
        if algorithm is None and (name in without or too_long or (able.pulls and not (pull and nbytes >= able.pulls))):
            continue
        cuts = _candidates(name, collective, size, nbytes, able.parts, cost)
        if algorithm is not None and parts is not None:
            cuts = [parts if collective in able.parts else 1]
        for cut in cuts:
            work = able.work(collective, size, nbytes, cut)
            found.append((name, cut, work.seconds(size, cost, cut)))
            sent, reduced = round(work.sent), round(work.reduced)
            first = (sent, work.messages, reduced) if collective == "allreduce" else (sent + reduced, work.messages, 0)
            burden.append((0, 0, 0) if pull else first)
    if not found:
        ordered = " in rank order" if deterministic else ""
        raise ValueError(f"algorithm {algorithm!r} cannot do {collective}{ordered}; known: {', '.join(ALGORITHMS)}")
    order = sorted(found, key=lambda candidate: candidate[2])
    whole = collective == "allreduce" and size == 2 and not pull and nbytes <= cost.eager
    tie = order[0][2] * (_TIE_WHOLE if whole else _TIE)
    equal = [i for i, candidate in enumerate(found) if candidate[2] <= tie]
    chosen = found[min(equal, key=burden.__getitem__)]
    found = [chosen, *(candidate for candidate in order if candidate is not chosen)]
    return Choice(collective, size, nbytes, deterministic, cost, tuple(found))


def _candidates(name: str, collective: str, size: int, nbytes: int, cut: tuple[str, ...], cost: Cost) -> list[int]:
    """Numbers of parts worth a look. Reductions are cut: what lands in scratch first must fit there. Where operands are
    read in place no more is gained by it: the fewer and longer the passes are, the faster. Nor is where ranks that share
    cores reduce what comes as it comes: they fill each other's gaps."""
    if collective not in cut:
        return [1]
    share = nbytes
    if name == "halving":
        share = nbytes // 8  # most of its messages are far smaller than the segment
    elif collective not in ("broadcast", "reduce") or name == "scatter_gather":
        share = nbytes // size
    # one pass over the operands of all ranks
    together = name in ("direct", "scatter_gather") and collective in _REDUCING
    if together and cost.pull:
        return [max(1, -(-share * size // _IN_PLACE))]
    most = _SEGMENTS[1] if cost.pull else _SEGMENTS[0]
    if together:
        most = min(most, max(_SEGMENTS[-1], _OPERANDS // size))
    parts = {min(_MAX_PARTS, max(1, -(-share // min(segment, most)))) for segment in _SEGMENTS}
    crowded = cost.crowd(size) > 1 and not cost.pull and not cost.offload
    return sorted(parts if collective in _REDUCING and (together or not crowded) else parts | {1})

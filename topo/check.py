"""The proof of a schedule: every result holds every contribution exactly once, and in order where that is asked.

The schedule is run with symbols instead of numbers: what a rank holds of a chunk is the set of ranks whose
contributions are in it (as bits of an integer). A reduction unites sets that must be disjoint; a lost contribution is
missing from a result, a doubled one is found where it is added, a misplaced one is missing here and never wanted there.
With `ordered` the symbols are expression trees, and every result must be the left-to-right reduction in rank order.
"""

from __future__ import annotations

import numpy as np

from hrdma.errors import ScheduleError
from hrdma.topo.layout import bringers, takers
from hrdma.topo.schedule import CHUNK, DST, LANE, OP, REDUCE, ROUND, SPAN, SRC, Schedule
from hrdma.types import COLLECTIVES

__all__ = ["check"]

_REDUCING = ("allreduce", "reduce", "reduce_scatter", "barrier")


def check(schedule: Schedule, ordered: bool = False, single: bool = False) -> None:
    """Proves a complete schedule.

    Parameters
    ----------
    schedule : Schedule
    ordered : bool
        Every reduction must be associated left to right in rank order: ((0 op 1) op 2) op ...
    single : bool
        With `ordered`: in one pass over all operands, so that nothing is rounded on the way.

    Raises
    ------
    ScheduleError
        With `rank` and `chunk`, at the first thing that is wrong.

    Notes
    -----
    Cost: linear in transfers times span; about 1 us each, 3 us when ordered.
    """
    _shape(schedule)
    held = _start(schedule)
    trees: list[dict[int, tuple[tuple, bool]]] | None = None  # leaves in order, and whether in one pass
    if ordered and schedule.collective in _REDUCING and schedule.collective != "barrier":
        trees = [dict.fromkeys(held[rank], ((rank,), True)) for rank in range(schedule.size)]
    reduced: dict[tuple[int, int], tuple[int, int]] = {}  # (rank, chunk) -> round and set of its latest reduction
    touched: dict[tuple[int, int], int] = {}  # (rank, chunk) -> latest round in which it takes part in a reduction
    table = schedule.table.tolist()
    at, everyone = 0, (1 << schedule.size) - 1
    while at < len(table):
        rnd = table[at][ROUND]
        groups: dict[tuple[int, int, int], list[list[int]]] = {}
        while at < len(table) and table[at][ROUND] == rnd:
            row = table[at]
            groups.setdefault((row[DST], row[CHUNK], row[SPAN]), []).append(row)
            at += 1
        news: list[tuple[int, int, int, tuple | None]] = []
        taken: set[tuple[int, int]] = set()
        for (dst, chunk, span), group in groups.items():
            for c in range(chunk, chunk + span):
                if (dst, c) in taken:
                    raise _wrong(dst, c, rnd, "is reached by transfers that overlap but differ in extent")
                taken.add((dst, c))
                news.append(_arrive(schedule, held, trees, rnd, dst, c, group))
                if group[0][OP] == REDUCE:
                    reduced[dst, c] = rnd, news[-1][2]
                    for row in group:
                        touched[row[SRC], c] = rnd
        for (dst, chunk, span), group in groups.items():
            if group[0][OP] == REDUCE:
                for c in range(chunk, chunk + span):
                    touched[dst, c] = rnd
        for dst, c, value, tree in news:
            held[dst][c] = value
            if trees is not None and tree is not None:
                trees[dst][c] = tree
    _end(schedule, held, trees, single)
    if schedule.collective != "barrier":
        for (rank, c), (rnd, value) in reduced.items():
            if touched[rank, c] == rnd and value != everyone:
                raise _wrong(
                    rank, c, rnd, f"is reduced here for the last time but lacks rank {_lowest(everyone & ~value)}; "
                    "an average could not be scaled"
                )  # fmt: skip


def _shape(schedule: Schedule) -> None:
    """Everything is in range."""
    table, size = schedule.table, schedule.size
    if schedule.collective not in COLLECTIVES:
        raise ScheduleError(f"unknown collective {schedule.collective!r}; known: {', '.join(COLLECTIVES)}")
    if schedule.view is not None:
        raise ScheduleError(
            f"this is rank {schedule.view}'s view; only a complete schedule can be proved", rank=schedule.view
        )
    if size < 1 or schedule.split < 1 or not 0 <= schedule.root < size or schedule.window < 0:
        raise ScheduleError(
            f"out of range: size {size}, split {schedule.split}, root {schedule.root}, window {schedule.window}"
        )
    weights = schedule.weights
    if weights is not None and (len(weights) != schedule.split or min(weights) < 0 or sum(weights) == 0):
        raise ScheduleError(f"weights must be {schedule.split} numbers, not negative, not all 0; they are {weights}")
    if (np.diff(table[:, ROUND]) < 0).any() or (len(table) and table[0, ROUND] < 0):
        raise ScheduleError("rounds must count up from 0")
    for column, limit, what in ((SRC, size, "source"), (DST, size, "destination"), (OP, 2, "op"), (LANE, 256, "lane")):
        bad = np.flatnonzero((table[:, column] < 0) | (table[:, column] >= limit))
        if len(bad):
            row = table[bad[0]].tolist()
            raise _wrong(row[DST], row[CHUNK], row[ROUND], f"has {what} {row[column]}, not in [0, {limit})")
    bad = np.flatnonzero(
        (table[:, CHUNK] < 0) | (table[:, SPAN] < 1) | (table[:, CHUNK] + table[:, SPAN] > schedule.chunks)
    )
    if len(bad):
        row = table[bad[0]].tolist()
        raise _wrong(row[DST], row[CHUNK], row[ROUND], f"with span {row[SPAN]} is not in [0, {schedule.chunks})")
    bad = np.flatnonzero(table[:, SRC] == table[:, DST])
    if len(bad):
        row = table[bad[0]].tolist()
        raise _wrong(row[DST], row[CHUNK], row[ROUND], "is sent by the rank to itself")


def _start(schedule: Schedule) -> list[dict[int, int]]:
    split = schedule.split
    held: list[dict[int, int]] = [{} for _ in range(schedule.size)]
    for block in range(schedule.blocks):
        for rank in bringers(schedule.collective, schedule.size, schedule.root, block):
            for c in range(block * split, (block + 1) * split):
                held[rank][c] = 1 << rank
    return held


def _arrive(schedule, held, trees, rnd: int, dst: int, c: int, group) -> tuple[int, int, int, tuple | None]:
    """What (dst, c) holds after the transfers of one round into it."""
    op = group[0][OP]
    if len(group) > 1:
        if any(row[OP] != op for row in group):
            raise _wrong(dst, c, rnd, "is both copied to and reduced into")
        if op != REDUCE:
            raise _wrong(dst, c, rnd, f"is copied to from ranks {group[0][SRC]} and {group[1][SRC]} at once")
    if op == REDUCE and schedule.collective not in _REDUCING:
        raise _wrong(dst, c, rnd, f"is reduced into, which {schedule.collective} does not do")
    for row in group:
        if c not in held[row[SRC]]:
            raise _wrong(row[SRC], c, rnd, f"is sent to rank {dst} by a rank that does not have it")
    if op != REDUCE:
        src = group[0][SRC]
        return dst, c, held[src][c], trees[src][c] if trees is not None else None
    if c not in held[dst]:
        raise _wrong(dst, c, rnd, "is reduced into, but the rank holds nothing of it")
    value = held[dst][c]
    for row in group:
        more = held[row[SRC]][c]
        if value & more and schedule.collective != "barrier":
            raise _wrong(
                dst, c, rnd, f"gets the contribution of rank {_lowest(value & more)} twice, now from rank {row[SRC]}"
            )
        value |= more
    if trees is None:
        return dst, c, value, None
    first, *others = [trees[rank][c][0] for rank in sorted([dst, *(row[SRC] for row in group)])]
    # left to right: a tree on the left is continued, one further right is an operand of its own
    tree = (*first, *(other[0] if len(other) == 1 else other for other in others))
    return dst, c, value, (tree, len(first) == 1)


def _end(schedule: Schedule, held, trees, single: bool) -> None:
    size, split = schedule.size, schedule.split
    straight = tuple(range(size))
    for block in range(schedule.blocks):
        needed = sum(1 << rank for rank in bringers(schedule.collective, size, schedule.root, block))
        for rank in takers(schedule.collective, size, schedule.root, block):
            for c in range(block * split, (block + 1) * split):
                value = held[rank].get(c, 0)
                if value != needed:
                    raise ScheduleError(
                        f"rank {rank}, chunk {c}: ends without the contribution of rank {_lowest(needed & ~value)}",
                        rank=rank,
                        chunk=c,
                    )
                if trees is not None:
                    tree, one_pass = trees[rank][c]
                    if tree != straight:
                        raise ScheduleError(
                            f"rank {rank}, chunk {c}: is not reduced left to right in rank order", rank=rank, chunk=c
                        )
                    if single and not one_pass:
                        raise ScheduleError(
                            f"rank {rank}, chunk {c}: is reduced in more than one pass", rank=rank, chunk=c
                        )


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _wrong(rank: int, chunk: int, rnd: int, text: str) -> ScheduleError:
    return ScheduleError(f"rank {rank}, chunk {chunk}, round {rnd}: {text}", rank=rank, chunk=chunk)

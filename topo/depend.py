"""What waits for what in a schedule, as a graph of integers: for simulation.

Nodes are the transfers, then the *results* (all transfers of a round into the same chunks of a rank, with the chunk that
is reduced into), then, where the schedule has a window, the *fences* (all sends of a rank up to a round have ended).

    0>1:4+ (round 0)  --.                                            transfers 0>1:4 and 2>1:4 make one result,
                         +--> result 1:4 (round 0) --> 1>3:4 (round 1)     which the transfer 1>3:4 sends on
    2>1:4+ (round 0)  --'

An edge is there where data flows, and where a window says so. That a chunk must not be overwritten while it is sent is
left to the lowering, which has scratch for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hrdma.topo.schedule import CHUNK, DST, OP, REDUCE, ROUND, SPAN, SRC, Schedule

__all__ = ["Graph", "graph"]


class Graph(NamedTuple):
    """Nodes 0 to transfers - 1 are the transfers, `results` nodes follow, then fences."""

    waits: np.ndarray  #: per node, how many it waits for
    start: np.ndarray  #: who waits for node i: ``then[start[i]:start[i + 1]]``
    then: np.ndarray
    first: np.ndarray  #: per result, one of its transfers
    operands: np.ndarray  #: per result, its transfers

    @property
    def results(self) -> int:
        return len(self.first)


def _expanded(number: np.ndarray, first: np.ndarray, span: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One entry per chunk: the number of its row, and the chunk."""
    if not len(span) or span.max() == 1:
        return number, first
    within = np.arange(span.sum()) - np.repeat(np.cumsum(span) - span, span)
    return np.repeat(number, span), np.repeat(first, span) + within


def graph(schedule: Schedule) -> Graph:
    """The graph of a complete schedule. Cost: sorting transfers times span, in numpy."""
    table = schedule.table.astype(np.int64)
    transfers, rounds = len(table), schedule.nrounds + 1
    rnd, src, dst, chunk, span = (table[:, column] for column in (ROUND, SRC, DST, CHUNK, SPAN))
    _, first, result, operands = np.unique(
        (rnd * schedule.size + dst) * schedule.chunks + chunk,
        return_index=True, return_inverse=True, return_counts=True,
    )  # fmt: skip
    results = len(first)
    edges = [np.stack([np.arange(transfers), transfers + result])]

    # the latest result of (rank, chunk) before a round: results in order of rank, chunk and round, looked up by bisection
    which, there = _expanded(np.arange(results), chunk[first], span[first])
    written = (dst[first][which] * schedule.chunks + there) * rounds + rnd[first][which]
    order = np.argsort(written, kind="stable")
    written, which = written[order], which[order]

    def latest(reader: np.ndarray, rank: np.ndarray, rows: np.ndarray) -> None:
        index, read = _expanded(np.arange(len(rows)), chunk[rows], span[rows])
        place = (rank[index] * schedule.chunks + read) * rounds
        found = np.searchsorted(written, place + rnd[rows][index]) - 1
        known = (found >= 0) & (written[found] >= place)
        edges.append(np.stack([transfers + which[found[known]], reader[index[known]]]))

    if results:
        latest(np.arange(transfers), src, np.arange(transfers))
        reducing = np.flatnonzero(table[first, OP] == REDUCE)
        latest(transfers + reducing, dst[first[reducing]], first[reducing])

    fences = 0
    if schedule.window and transfers:
        keys = src * rounds + rnd
        ends, fence = np.unique(keys, return_inverse=True)
        fences, base = len(ends), transfers + results
        edges.append(np.stack([np.arange(transfers), base + fence]))
        same = np.flatnonzero(ends[1:] // rounds == ends[:-1] // rounds)
        edges.append(np.stack([base + same, base + same + 1]))
        before = np.searchsorted(ends, keys - schedule.window, side="right") - 1
        held = (rnd >= schedule.window) & (before >= 0) & (ends[before] // rounds == src)
        edges.append(np.stack([base + before[held], np.flatnonzero(held)]))

    nodes = transfers + results + fences
    pairs = np.concatenate(edges, axis=1)
    pairs = np.sort(pairs[0] * nodes + pairs[1])
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]  # np.unique hashes, which takes several times as long
    origin, then = pairs // max(nodes, 1), pairs % max(nodes, 1)
    start = np.searchsorted(origin, np.arange(nodes + 1))
    return Graph(np.bincount(then, minlength=nodes), start, then, first, operands)

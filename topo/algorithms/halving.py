"""Recursive halving and doubling: partners exchange halves of halves of the vector, then the way back.

With m = the largest power of two not above size, the size - m extra ranks first hand their vector to a neighbour and get
the result at the end. Among the m that stay, in the step with distance d = m/2, m/4, ... 1 each keeps the half of its range
in which its own share lies and sends the other half to its partner; then the steps run backwards with complete ranges.

    allreduce, 4 ranks, shares a b c d

      round     rank 0     rank 1     rank 2     rank 3
      d = 2     > cd       > cd       > ab       > ab        0 and 2, 1 and 3
      d = 1     > b        > a        > d        > c         0 and 1, 2 and 3; A B C D are complete
      d = 1     A >        B >        C >        D >
      d = 2     AB >       AB >       CD >       CD >

Steps 2 log2(m), bytes 2 (m - 1) / m of the vector: the least possible when size is a power of two; otherwise two more
steps with the whole vector. Each of the `parts` segments of the vector does this on its own, so that they overlap.

A reduce_scatter is the way there, an allgather the way back, with ranges of blocks: those of a rank that stays and of the
neighbour that leaves are side by side. Steps log2(m); otherwise two more, one with a block and one with the vector.

References
----------
Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, IJHPCA, 2005 (section 3.3;
Rabenseifner's algorithm).
"""

from __future__ import annotations

import numpy as np

from hrdma.topo.algorithms.doubling import folded
from hrdma.topo.cost import Work
from hrdma.topo.schedule import COPY, REDUCE, Schedule, involved, join, rows

__all__ = ["COLLECTIVES", "build", "work"]

COLLECTIVES = ("allreduce", "reduce_scatter", "allgather")


def _way(back: bool, ranks: np.ndarray, edge: np.ndarray, base, first_round: int) -> list[np.ndarray]:
    """The steps of one way, a round each: there a rank gives what is its partner's to reduce, back all that it has.

    edge: where the range of each of `ranks` begins, and the last one ends; base: added, for several segments at once.
    """
    v = np.arange(len(ranks), dtype=np.int32)
    halves = [len(ranks) >> step for step in range(1, len(ranks).bit_length())]
    tables: list[np.ndarray] = []
    for half in reversed(halves) if back else halves:
        partner = v ^ half
        first = (v if back else partner) // half * half
        span = edge[first + half] - edge[first]
        op = COPY if back else REDUCE
        tables.append(rows(first_round + len(tables), ranks, ranks[partner], base + edge[first], op, span))
    return tables


def build(collective: str, size: int, parts: int = 1, root: int = 0, rank: int | None = None) -> Schedule:
    """The schedule; `parts`: segments of the vector, of an allreduce; segment p is the chunks p * m to p * m + m - 1."""
    stays, pairs = folded(size)
    power = len(stays)
    end = power.bit_length()  # the round behind one way
    ranks = np.array(stays, np.int32)
    stay, leaves = (np.array(column, np.int32) for column in (zip(*pairs) if pairs else ((), ())))
    edge = np.append(ranks, np.int32(size))  # in blocks: those of who stays and of the neighbour that leaves
    split = 1
    if collective == "allreduce":
        split = parts * power
        base, edge = np.arange(parts, dtype=np.int32)[:, None] * power, np.arange(power + 1, dtype=np.int32)
        tables = [
            rows(0, leaves, stay, base, REDUCE, power),
            *_way(False, ranks, edge, base, 1),
            *_way(True, ranks, edge, base, end),
            rows(2 * end - 1, stay, leaves, base, COPY, power),
        ]
    elif collective == "reduce_scatter":
        tables = [
            rows(0, leaves, stay, 0, REDUCE, size),
            *_way(False, ranks, edge, 0, 1),
            rows(end, stay, leaves, leaves, COPY),
        ]
    else:
        more = leaves + 1 < size
        tables = [
            rows(0, leaves, stay, leaves, COPY),
            *_way(True, ranks, edge, 0, 1),
            rows(end, stay, leaves, 0, COPY, leaves),  # what is before the own block, and behind
            rows(end, stay[more], leaves[more], leaves[more] + 1, COPY, size - 1 - leaves[more]),
        ]
    return Schedule(collective, size, involved(join(*tables), rank), split, root, "halving", view=rank)


def work(collective: str, size: int, nbytes: float, parts: int = 1) -> Work:
    """Closed form."""
    stays, pairs = folded(size)
    steps, extra = len(stays).bit_length() - 1, 1 if pairs else 0
    way = nbytes * (len(stays) - 1) / len(stays)
    if collective == "allreduce":
        way += extra * nbytes
        total = 2 * (steps + extra)
        share = (len(stays) - 1 + len(pairs)) * nbytes / (way * size) if way else 1.0
        return Work(total, total * parts, 2 * way, way, way, share)
    handed = extra * nbytes / size
    total = steps + 2 * extra
    moved = way + extra * nbytes + handed
    share = ((len(stays) - 1) * nbytes + len(pairs) * (nbytes + nbytes / size)) / (moved * size) if moved else 1.0
    if collective == "allgather":
        return Work(total, total + extra, moved, moved, 0.0, share)
    return Work(total, total, moved, handed, moved - handed, share)

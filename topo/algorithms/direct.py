"""Direct: every rank talks to every other at once.

Each rank *owns* one share of the vector (a block, or 1/size of it). In the reduce-scatter each rank sends every share
to its owner, who reduces all contributions in one pass in rank order; in the allgather each owner sends its share to
all. An allreduce is both. Peers are visited in the order rank + 1, rank + 2, ... so that no rank is everybody's first.

    allreduce, 3 ranks, shares a b c (owners 0 1 2)

      rank    0        1        2            0        1        2
      start   a b c    a b c    a b c
      round 0 b>1 c>2  a>0 c>2  a>0 b>1      A . .    . B .    . . C      capital: reduced, in the order 0, 1, 2
      round 1 A>1 A>2  B>0 B>2  C>0 C>1      A B C    A B C    A B C

Steps 1 per phase with size - 1 messages each way; bytes (size - 1) / size of the vector per phase, which is the least
possible. Every contribution is read once and every result written once, and the association is left to right in rank
order: this is the algorithm of deterministic mode, and of shared memory that is read in place. It wants full bisection.

Rooted collectives are one step with the root as the only partner.

References
----------
Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, IJHPCA, 2005 (section 3,
pairwise and long-message algorithms).
"""

from __future__ import annotations

import numpy as np

from hrdma.topo.cost import Work, effort
from hrdma.topo.schedule import COPY, REDUCE, Schedule, involved, join, rows

__all__ = ["COLLECTIVES", "build", "pairs", "work"]

COLLECTIVES = (
    "allreduce",
    "reduce",
    "broadcast",
    "allgather",
    "reduce_scatter",
    "gather",
    "scatter",
    "alltoall",
    "barrier",
)


def pairs(size: int, rank: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Sources and destinations of all ordered pairs (that touch rank), nearest successor first."""
    step = np.arange(1, size, dtype=np.int32)
    if rank is None:
        src = np.tile(np.arange(size, dtype=np.int32), size - 1)
        return src, (src + np.repeat(step, size)) % size
    here = np.full(2 * (size - 1), rank, np.int32)
    src, dst = here, here.copy()
    dst[::2] = (rank + step) % size
    src[1::2] = (rank - step) % size
    return src, dst


def build(collective: str, size: int, parts: int = 1, root: int = 0, rank: int | None = None) -> Schedule:
    """The schedule; `parts`: pieces of each owner's share (of the vector, for rooted collectives)."""
    parts = 1 if collective == "barrier" else parts
    split = parts * size if collective == "allreduce" else parts
    part = np.arange(parts, dtype=np.int32)[:, None]
    if collective in ("reduce", "broadcast", "gather", "scatter"):
        others = (root + np.arange(1, size, dtype=np.int32)) % size
        inward = collective in ("reduce", "gather")
        src, dst = (others, root) if inward else (root, others)
        block = others if collective in ("gather", "scatter") else 0
        table = rows(0, src, dst, block * parts + part, REDUCE if collective == "reduce" else COPY)
        return Schedule(collective, size, involved(table, rank), split, root, "direct", view=rank)
    src, dst = pairs(size, rank)
    if collective == "alltoall":
        table = rows(0, src, dst, (src * size + dst) * parts + part, COPY)
    elif collective == "barrier":
        table = rows(0, src, dst, 0, REDUCE)
    elif collective == "allgather":
        table = rows(0, src, dst, src * parts + part, COPY)
    else:
        table = rows(0, src, dst, dst * parts + part, REDUCE)
        if collective == "allreduce":
            table = join(table, rows(1, src, dst, src * parts + part, COPY))
    return Schedule(collective, size, table, split, root, "direct", view=rank)


def work(collective: str, size: int, nbytes: float, parts: int = 1) -> Work:
    """Closed form. In the rooted collectives only the root, or all others, are busy all the time."""
    peers = size - 1
    most = nbytes * peers / size
    if collective == "barrier":
        return Work(1, peers, 0, 0, 0)
    if collective == "allreduce":
        return Work(2, 2 * peers * parts, 2 * most, most, most, effort=effort(size))
    if collective == "reduce_scatter":
        return Work(1, peers * parts, most, 0, most, effort=effort(size))
    if collective == "reduce":
        return Work(1, peers * parts, nbytes, 0, peers * nbytes, 1 / size, effort(size))
    if collective == "broadcast":
        return Work(1, peers * parts, peers * nbytes, nbytes, 0, 1 / size)
    if collective == "scatter":
        return Work(1, peers * parts, most, nbytes / size, 0, 1 / size)
    return Work(1, peers * parts, most, most, 0, 1 / size if collective == "gather" else 1.0)

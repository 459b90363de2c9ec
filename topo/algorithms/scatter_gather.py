"""Scatter-gather: each rank reduces a share of the vector, and the root gathers the results.

The first half is `direct`'s reduce-scatter: each rank sends every share to its owner, who reduces all contributions in one
pass in rank order. Then each owner sends what it has made to the root. Shares are cut into parts; in a round an owner
reduces one part and sends the one before.

    reduce, 3 ranks, root 0, shares a b c (owners 0 1 2)

      rank    0        1        2            0        1        2
      start   a b c    a b c    a b c
      round 0 b>1 c>2  a>0 c>2  a>0 b>1      A . .    . B .    . . C      capital: reduced, in the order 0, 1, 2
      round 1          B>0      C>0          A B C

2 steps; the root receives 2 (size - 1) / size of the vector, where `direct` brings it size - 1 vectors, and all ranks
share the reducing. Where the root's memory can be written by its peers, they put their results there, and the second half
moves nothing.

References
----------
Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, IJHPCA, 2005 (section 3.4,
Rabenseifner's reduce).
"""

from __future__ import annotations

import numpy as np

from hrdma.topo.algorithms.direct import pairs
from hrdma.topo.cost import Work, effort
from hrdma.topo.schedule import COPY, REDUCE, Schedule, involved, join, rows

__all__ = ["COLLECTIVES", "build", "work"]

COLLECTIVES = ("reduce",)


def build(collective: str, size: int, parts: int = 1, root: int = 0, rank: int | None = None) -> Schedule:
    """The schedule; `parts`: pieces of each owner's share; share s is the chunks s * parts to s * parts + parts - 1."""
    src, dst = pairs(size, rank)
    part = np.arange(parts, dtype=np.int32)[:, None]
    owners = (root + np.arange(1, size, dtype=np.int32)) % size
    table = join(
        rows(part + 1, owners, root, owners * parts + part, COPY),
        rows(part, src, dst, dst * parts + part, REDUCE),
    )
    return Schedule(collective, size, involved(table, rank), parts * size, root, "scatter_gather", view=rank)


def work(collective: str, size: int, nbytes: float, parts: int = 1) -> Work:
    """Closed form, without what the root gathers: one that works in place is given it. (Another copies it, which the ranks
    cannot know.)"""
    peers = size - 1
    most = nbytes * peers / size
    return Work(2, 2 * peers * parts, most, 0, most, effort=effort(size))

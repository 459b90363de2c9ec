"""Double binary tree: two trees over all ranks, each for half of the vector; who is a leaf in one is inside in the other.

The first tree has the ranks in order (a rank's parent is given by the lowest set bit of its number, counted from 1); the
second is the first moved on by one rank. Each half is reduced up its tree and copied down again, in `parts` pieces that
follow each other.

    7 ranks       3                      4
                1   5                  2   6
               0 2 4 6                1 3 5 0          first and second tree

Steps about 2 log2(ranks); bytes 2 of the vector, sent and received by every rank, once the pipeline is full. With an odd
number of ranks one rank is a leaf twice.

References
----------
Sanders, Speck, Träff: Two-tree algorithms for full bandwidth broadcast, reduction and scan, Parallel Computing, 2009.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from hrdma.topo.cost import Work
from hrdma.topo.schedule import COPY, REDUCE, Schedule, involved, join, rows

__all__ = ["COLLECTIVES", "build", "work"]

COLLECTIVES = ("allreduce",)


@lru_cache(maxsize=16)
def _tree(size: int) -> tuple[tuple[int, int, int], ...]:
    """Edges (child, parent, depth of the child) of the first tree."""
    edges, todo = [], [(1, size, 0, 0)]  # first and last rank of a subtree from 1, its parent, its depth
    while todo:
        low, high, parent, depth = todo.pop()
        if low > high:
            continue
        top = next(high >> bit << bit for bit in range(high.bit_length(), -1, -1) if high >> bit << bit >= low)
        if parent:
            edges.append((top - 1, parent - 1, depth))
        todo += [(low, top - 1, top, depth + 1), (top + 1, high, top, depth + 1)]
    return tuple(edges)


def build(collective: str, size: int, parts: int = 1, root: int = 0, rank: int | None = None) -> Schedule:
    """The schedule; `parts`: pieces of each half."""
    edges = np.array(_tree(size), np.int32).reshape(-1, 3)
    height = int(edges[:, 2].max(initial=0))
    part = np.arange(parts, dtype=np.int32)[:, None]
    tables = []
    for tree in range(2):
        child, parent = (edges[:, 0] + tree) % size, (edges[:, 1] + tree) % size
        chunk = tree * parts + part
        tables.append(rows(part + height - edges[:, 2], child, parent, chunk, REDUCE))
        tables.append(rows(part + height + edges[:, 2] - 1, parent, child, chunk, COPY))
    return Schedule("allreduce", size, involved(join(*tables), rank), 2 * parts, name="tree", view=rank)


def work(collective: str, size: int, nbytes: float, parts: int = 1) -> Work:
    """Closed form; not exact: filling and emptying the pipeline is taken as pieces of one NIC's time."""
    height = max((depth for _, _, depth in _tree(size)), default=0)
    busy = 2 * nbytes * (1 + max(0, height - 1) / parts) if size > 1 else 0.0
    return Work(2 * height + parts - 1, 6 * parts, busy, nbytes, nbytes)

"""Binomial tree: the set of ranks that are served doubles in every step.

Ranks are counted from the root: v = (rank - root) mod size. In the step with distance d (the largest power of two below
size, halved each step) every v that is a multiple of 2d sends to v + d what the subtree [v + d, v + 2d) needs.

    scatter from 0, 6 ranks: blocks in the message

      d = 4   0 --4 5--> 4
      d = 2   0 --2 3--> 2
      d = 1   0 --1--> 1    2 --3--> 3    4 --5--> 5

Broadcast sends the whole vector along the same edges; gather and reduce run them backwards, with contributions. Steps
ceil(log2(size)); the root moves (size - 1) / size of the total for gather and scatter, the whole vector in every step
for broadcast and reduce, where `parts` lets levels overlap. For short vectors on many ranks.

References
----------
Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, IJHPCA, 2005 (section 3.2).
"""

from __future__ import annotations

import numpy as np

from hrdma.topo.cost import Work
from hrdma.topo.schedule import COPY, REDUCE, Schedule, involved

__all__ = ["COLLECTIVES", "build", "work"]

COLLECTIVES = ("broadcast", "reduce", "gather", "scatter")


def build(collective: str, size: int, parts: int = 1, root: int = 0, rank: int | None = None) -> Schedule:
    """The schedule; `parts`: pieces of the vector (broadcast and reduce; a subtree's blocks are one message)."""
    inward = collective in ("gather", "reduce")
    op = REDUCE if collective == "reduce" else COPY
    levels = (size - 1).bit_length()
    blockwise = collective in ("gather", "scatter")
    listed = []
    for level in range(levels):
        distance = 1 << (levels - 1 - level)
        rnd = levels - 1 - level if inward else level
        for v in range(0, size - distance, 2 * distance):
            here, there = (v + root) % size, (v + distance + root) % size
            src, dst = (there, here) if inward else (here, there)
            if not blockwise:
                listed += [(rnd, src, dst, part, 1, op, 0) for part in range(parts)]
                continue
            first, count = there, min(v + 2 * distance, size) - v - distance
            head = min(count, size - first)  # a subtree that wraps past the last rank is two messages
            listed.append((rnd, src, dst, first, head, op, 0))
            if count > head:
                listed.append((rnd, src, dst, 0, count - head, op, 0))
    listed.sort(key=lambda row: row[0])
    table = involved(np.array(listed, np.int32).reshape(-1, 7), rank)
    return Schedule(collective, size, table, 1 if blockwise else parts, root, "binomial", view=rank)


def work(collective: str, size: int, nbytes: float, parts: int = 1) -> Work:
    """Closed form."""
    levels = (size - 1).bit_length()
    share = (size - 1) / (levels * size) if levels else 1.0
    if collective == "broadcast":
        return Work(levels, levels * parts, levels * nbytes, levels * nbytes, 0, share)
    if collective == "reduce":
        return Work(levels, levels * parts, levels * nbytes, 0, levels * nbytes, share)
    most = nbytes * (size - 1) / size
    return Work(levels, levels, most, most, 0, share)

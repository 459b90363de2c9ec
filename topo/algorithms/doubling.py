"""Recursive doubling: partners at distance 1, 2, 4, ... exchange all that they have reduced so far.

    allreduce, 5 ranks; each column what the rank holds, as the ranks whose contributions are in it

      rank      0       1       2       3       4
      start     0       1       2       3       4
      fold      01              2       3       4       the first 2 (5 - 4) ranks pair up, 1 leaves
      d = 1     012             012     34      34      0 and 2 are neighbours among those that stayed
      d = 2     01234           01234   01234   01234
      unfold            01234

Steps log2(size) messages of the whole vector, two more when size is no power of two: for short vectors on many ranks.
Both partners evaluate the lower rank's operand first, so all ranks end with the same bits.

References
----------
Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, IJHPCA, 2005 (section 3.3).
"""

from __future__ import annotations

import numpy as np

from hrdma.topo.cost import LANDED, Work
from hrdma.topo.schedule import COPY, REDUCE, Schedule, involved

__all__ = ["COLLECTIVES", "build", "folded", "work"]

COLLECTIVES = ("allreduce",)


def folded(size: int) -> tuple[list[int], list[tuple[int, int]]]:
    """The ranks that stay (a power of two of them, in rank order) and the pairs (stays, leaves)."""
    power = 1 << (size.bit_length() - 1)
    extra = size - power
    stays = [2 * i for i in range(extra)] + list(range(2 * extra, size))
    return stays, [(2 * i, 2 * i + 1) for i in range(extra)]


def build(collective: str, size: int, parts: int = 1, root: int = 0, rank: int | None = None) -> Schedule:
    """The schedule; `parts` is ignored: the vector is one message."""
    stays, pairs = folded(size)
    steps = len(stays).bit_length() - 1
    listed = [(0, leaves, stay, 0, 1, REDUCE, 0) for stay, leaves in pairs]
    for step in range(steps):
        listed += [(1 + step, here, stays[v ^ (1 << step)], 0, 1, REDUCE, 0) for v, here in enumerate(stays)]
    listed += [(1 + steps, stay, leaves, 0, 1, COPY, 0) for stay, leaves in pairs]
    table = involved(np.array(listed, np.int32).reshape(-1, 7), rank)
    return Schedule(collective, size, table, 1, root, "doubling", view=rank)


def work(collective: str, size: int, nbytes: float, parts: int = 1) -> Work:
    """Closed form. What is exchanged lands in scratch, as partners send what they reduce into."""
    stays, pairs = folded(size)
    steps, extra = len(stays).bit_length() - 1, 1 if pairs else 0
    total = steps + 2 * extra
    share = (steps * len(stays) + 2 * len(pairs)) / (total * size) if total else 1.0
    return Work(total, total, total * nbytes, extra * nbytes, (steps + extra) * nbytes, share, 1 + LANDED)

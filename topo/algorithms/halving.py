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

COLLECTIVES = ("allreduce",)


def build(collective: str, size: int, parts: int = 1, root: int = 0, rank: int | None = None) -> Schedule:
    """The schedule; `parts`: segments of the vector; segment p is the chunks p * m to p * m + m - 1."""
    stays, pairs = folded(size)
    power = len(stays)
    steps = power.bit_length() - 1
    base = np.arange(parts, dtype=np.int32)[:, None] * power
    ranks, v = np.array(stays, np.int32), np.arange(power, dtype=np.int32)
    stay, leaves = (np.array(column, np.int32) for column in (zip(*pairs) if pairs else ((), ())))
    tables = [rows(0, leaves, stay, base, REDUCE, power)]
    for step in range(steps):
        half = power >> (step + 1)
        partner = v ^ half
        tables.append(rows(1 + step, ranks, ranks[partner], base + partner // half * half, REDUCE, half))
        tables.append(rows(2 * steps - step, ranks, ranks[partner], base + v // half * half, COPY, half))
    tables.append(rows(1 + 2 * steps, stay, leaves, base, COPY, power))
    return Schedule(collective, size, involved(join(*tables), rank), parts * power, root, "halving", view=rank)


def work(collective: str, size: int, nbytes: float, parts: int = 1) -> Work:
    """Closed form."""
    stays, pairs = folded(size)
    steps, extra = len(stays).bit_length() - 1, 1 if pairs else 0
    way = nbytes * (len(stays) - 1) / len(stays) + extra * nbytes
    total = 2 * (steps + extra)
    share = (len(stays) - 1 + len(pairs)) * nbytes / (way * size) if way else 1.0
    return Work(total, total * parts, 2 * way, way, way, share)

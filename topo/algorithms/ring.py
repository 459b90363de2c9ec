"""Ring: every rank receives from its predecessor and sends to its successor, and nothing else.

A *share* is what one rank owns at the end of the reduce-scatter: a block, or 1/size of the vector. Share o starts its
way at rank o + 1, gathers a contribution at each rank and is complete when it reaches o. The allgather carries complete
shares once around. An allreduce is both.

    allreduce, 3 ranks, shares a b c; capital: complete, xy: contributions of ranks x and y

      round   0>1   1>2   2>0
      0       c     a     b          first contributions
      1       b20   c01   a12        receivers complete them: B at 1, C at 2, A at 0
      2       A     B     C
      3       C     A     B

Steps size - 1 per phase, bytes (size - 1) / size of the vector per phase: the least possible, over one link per rank
and direction. Shares are cut in `parts`, so that the next step of one part runs beside this step of the other.

Broadcast and reduce along the ring are pipelines: part p passes position i in round p + i; size - 2 + parts steps of
1 / parts of the vector, nearly the vector's own time for long vectors, whatever the size.

References
----------
Patarasuk, Yuan: Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, Journal of Parallel and
Distributed Computing, 2009.
"""

from __future__ import annotations

import numpy as np

from hrdma.topo.cost import Work
from hrdma.topo.schedule import COPY, REDUCE, Schedule, involved, join, rows

__all__ = ["COLLECTIVES", "build", "work"]

COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "broadcast", "reduce")


def build(collective: str, size: int, parts: int = 1, root: int = 0, rank: int | None = None) -> Schedule:
    """The schedule; `parts`: pieces of each share (of the vector, for broadcast and reduce)."""
    split = parts * size if collective == "allreduce" else parts
    if collective in ("broadcast", "reduce"):
        hop = np.arange(size - 1, dtype=np.int32)
        part = np.arange(parts, dtype=np.int32)[:, None]
        if collective == "broadcast":
            table = rows(part + hop, (root + hop) % size, (root + hop + 1) % size, part, COPY)
        else:
            table = rows(part + hop, (root + size - 1 - hop) % size, (root + size - 2 - hop) % size, part, REDUCE)
        return Schedule(collective, size, join(involved(table, rank)), split, root, "ring", view=rank)
    step = np.arange(size - 1, dtype=np.int32)[:, None, None]
    part = np.arange(parts, dtype=np.int32)[:, None]
    ranks = (
        np.arange(size, dtype=np.int32) if rank is None else np.unique(np.array([(rank - 1) % size, rank], np.int32))
    )
    after = (ranks + 1) % size
    tables = []
    if collective != "allgather":
        tables.append(rows(step, ranks, after, (ranks - 1 - step) % size * parts + part, REDUCE))
    if collective != "reduce_scatter":
        start = 0 if collective == "allgather" else size - 1
        tables.append(rows(start + step, ranks, after, (ranks - step) % size * parts + part, COPY))
    return Schedule(collective, size, join(*tables), split, root, "ring", view=rank)


def work(collective: str, size: int, nbytes: float, parts: int = 1) -> Work:
    """Closed form."""
    steps = size - 1
    most = nbytes * steps / size
    if collective == "allreduce":
        return Work(2 * steps, 2 * steps * parts, 2 * most, most, most)
    if collective in ("broadcast", "reduce"):
        rounds = size - 2 + parts if size > 1 else 0
        length = nbytes * rounds / parts
        share = parts / rounds * steps / size if rounds else 1.0
        if collective == "broadcast":
            return Work(steps, rounds, length, length, 0, share)
        return Work(steps, rounds, length, 0, length, share)
    if collective == "allgather":
        return Work(steps, steps * parts, most, most, 0)
    return Work(steps, steps * parts, most, 0, most)

"""Relayed alltoall on a BCube or torus: blocks travel dimension by dimension and change dimension in a rank's memory.

Every block (source, destination) is cut into as many threads as the fabric has levels. Thread p corrects the digits in
the order p, p + 1, ...; on a BCube one hop per digit, in a ring of a torus hop by hop the shorter way round, so that every
message crosses one switch or one cable and all NICs work at once.

    BCube(2, 2), block (0, 3), ranks as digits d1 d0: thread 0 goes 00 > 01 > 11, thread 1 goes 00 > 10 > 11

Steps: the sum of the longest ways in each dimension. Bytes of a NIC for W bytes that each rank sends: W (n - 1) / n / levels
per step on a BCube of n-port switches. A table of ranks**2 * levels messages per hop: meant for some hundred ranks.

References
----------
Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, IJHPCA, 2005 (alltoall by
forwarding); the order of digits is that of BCube routing.
"""

from __future__ import annotations

from math import prod

import numpy as np

from hrdma.topo.cost import Work
from hrdma.topo.fabric import Fabric
from hrdma.topo.schedule import COPY, Schedule, involved, join, rows

__all__ = ["COLLECTIVES", "build", "fits", "work"]

COLLECTIVES = ("alltoall",)


def fits(fabric: Fabric) -> str:
    """Why it cannot be had on a fabric; empty when it can."""
    return (
        "" if fabric.kind in ("bcube", "torus", "ring") else f"it needs a bcube, torus or ring; {fabric.name} is none"
    )


def build(collective: str, fabric: Fabric, parts: int = 1, root: int = 0, rank: int | None = None) -> Schedule:
    """The schedule; `parts` is not used: a block is small as it is."""
    shape, size, levels = fabric.shape, fabric.hosts, len(fabric.shape)
    block = np.arange(size * size, dtype=np.int64)
    block = block[block // size != block % size]
    cubic = fabric.kind == "bcube"
    tables = []
    for thread in range(levels):
        here, stop, rnd = block // size, block % size, 0
        for level in ((thread + step) % levels for step in range(levels)):
            n, stride = shape[level], prod(shape[:level])
            for _ in range(1 if cubic else n // 2):
                digit = here // stride % n
                ahead = (stop // stride - digit) % n
                moves = ahead > 0
                if cubic:
                    other, lane = stop // stride % n, np.full(len(here), level)
                else:
                    up = ahead <= n // 2
                    other = (digit + np.where(up, 1, -1)) % n
                    lane = sum(2 if side > 2 else 1 for side in shape[:level]) + (~up if n > 2 else 0 * up)
                there = here + (other - digit) * stride
                columns = (here, there, block * levels + thread, lane)
                src, dst, chunk, lanes = (column[moves] for column in columns)
                tables.append(rows(rnd, src, dst, chunk, COPY, 1, lanes))
                here, rnd = np.where(moves, there, here), rnd + 1
    return Schedule("alltoall", size, involved(join(*tables), rank), levels, name="relay", view=rank)


def work(collective: str, fabric: Fabric, nbytes: float, parts: int = 1) -> Work | None:
    """Closed form on a BCube of one radix; None elsewhere."""
    if fabric.kind != "bcube" or len(set(fabric.shape)) > 1:
        return None
    n, levels = fabric.shape[0], len(fabric.shape)
    moved = nbytes * (n - 1) / n
    messages = (n - 1) * fabric.hosts // n * levels * levels
    return Work(levels, messages, moved * levels, moved * levels, 0.0, rails=levels)

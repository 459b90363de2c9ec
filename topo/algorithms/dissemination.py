"""Dissemination: in step t each rank tells rank + 2**t all it has heard.

    barrier, 5 ranks: of whom rank 0 has heard

      start     0
      t = 0     0 4              from 4
      t = 1     0 4 3 2          from 3
      t = 2     0 4 3 2 1        from 1 (who has heard of 1 0 4 3)

Steps ceil(log2(size)), one message without bytes each. News may arrive twice, which does no harm in a barrier and
would in a sum.

References
----------
Hensgen, Finkel, Manber: Two Algorithms for Barrier Synchronization, International Journal of Parallel Programming,
1988.
"""

from __future__ import annotations

import numpy as np

from hrdma.topo.cost import Work
from hrdma.topo.schedule import REDUCE, Schedule, involved, rows

__all__ = ["COLLECTIVES", "build", "work"]

COLLECTIVES = ("barrier",)


def build(collective: str, size: int, parts: int = 1, root: int = 0, rank: int | None = None) -> Schedule:
    """The schedule; `parts` is ignored."""
    step = np.arange((size - 1).bit_length(), dtype=np.int32)[:, None]
    src = np.arange(size, dtype=np.int32)
    table = involved(rows(step, src, (src + (1 << step)) % size, 0, REDUCE), rank)
    return Schedule(collective, size, table, 1, root, "dissemination", view=rank)


def work(collective: str, size: int, nbytes: float, parts: int = 1) -> Work:
    """Closed form."""
    levels = (size - 1).bit_length()
    return Work(levels, levels, 0, 0, 0)

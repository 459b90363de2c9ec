"""Pairwise: in step k each rank sends to rank + k and receives from rank - k, a few steps at a time.

    alltoall, 4 ranks, xy: block from x to y

      round   rank 0   rank 1   rank 2   rank 3
      0       01       12       23       30
      1       02       13       20       31
      2       03       10       21       32

Steps size - 1, bytes: what the rank sends, each block once. The messages are those of the direct algorithm; what
differs is that a rank starts step k only when its sends of step k - 2 have ended, so that at any time a rank receives
from few others: kinder to a network without full bisection, slower where peers are late.

References
----------
Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, IJHPCA, 2005 (section 3.4).
"""

from __future__ import annotations

import numpy as np

from hrdma.topo.cost import Work
from hrdma.topo.schedule import COPY, Schedule, involved, rows

__all__ = ["COLLECTIVES", "build", "work"]

COLLECTIVES = ("alltoall",)
_WINDOW = 2


def build(collective: str, size: int, parts: int = 1, root: int = 0, rank: int | None = None) -> Schedule:
    """The schedule; `parts` is ignored: a block is one message."""
    step = np.arange(1, size, dtype=np.int32)[:, None]
    src = np.arange(size, dtype=np.int32)
    dst = (src + step) % size
    table = involved(rows(step - 1, src, dst, src * size + dst, COPY), rank)
    return Schedule(collective, size, table, 1, root, "pairwise", window=_WINDOW, view=rank)


def work(collective: str, size: int, nbytes: float, parts: int = 1) -> Work:
    """Closed form."""
    most = nbytes * (size - 1) / size
    return Work(-(-(size - 1) // _WINDOW), size - 1, most, most, 0)

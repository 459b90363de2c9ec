"""Exchange: every rank sends the whole vector to every other, and each reduces all of them by itself.

    allreduce, 3 ranks, x y z the vectors of rank 0 1 2

      rank     0         1         2
      round 0  x>1 x>2   y>0 y>2   z>0 z>1      then each: (x + y) + z

One step, size - 1 messages of the whole vector each way: for vectors so small that only the number of dependent steps
matters. The association is left to right in rank order on every rank, so it serves deterministic mode too.

References
----------
Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, IJHPCA, 2005 (the one-step
case of their all-to-all broadcast for short messages).
"""

from __future__ import annotations

from hrdma.topo.algorithms.direct import pairs
from hrdma.topo.cost import LANDED, Work, effort
from hrdma.topo.schedule import REDUCE, Schedule, rows

__all__ = ["COLLECTIVES", "build", "work"]

COLLECTIVES = ("allreduce",)


def build(collective: str, size: int, parts: int = 1, root: int = 0, rank: int | None = None) -> Schedule:
    """The schedule; `parts` is ignored: the vector is one message."""
    src, dst = pairs(size, rank)
    return Schedule(collective, size, rows(0, src, dst, 0, REDUCE), 1, root, "exchange", view=rank)


def work(collective: str, size: int, nbytes: float, parts: int = 1) -> Work:
    """Closed form. All operands land in scratch before they are reduced."""
    return Work(1, size - 1, (size - 1) * nbytes, 0, (size - 1) * nbytes, effort=effort(size) + LANDED, copies=size - 1)

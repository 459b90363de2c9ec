"""Parameter server: P of the ranks own 1 / P of the vector each, gather all contributions to it and hand out the result.

    4 ranks, 2 servers (ranks 0 and 2), shares a b

      round 0   1 2 3 > 0: a    0 1 3 > 2: b
      round 1   0 > 1 2 3: A    2 > 0 1 3: B

Servers are ranks as the others are (in the middle of what they serve). Steps 2; bytes 2 (ranks - 1) / P of the vector
through each server's NIC: one server is the star that all else is compared with, and P = ranks is `direct`.

References
----------
Li et al.: Scaling Distributed Machine Learning with the Parameter Server, OSDI, 2014.
"""

from __future__ import annotations

import numpy as np

from hrdma.topo.cost import Work, effort
from hrdma.topo.schedule import COPY, REDUCE, Schedule, involved, join, rows

__all__ = ["COLLECTIVES", "build", "work"]

COLLECTIVES = ("allreduce",)


def build(size: int, servers: int, parts: int = 1, rank: int | None = None) -> Schedule:
    """The schedule; `parts`: pieces of each server's share.

    Raises
    ------
    ValueError
        When there are not 1 to `size` servers.
    """
    if not 1 <= servers <= size:
        raise ValueError(f"{servers} servers among {size} ranks; take 1 to {size}")
    owner = np.arange(servers, dtype=np.int32) * size // servers
    ahead = np.arange(1, size, dtype=np.int32)[:, None, None]
    part = np.arange(parts, dtype=np.int32)[:, None]
    other, chunk = (owner + ahead) % size, np.arange(servers, dtype=np.int32) * parts + part
    table = join(rows(0, other, owner, chunk, REDUCE), rows(1, owner, other, chunk, COPY))
    return Schedule("allreduce", size, involved(table, rank), servers * parts, name=f"server-{servers}", view=rank)


def work(size: int, servers: int, nbytes: float, parts: int = 1) -> Work:
    """Closed form: what a server does."""
    share = nbytes * (size - 1) / servers
    return Work(2, 2 * (size - 1) * parts, 2 * share, nbytes, share, servers / size, effort(size))

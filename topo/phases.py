"""From one reduce-scatter to the collectives: its transpose is the allgather, both together are the allreduce.

An algorithm writes the reduce-scatter over chunks of its own order, and says which rank owns each at the end. Transposed
(rounds backwards, sources and destinations exchanged, copies instead of reductions) it is the allgather:

    reduce-scatter   round 0: 1 > 0 +    round 1: 2 > 0 +        contributions to a chunk of rank 0
    allgather        round 1: 0 > 1      round 0: 0 > 2          its result to all

Where the caller's blocks are the ranks' (reduce_scatter, allgather), the chunks are renumbered so that block r holds those
of rank r. A reduce is the reduce-scatter and those transfers of the allgather that bring something nearer to the root (the
algorithm says which); transposed it is the broadcast: a scatter, and the rest of the allgather.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hrdma.topo.schedule import CHUNK, COPY, DST, LANE, OP, ROUND, SPAN, SRC, Schedule, involved, join

__all__ = ["COLLECTIVES", "ROOTED", "Written", "assemble"]

COLLECTIVES = ("allreduce", "reduce_scatter", "allgather")
ROOTED = ("reduce", "broadcast")


class Written(NamedTuple):
    """A reduce-scatter, all of it or the rows of one rank."""

    table: np.ndarray  #: of reductions
    back: np.ndarray  #: per row, the lane of the same way in the other direction
    owner: np.ndarray  #: per chunk, the rank that ends with it; each rank owns as many
    rounds: int
    inward: np.ndarray | None = None  #: per row, whether its transpose brings something nearer to the root


def transposed(table: np.ndarray, back: np.ndarray, rounds: int, op: int) -> np.ndarray:
    """The rows in the other direction of time and space."""
    turned = table.copy()
    turned[:, ROUND] = rounds - 1 - table[:, ROUND]
    turned[:, SRC], turned[:, DST] = table[:, DST], table[:, SRC]
    turned[:, OP], turned[:, LANE] = op, back
    return turned


def assemble(
    collective: str, size: int, written: Written, name: str, root: int = 0, rank: int | None = None, window: int = 0
) -> Schedule:
    """The schedule of a collective from a reduce-scatter.

    Parameters
    ----------
    collective : str
        One of `COLLECTIVES`; of `ROOTED` too where the algorithm wrote `inward`.
    rank : int, optional
        The rank to which the rows were narrowed.
    """
    scatter, back, owner, rounds, inward = written
    gather = transposed(scatter, back, rounds, COPY)
    split = len(owner)
    if collective == "allreduce":
        gather[:, ROUND] += rounds
        table = join(scatter, gather)
    elif collective in ROOTED:
        if inward is None:
            raise ValueError(f"{name} cannot do {collective}: it does not say which of its transfers lead to a root")
        gather[:, ROUND] += rounds
        if collective == "reduce":
            table = join(scatter, gather[inward])
        else:
            out = scatter[inward]  # whoever sends there keeps what it had
            out[:, OP] = COPY
            table = join(out, gather[~inward])
    else:
        split //= size
        table = join(_renumbered(gather if collective == "allgather" else scatter, owner, size))
    return Schedule(collective, size, involved(table, rank), split, root, name, window=window, view=rank)


def _renumbered(table: np.ndarray, owner: np.ndarray, size: int) -> np.ndarray:
    """One row per chunk, and the chunks of rank r are those of block r."""
    per_rank = len(owner) // size
    order = np.argsort(owner, kind="stable")
    number = np.empty(len(owner), np.int32)
    number[order] = owner[order] * per_rank + np.arange(len(owner), dtype=np.int32) % per_rank
    spans = table[:, SPAN]
    single = np.repeat(table, spans, axis=0)
    within = np.arange(len(single)) - np.repeat(np.cumsum(spans) - spans, spans)
    single[:, CHUNK] = number[single[:, CHUNK] + within]
    single[:, SPAN] = 1
    return single

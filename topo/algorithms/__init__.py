"""The table of algorithms: name, what it can do, and whether its association is left to right in rank order."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hrdma.topo.algorithms import (
    binomial,
    direct,
    dissemination,
    doubling,
    exchange,
    halving,
    pairwise,
    ring,
    scatter_gather,
)
from hrdma.topo.cost import Work
from hrdma.topo.schedule import Schedule

__all__ = ["ALGORITHMS", "Algorithm", "build"]


class Algorithm(NamedTuple):
    """One line of the table."""

    build: Callable[..., Schedule]  #: (collective, size, parts=1, root=0, rank=None) -> Schedule
    work: Callable[..., Work]  #: (collective, size, nbytes, parts=1) -> Work
    collectives: tuple[str, ...]
    ordered: tuple[str, ...] = ()  #: collectives whose reductions are one pass in rank order
    parts: tuple[str, ...] = ()  #: collectives that use `parts`: long vectors move in pieces that overlap
    short: tuple[str, ...] = ()  #: collectives for which it is chosen only up to `hrdma.topo.choice.SHORT` bytes
    pulls: int = 0  #: chosen only from so many bytes on where peers' memory is read in place; 0: anywhere


ALGORITHMS: dict[str, Algorithm] = {
    "direct": Algorithm(direct.build, direct.work, direct.COLLECTIVES,
                        ordered=("allreduce", "reduce", "reduce_scatter"),
                        parts=tuple(c for c in direct.COLLECTIVES if c != "barrier")),
    "scatter_gather": Algorithm(scatter_gather.build, scatter_gather.work, scatter_gather.COLLECTIVES,
                                ordered=("reduce",), parts=scatter_gather.COLLECTIVES, pulls=128 << 10),
    "exchange": Algorithm(exchange.build, exchange.work, exchange.COLLECTIVES, ordered=("allreduce",)),
    "doubling": Algorithm(doubling.build, doubling.work, doubling.COLLECTIVES),
    "halving": Algorithm(halving.build, halving.work, halving.COLLECTIVES, parts=("allreduce",),
                         short=("reduce_scatter", "allgather")),
    "ring": Algorithm(ring.build, ring.work, ring.COLLECTIVES, parts=ring.COLLECTIVES),
    "binomial": Algorithm(binomial.build, binomial.work, binomial.COLLECTIVES, parts=("broadcast", "reduce")),
    "pairwise": Algorithm(pairwise.build, pairwise.work, pairwise.COLLECTIVES),
    "dissemination": Algorithm(dissemination.build, dissemination.work, dissemination.COLLECTIVES),
}  # fmt: skip


def build(name: str, collective: str, size: int, parts: int = 1, root: int = 0, rank: int | None = None) -> Schedule:
    """The schedule of an algorithm by name.

    Parameters
    ----------
    name, collective : str
    size : int
        Ranks.
    parts : int
        Pieces of each share that move on their own, so that rounds of successive pieces overlap.
    root : int
        For rooted collectives.
    rank : int, optional
        Only this rank's transfers.

    Raises
    ------
    ValueError
        An unknown name, a collective that it cannot do, or a number out of range.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {name!r}; known: {', '.join(ALGORITHMS)}")
    if collective not in ALGORITHMS[name].collectives:
        raise ValueError(f"{name} cannot do {collective}; it does {', '.join(ALGORITHMS[name].collectives)}")
    if size < 1 or parts < 1 or not 0 <= root < size or (rank is not None and not 0 <= rank < size):
        raise ValueError(f"out of range: size {size}, parts {parts}, root {root}, rank {rank}")
    return ALGORITHMS[name].build(collective, size, parts=parts, root=root, rank=rank)

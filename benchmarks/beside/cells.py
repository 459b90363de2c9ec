"""What can be asked: a cell is one size of one case on one transport and number of ranks; which of them a run takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from beside import across
from hrdma.bench.sizes import parse_size, show_size

__all__ = ["CASES", "FULL", "QUICK", "TRANSPORTS", "Cell", "Selection", "cells"]

ELEMENT = 4  # bytes of a float32
K, M = 1 << 10, 1 << 20


@dataclass(frozen=True)
class What:
    """A case in the table.

    Attributes
    ----------
    sizes : tuple of int
        Bytes that the full table shows; each is of a rank's larger buffer.
    unit : str
        What a figure is shown in: "us", "ms" or "GB/s".
    pair : bool
        Whether it is between two ranks.
    """

    sizes: tuple[int, ...]
    unit: str
    pair: bool = False


CASES = {
    "pingpong": What((8, K, 64 * K), "us", pair=True),
    "bandwidth": What((M, 16 * M, 256 * M), "GB/s", pair=True),
    "allreduce": What((4 * K, 256 * K, 4 * M, 64 * M, 256 * M), "ms"),
    "reduce": What((64 * M,), "ms"),
    "reduce_scatter": What((64 * M,), "ms"),
    "allgather": What((64 * M,), "ms"),
    "alltoall": What((64 * M,), "ms"),
    "broadcast": What((64 * M,), "ms"),
}


@dataclass(frozen=True)
class Carrier:
    """A transport in the table: the numbers of ranks and the cases that are shown on it."""

    worlds: tuple[int, ...]
    cases: tuple[str, ...]
    others: bool = True  #: whether other numbers of ranks can be had


MAIN = ("pingpong", "bandwidth", "allreduce")
TRANSPORTS = {
    "shm": Carrier((2, 4, 8), tuple(CASES)),
    "tcp": Carrier((2, 4), tuple(CASES)),
    "tcp-cubic": Carrier((2,), MAIN),  # after the dash: the congestion control, where it is not the system's
    "namespaces": Carrier((2,), MAIN, others=False),  # tcp, a rank in each: `across`; as root
}


@dataclass(frozen=True)
class Cell:
    """One figure of a peer."""

    transport: str
    world: int
    case: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.transport}, {self.world} ranks, {self.case} {show_size(self.nbytes)}"


@dataclass(frozen=True)
class Selection:
    """What a run measures; sizes in bytes. Where worlds, cases or sizes are none: those of the table."""

    transports: tuple[str, ...]
    worlds: tuple[int, ...] = ()
    cases: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    def validate(self) -> None:
        """Refuses what is not there.

        Raises
        ------
        ValueError
            Says the wrong value and what there is.
        """
        for name, found, known in (
            ("transport", self.transports, tuple(TRANSPORTS)),
            ("case", self.cases, tuple(CASES)),
        ):
            for value in found:
                if value not in known:
                    raise ValueError(f"no {name} {value!r}; there are: {', '.join(known)}")
        for world in self.worlds:
            if not 2 <= world <= 64:
                raise ValueError(f"{world} ranks: choose 2 to 64")
        selected = list(cells(self))
        if not selected:
            raise ValueError("nothing to measure: pingpong, bandwidth and namespaces are for 2 ranks")
        for cell in selected:
            if cell.nbytes < ELEMENT * cell.world:
                raise ValueError(f"{cell}: choose a size with an element of {ELEMENT} bytes for each rank")


FULL = Selection(tuple(name for name in TRANSPORTS if name != across.TRANSPORT or across.possible()))
QUICK = Selection(("shm",), (2, 4), MAIN)


def cells(selection: Selection) -> Iterator[Cell]:
    """The cells of a selection, those of one job of ranks together."""
    for transport in selection.transports:
        table = TRANSPORTS[transport]
        for world in selection.worlds or table.worlds:
            if world not in table.worlds and not table.others:
                continue
            for name in selection.cases or table.cases:
                case = CASES[name]
                if case.pair and world != 2:
                    continue
                for nbytes in selection.sizes or case.sizes:
                    yield Cell(transport, world, name, nbytes)


def parse_list(text: str, known: Iterable[str] = ()) -> tuple[str, ...]:
    """The names of "a,b"; each must be known where something is."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    known = tuple(known)
    for name in found:
        if known and name not in known:
            raise ValueError(f"no {name!r} here; there are: {', '.join(known)}")
    if not found:
        raise ValueError(f"{text!r} names nothing")
    return found


def parse_sizes(text: str) -> tuple[int, ...]:
    """Bytes of "4K,256K"."""
    return tuple(parse_size(part) for part in parse_list(text))

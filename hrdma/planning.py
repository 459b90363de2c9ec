"""Planning: picks an algorithm for a call and lowers it to the program that the core runs.

The only module that knows both sides: what `hrdma.topo` plans, and what `hrdma._core` takes. Pure: the same arguments
give the same plan, and arguments that must be equal on all ranks decide alone which algorithm and how many parts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hrdma.topo.algorithms import ALGORITHMS
from hrdma.topo.choice import Choice, choose
from hrdma.topo.cost import DEFAULT_COST, NETWORK, Cost
from hrdma.topo.layout import block_counts
from hrdma.topo.lower import lower
from hrdma.topo.program import INSTR, REF, ProgramSpec
from hrdma.types import COLLECTIVES, DTYPES, OPS

__all__ = ["INSTR", "REF", "Cost", "Plan", "ProgramSpec", "cost_of", "lower", "plan"]


@dataclass(frozen=True, eq=False)
class Plan(ProgramSpec):
    """A program, and why this one."""

    choice: Choice | None = None

    @property
    def explanation(self) -> str:
        """One line for people: algorithm, prediction, and what the alternatives would take."""
        return "" if self.choice is None else self.choice.explain()


def plan(
    collective: str,
    *,
    size: int,
    rank: int,
    counts=0,
    itemsize: int = 1,
    dtype: str = "uint8",
    op: str | None = "sum",
    root: int | None = 0,
    deterministic: bool = False,
    in_place: bool = False,
    cost: Cost | None = None,
    mapped: bool = False,
    algorithm: str | None = None,
    parts: int | None = None,
) -> Plan:
    """The program of one rank for a collective call.

    Parameters
    ----------
    collective : str
        One of `hrdma.types.COLLECTIVES`.
    size, rank, root : int
        `root` is ignored where there is none.
    counts : int, sequence of int, or pair of sequences
        Elements: of the vector (allreduce, reduce, broadcast), of each rank's block (allgather, reduce_scatter, gather,
        scatter; one int: all alike), what this rank (sends to, receives from) each rank (alltoall; one int: all alike).
    itemsize : int
        Bytes of an element.
    dtype, op : str
        Only their names: whether the association matters. Ignored where nothing is reduced.
    deterministic : bool
        One association: rank order, left to right, rounded once.
    in_place : bool
        Input and output are the same memory: allreduce, reduce, alltoall the whole buffer; allgather and gather the own
        block of the output; reduce_scatter and scatter the own block of the input. A broadcast always is.
    cost : Cost, optional
        Of the slowest connection in use. Every rank must plan with the same cost, and the same `mapped`.
    mapped : bool
        Peers' buffers can be read in place (shared memory).
    algorithm : str, optional
        Only this one (measurements); every rank must ask for the same.
    parts : int, optional
        Only so many; with `algorithm`.

    Returns
    -------
    Plan
        With `explanation`. Buffers as in `hrdma.topo.layout`.

    Raises
    ------
    ValueError
        An unknown collective, dtype or op, a rank or root out of range, counts of the wrong length, an algorithm that
        cannot do it.

    Notes
    -----
    Pure; takes about 0.1 ms for a small call and 2 ms for one of many chunks: cache the result. The choice depends on
    arguments that are equal on every rank only (for alltoall: not on a rank's own counts).
    """
    if collective not in COLLECTIVES:
        raise ValueError(f"unknown collective {collective!r}; known: {', '.join(COLLECTIVES)}")
    if collective in ("allreduce", "reduce", "reduce_scatter"):
        if dtype not in DTYPES:
            raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
        if op not in OPS:
            raise ValueError(f"unknown op {op!r}; known: {', '.join(OPS)}")
    root = root or 0
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not in [0, {size})")
    if not 0 <= root < size:
        raise ValueError(f"root {root} is not in [0, {size})")
    if itemsize < 1:
        raise ValueError(f"itemsize must be at least 1, not {itemsize}")
    if collective == "alltoall":
        # counts of a rank's own may decide nothing that others must decide alike
        nbytes = size * counts * itemsize if isinstance(counts, int) else 0
    else:
        nbytes = sum(block_counts(collective, size, rank, counts)) * itemsize
    choice = choose(
        collective, size, nbytes, cost or DEFAULT_COST["shm" if mapped else "tcp"], mapped=mapped,
        deterministic=deterministic and not dtype.startswith(("int", "uint")), algorithm=algorithm, parts=parts,
    )  # fmt: skip
    schedule = ALGORITHMS[choice.algorithm].build(collective, size, parts=choice.parts, root=root, rank=rank)
    spec = lower(schedule, rank, counts, itemsize, in_place=in_place)
    return Plan(**vars(spec), choice=choice)


def cost_of(links: Collection[str], members: Sequence[Mapping[str, Any]], cards: Sequence[Mapping[str, Any]]) -> Cost:
    """Cost parameters of a communicator: those of its slowest connections.

    Parameters
    ----------
    links : collection of str
        Providers between its ranks.
    members, cards : sequence of mapping
        The cards of its ranks, and of all ranks of the job: `host`, `cpus` (mask in hexadecimal), `costs` (measured, by
        provider).

    Notes
    -----
    Pure. Measured costs are those of the lowest member that has any, or of the lowest rank of all: whoever knows all
    cards finds the same.
    """

    def known(name: str) -> Cost:
        found = (card["costs"][name] for card in [*members, *cards] if name in card["costs"])
        return next((Cost(**fields) for fields in found), DEFAULT_COST[name])

    cost = max(map(known, sorted(links) or ["loop"]), key=lambda cost: (cost.beta, cost.alpha))
    if len({card["host"] for card in members}) > 1:
        if cost.offload:
            return cost
        # measured on one host: the network adds its own
        beta, latency = max(cost.beta, NETWORK.beta), max(cost.latency, NETWORK.latency)
        return replace(cost, beta=beta, latency=latency, offload=True, name=f"{cost.name}, over {NETWORK.name}")
    cpus = 0
    for card in members:
        cpus |= int(card["cpus"], 16)
    return replace(cost, cores=bin(cpus).count("1"))

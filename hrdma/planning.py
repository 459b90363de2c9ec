"""Planning: picks an algorithm for a call and lowers it to the program that the core runs.

The only module that knows both sides: what `hrdma.topo` plans, and what `hrdma._core` takes. Pure: the same arguments
give the same plan, and arguments that must be equal on all ranks decide alone which algorithm and how many parts.

A job that says on which fabric it runs has its collectives planned for that one (`Network`), lane by lane; what cannot be
planned there is planned as for any network, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hrdma.errors import ScheduleError
from hrdma.topo import fabric_file, plan_file
from hrdma.topo.algorithms import ALGORITHMS
from hrdma.topo.algorithms.on_fabric import lookup, refusal
from hrdma.topo.answers import answer
from hrdma.topo.choice import Choice, choose
from hrdma.topo.cost import DEFAULT_COST, NETWORK, SHOWN, Cost
from hrdma.topo.layout import block_counts
from hrdma.topo.lower import SCRATCH, lower
from hrdma.topo.planner import ROOTED, FabricPlan
from hrdma.topo.planner import plan as plan_on_fabric
from hrdma.topo.program import ASIDE_WITHIN, INSTR, REF, ProgramSpec, aside, stage
from hrdma.topo.routing import chunk_bytes
from hrdma.topo.schedule import DST, ROUND, Schedule
from hrdma.topo.slices import copied, joined, lengths, slicing
from hrdma.types import COLLECTIVES, DTYPES, OPS

if TYPE_CHECKING:
    from hrdma.communicator import Communicator
    from hrdma.topo.fabric import Fabric

__all__ = [
    "INSTR", "REF", "Cost", "Network", "Plan", "ProgramSpec", "Schedule", "cost_of", "discover", "discovered", "given", "lower", "network", "plan",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Plan(ProgramSpec):
    """A program, and why this one."""

    choice: Choice | None = None
    reason: str = ""  #: of a plan for a fabric; else why it is not one, where there is a fabric
    aside: int = 0  #: of `_core.Program`
    slices: int = 1  #: of a vector, one after the other: the choice is that of one
    sliceable: bool = False  #: in slices, or on a copy, if that is asked for

    @property
    def explanation(self) -> str:
        """One line for people: algorithm, prediction, and what the alternatives would take."""
        chosen = "" if self.choice is None else self.choice.explain()
        copied = "plain arrays are copied to where peers can map them" if self.aside else ""
        sliced = f"in {self.slices} slices" if self.slices > 1 else ""
        return "; ".join(filter(None, [chosen, sliced, copied, self.reason]))


@dataclass(frozen=True)
class Network:
    """The fabric of a job, and the plan that it was given.

    Attributes
    ----------
    fabric : Fabric
    given : FabricPlan, optional
        Runs in place of what would be planned for its collective (and root).
    """

    fabric: Fabric
    given: FabricPlan | None = None

    def digest(self) -> str:
        """Equal on ranks that will plan alike."""
        if self.given is None:
            return self.fabric.digest()
        return f"{self.fabric.digest()} with plan {self.given.schedule().digest()}"

    def plan(
        self, collective: str, *, rank: int, counts, itemsize: int, root: int, in_place: bool, deterministic: bool, cost: Cost,
        algorithm: str | None = None, parts: int | None = None, landing: int = 0,
    ) -> Plan | str:  # fmt: skip
        """The program of one rank for a collective of all ranks, or why there is none.

        Parameters
        ----------
        algorithm : str, optional
            Only this one, in so many `parts` (1).
        collective, rank, counts, itemsize, root, in_place, cost, landing
            As in `plan`.
        deterministic : bool
            Whether the association matters.

        Raises
        ------
        ValueError
            An `algorithm` that cannot do it.

        Notes
        -----
        Time: about 0.1 s the first time for 9 hosts, then a few milliseconds. Memory: scratch for what a rank receives in
        one round, up to the size of the vector; with less, messages by one NIC would wait for those by another. Schedules are compared at the next power of
        two of the bytes, so that sizes that differ little share one.
        """
        if deterministic:
            return "plans for a fabric reduce in other orders than that of the ranks"
        if not isinstance(counts, int):
            return "plans for a fabric have blocks of one length"
        blocks = self.fabric.ranks if collective in _BLOCKS else 1
        nbytes = _power(counts * itemsize * blocks)
        given, made = self.given, None
        try:
            if algorithm is not None:
                if why := refusal(algorithm, collective, self.fabric):
                    raise ValueError(f"{algorithm} cannot plan {collective} on {self.fabric.name}: {why}")
                schedule = lookup(algorithm).build(collective, self.fabric, parts or 1, root, rank)
            elif (
                given is not None
                and given.collective == collective
                and (collective not in ROOTED or given.root == root)
            ):
                made, schedule = given, given.schedule(rank)
            else:
                made = plan_on_fabric(collective, self.fabric, nbytes, cost, root=root)
                schedule = made.schedule(rank)
            scratch = _of_one_round(schedule, rank, counts * itemsize * blocks)
            spec = lower(schedule, rank, counts, itemsize, in_place=in_place, scratch=scratch, landing=landing)
        except ValueError as error:  # no algorithm has this collective here, or a given plan does not do for the counts
            if algorithm is not None:
                raise
            return str(error)
        reason = f"{algorithm} on {self.fabric.name}" if made is None else made.explain().partition("\n")[0]
        return Plan(**vars(spec), reason=reason)


_PADDING = 4096  # of a transfer's place in scratch: more than alignment takes
_BLOCKS = ("allgather", "reduce_scatter", "gather", "scatter", "alltoall")


def _of_one_round(schedule: Schedule, rank: int, nbytes: int) -> int:
    """Bytes of scratch in which all that a rank receives in a round fits at once, and never less than usual."""
    mine = schedule.for_rank(rank)
    arriving = mine.table[:, DST] == rank
    each = chunk_bytes(mine, nbytes)[arriving] + _PADDING
    return max(SCRATCH, int(np.bincount(mine.table[arriving, ROUND], each).max(initial=0)))


def _power(nbytes: int) -> int:
    return 1 << max(0, nbytes - 1).bit_length() if nbytes else 0


def network(fabric: str, given: str, ranks: int) -> Network | None:
    """What the settings ``HRDMA_FABRIC`` and ``HRDMA_PLAN`` say.

    Parameters
    ----------
    fabric : str
        Path of a TOML file, or the name of a fabric such as ``bcube:3,2``; empty: that of the plan, if any.
    given : str
        Path of a plan; empty: none.
    ranks : int
        Of the job.

    Returns
    -------
    Network or None
        None where neither is said.

    Raises
    ------
    ValueError
        The fabric is malformed, or has another number of ranks.
    ScheduleError
        The plan is wrong, or is for another fabric; the message names rank and chunk.
    OSError
        A file cannot be read.
    """
    found = fabric_file.find(fabric) if fabric else None
    made = plan_file.load(given, found) if given else None
    found = found or (made.fabric if made else None)
    if found is None:
        return None
    if found.ranks != ranks:
        raise ValueError(f"the fabric {found.name} ({fabric or given}) has {found.ranks} ranks, the job {ranks}")
    return Network(found, made)


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
    opened: bool = False,
    sliced: bool = False,
    landing: int = 0,
    algorithm: str | None = None,
    parts: int | None = None,
    on: Network | None = None,
    schedule: Schedule | None = None,
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
    opened : bool
        A short allreduce, in place, of two ranks whose buffers are registered: each sums a half of both, and writes the
        result to both (direct). A long reduce of two such ranks: each sums a half and writes it to the root
        (scatter_gather), which takes longer than direct where memory is not registered. The same on both ranks.
    sliced : bool
        In slices, as no rank's memory can be mapped by its peers, or on a copy (`topo.slices`), where that is faster. The same
        on all ranks; but for an allreduce of one slice, where it is each rank's own affair. Ignored where nothing is mapped.
    landing : int
        As in `lower`. Ranks may differ in it.
    algorithm : str, optional
        Only this one (measurements); every rank must ask for the same.
    parts : int, optional
        Only so many; with `algorithm`.
    on : Network, optional
        What the ranks run on: planned for that where it can be, else as for any network, with the `reason`.
    schedule : Schedule, optional
        Only this one, as `given` returned it.

    Returns
    -------
    Plan
        With `explanation`. Buffers as in `hrdma.topo.layout`.

    Raises
    ------
    ValueError
        An unknown collective, dtype or op, a rank or root out of range, counts of the wrong length, an algorithm that
        cannot do it.
    ScheduleError
        The schedule is of another collective or root, or not in rank order where that matters.

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
    rounded = deterministic and not dtype.startswith(("int", "uint"))
    if schedule is not None:
        return _of_given(
            schedule, collective, size, rank, counts, itemsize, root, in_place, rounded, nbytes, landing
        )  # fmt: skip
    why = ""
    if on is not None:
        found = on.plan(
            collective, rank=rank, counts=counts, itemsize=itemsize, root=root, in_place=in_place, deterministic=rounded,
            cost=cost or NETWORK, algorithm=algorithm, parts=parts, landing=landing,
        )  # fmt: skip
        if isinstance(found, Plan):
            return found
        why = found
    if opened and mapped and algorithm is None and collective == "allreduce":
        algorithm, parts = "direct", 1
    known = cost or DEFAULT_COST["shm" if mapped else "tcp"]
    crowded = mapped and cost is not None and cost.crowd(size) > 1
    free = algorithm is None or (mapped and collective == "allreduce")  # a reduce in slices has another's algorithms
    sliceable = free and cost is not None and isinstance(counts, int)
    way = slicing(collective, size, nbytes, known, mapped) if sliceable else None
    each = lengths(counts, itemsize, way.nbytes) if way and (sliced or not mapped) else [counts]
    slices, copies = len(each), way is not None and way.copies and sliced
    kind = "allreduce" if copies else collective  # a reduce as well: hrdma.topo.slices
    choice = choose(
        kind, size, nbytes if slices == 1 else each[0] * itemsize, known, mapped=mapped,
        deterministic=rounded, algorithm=algorithm, parts=parts,
        without=_slower(size, nbytes, crowded, opened),
    )  # fmt: skip
    schedule = ALGORITHMS[choice.algorithm].build(kind, size, parts=choice.parts, root=root, rank=rank)

    def lowered(count, in_place: bool = in_place) -> ProgramSpec:
        spec = lower(schedule, rank, count, itemsize, in_place=in_place, landing=landing, packet=known.packet)
        if mapped:
            answer(spec)
        if mapped and cost is not None and not crowded:
            stage(spec, cost.staged)
        return spec

    if way and (slices > 1 or copies):
        out = collective == "allreduce" or rank == root
        made = {n: copied(lowered(n, True), in_place, out) if copies else lowered(n) for n in set(each)}
        spec, what = joined([made[n] for n in each], way.ahead), ASIDE_WITHIN if copies else 0
    else:
        spec = lowered(counts)
        what = aside(spec, collective, nbytes, root) if crowded else 0
    reason = why and f"not planned for {on.fabric.name}: {why}" if on else ""
    return Plan(
        **vars(spec), choice=choice, aside=what, slices=slices, sliceable=mapped and way is not None, reason=reason
    )


_UNASKED = 4 << 10  # bytes of a message above which ranks that share cores read what is mapped where it lies


def _slower(size: int, nbytes: int, crowded: bool, opened: bool) -> tuple[str, ...]:
    """Algorithms that take longer than their closed forms say."""
    found = ("scatter_gather",) if size == 2 and not opened else ()
    # each step overwrites what the last one's peer has to have read; what goes to all alike is copied once (Cost.shown)
    return (*found, "doubling") if crowded and nbytes >= (_UNASKED + 1 if size == 2 else SHOWN) else found


def given(what: Schedule | str, size: int) -> Schedule:
    """The schedule that a call was given, proved.

    Parameters
    ----------
    what : Schedule or str
        Complete; or the path of a file of a plan, a schedule (JSON) or an MSCCL program (XML).
    size : int
        Ranks of the communicator.

    Raises
    ------
    TypeError
        Neither a schedule nor a path.
    ScheduleError
        For another number of ranks; wrong, with rank and chunk; one rank's view; a file that holds none.
    OSError
        The file cannot be read.

    Notes
    -----
    Cost: that of `Schedule.check`, about 1 us for each transfer and chunk.
    """
    if isinstance(what, str):
        return plan_file.prove(what, ranks=size)
    if not isinstance(what, Schedule):
        raise TypeError(f"schedule={what!r}: a Schedule of hrdma.topo or the path of a file is wanted")
    if what.size != size:  # first: a proof for very many ranks takes long
        name = what.name or "the given schedule"
        raise ScheduleError(f"schedule= is for {what.size} ranks ({name}), the communicator has {size}")
    what.check()
    return what


def _of_given(
    schedule: Schedule, collective: str, size: int, rank: int, counts, itemsize: int, root: int, in_place: bool,
    ordered: bool, nbytes: int, landing: int,
) -> Plan:  # fmt: skip
    """The program of one rank of a schedule that is proved, but perhaps not for this call."""
    name = schedule.name or "the given schedule"
    if schedule.collective != collective:
        raise ScheduleError(f"schedule= is for {schedule.collective} ({name}), the call is {collective}")
    if collective in ROOTED and schedule.root != root:
        raise ScheduleError(f"schedule= has root {schedule.root} ({name}), the call root {root}")
    if ordered:
        try:
            schedule.check(ordered=True, single=True)
        except ScheduleError as error:
            text = f"deterministic=True needs rank order, and {name} has another: {error}"
            raise ScheduleError(text, rank=error.rank, chunk=error.chunk) from None
    scratch = _of_one_round(schedule, rank, nbytes)
    spec = lower(schedule, rank, counts, itemsize, in_place=in_place, scratch=scratch, landing=landing)
    return Plan(**vars(spec), reason=f"{collective} on {size} ranks: {name}, as given")


def cost_of(links: Collection[str], members: Sequence[Mapping[str, Any]], cards: Sequence[Mapping[str, Any]]) -> Cost:
    """Cost parameters of a communicator: those of its slowest connections.

    Parameters
    ----------
    links : collection of str
        Providers between its ranks.
    members, cards : sequence of mapping
        The cards of its ranks, and of all ranks of the job: `host`, `machine` (hosts may share one: namespaces, containers),
        `cpus` (mask in hexadecimal), `costs` (measured, by provider).

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
        cost = replace(cost, packet=0)  # that of the loopback
    if len({card["machine"] for card in members}) > 1:
        if cost.offload:
            return cost
        # measured on one host: the network adds its own
        beta, latency = max(cost.beta, NETWORK.beta), max(cost.latency, NETWORK.latency)
        return replace(cost, beta=beta, latency=latency, offload=True, name=f"{cost.name}, over {NETWORK.name}")
    cpus = 0
    for card in members:
        cpus |= int(card["cpus"], 16)
    return replace(cost, cores=bin(cpus).count("1"))


def discover(comm: Communicator) -> Fabric:
    """Measures the network of a running job. Collective: all ranks of the communicator call it.

    Parameters
    ----------
    comm : Communicator

    Returns
    -------
    Fabric
        The same on all ranks, with the names of the NICs (``interfaces``): kept in a file (`hrdma.topo.fabric_file.dump`)
        it is what the setting ``HRDMA_FABRIC`` takes. Rates are bits of payload per second.

    Raises
    ------
    ValueError
        The hosts are not of one kind (other numbers of ranks or NICs than `hrdma.topo.infer.infer` takes), or one is
        reached by no other.

    Notes
    -----
    NICs of one subnet count as joined by a switch, or by a cable where there are two; subnets that leave hosts apart count
    as one where routers join them. Each NIC is measured with every other of its subnet, in subnets of more than 16 NICs with
    those 1, 2, 4, 8 and so on further; a pair that is less than half as fast as both are with others is named in a warning.
    About 0.3 s for each NIC of a host and each that it is measured with, during which the network is full, and 2 s for a
    subnet that cannot be reached. ``HRDMA_IFNAME`` says which NICs count.
    """
    from hrdma.discovery import discover as measured
    from hrdma.discovery import over

    runtime = comm._runtime
    return measured(comm.rank, [runtime.cards[rank] for rank in comm.members], runtime.config.ifname, over(comm))


def discovered(
    rank: int,
    cards: Sequence[dict[str, Any]],
    ifname: str,
    told: Callable[[str, dict[str, Any]], list[dict[str, Any]]],
) -> Network:
    """What a job runs on, measured before its ranks are connected (``HRDMA_FABRIC=discover``).

    Parameters
    ----------
    rank, cards, ifname, told
        As in `hrdma.discovery.discover`.

    Raises
    ------
    ValueError
        As `discover`.
    """
    from hrdma.discovery import discover as measured

    return Network(measured(rank, cards, ifname, told))

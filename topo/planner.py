"""The planner: every algorithm that fits a fabric, what each would take, and the cheapest as a plan.

Up to `SIMULATED` ranks each candidate is built and simulated, so contention counts; beyond, closed forms are compared, and
one rank builds nothing but its own view. The same call gives the same plan on every rank; plans are remembered.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hrdma.topo.algorithms.on_fabric import OnFabric, known, lookup, refusal
from hrdma.topo.cost import NETWORK, Cost, Work
from hrdma.topo.fabric import Fabric
from hrdma.topo.schedule import Schedule
from hrdma.topo.simulate import simulate
from hrdma.types import COLLECTIVES
from hrdma.units import in_bytes, in_seconds

__all__ = ["SIMULATED", "Candidate", "FabricPlan", "compare", "on_fabric", "plan"]

SIMULATED = 64  # ranks
ROOTED = ("broadcast", "reduce", "gather", "scatter")
_ACCURACY = 0.005  # of simulations
_PARTS = (1, 2, 4, 8, 16)
_LEAST_PART = 64 << 10  # bytes
_TIE = 1.02  # the prediction is not better than that
_REMEMBERED = 64  # plans


class Candidate(NamedTuple):
    """What an algorithm would take on a fabric."""

    algorithm: str
    parts: int
    seconds: float  #: of a call behind others: never less than the busiest link needs for its bytes, whatever its burst
    steps: int  #: rounds (of the closed form: dependent steps)
    per_nic: float  #: bytes that leave by the busiest NIC of a host, or by memory where there is only one host
    transfers: int  #: messages of all ranks; 0: not built
    simulated: bool  #: else the closed form, which knows no contention


def on_fabric(cost: Cost, fabric: Fabric) -> Cost:
    """The cost of messages between neighbours of a fabric, for closed forms: the slowest NIC, the longest latency."""
    if fabric.hosts == 1:
        rate, latency = fabric.memory_rate, fabric.memory_latency
    else:
        rate = fabric.nic_rate
        latency = max(link.latency for link in fabric.links) * (2 if fabric.switches else 1)
    return replace(cost, beta=8 / rate, latency=min(cost.latency + latency, 0.999), offload=True, pull=False)


def _candidates(
    able: OnFabric, collective: str, fabric: Fabric, nbytes: float, cost: Cost
) -> list[tuple[int, Work | None]]:
    """Numbers of parts worth a look, with their closed forms: one, and the best other."""
    whole = able.work(collective, fabric, nbytes, 1)
    found: list[tuple[int, Work | None]] = [(1, whole)]
    if whole is None or collective not in able.parts:
        return found
    limit = nbytes / fabric.ranks / _LEAST_PART
    forms = [(able.work(collective, fabric, nbytes, parts), parts) for parts in _PARTS[1:] if parts <= limit]
    timed = [(work.seconds(fabric.ranks, cost, parts), parts, work) for work, parts in forms if work is not None]
    if timed and min(timed)[0] < whole.seconds(fabric.ranks, cost, 1):
        _, parts, work = min(timed)
        found.append((parts, work))
    return found


def compare(
    collective: str,
    fabric: Fabric,
    nbytes: float,
    cost: Cost = NETWORK,
    *,
    root: int = 0,
    names: tuple[str, ...] | None = None,
    simulated: bool | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[list[Candidate], list[tuple[str, str]]]:
    """What every algorithm would take.

    Parameters
    ----------
    collective : str
    fabric : Fabric
    nbytes : float
        Of the whole vector (of all blocks together; alltoall: what one rank sends).
    cost : Cost
        Of messages and reductions to the cores.
    root : int
    names : tuple of str, optional
        Only these algorithms, in parts as the planner would take them.
    simulated : bool, optional
        Whether to simulate, or compare closed forms; by default simulate up to `SIMULATED` ranks.
    progress : callable, optional
        Called with (algorithm, transfers that arrived, all transfers) while one is simulated.

    Returns
    -------
    candidates : list of Candidate
        Best first: of those within 2 % of the fastest the one with the fewest steps, then the others by their time.
    refused : list of (algorithm, why)
        Those that do this collective, but not on this fabric; of `names` all that cannot.

    Raises
    ------
    ValueError
        An unknown collective or algorithm, bytes below 0, a root that is no rank.
    """
    if collective not in COLLECTIVES:
        raise ValueError(f"unknown collective {collective!r}; known: {', '.join(COLLECTIVES)}")
    if not 0 <= nbytes < float("inf"):
        raise ValueError(f"{nbytes} bytes cannot be planned for; give 0 or more")
    if not 0 <= root < fabric.ranks:
        raise ValueError(f"root {root} is no rank of {fabric.name}, which has {fabric.ranks}")
    if simulated is None:
        simulated = fabric.ranks <= SIMULATED
    found, refused, near = [], [], on_fabric(cost, fabric)
    for name in names or known():
        able = lookup(name)
        if names is None and collective not in able.collectives:
            continue
        if why := refusal(name, collective, fabric):
            refused.append((name, why))
            continue
        for parts, work in _candidates(able, collective, fabric, nbytes, near):
            if simulated:
                found.append(_simulated(name, able, collective, fabric, nbytes, cost, root, parts, progress))
            elif work is not None:
                seconds = work.seconds(fabric.ranks, near, parts)
                found.append(Candidate(name, parts, seconds, round(work.steps), work.per_nic, 0, False))
            else:
                refused.append((name, f"it has no closed form for {collective} on {fabric.name}"))
    found.sort(key=lambda candidate: candidate.seconds)
    if found:
        equal = [candidate for candidate in found if candidate.seconds <= found[0].seconds * _TIE]
        best = min(equal, key=lambda candidate: candidate.steps)
        found.remove(best)
        found.insert(0, best)
    return found, refused


def _simulated(name, able: OnFabric, collective, fabric: Fabric, nbytes, cost, root, parts, progress) -> Candidate:
    schedule = able.build(collective, fabric, parts, root, None)
    told = None if progress is None else lambda done, transfers: progress(name, done, transfers)
    result = simulate(schedule, fabric, nbytes, cost, accuracy=_ACCURACY, progress=told)
    leaving = list(fabric.host_links()) if fabric.hosts > 1 else slice(0, None)
    per_nic = float(result.link_bytes[leaving].max(initial=0.0))
    sustained = float((result.link_bytes * 8 / result.link_rates).max(initial=0.0))  # what bursts borrow is paid back
    return Candidate(name, parts, max(result.seconds, sustained), schedule.nrounds, per_nic, len(schedule.table), True)


@dataclass(frozen=True)
class FabricPlan:
    """A collective's schedule on a fabric, and why this one.

    Attributes
    ----------
    collective : str
    fabric : Fabric
    nbytes : float
    root : int
    candidates : tuple of Candidate
        The chosen one first, then the others, best first.
    refused : tuple of (algorithm, why)
    given : Schedule, optional
        The schedule of a file, in place of what the algorithm would write.
    """

    collective: str
    fabric: Fabric
    nbytes: float
    root: int
    candidates: tuple[Candidate, ...]
    refused: tuple[tuple[str, str], ...] = ()
    given: Schedule | None = None

    @property
    def algorithm(self) -> str:
        return self.candidates[0].algorithm

    @property
    def parts(self) -> int:
        return self.candidates[0].parts

    @property
    def seconds(self) -> float:
        """Predicted."""
        return self.candidates[0].seconds

    def schedule(self, rank: int | None = None) -> Schedule:
        """The schedule, complete or as one rank sees it."""
        if self.given is not None:
            return self.given if rank is None else self.given.for_rank(rank)
        return lookup(self.algorithm).build(self.collective, self.fabric, self.parts, self.root, rank)

    def explain(self) -> str:
        """Why this one and by how much, for people."""
        best, extent = self.candidates[0], in_bytes(self.nbytes)
        how = "simulated" if best.simulated else "by closed forms, without contention"
        edited = " (edited since)" if self.given is not None else ""
        rooted = f" with root {self.root}" if self.collective in ROOTED else ""
        lines = [
            f"{self.collective}{rooted} of {extent} on {self.fabric.name}, {self.fabric.ranks} ranks: "
            f"{_named(best)}{edited}, predicted {in_seconds(best.seconds)} ({how})"
        ]
        for other in self.candidates:
            longer = "" if other is best else f"   {other.seconds / best.seconds:.2f} x" if best.seconds else ""
            lines.append(
                f"  {_named(other):18} {other.steps:5} steps  {in_bytes(other.per_nic):>10} per NIC "
                f"{in_seconds(other.seconds):>10}{longer}"
            )
        lines += [f"  {name:18} not possible: {why}" for name, why in self.refused]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "collective": self.collective,
            "nbytes": self.nbytes,
            "root": self.root,
            "ranks": self.fabric.ranks,
            "digest": self.fabric.digest(),
            "candidates": [candidate._asdict() for candidate in self.candidates],
            "refused": [list(entry) for entry in self.refused],
        }

    def check(self) -> None:
        """Proves the complete schedule. See `hrdma.topo.check.check`.

        Raises
        ------
        ScheduleError
            Naming rank and chunk.
        """
        self.schedule().check()


def _named(candidate: Candidate) -> str:
    return candidate.algorithm + (f"/{candidate.parts}" if candidate.parts > 1 else "")


_plans: OrderedDict[tuple, FabricPlan] = OrderedDict()
_lock = threading.Lock()


def plan(
    collective: str,
    fabric: Fabric,
    nbytes: float,
    cost: Cost = NETWORK,
    *,
    root: int = 0,
    algorithm: str | None = None,
) -> FabricPlan:
    """The cheapest plan for a collective on a fabric.

    Parameters
    ----------
    collective, fabric, nbytes, cost, root
        As in `compare`.
    algorithm : str, optional
        Only this one.

    Returns
    -------
    FabricPlan
        Remembered: the same call gives the same object.

    Raises
    ------
    ValueError
        As `compare`; or no algorithm can do it, with the reasons.

    Notes
    -----
    Cost: up to some seconds for 64 ranks.
    """
    key = (collective, fabric.digest(), fabric.name, nbytes, cost, root, algorithm)
    with _lock:
        if key in _plans:
            _plans.move_to_end(key)
            return _plans[key]
    found, refused = compare(
        collective, fabric, nbytes, cost, root=root, names=None if algorithm is None else (algorithm,)
    )
    if not found:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused)
        raise ValueError(f"no algorithm can do {collective} on {fabric.name}: {reasons}")
    made = FabricPlan(collective, fabric, nbytes, root, tuple(found), tuple(refused))
    with _lock:
        _plans[key] = made
        while len(_plans) > _REMEMBERED:
            _plans.popitem(last=False)
    return made

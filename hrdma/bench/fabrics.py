"""Algorithms on a fabric, measured beside their predictions: the ranks' part, and the part that starts them in a lab.

The prediction is made first: the links' rates and buckets as they are configured, less what headers take (`PAYLOAD`),
simulated with what a message costs in this lab (`calibrated`): the core's part as any job measures it on loopback, and the kernel's way
from host to host, of empty pings between neighbours, less the links' configured latency. No parameter comes from what is measured afterwards. Then one job runs
every algorithm and size in interleaved rounds, so that what the machine does in a moment falls on all; a round of short
calls is as many, one after the other, as take a while. Each result is checked, each NIC's bytes are counted by the kernel,
and the job fails where shared memory carried anything between hosts. How busy the processors were is part of the result: a
lab is one machine, and when that is full its links are not what limits.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hrdma.lab.layout import burst_of
from hrdma.lab.traffic import bytes_by_provider, check_wires
from hrdma.topo.cost import Cost
from hrdma.units import in_bytes

if TYPE_CHECKING:
    from hrdma.communicator import Communicator
    from hrdma.lab.lab import Lab
    from hrdma.topo.fabric import Fabric
    from hrdma.topo.planner import Candidate

__all__ = ["PAYLOAD", "Measurement", "calibrated", "measure", "payload", "plain"]

PAYLOAD = 1448 / 1514  # of a full Ethernet frame that carries TCP
ROUND_SECONDS = 0.1  # that short calls of a round take together, as predicted
MODULUS = 1000  # of the test data: sums stay exact in float32


@dataclass(frozen=True)
class Measurement:
    """One algorithm and size. Times in seconds, of the slowest rank."""

    algorithm: str
    parts: int
    nbytes: int
    predicted: float
    measured: float  #: median of the rounds
    least: float
    most: float
    per_nic: float  #: bytes that were to leave the busiest NIC
    sent: float  #: bytes that left it, headers and answers included; median of the rounds
    busy: float  #: share of this machine's processors, with whatever else it did
    lab: float  #: the same for the job alone: its processes, and the kernel's handling of packets
    carried: Mapping[str, float]  #: bytes that all ranks together sent in a call, by provider

    @property
    def carriers(self) -> str:
        """Which provider carried how much, for people."""
        return ", ".join(f"{name} {in_bytes(nbytes)}" for name, nbytes in self.carried.items())

    @property
    def off(self) -> float:
        """How much longer than predicted, as a share."""
        return self.measured / self.predicted - 1


class _Case(NamedTuple):
    algorithm: str
    parts: int
    nbytes: int
    calls: int = 1  #: in a round


# -- outside the lab ----------------------------------------------------------------------------------------------------


def payload(fabric: Fabric) -> Fabric:
    """The fabric that payload sees in a lab: rates and buckets less headers."""
    links = (link._replace(rate=link.rate * PAYLOAD, burst=burst_of(link) * PAYLOAD) for link in fabric.links)
    return replace(fabric, links=tuple(links))


def calibrated(lab: Lab, fabric: Fabric, *, timeout: float = 60.0) -> Cost:
    """What predictions for a lab are made with, on the `payload` of its fabric: from a job that finds out what messages cost there.

    Returns
    -------
    Cost
        Of the job's connections; of hosts that share this machine's cores. Its latency has what pings between neighbours
        take beyond the latency of the fabric's links.

    Raises
    ------
    RuntimeError
        The lab is of another fabric; the job failed, as it said on its error stream.
    """
    _require(lab, fabric)
    found = _job(lab, {"calibrate": True}, "", timeout)
    cost = Cost(**found["cost"])
    return replace(cost, latency=cost.latency + max(0.0, found["way"] - _way(fabric)))


def _require(lab: Lab, fabric: Fabric) -> None:
    kinds = sorted({(nic["rate_bit_s"], nic["burst"]) for node in lab.nodes[: lab.hosts] for nic in node["nics"]})
    links = [fabric.links[way >> 1] for way in fabric.host_links()]
    wanted = sorted({(link.rate, burst_of(link)) for link in links})
    if (lab.fabric, kinds) != (fabric.name, wanted):
        here, there = (", ".join(f"{rate:g} bit/s, bursts of {burst} B" for rate, burst in s) for s in (kinds, wanted))
        raise RuntimeError(f"lab {lab.name} is {lab.fabric} of {here}, not {fabric.name} of {there}")


def _job(lab: Lab, wish: dict[str, Any], fabric: str, timeout: float) -> Any:
    """What rank 0 found out. Which network the caller's own jobs run on is not said to this one."""
    env = {**os.environ, "HRDMA_FABRIC": fabric, "HRDMA_PLAN": ""}
    with tempfile.TemporaryDirectory(prefix="hrdma-") as folder:
        output = Path(folder, "found.json")
        argv = [sys.executable, "-m", "hrdma.bench.fabrics", json.dumps({**wish, "output": str(output)})]
        code = lab.run(argv, timeout=timeout, env=env)
        if code:
            raise RuntimeError(f"the job in lab {lab.name} ended with {code}")
        return json.loads(output.read_text())


def measure(
    lab: Lab, fabric: Fabric, candidates: Sequence[tuple[int, Candidate]], *, rounds: int = 3, timeout: float = 600.0
) -> list[Measurement]:
    """Runs allreduces of float32 in a lab.

    Parameters
    ----------
    lab : Lab
        Up, and of this fabric.
    fabric : Fabric
        With the rates of its links; what is planned on is its `payload`.
    candidates : sequence of (int, Candidate)
        Bytes, and what was predicted on what `calibrated` says.
    rounds : int
    timeout : float
        Seconds for all.

    Raises
    ------
    RuntimeError
        The lab is of another fabric; a rank failed, as it said on its error stream.
    """
    _require(lab, fabric)
    from hrdma.topo.fabric_file import dump

    cases = [
        _Case(candidate.algorithm, candidate.parts, nbytes, max(1, round(ROUND_SECONDS / candidate.seconds)))
        for nbytes, candidate in candidates
    ]
    with tempfile.TemporaryDirectory(prefix="hrdma-") as folder:
        dump(payload(fabric), f"{folder}/fabric.toml")
        found = _job(lab, {"cases": cases, "rounds": rounds}, f"{folder}/fabric.toml", timeout)
    return [
        Measurement(case.algorithm, case.parts, case.nbytes, c.seconds, per_nic=c.per_nic, **told)
        for case, (_, c), told in zip(cases, candidates, found)
    ]


# -- in it, on every rank -----------------------------------------------------------------------------------------------


class _Ticks(NamedTuple):
    """Time of all processors since the machine's start, in ticks."""

    busy: float  #: not idle
    kernel: float  #: of that, packets (and other interrupts)
    total: float


def _ticks() -> _Ticks:
    user, nice, system, idle, waiting, irq, softirq, steal = map(
        float, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    busy = user + nice + system + irq + softirq + steal
    return _Ticks(busy, irq + softirq, busy + idle + waiting)


def _sent() -> float:
    """Bytes that have left the busiest NIC of this host."""
    rows = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return float(max((int(row[1].split()[8]) for row in rows if row[0].strip() != "lo"), default=0))


class _Round(NamedTuple):
    """What a round of a case found, for one call."""

    seconds: float  #: of the slowest rank
    sent: float  #: bytes that left the busiest NIC of all
    busy: float
    lab: float
    moved: dict[str, float]  #: bytes that this rank sent and received, by provider


def _carried(comm: Communicator, rounds: Sequence[_Round]) -> list[dict[str, float]]:
    """For each case the bytes of all ranks by provider, which are counted where they leave and where they arrive."""
    names = sorted(comm.info()["domains"])  # all of a lab's hosts are one machine and have the same
    sums = np.array([[one.moved.get(name, 0.0) / 2 for name in names] for one in rounds])
    comm.allreduce(sums)
    return [{name: float(n) for name, n in zip(names, row) if n} for row in sums]


class _Job:
    """The cases on a communicator: each has one of its own, and so a plan of its own."""

    def __init__(self, comm: Communicator, cases: Sequence[_Case]) -> None:
        self.comm = comm
        self.cases = cases
        self.comms = []
        for case in cases:
            own = comm.dup()
            own._plan_override = (case.algorithm, case.parts)
            self.comms.append(own)
        count = max(case.nbytes for case in cases) // 4
        self.pattern = (np.arange(count, dtype=np.float32) % MODULUS).astype(np.float32)
        self.x, self.out = np.empty(count, np.float32), np.empty(count, np.float32)
        self.wrong = 0

    def run(self, number: int) -> _Round:
        size, count = self.comm.size, self.cases[number].nbytes // 4
        comm, calls = self.comms[number], self.cases[number].calls
        x, out, pattern = self.x[:count], self.out[:count], self.pattern[:count]
        np.add(pattern, np.float32(self.comm.rank), out=x)
        if calls == 1:
            out = x  # in place, as large ones are
        else:
            out.fill(np.nan)  # the right sums of another round stand there
        already = bytes_by_provider(self.comm)
        sent, before, own = _sent(), _ticks(), time.process_time()
        self.comm.barrier()
        begun = time.perf_counter()
        for _ in range(calls):
            comm.allreduce(x, out=None if out is x else out)
        took = (time.perf_counter() - begun) / calls
        slowest = np.array([took, (_sent() - sent) / calls], np.float64)
        spent = np.array([time.process_time() - own], np.float64)
        busy, kernel, total = (b - a for a, b in zip(before, _ticks()))
        moved = {name: (n - already[name]) / calls for name, n in bytes_by_provider(self.comm).items()}
        self.comm.allreduce(slowest, "max")
        self.comm.allreduce(spent)
        self.wrong += int(np.count_nonzero(out != pattern * size + size * (size - 1) // 2))
        used = min(busy, kernel + float(spent[0]) * os.sysconf("SC_CLK_TCK"))  # packets may be in both
        total = max(total, 1.0)
        return _Round(float(slowest[0]), float(slowest[1]), busy / total, used / total, moved)


def _way(found: Fabric) -> float:
    """Seconds from a host to a neighbour."""
    return statistics.median(link.latency for link in found.links) * (2 if found.switches else 1)


def rank_main(wish: dict[str, Any]) -> None:
    """What every rank runs."""
    import hrdma
    from hrdma.planning import discover

    with hrdma.init() as comm:
        if "calibrate" in wish:
            told = {"cost": comm.info()["cost"], "way": _way(discover(comm))}
            if comm.rank == 0:
                Path(wish["output"]).write_text(json.dumps(told))
            return
        job = _Job(comm, [_Case(*case) for case in wish["cases"]])
        for number in range(len(job.cases)):
            job.run(number)  # plans, and lets the windows find the rates
        rows = [[job.run(number) for number in range(len(job.cases))] for _ in range(wish["rounds"])]
        check_wires(comm)
        carried = _carried(comm, rows[-1])
        wrong = np.array([job.wrong], np.int64)
        comm.allreduce(wrong)
        if wrong[0]:
            raise RuntimeError(f"{wrong[0]} elements of the results are wrong")
        if comm.rank == 0:
            found = []
            for number in range(len(job.cases)):
                times, sent, busy, lab, _ = zip(*(row[number] for row in rows))
                middle = {"measured": times, "sent": sent, "busy": busy, "lab": lab}
                found.append(
                    {name: statistics.median(values) for name, values in middle.items()}
                    | {"least": min(times), "most": max(times), "carried": carried[number]}
                )
            Path(wish["output"]).write_text(json.dumps(found))


def plain(found: Sequence[Measurement]) -> list[dict[str, Any]]:
    """For JSON."""
    return [{**asdict(one), "off": one.off} for one in found]


if __name__ == "__main__":
    rank_main(json.loads(sys.argv[1]))

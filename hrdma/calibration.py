"""Measures what messages and bytes cost on this machine, once, and keeps it in a file.

Two engines in this process, each with a thread of its own, run programs in the core over the real provider, so what is
timed is what a collective's steps are made of and the interpreter has no part in it. For each provider:

  step     a chain: send 8 bytes, receive 8, send again ...     alpha + latency
  burst    as many messages at once                             alpha
  move     the chain with long messages                         latency + as `Cost.message` + beta * nbytes
  staged   the same through messages, where peers' memory can be read in place: the faster of the two counts
  shared   the first chain with both threads on one core        2 alpha + latency + switch

and gamma by a reduction in memory that lies in the own core's cache, as what has just arrived does. What a thread sends it
has received the step before, as in a real collective: bytes in the other core's cache cost several times those in the
own one.

A loaded machine only ever makes times longer. So there are many runs, shorter than a time slice, and the best of each
counts, provided that it came out twice: a machine on which it did not is too busy to say anything. Nor is a result
believed that is far from what any machine does. Then the defaults are used, and the next job tries again.
"""

from __future__ import annotations

import json
import math
import os
import platform
import secrets
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from hrdma import _core
from hrdma.log import logger
from hrdma.topo.cost import DEFAULT_COST, Cost
from hrdma.topo.program import BUF_OUT, INSTR, RECV, REF, SEND, STAGED

__all__ = ["cache_file", "costs", "describe", "load", "machine", "measure", "save"]

FORMAT = 10  # of the file and of what is measured
SECONDS = 0.045  # for one provider
PASSES = 3  # at least
CALLS = 3  # of each program in a pass
ALIKE = 1.2  # the second best time may be this much longer than the best
RUN_SECONDS = 2e-4  # about, of one run
MOST_STEPS = 128
WARM_STEPS = 8  # of long messages, before anything is measured: windows grow with the rate that was seen
LONG = {"shm": 256 << 10, "tcp": 1 << 20}  # bytes of a long message; else 8 eager limits
SWITCHING = 0.6  # of a message through memory between threads of one core, at least: no line of it moves to another
STAGED_MOST = 512 << 10  # up to so many bytes what holds for a long message holds for those that a program changes
DEADLINE = 2.0
FAR = 6  # a result this many times the default, or this part of it, is not believed
UNMEASURED = ("loop",)


# -- the file --------------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What a measurement holds for: format, version, processor, kernel, cores."""
    from hrdma import __version__

    model = ""
    try:
        with open("/proc/cpuinfo") as file:
            names = ("model name", "CPU part", "cpu model")
            model = next((line.split(":", 1)[1].strip() for line in file if line.startswith(names)), "")
    except OSError:
        pass
    return {
        "format": FORMAT,
        "version": __version__,
        "cpu": f"{platform.machine()} {model}".strip(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
    }


def cache_file(folder: str = "") -> str:
    """Path of the file of this machine.

    Parameters
    ----------
    folder : str
        ``HRDMA_CACHE_DIR``; empty: ``hrdma`` in ``XDG_CACHE_HOME``, else in ``~/.cache``.
    """
    import hashlib

    if not folder:
        folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"), "hrdma")
    digest = hashlib.blake2b(json.dumps(machine(), sort_keys=True).encode(), digest_size=6).hexdigest()
    return os.path.join(os.path.expanduser(folder), f"cost-{digest}.json")


def load(folder: str = "") -> dict[str, Cost]:
    """Cached costs by provider; empty where there are none, or where the file is damaged or another machine's."""
    try:
        with open(cache_file(folder)) as file:
            found = json.load(file)
        if found["machine"] != machine():
            return {}
        costs = {name: Cost(**fields) for name, fields in found["costs"].items()}
        return {name: cost for name, cost in costs.items() if name in DEFAULT_COST and not _doubts(name, cost)}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def save(folder: str, costs: Mapping[str, Cost]) -> None:
    """Writes the file in one step: a reader sees the old one or the new one.

    Raises
    ------
    OSError
        The folder cannot be made or written.
    """
    path = cache_file(folder)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    text = json.dumps({"machine": machine(), "costs": {name: cost.to_dict() for name, cost in costs.items()}}, indent=1)
    descriptor, draft = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".cost-")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def costs(names: Iterable[str], folder: str = "", *, may_measure: bool = True) -> dict[str, Cost]:
    """Costs of providers on this machine: from the file, else measured and written there.

    Parameters
    ----------
    names : iterable of str
        Providers that can be opened.
    folder : str
        ``HRDMA_CACHE_DIR``.
    may_measure : bool
        False: only what is in the file.

    Returns
    -------
    dict of str to Cost
        Without those that are not known, `loop` among them.

    Notes
    -----
    Measuring takes some 60 ms for each provider. Two processes may do it at the same time; one file wins.
    """
    wanted = [name for name in names if name in DEFAULT_COST and name not in UNMEASURED]
    known = load(folder)
    missing = [name for name in wanted if name not in known]
    if missing and may_measure:
        fresh = {}
        for name in missing:
            try:
                fresh[name] = measure(name)
                logger.info("measured: %s", describe(fresh[name]))
            except (ValueError, RuntimeError, OSError, MemoryError) as error:
                logger.info("the cost of %s could not be measured: %s; defaults are used", name, error)
        known |= fresh
        if fresh:
            try:
                save(folder, known)
            except OSError as error:
                logger.info(
                    "measured costs are not kept: %s; set HRDMA_CACHE_DIR to a folder that can be written", error
                )
    return {name: known[name] for name in wanted if name in known}


def describe(cost: Cost) -> str:
    """One line for people."""
    terms = [f"{word} {getattr(cost, word) * 1e6:.3g} us" for word in ("alpha", "latency", "switch")]
    terms += [f"{word} {getattr(cost, word) * 1e9:.3g} ns/B" for word in ("beta", "gamma")]
    return f"{cost.name}: {', '.join(terms)}"


# -- measuring -------------------------------------------------------------------------------------------------------------


class _Pair(_core.CommunicatorBase):
    """One end of two, whose only collective is a given program."""

    def __init__(self, engine: _core.Engine, id: int, rank: int, program: _core.Program, buffer: np.ndarray) -> None:
        super().__init__(engine, id, (0, 1), rank, timeout=DEADLINE)
        self.program = program
        self.buffer = buffer

    def _plan(self, *call: Any) -> _core.Program:
        return self.program

    def run(self) -> float:
        """Seconds of one run; the GIL is not held meanwhile."""
        start = time.perf_counter()
        self.allreduce(self.buffer, async_op=True).wait()
        return time.perf_counter() - start


class _Probe(NamedTuple):
    """What is run: so many steps of messages of so many bytes."""

    steps: int
    nbytes: int
    chained: bool = True
    shared: bool = False  #: both ends on one core
    staged: bool = False


def _probes(default: Cost, long: int, pull: bool) -> dict[str, _Probe]:
    """The probes of a provider, each with as many steps as the defaults let expect in the time of a run."""
    quick, slow, shared = (
        max(2, min(MOST_STEPS, round(RUN_SECONDS / seconds)))
        for seconds in (
            default.alpha + default.latency,
            default.message(long) + default.latency + default.beta * long,
            2 * default.alpha + default.latency + default.switch,
        )
    )
    probes = {
        "step": _Probe(quick, 8),
        "burst": _Probe(quick, 8, chained=False),
        "move": _Probe(slow, long),
        "shared": _Probe(shared, 8, shared=True),
    }
    if pull:
        probes["staged"] = _Probe(slow, long, staged=True)
    return probes


def _program(peer: int, probe: _Probe) -> _core.Program:
    """Messages both ways. Chained: each is sent from where the one before was received to."""
    steps, nbytes = probe.steps, probe.nbytes
    instrs = np.zeros(2 * steps, INSTR)
    send, recv = instrs[0::2], instrs[1::2]
    even = np.arange(steps) % 2
    instrs["peer"], instrs["len"], instrs["src_buf"], instrs["dst_buf"] = peer, nbytes, BUF_OUT, BUF_OUT
    instrs["tag"] = np.arange(2 * steps) // 2
    send["op"], recv["op"] = SEND, RECV
    send["flags"] = STAGED if probe.staged else 0
    send["src_off"], recv["dst_off"] = even * nbytes, (1 - even) * nbytes
    unlocks: np.ndarray = np.zeros(0, np.uint32)
    if probe.chained:
        # a receive lets the next send go, a send the next receive, which writes where it was sent from
        unlocks = np.arange(2, 2 * steps, dtype=np.uint32) ^ 1
        instrs["unlock"] = np.arange(2 * steps)
        instrs["nunlock"][:-2] = 1
        instrs["unlock"][-2:] = 0
        instrs["after"][2:] = 1
    return _core.Program(
        instrs, unlocks, np.zeros(0, REF), 0, 2 * nbytes, 0, 2, text=f"probe of {steps} x {nbytes} B", signature=1
    )


def measure(name: str, seconds: float = SECONDS) -> Cost:
    """Measures a provider.

    Parameters
    ----------
    name : str
    seconds : float
        For the runs; opening, connecting and closing come on top.

    Raises
    ------
    RuntimeError
        What came out cannot be true, or the provider failed.
    ValueError, OSError, MemoryError
        It cannot be opened here.
    """
    token = secrets.token_bytes(16)
    engines = [_core.Engine(rank, name, token=token) for rank in range(2)]
    try:
        domains = [engine.domains()[name] for engine in engines]
        for rank, engine in enumerate(engines):
            engine.connect(rank, "loop", engine.domains()["loop"]["address"], True)
            engine.connect(1 - rank, name, domains[1 - rank]["address"], rank == 0)
        for engine in engines:
            engine.connect_wait(DEADLINE)
        eager, pull = domains[0]["eager_max"], "map" in domains[0]["caps"]
        long = LONG.get(name, 8 * eager)
        probes = _probes(DEFAULT_COST[name], long, pull)
        best = _best_times(engines, probes, seconds)
    finally:
        for engine in engines:
            engine.close(0.0)
    cost = _fit(name, best, long, eager, pull)
    doubts = _doubts(name, cost)
    if doubts:
        raise RuntimeError(f"{doubts}, which cannot be true")
    return cost


def _best_times(engines: list[_core.Engine], probes: dict[str, _Probe], seconds: float) -> dict[str, float]:
    """Seconds per step of each probe: the best of many short runs."""
    cpus = sorted(os.sched_getaffinity(0))
    pairs: dict[str, list[_Pair]] = {}
    buffers = [_core.zeros(2 * max(probe.nbytes for probe in probes.values()) // 4) for _ in engines]
    for number, (which, probe) in enumerate(probes.items(), 2):
        pairs[which] = [
            _Pair(engine, number, rank, _program(1 - rank, probe), buffers[rank][: probe.nbytes // 2])
            for rank, engine in enumerate(engines)
        ]
    until, passes = time.perf_counter() + seconds, 0
    apart = [cpus[0], cpus[-1]]
    for engine in engines:
        engine.locality(2, len(cpus))
    warm = probes["move"]._replace(steps=WARM_STEPS)
    _side_by_side(
        [[_Pair(engine, 1, rank, _program(1 - rank, warm), buffers[rank])] for rank, engine in enumerate(engines)],
        apart,
    )
    found: dict[str, list[float]] = {which: [] for which in probes}
    while True:
        for shared in (False, True):
            for engine in engines:
                engine.locality(2, 1 if shared else len(cpus))
            names = [which for which, probe in probes.items() if probe.shared == shared]
            ends = [[pairs[which][rank] for which in names] for rank in range(2)]
            for which, times in zip(names, _side_by_side(ends, [cpus[0]] * 2 if shared else apart)):
                found[which] = sorted(found[which] + times)[:2]
        passes += 1
        busy = [which for which, (first, second) in found.items() if second > ALIKE * first]
        if passes >= PASSES and not busy:
            return {which: best / probes[which].steps for which, (best, _) in found.items()}
        if time.perf_counter() > until:
            why = f"no two times of '{busy[0]}' agree" if busy else f"{passes} passes took all the time"
            raise RuntimeError(f"the machine is too busy: {why}")


def _side_by_side(pairs: list[list[_Pair]], cpus: list[int]) -> list[list[float]]:
    """Both ends run the same programs, each in a thread on its core; every program's times, the slower end's."""
    taken: list[list[list[float]]] = [[], []]
    failed: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            os.sched_setaffinity(0, {cpus[rank]})
            for pair in pairs[rank]:
                taken[rank].append([pair.run() for _ in range(CALLS)])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=body, args=(rank,), name="hrdma-calibration") for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise RuntimeError(str(failed[0])) from failed[0]
    return [list(map(max, *both)) for both in zip(*taken)]


def _fit(name: str, times: Mapping[str, float], long: int, eager: int, pull: bool) -> Cost:
    """Parameters from seconds per step."""
    default = DEFAULT_COST[name]
    move = min(times["move"], times.get("staged", math.inf))
    if len(os.sched_getaffinity(0)) > 1:
        alpha = min(times["burst"], times["step"])
        latency = times["step"] - alpha
        moving = move
    else:  # one core does the work of both ends
        alpha, latency = times["burst"] / 2, default.latency
        moving = move / 2
    switch = max(0.0, times["shared"] - 2 * alpha - latency, SWITCHING * times["shared"] if pull else 0.0)
    name = f"measured for {name}"
    staged = STAGED_MOST if move < times["move"] else 0
    cost = replace(
        default, alpha=alpha, latency=latency, switch=switch, eager=eager, pull=pull, staged=staged, name=name
    )
    beta = max(moving - latency - cost.message(long), moving / 2) / long
    return replace(cost, beta=beta, gamma=_reduction())


def _reduction(nbytes: int = 256 << 10, calls: int = 20) -> float:
    """Seconds per byte of a reduction of two operands in a second-level cache."""
    x, y = np.zeros(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)
    best = math.inf
    for _ in range(calls):
        start = time.perf_counter()
        _core.reduce("sum", "float32", x, [x, y])
        best = min(best, time.perf_counter() - start)
    return best / nbytes


def _doubts(name: str, cost: Cost) -> str:
    """What about it is beyond belief; empty when nothing is."""
    default = DEFAULT_COST[name]
    for field in ("alpha", "beta", "gamma"):
        value, usual = getattr(cost, field), getattr(default, field)
        if not usual / FAR <= value <= usual * FAR:
            return f"{field} is {value:.3g} s"
    for field in ("latency", "switch"):
        if not 0 <= getattr(cost, field) <= FAR * (default.alpha + getattr(default, field)):
            return f"{field} is {getattr(cost, field):.3g} s"
    return ""

"""The kill matrix: what falls how, and when; and what the ranks of one run do. Seeded, so that each run can be repeated."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from rankside import HOWS, JOB_SECONDS, Me, attempt, describe_error

import hrdma

COLLECTIVES = (
    "allreduce",
    "reduce",
    "broadcast",
    "allgather",
    "reduce_scatter",
    "gather",
    "scatter",
    "alltoall",
)
JOINING = ("before_init", "rendezvous", "connect", "after_init")
MESSAGES = ("send", "send_large", "recv", "recv_large", "any_source", "wait")
CALLS = ("barrier", *COLLECTIVES, *(f"{name}_large" for name in COLLECTIVES))
PHASES = (*JOINING, *MESSAGES, *CALLS, "between", "close")
TRANSPORTS = ("shm", "tcp")

SMALL = 96  # elements
LARGE = 3 << 18  # elements of 8 bytes: 6 MiB
RANKS = 3
JOIN_SECONDS = 2.0  # deadline of init where a rank never comes; in other phases that of the job
CLOSE_SECONDS = 2.0


class Case(NamedTuple):
    """One run: who falls, how, in which phase, and the seed of when exactly."""

    phase: str
    how: str
    transport: str
    seed: int

    def __str__(self) -> str:
        return f"{self.phase}-{self.how}-{self.transport}-{self.seed}"

    def rng(self) -> random.Random:
        return random.Random(str(self))

    @property
    def victim(self) -> int:
        return self.rng().randrange(RANKS)

    @property
    def fault(self) -> str:
        """For HRDMA_FAULT of the victim: falls in the middle of the transport's so-many-th operation; or empty."""
        rng = random.Random(f"{self} fault")
        if self.how not in ("kill", "stop") or self.phase not in (*MESSAGES, *CALLS) or rng.random() < 0.5:
            return ""
        return f"{self.transport}:{'kill=process' if self.how == 'kill' else 'stop=after'}:{rng.randint(3, 60)}"

    @property
    def operation(self) -> str:
        """What survivors are in when it happens, as PeerError calls it."""
        name = self.phase.removesuffix("_large")
        return {"any_source": "recv", "wait": "irecv", "between": "allreduce"}.get(name, name)


def matrix() -> list[Case]:
    """Every phase, way and transport, in an order in which each short run of them has a bit of everything."""
    cases = [(phase, how, transport) for phase in PHASES for how in HOWS for transport in TRANSPORTS]
    random.Random(5).shuffle(cases)
    return [Case(*case, seed) for seed, case in enumerate(cases)]


def sample(n: int) -> list[Case]:
    """So many runs that have every way, each kind of phase and each transport among them."""
    kinds = ("before_init", "rendezvous", "connect", "after_init", "send", "recv", "small", "large", "between", "close")
    found = []
    for seed in range(n):
        rng = random.Random(seed)
        phase = kinds[seed % len(kinds)]
        if phase in ("send", "recv"):
            phase = rng.choice([name for name in MESSAGES if name.startswith(phase) or phase == "recv"])
        elif phase in ("small", "large"):
            phase = rng.choice([name for name in CALLS if name.endswith("_large") == (phase == "large")])
        # kill and stop in turn for each kind; each fourth run exits instead
        how = ("kill", "stop")[(seed // len(kinds) + seed) % 2] if seed % 4 != 3 else ("exit0", "exit3")[seed // 4 % 2]
        found.append(Case(phase, how, TRANSPORTS[(seed // 2 + seed // len(kinds)) % 2], seed))
    return found


def on_verbs() -> list[Case]:
    """Runs on an RDMA device, simulated or not: a peer that falls while queue pairs are made, and what is under way on them."""
    ways = [("connect", "kill", 5), ("connect", "kill", 7), ("connect", "stop", 7), ("connect", "stop", 8)]
    ways += [("allreduce_large", "kill", 3), ("send_large", "stop", 4)]
    return [Case(phase, how, "verbs", seed) for phase, how, seed in ways]


# -- what the ranks do -------------------------------------------------------------------------------------------------------


def join_seconds(case: Case) -> float:
    return JOIN_SECONDS if case.phase in JOINING[:2] else JOB_SECONDS


def run(me: Me, case: list[Any]) -> None:
    """The function of every rank. The victim falls on the way; the others tell "raised", then go on without it."""
    this = Case(*case)
    victim = me.rank == this.victim
    if victim:
        _prepare(me, this)
        if this.fault:
            os.environ["HRDMA_FAULT"] = this.fault
    start = time.monotonic()
    try:
        comm = hrdma.init(timeout=join_seconds(this))
    except Exception as error:
        me.tell("raised", **describe_error(error), where="init", took=time.monotonic() - start)
        return
    comm.timeout = 10.0
    me.tell("ready")
    if this.phase == "after_init" and victim:
        me.fall(this.how)
    if this.phase == "close":
        _close(me, comm, this, victim)
        return
    # after init it has fallen already, and goes on where it was stopped; at other points it may not have come to it
    falls = victim and this.phase != "after_init"
    error = attempt(me, lambda: _work(me, comm, this, falls))
    me.tell("raised", **(error or {"error": None}), where="work")
    again = attempt(me, lambda: comm.barrier(timeout=5.0))
    me.tell("raised again", **(again or {"error": None}))
    if not victim:
        rest = comm.shrink(timeout=8.0)
        total = rest.allreduce(np.full(1000, me.rank), out=np.zeros(1000, int))
        me.tell("went on", members=list(rest.members), total=int(total[-1]))
        hrdma.finalize(CLOSE_SECONDS)


def _prepare(me: Me, case: Case) -> None:
    """Sets the trap for the phases of init."""
    rng = case.rng()
    rng.random()
    if case.phase == "before_init":
        me.fall(case.how)
    elif case.phase == "rendezvous":
        from hrdma.control import join

        owner, names = (
            (join.Guest, ("_call", "answered")) if me.rank else (join.Roster, ("begin", "admitted", "_complete"))
        )
        name = rng.choice(names)
        call = rng.randint(1, 2) if name in ("admitted", "_complete") else 1
        # `answered` is the table: after it, this rank is a member
        me.fall_at(case.how, owner, name, call, after=rng.random() < 0.5 and name != "answered")
    elif case.phase == "connect":
        from hrdma import runtime

        if rng.random() < 0.3:
            me.fall_at(case.how, runtime.Runtime, "_connect", 1, after=False)
            return
        call = rng.randint(1, RANKS)

        class Engine(runtime._core.Engine):
            pass

        me.fall_at(case.how, Engine, rng.choice(("connect", "connect", "connect_wait")), call, after=rng.random() < 0.5)
        runtime._core = _Replaced(runtime._core, Engine=Engine)


class _Replaced:
    """A module with a name replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _work(me: Me, comm: hrdma.Communicator, case: Case, falls: bool) -> None:
    """Repeats the operation until it fails; who is to fall does so meanwhile."""
    rng = case.rng()
    rng.random()
    step = _step(comm, case, rng.random() < 0.5)
    calls = rng.randint(1, 40)
    delay = rng.uniform(0.0, 0.03)
    early = rng.random() < 0.3 or case.phase == "between"
    if case.phase not in JOINING:
        comm.barrier()
    if falls and not early and not case.fault:
        me.fall_later(case.how, delay)
    if falls and case.phase == "between":
        me.fall("leave" if case.how == "exit0" and rng.random() < 0.5 else case.how)
    if case.phase == "between":
        time.sleep(0.3)
    for count in range(1_000_000):
        if falls and early and count == calls and not case.fault:
            # between two of many calls; a process that ends in good order says so to the others
            me.fall("leave" if case.how == "exit0" else case.how)
        step()


def _step(comm: hrdma.Communicator, case: Case, registered: bool) -> Callable[[], Any]:
    """One call of the operation under test."""
    name = case.phase.removesuffix("_large")
    if name in ("between", *JOINING):
        name = "allreduce"
    large = case.phase.endswith("_large")
    count = (LARGE if large else SMALL) // comm.size * comm.size
    empty = hrdma.empty if registered else np.empty
    x, out = empty(count, "float64"), empty(count * comm.size, "float64")
    x[:] = comm.rank
    part = out[: count // comm.size]
    victim, me = case.victim, comm.rank
    others = [rank for rank in range(comm.size) if rank != victim]
    if name in ("send", "recv", "any_source", "wait"):
        to_victim = name == "send"

        def messages() -> Iterator[Any]:
            while True:
                if me == victim:
                    for other in others:
                        yield comm.recv(out, other) if to_victim else comm.send(x, other)
                elif to_victim:
                    yield comm.send(x, victim)
                elif name == "wait":
                    yield comm.irecv(out, victim).wait()
                else:
                    yield comm.recv(out, hrdma.ANY_SOURCE if name == "any_source" else victim)

        return messages().__next__
    root = case.seed % comm.size
    return {
        "barrier": comm.barrier,
        "allreduce": lambda: comm.allreduce(x, out=out[:count]),
        "reduce": lambda: comm.reduce(x, root, out=out[:count]),
        "broadcast": lambda: comm.broadcast(x, root),
        "allgather": lambda: comm.allgather(x, out),
        "reduce_scatter": lambda: comm.reduce_scatter(x, out=part),
        "gather": lambda: comm.gather(x, root, out=out),
        "scatter": lambda: comm.scatter(x, root, out=part),
        "alltoall": lambda: comm.alltoall(x, out[:count]),
    }[name]


def _close(me: Me, comm: hrdma.Communicator, case: Case, victim: bool) -> None:
    rng = case.rng()
    rng.random()
    when, delay = rng.choice(("before", "meanwhile", "after")), rng.uniform(0.0, 0.02)
    attempt(me, comm.barrier)  # the victim may be through, and have fallen, before the others are
    if victim and when == "before":
        me.fall(case.how)
    if victim and when == "meanwhile":
        me.fall_later(case.how, delay)
    started = time.monotonic()
    hrdma.finalize(CLOSE_SECONDS)
    me.tell("closed", took=time.monotonic() - started)
    if victim:
        time.sleep(0.1)
        me.fall(case.how)

"""Runs a function on ranks of their own, each a fresh process of this host, against faults that must fire.

For tests of a user's job, on a machine without RDMA: what fails is a simulated device, or what is around a provider, below
the same code that drives real ones. An example is in the README of this folder.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hrdma.children import Child, call_of, read, wait
from hrdma.places import reserve_port

__all__ = ["DeviceFaults", "FaultNeverFired", "Outcome", "TransportFaults", "ranks"]

STATUSES = ("retry", "rnr", "access", "flush", "local", "fatal")
PROVIDERS = ("shm", "tcp", "verbs")
MOST_RAILS = 3
LONGEST_DELAY = 999.0
# Of the caller's environment these are not the ranks'; nor is HRDMA_*, but what is about the machine.
_NOT_THEIRS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")
_KEPT = ("HRDMA_CACHE_DIR",)


@dataclass(frozen=True, kw_only=True)
class _Faults:
    """What both kinds have."""

    seed: int = 1
    budget: int | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        _whole("seed", self.seed, 0)
        if self.budget is not None:
            _whole("budget", self.budget, 1)
        if self.rank is not None:
            _whole("rank", self.rank, 0)

    def _strikes(self, rank: int | None) -> bool:
        return rank is None or self.rank is None or self.rank == rank


@dataclass(frozen=True, kw_only=True)
class DeviceFaults(_Faults):
    """Faults of a simulated RDMA device.

    Parameters
    ----------
    seed : int
        Another one, another course of events.
    budget : int, optional
        At most so many faults of each device; None: no limit.
    rank : int, optional
        The only rank that has faults; None: every rank has.
    completion : float
        Probability that a work request completes with an error, which ends its queue pair; of several rails on the first.
    status : str
        Which error: ``retry`` (no answer), ``rnr`` (no receive was posted), ``access`` (the peer refuses), ``flush``, ``local`` (the
        memory is not the device's), ``fatal``.
    post : float
        Probability that the device takes no work request for the moment; it gets it again.
    registration : float
        Probability that memory cannot be pinned, as beyond ``ulimit -l``. What is sent then goes through buffers; a
        connection that does not get its own memory is an error.
    rails : int
        Devices of each rank, 1 to 3; while one is lost the others do its work.
    fallback : bool
        A connection without a rail goes on over tcp. False: its peer is lost.

    Raises
    ------
    ValueError
        A value is out of range; the message names it.
    """

    completion: float = 0.0
    status: str = "retry"
    post: float = 0.0
    registration: float = 0.0
    rails: int = 1
    fallback: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _probabilities(completion=self.completion, post=self.post, registration=self.registration)
        _one_of("status", self.status, STATUSES)
        _whole("rails", self.rails, 1, MOST_RAILS)

    def environment(self, rank: int | None = None) -> dict[str, str]:
        """The settings of a job, as this rank has them; None: as one has that is struck."""
        found = {"HRDMA_TRANSPORT": "verbs", "HRDMA_DEVICES": ",".join(["sim2"] * self.rails)}
        if self.fallback:
            found["HRDMA_FALLBACK"] = "tcp"
        if self._strikes(rank):
            options = _options(wc_error=self.completion, errno=self.post, reg_errno=self.registration)
            options += [f"wc_status={self.status}", f"fault_seed={self.seed}"]
            options += [] if self.budget is None else [f"fault_budget={self.budget}"]
            found["HRDMA_VERBS"] = ",".join(options)
        return found


@dataclass(frozen=True, kw_only=True)
class TransportFaults(_Faults):
    """Faults around a provider: of what is posted to it, some is lost, late or refused.

    The probabilities add up to at most 1. ``drop``, ``reorder`` and ``truncate`` are worse than what a transport may do: a job
    meets its deadlines by them, or errors that tell of broken peers.

    Parameters
    ----------
    seed, budget, rank
        As of `DeviceFaults`; the budget does not count kills.
    provider : str
        ``shm``, ``tcp`` or ``verbs`` (on the simulated device); it alone connects the ranks.
    drop, reorder, truncate, error : float
        Probability that an operation vanishes, is overtaken by the next, moves half of its bytes, fails.
    delay : float
        Probability that it is held back, with all that follow on its connection.
    delay_time : float
        By so many seconds.
    kill : int, optional
        The connection of the operation after so many is cut.
    kill_process : int, optional
        The process is killed (SIGKILL) there.

    Raises
    ------
    ValueError
        A value is out of range; the message names it.
    """

    provider: str = "tcp"
    drop: float = 0.0
    reorder: float = 0.0
    truncate: float = 0.0
    error: float = 0.0
    delay: float = 0.0
    delay_time: float = 0.002
    kill: int | None = None
    kill_process: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of("provider", self.provider, PROVIDERS)
        chances = {name: getattr(self, name) for name in ("drop", "reorder", "truncate", "error", "delay")}
        _probabilities(**chances)
        if sum(chances.values()) > 1:
            raise ValueError(
                f"the probabilities add up to {sum(chances.values()):g}: at most 1, an operation has one fault"
            )
        _seconds("delay_time", self.delay_time, LONGEST_DELAY)
        for name in ("kill", "kill_process"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1)
        if self.kill is not None and self.kill_process is not None:
            raise ValueError(f"kill={self.kill} and kill_process={self.kill_process}: one of them at a time")

    def environment(self, rank: int | None = None) -> dict[str, str]:
        """The settings of a job, as this rank has them; None: as one has that is struck."""
        found = {"HRDMA_TRANSPORT": self.provider} | ({"HRDMA_DEVICES": "sim"} if self.provider == "verbs" else {})
        if self._strikes(rank):
            options = _options(drop=self.drop, reorder=self.reorder, truncate=self.truncate, error=self.error)
            options += [f"delay={self.delay!r}:{self.delay_time!r}s"] if self.delay else []
            options += [] if self.kill is None else [f"kill=after:{self.kill}"]
            options += [] if self.kill_process is None else [f"kill=process:{self.kill_process}"]
            options += [f"seed={self.seed}"] + ([] if self.budget is None else [f"budget={self.budget}"])
            found["HRDMA_FAULT"] = f"{self.provider}:{','.join(options)}"
        return found


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Attributes
    ----------
    rank : int
    value : object
        What the function returned.
    error : BaseException or None
        What it raised, with its fields; ``TimeoutError`` where the time was up, ``ChildProcessError`` where the process ended on its own.
    exit_code : int
        Of the process; negative: the signal that ended it.
    output : str
        What it wrote to its standard output and error, the traceback among it.
    faults : int
        How many were injected into it; 0, too, where it ended before it could say.
    """

    rank: int
    value: Any
    error: BaseException | None
    exit_code: int
    output: str
    faults: int

    def result(self) -> Any:
        """The value. Raises the error, where there is one, from a `ChildProcessError` that shows the output."""
        if self.error is not None:
            raise self.error from ChildProcessError(f"rank {self.rank} wrote:\n{self.output}")
        return self.value


class FaultNeverFired(AssertionError):
    """No rank had any of the faults that were asked for: what was to be tested was not.

    Attributes
    ----------
    outcomes : list of Outcome
    """

    def __init__(self, message: str, outcomes: list[Outcome] | None = None) -> None:
        super().__init__(message)
        self.outcomes = outcomes or []


def ranks(
    function: Callable[..., Any],
    size: int,
    *,
    faults: DeviceFaults | TransportFaults | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    must_fire: bool = True,
    **arguments: Any,
) -> list[Outcome]:
    """Runs ``function(comm, **arguments)`` on every rank of a job on this host, and says how each ended.

    Parameters
    ----------
    function : callable
        Stands at the top of a module: of a test, of a script (below ``if __name__ == "__main__":`` it calls this), or any other.
    size : int
        Ranks; each is a new process of this interpreter.
    faults : DeviceFaults or TransportFaults, optional
    env : mapping, optional
        More of the environment. ``HRDMA_*`` of the caller's is not handed on; ``HRDMA_TIMEOUT`` is half of `timeout`.
    timeout : float
        Seconds, after which those that are left are stopped.
    must_fire : bool
        False: it is no error when no fault fires.
    **arguments
        Of the function; pickled, as its value is.

    Returns
    -------
    list of Outcome
        By rank. What a rank raises is in its outcome, and not raised here.

    Raises
    ------
    FaultNeverFired
        There were faults to inject, and none was in any rank.
    ValueError
        An argument is wrong; nothing was started.

    Notes
    -----
    Blocks until all have ended; those of an interrupted call are killed, with what they had started. A rank dies with the thread
    that called this. It takes about half a second of processor time to start one.
    """
    _whole("size", size, 1)
    _seconds("timeout", timeout, 1e6)
    call = call_of(function, arguments)
    if faults is not None and faults.rank is not None and faults.rank >= size:
        raise ValueError(f"faults of rank {faults.rank}: there are {size} ranks")
    given = dict(env or {})
    if both := sorted(set(given) & set(faults.environment() if faults else ())):
        raise ValueError(f"{both[0]} is set by the faults: leave it out of env=")
    base = {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith("HRDMA_")}
    base = {name: value for name, value in base.items() if name not in _NOT_THEIRS}
    base |= {"HRDMA_TOKEN": secrets.token_hex(32), "HRDMA_TIMEOUT": repr(timeout / 2), "PYTHONUNBUFFERED": "1"}
    with contextlib.ExitStack() as stack:
        host, port = stack.enter_context(reserve_port("127.0.0.1")).getsockname()[:2]
        base |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        job = [stack.enter_context(Child()) for _ in range(size)]
        for rank, child in enumerate(job):
            mine = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            child.start(call, base | mine | (faults.environment(rank) if faults else {}) | given)
        late = wait(job, timeout)
        found = [_outcome(rank, child, timeout if late[rank] else None, faults) for rank, child in enumerate(job)]
    if faults is not None and must_fire and not any(one.faults for one in found):
        ends = "".join(f"\nrank {one.rank}: {'returned' if one.error is None else repr(one.error)}" for one in found)
        raise FaultNeverFired(f"no fault was injected by {faults}, seed {faults.seed}{ends}", found)
    return found


def _outcome(rank: int, child: Child, late: float | None, faults: DeviceFaults | TransportFaults | None) -> Outcome:
    report, output = child.heard()
    value: Any = None
    error: BaseException | None = None
    if late is not None:
        error = TimeoutError(f"rank {rank} did not end within {late:g} s")
    elif report is None:
        how = f"was killed by {signal.Signals(-child.code).name}" if child.code < 0 else f"exited with {child.code}"
        error = ChildProcessError(f"rank {rank} {how} before it had a result")
    else:
        value, error = read(report)
    count = report.faults if report else 0
    if report is None and late is None and child.code == -signal.SIGKILL and isinstance(faults, TransportFaults):
        count = int(faults.kill_process is not None and faults._strikes(rank))  # it could not say so
    return Outcome(rank, value, error, child.code, output, count)


def _options(**chances: float) -> list[str]:
    return [f"{name}={float(value)!r}" for name, value in chances.items() if value]


def _probabilities(**values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise ValueError(f"{name}={value!r}: a probability from 0 to 1 is wanted")


def _whole(name: str, value: int, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        raise ValueError(
            f"{name}={value!r}: a whole number, {least} {'or more' if most is None else f'to {most}'}, is wanted"
        )


def _seconds(name: str, value: float, most: float) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not (0 < value <= most and math.isfinite(value))
    ):
        raise ValueError(f"{name}={value!r}: seconds above 0, at most {most:g}, are wanted")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r}: one of {', '.join(known)} is wanted")

"""Runs a function of a test module on n ranks, each in a process of its own, and collects what they return.

    def body(comm, count):
        ...
        return value                 # JSON

    def test_it():
        assert harness.ranks(body, 3, count=5) == [...]

The function is found again by file and name, so it must stand at the top of its module. Nothing survives a test: every rank
is a process group that dies with the harness, and is killed when the time is up. What ranks print is shown on failure.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from nursery import Rank, environment
from ports import free_port
from rankside import Me, load

TIMEOUT = 60.0


class Outcome(NamedTuple):
    """How one rank ended."""

    rank: int
    status: int  #: exit status; negative: the signal
    value: Any  #: what the function returned
    error: str  #: name of the exception's class, or empty
    text: str  #: its message
    fields: dict[str, Any]  #: its attributes, where they are plain
    output: str


def outcomes(
    function: Callable[..., Any],
    n: int,
    *,
    timeout: float = TIMEOUT,
    env: dict[str, str] | None = None,
    init: bool = True,
    **arguments: Any,
) -> list[Outcome]:
    """Runs ``function(comm, **arguments)`` on n ranks and says how each ended. Fails only when time is up.

    Parameters
    ----------
    env : dict, optional
        Added to the environment.
    init : bool
        False: ``function(rank, **arguments)`` is called without a communicator.
    """
    base = environment() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(n)}
    base |= {"HRDMA_TIMEOUT": "30"} | devices((env or {}).get("HRDMA_TRANSPORT", ""))
    call = [function.__code__.co_filename, function.__name__, init, arguments]
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        job = [Rank(rank, folder / f"rank{rank}.log") for rank in range(n)]
        try:
            for rank in job:
                how = {"call": call, "result": str(folder / f"rank{rank.rank}.json")}
                rank.start(_rank, {**base, "RANK": str(rank.rank), **(env or {})}, how)
            deadline = time.monotonic() + timeout
            late = [rank.rank for rank in job if not rank.ends(deadline - time.monotonic())]
        finally:
            codes = [_end(rank) for rank in job]
        found = [_outcome(rank, code) for rank, code in zip(job, codes)]
    if late:
        pytest.fail(f"ranks {late} of {n} did not end within {timeout} s\n{_shown(found)}", pytrace=False)
    return found


def ranks(function: Callable[..., Any], n: int, **how: Any) -> list[Any]:
    """As `outcomes`, for functions that must end well on all ranks; returns their values."""
    found = outcomes(function, n, **how)
    if any(one.status for one in found):
        pytest.fail(f"not all of {n} ranks ended well\n{_shown(found)}", pytrace=False)
    return [one.value for one in found]


def _end(rank: Rank) -> int:
    """Ends what is left of a rank; its exit status."""
    try:
        os.killpg(rank.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return rank.ended()


def _outcome(rank: Rank, status: int) -> Outcome:
    result = rank.log.with_suffix(".json")
    found = json.loads(result.read_text() or "{}") if result.exists() else {}
    output = rank.log.read_text(errors="replace")
    return Outcome(
        rank.rank,
        status,
        found.get("value"),
        found.get("error", ""),
        found.get("text", ""),
        found.get("fields", {}),
        output,
    )


def _shown(found: Sequence[Outcome]) -> str:
    return "\n".join(f"--- rank {one.rank}: status {one.status} {one.error}\n{one.output.rstrip()}" for one in found)


def transports() -> list[str]:
    """Providers over which tests of several ranks run."""
    return ["shm", "tcp", "verbs"]


def devices(transport: str) -> dict[str, str]:
    """The environment that a transport needs: verbs runs on the simulated device, or on HRDMA_TEST_DEVICE."""
    return {"HRDMA_DEVICES": os.environ.get("HRDMA_TEST_DEVICE") or "sim"} if transport == "verbs" else {}


def _plain(value: Any) -> bool:
    return isinstance(value, (int, float, str, bool, type(None)))


def _rank(me: Me, call: Sequence[Any], result: str) -> None:
    """What a rank does."""
    path, name, init, arguments = call
    found: dict[str, Any] = {}
    status = 0
    try:
        function = load(path, name)
        if init:
            import hrdma

            with hrdma.init() as comm:
                found["value"] = function(comm, **arguments)
        else:
            found["value"] = function(me.rank, **arguments)
    except BaseException as error:
        traceback.print_exc()
        fields = {key: value for key, value in vars(error).items() if _plain(value)}
        found |= {"error": type(error).__name__, "text": str(error), "fields": fields}
        status = 1
    Path(result).write_text(json.dumps(found))
    sys.exit(status)

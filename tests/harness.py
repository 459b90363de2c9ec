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

import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ports import free_port

TIMEOUT = 60.0
PR_SET_PDEATHSIG = 1


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
    base = {name: value for name, value in os.environ.items() if not name.startswith("HRDMA_")}
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(n), "HRDMA_TIMEOUT": "30"}
    base |= devices((env or {}).get("HRDMA_TRANSPORT", ""))
    call = json.dumps([function.__code__.co_filename, function.__name__, init, arguments])
    processes, files = [], []
    try:
        for rank in range(n):
            output, result = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 closed by _outcome
            files.append((output, result))
            processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, str(result.fileno()), call],
                    env=base | {"RANK": str(rank)} | (env or {}),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[result.fileno()],
                    start_new_session=True,
                )
            )
        deadline = time.monotonic() + timeout
        late = []
        for rank, process in enumerate(processes):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(rank)
    finally:
        for process in processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    found = [_outcome(rank, processes[rank].returncode, *files[rank]) for rank in range(n)]
    if late:
        pytest.fail(f"ranks {late} of {n} did not end within {timeout} s\n{_shown(found)}", pytrace=False)
    return found


def ranks(function: Callable[..., Any], n: int, **how: Any) -> list[Any]:
    """As `outcomes`, for functions that must end well on all ranks; returns their values."""
    found = outcomes(function, n, **how)
    if any(one.status for one in found):
        pytest.fail(f"not all of {n} ranks ended well\n{_shown(found)}", pytrace=False)
    return [one.value for one in found]


def _outcome(rank: int, status: int, output: Any, result: Any) -> Outcome:
    with output, result:
        output.seek(0)
        result.seek(0)
        text = output.read().decode(errors="replace")
        found = json.loads(result.read() or b"{}")
    return Outcome(
        rank, status, found.get("value"), found.get("error", ""), found.get("text", ""), found.get("fields", {}), text
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


def _child(descriptor: int, path: str, name: str, init: bool, arguments: dict[str, Any]) -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    found: dict[str, Any] = {}
    status = 0
    try:
        spec.loader.exec_module(module)
        function = getattr(module, name)
        if init:
            import hrdma

            with hrdma.init() as comm:
                found["value"] = function(comm, **arguments)
        else:
            found["value"] = function(int(os.environ["RANK"]), **arguments)
    except BaseException as error:
        import traceback

        traceback.print_exc()
        fields = {key: value for key, value in vars(error).items() if _plain(value)}
        found |= {"error": type(error).__name__, "text": str(error), "fields": fields}
        status = 1
    with os.fdopen(descriptor, "w") as file:
        json.dump(found, file)
    return status


if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.abspath(__file__))
    sys.modules["harness"] = sys.modules["__main__"]
    sys.exit(_child(int(sys.argv[1]), *json.loads(sys.argv[2])))

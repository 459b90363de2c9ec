"""Jobs of ranks that fail on purpose, as the test sees them: what each rank said, and when it ended or stopped."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import took
from nursery import Rank, environment
from ports import free_port
from rankside import JOB_SECONDS
from windows import Starved

import harness


class Job(list[Rank]):
    """The ranks of a job, by rank."""

    def survivors(self, *fallen: int) -> list[Rank]:
        return [rank for rank in self if rank.rank not in fallen]

    def shown(self) -> str:
        return "\n".join(rank.shown() for rank in self)


def in_time(job: Job, rank: Rank, since: float, event: dict[str, Any], limit: float) -> None:
    """Fails when a rank said this too late; as `Starved` when its threads were ready for so long and had no processor.

    The machine's scheduler has kept all threads of two ranks waiting for 1.7 s while processes beside them, one on each processor, woke in
    time: `machine.took` knows nothing of it.
    """
    late = took(since, event["time"])
    if late < limit:
        return
    text = f"rank {rank.rank} took {late:.2f} s\n{job.shown()}"
    before = [one["waited"] for one in rank.news if "waited" in one and one["time"] <= since]
    if late - (event["waited"] - max(before, default=0.0)) < limit:
        raise Starved(text)
    raise AssertionError(text)


def start_job(
    function: Callable[..., Any],
    n: int,
    *,
    transport: str = "",
    env: dict[str, str] | None = None,
    each: dict[int, dict[str, str]] | None = None,
    port: int = 0,
    **arguments: Any,
) -> Job:
    """Starts ``function(me, **arguments)`` on n ranks.

    Parameters
    ----------
    env : dict, optional
        Added to the environment of all ranks.
    each : dict, optional
        The same for single ranks.
    """
    folder = Path(tempfile.mkdtemp(prefix="hrdma-failure-"))
    base = {
        **environment(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port or free_port()),
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "HRDMA_TIMEOUT": str(JOB_SECONDS),
        "HRDMA_HEARTBEAT": "1",
        **({"HRDMA_TRANSPORT": transport} if transport else {}),
        **harness.devices(transport),
        **(env or {}),
    }
    job = Job(Rank(rank, folder / f"rank{rank}") for rank in range(n))
    for rank in job:
        rank.mates = job
        own = {"RANK": str(rank.rank), "LOCAL_RANK": str(rank.rank), **(each or {}).get(rank.rank, {})}
        rank.start(function, {**base, **own}, arguments)
    return job


def end_job(job: Job) -> None:
    """Ends what still runs, and removes what was printed."""
    for rank in job:
        if rank.told("ended") is None:
            rank.signal(signal.SIGKILL)
    for rank in job:
        rank.ended(5)
        rank.log.unlink(missing_ok=True)
    for folder in {rank.log.parent for rank in job}:
        folder.rmdir()

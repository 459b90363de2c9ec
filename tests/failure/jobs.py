"""Jobs of ranks that fail on purpose, as the test sees them: what each rank said, and when it ended or stopped."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ports import free_port

import harness

WAIT = 20.0
ZYGOTE = Path(__file__).with_name("zygote.py")


class Nursery:
    """The zygote, and the news of all ranks that it has started. One per test session."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HRDMA_")}
        self._process = subprocess.Popen(
            [sys.executable, str(ZYGOTE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment | {"OPENBLAS_NUM_THREADS": "1"},
        )
        self._news: dict[int, list[dict[str, Any]]] = {}
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            with self._changed:
                self._news[message["who"]].append(message)
                self._changed.notify_all()

    def new(self) -> int:
        """A number for a rank."""
        who = next(self._numbers)
        with self._changed:
            self._news[who] = []
        return who

    def ask(self, do: str, who: int, **request: Any) -> None:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps({"do": do, "who": who, **request}).encode() + b"\n")
            self._process.stdin.flush()

    def news(self, who: int) -> list[dict[str, Any]]:
        with self._changed:
            return list(self._news[who])

    def until(self, who: int, found: Callable[[list[dict[str, Any]]], Any], seconds: float) -> Any:
        """Waits until `found` makes something of what a rank has said; None when it did not in time."""
        end = time.monotonic() + seconds
        with self._changed:
            while not (result := found(self._news[who])):
                left = end - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)
            return result

    def close(self) -> None:
        """Kills what is left."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._reader.join(10)
        self._process.stdout.close()


class Rank:
    """One process of a job."""

    def __init__(self, nursery: Nursery, rank: int, log: Path) -> None:
        self._nursery = nursery
        self.rank = rank
        self.log = log
        self.who = nursery.new()

    @property
    def news(self) -> list[dict[str, Any]]:
        """All that it has said, in order."""
        return self._nursery.news(self.who)

    def told(self, *events: str) -> dict[str, Any] | None:
        """The first of these events, if it has come."""
        return next((message for message in self.news if message["event"] in events), None)

    def event(self, *events: str, seconds: float = WAIT, count: int = 1) -> dict[str, Any]:
        """The first (or a later) of these events; the test fails when it does not come."""

        def find(news: list[dict[str, Any]]) -> dict[str, Any] | None:
            found = [message for message in news if message["event"] in events]
            return found[count - 1] if len(found) >= count else None

        found = self._nursery.until(self.who, find, seconds)
        if found is None:
            self.signal(signal.SIGUSR2)  # faulthandler writes where each thread is
            time.sleep(0.3)
            pytest.fail(f"rank {self.rank}: no {'/'.join(events)} within {seconds} s\n{self.shown()}", pytrace=False)
        return found

    def signal(self, number: int) -> float:
        """Sends a signal; returns the time just before."""
        now = time.monotonic()
        self._nursery.ask("signal", self.who, number=int(number))
        return now

    def say(self, what: Any) -> None:
        """Gives the rank what it waits for in `Me.hear`."""
        self._nursery.ask("say", self.who, what=what)

    def ended(self, seconds: float = WAIT) -> int:
        """Its exit code; negative: the signal."""
        return self.event("ended", seconds=seconds)["code"]

    @property
    def pid(self) -> int:
        return self.event("started")["pid"]

    def fell(self, seconds: float = WAIT) -> float:
        """When it fell."""
        return self.event("falls", "stopped", "ended", seconds=seconds)["time"]

    def value(self, seconds: float = WAIT) -> Any:
        """What its function returned; the test fails when it raised or died."""
        found = self.event("returned", "failed", "ended", seconds=seconds)
        if found["event"] != "returned":
            pytest.fail(f"rank {self.rank} did not return\n{self.shown()}", pytrace=False)
        return found["value"]

    def shown(self) -> str:
        said = "\n".join(str(message) for message in self.news)
        return f"--- rank {self.rank} said\n{said}\n--- and printed\n{self.log.read_text(errors='replace')}"


class Job(list[Rank]):
    """The ranks of a job, by rank."""

    def survivors(self, *fallen: int) -> list[Rank]:
        return [rank for rank in self if rank.rank not in fallen]

    def shown(self) -> str:
        return "\n".join(rank.shown() for rank in self)


def start_job(
    nursery: Nursery,
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
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port or free_port()),
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "HRDMA_TIMEOUT": "15",
        "HRDMA_HEARTBEAT": "1",
        **({"HRDMA_TRANSPORT": transport} if transport else {}),
        **harness.devices(transport),
        **(env or {}),
    }
    job = Job(Rank(nursery, rank, folder / f"rank{rank}") for rank in range(n))
    for rank in job:
        rank.log.touch()
        nursery.ask(
            "start",
            rank.who,
            path=function.__code__.co_filename,
            function=function.__name__,
            log=str(rank.log),
            env={**base, "RANK": str(rank.rank), "LOCAL_RANK": str(rank.rank), **(each or {}).get(rank.rank, {})},
            arguments=arguments,
        )
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

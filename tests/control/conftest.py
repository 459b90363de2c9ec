"""The fixture `start`: jobs of real ranks that end with the test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys

import machine
import pytest
from control_jobs import MAIN, Rank, Ranks
from ports import free_port


@pytest.fixture
def start():
    """Starts ranks: ``start(size, ranks=[...], port=, token=, env=, **options)``; ends them after the test."""
    started: list[Rank] = []
    machine.begin()

    def make(size: int, ranks=None, *, port: int = 0, token: str | None = "secret", env=None, each=None, **options):
        port = port or free_port()
        base = {key: value for key, value in os.environ.items() if not key.startswith(("HRDMA_", "TORCHELASTIC"))}
        base.update({"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        if token is not None:
            base["HRDMA_TOKEN"] = token
        base.update(env or {})
        found = Ranks()
        for rank in range(size) if ranks is None else ranks:
            own = {**options, **(each or {}).get(rank, {})}
            environment = {**base, "RANK": str(rank), **own.pop("env", {})}
            found.append(Rank([sys.executable, str(MAIN), json.dumps(own)], environment))
        started.extend(found)
        return found

    yield make
    for rank in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, signal.SIGCONT)
        rank.close()

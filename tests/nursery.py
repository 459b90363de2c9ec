"""The process that ranks are forked from, and a rank as its test knows it: what it said, when it ended or stopped."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

WAIT = 20.0
ZYGOTE = Path(__file__).with_name("zygote.py")


class Nursery:
    """The zygote, and the news of all ranks that it has started."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(ZYGOTE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
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


@functools.cache
def nursery() -> Nursery:
    """The one of this test session; `end_nursery` ends it."""
    return Nursery()


def end_nursery() -> None:
    if nursery.cache_info().currsize:
        nursery().close()


def environment() -> dict[str, str]:
    """What ranks have beside what their test gives them."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HRDMA_")}
    return kept | {"OPENBLAS_NUM_THREADS": "1"}  # threads would not be in a process that was forked


class Rank:
    """One process of a job."""

    def __init__(self, rank: int, log: Path) -> None:
        self._nursery = nursery()
        self.rank = rank
        self.log = log
        self.who = self._nursery.new()
        #: shown when this one does not do what its test waits for
        self.mates: Sequence[Rank] = (self,)

    def start(self, function: Callable[..., Any], env: dict[str, str], arguments: dict[str, Any]) -> None:
        """Has it call ``function(me, **arguments)``, which stands at the top of its module, with this environment."""
        self.log.touch()
        code = function.__code__
        call = {"path": code.co_filename, "function": code.co_name, "arguments": arguments}
        self._nursery.ask("start", self.who, log=str(self.log), env=env, **call)

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
            for rank in self.mates:
                rank.signal(signal.SIGUSR2)  # faulthandler writes where each thread is
            time.sleep(0.3)
            self._fail(f"no {'/'.join(events)} within {seconds} s")
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

    def ends(self, seconds: float) -> bool:
        """Whether it ends within this time."""
        return bool(self._nursery.until(self.who, lambda news: any(one["event"] == "ended" for one in news), seconds))

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
            self._fail("did not return")
        return found["value"]

    def _fail(self, why: str) -> NoReturn:
        shown = "\n".join(rank.shown() for rank in self.mates)
        pytest.fail(f"rank {self.rank}: {why}\n{shown}", pytrace=False)

    def shown(self) -> str:
        said = "\n".join(str(message) for message in self.news)
        return f"--- rank {self.rank} said\n{said}\n--- and printed\n{self.log.read_text(errors='replace')}"

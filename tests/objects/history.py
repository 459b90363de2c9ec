"""What happened in a run, and whether it may have: a checker without sockets or clock."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SLACK = 2.0  # seconds that a call may be late: the machine is shared


@dataclass
class Call:
    """One call of a client."""

    client: str
    node: str
    verb: str
    name: str
    args: dict[str, Any]
    deadline: float
    begin: float
    end: float = 0.0
    outcome: str = "open"  #: "ok" or the name of the exception
    value: Any = None


@dataclass
class History:
    """All calls, and when nodes were hurt."""

    calls: list[Call] = field(default_factory=list)
    hurt: list[tuple[float, str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, client: str, node: str, verb: str, name: str, timeout: float, **args: Any) -> Call:
        now = time.monotonic()
        call = Call(client, node, verb, name, args, now + timeout, now)
        with self._lock:
            self.calls.append(call)
        return call

    def end(self, call: Call, outcome: str, value: Any = None) -> None:
        call.end, call.outcome, call.value = time.monotonic(), outcome, value

    def hurts(self, node: str) -> None:
        self.hurt.append((time.monotonic(), node))


def content(name: str, n: int) -> np.ndarray:
    """The value of the object of this name: every object and every offset differs."""
    return np.arange(n, dtype="int64") * 1009 + int(name[1:]) * 7


def problems(history: History, n_of: dict[str, int]) -> list[str]:
    """What may not have happened.

    Parameters
    ----------
    history : History
    n_of : dict
        Elements of each object that was put, by name.
    """
    found = []
    puts = {call.name: call for call in history.calls if call.verb == "put" and call.outcome == "ok"}
    deleted = {call.name: call.begin for call in history.calls if call.verb == "delete"}
    for call in history.calls:
        if call.outcome == "open":
            found.append(f"{call.verb} {call.name} never returned")
        elif call.end > call.deadline + SLACK:
            found.append(f"{call.verb} {call.name} returned {call.end - call.deadline:.1f} s after its deadline")
        elif call.outcome not in ("ok", "TimeoutError", "PeerError", "ObjectLost"):
            found.append(f"{call.verb} {call.name} ended with {call.outcome}")
        if (
            call.verb == "get"
            and call.outcome == "ok"
            and not np.array_equal(call.value, content(call.name, n_of[call.name]))
        ):
            found.append(f"get {call.name} gave something else than was put")
        if call.verb == "sum" and call.outcome == "ok":
            found += _sum_problems(call, n_of)
        if call.verb == "get" and call.outcome == "ObjectLost":
            put = puts.get(call.name)
            gone = call.name in deleted and deleted[call.name] <= call.end
            safe = put is not None and not any(node == put.node and when <= call.end for when, node in history.hurt)
            if put is not None and put.end < call.begin and safe and not gone:
                found.append(f"{call.name} was lost though the node where it was put was never hurt")
    return found


def _sum_problems(call: Call, n_of: dict[str, int]) -> list[str]:
    value, parts = call.value
    what = f"sum {call.name}"
    if len(set(parts)) != len(parts):
        return [f"{what}: an object contributed twice"]
    if len(parts) != call.args["count"]:
        return [f"{what}: {len(parts)} contributors instead of {call.args['count']}"]
    if not set(parts) <= set(call.args["names"]):
        return [f"{what}: a contributor was not asked for"]
    if not np.array_equal(value, sum(content(name, n_of[name]) for name in parts)):
        return [f"{what} is not the sum of its contributors"]
    return []

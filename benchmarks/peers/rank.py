"""What every rank of a Python peer runs: measures the cells that the benchmark asks for, and checks each result.

A peer's job lives as long as the table needs it. Each of its ranks holds a Unix socket to the benchmark and sleeps on it
between two cells, so that a job that waits for its turn costs the others nothing. One JSON object is one line:

    rank                                            benchmark
    {"rank": 0, "size": 2, "version": "MPICH 5"} ->
                                                 <- {"case": "allreduce", "nbytes": 4096, "seconds": 0.1, "repetitions": 5}
    {"most": 0.002}                              ->    any number of times: what the ranks must agree on
                                                 <- 0.003       the largest of all ranks
    {"seconds": [...], "wrong": 0, "operations": 500} ->    or {"error": "..."}

The method is that of `hrdma bench`: between two clock readings, which follow a barrier of the peer, there is nothing but the
peer's calls; the slowest rank counts; one more operation on known values is compared with numpy's result, to the bit.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import repeat
from typing import Any

import numpy as np

from hrdma.bench.cases import CASES, NONE, SHARE, WHOLE, Case, Situation
from hrdma.bench.measure import wrong_elements
from hrdma.bench.values import Values

Call = Callable[[], object]

MOST_CALLS = 100_000
PR_SET_PDEATHSIG = 1
IN_PLACE = ("allreduce", "reduce", "broadcast")
ROOT = 0


class Peer(ABC):
    """A library that moves arrays, on one rank of its job; float32, sums, root 0.

    Attributes
    ----------
    rank, size : int
    version : str
        The library's name and version.
    spoils : tuple of str
        Cases in which the library may change an input, so that this is not held against it.
    """

    rank: int
    size: int
    version: str
    spoils: tuple[str, ...] = ()

    def buffer(self, count: int) -> np.ndarray:
        """Memory for so many elements, as this row of the table uses it."""
        return np.empty(count, np.float32)

    @abstractmethod
    def barrier(self) -> None:
        """Returns when all ranks have come."""

    @abstractmethod
    def bind(self, case: Case, x: np.ndarray, out: np.ndarray) -> Call:
        """The call that is measured, its arguments looked up; `case.burst` operations."""


class Line:
    """The socket to the benchmark."""

    def __init__(self, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(name.replace("@", "\0", 1))  # "@" as in /proc/net/unix: it is in no folder
        self._file = self._socket.makefile("r")

    def say(self, value: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(value).encode() + b"\n")

    def hear(self) -> Any:
        """The next object; None where the benchmark has hung up."""
        text = self._file.readline()
        return json.loads(text) if text else None

    def most(self, value: float) -> float:
        """The largest value of all ranks."""
        self.say({"most": value})
        answer = self.hear()
        if answer is None:
            raise EOFError("the benchmark hung up")
        return float(answer)


def serve(make: Callable[[], Peer]) -> None:
    """Joins the peer's job and measures until the benchmark hangs up; argv[1] is the name of its socket."""
    end_with_parent()
    line = Line(sys.argv[1])  # first, so that the benchmark can end a rank that hangs as it joins
    peer = make()
    line.say({"rank": peer.rank, "size": peer.size, "version": peer.version})
    while (asked := line.hear()) is not None:
        try:
            answer = measure(peer, line.most, **asked)
        except Exception as error:
            line.say({"error": f"rank {peer.rank}: {type(error).__name__}: {error}"})
            raise
        line.say(answer)


def pair() -> tuple[int, socket.socket]:
    """Makes two ranks of this process, for a peer that has no launcher; the rank, and a socket to tell the other an address."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rank = 0 if os.fork() else 1
    if rank:
        end_with_parent()
    ends[1 - rank].close()
    return rank, ends[rank]


def end_with_parent() -> None:
    """Has the kernel end this process when the one that started it is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def measure(
    peer: Peer, most: Callable[[float], float], case: str, nbytes: int, seconds: float, repetitions: int
) -> dict[str, Any]:
    """Measures one cell.

    Parameters
    ----------
    most : function
        Of a number: the largest of all ranks. Collective.
    nbytes : int
        Of a rank's larger buffer.
    seconds : float
        Time that all repetitions take together, about.
    repetitions : int
        At least 1. Where one operation takes long there are fewer, but two.

    Returns
    -------
    dict
        "seconds": of one operation on this rank, for each repetition; "wrong": elements of this rank; "operations": how
        many the repetitions made.
    """
    pattern = CASES[case]
    count = nbytes // 4
    share = count // peer.size if pattern.shared else count
    count = share * peer.size if pattern.shared else count
    at = Situation(peer.rank, peer.size, ROOT, count, share)
    x, out = _buffers(peer, pattern, at)
    x.fill(0)
    out.fill(0)
    call = peer.bind(pattern, x, out)
    calls, once = _warm_up(peer, call, most, seconds / repetitions)
    repetitions = max(2, min(repetitions, math.ceil(seconds / (calls * once))))
    burst = pattern.burst(nbytes)
    found = [_time(peer, call, calls) / calls / burst for _ in range(repetitions)]
    values = Values("float32", at.size, "sum" if pattern.reduces else None)
    wrong = wrong_elements(pattern, call, at, values, x, out, pattern.name in peer.spoils)
    return {"seconds": found, "wrong": wrong, "operations": repetitions * calls * burst}


def _buffers(peer: Peer, case: Case, at: Situation) -> tuple[np.ndarray, np.ndarray]:
    """The two buffers of this rank; without elements where the case has none here."""
    kinds = {
        which: kind if case.has(which, at.rank, at.root) else NONE for which, kind in (("x", case.x), ("out", case.out))
    }
    counts = {NONE: 0, SHARE: at.share, WHOLE: at.count}
    x = peer.buffer(counts[kinds["x"]])
    in_place = case.name in IN_PLACE and kinds["out"] != NONE
    return x, x if in_place else peer.buffer(counts[kinds["out"]])


def _time(peer: Peer, call: Call, calls: int) -> float:
    clock = time.perf_counter
    gc.disable()
    try:
        peer.barrier()
        begin = clock()
        for _ in repeat(None, calls):
            call()
        return clock() - begin
    finally:
        gc.enable()


def _warm_up(peer: Peer, call: Call, most: Callable[[float], float], target: float) -> tuple[int, float]:
    """How many calls take the target's seconds, and seconds of one; tried with more and more calls, never with the first."""
    _time(peer, call, 1)
    calls = 1
    while True:
        elapsed = max(most(_time(peer, call, calls)), 1e-9)
        if elapsed >= target / 2 or calls == MOST_CALLS:
            break
        calls = min(MOST_CALLS, max(2 * calls, int(calls * target / elapsed / 2)))
    return max(1, min(MOST_CALLS, int(calls * target / elapsed))), elapsed / calls

"""Measures one size of one case: buffers, warm-up, timed rounds, and the check of the result.

Time is taken from a barrier to the end of the rank's last call, for many calls at once, and the slowest rank counts.
Between the two clock readings there is nothing but the calls: no clock, no allocation by this harness, no garbage
collection. How many calls is agreed by all ranks (each estimate is reduced to its maximum), so that slow links are not
asked for more than they can do in the time.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, cast

import numpy as np

from hrdma.bench.cases import NONE, SHARE, Situation
from hrdma.bench.values import Values, dtype_of

if TYPE_CHECKING:
    from hrdma.bench.cases import Call, Case
    from hrdma.bench.options import Options
    from hrdma.communicator import Communicator
    from hrdma.types import Op

__all__ = ["Bench", "Row", "wrong_elements"]

ROUND_SECONDS = 0.1  # where the iterations are not given
MOST_ITERATIONS = 200_000
UNCHECKED = -1


@dataclass(frozen=True)
class Row:
    """One size. Times in microseconds (median, least and largest round), bandwidths in 1e9 bytes per second."""

    size: int
    count: int
    type: str
    redop: str
    root: int
    time_us: float
    min_us: float
    max_us: float
    algbw: float
    busbw: float
    wrong: int  #: elements over all ranks; -1: not checked
    iters: int


class Bench:
    """A case on a communicator.

    Parameters
    ----------
    comm : Communicator
    options : Options
        Validated.
    progress : function
        Told, on every rank, what is being done now.
    """

    def __init__(self, comm: Communicator, options: Options, progress: Callable[[str], None]) -> None:
        self.comm = comm
        self.options = options
        self.case = options.pattern
        self._progress = progress
        self._number = np.zeros(1, np.float64)

    def measure(self, count: int, dtype: str, op: str) -> Row:
        """Measures and checks buffers of so many elements. Collective.

        Raises
        ------
        MemoryError
            The buffers cannot be had.
        HrdmaError, TimeoutError
            The transport failed.
        """
        options, case, n = self.options, self.case, self.comm.size
        values = Values(dtype, n, op if case.reduces else None)
        at = Situation(self.comm.rank, n, options.root, count, count // n if case.shared else count)
        x, out = self._buffers(at, dtype_of(dtype))
        x.fill(0)
        out.fill(0)
        call = case.bind(self.comm, x, out, cast("Op", op), options.root)
        nbytes = count * x.itemsize
        burst = case.burst(nbytes)
        iters = self._warm_up(call)
        rounds = []
        for number in range(1, options.rounds + 1):
            self._progress(f"round {number} of {options.rounds}, {iters} iterations each")
            rounds.append(self._time(call, iters) / burst)
        self._progress("checking the result")
        wrong = self._check(call, at, values, x, out) if options.check else UNCHECKED
        median = statistics.median(rounds)
        algbw = nbytes / median / 1e9
        return Row(
            size=nbytes,
            count=count,
            type=dtype if case.moves else "none",
            redop=op,
            root=options.root if case.rooted else -1,
            time_us=median * 1e6,
            min_us=min(rounds) * 1e6,
            max_us=max(rounds) * 1e6,
            algbw=algbw,
            busbw=algbw * case.factor(n),
            wrong=wrong,
            iters=iters,
        )

    def _buffers(self, at: Situation, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """The two buffers of this rank; without elements where the case has none here."""
        case = self.case
        x, out = (
            self._new((at.share if kind == SHARE else at.count) if case.has(which, at.rank, at.root) else 0, dtype)
            for which, kind in (("x", case.x), ("out", case.out))
        )
        if self.options.where == "in" and x.size and out.size:
            mine = slice(at.share * at.rank, at.share * (at.rank + 1))
            if case.x == case.out:
                out = x
            elif case.x == SHARE:
                x = out[mine]
            else:
                out = x[mine]
        return x, out

    def _new(self, count: int, dtype: np.dtype) -> np.ndarray:
        import hrdma

        return hrdma.empty(count, dtype) if self.options.memory == "registered" and count else np.empty(count, dtype)

    def _most(self, value: float) -> float:
        """The largest value of all ranks."""
        self._number[0] = value
        self.comm.allreduce(self._number, "max")
        return float(self._number[0])

    def _time(self, call: Call, iters: int) -> float:
        """Seconds per call, of the slowest rank."""
        clock = time.perf_counter
        collects = gc.isenabled()
        gc.disable()
        try:
            self.comm.barrier()
            begin = clock()
            for _ in repeat(None, iters):
                call()
            elapsed = clock() - begin
        finally:
            if collects:
                gc.enable()
        return self._most(elapsed) / iters

    def _warm_up(self, call: Call) -> int:
        """Runs the call as often as asked, or for as long as a round takes; the number of calls of a round."""
        options = self.options
        self._progress("warm-up")
        once = self._time(call, 1)
        warmup = min(options.warmup - 1, int(ROUND_SECONDS / once))
        if warmup > 0:
            once = self._time(call, warmup)
        if options.iters:
            return options.iters
        iters = min(MOST_ITERATIONS, int(ROUND_SECONDS / once))
        if iters > 4 * max(warmup, 1):  # a few calls say little about many
            iters = min(MOST_ITERATIONS, int(ROUND_SECONDS / self._time(call, iters // 4)))
        return max(1, iters)

    def _check(self, call: Call, at: Situation, values: Values, x: np.ndarray, out: np.ndarray) -> int:
        """Runs it once more on known values; wrong elements over all ranks, those of a changed input included."""
        case = self.case
        if case.name == "barrier":
            return self._check_barrier(call)
        return self._total(wrong_elements(case, call, at, values, x, out))

    def _check_barrier(self, call: Call) -> int:
        """Ranks that left before the last one came, as far as they have one clock."""
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = int(file.read().replace("-", "")[:15], 16)
        times = np.zeros((self.comm.size, 3), np.int64)
        time.sleep(0.01 * self.comm.rank / self.comm.size)
        came = time.monotonic_ns()
        call()
        left = time.monotonic_ns()
        self.comm.allgather(np.array([boot, came, left], np.int64), times.reshape(-1))
        if len(set(times[:, 0].tolist())) > 1:
            return UNCHECKED
        return int(np.count_nonzero(times[:, 2] < times[:, 1].max()))

    def _total(self, wrong: int) -> int:
        total = np.array([wrong], np.int64)
        self.comm.allreduce(total, "sum")
        return int(total[0])


def wrong_elements(
    case: Case, call: Call, at: Situation, values: Values, x: np.ndarray, out: np.ndarray, spoils: bool = False
) -> int:
    """Runs a call on known values; how many elements are wrong on this rank, to the bit.

    An input that the call has changed is wrong too, but for a library that may do that (`spoils`).
    """
    apart = not np.may_share_memory(x, out)
    out.fill(0)
    values.fill(x, at.rank)
    call()
    result = out if out.size else x
    wrong = 0
    for begin, end, expected in case.want(at, values):
        wrong += values.count_wrong(result[begin:end], expected)
    if apart and case.out != NONE and not spoils:
        wrong += values.count_wrong(x, values.of(at.rank))
    return wrong

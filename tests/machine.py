"""What the machine withheld: seconds in which a process that only wanted to wake up could not.

    killed = rank.signal(SIGKILL)
    assert machine.took(killed, rank.event("lost")["time"]) < 0.5

Some bounds are promises (a death is known within a second), so they are neither widened nor tried again until they hold. But on a
machine that stops for half a second, as a virtual one does when its host is busy, everything takes half a second longer. A
process beside the tests sleeps 10 ms again and again, on each of the first processors, and keeps when it woke late; that is taken
off. It uses no memory, locks or files of what is tested, so what is slow there stays slow here.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import subprocess
import sys
import threading
import time

PACE = 0.01
LATE = 0.03  #: seconds of a sleep of PACE, beyond which the machine was not there
MOST = 4  #: processors that are looked at
WAIT = 30.0


def withheld(begin: float, end: float) -> float:
    """Seconds between two times of the monotonic clock during which one of the processors did not come round."""
    return _watch().withheld(begin, end)


def took(begin: float, end: float) -> float:
    """Seconds between two times of the monotonic clock, without those that the machine withheld."""
    return end - begin - withheld(begin, end)


class Watch:
    """The process beside the tests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-ES", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.withheld(0.0, 0.0)  # it looks from now on

    def withheld(self, begin: float, end: float) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{begin} {end}\n")
        self._process.stdin.flush()
        ready = select.select([self._process.stdout], [], [], WAIT)[0]
        assert ready, f"the process that looks at the machine has not answered within {WAIT:g} s"
        return float(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(WAIT)
        self._process.stdout.close()


@functools.cache
def _watch() -> Watch:
    return Watch()


def begin() -> None:
    """Looks from now on; what was before it is not known."""
    _watch()


def end() -> None:
    """Ends the process, if there is one."""
    if _watch.cache_info().currsize:
        _watch().close()
        _watch.cache_clear()


# --- inside it ---


class Sleeper(threading.Thread):
    """Sleeps on one processor, and knows when it woke late."""

    def __init__(self, cpu: int) -> None:
        super().__init__(daemon=True)
        self.cpu = cpu
        self.woke = 0.0
        self.late: list[tuple[float, float]] = []

    def run(self) -> None:
        os.sched_setaffinity(threading.get_native_id(), {self.cpu})
        before = time.monotonic()
        while True:
            time.sleep(PACE)
            now = time.monotonic()
            if now - before > LATE:
                self.late.append((before + PACE, now))
            self.woke = before = now


def union(spans: list[tuple[float, float]], begin: float, end: float) -> float:
    """Length of what the spans cover of an interval."""
    total, until = 0.0, begin
    for first, last in sorted(spans):
        total += max(0.0, min(last, end) - max(first, until))
        until = max(until, last)
    return total


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its input
    sleepers = [Sleeper(cpu) for cpu in sorted(os.sched_getaffinity(0))[:MOST]]
    for sleeper in sleepers:
        sleeper.start()
    for line in sys.stdin:
        begin, end = map(float, line.split())
        while not all(sleeper.woke > end for sleeper in sleepers):
            time.sleep(PACE / 4)
        print(union([span for sleeper in sleepers for span in sleeper.late], begin, end), flush=True)


if __name__ == "__main__":
    main()

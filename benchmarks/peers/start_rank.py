"""What every rank of bench_start.py runs: comes with its imports done, then starts its library when it is told to.

    python start_rank.py hrdma|mpi SOCKET

What is said is described in rank.py; here an object that the benchmark sends is {"step": ..., and what the step takes}.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from rank import Line, end_with_parent

COUNT = 1 << 18  # elements of the allreduce
PINGS = 2000
ARENAS = "/memfd:hrdma-arena"
# What `hrdma.init` and a first barrier import on their way, as importing hrdma imports nothing.
FETCHED = ("calibration", "communicator", "config", "control", "log", "planning", "traffic", "world")


def memory(smaps: str) -> dict[str, int]:
    """Bytes of a process: its share (PSS), of which arenas have a part; and what is its own alone (USS)."""
    found: Counter[str] = Counter()
    mapped = ""
    for line in smaps.splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            mapped = words[5] if len(words) > 5 else ""
        elif words[0] in ("Pss:", "Private_Clean:", "Private_Dirty:"):
            kind = words[0].partition("_")[0].rstrip(":").lower()
            found[kind] += 1024 * int(words[1])
            if mapped.startswith(ARENAS) and kind == "pss":
                found["arenas"] += 1024 * int(words[1])
    return {"pss": found["pss"], "arenas": found["arenas"], "own": found["private"]}


class Hrdma:
    def __init__(self) -> None:
        import hrdma

        for name in FETCHED:
            import_module(f"hrdma.{name}")
        self.version = f"hrdma {hrdma.__version__}"
        self.rank = int(os.environ["RANK"])
        self._begin = hrdma.init

    def start(self) -> None:
        self.comm = self._begin()
        self.comm.barrier()

    def allreduce(self, x: np.ndarray) -> None:
        self.comm.allreduce(x)

    def send(self, x: np.ndarray, to: int) -> None:
        self.comm.send(x, to)

    def recv(self, x: np.ndarray, source: int) -> None:
        self.comm.recv(x, source)


class Mpi:
    def __init__(self) -> None:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI

        self.mpi = MPI
        self.version = MPI.Get_library_version().split("\n")[0].replace("Version:", "").strip("\0")
        self.rank = int(os.environ["PMI_RANK"])

    def start(self) -> None:
        self.mpi.Init_thread()
        self.comm = self.mpi.COMM_WORLD
        self.comm.Barrier()

    def allreduce(self, x: np.ndarray) -> None:
        self.comm.Allreduce(self.mpi.IN_PLACE, x)

    def send(self, x: np.ndarray, to: int) -> None:
        self.comm.Send(x, to)

    def recv(self, x: np.ndarray, source: int) -> None:
        self.comm.Recv(x, source)


class Steps:
    """What the benchmark can ask for, one method each; a method returns what is said."""

    imported = 0.0  # seconds that importing the library took

    def __init__(self, library: Hrdma | Mpi) -> None:
        self.library = library

    def start(self) -> dict[str, Any]:
        """Seconds from here to the end of the first barrier, and of the imports before."""
        begin = time.perf_counter()
        self.library.start()
        return {"seconds": time.perf_counter() - begin, "imports": self.imported}

    def memory(self) -> dict[str, Any]:
        return memory(Path("/proc/self/smaps").read_text())

    def allreduce(self, size: int) -> dict[str, Any]:
        """Elements of a sum of plain arrays that are wrong."""
        x = np.arange(COUNT, dtype=np.float32) % 251 + self.library.rank
        self.library.allreduce(x)
        want = (np.arange(COUNT, dtype=np.float32) % 251) * size + size * (size - 1) // 2
        return {"wrong": int(np.count_nonzero(x != want))}

    def idle(self, seconds: float) -> dict[str, Any]:
        """Seconds of processors that all threads of this process took while it did nothing, after a second of that."""
        time.sleep(1)
        begin = time.process_time()
        time.sleep(seconds)
        return {"cpu": time.process_time() - begin}

    def pingpong(self) -> dict[str, Any]:
        """Seconds of 8 bytes one way between ranks 0 and 1; the others sleep at their sockets to the benchmark."""
        library, x = self.library, np.zeros(1)
        if library.rank > 1:
            return {"seconds": 0.0}
        other, first = 1 - library.rank, library.rank == 0
        begin = 0.0
        for number in range(-PINGS // 4, PINGS):  # those below 0 are not counted
            if number == 0:
                begin = time.perf_counter()
            for step in (library.send, library.recv) if first else (library.recv, library.send):
                step(x, other)
        return {"seconds": (time.perf_counter() - begin) / PINGS / 2}


def main() -> None:
    end_with_parent()
    line = Line(sys.argv[2])
    begin = time.perf_counter()
    steps = Steps({"hrdma": Hrdma, "mpi": Mpi}[sys.argv[1]]())
    steps.imported = time.perf_counter() - begin
    line.say({"rank": steps.library.rank, "version": steps.library.version})
    while (asked := line.hear()) is not None:
        try:
            answer = getattr(steps, asked.pop("step"))(**asked)
        except Exception as error:
            line.say({"error": f"rank {steps.library.rank}: {type(error).__name__}: {error}"})
            raise
        line.say(answer)


if __name__ == "__main__":
    main()

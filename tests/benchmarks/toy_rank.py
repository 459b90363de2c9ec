"""A rank of a made-up peer, for test_side_by_side_jobs.py: ranks that meet nobody, and one of several ways to go wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
from rank import Call, Peer, serve

from hrdma.bench.cases import Case


class Toy(Peer):
    """Sums of one rank are its own values, so that `size` 1 gives right results without any transport."""

    size = 1
    version = "toy 1"
    spoils = ("alltoall",)

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.fault = os.environ.get("TOY_FAULT", "")
        self.calls = 0
        if self.fault == "leaves":
            sys.exit("no licence")
        if self.fault == "never ready":
            time.sleep(600)

    def barrier(self) -> None:
        if self.fault == "hangs":
            with subprocess.Popen(["sleep", "600"]) as child:
                print(child.pid, file=sys.stderr, flush=True)

    def bind(self, case: Case, x: np.ndarray, out: np.ndarray) -> Call:
        def call() -> None:
            self.calls += 1
            if self.fault == "raises" and self.calls == 3:
                raise OSError("the cable is out")
            if self.fault == "wrong":
                out[-1] += 1
            if x is not out:
                out[:] = x
            if self.fault == "spoils":
                x[0] += 1

        return call


if __name__ == "__main__":
    serve(Toy)

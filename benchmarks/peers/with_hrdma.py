"""hrdma's own rows: registered buffers, or plain numpy arrays after `numpy` on the command line."""

from __future__ import annotations

import sys

import numpy as np
from rank import ROOT, Call, Peer, serve

import hrdma
from hrdma.bench.cases import Case


class Hrdma(Peer):
    def __init__(self) -> None:
        self.comm = hrdma.init()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.version = f"hrdma {hrdma.__version__}"
        self.registered = "numpy" not in sys.argv[2:]

    def buffer(self, count: int) -> np.ndarray:
        return hrdma.empty(count, "float32") if self.registered and count else super().buffer(count)

    def barrier(self) -> None:
        self.comm.barrier()

    def bind(self, case: Case, x: np.ndarray, out: np.ndarray) -> Call:
        return case.bind(self.comm, x, out, "sum", ROOT)


if __name__ == "__main__":
    serve(Hrdma)

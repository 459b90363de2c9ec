"""MPI through mpi4py: upper-case calls, buffers described once before the measurement."""

from __future__ import annotations

from functools import partial

import numpy as np
from mpi4py import MPI
from rank import ROOT, Call, Peer, serve

from hrdma.bench.cases import Case


class Mpi(Peer):
    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size
        self.version = " ".join(
            MPI.Get_library_version().split("\n")[0].split(",")[0].replace("Version:", "").strip("\0").split()
        )

    def barrier(self) -> None:
        self.comm.Barrier()

    def bind(self, case: Case, x: np.ndarray, out: np.ndarray) -> Call:
        comm = self.comm
        mine, theirs = [x, MPI.FLOAT], [out, MPI.FLOAT]
        calls: dict[str, Call] = {
            "allreduce": partial(comm.Allreduce, MPI.IN_PLACE, mine, MPI.SUM),
            "reduce": partial(
                comm.Reduce, *((MPI.IN_PLACE, mine) if self.rank == ROOT else (mine, None)), MPI.SUM, ROOT
            ),
            "broadcast": partial(comm.Bcast, mine, ROOT),
            "allgather": partial(comm.Allgather, mine, theirs),
            "reduce_scatter": partial(comm.Reduce_scatter_block, mine, theirs, MPI.SUM),
            "alltoall": partial(comm.Alltoall, mine, theirs),
            "pingpong": partial(self._ping if self.rank == 0 else self._pong, mine, theirs),
            "bandwidth": partial(
                self._stream,
                partial(comm.Isend, mine, 1) if self.rank == 0 else partial(comm.Irecv, theirs, 0),
                case.burst(max(x.nbytes, out.nbytes)),
            ),
        }
        return calls[case.name]

    def _ping(self, mine: list, theirs: list) -> None:
        self.comm.Send(mine, 1)
        self.comm.Recv(theirs, 1)

    def _pong(self, mine: list, theirs: list) -> None:
        self.comm.Recv(theirs, 0)
        self.comm.Send(mine, 0)

    @staticmethod
    def _stream(post: Call, window: int) -> None:
        MPI.Request.Waitall([post() for _ in range(window)])


if __name__ == "__main__":
    serve(Mpi)

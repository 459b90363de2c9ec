"""torch.distributed with Gloo on the CPU: tensors over the arrays' memory, shared and looked up before the measurement."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from rank import ROOT, Call, Peer, serve

from hrdma.bench.cases import Case

PATIENCE = timedelta(seconds=60)


class Gloo(Peer):
    spoils = ("reduce",)  # partial sums are left in the tensors of the ranks that are not the root

    def __init__(self) -> None:
        dist.init_process_group("gloo", timeout=PATIENCE)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.version = f"torch {torch.__version__}"

    def barrier(self) -> None:
        dist.barrier()

    def bind(self, case: Case, x: np.ndarray, out: np.ndarray) -> Call:
        mine, theirs = torch.from_numpy(x), torch.from_numpy(out)
        calls: dict[str, Call] = {
            "allreduce": lambda: dist.all_reduce(mine),
            "reduce": lambda: dist.reduce(mine, ROOT),
            "broadcast": lambda: dist.broadcast(mine, ROOT),
            "allgather": lambda: dist.all_gather_into_tensor(theirs, mine),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(theirs, mine),
            "alltoall": lambda: dist.all_to_all_single(theirs, mine),
            "pingpong": self._pingpong(mine, theirs),
            "bandwidth": self._stream(mine, theirs, case.burst(max(x.nbytes, out.nbytes))),
        }
        return calls[case.name]

    def _pingpong(self, mine: torch.Tensor, theirs: torch.Tensor) -> Call:
        def ping() -> None:
            dist.send(mine, 1)
            dist.recv(theirs, 1)

        def pong() -> None:
            dist.recv(theirs, 0)
            dist.send(mine, 0)

        return ping if self.rank == 0 else pong

    def _stream(self, mine: torch.Tensor, theirs: torch.Tensor, window: int) -> Call:
        post: Callable[[], dist.Work] = (
            (lambda: dist.isend(mine, 1)) if self.rank == 0 else (lambda: dist.irecv(theirs, 0))
        )

        def stream() -> None:
            for work in [post() for _ in range(window)]:
                work.wait()

        return stream


if __name__ == "__main__":
    serve(Gloo)

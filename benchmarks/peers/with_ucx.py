"""UCX through ucxx: tagged messages between two workers, no asyncio; whoever waits drives its worker. No collectives."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from importlib.metadata import version

import numpy as np
import ucxx._lib.libucxx as ucx
from rank import Call, Peer, pair, serve
from ucxx._lib.arr import Array

from hrdma.bench.cases import Case

TAG = ucx.UCXXTag(1)
MOST_ADDRESS = 1 << 16


class Ucx(Peer):
    size = 2

    def __init__(self, rank: int, other: socket.socket) -> None:
        self.rank = rank
        self.version = f"ucxx {version('ucxx-cu12')}, UCX {'.'.join(map(str, ucx.get_ucx_version()))}"
        self.worker = ucx.UCXWorker(ucx.UCXContext({}))
        other.send(bytes(ucx.UCXAddress.create_from_worker(self.worker)))
        address = ucx.UCXAddress.create_from_buffer(other.recv(MOST_ADDRESS))
        self.endpoint = ucx.UCXEndpoint.create_from_worker_address(self.worker, address, endpoint_error_handling=False)
        self.token = Array(np.zeros(1, np.uint8))

    def barrier(self) -> None:
        self._both(self.token, self.token)

    def bind(self, case: Case, x: np.ndarray, out: np.ndarray) -> Call:
        mine, theirs = (Array(array) if array.size else None for array in (x, out))
        post = (lambda: self._send(mine)) if self.rank == 0 else (lambda: self._recv(theirs))
        window = range(case.burst(max(x.nbytes, out.nbytes)))

        def stream() -> None:
            for request in [post() for _ in window]:
                self._wait(request)

        return stream if case.name == "bandwidth" else lambda: self._both(mine, theirs)

    def _both(self, mine: Array, theirs: Array) -> None:
        """A message to the other and one from it, rank 0 first."""
        steps: tuple[Callable[[], ucx.UCXRequest], ...] = (lambda: self._send(mine), lambda: self._recv(theirs))
        for step in steps if self.rank == 0 else reversed(steps):
            self._wait(step())

    def _send(self, array: Array) -> ucx.UCXRequest:
        return self.endpoint.tag_send(array, TAG)

    def _recv(self, array: Array) -> ucx.UCXRequest:
        return self.worker.tag_recv(array, TAG, ucx.UCXXTagMaskFull)

    def _wait(self, request: ucx.UCXRequest) -> None:
        while not request.completed:
            self.worker.progress()
        request.check_error()


if __name__ == "__main__":
    serve(partial(Ucx, *pair()))

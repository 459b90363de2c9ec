"""pyzmq: a pair of sockets, messages that are not copied where pyzmq can avoid it; two ranks, no collectives.

The address and the rank follow on the command line. A received message is copied into the target, as the other rows have it.
"""

from __future__ import annotations

import sys

import numpy as np
import zmq
from rank import Call, Peer, serve

from hrdma.bench.cases import Case

SMALL = 1 << 16  # bytes up to which copying a message is cheaper than tracking it
PATIENCE_MS = 60_000


class Zmq(Peer):
    size = 2

    def __init__(self) -> None:
        address, self.rank = sys.argv[2], int(sys.argv[3])
        self.version = f"pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()}"
        self.socket = zmq.Context().socket(zmq.PAIR)
        self.socket.sndtimeo = self.socket.rcvtimeo = PATIENCE_MS
        self.socket.linger = 0
        if self.rank == 0:
            self.socket.bind(address)
        else:
            self.socket.connect(address)

    def barrier(self) -> None:
        self.socket.send(b"")
        self.socket.recv()

    def bind(self, case: Case, x: np.ndarray, out: np.ndarray) -> Call:
        socket, copy = self.socket, max(x.nbytes, out.nbytes) < SMALL
        source, target = x.view(np.uint8), out.view(np.uint8)
        window = range(case.burst(max(x.nbytes, out.nbytes)))

        def send() -> None:
            socket.send(source, copy=copy)

        def recv() -> None:
            got = socket.recv(copy=copy)
            target[:] = np.frombuffer(got if copy else got.buffer, np.uint8)

        def ping() -> None:
            send()
            recv()

        def pong() -> None:
            recv()
            send()

        def stream() -> None:
            for _ in window:
                send() if self.rank == 0 else recv()
            self.barrier()  # what was sent has come only when the other says so

        return stream if case.name == "bandwidth" else ping if self.rank == 0 else pong


if __name__ == "__main__":
    serve(Zmq)

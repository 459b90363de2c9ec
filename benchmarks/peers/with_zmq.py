"""pyzmq: a pair of sockets; large messages are not copied by pyzmq, but into the target, as in the other rows. No collectives.

`tcp` on the command line: over loopback TCP, otherwise over a Unix socket.
"""

from __future__ import annotations

import socket
import sys
from functools import partial

import numpy as np
import zmq
from rank import Call, Peer, pair, serve

from hrdma.bench.cases import Case

LARGE = 1 << 16  # bytes from which tracking a message is cheaper than copying it
PATIENCE_MS = 60_000
MOST_ADDRESS = 1 << 10


class Zmq(Peer):
    size = 2

    def __init__(self, rank: int, other: socket.socket) -> None:
        self.rank = rank
        self.version = f"pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()}"
        self.pair = zmq.Context().socket(zmq.PAIR)
        self.pair.sndtimeo = self.pair.rcvtimeo = PATIENCE_MS
        self.pair.linger = 0
        if self.rank == 0:
            self.pair.bind("tcp://127.0.0.1:*" if sys.argv[2] == "tcp" else "ipc://*")
            other.send(self.pair.last_endpoint)
        else:
            self.pair.connect(other.recv(MOST_ADDRESS).decode())

    def barrier(self) -> None:
        self.pair.send(b"")
        self.pair.recv()

    def bind(self, case: Case, x: np.ndarray, out: np.ndarray) -> Call:
        link, large = self.pair, max(x.nbytes, out.nbytes) >= LARGE
        source, target = x.view(np.uint8), out.view(np.uint8)
        window = range(case.burst(max(x.nbytes, out.nbytes)))
        send = partial(link.send, source, copy=False) if large else partial(link.send, source)

        def recv() -> None:
            target[:] = np.frombuffer(link.recv(copy=False).buffer if large else link.recv(), np.uint8)

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
    serve(partial(Zmq, *pair()))

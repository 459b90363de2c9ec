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

SMALL = 1 << 16  # bytes below which copying a message is cheaper than tracking it
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
        link, copy = self.pair, max(x.nbytes, out.nbytes) < SMALL
        source, target = x.view(np.uint8), out.view(np.uint8)
        window = range(case.burst(max(x.nbytes, out.nbytes)))

        def send() -> None:
            link.send(source, copy=copy)

        def recv() -> None:
            got = link.recv(copy=copy)
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
    serve(partial(Zmq, *pair()))

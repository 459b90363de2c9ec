"""RDMA WRITE from this host into the other one's memory, and TCP beside it; run as a program this file is their far end.

    with other.start(FAR_END), streams(output, guest, dscps=[10, 12]) as (writers, sender):
        with running(writers[0], sender):
            writers[1].latencies(20)

The two ends meet over the wire that carries nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from hrdma import verbs

FAR_END = "python tests/rxe/streams.py"
PORT = 7740  # the far end listens for queue pairs on the wire `control`, and for TCP on wire 0
LISTEN_SECONDS = 60.0  # to start Python takes seconds here
MESSAGE = 1 << 16  # bytes; of those whose latency is measured
BULK = 1 << 20  # of those without a pause: between two there is Python, which may have to wait for its turn
AHEAD = 2  # messages without a pause that are posted at a time
ACK_TIMEOUT = 8.0  # seconds; packets of a low band may wait for long
SEND_BUFFER = 1 << 15  # of TCP; what lies here in a low band shall take less than its least time-out, 0.2 s
PATIENCE = 60.0


class Writer:
    """A queue pair that writes to the other host."""

    def __init__(self, pd: verbs.ProtectionDomain, region: verbs.MemoryRegion) -> None:
        self._cq, self._region = verbs.CompletionQueue(pd.device), region
        self.qp = verbs.QueuePair(pd, self._cq)
        self.address, self.rkey = 0, 0  #: of the memory there

    def _post(self, nbytes: int) -> None:
        self.qp.write(self._region[:nbytes], self.address, self.rkey)

    def _ended(self) -> int:
        """How many messages have been acknowledged, one at least."""
        ended = self._cq.poll(timeout=PATIENCE)
        assert ended, f"no message was acknowledged within {PATIENCE} s"
        for one in ended:
            one.check()
        return len(ended)

    def latencies(self, count: int) -> list[float]:
        """Seconds from posting a message until it is acknowledged, one message after the other."""
        took = []
        for _ in range(count):
            start = time.monotonic()
            self._post(MESSAGE)
            self._ended()
            took.append(time.monotonic() - start)
        return took

    def run(self, stop: threading.Event) -> None:
        """Writes without a pause until it is stopped, and then until all is acknowledged."""
        ahead = 0
        while ahead or not stop.is_set():
            while ahead < AHEAD and not stop.is_set():
                self._post(BULK)
                ahead += 1
            ahead -= self._ended() if ahead else 0


class Sender:
    """A TCP connection to the other host."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket()
        self.socket.settimeout(PATIENCE)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self.socket.connect((address, PORT))

    def run(self, stop: threading.Event) -> None:
        """Sends without a pause until it is stopped."""
        chunk = bytes(BULK)
        while not stop.is_set():
            self.socket.sendall(chunk)

    @property
    def resent(self) -> int:
        """Segments sent again: tcpi_total_retrans."""
        return int.from_bytes(self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[100:104], "little")


@contextlib.contextmanager
def running(*streams: Writer | Sender) -> Iterator[None]:
    """Lets streams run beside what is inside; what one of them raises is raised at the end."""
    stop, failures = threading.Event(), []

    def run(stream: Writer | Sender) -> None:
        try:
            stream.run(stop)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(2 * PATIENCE)
    if failures:
        raise failures[0]


@contextlib.contextmanager
def streams(
    guest: dict[str, str], run_there: Callable[[str], str], dscps: Sequence[int]
) -> Iterator[tuple[list[Writer], Sender]]:
    """A writer for each DSCP, and a TCP connection; the far end has been started."""
    deadline = time.monotonic() + LISTEN_SECONDS
    while f"{guest['HOSTS_ADDR1']}:{PORT} " not in run_there("ss -Hltn"):
        assert time.monotonic() < deadline, f"no far end within {LISTEN_SECONDS} s"
        time.sleep(0.2)
    with contextlib.ExitStack() as stack:
        meeting = stack.enter_context(socket.create_connection((guest["HOSTS_ADDR1"], PORT), timeout=PATIENCE))
        device = stack.enter_context(verbs.Device("rxe0"))
        pd = verbs.ProtectionDomain(device)
        region = verbs.MemoryRegion(pd, bytearray(BULK))
        writers = [Writer(pd, region) for _ in dscps]
        lines = meeting.makefile("rw")
        print(json.dumps([writer.qp.address for writer in writers]), file=lines, flush=True)
        there = json.loads(lines.readline())
        for writer, dscp, address in zip(writers, dscps, there["queue_pairs"]):
            writer.qp.connect(address, dscp=dscp, ack_timeout=ACK_TIMEOUT)
            writer.address, writer.rkey = there["address"], there["rkey"]
        sender = Sender(guest["WIRE0_ADDR1"])
        stack.callback(sender.socket.close)
        yield writers, sender


def far_end() -> None:
    """Memory to be written to, and a sink; until the near end closes the connection over which they meet."""
    with (
        socket.create_server((os.environ["WIRE0_ADDR1"], PORT)) as sink,
        verbs.Device("rxe0") as device,
        socket.create_server((os.environ["HOSTS_ADDR1"], PORT)) as listener,
    ):
        listener.settimeout(LISTEN_SECONDS)
        meeting, _ = listener.accept()
        with meeting, meeting.makefile("rw") as lines:
            pd, cq = verbs.ProtectionDomain(device), verbs.CompletionQueue(device)
            region = verbs.MemoryRegion(pd, bytearray(BULK), remote_write=True)
            theirs = json.loads(lines.readline())
            pairs = [verbs.QueuePair(pd, cq) for _ in theirs]
            for pair, address in zip(pairs, theirs):
                pair.connect(address, ack_timeout=ACK_TIMEOUT)
            told = {"queue_pairs": [pair.address for pair in pairs], "address": region.address, "rkey": region.rkey}
            print(json.dumps(told), file=lines, flush=True)
            stream, _ = sink.accept()
            threading.Thread(target=swallow, args=(stream,), daemon=True).start()
            lines.readline()  # the end


def swallow(stream: socket.socket) -> None:
    buffer = bytearray(1 << 18)
    while stream.recv_into(buffer):
        pass


if __name__ == "__main__":
    far_end()

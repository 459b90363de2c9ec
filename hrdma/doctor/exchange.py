"""A real exchange over a queue pair: bytes written, read back and compared; latency and bandwidth of that path.

Everything is one-sided, so the far end only keeps its memory open: the same code measures a device with itself and with
a device of another host.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from hrdma import verbs

__all__ = ["End", "with_itself"]

PIECE, PIECES = 1 << 16, 8  # of one batch
SIZE = PIECE * PIECES
SECONDS = 5.0  # for one work request; retries end it sooner
TURNS, MOST = 100, 0.25  # reads timed, and seconds after which timing ends


class End:
    """One queue pair on a device, and memory: a half that the peer uses, a half of its own.

    Raises
    ------
    DeviceError, RequestError
        The device cannot be opened, or gives no queue pair or memory.
    """

    def __init__(self, name: str, port: int = 1, gid_index: int | None = None) -> None:
        self.device = verbs.Device(name, port, gid_index)
        try:
            pd = verbs.ProtectionDomain(self.device)
            self.cq = verbs.CompletionQueue(self.device)
            self.qp = verbs.QueuePair(pd, self.cq)
            self.bytes = np.zeros(2 * SIZE, "uint8")
            self.region = verbs.MemoryRegion(pd, self.bytes, remote_read=True, remote_write=True)
        except BaseException:
            self.device.close()
            raise

    def __enter__(self) -> End:
        return self

    def __exit__(self, *_: object) -> None:
        self.device.close()

    def card(self) -> dict[str, Any]:
        """What the peer needs, as JSON can carry it."""
        where = {"remote": self.region.address, "rkey": self.region.rkey, "device": self.device.name}
        return self.qp.address._asdict() | where

    def connect(self, card: dict[str, Any]) -> None:
        self.qp.connect([card[name] for name in ("gid", "lid", "num", "psn", "mtu")])

    def _end(self) -> None:
        found = self.cq.poll(1, timeout=SECONDS)
        if not found:
            raise TimeoutError(f"a work request on {self.device.name} did not end within {SECONDS:g} s")
        found[0].check()

    def probe(self, card: dict[str, Any]) -> dict[str, float]:
        """Writes to the peer's memory, reads it back, then times both; the peer stays connected meanwhile.

        Returns
        -------
        dict
            ``latency``: of a read of 8 bytes and back, median, seconds; ``bandwidth``: of writes, bytes per second.

        Raises
        ------
        RequestError, TimeoutError
            It did not get through.
        ValueError
            What came back is not what was sent.
        """
        remote, rkey = card["remote"], card["rkey"]
        local = self.bytes[SIZE:]
        pieces = [self.region[at : at + PIECE] for at in range(SIZE, 2 * SIZE, PIECE)]
        local[:] = sent = (np.arange(SIZE) * 7 % 251).astype("uint8")
        self.qp.write(pieces, remote, rkey, signaled=False)
        self.qp.read(self.region[SIZE : SIZE + 8], remote, rkey)  # ends after the writes
        self._end()
        local[:] = 0
        self.qp.read(self.region[SIZE:], remote, rkey)
        self._end()
        if wrong := int((local != sent).sum()):
            raise ValueError(f"{wrong} of {SIZE} bytes came back changed over {self.device.name}")
        return {"latency": self._latency(remote, rkey), "bandwidth": self._bandwidth(pieces, remote, rkey)}

    def _latency(self, remote: int, rkey: int) -> float:
        word = self.region[SIZE : SIZE + 8]
        times: list[float] = []
        stop = time.monotonic() + MOST
        while len(times) < TURNS and (not times or time.monotonic() < stop):
            start = time.perf_counter()
            self.qp.read(word, remote, rkey)
            self._end()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def _bandwidth(self, pieces: list[verbs.Piece], remote: int, rkey: int) -> float:
        turns, start = 0, time.perf_counter()
        while not turns or time.perf_counter() - start < MOST:
            self.qp.write(pieces[:-1], remote, rkey, signaled=False)
            self.qp.write(pieces[-1], remote + SIZE - PIECE, rkey)
            self._end()
            turns += 1
        return turns * SIZE / (time.perf_counter() - start)


def with_itself(name: str, port: int = 1) -> dict[str, float]:
    """`End.probe` between two queue pairs of one device."""
    with End(name, port) as here, End(name, port) as there:
        here.connect(there.card())
        there.connect(here.card())
        return here.probe(there.card())

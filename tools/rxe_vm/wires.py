"""Wires between two guests: frames pass through this process, so that those which the far end does not take are lost.

Linked directly, a card whose link is down would not lose frames but stop reading, and block the sender's card for ever: no
retry of RDMA would ever run out. Here it blocks for `PATIENCE`, as a card does that is busy; after that frames are
thrown away until it reads again. QEMU's format on a stream socket: the length in 4 bytes, big-endian, then the frame.
"""

from __future__ import annotations

import collections
import selectors
import socket
import struct
import time
from collections.abc import Sequence

PATIENCE = 0.3  # seconds; a guest that gets no processor time for so long loses frames, which RDMA and TCP send again
HELD = 1 << 16  # bytes waiting in one direction before its sender is not read any more
TICK = 0.05  # seconds between looks at lanes that are blocked


def whole_frames(data: bytes | bytearray) -> int:
    """Length of the part of `data` that is complete frames."""
    place = 0
    while place + 4 <= len(data):
        (length,) = struct.unpack_from(">I", data, place)
        if place + 4 + length > len(data):
            break
        place += 4 + length
    return place


class Lane:
    """One direction of a wire: sockets without blocking, and the frames on their way."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self._partial = b""  # the beginning of a frame whose end has not come
        self._waiting: collections.deque[bytes] = collections.deque()  # each is whole frames
        self._held = 0  # bytes in _waiting
        self._sent = 0  # of the first in _waiting
        self._progress = time.monotonic()  # when the sink last took something, or had all
        self._losing = False  # the sink has taken nothing since frames were lost

    @property
    def blocked(self) -> bool:
        return bool(self._waiting)

    @property
    def full(self) -> bool:
        return self._held >= HELD

    def read(self) -> bool:
        """Takes what the source has, and sends what the sink takes; False at the source's end."""
        try:
            data = self.source.recv(65536)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        data = self._partial + data
        end = whole_frames(data)
        self._partial = data[end:]
        if end:
            if not self._waiting and not self._losing:
                self._progress = time.monotonic()
            self._waiting.append(data[:end])
            self._held += end
            self.write()
        return bool(data)

    def write(self) -> None:
        """Sends what the sink takes."""
        while self._waiting:
            first = self._waiting[0]
            try:
                count = self.sink.send(memoryview(first)[self._sent :])
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                count = len(first) - self._sent  # nobody is there any more
            self._progress = time.monotonic()
            self._losing = False
            self._sent += count
            if self._sent == len(first):
                self._waiting.popleft()
                self._held -= len(first)
                self._sent = 0

    def lose(self) -> None:
        """Throws away what the sink has not taken for too long, but for the rest of a frame of which it has a part."""
        if not self._waiting or time.monotonic() < self._progress + PATIENCE:
            return
        self._losing = True
        first = self._waiting[0]
        end = 0
        while end < self._sent:
            (length,) = struct.unpack_from(">I", first, end)
            end += 4 + length
        self._waiting.clear()
        self._held = end
        if end > self._sent:
            self._waiting.append(first[:end])
        else:
            self._held = self._sent = 0


class Wires:
    """All wires, for one loop over a selector.

    Parameters
    ----------
    pairs : sequence of two sockets
        This process's ends of each wire, connected with what the guests have. They stay the caller's to close.
    """

    def __init__(self, pairs: Sequence[tuple[socket.socket, socket.socket]]) -> None:
        self._lanes = [Lane(*ends) for left, right in pairs for ends in ((left, right), (right, left))]
        self._ended: set[socket.socket] = set()
        for left, right in pairs:
            left.setblocking(False)
            right.setblocking(False)

    def watch(self, selector: selectors.BaseSelector) -> float | None:
        """Says to the selector what to wait for; returns the seconds after which `turn` wants to be called, if any."""
        for lane in self._lanes:
            reverse = next(other for other in self._lanes if other.source is lane.sink)
            events = 0
            if not lane.full and lane.source not in self._ended:
                events |= selectors.EVENT_READ
            if reverse.blocked:
                events |= selectors.EVENT_WRITE
            known = selector.get_map().get(lane.source)
            if known is None and events:
                selector.register(lane.source, events, self)
            elif known is not None and not events:
                selector.unregister(lane.source)
            elif known is not None and known.events != events:
                selector.modify(lane.source, events, self)
        return TICK if any(lane.blocked for lane in self._lanes) else None

    def turn(self, ready: dict[socket.socket, int]) -> None:
        """Moves frames over the sockets that are ready, and loses those that nobody has taken."""
        for lane in self._lanes:
            if ready.get(lane.source, 0) & selectors.EVENT_READ and not lane.read():
                self._ended.add(lane.source)
            if ready.get(lane.sink, 0) & selectors.EVENT_WRITE:
                lane.write()
            lane.lose()

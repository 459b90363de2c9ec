"""One host's objects in shared memory: a segment each, counted against a capacity.

A segment is a memfd: nothing has a name, so that nothing is left behind, and what a client maps stays mapped whatever becomes
of the node. A client that puts gets it writable once; when it is done the segment is sealed, after which not even that client
can change it. Others get a read-only descriptor and map it: a `get` copies nothing. Memory is reserved before it is handed out
(ENOMEM here, never SIGBUS there).

Only spare copies may be evicted: complete, viewed by nobody, feeding nobody, and known to the directory to be complete
elsewhere too. That last question goes over the network, hence `Store.make_room` takes a callback.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hrdma.errors import ObjectStoreFull
from hrdma.objects.asker import Body
from hrdma.objects.memory import Memory

if TYPE_CHECKING:
    from hrdma.verbs import MemoryRegion, ProtectionDomain

__all__ = ["Part", "Segment", "Store", "usual_capacity"]

F_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
SEAL_SHRINK, SEAL_GROW, SEAL_WRITE, SEAL_FUTURE_WRITE = 2, 4, 8, 16


def usual_capacity() -> int:
    """Bytes of a store where nobody said: three tenths of the memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 3 // 10


class Segment(Memory):
    """The bytes of one object, or of a sum on its way.

    `progress` says how many bytes are there; whoever adds some calls `advance`, whoever needs some `wait_for`. Threads.
    """

    def __init__(self, name: str, meta: Body, gen: str, *, by_client: bool = False) -> None:
        self.name, self.meta, self.gen = name, meta, gen
        nbytes: int = meta["nbytes"]
        self.progress = 0
        self.fixed = not by_client  #: nobody but this process can write there any more
        self.complete = False  #: it counts: the directory knows it as complete
        self.producing = False
        self.aborted = False
        self.via: int | None = None
        self.pins = 0  #: views, streams and sums that use it
        self.doomed = False  #: it goes with its last pin
        self.used = time.monotonic()
        self.parts: list[Part] = []  #: of a result that comes in pieces
        self.changed = threading.Condition()
        self._closed = False
        self.writer = os.memfd_create("hrdma-object", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.writer, nbytes)
            os.posix_fallocate(self.writer, 0, nbytes)
            self.reader = os.open(f"/proc/self/fd/{self.writer}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.close(self.writer)
            raise
        if by_client:
            self.map = mmap.mmap(self.reader, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        else:
            self.map = mmap.mmap(self.writer, nbytes)
            fcntl.fcntl(self.writer, F_ADD_SEALS, SEAL_SHRINK | SEAL_GROW | SEAL_FUTURE_WRITE)
        super().__init__(memoryview(self.map))

    def seal(self) -> None:
        """Ends all writing, also by whoever holds the writable descriptor.

        Raises
        ------
        OSError
            Somebody has it mapped writable.
        """
        fcntl.fcntl(self.writer, F_ADD_SEALS, SEAL_SHRINK | SEAL_GROW | SEAL_WRITE)
        with self.changed:
            self.fixed = True
            self.changed.notify_all()

    def advance(self, progress: int) -> None:
        with self.changed:
            self.progress = progress
            self.changed.notify_all()

    def abort(self) -> None:
        """It will not grow any more; who waits for more gives up."""
        with self.changed:
            self.aborted = True
            self.changed.notify_all()
        self._wake_parts()

    def _wake_parts(self) -> None:
        for part in self.parts:
            part.wake()

    def wait_for(self, nbytes: int, timeout: float | None = None) -> int:
        """Waits until more than `nbytes` bytes are there; returns how many, or -1 when there will be no more."""
        with self.changed:
            self.changed.wait_for(lambda: self.progress > nbytes or self.aborted, timeout)
            return -1 if self.aborted else self.progress

    def wait_fixed(self, timeout: float) -> bool:
        """Waits until nobody but this process can write there, or will; False when the time is over."""
        with self.changed:
            return self.changed.wait_for(lambda: self.fixed or self.aborted, timeout)

    def private(self) -> memoryview | None:
        """Of what this process may only read: before 6.2 Linux pins such memory only where it is private, in a copy."""
        if not self.view.readonly:
            return None
        return memoryview(mmap.mmap(self.reader, self.nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ))

    def pin(self) -> bool:
        """It stays until `unpin`; False when it has gone. From any thread."""
        with self.changed:
            self.pins += not self._closed
            return not self._closed

    def unpin(self) -> None:
        with self.changed:
            self.pins -= 1
            self.used = time.monotonic()

    def close(self) -> bool:
        """Gives the descriptors back, unless it is pinned; the memory goes with the last mapping."""
        with self.changed:
            if self.pins or self._closed:
                return False
            self._closed = self.aborted = True
            self.changed.notify_all()
        self._wake_parts()
        self.deregister()
        for descriptor in (self.reader, self.writer):
            os.close(descriptor)
        self.reader = self.writer = -1
        return True


class Part:
    """A stretch of a segment that grows by itself: a piece of a result, or of an object that is there."""

    def __init__(self, segment: Segment, start: int, end: int) -> None:
        self.segment = segment
        self.base, self.nbytes = start, end - start
        self.view = segment.view[start:end]
        self.progress = self.nbytes if segment.progress == segment.nbytes else 0
        self.producing = False
        self.via: int | None = None
        self._changed = threading.Condition()  # its own: who waits for one piece is not woken for every other

    @property
    def aborted(self) -> bool:
        return self.segment.aborted

    @property
    def full(self) -> bool:
        return self.progress == self.nbytes

    def advance(self, progress: int) -> None:
        with self._changed:
            self.progress = progress
            self._changed.notify_all()

    def wake(self) -> None:
        """Its segment was aborted."""
        with self._changed:
            self._changed.notify_all()

    def abort(self) -> None:
        """A segment of which a piece will not come is of no use."""
        self.segment.abort()

    def wait_for(self, nbytes: int, timeout: float | None = None) -> int:
        """As of a segment."""
        with self._changed:
            self._changed.wait_for(lambda: self.progress > nbytes or self.aborted, timeout)
            return -1 if self.aborted else self.progress

    def wait_fixed(self, timeout: float) -> bool:
        """As of its segment."""
        return self.segment.wait_fixed(timeout)

    def region(self, domain: ProtectionDomain) -> MemoryRegion:
        """Of its segment: this part begins at `base` there."""
        return self.segment.region(domain)


class Store:
    """The segments of a host and what they may take. All methods run in the control thread."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.evicted = 0
        self.objects: dict[str, Segment] = {}
        self.held: set[Segment] = set()  #: all that takes memory: sums and what is deleted, too

    def reserve(self, nbytes: int) -> bool:
        """Counts bytes as taken where there is room."""
        if self.used + nbytes > self.capacity:
            return False
        self.used += nbytes
        return True

    def made(self, segment: Segment | None, nbytes: int) -> None:
        """What was reserved is this segment now; None: nothing came of it."""
        if segment is None:
            self.used -= nbytes
        else:
            self.held.add(segment)

    def spare(self) -> Iterator[Segment]:
        """What might be evicted, least recently used first."""
        found = [segment for segment in self.objects.values() if segment.complete and not segment.pins]
        return iter(sorted(found, key=lambda segment: segment.used))

    def make_room(
        self, nbytes: int, evict: Callable[[Segment, Callable[[], None]], None],
        then: Callable[[ObjectStoreFull | None], None],
    ) -> None:  # fmt: skip
        """Reserves bytes, evicting spare copies where it must; `then` gets None, or why it cannot be.

        Parameters
        ----------
        nbytes : int
        evict : callable
            Asks the directory whether a segment is spare, calls `Store.evict` if so, and then the callback that it gets.
        then : callable
        """
        if nbytes > self.capacity:
            then(ObjectStoreFull(f"an object of {nbytes} bytes is larger than the store: {self.capacity} bytes"))
            return
        candidates = self.spare()

        def attempt() -> None:
            if self.reserve(nbytes):
                then(None)
                return
            segment = next((segment for segment in candidates if self.objects.get(segment.name) is segment), None)
            if segment is None:
                then(ObjectStoreFull(f"no room for {nbytes} bytes: {self.holders()}"))
            elif segment.pins:
                attempt()
            else:
                evict(segment, attempt)

        attempt()

    def evict(self, segment: Segment) -> bool:
        """Lets go of a spare copy; False when it came into use meanwhile."""
        if self.objects.get(segment.name) is not segment or not self._close(segment):
            return False
        del self.objects[segment.name]
        self.evicted += 1
        return True

    def discard(self, segment: Segment) -> None:
        """Lets go of a segment: now, or when its last pin goes."""
        if self.objects.get(segment.name) is segment:
            del self.objects[segment.name]
        segment.abort()
        segment.doomed = True
        self._close(segment)

    def unpin(self, segment: Segment) -> None:
        segment.unpin()
        if segment.doomed:
            self._close(segment)

    def _close(self, segment: Segment) -> bool:
        if not segment.close():
            return False
        self.held.discard(segment)
        self.used -= segment.nbytes
        return True

    def holders(self) -> str:
        """Who holds what, largest first."""
        found = sorted(self.held, key=lambda segment: -segment.nbytes)[:8]
        shown = [f"{segment.name} {segment.nbytes} bytes, {self._why(segment)}" for segment in found]
        return f"{self.used} of {self.capacity} bytes are taken" + "".join(f"; {text}" for text in shown)

    def _why(self, segment: Segment) -> str:
        if segment.doomed:
            return f"deleted, in use {segment.pins} times"
        if not segment.complete:
            return "being made"
        return f"in use {segment.pins} times" if segment.pins else "the only copy"

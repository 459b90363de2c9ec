"""A position of a reduction at its node: adds the node's objects and its children's sums, block by block, while they arrive.

One buffer, `out`, and one stage per input, each a thread that follows the one before it:

    stage 0   this node's objects, in one pass       ########----
    stage 1   out += first child                     ######------
    stage 2   out += second child                    ####--------
    progress of out                                  ####--------   the parent streams that

A later child is one more stage. When the order is closed, that is when no child can be added, what the last stage has passed is
final, so the sum flows on while it is still being made. A position that has one object and no child is that object:
nothing is copied.

A stage whose stream ends early opens it again from the byte that it has, until the sum is aborted: whether the child is dead
is for the view to say, and then another order comes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from hrdma.errors import HrdmaError
from hrdma.objects import kernels
from hrdma.objects.asker import Body
from hrdma.objects.carriers import BLOCK, Stream, Target
from hrdma.objects.memory import Memory
from hrdma.objects.pieces import bounds
from hrdma.objects.plan import Child, Order
from hrdma.objects.shape import ROOT
from hrdma.objects.store import Part, Segment
from hrdma.objects.streams import block_of

__all__ = ["Sum", "order_of"]

AGAIN = 0.02  # seconds before a stream is opened again


class Host(Protocol):
    """What a sum needs of its node; all of it from any thread."""

    @property
    def bandwidth(self) -> float: ...
    def sum_stream(self, child: Child, request: Body, target: Target) -> Stream: ...
    def local_sum(self, name: str, piece: int, child: Child) -> Segment | Part | None: ...
    def absorbed(self, nbytes: int, seconds: float) -> None: ...


def order_of(fields: Any) -> Order:
    """An order as JSON carries it."""
    position, node, attempt, refs, children, closed = fields
    return Order(position, node, attempt, tuple(refs), tuple(Child(*child) for child in children), closed)


class Sum:
    """One attempt at one position. `tell` is called in its threads: ("absorbed", child), ("summed", None), ("failed", text)."""

    def __init__(self, host: Host, body: Body, order: Order, node: int, tell: Callable[[str, Any], None]) -> None:
        self._host, self._tell, self._node = host, tell, node
        self.name: str = body["id"]
        self.making: str = body["making"]
        self.piece: int = body["piece"]
        self.order = order
        #: whether this sum is just one object
        self.plain = order.position != ROOT and order.closed and len(order.refs) == 1 and not order.children
        self._op, self._count, self._meta = body["op"], body["count"], body["meta"]
        self.start_at, self.end_at = bounds(self._meta["nbytes"], body["pieces"])[self.piece]
        self.inputs: list[Segment] = []
        self.out: Segment | Part | None = None
        self.reports: list[tuple[str, Any]] = []
        self.aborted = False
        self._changed = threading.Condition()
        self._passed: list[int] = []
        self._told: set[Child] = set()
        self._streams: set[Stream] = set()
        self._closed = False
        self._publishing = threading.Lock()
        self._published = 0
        self._summed = False

    @property
    def scratch(self) -> Segment | None:
        """Memory that is this sum's own."""
        return self.out if isinstance(self.out, Segment) and not self.plain else None

    def start(self, out: Segment | Part | None = None) -> None:
        """Begins to add into `out`; a plain sum is its object, or the stretch of it that makes the piece."""
        if self.plain:
            self.out = Part(self.inputs[0], self.start_at, self.end_at)
            return
        self.out = out
        if self.inputs:
            self._stage(self._add_inputs, ())
        self.extend(self.order)

    def extend(self, order: Order) -> None:
        """The order has more children, or is closed."""
        self.order = order
        if self.out is None or self.plain:
            return
        for child in order.children:
            if child not in self._told:
                self._told.add(child)
                self._stage(self._add_child, (child,))
        if order.closed and not self._closed:
            self._closed = True
            self._run(self._publish)

    def abort(self) -> None:
        """Ends it; its threads end soon."""
        with self._changed:
            self.aborted = True
            self._changed.notify_all()
        for stream in list(self._streams):
            stream.cancel()
        if self.out is not None and not self.plain:
            self.out.abort()

    def cut_off(self, nodes: set[int]) -> None:
        """These nodes are gone: nothing more comes from them, though a frozen one would not say so."""
        if any(child.node in nodes for child in self.order.children):
            for stream in list(self._streams):
                stream.cancel()

    # the threads

    def _run(self, work: Callable[..., None], *arguments: Any) -> None:
        def guarded() -> None:
            try:
                work(*arguments)
            except (ValueError, TypeError, MemoryError) as error:
                if not self.aborted:
                    self._tell("failed", f"{type(error).__name__}: {error}")

        threading.Thread(target=guarded, name="hrdma-sum", daemon=True).start()

    def _stage(self, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._passed.append(0)
        self._run(work, len(self._passed) - 1, *arguments)

    def _pass(self, stage: int, progress: int) -> None:
        with self._changed:
            self._passed[stage] = progress
            self._changed.notify_all()
        if self._closed and stage == len(self._passed) - 1:
            self._publish()

    def _wait(self, stage: int, nbytes: int) -> int:
        """Waits until a stage has passed more than `nbytes`; -1 when the sum was aborted."""
        with self._changed:
            self._changed.wait_for(lambda: self._passed[stage] > nbytes or self.aborted)
            return -1 if self.aborted else self._passed[stage]

    def _add_inputs(self, stage: int) -> None:
        assert self.out is not None
        out, views = self.out.view, [segment.view[self.start_at : self.end_at] for segment in self.inputs]
        for start in range(0, self.out.nbytes, BLOCK):
            if self.aborted:
                return
            end = min(start + BLOCK, self.out.nbytes)
            kernels.fold(self._op, self._meta["dtype"], out[start:end], [view[start:end] for view in views])
            self._pass(stage, end)

    def _add_child(self, stage: int, child: Child) -> None:
        assert self.out is not None
        out, nbytes, done = self.out.view, self.out.nbytes, 0
        source = _Source(self, child)
        most = min(block_of(self._host.bandwidth), nbytes)
        staging = Memory(memoryview(bytearray(most)))
        try:
            while done < nbytes:
                block = source.next(done, min(most, nbytes - done), staging)
                if block is None:
                    return
                end = done + len(block)
                if stage == 0:
                    out[done:end] = block
                elif self._reach(stage - 1, end):
                    kernels.fold(self._op, self._meta["dtype"], out[done:end], [out[done:end], block])
                else:
                    return
                done = end
                self._pass(stage, done)
        finally:
            source.close()
        if source.opened is not None:
            self._host.absorbed(nbytes, time.monotonic() - source.opened)
        self._tell("absorbed", child)

    def _reach(self, stage: int, nbytes: int) -> bool:
        return self._wait(stage, nbytes - 1) >= nbytes

    def _publish(self) -> None:
        """What all stages have passed is final: by the thread of the last stage, and once when no child can be added."""
        assert self.out is not None
        with self._publishing:
            done, there = self._published, self._passed[-1]
            if self.aborted or self._summed or there == done < self.out.nbytes:
                return
            if self._op == "avg" and self.order.position == ROOT:
                kernels.scale(self._meta["dtype"], self.out.view[done:there], self._count)
            self._published = there
            self.out.advance(there)
            if there == self.out.nbytes:
                self._summed = True
                if self.order.position == ROOT:
                    self._tell("summed", None)

    def open(self, child: Child, offset: int, target: Target) -> Stream | None:
        """A stream of a child's sum; None when this sum was aborted first."""
        request = {"id": self.name, "gen": self.making, "piece": self.piece}
        request |= {"position": child.position, "attempt": child.attempt}
        while not self.aborted:
            try:
                stream = self._host.sum_stream(child, {**request, "offset": offset}, target)
            except (OSError, HrdmaError):
                with self._changed:
                    self._changed.wait_for(lambda: self.aborted, AGAIN)
                continue
            self._streams.add(stream)
            if not self.aborted:
                return stream
            self.shut(stream)
        return None

    def shut(self, stream: Stream) -> None:
        self._streams.discard(stream)
        stream.close()

    def local(self, child: Child) -> Segment | Part | None:
        """The sum of a child on this node, or None when it is aborted first."""
        while not self.aborted and child.node == self._node:
            segment = self._host.local_sum(self.name, self.piece, child)
            if segment is not None:
                return segment
            with self._changed:
                self._changed.wait_for(lambda: self.aborted, AGAIN)
        return None


class _Source:
    """The bytes of a child's sum, a block at a time, from this node's memory or over a stream."""

    def __init__(self, owner: Sum, child: Child) -> None:
        self._owner, self._child = owner, child
        self._stream: Stream | None = None
        self._segment = owner.local(child)
        self.opened: float | None = None  #: when its first stream was

    def next(self, offset: int, want: int, staging: Memory) -> memoryview | None:
        """The bytes from an offset on, all that are wanted; None when the sum was aborted."""
        if self._segment is not None:
            while not self._owner.aborted:
                there = self._segment.wait_for(offset + want - 1, 1.0)
                if there < 0:
                    return None
                if there >= offset + want:
                    return self._segment.view[offset : offset + want]
            return None
        have = 0
        while have < want:
            if self._stream is None:
                self._stream = self._owner.open(self._child, offset + have, staging)
                if self._stream is None:
                    return None
                self.opened = self.opened or time.monotonic()
            got = self._stream.read(have, want)
            have += got
            if not got:
                self.close()
        return staging.view[:want]

    def close(self) -> None:
        if self._stream is not None:
            self._owner.shut(self._stream)
            self._stream = None

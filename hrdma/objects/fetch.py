"""Bringing one object to this node, for whoever here waits for it.

Ask the directory who sends; stream from there into a segment, which feeds others meanwhile; tell the directory when all is
there. When the stream ends early, ask again, naming the sender that failed, and go on from the byte that is there, unless the
object was made anew (another `gen`): then from the beginning, in a new segment. One fetch per object and node, however many
clients wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from hrdma.errors import HrdmaError, ObjectStoreFull
from hrdma.objects.asker import Asker, Body
from hrdma.objects.carriers import Stream
from hrdma.objects.memory import Memory
from hrdma.objects.store import Segment

__all__ = ["Fetch"]

AGAIN = 0.02  # seconds before the directory is asked again


class Host(Protocol):
    """What a fetch needs of its node. `stream` may be called from any thread, and so may `post`."""

    asker: Asker

    def post(self, call: Callable[[], None]) -> object: ...
    def later(self, name: str, seconds: float, call: Callable[[], None]) -> None: ...
    def make_segment(
        self, name: str, meta: Body, gen: str, then: Callable[[Segment | None, ObjectStoreFull | None], None]
    ) -> None: ...
    def stream(self, node: int, request: Body, target: Memory) -> Stream: ...
    def measured(self, nbytes: int, seconds: float) -> None: ...
    def fetched(self, name: str, answer: Body) -> None: ...
    def discard(self, segment: Segment) -> None: ...


class Fetch:
    """One object on its way here. Methods run in the control thread."""

    def __init__(self, host: Host, name: str) -> None:
        self.name = name
        self.sender: int | None = None
        self.segment: Segment | None = None
        self._host = host
        self._failed: list[int] = []
        self._lock = threading.Lock()  # of the two below, which the thread of a stream shares
        self._pulling: object | None = None
        self._stream: Stream | None = None
        self._over = False
        self._question: int | None = None
        self._ask()

    def _ask(self) -> None:
        if not self._over:
            self._question = self._host.asker.ask("locate", self.name, self._located, failed=self._failed[-4:])

    def stop(self) -> None:
        """Nobody wants it any more, or it came another way. What is there of it is not touched."""
        if self._over:
            return
        self._over = True
        if self._question is not None:
            self._host.asker.forget(self._question)
        if self._stream is not None:
            self._stream.cancel()
        if self.segment is None:
            self._host.asker.tell("leave", self.name)  # an answer may be on its way that makes us a copy

    def cut_off(self, nodes: set[int]) -> None:
        """These nodes are gone: nothing more comes from them."""
        if self.sender in nodes:
            self.sender = None
            if self.segment is not None:
                self.segment.via = None
            with self._lock:
                opening = self._stream is None and self._pulling is not None
                if opening:
                    self._pulling = None  # its thread may be stuck in the handshake: it is left to itself
                elif self._stream is not None:
                    self._stream.cancel()
            if opening:
                self._again()

    def _located(self, answer: Body) -> None:
        self._question = None
        if "sender" not in answer:
            self._end(answer)
            return
        sender, gen = answer["sender"], answer["gen"]
        if self.segment is not None and self.segment.gen == gen:
            self._pull(sender)
            return
        if self.segment is not None:
            self._host.discard(self.segment)
            self.segment = None

        def made(segment: Segment | None, why: ObjectStoreFull | None) -> None:
            if self._over:
                if segment is not None:
                    self._host.discard(segment)
            elif segment is None:
                self._host.asker.tell("leave", self.name)
                self._end({"error": ["full", str(why)]})
            else:
                self.segment = segment
                self._pull(sender)

        self._host.make_segment(self.name, answer["meta"], gen, made)

    def _pull(self, sender: int) -> None:
        assert self.segment is not None
        self.sender = self.segment.via = sender
        self._pulling = pull = object()
        threading.Thread(target=self._run, args=(self.segment, sender, pull), name="hrdma-fetch", daemon=True).start()

    def _run(self, segment: Segment, sender: int, pull: object) -> None:
        """The thread of one stream."""
        first = segment.progress
        try:
            request = {"id": self.name, "gen": segment.gen, "offset": first}
            stream = self._host.stream(sender, request, segment)
            opened = time.monotonic()
        except (OSError, HrdmaError):
            self._host.post(lambda: self._ended(pull, sender))
            return
        with self._lock:
            if self._pulling is pull:
                self._stream = stream
        if self._stream is not stream:
            stream.close()
            return
        while segment.progress < segment.nbytes and not self._over and not segment.aborted:
            got = stream.read(segment.progress, segment.nbytes)
            if not got:
                break
            segment.advance(segment.progress + got)
        stream.close()
        moved, seconds = segment.progress - first, time.monotonic() - opened
        self._host.post(lambda: self._ended(pull, sender, moved, seconds))

    def _ended(self, pull: object, sender: int, moved: int = 0, seconds: float = 0.0) -> None:
        if self._pulling is not pull:
            return
        with self._lock:
            self._pulling = self._stream = None
        segment = self.segment
        if self._over or segment is None:
            return
        if segment.progress == segment.nbytes:
            self._host.measured(moved, seconds)
            self._question = self._host.asker.ask("have", self.name, self._counted, gen=segment.gen)
            return
        self._failed.append(sender)
        self._again()

    def _again(self) -> None:
        if self.segment is not None:
            self.segment.via = None
        self._host.later(f"fetch {self.name}", AGAIN, self._ask)

    def _counted(self, answer: Body) -> None:
        self._question = None
        if "ok" in answer:
            assert self.segment is not None
            self.segment.complete = True
            self.segment.via = None
            self._end({"meta": self.segment.meta})
        else:
            if self.segment is not None:
                self._host.discard(self.segment)
            self.segment = None
            self._ask()

    def _end(self, answer: Body) -> None:
        self._over = True
        if self.segment is not None and not self.segment.complete:
            self._host.discard(self.segment)
        self._host.fetched(self.name, answer)

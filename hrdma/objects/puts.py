"""Objects that clients of this host put: memory to write, sealed and made known when all of it is there.

A put begins, its client writes the segment, and commits it; or it is undone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hrdma.errors import ObjectStoreFull
from hrdma.objects.asker import Asker, Body
from hrdma.objects.store import Segment, Store

__all__ = ["Puts"]


class Host(Protocol):
    """What a put needs of its node."""

    asker: Asker
    store: Store

    def make_segment(
        self, name: str, meta: Body, gen: str, then: Callable[[Segment | None, ObjectStoreFull | None], None],
        *, by_client: bool = False, listed: bool = True,
    ) -> None: ...  # fmt: skip
    def listed(self) -> None: ...
    def fetched(self, name: str, answer: Body) -> None: ...


class Puts:
    """Of one node. Everything runs in its control thread."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def begin(
        self, name: str, meta: Body, gen: str, inline: bytes | None, own: bool, then: Callable[[Body, Segment | None], None]
    ) -> None:  # fmt: skip
        """Begins one. `then` gets the answer and, for a large object, the segment to write."""
        asker, store = self._host.asker, self._host.store
        what = {"meta": meta, "gen": gen, "own": own}
        if inline is not None:
            asker.ask("put", name, lambda answer: then(answer, None), **what, inline=inline)
            return

        def made(segment: Segment | None, why: ObjectStoreFull | None) -> None:
            if segment is None:
                then({"error": ["full", str(why)]}, None)
            else:
                asker.ask("put", name, lambda answer: granted(answer, segment), **what)

        def granted(answer: Body, segment: Segment) -> None:
            if "ok" not in answer:
                store.discard(segment)
                then(answer, None)
                return
            old = store.objects.get(name)
            if old is not None:
                store.discard(old)
            segment.producing = True
            store.objects[name] = segment
            self._host.listed()
            then(answer, segment)

        self._host.make_segment(name, meta, gen, made, by_client=True, listed=False)

    def commit(self, segment: Segment, then: Callable[[Body], None]) -> None:
        """All of it is written: it counts once the directory says so."""
        deleted = {"error": ["lost", f"object {segment.name} was deleted while it was put"]}
        if segment.doomed:
            then(deleted)
            return
        try:
            segment.seal()
        except OSError:
            self.undo(segment)
            then({"error": ["value", "the object is still mapped writable by the process that puts it"]})
            return
        segment.advance(segment.nbytes)

        def counted(answer: Body) -> None:
            if "ok" not in answer:
                self._host.store.discard(segment)
                then(deleted)
                return
            segment.complete, segment.producing = True, False
            then({"ok": True})
            self._host.fetched(segment.name, {"meta": segment.meta})

        self._host.asker.ask("have", segment.name, counted, gen=segment.gen)

    def undo(self, segment: Segment) -> None:
        """Whoever put it is gone, or was interrupted, before it was all there."""
        self._host.asker.tell("unput", segment.name, gen=segment.gen)
        self._host.store.discard(segment)

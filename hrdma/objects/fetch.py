"""One object on its way to this node: asks who has it, makes room, takes it in, goes on elsewhere when a sender fails.

Most objects come whole, from one node at a time. The result of an allreduce that is made in pieces comes as they do: a piece
each from wherever it is, those that are added here from this node's own sums.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from hrdma.errors import HrdmaError, ObjectStoreFull
from hrdma.objects.asker import Asker, Body
from hrdma.objects.carriers import Stream, Target
from hrdma.objects.pieces import bounds
from hrdma.objects.store import Part, Segment

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
    def stream(self, node: int, request: Body, target: Target) -> Stream: ...
    def measured(self, nbytes: int, seconds: float, trust: float = 1.0) -> None: ...
    def wanted(self, name: str) -> bool: ...
    def fetched(self, name: str, answer: Body) -> None: ...
    def discard(self, segment: Segment) -> None: ...


class Fetch:
    """One object on its way here. Methods run in the control thread."""

    def __init__(self, host: Host, name: str) -> None:
        self.name = name
        self.segment: Segment | None = None
        self.host = host
        self.over = False
        self._pulls: list[_Pull] = []
        self._takers: list[Callable[[Segment], None]] = []
        self._making = ""  # for which making a segment is being made
        self._question: int | None = None
        self._ask()

    def _ask(self) -> None:
        self._question = self.host.asker.ask("locate", self.name, self.located)

    def stop(self) -> None:
        """Nobody wants it any more, or it came another way. What is there of it is not touched."""
        if self.over:
            return
        self.over = True
        self._withdraw()
        if self.segment is None:
            self.host.asker.tell("leave", self.name)  # an answer may be on its way that makes us a copy

    def give_up(self) -> None:
        """Nobody wants it any more: what has begun to come comes to its end, but what nobody brings takes no room."""
        if self.segment is None or (self._pulls and not any(pull.coming for pull in self._pulls)):
            self._withdraw()
            self.host.asker.tell("leave", self.name)
            self._end({})

    def _withdraw(self) -> None:
        if self._question is not None:
            self.host.asker.forget(self._question)
            self._question = None
        for pull in self._pulls:
            pull.stop()
        self._pulls.clear()

    def cut_off(self, nodes: set[int]) -> None:
        """These nodes are gone: nothing more comes from them."""
        for pull in self._pulls:
            pull.cut_off(nodes)

    def anew(self, gen: str) -> None:
        """What is here of this making counts no more."""
        if gen == (self._making if self.segment is None else self.segment.gen):
            self._discard()
            self._takers.clear()
            self._ask()

    def take(self, meta: Body, gen: str, pieces: int, then: Callable[[Segment], None]) -> None:
        """A piece of it will be added here: `then` gets the segment for that, which all pieces share."""
        if self.segment is not None and self.segment.gen != gen:
            self._discard()
        self._takers.append(then)
        self.located({"meta": meta, "gen": gen, "pieces": pieces})

    def located(self, answer: Body) -> None:
        """The answer of the directory, also to one of the pulls that finds that this is another making by now."""
        if self._question is not None:
            self.host.asker.forget(self._question)
            self._question = None
        if "gen" not in answer:
            self._end(answer)
            return
        gen = answer["gen"]
        if self.segment is not None and self.segment.gen == gen:
            self._taken()
            return
        if self.segment is not None:
            self._discard()
        elif self._making == gen:
            return
        self._making = gen

        def made(segment: Segment | None, why: ObjectStoreFull | None) -> None:
            if self.over or self._making != gen:
                if segment is not None:
                    self.host.discard(segment)
                return
            self._making = ""
            if segment is None:
                self.host.asker.tell("leave", self.name)
                self._end({"error": ["full", str(why)]})
                return
            self.segment = segment
            if "pieces" in answer:
                limits = bounds(segment.nbytes, answer["pieces"])
                segment.parts = [Part(segment, start, end) for start, end in limits]
                self._taken()
                pieces = enumerate(segment.parts)
                self._pulls = [_Pull(self, part, [i, len(limits)]) for i, part in pieces if not part.producing]
                for pull in self._pulls:
                    pull.ask()
            else:
                self._pulls = [_Pull(self, segment, None)]
                self._pulls[0].begin(answer["sender"])

        self.host.make_segment(self.name, answer["meta"], gen, made)

    def _taken(self) -> None:
        takers, self._takers = self._takers, []
        for then in takers:
            assert self.segment is not None
            then(self.segment)
        self._pulls = [pull for pull in self._pulls if not pull.released()]

    def _discard(self) -> None:
        self._withdraw()
        self._making = ""
        if self.segment is not None:
            self.host.discard(self.segment)
            self.segment = None

    def check(self) -> None:
        """Some of it has come: is that all?"""
        segment = self.segment
        if self.over or segment is None or self._question is not None:
            return
        if segment.parts:
            if not all(part.full for part in segment.parts):
                return
            segment.advance(segment.nbytes)
        if segment.progress == segment.nbytes:
            self._question = self.host.asker.ask("have", self.name, self._counted, gen=segment.gen)

    def _counted(self, answer: Body) -> None:
        self._question = None
        if "ok" in answer:
            assert self.segment is not None
            self.segment.complete = True
            self.segment.via = None
            self._end({"meta": self.segment.meta})
        else:
            self._discard()
            self._ask()

    def _end(self, answer: Body) -> None:
        self.over = True
        self._withdraw()
        if self.segment is not None and not self.segment.complete:
            self.host.discard(self.segment)
        self.host.fetched(self.name, answer)


class _Pull:
    """One stretch that grows by what streams bring, one after another."""

    def __init__(self, fetch: Fetch, target: Segment | Part, piece: list[int] | None) -> None:
        assert fetch.segment is not None
        self._fetch, self._host, self._target, self._gen = fetch, fetch.host, target, fetch.segment.gen
        self._piece = {} if piece is None else {"piece": piece}
        self._sender: int | None = None
        self._over = False
        self._failed: list[int] = []
        self._lock = threading.Lock()  # of the two below, which the thread of a stream shares
        self._pulling: object | None = None
        self._stream: Stream | None = None
        self._question: int | None = None

    @property
    def coming(self) -> bool:
        """Whether all of it is here, or somebody brings it."""
        return self._pulling is not None or self._target.progress == self._target.nbytes

    def ask(self) -> None:
        if not self._over and not self._host.wanted(self._fetch.name):
            self._fetch.give_up()
        if not self._over:
            self._question = self._host.asker.ask(
                "locate", self._fetch.name, self._located, failed=self._failed[-4:], gen=self._gen, **self._piece
            )

    def stop(self) -> None:
        self._over = True
        if self._question is not None:
            self._host.asker.forget(self._question)
        with self._lock:
            if self._stream is not None:
                self._stream.cancel()

    def released(self) -> bool:
        """Whether this node adds that piece itself; then nothing is to come."""
        mine = self._target.producing and isinstance(self._target, Part)
        if mine:
            self.stop()
        return mine

    def cut_off(self, nodes: set[int]) -> None:
        if self._sender in nodes:
            self._sender = self._target.via = None
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
        if answer.get("gen") == self._gen and "sender" in answer:
            self.begin(answer["sender"])
        else:
            self._fetch.located(answer)

    def begin(self, sender: int) -> None:
        self._sender = self._target.via = sender
        self._pulling = pull = object()
        threading.Thread(target=self._run, args=(sender, pull), name="hrdma-fetch", daemon=True).start()

    def _run(self, sender: int, pull: object) -> None:
        """The thread of one stream."""
        target = self._target
        first = target.progress
        try:
            request = {"id": self._fetch.name, "gen": self._gen, "offset": first, **self._piece}
            stream = self._host.stream(sender, request, target)
            opened = time.monotonic()
        except (OSError, HrdmaError):
            self._host.post(lambda: self._ended(pull, sender))
            return
        with self._lock:
            if self._pulling is pull and not self._over:
                self._stream = stream
        if self._stream is not stream:
            stream.close()
            return
        while target.progress < target.nbytes and not self._over and not target.aborted:
            got = stream.read(target.progress, target.nbytes)
            if not got:
                break
            target.advance(target.progress + got)
        stream.close()
        moved, seconds = target.progress - first, time.monotonic() - opened
        self._host.post(lambda: self._ended(pull, sender, moved, seconds))

    def _ended(self, pull: object, sender: int, moved: int = 0, seconds: float = 0.0) -> None:
        if self._pulling is not pull:
            return
        with self._lock:
            self._pulling = self._stream = None
        if self._over:
            return
        if self._target.progress == self._target.nbytes:
            self._host.measured(moved, seconds, trust=0.0 if self._piece else 1.0)  # pieces share the link
            if self._piece:
                self._target.via = None
                self._host.asker.tell("have_piece", self._fetch.name, gen=self._gen, **self._piece)
            self._fetch.check()
            return
        self._failed.append(sender)
        self._again()

    def _again(self) -> None:
        self._target.via = None
        self._host.later(f"fetch {self._fetch.name} {self._piece}", AGAIN, self.ask)

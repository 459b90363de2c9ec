"""A node: one host's store, its shard of the directory, its part of every transfer and sum.

The control thread does everything but moving and adding bytes; what it does never blocks. This file joins the parts:

    sessions (clients of this host)      cluster (other nodes)
                \\                          /
                 node: puts, fetches, sums
                /          |              \\
            store       asker          directory -> reductions
                    feeder (streams to others) -> lines (clients of others)
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from hrdma.config import Config
from hrdma.control.link import is_loopback
from hrdma.control.loop import Loop
from hrdma.control.wire import job_key
from hrdma.errors import HrdmaError, ObjectStoreFull
from hrdma.objects.asker import Asker, Body, keepers
from hrdma.objects.carriers import Carriers, Source, Stream, Target
from hrdma.objects.cluster import Cluster
from hrdma.objects.directory import Directory, Entry
from hrdma.objects.fetch import Fetch
from hrdma.objects.lines import Lines
from hrdma.objects.pieces import bounds
from hrdma.objects.positions import Positions
from hrdma.objects.puts import Puts
from hrdma.objects.reduction import Reduction
from hrdma.objects.shelf import Shelf
from hrdma.objects.store import Part, Segment, Store
from hrdma.objects.streams import Feeder, block_of, open_stream

__all__ = ["Node"]

PATIENCE = 1.0  # seconds that a stream waits for what is about to be made here
PINGS = (0.5, 2.0, 5.0)  # seconds after a change of view, and from one to the next, at which latency is measured again
TELLING, LONG = 1 << 17, 1 << 20  # bytes of a stream that says something about its link; that says much

Then = Callable[[Body], None]


class Node:
    """Runs in threads of its own until `close`. Make it, then `start` it.

    Parameters
    ----------
    config : Config
    address : tuple of (str, int)
        Where it listens for other nodes; port 0 is any.
    seeds : list of (str, int)
        Nodes of the cluster to join; empty: it founds one.
    capacity : int
        Bytes of the store.
    """

    def __init__(self, config: Config, address: tuple[str, int], seeds: list[tuple[str, int]], capacity: int) -> None:
        self.key = job_key(config.token)
        self.carriers = Carriers(config)
        self._address, self._seeds = address, seeds
        open_to_all = bool(config.token) or config.insecure
        self.loop = Loop(1, self.key, config.heartbeat, open_to_all=open_to_all, crashed=self.failed)
        host = address[0] if is_loopback(address[0]) else "::" if ":" in address[0] else "0.0.0.0"
        self.lines = Lines(self)
        self.feeder = Feeder(self.key, self._find, self.carriers, self._adopt, host=host, open_to_all=open_to_all)
        self.cluster = Cluster(self.loop, self, self.feeder.port)
        self.store = Store(capacity)
        self.shelf = Shelf(self)
        self.asker = Asker(self.send)
        self.directory = Directory(self, self.cluster.me)
        self.latency, self.bandwidth = 1e-4, 1e9  #: guesses, until the first measurement
        self._latency_known, self._bandwidth_known = False, False
        self.received = 0
        self._fetches: dict[str, Fetch] = {}
        self._positions = Positions(self)
        self.puts = Puts(self)
        self._ready: dict[str, list[Then]] = {}
        self._makers = ThreadPoolExecutor(2, "hrdma-memory")
        self._listed = threading.Condition()
        self._up = threading.Event()
        self._error: Exception | None = None
        self._known: set[int] = set()
        self.purged: Callable[[str, str], None] = lambda name, gen: None  #: called when an object is deleted
        self.changed: Callable[[], None] = lambda: None  #: called when the nodes have changed
        self.broken: Callable[[], None] = lambda: None  #: called when it cannot go on

    # any thread

    def start(self, timeout: float) -> None:
        """Starts it and waits until it belongs to a cluster.

        Raises
        ------
        TimeoutError, PeerError, OSError
            It does not.
        """

        def first() -> None:
            try:
                self.cluster.start(self._address, self._seeds, timeout)
            except Exception as error:
                self.failed(error)

        self.loop.start(first)
        if not self._up.wait(timeout) or self._error is not None:
            self.close()
            raise self._error or TimeoutError(f"the node did not come up within {timeout:g} s")

    def close(self) -> None:
        """Stops; the other nodes see it leave."""
        self.loop.post(self._stop)
        self.loop.join(5.0)
        self.feeder.close()
        self._makers.shutdown(wait=False)
        for segment in self.store.objects.values():
            segment.close()  # unless a stream is in the middle of it: that one ends now
        self.carriers.close()
        self.shelf.close()

    def post(self, call: Callable[[], None]) -> bool:
        return self.loop.post(call)

    def _find(self, request: Body) -> tuple[Source, Callable[[], None]] | None:
        """Of the feeder, in its thread: the source of a stream, which may be about to be made."""
        with self._listed:
            self._listed.wait_for(lambda: self._source(request) is not None or not self._coming(request), PATIENCE)
        source = self._source(request)
        segment = source.segment if isinstance(source, Part) else source
        if source is None or segment is None or not segment.pin():
            return None
        return source, lambda: self._unpin_later(segment)

    def _adopt(self, sock: socket.socket, release: Callable[[], None]) -> bool:
        return self.loop.post(lambda: self.lines.adopt(sock, release))

    def _unpin_later(self, segment: Segment) -> None:
        self.loop.post(lambda: self.store.unpin(segment))

    def _source(self, request: Body) -> Segment | Part | None:
        if "position" in request:
            return self._positions.find(request)
        segment = self.store.objects.get(request["id"])
        if segment is None or segment.gen != request["gen"]:
            return None
        if "piece" not in request:
            return segment
        piece, pieces = request["piece"]
        if segment.complete:
            return Part(segment, *bounds(segment.nbytes, pieces)[piece])
        return segment.parts[piece] if segment.parts else None

    def _coming(self, request: Body) -> bool:
        """Whether what was asked for may be here in a moment."""
        return "position" in request or request["id"] in self._fetches

    def listed(self) -> None:
        """There is a new segment: streams may wait for it."""
        with self._listed:
            self._listed.notify_all()

    def stream(self, node: int, request: Body, target: Target) -> Stream:
        card = self.cluster.nodes.get(node)
        if card is None:
            raise HrdmaError(f"node {node:x} is gone")
        place = (node, card["host"], card["data"])
        return open_stream(self.key, self.carriers, place, request, self.cluster.me, target, block_of(self.bandwidth))

    def absorbed(self, nbytes: int, seconds: float) -> None:
        """A stream of a sum has ended, which may have waited for the sum: it does not say that the link is slow."""
        self.post(lambda: self.measured(nbytes, seconds, trust=0.0))

    # the control thread: what the parts need

    def send(self, node: int, body: Body) -> None:
        if node < 0:
            self.lines.send(node, body)
        else:
            self.cluster.send(node, body)

    def at_hand(self, name: str) -> Body | None:
        """What there is to say of a small object whose entry is here: nobody need be asked."""
        entry = self.directory.entries.get(name)
        if entry is None or entry.inline is None or entry.held or not self._keeps(name):
            return None
        return {"meta": entry.meta, "inline": entry.inline}

    def known(self, entry: Entry) -> None:
        self.shelf.known(entry.id)

    def _keeps(self, name: str) -> bool:
        return self.directory.settled and keepers(name, self.nodes())[:1] == (self.me,)

    def peek(self, asker: int, body: Body) -> bool:
        if not self._keeps(body["id"]):
            return False
        self.directory.heard(asker, body)
        return True

    def unpeek(self, asker: int, name: str, number: int) -> None:
        self.directory.heard(asker, {"verb": "forget", "id": name, "question": number})

    def later(self, name: str, seconds: float, call: Callable[[], None]) -> None:
        self.loop.at(name, time.monotonic() + seconds, call)

    def nodes(self) -> tuple[int, ...]:
        return tuple(self.cluster.nodes)

    def reduction(self, entry: Entry) -> Reduction:
        return Reduction(entry, self)

    def failed(self, error: Exception) -> None:
        self._error = self._error or error
        self._up.set()
        self.broken()

    def _stop(self) -> None:
        for fetch in self._fetches.values():
            fetch.stop()
        self._positions.abort()
        self.lines.close()
        for segment in self.store.objects.values():
            segment.abort()
        self.cluster.leave()
        self.loop.stop(0.2)

    def measured(self, nbytes: int, seconds: float, trust: float = 1.0) -> None:
        """An open stream moved so much in so long: what the shape of reductions, and blocks, are chosen by."""
        self.received += nbytes
        if nbytes >= TELLING and seconds > 0:
            found = nbytes / seconds
            # A slow one may be a busy host's or a waiting sender's, a good one is the link's.
            better = found > self.bandwidth or not self._bandwidth_known
            self.bandwidth += (found - self.bandwidth) * (1.0 if better else 0.2 * trust * min(1.0, nbytes / LONG))
            self._bandwidth_known = True

    # views and messages

    def viewed(self, nodes: tuple[int, ...]) -> None:
        """The nodes changed: tells the keepers all that is here, asks again, and says that this was all."""
        gone, self._known = self._known.difference(nodes), set(nodes)
        for fetch in self._fetches.values():
            fetch.cut_off(gone)
        self._positions.cut_off(gone)
        self.feeder.cut_off(gone)
        self.shelf.viewed()
        self.carriers.forget(gone)
        self.directory.view(self.cluster.me, nodes, self.cluster.epoch)
        self.asker.view(nodes)
        self.lines.viewed()
        self.changed()
        if not nodes:
            return
        for segment in self.store.objects.values():
            self._tell_copy(segment)
        self._positions.tell()
        for node in nodes:
            self.send(node, {"verb": "synced"})
        self._latency_known = False
        self._ping(PINGS)
        self._up.set()

    def _tell_copy(self, segment: Segment) -> None:
        what = {"meta": segment.meta, "gen": segment.gen}
        if segment.complete or not segment.parts:
            has = {"complete": segment.complete, "producing": segment.producing, "via": segment.via}
            self.asker.tell("copy", segment.name, **what, **has)
            return
        for piece, part in enumerate(segment.parts):
            has = {"complete": part.full, "producing": part.producing, "via": part.via, "piece": piece}
            self.asker.tell("copy", segment.name, **what, **has)

    def _ping(self, later: tuple[float, ...]) -> None:
        """Measures latency: when the nodes have just changed all of them are busy, so it is done again."""
        for node in self.cluster.nodes:
            if node != self.cluster.me:
                self.send(node, {"verb": "ping", "time": time.monotonic()})
        if later:
            self.later("ping", later[0], lambda: self._ping(later[1:]))

    def heard_from(self, node: int, body: Body) -> None:
        verb = body["verb"]
        if verb == "answer":
            self.asker.answered(body["n"], body)
        elif verb == "synced":
            self.directory.synced(node)
        elif verb == "sum":
            self._positions.order(body)
        elif verb in ("purge", "counts", "unsum"):
            getattr(self, "_" + verb)(body)
        elif verb == "ping":
            self.send(node, {"verb": "pong", "time": body["time"]})
        elif verb == "pong":
            found = (time.monotonic() - body["time"]) / 2
            # The least of this view: what a ping takes beyond it, it has waited behind other work.
            self.latency = min(found, self.latency) if self._latency_known else found
            self._latency_known = True
        else:
            self.directory.heard(node, body)

    # memory

    def make_segment(
        self, name: str, meta: Body, gen: str, then: Callable[[Segment | None, ObjectStoreFull | None], None],
        *, by_client: bool = False, listed: bool = True,
    ) -> None:  # fmt: skip
        """Makes room and a segment, in another thread since the kernel clears the pages; `then` gets it or why not.

        Two of one name may be made in either order. What `then` discards, since nobody wants it any more, takes no other's place.
        """
        nbytes = meta["nbytes"]

        def make() -> None:
            try:
                segment = Segment(name, meta, gen, by_client=by_client)
            except OSError as error:
                why = ObjectStoreFull(f"the host has no {nbytes} bytes of memory left: {error.strerror}")
                self.loop.post(lambda: made(None, why))
            else:
                self.loop.post(lambda: made(segment, None))

        def made(segment: Segment | None, why: ObjectStoreFull | None) -> None:
            self.store.made(segment, nbytes)
            then(segment, why)
            if segment is not None and listed and not segment.doomed:
                old = self.store.objects.get(name)
                if old is not None:
                    self.store.discard(old)
                self.store.objects[name] = segment
            self.listed()

        def roomy(full: ObjectStoreFull | None) -> None:
            if full is not None:
                then(None, full)
            else:
                self._makers.submit(make)

        self.store.make_room(nbytes, self._evict, roomy)

    def _evict(self, segment: Segment, then: Callable[[], None]) -> None:
        def answered(body: Body) -> None:
            if "ok" in body and body["ok"] and not self.store.evict(segment):
                # It came into use while the directory struck it off: it is a copy again.
                self.asker.ask("have", segment.name, counted, gen=segment.gen)
            then()

        def counted(body: Body) -> None:
            if "ok" not in body:  # deleted meanwhile, of which nobody told who had no copy
                self.store.discard(segment)

        self.asker.ask("drop", segment.name, answered)

    def discard(self, segment: Segment) -> None:
        self.store.discard(segment)

    # objects: what sessions ask for

    def want(self, name: str, then: Then) -> None:
        """`then` gets the answer of the directory, or the description of an object that is complete here."""
        segment = self.store.objects.get(name)
        if segment is not None and segment.complete:
            segment.used = time.monotonic()
            then({"meta": segment.meta})
            return
        self._ready.setdefault(name, []).append(then)
        if name not in self._fetches and (segment is None or not segment.producing):
            self._fetches[name] = Fetch(self, name)

    def unwant(self, name: str, then: Then) -> None:
        """Whoever wanted it does so no more."""
        waiting = self._ready.get(name, [])
        if then in waiting:
            waiting.remove(then)
        if not waiting:
            self._ready.pop(name, None)
            if name in self._fetches:
                self._fetches[name].give_up()

    def wanted(self, name: str) -> bool:
        return name in self._ready

    def fetched(self, name: str, answer: Body) -> None:
        """An object is here, or will not be: tells whoever waits."""
        fetch = self._fetches.pop(name, None)
        if fetch is not None:
            fetch.stop()
        for then in self._ready.pop(name, []):
            then(answer)

    # messages of keepers

    def _purge(self, body: Body) -> None:
        self.purged(body["id"], body["gen"])
        segment = self.store.objects.get(body["id"])
        if segment is not None:
            self.store.discard(segment)

    def _counts(self, body: Body) -> None:
        segment = self.store.objects.get(body["id"])
        if segment is not None and segment.gen == body["gen"] and segment.progress == segment.nbytes:
            segment.complete, segment.producing = True, False
            self.fetched(segment.name, {"meta": segment.meta})

    def _unsum(self, body: Body) -> None:
        self._positions.unsum(body)
        fetch = self._fetches.get(body["id"])
        if body["anew"] and fetch is not None:
            fetch.anew(body["making"])

    # what its positions need

    @property
    def me(self) -> int:
        return self.cluster.me

    def grows_here(self, name: str) -> None:
        """Nobody need bring it; what was brought is of another making, and nobody would bring the rest."""
        fetch = self._fetches.pop(name, None)
        if fetch is not None:
            fetch.stop()
            if fetch.segment is not None:
                self.store.discard(fetch.segment)

    def grows_no_more(self, name: str) -> None:
        """A sum here ended: who still waits for the result must have it from elsewhere."""
        if name in self._ready and name not in self._fetches:
            self._fetches[name] = Fetch(self, name)

    def gather(self, name: str) -> None:
        """A result that comes in pieces is wanted here, as on all hosts that put something in."""
        segment = self.store.objects.get(name)
        if name not in self._fetches and (segment is None or not segment.complete):
            self.want(name, lambda _: None)

    def take(self, name: str, meta: Body, gen: str, pieces: int, then: Callable[[Segment], None]) -> None:
        """A piece of it is added here."""
        self.gather(name)
        if name in self._fetches:
            self._fetches[name].take(meta, gen, pieces, then)

    def piece_made(self, name: str) -> None:
        """One more is complete."""
        if name in self._fetches:
            self._fetches[name].check()

"""The positions of reductions that a node holds: carries out orders, answers for the sums, frees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from hrdma.errors import ObjectStoreFull
from hrdma.log import logger
from hrdma.objects.asker import Asker, Body
from hrdma.objects.plan import Child
from hrdma.objects.shape import ROOT
from hrdma.objects.store import Part, Segment, Store
from hrdma.objects.streams import Stream
from hrdma.objects.sums import Sum, order_of

__all__ = ["Positions"]

Key = tuple[str, int, int]  # result, piece, position


class Host(Protocol):
    """What they need of their node. `post`, `stream` and `absorbed` from any thread."""

    asker: Asker
    store: Store
    bandwidth: float

    @property
    def me(self) -> int: ...
    def post(self, call: Callable[[], None]) -> bool: ...
    def stream(self, node: int, request: Body) -> Stream: ...
    def absorbed(self, nbytes: int, seconds: float) -> None: ...
    def make_segment(
        self, name: str, meta: Body, gen: str, then: Callable[[Segment | None, ObjectStoreFull | None], None],
        *, listed: bool = True,
    ) -> None: ...  # fmt: skip
    def listed(self) -> None: ...
    def grows_here(self, name: str) -> None: ...
    def grows_no_more(self, name: str) -> None: ...
    def take(self, name: str, meta: Body, gen: str, pieces: int, then: Callable[[Segment], None]) -> None: ...
    def gather(self, name: str) -> None: ...
    def piece_made(self, name: str) -> None: ...


class Positions:
    """Methods run in the control thread, `find`, `sum_stream` and `local_sum` in any."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._sums: dict[Key, Sum] = {}

    def __iter__(self) -> Iterator[Sum]:
        return iter(list(self._sums.values()))

    # any thread

    @property
    def bandwidth(self) -> float:
        return self._host.bandwidth

    def find(self, request: Body) -> Segment | Part | None:
        """The sum that a stream asks for."""
        found = self._sums.get((request["id"], request["piece"], request["position"]))
        fits = found is not None and found.making == request["gen"] and found.order.attempt == request["attempt"]
        return found.out if found is not None and fits else None

    def sum_stream(self, child: Child, request: Body) -> Stream:
        return self._host.stream(child.node, request)

    def local_sum(self, name: str, piece: int, child: Child) -> Segment | Part | None:
        found = self._sums.get((name, piece, child.position))
        return found.out if found is not None and found.order.attempt == child.attempt else None

    def absorbed(self, nbytes: int, seconds: float) -> None:
        self._host.absorbed(nbytes, seconds)

    # orders of the keeper of a result

    def order(self, body: Body) -> None:
        """Begins a sum, or goes on with one that is there."""
        order = order_of(body["order"])
        name, pieces = body["id"], body["pieces"]
        key = (name, body["piece"], order.position)
        found = self._sums.get(key)
        if found is not None and (found.making, found.order.attempt) == (body["making"], order.attempt):
            found.extend(order)
            return
        if found is not None:
            self._end(key)
        sum_ = Sum(self, body, order, self._host.me, lambda what, child: self._told(sum_, what, child))
        self._sums[key] = sum_
        for ref in order.refs:
            segment = self._host.store.objects.get(ref)
            # All of it is there; that it counts, which the keeper knows, may not have been said here yet.
            if segment is None or segment.progress < segment.nbytes or not segment.pin():
                self._end(key)
                self._host.asker.tell("missing", name, making=body["making"], ref=ref)
                return
            sum_.inputs.append(segment)
        if pieces > 1:
            self._host.gather(name)
        if sum_.plain:
            sum_.start()
            self._host.listed()
            return

        def made(segment: Segment | None, why: ObjectStoreFull | None) -> None:
            if self._sums.get(key) is not sum_:
                if segment is not None:
                    self._host.store.discard(segment)
            elif segment is None:
                self._told(sum_, "failed", str(why))
            else:
                segment.producing = order.position == ROOT
                sum_.start(segment)

        def taken(segment: Segment) -> None:
            if self._sums.get(key) is sum_:
                part = segment.parts[sum_.piece]
                part.producing = True
                sum_.start(part)
                self._host.listed()

        if order.position == ROOT and pieces > 1:
            self._host.take(name, body["meta"], body["making"], pieces, taken)
            return
        if order.position == ROOT:
            self._host.grows_here(name)
        meta = {**body["meta"], "nbytes": sum_.end_at - sum_.start_at}
        self._host.make_segment(name, meta, f"{body['making']}.{order.attempt}", made, listed=order.position == ROOT)

    def unsum(self, body: Body) -> None:
        """Ends all sums of one run of a reduction."""
        for key, sum_ in list(self._sums.items()):
            if sum_.name == body["id"] and sum_.making == body["making"]:
                self._end(key)

    def cut_off(self, nodes: set[int]) -> None:
        """These nodes are gone: nothing more comes from them."""
        for sum_ in self:
            sum_.cut_off(nodes)

    def tell(self) -> None:
        """Tells the keepers again how far all of them are."""
        for sum_ in self:
            self._host.asker.tell("summing", sum_.name, making=sum_.making)
            for what, child in sum_.reports:
                self._report(sum_, what, child)

    def abort(self) -> None:
        """The node stops."""
        for sum_ in self:
            sum_.abort()

    def _told(self, sum_: Sum, what: str, child: Any) -> None:
        """Of a sum, in any thread."""

        def report() -> None:
            if self._sums.get((sum_.name, sum_.piece, sum_.order.position)) is sum_:
                sum_.reports.append((what, child))
                self._report(sum_, what, child)
                if what == "summed" and isinstance(sum_.out, Part):
                    self._host.piece_made(sum_.name)

        self._host.post(report)

    def _report(self, sum_: Sum, what: str, child: Any) -> None:
        body: Body = {"making": sum_.making, "attempt": sum_.order.attempt, "piece": sum_.piece}
        if what == "absorbed":
            body |= {"position": child.position, "attempt": child.attempt, "by": sum_.order.attempt}
        elif what == "failed":
            logger.warning("objects: a sum failed: %s", child)
            body |= {"kind": "full" if "room" in child else "request", "text": child}
        self._host.asker.tell(what, sum_.name, **body)

    def _end(self, key: Key) -> None:
        """Frees a sum and what it uses; a result that counts stays, and so does a piece of one."""
        sum_ = self._sums.pop(key)
        out, root = sum_.out, key[2] == ROOT
        if isinstance(out, Part) and not sum_.plain:
            if not out.full:
                self._host.store.discard(out.segment)
        elif sum_.scratch is None or not sum_.scratch.complete:
            sum_.abort()
            if sum_.scratch is not None:
                self._host.store.discard(sum_.scratch)
        for segment in sum_.inputs:
            self._host.store.unpin(segment)
        if root:
            self._host.grows_no_more(key[0])

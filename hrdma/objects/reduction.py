"""A reduction at the keeper of its result: watches the objects, drives the plan, gives orders, and says when it counts.

Small objects are reduced here, from the content that their entries hold, in the order in which they were named: where all of
them count, whoever does it finds the same. Large ones stay where they are: `hrdma.objects.plan` says which node adds what, and the nodes do it (`hrdma.objects.sums`). Orders leave a moment after
an arrival rather than at once, so that objects of one node that arrive together share one position: they are then added in
one pass, without a hop between them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Protocol

from hrdma.objects import kernels
from hrdma.objects.asker import Asker, Body
from hrdma.objects.broadcast import Copies, Copy
from hrdma.objects.directory import Directory, Entry
from hrdma.objects.pieces import Pieces, pieces_of
from hrdma.objects.plan import Order, Plan
from hrdma.objects.ref import INLINE
from hrdma.objects.shape import degree

__all__ = ["Owner", "Reduction"]

GATHER = 0.001  # seconds that orders wait for further arrivals


class Owner(Protocol):
    """What a reduction needs of its node."""

    asker: Asker
    directory: Directory
    latency: float
    bandwidth: float

    def send(self, node: int, body: Body) -> None: ...
    def later(self, name: str, seconds: float, call: Callable[[], None]) -> None: ...
    def nodes(self) -> tuple[int, ...]: ...
    def at_hand(self, name: str) -> Body | None: ...


class Reduction:
    """Fills the entry of a result, from `begin` on."""

    def __init__(self, entry: Entry, owner: Owner) -> None:
        assert entry.spec is not None
        self._entry = entry
        self._owner = owner
        self._spec = entry.spec
        self._making = secrets.token_hex(6)
        self._questions: dict[str, int] = {}
        self._meta: Body | None = None
        self._first = ""
        self._plan: Plan | None = None
        self._pieces: Pieces | None = None
        self._small: dict[str, bytes] = {}
        self._known: tuple[int, ...] = owner.nodes()
        self._over = False

    def begin(self) -> None:
        """Looks for the objects; where all are small and at hand, that is all there is to do."""
        for ref in self._spec["refs"]:
            self._seek(ref)

    @property
    def making(self) -> str:
        """Names this run of the reduction: after a change of keeper another one begins."""
        return self._making

    def stop(self) -> None:
        """Ends it; nodes free their sums."""
        self._over = True
        self._forget()
        self._withdraw(anew=self._entry.reducing is not None)

    def _forget(self) -> None:
        for question in self._questions.values():
            self._owner.asker.forget(question)
        self._questions.clear()

    def _withdraw(self, anew: bool) -> None:
        if self._plan is not None or self._pieces is not None:
            for node in self._owner.nodes():
                body = {"verb": "unsum", "id": self._entry.id, "making": self._making, "anew": anew}
                self._owner.send(node, body)

    def _anew(self) -> None:
        """Begins from the beginning: something is lost of which some pieces have a part."""
        self._forget()
        self._withdraw(anew=True)
        self._making, self._pieces = secrets.token_hex(6), None
        self._entry.gen, self._entry.copies, self._entry.pieces = "", Copies(), []
        for ref in self._spec["refs"]:
            self._seek(ref)

    def view(self, nodes: tuple[int, ...]) -> None:
        """The nodes changed."""
        gone = [node for node in self._known if node not in nodes]
        self._known = nodes
        if self._pieces is not None:
            if not set(gone).isdisjoint(self._pieces.nodes):
                self._anew()
                return
            for piece, order in self._pieces.repeat():
                self._order(order, piece)
            if self._entry.gen:
                for copies, plan in zip(self._entry.pieces, self._pieces.plans, strict=True):
                    copies.of.setdefault(plan.root, Copy(False, producing=True))
        if self._plan is None:
            return
        for node in gone:
            alive = [node for node in self._plan.nodes if node in nodes]
            successor = max(alive, default=self._owner.directory.me)
            for ref in self._plan.lose(node, successor):
                self._seek(ref)
        for order in self._plan.repeat():
            self._order(order)
        if self._entry.gen:
            self._entry.copies.of[self._plan.root] = Copy(False, producing=True)
        self._soon()

    def heard(self, src: int, verb: str, body: Body) -> None:
        """A node says how far it is."""
        if body["making"] != self._making:
            return
        if self._pieces is not None:
            self._heard_of_piece(self._pieces, verb, body)
        if self._plan is None:
            return
        if verb == "absorbed":
            self._plan.absorbed(body["position"], body["attempt"], body["by"])
        elif verb == "missing":
            for ref in self._plan.miss(body["ref"], src):
                self._seek(ref)
            self._soon()
        elif verb == "failed":
            self._fail(body["kind"], body["text"])
        elif verb == "summed" and (parts := self._plan.finish(body["attempt"])) is not None:
            self._finish(parts)

    def _heard_of_piece(self, pieces: Pieces, verb: str, body: Body) -> None:
        if verb == "absorbed":
            pieces.absorbed(body["piece"], body["position"], body["attempt"], body["by"])
            self._soon()
        elif verb == "missing":
            self._anew()
        elif verb == "failed":
            self._fail(body["kind"], body["text"])
        elif verb == "summed":
            pieces.finish(body["piece"], body["attempt"])
            if pieces.parts is not None:
                self._owner.directory.wake(self._entry)  # some node may have all of it

    def whole(self, node: int, then: Callable[[], object]) -> bool:
        """A node has the whole result: whether it counts now. `then` runs when that is known."""
        if self._pieces is None or self._pieces.parts is None:
            return False
        self._entry.copies.completed(node)
        self._finish(self._pieces.parts, then)
        return True

    def _seek(self, ref: str) -> None:
        if self._over or ref in self._questions:
            return
        if (answer := self._owner.at_hand(ref)) is not None:
            self._arrived(ref, answer)
        else:
            self._questions[ref] = self._owner.asker.ask(
                "watch", ref, lambda answer: self._arrived(ref, answer), patient=True, content=True
            )

    def _arrived(self, ref: str, answer: Body) -> None:
        self._questions.pop(ref, None)
        if self._over:
            return
        if "error" in answer:
            self._fail(*answer["error"])
            return
        meta = answer["meta"]
        if self._meta is None:
            try:
                kernels.check(self._spec["op"], meta["dtype"])
            except (TypeError, ValueError) as error:
                self._fail("type" if isinstance(error, TypeError) else "value", f"object {ref}: {error}")
                return
            self._meta, self._first = meta, ref
        for what in ("dtype", "shape"):
            if meta[what] != self._meta[what]:
                mine, theirs = meta[what], self._meta[what]
                self._fail("value", f"cannot reduce: object {ref} has {what} {mine}, object {self._first} has {theirs}")
                return
        if meta["nbytes"] <= INLINE:
            if ref not in self._small and len(self._small) < self._spec["count"]:
                self._small[ref] = answer["inline"]
            if len(self._small) == self._spec["count"]:
                self._finish_small()
            return
        if self._plan is None and self._pieces is None:
            owner, count = self._owner, self._spec["count"]
            number = pieces_of(count, meta["nbytes"], owner.bandwidth) if self._spec["everywhere"] else 1
            if number > 1:
                self._pieces = Pieces(count, number)
        if self._plan is None and self._pieces is None:
            node = self._spec["node"] if self._spec["node"] in owner.nodes() else owner.directory.me
            self._plan = Plan(count, node, degree(count, meta["nbytes"], owner.latency, owner.bandwidth))
        planner = self._pieces or self._plan
        if answer["node"] in self._known and planner is not None:
            planner.arrive(ref, answer["node"])
            self._soon()
        else:
            self._seek(ref)

    def _soon(self) -> None:
        self._owner.later(f"orders {self._entry.id}", GATHER, self._give_orders)

    def _give_orders(self) -> None:
        plan, entry = self._plan, self._entry
        if not self._over and self._pieces is not None:
            self._order_pieces(self._pieces)
        if self._over or plan is None or self._meta is None:
            return
        for order in plan.orders():
            self._order(order)
        gen = f"{self._making}.{plan.attempt}" if plan.begun else ""
        if entry.gen != gen:
            entry.gen, entry.meta, entry.copies = gen, self._meta, Copies()
            if gen:  # before that whoever wants the result has nobody to get it from, and waits
                entry.copies.of[plan.root] = Copy(False, producing=True)
            self._owner.directory.changed(entry)

    def _order_pieces(self, pieces: Pieces) -> None:
        entry = self._entry
        for piece, order in pieces.orders():
            self._order(order, piece)
        if pieces.begun and not entry.gen:
            entry.gen, entry.meta, entry.copies = self._making, self._meta, Copies()
            entry.pieces = [Copies() for _ in pieces.plans]
            for piece, copies in enumerate(entry.pieces):
                copies.chain(pieces.ring(piece))
            self._owner.directory.changed(entry)

    def _order(self, order: Order, piece: int = 0) -> None:
        body: Body = {"verb": "sum", "id": self._entry.id, "making": self._making, "meta": self._meta}
        body |= {"op": self._spec["op"], "count": self._spec["count"], "order": order, "piece": piece}
        body["pieces"] = len(self._pieces.plans) if self._pieces is not None else 1
        self._owner.send(order.node, body)

    def _finish_small(self) -> None:
        assert self._meta is not None
        parts = [ref for ref in self._spec["refs"] if ref in self._small]
        self._entry.meta, self._entry.gen = self._meta, self._making
        self._entry.inline = kernels.reduced(self._spec["op"], self._meta, [self._small[ref] for ref in parts])
        self._entry.held = len(parts) < len(self._spec["refs"])
        self._finish(parts)

    def _finish(self, parts: list[str], then: Callable[[], object] = lambda: None) -> None:
        """It counts when the backup knows: else a keeper that was away, and is not one any more, could end it by itself."""
        entry, plan = self._entry, self._plan
        entry.parts, entry.committed, entry.reducing = parts, True, None
        if plan is not None:
            entry.copies.completed(plan.root)
        gen = entry.gen

        def known() -> None:
            if entry.held:
                entry.held = False
                self._owner.directory.wake(entry)
            if plan is not None:
                self._owner.send(plan.root, {"verb": "counts", "id": entry.id, "gen": gen})
            self._withdraw(anew=False)
            then()

        self._over = True
        self._forget()
        self._owner.directory.changed(entry, known)

    def _fail(self, kind: str, text: str) -> None:
        self.stop()
        self._entry.error, self._entry.reducing = [kind, text], None
        self._entry.copies, self._entry.pieces = Copies(), []
        self._owner.directory.changed(self._entry)

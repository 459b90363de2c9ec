"""A large allreduce in pieces, so that every host's link carries the same: who reduces which piece, with whom, and when.

One reduction to one host and a broadcast from there move the object over every link twice, and the last host to come receives
it twice: a sum, then the result. In pieces, each a chain of its own that ends at another host, n hosts move 2 (n - 1) / n of
it, as a ring does. What is known too early is not planned: while objects still arrive, each host adds one piece after the
other, and the pieces that nobody has begun are shared out when all have come.

    hosts 0 1 2 are there, 3 is not          when 3 comes
    piece 0   0 -> 1 -> 2                    0 -> 1 -> 2 -> 3          ends at 3
    piece 1   0 -> 1                         0 -> 1 -> 3 -> 2          ends at 2
    piece 2   0 -> 1 (on its way)            0 -> 1 -> 3 -> 2          ends at 2
    piece 3                                  3 -> 0 -> 2 -> 1          ends at 1

All pieces have the same contributors. So the loss of one begins all of it anew, and there are no backups. Pure: no clock, no
sockets.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hrdma.objects.plan import Order, Plan
from hrdma.objects.shape import CHAIN

__all__ = ["Pieces", "bounds", "pieces_of"]

LEAST = 0.05  # seconds that a piece takes on a link at least: opening its streams must not count
ALIGNED = 64  # bytes
WINDOW = 2  # pieces that a host takes in at a time before all have come: the next begins while the last one ends
NOWHERE = -1


def pieces_of(count: int, nbytes: int, bandwidth: float) -> int:
    """How many pieces an allreduce of so many objects of so many bytes is made in; 1 when it does not pay."""
    return max(1, min(count, int(nbytes / (bandwidth * LEAST)))) if count > 2 else 1


def bounds(nbytes: int, number: int) -> list[tuple[int, int]]:
    """First byte of each piece, and the first one after it."""
    step = -(-nbytes // number // ALIGNED) * ALIGNED
    return [(min(nbytes, i * step), min(nbytes, (i + 1) * step)) for i in range(number)]


@dataclass
class _Member:
    """What a host puts in."""

    node: int
    refs: list[str]
    joined: set[int] = field(default_factory=set)  # pieces
    taking: set[int] = field(default_factory=set)  # those of them of which a sum is on its way here


class Pieces:
    """The state of one allreduce.

    Parameters
    ----------
    count : int
        Objects in the result: the first that arrive.
    number : int
        Pieces.
    """

    def __init__(self, count: int, number: int) -> None:
        self.count = count
        self.plans = [Plan(count, NOWHERE, CHAIN) for _ in range(number)]
        self._members: list[_Member] = []
        self._spread = False
        self._parts: list[list[str] | None] = [None] * number

    @property
    def begun(self) -> bool:
        """Whether there is somebody to get each piece from."""
        return self._spread and all(plan.begun for plan in self.plans)

    @property
    def nodes(self) -> list[int]:
        """Whoever puts something in, in the order in which they came."""
        return list(dict.fromkeys(member.node for member in self._members))

    def arrive(self, ref: str, node: int) -> None:
        """An object is complete on a node; those beyond `count` are left out."""
        placed = [ref for member in self._members for ref in member.refs]
        if len(placed) == self.count or ref in placed:
            return
        for member in self._members:
            if member.node == node and not member.joined:
                member.refs.append(ref)
                return
        self._members.append(_Member(node, [ref]))

    def absorbed(self, piece: int, position: int, attempt: int, by: int) -> None:
        """The whole sum of a position of a piece is in that of its parent's attempt `by`."""
        self.plans[piece].absorbed(position, attempt, by)
        for member in self._members:
            if piece in member.taking and self.plans[piece].attempt_of(member.refs[0]) == by:
                member.taking.discard(piece)

    def orders(self) -> list[tuple[int, Order]]:
        """What has to be told to nodes since the last call: the piece and the order."""
        if sum(len(member.refs) for member in self._members) < self.count:
            self._go_on()
        elif not self._spread:
            self._spread = True
            self._share_out()
        return [(piece, order) for piece, plan in enumerate(self.plans) for order in plan.orders()]

    def repeat(self) -> list[tuple[int, Order]]:
        """All orders that stand."""
        return [(piece, order) for piece, plan in enumerate(self.plans) for order in plan.repeat()]

    def finish(self, piece: int, attempt: int) -> None:
        """The sum of a piece is complete."""
        self._parts[piece] = self._parts[piece] or self.plans[piece].finish(attempt)

    @property
    def parts(self) -> list[str] | None:
        """The objects in the result, once all pieces of it are complete."""
        return self._parts[0] if all(parts is not None for parts in self._parts) else None

    def ring(self, piece: int) -> list[int]:
        """In which order the hosts pass a piece of the result on, the one where it ends first."""
        nodes, root = self.nodes, self.plans[piece].root
        at = nodes.index(root)
        return nodes[at:] + nodes[:at]

    def _join(self, member: _Member, piece: int) -> None:
        plan = self.plans[piece]
        if plan.placed:
            member.taking.add(piece)
        member.joined.add(piece)
        for ref in member.refs:
            plan.arrive(ref, member.node)

    def _go_on(self) -> None:
        """Those who take nothing in begin their next piece."""
        if len(self._members) < 2:
            return
        for member in self._members:
            for piece, plan in enumerate(self.plans):
                if len(member.taking) >= WINDOW:
                    break
                if piece not in member.joined:
                    if not plan.placed:
                        self._join(next(other for other in self._members if other is not member), piece)
                    self._join(member, piece)

    def _share_out(self) -> None:
        """All have come: the rest of each piece, in such an order that the busiest link has least to do."""
        members, number = self._members, len(self.plans)
        rest = [[member for member in members if piece not in member.joined] for piece in range(number)]
        # Pieces that each has still to take in, or to send on: sums, and the result.
        load = {id(member): float(2 * number + len(member.taking)) for member in members}
        for missing in rest:
            for member in missing:
                load[id(member)] += 2
        for piece in sorted(range(number), key=lambda piece: len(rest[piece])):  # where there is no choice first
            missing = rest[piece]
            # Whoever has most to do ends a piece: it need not send the sum, nor take in the result.
            root = max(missing or members[-1:], key=lambda member: load[id(member)])
            load[id(root)] -= 2
            self.plans[piece].put_root(root.node)
            at = missing.index(root) + 1 if missing else 0
            order = missing[at:] + missing[:at]
            if len(order) == len(members):
                load[id(order[0])] -= 1  # it takes nothing in
            for member in order:
                self._join(member, piece)

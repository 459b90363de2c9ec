"""A large allreduce in pieces, so that every host's link carries the same: who reduces which piece, with whom, and when.

One reduction to one host and a broadcast from there move the object over every link twice, and the last host to come receives
it twice: a sum, then the result. In pieces, each a chain of its own that ends at another host, n hosts move 2 (n - 1) / n of
it, as a ring does. What is known too early is not planned: while objects still arrive, links that are idle begin one piece
after the other, and the rest of all pieces is shared out when all have come. A host that has much to take in by then sends its
own straight to where the piece ends, instead of adding it to what comes by.

    hosts 0 1 2 are there, 3 is not          when 3 comes
    piece 0   0 -> 1 -> 2                    0 -> 1 -> 2, 3 -> 2       ends at 2
    piece 1   2 -> 0                         2 -> 0 -> 1 -> 3          ends at 3
    piece 2   1 -> 2 (on its way)            1 -> 2 -> 3 -> 0          ends at 0
    piece 3                                  3 -> 0 -> 2 -> 1          ends at 1

All pieces have the same contributors. So the loss of one begins all of it anew, and there are no backups. Pure: no clock, no
sockets.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from hrdma.objects.plan import Order, Plan
from hrdma.objects.shape import CHAIN

__all__ = ["Pieces", "bounds", "pieces_of"]

LEAST = 0.05  # seconds that a piece takes on a link at least: opening its streams must not count
ALIGNED = 64  # bytes
WINDOW = 2  # pieces that a host takes in, and sends on, at a time before all have come: the next begins while the last one ends
FINER = 2  # times as many pieces where objects come one after the other: there is more to share out in the end
STEEP = 8  # the power of loads whose sum is kept low: the higher, the more the largest of them counts
TURNS = 3  # in which each piece is decided anew, with regard to what was decided for the others
NOWHERE = -1


def pieces_of(count: int, nbytes: int, bandwidth: float) -> int:
    """How many pieces an allreduce of so many objects of so many bytes is made in; 1 when it does not pay."""
    return max(1, min(count, int(nbytes / (bandwidth * LEAST)))) if count > 2 else 1


def bounds(nbytes: int, number: int) -> list[tuple[int, int]]:
    """First byte of each piece, and the first one after it."""
    step = -(-nbytes // number // ALIGNED) * ALIGNED
    return [(min(nbytes, i * step), min(nbytes, (i + 1) * step)) for i in range(number)]


@dataclass(eq=False)
class _Member:
    """What a host puts in."""

    node: int
    refs: list[str]
    taking: set[int] = field(default_factory=set)  # pieces of which a sum is on its way here
    sending: set[int] = field(default_factory=set)  # of which this one's sum is on its way to another
    ups: float = 0.0  # once all have come: pieces that it has still to send on, sums and the result
    downs: float = 0.0  # to take in


@dataclass
class _Rest:
    """How a piece goes on once all have come."""

    root: _Member
    line: list[_Member]  # each adds what came from the one before, and the root what comes from the last
    heads: list[_Member]  # each sends its own to the root
    last: _Member  # it need not send the result on


class Pieces:
    """The state of one allreduce.

    Parameters
    ----------
    count : int
        Objects in the result: the first that arrive.
    number : int
        Pieces, where all objects are there when the first orders are given; else twice as many.
    """

    def __init__(self, count: int, number: int) -> None:
        self.count = count
        self._number = number
        number *= FINER
        self.plans = [Plan(count, NOWHERE, CHAIN) for _ in range(number)]
        self._members: list[_Member] = []
        self._chains: list[list[_Member]] = [[] for _ in range(number)]  # who has joined each piece, in order
        self._rings: list[list[int]] = []
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
            if member.node == node and not any(member in chain for chain in self._chains):
                member.refs.append(ref)
                return
        self._members.append(_Member(node, [ref]))

    def absorbed(self, piece: int, position: int, attempt: int, by: int) -> None:
        """The whole sum of a position of a piece is in that of its parent's attempt `by`."""
        self.plans[piece].absorbed(position, attempt, by)
        for before, member in pairwise(self._chains[piece]):
            if piece in member.taking and self.plans[piece].attempt_of(member.refs[0]) == by:
                member.taking.discard(piece)
                before.sending.discard(piece)

    def orders(self) -> list[tuple[int, Order]]:
        """What has to be told to nodes since the last call: the piece and the order."""
        if sum(len(member.refs) for member in self._members) < self.count:
            self._go_on()
        elif not self._spread:
            self._spread = True
            if not any(self._chains):
                for each in (self.plans, self._chains, self._parts):
                    del each[self._number :]
                self._go_round()
            else:
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
        return self._rings[piece]

    def _join(self, member: _Member, piece: int) -> None:
        chain = self._chains[piece]
        if chain:
            member.taking.add(piece)
            chain[-1].sending.add(piece)
        chain.append(member)
        for ref in member.refs:
            self.plans[piece].arrive(ref, member.node)

    def _go_on(self) -> None:
        """Those whose links are idle begin their next piece, one sending and one taking in."""
        while steps := list(self._steps()):
            _, piece, sender, taker = min(steps)
            if not self._chains[piece]:
                self._join(self._members[sender], piece)
            self._join(self._members[taker], piece)

    def _steps(self) -> Iterator[tuple[tuple[int, bool, int, int], int, int, int]]:
        """Who may send a sum of which piece to whom; the least first: that loads idle links, needs not wait for what is
        on its way itself, and is of a piece which few have not joined; and those first who came last."""
        free = [i for i, member in enumerate(self._members) if len(member.taking) < WINDOW]
        for piece, chain in enumerate(self._chains):
            for i, sender in enumerate(self._members):
                if len(sender.sending) < WINDOW and (not chain or sender is chain[-1]):
                    for j in free:
                        taker = self._members[j]
                        if taker is not sender and taker not in chain:
                            busy = len(sender.sending) + len(taker.taking)
                            yield (busy, piece in sender.taking, -len(chain), -i - j), piece, i, j

    def _go_round(self) -> None:
        """All have come before any piece was begun: each ends at another host, and comes to it and goes on from it in a ring."""
        members = self._members
        for piece in range(len(self.plans)):
            at = piece % len(members)
            after = members[at + 1 :] + members[:at]
            self._carry_out(piece, _Rest(members[at], after, [], after[-1] if after else members[at]))

    def _share_out(self) -> None:
        """All have come: the rest of each piece, in such a way that the busiest link has least to do."""
        missing = [[member for member in self._members if member not in chain] for chain in self._chains]
        pieces = sorted(range(len(self.plans)), key=lambda piece: len(missing[piece]))  # where there is no choice first
        for member in self._members:
            member.ups, member.downs = len(member.sending) / 2, len(member.taking) / 2
        nobody = _Member(NOWHERE, [])
        found = [_Rest(nobody, each, [], nobody) for each in missing]
        for piece in pieces:
            self._count(piece, found[piece], 1)
        for piece in pieces * TURNS:
            self._count(piece, found[piece], -1)
            found[piece] = self._rest(piece, missing[piece], found[piece].root)
            self._count(piece, found[piece], 1)
        for piece, rest in enumerate(found):
            self._carry_out(piece, rest)

    def _carry_out(self, piece: int, rest: _Rest) -> None:
        plan, nodes, there = self.plans[piece], self.nodes, rest.root in self._chains[piece]
        plan.put_root(rest.root.node)
        if there:
            plan.branch()
        for member in [*rest.line, *([] if there else [rest.root])]:
            self._join(member, piece)
        for member in rest.heads:
            plan.branch()
            self._join(member, piece)
        at = nodes.index(rest.root.node)
        ends = list(dict.fromkeys([rest.root.node, rest.last.node]))
        self._rings.append([ends[0], *(node for node in nodes[at:] + nodes[:at] if node not in ends), *ends[1:]])

    def _rest(self, piece: int, missing: list[_Member], before: _Member) -> _Rest:
        found: list[tuple[float, bool, int, _Rest]] = []
        for root in [*missing, *self._chains[piece][-1:]]:
            at = missing.index(root) + 1 if root in missing else piece % max(1, len(missing))
            members = [member for member in missing[at:] + missing[:at] if member is not root]
            line = sorted(members, key=lambda member: member.downs)
            heads: list[_Member] = []
            last = max(self._members, key=lambda member: (member is not root, member.ups + (member in missing)))
            while True:
                rest = _Rest(root, [member for member in members if member in line], [*heads], last)
                self._count(piece, rest, 1)
                cost = sum(load**STEEP for member in self._members for load in (member.ups, member.downs))
                self._count(piece, rest, -1)
                found.append((cost, root is not before, len(found), rest))
                # Each of the line takes in a sum and the result: whoever has more to take in sends to the root instead.
                if not line or line[-1].downs < root.downs + len(heads):
                    break
                heads.append(line.pop())
        return min(found)[3]

    def _count(self, piece: int, rest: _Rest, sign: int) -> None:
        """Adds to the loads, or takes away from them, what the rest of a piece is for each."""
        chain = self._chains[piece]
        goes_on = bool(chain) and rest.root is not chain[-1]  # the sum that is there is sent to the others
        if goes_on:
            chain[-1].ups += sign
        for member in [*rest.line, *rest.heads]:
            member.ups += sign
        for member in rest.line if goes_on else rest.line[1:]:
            member.downs += sign
        rest.root.downs += sign * (len(rest.heads) + bool(rest.line or goes_on))
        for member in self._members:
            member.ups += sign * (member is not rest.last)
            member.downs += sign * (member is not rest.root)

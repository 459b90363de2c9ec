"""One reduction while it happens: who adds what to what, as objects arrive and nodes die.

A *position* of the tree (`hrdma.objects.shape`) is held by a node and adds that node's objects to the sums of its children;
ROOT stands where the result is wanted. Positions are given *orders*. Each order bears an attempt, a number never used twice:
a sum is named by (position, attempt), so that a sum that was made anew is never mistaken for the one it replaces.

The whole of the failure handling is one rule, applied until nothing changes: **a position whose children are no longer those
it was told of begins anew**, under a new attempt; its parent then finds one of its own children changed, and so on up to ROOT.
A loss therefore costs the path from the lost position to the root, and all other sums stay.

    lost: 1        3*            * begins anew; 0, 5, 4, 6 keep their sums,
                 x   5           and 0 is a child of 3 until an object takes position 1
                0 2  4 6

A child that was *absorbed* (its whole sum arrived in its parent) may die: it stays in the tree as long as the attempt of the
parent that absorbed it stands. Objects beyond `count` are backups for those that are lost. Pure: no clock, no sockets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count as counter
from typing import NamedTuple

from hrdma.objects.shape import BINARY, ROOT, STAR, parent

__all__ = ["Child", "Order", "Plan"]


class Child(NamedTuple):
    """A sum that a position adds."""

    position: int
    node: int
    attempt: int


class Order(NamedTuple):
    """What a node is to do for one position."""

    position: int
    node: int
    attempt: int
    refs: tuple[str, ...]  #: objects of this node, added first
    children: tuple[Child, ...]  #: in the order in which they were told
    closed: bool  #: no child will be added: the sum is complete when all of these are in it


@dataclass
class _Position:
    node: int
    attempt: int
    refs: list[str] = field(default_factory=list)
    told: Order | None = None
    dead: bool = False
    absorbed_by: int = -1  # attempt of the parent that has all of this sum


class Plan:
    """The state of one reduction.

    Parameters
    ----------
    count : int
        Objects in the result: the first that arrive.
    node : int
        Where the result is wanted.
    shape : str
        Of `hrdma.objects.shape`.
    """

    def __init__(self, count: int, node: int, shape: str) -> None:
        self.count = count
        self.shape = shape
        self._attempts = counter(1)
        self._at: dict[int, _Position] = {ROOT: _Position(node, next(self._attempts))}
        self._placed: set[str] = set()
        self._backups: dict[str, int] = {}
        self._branches: set[int] = set()  # positions whose sum goes to ROOT, whatever stands above

    @property
    def root(self) -> int:
        """The node of ROOT."""
        return self._at[ROOT].node

    @property
    def attempt(self) -> int:
        """The attempt of ROOT."""
        return self._at[ROOT].attempt

    @property
    def begun(self) -> bool:
        """Whether ROOT has orders: its sum may have bytes."""
        return self._at[ROOT].told is not None

    @property
    def placed(self) -> int:
        """Objects that have a place."""
        return len(self._placed)

    @property
    def full(self) -> bool:
        return len(self._placed) == self.count

    @property
    def nodes(self) -> set[int]:
        """Nodes that hold a position and live."""
        return {position.node for position in self._at.values() if not position.dead}

    def put_root(self, node: int) -> None:
        """Moves ROOT to a node, before it has orders."""
        assert not self.begun
        self._at[ROOT].node = node

    def branch(self) -> None:
        """What arrives from now on is not added to what is there, but beside it at ROOT. Before `full`, and if nobody is lost."""
        self._branches |= {max(self._at)} - {ROOT}

    def attempt_of(self, ref: str) -> int:
        """The attempt of the position that adds an object; -1 where none does."""
        return next((position.attempt for position in self._at.values() if ref in position.refs), -1)

    def arrive(self, ref: str, node: int) -> None:
        """An object is complete on a node. Beyond `count` it is a backup."""
        if ref in self._placed:
            return
        if self.full:
            self._backups[ref] = node
            return
        self._backups.pop(ref, None)
        self._placed.add(ref)
        mine = [position for position in self._at.values() if position.node == node and not position.dead]
        fresh = next((position for position in mine if position.told is None), None)
        if fresh is None:
            number = next(number for number in counter() if number not in self._at)
            fresh = self._at[number] = _Position(node, next(self._attempts))
        fresh.refs.append(ref)

    def absorbed(self, position: int, attempt: int, by: int) -> None:
        """The whole sum of a position is in that of its parent's attempt `by`."""
        child = self._at.get(position)
        if child is not None and child.attempt == attempt:
            child.absorbed_by = by
            for under in child.told.children if child.told else ():
                self.absorbed(under.position, under.attempt, attempt)

    def lose(self, node: int, successor: int) -> list[str]:
        """A node died. Returns the objects that have to be found again.

        Parameters
        ----------
        node : int
        successor : int
            Gets ROOT where the node had it.
        """
        for ref in [ref for ref, where in self._backups.items() if where == node]:
            del self._backups[ref]
        lost: list[str] = []
        if self.root == node:
            lost += self._at[ROOT].refs
            self._at[ROOT] = _Position(successor, next(self._attempts))
        for position in self._at.values():
            position.dead = position.dead or position.node == node
        return self._settle(lost)

    def miss(self, ref: str, node: int) -> list[str]:
        """An object is not on the node where it was. Returns the objects that have to be found again."""
        lost: list[str] = []
        if self._backups.get(ref) == node:
            del self._backups[ref]
        for number, position in list(self._at.items()):
            if ref in position.refs and position.node == node and not position.dead:
                lost = list(position.refs)
                if number == ROOT:
                    self._at[ROOT] = _Position(node, next(self._attempts))
                else:
                    del self._at[number]
        return self._settle(lost)

    def orders(self) -> list[Order]:
        """What has to be told to nodes since the last call."""
        self._settle([])
        found, under = [], self._children()
        for number, position in self._at.items():
            if number == ROOT and not self.full and self.shape != STAR:
                continue  # what now is on top will be below what arrives: its sum is not for ROOT
            if not position.dead and (order := self._order(number, under[number])) != position.told:
                position.told = order
                found.append(order)
        return found

    def repeat(self) -> list[Order]:
        """All orders that stand."""
        return [position.told for position in self._at.values() if position.told is not None and not position.dead]

    def finish(self, attempt: int) -> list[str] | None:
        """ROOT's node has the sum of this attempt. Returns the objects in it; None when that attempt is out of date."""
        root = self._at[ROOT]
        if root.attempt != attempt or root.told is None or not root.told.closed or not self.full:
            return None
        return [ref for position in self._at.values() for ref in position.refs]

    def _settle(self, lost: list[str]) -> list[str]:
        self._placed.difference_update(lost)
        while True:
            while gone := self._gone():
                for number in gone:
                    refs = self._at.pop(number).refs
                    lost += refs
                    self._placed.difference_update(refs)
            while self._backups and not self.full:
                ref = next(iter(self._backups))
                self.arrive(ref, self._backups.pop(ref))
            under = self._children()
            stale = [number for number in self._at if self._stale(number, under)]
            for number in stale:
                position = self._at[number]
                self._at[number] = _Position(position.node, next(self._attempts), position.refs)
            if not stale:
                return [ref for ref in lost if ref not in self._placed]

    def _gone(self) -> list[int]:
        """Dead positions whose sum is needed and is not in that of their parent."""
        if not any(position.dead for position in self._at.values()):
            return []
        above = self._parents()
        return [
            number
            for number, position in self._at.items()
            if position.dead and position.absorbed_by != self._at[above[number]].attempt
        ]

    def _parents(self) -> dict[int, int]:
        """The nearest filled ancestor of each position; a dead one only where it was told of this very sum."""
        alive = {number for number, position in self._at.items() if not position.dead and number != ROOT}
        adopted: dict[tuple[int, int], set[int]] = {}
        for number, position in self._at.items():
            if position.dead and position.told is not None:
                for child in position.told.children:
                    adopted.setdefault((child.position, child.attempt), set()).add(number)
        last = max(self._at)
        found = {}
        for number, position in self._at.items():
            if number in self._branches:
                found[number] = ROOT
            elif number != ROOT:
                mine = adopted.get((number, position.attempt))
                found[number] = parent(self.shape, number, alive | mine if mine else alive, last)
        return found

    def _children(self) -> dict[int, set[Child]]:
        found: dict[int, set[Child]] = {number: set() for number in self._at}
        for number, above in self._parents().items():
            found[above].add(Child(number, self._at[number].node, self._at[number].attempt))
        return found

    def _order(self, number: int, children: set[Child]) -> Order:
        position = self._at[number]
        told = position.told.children if position.told else ()
        ordered = (*(child for child in told if child in children), *sorted(children.difference(told)))
        grows = number == ROOT or (self.shape == BINARY and number % 2 == 1 and len(ordered) < 2)
        return Order(number, position.node, position.attempt, tuple(position.refs), ordered, self.full or not grows)

    def _stale(self, number: int, under: dict[int, set[Child]]) -> bool:
        position = self._at[number]
        if position.dead or position.told is None:
            return False
        if position.told.closed:
            return under[number] != set(position.told.children)
        return not under[number].issuperset(position.told.children)

"""Who sends to whom in a broadcast: the copies of one object, and the choice of a sender for a receiver.

Receivers ask, one after the other; nobody knows beforehand who will. Each copy feeds a bounded number of receivers at a
time, and a receiver may feed others before it is complete. So receivers that ask together form one pipelined chain, and
those that ask later fan out over the finished copies:

    A* -> B -> C -> D        A is complete; B, C, D asked while A was sending
    A* B* C* D* -> E         E asks when all are done: it may have any of them

A copy that is fed by nobody and is not complete feeds nobody. A receiver whose sender went away is never given one that
is fed, however indirectly, by itself: following ``via`` from any copy ends at one that is complete or is being produced.
Pure: no clock, no sockets.

Zhuang et al., "Hoplite: efficient and fault-tolerant collective communication for task-based distributed systems",
SIGCOMM 2021.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["FEEDS", "Copies", "Copy"]

FEEDS = 2  # receivers that one copy feeds at most; a second one only while no copy is idle


@dataclass
class Copy:
    """One node's copy of the object."""

    complete: bool
    producing: bool = False  #: it grows here: put by a client, or the result of a reduction
    via: int | None = None  #: the node that feeds it


class Copies:
    """The copies of one object by node, in the order in which they came."""

    def __init__(self) -> None:
        self.of: dict[int, Copy] = {}
        self._planned: set[int] = set()

    def source(self, node: int) -> int | None:
        """The complete or producing copy that feeds this one in the end; None when it is cut off."""
        seen = set()
        while node in self.of and node not in seen:
            seen.add(node)
            copy = self.of[node]
            if copy.complete or copy.producing:
                return node
            if copy.via is None:
                return None
            node = copy.via
        return None

    def fed_by(self, node: int, other: int) -> bool:
        """Whether `node` is `other` or is fed by it, directly or not."""
        seen = set()
        while node not in seen:
            if node == other:
                return True
            seen.add(node)
            copy = self.of.get(node)
            if copy is None or copy.complete or copy.producing or copy.via is None:
                return False
            node = copy.via
        return False

    def depth(self, node: int) -> int:
        """How many hops the bytes of this copy come."""
        hops = 0
        while (copy := self.of.get(node)) is not None and not copy.complete and copy.via is not None:
            node = copy.via
            hops += 1
        return hops

    def choose(self, receiver: int, avoid: Collection[int] = ()) -> int | None:
        """The sender for a receiver; None when it has to wait for one.

        Parameters
        ----------
        receiver : int
        avoid : collection of int
            Nodes that failed this receiver before: taken only where there is no other.
        """
        loads = Counter(copy.via for copy in self.of.values() if not copy.complete and copy.via is not None)
        best = None
        for order, (node, copy) in enumerate(self.of.items()):
            if loads[node] >= FEEDS or self.source(node) is None or self.fed_by(node, receiver):
                continue
            rank = (node in avoid, loads[node], not copy.complete, self.depth(node), order)
            if best is None or rank < best[0]:
                best = (rank, node)
        return None if best is None else best[1]

    def chain(self, nodes: list[int]) -> None:
        """The first of them makes the object, and all others will ask for it: who feeds whom is settled before."""
        self.of[nodes[0]] = Copy(False, producing=True)
        for sender, receiver in pairwise(nodes):
            self.of[receiver] = Copy(False, via=sender)
        self._planned = set(nodes[1:])

    def grant(self, receiver: int, avoid: Collection[int] = ()) -> int | None:
        """Chooses a sender and notes that it feeds the receiver, which is a partial copy from now on."""
        copy = self.of.get(receiver)
        if receiver in self._planned:
            self._planned.discard(receiver)
            if copy is not None and copy.via is not None:
                return copy.via
        if copy is not None and not copy.complete:
            copy.via = None  # what fed it before does so no more
        sender = self.choose(receiver, avoid)
        if sender is not None:
            self.of.setdefault(receiver, Copy(False)).via = sender
        return sender

    def completed(self, node: int) -> None:
        """This node has all of it."""
        self.of[node] = Copy(True)

    def remove(self, node: int) -> None:
        """This node has nothing of it any more; whoever it fed is cut off until it asks again."""
        self.of.pop(node, None)
        for copy in self.of.values():
            if copy.via == node:
                copy.via = None

    @property
    def complete(self) -> list[int]:
        return [node for node, copy in self.of.items() if copy.complete]

    @property
    def alive(self) -> bool:
        """Whether the bytes are somewhere, or are on their way into being."""
        return any(copy.complete or copy.producing for copy in self.of.values())

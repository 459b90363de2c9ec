"""Looks for nodes that were counted as lost: they may have gone on as a cluster of their own, which should become one again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from hrdma.control.loop import Dialog, Loop

__all__ = ["Address", "Lookout"]

LOOK = 600.0  # seconds for which a node is looked for
OFTEN = 0.5  # seconds between two looks, at least; a heartbeat where that is longer
MOST = 8  # nodes that are called in one look
PATIENT = 6  # doublings of the time between two looks, at most

Address = tuple[str, int]


class Lookout:
    """Calls them now and then. Everything runs in the control thread.

    Parameters
    ----------
    loop : Loop
    dial : callable
        Calls the node at an address to ask who the nodes are.
    mine : callable
        Whether it is this node's to look.
    """

    def __init__(self, loop: Loop, dial: Callable[[str, int], Dialog], mine: Callable[[], bool]) -> None:
        self._loop, self._dial, self._mine = loop, dial, mine
        self.failures = 0  #: times in a row that this node joined nobody whom it had found
        self._until: dict[Address, float] = {}  # in the order in which they are called
        self._calls: dict[Dialog, Address] = {}

    def view(self, lost: Iterable[Address], there: Iterable[Address]) -> None:
        """Nodes went, and these are there: whoever is found again is looked for no more."""
        until = time.monotonic() + LOOK
        for address in lost:
            self._until.setdefault(address, until)
        for address in there:
            self._until.pop(address, None)
        self._again()

    def _again(self) -> None:
        if self._until:
            pause = max(OFTEN, self._loop.heartbeat) * 2 ** min(self.failures, PATIENT)
            self._loop.at("look", time.monotonic() + pause, self._look)

    def _look(self) -> None:
        self.hang_up()
        now = time.monotonic()
        self._until = {address: until for address, until in self._until.items() if until > now}
        if self._mine():
            for address in list(self._until)[:MOST]:
                self._calls[self._dial(*address)] = address
                self._until[address] = self._until.pop(address)  # the others are next
        self._again()

    def hang_up(self) -> None:
        for dialog in self._calls:
            self._loop.hang_up(dialog)
        self._calls.clear()

    def over(self, dialog: Dialog, *, stranger: bool = False) -> bool:
        """Whether this was one of its calls, which is over. A stranger lives there now: nobody looks there again."""
        address = self._calls.pop(dialog, None)
        if address is None:
            return False
        self._loop.hang_up(dialog)
        if stranger:
            self._until.pop(address, None)
        return True

"""Whose turn it is to take bytes in, where many streams share a link: few at a time, those that others wait for first.

In a pipeline over many hosts each block waits on every link behind those of all streams there. So pieces of a result do not
come all at once: a stream waits while `at_a_time` others are not done that are nearer to the beginning of their pipeline. What
a stream waits for is itself nearer to it, on whatever host; so the nearest of all never waits, and nobody waits for ever.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from itertools import count

__all__ = ["Turns"]


class Turns:
    """The turns of one host. All methods from any thread."""

    def __init__(self, at_a_time: int) -> None:
        self._at_a_time = at_a_time
        self._here: set[tuple[int, int]] = set()
        self._numbers = count()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def turn(self, depth: int, over: Callable[[], bool]) -> Iterator[None]:
        """Waits for a turn, or until it is `over` (after which `look` is called), and has it during the block.

        Parameters
        ----------
        depth : int
            Hops from the beginning of the pipeline.
        over : callable
        """
        mine = (depth, next(self._numbers))
        with self._changed:
            self._here.add(mine)
            self._changed.wait_for(lambda: over() or sum(other < mine for other in self._here) < self._at_a_time)
        try:
            yield
        finally:
            with self._changed:
                self._here.discard(mine)
                self._changed.notify_all()

    def look(self) -> None:
        """Something is over."""
        with self._changed:
            self._changed.notify_all()

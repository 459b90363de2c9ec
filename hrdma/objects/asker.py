"""Which node keeps the entry of an object, and asking it: questions are repeated when that node changes.

The directory is sharded by rendezvous hashing: each node gets a score from its number and the object's id; the highest
keeps the entry, the second its backup. When the first dies the second is the highest, with nothing to agree on. Every
question is idempotent, so after a change of view those without an answer are simply asked again.

A node scores highest for the names that begin with its number, which are those of objects that its clients did not name:
mostly they ask about them too, and then no message crosses the network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count
from typing import Any

__all__ = ["Asker", "Body", "keepers"]

Body = dict[str, Any]


@lru_cache(maxsize=1 << 16)
def keepers(name: str, nodes: tuple[int, ...]) -> tuple[int, ...]:
    """The node that keeps the entry of this object and, where there is more than one node, its backup."""

    def score(node: int) -> tuple[bool, bytes]:
        return name.startswith(f"{node:x}-"), hashlib.blake2b(f"{node}/{name}".encode(), digest_size=8).digest()

    return tuple(sorted(nodes, key=score, reverse=True)[:2])


class Asker:
    """Questions of this node to the directory."""

    def __init__(self, send: Callable[[int, Body], None]) -> None:
        self._send = send
        self._nodes: tuple[int, ...] = ()
        self._numbers = count(1)
        self._open: dict[int, tuple[Body, Callable[[Body], None]]] = {}

    def ask(self, verb: str, name: str, then: Callable[[Body], None], **body: Any) -> int:
        """Asks the keeper of an object; `then` gets the answer, in the control thread. Returns the question's number."""
        number = next(self._numbers)
        question = {"verb": verb, "id": name, "n": number, **body}
        self._open[number] = (question, then)
        if self._nodes:
            self._send(keepers(name, self._nodes)[0], question)
        return number

    def tell(self, verb: str, name: str, **body: Any) -> None:
        """Tells the keeper something that needs no answer."""
        if self._nodes:
            self._send(keepers(name, self._nodes)[0], {"verb": verb, "id": name, **body})

    def forget(self, number: int) -> None:
        """The answer is not wanted any more."""
        found = self._open.pop(number, None)
        if found is not None:
            self.tell("forget", found[0]["id"], question=number)

    def answered(self, number: int, body: Body) -> None:
        found = self._open.pop(number, None)
        if found is not None:
            found[1](body)

    def view(self, nodes: Sequence[int]) -> None:
        """The nodes changed: asks again what is open, later where there are none now."""
        self._nodes = tuple(nodes)
        if not nodes:
            return
        for question, _ in list(self._open.values()):
            self._send(keepers(question["id"], self._nodes)[0], question)

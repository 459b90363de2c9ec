"""Small objects that a node lays out for the clients of its host: memory that they read, without asking it.

    client            its own node                          client            its own node
      |  get -------------> |  wakes up                       |  reads what the node laid out when it came
      |  <----------------- |                                 |

An object of up to 64 KiB whose entry is here is on the shelf from when it exists until it is deleted or the nodes change. Of so
many the shelf has the last (`hr/shelf.h`): what is not there is asked for as ever, which is right in every case. What is there
holds for less time than it takes until a node that stands still is counted as lost, and only as long as the node has the number
that the client knows; a client also looks whether its node is gone.

A reduction without a name, of objects that are all on the shelf, is made by the client that asks for it: the node is told
the result, and whoever asked has it already. The others have it as soon as the node does; from then on that client too hears from
the node whether it still exists. How far the node has heard it is on the shelf as well.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import time
from collections.abc import Sequence
from typing import Protocol

from hrdma import _core
from hrdma.control.loop import Loop
from hrdma.objects import kernels
from hrdma.objects.asker import Body
from hrdma.objects.store import Segment

__all__ = ["Shelf", "Shelved"]

HOLD = 0.4  # heartbeats for which what is there holds: a node that stands still is counted as lost after twice as many
FOR_EVER = 1e9  # seconds

Found = tuple[bytes, bytes]  # description and content

_encode = json.JSONEncoder(separators=(",", ":")).encode


@functools.lru_cache(maxsize=64)
def _meta(text: bytes) -> Body:
    """The description of an object, of which many have the same."""
    found: Body = json.loads(text)
    return found


class Owner(Protocol):
    """What a shelf needs of its node."""

    loop: Loop

    @property
    def me(self) -> int: ...
    def nodes(self) -> tuple[int, ...]: ...
    def at_hand(self, name: str) -> Body | None: ...


class Shelf:
    """A node's. Everything runs in its control thread."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._segment = Segment("shelf", {"nbytes": _core.SHELF_BYTES}, "")
        self._shelf = _core.Shelf(self._segment.map, True)
        self._places = set(range(_core.SHELF_PLACES))
        self.reader = self._segment.reader  #: descriptor, for clients

    def known(self, name: str) -> None:
        """What there is to say of an object has changed."""
        found = self._owner.at_hand(name)
        if found is None:
            self._shelf.remove(name)
        else:
            self._shelf.put(name, _encode(found["meta"]).encode(), found["inline"])

    def viewed(self) -> None:
        """The nodes have changed: what is known now comes when all have told what they have."""
        self._shelf.clear()
        self._hold()

    def _hold(self) -> None:
        """A node that is alone goes on by itself: nobody counts it as lost."""
        loop, alone = self._owner.loop, len(self._owner.nodes()) < 2
        self._shelf.hold(self._owner.me, FOR_EVER if alone else HOLD * loop.heartbeat)
        if alone:
            loop.cancel("hold")
        else:
            loop.at("hold", time.monotonic() + HOLD / 2 * loop.heartbeat, self._hold)

    def place(self) -> int | None:
        """For a client, where it sees how far it was heard; None where there are too many."""
        place = self._places.pop() if self._places else None
        if place is not None:
            self._shelf.hear(place, 0)
        return place

    def hear(self, place: int, number: int) -> None:
        """What that client said is known up to this number."""
        self._shelf.hear(place, max(number, self._shelf.heard(place)))

    def leave(self, place: int) -> None:
        self._places.add(place)

    def close(self) -> None:
        self._shelf.hold(0, 0.0)
        self._segment.close()


class Shelved:
    """The shelf as a client sees it, and what that client has made of it.

    Parameters
    ----------
    descriptor : int
        Of the shelf; it is closed.
    home : str
        Number of the node, in hexadecimal digits.
    place : int or None
        This client's.
    """

    def __init__(self, descriptor: int, home: str, place: int | None) -> None:
        try:
            memory = mmap.mmap(descriptor, _core.SHELF_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._shelf, self._home, self._place = _core.Shelf(memory), int(home, 16), place
        self._made: dict[str, tuple[int, Found]] = {}

    def take(self, names: Sequence[str]) -> list[tuple[Body, bytes]] | None:
        """Description and content of each, where all of them are there."""
        found = self._found(names)
        return None if found is None else [(_meta(meta), content) for meta, content in found]

    def _found(self, names: Sequence[str]) -> list[Found] | None:
        # What the node had not heard of a moment ago was not deleted then; what it had is on the shelf if anywhere.
        heard = self._shelf.heard(self._place) if self._place is not None and self._made else 0
        there = self._shelf.take(names, self._home)
        if there is None:
            return None
        found = [each or self._unheard(name, heard) for name, each in zip(names, there)]
        return None if None in found else found  # type: ignore[return-value]

    def _unheard(self, name: str, heard: int) -> Found | None:
        number, found = self._made.get(name, (0, None))
        return found if number > heard else None

    def reduce(self, body: Body) -> Body:
        """What is to be told of a reduction beyond what it is: its result, where all objects of it are there.

        Nothing where they cannot be reduced: the node says why.
        """
        if self._place is None or body["count"] < len(body["refs"]):
            return {}
        found = self._found(body["refs"])
        if found is None or any(meta != found[0][0] for meta, _ in found):
            return {}
        meta = _meta(found[0][0])
        try:
            kernels.check(body["op"], meta["dtype"])
        except (TypeError, ValueError):
            return {}
        return {"meta": meta, "inline": kernels.reduced(body["op"], meta, [content for _, content in found])}

    def made(self, name: str, number: int, what: Body) -> None:
        """The node was told of a result, with the question of this number."""
        if "inline" not in what or self._place is None:
            return
        heard = self._shelf.heard(self._place)
        for old, (when, _) in list(self._made.items()):
            if when <= heard:
                self._made.pop(old, None)
        self._made[name] = number, (_encode(what["meta"]).encode(), what["inline"])

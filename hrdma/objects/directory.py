"""One node's shard of the directory: what is known of the objects whose entries it keeps, and the questions about them.

An entry has *facts*, which the backup holds too before a question about them is answered (content of small objects, what
was deleted, what a reduction shall be and what went into it), and *soft state* (copies, waiting questions), which the
nodes themselves know best. When the view changes, soft state is thrown away and every node tells it again; a shard answers
nothing until all nodes of the view have said that they have told everything (`synced`). Then all facts are here, and only
then are copies held against them: who was away may have what was deleted or made anew meanwhile, and is told that it goes.
There is one way to recover, and it is the same whether a node joined, left or died.

Facts have a version that is larger in each later view: what was decided while a node was away prevails over what that node
decided last, which nobody may have heard.

A question that cannot be answered yet waits in its entry and is tried again whenever the entry changes; whoever asked keeps
the deadline and withdraws it (`forget`).

`gen` names one making of an object's bytes: the put, or the attempt of a reduction. Bytes of different makings never mix.
Everything runs in the control thread; there are no sockets here and the clock is the owner's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from hrdma.objects.asker import Body, keepers
from hrdma.objects.broadcast import Copies, Copy

__all__ = ["Directory", "Entry", "Owner"]

QUESTIONS = frozenset(["put", "unput", "have", "have_piece", "leave", "drop", "locate", "peek", "watch"])
QUESTIONS |= frozenset(["delete", "contributors", "reduce", "forget"])
TOMBSTONES = 1 << 14  # deleted ids remembered
CHANGES = 32  # bits of a version that count the changes of one view; those above are its epoch


class Reducing(Protocol):
    """A reduction as its entry sees it."""

    @property
    def making(self) -> str: ...
    def begin(self) -> None: ...
    def view(self, nodes: tuple[int, ...]) -> None: ...
    def whole(self, node: int, then: Callable[[], object]) -> bool: ...
    def heard(self, src: int, verb: str, body: Body) -> None: ...
    def stop(self) -> None: ...


class Owner(Protocol):
    """What the shard needs of its node."""

    def send(self, node: int, body: Body) -> None: ...
    def known(self, entry: Entry) -> None: ...
    def reduction(self, entry: Entry) -> Reducing: ...


@dataclass
class Entry:
    """What is known of one object."""

    id: str
    version: int = 0
    meta: Body | None = None  #: fact: kind, dtype, shape, nbytes
    gen: str = ""  #: fact
    owner: int | None = None  #: fact: the node of the client with which it goes
    committed: bool = False  #: fact: all of it existed once
    inline: bytes | None = None  #: fact: content of a small object
    deleted: bool = False  #: fact
    spec: Body | None = None  #: fact: op, refs, count, node of a reduction whose result this is
    parts: list[str] | None = None  #: fact: the objects in that result
    error: list[str] | None = None  #: fact: [kind, text]: why there will be none
    copies: Copies = field(default_factory=Copies)
    pieces: list[Copies] = field(default_factory=list)  #: of each piece, of a result that is made in pieces
    waiting: list[tuple[int, Body]] = field(default_factory=list)
    reducing: Reducing | None = None
    held: bool = False  #: nobody hears what is in it before the backup does, which could find something else

    FACTS = ("version", "meta", "gen", "owner", "committed", "deleted", "spec", "parts", "error")

    def facts(self) -> Body:
        """A message with them."""
        facts = {name: getattr(self, name) for name in self.FACTS}
        return {"verb": "facts", "id": self.id, "facts": facts, "inline": self.inline}

    @property
    def lost(self) -> bool:
        return self.committed and self.inline is None and not self.copies.alive


class Directory:
    """The entries that this node keeps, as keeper or as backup."""

    def __init__(self, owner: Owner, me: int) -> None:
        self._owner = owner
        self.me = me
        self.entries: dict[str, Entry] = {}
        self._nodes: tuple[int, ...] = ()
        self._unsynced: set[int] = set()
        self._epoch = 0
        self._held: list[tuple[int, Body]] = []
        self._copies: list[tuple[int, Body]] = []  # told, and not yet held against the facts
        self._deleted: OrderedDict[str, None] = OrderedDict()
        self._acks: dict[tuple[str, int], Callable[[], object]] = {}

    @property
    def settled(self) -> bool:
        return not self._unsynced

    # views

    def view(self, me: int, nodes: tuple[int, ...], epoch: int = 1) -> None:
        """The nodes changed: hands facts to those who keep them now, and forgets what will be told again.

        With no nodes, this one is about to join again: it keeps its facts until it knows to whom they go.
        """
        self.me, self._nodes, self._epoch = me, nodes, epoch
        self._unsynced = set(nodes)
        self._held.clear()
        self._copies.clear()
        self._acks.clear()
        for name, entry in list(self.entries.items()):
            keep = keepers(name, nodes) if nodes else ()
            entry.waiting.clear()
            entry.copies, entry.pieces = Copies(), [Copies() for _ in entry.pieces]
            if entry.version:
                for node in keep:
                    if node != me:
                        self._owner.send(node, entry.facts())
            if entry.reducing is not None and keep[:1] != (me,):
                entry.reducing.stop()
                entry.reducing = None
            if (nodes and me not in keep) or not (entry.version or entry.reducing):
                del self.entries[name]
                self._deleted.pop(name, None)  # who keeps it now knows

    def synced(self, node: int) -> None:
        """A node has told all it has. When all have, questions are answered again."""
        if node not in self._unsynced:
            return
        self._unsynced.discard(node)
        if self._unsynced:
            return
        copies, self._copies = self._copies, []
        for src, body in copies:
            self._copy(src, body)
        for entry in list(self.entries.values()):
            if keepers(entry.id, self._nodes)[0] == self.me:
                if entry.reducing is not None:
                    entry.reducing.view(self._nodes)
                elif entry.spec and entry.parts is None and entry.error is None and not entry.deleted:
                    # What the last keeper began counts no more.
                    entry.gen, entry.meta, entry.copies, entry.pieces = "", None, Copies(), []
                    entry.reducing = self._owner.reduction(entry)
                    entry.reducing.begin()
        held, self._held = self._held, []
        for src, body in held:
            self.heard(src, body)
        for entry in list(self.entries.values()):
            entry.held = False  # all facts have been told
            self.wake(entry)

    # messages

    def heard(self, src: int, body: Body) -> None:
        """A message about an object that this node keeps."""
        verb = body["verb"]
        if verb in ("facts", "acked"):
            getattr(self, "_" + verb)(src, body)
            return
        if verb == "copy":
            self._copies.append((src, body))
            return
        if not self.settled:
            self._held.append((src, body))
            return
        entry = self._entry(body["id"])
        if verb == "summing":
            if entry.reducing is None or entry.reducing.making != body["making"]:
                anew = entry.gen != body["making"]
                self._owner.send(src, {"verb": "unsum", "id": entry.id, "making": body["making"], "anew": anew})
            return
        if verb in ("absorbed", "summed", "missing", "failed"):
            if entry.reducing is not None:
                entry.reducing.heard(src, verb, body)
            return
        if verb not in QUESTIONS:
            raise ValueError(f"unknown verb {verb!r}")
        if not getattr(self, "_" + verb)(entry, src, body):
            entry.waiting.append((src, body))

    def _entry(self, name: str) -> Entry:
        entry = self.entries.get(name)
        if entry is None:
            entry = self.entries[name] = Entry(name)
        return entry

    def _answer(self, src: int, body: Body, **answer: Any) -> bool:
        self._owner.send(src, {"verb": "answer", "n": body["n"], **answer})
        return True

    def wake(self, entry: Entry) -> None:
        """What may be said of it has changed: tries again what waits."""
        self._owner.known(entry)
        waiting, entry.waiting = entry.waiting, []
        for src, body in waiting:
            if not getattr(self, "_" + body["verb"])(entry, src, body):
                entry.waiting.append((src, body))
        self._tidy(entry)

    def _tidy(self, entry: Entry) -> None:
        """Nothing is kept of what was only asked about."""
        if not (entry.version or entry.copies.of or entry.waiting or entry.reducing or entry.gen):
            self.entries.pop(entry.id, None)

    def changed(self, entry: Entry, then: Callable[[], object] | None = None) -> None:
        """Facts changed: `then` runs when the backup has them; questions that wait are tried again."""
        entry.version = max(entry.version, self._epoch << CHANGES) + 1
        keep = keepers(entry.id, self._nodes)
        if len(keep) == 1:
            if then is not None:
                then()
        else:
            if then is not None:
                self._acks[entry.id, entry.version] = then
            self._owner.send(keep[1], {**entry.facts(), "ack": then is not None})
        self.wake(entry)

    def _facts(self, src: int, body: Body) -> None:
        facts = body["facts"]
        entry = self._entry(body["id"])
        if facts["version"] > entry.version:
            if entry.reducing is not None:  # begun while its keeper was away, which had got further
                entry.reducing.stop()
                entry.reducing = None
            for name in Entry.FACTS:
                setattr(entry, name, facts[name])
            entry.inline = body["inline"]
            self._remember(entry)
        if body.get("ack"):
            self._owner.send(src, {"verb": "acked", "id": body["id"], "version": facts["version"]})

    def _acked(self, src: int, body: Body) -> None:
        then = self._acks.pop((body["id"], body["version"]), None)
        if then is not None:
            then()

    def _copy(self, src: int, body: Body) -> None:
        """What a node has of an object, told after a change of view."""
        entry = self._entry(body["id"])
        stale = body["gen"] != entry.gen and (entry.committed or entry.spec is not None)
        if entry.deleted or (stale and body["complete"] and "piece" not in body):
            self._owner.send(src, {"verb": "purge", "id": entry.id, "gen": body["gen"]})
            return
        if stale:
            return  # a fetch or a sum that will hear of it by itself
        if "piece" in body:
            if body["gen"] == entry.gen and entry.pieces:
                entry.pieces[body["piece"]].of[src] = Copy(body["complete"], body["producing"], body["via"])
            return
        if body["complete"] or body["producing"]:
            if not entry.gen or not entry.committed:
                entry.gen, entry.meta = body["gen"], body["meta"]
            entry.committed = entry.committed or body["complete"]
        if body["producing"] and entry.parts is not None and body["gen"] == entry.gen:
            self._owner.send(src, {"verb": "counts", "id": entry.id, "gen": entry.gen})
            entry.copies.completed(src)
            return
        if body["complete"] or body["producing"] or not entry.gen or body["gen"] == entry.gen:
            entry.copies.of[src] = Copy(body["complete"], body["producing"], body["via"])

    # questions: each returns whether it was answered

    def _put(self, entry: Entry, src: int, body: Body) -> bool:
        if entry.spec is not None:
            return self._answer(src, body, error=["value", f"{entry.id!r} is the result of a reduction"])
        if entry.committed and not entry.lost and not entry.deleted:
            if entry.gen == body["gen"]:
                return self._answer(src, body, ok=True)
            return self._answer(src, body, exists=True)
        mine = entry.gen == body["gen"]
        if not mine and any(copy.producing for copy in entry.copies.of.values()):
            return False
        entry.deleted, entry.committed = False, False
        self._remember(entry)
        entry.gen, entry.meta, entry.inline = body["gen"], body["meta"], body.get("inline")
        entry.owner = src if body.get("own") else None
        if not mine:
            entry.copies = Copies()
        if entry.inline is not None:
            entry.committed = True
            self.changed(entry, lambda: self._answer(src, body, ok=True))
            return True
        entry.copies.of[src] = Copy(False, producing=True)
        if entry.version:  # what is known of the one before holds no more, for the backup either
            self.changed(entry, lambda: self._answer(src, body, ok=True))
        else:
            self._answer(src, body, ok=True)
            self.wake(entry)
        return True

    def _unput(self, entry: Entry, src: int, body: Body) -> bool:
        if entry.gen == body["gen"] and not entry.committed:
            entry.copies, entry.gen, entry.meta = Copies(), "", None
            self.wake(entry)
        return True

    def _have(self, entry: Entry, src: int, body: Body) -> bool:
        if entry.gen != body["gen"] or entry.deleted:
            return self._answer(src, body, stale=True)
        making = entry.reducing
        if making is not None and not making.whole(src, lambda: self._answer(src, body, ok=True)):
            return False  # until the sum counts: its root may yet die and begin anew
        for copies in (entry.copies, *entry.pieces):
            copies.completed(src)
        if making is not None:
            self.wake(entry)
        elif entry.committed:
            self._answer(src, body, ok=True)
            self.wake(entry)
        else:
            entry.committed = True
            self.changed(entry, lambda: self._answer(src, body, ok=True))
        return True

    def _have_piece(self, entry: Entry, src: int, body: Body) -> bool:
        if entry.gen == body["gen"] and entry.pieces:
            entry.pieces[body["piece"][0]].completed(src)
            self.wake(entry)
        return True

    def _leave(self, entry: Entry, src: int, body: Body) -> bool:
        for copies in (entry.copies, *entry.pieces):
            copy = copies.of.get(src)
            if copy is not None and not copy.complete and not copy.producing:
                copies.remove(src)
                self.wake(entry)
        return True

    def _drop(self, entry: Entry, src: int, body: Body) -> bool:
        spare = len(entry.copies.complete) > 1 and src in entry.copies.complete
        fed = any(copy.via == src and not copy.complete for copy in entry.copies.of.values())
        if spare and not fed:
            entry.copies.remove(src)
        return self._answer(src, body, ok=spare and not fed)

    def _locate(self, entry: Entry, src: int, body: Body) -> bool:
        if entry.held:
            return False
        if self._ended(entry, src, body):
            return True
        if entry.inline is not None:
            return self._answer(src, body, meta=entry.meta, inline=entry.inline)
        copies, piece = entry.copies, body.get("piece")
        if piece is not None and body["gen"] == entry.gen:
            if entry.pieces and entry.pieces[piece[0]].alive:
                copies = entry.pieces[piece[0]]
        elif entry.pieces and not copies.complete:
            return self._answer(src, body, meta=entry.meta, gen=entry.gen, pieces=len(entry.pieces))
        sender = copies.grant(src, body.get("failed", ())) if copies.alive else None
        if sender is None:
            return False
        return self._answer(src, body, meta=entry.meta, gen=entry.gen, sender=sender)

    def _peek(self, entry: Entry, src: int, body: Body) -> bool:
        """Of a client of another host: the content of a small object, as soon as it exists. Of anything else, nothing."""
        if entry.held:
            return False
        if entry.inline is not None:
            return self._answer(src, body, meta=entry.meta, inline=entry.inline)
        nothing = entry.deleted or entry.error is not None or entry.lost
        return (nothing or bool(entry.gen)) and self._answer(src, body)

    def _watch(self, entry: Entry, src: int, body: Body) -> bool:
        """Answered when all of it exists, or at once; a patient watcher waits for a lost object to be made again."""
        if entry.held:
            return False
        if entry.inline is not None:
            inline = entry.inline if body.get("content") else b""
            return self._answer(src, body, meta=entry.meta, inline=inline)
        if entry.copies.complete:
            return self._answer(src, body, meta=entry.meta, node=entry.copies.complete[0])
        if not body.get("patient") and self._ended(entry, src, body):
            return True
        if not body.get("now"):
            return False
        self._tidy(entry)
        return self._answer(src, body, absent=True)

    def _ended(self, entry: Entry, src: int, body: Body) -> bool:
        if entry.deleted:
            return self._answer(src, body, error=["lost", f"object {entry.id} was deleted"])
        if entry.error is not None:
            return self._answer(src, body, error=entry.error)
        if entry.lost and entry.reducing is None:
            return self._answer(src, body, error=["lost", f"object {entry.id} is lost: no copy of it is left"])
        return False

    def _delete(self, entry: Entry, src: int, body: Body) -> bool:
        if body.get("gen", entry.gen) != entry.gen:  # its owner's end: the name is another object's by now, or nobody's
            self.wake(entry)
            return self._answer(src, body, ok=True)
        if entry.reducing is not None:
            entry.reducing.stop()
            entry.reducing = None
        told = {node for copies in (entry.copies, *entry.pieces) for node in copies.of}
        if entry.owner is not None:
            told.add(entry.owner)
        for node in told:
            self._owner.send(node, {"verb": "purge", "id": entry.id, "gen": entry.gen})
        entry.copies, entry.pieces, entry.owner = Copies(), [], None
        entry.deleted, entry.committed = True, False
        entry.meta = entry.inline = entry.spec = entry.parts = entry.error = None
        entry.gen = ""
        self._remember(entry)
        self.changed(entry, lambda: self._answer(src, body, ok=True))
        return True

    def _remember(self, entry: Entry) -> None:
        """Keeps count of what is deleted: of so much only the last is known."""
        self._deleted.pop(entry.id, None)
        if entry.deleted:
            self._deleted[entry.id] = None
        while len(self._deleted) > TOMBSTONES:
            old, _ = self._deleted.popitem(last=False)
            if not self.entries[old].waiting:
                del self.entries[old]

    def _contributors(self, entry: Entry, src: int, body: Body) -> bool:
        if entry.held:
            return False
        if entry.parts is not None:
            return self._answer(src, body, parts=entry.parts)
        if entry.committed and entry.spec is None:
            return self._answer(
                src, body, error=["value", f"{entry.id!r} was put, it is not the result of a reduction"]
            )
        return self._ended(entry, src, body)

    def _reduce(self, entry: Entry, src: int, body: Body) -> bool:
        spec = {key: body[key] for key in ("op", "refs", "count")}
        if entry.spec is not None:
            same = all(entry.spec[key] == spec[key] for key in spec)
            if same:
                return self._answer(src, body, ok=True)
            return self._answer(src, body, error=["value", f"{entry.id!r} is the result of another reduction"])
        if entry.committed or entry.gen:
            return self._answer(src, body, error=["value", f"{entry.id!r} exists already"])
        entry.deleted = False
        self._remember(entry)
        entry.spec = {**spec, "node": src, "everywhere": body["everywhere"]}
        entry.owner = src if body.get("own") else None
        if "inline" in body:  # whoever asks had all of them, and has made it
            entry.meta, entry.inline, entry.gen = body["meta"], body["inline"], body["gen"]
            entry.parts, entry.committed = spec["refs"], True
            self.changed(entry, lambda: self._answer(src, body, ok=True))
            return True
        entry.reducing = self._owner.reduction(entry)
        before = entry.version
        entry.reducing.begin()
        if entry.version == before:
            self.changed(entry, lambda: self._answer(src, body, ok=True))
        else:  # it has ended, and the backup is being told of all of it
            self._after(entry, lambda: self._answer(src, body, ok=True))
        return True

    def _after(self, entry: Entry, then: Callable[[], object]) -> None:
        """Runs `then` when the backup has what it was told last."""
        known = self._acks.pop((entry.id, entry.version), None)
        if known is None:
            then()
            return

        def both() -> None:
            known()
            then()

        self._acks[entry.id, entry.version] = both

    def _forget(self, entry: Entry, src: int, body: Body) -> bool:
        number = body["question"]
        entry.waiting = [(node, other) for node, other in entry.waiting if (node, other["n"]) != (src, number)]
        copy = entry.copies.of.get(src)
        if copy is not None and not copy.complete and not copy.producing and copy.via is None:
            entry.copies.remove(src)
        self._tidy(entry)
        return True

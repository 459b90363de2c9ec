"""Clients of this host at their node: a Unix socket each, whose end is the end of the client.

Packets are control frames; a descriptor travels beside the frame that it belongs to. The socket has an abstract name, so that
nothing is left in the file system. A client proves the job token as nodes do; without a token it must be of the same user.

    request   {"n", "verb", ...}             any number at a time, also in one packet
    answer    {"n", ...} or {"n", "error"}   once each, when it is known; "cancel" ends the wait for one
    news      {"n": 0, "nodes"}              the nodes have changed
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

from hrdma.control.trust import Admission, Gate
from hrdma.control.wire import FrameError, Kind, decode, encode, frame_limit
from hrdma.log import logger
from hrdma.objects.asker import Body
from hrdma.objects.node import Node
from hrdma.objects.packets import pack, unpack
from hrdma.objects.store import Segment

__all__ = ["LIMIT", "Sessions", "local_name"]

LIMIT = frame_limit(1)
VERBS = frozenset(
    [
        "put",
        "progress",
        "commit",
        "abandon",
        "get",
        "release",
        "watch",
        "delete",
        "contributors",
        "reduce",
        "cancel",
        "info",
    ]
)  #: what a client may ask
BACKLOG = 4096  # answers that a client may leave unread
RETRY = 0.02  # seconds until answers that did not fit are tried again


def local_name(key: bytes, cluster: str, node: str) -> str:
    """The abstract socket name of a node: the same for all processes of this host that mean the same one."""
    text = f"{key.hex()}/{cluster}/{node}/{os.getuid()}"
    return "\0hrdma-objects-" + hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


class Sessions:
    """All clients of one node. Everything runs in the node's control thread."""

    def __init__(self, node: Node, name: str, *, linger: float | None) -> None:
        self.node = node
        self._linger = linger
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._listener.bind(name)
            self._listener.listen(256)
        except OSError:
            self._listener.close()
            raise
        self._sessions: dict[int, _Session] = {}
        self.deserted: Callable[[], None] = lambda: None
        self.gate = Gate(node.key, LIMIT, 1, open_to_all=True, send=self._send_raw)
        self.secret = node.key != bytes(32)
        node.purged, node.changed = self._purged, self._viewed
        node.post(self._open)

    def _open(self) -> None:
        self.node.loop.watch(self._listener.fileno(), self._accept)
        self._check_deserted()

    def _send_raw(self, identity: bytes, frame: bytes) -> None:
        session = self._sessions.get(int.from_bytes(identity, "big"))
        if session is not None:
            session.push(frame)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setblocking(False)
            pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if not self.secret and uid not in (0, os.getuid()):
                logger.warning("objects: dropped a client of user %d: without a job token only this user may come", uid)
                sock.close()
                continue
            session = _Session(self, sock, pid)
            self._sessions[sock.fileno()] = session
            self.node.loop.watch(sock.fileno(), session.readable)

    def _purged(self, name: str, gen: str) -> None:
        for session in self._sessions.values():
            session.purged(name, gen)

    def _viewed(self) -> None:
        for session in self._sessions.values():
            session.viewed()

    def ended(self, session: _Session) -> None:
        self._sessions.pop(session.descriptor, None)
        self._check_deserted()

    def _check_deserted(self) -> None:
        if not self._sessions and self._linger is not None:
            self.node.loop.at("deserted", time.monotonic() + self._linger, self._leave)

    def _leave(self) -> None:
        if not self._sessions:
            self.deserted()

    def close(self) -> None:
        """Hangs up on all clients."""

        def shut() -> None:
            self.node.loop.unwatch(self._listener.fileno())
            self._listener.close()
            self._linger = None
            for session in list(self._sessions.values()):
                session.end()

        if not self.node.post(shut):
            self._listener.close()

    def holders(self) -> str:
        """Which clients view what, for a store that is full."""
        found = [session.views() for session in self._sessions.values()]
        return "; ".join(text for text in found if text)


class _Session:
    """One client."""

    def __init__(self, owner: Sessions, sock: socket.socket, pid: int) -> None:
        self._owner, self._node = owner, owner.node
        self._sock, self.descriptor, self._pid = sock, sock.fileno(), pid
        self._known = False
        self._place: int | None = None  # on the shelf
        self._over = False
        self._pinned: dict[int, Segment] = {}
        self._pins = count(1)
        self._writing: dict[int, Segment] = {}  # by the number of the put: a name may be deleted and put anew meanwhile
        self._owned: dict[str, str | None] = {}  # the making of each that is this client's; None: a reduction
        self._cancels: dict[int, Callable[[], None]] = {}
        self._answers: list[Body] = []  # of this turn
        self._unsent: deque[tuple[bytes, int | None]] = deque()

    def views(self) -> str:
        names = sorted({segment.name for segment in self._pinned.values()})
        return f"process {self._pid} views {', '.join(names[:4])}" if names else ""

    # packets

    def readable(self) -> None:
        for _ in range(64):
            try:
                frame = self._sock.recv(LIMIT)
            except BlockingIOError:
                return
            except OSError:
                frame = b""
            if not frame:
                self.end()
                return
            try:
                self._take(frame)
            except (FrameError, AttributeError, KeyError, TypeError, ValueError) as error:
                logger.warning("objects: process %d sent a malformed request: %r", self._pid, error)
                self.end()
            if self._over:
                return

    def _take(self, frame: bytes) -> None:
        if not self._known:
            identity = self.descriptor.to_bytes(8, "big")
            peer = self._owner.gate.receive(identity, frame, self.descriptor, f"process {self._pid}", lambda: True)
            if peer is not None:
                self._welcome(peer)
            return
        kind, body = decode(frame, limit=LIMIT)
        for request in unpack(body) if kind is Kind.OBJECT else ():
            if request["verb"] not in VERBS:
                raise ValueError(f"unknown verb {request['verb']!r}")
            getattr(self, "_on_" + request["verb"])(request)

    def _welcome(self, peer: Admission) -> None:
        self._known, self._place = True, self._node.shelf.place()
        cluster = self._node.cluster
        body = {
            "job": cluster.job,
            "capacity": self._node.store.capacity,
            "node": f"{cluster.me:x}",
            "nodes": self._nodes(),
            "place": self._place,
        }
        self.push(encode(Kind.WELCOME, body, limit=LIMIT), self._node.shelf.reader)

    def _nodes(self) -> list[tuple[int, str, int]]:
        return [(node, card["host"], card["data"]) for node, card in self._node.cluster.nodes.items()]

    def viewed(self) -> None:
        """The nodes changed: it is told, though it did not ask."""
        if self._known:
            self.push(pack([{"n": 0, "nodes": self._nodes()}], limit=LIMIT)[0])

    def push(self, frame: bytes, descriptor: int | None = None) -> None:
        """Sends a packet, later when the client does not read now. A descriptor is duplicated while it waits."""
        if self._over:
            return
        if not self._unsent and self._write(frame, descriptor):
            return
        if len(self._unsent) >= BACKLOG:
            self.end()
            return
        self._unsent.append((frame, None if descriptor is None else os.dup(descriptor)))
        self._node.later(f"client {self.descriptor}", RETRY, self._flush)

    def _write(self, frame: bytes, descriptor: int | None) -> bool:
        try:
            socket.send_fds(self._sock, [frame], [] if descriptor is None else [descriptor])
        except BlockingIOError:
            return False
        except OSError:
            pass  # its end is on the way
        return True

    def _flush(self) -> None:
        while self._unsent and not self._over:
            frame, descriptor = self._unsent[0]
            if not self._write(frame, descriptor):
                self._node.later(f"client {self.descriptor}", RETRY, self._flush)
                return
            self._unsent.popleft()
            if descriptor is not None:
                os.close(descriptor)

    def _answer(self, n: int, body: Body, descriptor: int | None = None) -> None:
        self._cancels.pop(n, None)
        body = {**body, "n": n}
        if "error" in body and body["error"][0] == "full" and (text := self._owner.holders()):
            body["error"] = ["full", f"{body['error'][1]}; {text}"]
        if descriptor is not None:
            self.push(pack([body], limit=LIMIT)[0], descriptor)
            return
        if not self._answers:
            self._node.loop.last(self._push_answers, first=True)
        self._answers.append(body)

    def _push_answers(self) -> None:
        answers, self._answers = self._answers, []
        for frame in pack(answers, limit=LIMIT):
            self.push(frame)

    def end(self) -> None:
        """The client is gone: gives up what it wrote, waited for and viewed, and frees what it owned."""
        if self._over:
            return
        self._over = True
        self._node.loop.unwatch(self.descriptor)
        self._node.loop.cancel(f"client {self.descriptor}")
        self._sock.close()
        for cancel in list(self._cancels.values()):
            cancel()
        for segment in self._writing.values():
            self._node.puts.undo(segment)
        for segment in self._pinned.values():
            self._node.store.unpin(segment)
        for name, gen in self._owned.items():
            self._disown(name, gen)
        if self._place is not None:
            self._node.shelf.leave(self._place)
        for _, descriptor in self._unsent:
            if descriptor is not None:
                os.close(descriptor)
        self._owner.ended(self)

    # requests

    def _ask(self, body: Body, verb: str, **more: Any) -> None:
        n = body["n"]
        question = self._node.asker.ask(verb, body["id"], lambda answer: self._answer(n, answer), **more)
        self._cancels[n] = lambda: self._node.asker.forget(question)

    def _on_put(self, body: Body) -> None:
        n, gen = body["n"], secrets.token_hex(6)

        def then(answer: Body, segment: Segment | None) -> None:
            if "ok" in answer:
                self._own(body, gen)
            if segment is None:
                self._answer(n, answer)
            elif self._over:
                self._node.puts.undo(segment)
            else:
                self._writing[n] = segment
                self._answer(n, {"ok": True, "writing": n}, segment.writer)

        self._node.puts.begin(body["id"], body["meta"], gen, body.get("inline"), bool(body.get("own")), then)

    def _own(self, body: Body, gen: str | None) -> None:
        """It was made by this client, and goes with it where it asked for that."""
        if not body.get("own"):
            return
        if self._over:
            self._disown(body["id"], gen)
        else:
            self._owned[body["id"]] = gen

    def _disown(self, name: str, gen: str | None) -> None:
        self._node.asker.ask("delete", name, lambda _: None, **({} if gen is None else {"gen": gen}))

    def purged(self, name: str, gen: str) -> None:
        """Somebody has deleted it."""
        if self._owned.get(name, gen) in (gen, None):
            self._owned.pop(name, None)

    def _on_progress(self, body: Body) -> None:
        self._writing[body["writing"]].advance(body["progress"])

    def _on_commit(self, body: Body) -> None:
        n = body["n"]
        self._node.puts.commit(self._writing.pop(body["writing"]), lambda answer: self._answer(n, answer))

    def _on_abandon(self, body: Body) -> None:
        segment = self._writing.pop(body["writing"], None)  # None: it had been committed
        if segment is not None:
            self._node.puts.undo(segment)

    def _on_get(self, body: Body) -> None:
        n, name = body["n"], body["id"]
        if (found := self._node.at_hand(name)) is not None:
            self._answer(n, found)
            return

        if body.get("now") and not ((there := self._node.store.objects.get(name)) and there.complete):
            self._answer(n, {"absent": True})
            return

        def then(answer: Body) -> None:
            if self._over:
                return  # nobody would give back what is pinned
            segment = self._node.store.objects.get(name)
            if "error" in answer or "inline" in answer:
                self._answer(n, answer)
            elif segment is None or not segment.complete or not segment.pin():
                self._node.want(name, then)
            else:
                pin = next(self._pins)
                self._pinned[pin] = segment
                self._answer(n, {"meta": segment.meta, "pin": pin}, segment.reader)

        self._cancels[n] = lambda: self._node.unwant(name, then)
        self._node.want(name, then)

    def _on_release(self, body: Body) -> None:
        segment = self._pinned.pop(body["pin"], None)  # a client that was interrupted may say so twice
        if segment is not None:
            self._node.store.unpin(segment)

    def _on_watch(self, body: Body) -> None:
        self._ask(body, "watch", **({"now": True} if body.get("now") else {}))

    def _on_delete(self, body: Body) -> None:
        self._ask(body, "delete")

    def _on_contributors(self, body: Body) -> None:
        self._ask(body, "contributors")

    def _on_reduce(self, body: Body) -> None:
        self._own(body, None)
        flags = {name: body.get(name) is True for name in ("own", "everywhere")}
        what = {name: body[name] for name in ("op", "refs", "count")}
        if body.get("quiet"):  # nobody waits for the answer
            if "inline" in body:  # the client has made it
                what |= {"meta": body["meta"], "inline": body["inline"], "gen": secrets.token_hex(6)}
            self._node.asker.ask("reduce", body["id"], lambda answer: self._heard(body["n"]), **what, **flags)
        else:
            self._ask(body, "reduce", **what, **flags)

    def _heard(self, n: int) -> None:
        if self._place is not None and not self._over:
            self._node.shelf.hear(self._place, n)

    def _on_cancel(self, body: Body) -> None:
        cancel = self._cancels.pop(body["question"], None)
        if cancel is not None:
            cancel()

    def _on_info(self, body: Body) -> None:
        node = self._node
        info = {
            "node": f"{node.cluster.me:x}",
            "address": f"tcp://{node.cluster.host}:{node.cluster.port}",
            "nodes": [f"{other:x}" for other in node.cluster.nodes],
            "epoch": node.cluster.epoch,
            "objects": len(node.store.objects),
            "used": node.store.used,
            "holders": node.store.holders(),
            "capacity": node.store.capacity,
            "evicted": node.store.evicted,
            "sent": node.carriers.sent,
            "ways": node.carriers.stats(),
            "received": node.received,
            "asked": node.lines.answered,
            "latency": node.latency,
            "bandwidth": node.bandwidth,
        }
        self._answer(body["n"], {"info": info})

"""Clients that ask the keeper of a small object themselves: a TCP connection from a client to a node of another host.

    client            its own node            keeper
      |  get -------------> |  locate ----------> |        by way of two nodes, and of libzmq's threads in both
      |  <----------------- |  <----------------- |
      |  peek ------------------------------------>|        by its own line
      |  <----------------------------------------|

An object of up to 64 KiB is in the entry that its keeper holds, so whoever knows the keeper has it by one question. The line
answers with the content or with "elsewhere": it is large, lost, deleted, or this node is not its keeper; then the client asks
its own node as ever, which is right in every case. So what a client believes of the nodes only decides whom it asks first. Its
node tells it when the nodes change, and it hangs up on those that are gone: a node that was frozen must not be heard.

A client takes to it after small objects of one keeper in a row. The handshake is that of a stream (`streams.py`).
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol

from hrdma.control.loop import Loop
from hrdma.control.wire import FrameError, decode, frame_limit
from hrdma.errors import HrdmaError
from hrdma.log import logger
from hrdma.objects.asker import Body, keepers
from hrdma.objects.packets import pack, unpack
from hrdma.objects.streams import open_line

__all__ = ["Lines", "Shortcuts"]

LIMIT = frame_limit(1)
LENGTH = struct.Struct(">I")
READ = 1 << 18
UNSENT = 1 << 24  # bytes that a client may leave unread
RETRY = 0.02  # seconds until what did not fit is tried again
ENOUGH = 2  # small objects of a keeper in a row after which a client calls it
HOLD_OFF = 5.0  # seconds for which a keeper that could not be reached is not called again
OPENING = 1.0  # seconds that calling it may take


def _framed(messages: Sequence[Body]) -> bytes:
    return b"".join(LENGTH.pack(len(frame)) + frame for frame in pack(messages, limit=LIMIT))


class _Frames:
    """Takes messages out of what arrives."""

    def __init__(self) -> None:
        self._data = b""

    def take(self, data: bytes) -> list[Body]:
        """The messages that are whole by now.

        Raises
        ------
        KeyError, TypeError, ValueError
            It is something else.
        """
        data = self._data + data if self._data else data
        found: list[Body] = []
        at = 0
        while len(data) - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(data, at)
            if length > LIMIT:
                raise FrameError(f"a frame of {length} bytes, above the limit of {LIMIT}")
            end = at + LENGTH.size + length
            if end > len(data):
                break
            found += unpack(decode(data[at + LENGTH.size : end], limit=LIMIT)[1])
            at = end
        self._data = data[at:]
        return found


# --- the node's side: in its control thread ---


class Owner(Protocol):
    """What lines need of their node."""

    loop: Loop

    def peek(self, asker: int, body: Body) -> bool:
        """Passes a question on to the directory; False where this node is not the one to ask."""

    def unpeek(self, asker: int, name: str, number: int) -> None:
        """Its answer is not wanted any more."""


class Lines:
    """All clients of other hosts that ask this node. To the directory they are askers with negative numbers."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._lines: dict[int, _Line] = {}
        self._numbers = count(1)
        self.answered = 0  #: contents that were sent

    def adopt(self, sock: socket.socket, release: Callable[[], None]) -> None:
        """Serves a client that has proved the token, until it hangs up."""
        number = -next(self._numbers)
        self._lines[number] = _Line(self, self._owner, number, sock, release)

    def send(self, number: int, body: Body) -> None:
        line = self._lines.get(number)
        if line is not None:
            self.answered += "inline" in body
            line.answer(body)

    def viewed(self) -> None:
        """The nodes changed: the directory has forgotten what was asked."""
        for line in list(self._lines.values()):
            line.elsewhere()

    def ended(self, number: int) -> None:
        self._lines.pop(number, None)

    def close(self) -> None:
        for line in list(self._lines.values()):
            line.end()


class _Line:
    """One of them."""

    def __init__(
        self, lines: Lines, owner: Owner, number: int, sock: socket.socket, release: Callable[[], None]
    ) -> None:
        self._lines, self._owner, self._number = lines, owner, number
        self._sock, self._release = sock, release
        self._descriptor = sock.fileno()
        self._frames = _Frames()
        self._open: dict[int, str] = {}
        self._answers: list[Body] = []  # of this turn
        self._unsent = b""
        self._over = False
        sock.setblocking(False)
        owner.loop.watch(self._descriptor, self._readable)

    def _readable(self) -> None:
        try:
            data = self._sock.recv(READ)
            messages = self._frames.take(data)
            for message in messages:
                self._asked(message["verb"], message["id"], message["n"])
        except BlockingIOError:
            return
        except OSError:
            data = b""
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            logger.warning("objects: a client of another host sent a malformed question: %r", error)
            data = b""
        if not data:
            self.end()

    def _asked(self, verb: str, name: str, number: int) -> None:
        if type(name) is not str or type(number) is not int or verb not in ("peek", "forget"):
            raise ValueError(f"verb {verb!r}, name {name!r}, number {number!r}")
        if verb == "forget":
            if self._open.pop(number, None) is not None:
                self._owner.unpeek(self._number, name, number)
            return
        self._open[number] = name
        if not self._owner.peek(self._number, {"verb": "peek", "id": name, "n": number}):
            self.answer({"n": number})

    def answer(self, body: Body) -> None:
        """With the content, or without: then it is elsewhere."""
        if self._open.pop(body["n"], None) is None:
            return
        if not self._answers:
            self._owner.loop.last(self._flush, first=True)
        self._answers.append({key: body[key] for key in ("n", "meta", "inline") if "inline" in body or key == "n"})

    def elsewhere(self) -> None:
        for number in list(self._open):
            self.answer({"n": number})

    def _flush(self) -> None:
        answers, self._answers = self._answers, []
        self._unsent += _framed(answers)
        self._write()

    def _write(self) -> None:
        if self._over:
            return
        try:
            self._unsent = self._unsent[self._sock.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.end()
            return
        if len(self._unsent) > UNSENT:
            self.end()
        elif self._unsent:
            self._owner.loop.at(f"line {self._number}", time.monotonic() + RETRY, self._write)

    def end(self) -> None:
        if self._over:
            return
        self._over = True
        self._owner.loop.unwatch(self._descriptor)
        self._owner.loop.cancel(f"line {self._number}")
        for number, name in self._open.items():
            self._owner.unpeek(self._number, name, number)
        self._open.clear()
        self._lines.ended(self._number)
        self._sock.close()
        self._release()


# --- the client's side: in whichever thread asks ---


class Shortcuts:
    """The lines of one client, to the keepers of which it has had small objects.

    Parameters
    ----------
    key : bytes
        Of the job token.
    home : str
        Number of this client's own node, in hexadecimal digits.
    """

    def __init__(self, key: bytes, home: str) -> None:
        self._key, self._home = key, int(home, 16)
        self._places: dict[int, tuple[str, int]] = {}
        self._nodes: tuple[int, ...] = ()
        self._named: dict[str, int] = {}
        self._small: dict[int, int] = {}  # how many in a row
        self._calls: dict[int, _Call] = {}
        self._not_before: dict[int, float] = {}
        self._lock = threading.RLock()  # a signal handler may close what it interrupts

    def viewed(self, nodes: Sequence[Sequence[Any]]) -> None:
        """The nodes of the job: number, host and port of each. Hangs up on those that are gone, whoever waits there."""
        with self._lock:
            self._places = {int(node): (str(host), int(port)) for node, host, port in nodes}
            self._nodes = tuple(self._places)
            self._named = {f"{node:x}": node for node in self._nodes}
            for node in self._calls.keys() - self._places.keys():
                self._calls.pop(node).shut()

    def _keeper(self, name: str) -> int | None:
        """Whom to ask: a node of another host."""
        if len(self._nodes) < 2:
            return None
        node = self._named.get(name.partition("-")[0]) or keepers(name, self._nodes)[0]
        return None if node == self._home else node

    def noted(self, name: str, small: bool) -> None:
        """What this client's node found out about an object."""
        node = self._keeper(name)
        if node is not None:
            self._small[node] = self._small.get(node, 0) + 1 if small else 0

    def ask(self, names: Sequence[str], deadline: float) -> dict[str, Body]:
        """The descriptions and contents that one keeper has of all these; what is missing is to be had from this client's node.

        Waits for objects that do not exist yet, until `deadline` on the monotonic clock or until the keeper cannot say.
        """
        node = self._keeper(names[0])
        if node is None or self._small.get(node, 0) < ENOUGH:
            return {}
        if any(self._keeper(name) != node for name in names[1:]):
            return {}
        call = self._calls.get(node) or self._called(node, deadline)
        if call is None or not call.lock.acquire(blocking=False):
            return {}
        try:
            found = call.ask(names, deadline)
        except (OSError, ValueError, KeyError, TypeError):
            self._hang_up(node, call)
            return {}
        except BaseException:
            self._hang_up(node, call)
            raise
        finally:
            call.lock.release()
            if call.over:
                call.sock.close()
        if len(found) < len(names):
            self._small[node] = 0
        return found

    def _called(self, node: int, deadline: float) -> _Call | None:
        now = time.monotonic()
        place = self._places.get(node)
        if place is None or self._not_before.get(node, 0.0) > now or deadline - now < OPENING:
            return None
        try:
            sock = open_line(self._key, place, self._home, OPENING)
        except (OSError, HrdmaError, ValueError, KeyError):
            self._not_before[node] = now + HOLD_OFF
            return None
        call = _Call(sock)
        with self._lock:
            if node not in self._places or node in self._calls:
                call.shut()
                return self._calls.get(node)
            self._calls[node] = call
        return call

    def _hang_up(self, node: int, call: _Call) -> None:
        with self._lock:
            if self._calls.get(node) is call:
                del self._calls[node]
        self._small[node] = 0
        call.shut()

    def drop(self) -> None:
        """In a forked child: closes its copies, whose ends stay the parent's."""
        for call in self._calls.values():
            call.sock.close()
        self._calls = {}

    def close(self) -> None:
        with self._lock:
            calls, self._calls, self._places, self._nodes = self._calls, {}, {}, ()
        for call in calls.values():
            call.shut()


class _Call:
    """One line; whoever has the lock asks, one at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.lock = threading.Lock()
        self.over = False
        self._frames = _Frames()
        self._numbers = count(1)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def ask(self, names: Sequence[str], deadline: float) -> dict[str, Body]:
        asked = {next(self._numbers): name for name in names}
        self.sock.sendall(_framed([{"verb": "peek", "id": name, "n": n} for n, name in asked.items()]))
        found: dict[str, Body] = {}
        while asked:
            left = deadline - time.monotonic()
            if not self._poll.poll(math.ceil(min(max(0.0, left), 3600.0) * 1000)):
                if left > 0:
                    continue
                # The answer may yet come: whoever asks next skips it.
                self.sock.sendall(_framed([{"verb": "forget", "id": name, "n": n} for n, name in asked.items()]))
                return found
            data = self.sock.recv(READ)
            if not data:
                raise ConnectionError("the keeper hung up")
            for answer in self._frames.take(data):
                name = asked.pop(answer["n"], None)
                if name is not None and "inline" in answer:
                    found[name] = answer
        return found

    def shut(self) -> None:
        """Whoever waits for an answer finds that there will be none. Who has the lock closes the socket."""
        self.over = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        if self.lock.acquire(blocking=False):
            self.sock.close()
            self.lock.release()

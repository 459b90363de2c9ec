"""A process's connection to the node of its host: questions out, answers in, and the descriptors that come with them.

Whoever calls sends, and whoever waits for an answer receives: it takes the role, settles what comes, its own request among
the rest, and returns without a change of threads. While nobody waits a thread has the role, for requests that are awaited or
polled, and for the end of the node. The role is a lock; the thread sleeps on an epoll where a waiter mutes the socket.

A waiter may be the main thread, where a signal handler can raise after any call. What must not be lost then, the lock and a
packet, is stored by the very call that gets it: ``kept.extend(map(call, (argument,)))`` comes back to the interpreter only
when the list has the result. What a waiter leaves undone in that way the thread does.
"""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, TypeVar

from hrdma.control.trust import Caller, TokenError
from hrdma.control.wire import FrameError, Kind, decode
from hrdma.errors import ObjectLost, ObjectStoreFull, PeerError, RequestError
from hrdma.objects.asker import Body
from hrdma.objects.lines import Shortcuts
from hrdma.objects.packets import pack, unpack
from hrdma.objects.request import Request
from hrdma.objects.sessions import LIMIT
from hrdma.objects.shelf import Shelved

__all__ = ["Connection", "nothing"]

DONTWAIT = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
LONGEST = 2**31 - 1  # ms that poll() can wait at once
GONE = "the node of this host is gone: its objects with no copy elsewhere are lost; connect again"
INTERRUPTED = "the thread that received the answer was interrupted: ask again"

Self = TypeVar("Self", bound="Connection")
Finish = Callable[[Body, "int | None"], Any]

_open: weakref.WeakSet[Connection] = weakref.WeakSet()


def _forked() -> None:
    # A child's copy of the socket would keep the connection up when the parent dies.
    for connection in list(_open):
        connection.drop()


os.register_at_fork(after_in_child=_forked)


class Connection:
    """The socket, what was asked and not answered, and the thread that receives while nobody waits.

    Parameters
    ----------
    sock : socket
        Connected to the node.
    key : bytes
        Of the job token.
    timeout, deadline : float
        Default of calls in seconds; when the handshake has to be over.
    owner : bool
        What this connection makes goes with it.
    """

    def __init__(
        self, sock: socket.socket, key: bytes, timeout: float, deadline: float, *, owner: bool = False
    ) -> None:
        self._owner = owner
        self._sock = sock
        self._timeout = timeout
        self._pid = os.getpid()
        self._numbers = count(1)
        self._pending: dict[int, tuple[Request, Finish]] = {}
        self._released: deque[int] = deque()
        self._lock = threading.Lock()
        self._role = threading.RLock()  # a signal handler or callback of whoever has it may wait too
        self._driver: int | None = None  # the thread that has it to wait
        self._inbox: list[tuple[Any, ...]] = []  # packets and answers; of whoever has the role
        self._gone: str | None = None
        welcome, shelf = self._shake_hands(key, deadline)
        self.job, self.capacity, self._home = welcome["job"], welcome["capacity"], welcome["node"]
        self._shelved = Shelved(shelf, self._home, welcome["place"])
        self._shortcuts = Shortcuts(key, self._home)
        self._shortcuts.viewed(welcome["nodes"])
        self._wake, self._nudge = self._event(), self._event()
        self._epoll = select.epoll()
        self._epoll.register(sock, select.EPOLLIN)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(target=self._receive, name="hrdma-objects", daemon=True)
        self._thread.start()
        _open.add(self)

    def _event(self) -> int:
        made = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # With the client and not before: whoever still rings would ring at somebody else's descriptor.
        weakref.finalize(self, os.close, made).atexit = False
        return made

    def drop(self) -> None:
        """In a forked child: closes its copy of the connection. Views stay valid."""
        self._gone = self._gone or "this client is the parent's"
        self._sock.close()
        self._shortcuts.drop()

    @property
    def closed(self) -> bool:
        """Whether it can be used no more: closed here, by the node's end, or by a fork."""
        return self._gone is not None

    def close(self) -> None:
        """Ends the connection. Objects stay; arrays that were got stay valid."""
        if os.getpid() == self._pid:
            self._end("this client is closed")
            if threading.get_ident() not in (self._thread.ident, self._driver):  # they end once they go on
                self._thread.join(5.0)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _shake_hands(self, key: bytes, deadline: float) -> tuple[Body, int]:
        """The welcome, and the descriptor of the shelf."""
        caller = Caller(key, LIMIT, {"rank": 0, "purpose": "client"}, {"pid": self._pid})
        packet = caller.hello
        while True:
            self._sock.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                self._sock.send(packet)
                answer, beside, _, _ = self._sock.recvmsg(LIMIT, socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC)
                kind, body = decode(answer, limit=LIMIT)
            except TimeoutError:
                raise TimeoutError("the node of this host does not answer; it may be stopped") from None
            except (OSError, FrameError):
                raise PeerError("the node of this host hung up", operation="connect", phase="connect") from None
            if kind is Kind.WELCOME:
                self._sock.settimeout(None)
                return body, struct.unpack("i", beside[0][2])[0]
            if kind is not Kind.CHALLENGE:
                raise PeerError(str(body.get("text")), operation="connect", phase="connect")
            try:
                packet = caller.answer(body)
            except TokenError as error:
                raise PeerError(f"the node does not hold our job token: {error}", operation="connect") from None

    # sending

    def _call(self, verb: str, body: Body, timeout: float, finish: Finish) -> Request:
        return self._ask([(verb, body, finish)], timeout)[0]

    def _ask(self, questions: Iterable[tuple[str, Body, Finish]], timeout: float) -> list[Request]:
        """Asks all in one packet."""
        if os.getpid() != self._pid:
            raise ValueError("used after fork: call hrdma.objects.connect() in the child")
        messages = self._given_back()
        requests = []
        for verb, body, finish in questions:
            number = next(self._numbers)
            request = Request(f"{verb} {body.get('id', '')}".strip(), timeout, self._withdraw, self._drive, number)
            self._pending[number] = (request, finish)
            if self._gone is not None:
                self._pending.pop(number, None)
                raise PeerError(self._gone, operation=verb)
            messages.append({"verb": verb, "n": number, **body})
            requests.append(request)
        self._say(*messages)
        return requests

    def _tell(self, verb: str, body: Body) -> int:
        """Asks for what nobody waits for. Returns the question's number."""
        if os.getpid() != self._pid:
            raise ValueError("used after fork: call hrdma.objects.connect() in the child")
        if self._gone is not None:
            raise PeerError(self._gone, operation=verb)
        number = next(self._numbers)
        self._say(*self._given_back(), {"verb": verb, "n": number, "quiet": True, **body})
        return number

    def _release(self, pin: int) -> None:
        # Called wherever the last reference goes, so it takes no lock and sends nothing itself.
        self._released.append(pin)
        if self._gone is None and os.getpid() == self._pid:
            os.eventfd_write(self._wake, 1)

    def _given_back(self) -> list[Body]:
        """Says which views are gone: before the next request, which may need the room."""
        messages: list[Body] = []
        while self._released:
            try:
                messages.append({"verb": "release", "pin": self._released.popleft()})
            except IndexError:  # another thread was quicker
                break
        return messages

    def _withdraw(self, requests: Sequence[Request]) -> None:
        numbers = [request.number for request in requests if self._pending.pop(request.number, None) is not None]
        if numbers and self._gone is None:
            os.eventfd_write(self._nudge, 1)  # another thread may be waiting for one of them
            self._say(*({"verb": "cancel", "question": number} for number in numbers))

    def _say(self, *messages: Body) -> None:
        try:
            frames = pack(messages, limit=LIMIT)
        except ValueError as error:
            raise ValueError(f"a request is too long: give fewer references at once ({error})") from None
        for frame in frames:
            try:
                self._sock.send(frame)
            except OSError as error:
                if error.errno == errno.EMSGSIZE:
                    raise ValueError(
                        f"a request of {len(frame)} bytes is too long: give fewer references at once"
                    ) from None
                self._end(GONE)

    def _hung_up(self) -> bool:
        """Whether the node is gone, though nobody has heard of it yet."""
        try:
            return not self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    # receiving

    def _drive(self, request: Request, seconds: float) -> None:
        """Receives for all in the thread of one who waits, until its request is done or the time is over."""
        if self._gone is not None:
            return
        deadline = time.monotonic() + seconds
        held: list[bool] = []
        try:
            held.extend(map(self._role.acquire, (False,)))
            if not held[0] or self._gone is not None:
                return  # another has the role, and will settle this request too
            self._driver = threading.get_ident()
            try:
                self._epoll.modify(self._sock, 0)
                self._receive_for(request, deadline)
            finally:
                self._epoll.modify(self._sock, select.EPOLLIN)
        finally:
            if held and held[0]:
                self._driver = None
                self._role.release()
                if self._inbox:
                    os.eventfd_write(self._wake, 1)

    def _receive_for(self, request: Request, deadline: float) -> None:
        waiter = select.poll()  # one each: a signal handler may be inside another's
        waiter.register(self._sock, select.POLLIN)
        waiter.register(self._nudge, select.POLLIN)
        while not request.done and self._gone is None:
            left = deadline - time.monotonic()
            ready = () if self._inbox else waiter.poll(math.ceil(min(max(0.0, left * 1000), LONGEST)))
            if any(descriptor == self._nudge for descriptor, _ in ready):
                _clear(self._nudge)
            if self._inbox or ready:
                self._take()
            if left <= 0:
                return

    def _receive(self) -> None:
        while self._gone is None:
            self._epoll.poll()
            _clear(self._wake)
            if released := self._given_back():
                self._say(*released)
            if self._role.acquire(blocking=False):
                try:
                    self._take()
                finally:
                    self._role.release()
        for number in list(self._pending):
            request, _ = self._pending.pop(number, (None, None))
            if request is not None:
                request.settle(error=PeerError(self._gone, operation="objects", phase="transfer", transport="shm"))
        with self._role:
            self._sock.close()
            self._epoll.close()

    def _take(self) -> None:
        """What another left, and one packet, where there is one. By whoever has the role."""
        try:
            # socket.recv_fds would ignore the flags.
            self._inbox.extend(map(self._sock.recvmsg, (LIMIT,), (socket.CMSG_LEN(4),), (DONTWAIT,)))
        except BlockingIOError:
            pass
        except OSError:
            self._end(GONE)
        while self._inbox:
            self._settle_first()

    def _settle_first(self) -> None:
        first = self._inbox[0]
        if len(first) == 4:  # a packet: its answers take its place
            packet, beside, _, _ = first
            if not packet:
                self._end(GONE)
            descriptor = struct.unpack("i", beside[0][2])[0] if beside else None
            answers = unpack(decode(packet, limit=LIMIT)[1]) if packet else []
            self._inbox[:1] = [(answer, descriptor) for answer in answers]
            return
        answer, descriptor = first
        request, finish = self._pending.get(answer["n"], (None, nothing))
        if answer["n"] == 0:
            self._shortcuts.viewed(answer["nodes"])
        del self._inbox[0]  # so far all could be done again; from here on it is done once
        if request is None:  # it was withdrawn: what came with the answer goes back
            if descriptor is not None:
                os.close(descriptor)
            self._refuse(answer)
            return
        finished = False
        try:
            self._pending.pop(answer["n"], None)
            error = _error(*answer["error"]) if "error" in answer else None
            value = finish(answer, descriptor) if error is None else None
            finished = True
            if not request.settle(value, error):  # it was withdrawn meanwhile
                self._refuse(answer)
        except BaseException as raised:
            ordinary = isinstance(raised, Exception)
            if request.settle(error=raised if ordinary else RequestError(INTERRUPTED)):
                self._refuse(answer)
            if finished or not ordinary:  # of a callback, or of whoever receives and not of the one that asked
                raise

    def _refuse(self, answer: Body) -> None:
        """Gives back what came with an answer that nobody gets."""
        if "pin" in answer:
            self._say({"verb": "release", "pin": answer["pin"]})
        if "writing" in answer:
            self._say({"verb": "abandon", "writing": answer["writing"]})

    def _end(self, why: str) -> None:
        """The thread, which no signal interrupts, then tells those who wait. May be done again, where it was interrupted."""
        with self._lock:
            self._gone = self._gone or why
        self._shortcuts.close()
        try:
            os.eventfd_write(self._wake, 1)
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def _clear(event: int) -> None:
    try:
        os.eventfd_read(event)
    except BlockingIOError:
        pass


def nothing(_answer: Body, _descriptor: int | None) -> None:
    return None


def _error(kind: str, text: str) -> Exception:
    if kind == "lost":
        return ObjectLost(text)
    kinds: dict[str, type[Exception]] = {"full": ObjectStoreFull, "value": ValueError, "type": TypeError}
    return kinds.get(kind, RequestError)(text)

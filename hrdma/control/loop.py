"""The control thread: waits for sockets, timers and posted calls, and hands what happens to the current phase.

One thread per process does all of the control plane's work, so that its state needs no locks. What is to be done next
depends on the phase, an object with the methods of `Phase`: first a rank joins (`hrdma.control.join`), then it is a
member (`hrdma.control.membership`). The thread sleeps without a timeout unless a timer is set: an idle job costs its
heartbeats, and those are libzmq's.
"""

from __future__ import annotations

import collections
import functools
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from hrdma.control.link import Call, Link, Listener, Waker
from hrdma.control.trust import Admission, Caller, Gate, TokenError
from hrdma.control.wire import FrameError, Kind, ProtocolError, decode, encode, frame_limit
from hrdma.log import logger

__all__ = ["Dialog", "Loop", "Phase"]


class Phase(Protocol):
    """What the thread tells the phase. All methods run in the control thread and never block."""

    def admitted(self, peer: Admission) -> None:
        """A peer proved the token at our listener; it stands for no rank until the phase says so."""

    def heard(self, rank: int, kind: Kind, body: dict[str, Any]) -> None:
        """A message of a rank connected to our listener."""

    def hung_up(self, ranks: list[int]) -> None:
        """The connections of ranks to our listener ended: all that are known at once are told at once."""

    def answered(self, dialog: Dialog, kind: Kind, body: dict[str, Any]) -> None:
        """A message of the rank that we called."""

    def refused(self, dialog: Dialog, error: TokenError | ProtocolError) -> None:
        """The rank that we called does not hold our token, or speaks another version."""

    def ended(self, dialog: Dialog) -> None:
        """The connection to the rank that we called ended, or never came up."""


class Dialog:
    """A call to a rank's listener and the handshake on it."""

    def __init__(self, rank: int, call: Call, caller: Caller) -> None:
        self.rank = rank
        self.call = call
        self.caller = caller
        self.welcome = False
        call.send(caller.hello)


class Loop:
    """The thread and what it waits for. `post`, `stop` and `drop` may be called from any thread."""

    def __init__(
        self, size: int, key: bytes, heartbeat: float, *, open_to_all: bool, crashed: Callable[[Exception], None]
    ) -> None:
        self.size = size
        self.limit = frame_limit(size)
        self._crashed = crashed
        self.heartbeat = heartbeat
        self.key = key
        self.open_to_all = open_to_all
        self.phase: Phase | None = None
        self.listener: Listener | None = None
        self.gate: Gate | None = None
        self._context = zmq.Context(io_threads=1)
        self._context.setsockopt(zmq.MAX_SOCKETS, max(1024, 8 * size))
        # An epoll on what sockets of libzmq signal with: asking each of them what it has, as zmq.Poller does, takes longer
        # than most messages. What they signal is only that something has happened since they were last used.
        self._epoll = select.epoll()
        self._dialogs: dict[Dialog, None] = {}
        self._watched: dict[int, Callable[[], None]] = {}
        self._timers: dict[str, tuple[float, Callable[[], None]]] = {}
        self._posted: collections.deque[Callable[[], None]] = collections.deque()
        self._last: collections.deque[Callable[[], None]] = collections.deque()
        self._lock = threading.Lock()
        self._waker: Waker | None = Waker()
        self._epoll.register(self._waker.descriptor, select.EPOLLIN)
        self._stopping = False
        self._linger = 0.0
        self._thread = threading.Thread(target=self._run, name="hrdma-control", daemon=True)

    # Any thread

    def start(self, first: Callable[[], None]) -> None:
        """Starts the thread with this call."""
        self.post(first)
        self._thread.start()

    def post(self, call: Callable[[], None]) -> bool:
        """Runs a call in the control thread, soon; False when the thread has ended."""
        with self._lock:
            if self._waker is None:
                return False
            self._posted.append(call)
            self._waker.ring()
            return True

    def forget(self, descriptor: int, timeout: float) -> None:
        """Has the thread `unwatch` it, and waits for that."""
        done = threading.Event()

        def forgotten() -> None:
            self.unwatch(descriptor)
            done.set()

        if self.post(forgotten):
            done.wait(timeout)

    def join(self, timeout: float) -> bool:
        """Waits until the thread has ended; False when it has not."""
        self._thread.join(max(0.0, timeout))
        return not self._thread.is_alive()

    def descriptors(self) -> list[int]:
        """Descriptors of connections and listener, for a forked child to close."""
        links: list[Link] = [dialog.call for dialog in list(self._dialogs)]
        found = [descriptor for link in links for descriptor in list(link.descriptors)]
        if self.listener is not None:
            found += [self.listener.bound, *list(self.listener.descriptors)]
        return found

    def drop(self) -> None:
        """After a fork, in the child: closes the copies of the sockets, so that their ends are those of the parent."""
        for descriptor in self.descriptors():
            try:
                os.close(descriptor)
            except OSError:
                continue
        self._waker = None
        self._dialogs.clear()
        self.listener = None

    # The control thread

    def stop(self, linger: float = 0.0) -> None:
        """Ends the thread after this turn; what was sent has `linger` seconds to leave."""
        self._stopping = True
        self._linger = linger

    def at(self, name: str, when: float, call: Callable[[], None]) -> None:
        """Sets the timer of this name, replacing it; `when` is on the monotonic clock."""
        self._timers[name] = (when, call)

    def last(self, call: Callable[[], None], *, first: bool = False) -> None:
        """Runs a call at the end of this turn, when all that had come has been heard, and what that asks for after it.

        `first`: before those that are there already, as somebody waits for it.
        """
        if first:
            self._last.appendleft(call)
        else:
            self._last.append(call)

    def cancel(self, name: str) -> None:
        self._timers.pop(name, None)

    def watch(self, descriptor: int, call: Callable[[], None]) -> None:
        """Runs a call whenever this descriptor is readable, until `unwatch`."""
        self._watched[descriptor] = call
        self._epoll.register(descriptor, select.EPOLLIN)

    def unwatch(self, descriptor: int) -> None:
        if self._watched.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def open(self, sock: Any) -> Listener:
        """Begins to listen on a socket that listens already."""
        listener = Listener(self._context, sock, self.size, self.heartbeat)
        self.listener = listener
        self.gate = Gate(self.key, self.limit, self.size, open_to_all=self.open_to_all, send=listener.send)
        self._attend(listener)
        return listener

    def _attend(self, link: Link) -> None:
        for signal in link.signals:
            self._epoll.register(signal, select.EPOLLIN)

    def _neglect(self, link: Link) -> None:
        for signal in link.signals:
            self._epoll.unregister(signal)

    def dial(self, rank: int, endpoint: str, hello: dict[str, Any], private: dict[str, Any]) -> Dialog:
        """Calls a rank and begins the handshake; `private` is told it once it has proved the token."""
        caller = Caller(self.key, self.limit, hello, private)
        dialog = Dialog(rank, Call(self._context, endpoint, self.size, self.heartbeat), caller)
        self._dialogs[dialog] = None
        self._attend(dialog.call)
        return dialog

    def hang_up(self, dialog: Dialog, linger: float = 0.0) -> None:
        """Ends a call; the phase is not told."""
        if dialog in self._dialogs:
            del self._dialogs[dialog]
            self._neglect(dialog.call)
            dialog.call.close(linger)

    def frame(self, kind: Kind, body: dict[str, Any]) -> bytes:
        return encode(kind, body, limit=self.limit)

    def say(self, dialog: Dialog, kind: Kind, body: dict[str, Any]) -> None:
        """Sends to a rank that we called."""
        dialog.call.send(self.frame(kind, body))

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception as error:
            # Without this thread nobody would ever be told of a loss: say so, and let the peers see us hang up.
            logger.exception("control: the control thread failed; the other ranks will count this one as lost")
            self._crashed(error)
        finally:
            self._close()

    def _turn(self) -> None:
        wait = None
        if self._pending():
            wait = 0.0
        elif self._timers:
            wait = max(0.0, min(when for when, _ in self._timers.values()) - time.monotonic())
        ready = {descriptor for descriptor, _ in self._epoll.poll(wait)}
        waker = self._waker
        if waker is not None and waker.descriptor in ready:
            waker.clear()
        for _ in range(len(self._posted)):
            self._posted.popleft()()
        for descriptor in ready:
            if descriptor in self._watched:
                self._watched[descriptor]()
        listener = self.listener
        if listener is not None and (listener.pending or not ready.isdisjoint(listener.signals)):
            self._serve_listener()
        for dialog in list(self._dialogs):
            # Serving another may have ended this one.
            if dialog in self._dialogs and (dialog.call.pending or not ready.isdisjoint(dialog.call.signals)):
                self._serve_dialog(dialog)
        now = time.monotonic()
        for name, (when, call) in list(self._timers.items()):
            if when <= now and self._timers.get(name) == (when, call):
                del self._timers[name]
                call()
        while self._last:
            self._last.popleft()()

    def _pending(self) -> bool:
        """Whether messages wait of which nothing is signalled, since they came while the socket was used."""
        links: list[Link] = [dialog.call for dialog in self._dialogs]
        if self.listener is not None:
            links.append(self.listener)
        return any(link.look() for link in links)

    def _serve_listener(self) -> None:
        listener, gate = self.listener, self.gate
        if listener is None or gate is None or self.phase is None:
            return
        events = listener.events()
        strange = []
        for received in listener.receive():
            if self._stopping:
                return
            rank = listener.rank_of(received.identity)
            if rank is None:
                strange.append(received)
                continue
            try:
                kind, body = decode(received.frame, limit=self.limit)
            except FrameError as error:
                gate.note(f"rank {rank}", f"it sent a wrong frame ({error})")
                continue
            self.phase.heard(rank, kind, body)
        for address in listener.strangers():
            gate.note(address, "no frame of this protocol came (a port scanner, or a frame that is too long?)")
        ended = [listener.hung_up(descriptor) for event, descriptor in events if event == zmq.EVENT_DISCONNECTED]
        gone = [rank for rank in ended if rank is not None]
        if gone and not self._stopping:
            self.phase.hung_up(gone)
        for received in strange:
            if self._stopping:
                return
            peer = gate.receive(*received, same_host=functools.partial(listener.same_host, received))
            # Its connection may have ended before its proof is read, and that end is not reported again.
            if peer is not None and peer.descriptor in listener.descriptors:
                self.phase.admitted(peer)

    def _serve_dialog(self, dialog: Dialog) -> None:
        call = dialog.call
        call.poll_events()
        for frame in call.receive():
            if dialog not in self._dialogs or self.phase is None or self._stopping:
                return
            try:
                kind, body = decode(frame, limit=self.limit)
                if kind is Kind.CHALLENGE and not dialog.welcome:
                    call.send(dialog.caller.answer(body))
                    continue
            except (TokenError, ProtocolError) as error:
                self.phase.refused(dialog, error)
                continue
            except FrameError as error:
                logger.warning("control: rank %d sent a wrong frame: %s", dialog.rank, error)
                continue
            if kind is Kind.WELCOME:
                dialog.welcome = True
            if dialog.welcome or kind in (Kind.ABORT, Kind.EXPELLED):
                self.phase.answered(dialog, kind, body)
        if call.down and dialog in self._dialogs and self.phase is not None and not self._stopping:
            self.hang_up(dialog)
            self.phase.ended(dialog)

    def _close(self) -> None:
        with self._lock:
            waker, self._waker = self._waker, None
        for dialog in list(self._dialogs):
            self.hang_up(dialog, self._linger)
        if self.listener is not None:
            self._neglect(self.listener)
            self.listener.close(self._linger)
            self.listener = None
        self._posted.clear()
        self._epoll.close()
        self._context.term()
        if waker is not None:
            waker.close()

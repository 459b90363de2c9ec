"""How ranks meet: rank 0 calls the roll, the others call rank 0, and everybody leaves with the same table or error.

Rank 0 listens at MASTER_ADDR; each other rank first begins to listen itself, on a port of the kernel's choice, then
calls rank 0 until it answers. When all have come, rank 0 sends the table of all cards and endpoints. What goes wrong is
decided in one place and told to all that have come: the same text is raised on each of them.
"""

from __future__ import annotations

import secrets
import socket
import time
from typing import TYPE_CHECKING, Any, Protocol

from hrdma.control.link import listen, resolve, url
from hrdma.control.loop import Dialog, Loop
from hrdma.control.trust import Admission, TokenError
from hrdma.control.wire import Kind, ProtocolError
from hrdma.errors import HrdmaError, PeerError

if TYPE_CHECKING:
    from hrdma.world import World

__all__ = ["Guest", "Joined", "Roster", "failure"]

REDIAL = 0.001  # seconds to the second call where rank 0 is not there yet; each pause is twice the one before,
REDIAL_MOST = 0.02  # and this long at most
RESOLVE = 0.2  # seconds between questions for the name of its host, while nobody knows it
TELL = 1.0  # seconds that rank 0 stays to tell latecomers why there is no job
LINGER = 0.5  # seconds that last messages have to leave


class Joined(Protocol):
    """Who gets the result, in the control thread. `host` is empty for ranks on the host of rank 0."""

    def joined(self, table: dict[str, Any], dialog: Dialog | None, early: dict[int, Admission]) -> None: ...
    def failed(self, error: Exception) -> None: ...


def failure(kind: str, text: str, rank: int = -1) -> Exception:
    """The exception for an ABORT."""
    if kind == "value":
        return ValueError(text)
    if kind == "timeout":
        return TimeoutError(text)
    return PeerError(text, rank=rank, operation="init", phase="init")


def _absent(ranks: list[int], seconds: float, address: str) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:16]) + (", ..." if len(ranks) > 16 else "")
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {shown} did not arrive within {seconds:g} s at {address}"


class _Meeting:
    """What both sides share: the address, the clock."""

    def __init__(self, loop: Loop, owner: Joined, world: World, card: dict[str, Any], deadline: float) -> None:
        self._loop = loop
        self._owner = owner
        self._world = world
        self._card = card
        self._started = time.monotonic()
        self._deadline = deadline
        self._seconds = max(0.1, round(deadline - self._started, 1))
        self._address = f"{world.master_addr}:{world.master_port}"
        self._over = False

    def _resolve(self) -> tuple[socket.AddressFamily, str] | None:
        """The address of rank 0; None when the name is not known, yet."""
        try:
            return resolve(self._world.master_addr, self._world.master_port)
        except OSError as error:
            self._trouble = f"cannot resolve MASTER_ADDR={self._world.master_addr}: {error.strerror or error}"
            return None

    def _fail(self, error: Exception, linger: float = LINGER) -> None:
        if not self._over:
            self._over = True
            self._owner.failed(error)
            self._loop.stop(linger)


class Roster(_Meeting):
    """Rank 0's side."""

    def begin(self) -> None:
        loop, world = self._loop, self._world
        loop.phase = self
        sock = world.listener
        if sock is None:
            found = self._resolve()
            if found is None:
                self._fail(HrdmaError(self._trouble))
                return
            try:
                sock = listen(*found, world.master_port)
            except OSError as error:
                self._fail(
                    HrdmaError(
                        f"rank 0 cannot listen at {self._address}: {error.strerror}; another job, a second rank 0 "
                        "of this one or another program may hold the port: end it, or set MASTER_PORT (or HRDMA_PORT) to a free one on all ranks"
                    )
                )
                return
        loop.open(sock)
        self._arrived: dict[int, dict[str, Any]] = {0: {"card": self._card, "host": "", "port": world.master_port}}
        self._abort_body: dict[str, Any] | None = None
        self._told: set[int] = {0}
        loop.at("join", self._deadline - min(0.05, self._seconds / 20), self._expire)
        self._complete()

    def admitted(self, peer: Admission) -> None:
        gate, listener = self._loop.gate, self._loop.listener
        assert gate is not None and listener is not None
        rank, size = peer.rank, peer.hello.get("size")
        port, card = peer.private.get("port"), peer.private.get("card")
        if peer.hello.get("purpose") != "join" or not isinstance(card, dict) or type(port) is not int:
            gate.note(peer.address, "it wants something else than to join")
            gate.refuse(peer.identity, "this job is not complete yet", kind="peer")
            return
        if self._abort_body is not None:
            self._tell(peer.identity, rank)
            return
        problem = ""
        if size != self._world.size:
            problem = f"rank {rank} was started with a world size of {size}, rank 0 with {self._world.size}"
        elif not 0 <= rank < self._world.size:
            problem = f"rank {rank} is out of range for a world of {self._world.size}"
        elif rank in self._arrived:
            first = "rank 0 itself" if rank == 0 else f"process {self._arrived[rank]['card'].get('pid', '?')}"
            problem = f"two processes claim to be rank {rank}: {first} and process {card.get('pid', '?')}"
        if problem:
            self._abort("value", problem)
            self._tell(peer.identity, rank)
            return
        listener.bind_rank(peer.identity, peer.descriptor, rank)
        # Who reaches rank 0 from its own host is reached by others as rank 0 is: at MASTER_ADDR.
        self._arrived[rank] = {"card": card, "host": "" if peer.same_host else peer.address, "port": port}
        listener.send(peer.identity, self._loop.frame(Kind.WELCOME, {}))
        self._complete()

    def heard(self, rank: int, kind: Kind, body: dict[str, Any]) -> None:
        listener = self._loop.listener
        assert listener is not None
        identity = listener.identity_of(rank)
        if kind is Kind.WHO and identity is not None:
            listener.send(identity, self._loop.frame(Kind.MISSING, {"ranks": self._missing()}))
        elif kind is Kind.GIVE_UP:
            self._abort("timeout", str(body.get("text", f"rank {rank} gave up")))

    def hung_up(self, ranks: list[int]) -> None:
        rank = ranks[0]
        self._abort("peer", f"rank {rank} was lost while the ranks were joining", rank)

    def answered(self, dialog: Dialog, kind: Kind, body: dict[str, Any]) -> None:
        raise AssertionError("rank 0 calls nobody while joining")

    def refused(self, dialog: Dialog, error: TokenError | ProtocolError) -> None:
        raise AssertionError("rank 0 calls nobody while joining")

    def ended(self, dialog: Dialog) -> None:
        raise AssertionError("rank 0 calls nobody while joining")

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._world.size) if rank not in self._arrived]

    def _complete(self) -> None:
        if self._missing() or self._over or self._abort_body is not None:
            return
        self._over = True
        self._loop.cancel("join")
        members = [self._arrived[rank] for rank in range(self._world.size)]
        table = {"members": members, "job": secrets.token_hex(8)}
        listener = self._loop.listener
        assert listener is not None
        frame = self._loop.frame(Kind.TABLE, table)
        for rank in range(1, self._world.size):
            identity = listener.identity_of(rank)
            if identity is not None:
                listener.send(identity, frame)
        self._owner.joined(table, None, {})

    def _expire(self) -> None:
        gate = self._loop.gate
        text = _absent(self._missing(), self._seconds, self._address)
        if gate is not None and gate.wrong_tokens:
            text += " (a peer was refused: its job token differs, see HRDMA_TOKEN)"
        self._abort("timeout", text)

    def _abort(self, kind: str, text: str, rank: int = -1) -> None:
        """No job: tells all that have come, stays a moment for those who are on their way, then fails."""
        if self._over or self._abort_body is not None:
            return
        self._loop.cancel("join")
        self._abort_body = {"kind": kind, "text": text, "rank": rank}
        until = min(time.monotonic() + TELL, self._deadline) if kind == "value" else 0.0
        self._loop.at("abort", until, lambda: self._fail(failure(kind, text, rank)))
        listener = self._loop.listener
        assert listener is not None
        for other in list(self._arrived):
            identity = listener.identity_of(other)
            if identity is not None:
                self._tell(identity, other)

    def _tell(self, identity: bytes, rank: int) -> None:
        listener, body = self._loop.listener, self._abort_body
        assert listener is not None and body is not None
        listener.send(identity, self._loop.frame(Kind.ABORT, body))
        self._told.add(rank)
        if self._told >= set(range(self._world.size)):
            self._loop.at("abort", 0.0, lambda: self._fail(failure(**body)))


class Guest(_Meeting):
    """The side of every other rank."""

    def begin(self) -> None:
        self._loop.phase = self
        self._trouble = ""
        self._pause = REDIAL
        self._dialog: Dialog | None = None
        self._early: dict[int, Admission] = {}
        self._loop.at("ask", self._deadline - min(0.2, self._seconds / 10), self._ask)
        self._call()

    def admitted(self, peer: Admission) -> None:
        self._early[peer.rank] = peer

    def heard(self, rank: int, kind: Kind, body: dict[str, Any]) -> None:
        raise AssertionError("nobody stands for a rank at a guest's listener")

    def hung_up(self, ranks: list[int]) -> None:
        raise AssertionError("nobody stands for a rank at a guest's listener")

    def answered(self, dialog: Dialog, kind: Kind, body: dict[str, Any]) -> None:
        if kind is Kind.TABLE and not self._over:
            self._over = True
            self._loop.cancel("ask")
            self._loop.cancel("join")
            self._owner.joined(body, dialog, self._early)
        elif kind is Kind.ABORT and body.get("kind") == "again":
            self._loop.hang_up(dialog)
            self._trouble = str(body.get("text"))
            self._call_again()
        elif kind is Kind.ABORT:
            self._fail(failure(str(body.get("kind")), str(body.get("text")), int(body.get("rank", -1))))
        elif kind is Kind.MISSING:
            ranks = [int(rank) for rank in body.get("ranks", [])]
            self._give_up(_absent(ranks, self._seconds, self._address))

    def refused(self, dialog: Dialog, error: TokenError | ProtocolError) -> None:
        if isinstance(error, ProtocolError):
            text = f"version mismatch: rank 0 at {self._address} speaks {error}: install the same hrdma for all ranks"
        else:
            self._loop.say(dialog, Kind.GIVE_UP, {"text": "token"})
            text = f"rank 0 at {self._address} holds another job token: HRDMA_TOKEN must be the same on all ranks"
        self._loop.hang_up(dialog, LINGER)
        self._fail(PeerError(text, rank=0, operation="init", phase="init"))

    def ended(self, dialog: Dialog) -> None:
        if self._over:
            return
        if dialog.welcome:
            text = f"rank 0 at {self._address} was lost while the ranks were joining"
            self._fail(PeerError(text, rank=0, operation="init", phase="init"))
            return
        if dialog.call.up:
            self._trouble = "rank 0 hung up"
        elif dialog.call.reached:
            self._trouble = "what listens there is not hrdma, or hung up"
        else:
            self._trouble = "nobody listens there"
        self._call_again()

    def _call(self) -> None:
        found = self._resolve()
        if found is None:
            self._loop.at("redial", time.monotonic() + RESOLVE, self._call)
            return
        family, host = found
        if self._loop.listener is None:
            # Rank 0 proves that an address is reachable; on its host we can be found where it is.
            self._loop.open(listen(family, host, 0))
        assert self._loop.listener is not None
        private = {"card": self._card, "port": self._loop.listener.port}
        hello = {"purpose": "join", "rank": self._world.rank, "size": self._world.size}
        self._dialog = self._loop.dial(0, url(host, self._world.master_port), hello, private)

    def _call_again(self) -> None:
        self._loop.at("redial", time.monotonic() + self._pause, self._call)
        self._pause = min(2 * self._pause, REDIAL_MOST)

    def _ask(self) -> None:
        """Shortly before the deadline: rank 0 may know who is missing."""
        if self._dialog is not None and self._dialog.welcome:
            self._loop.say(self._dialog, Kind.WHO, {})
            self._loop.at("join", self._deadline, lambda: self._give_up("rank 0 does not answer"))
            return
        text = _absent([0], self._seconds, self._address)
        if self._dialog is not None and self._dialog.call.reached and not self._dialog.call.down:
            self._trouble = "what listens there does not answer"
        self._fail(TimeoutError(f"{text} ({self._trouble})" if self._trouble else text))

    def _give_up(self, text: str) -> None:
        if self._dialog is not None:
            self._loop.say(self._dialog, Kind.GIVE_UP, {"text": text})
        self._fail(TimeoutError(text))

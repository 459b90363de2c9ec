"""Which nodes there are: a view, numbered, published by the oldest node; and messages between the nodes.

Every node calls every other (`hrdma.control` links: authenticated, with heartbeats), and speaks on the calls that it made.
The oldest node of the view coordinates: it admits nodes, drops those whose connection ended, and publishes views. When it is
gone the next oldest does so. There is no vote, so that two nodes can go on when one of them dies; the price is that a network
that falls apart leaves a cluster on each side. The oldest of each looks for the nodes that were lost (`hrdma.objects.lookout`): when
they find each other again, those of the smaller cluster, or of the one without the smallest number, join the other, all in one
view: of what only the last to come has, nobody hears that it is lost.

A node that was frozen finds all its connections ended and would count all others as dead. Therefore, before it takes over or
is left alone, a node calls those it misses once more: if one answers that it belongs to a view without this node, and not
smaller than what this node still sees, it has gone on without it, which joins again under a new number, keeping its objects.

Messages carry the epoch of the sender's view. Those of a later view wait for that view here, those of an earlier one are
dropped: what they said is said again after each change (`hrdma.objects.directory`).
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterable
from typing import Any, Protocol

from hrdma.control.link import listen, resolve, url
from hrdma.control.loop import Dialog, Loop
from hrdma.control.trust import Admission, TokenError
from hrdma.control.wire import Kind, ProtocolError
from hrdma.errors import HrdmaError, PeerError
from hrdma.log import logger
from hrdma.objects.asker import Body
from hrdma.objects.lookout import Address, Lookout
from hrdma.objects.packets import pack, unpack

__all__ = ["Cluster", "Member", "address_of", "address_towards"]

REDIAL = 0.05  # seconds between calls to somebody who does not listen yet
REJOIN = 10.0  # seconds, at least, after which a node that was counted as lost, and finds nobody, goes on alone
LINGER = 0.2  # seconds that a last word has to leave

Card = dict[str, Any]


class Member(Protocol):
    """Whom the cluster tells, in the control thread."""

    def viewed(self, nodes: tuple[int, ...]) -> None: ...
    def heard_from(self, node: int, body: Body) -> None: ...
    def failed(self, error: Exception) -> None: ...


def address_of(text: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``."""
    head, _, rest = text.partition("://")
    host, _, port = rest.rpartition(":")
    if head != "tcp" or not host or not port.isdecimal() or not int(port) < 65536:
        raise ValueError(f"{text!r} is no address: it should look like tcp://host:29600")
    return host.strip("[]"), int(port)


class Cluster:
    """This node's place among the nodes. All methods run in the control thread."""

    def __init__(self, loop: Loop, member: Member, data_port: int) -> None:
        self.me = secrets.randbits(62)
        self.job = ""
        self.epoch = 0
        self.nodes: dict[int, Card] = {}  # oldest first
        self.host, self.port = "", 0
        self._loop = loop
        self._member = member
        self._data_port = data_port
        self._dialogs: dict[int, Dialog] = {}
        self._out: dict[int, list[Body]] = {}  # of this turn
        self._unsent: dict[int, list[Body]] = {}
        self._later: list[tuple[int, int, Body]] = []
        self._down: set[int] = set()
        self._seeds: list[Address] = []
        self._deadline = 0.0
        self._joining: Dialog | None = None
        self._company: list[Address] = []  # who joins again with this node
        self._guests: dict[int, tuple[Card, list[Address]]] = {}  # not admitted yet: of their company some are not here
        self._probes: dict[Dialog, int] = {}
        self._asked: set[int] = set()
        self._lookout = Lookout(loop, self._call_lost, self._coordinates)
        loop.phase = self

    # how it begins

    def start(self, address: tuple[str, int], seeds: list[Address], timeout: float) -> None:
        """Listens; founds a cluster, or joins that of the first seed that answers."""
        family, numeric = resolve(*address)
        sock = listen(family, numeric, address[1])
        self.host, self.port = numeric, sock.getsockname()[1]
        self._loop.open(sock)
        self._deadline = time.monotonic() + timeout
        if not seeds:
            self.job = secrets.token_hex(8)
            self._install(1, {self.me: self._card()})
        else:
            self._seeds = seeds
            self._join()

    def _card(self) -> Card:
        return {"host": self.host, "port": self.port, "data": self._data_port}

    def _dial(self, host: str, port: int, *, rank: int, join: bool = False, **more: Any) -> Dialog:
        """Calls a node; under number 0 to ask who the nodes are, without standing for one."""
        hello = {"rank": rank, "purpose": "node", "join": join, "size": 1}
        return self._loop.dial(0, url(host, port), hello, {**self._card(), **more})

    def _call_lost(self, host: str, port: int) -> Dialog:
        """Asks a node that was lost who its nodes are, and says who are here."""
        return self._dial(host, port, rank=0, job=self.job, nodes=list(self.nodes.items()))

    def _join(self) -> None:
        """Asks the next seed who the nodes are."""
        if self.nodes:
            return
        if self._joining is not None:
            self._loop.hang_up(self._joining)
            self._joining = None
        if time.monotonic() > self._deadline and self.job:
            logger.warning("objects: no other node was found: this one goes on alone")
            self._lookout.failures += 1
            self._install(1, {self.me: self._card()})
            return
        if time.monotonic() > self._deadline:
            shown = ", ".join(f"{host}:{port}" for host, port in self._seeds)
            self._member.failed(TimeoutError(f"no node of the cluster answered in time at {shown}"))
            return
        self._loop.at("join", time.monotonic() + self._loop.heartbeat, self._join)
        host, port = self._seeds[0]
        self._seeds = [*self._seeds[1:], self._seeds[0]]
        try:
            _, numeric = resolve(host, port)
        except OSError:
            self._loop.at("join", time.monotonic() + REDIAL, self._join)
            return
        self._joining = self._dial(numeric, port, rank=0)

    def _told_of(self, nodes: list[tuple[int, Card]]) -> None:
        """Asks the oldest node to be admitted: the answer is a view."""
        assert self._joining is not None
        self._loop.hang_up(self._joining)
        self._joining = None
        if not nodes:  # it is joining itself
            self._loop.at("join", time.monotonic() + REDIAL, self._join)
            return
        others = _addresses(card for _, card in nodes)
        self._seeds = [*(seed for seed in self._seeds if seed not in others), *others]
        self._joining = self._dial(*others[0], rank=self.me, join=True, company=self._company)
        self._joining.rank = nodes[0][0]

    def leave(self) -> None:
        """Says goodbye: the others need not wait for heartbeats. The sockets' ends say the same."""
        self.nodes.clear()

    # messages

    @property
    def oldest(self) -> int:
        return next(iter(self.nodes), self.me)

    def send(self, node: int, body: Body) -> None:
        """To a node of the view, in order, at the end of this turn; nothing happens when it is not there any more."""
        if node in self.nodes:
            if not self._out:
                self._loop.last(self._flush)
            self._out.setdefault(node, []).append(body)

    def _flush(self) -> None:
        """What this node says to itself first: it may lead to more for others."""
        while mine := self._out.pop(self.me, None):
            epoch = self.epoch
            for body in mine:
                self._deliver(self.me, epoch, body)
        out, self._out = self._out, {}
        for node, bodies in out.items():
            dialog = self._dialogs.get(node)
            if dialog is not None and dialog.welcome:
                self._say(dialog, bodies)
            else:
                self._unsent.setdefault(node, []).extend(bodies)

    def _say(self, dialog: Dialog, bodies: list[Body]) -> None:
        for frame in pack(bodies, limit=self._loop.limit, e=self.epoch):
            dialog.call.send(frame)

    def heard(self, rank: int, kind: Kind, body: Body) -> None:
        """Of `Phase`: messages of a node that called us."""
        if kind is Kind.OBJECT:
            try:
                epoch, messages = body["e"], unpack(body)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                logger.warning("objects: node %x sent a malformed frame: %r", rank, error)
                return
            for message in messages:
                self._deliver(rank, epoch, message)

    def _deliver(self, node: int, epoch: int, body: Body) -> None:
        try:
            self._heard(node, epoch, body)
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("objects: node %x sent a malformed message: %r", node, error, exc_info=True)

    def _heard(self, node: int, epoch: int, body: Body) -> None:
        verb = body["verb"]
        if verb == "view":
            self._view(body)
        elif verb == "suspect":
            self._suspect(body["accuser"], body["node"])
        elif verb == "met":
            self._met(body["job"], {int(node): card for node, card in body["nodes"]})
        elif epoch > self.epoch:
            self._later.append((node, epoch, body))
        elif epoch == self.epoch and node in self.nodes:
            self._member.heard_from(node, body)

    # views

    def _view(self, body: Body) -> None:
        if body["epoch"] <= self.epoch:
            return
        nodes = {int(node): card for node, card in body["nodes"]}
        if self.me not in nodes:
            self._rejoin(_addresses(nodes.values()))
            return
        self.job = body["job"]
        self._install(body["epoch"], nodes)

    def _install(self, epoch: int, nodes: dict[int, Card]) -> None:
        gone = [card for node, card in self.nodes.items() if node not in nodes]
        self.epoch, self.nodes = epoch, nodes
        if len(nodes) > 1:
            self._lookout.failures = 0
        self._lookout.view(_addresses(gone), _addresses(nodes.values()))
        self._down &= set(nodes)
        for node, dialog in list(self._dialogs.items()):
            if node not in nodes:
                self._loop.hang_up(dialog)
                del self._dialogs[node]
        self._out.clear()
        self._unsent.clear()
        self._asked.clear()
        if self._joining is not None:
            if self._joining.rank in nodes:
                self._dialogs[self._joining.rank] = self._joining
            else:
                self._loop.hang_up(self._joining)
            self._joining = None
        self._loop.cancel("join")
        for node, card in nodes.items():
            if node != self.me and node not in self._dialogs:
                self._dialogs[node] = self._dial(card["host"], card["port"], rank=self.me)
                self._dialogs[node].rank = node
        self._member.viewed(tuple(nodes))
        later, self._later = self._later, []
        for node, when, body in later:
            self._deliver(node, when, body)

    def _coordinates(self) -> bool:
        return bool(self.nodes) and self.oldest == self.me

    def _announce(self, nodes: dict[int, Card]) -> Body:
        """Tells the nodes of this view who those of the next are."""
        body = {"verb": "view", "epoch": self.epoch + 1, "nodes": list(nodes.items()), "job": self.job}
        for node in self.nodes:
            dialog = self._dialogs.get(node)
            if node != self.me and dialog is not None and dialog.welcome:
                self._say(dialog, [body])
        return body

    def _publish(self, nodes: dict[int, Card]) -> None:
        body = self._announce(nodes)
        logger.info("objects: view %d has %d nodes", self.epoch + 1, len(nodes))
        self._install(self.epoch + 1, nodes)
        for node, dialog in self._dialogs.items():
            if not dialog.welcome:  # it has just come: this is the first that it hears
                self._unsent.setdefault(node, []).insert(0, body)

    def _rejoin(self, seeds: list[Address]) -> None:
        logger.warning("objects: this node was counted as lost; it joins again")
        for dialog in [*self._dialogs.values(), *self._probes]:
            self._loop.hang_up(dialog, LINGER)
        self._lookout.hang_up()
        self._lookout.view(seeds, [])
        self._dialogs.clear()
        self._probes.clear()
        left = _addresses(card for node, card in self.nodes.items() if node != self.me and node not in self._down)
        self._company = [address for address in left if address not in seeds]
        self._guests.clear()
        self._down.clear()
        self._later.clear()
        self.me, self.epoch, self.nodes = secrets.randbits(62), 0, {}
        self._member.viewed(())
        self._seeds, self._deadline = seeds, time.monotonic() + max(REJOIN, 4 * self._loop.heartbeat)
        self._join()

    # who comes

    def admitted(self, peer: Admission) -> None:
        """Of `Phase`: a node called us and holds the token."""
        listener = self._loop.listener
        assert listener is not None
        listener.bind_rank(peer.identity, peer.descriptor, peer.rank)
        answer: Body = {"epoch": self.epoch, "job": self.job}
        answer["nodes"] = list(self.nodes.items())
        listener.send(peer.identity, self._loop.frame(Kind.WELCOME, answer))
        if "nodes" in peer.private:
            self._deliver(peer.rank, self.epoch, {"verb": "met", **peer.private})
            return
        if peer.hello.get("join") is True and self._coordinates() and peer.rank not in self.nodes:
            card, company = peer.private, peer.private.get("company", [])
            if not isinstance(card.get("host"), str) or any(type(card.get(key)) is not int for key in ("port", "data")):
                return
            if not isinstance(company, list) or any(not isinstance(each, list) or len(each) != 2 for each in company):
                return
            if not self._guests:
                self._loop.at("admit", time.monotonic() + self._loop.heartbeat / 2, self._admit_all)
            card = {key: card[key] for key in ("host", "port", "data")}
            self._guests[peer.rank] = card, [(host, port) for host, port in company]
            here = _addresses([*self.nodes.values(), *(card for card, _ in self._guests.values())])
            self._admit({node for node, (_, company) in self._guests.items() if all(each in here for each in company)})

    def _admit(self, guests: Iterable[int]) -> None:
        nodes = {node: self._guests.pop(node)[0] for node in guests}
        if not self._guests:
            self._loop.cancel("admit")
        if nodes and self._coordinates():
            self._publish({**self.nodes, **nodes})

    def _admit_all(self) -> None:
        """Those with whom they come are late: they have died, or join others."""
        self._admit([*self._guests])

    def answered(self, dialog: Dialog, kind: Kind, body: Body) -> None:
        """Of `Phase`: somebody whom we called."""
        if self._lookout.over(dialog, stranger=kind is Kind.ABORT):
            if kind is Kind.WELCOME:
                self._met(body["job"], {int(node): card for node, card in body["nodes"]})
        elif kind is Kind.ABORT and not self._not_here(dialog):
            self._member.failed(PeerError(str(body.get("text")), operation="connect", phase="connect"))
        elif kind is Kind.WELCOME and dialog is self._joining:
            if self.job and body["job"] not in ("", self.job):
                self._not_here(dialog)
            elif dialog.rank == 0:
                self._told_of([(int(node), card) for node, card in body["nodes"]])
        elif kind is Kind.WELCOME and dialog in self._probes:
            self._probed(dialog, body)
        elif kind is Kind.WELCOME:
            unsent = self._unsent.pop(dialog.rank, [])
            if unsent:
                self._say(dialog, unsent)

    def refused(self, dialog: Dialog, error: TokenError | ProtocolError) -> None:
        """Of `Phase`: it does not hold our token."""
        if self._lookout.over(dialog, stranger=True) or self._not_here(dialog):
            return
        text = f"the node at this address does not hold our job token (HRDMA_TOKEN): {error}"
        self._member.failed(PeerError(text, operation="connect", phase="connect"))

    def _not_here(self, dialog: Dialog) -> bool:
        """Somebody else has the address where a node of this job was: as if nobody had answered there."""
        if dialog not in self._probes and not (dialog is self._joining and self.job):
            return False
        self._loop.hang_up(dialog)
        self.ended(dialog)
        return True

    # who goes

    def ended(self, dialog: Dialog) -> None:
        """Of `Phase`: a connection that we made ended, or never came up."""
        if self._lookout.over(dialog):
            return
        if dialog is self._joining:
            self._joining = None
            if not self.nodes:
                self._loop.at("join", time.monotonic() + REDIAL, self._join)
        elif dialog in self._probes:
            self._probes.pop(dialog)
            self._decide()
        elif self._dialogs.get(dialog.rank) is dialog:
            self._gone(dialog.rank)

    def hung_up(self, ranks: list[int]) -> None:
        """Of `Phase`: connections of nodes that called us ended."""
        for node in ranks:
            self._guests.pop(node, None)
            self._gone(node)

    def _gone(self, node: int) -> None:
        if node not in self.nodes or node == self.me or node in self._down:
            return
        self._down.add(node)
        self._decide()

    def _decide(self) -> None:
        """Nodes are missed: what follows."""
        down = [node for node in self.nodes if node in self._down]
        if not down or self._probes:
            return
        up = [node for node in self.nodes if node not in self._down]
        if up[0] != self.me:
            grace = time.monotonic() + (self._loop.heartbeat if self.oldest in down else 0.2)
            self._loop.at("suspect", grace, self._complain)
        elif self.oldest == self.me and len(up) > 1:
            self._publish({node: self.nodes[node] for node in up})
        else:
            unasked = [node for node in down if node not in self._asked]
            if unasked:
                for node in unasked:
                    self._asked.add(node)
                    card = self.nodes[node]
                    self._probes[self._dial(card["host"], card["port"], rank=0)] = node
            else:
                self._publish({node: self.nodes[node] for node in up})

    def _probed(self, dialog: Dialog, body: Body) -> None:
        """Somebody whom we missed is there. Who is in a smaller group, and not in the view of the other, is the one lost."""
        node = self._probes.pop(dialog)
        theirs = {int(other): card for other, card in body["nodes"]}
        up = len(self.nodes.keys() - self._down)
        if body["job"] == self.job and theirs and self.me not in theirs and len(theirs) >= up:
            self._loop.hang_up(dialog)
            self._rejoin(_addresses(theirs.values()))
            return
        self._loop.hang_up(dialog)
        logger.info("objects: the connection with node %x broke though it lives", node)
        self._decide()

    def _met(self, job: str, theirs: dict[int, Card]) -> None:
        """Somebody who was counted as lost is there. If two clusters have come of one, both judge alike which of them goes on."""
        if job != self.job or not theirs or not self.nodes or not theirs.keys().isdisjoint(self.nodes):
            return
        if not self._coordinates():
            self.send(self.oldest, {"verb": "met", "job": job, "nodes": list(theirs.items())})
        elif (len(theirs), -min(theirs)) > (len(self.nodes), -min(self.nodes)):
            logger.warning("objects: %d nodes had gone on without these %d", len(theirs), len(self.nodes))
            self._announce(theirs)
            self._rejoin(_addresses(theirs.values()))

    def _complain(self) -> None:
        """Nobody did anything about nodes that we miss: says so to the oldest that is left."""
        down = [node for node in self.nodes if node in self._down]
        up = [node for node in self.nodes if node not in self._down]
        for node in down:
            self.send(up[0], {"verb": "suspect", "node": node, "accuser": self.me})
        if down:
            self._loop.at("suspect", time.monotonic() + self._loop.heartbeat, self._complain)

    def _suspect(self, accuser: int, node: int) -> None:
        if accuser not in self.nodes or node not in self.nodes or accuser == node:
            return
        if self.oldest != self.me:
            if self.oldest in self._down:
                self._decide()
            else:
                self.send(self.oldest, {"verb": "suspect", "node": node, "accuser": accuser})
            return
        order = list(self.nodes)
        victim = max(accuser, node, key=order.index)
        self._publish({other: card for other, card in self.nodes.items() if other != victim})


def _addresses(cards: Iterable[Card]) -> list[Address]:
    return [(card["host"], card["port"]) for card in cards]


def address_towards(host: str, port: int) -> str:
    """The address of this host from which it reaches another. Nothing is sent."""
    family, numeric = resolve(host, port)
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((numeric, port))
        except OSError as error:
            raise HrdmaError(f"no way from here to {host}:{port}: {error.strerror}") from None
        return str(sock.getsockname()[0])

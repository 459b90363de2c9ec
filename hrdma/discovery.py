"""Measures the network under a running job: which NICs reach each other, how fast, how far. `hrdma.planning.discover` calls it,
and `init` before the ranks are connected where ``HRDMA_FABRIC=discover`` says so.

    1. every rank tells its host and NICs, with a port at which each NIC is listening
    2. NICs of one subnet, or of several with routers between, form a circle in which hosts take turns: each sends to the
       next one, then to the one after, until every NIC has sent to all others; in large subnets to some of them
    3. these pairs are put into rounds in which no host sends twice or receives twice, and are measured round by round:
       short messages to and fro (the shortest time counts), then bulk for a moment
    4. what was found is told to all, and each infers the same fabric from it; a fabric knows what a NIC can do, so a pair
       that is much slower than both of its NICs is named in a warning

Plain sockets, not the transport: each is bound to its NIC's address and what is measured is the network alone. The first
rank of a host measures for it. Rates are those of payload, as plans need them: what headers take is gone already.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hrdma.log import logger
from hrdma.nics import nics
from hrdma.topo.infer import Inferred, Measured, Nic, Sample, infer, joined

if TYPE_CHECKING:
    from hrdma.communicator import Communicator
    from hrdma.topo.fabric import Fabric

__all__ = ["Edge", "Told", "discover", "over", "pairs", "rounds", "slower"]

SECONDS = 0.2  # of bulk between two NICs
WARM_UP = 0.05  # of that, not counted: slow start, and buckets that are full at the beginning
PINGS = 30
CONNECT_SECONDS = 2.0  # after which two NICs of one subnet count as apart
PIECE = 256 << 10
ALL = 16  # NICs in a subnet: so many are measured each with each
SLOW = 0.5  # of what its NICs reach with others: below that a pair is named
_PING = 8
_NONCE = 16


Told = Callable[[str, dict[str, Any]], list[dict[str, Any]]]


class Edge(NamedTuple):
    """One NIC sends to another of its subnet."""

    subnet: str
    src: tuple[int, int]  #: host, NIC
    dst: tuple[int, int]


def discover(rank: int, cards: Sequence[dict[str, Any]], ifname: str, told: Told) -> Fabric:
    """See `hrdma.planning.discover`.

    Parameters
    ----------
    rank : int
        This one.
    cards : sequence of dict
        Of all ranks: `host`, `costs`.
    ifname : str
        Which NICs count, as ``HRDMA_IFNAME``.
    told : callable
        Exchanges what each rank has to say, by rank; waits for all of them. Its first argument names the exchange.
    """
    hosts = list(dict.fromkeys(card["host"] for card in cards))
    first = [next(rank for rank, card in enumerate(cards) if card["host"] == host) for host in hosts]
    mine = hosts.index(cards[rank]["host"])
    speaks = first[mine] == rank
    own = nics(ifname)
    with contextlib.ExitStack() as stack:
        listeners = []
        for nic in own if speaks else []:
            listeners.append(stack.enter_context(_listen(nic.address)))
        said = told(
            "nics",
            {
                "nics": [list(nic) for nic in own],
                "ports": [listener.getsockname()[1] for listener in listeners],
                "nonce": secrets.token_hex(_NONCE),
            },
        )
        by_host = [said[rank] for rank in first]
        there = joined([[Nic(name, subnet) for name, _, subnet in entry["nics"]] for entry in by_host])
        edges = pairs(there)
        found: list[tuple[Edge, float, float]] = []
        unreached: set[str] = set()
        for number, together in enumerate(rounds(edges)):
            lost = sorted({edge.subnet for edge, rate, _ in found if not rate})
            unreached.update(*(entry["unreached"] for entry in told(f"round {number}", {"unreached": lost})))
            if speaks:
                found += _round([edge for edge in together if edge.subnet not in unreached], mine, by_host, listeners)
    heard = told("found", {"found": [_plain(*entry) for entry in found]})
    measured = [tuple(entry) for entries in heard for entry in entries["found"]]
    good = {
        (subnet, tuple(src), tuple(dst)): (rate, latency) for subnet, src, dst, rate, latency in measured if rate > 0
    }
    apart = {edge.subnet for edge in edges if (edge.subnet, edge.src, edge.dst) not in good}
    for subnet in sorted(apart):
        if rank == 0:
            logger.warning("NICs of %s do not reach each other on all hosts: they are left out", subnet)
    reached = {Edge(*key): rate for key, (rate, _) in good.items() if key[0] not in apart}
    for edge, rate, usual in slower(reached) if rank == 0 else ():
        (source, at), (target, to) = edge.src, edge.dst
        logger.warning(
            "host %d (%s) to host %d (%s): %.3g Mbit/s, where both reach %.3g with others; plans do not know of it",
            source, there[source][at].name, target, there[target][to].name, rate / 1e6, usual / 1e6,
        )  # fmt: skip
    samples = [
        Sample(first[src[0]], first[dst[0]], subnet, *numbers)
        for (subnet, src, dst), numbers in sorted(good.items())
        if subnet not in apart
    ]
    ranks = [
        Measured(card["host"], tuple(nic for nic in there[host] if nic.subnet not in apart))
        for card, host in ((card, hosts.index(card["host"])) for card in cards)
    ]
    return _named(infer(ranks, [*samples, *_memory(cards, first)]))


def _named(inferred: Inferred) -> Fabric:
    return replace(inferred.fabric, interfaces=inferred.nics) if any(inferred.nics) else inferred.fabric


def _memory(cards: Sequence[dict[str, Any]], first: Sequence[int]) -> list[Sample]:
    """What shared memory does, as it was calibrated on this machine."""
    rank = first[0]
    if rank + 1 >= len(cards) or cards[rank + 1]["host"] != cards[rank]["host"]:
        return []
    known = [card["costs"]["shm"] for card in cards if "shm" in card["costs"]]
    return [Sample(rank, rank + 1, "", 8 / cost["beta"], cost["alpha"] + cost["latency"]) for cost in known[:1]]


# -- who measures what ------------------------------------------------------------------------------------------------------


def pairs(hosts: Sequence[Sequence[Nic]]) -> list[Edge]:
    """Every NIC to the next one of its subnet where another host has one, then to those further on.

    To all where they are no more than `ALL`, else to those 1, 2, 4, 8 and so on further, so that the time grows slowly.
    """
    members: dict[str, list[tuple[int, int, int]]] = {}
    for host, listed in enumerate(hosts):
        seen: Counter[str] = Counter()
        for number, nic in enumerate(listed):
            members.setdefault(nic.subnet, []).append((seen[nic.subnet], host, number))
            seen[nic.subnet] += 1
    found: list[tuple[int, Edge]] = []
    for subnet, listed_there in members.items():
        ports = [(host, number) for _, host, number in sorted(listed_there)]
        n = len(ports)
        steps = range(1, n) if n <= ALL else [1 << bit for bit in range((n - 1).bit_length())]
        for step in steps if len({host for host, _ in ports}) > 1 else ():
            found += [
                (step, Edge(subnet, port, to))
                for port, to in zip(ports, [*ports[step:], *ports[:step]])
                if port[0] != to[0]
            ]
    return [edge for _, edge in sorted(found, key=lambda each: each[0])]  # a subnet that is apart shows early


def slower(rates: Mapping[Edge, float]) -> list[tuple[Edge, float, float]]:
    """Pairs that are slower than both of their NICs are with others: what they reach, and what the slower NIC does."""
    best: dict[tuple[int, int], float] = {}
    for edge, rate in rates.items():
        for port in (edge.src, edge.dst):
            best[port] = max(best.get(port, 0.0), rate)
    usual = {edge: min(best[edge.src], best[edge.dst]) for edge in rates}
    return [(edge, rate, usual[edge]) for edge, rate in rates.items() if rate < SLOW * usual[edge]]


def rounds(edges: Sequence[Edge]) -> list[list[Edge]]:
    """Edges that are measured at once: in a round no host sends twice or receives twice."""
    made: list[list[Edge]] = []
    busy: list[tuple[set[int], set[int]]] = []
    for edge in edges:
        source, target = edge.src[0], edge.dst[0]
        free = (k for k, (senders, receivers) in enumerate(busy) if source not in senders and target not in receivers)
        at = next(free, len(made))
        if at == len(made):
            made.append([])
            busy.append((set(), set()))
        made[at].append(edge)
        busy[at][0].add(source)
        busy[at][1].add(target)
    return made


def _round(
    together: list[Edge], host: int, hosts: Sequence[dict[str, Any]], listeners: Sequence[socket.socket]
) -> list[tuple[Edge, float, float]]:
    """Takes part in a round; what was measured by sending: rate 0 where the other NIC was not reached."""
    sends = [edge for edge in together if edge.src[0] == host]
    receives = [edge for edge in together if edge.dst[0] == host]
    threads = [
        threading.Thread(target=_answer, args=(listeners[edge.dst[1]], hosts[edge.src[0]]["nonce"]), daemon=True)
        for edge in receives
    ]
    for thread in threads:
        thread.start()
    found = []
    for edge in sends:
        source, target = hosts[host]["nics"][edge.src[1]][1], hosts[edge.dst[0]]["nics"][edge.dst[1]][1]
        port = hosts[edge.dst[0]]["ports"][edge.dst[1]]
        try:
            found.append((edge, *_measure(source, target, port, hosts[host]["nonce"])))
        except OSError:
            found.append((edge, 0.0, 0.0))
    for thread in threads:
        thread.join()
    return found


# -- one pair ---------------------------------------------------------------------------------------------------------------


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=8)


def _measure(source: str, target: str, port: int, nonce: str) -> tuple[float, float]:
    """Rate in bit/s and latency in seconds from here to a NIC."""
    with socket.create_connection((target, port), timeout=CONNECT_SECONDS, source_address=(source, 0)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(bytes.fromhex(nonce))
        times = []
        for _ in range(PINGS):
            begun = time.perf_counter()
            sock.sendall(bytes(_PING))
            _exactly(sock, _PING)
            times.append(time.perf_counter() - begun)
        piece, end = memoryview(bytes(PIECE)), time.monotonic() + SECONDS
        while time.monotonic() < end:
            sock.send(piece)
        sock.shutdown(socket.SHUT_WR)
        (rate,) = struct.unpack("<d", _exactly(sock, 8))
        return rate, min(times) / 2


def _answer(listener: socket.socket, nonce: str) -> None:
    """The other side of `_measure`. Nobody has to come."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as callers:
        if sock := _admitted(listener, bytes.fromhex(nonce), callers):
            sock.settimeout(CONNECT_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(PINGS):
                sock.sendall(_exactly(sock, _PING))
            sock.sendall(struct.pack("<d", _drain(sock)))


def _admitted(listener: socket.socket, nonce: bytes, callers: contextlib.ExitStack) -> socket.socket | None:
    """The first caller who says the nonce. Others neither end nor delay it: all are listened to at once."""
    end = time.monotonic() + CONNECT_SECONDS
    listener.setblocking(False)
    with selectors.DefaultSelector() as heard:
        heard.register(listener, selectors.EVENT_READ)
        while (left := end - time.monotonic()) > 0:
            for key, _ in heard.select(left):
                if key.fileobj is listener:
                    with contextlib.suppress(OSError):  # it has gone again
                        caller = callers.enter_context(listener.accept()[0])
                        caller.setblocking(False)
                        heard.register(caller, selectors.EVENT_READ, (caller, b""))
                    continue
                sock, said = key.data
                part = b""
                with contextlib.suppress(OSError):
                    part = sock.recv(_NONCE - len(said))
                said += part
                if part and len(said) < _NONCE:
                    heard.modify(sock, selectors.EVENT_READ, (sock, said))
                elif secrets.compare_digest(said, nonce):
                    return sock
                else:
                    heard.unregister(sock)
                    sock.close()
    return None


def _drain(sock: socket.socket) -> float:
    """Bits per second that come until the other side ends, after the warm-up."""
    into, begun = bytearray(PIECE), time.monotonic()
    start, last, got = begun, begun, 0
    while n := sock.recv_into(into):
        last = time.monotonic()
        if last < begun + WARM_UP:
            start = last
        else:
            got += n
    return 8 * got / (last - start) if last > start else 0.0


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = sock.recv(nbytes - len(data))
        if not part:
            raise ConnectionResetError("closed by the other side")
        data += part
    return data


# -- telling all ------------------------------------------------------------------------------------------------------------


def _plain(edge: Edge, rate: float, latency: float) -> list[Any]:
    return [edge.subnet, list(edge.src), list(edge.dst), rate, latency]


def over(comm: Communicator) -> Told:
    """Exchanges by collectives of a communicator."""

    def told(_: str, value: dict[str, Any]) -> list[dict[str, Any]]:
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths = np.empty(comm.size, np.int64)
        comm.allgather(np.array([len(data)], np.int64), lengths)
        everything = np.empty(int(lengths.sum()), np.uint8)
        comm.allgather(data, everything, counts=lengths.tolist())
        ends = np.cumsum(lengths)
        return [json.loads(everything[end - n : end].tobytes()) for end, n in zip(ends, lengths)]

    return told

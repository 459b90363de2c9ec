"""The way to another host, on which the same command runs: tcp by a communicator, each rail by a queue pair.

The two meet in the library's own control plane. Who is rank 0 follows from the addresses by which they reach each other,
the lower one first; where those are the same (two processes of one host), from who came first. They measure in turns, so that
what one finds is not what the other disturbs.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import ipaddress
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import hrdma
from hrdma.config import Config
from hrdma.doctor import exchange, rdma
from hrdma.doctor.finding import ERROR, OK, WARNING, Finding
from hrdma.units import in_bytes, in_seconds

if TYPE_CHECKING:
    from hrdma.communicator import Communicator

__all__ = ["examine", "rails"]


CARD = 1 << 14  # bytes of what is told to the peer at a time
BULK = 4 << 20
TURNS = 100


def examine(host: str, port: int, timeout: float) -> Iterator[Finding]:
    """Measures the way to `host`, on which the same runs with this one's address.

    Parameters
    ----------
    host : str
        Name or address.
    port : int
        Of the rendezvous, the same on both.
    timeout : float
        Seconds until both have come, and for each step.
    """
    with contextlib.ExitStack() as stack:
        try:
            mine, theirs = _addresses(host)
            rank = _rank(mine, theirs, port, stack)
            first = (mine, theirs)[rank]
            master = f"[{first}]:{port}" if ":" in first else f"{first}:{port}"
            comm = stack.enter_context(hrdma.init(rank, 2, master=master, transport="tcp", timeout=timeout))
        except (OSError, RuntimeError, ValueError) as error:
            yield Finding(ERROR, f"peer {host}", str(error), _mend(error, host, port))
            return
        try:
            yield _tcp(comm, host)
            yield from _rails(comm, host)
            comm.barrier()
        except (OSError, RuntimeError) as error:
            yield Finding(ERROR, f"peer {host}", f"it went away: {error}", f"hrdma doctor --peer {mine}, on {host}")


def _mend(error: Exception, host: str, port: int) -> str:
    if isinstance(error, socket.gaierror):
        return "an address instead of a name"
    if "HRDMA_TOKEN" in str(error):
        return "HRDMA_TOKEN=... hrdma doctor --peer ..., the same on both hosts"
    return f"start `hrdma doctor --peer` on {host} too, with this host's address; both must reach TCP port {port}"


def _addresses(host: str) -> tuple[str, str]:
    """Our address on the way there, and the peer's."""
    for family, _, _, _, there in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as asked:
            try:
                asked.connect(there)  # sends nothing: the kernel chooses a way
            except OSError:
                continue
            return str(asked.getsockname()[0]), str(asked.getpeername()[0])
    raise OSError(f"there is no way to {host}")


def _rank(mine: str, theirs: str, port: int, stack: contextlib.ExitStack) -> int:
    if mine != theirs:
        order = [ipaddress.ip_address(address.partition("%")[0]) for address in (mine, theirs)]
        return int(int(order[0]) > int(order[1]))
    first = stack.enter_context(socket.socket(socket.AF_UNIX))
    try:
        first.bind(f"\0hrdma-doctor-{port}")  # ends with this process
    except OSError:
        return 1
    return 0


def _told(comm: Communicator, mine: Any) -> list[Any]:
    """What each rank says, as JSON."""
    text = json.dumps(mine).encode()
    if len(text) > CARD:
        raise ValueError(f"{len(text)} bytes to tell the peer, more than {CARD}")
    buffer = np.frombuffer(text.ljust(CARD), "uint8").copy()
    both = comm.allgather(buffer)
    return [json.loads(both[at : at + CARD].tobytes()) for at in (0, CARD)]


def _tcp(comm: Communicator, host: str) -> Finding:
    other, word, bulk = 1 - comm.rank, np.zeros(8, "uint8"), np.zeros(BULK, "uint8")
    times = []
    for _ in range(TURNS):
        start = time.perf_counter()
        for turn in (0, 1):
            if comm.rank == turn:
                comm.send(word, dst=other)
            else:
                comm.recv(word, src=other)
        times.append(time.perf_counter() - start)
    latency = sorted(times)[len(times) // 2]
    for turn in (0, 1):
        comm.barrier()
        start = time.perf_counter()
        for _ in range(8):
            if comm.rank == turn:
                comm.send(bulk, dst=other)
            else:
                comm.recv(bulk, src=other)
        comm.barrier()
        if comm.rank == turn:
            bandwidth = 8 * BULK / (time.perf_counter() - start)
    figures = {"latency": latency, "bandwidth": bandwidth}
    text = f"{in_seconds(latency)} there and back, {in_bytes(bandwidth)}/s from here"
    return Finding(OK, f"tcp to {host}", text, figures=figures)


def rails(root: Path, wanted: str) -> list[tuple[str, int]]:
    """Devices and ports to measure: all that are active, or those of HRDMA_DEVICES, which may name ``sim``."""
    there = rdma.active(root)
    if not wanted:
        return there
    items = [item.partition(":")[::2] for item in wanted.split(",")]
    named = dict.fromkeys(  # in the order in which they are named: provider verbs pairs them so
        (name, port)
        for pattern, which in items
        for name, port in there
        if fnmatch.fnmatchcase(name, pattern) and which in ("", str(port))
    )
    return [*named] + ([("sim", 1)] if any(pattern == "sim" for pattern, _ in items) else [])


def _rails(comm: Communicator, host: str) -> Iterator[Finding]:
    mine = rails(Path("/"), Config.load().devices)
    counts = _told(comm, len(mine))
    if not min(counts):
        who = [
            name for name, count in zip(("this host", host), (counts[comm.rank], counts[1 - comm.rank])) if not count
        ]
        yield Finding(
            WARNING, f"rails to {host}", f"no active RDMA device on {' and '.join(who)}", "hrdma doctor, there"
        )
    elif counts[0] != counts[1]:
        text = f"{counts[comm.rank]} here and {counts[1 - comm.rank]} there: the first {min(counts)} are measured"
        yield Finding(WARNING, f"rails to {host}", text)
    for number in range(min(counts)):
        yield _rail(comm, host, *mine[number])


def _rail(comm: Communicator, host: str, name: str, port: int) -> Finding:
    """One after the other measures; both say whether they could, so that neither waits for what does not come."""
    where = f"{name}:{port} to {host}"
    with contextlib.ExitStack() as stack:
        card, why, end = None, "", None
        try:
            end = stack.enter_context(exchange.End(name, port))
            card = end.card()
        except (RuntimeError, OSError) as error:
            why = str(error)
        cards = _told(comm, {"card": card, "why": why})
        if not why and cards[1 - comm.rank]["card"]:
            try:
                assert end is not None
                end.connect(cards[1 - comm.rank]["card"])
            except (RuntimeError, ValueError) as error:
                why = str(error)
        reasons = [entry["why"] for entry in _told(comm, {"why": why})]
        if any(reasons):
            text = why or f"on {host}: {reasons[1 - comm.rank]}"
            return Finding(ERROR, where, text, "hrdma doctor, on the host that says so")
        assert end is not None  # or there would be a reason
        far = cards[1 - comm.rank]["card"]
        for turn in (0, 1):
            if comm.rank == turn:
                finding = rdma.measured(where, f"to {far['device']} there", functools.partial(end.probe, far))
            comm.barrier()
        return finding

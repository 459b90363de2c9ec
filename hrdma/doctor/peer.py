"""The way to another host, on which the same command runs: tcp by a communicator, each rail by a queue pair.

The two meet in the library's own control plane. Who is rank 0 follows from the addresses by which they reach each other,
the lower one first; where those are the same (two processes of one host), from who came first. They measure in turns, so that
what one finds is not what the other disturbs.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import hrdma
from hrdma import verbs
from hrdma.config import Config
from hrdma.doctor import exchange, rdma
from hrdma.doctor.finding import ERROR, OK, WARNING, Finding
from hrdma.errors import DeviceError
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


def rails(root: Path, config: Config, warn: Callable[[str], object]) -> list[tuple[str, int, int] | None]:
    """Devices, ports and GIDs to measure, by number of the rail: all ports that are active, or what HRDMA_DEVICES names.

    What is named is what a communicator would use, chosen as it does, simulated devices too. None: it will not do now,
    of which `warn` hears.

    Raises
    ------
    DeviceError, ValueError
        One that is named is not there, or none will do; a setting is wrong.
    """
    index = config.gid()
    if config.devices:
        return verbs.choose(config.devices, ifname=config.ifname, gid_index=index, warn=warn)
    found: list[tuple[str, int, int] | None] = []
    for name, port in rdma.active(root):
        try:
            found += verbs.choose(f"{name}:{port}", ifname=config.ifname, gid_index=index)
        except (DeviceError, ValueError) as error:
            warn(str(error))
            found.append(None)
    return found


def _rails(comm: Communicator, host: str) -> Iterator[Finding]:
    mine: list[tuple[str, int, int] | None] = []
    said: list[str] = []
    wrong = ""
    try:
        mine = rails(Path("/"), Config.load(), said.append)
    except (DeviceError, ValueError) as error:
        wrong = str(error)
    for text in filter(None, [*said, wrong]):
        yield Finding(ERROR if wrong else WARNING, f"rails to {host}", text)
    have = _told(comm, [one is not None for one in mine])
    numbers = [number for number in range(min(map(len, have))) if have[0][number] and have[1][number]]
    here, there = have[comm.rank], have[1 - comm.rank]
    if not any(here) or not any(there):
        who = [name for name, its in (("this host", here), (host, there)) if not any(its)]
        text = f"no active RDMA device on {' and '.join(who)}"
        if not wrong:
            yield Finding(WARNING, f"rails to {host}", text, "hrdma doctor, there")
    elif here != there:
        text = f"{sum(here)} here and {sum(there)} there: the {len(numbers)} that both have a device for are measured"
        yield Finding(WARNING, f"rails to {host}", text)
    for number in numbers:
        name, port, index = mine[number] or ("", 0, 0)
        same = [one for one in mine[:number] if one and one[:2] == (name, port)]
        where = f"{name}:{port} to {host}{f' (rail {number})' if same else ''}"
        yield _rail(comm, host, where, name, port, index)


def _rail(comm: Communicator, host: str, where: str, name: str, port: int, index: int) -> Finding:
    """One after the other measures; both say whether they could, so that neither waits for what does not come."""
    with contextlib.ExitStack() as stack:
        card, why, end = None, "", None
        try:
            end = stack.enter_context(exchange.End(name, port, index))
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

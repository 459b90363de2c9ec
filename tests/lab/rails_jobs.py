"""Jobs of the tests of rails: ``python rails_jobs.py MODE ...``; each rank prints a line of JSON. Or its functions are called."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

import hrdma
from hrdma.lab.traffic import check_wires
from hrdma.nics import nics

COUNT = 200_000


def sent() -> dict[str, int]:
    """Bytes that have left each NIC of this host."""
    rows = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return {name.strip(): int(values.split()[8]) for name, values in rows}


def acknowledged() -> Counter[str]:
    """Bytes that this process's connections have delivered, by the NIC whose address they have: by which wire they leave
    the kernel's routes decide."""
    names = {nic.address: nic.name for nic in nics()}
    found: Counter[str] = Counter(dict.fromkeys(names.values(), 0))
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as sock:
            name = names.get(sock.getsockname()[0])
            if name and sock.getpeername():
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
                found[name] += struct.unpack_from("=Q", info, 120)[0]  # tcpi_bytes_acked of linux/tcp.h
    return found


def since(before: Counter[str]) -> dict[str, int]:
    return {name: n - before[name] for name, n in acknowledged().items()}


def summed(algorithm: str = "", count: str = str(COUNT)) -> dict:
    """Allreduces, checked; what left by which NIC during the last one."""
    with hrdma.init() as comm:
        own = comm.dup()
        if algorithm:
            own._plan_override = (algorithm, 1)
        for _ in range(2):
            x = np.arange(int(count), dtype=np.float32) % 1000 * comm.size + comm.rank
            expected = (x - comm.rank) * comm.size + sum(range(comm.size))
            comm.barrier()
            before, delivered = sent(), acknowledged()
            own.allreduce(x)
            comm.barrier()  # what this host relays has left when the others have it
            moved = {name: n - before[name] for name, n in sent().items() if name != "lo"}
            by_rail = since(delivered)
            assert (x == expected).all()
        check_wires(comm)
        rails = {peer["rails"] for peer in comm.stats()["peers"].values()}
        return {"moved": moved, "by_rail": by_rail, "rails": comm.info()["rails"], "each": sorted(rails)}


def cut(nic: str) -> dict:
    """Rank 1 pulls a cable in the middle: everybody hears of it."""
    import subprocess

    with hrdma.init(tcp="user_timeout=2") as comm:
        x = np.ones(COUNT, np.float32)
        comm.allreduce(x)
        begun = time.monotonic()
        try:
            for turn in range(200):
                if turn == 1 and comm.rank == 1:
                    subprocess.run(["ip", "link", "set", nic, "down"], check=True)
                comm.allreduce(x, timeout=25)
        except hrdma.HrdmaError as error:
            return {"error": type(error).__name__, "after": time.monotonic() - begun}
        return {"error": "", "after": 0.0}


def messages() -> dict:
    """Messages between users keep to the first rail, and to their order."""
    with hrdma.init() as comm:
        other = comm.size - 1 - comm.rank
        delivered = acknowledged()
        requests = [comm.irecv(np.empty(n, np.uint8), other, tag=1) for n in (10, 300_000, 20)]
        for n in (10, 300_000, 20):
            comm.send(np.full(n, 7, np.uint8), other, tag=1)
        sizes = [request.wait()[1] for request in requests]
        comm.barrier()
        return {"sizes": sizes, "by_rail": since(delivered)}


MODES = {"summed": summed, "cut": cut, "messages": messages}

if __name__ == "__main__":
    print(json.dumps(MODES[sys.argv[1]](*sys.argv[2:])), flush=True)

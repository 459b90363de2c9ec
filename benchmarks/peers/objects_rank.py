"""A rank on a host of a lab, for bench_objects_lab.py: hrdma.objects, Gloo or MPI; told what to do over a Unix socket.

    objects_rank.py PEER SOCKET PLACES      PLACES: JSON, the namespace and the address of each rank

A line of JSON in ("do this, at that moment of the monotonic clock", which all hosts of a lab share), one out: when it was
done here, and whether the result was right. Nothing of this crosses the lab's network.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import threading
import time
from typing import Any

import numpy as np

CLONE_NEWNET = 0x40000000
PORT = 29700
SECONDS = 60.0
CYCLE = 1024  # values repeat after so many elements: sums of them are exact in float32


def enter(namespace: str) -> None:
    descriptor = os.open(namespace, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(descriptor)


def value(n: int, rank: int, size: int) -> np.ndarray:
    return (np.arange(n, dtype="float32") % CYCLE) * size + rank


def total(n: int, size: int) -> np.ndarray:
    return (np.arange(n, dtype="float32") % CYCLE) * (size * size) + size * (size - 1) // 2


def rest(n: int) -> None:
    """After its end a host does nothing for a while: they share processors, and others may still be at it."""
    time.sleep(min(5.0, 0.05 + 4 * n / 1e7))  # about as long as its bytes take over a link of 100 Mbit/s


def until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


class Objects:
    """hrdma.objects: rank 0 asks for reductions; the others have put, or will."""

    def __init__(self, rank: int, size: int, addresses: list[str]) -> None:
        from hrdma.objects import connect

        self.rank, self.size = rank, size
        self.totals: list[Any] = []  # of reductions that nobody else asks for
        self.client = connect(f"tcp://{addresses[0]}:{PORT}", token="benchmark", timeout=SECONDS, capacity=1 << 30)
        deadline = time.monotonic() + SECONDS
        while (there := len(self.client.info()["nodes"])) < size:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{there} of {size} nodes have come within {SECONDS:g} s")
            time.sleep(0.05)
        if rank == 0:  # as a driver owns what its tasks return: names from here are kept here
            self.client.put(self.client.ref().id.encode(), id="names")
        self.names = bytes(self.client.get(self.client.ref("names"))).decode()

    def prepare(self, operation: str, key: str, mine: np.ndarray, staggered: bool) -> None:
        self.late = staggered and operation != "broadcast"
        if not self.late and (operation != "broadcast" or self.rank == 0):
            self.client.put(mine, id=f"{self.names}.{key}.{self.rank}")

    def run(self, operation: str, key: str, mine: np.ndarray, start: float, mine_at: float) -> list[np.ndarray]:
        client, key = self.client, f"{self.names}.{key}"
        refs = [client.ref(f"{key}.{rank}") for rank in range(self.size)]
        if operation == "broadcast":
            until(mine_at)
            return [client.get(refs[0])] if self.rank else []
        if self.late:
            threading.Thread(target=lambda: (until(mine_at), client.put(mine, id=refs[self.rank].id))).start()
        if self.rank and operation in ("gather", "reduce"):
            return []
        until(start)
        if self.rank == 0 and operation == "gather":
            return client.get(refs)
        name = f"{key}.total"
        if operation == "reduce" and self.rank == 0:
            self.totals.append(client.reduce(refs))
            return [client.get(self.totals[-1])]
        if operation == "allreduce":
            return [client.get(client.ref(name)) if self.rank else client.allreduce(refs, id=name)]
        return []

    def clean(self, key: str) -> None:
        if self.rank == 0:
            for name in [*range(self.size), "total"]:
                self.client.delete(self.client.ref(f"{self.names}.{key}.{name}"))
            for total in self.totals:
                self.client.delete(total)
            self.totals.clear()


class Collective:
    """What Gloo and MPI have in common: all must be there, so each calls when its own data is ready."""

    rank: int
    size: int

    def prepare(self, operation: str, key: str, mine: np.ndarray, staggered: bool) -> None:
        number = self.size if operation == "gather" else 1
        self.out = [mine.copy() for _ in range(number)]

    def run(self, operation: str, key: str, mine: np.ndarray, start: float, mine_at: float) -> list[np.ndarray]:
        until(mine_at)
        getattr(self, operation)(mine)
        if operation == "broadcast":
            return self.out if self.rank else []
        return self.out if self.rank == 0 or operation == "allreduce" else []

    def clean(self, key: str) -> None:
        self.out = []


class Gloo(Collective):
    def __init__(self, rank: int, size: int, addresses: list[str]) -> None:
        import torch
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = "nic0"
        self.dist, self.tensor = dist, torch.from_numpy
        self.rank, self.size = rank, size
        dist.init_process_group("gloo", init_method=f"tcp://{addresses[0]}:{PORT + 1}", rank=rank, world_size=size)

    def broadcast(self, mine: np.ndarray) -> None:
        self.dist.broadcast(self.tensor(self.out[0]), 0)

    def gather(self, mine: np.ndarray) -> None:
        self.dist.gather(self.tensor(mine), [self.tensor(out) for out in self.out] if self.rank == 0 else None)

    def reduce(self, mine: np.ndarray) -> None:
        self.dist.reduce(self.tensor(self.out[0]), 0)

    def allreduce(self, mine: np.ndarray) -> None:
        self.dist.all_reduce(self.tensor(self.out[0]))


class Mpi(Collective):
    def __init__(self, rank: int, size: int, addresses: list[str]) -> None:
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size

    def prepare(self, operation: str, key: str, mine: np.ndarray, staggered: bool) -> None:
        self.all = np.empty((self.size, len(mine)), mine.dtype) if operation == "gather" else mine[None].copy()
        self.out = list(self.all)

    def broadcast(self, mine: np.ndarray) -> None:
        self.comm.Bcast(self.all[0])

    def gather(self, mine: np.ndarray) -> None:
        self.comm.Gather(mine, self.all if self.rank == 0 else None)

    def reduce(self, mine: np.ndarray) -> None:
        self.comm.Reduce(mine, self.all[0] if self.rank == 0 else None)

    def allreduce(self, mine: np.ndarray) -> None:
        self.comm.Allreduce(mine, self.all[0])


PEERS: dict[str, Any] = {"hrdma": Objects, "gloo": Gloo, "mpich": Mpi}


def right(operation: str, found: list[np.ndarray], n: int, size: int) -> bool:
    if operation in ("broadcast", "gather"):
        return all(np.array_equal(each, value(n, rank, size)) for rank, each in enumerate(found))
    return all(np.array_equal(each, total(n, size)) for each in found)


def main() -> None:
    name, path, places = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    rank, size = int(os.environ.get("PMI_RANK") or os.environ["RANK"]), len(places)
    enter(places[rank][0])
    peer = PEERS[name](rank, size, [address for _, address in places])
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        lines = sock.makefile("rw")
        print(json.dumps({"rank": rank}), file=lines, flush=True)
        for line in lines:
            what = json.loads(line)
            operation, key, n, stagger = what["operation"], what["key"], what["n"], what["stagger"]
            mine = value(n, rank, size)
            keys = [f"{key}.{turn}" for turn in range(what["row"])]
            for each in keys:
                peer.prepare(operation, each, mine, stagger > 0)
            print(json.dumps({"ready": True}), file=lines, flush=True)
            start = json.loads(lines.readline())["start"]
            found = [peer.run(operation, each, mine, start, start + rank * stagger) for each in keys]
            end = time.monotonic()
            rest(n)
            good = all(right(operation, each, n, size) for each in found)
            print(json.dumps({"end": end, "right": good}), file=lines, flush=True)
            lines.readline()  # all are done
            del found
            for each in keys:
                peer.clean(each)


if __name__ == "__main__":
    main()

"""Ray or Dask on the hosts of a lab, for bench_objects_lab.py: the daemons of each host, and the driver on host 0.

    objects_tasks.py ray|dask SOCKET PLACES             the driver
    objects_tasks.py ray|dask daemon HOST FOLDER PLACES     becomes what a host runs

The driver is told what to do as a rank is (`objects_rank.py`). Neither system has reductions of objects: host 0 fetches all and
adds them, as their users do, and the others fetch the sum from it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from objects_rank import enter, rest, right, until, value

RAY_PORT, DASK_PORT = 6379, 8786
STORE = 600 << 20
SECONDS = 200.0


def daemon(name: str, host: int, folder: str, addresses: list[str]) -> None:
    """Becomes what runs on a host."""
    scripts = Path(sys.executable).parent
    head, own = addresses[0], addresses[host]
    if name == "ray":
        command = [str(scripts / "ray"), "start", "--block", f"--node-ip-address={own}", "--num-cpus=1"]
        command += [f"--resources={json.dumps({f'host{host}': 9})}", f"--object-store-memory={STORE}"]
        command += ["--disable-usage-stats", "--include-log-monitor=false"]
        if host == 0:
            command += ["--head", f"--port={RAY_PORT}", "--include-dashboard=false", f"--temp-dir={folder}/r"]
        else:
            wait_for(head, RAY_PORT)
            wait_for_others(Path(folder) / "r" / "session_latest" / "sockets", host)
            command += [f"--address={head}:{RAY_PORT}"]
    elif host == 0 and os.fork():
        command = [str(scripts / "dask"), "scheduler", f"--host={head}", f"--port={DASK_PORT}", "--no-dashboard"]
    else:
        wait_for(head, DASK_PORT)
        command = [str(scripts / "dask"), "worker", f"tcp://{head}:{DASK_PORT}", f"--host={own}", "--no-nanny"]
        command += ["--nthreads=4", "--no-dashboard", f"--local-directory={folder}/d{host}"]
    os.execv(command[0], command)


def wait_for(address: str, port: int) -> None:
    end = time.monotonic() + SECONDS
    while True:
        try:
            socket.create_connection((address, port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def wait_for_others(sockets: Path, count: int) -> None:
    """Until so many raylets are up: two that start at once on one machine take the same name for their sockets."""
    end = time.monotonic() + SECONDS
    while len(list(sockets.glob("raylet*"))) < count:
        if time.monotonic() > end:
            raise TimeoutError(f"{count} hosts of Ray did not come up within {SECONDS:g} s")
        time.sleep(0.2)


class Host:
    """What an actor, or the tasks of a worker, do on a host."""

    def value(self, n: int, rank: int, size: int, moment: float) -> np.ndarray:
        until(moment)
        return value(n, rank, size)

    def sum(self, arrays: list[np.ndarray]) -> np.ndarray:
        result = arrays[0].copy()
        for array in arrays[1:]:
            result += array
        return result

    def check(self, arrays: list[np.ndarray], operation: str, n: int, size: int) -> tuple[float, bool]:
        return self.check_all([arrays], operation, n, size)

    def check_all(self, row: list[list[np.ndarray]], operation: str, n: int, size: int) -> tuple[float, bool]:
        end = time.monotonic()
        rest(n)
        return end, all(right(operation, arrays, n, size) for arrays in row)


class RayHost(Host):
    """References come in lists, which Ray does not look into: fetching is this actor's own call."""

    def total(self, refs: list[Any]) -> np.ndarray:
        import ray

        return self.sum(ray.get(refs))

    def take(self, row: list[list[Any]], operation: str, n: int, size: int, moment: float) -> tuple[float, bool]:
        import ray

        until(moment)
        found = []
        for refs in row:
            arrays = ray.get(refs)
            found.append([self.sum(arrays)] if operation == "reduce" else arrays)
        return self.check_all(found, operation, n, size)


def join_ray(addresses: list[str]) -> None:
    """Makes this process a driver on the first host, when all hosts are up."""
    import ray

    wait_for(addresses[0], RAY_PORT)
    ray.init(address=f"{addresses[0]}:{RAY_PORT}", _node_ip_address=addresses[0], log_to_driver=False)
    end = time.monotonic() + SECONDS
    while (there := sum(node["Alive"] for node in ray.nodes())) < len(addresses):
        if time.monotonic() > end:
            raise TimeoutError(f"{there} of {len(addresses)} hosts of Ray came up within {SECONDS:g} s")
        time.sleep(0.2)


class Ray:
    def __init__(self, addresses: list[str]) -> None:
        import ray

        self.ray, self.size = ray, len(addresses)
        join_ray(addresses)
        kind = ray.remote(num_cpus=0, max_concurrency=3)(RayHost)
        self.hosts = [kind.options(resources={f"host{i}": 1}).remote() for i in range(self.size)]
        ray.get([host.value.remote(1, 0, 1, 0.0) for host in self.hosts])

    def put(self, n: int, moments: list[float]) -> list[Any]:
        return [host.value.remote(n, i, self.size, moments[i]) for i, host in enumerate(self.hosts)]

    def wait(self, refs: list[Any]) -> None:
        self.ray.wait(refs, num_returns=len(refs), fetch_local=False)

    def run(self, operation: str, n: int, row: list[list[Any]], moments: list[float]) -> list[tuple[float, bool]]:
        takers, what = self.hosts[:1], row
        if operation == "broadcast":
            takers, what = self.hosts[1:], [refs[:1] for refs in row]
        elif operation == "allreduce":
            takers, what = self.hosts, [[self.hosts[0].total.remote(refs)] for refs in row]
        moments = moments[-len(takers) :] if operation == "broadcast" else [0.0] * len(takers)
        return self.ray.get([host.take.remote(what, operation, n, self.size, at) for host, at in zip(takers, moments)])


class Dask:
    def __init__(self, addresses: list[str]) -> None:
        from distributed import Client

        wait_for(addresses[0], DASK_PORT)
        self.client, self.size = Client(f"tcp://{addresses[0]}:{DASK_PORT}"), len(addresses)
        self.client.wait_for_workers(self.size, timeout=SECONDS)
        workers = self.client.scheduler_info(n_workers=-1)["workers"]
        self.at = [next(at for at in workers if at.startswith(f"tcp://{address}:")) for address in addresses]

    def _on(self, host: int, call: Any, *arguments: Any) -> Any:
        return self.client.submit(call, *arguments, workers=[self.at[host]], pure=False)

    def put(self, n: int, moments: list[float]) -> list[Any]:
        return [self._on(i, Host().value, n, i, self.size, moments[i]) for i in range(self.size)]

    def wait(self, refs: list[Any]) -> None:
        from distributed import wait

        wait(refs)

    def run(self, operation: str, n: int, row: list[list[Any]], moments: list[float]) -> list[tuple[float, bool]]:
        (refs,) = row
        takers, what = [0], refs
        if operation == "broadcast":
            takers, what = list(range(1, self.size)), refs[:1]
        elif operation in ("reduce", "allreduce"):
            takers, what = [0] if operation == "reduce" else list(range(self.size)), [self._on(0, Host().sum, refs)]
        found = []
        for host in takers:
            if operation == "broadcast":
                until(moments[host])
            found.append(self._on(host, Host().check, what, operation, n, self.size))
        return self.client.gather(found)


def main() -> None:
    name, places = sys.argv[1], json.loads(sys.argv[-1])
    addresses = [address for _, address in places]
    if sys.argv[2] == "daemon":
        host = int(sys.argv[3])
        enter(places[host][0])
        daemon(name, host, sys.argv[4], addresses)
    enter(places[0][0])
    peer = {"ray": Ray, "dask": Dask}[name](addresses)
    size = len(places)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(sys.argv[2])
        lines = sock.makefile("rw")
        print(json.dumps({"rank": 0}), file=lines, flush=True)
        for line in lines:
            what = json.loads(line)
            operation, n, stagger = what["operation"], what["n"], what["stagger"]
            ready = operation == "broadcast" or not stagger
            row = [peer.put(n, [0.0] * size) for _ in range(what["row"])] if ready else []
            for refs in row:
                peer.wait(refs)
            print(json.dumps({"ready": True}), file=lines, flush=True)
            start = json.loads(lines.readline())["start"]
            moments = [start + i * stagger for i in range(size)]
            until(start)
            found = peer.run(operation, n, row or [peer.put(n, moments)], moments)
            end, good = max(end for end, _ in found), all(good for _, good in found)
            print(json.dumps({"end": end, "right": good}), file=lines, flush=True)
            lines.readline()
            del row, found


if __name__ == "__main__":
    main()

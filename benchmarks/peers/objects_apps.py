"""The driver of bench_objects_apps.py and bench_objects_failure_ray.py, on host 0 of a lab: small programs on Ray.

    objects_apps.py SOCKET PLACES

A line of JSON in ("so many steps of that program, moved that way", or so many seconds of it), one out: when each was done since
the beginning, whose gradients were in it (numbers of hosts), and how good the program is by then.
The actors of a program are there for both ways; each way trains parameters of its own, and takes turns with the other.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from objects_rank import enter
from objects_tasks import join_ray

STORE = 512 << 20
LONGEST = 100.0  # seconds of an answer
BATCH = 16  # images of a gradient: computing takes a small part of a step, as it does where processors are not shared


class Gradients:
    """Asynchronous SGD and the learner of a reinforcement-learning loop: the first gradients that arrive, so many."""

    def __init__(self, hosts: int, count: int, source: type, server: Callable[[], Any], *arguments: Any) -> None:
        from hrdma.examples.arriving import WAYS

        self.actors = [on(host, source).remote(host, *arguments) for host in range(1, hosts)]
        self.averages = {way: WAYS[way](self.actors, count) for way in WAYS}
        self.servers = {way: server() for way in WAYS}

    def step(self, way: str) -> list[int]:
        self.servers[way].step(self.averages[way])
        return [number + 1 for number in self.averages[way].taken]

    def finish(self, way: str) -> float:
        self.averages[way].finish()
        return self.servers[way].score()


class Serving:
    """One model on each host; a request is broadcast to all of them."""

    def __init__(self, hosts: int, images: int) -> None:
        import ray

        from hrdma.examples.ensemble import WAYS, Model, Requests

        self.models = [on(host, Model).remote(host) for host in range(hosts)]
        ray.get([model.ready.remote() for model in self.models])
        self.requests = {way: Requests(images) for way in WAYS}

    def step(self, way: str) -> list[int]:
        self.requests[way].step(way, self.models)
        return list(range(len(self.models)))

    def finish(self, way: str) -> float:
        return self.requests[way].score()


def on(host: int, kind: type) -> Any:
    import ray

    return ray.remote(num_cpus=0, max_restarts=-1)(kind).options(resources={f"host{host}": 0.01})


def program(name: str, hosts: int, size: int) -> Any:
    """`size`: units of the hidden layer, or images of a request."""
    from hrdma.examples import async_sgd, cart_pole

    workers = hosts - 1
    if name in ("sgd", "failure"):
        count = workers // 2 if name == "sgd" else workers - 1
        return Gradients(hosts, count, async_sgd.Worker, lambda: async_sgd.Training(size), 0.0, size, BATCH)
    if name == "rl":
        return Gradients(hosts, workers // 2, cart_pole.Actor, lambda: cart_pole.Learning(size), size)
    return Serving(hosts, size)


def main() -> None:
    path, places = sys.argv[1], json.loads(sys.argv[2])
    enter(places[0][0])
    join_ray([address for _, address in places])
    from hrdma.integrations.ray import connect

    connect(capacity=STORE)
    programs: dict[str, Any] = {}
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        lines = sock.makefile("rw")
        print(json.dumps({"up": True}), file=lines, flush=True)
        for line in lines:
            what = json.loads(line)
            name = what["program"]
            if name not in programs:
                programs[name] = program(name, len(places), what["size"])
            begin, done, taken = time.monotonic(), [0.0], []
            while len(done) <= what.get("steps", 1 << 30) and done[-1] < what.get("seconds", LONGEST):
                taken.append(programs[name].step(what["way"]))
                done.append(time.monotonic() - begin)
            said = {"done": done[1:], "taken": taken, "score": programs[name].finish(what["way"])}
            print(json.dumps(said), file=lines, flush=True)


if __name__ == "__main__":
    main()

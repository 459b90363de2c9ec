"""Seeded chaos: clients put, get, reduce and delete at random while nodes are killed, stopped and started and clients vanish."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from history import History, content, problems
from rig import Outside, Rig, eventually

from hrdma.errors import HrdmaError
from hrdma.objects import Client, ObjectRef

RUNS = int(os.environ.get("CHAOS_RUNS", "20"))  # beyond 20, seeds hurt more than once
SMALL, LARGE = 100, 40_000  # int64: one inline, one not
TIMEOUT = 6.0
HEARTBEAT = 0.4
NODES = ("a", "b", "c")
OBJECTS = 12
SECONDS = 0.5


class Run:
    """One seed."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig, self.seed = rig, seed
        draw = random.Random(seed)
        self.n = SMALL if seed % 4 == 3 else LARGE
        self.names = [f"o{i}" for i in range(OBJECTS)]
        self.plan = {name: draw.choice(["a", "b", "c"]) for name in self.names}
        self.history = History()
        self.over = threading.Event()
        self.errors: list[BaseException] = []
        self.sums = iter(range(1000))
        self.results: list[ObjectRef] = []
        self.guard = threading.Lock()

    def client(self, node: str) -> Client | None:
        """A client of a node, or of any other when that one is gone."""
        for name in [node, *NODES, "d", "e", "f"]:
            if name in self.rig.nodes:
                try:
                    with self.guard:
                        return self.rig.client(name, timeout=2.0)
                except (HrdmaError, TimeoutError, OSError):
                    continue
        return None

    def work(self, node: str, number: int) -> None:
        draw = random.Random(f"{self.seed}/{number}")
        try:
            client = None
            todo = [name for name in self.names if self.plan[name] == node]
            while not self.over.is_set():
                client = client or self.client(node)
                if client is None:
                    time.sleep(0.05)
                elif not self.step(client, node, number, draw, todo):
                    client = None
        except BaseException as error:
            self.errors.append(error)

    def step(self, client: Client, node: str, number: int, draw: random.Random, todo: list[str]) -> bool:
        what = draw.random()
        if todo and what < 0.7:
            return self.call(client, node, number, "put", todo.pop(draw.randrange(len(todo))))
        if what < 0.85:
            return self.call(client, node, number, "get", draw.choice(self.names))
        if what < 0.97:
            names = draw.sample(self.names, draw.randint(1, 6))
            return self.call(
                client, node, number, "sum", f"s{number}.{next(self.sums)}", names, draw.randint(1, len(names))
            )
        with suppress(OSError):  # closed already, as its node is gone
            client._sock.shutdown(socket.SHUT_RDWR)  # as when its process is killed
        return False

    def call(self, client: Client, node: str, number: int, verb: str, name: str, names=(), count: int = 0) -> bool:
        timeout = 0.3 if verb != "put" else TIMEOUT
        call = self.history.begin(f"{number}", node, verb, name, timeout, names=list(names), count=count)
        try:
            value = None
            if verb == "put":
                client.put(content(name, self.n), id=name, timeout=timeout)
            elif verb == "get":
                value = client.get(client.ref(name), timeout=timeout).copy()
            else:
                refs, result = [client.ref(part) for part in names], client.ref(name)
                if number % 2:  # in pieces
                    value = client.allreduce(refs, count=count, id=name, timeout=timeout).copy()
                else:
                    # Every other one without a name: of small objects the client makes it, where all count.
                    result = client.reduce(refs, count=count, id=name if count % 2 else None, timeout=timeout)
                    self.results.append(result)
                    value = client.get(result, timeout=max(0.0, call.deadline - time.monotonic())).copy()
                parts = client.contributors(result, timeout=max(0.0, call.deadline + 1 - time.monotonic()))
                value = (value, [part.id for part in parts])
        except Exception as error:
            self.history.end(call, type(error).__name__, str(error))
            return "gone" not in str(error) and "closed" not in str(error)
        self.history.end(call, "ok", value)
        return True

    def hurt(self, draw: random.Random) -> None:
        """One thing at a time: the next comes when the nodes agree again."""
        victim = draw.choice(sorted(self.rig.nodes))
        self.history.hurts(victim)
        if draw.random() < 0.7:
            with self.guard:
                self.rig.kill(victim)
                self.rig.grow(draw.choice([name for name in "def" if name not in self.rig.nodes]))
        else:
            self.rig.nodes[victim].signal(signal.SIGSTOP)
            time.sleep(draw.choice([0.05, 2 * HEARTBEAT]))
            self.rig.nodes[victim].signal(signal.SIGCONT)
        self.settle()

    def settle(self) -> None:
        def settled() -> bool:
            views = []
            for name in self.rig.nodes:
                client = self.client(name)
                if client is None:
                    return False
                views.append(sorted(client.info(timeout=2)["nodes"]))
            return all(view == views[0] for view in views) and len(views[0]) == len(self.rig.nodes)

        def quietly() -> bool:
            try:
                return settled()
            except (HrdmaError, TimeoutError):
                return False

        eventually(quietly, 20, "one view")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(RUNS))
def test_chaos(rig_of, zygote, seed):
    rig = rig_of(Outside, heartbeat=HEARTBEAT, devices="sim" if seed % 2 else "")  # by RDMA every other time
    rig.grow(*NODES)
    rig.settle()
    run = Run(rig, seed)
    draw = random.Random(seed)
    threads = [threading.Thread(target=run.work, args=(node, i)) for i, node in enumerate("abc")]
    for thread in threads:
        thread.start()
    try:
        time.sleep(draw.uniform(0.02, SECONDS / 2))
        for _ in range(1 + seed // 20 % 3):
            run.hurt(draw)
        time.sleep(SECONDS / 2)
    finally:
        run.over.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert not run.errors, run.errors
    assert not (found := problems(run.history, dict.fromkeys(run.names, run.n))), "\n".join(found)
    still_there(run)
    clean(run)


def still_there(run: Run) -> None:
    """What was put on a node that nobody hurt can be got, now that all is quiet."""
    client = run.client("a")
    hurt = {node for _, node in run.history.hurt}
    for call in run.history.calls:
        if call.verb == "put" and call.outcome == "ok" and call.node not in hurt:
            assert np.array_equal(client.get(client.ref(call.name), timeout=10), content(call.name, run.n)), call.name


def clean(run: Run) -> None:
    """Deletes everything: no node may hold a byte after."""
    client = run.client("a")
    for ref in [client.ref(name) for name in {call.name for call in run.history.calls}] + run.results:
        client.delete(ref, timeout=5)
    for other in run.rig.clients:
        if other is not client:
            other.close()
    for name in run.rig.nodes:
        last = run.client(name)
        try:
            eventually(lambda last=last: last.info()["used"] == 0)
        except AssertionError:
            raise AssertionError(f"the store of {name} is not empty: {last.info()['holders']}") from None


def test_the_checker_sees_each_fault():
    names = {"o1": 5, "o2": 5}

    def one(verb, name, outcome, value=None, node="a", **args):
        history = History()
        put = history.begin("0", "a", "put", "o1", 1)
        history.end(put, "ok")
        call = history.begin("0", node, verb, name, 1, **args)
        history.end(call, outcome, value)
        return history, call

    good = content("o1", 5)
    both = good + content("o2", 5)
    asked = {"names": ["o1", "o2"], "count": 2}
    assert problems(one("get", "o1", "ok", good)[0], names) == []
    assert problems(one("sum", "s", "ok", (both, ["o1", "o2"]), **asked)[0], names) == []
    wrong = [
        (one("get", "o1", "ok", good + 1), "something else"),
        (one("get", "o1", "ObjectLost"), "never hurt"),
        (one("get", "o1", "open"), "never returned"),
        (one("get", "o1", "KeyError"), "ended with KeyError"),
        (one("sum", "s", "ok", (both + 1, ["o1", "o2"]), **asked), "not the sum"),
        (one("sum", "s", "ok", (2 * good, ["o1", "o1"]), **asked), "twice"),
        (one("sum", "s", "ok", (good, ["o1"]), **asked), "instead of 2"),
        (one("sum", "s", "ok", (both, ["o1", "o2"]), names=["o1", "o3"], count=2), "not asked for"),
    ]
    for (history, _), text in wrong:
        assert [problem for problem in problems(history, names) if text in problem], text
    history, call = one("get", "o1", "ok", good)
    call.end = call.deadline + 60
    assert "after its deadline" in problems(history, names)[0]
    history, call = one("get", "o1", "ObjectLost")
    history.hurt.append((call.begin, "a"))
    assert problems(history, names) == [], "its node was hurt: it may be lost"

"""Averages of the first gradients that arrive from Ray actors, moved by hrdma.objects or by Ray's own objects.

The server sends weights to whoever is idle, and takes the average of any `count` of the gradients that are under way. Whoever
is in it gets the next weights; the others keep computing, and are in a later average. An actor that dies is not waited for; it is
asked again where Ray has restarted it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np

__all__ = ["WAYS", "Source", "ThroughHrdma", "ThroughRay"]

PATIENCE = 300.0  # seconds for gradients; hrdma's calls have the same by default


class Source(ABC):
    """An actor that computes gradients."""

    @abstractmethod
    def compute(self, weights: np.ndarray) -> np.ndarray:
        """The gradient at these weights."""

    def through_hrdma(self, weights: Any, name: str) -> str:
        """`weights` is a reference; the gradient becomes the object of this name. Returns the node that holds it."""
        from hrdma.integrations.ray import connect

        objects = connect()
        objects.put(self.compute(objects.get(weights)), id=name)
        return objects.info()["node"]

    def through_ray(self, weights: np.ndarray) -> np.ndarray:
        return self.compute(weights)


class Asked(NamedTuple):
    """What an actor is computing."""

    number: int  # of the actor
    weights: Any
    call: Any


class ThroughHrdma:
    """The server's side: rounds of put, reduce of the first to arrive, get.

    The names of the gradients to come are known, so that the sum is made on the way, between the hosts of the actors, from
    those that arrive first.
    """

    def __init__(self, actors: list[Any], count: int) -> None:
        from hrdma.integrations.ray import connect

        self.objects = connect()
        self.actors, self.count = actors, count
        self.busy: dict[Any, Asked] = {}  # by the gradient to come
        self.idle = list(range(len(actors)))
        self.taken: list[int] = []  # whose gradients are in the last average
        self.rounds = 0

    def step(self, weights: np.ndarray) -> np.ndarray:
        """Sends the weights to whoever is idle; the average of the first gradients of all that are under way."""
        objects, current = self.objects, self.objects.put(weights)
        nodes = objects.info()["nodes"]
        self.idle += self._forget([ref for ref, asked in self.busy.items() if gone(asked.call, nodes)])
        for number in self.idle:
            name = f"gradient of {number} in {self.rounds} for {current.id}"
            self.busy[objects.ref(name)] = Asked(
                number, current, self.actors[number].through_hrdma.remote(current, name)
            )
        average = objects.reduce(list(self.busy), "avg", count=self.count)
        found = objects.get(average).copy()
        self.idle = self._forget(objects.contributors(average))
        self.taken = list(self.idle)
        objects.delete(average, async_op=True)
        self.rounds += 1
        return found

    def finish(self) -> None:
        """Waits for the gradients that nobody takes any more."""
        import ray

        if self.busy:
            ray.wait([asked.call for asked in self.busy.values()], num_returns=len(self.busy), timeout=PATIENCE)
        self.idle += self._forget(list(self.busy))

    def _forget(self, gradients: list[Any]) -> list[int]:
        """Deletes gradients, and the weights that no gradient is made at any more; whose they were."""
        done = [self.busy.pop(ref) for ref in gradients]
        used = {asked.weights for asked in self.busy.values()}
        for old in [*gradients, *({asked.weights for asked in done} - used)]:
            self.objects.delete(old, async_op=True)
        return [asked.number for asked in done]


class ThroughRay:
    """The same with Ray's own objects: the server fetches each gradient and adds them itself."""

    def __init__(self, actors: list[Any], count: int) -> None:
        self.actors, self.count = actors, count
        self.busy: dict[Any, int] = {}
        self.idle = list(range(len(actors)))
        self.taken: list[int] = []

    def step(self, weights: np.ndarray) -> np.ndarray:
        import ray

        current = ray.put(weights)
        for number in self.idle:
            self.busy[self.actors[number].through_ray.remote(current)] = number
        self.idle, self.taken = [], []
        found: list[Any] = []
        while len(found) < self.count:
            wanted = self.count - len(found)
            first, _ = ray.wait(list(self.busy), num_returns=wanted, timeout=PATIENCE)
            if len(first) < wanted:
                raise TimeoutError(f"{len(first)} of {wanted} gradients came within {PATIENCE:g} s; is an actor stuck?")
            for ref in first:
                self.idle.append(self.busy.pop(ref))
                if not lost(ref):
                    self.taken.append(self.idle[-1])
                    found.append(ref)
        return np.mean(ray.get(found), axis=0)

    def finish(self) -> None:
        import ray

        if self.busy:
            ray.wait(list(self.busy), num_returns=len(self.busy), timeout=PATIENCE, fetch_local=False)
        self.idle += self.busy.values()
        self.busy.clear()


def gone(call: Any, nodes: list[str]) -> bool:
    """Whether the gradient of a call will not come: its actor is gone, or has answered and its host is gone since."""
    import ray

    return lost(call) or (bool(ray.wait([call], timeout=0, fetch_local=False)[0]) and ray.get(call) not in nodes)


def lost(call: Any) -> bool:
    """Whether a call has failed since its actor, or what it returned, is gone. What the actor itself raised is raised here."""
    import ray
    from ray.exceptions import ObjectLostError, RayActorError

    if not ray.wait([call], timeout=0, fetch_local=False)[0]:
        return False
    try:
        ray.get(call)
    except (RayActorError, ObjectLostError):
        return True
    return False


WAYS: dict[str, type[ThroughHrdma] | type[ThroughRay]] = {"hrdma": ThroughHrdma, "ray": ThroughRay}

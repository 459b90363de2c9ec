"""Asynchronous SGD on Ray: the server takes the first half of the gradients that arrive, and goes on without the rest.

    python -m hrdma.examples.async_sgd --workers 8        (pip install 'hrdma[demo,ray]')
    python -m hrdma.examples.async_sgd --through ray      the same, moved by Ray's own objects

Ray places the workers and calls them; hrdma.objects moves weights and gradients. The server knows the names of the gradients
to come, asks for the average of any half of them, and gets it: the sum is made on the way, between the workers' hosts, from
those that arrive first. Whoever is in it gets the new weights; the others keep computing, and are in a later average. A
worker that dies is never waited for.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.util import find_spec
from typing import Any

import numpy as np

from hrdma.examples.train_digits import ENOUGH, HELD_BACK, Network

BATCH = 64


def digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    images, shown = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    return (images[order] / 16).astype("float32"), shown[order]


class Worker:
    """An actor: the gradient of a random batch at the weights that it is given. Every other one is slow."""

    def __init__(self, number: int, delay: float) -> None:
        x, labels = digits()
        self.x, self.labels = x[HELD_BACK:], labels[HELD_BACK:]
        self.random = np.random.default_rng(number)
        self.delay = delay * (number % 2)
        self.network = Network()

    def compute(self, weights: np.ndarray) -> np.ndarray:
        self.network.theta[:] = weights
        mine = self.random.integers(0, len(self.x), BATCH)
        self.network.backward(self.x[mine], self.labels[mine])
        time.sleep(self.delay)
        return self.network.grad

    def through_hrdma(self, weights: Any, name: str) -> None:
        """`weights` is a reference; the gradient becomes the object of this name."""
        from hrdma.integrations.ray import connect

        objects = connect()
        objects.put(self.compute(objects.get(weights)), id=name)

    def through_ray(self, weights: np.ndarray) -> np.ndarray:
        return self.compute(weights)


class ThroughHrdma:
    """The server's side: rounds of put, reduce of the first half, get."""

    def __init__(self, workers: list[Any]) -> None:
        from hrdma.integrations.ray import connect

        self.objects = connect()
        self.workers = workers
        self.busy: dict[Any, tuple[int, Any]] = {}  # gradient to come -> whose it is, and at which weights
        self.idle = list(range(len(workers)))
        self.rounds = 0

    def step(self, weights: np.ndarray) -> np.ndarray:
        """Sends the weights to whoever is idle; the average of the first half of all gradients that are under way."""
        objects, current = self.objects, self.objects.put(weights)
        for number in self.idle:
            name = f"gradient of {number} in {self.rounds}"
            self.workers[number].through_hrdma.remote(current, name)
            self.busy[objects.ref(name)] = (number, current)
        average = objects.reduce(list(self.busy), "avg", count=len(self.workers) // 2)
        found = objects.get(average).copy()
        used = {self.busy[ref][1] for ref in self.busy}
        self.idle = []
        for ref in objects.contributors(average):
            self.idle.append(self.busy.pop(ref)[0])
            objects.delete(ref)
        for old in [average, *(used - {weights for _, weights in self.busy.values()})]:
            objects.delete(old)
        self.rounds += 1
        return found


class ThroughRay:
    """The same with Ray's own objects: the server fetches each gradient and adds them itself."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers
        self.busy: dict[Any, int] = {}
        self.idle = list(range(len(workers)))

    def step(self, weights: np.ndarray) -> np.ndarray:
        import ray

        current = ray.put(weights)
        for number in self.idle:
            self.busy[self.workers[number].through_ray.remote(current)] = number
        first, _ = ray.wait(list(self.busy), num_returns=len(self.workers) // 2)
        self.idle = [self.busy.pop(ref) for ref in first]
        return np.mean(ray.get(first), axis=0)


def main() -> int:
    parser = argparse.ArgumentParser(description="asynchronous SGD on Ray, on the UCI hand-written digits")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--rate", type=float, default=0.3, help="learning rate (default: 0.3)")
    parser.add_argument("--delay", type=float, default=0.02, help="seconds by which every other worker is slower")
    parser.add_argument("--through", choices=["hrdma", "ray"], default="hrdma", help="what moves weights and gradients")
    parser.add_argument("--address", help="of a Ray cluster; a new one on this machine where it is not given")
    how = parser.parse_args()
    if how.workers < 2:
        parser.error(f"--workers {how.workers}: at least 2, of which the first half is waited for")
    for package, extra in (("sklearn", "demo"), ("ray", "ray")):
        if find_spec(package) is None:
            parser.error(f"{package} is needed: pip install 'hrdma[{extra}]'")
    import ray

    ray.init(address=how.address, include_dashboard=None if how.address else False, log_to_driver=False)
    actor = ray.remote(num_cpus=0)(Worker)
    workers = [actor.remote(number, how.delay) for number in range(how.workers)]
    server = ThroughHrdma(workers) if how.through == "hrdma" else ThroughRay(workers)
    x, labels = digits()
    network = Network()
    network.randomise(seed=0)
    begin = time.perf_counter()
    for number in range(how.rounds):
        network.theta -= how.rate * server.step(network.theta)
        if number % 100 == 99:
            accuracy = network.accuracy(x[:HELD_BACK], labels[:HELD_BACK])
            print(
                f"round {number + 1:4d}   test accuracy {accuracy:.3f}   {time.perf_counter() - begin:5.1f} s",
                flush=True,
            )
    seconds = time.perf_counter() - begin
    accuracy = network.accuracy(x[:HELD_BACK], labels[:HELD_BACK])
    print(
        f"test accuracy {accuracy:.4f} after {how.rounds} rounds, {how.rounds / seconds:.1f} a second, through {how.through}"
    )
    ray.shutdown()
    return 0 if accuracy > ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())

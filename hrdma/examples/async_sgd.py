"""Asynchronous SGD on Ray: the server takes the first half of the gradients that arrive, and goes on without the rest.

    python -m hrdma.examples.async_sgd --workers 8        (pip install 'hrdma[demo,ray]')
    python -m hrdma.examples.async_sgd --through ray      the same, moved by Ray's own objects

Ray places the workers and calls them; hrdma.objects moves weights and gradients (`arriving.py`). The server knows the names
of the gradients to come, asks for the average of any half of them, and gets it: the sum is made on the way, between the
workers' hosts, from those that arrive first. Whoever is in it gets the new weights; the others keep computing, and are in a
later average. A worker that dies is never waited for.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.util import find_spec

import numpy as np

from hrdma.examples.arriving import WAYS, Source, ThroughHrdma, ThroughRay
from hrdma.examples.train_digits import ENOUGH, HELD_BACK, HIDDEN, Network, digits

BATCH = 64
RATE = 0.3


class Worker(Source):
    """An actor: the gradient of a random batch at the weights that it is given. Every other one is slow."""

    def __init__(self, number: int, delay: float, hidden: int = HIDDEN, batch: int = BATCH) -> None:
        x, labels = digits()
        self.x, self.labels = x[HELD_BACK:], labels[HELD_BACK:]
        self.random = np.random.default_rng(number)
        self.batch, self.delay = batch, delay * (number % 2)
        self.network = Network(hidden)

    def compute(self, weights: np.ndarray) -> np.ndarray:
        self.network.theta[:] = weights
        mine = self.random.integers(0, len(self.x), self.batch)
        self.network.backward(self.x[mine], self.labels[mine])
        time.sleep(self.delay)
        return self.network.grad


class Training:
    """The server: the parameters, and a step with each average."""

    def __init__(self, hidden: int = HIDDEN, rate: float = RATE) -> None:
        x, labels = digits()
        self.test = x[:HELD_BACK], labels[:HELD_BACK]
        self.network = Network(hidden)
        self.network.randomise(seed=0)
        self.rate = rate * HIDDEN / hidden  # of a wider layer each step moves the scores by more

    def step(self, averages: ThroughHrdma | ThroughRay) -> None:
        self.network.theta -= self.rate * averages.step(self.network.theta)

    def score(self) -> float:
        return self.network.accuracy(*self.test)


def main() -> int:
    parser = argparse.ArgumentParser(description="asynchronous SGD on Ray, on the UCI hand-written digits")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--rate", type=float, default=RATE, help=f"learning rate (default: {RATE})")
    parser.add_argument("--delay", type=float, default=0.02, help="seconds by which every other worker is slower")
    parser.add_argument("--through", choices=list(WAYS), default="hrdma", help="what moves weights and gradients")
    parser.add_argument("--address", help="of a Ray cluster; a new one on this machine where it is not given")
    how = parser.parse_args()
    if how.workers < 2:
        parser.error(f"--workers {how.workers}: at least 2, of which the first half is waited for")
    for package, extra in (("sklearn", "demo"), ("ray", "ray")):
        if find_spec(package) is None:
            parser.error(f"{package} is needed: pip install 'hrdma[{extra}]'")
    import ray

    ray.init(address=how.address, include_dashboard=None if how.address else False, log_to_driver=False)
    actor = ray.remote(num_cpus=0, max_restarts=-1)(Worker)
    workers = [actor.remote(number, how.delay) for number in range(how.workers)]
    averages = WAYS[how.through](workers, how.workers // 2)
    training = Training(rate=how.rate)
    begin = time.perf_counter()
    for number in range(how.rounds):
        training.step(averages)
        if number % 100 == 99:
            seconds = time.perf_counter() - begin
            print(f"round {number + 1:4d}   test accuracy {training.score():.3f}   {seconds:5.1f} s", flush=True)
    seconds, accuracy = time.perf_counter() - begin, training.score()
    print(
        f"test accuracy {accuracy:.4f} after {how.rounds} rounds, {how.rounds / seconds:.1f} a second, through {how.through}"
    )
    ray.shutdown()
    return 0 if accuracy > ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())

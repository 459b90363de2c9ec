"""Serving an ensemble on Ray: each request goes to eight models, and what most of them say is the answer.

    python -m hrdma.examples.ensemble                     (pip install 'hrdma[demo,ray]')
    python -m hrdma.examples.ensemble --through ray       the same, moved by Ray's own objects

A request is a batch of images that all models get: one put, and a get by each of them, which pass it on to each other while it
arrives. Models differ in width, and in the images that they have learned from.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from hrdma.examples.train_digits import ENOUGH, HELD_BACK, Network, digits

MODELS = 8
WIDTHS = (32, 48, 64, 96)
LESSONS, BATCH, RATE = 1500, 64, 0.2


class Model:
    """An actor: a network that has learned from images drawn for it, with repetition."""

    def __init__(self, number: int) -> None:
        x, labels = digits()
        random = np.random.default_rng(number)
        mine = HELD_BACK + random.integers(0, len(x) - HELD_BACK, len(x) - HELD_BACK)
        self.network = Network(WIDTHS[number % len(WIDTHS)])
        self.network.randomise(seed=number)
        for _ in range(LESSONS):
            batch = random.choice(mine, BATCH)
            self.network.backward(x[batch], labels[batch])
            self.network.theta -= RATE * self.network.grad

    def ready(self) -> bool:
        return True

    def through_hrdma(self, images: Any) -> np.ndarray:
        """`images` is a reference."""
        from hrdma.integrations.ray import connect

        return self.through_ray(connect().get(images))

    def through_ray(self, images: np.ndarray) -> np.ndarray:
        """What each image shows."""
        return self.network.forward(images)[1].argmax(axis=1).astype("uint8")


def ask_through_hrdma(models: list[Any], images: np.ndarray) -> list[np.ndarray]:
    import ray

    from hrdma.integrations.ray import connect

    objects = connect()
    request = objects.put(images)
    try:
        return ray.get([model.through_hrdma.remote(request) for model in models])
    finally:
        objects.delete(request, async_op=True)


def ask_through_ray(models: list[Any], images: np.ndarray) -> list[np.ndarray]:
    import ray

    request = ray.put(images)
    return ray.get([model.through_ray.remote(request) for model in models])


WAYS: dict[str, Callable[[list[Any], np.ndarray], list[np.ndarray]]] = {
    "hrdma": ask_through_hrdma,
    "ray": ask_through_ray,
}


def majority(votes: list[np.ndarray]) -> np.ndarray:
    """Of each image the digit with most votes; of several the smallest."""
    return (np.stack(votes)[..., None] == np.arange(10)).sum(axis=0).argmax(axis=1)


class Requests:
    """Batches of images that no model has learned from, and how many were answered correctly."""

    def __init__(self, images: int) -> None:
        x, labels = digits()
        self.test = x[:HELD_BACK], labels[:HELD_BACK]
        self.random = np.random.default_rng(0)
        self.size = images
        self.asked = self.right = 0

    def step(self, through: str, models: list[Any]) -> None:
        """One request, and its answer."""
        x, labels = self.test
        mine = self.random.integers(0, HELD_BACK, self.size)
        answer = majority(WAYS[through](models, x[mine]))
        self.asked += len(mine)
        self.right += int((answer == labels[mine]).sum())

    def score(self) -> float:
        return self.right / self.asked


def main() -> int:
    parser = argparse.ArgumentParser(description="an ensemble of models on Ray that reads hand-written digits")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--images", type=int, default=2000, help="of a request")
    parser.add_argument("--through", choices=list(WAYS), default="hrdma", help="what moves the images")
    parser.add_argument("--address", help="of a Ray cluster; a new one on this machine where it is not given")
    how = parser.parse_args()
    for package, extra in (("sklearn", "demo"), ("ray", "ray")):
        if find_spec(package) is None:
            parser.error(f"{package} is needed: pip install 'hrdma[{extra}]'")
    import ray

    ray.init(address=how.address, include_dashboard=None if how.address else False, log_to_driver=False)
    actor = ray.remote(num_cpus=0)(Model)
    models = [actor.remote(number) for number in range(MODELS)]
    ray.get([model.ready.remote() for model in models])
    requests = Requests(how.images)
    begin = time.perf_counter()
    for _ in range(how.requests):
        requests.step(how.through, models)
    seconds = time.perf_counter() - begin
    print(
        f"test accuracy {requests.score():.4f} in {how.requests} requests of {how.images} images, "
        f"{how.requests / seconds:.1f} a second, through {how.through}"
    )
    ray.shutdown()
    return 0 if requests.score() > ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())

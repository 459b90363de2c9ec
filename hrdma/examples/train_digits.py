"""Data-parallel training on the UCI hand-written digits: numpy learns, hrdma averages the gradients.

    hrdma run -n 4 -m hrdma.examples.train_digits

Each rank takes its share of every batch and computes gradients into one flat, registered buffer. One allreduce per step
averages that buffer over all ranks; then all ranks make the same update, and their parameters stay identical to the
bit. What of hrdma is used: init, empty, zeros, broadcast, allreduce, allgather, stats.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread of matrix products per rank: the ranks share the cores

import numpy as np

import hrdma

IMAGES = (1797, 64)
HIDDEN = 96
HELD_BACK = 360  # samples for the test
MOMENTUM = 0.9
ENOUGH = 0.95  # test accuracy that counts as success


class Network:
    """One hidden layer. All parameters lie in one flat array, their gradients in another: one allreduce takes all."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        shapes = ((64, hidden), (hidden,), (hidden, 10), (10,))  # weights and biases of two layers
        n = sum(int(np.prod(shape)) for shape in shapes)
        self.theta = hrdma.zeros(n, "float32")
        self.grad = hrdma.zeros(n, "float32")
        self.w1, self.b1, self.w2, self.b2 = views(self.theta, shapes)
        self.grad_w1, self.grad_b1, self.grad_w2, self.grad_b2 = views(self.grad, shapes)

    def randomise(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        for weights in (self.w1, self.w2):
            weights[:] = random.normal(0, np.sqrt(2 / len(weights)), weights.shape)

    def forward(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The hidden layer, and the probability of each digit."""
        hidden = np.maximum(x @ self.w1 + self.b1, 0)
        scores = hidden @ self.w2 + self.b2
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        return hidden, chances / chances.sum(axis=1, keepdims=True)

    def backward(self, x: np.ndarray, labels: np.ndarray) -> float:
        """Fills ``grad`` with the mean gradient of these samples; their mean loss."""
        hidden, chances = self.forward(x)
        rows = np.arange(len(labels))
        loss = -np.log(chances[rows, labels] + 1e-9).mean()
        chances[rows, labels] -= 1
        chances /= len(labels)
        np.matmul(hidden.T, chances, out=self.grad_w2)
        np.sum(chances, axis=0, out=self.grad_b2)
        back = (chances @ self.w2.T) * (hidden > 0)
        np.matmul(x.T, back, out=self.grad_w1)
        np.sum(back, axis=0, out=self.grad_b1)
        return float(loss)

    def accuracy(self, x: np.ndarray, labels: np.ndarray) -> float:
        return float((self.forward(x)[1].argmax(axis=1) == labels).mean())


def views(flat: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """The parts of a flat array, in these shapes."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=True)]


def digits() -> tuple[np.ndarray, np.ndarray]:
    """1797 images of 8 x 8 and what they show, shuffled; scikit-learn's copy, without its import, which takes a second and a half."""
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("scikit-learn's copy of the digits is needed: pip install 'hrdma[demo]'")
    rows = np.loadtxt(Path(found.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    return (rows[:, :-1] / 16).astype("float32"), rows[:, -1].astype("int64")


def load(comm: hrdma.Communicator) -> tuple[np.ndarray, np.ndarray]:
    """The digits: rank 0 reads them, the others get them from it."""
    x = hrdma.empty(IMAGES, "float32")
    labels = hrdma.empty(len(x), "int64")
    if comm.rank == 0:
        x[:], labels[:] = digits()
    comm.broadcast(x, root=0)
    comm.broadcast(labels, root=0)
    return x, labels


def train(
    comm: hrdma.Communicator, network: Network, x: np.ndarray, labels: np.ndarray, how: argparse.Namespace
) -> tuple[int, float, float]:
    """Trains; the number of steps, seconds in all, and seconds of these in communication."""
    network.randomise(seed=comm.rank)
    comm.broadcast(network.theta, root=0)  # all begin with the parameters of rank 0
    velocity = np.zeros_like(network.theta)
    random = np.random.default_rng(1)  # the same order of samples on all ranks
    share = how.batch // comm.size
    steps = len(x) // how.batch
    communication = 0.0
    begin = time.perf_counter()
    for epoch in range(how.epochs):
        order = random.permutation(len(x))
        rate = how.rate * (1 - epoch / how.epochs)
        loss = 0.0
        for step in range(steps):
            first = step * how.batch + comm.rank * share
            mine = order[first : first + share]
            loss += network.backward(x[mine], labels[mine])
            before = time.perf_counter()
            comm.allreduce(network.grad, op="avg")
            communication += time.perf_counter() - before
            velocity *= MOMENTUM
            velocity -= rate * network.grad
            network.theta += velocity
        if comm.rank == 0 and (epoch % 5 == 4 or epoch == how.epochs - 1):
            seconds = time.perf_counter() - begin
            print(f"epoch {epoch + 1:3d} of {how.epochs}   loss {loss / steps:.4f}   {seconds:5.1f} s", flush=True)
    return how.epochs * steps, time.perf_counter() - begin, communication


def same_everywhere(comm: hrdma.Communicator, theta: np.ndarray) -> tuple[bool, str]:
    """Whether all ranks hold these very bits: their digests are gathered and compared."""
    digest = np.frombuffer(hashlib.sha256(theta.tobytes()).digest(), np.uint8)
    digests = comm.allgather(digest).reshape(comm.size, -1)
    return bool((digests == digest).all()), digest.tobytes().hex()


def report(comm: hrdma.Communicator, nbytes: int, steps: int, seconds: float, communication: float) -> None:
    """One table of what the transport did, as this rank saw it."""
    from rich.console import Console
    from rich.table import Table

    stats = comm.stats()
    table = Table(
        title=f"What the transport did, seen from rank {comm.rank}", title_justify="left", box=None, pad_edge=False
    )
    for title in ("peer", "provider", "sent", "received or read", "messages", "in communication", "busbw"):
        table.add_column(title, justify="left" if title in ("peer", "provider") else "right", no_wrap=True)
    for peer, found in stats["peers"].items():
        messages = found["tx_msgs"] + found["rx_msgs"]
        table.add_row(
            f"rank {peer}", found["provider"], megabytes(found["tx_bytes"]), megabytes(found["rx_bytes"]), str(messages)
        )
    moved = 2 * (comm.size - 1) / comm.size * nbytes * steps
    table.add_row(
        "all",
        f"{steps} allreduces of {nbytes / 1e3:.1f} kB",
        megabytes(stats["tx_bytes"]),
        megabytes(stats["rx_bytes"]),
        str(sum(found["tx_msgs"] + found["rx_msgs"] for found in stats["peers"].values())),
        f"{communication:.2f} of {seconds:.2f} s",
        f"{moved / communication / 1e9:.2f} GB/s",
        style="bold",
    )
    Console(width=120, highlight=False).print(table)


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.2f} MB"


def main() -> int:
    parser = argparse.ArgumentParser(description="data-parallel training on the UCI hand-written digits")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64, help="samples of all ranks together (default: 64)")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate at the beginning (default: 0.05)")
    how = parser.parse_args()
    samples = IMAGES[0] - HELD_BACK
    if find_spec("sklearn") is None:
        parser.error("scikit-learn's copy of the digits is needed: pip install 'hrdma[demo]'")
    with hrdma.init() as comm:
        if not comm.size <= how.batch <= samples:
            parser.error(f"--batch {how.batch}: between {comm.size}, the ranks, and {samples}, the samples")
        x, labels = load(comm)
        network = Network()
        steps, seconds, communication = train(comm, network, x[HELD_BACK:], labels[HELD_BACK:], how)
        identical, digest = same_everywhere(comm, network.theta)
        accuracy = network.accuracy(x[:HELD_BACK], labels[:HELD_BACK])
        if comm.rank == 0:
            report(comm, network.grad.nbytes, steps, seconds, communication)
            print(f"test accuracy {accuracy:.4f} on {HELD_BACK} digits that were held back")
            verdict = "bit-identical" if identical else "NOT IDENTICAL"
            print(f"parameters of all {comm.size} ranks are {verdict} (sha256 {digest[:16]}...)")
    return 0 if identical and accuracy > ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())

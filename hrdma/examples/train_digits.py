"""Data-parallel training on the UCI hand-written digits: numpy does the learning, hrdma averages the gradients.

    hrdma run -n 4 -m hrdma.examples.train_digits

Each rank takes its share of every batch, computes gradients into one flat registered buffer, and one allreduce per step
averages them. All ranks then make the same update, so their parameters stay identical to the bit, which is proved at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time

import numpy as np

import hrdma
from hrdma.communicator import Communicator

SHAPES = ((64, 96), (96,), (96, 10), (10,))  # two layers: weights and biases
TEST = 360  # samples held back


class Network:
    """A perceptron with one hidden layer whose parameters, and whose gradients, each lie in one flat array."""

    def __init__(self, seed: int) -> None:
        sizes = [int(np.prod(shape)) for shape in SHAPES]
        self.theta = np.zeros(sum(sizes), np.float32)
        self.grad = hrdma.empty(sum(sizes), "float32")
        self.w1, self.b1, self.w2, self.b2 = self._views(self.theta, sizes)
        self.g_w1, self.g_b1, self.g_w2, self.g_b2 = self._views(self.grad, sizes)
        random = np.random.default_rng(seed)
        for weights in (self.w1, self.w2):
            weights[:] = random.normal(0, np.sqrt(2 / len(weights)), weights.shape)

    @staticmethod
    def _views(flat: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, SHAPES, strict=True)]

    def forward(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        hidden = np.maximum(x @ self.w1 + self.b1, 0)
        scores = hidden @ self.w2 + self.b2
        scores -= scores.max(axis=1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=1, keepdims=True)
        return hidden, scores

    def gradients(self, x: np.ndarray, labels: np.ndarray) -> float:
        """Fills ``grad`` with the mean over the given samples and returns their mean loss."""
        hidden, chance = self.forward(x)
        rows = np.arange(len(labels))
        loss = -float(np.mean(np.log(chance[rows, labels] + 1e-9)))
        chance[rows, labels] -= 1
        chance /= len(labels)
        np.matmul(hidden.T, chance, out=self.g_w2)
        np.sum(chance, axis=0, out=self.g_b2)
        back = (chance @ self.w2.T) * (hidden > 0)
        np.matmul(x.T, back, out=self.g_w1)
        np.sum(back, axis=0, out=self.g_b1)
        return loss

    def accuracy(self, x: np.ndarray, labels: np.ndarray) -> float:
        return float(np.mean(self.forward(x)[1].argmax(axis=1) == labels))


def load() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("this example needs scikit-learn's copy of the digits: pip install hrdma[demo]") from None
    x, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return (x[order] / 16).astype(np.float32), labels[order]


def train(comm: Communicator, epochs: int, batch: int, rate: float) -> Network:
    """Trains; batch is the number of samples that all ranks take together in a step."""
    x, labels = load()
    x, labels = x[TEST:], labels[TEST:]
    network = Network(seed=1)
    momentum = np.zeros_like(network.theta)
    random = np.random.default_rng(2)  # the same order on every rank
    share = batch // comm.size
    steps = len(x) // batch
    begin = time.perf_counter()
    inside = 0.0
    for epoch in range(epochs):
        order = random.permutation(len(x))
        loss = 0.0
        for step in range(steps):
            first = step * batch + comm.rank * share
            mine = order[first : first + share]
            loss += network.gradients(x[mine], labels[mine])
            before = time.perf_counter()
            comm.allreduce(network.grad, op="avg")
            inside += time.perf_counter() - before
            momentum *= 0.9
            momentum += network.grad
            network.theta -= rate * (1 - epoch / epochs) * momentum
        if comm.rank == 0 and (epoch % 5 == 4 or epoch == epochs - 1):
            print(f"epoch {epoch + 1:3d} of {epochs}  loss {loss / steps:.4f}  {time.perf_counter() - begin:5.1f} s", flush=True)
    report(comm, network, epochs * steps, time.perf_counter() - begin, inside)
    return network


def report(comm: Communicator, network: Network, steps: int, total: float, inside: float) -> None:
    """What the transport did, as rank 0 saw it."""
    stats = comm.stats()
    if comm.rank:
        return
    from rich.console import Console
    from rich.table import Table

    moved = 2 * (comm.size - 1) / comm.size * network.grad.nbytes * steps
    table = Table(title="Transport, as rank 0 saw it", title_justify="left", show_edge=False)
    for title in ("peer", "provider", "sent", "received", "messages"):
        table.add_column(title, justify="left" if title == "provider" else "right")
    for peer, found in stats["peers"].items():
        table.add_row(
            str(peer),
            found["provider"],
            f"{found['tx_bytes'] / 1e6:.2f} MB",
            f"{found['rx_bytes'] / 1e6:.2f} MB",
            f"{found['tx_msgs'] + found['rx_msgs']}",
        )
    console = Console(width=100)
    console.print(table)
    console.print(
        f"{steps} allreduces of {network.grad.nbytes} bytes: {inside:.3f} s of {total:.3f} s in communication "
        f"({inside / steps * 1e6:.0f} us each), bus bandwidth {moved / inside / 1e9:.2f} GB/s",
        highlight=False,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="data-parallel training on the UCI hand-written digits")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64, help="samples of all ranks together")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate")
    options = parser.parse_args()
    with hrdma.init() as comm:
        network = train(comm, options.epochs, options.batch, options.rate)
        digest = np.frombuffer(hashlib.sha256(network.theta.tobytes()).digest(), np.uint8)
        digests = comm.allgather(digest).reshape(comm.size, -1)
        identical = bool((digests == digests[0]).all())
        x, labels = load()
        accuracy = network.accuracy(x[:TEST], labels[:TEST])
        if comm.rank == 0:
            print(f"test accuracy {accuracy:.4f} on {TEST} digits that were held back")
            shown = digests[0].tobytes().hex()[:16]
            print(f"parameters of all {comm.size} ranks are bit-identical: {'yes' if identical else 'NO'} (sha256 {shown}...)")
        return 0 if identical and accuracy > 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())

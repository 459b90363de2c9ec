"""Reinforcement learning on Ray: actors balance poles, the learner takes the first half of their gradients that arrive.

    python -m hrdma.examples.cart_pole --actors 8         (pip install 'hrdma[ray]')
    python -m hrdma.examples.cart_pole --through ray      the same, moved by Ray's own objects

Each actor plays a few steps of many poles with the policy that it has been given, and turns what it saw into a gradient
(advantage actor-critic). The gradients are reduced as they arrive, and the next policy goes back to those they came from
(`arriving.py`); the others go on with the policy that they have. The policy is one hidden layer on fixed features of cart and
pole; it has learned when poles that it has not seen stay up.

References
----------
Barto, Sutton, Anderson, "Neuronlike adaptive elements that can solve difficult learning control problems", IEEE SMC, 1983.
Mnih et al., "Asynchronous methods for deep reinforcement learning", ICML 2016.
Espeholt et al., "IMPALA: scalable distributed deep-RL with importance weighted actor-learner architectures", ICML 2018.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.util import find_spec

import numpy as np

from hrdma.examples.arriving import WAYS, Source, ThroughHrdma, ThroughRay
from hrdma.examples.train_digits import views

FEATURES, HIDDEN = 640, 256
POLES, STEPS = 16, 32  # of an actor, for one gradient
DISCOUNT, ENTROPY, VALUE = 0.97, 0.01, 0.5
RATE, MEMORY = 1e-3, 0.95  # of RMSProp
LONGEST = 200  # steps for which a pole is tried
ENOUGH = 150  # steps that a pole stays up on average
START = 0.05  # of each quantity at most
GRAVITY, MASS_CART, MASS_POLE, HALF_LENGTH, FORCE, TICK = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
EDGE, FALLEN = 2.4, np.radians(12)
SCALE = np.array([1.0, 1.0, 0.15, 1.0], "float32")  # of place, speed, angle and its speed, as policies see them


class Poles:
    """Carts with a pole each, which two forces push left or right. One that falls is set up anew."""

    def __init__(self, count: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.state = self._fresh(count)

    def _fresh(self, count: int) -> np.ndarray:
        return self.random.uniform(-START, START, (count, 4))

    def step(self, right: np.ndarray) -> np.ndarray:
        """Pushes; which poles have fallen."""
        _, speed, angle, turning = self.state.T
        sine, cosine = np.sin(angle), np.cos(angle)
        mass = MASS_CART + MASS_POLE
        push = (np.where(right, FORCE, -FORCE) + MASS_POLE * HALF_LENGTH * turning**2 * sine) / mass
        bend = (GRAVITY * sine - cosine * push) / (HALF_LENGTH * (4 / 3 - MASS_POLE * cosine**2 / mass))
        speed_up = push - MASS_POLE * HALF_LENGTH * bend * cosine / mass
        self.state = self.state + TICK * np.stack([speed, speed_up, turning, bend], axis=1)
        fallen = (abs(self.state[:, 0]) > EDGE) | (abs(self.state[:, 2]) > FALLEN)
        self.state[fallen] = self._fresh(int(fallen.sum()))
        return fallen


class Policy:
    """Fixed features, a hidden layer, and on it the scores of both pushes and what is to be expected from here."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        random = np.random.default_rng(0)  # the same features everywhere
        self.directions = random.normal(0, 1, (4, FEATURES)).astype("float32")
        self.phases = random.uniform(0, 2 * np.pi, FEATURES).astype("float32")
        shapes = ((FEATURES, hidden), (hidden,), (hidden, 3), (3,))
        self.theta = np.zeros(sum(int(np.prod(shape)) for shape in shapes), "float32")
        self.grad = np.zeros_like(self.theta)
        self.w1, self.b1, self.w2, self.b2 = views(self.theta, shapes)
        self.grad_w1, self.grad_b1, self.grad_w2, self.grad_b2 = views(self.grad, shapes)

    def randomise(self, seed: int) -> None:
        self.w1[:] = np.random.default_rng(seed).normal(0, np.sqrt(1 / FEATURES), self.w1.shape)

    def features(self, state: np.ndarray) -> np.ndarray:
        return np.cos((state.astype("float32") / SCALE) @ self.directions + self.phases) * np.float32(2**0.5)

    def forward(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The hidden layer, the chance of a push to the right, the value."""
        hidden = np.tanh(features @ self.w1 + self.b1)
        out = hidden @ self.w2 + self.b2
        return hidden, 1 / (1 + np.exp(out[:, 0] - out[:, 1])), out[:, 2]

    def backward(self, features: np.ndarray, right: np.ndarray, returns: np.ndarray) -> None:
        """Fills ``grad`` with the mean gradient of these pushes, which were followed by these discounted rewards."""
        hidden, chance, value = self.forward(features)
        advantage = returns - value
        advantage /= advantage.std() + 1e-6
        odds = np.log(chance + 1e-9) - np.log(1 - chance + 1e-9)
        to_right = advantage * (chance - right) + ENTROPY * chance * (1 - chance) * odds
        back = np.stack([-to_right, to_right, VALUE * (value - returns) / STEPS], axis=1).astype("float32") / len(value)
        np.matmul(hidden.T, back, out=self.grad_w2)
        np.sum(back, axis=0, out=self.grad_b2)
        inner = (back @ self.w2.T) * (1 - hidden**2)
        np.matmul(features.T, inner, out=self.grad_w1)
        np.sum(inner, axis=0, out=self.grad_b1)

    def steps_up(self, seed: int) -> float:
        """For how many steps poles that no actor has seen stay up, on average."""
        poles = Poles(2 * POLES, seed)
        up, steps = np.ones(2 * POLES, bool), 0
        for _ in range(LONGEST):
            up &= ~poles.step(self.forward(self.features(poles.state))[1] > 0.5)
            steps += int(up.sum())
        return steps / len(up)


class Actor(Source):
    """Plays, and says how its policy should change."""

    def __init__(self, number: int, hidden: int = HIDDEN) -> None:
        self.poles = Poles(POLES, seed=number)
        self.random = np.random.default_rng(number)
        self.policy = Policy(hidden)

    def compute(self, weights: np.ndarray) -> np.ndarray:
        policy, poles = self.policy, self.poles
        policy.theta[:] = weights
        seen, pushes, falls = [], [], []
        for _ in range(STEPS):
            seen.append(policy.features(poles.state))
            pushes.append(self.random.random(POLES) < policy.forward(seen[-1])[1])
            falls.append(poles.step(pushes[-1]))
        ahead = policy.forward(policy.features(poles.state))[2]
        returns = []
        for fallen in reversed(falls):
            ahead = np.where(fallen, 0.0, 1 + DISCOUNT * ahead)
            returns.append(ahead)
        policy.backward(np.concatenate(seen), np.concatenate(pushes), np.concatenate(returns[::-1]))
        return policy.grad


class Learning:
    """The learner: the policy, and a step with each average."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        self.policy = Policy(hidden)
        self.policy.randomise(seed=0)
        self.squares = np.zeros_like(self.policy.theta)

    def step(self, averages: ThroughHrdma | ThroughRay) -> None:
        gradient = averages.step(self.policy.theta)
        self.squares += (1 - MEMORY) * (gradient**2 - self.squares)
        self.policy.theta -= RATE * gradient / (np.sqrt(self.squares) + np.float32(1e-6))

    def score(self) -> float:
        return self.policy.steps_up(seed=1 << 20)


def main() -> int:
    parser = argparse.ArgumentParser(description="reinforcement learning on Ray: poles on carts")
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--through", choices=list(WAYS), default="hrdma", help="what moves policies and gradients")
    parser.add_argument("--address", help="of a Ray cluster; a new one on this machine where it is not given")
    how = parser.parse_args()
    if how.actors < 2:
        parser.error(f"--actors {how.actors}: at least 2, of which the first half is waited for")
    if find_spec("ray") is None:
        parser.error("ray is needed: pip install 'hrdma[ray]'")
    import ray

    ray.init(address=how.address, include_dashboard=None if how.address else False, log_to_driver=False)
    actor = ray.remote(num_cpus=0, max_restarts=-1)(Actor)
    averages = WAYS[how.through]([actor.remote(number) for number in range(how.actors)], how.actors // 2)
    learning = Learning()
    begin = time.perf_counter()
    for number in range(how.rounds):
        learning.step(averages)
        if number % 50 == 49:
            seconds = time.perf_counter() - begin
            print(f"round {number + 1:4d}   poles stay up {learning.score():5.1f} steps   {seconds:5.1f} s", flush=True)
    seconds, steps = time.perf_counter() - begin, learning.score()
    print(
        f"poles stay up {steps:.1f} of {LONGEST} steps after {how.rounds} rounds, {how.rounds / seconds:.1f} a second, "
        f"through {how.through}"
    )
    ray.shutdown()
    return 0 if steps > ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())

"""The parts of the examples on Ray that need no Ray: gradients, poles, votes, and learning from averages."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from hrdma.examples import cart_pole
from hrdma.examples.cart_pole import FALLEN, Actor, Learning, Poles, Policy

pytestmark = pytest.mark.skipif(
    find_spec("sklearn") is None, reason="scikit-learn is not installed: pip install hrdma[demo]"
)


class Here:
    """Averages as those of `arriving.py`, of actors in this process; half of them answer with older weights."""

    def __init__(self, actors):
        self.actors, self.waiting, self.turn = actors, {}, 0

    def step(self, weights):
        for number, actor in enumerate(self.actors):
            if number not in self.waiting:
                self.waiting[number] = actor.compute(weights).copy()
        self.turn += 1
        return np.mean([self.waiting.pop(number) for number in range(self.turn % 2, len(self.actors), 2)], axis=0)


def test_poles_fall_to_the_side_that_they_lean_to():
    poles = Poles(4, seed=0)
    poles.state[:] = 0
    poles.state[:2, 2] = 0.1, -0.1
    poles.step(np.array([False, True, False, True]))
    assert poles.state[0, 3] > 0 > poles.state[1, 3], "pushed away from where it leans, it leans more"
    assert poles.state[2, 3] == pytest.approx(-poles.state[3, 3]) and poles.state[2, 1] < 0 < poles.state[3, 1]
    poles.state[0, 2] = FALLEN
    fallen = poles.step(np.array([False] * 4))
    assert fallen[0] and not fallen[1:].any()
    assert abs(poles.state[0]).max() <= cart_pole.START, "set up anew"


def test_gradients_of_a_policy_are_those_of_its_loss():
    """By differences, for some of its parameters; in double precision, since they are small."""
    policy, random = Policy(hidden=5), np.random.default_rng(3)
    theta = random.normal(0, 0.3, policy.theta.shape)
    n = 40
    features = policy.features(random.normal(0, 0.1, (n, 4))).astype("float64")
    right, returns = random.random(n) < 0.5, random.normal(5, 2, n)

    def outputs(theta):
        ends = np.cumsum([policy.w1.size, policy.b1.size, policy.w2.size])
        w1, b1, w2, b2 = np.split(theta, ends)
        out = np.tanh(features @ w1.reshape(policy.w1.shape) + b1) @ w2.reshape(policy.w2.shape) + b2
        return 1 / (1 + np.exp(out[:, 0] - out[:, 1])), out[:, 2]

    _, value = outputs(theta)
    advantage = (returns - value) / ((returns - value).std() + 1e-6)  # held fixed: it only weighs

    def loss(theta):
        chance, value = outputs(theta)
        taken = np.where(right, chance, 1 - chance)
        disorder = -chance * np.log(chance) - (1 - chance) * np.log(1 - chance)
        wrong = cart_pole.VALUE * (value - returns) ** 2 / 2 / cart_pole.STEPS
        return (-advantage * np.log(taken) - cart_pole.ENTROPY * disorder + wrong).mean()

    policy.theta[:] = theta
    policy.backward(features.astype("float32"), right, returns)
    for place in [*random.integers(0, len(theta), 20), *range(len(theta) - 18, len(theta))]:
        step = np.zeros_like(theta)
        step[place] = 1e-5
        slope = (loss(theta + step) - loss(theta - step)) / 2e-5
        assert policy.grad[place] == pytest.approx(slope, rel=2e-2, abs=2e-5), place


@pytest.mark.slow
def test_poles_are_balanced_in_the_end():
    learning, averages = Learning(), Here([Actor(number) for number in range(4)])
    assert learning.score() < 50
    for _ in range(200):
        learning.step(averages)
    assert learning.score() > cart_pole.ENOUGH


def test_digits_are_read_in_the_end():
    from hrdma.examples.async_sgd import Training, Worker

    for hidden in (96, 500):
        training, averages = Training(hidden), Here([Worker(number, 0.0, hidden) for number in range(4)])
        assert training.score() < 0.5
        for _ in range(150):
            training.step(averages)
        assert training.score() > 0.9, "wider layers learn at the same rate"


def test_most_votes_count():
    from hrdma.examples.ensemble import majority

    votes = [np.array(each, "uint8") for each in ([1, 9, 3], [1, 8, 2], [7, 8, 0])]
    assert majority(votes).tolist() == [1, 8, 0], "of several the smallest"


def test_requests_count_what_was_right(monkeypatch):
    from hrdma.examples import ensemble
    from hrdma.examples.train_digits import digits

    known = {image.tobytes(): label for image, label in zip(*digits())}

    def ask(models, images):
        right = np.array([known[image.tobytes()] for image in images], "uint8")
        return [right, right, (right + 1) % 10] if models else [(right + 1) % 10, right, (right + 1) % 10]

    monkeypatch.setitem(ensemble.WAYS, "ray", ask)
    requests = ensemble.Requests(50)
    requests.step("ray", [1])
    assert requests.score() == 1
    requests.step("ray", [])
    assert requests.score() == 0.5

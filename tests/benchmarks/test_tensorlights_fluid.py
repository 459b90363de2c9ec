"""The fluid model beside bench_tensorlights.py: cases that can be counted out by hand, and what it says of long runs."""

from __future__ import annotations

from statistics import mean

import pytest
from tensorlights_fluid import completion

TOGETHER, APART = [0] * 6, list(range(6))
CASE = {"transfer": 1 / 18, "compute": 10 / 21, "stagger": 0.1 / 0.64, "noise": 0.1}


def test_a_job_alone_takes_both_ways_and_its_computing():
    took = completion("fifo", [0], 3, 4, transfer=0.1, compute=1.0, stagger=0.0)
    assert took == pytest.approx([4 * (0.3 + 1.0 + 0.3)])


def test_jobs_that_share_a_link_end_together_and_bands_put_them_in_a_row():
    both = {"transfer": 0.1, "compute": 10.0, "stagger": 0.0}
    assert completion("fifo", [0, 0], 3, 1, **both) == pytest.approx([0.6 + 10 + 0.6] * 2)
    # the second job's models leave behind the first's, so its gradients come when the others are through
    assert completion("tls-one", [0, 0], 3, 1, **both) == pytest.approx([0.3 + 10 + 0.3, 0.6 + 10 + 0.3])


def test_a_rotation_turns_the_order_round():
    took = completion("tls-rr", [0, 0], 3, 1, transfer=0.1, compute=10.0, stagger=0.0, interval=0.1)
    # the link is theirs in turns of 0.1 s, so models are there at 0.5 and 0.6 s; back the first has the link alone for
    # 0.1 s, then they share it: 0.4 s for what the first still has to send, and 0.1 s for the second's rest
    assert took == pytest.approx([11.0, 11.1])


def test_servers_apart_leave_nothing_to_order():
    found = [completion(name, APART, 3, 5, interval=2.0, **CASE) for name in ("fifo", "tls-one", "tls-rr")]
    assert found[0] == found[1] == found[2]


def test_jobs_share_a_band_where_there_are_more_than_bands():
    took = completion("tls-one", [0] * 8, 1, 1, transfer=0.1, compute=10.0, stagger=0.0)
    fast, slow = took[0::2], took[1::2]
    assert fast == pytest.approx(slow)
    assert fast == sorted(fast) and fast[0] < fast[-1]


def test_under_fifo_jobs_fall_into_step_and_what_bands_gain_grows():
    gains = []
    for steps in (8, 60):
        fifo, one = (mean(completion(name, TOGETHER, 3, steps, **CASE)) for name in ("fifo", "tls-one"))
        gains.append(1 - one / fifo)
    assert 0.05 < gains[0] < 0.2 and gains[1] > 0.3


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="'tls-two': fifo, tls-one, tls-rr"):
        completion("tls-two", TOGETHER, 3, 1, transfer=1.0, compute=1.0, stagger=0.0)

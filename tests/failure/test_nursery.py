"""What starts the ranks of tests outlives whatever they do."""

from __future__ import annotations

import time

from rankside import Me


def is_over(me: Me) -> None:
    """Ends at once."""


def test_a_rank_that_ends_while_it_is_spoken_to(start):
    for _ in range(10):
        (rank,) = start(is_over, 1)
        until = time.monotonic() + 10
        while not rank.told("ended") and time.monotonic() < until:
            rank.say("something")
        assert rank.ended() == 0

"""Who sends to whom: chains, fan-out, no cycles whoever dies, everybody done while a copy lives."""

from __future__ import annotations

import random

import pytest

from hrdma.objects.broadcast import FEEDS, Copies, Copy


def test_receivers_that_ask_together_form_a_chain():
    copies = Copies()
    copies.completed(0)
    assert [copies.grant(node) for node in (1, 2, 3, 4)] == [0, 1, 2, 3]


def test_late_receivers_fan_out_over_finished_copies():
    copies = Copies()
    for node in range(4):
        copies.completed(node)
    assert sorted(copies.grant(node) for node in (4, 5, 6, 7)) == [0, 1, 2, 3]


def test_a_receiver_whose_sender_died_is_not_fed_by_those_it_feeds():
    copies = Copies()
    copies.completed(0)
    copies.completed(9)
    copies.of[1], copies.of[2], copies.of[3] = Copy(False, via=0), Copy(False, via=1), Copy(False, via=2)
    copies.remove(0)
    assert copies.grant(1) == 9
    copies.remove(9)
    assert copies.grant(1) is None, "2 and 3 are fed by 1 itself"
    assert not copies.alive


def test_a_failed_sender_is_the_last_choice():
    copies = Copies()
    copies.completed(0)
    copies.completed(1)
    assert copies.grant(5, avoid=[0]) == 1
    copies.remove(1)
    assert copies.grant(5, avoid=[0]) == 0


def check(copies: Copies) -> None:
    for node, copy in copies.of.items():
        seen = [node]
        while copy is not None and not copy.complete and copy.via is not None:
            assert copy.via not in seen, f"cycle {seen}"
            seen.append(copy.via)
            copy = copies.of.get(copy.via)
        assert sum(other.via == node and not other.complete for other in copies.of.values()) <= FEEDS


@pytest.mark.parametrize("seed", range(60))
def test_random_histories(seed):
    """Joins, completions and deaths in any order: no cycle, bounded feeding, all end while a complete copy lives."""
    draw = random.Random(seed)
    copies = Copies()
    copies.completed(0)
    alive, wants = {0}, set()
    fresh = iter(range(1, 1000))
    for _ in range(150):
        what = draw.random()
        if what < 0.4:
            node = next(fresh)
            alive.add(node)
            wants.add(node)
            copies.grant(node)
        elif what < 0.7:
            ready = [
                node for node, copy in copies.of.items()
                if not copy.complete and copy.via in copies.of and copies.of[copy.via].complete
            ]  # fmt: skip
            if ready:
                node = draw.choice(ready)
                copies.completed(node)
                wants.discard(node)
        elif what < 0.85 and len(copies.complete) + len(alive) > 2:
            node = draw.choice(sorted(alive))
            if copies.complete == [node]:
                continue
            alive.discard(node)
            wants.discard(node)
            copies.remove(node)
        for node in sorted(wants):
            copy = copies.of.get(node)
            if copy is None or copy.via is None:
                copies.grant(node)
        check(copies)
    for _ in range(5000):
        if not wants:
            break
        for node in sorted(wants):
            copy = copies.of.get(node)
            if copy is None or copy.via is None:
                copies.grant(node)
            elif copies.of[copy.via].complete:
                copies.completed(node)
                wants.discard(node)
        check(copies)
    assert not wants


def test_the_checker_sees_a_cycle():
    copies = Copies()
    copies.of[1], copies.of[2] = Copy(False, via=2), Copy(False, via=1)
    with pytest.raises(AssertionError, match="cycle"):
        check(copies)

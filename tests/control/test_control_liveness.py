"""Who is lost, how soon it is known, and what goes on afterwards; with real processes."""

from __future__ import annotations

import os
import random
import signal
import socket
import time

import pytest
from machine import took
from ports import free_port
from windows import one_good


def test_kill_is_noticed_at_once(start):
    ranks = start(4).joined()
    killed = ranks[2].signal(signal.SIGKILL)
    for rank in (ranks[0], ranks[1], ranks[3]):
        assert took(killed, rank.event("lost", rank=2)["time"]) < 0.5
        assert rank.do("lost")[0].keys() == {"2"}


def test_the_coordinator_may_die(start):
    ranks = start(4).joined()
    killed = ranks[0].signal(signal.SIGKILL)
    rest = ranks[1:]
    for rank in rest:
        assert took(killed, rank.event("lost", rank=0)["time"]) < 0.5
    numbers = [rank.ask("agree", key="k", members=[0, 1, 2, 3], payload={"a": i}) for i, rank in enumerate(rest)]
    results = [rank.answer(number) for rank, number in zip(rest, numbers, strict=True)]
    assert results == [{"1": {"a": 0}, "2": {"a": 1}, "3": {"a": 2}}] * 3
    killed = ranks[3].signal(signal.SIGKILL)
    for rank in (ranks[1], ranks[2]):
        assert took(killed, rank.event("lost", rank=3)["time"]) < 0.5


def test_a_barrier_blames_who_was_lost_first(start):
    """Rank 0 may have ended because of rank 2, so the lowest rank is not the cause."""
    ranks = start(4).joined()
    rest = (ranks[1], ranks[3])
    for gone in (2, 0):
        ranks[gone].signal(signal.SIGKILL)
        for rank in rest:
            rank.event("lost", rank=gone)
    for number, rank in [(rank.ask("barrier"), rank) for rank in rest]:
        error, text = rank.answer(number)["error"]
        assert error == "PeerError" and text.startswith("barrier: rank 2 "), text


@pytest.mark.parametrize("gone", [0, 2])
@pytest.mark.parametrize("early", [False, True])
def test_a_barrier_waits_for_nobody_once_one_is_lost(start, gone, early):
    """Neither for those who do not come, nor for what a new coordinator has to ask."""
    ranks = start(4).joined()
    number = 0 if early else ranks[1].ask("barrier", seconds=20.0)
    killed = ranks[gone].signal(signal.SIGKILL)
    ranks[1].event("lost", rank=gone)
    number = number or ranks[1].ask("barrier", seconds=20.0)  # rank 3 does not call it
    found = ranks[1].answer(number)
    assert found["error"][0] == "PeerError" and found["error"][1].startswith(f"barrier: rank {gone} hung up"), found
    assert took(killed, time.monotonic()) < 0.7
    rest = [rank for rank in range(4) if rank != gone]
    numbers = [ranks[rank].ask("agree", key="k", members=[0, 1, 2, 3], payload={}) for rank in rest]
    assert all(ranks[rank].answer(n).keys() == set(map(str, rest)) for rank, n in zip(rest, numbers, strict=True))


@pytest.mark.parametrize("dead", [(0, 1), (0, 2), (0, 1, 2)])
def test_several_die_at_once(start, dead):
    """The coordinator and others: nobody is left to tell of the others' death, so survivors find out themselves."""
    ranks = start(4).joined()
    for rank in dead:
        killed = ranks[rank].signal(signal.SIGKILL)
    alive = [rank for index, rank in enumerate(ranks) if index not in dead]
    for rank in alive:
        for gone in dead:
            assert took(killed, rank.event("lost", rank=gone)["time"]) < 1.0
    members = [0, 1, 2, 3]
    numbers = [rank.ask("agree", key="k", members=members, payload={}) for rank in alive]
    assert all(
        rank.answer(n) == {str(r): {} for r in set(members) - set(dead)} for rank, n in zip(alive, numbers, strict=True)
    )


@pytest.mark.parametrize("frozen", [0, 2])
def test_a_frozen_rank_is_lost_and_learns_of_it(start, frozen):
    ranks = start(4, config={"heartbeat": 0.6}).joined()
    barrier = ranks[frozen].ask("barrier", seconds=20.0)
    ranks[frozen].do("lost")  # its commands are begun in turn
    stopped = ranks[frozen].signal(signal.SIGSTOP)
    rest = [rank for index, rank in enumerate(ranks) if index != frozen]
    for rank in rest:
        known = rank.event("lost", rank=frozen)["time"]
        assert known - stopped > 0.3
        assert took(stopped, known) < 1.2
    number = [rank.ask("agree", key="k", members=[0, 1, 2, 3], payload={}) for rank in rest]
    agreed = [rank.answer(n) for rank, n in zip(rest, number, strict=True)]
    assert all(str(frozen) not in result and len(result) == 3 for result in agreed)
    ranks[frozen].signal(signal.SIGCONT)
    for other in set(range(4)) - {frozen}:
        ranks[frozen].event("lost", rank=other)
    error, text = ranks[frozen].answer(barrier)["error"]
    assert error == "PeerError"
    if frozen:  # a coordinator may hear of one hang-up before the others, and blame that
        assert "this rank was expelled" in text
    time.sleep(0.2)
    assert all(not [e for e in rank.events("lost") if e["rank"] != frozen] for rank in rest)


@pytest.mark.parametrize("when", ["before it is stopped", "when it knows of one"])
def test_a_coordinator_that_wakes_up_to_old_messages_decides_nothing_with_them(start, when):
    """They agree while it is stopped, first with it and then without; it hears that and of their ends one by one."""
    ranks = start(3, config={"heartbeat": 0.6}, each={0: {"apart": 0.5}}).joined()
    agreement = {"key": "k", "members": [0, 1, 2], "payload": {}}
    early = when == "before it is stopped"
    number = ranks[0].ask("agree", **agreement) if early else 0
    if early:
        ranks[0].do("lost")  # its commands are begun in turn
        time.sleep(0.2)
    ranks[0].signal(signal.SIGSTOP)
    numbers = [rank.ask("agree", **agreement) for rank in ranks[1:]]
    assert [rank.answer(n).keys() for rank, n in zip(ranks[1:], numbers, strict=True)] == [{"1", "2"}] * 2
    ranks[0].signal(signal.SIGCONT)
    ranks[0].event("lost")
    found = ranks[0].answer(number) if early else ranks[0].do("agree", **agreement)
    assert found["error"][0] == "PeerError" and "this rank was expelled" in found["error"][1]


@pytest.mark.parametrize("away", [1, 2, 3])
@pytest.mark.parametrize("waiting", [False, True])
def test_two_sides_of_a_broken_connection_do_not_both_go_on(start, away, waiting):
    """Coordinator and member lose each other though both live; rank 1 is next in line and would coordinate itself."""
    ranks = start(4).joined()
    number = ranks[away].ask("barrier") if waiting else 0
    ranks[away].do("cut")
    for other in set(range(4)) - {away}:
        ranks[away].event("lost", rank=other)
        ranks[other].event("lost", rank=away)
    found = ranks[away].answer(number) if waiting else ranks[away].do("barrier")
    assert found["error"][0] == "PeerError" and "this rank was expelled" in found["error"][1]
    rest = [rank for index, rank in enumerate(ranks) if index != away]
    numbers = [rank.ask("agree", key="k", members=[0, 1, 2, 3], payload={}) for rank in rest]
    assert all(len(rank.answer(n)) == 3 for rank, n in zip(rest, numbers, strict=True))
    assert all({e["rank"] for e in rank.events("lost")} == {away} for rank in rest)


def test_a_process_that_just_ends_is_lost_and_ends_quickly(start):
    ranks = start(3).joined()
    ranks[1].process.stdin.close()
    begun = time.monotonic()
    assert ranks[1].wait(3) == 0 and ranks[1].errors == ""
    assert took(begun, time.monotonic()) < 1.0
    for rank in (ranks[0], ranks[2]):
        rank.event("lost", rank=1)


@pytest.mark.parametrize("busy", [0, 1])
def test_a_rank_that_holds_the_interpreter_is_not_lost(start, busy):
    """Four heartbeat periods without the GIL; for rank 1 the coordinator dies meanwhile, and it is next in line."""
    ranks = start(3, config={"heartbeat": 0.4}).joined()
    number = ranks[busy].ask("hold_gil", hold=1.6)
    if busy == 1:
        time.sleep(0.3)
        ranks[0].signal(signal.SIGKILL)
    ranks[busy].answer(number)
    alive = ranks if busy == 0 else ranks[1:]
    numbers = [rank.ask("agree", key="k", members=[0, 1, 2], payload={}) for rank in alive]
    expected = {"0", "1", "2"} if busy == 0 else {"1", "2"}
    for rank, n in zip(alive, numbers, strict=True):
        assert rank.answer(n).keys() == expected
        assert {e["rank"] for e in rank.events("lost")} == ({0} if busy == 1 else set())


def test_a_new_coordinator_waits_for_a_busy_member(start):
    ranks = start(3, config={"heartbeat": 0.5}).joined()
    number = ranks[2].ask("hold_gil", hold=1.5)
    time.sleep(0.2)
    ranks[0].signal(signal.SIGKILL)
    early = ranks[1].ask("agree", key="k", members=[0, 1, 2], payload={"r": 1})
    ranks[2].answer(number)
    late = ranks[2].ask("agree", key="k", members=[0, 1, 2], payload={"r": 2})
    expected = {"1": {"r": 1}, "2": {"r": 2}}
    assert ranks[1].answer(early) == ranks[2].answer(late) == expected


@pytest.mark.parametrize("seed", range(4))
def test_all_survivors_agree_whenever_the_coordinator_dies(start, seed):
    rng = random.Random(seed)
    ranks = start(4).joined()
    dead = [0, 1] if seed % 2 else [0]
    numbers = [rank.ask("agrees", members=[0, 1, 2, 3], without=100, dead=dead, seconds=12) for rank in ranks]
    ranks[0].event("agreed")
    time.sleep(rng.uniform(0.005, 0.06))
    ranks[0].signal(signal.SIGKILL)
    if seed % 2:
        time.sleep(rng.uniform(0.0, 0.01))
        ranks[1].signal(signal.SIGKILL)
    alive = [rank for rank in range(4) if rank not in dead]
    results = [ranks[rank].answer(numbers[rank]) for rank in alive]
    assert all(result == results[0] for result in results)
    found = list(results[0].values())
    assert len(found[0]) == 4 and all(len(result) == len(alive) for result in found[-100:])
    assert found[-1].keys() == {str(rank) for rank in alive}


def test_agreement_names_who_is_missing(start):
    ranks = start(3).joined()
    keys = iter("abcdefghij")

    def measure() -> str:
        """The coordinator is asked just before the time is up, and a busy machine makes the answer late."""
        key = next(keys)
        number = ranks[1].ask("agree", key=key, members=[0, 1, 2], payload={}, seconds=0.5)
        ranks[0].do("agree", key=key, members=[0, 1, 2], payload={}, seconds=0.3)
        kind, text = ranks[1].answer(number)["error"]
        assert kind == "TimeoutError"
        who = text.partition(": ")[2].partition(" did not answer")[0]
        assert who in ("rank 2", "ranks 0, 2", "the coordinator"), text
        return text.replace(f"'{key}'", "'k'")

    one_good(measure, lambda text: text == "agreement 'k': rank 2 did not answer within 0.5 s")


def test_agreement_refuses_what_does_not_fit(start):
    ranks = start(2).joined()
    assert ranks[0].do("agree", key="a", members=[1], payload={})["error"][0] == "ValueError"
    assert "at most" in ranks[0].do("agree", key="b", members=[0], payload={"x": "y" * 5000})["error"][1]
    assert ranks[0].do("agree", key="c", members=[0], payload={"x": 1}) == {"0": {"x": 1}}
    n = ranks[0].ask("agree", key="d", members=[0, 1], payload={})
    found = ranks[1].do("agree", key="d", members=[1, 0], payload={})
    assert found["error"][0] == "ValueError" and "[1, 0]" in found["error"][1] == ranks[0].answer(n)["error"][1]


def test_leaving_is_not_being_lost(start):
    ranks = start(3).joined()
    assert ranks[2].do("leave") is None
    for rank in ranks[:2]:
        assert rank.event("left", rank=2)["reason"] == "rank 2 left"
        assert rank.events("lost") == []
        assert rank.do("lost") == [{"2": "rank 2 left"}, [2], 1]
    found = ranks[2].do("barrier")
    assert found["error"] == ["HrdmaError", "the control plane is closed"]
    numbers = [rank.ask("barrier") for rank in ranks[:2]]
    assert all(
        rank.answer(n)["error"] == ["PeerError", "barrier: rank 2 left"]
        for rank, n in zip(ranks[:2], numbers, strict=True)
    )


def test_a_rank_that_leaves_does_not_warn_of_others(start):
    """Their last word may be lost where a link is full; nobody waits for them any more."""
    ranks = start(3).joined()
    ranks[0].signal(signal.SIGSTOP)
    leaving = ranks[1].ask("leave")
    assert ranks[1].do("leaving")
    ranks[0].signal(signal.SIGKILL)
    assert ranks[2].event("warned")["text"].startswith("control: rank 0 hung up")
    assert ranks[1].answer(leaving) is None
    assert ranks[1].events("warned") == []


def test_the_coordinator_hands_over_when_it_leaves(start):
    ranks = start(3).joined()
    begun = time.monotonic()
    ranks[0].do("leave")
    assert took(begun, time.monotonic()) < 2.0
    for rank in ranks[1:]:
        rank.event("left", rank=0)
    numbers = [rank.ask("agree", key="k", members=[0, 1, 2], payload={}) for rank in ranks[1:]]
    assert [rank.answer(n) for rank, n in zip(ranks[1:], numbers, strict=True)] == [{"1": {}, "2": {}}] * 2
    assert all(rank.events("lost") == [] for rank in ranks[1:])


def test_all_leave_together_quickly(start):
    ranks = start(4).joined()
    begun = time.monotonic()
    ranks.do("leave")
    assert took(begun, time.monotonic()) < 0.7
    assert all(rank.events("lost") == [] for rank in ranks)
    assert all(rank.do("threads").count("hrdma-control") == 0 for rank in ranks)


def test_abandon_counts_as_lost(start):
    ranks = start(3).joined()
    abandoned = time.monotonic()
    ranks[1].do("abandon")
    for rank in (ranks[0], ranks[2]):
        assert took(abandoned, rank.event("lost", rank=1)["time"]) < 1.0


def test_a_forked_child_does_not_keep_its_parent_alive(start):
    ranks = start(3).joined()
    child = ranks[1].do("fork", thread=False)
    try:
        numbers = ranks.do("barrier")
        assert numbers == [None] * 3
        killed = ranks[1].signal(signal.SIGKILL)
        for rank in (ranks[0], ranks[2]):
            assert took(killed, rank.event("lost", rank=1)["time"]) < 0.5
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_is_told_that_it_cannot_use_it(start):
    ranks = start(2).joined()
    assert "HrdmaError: the control plane does not work in a forked child" in ranks[0].do("use_in_child", thread=False)
    assert ranks.do("barrier") == [None, None]


def test_nothing_listens_after_all_were_killed(start):
    port = free_port()
    ranks = start(3, port=port).joined()
    for rank in ranks:
        rank.signal(signal.SIGKILL)
    for rank in ranks:
        rank.wait()
    with socket.socket() as sock:
        assert sock.connect_ex(("127.0.0.1", port)) != 0
    assert start(3, port=port).joined().do("barrier") == [None] * 3


def test_idle_costs_nothing(start):
    ranks = start(3).joined()
    before = ranks.do("cpu")
    time.sleep(1.0)
    spent = [after - start for after, start in zip(ranks.do("cpu"), before, strict=True)]
    assert max(spent) < 0.03, spent

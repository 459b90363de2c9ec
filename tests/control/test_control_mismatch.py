"""Stalls and mismatched calls, end to end."""

from __future__ import annotations

import signal
import time

from machine import took

A = "allreduce(float32, 1000, sum)"
B = "allreduce(float64, 1000, sum)"
ALL = [0, 1, 2, 3]


def stall(rank, signature=1, text=A, sequence=12, do="stall"):
    return rank.do(do, comm=7, members=ALL, sequence=sequence, signature=signature, text=text)


def test_all_members_are_told_who_differs(start):
    ranks = start(4).joined()
    for index in (0, 1, 3):
        stall(ranks[index])
    begun = time.monotonic()
    stall(ranks[2], 2**64 - 1, B)
    verdicts = [rank.event("verdict", comm=7) for rank in ranks]
    assert {v["text"] for v in verdicts} == {f"allreduce #12: rank 2 calls {B}, ranks 0, 1, 3 call {A}"}
    assert took(begun, max(v["time"] for v in verdicts)) < 1.0


def test_a_mismatch_seen_by_one_core_is_decided_without_waiting_for_stalls(start):
    ranks = start(4).joined()
    stall(ranks[3], 3, "barrier()", sequence=4)
    stall(ranks[1], do="mismatch")
    texts = {rank.event("verdict")["text"] for rank in ranks}
    assert texts == {
        f"allreduce #12: rank 1 calls {A}, what a peer sent does not match, rank 0 has not said where it is, "
        "rank 2 has not said where it is, rank 3 is in barrier #4: barrier()"
    }


def test_a_late_report_gets_the_verdict_again(start):
    ranks = start(4).joined()
    stall(ranks[0])
    stall(ranks[1], 2, B)
    ranks[0].event("verdict")
    before = len(ranks[3].events("verdict"))
    stall(ranks[3])
    ranks[3].until(lambda _: len(ranks[3].events("verdict")) > before, "second verdict")


def test_stalled_ranks_learn_who_is_where(start):
    ranks = start(4).joined()
    stall(ranks[1], 5, "barrier()", sequence=11)
    where, end = {}, time.monotonic() + 10
    while where.get("1", "not").startswith("not") and time.monotonic() < end:
        stall(ranks[0])
        time.sleep(0.02)
        where = ranks[0].do("stalls", comm=7)
    assert where == {
        "1": "waiting in barrier #11: barrier()",
        "2": "not waiting in this communicator",
        "3": "not waiting in this communicator",
        "0": f"waiting in allreduce #12: {A}",
    }
    assert ranks[0].do("stalls", comm=8) == {}


def test_a_new_coordinator_decides_too(start):
    ranks = start(4).joined()
    stall(ranks[1])
    ranks[0].signal(signal.SIGKILL)
    ranks[1].event("lost", rank=0)
    deadline = time.monotonic() + 5
    while not ranks[3].events("verdict") and time.monotonic() < deadline:
        # As the communicator does, though less patiently: what was said to the old coordinator is gone.
        stall(ranks[1])
        stall(ranks[2])
        stall(ranks[3], 2, B)
        time.sleep(0.05)
    texts = {rank.event("verdict")["text"] for rank in ranks[1:]}
    assert texts == {f"allreduce #12: rank 3 calls {B}, ranks 1, 2 call {A}"}

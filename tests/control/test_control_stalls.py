"""Mismatched collectives: when a verdict is given, and what it says."""

from __future__ import annotations

import pytest

from hrdma.control.stalls import CONFLICT_PATIENCE, FRESH, PATIENCE, Report, Stalls, read_pairs

A = "allreduce(float32, 1000, sum)"
B = "allreduce(float64, 1000, sum)"
ALL = (0, 1, 2, 3)


def add(stalls: Stalls, rank: int, sequence: int, signature: int, text: str, when=0.0, members=ALL, mismatch=False):
    return stalls.add(7, members, rank, Report(sequence, signature, text, when), mismatch=mismatch)


def test_the_minority_is_named_first():
    stalls = Stalls()
    for rank, asked in ((0, [1, 2, 3]), (1, []), (3, [])):
        assert add(stalls, rank, 12, 1, A) == asked
    add(stalls, 2, 12, 2, B)
    (verdict,) = stalls.due(0.0, ())
    assert verdict.text == f"allreduce #12: rank 2 calls {B}, ranks 0, 1, 3 call {A}"
    assert (verdict.comm, verdict.members) == (7, ALL)
    assert stalls.verdict(7) == verdict and stalls.next_time() is None and stalls.due(9.0, ()) == []


def test_a_slow_rank_is_no_mismatch():
    stalls = Stalls()
    for rank in (0, 1):
        add(stalls, rank, 12, 1, A)
    add(stalls, 2, 11, 2, B)
    add(stalls, 3, 13, 3, "barrier()")
    assert stalls.next_time() is None and stalls.due(100.0, ()) == []


def test_a_conflict_waits_a_moment_for_the_others_and_asks_them():
    stalls = Stalls()
    add(stalls, 0, 5, 1, A)
    assert add(stalls, 2, 5, 2, B, when=1.0) == [1, 3]
    assert stalls.next_time() == 1.0 + CONFLICT_PATIENCE
    assert stalls.due(1.1, ()) == []
    add(stalls, 1, 5, 1, A, when=1.1)
    assert stalls.due(1.1, ()) == []
    (verdict,) = stalls.due(2.0, ())
    assert verdict.text == f"allreduce #5: rank 2 calls {B}, ranks 0, 1 call {A}, rank 3 has not said where it is"


def test_those_who_are_not_there_are_asked_each_second():
    """They may have been through with another call, and call nothing more."""
    stalls = Stalls()
    assert add(stalls, 0, 5, 1, A) == [1, 2, 3]
    assert add(stalls, 3, 5, 1, A, when=0.1) == []
    stalls.add(7, ALL, 1, Report(4, 9, "barrier()", 0.2, waits=False), mismatch=False)
    assert add(stalls, 0, 5, 1, A, when=1.0) == [1, 2]
    assert stalls.where(7, 5, 1.0)[1] == "not waiting in this communicator"
    before = [Report(5, 2, B, 1.2)]
    stalls.add(7, ALL, 1, Report(6, 9, "barrier()", 1.2, waits=False), before, mismatch=False)
    (verdict,) = stalls.due(2.0, ())
    assert verdict.text == f"allreduce #5: rank 1 calls {B}, ranks 0, 3 call {A}, rank 2 has not said where it is"


def test_nobody_waits_for_the_dead():
    stalls = Stalls()
    add(stalls, 0, 5, 1, A)
    add(stalls, 1, 5, 2, B)
    (verdict,) = stalls.due(0.0, {2, 3})
    assert verdict.text == f"allreduce #5: rank 1 calls {B}, rank 0 calls {A}"


def test_a_reported_mismatch_is_decided_even_if_the_other_is_elsewhere():
    stalls = Stalls()
    assert add(stalls, 1, 5, 1, A, mismatch=True) == [0, 2, 3]
    assert stalls.next_time() == PATIENCE
    add(stalls, 0, 6, 9, "barrier()", when=0.1)
    add(stalls, 2, 5, 1, A, when=0.1)
    (verdict,) = stalls.due(PATIENCE, {3})
    assert verdict.text == (
        f"allreduce #5: ranks 1, 2 call {A}, what a peer sent does not match, rank 0 is in barrier #6: barrier()"
    )


def test_a_rank_that_went_on_is_still_convicted():
    stalls = Stalls()
    add(stalls, 0, 5, 1, A)
    add(stalls, 0, 6, 1, A)
    add(stalls, 1, 5, 2, B)
    (verdict,) = stalls.due(1.0, {2, 3})
    assert "rank 0 calls" in verdict.text and "rank 1 calls" in verdict.text


def test_what_came_before_tells_who_began():
    """Ranks 1 and 2 have only sent in #5, and went on; rank 0 waits in it for rank 2."""
    stalls = Stalls()
    before = {1: Report(5, 1, A, 0.0), 2: Report(5, 2, B, 0.0)}
    for rank in (1, 2):
        stalls.add(7, (0, 1, 2), rank, Report(6, 9, "barrier()", 0.0), [before[rank]], mismatch=False)
    (verdict,) = stalls.due(1.0, {0})
    assert verdict.text.startswith("allreduce #5:")
    stalls = Stalls()
    stalls.add(7, (0, 1, 2), 1, Report(6, 9, "barrier()", 0.0), [before[1]], mismatch=True)
    stalls.add(7, (0, 1, 2), 0, Report(5, 1, A, 0.0), mismatch=False)
    stalls.add(7, (0, 1, 2), 2, Report(6, 9, "barrier()", 0.0), [before[2]], mismatch=False)
    (verdict,) = stalls.due(0.0, ())
    assert verdict.text == f"allreduce #5: rank 2 calls {B}, ranks 0, 1 call {A}"


def test_who_was_told_of_it_may_report_first():
    """Rank 1 has seen in #5 that what rank 0 sent does not fit; ranks 0 and 2, through with it, hear so in a barrier."""
    stalls = Stalls()
    before = {0: Report(5, 1, "alltoall(3)", 0.0), 2: Report(5, 1, "alltoall(2)", 0.0)}
    for rank in (0, 2):
        stalls.add(7, (0, 1, 2), rank, Report(6, 9, "barrier()", 0.0), [before[rank]], mismatch=True)
    assert not stalls.due(0.0, ())
    assert stalls.add(7, (0, 1, 2), 1, Report(5, 1, "alltoall(2)", 0.1), mismatch=True) == []
    (verdict,) = stalls.due(0.1, ())
    assert verdict.text == (
        "alltoall #5: rank 0 calls alltoall(3), ranks 1, 2 call alltoall(2), what a peer sent does not match"
    )


def test_ranks_in_texts_are_those_of_the_communicator():
    stalls = Stalls()
    for rank, signature, text in ((9, 1, A), (4, 2, B), (6, 1, A)):
        add(stalls, rank, 0, signature, text, members=(9, 4, 6))
    (verdict,) = stalls.due(0.0, ())
    assert verdict.text == f"allreduce #0: rank 1 calls {B}, ranks 0, 2 call {A}"


def test_where_names_the_late_first():
    stalls = Stalls()
    add(stalls, 0, 5, 1, A, when=10.0)
    add(stalls, 1, 4, 1, "barrier()", when=10.0)
    add(stalls, 2, 5, 1, A, when=10.0 - FRESH - 1)
    assert list(stalls.where(7, 5, 10.0).items()) == [
        (1, "waiting in barrier #4: barrier()"),
        (2, "not waiting in this communicator"),
        (3, "not waiting in this communicator"),
        (0, f"waiting in allreduce #5: {A}"),
    ]
    assert stalls.where(8, 5, 10.0) == {}


def alltoall(stalls: Stalls, rank: int, pairs: str, when: float = 0.0, sequence: int = 5):
    report = Report(sequence, 1, f"alltoall(as rank {rank})", when, rank == 2, read_pairs(pairs))
    return stalls.add(7, (0, 1, 2), rank, report, mismatch=False)


def test_an_alltoall_in_which_something_is_missing_is_a_mismatch():
    """The signatures are alike, as each rank has counts of its own."""
    stalls = Stalls()
    assert alltoall(stalls, 2, "7:7") == [0, 1]
    alltoall(stalls, 0, "7:7")
    assert stalls.next_time() is None
    alltoall(stalls, 1, "3:7", when=0.1)
    assert stalls.next_time() == 0.1 + CONFLICT_PATIENCE
    (verdict,) = stalls.due(0.1, ())
    assert verdict.text == (
        "alltoall #5: rank 1 sends nothing to rank 2, which expects something, rank 2 calls alltoall(as rank 2), "
        "rank 1 calls alltoall(as rank 1), rank 0 calls alltoall(as rank 0)"
    )


def test_what_nobody_expects_is_a_mismatch_as_well():
    stalls = Stalls()
    alltoall(stalls, 2, "7:5")
    alltoall(stalls, 1, "7:7", sequence=4)
    assert stalls.next_time() is None
    alltoall(stalls, 1, "7:7")
    (verdict,) = stalls.due(1.0, {0})
    assert "rank 1 sends to rank 2, which expects nothing, " in verdict.text


def test_counts_that_differ_and_fit_are_none():
    stalls = Stalls()
    for rank, pairs in enumerate(("6:2", "1:5", "2:1")):
        alltoall(stalls, rank, pairs)
    assert stalls.next_time() is None and stalls.due(9.0, ()) == []


@pytest.mark.parametrize("text", ["", "7", "7:", "7:7:7", "x:1"])
def test_pairs_of_the_wire_are_read_strictly(text):
    with pytest.raises(ValueError, match=r"."):
        read_pairs(text)

"""A rank is killed, stopped or exits at every point of a job's life: the others learn of it in time, and who it was."""

from __future__ import annotations

import signal

import pytest
from jobs import in_time
from machine import took
from matrix import CLOSE_SECONDS, JOINING, RANKS, Case, join_seconds, matrix, on_verbs, run, sample
from windows import unless_starved

HEARTBEAT = 1.0
RUNS = 20  # in the normal suite


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        nightly = metafunc.config.getoption("--nightly", default=False)
        metafunc.parametrize("case", [*(matrix() if nightly else sample(RUNS)), *on_verbs()], ids=str)


def test_every_other_rank_learns_of_it(start, case):
    unless_starved(lambda: learns(start, case))


def learns(start, case):
    job = start(run, RANKS, transport=case.transport, case=list(case))
    victim, rest = job[case.victim], job.survivors(case.victim)
    limit = HEARTBEAT + 1.0 if case.how == "stop" else 1.0
    fell = victim.fell()
    if case.phase == "close":
        for rank in rest:
            assert soon(rank.event("closed"), CLOSE_SECONDS + 1.0), job.shown()
            assert rank.ended() == 0, job.shown()
        return
    for rank in rest:
        raised = rank.event("raised")
        check_error(case, raised, job)
        if raised["error"] == "TimeoutError":
            assert soon(raised, join_seconds(case) + 1.0), job.shown()
        else:
            in_time(job, rank, fell, raised, limit)
    if any(rank.told("raised")["where"] == "init" for rank in rest):
        return
    members = [rank.rank for rank in rest]
    for rank in rest:
        again = rank.event("raised again")
        assert (again["error"], again["rank"]) == ("PeerError", case.victim), job.shown()
        went_on = rank.event("went on", "failed")
        assert went_on.get("members") == members and went_on["total"] == sum(members), job.shown()
        assert rank.ended() == 0, job.shown()
    if case.how == "stop":
        victim.signal(signal.SIGCONT)
        found = victim.event("raised again", seconds=5)
        assert found["error"] == "PeerError", job.shown()


def soon(event: dict, seconds: float) -> bool:
    """Whether a call that says at its end how long it took was in time."""
    return took(event["time"] - event["took"], event["time"]) < seconds


def check_error(case: Case, raised: dict, job) -> None:
    """It names rank, operation, sequence, phase and transport."""
    shown = f"{raised}\n{job.shown()}"
    if raised["where"] == "init":
        assert case.phase in JOINING, shown
        if raised["error"] == "TimeoutError":
            # who has no answer yet when rank 0 is killed or stopped cannot know that it was there
            early = case.phase == "connect" and case.victim == 0 and case.how in ("kill", "stop")
            assert early or case.phase in ("before_init", "rendezvous"), shown
            # who comes when rank 0 has given up already hears of nobody else
            late = {case.victim, 0} if (job[0].told("raised") or raised)["time"] < raised["time"] else {case.victim}
            assert any(f"rank {rank} did not arrive" in raised["text"] for rank in late), shown
            return
        assert raised["error"] == "PeerError", shown
        assert (raised["rank"], raised["operation"]) == (case.victim, "init"), shown
        assert raised["phase"] in ("init", "connect"), shown
        assert raised["transport"] == ("" if raised["phase"] == "init" else case.transport), shown
        assert f"rank {case.victim}" in raised["text"], shown
        return
    operation = "allreduce" if case.phase in JOINING else case.operation
    assert raised["error"] == "PeerError", shown
    if raised["operation"] == "barrier" != operation:  # the first call of all, which the victim had left already
        assert raised["sequence"] == 0 and case.phase not in JOINING, shown
        operation = "barrier"
    assert (raised["rank"], raised["operation"]) == (case.victim, operation), shown
    assert raised["sequence"] >= 0 and raised["transport"] == case.transport, shown
    assert raised["phase"] in ("connect", "post", "match", "transfer", "finish"), shown
    for word in (f"rank {case.victim}", operation, f"#{raised['sequence']}", raised["phase"], case.transport):
        assert word in raised["text"], shown

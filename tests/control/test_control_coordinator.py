"""The coordinator's decisions without sockets, a change of coordinator included."""

from __future__ import annotations

import random

import pytest

from hrdma.control.coordinator import Coordinator, Decisions, read_ranks
from hrdma.control.wire import Kind


class Hall:
    """A coordinator and what it sent."""

    def __init__(self, size=3, rank=0, **options) -> None:
        self.sent: list[tuple[int, Kind, dict]] = []
        options = {"lost": {}, "left": set(), "decisions": Decisions(10000), **options}
        self.coordinator = Coordinator(rank, size, lambda *message: self.sent.append(message), **options)

    def agree(self, rank, key="k", members=(0, 1, 2), payload=None) -> None:
        body = {"key": key, "members": list(members), "payload": payload or {"r": rank}}
        self.coordinator.receive(rank, Kind.AGREE, body, 0.0)

    def confirm(self, *ranks) -> None:
        """They have read what they were sent, and answer."""
        for rank, kind, body in list(self.sent):
            if kind is Kind.PROPOSE and rank in ranks:
                self.coordinator.receive(rank, Kind.CONFIRM, body, 0.0)

    def of(self, kind: Kind) -> dict[int, dict]:
        return {rank: body for rank, found, body in self.sent if found is kind}


def test_an_agreement_is_decided_when_all_have_come():
    hall = Hall()
    hall.agree(0)
    hall.agree(2)
    assert not hall.of(Kind.DECIDED)
    hall.agree(1)
    assert not hall.of(Kind.DECIDED)
    hall.confirm(1, 2)
    result = {"key": "k", "result": {"0": {"r": 0}, "1": {"r": 1}, "2": {"r": 2}}}
    assert hall.of(Kind.DECIDED) == {0: result, 1: result, 2: result}


def test_the_dead_are_left_out_even_if_they_had_come():
    hall = Hall()
    hall.agree(0)
    hall.agree(2)
    hall.coordinator.lose(2, "gone")
    hall.agree(1)
    hall.confirm(1)
    assert hall.of(Kind.DECIDED)[0]["result"] == {"0": {"r": 0}, "1": {"r": 1}}
    assert 2 not in hall.of(Kind.DECIDED)


def test_nothing_is_decided_that_was_not_just_confirmed():
    """What rank 2 sent may be old: it may have gone on with rank 1, and its hang-up comes next."""
    hall = Hall()
    hall.agree(2)
    hall.coordinator.lose(1, "gone")
    hall.agree(0)
    hall.coordinator.receive(0, Kind.WHO, {"key": "k"}, 0.0)
    assert not hall.of(Kind.DECIDED) and hall.of(Kind.MISSING)[0]["ranks"] == [2]
    assert hall.of(Kind.PROPOSE) == {2: {"key": "k", "turn": 1}}
    hall.coordinator.receive(2, Kind.CONFIRM, {"key": "another", "turn": 1}, 0.0)
    hall.coordinator.receive(2, Kind.CONFIRM, {"key": "k", "turn": 0}, 0.0)
    assert not hall.of(Kind.DECIDED)
    hall.confirm(2)
    assert hall.of(Kind.DECIDED)[0] == {"key": "k", "result": {"0": {"r": 0}, "2": {"r": 2}}}


def test_a_confirmation_does_not_count_for_long():
    """The coordinator was stopped after it had asked: they may have answered, and lost it since."""
    now = [0.0]
    hall = Hall(patience=1.0, clock=lambda: now[0])
    for rank in (0, 1, 2):
        hall.agree(rank)
    hall.confirm(1)
    now[0] = 1.5
    hall.coordinator.receive(2, Kind.CONFIRM, {"key": "k", "turn": 1}, 0.0)
    assert not hall.of(Kind.DECIDED) and hall.of(Kind.PROPOSE) == {rank: {"key": "k", "turn": 2} for rank in (1, 2)}
    now[0] = 2.0
    hall.coordinator.receive(1, Kind.CONFIRM, {"key": "k", "turn": 1}, 0.0)
    hall.coordinator.receive(2, Kind.CONFIRM, {"key": "k", "turn": 2}, 0.0)
    assert not hall.of(Kind.DECIDED)
    hall.coordinator.receive(1, Kind.CONFIRM, {"key": "k", "turn": 2}, 0.0)
    assert hall.of(Kind.DECIDED).keys() == {0, 1, 2}


def test_who_hangs_up_confirms_nothing_and_is_not_waited_for():
    hall = Hall()
    hall.agree(2)
    hall.coordinator.lose(1, "gone")
    hall.agree(0)
    hall.coordinator.lose(2, "gone")
    assert hall.of(Kind.DECIDED)[0]["result"] == {"0": {"r": 0}}


def test_a_late_repetition_gets_the_same_result():
    hall = Hall()
    for rank in (0, 1, 2):
        hall.agree(rank)
    hall.confirm(1, 2)
    hall.coordinator.lose(2, "gone")
    hall.sent.clear()
    hall.agree(1, payload={"other": 1})
    assert hall.of(Kind.DECIDED)[1]["result"].keys() == {"0", "1", "2"}


def test_who_is_missing():
    hall = Hall()
    hall.agree(1)
    hall.coordinator.receive(1, Kind.WHO, {"key": "k"}, 0.0)
    assert hall.of(Kind.MISSING) == {1: {"key": "k", "ranks": [0, 2]}}


def test_a_new_coordinator_decides_nothing_before_all_have_come():
    hall = Hall(4, 1, lost={0: "gone"}, awaited=[2, 3])
    hall.agree(1, members=(0, 1, 2))
    hall.coordinator.bring(2, {"agrees": {"k": {"members": [0, 1, 2], "payload": {"r": 2}}}})
    assert not hall.of(Kind.DECIDED)
    hall.coordinator.bring(3, {})
    assert not hall.of(Kind.DECIDED)
    hall.confirm(2)
    assert hall.of(Kind.DECIDED)[1]["result"] == {"1": {"r": 1}, "2": {"r": 2}}


def test_what_one_survivor_was_told_holds_for_all():
    hall = Hall(3, 1, lost={0: "gone"}, awaited=[2])
    hall.agree(1)
    told = {"result": {"0": {"r": 0}, "1": {"r": 1}, "2": {"r": 2}}}
    hall.coordinator.bring(2, {"decisions": {"k": told}})
    assert hall.of(Kind.DECIDED) == {1: {"key": "k", **told}, 2: {"key": "k", **told}}


def test_losses_known_to_one_are_told_to_all():
    hall = Hall(4, 1, lost={0: "gone"}, awaited=[2, 3])
    hall.coordinator.bring(2, {"lost": {"0": "x", "3": "rank 3 left", "1": "nonsense", "x": "y"}, "left": [3]})
    assert hall.coordinator.lost == {0: "gone", 3: "rank 3 left"} and hall.coordinator.left == {3}
    assert hall.coordinator.awaited == set()
    assert (2, Kind.LOST, {"rank": 3, "reason": "rank 3 left", "left": True}) in hall.sent


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.AGREE, {}),
        (Kind.AGREE, {"key": "k", "members": [0, 9], "payload": {}}),
        (Kind.AGREE, {"key": "k", "members": "all", "payload": {}}),
        (Kind.WHO, {}),
        (Kind.CONFIRM, {}),
        (Kind.CONFIRM, {"key": "k", "turn": "last"}),
        (Kind.STALL, {"comm": 1}),
        (Kind.STALL, {"comm": 1, "members": [1, 2], "sequence": 0, "signature": 0, "text": "x"}),
        (Kind.HELLO, {}),
    ],
)
def test_nonsense_of_a_member_is_dropped_and_logged(kind, body, caplog):
    hall = Hall()
    hall.coordinator.receive(0, kind, body, 0.0)
    assert hall.sent == [] and len(caplog.records) == 1


@pytest.mark.parametrize("value", [None, [], [0, 0], [3], [-1], [True], ["0"], {0: 1}])
def test_lists_of_ranks_are_checked(value):
    with pytest.raises(ValueError):
        read_ranks(value, 3)
    assert read_ranks([2, 0], 3) == (2, 0)


def test_decisions_are_bounded_and_the_first_stands():
    kept = Decisions(100)
    kept.add("a", {"result": {}})
    kept.add("a", {"result": {"0": {}}})
    assert kept["a"] == {"result": {}}
    for number in range(50):
        kept.add(f"b{number}", {"result": {}})
    assert "a" not in kept and "b49" in kept and len(kept.dump()) < 10
    kept.add("large", {"result": "x" * 1000})
    assert list(kept.dump()) == ["large"]


def test_any_order_of_messages_and_deaths_gives_one_result():
    """Messages to members are cut off at a random place when the coordinator dies; survivors bring their state."""
    for seed in range(300):
        rng = random.Random(seed)
        size = rng.randint(2, 5)
        told: dict[int, dict] = {rank: {} for rank in range(size)}
        gone: dict[int, str] = {}
        contributed: set[int] = set()
        while True:
            chief = min(set(range(size)) - set(gone))
            others = set(range(size)) - set(gone) - {chief}
            hall = Hall(size, chief, lost=dict(gone), awaited=sorted(others) if gone else [])
            state = {rank: {"decisions": told[rank], "agrees": {}} for rank in others | {chief}}
            for rank in contributed - set(gone):
                state[rank]["agrees"] = {"k": {"members": list(range(size)), "payload": {"r": rank, "c": chief}}}
            for key, decision in told[chief].items():
                hall.coordinator._decisions.add(key, decision)
            steps = [("bring", rank) for rank in others] if gone else []
            steps += [("agree", rank) for rank in others | {chief}]
            rng.shuffle(steps)
            steps.sort(key=lambda step: step[0] == "agree" if gone else 0)
            last = len(others) == 0 or rng.random() < 0.3
            cut = len(steps) if last else rng.randrange(len(steps) + 1)
            for step, rank in steps[:cut]:
                if step == "bring":
                    hall.coordinator.bring(rank, state[rank])
                else:
                    contributed.add(rank)
                    body = {"r": rank, "c": chief}
                    hall.agree(rank, members=range(size), payload=body)
            hall.confirm(*others if last else (rank for rank in others if rng.random() < 0.5))
            delivered = hall.sent if last else hall.sent[: rng.randrange(len(hall.sent) + 1)]
            for rank, kind, body in delivered:
                if kind is Kind.DECIDED:
                    told[rank]["k"] = {"result": body["result"]}
            if last:
                break
            gone[chief] = "dead"
        results = [told[rank].get("k") for rank in sorted(set(range(size)) - set(gone))]
        assert results[0] is not None and all(result == results[0] for result in results), seed

"""The schedule as data: JSON, views, text."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hrdma.errors import ScheduleError
from hrdma.topo.algorithms import ALGORITHMS, build
from hrdma.topo.schedule import Schedule, Transfer

CASES = [(name, collective) for name, algorithm in ALGORITHMS.items() for collective in algorithm.collectives]


@pytest.mark.parametrize(("name", "collective"), CASES)
@pytest.mark.parametrize("size", (1, 5))
def test_json_round_trip(name: str, collective: str, size: int) -> None:
    schedule = build(name, collective, size, parts=2)
    again = Schedule.from_json(schedule.to_json())
    assert again == schedule and hash(again) == hash(schedule)
    assert Schedule.from_json(schedule.for_rank(0).to_json()) == schedule.for_rank(0)


def test_json_carries_what_later_algorithms_need() -> None:
    rounds = [[Transfer(0, 1, 0, "reduce", lane=1, span=2)], [Transfer(1, 0, 0, "copy", lane=3, span=2)]]
    schedule = Schedule.of("allreduce", 2, rounds, split=2, weights=(1, 3), window=4, name="mine")
    again = Schedule.from_json(schedule.to_json())
    assert again == schedule and again.rounds == (tuple(rounds[0]), tuple(rounds[1]))
    assert again != build("ring", "allreduce", 2)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "hrdma.schedule", "version": 9}', '{"format": "hrdma.schedule", "version": 1}']
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="not a schedule"):
        Schedule.from_json(text)


def test_edited_text_is_refused() -> None:
    text = build("ring", "allreduce", 2).to_json()
    for old, new, match in (
        ('"allreduce"', '"allmagic"', "unknown collective 'allmagic'; known: "),
        ('"reduce", 0', '"add", 0', "op of a transfer is copy or reduce, not 'add'"),
        ("[0, 1, ", "[0, ", "not a schedule: ValueError: not enough values to unpack"),
    ):
        assert old in text
        with pytest.raises(ScheduleError, match=match):
            Schedule.from_json(text.replace(old, new, 1))


def test_numbers_of_numpy_are_numbers() -> None:
    schedule = build("ring", "allreduce", 3)
    given = {"size": np.int64(3), "split": np.int32(3), "root": np.int8(0), "window": np.uint8(0)}
    same = Schedule("allreduce", table=schedule.table, weights=(np.int64(1),) * 3, name="ring", **given)
    again = replace(schedule, weights=(1, 1, 1))
    assert same == again and same.digest() == again.digest() and same.to_json() == again.to_json()
    assert same.for_rank(np.int64(1)).digest() == again.for_rank(1).digest() != again.digest()
    assert schedule.digest() != again.digest()
    with pytest.raises(TypeError):
        replace(schedule, size="3")


def test_text() -> None:
    text = str(build("halving", "allreduce", 4))
    assert text.splitlines()[0] == "halving: allreduce, 4 ranks, 4 chunks, 16 transfers"
    assert "0>2:2-3+" in text
    assert "as rank 1 sees it" in str(build("halving", "allreduce", 4, rank=1))


def test_data_cannot_be_changed() -> None:
    schedule = build("ring", "allreduce", 3)
    with pytest.raises(ValueError, match="read-only"):
        schedule.table[0, 0] = 1
    with pytest.raises(AttributeError):
        schedule.size = 4
    with pytest.raises(ScheduleError, match="view of rank 1"):
        schedule.for_rank(1).for_rank(2)
    with pytest.raises(ScheduleError, match="7 columns"):
        Schedule("allreduce", 2, schedule.table[:, :3].copy())

"""What is said of those that are late: it is their fault, unless they had no processor."""

from __future__ import annotations

import pytest
from jobs import Job, in_time
from windows import Starved, unless_starved


class Told:
    """A rank that has said this: (when, how long its threads have waited by then)."""

    rank = 1

    def __init__(self, *said: tuple[float, float]) -> None:
        self.news = [{"time": time, "waited": waited} for time, waited in said] + [{"event": "ended", "time": 99.0}]

    def shown(self) -> str:
        return str(self.news)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """A machine that withholds nothing."""
    monkeypatch.setattr("jobs.took", lambda begin, end: end - begin)


@pytest.mark.parametrize(
    ("said", "raises"),
    [
        (((9.0, 0.5), (10.9, 0.5)), None),
        (((9.0, 0.5), (11.5, 0.9)), AssertionError),  # half a second too late, and waited for 0.4
        (((9.0, 0.5), (11.5, 1.1)), Starved),
        (((9.0, 0.5), (9.5, 1.0), (11.5, 1.1)), AssertionError),  # it had waited before
        (((11.5, 0.6),), Starved),  # it said nothing before
    ],
)
def test_who_is_late_has_to_have_waited_for_as_long(said, raises):
    rank = Told(*said)

    def check() -> None:
        in_time(Job([rank]), rank, 10.0, rank.news[len(said) - 1], 1.0)

    if raises is None:
        check()
        return
    with pytest.raises(raises, match=r"rank 1 took 1.50 s"):
        check()


def test_it_is_measured_again_while_they_starve_and_not_for_ever():
    ends = iter([Starved("a"), Starved("b"), 5])

    def measure() -> int:
        end = next(ends)
        if isinstance(end, Exception):
            raise end
        return end

    assert unless_starved(measure) == 5

    def starve() -> None:
        raise Starved("no processor")

    with pytest.raises(AssertionError, match="in none of 2 windows was there a processor: no processor"):
        unless_starved(starve, windows=2)

    def fail() -> None:
        raise AssertionError("wrong")

    with pytest.raises(AssertionError, match="wrong"):
        unless_starved(fail)

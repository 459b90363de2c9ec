"""Measuring while others use the machine too: again until one figure is good, all of them where none is.

A process that gets no processor for a second spoils what is measured in that second, and no bound that is of use allows for it. A
fault of what is tested is there each time. So what is said of rates, shares and short times is measured in windows, each with its
own start and counters, and one that is good will do. What must never happen (a wrong value, a loss, an error) is not for windows:
it is asserted of all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def one_good(measure: Callable[[], Found], good: Callable[[Found], bool], windows: int = 10) -> Found:
    """What the first good window found; fails with what all have found where none is good."""
    found = []
    for _ in range(windows):
        found.append(measure())
        if good(found[-1]):
            return found[-1]
    raise AssertionError(f"none of {windows} windows is good: {found}")


class Starved(Exception):
    """What was late had no processor for as long as it was too late."""


def unless_starved(measure: Callable[[], Found], windows: int = 6) -> Found:
    """What the first window found in which nobody starved; fails where all did."""
    for _ in range(windows - 1):
        try:
            return measure()
        except Starved as starved:
            print(f"measured again: {starved}")  # pytest shows it with a failure
    try:
        return measure()
    except Starved as starved:
        raise AssertionError(f"in none of {windows} windows was there a processor: {starved}") from None

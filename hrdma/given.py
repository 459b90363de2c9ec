"""Schedules that calls are given (`schedule=`): read, proved, and agreed upon by all ranks before one of them runs.

A rank can see for itself that a schedule is right, but not that the others mean the same one, and two right ones do not fit
together. So the first call with a schedule tells all ranks what this rank has, by an allgather of the communicator itself:
it has a place in the order of calls as any other, hence a rank that calls something else meanwhile is found out as usual.
Who cannot use its schedule says so there, and no rank waits for it.

Ranks agree on what is in a schedule, not on the object or the file, and whether a call must ask is decided by that alone:
the same on all ranks as long as they call the same.
"""

from __future__ import annotations

from collections import OrderedDict
from os import PathLike
from typing import TYPE_CHECKING

from hrdma.errors import ScheduleError

if TYPE_CHECKING:
    from hrdma.communicator import Communicator
    from hrdma.planning import Schedule

__all__ = ["GivenSchedules"]

TOLD = 256  # bytes that each rank says
KEPT = 32  # schedules of a communicator; the oldest is forgotten, on all ranks alike, and would be asked about anew
_AGREED, _REFUSED = b"+", b"-"


class GivenSchedules:
    """Those of one communicator.

    Attributes
    ----------
    schedules : dict of int to Schedule
        By their numbers, from 1.
    """

    def __init__(self) -> None:
        self.schedules: dict[int, Schedule] = {}
        self._numbers: OrderedDict[str, int] = OrderedDict()  # by digest, in the order in which the ranks agreed
        self._last = 0

    def mark(self, number: int) -> str:
        """What the text of a call says of its schedule; it differs wherever schedules do."""
        if number == 0:
            return ""
        digest = next((digest for digest, known in self._numbers.items() if known == number), "")
        return f" with schedule {digest}" if digest else " to compare what schedule= means"

    def number(self, comm: Communicator, what: Schedule | str | PathLike[str], timeout: float | None) -> int:
        """The number of a schedule. Collective where it is new.

        Raises
        ------
        TypeError
            Neither a schedule nor a path; nothing was told.
        ScheduleError
            As `hrdma.planning.given`; or another rank has another one, or cannot use its own.
        OSError
            The file cannot be read.
        """
        from hrdma.planning import given

        try:
            schedule = given(what)
        except (ScheduleError, OSError) as error:
            comm._told(_padded(_REFUSED + str(error).encode()), timeout)
            raise
        digest = schedule.digest()
        if digest not in self._numbers:
            name = f"{schedule.name or 'one without a name'} ({digest})"
            told = comm._told(_padded(_AGREED + name.encode()), timeout)
            _compare([bytes(told[at : at + TOLD]).rstrip(b"\0") for at in range(0, len(told), TOLD)])
            self._last += 1
            self._numbers[digest] = self._last
            self.schedules[self._last] = schedule
            if len(self._numbers) > KEPT:
                del self.schedules[self._numbers.popitem(last=False)[1]]
                comm._forget_given()
        return self._numbers[digest]


def _padded(text: bytes) -> bytes:
    return text[:TOLD].ljust(TOLD, b"\0")


def _compare(told: list[bytes]) -> None:
    for other, text in enumerate(told):
        if text.startswith(_REFUSED):
            raise ScheduleError(
                f"schedule=: rank {other} cannot use what it was given: {text[1:].decode(errors='replace')}", rank=other
            )
    for other, text in enumerate(told):
        if text != told[0]:
            first, its = (said[1:].decode(errors="replace") for said in (told[0], text))
            raise ScheduleError(
                f"schedule= must mean the same on all ranks: rank 0 has {first}, rank {other} has {its}", rank=other
            )

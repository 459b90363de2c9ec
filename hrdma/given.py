"""Schedules that calls are given (`schedule=`): read, proved, and agreed upon by all ranks before one of them runs.

A rank can see for itself that a schedule is right, but not that the others mean the same one, and two right ones do not fit
together. So the first call with a schedule tells all ranks what this rank has, by an allgather of the communicator itself:
it has a place in the order of calls as any other, hence a rank that calls something else meanwhile is found out as usual;
so is one that uses a schedule on which all have agreed before. Who cannot use its schedule says so there, whatever the
reason, and no rank with a new one waits for it.

Ranks agree on what is in a schedule, not on the object or the file, and whether a call must ask is decided by that alone:
the same on all ranks as long as they call the same.
"""

from __future__ import annotations

from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from hrdma.errors import ScheduleError

if TYPE_CHECKING:
    from hrdma.communicator import Communicator
    from hrdma.planning import Schedule

__all__ = ["GivenSchedules"]

TOLD = 256  # bytes that each rank says: digest, then as much of a name as there is room for
DIGEST = 16  # letters
KEPT = 32  # schedules of a communicator; the oldest is forgotten, on all ranks alike, and would be asked about anew
PATHS = 64  # of files whose numbers are known; a file is read again when its own was forgotten
_AGREED, _REFUSED = b"+", b"-"


class GivenSchedules:
    """Those of one communicator.

    Attributes
    ----------
    schedules : dict of int to Schedule
        By their numbers, from 1, in the order in which the ranks agreed.
    """

    def __init__(self) -> None:
        self.schedules: dict[int, Schedule] = {}
        self._numbers: dict[str, int] = {}  # by digest
        self._last = 0

    def mark(self, number: int) -> str:
        """What the text of a call says of its schedule; it differs wherever schedules do."""
        if number == 0:
            return ""
        schedule = self.schedules.get(number)
        return f" with schedule {schedule.digest()}" if schedule else " to compare what schedule= means"

    def number(self, comm: Communicator, what: Schedule | str | PathLike[str], timeout: float | None) -> int:
        """The number of a schedule. Collective where it is new, or cannot be used.

        Raises
        ------
        TypeError
            Neither a schedule nor a path.
        ScheduleError
            As `hrdma.planning.given`; or another rank has another one, or cannot use its own.
        OSError
            The file cannot be read.
        """
        try:
            known = self._numbers.get(what.digest()) if hasattr(what, "digest") else None
            if known is not None:
                return known
            name: Any = fspath(what) if isinstance(what, PathLike) else what
            if isinstance(name, str) and name in comm._files:
                return comm._files[name]
            from hrdma.planning import given

            schedule = given(name, comm.size)
            digest = schedule.digest()
        except Exception as error:
            comm._told(_padded(_REFUSED + _bytes(str(error) or type(error).__name__)), timeout)
            raise
        if digest not in self._numbers:
            said = _AGREED + _bytes(digest + (schedule.name or "one without a name"))
            told = comm._told(_padded(said), timeout)
            _compare([bytes(told[at : at + TOLD]).rstrip(b"\0") for at in range(0, len(told), TOLD)])
            self._last += 1
            self._numbers[digest] = self._last
            self.schedules[self._last] = schedule
            if len(self.schedules) > KEPT:
                oldest = next(iter(self.schedules))
                del self._numbers[self.schedules.pop(oldest).digest()]
                comm._forget_given(oldest)
        if isinstance(name, str):
            if len(comm._files) >= PATHS:
                comm._files.clear()
            comm._files[name] = self._numbers[digest]
        return self._numbers[digest]


def _bytes(text: str) -> bytes:
    return text.encode(errors="replace")  # names of files need not be Unicode


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
            raise ScheduleError(
                f"schedule= must mean the same on all ranks: rank 0 has {_shown(told[0])}, rank {other} has {_shown(text)}",
                rank=other,
            )


def _shown(said: bytes) -> str:
    digest, name = (part.decode(errors="replace") for part in (said[1 : 1 + DIGEST], said[1 + DIGEST :]))
    return f"{name} ({digest})"

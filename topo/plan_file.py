"""Plans in files: JSON with the fabric, the reasons and the schedule, a round per line, so that it can be edited.

A plan holds all that it needs: `load` gives it back, compares the fabric with the job's where one is given, and proves the
schedule before anything else may use it. `schedule_of` and `prove` also take the other files that hold a schedule.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hrdma.errors import ScheduleError
from hrdma.topo import msccl
from hrdma.topo.fabric import Fabric
from hrdma.topo.fabric_file import dumps as fabric_dumps
from hrdma.topo.fabric_file import loads as fabric_loads
from hrdma.topo.planner import ROOTED, Candidate, FabricPlan
from hrdma.topo.schedule import Schedule

__all__ = ["dump", "dumps", "load", "loads", "prove", "schedule_of"]

_FORMAT = "hrdma.plan"
_VERSION = 1


def dumps(plan: FabricPlan) -> str:
    """The text of a plan. Cost: that of its complete schedule, about 40 bytes per transfer."""
    head = {"format": _FORMAT, "version": _VERSION, **plan.to_dict(), "fabric": fabric_dumps(plan.fabric)}
    return json.dumps(head, indent=1)[:-2] + ',\n "schedule": ' + plan.schedule().to_json() + "}\n"


def dump(plan: FabricPlan, path: str | Path) -> None:
    """Writes a plan to a file."""
    Path(path).write_text(dumps(plan))


def load(path: str | Path, fabric: Fabric | None = None) -> FabricPlan:
    """A plan from a file; see `loads`. Errors name the file.

    Raises
    ------
    OSError
        When it cannot be read.
    """
    try:
        return loads(Path(path).read_text(), fabric)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}", rank=error.rank, chunk=error.chunk) from error
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{path}: not a plan: {error}") from error


def loads(text: str, fabric: Fabric | None = None) -> FabricPlan:
    """A plan from text, proved.

    Parameters
    ----------
    text : str
    fabric : Fabric, optional
        That of the job: a plan for another one is refused.

    Raises
    ------
    ScheduleError
        Not a plan; for another fabric or another number of ranks; a schedule that is of another collective or root than the
        plan says, or wrong, with rank and chunk.
    """
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != _FORMAT or data.get("version") != _VERSION:
            raise ScheduleError(f"not a plan: it has no format {_FORMAT!r}, version {_VERSION}")
        planned = fabric_loads(data["fabric"])
        schedule = Schedule.from_json(json.dumps(data["schedule"]))
        found = _assembled(data, planned, schedule)
    except ScheduleError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise ScheduleError(f"not a plan: {type(error).__name__}: {error}") from error
    _belongs(found, schedule, fabric)
    schedule.check()
    return found


def _assembled(data: dict[str, Any], fabric: Fabric, schedule: Schedule) -> FabricPlan:
    candidates = tuple(Candidate(**candidate) for candidate in data["candidates"])
    if not candidates:
        raise ScheduleError("not a plan: it has no candidates")
    refused = tuple((str(name), str(why)) for name, why in data["refused"])
    nbytes, root = float(data["nbytes"]), int(data["root"])
    found = FabricPlan(str(data["collective"]), fabric, nbytes, root, candidates, refused)
    # what is as the algorithm wrote it needs no copy of it, and is not called edited
    return found if _untouched(found, schedule) else FabricPlan(
        found.collective, fabric, nbytes, root, candidates, refused, schedule
    )  # fmt: skip


def _untouched(found: FabricPlan, schedule: Schedule) -> bool:
    try:
        return found.schedule() == schedule
    except ValueError:
        return False


def _belongs(found: FabricPlan, schedule: Schedule, fabric: Fabric | None) -> None:
    if schedule.collective != found.collective:
        raise ScheduleError(f"the plan is for {found.collective}, its schedule for {schedule.collective}")
    if schedule.collective in ROOTED and schedule.root != found.root:
        raise ScheduleError(f"the plan has root {found.root}, its schedule root {schedule.root}")
    if schedule.size != found.fabric.ranks:
        raise ScheduleError(
            f"the plan's schedule is for {schedule.size} ranks; {found.fabric.name} has {found.fabric.ranks}"
        )
    if fabric is None:
        return
    if fabric.ranks != found.fabric.ranks:
        raise ScheduleError(
            f"the plan is for {found.fabric.ranks} ranks on {found.fabric.name}; {fabric.name} has {fabric.ranks}"
        )
    if fabric.digest() != found.fabric.digest():
        raise ScheduleError(
            f"the plan is for another fabric: {found.fabric.name} ({found.fabric.digest()}), "
            f"not {fabric.name} ({fabric.digest()}); plan again"
        )


def schedule_of(path: str | Path) -> Schedule:
    """The schedule in a file: of a plan, alone (JSON), or as a program of MSCCL (XML). Not proved.

    Raises
    ------
    ScheduleError
        None of these; the message names the file.
    OSError
        When it cannot be read.
    """
    return _held(path)[0]


def prove(path: str | Path, fabric: Fabric | None = None, ranks: int | None = None) -> Schedule:
    """The schedule in a file, as `schedule_of`, proved.

    Parameters
    ----------
    path : str or Path
    fabric : Fabric, optional
        It must be for this one: a plan for one that is equal, others for as many ranks.
    ranks : int, optional
        It must be for so many.

    Raises
    ------
    ScheduleError
        As `schedule_of` and `loads`; for another fabric or number of ranks; wrong, with rank and chunk.
    OSError
        When it cannot be read.
    """
    schedule, is_plan = _held(path)
    if ranks is not None and schedule.size != ranks:  # first: a proof for very many ranks takes long
        raise ScheduleError(f"{path}: it is for {schedule.size} ranks, the communicator has {ranks}")
    if is_plan:
        return load(path, fabric).schedule()
    if fabric is not None and schedule.size != fabric.ranks:
        raise ScheduleError(f"{path}: it is for {schedule.size} ranks; {fabric.name} has {fabric.ranks}")
    schedule.check()
    return schedule


def _held(path: str | Path) -> tuple[Schedule, bool]:
    """The schedule in a file, and whether that is a plan."""
    try:
        text = Path(path).read_text()
        if text.lstrip().startswith("<"):
            return msccl.loads(text), False
        data = json.loads(text)
        is_plan = isinstance(data, dict) and data.get("format") == _FORMAT
        return Schedule.from_json(json.dumps(data["schedule"]) if is_plan and "schedule" in data else text), is_plan
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}", rank=error.rank, chunk=error.chunk) from error
    except ValueError as error:
        raise ScheduleError(f"{path}: neither JSON nor XML: {error}") from error

"""What is kept of a device between two commands: what was there before, what is installed, and what is about to be.

One JSON file for each device, in a folder below ``/run``. It needs no fsync: a crash of a process leaves the page cache, and a crash of
the machine takes the kernel's traffic control with it, which the boot id tells. A file is locked by whoever may change the device.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hrdma.errors import DeviceError, RefusedError
from hrdma.qos import tree
from hrdma.qos.objects import Dcb, Object, of_json, to_json
from hrdma.qos.order import Place
from hrdma.qos.policy import Job, Match, Policy

__all__ = ["DIRECTORY", "Lock", "Record", "Wish", "holder", "now", "start_keeper", "stem"]

DIRECTORY = "/run/hrdma-qos"


def now() -> float:
    """Seconds since the machine was started, its sleep included: a clock that all processes share and nobody sets."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def start_keeper(dev: str, directory: str) -> None:
    """Starts the keeper of a device's lease, in this network namespace; a second one ends by itself."""
    command = [sys.executable, "-m", "hrdma.qos.lease", dev, directory]
    null = subprocess.DEVNULL
    subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True, cwd="/")


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def stem(dev: str) -> str:
    """Name of a device's files; devices of two network namespaces may have one name."""
    if "/" in dev:
        raise DeviceError(f"{dev!r} is not the name of a device")
    return f"{dev}@{os.stat('/proc/thread-self/ns/net').st_ino}"


@dataclass(frozen=True)
class Wish:
    """All that a tree follows from."""

    policy: Policy
    kind: str
    device: tree.Device
    slots: Mapping[str, int]
    places: Mapping[str, Place]
    rotation: int = 0

    @property
    def carrier(self) -> str:
        """The device whose classes the packets pass."""
        return tree.ifb_name(self.device.index) if self.policy.direction == "ingress" else self.device.name

    @property
    def tree(self) -> tree.Tree:
        return tree.build(self.policy, self.kind, self.device, self.slots, self.places)


@dataclass(frozen=True)
class Record:
    """The journal of a device.

    Notes
    -----
    `settled` is what is installed. Where it is None, the device is on its way to `before`: an installation that did not end, or
    a revert. `pending` is what a change was about to install when it was written.
    """

    dev: str
    index: int
    before: tuple[Object, ...]
    settled: Wish | None = None
    pending: Wish | None = None
    lease: float = 0.0  #: seconds that the installation lasts unless it is renewed; 0: for ever
    expires: float = 0.0  #: when, on the clock of `now`
    dcb: Dcb | None = None  #: the NIC's own priorities before; None where they were not touched
    members: tuple[dict[str, Any], ...] = field(default=())  #: processes that registered with a controller
    marked: tuple[str, ...] = ()  #: cgroups whose sockets are given a priority
    boot: str = field(default_factory=boot_id)

    @property
    def expired(self) -> bool:
        return self.lease > 0 and now() > self.expires

    def renewed(self) -> Record:
        return replace(self, expires=now() + self.lease if self.lease else 0.0)

    def save(self, directory: str) -> None:
        """Writes the file as a whole or not at all."""
        text = json.dumps(_plain(self))
        path = Path(directory, f"{stem(self.dev)}.json")
        part = path.with_suffix(".part")
        part.write_text(text)
        part.rename(path)

    def drop(self, directory: str) -> None:
        Path(directory, f"{stem(self.dev)}.json").unlink(missing_ok=True)

    @classmethod
    def load(cls, directory: str, dev: str) -> Record | None:
        """The record of a device; None where there is none, or it is about an earlier start of the machine."""
        path = Path(directory, f"{stem(dev)}.json")
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise RefusedError(f"{path} is not a record of this version: {error}; look at it and remove it") from None
        return _record(values) if values["boot"] == boot_id() else None


def _plain(record: Record) -> dict[str, Any]:
    values = {name: getattr(record, name) for name in ("dev", "index", "lease", "expires", "members", "marked", "boot")}
    values["dcb"] = asdict(record.dcb) if record.dcb else None
    values["before"] = [to_json(thing) for thing in record.before]
    for name in ("settled", "pending"):
        wish = getattr(record, name)
        values[name] = asdict(wish) if wish else None
    return values


def _record(values: dict[str, Any]) -> Record:
    wishes = {name: _wish(values[name]) if values[name] else None for name in ("settled", "pending")}
    before = tuple(of_json(thing) for thing in values["before"])
    return Record(
        **{
            **values,
            **wishes,
            "before": before,
            "dcb": _dcb(values["dcb"]),
            "members": tuple(values["members"]),
            "marked": tuple(values["marked"]),
        }
    )


def _dcb(values: dict[str, Any] | None) -> Dcb | None:
    """JSON has no tuples."""
    if values is None:
        return None
    apps = tuple((code, priority) for code, priority in values["apps"])
    plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    plain["apps"] = apps
    return Dcb(**plain)


def _wish(values: dict[str, Any]) -> Wish:
    policy = values["policy"]
    jobs = tuple(Job(**{**job, "match": tuple(Match(**match) for match in job["match"])}) for job in policy["jobs"])
    return Wish(
        Policy(**{**policy, "jobs": jobs, "dscp_pool": tuple(policy["dscp_pool"])}),
        values["kind"],
        tree.Device(**{**values["device"], "dcb": _dcb(values["device"]["dcb"])}),
        values["slots"],
        {name: Place(**place) for name, place in values["places"].items()},
        values["rotation"],
    )


class Lock:
    """The right to change a device; the kernel gives it back when the process ends, however it ends."""

    def __init__(self, directory: str, dev: str, patience: float = 0.0) -> None:
        try:
            os.makedirs(directory, 0o755, exist_ok=True)
            self._fd = os.open(Path(directory, f"{stem(dev)}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RefusedError(
                f"cannot keep a record in {directory}: {error.strerror}; run as root, or name a folder: --state"
            ) from None
        deadline = now() + patience
        while not self._take():
            if now() >= deadline:
                pid = os.pread(self._fd, 32, 0).decode() or "?"
                os.close(self._fd)
                raise RefusedError(f"{dev} is in the hands of process {pid.strip()}: one controller at a time")
            time.sleep(0.05)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)

    def _take(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        os.ftruncate(self._fd, 0)
        os.close(self._fd)


def holder(directory: str, dev: str) -> int:
    """Process that has the lock of a device; 0 where nobody has."""
    try:
        fd = os.open(Path(directory, f"{stem(dev)}.lock"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return 0
    except BlockingIOError:
        return int(os.pread(fd, 32, 0) or b"0")
    finally:
        os.close(fd)

"""What is kept of a device between two commands: what was there before, what is installed, and what is about to be.

One JSON file for each device, in a folder below ``/run``. It needs no fsync: a crash of a process leaves the page cache, and a crash of
the machine takes the kernel's traffic control with it, which the boot id tells. A file is locked by whoever may change the device.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hrdma.errors import RefusedError
from hrdma.qos import tree
from hrdma.qos.files import path_of
from hrdma.qos.objects import Dcb, Object, of_json, to_json
from hrdma.qos.order import Live, Place
from hrdma.qos.policy import Job, Match, Policy

__all__ = ["Lock", "Record", "Wish", "holder", "now", "start_keeper", "take_keeper"]

VERSION = 3  # of the file


def now() -> float:
    """Seconds since the machine was started, its sleep included: a clock that all processes share and nobody sets."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def take_keeper(dev: str, directory: str) -> int | None:
    """The right to keep a device's lease, as a descriptor; None where somebody has it."""
    fd = os.open(path_of(dev, "lease", directory), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def start_keeper(dev: str, directory: str) -> None:
    """Starts the keeper of a device's lease, in this network namespace, unless there is one; it inherits the right."""
    fd = take_keeper(dev, directory)
    if fd is None:
        return
    command = [sys.executable, "-m", "hrdma.qos.lease", dev, directory, str(fd)]
    null = subprocess.DEVNULL
    try:
        subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True, cwd="/", pass_fds=[fd])
    finally:
        os.close(fd)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True)
class Wish:
    """All that a tree follows from."""

    policy: Policy
    kind: str
    device: tree.Device
    slots: Mapping[str, int]
    places: Mapping[str, Place]
    rotation: int = 0
    live: Mapping[str, Live] = field(default_factory=dict)  #: the counters by which the places were chosen
    classifier: str = "u32"

    @property
    def carrier(self) -> str:
        """The device whose classes the packets pass."""
        return tree.ifb_name(self.device.index) if self.policy.direction == "ingress" else self.device.name

    @property
    def by_packet(self) -> bool:
        """Whether a job's packets are known by what is in them alone, whatever the priority of their socket."""
        return self.kind in ("mqprio", "dcb") or self.policy.direction == "ingress"

    @cached_property
    def tree(self) -> tree.Tree:
        return tree.build(self.policy, self.kind, self.device, self.slots, self.places, self.classifier)


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
    #: Cgroups whose sockets are given a priority: which, and the number of the cgroup, which one made anew has not.
    marked: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    boot: str = field(default_factory=boot_id)

    @property
    def expired(self) -> bool:
        return self.lease > 0 and now() > self.expires

    def renewed(self) -> Record:
        return replace(self, expires=now() + self.lease if self.lease else 0.0)

    def save(self, directory: str) -> None:
        """Writes the file as a whole or not at all; RefusedError where it cannot."""
        text = json.dumps(_plain(self))
        path = Path(path_of(self.dev, "json", directory))
        part = path.with_suffix(".part")
        try:
            part.write_text(text)
            part.rename(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise RefusedError(
                f"cannot write the record {path}: {error.strerror}; without it nothing is changed"
            ) from None

    def drop(self, directory: str) -> None:
        Path(path_of(self.dev, "json", directory)).unlink(missing_ok=True)

    @classmethod
    def load(cls, directory: str, dev: str) -> Record | None:
        """The record of a device; None where there is none, or it is about an earlier start of the machine."""
        path = Path(path_of(dev, "json", directory))
        try:
            values = json.loads(path.read_text())
            if values["boot"] != boot_id():
                return None
            if (version := values.pop("version")) != VERSION:
                raise ValueError(f"it has version {version}, not {VERSION}")
            return _record(values)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise RefusedError(
                f"{path} is not a record of this version of hrdma ({type(error).__name__}: {error}): revert with the version that"
                " installed, or look at the file and remove it, and what is installed by `tc qdisc del dev DEV root`"
            ) from None


def _plain(record: Record) -> dict[str, Any]:
    names = ("dev", "index", "lease", "expires", "members", "marked", "boot")
    values = {"version": VERSION, **{name: getattr(record, name) for name in names}}
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
            "marked": {path: tuple(mark) for path, mark in values["marked"].items()},
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
        Policy(**{**policy, "jobs": jobs, **{name: tuple(policy[name]) for name in ("dscp_pool", "answer_pool")}}),
        values["kind"],
        tree.Device(**{**values["device"], "dcb": _dcb(values["device"]["dcb"])}),
        values["slots"],
        {name: Place(**place) for name, place in values["places"].items()},
        values["rotation"],
        {name: Live(**live) for name, live in values["live"].items()},
        values["classifier"],
    )


# Locks of an open file, as flock makes them, but such as can be asked for without taking them.
_FLOCK = struct.Struct("hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid
_WANTED = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


class Lock:
    """The right to change a device; the kernel gives it back when the process ends, however it ends."""

    def __init__(self, directory: str, dev: str, patience: float = 0.0) -> None:
        try:
            os.makedirs(directory, 0o755, exist_ok=True)
            self._fd = os.open(path_of(dev, "lock", directory), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _WANTED)
        except (BlockingIOError, PermissionError):  # the kernel may say either
            return False
        return True

    def release(self) -> None:
        os.ftruncate(self._fd, 0)
        os.close(self._fd)


def holder(directory: str, dev: str) -> int:
    """Process that has the lock of a device; 0 where nobody has, -1 where it has not said yet who it is."""
    try:
        fd = os.open(path_of(dev, "lock", directory), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        (kind, *_) = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WANTED))
        return 0 if kind == fcntl.F_UNLCK else int(os.pread(fd, 32, 0) or b"-1")
    finally:
        os.close(fd)

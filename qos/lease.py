"""The process that gives a device back when its lease is over and nobody has renewed it.

It is started beside whoever installs with a lease, in a session of its own, so that it outlives them. It keeps nothing in
memory: expiry is in the record, and opening the device is what reverts. There is one for each device: the right to be it is a
lock that it inherits from who starts it. Before it ends it gives that back and looks once more, so that no lease that
begins meanwhile is without a keeper. Nobody would start another one for a holder that was killed, so no failure ends it: a kernel
that is busy, descriptors that have run out and a record that cannot be read now are looked at again.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from hrdma.errors import DeviceError, HrdmaError
from hrdma.qos.apply import Control
from hrdma.qos.files import path_of
from hrdma.qos.record import Record, now, take_keeper

__all__ = ["keep"]

PACE = 1.0  # seconds between looks
FAILURES = (HrdmaError, OSError)  # a deadline of the kernel's answer is of the latter


def _wanted(record: Record | None) -> bool:
    """Whether there is something to keep: a lease, or a change that may have been cut off."""
    return record is not None and bool(record.settled is None or record.pending or record.lease)


def _watch(dev: str, directory: str) -> None:
    """Returns when there is no lease any more: given up, reverted, or the device is gone."""
    path, seen = Path(path_of(dev, "json", directory)), -1
    record: Record | None = None
    while True:
        try:
            stamp = path.stat().st_mtime_ns
            if stamp != seen:  # a record is long, and read only when it has changed
                record = Record.load(directory, dev)
                seen = stamp
        except FileNotFoundError:
            return
        except FAILURES:
            time.sleep(PACE)
            continue
        if record is None or not _wanted(record):
            return
        # One that is not settled is a change under way, or one that was cut off: the lock tells.
        under_way = record.settled is None or record.pending is not None
        left = record.expires - now() if record.lease and not under_way else 0.0
        time.sleep(min(max(left, 0.05), PACE))
        if left > 0:
            continue
        try:
            Control(dev, directory).close()
        except DeviceError:
            return
        except FAILURES:  # somebody has it, or it cannot be reverted now
            time.sleep(PACE)


def _again(dev: str, directory: str) -> int | None:
    """The right once more where a lease has begun since the last look and nobody keeps it."""
    while True:
        try:
            return take_keeper(dev, directory) if _wanted(Record.load(directory, dev)) else None
        except FAILURES:
            time.sleep(PACE)


def keep(dev: str, directory: str, right: int) -> None:
    """Keeps a device's lease as long as there is one; `right` is what `take_keeper` gave."""
    held: int | None = right
    while held is not None:
        try:
            _watch(dev, directory)
        finally:
            os.close(held)
        held = _again(dev, directory)


if __name__ == "__main__":
    keep(sys.argv[1], sys.argv[2], int(sys.argv[3]))

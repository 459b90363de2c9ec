"""The process that gives a device back when its lease is over and nobody has renewed it.

It is started beside whoever installs with a lease, in a session of its own, so that it outlives them. It keeps nothing in
memory: expiry is in the record, and opening the device is what reverts.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path

from hrdma.errors import DeviceError, HrdmaError
from hrdma.qos.apply import Control
from hrdma.qos.record import Record, now, stem

__all__ = ["keep"]

PACE = 1.0  # seconds between looks


def keep(dev: str, directory: str) -> None:
    """Returns when there is no lease any more: given up, reverted, or the device is gone."""
    fd = os.open(Path(directory, f"{stem(dev)}.lease"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    path, seen = Path(directory, f"{stem(dev)}.json"), -1
    while path.exists():
        if path.stat().st_mtime_ns != seen:  # a record is long, and read only when it has changed
            seen = path.stat().st_mtime_ns
            record = Record.load(directory, dev)
        if record is None or (record.settled and not record.lease):
            return
        # One that is not settled is an installation under way, or one that was cut off: the lock tells.
        left = record.expires - now() if record.settled else 0.0
        time.sleep(min(max(left, 0.05), PACE))
        if left > 0:
            continue
        try:
            Control(dev, directory).close()
        except DeviceError:
            return
        except HrdmaError:  # somebody has it, or it cannot be reverted now
            time.sleep(PACE)


if __name__ == "__main__":
    keep(sys.argv[1], sys.argv[2])

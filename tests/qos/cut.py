"""Changes that are cut off: the process killed, or the kernel refusing, at any request that is chosen."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import lab

from hrdma.errors import NetlinkError
from hrdma.qos.apply import Control
from hrdma.qos.wire import Wire

__all__ = ["attempt"]


def attempt(net: lab.Net, how: str, at: int, action: Callable[[Control], object]) -> bool:
    """Does something in which the request with number `at` is the last one that is made, or is refused; whether it got through."""
    if how == "killed":

        def act():
            _sabotage(at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            with Control("v0", net.directory) as control:
                action(control)

        return lab.ended(lab.child(act)) == 0
    kept = Wire.request

    def refuse():
        Wire.request = kept
        raise NetlinkError("cannot: the test says so", errno=12)

    with Control("v0", net.directory) as control:
        _sabotage(at, refuse)
        try:
            action(control)
        except NetlinkError as error:
            assert "the test says so" in str(error)
            return False
        finally:
            Wire.request = kept
    return True


def _sabotage(at: int, action: Callable[[], object]) -> None:
    count, kept = iter(range(1 << 30)), Wire.request

    def request(self, verb, thing):
        if next(count) == at:
            action()
        kept(self, verb, thing)

    Wire.request = request

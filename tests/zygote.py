"""Starts ranks by fork from a process that has imported everything, and reports how each ends, stops and goes on.

A test starts two to five ranks and ends them within a second; their imports would cost more than that. So one process,
started by the test session, imports what ranks need, opens nothing, and forks a rank per request. Requests come as JSON
lines on stdin; ranks and the zygote tell what happens as JSON lines on one pipe, each with the clock of the machine
(``time.monotonic`` is one clock for all processes). Lines are shorter than PIPE_BUF, so they never mix.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import sys
import threading
import time
from typing import Any

PR_SET_PDEATHSIG = 1
IMPORTED = (
    "numpy",
    "pytest",
    "zmq",
    "asyncio",
    "encodings.idna",
    "harness",
    "rankside",
    "hrdma._core",
    "hrdma.calibration",
    "hrdma.cli.bench",
    "hrdma.communicator",
    "hrdma.control",
    "hrdma.planning",
    "hrdma.runtime",
)


class Zygote:
    """The process that forks. `serve` returns in each rank, with what the rank shall do."""

    def __init__(self) -> None:
        self.news = os.dup(1)
        self.pids: dict[int, int] = {}
        self.inboxes: dict[int, int] = {}

    def tell(self, **message: Any) -> None:
        os.write(self.news, json.dumps({**message, "time": time.monotonic()}).encode() + b"\n")

    def serve(self) -> dict[str, Any] | None:
        wake, ring = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(ring)
        buffered = b""
        while True:
            ready, _, _ = select.select([0, wake], [], [])
            if wake in ready:
                os.read(wake, 4096)
                self.reap()
            if 0 not in ready:
                continue
            read = os.read(0, 65536)
            if not read:
                self.kill_all()
                return None
            *lines, buffered = (buffered + read).split(b"\n")
            for line in lines:
                request = json.loads(line)
                if self.obey(request):
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    return request

    def obey(self, request: dict[str, Any]) -> bool:
        """True in a new rank."""
        who = request["who"]
        if request["do"] == "start":
            inbox, outlet = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.dup2(inbox, 0)
                for descriptor in (inbox, outlet, *self.inboxes.values()):
                    os.close(descriptor)
                return True
            os.close(inbox)
            self.pids[who], self.inboxes[who] = pid, outlet
            self.tell(who=who, event="started", pid=pid)
        elif request["do"] == "signal" and who in self.pids:
            os.kill(self.pids[who], request["number"])
        elif request["do"] == "say" and who in self.inboxes:
            with contextlib.suppress(BrokenPipeError):  # it has ended, which `reap` is about to tell
                os.write(self.inboxes[who], json.dumps(request["what"]).encode() + b"\n")
        return False

    def reap(self) -> None:
        while self.pids:
            flags = os.WEXITED | os.WSTOPPED | os.WCONTINUED | os.WNOHANG
            found = os.waitid(os.P_ALL, 0, flags)
            if found is None:
                return
            who = next(who for who, pid in self.pids.items() if pid == found.si_pid)
            if found.si_code in (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED):
                os.close(self.inboxes.pop(who))
                del self.pids[who]
                code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
                self.tell(who=who, event="ended", code=code)
            elif found.si_code == os.CLD_STOPPED:
                self.tell(who=who, event="stopped")
            elif found.si_code == os.CLD_CONTINUED:
                self.tell(who=who, event="continued")

    def kill_all(self) -> None:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
        for pid in self.pids.values():
            os.waitpid(pid, 0)


def be_rank(zygote: Zygote, request: dict[str, Any]) -> int:
    """What a rank does: calls the function of the test module with `me`, and says how that ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # What a rank starts is ended with its process group. No session of its own: the kernel schedules each as a group of tasks
    # (sched_autogroup), and Linux 6.18 was seen to leave such a group, so all threads of a rank, without a processor for 1.7 s.
    os.setpgid(0, 0)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    os.environ.clear()
    os.environ.update(request["env"])

    from rankside import Me, describe_error, load

    me = Me(zygote.news, request["who"])
    try:
        value = load(request["path"], request["function"])(me, **request["arguments"])
    except Exception as error:
        import traceback

        traceback.print_exc()
        me.tell("failed", **describe_error(error))
        return 1
    me.tell("returned", value=value)
    return 0


def main() -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a rank that collects what is here would copy all of its pages: half of what a short rank costs
    zygote = Zygote()
    request = zygote.serve()
    return 0 if request is None else be_rank(zygote, request)


def leave(status: int) -> None:
    """As sys.exit, but gives back nothing that was imported: page by page, a rank would copy it first."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    try:
        status = main()
    except SystemExit as end:
        status = end.code
    leave(status)

"""A rank of `hrdma.testing` as a process: started, waited for, stopped, and what it runs.

Nothing has a name in the file system: the call and what comes of it go through unlinked files. A rank leads a process group of
its own, so that what it started dies with it (from Python 3.11 on in the caller's session, as those of `hrdma run` are:
hrdma/launch.py); the kernel kills it when its parent dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from hrdma.places import leave_terminal

__all__ = ["Child", "Report", "call_of", "read", "run", "wait"]

GRACE = 2.0  # seconds in which a rank that is out of time may say where it is
LOOK = 0.01  # seconds between looks at those that run
PR_SET_PDEATHSIG = 1  # linux/prctl.h
_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
_MAIN = "__mp_main__"  # as multiprocessing has it: the caller's main module, in a process where it is not that


class Report(NamedTuple):
    """What a rank says at its end."""

    faults: int  #: injected into it
    failed: bool
    result: bytes  #: the value, or the exception, pickled; empty: neither came in time


def call_of(function: Callable[..., Any], arguments: Mapping[str, Any]) -> bytes:
    """What a `Child` is told to do.

    Raises
    ------
    ValueError
        The function cannot be found by its name, or an argument cannot be pickled.
    """
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    name = getattr(function, "__qualname__", "")
    file = getattr(module, "__file__", None)
    if module is None or file is None or getattr(module, name, None) is not function:
        raise ValueError(
            f"{name or function!r}: a function at the top of a module's file is wanted, which another process can import"
        )
    home = module.__name__
    if home == "__main__":
        home = module.__spec__.name if module.__spec__ else _MAIN  # python -m NAME, or a script
    try:
        return pickle.dumps((home, os.path.abspath(file), name, pickle.dumps(dict(arguments))))
    except Exception as error:  # whatever a class's own methods raise
        raise ValueError(f"arguments of {name} cannot be pickled: {error}") from None


class Child:
    """One process. It is started at most once, and is gone when the block of `with` has ended."""

    def __init__(self) -> None:
        self._files = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self.code = 0  #: exit status; negative: the signal. Known after the block

    def __enter__(self) -> Child:
        self._output = self._files.enter_context(tempfile.TemporaryFile())
        self._report = self._files.enter_context(tempfile.TemporaryFile())
        return self

    def start(self, call: bytes, env: Mapping[str, str]) -> None:
        with tempfile.TemporaryFile() as told:
            told.write(call)
            told.seek(0)
            code = f"import sys; sys.path[:] = {sys.path!r}; from hrdma.children import run; run({self._report.fileno()}, {os.getpid()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                env=dict(env),
                stdin=told,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=[self._report.fileno()],
                **_GROUP,
            )

    @property
    def ended(self) -> bool:
        """Whether it has; its number is not given to another process before `end`."""
        process = self._process
        return process is None or os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def ask_to_end(self) -> None:
        """Has it report, and end by SIGTERM."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGTERM)
            os.kill(self._process.pid, signal.SIGCONT)  # a stopped process takes no other

    def end(self) -> None:
        """Kills what is left of it and of what it had started. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            self.code = process.wait()

    def heard(self) -> tuple[Report | None, str]:
        """Its report, and its output."""
        with contextlib.suppress(OSError):
            self._output.seek(0)
        self._report.seek(0)
        try:
            report = Report(*pickle.load(self._report))
        except (EOFError, pickle.UnpicklingError, TypeError):
            report = None
        return report, self._output.read().decode(errors="replace")

    def __exit__(self, *_: object) -> None:
        self.end()
        self._files.close()


def wait(children: Sequence[Child], seconds: float) -> list[bool]:
    """Until all have ended, and are gone. Says of each whether it was too late."""
    end = time.monotonic() + seconds
    while not all(child.ended for child in children) and time.monotonic() < end:
        time.sleep(LOOK)
    late = [not child.ended for child in children]
    for child in (child for child, is_late in zip(children, late) if is_late):
        child.ask_to_end()
    end = time.monotonic() + GRACE
    while not all(child.ended for child in children) and time.monotonic() < end:
        time.sleep(LOOK)
    for child in children:
        child.end()
    return late


def read(report: Report) -> tuple[Any, BaseException | None]:
    """The value, or the exception, of a report."""
    sys.modules.setdefault(_MAIN, sys.modules["__main__"])
    try:
        found = pickle.loads(report.result)
    except Exception as error:
        return None, TypeError(f"what came back cannot be unpickled here: {error}")
    return (None, found) if report.failed else (found, None)


# --- in the rank ---


def run(descriptor: int, parent: int) -> None:
    """All that a rank does; its standard input says what."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    leave_terminal()
    from hrdma import _core

    def report(failed: bool, result: bytes) -> None:
        data = pickle.dumps((_core.faults_fired(), failed, result))
        os.pwrite(descriptor, data, 0)

    def stop(number: int, frame: FrameType | None) -> None:
        print("stopped, as the time was up. It was here:", file=sys.stderr)
        traceback.print_stack(frame)
        sys.stderr.flush()
        report(True, b"")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, stop)
    failed = True
    try:
        home, file, name, arguments = pickle.load(sys.stdin.buffer)
        with open(os.devnull) as null:
            os.dup2(null.fileno(), 0)
        function = getattr(_module(home, file), name)
        known = pickle.loads(arguments)
        import hrdma

        with hrdma.init() as comm:
            found = function(comm, **known)
        result = _pickled(found)
        failed = False
    except BaseException as error:
        traceback.print_exc()
        result = _pickled_error(error)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    report(failed, result)
    sys.exit(int(failed))


def _module(home: str, file: str) -> ModuleType:
    """The function's module: by its name where that finds its file, else by the file."""
    if home != _MAIN:
        with contextlib.suppress(ImportError):
            found = importlib.import_module(home)
            if os.path.abspath(found.__file__ or "") == file:
                return found
    spec = importlib.util.spec_from_file_location(home, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[home] = module
    if home == _MAIN:
        sys.modules["__main__"] = module  # where pickles of the caller look
    spec.loader.exec_module(module)
    return module


def _pickled(value: Any) -> bytes:
    data = pickle.dumps(value)
    pickle.loads(data)
    return data


def _pickled_error(error: BaseException) -> bytes:
    try:
        return _pickled(error)
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))

"""Named network namespaces of labs: made, found by name, entered, emptied of processes, removed.

A lab's namespaces are `/run/netns/hrdma-LAB-h0`, `-h1`, ... for hosts and `-s0`, ... for switches: what is left of a
lab is known by these names alone, and `ip netns exec` works with them. A namespace ends when its name is gone and the
last process has left it; all interfaces in it, and hence their other ends, end with it.

What has to be done in a namespace is done by a thread that enters it and ends there, never by a forked child: a child
would run the cleanup of this process when a signal ends it, and share the kernel's poll sets with it. Who waits for such
a thread waits for its end, also when a signal interrupts: removing what it is still making would leave a part behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

from hrdma.places import CLONE_NEWNET, enter_network

__all__ = [
    "counters",
    "create",
    "enter",
    "inside",
    "is_name",
    "labs",
    "namespace",
    "namespaces",
    "path",
    "processes",
    "remove",
    "stop_processes",
]

FOLDER = "/run/netns"
PREFIX = "hrdma-"
MS_BIND, MS_REC, MS_SHARED = 1 << 12, 1 << 14, 1 << 20
MNT_DETACH = 2
INSIDE = 30.0  # seconds that a thread in a namespace may take
ASK = 2.0  # seconds that processes have after SIGTERM
KILL = 5.0  # seconds after SIGKILL until one that is still there is reported

_libc = ctypes.CDLL(None, use_errno=True)
_NAME = "[a-z0-9][a-z0-9-]{0,31}"
_ENTRY = re.compile(rf"{PREFIX}(?P<lab>{_NAME})-(?P<kind>[hs])(?P<number>[0-9]+)")

T = TypeVar("T")


def is_name(lab: str) -> bool:
    """Whether a lab can be called so: lower-case letters, digits and hyphens."""
    return re.fullmatch(_NAME, lab) is not None


def namespace(lab: str, node: str) -> str:
    """The name of a node's namespace."""
    return f"{PREFIX}{lab}-{node}"


def path(lab: str, node: str) -> str:
    """The file that stands for a node's namespace."""
    return f"{FOLDER}/{namespace(lab, node)}"


def namespaces() -> dict[str, list[str]]:
    """Labs that have a namespace, and the names of their nodes in order: hosts, then switches."""
    found: dict[str, list[tuple[str, int]]] = {}
    for name in os.listdir(FOLDER) if os.path.isdir(FOLDER) else ():
        if match := _ENTRY.fullmatch(name):
            found.setdefault(match["lab"], []).append((match["kind"], int(match["number"])))
    return {lab: [f"{kind}{number}" for kind, number in sorted(nodes)] for lab, nodes in sorted(found.items())}


def labs() -> list[str]:
    """Names of the labs that have a namespace."""
    return list(namespaces())


def create(lab: str, node: str) -> None:
    """Makes a node's namespace.

    Raises
    ------
    OSError
        The name is taken, or this process may not make namespaces.
    """
    _shared_folder()
    file = path(lab, node)
    os.close(os.open(file, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0))

    def make() -> None:
        _checked(_libc.unshare(CLONE_NEWNET), "unshare", file)
        _mount("/proc/thread-self/ns/net", file, MS_BIND)

    _in_thread(make)


def remove(lab: str, node: str) -> None:
    """Takes a namespace's name away, also one whose making was interrupted. It is no error when there is none."""
    file = path(lab, node)
    _libc.umount2(file.encode(), MNT_DETACH)  # fails where nothing is mounted yet: then the file alone is to go
    with contextlib.suppress(FileNotFoundError):
        os.unlink(file)


def enter(file: str) -> None:
    """Moves the calling thread into a network namespace."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter_network(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, file) from error
    finally:
        os.close(descriptor)


def inside(file: str, function: Callable[[], T]) -> T:
    """What a function returns in a thread that has entered a network namespace; its sockets stay there.

    Raises
    ------
    TimeoutError
        It takes longer than 30 s. The thread is abandoned.
    """

    def call() -> T:
        enter(file)
        return function()

    return _in_thread(call)


def counters(file: str) -> dict[str, dict[str, int]]:
    """Bytes that each interface in a network namespace has sent and received."""

    def read() -> list[str]:
        with open("/proc/thread-self/net/dev") as lines:
            return lines.readlines()[2:]  # below its head

    found = {}
    for line in inside(file, read):
        name, _, numbers = line.rpartition(":")
        values = numbers.split()
        found[name.strip()] = {"tx_bytes": int(values[8]), "rx_bytes": int(values[0])}
    return found


def _in_thread(function: Callable[[], T]) -> T:
    """What a function returns in a thread of its own, whose namespaces end with it."""
    result: Future[T] = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    end = time.monotonic() + INSIDE
    try:
        thread.join(INSIDE)
    except BaseException:
        thread.join(max(0.0, end - time.monotonic()))
        raise
    if thread.is_alive():
        raise TimeoutError(f"the kernel has not answered for {INSIDE:g} s")
    return result.result()


def _shared_folder() -> None:
    """Makes the folder a shared mount, as `ip netns` does: a name that is removed is gone for every process."""
    os.makedirs(FOLDER, exist_ok=True)
    try:
        _mount("", FOLDER, MS_SHARED | MS_REC)
    except OSError:  # not a mount yet
        _mount(FOLDER, FOLDER, MS_BIND | MS_REC)
        _mount("", FOLDER, MS_SHARED | MS_REC)


def _mount(source: str, target: str, flags: int) -> None:
    _checked(_libc.mount(source.encode(), target.encode(), b"none", ctypes.c_ulong(flags), None), "mount", target)


def _checked(result: int, call: str, file: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}", file)


# --- processes ---


def _identity(file: str) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:  # it ended meanwhile, or is hidden from us
        return None
    return found.st_dev, found.st_ino


def processes(files: Iterable[str]) -> dict[str, list[int]]:
    """Pids of the processes in network namespaces, by the namespace's file."""
    names = {identity: file for file in files if (identity := _identity(file)) is not None}
    found: dict[str, list[int]] = {file: [] for file in names.values()}
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (file := names.get(_identity(f"/proc/{entry}/ns/net") or (0, 0))):
            found[file].append(int(entry))
    return found


def stop_processes(files: Iterable[str]) -> None:
    """Ends every process in network namespaces: asks, waits, kills.

    Raises
    ------
    RuntimeError
        This process is in one of them, or one did not end.

    Notes
    -----
    Blocks up to 7 s. A process is held by a pidfd before it is looked at: its number cannot have gone to another.
    """
    files = list(files)
    if os.getpid() in (pid for pids in processes(files).values() for pid in pids):
        raise RuntimeError("this process is inside the lab: leave it first (exit)")
    seen: set[int] = set()
    for number, seconds in ((signal.SIGTERM, ASK), (signal.SIGKILL, KILL)):
        end = time.monotonic() + seconds
        while left := _signal_all(files, number, seen):
            wait = end - time.monotonic()
            if wait <= 0:
                break
            _wait_any_end(left, min(wait, 0.2))  # wakes up for those that were started meanwhile
    left = [pid for pids in processes(files).values() for pid in pids]
    if left:
        raise RuntimeError(f"processes {', '.join(map(str, left))} of the lab do not end, SIGKILL notwithstanding")


def _signal_all(files: list[str], number: int, seen: set[int]) -> list[int]:
    """Signals all that are there, once each for SIGTERM, and gives their pids."""
    wanted = {_identity(file) for file in files} - {None}
    left = []
    for pid in (pid for pids in processes(files).values() for pid in pids):
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                if _identity(f"/proc/{pid}/ns/net") in wanted:
                    if pid not in seen or number == signal.SIGKILL:
                        signal.pidfd_send_signal(descriptor, number)
                        # a stopped one takes no signal but SIGKILL
                        signal.pidfd_send_signal(descriptor, signal.SIGCONT)
                    seen.add(pid)
                    left.append(pid)
            finally:
                os.close(descriptor)
    return left


def _wait_any_end(pids: list[int], seconds: float) -> None:
    """Returns when all have ended, or after a time."""
    end = time.monotonic() + seconds
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
            finally:
                os.close(descriptor)

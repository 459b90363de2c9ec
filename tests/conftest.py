"""For every test: nothing hangs, nothing is left behind, and under HRDMA_STRICT=1 nothing is skipped that CI can run."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import machine
import pytest
from nursery import end_nursery

STRICT = os.environ.get("HRDMA_STRICT", "") not in ("", "0")

#: Reasons (as regular expressions) that stay a skip under HRDMA_STRICT=1: what a CI machine truly may not have.
ALLOWED_SKIPS = [
    r"less than \d+ [GM]iB of memory",
    r"\d+ GiB of free memory",
    r"no RDMA device",
    r"torch is not installed",
    r"ray is not installed",  # test_meeting tests how nodes meet without it
    r"this host has no address but loopback",
    r"no python3\.\d+ with venv on this machine",
    r"this kernel does not ",
    r"this peer's plain memory cannot be reached",  # process_vm_readv needs a permission
]

TIME_LIMIT = 120.0  # seconds for one test; @pytest.mark.timeout(seconds) for another
HARD = 30.0  # seconds more, after which a test that ignored its time limit ends the whole run
LEAVE = 5.0  # seconds for processes that are on their way out
SHARED = Path("/dev/shm")  # where shared memory has names

# In the environment of every process that the tests start, whoever its parent is now.
MARK = "PYTEST_SESSION_MARK"

C_SKIPS: pytest.StashKey[Counter[tuple[str, str]]] = pytest.StashKey()
C_SKIP = "skipped in C"  # property of a report: what a worker process tells the one that prints the summary
STDERR: pytest.StashKey[int] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--flavour",
        action="append",
        choices=["plain", "asan", "tsan"],
        help="build of the C tests (plain); may be repeated",
    )
    parser.addoption("--nightly", action="store_true", help="also what takes minutes, the whole kill matrix among it")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"timeout(seconds): time limit of this test, instead of {TIME_LIMIT:g} s")
    config.addinivalue_line(
        "markers", "first(turn=1): begins before all others, on a worker each, as nothing must wait for it in the end"
    )
    config.addinivalue_line("markers", "nightly: left out without --nightly")
    config.stash[C_SKIPS] = Counter()
    config.pluginmanager.register(CSkips(config.stash[C_SKIPS]))
    config.stash[STDERR] = os.dup(2)  # while a test runs, 2 is where its output is collected
    os.environ[MARK] = uuid.uuid4().hex
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # workers have all cores: more threads would wait, spinning


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    late = [item for item in items if item.get_closest_marker("nightly") and not config.getoption("--nightly")]
    config.hook.pytest_deselected(items=late)
    marks = {item: mark for item in items if (mark := item.get_closest_marker("first"))}
    first = sorted(marks, key=lambda item: marks[item].kwargs.get("turn", 1))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))  # each begins with as many of them in a row:
    share = (len(items) - len(late)) // workers
    items[:] = [item for item in items if item not in late and item not in marks]
    for worker in range(workers):
        items[worker * share : worker * share] = first[worker::workers]


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[STDERR])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "flavour" in metafunc.fixturenames:
        metafunc.parametrize("flavour", metafunc.config.getoption("flavour") or ["plain"], scope="session")


# --- time limit ---


class OutOfTimeError(Exception):
    """The test took longer than it may."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Raises in the test when its time is over; shows all stacks and ends the run where even that is ignored.

    Set-up, test and tear-down share the limit. The exception comes as soon as the interpreter handles signals, which
    a loop in C that never asks for them prevents; hence the second, harder limit.
    """
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0]) if marker else TIME_LIMIT

    def expire(_signal: int, _frame: object) -> None:
        faulthandler.dump_traceback(file=item.config.stash[STDERR], all_threads=True)
        raise OutOfTimeError(f"{item.nodeid} took longer than {limit:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, limit)
    faulthandler.dump_traceback_later(limit + HARD, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- skips ---


def allowed(reason: str) -> bool:
    return any(re.search(pattern, reason) for pattern in ALLOWED_SKIPS)


def refusal(reason: str) -> str:
    return f"HRDMA_STRICT=1 and skipped: {reason}\n(if no CI machine can have it, add it to ALLOWED_SKIPS in tests/conftest.py)"


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    where = report.longrepr
    return str(where[2] if isinstance(where, tuple) else where).removeprefix("Skipped: ")


def refuse(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turns a skip that is not allowed into a failure."""
    if STRICT and report.skipped and not hasattr(report, "wasxfail") and not allowed(reason := reason_of(report)):
        report.outcome = "failed"
        report.longrepr = refusal(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    report = yield
    refuse(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    report = yield
    refuse(report)
    return report


@pytest.fixture
def note_skip(record_property: Callable[[str, object], None]) -> Callable[[str, str], None]:
    """Records a skip inside a C program: shown at the end, and refused under HRDMA_STRICT=1 as any other."""

    def note(where: str, reason: str) -> None:
        record_property(C_SKIP, [where, reason])
        if STRICT and not allowed(reason):
            pytest.fail(refusal(f"{where}: {reason}"), pytrace=False)

    return note


class CSkips:
    """Counts what the tests recorded by note_skip."""

    def __init__(self, skips: Counter[tuple[str, str]]) -> None:
        self.skips = skips

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties if report.when == "teardown" else ():
            if name == C_SKIP:
                where, reason = value
                self.skips[where, reason] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skips = config.stash[C_SKIPS]
    if skips:
        terminalreporter.section("skipped in C programs", sep="-")
    for (where, reason), count in sorted(skips.items()):
        terminalreporter.line(f"SKIPPED [{count}] {where}: {reason}")


# --- nothing is left ---


def ours() -> dict[int, str]:
    """Processes that bear this session's mark, without this one: pid and command line."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile, or is somebody else's
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
    return found


def shared_files() -> set[str]:
    return {entry.name for entry in SHARED.glob("*hrdma*")} if SHARED.is_dir() else set()


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fails the last test when a process or a shared-memory file of ours outlives the run."""
    files = shared_files()
    yield
    end_nursery()
    machine.end()
    until, left, looks = time.monotonic() + LEAVE, ours(), 0
    while looks < 2 and time.monotonic() < until:  # in the middle of execve a process has no environment
        time.sleep(0.05)
        left = ours()
        looks = 0 if left else looks + 1
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"processes that the tests left running (now killed): {left}"
    assert not (more := shared_files() - files), f"left in {SHARED}: {sorted(more)}"

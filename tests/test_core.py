"""The C tests: builds tests/core and runs each program, per provider where that matters, plain or under sanitizers.

``pytest --flavour asan --flavour tsan tests/test_core.py`` is what ``make san`` runs.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "tests" / "core"
PROVIDERS = re.findall(r"^HR_PROVIDER\((\w+)\)", (ROOT / "cython/providers/providers.def").read_text(), re.MULTILINE)
LIMIT = 400  # seconds for one program; a single test in it has CHECK_TIMEOUT of check.h

SANITIZER = {
    "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # A child forked from a process with threads is used by the tests of fork, which only read in it.
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1:die_after_fork=0",
}
# The thread sanitizer is slow, and has nothing to see where there is one thread: the name of the part that has several.
TSAN_PART = {"test_reduce": "threads"}
# Random load lasts longest where most is seen of it, under the sanitizers; everywhere longer with --nightly.
SHORTER = {
    "plain": {"WILD_ROUNDS": "4", "STRESS_SECONDS": "0.3"},
    "asan": {"STRESS_SECONDS": "0.5"},
    "tsan": {"WILD_ROUNDS": "4", "STRESS_SECONDS": "0.5"},
}
# What takes half a minute, most of it waiting, begins first, in these turns: others run meanwhile.
WAITS = {"conformance-verbs": 1, "test_verbs_spare": 1, "test_verbs_bond_silence": 2}
SKIPPED = re.compile(r"^(\w+):? +skipped: (.*)$", re.MULTILINE)
# What a provider's capabilities exclude is no gap: the conformance suite checks instead that such slots say so, and an
# attack by what a provider cannot do is none. The suite runs with one thread and with two: a check for two is not lost.
BY_CONTRACT = re.compile(
    r"the provider (does not have HR_CAP_|must be polled|took \d+ messages)|only loop connects a domain to itself"
    r"|nothing stayed in progress that could be canceled|one thread: run with --threads"
)

pytestmark = pytest.mark.timeout(LIMIT + 200)  # the build may be part of the first test


class Run(NamedTuple):
    """One program with its arguments; a provider, or a device, where the program does not choose its own."""

    program: str
    provider: str | None = None
    device: str | None = None

    def __str__(self) -> str:
        return "-".join(part for part in self if part)


def runs() -> list[Run]:
    found = [Run("conformance", provider) for provider in reversed(PROVIDERS)]  # the longest first
    for source in sorted(CORE.glob("test_*.c")):
        on_engines = re.search(r'#include "(world|wild_rig|stress_rig)\.h"', source.read_text())
        found += [Run(source.stem, provider) for provider in (PROVIDERS if on_engines else [None])]
        if '#include "completions.h"' in source.read_text():
            found.append(Run(source.stem, device="sim_rxe"))
    return found


def make(flavour: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One make of a flavour at a time: test sessions may run side by side, and `.ci/run` compiles beside them."""
    (ROOT / "build" / "c").mkdir(parents=True, exist_ok=True)
    with (ROOT / "build" / "c" / f"{flavour}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return subprocess.run(
            ["make", "-s", "-f", "tests/core/Makefile", f"FLAVOUR={flavour}", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@functools.cache
def build(flavour: str) -> subprocess.CompletedProcess[str]:
    """Builds all programs of a flavour, once in a session, and goes on after the first that cannot be built."""
    return make(flavour, "-k", f"-j{len(os.sched_getaffinity(0))}")


@functools.cache
def fixed_addresses() -> list[str]:
    """What starts a program without address randomization, which older thread sanitizers need; nothing where refused."""
    command = ["setarch", "-R"]
    usable = shutil.which("setarch") and not subprocess.run([*command, "true"], stderr=subprocess.DEVNULL).returncode
    return command if usable else []


def finish(command: list[str], env: dict[str, str]) -> tuple[int, str]:
    """Exit code and output; what is still running after the limit is killed, children included."""
    process = subprocess.Popen(
        command,
        env=env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
        return process.returncode, output
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        print(output)  # pytest shows it with the failure
        raise


def parameter(run: Run) -> Any:
    marks = [pytest.mark.slow] if run.program == "conformance" else []
    if turn := WAITS.get(str(run)):
        marks.append(pytest.mark.first(turn=turn))
    return pytest.param(run, id=str(run), marks=marks)


@pytest.mark.parametrize("run", [parameter(run) for run in runs()])
def test_core(run: Run, flavour: str, note_skip: Callable[[str, str], None], pytestconfig: pytest.Config) -> None:
    program = f"build/c/{flavour}/{run.program}"
    built = build(flavour)
    if built.returncode and make(flavour, "-q", program).returncode:
        pytest.fail(f"{program} cannot be built:\n{built.stdout}", pytrace=False)
    command = [str(ROOT / program)]
    if run.program == "conformance" and run.provider:
        command = [str(CORE / "run_conformance.sh"), flavour, *command, run.provider]
    env = {} if pytestconfig.getoption("--nightly") else SHORTER[flavour]
    env = env | os.environ | SANITIZER | ({"HR_TEST_PROVIDER": run.provider} if run.provider else {})
    env |= {"HR_TEST_DEVICE": run.device} if run.device else {}
    if flavour == "tsan":
        part = TSAN_PART.get(run.program)
        command = [*fixed_addresses(), *command, *([part] if part else [])]
    code, output = finish(command, env)
    if code:
        pytest.fail(f"{' '.join(command)}: exit code {code}\n{output}", pytrace=False)
    assert re.search(r"\d+ passed", output), f"{run} ended well without having run a test:\n{output}"
    for name, reason in SKIPPED.findall(output):
        if run.provider and BY_CONTRACT.search(reason):
            continue
        note_skip(f"{run}: {name}", reason)

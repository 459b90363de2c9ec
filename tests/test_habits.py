"""What conftest.py promises for every test, seen to fail: time limits, refused skips, leftovers."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import machine
import pytest
from windows import one_good

HERE = Path(__file__).parent


@pytest.fixture
def outcome(tmp_path):
    """Runs the text of a test file under our conftest.py: ``outcome(text, strict=True)`` gives exit code and output."""
    for name in ("conftest.py", "machine.py", "nursery.py"):
        shutil.copy(HERE / name, tmp_path)

    def run(text: str, *options: str, strict: bool = False) -> tuple[int, str]:
        (tmp_path / "test_it.py").write_text("import pytest, subprocess, time\n" + textwrap.dedent(text))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", *options, "."],
            cwd=tmp_path,
            env={**os.environ, "HRDMA_STRICT": "1" if strict else "0"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_test_that_waits_for_ever_fails_and_the_next_one_runs(outcome):
    text = """
        @pytest.mark.timeout(0.5)
        def test_waits(): time.sleep(50)
        def test_next(): pass
    """
    code, output = outcome(text)
    assert code == 1
    assert "test_waits took longer than 0.5 s" in output
    assert re.search(r"1 failed, 1 passed", output), output


def test_where_even_signals_are_ignored_the_run_ends_with_all_stacks(outcome):
    text = """
        import signal, conftest
        @pytest.fixture(autouse=True, scope="session")
        def soon(): conftest.HARD = 0.5
        def test_starts(): pass
        @pytest.mark.timeout(0.5)
        def test_is_deaf():
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            time.sleep(50)
    """
    code, output = outcome(text)
    assert code != 0
    assert "Timeout (0:00:01)!" in output
    assert "in test_is_deaf" in output


@pytest.mark.parametrize(
    "text",
    [
        "def test_it(): pytest.skip('gcc is not here')",
        "@pytest.mark.skipif(True, reason='gcc is not here')\ndef test_it(): pass",
        "pytest.skip('gcc is not here', allow_module_level=True)",
        "def test_it(note_skip): note_skip('test_x: part', 'gcc is not here')",
    ],
)
def test_a_skip_that_ci_must_not_have(outcome, text):
    code, output = outcome(text)
    assert code in (0, 5), output  # 5: nothing else was there
    assert re.search(r"SKIPPED \[1\] .*gcc is not here", output), output
    code, output = outcome(text, strict=True)
    assert code not in (0, 5), output
    assert "HRDMA_STRICT=1 and skipped" in output


def test_a_skip_that_ci_may_have(outcome):
    text = """
        def test_skip(): pytest.skip("less than 2 GiB of memory free")
        @pytest.mark.xfail
        def test_xfail(): assert 0
        def test_inside_c(note_skip): note_skip("test_x: part", "this kernel does not do that")
    """
    code, output = outcome(text, strict=True)
    assert code == 0, output
    assert "1 passed, 1 skipped, 1 xfailed" in output


def test_a_process_that_is_left_is_found_and_killed(outcome):
    """Its parent has ended, so that nothing but its environment tells whose it is."""
    text = """
        import conftest, pathlib; conftest.LEAVE = 0.2
        def test_leaves():
            subprocess.run(["sh", "-c", "sleep 4321 & echo $! >pid"])
            started = pathlib.Path("/proc", pathlib.Path("pid").read_text().strip(), "cmdline")
            while b"4321" not in started.read_bytes() or started.read_bytes().startswith(b"sh"): time.sleep(0.01)
    """
    code, output = outcome(text)
    assert code == 1
    assert re.search(r"processes that the tests left running .*sleep 4321", output), output


def test_a_file_in_shared_memory_is_found(outcome):
    text = """
        import conftest, pathlib
        conftest.SHARED = pathlib.Path(".")  # the real one is looked at by other tests
        def test_leaves(): pathlib.Path("hrdma-left").touch()
    """
    code, output = outcome(text)
    assert code == 1
    assert "left in .: ['hrdma-left']" in output


# --- time ---


def test_what_the_machine_withheld_is_taken_off():
    """The process that looks stands still for half a second: to it that is the machine."""
    watch = machine.Watch()
    begun = time.monotonic()
    try:
        watch._process.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        watch._process.send_signal(signal.SIGCONT)
        over = time.monotonic()
        assert 0.4 < watch.withheld(begun, over + 0.1) <= over + 0.1 - begun
        assert watch.withheld(begun - 10, begun - 5) == 0.0, "what was before is not known"
    finally:
        watch.close()
    assert machine.union([(5.0, 7.0), (1.0, 3.0), (2.0, 4.0), (2.5, 2.6)], 1.5, 6.0) == 3.5


def test_one_good_window_is_enough_and_all_are_named_where_none_is():
    turns = iter(range(10))
    assert one_good(lambda: next(turns), lambda turn: turn == 3) == 3
    with pytest.raises(AssertionError, match=r"none of 2 windows is good: \[4, 5\]"):
        one_good(lambda: next(turns), lambda turn: turn == 3, 2)

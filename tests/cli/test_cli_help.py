"""The command itself: help texts, exit codes, what is imported for them."""

from __future__ import annotations

import pytest
from commands import hrdma, python

import hrdma as package
from hrdma.bench.cases import CASES
from hrdma.cli import COMMANDS


def test_version():
    done = hrdma("--version")
    assert done.returncode == 0 and done.stdout == f"hrdma, version {package.__version__}\n"


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("words", [(), *((name,) for name in COMMANDS)], ids=" ".join)
def test_help(words, flag):
    done = hrdma(*words, flag)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith(f"Usage: hrdma{''.join(f' {word}' for word in words)} ")
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert "xit code" in done.stdout


def test_help_names_all_commands_and_cases():
    text = hrdma("--help").stdout
    assert all(f"\n  {name} " in text for name in COMMANDS)
    text = hrdma("bench", "--help").stdout
    assert all(name in text for name in CASES)
    for code in (0, 1, 2, 124):
        assert f"\n    {code:3d}  " in text, code


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["fly"], 2, "No such command 'fly'"),
        (["info", "--fast"], 2, "No such option"),
        (["run", "-n", "2"], 2, "name a script or program"),
        (["run", "-n", "2", "--", "sh", "-c", "exit 7"], 7, "exited with 7"),
        (["run", "-n", "1", "--timeout", "0.3", "--", "sleep", "9"], 124, "timed out"),
        (["run", "-n", "1", "--", "sh", "-c", "kill -9 $$"], 137, "SIGKILL"),
        (["run", "-n", "1", "no-such-program"], 127, "no such command"),
    ],
)
def test_exit_codes(arguments, code, text):
    done = hrdma(*arguments)
    assert done.returncode == code and text in done.stderr, done


def test_help_is_quick():
    """--help imports neither the compiled core, nor rich, nor numpy."""
    code = """
import sys
import hrdma.cli
try:
    hrdma.cli.command(["--help"])
except SystemExit:
    pass
print(*sorted({"rich", "numpy", "hrdma._core", "hrdma.launch"} & set(sys.modules)), file=sys.stderr)
"""
    done = python("-c", code)
    assert done.returncode == 0 and done.stderr.strip() == "", done.stderr

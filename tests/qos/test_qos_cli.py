"""`hrdma qos` as users call it: what it prints, its exit codes, and that everything can be done twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import lab
import pytest

POLICY = """[qos]
policy = "tls-rr"
rate = "100mbit"

[[job]]
name = "a"
match = [{ sport = 2000 }]

[[job]]
name = "b"
match = [{ dscp = 26 }]
"""
COMMANDS = ["show", "plan", "install", "status", "rotate", "revert", "serve", "run"]


def hrdma(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "hrdma", "qos", *words], capture_output=True, text=True, timeout=60)


def test_help_names_every_command_and_exit_code():
    done = hrdma("--help")
    assert done.returncode == 0
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)
    assert "3  refused" in done.stdout


@lab.isolated
def test_a_life(net):
    path = Path(net.directory, "p.toml")
    path.write_text(POLICY)
    here = ["--dev", "v0", "--state", net.directory]

    def run(code: int, *words: str) -> str:
        done = hrdma(*words, *here)
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done.stdout if not code else done.stderr

    before = lab.dump()
    assert "nothing but the kernel's default" in run(0, "show")
    assert "nothing is installed" in run(3, "status")
    assert "nothing is installed" in run(3, "rotate")
    planned = run(0, "plan", str(path))
    assert "tc qdisc add dev v0 root handle 4852: htb default 1" in planned
    assert planned == run(0, "install", str(path), "--dry-run")
    assert lab.dump() == before

    assert "changes in" in run(0, "install", str(path))
    installed = lab.dump()
    assert ", 0 changes" in run(0, "install", str(path))
    assert "# nothing to do on v0" in run(0, "plan", str(path))
    assert "rotated 1 times" in run(0, "rotate")
    rows = json.loads(run(0, "status", "--json", "--interval", "50ms"))["jobs"]
    assert {row["job"]: row["band"] for row in rows} == {"a": 1, "b": 0, "(others)": 7, "(acks)": -1}
    assert "(others)" in run(0, "status", "--interval", "50ms")
    assert json.loads(run(0, "show", "--json"))["installed"]["rotation"] == 1
    run(0, "rotate")
    assert lab.dump() == installed
    assert "as it was before" in run(0, "revert")
    assert "nothing is installed" in run(0, "revert")
    assert lab.dump() == before

    path.write_text(POLICY.replace("26", "104"))
    assert "line 11, job[1].match[0].dscp: 104 is not a DSCP" in run(2, "install", str(path))
    assert "cannot read the policy" in run(2, "install", str(path) + "x")
    assert lab.dump() == before


@lab.isolated
def test_the_commands_of_a_plan_make_the_same_tree(net):
    """What `plan` prints, given to tc, leaves nothing that install would still do but bursts, which tc rounds."""
    path = Path(net.directory, "p.toml")
    path.write_text(POLICY)
    words = ["plan", str(path), "--dev", "v0", "--state", net.directory]
    lines = json.loads(hrdma(*words, "--json").stdout)["commands"]
    for line in lines:
        lab.tc(line.removeprefix("tc "))
    left = json.loads(hrdma(*words, "--json").stdout)["commands"]
    assert all(line.startswith("tc class change") for line in left), left


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name):
    done = hrdma(name, "--help")
    assert done.returncode == 0
    assert "--dev" in done.stdout

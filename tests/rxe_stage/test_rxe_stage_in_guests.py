"""The stage: tests/rxe in one guest and in two, none failed, none skipped. `make test-rxe` shows what they print."""

from __future__ import annotations

import fcntl
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAGES = {"one": "--hosts 1", "two": "--hosts 2 --wires 2"}


@pytest.mark.xdist_group("rxe")
@pytest.mark.slow
@pytest.mark.timeout(620)
@pytest.mark.parametrize("hosts", STAGES)
def test_in_guests(run, hosts):
    out = ROOT / "build" / "rxe_vm" / hosts  # JUnit results stay there
    results = out / "junit.xml"
    results.unlink(missing_ok=True)
    with (ROOT / "build" / "make.lock").open("w") as lock:  # as test_core.py: what runs in there is built out here
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", "-s", "-f", "tests/core/Makefile", "build/c/plain/conformance"], cwd=ROOT, check=True)
    tests = "pytest tests/rxe -q -p no:cacheprovider --durations=3 --junitxml=$RXE_OUT/junit.xml"
    options = [*STAGES[hosts].split(), "--timeout", "600", "--out", out]
    done = subprocess.run([run, *options, "--", "sh", "-c", f"python -m {tests}"], timeout=615)
    assert done.returncode == 0
    (suite,) = ET.parse(results).getroot().iter("testsuite")
    assert int(suite.attrib["tests"]) > 0
    assert [suite.attrib[name] for name in ("errors", "failures", "skipped")] == ["0", "0", "0"]

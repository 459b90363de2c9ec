"""The stage: tests/rxe in one guest and in two, none failed, none skipped. `make test-rxe` shows what they print."""

from __future__ import annotations

import fcntl
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VANISH = "tests/failure/test_matrix.py::test_every_other_rank_learns_of_it[connect-{}-verbs-{}]"  # while queue pairs are made
SAME = (  # what holds on the simulated device holds on another
    "tests/api/test_verbs.py tests/api/test_verbs_more.py tests/api/test_collectives.py::test_everything_on_a_device"
    " --deselect tests/api/test_verbs.py::test_more_queue_pairs_and_regions_than_the_device_has"  # of the simulated one only
    " 'tests/api/test_traffic_class.py::test_connections_carry_the_class_of_the_job[verbs]'"
    " 'tests/failure/test_aftermath.py::test_survivors_go_on_twice_in_a_row[order2-stop-verbs]'"
    " 'tests/failure/test_memory_safe.py::test_the_stopped_rank_that_wakes_up_changes_nothing[verbs-True-alltoall]' "
    + " ".join(f"'{VANISH.format(*how)}'" for how in (("kill", 5), ("kill", 7), ("stop", 7), ("stop", 8)))
)
PYTEST = "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python -m pytest tests/rxe"  # plugins take a second to import, for nothing
# One processor: two that are translated wait for each other so much that the same tests take 1.7 times the processor time.
STAGES = {
    "one": ("--hosts 1 --cores 1", f"HRDMA_TEST_DEVICE=rxe0 {PYTEST} {SAME}"),
    "two": ("--hosts 2 --wires 2", PYTEST),
}


@pytest.mark.slow
@pytest.mark.timeout(620)
@pytest.mark.parametrize(  # one after the other: each takes a processor, and others have work for the second
    "hosts", [pytest.param(hosts, marks=pytest.mark.first(turn=turn)) for turn, hosts in enumerate(STAGES, 1)]
)
def test_in_guests(run, hosts):
    out = ROOT / "build" / "rxe_vm" / hosts  # JUnit results stay there
    results = out / "junit.xml"
    results.unlink(missing_ok=True)
    (ROOT / "build" / "c").mkdir(parents=True, exist_ok=True)
    with (ROOT / "build/c/plain.lock").open("w") as lock:  # as test_core.py: what runs in there is built out here
        fcntl.flock(lock, fcntl.LOCK_EX)
        programs = [f"build/c/plain/{name}" for name in ("conformance", "test_verbs_completions", "test_verbs_states")]
        subprocess.run(["make", "-s", "-f", "tests/core/Makefile", *programs], cwd=ROOT, check=True)
    machines, tests = STAGES[hosts]
    tests = f"{tests} -q -p no:cacheprovider --durations=3 --junitxml=$RXE_OUT/junit.xml"
    options = [*machines.split(), "--timeout", "600", "--out", out]
    done = subprocess.run([run, *options, "--", "sh", "-c", tests], timeout=615)
    assert done.returncode == 0
    (suite,) = ET.parse(results).getroot().iter("testsuite")
    assert int(suite.attrib["tests"]) > 0
    assert [suite.attrib[name] for name in ("errors", "failures", "skipped")] == ["0", "0", "0"]

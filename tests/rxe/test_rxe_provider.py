"""The verbs provider on a device that is not simulated: its contract, collectives, messages, a rank that is lost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFORMANCE = "build/c/plain/conformance"
OF_THE_LIBRARY = [
    "test_collectives.py::test_movement[2-verbs]",
    "test_collectives.py::test_reductions[3-verbs]",
    "test_collectives.py::test_asynchronous_collectives[verbs]",
    "test_job.py::test_messages[2-verbs]",
    "test_job.py::test_a_killed_rank_breaks_its_communicator_and_the_others_go_on[2-allreduce-verbs]",
]


def passed(command: list[str], device: str, seconds: float, count: int) -> None:
    env = os.environ | {"HRDMA_TEST_DEVICE": device}
    done = subprocess.run(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) >= count, done.stdout


@pytest.mark.parametrize("threads", [[], ["--threads"]], ids=["one", "two"])
def test_the_contract(device, threads):
    if "HOSTS" not in os.environ:  # in guests it was built outside
        subprocess.run(["make", "-s", "-f", "tests/core/Makefile", CONFORMANCE], cwd=ROOT, check=True, timeout=300)
    passed([str(ROOT / CONFORMANCE), "--device", device, *threads, "verbs"], device, 100, 40)


@pytest.mark.timeout(180)
def test_of_the_library(device):
    """As over the simulated device, in one session."""
    names = [f"tests/api/{name}" for name in OF_THE_LIBRARY]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", *names]
    passed(command, device, 170, len(names))

"""For the tests of labs: one lab for the session, the command, the reason to skip; no namespace of ours is left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab_jobs import environment

from hrdma.lab import lab as labs
from hrdma.lab import namespaces
from hrdma.lab.lab import Lab
from hrdma.topo.fabrics import parse

PREFIX = f"test{os.getpid()}"  # of the names of all labs here
NEEDED = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


def missing() -> str:
    """What this process lacks for a lab."""
    if os.geteuid() != 0:
        return "needs root: a lab is made of network namespaces"
    status = Path("/proc/self/status").read_text()
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    lacking = [name for name, bit in NEEDED.items() if not effective >> bit & 1]
    return f"needs {', '.join(lacking)}: a lab is made of network namespaces" if lacking else ""


@pytest.fixture(scope="session")
def root() -> None:
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def iproute2() -> None:
    """What the kernel has made of a lab is asked of somebody else's programs."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("ip and tc are not installed, with which networks are looked at: apt install iproute2")


@pytest.fixture(scope="session")
def removed(root) -> Iterator[None]:
    """Takes down what the tests have left, and fails when it was anything."""
    yield
    left = [name for name in labs.labs() if name.startswith(PREFIX)]
    for name in left:
        labs.down(name)
    assert not left, f"labs that the tests left up (now down): {left}"


@pytest.fixture
def name(removed, request) -> Iterator[str]:
    """A name for a lab of this test; what has it is taken down."""
    mine = f"{PREFIX}-own"
    yield mine
    labs.down(mine)


@pytest.fixture(scope="session")
def lab(removed) -> Iterator[Lab]:
    """BCube(2, 2) at 50 Mbit/s: 4 hosts of 2 NICs, 4 switches; hosts 0 and 3 are apart in both digits."""
    with Lab.up(parse("bcube:2,2", rate="50mbit", latency=0), f"{PREFIX}-bcube") as made:
        yield made


@pytest.fixture(scope="session")
def hrdma() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs ``hrdma lab`` as a user does: ``hrdma("up", "ring", "--n", "3")``; keywords are for subprocess."""

    def run(*arguments: str, timeout: float = 40, **how) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hrdma", "lab", *arguments]
        options = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "env": environment(), **how}
        return subprocess.run(command, timeout=timeout, **options)

    return run


@pytest.fixture
def started_in(lab) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command in a namespace of a lab, and ends it after the test."""
    started = []

    def start(where: Lab, host: int, *command: str) -> subprocess.Popen[str]:
        def launch() -> subprocess.Popen[str]:
            return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

        started.append(namespaces.inside(where.namespace(host), launch))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()

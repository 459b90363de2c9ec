"""Tests that need an RDMA device: in guests of tools/rxe_vm, or on a real one (HRDMA_TEST_DEVICE=mlx5_0).

With two guests the same command runs in both: host 0 runs those tests that take the fixture `other`, host 1 serves it.
In one guest all others run. Where there is no device, every test says so.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import hosts
import pytest

HOSTS = int(os.environ.get("HOSTS", "0"))  # in a guest of tools/rxe_vm: how many there are
OTHER: pytest.StashKey[hosts.OtherHost] = pytest.StashKey()


def pytest_cmdline_main() -> int | None:
    if HOSTS == 2 and os.environ["HOST"] == "1":
        hosts.serve(os.environ["HOSTS_ADDR1"])
        return 0
    return None


def pytest_configure(config: pytest.Config) -> None:
    if HOSTS == 2 and os.environ["HOST"] == "0":
        config.stash[OTHER] = hosts.OtherHost(os.environ["HOSTS_ADDR1"])


def pytest_unconfigure(config: pytest.Config) -> None:
    if OTHER in config.stash:
        config.stash[OTHER].close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In guests: only what is meant for this number of them."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    wrong = [item for item in here if HOSTS and ("other" in getattr(item, "fixturenames", ())) != (HOSTS == 2)]
    if wrong:
        config.hook.pytest_deselected(items=wrong)
        items[:] = [item for item in items if item not in wrong]


@pytest.fixture(scope="session")
def device() -> str:
    """Name of the RDMA device that is tested; in guests rxe0."""
    if name := os.environ.get("HRDMA_TEST_DEVICE"):
        assert Path("/sys/class/infiniband", name).exists(), f"HRDMA_TEST_DEVICE={name}: no such RDMA device"
        return name
    if not HOSTS:
        pytest.skip("no RDMA device is named by HRDMA_TEST_DEVICE; in virtual machines: make test-rxe")
    return "rxe0"


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tests run sees settings of hrdma only, which HRDMA_TEST_DEVICE is not."""
    monkeypatch.delenv("HRDMA_TEST_DEVICE", raising=False)


@pytest.fixture(scope="session")
def guest(device: str) -> dict[str, str]:
    """The environment inside a guest of tools/rxe_vm, for tests of what only guests have."""
    if not HOSTS:
        pytest.skip(f"no RDMA device of tools/rxe_vm, but {device}; in virtual machines: make test-rxe")
    return dict(os.environ)


@pytest.fixture(scope="session")
def other(guest: dict[str, str], pytestconfig: pytest.Config) -> Iterator[hosts.OtherHost]:
    """The second host: ``other.run("ip link")``, ``other.start(...)``."""
    return pytestconfig.stash[OTHER]


@pytest.fixture(scope="session")
def output():
    """Output of a program on this host that must end well: ``output("rdma link")``; ``given``: its input."""

    def run(command: str, timeout: float = 60, given: str = "") -> str:
        done = subprocess.run(
            shlex.split(command),
            input=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}"
        return done.stdout

    return run

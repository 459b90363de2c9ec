"""Fixtures of the failure tests, and `pytest --nightly`."""

from __future__ import annotations

import pytest
from jobs import Job, Nursery, end_job, start_job


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="failure tests: the whole kill matrix, 200 runs and more")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: left out without --nightly")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--nightly", default=False):
        return
    late = [item for item in items if item.get_closest_marker("nightly")]
    items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=late)


@pytest.fixture(scope="session")
def nursery():
    """Where ranks are forked from."""
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def start(nursery):
    """``start(function, n, ...)`` starts a job (see `jobs.start_job`); it is ended after the test."""
    started: list[Job] = []

    def make(function, n, **how) -> Job:
        job = start_job(nursery, function, n, **how)
        started.append(job)
        return job

    yield make
    for job in started:
        end_job(job)

"""Fixtures of the failure tests."""

from __future__ import annotations

import pytest
from jobs import Job, Nursery, end_job, start_job


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

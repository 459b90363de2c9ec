"""Fixtures of the failure tests."""

from __future__ import annotations

import machine
import pytest
from jobs import Job, end_job, start_job


@pytest.fixture
def start():
    """``start(function, n, ...)`` starts a job (see `jobs.start_job`); it is ended after the test."""
    started: list[Job] = []
    machine.begin()

    def make(function, n, **how) -> Job:
        job = start_job(function, n, **how)
        started.append(job)
        return job

    yield make
    for job in started:
        end_job(job)

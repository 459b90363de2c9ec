"""The fixture `comm`: a job of one rank, in pytest's own process."""

from __future__ import annotations

import os

import pytest

import hrdma


@pytest.fixture(scope="module")
def comm():
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("HRDMA_") or name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                patch.delenv(name)
        with hrdma.init(timeout=20) as communicator:
            yield communicator

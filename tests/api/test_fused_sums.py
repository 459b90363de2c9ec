"""Sums of plain arrays that go on in a message as they are made: every type and operator is right, to the bit."""

from __future__ import annotations

import os

import numpy as np
import pytest

import harness

LENGTHS = (24, 40_000, 65_536, 131_000, 262_144, 400_008)  # bytes
TYPES = ("int8", "uint16", "int32", "uint64", "float16", "float32", "float64")
COMBINED = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


def allreduces(comm, times: int) -> int:
    rng = np.random.default_rng(7)  # the same on both ranks
    for dtype in TYPES:
        for length in LENGTHS:
            both = (rng.random((2, length // np.dtype(dtype).itemsize)) * 20).astype(dtype)
            for op, combined in COMBINED.items():
                x = np.empty_like(both[0])
                for again in range(times):
                    x[:] = both[comm.rank]
                    comm.allreduce(x, op=op, deterministic=again % 2 == 1)
                    wanted = combined(both[0], both[1], dtype=dtype)
                    assert x.tobytes() == wanted.tobytes(), (dtype, length, op, again)
            x = both[comm.rank].copy()
            comm.allreduce(x, op="avg")
            if np.dtype(dtype).kind == "f":
                assert np.array_equal(x, ((both[0].astype("float64") + both[1]) / 2).astype(dtype)), (dtype, length)
            else:
                assert np.array_equal(x.astype("int64"), both.sum(0, dtype=dtype).astype("int64") // 2), (dtype, length)
    return comm.stats()["counters"]["messages_fused"]


@pytest.mark.parametrize("options", ("", "cma=0", "ring=131072"))
def test_two_ranks_on_shared_memory(options):
    found = harness.ranks(allreduces, 2, env={"HRDMA_TRANSPORT": "shm", "HRDMA_SHM": options}, times=3)
    assert all(found) == (len(os.sched_getaffinity(0)) > 1), found  # with one processor they share it


def test_over_tcp_there_are_none():
    assert harness.ranks(allreduces, 2, env={"HRDMA_TRANSPORT": "tcp"}, times=1) == [0, 0]

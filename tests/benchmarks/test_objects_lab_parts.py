"""The benchmark of objects in a lab: its values, bounds and table; a run is in tests/lab."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
from bench_objects_lab import bound, table
from objects_rank import CYCLE, right, total, value

N = 2 * CYCLE + 3


@pytest.mark.parametrize("size", [2, 8, 16])
def test_sums_of_the_values_are_exact(size):
    assert np.array_equal(sum(value(N, rank, size).astype("float64") for rank in range(size)), total(N, size))


def test_what_is_wrong_is_seen():
    arrays = [value(N, rank, 3) for rank in range(3)]
    assert right("gather", arrays, N, 3) and right("broadcast", arrays[:1], N, 3)
    assert not right("gather", arrays[::-1], N, 3) and not right("broadcast", arrays[1:2], N, 3)
    assert right("allreduce", [total(N, 3)] * 2, N, 3) and not right("reduce", [total(N, 4)], N, 3)
    spoilt = total(N, 3)
    spoilt[-1] += 1
    assert not right("reduce", [spoilt], N, 3)


def test_bounds():
    second = int(1e8 / 8 * 1448 / 1514)  # bytes that 100 Mbit/s carry in a second
    for operation, factor in {"broadcast": 1, "reduce": 1, "allreduce": 2, "gather": 7}.items():
        assert bound(operation, second, 8, 1e8, 0.0) == pytest.approx(factor, rel=1e-6)
    assert bound("reduce", second, 8, 1e8, 2.0) == pytest.approx(15)
    assert bound("gather", second, 8, 1e8, 0.1) == pytest.approx(7, rel=1e-6)
    assert bound("gather", second, 8, 1e8, 2.0) == pytest.approx(15, rel=1e-6)


def test_a_table_says_who_failed_and_who_is_left_out():
    options = argparse.Namespace(hosts=2, rate="100mbit", stagger=0.0)
    found = {
        "hrdma": {"reduce 1024": [0.002, 0.004, 0.003]},
        "gloo": {"failed": "reduce of 1024 bytes: wrong result"},
        "mpich": {"left out": "no network"},
        "ray": {"reduce 1024": [0.006]},
    }
    lines = table(found, [("reduce", 1024)], options).splitlines()
    assert lines[0].endswith("| bound | hrdma | gloo | ray |")
    assert "3.0 ms" in lines[2] and "| failed |" in lines[2] and "6.0 ms (2.00x)" in lines[2]
    assert "gloo failed: reduce of 1024 bytes: wrong result" in lines and "mpich left out: no network" in lines

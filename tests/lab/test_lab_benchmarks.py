"""Benchmarks that bring up a lab of two hosts, a short run of each: what is printed, and that links limit where they shall."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def ran(program: str, *options: str) -> list[list[str]]:
    """The last table that a benchmark prints, without its head: words of cells, by row."""
    command = [sys.executable, str(BENCHMARKS / program), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.strip().splitlines()
    return [line.strip("| ").split(" | ") for line in lines[lines.index(next(x for x in lines if "---" in x)) + 1 :]]


def test_an_overlap_is_measured_over_the_link(root, name):
    ((reduce, loop, both, ratio, _),) = ran(
        "bench_overlap.py", "--rate", "400mbit", "--size", "4M", "--rounds", "1", "--name", name
    )
    wire = 1e3 * 8 * (4 << 20) / 400e6  # ms
    assert float(reduce.split()[0]) > 0.9 * wire, "faster than the link: not over it"
    assert float(both.split()[0]) > 0.9 * wire and float(loop.split()[0]) > 0 and float(ratio.split()[0]) > 0


def test_namespaces_are_measured_without_a_limit(root, name):
    short = ["--rounds", "1", "--iters", "10"]
    rows = ran("bench_namespaces.py", "--cases", "pingpong", "--sizes", "8", "1M", *short, "--name", name)
    assert [row[0] for row in rows] == ["pingpong, 8 B", "pingpong, 1 MiB"]
    assert all(float(cell.split()[0]) > 0 for row in rows for cell in row[1:])

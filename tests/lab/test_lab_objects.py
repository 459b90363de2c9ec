"""Objects between the hosts of a lab, as benchmarks/bench_objects_lab.py measures them: every operation, ready and staggered."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parents[2] / "benchmarks" / "bench_objects_lab.py"


@pytest.mark.parametrize("stagger", ["0", "0.1"])
def test_objects_cross_the_links(root, name, tmp_path, stagger):
    command = [sys.executable, str(PROGRAM), "--hosts", "3", "--sizes", "1K", "256K", "--rounds", "1", "--name", name]
    done = subprocess.run(
        [*command, "--stagger", stagger, "--json", str(tmp_path / "found.json")],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["found"]["hrdma"]
    for operation in ("broadcast", "gather", "reduce", "allreduce"):
        least = 8 * (1 << 18) / 1e8 * (2 if operation == "gather" and stagger == "0" else 1)
        assert all(seconds > least for seconds in found[f"{operation} {1 << 18}"]), "faster than the link: not over it"

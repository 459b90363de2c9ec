"""bench_start.py and bench_dtypes.py: tables and what counts as memory of arenas; a short run of each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from bench_dtypes import table as table_of_types
from bench_start import COLUMNS, table
from beside.environments import ROOT
from beside.job import Failure, Job, Start
from start_rank import memory


def ran(program: str, *options: str) -> str:
    """What a benchmark prints."""
    command = [sys.executable, str(ROOT / "benchmarks" / program), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SMAPS = """\
7f00-7f40 rw-s 00000000 00:01 1                          /memfd:hrdma-arena (deleted)
Pss:                4096 kB
Pss_Dirty:          4096 kB
Private_Clean:        96 kB
Private_Dirty:      4000 kB
VmFlags: rd wr sh
7f40-7f50 rw-s 00000000 00:01 2                          /memfd:hrdma-rings (deleted)
Pss:                 512 kB
Private_Dirty:         0 kB
7f50-7f60 rw-p 00000000 00:00 0
Pss:                 100 kB
Private_Dirty:       100 kB
"""


def test_arenas_are_told_from_other_memory():
    assert memory(SMAPS) == {"pss": 4708 * 1024, "arenas": 4096 * 1024, "own": 4196 * 1024}


def test_a_process_has_memory_of_its_own():
    found = memory(Path("/proc/self/smaps").read_text())
    assert 0 < found["own"] <= found["pss"]


def test_a_table_has_medians_and_the_ratio_to_mpich():
    rounds = {"hrdma": [0.03, 0.02, 0.09], "mpich": [0.06]}
    rows = {(4, name): dict.fromkeys(COLUMNS, each) for name, each in rounds.items()}
    rows[4, "mpich"]["arenas"] = [0.0]  # there is no ratio
    lines = table(rows).splitlines()
    assert lines[2].startswith("| 4 | hrdma | 30 (20 to 90) | 30 |")
    assert lines[4].startswith("| 4 | *hrdma over MPICH* | 0.50 | 0.50 |") and "|  |" in lines[4]
    assert len({line.count("|") for line in lines}) == 1


def test_types_are_ratios_to_float32_of_the_same_round():
    times = {("int8", 4096): [2.0, 8.0, 4.4], ("float32", 4096): [2.0, 4.0, 4.0]}
    lines = table_of_types(times, [4096]).splitlines()
    assert lines[2] == "| float32 | 4 us, 1.0 GB/s |"
    assert lines[3] == "| int8 | 1.10 (1.00 to 2.00) |"


@pytest.mark.slow
def test_a_start_is_measured():
    out = ran("bench_start.py", "--libraries", "hrdma", "--ranks", "2", "--rounds", "1", "--idle", "0.1")
    assert out.splitlines()[-1].startswith("| 2 | hrdma | ")


@pytest.mark.slow
def test_all_types_are_measured():
    out = ran("bench_dtypes.py", "--sizes", "4K", "--rounds", "1", "--iters", "100")
    assert {f"| {name} |" for name in ("float32", "int8", "float16", "float64")} <= {
        line[: line.find("|", 2) + 1] for line in out.splitlines()
    }


def test_a_job_that_is_asked_and_ends_is_a_failure():
    says = "import sys; from rank import Line; line = Line(sys.argv[1])"
    program = f"{says}; line.say({{'rank': 0, 'version': '1'}}); line.hear(); line.say({{'a': 1}}); line.hear()"
    start = Start([[sys.executable, "-c", program, "{socket}"]], {"PYTHONPATH": str(ROOT / "benchmarks" / "peers")})
    with Job(start, 1) as job:
        assert job.ask({"step": "any"}, 30) == [{"a": 1}]
        with pytest.raises(Failure):
            job.ask({"step": "any"}, 30)

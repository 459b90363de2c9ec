"""`hrdma bench`: every case, the numbers that it prints, wrong results, exit codes, jobs of other launchers."""

from __future__ import annotations

import io
import json
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from commands import hrdma, python

import harness
from hrdma.bench.cases import CASES, reductions
from hrdma.bench.options import Options
from hrdma.bench.report import Progress
from hrdma.types import DTYPES

QUICK = ("-i", "2", "-r", "1", "-w", "1")


def called(rank: int, arguments: list[str]) -> int:
    """The command's exit code in a rank of a job."""
    from hrdma.cli import command

    with pytest.raises(SystemExit) as end:
        command(arguments, prog_name="hrdma")
    return end.value.code


def printed(found: list[harness.Outcome]) -> tuple[dict, list[int]]:
    """The document, which rank 0 prints, and what each rank made its exit code; nobody prints anything else."""
    assert not any(one.error or (one.rank and one.output) for one in found), found
    return json.loads(found[0].output), [one.value for one in found]


def bench(name: str, n: int, *arguments: str, transport: str = "") -> dict:
    """What the command finds in a job that is there; those that start their ranks themselves call it by `hrdma`."""
    env = {"HRDMA_TRANSPORT": transport} if transport else {}
    call = ["bench", name, *arguments, "--json", *QUICK]
    document, codes = printed(harness.outcomes(called, n, init=False, env=env, arguments=call))
    assert codes == [0] * n
    return document


@pytest.mark.parametrize("transport", harness.transports())
@pytest.mark.parametrize("name", CASES)
def test_every_case(name, transport):
    case, n = CASES[name], 2 if CASES[name].pair else 3
    found = bench(name, n, "-b", "0", "-e", "100K", "-f", "50", transport=transport)
    assert found["case"] == name and found["ranks"] == n and found["transports"] == [transport]
    assert found["wrong"] == 0 and found["place"] == case.places[0]
    rows = found["rows"]
    if case.shared:
        assert [row["count"] for row in rows] == [0, 3, 12, 624, 25599]  # whole shares
    elif case.moves:
        assert [row["count"] for row in rows] == [0, 1, 12, 625, 25600]
    else:
        assert [(row["count"], row["type"]) for row in rows] == [(0, "none")]
    for row in rows:
        assert row["size"] == 4 * row["count"] and row["wrong"] == 0 and row["iters"] == 2
        assert row["redop"] == ("sum" if case.reduces else "none") and row["root"] == (0 if case.rooted else -1)
        assert 0 < row["min_us"] <= row["time_us"] <= row["max_us"]
        assert row["algbw"] == pytest.approx(row["size"] / row["time_us"] / 1e3)
        factor = {"allreduce": 4 / 3, "barrier": 0.0}.get(name, 2 / 3 if case.shared else 1.0)
        assert row["busbw"] == pytest.approx(row["algbw"] * factor)
    assert found["average_busbw"] == pytest.approx(sum(row["busbw"] for row in rows) / len(rows))


@pytest.mark.slow
@pytest.mark.parametrize(("place", "memory"), [("in", "plain"), ("out", "registered")])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(case.places) > 1])
def test_places_memories_and_roots(name, place, memory):
    root = ["--root", "2"] if CASES[name].rooted else []
    options = ["--place", place, "--memory", memory, "-d", "int16", *root]
    found = bench(name, 3, "-b", "100", "-e", "300K", "-f", "3000", *options)
    assert found["wrong"] == 0 and (found["place"], found["memory"]) == (place, memory)
    assert {row["root"] for row in found["rows"]} == {2 if root else -1}


@pytest.mark.parametrize("deterministic", [False, True])
def test_all_types_and_operators(deterministic):
    options = ["--deterministic"] if deterministic else []
    found = bench("allreduce", 3, "-b", "1000", "-e", "1000", "-d", "all", "-o", "all", *options)
    kinds = [(row["type"], row["redop"]) for row in found["rows"]]
    assert kinds == [(dtype, op) for dtype in DTYPES for op in reductions(dtype)]
    assert found["wrong"] == 0 and found["deterministic"] is deterministic


def test_all_types_of_what_is_moved():
    found = bench("alltoall", 3, "-b", "1000", "-e", "1000", "-d", "all")
    assert [row["type"] for row in found["rows"]] == list(DTYPES)


def test_table():
    done = hrdma("bench", "reduce", "-n", "2", "-b", "8", "-e", "2K", "-f", "16", "--root", "1", "-o", "max", *QUICK)
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[0] == "# reduce on 2 ranks over shm, registered memory, in place"
    assert lines[2].split() == ["#", "size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"]
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert [row[:5] + row[8:] for row in rows] == [
        [str(size), str(size // 4), "float32", "max", "1", "0"] for size in (8, 128, 2048)
    ]
    assert all(float(number) >= 0 for row in rows for number in row[5:8])
    assert lines[-2].startswith("# average bus bandwidth: ") and lines[-1] == "# wrong elements: 0"
    unchecked = hrdma("bench", "barrier", "-n", "2", "--no-check", *QUICK).stdout.splitlines()
    assert unchecked[-2].split()[-1] == "N/A" and unchecked[-1] == "# results were not checked"


@pytest.mark.parametrize("transport", harness.transports())
def test_ranks_of_its_own(transport):
    environ = {"HRDMA_TRANSPORT": transport, **harness.devices(transport)}
    done = hrdma("bench", "allgather", "-n", "3", "-b", "0", "-e", "100K", "-f", "50", "--json", *QUICK, **environ)
    assert done.returncode == 0 and done.stderr == "", done
    found = json.loads(done.stdout)
    assert (found["case"], found["ranks"], found["transports"], found["wrong"]) == ("allgather", 3, [transport], 0)
    assert [row["count"] for row in found["rows"]] == [0, 3, 12, 624, 25599]


@pytest.mark.parametrize("name", ["allreduce", "barrier"])
def test_one_rank(name):
    done = hrdma("bench", name, "-n", "1", "-e", "1K", "--json", *QUICK)
    assert done.returncode == 0 and done.stderr == "", done
    found = json.loads(done.stdout)
    assert found["ranks"] == 1 and found["wrong"] == 0


# Wrong results are noticed


def spoilt(rank: int, options: str, culprit: int, how: str) -> int:
    """The exit code of a rank of a job, in which the culprit has wrong results."""
    from hrdma.bench import worker

    given = Options.from_json(options)
    case = CASES[given.case]

    def bind(comm, x, out, op, root):
        call = case.bind(comm, x, out, op, root)

        def spoil():
            call()
            if rank == culprit:
                result = out if out.size else x
                if how == "element":
                    result[len(result) // 2] += 1
                elif how == "zeros":
                    result[:] = 0
                elif how == "shift":
                    result[:] = np.roll(result, 1)
                elif how == "input":
                    x[0] += 1

        return spoil

    CASES[given.case] = replace(case, bind=bind)
    return worker.main(given)


def sabotaged(n: int, culprit: int, how: str, options: Options) -> list[harness.Outcome]:
    return harness.outcomes(spoilt, n, init=False, options=options.to_json(), culprit=culprit, how=how)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].moves])
def test_one_wrong_element_on_one_rank_is_counted(name):
    n = 2 if CASES[name].pair else 3
    culprit = 1 if name in ("pingpong", "bandwidth", "reduce", "gather") else n - 1  # one that has the result
    options = Options(name, 4096, 4096, iters=2, rounds=1, warmup=1, json=True, dtype="int32", root=1 if n == 3 else 0)
    found, codes = printed(sabotaged(n, culprit, "element", options))
    assert codes == [1] * n and found["wrong"] == 1 and [row["wrong"] for row in found["rows"]] == [1], found


@pytest.mark.parametrize(("how", "least"), [("zeros", 1024), ("shift", 900), ("input", 1)])
def test_other_wrong_results(how, least):
    options = Options("allgather", 12288, 12288, iters=2, rounds=1, warmup=1)
    found = sabotaged(3, 0, how, options)
    row = next(line.split() for line in found[0].output.splitlines() if not line.startswith("#"))
    assert [one.value for one in found] == [1] * 3 and int(row[-1]) >= least, found
    assert "IS BROKEN" in found[0].output, found


def early(comm):
    """A barrier that holds nobody."""
    from hrdma.bench.measure import Bench

    bench = Bench(comm, Options("barrier"), lambda doing: None)
    good = bench._check_barrier(comm.barrier)
    comm.barrier()
    return [good, bench._check_barrier(lambda: None)]


def test_a_barrier_that_does_not_hold_is_noticed():
    for good, bad in harness.ranks(early, 3):
        assert good == 0 and bad > 0


# Refusals and exit codes


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["fly"], "'fly' is not one of 'allreduce', 'reduce'"),
        ([], "Missing argument 'CASE'"),
        (["allreduce", "-b", "1T"], "'1T' is not a size: bytes, or a number with K, M or G"),
        (["allreduce", "-b", "1K", "-e", "8"], "-e 8 is below -b 1024"),
        (["allreduce", "-d", "int3"], "'int3' is not one of"),
        (["allreduce", "-d", "float32", "-o", "bxor"], "-o bxor is not defined for float32, which has sum, prod"),
        (["pingpong", "-n", "3"], "pingpong is between 2 ranks, not 3: pass -n 2"),
        (["broadcast", "--root", "2"], "--root 2 is not one of 2 ranks: 0 to 1"),
        (["broadcast", "--place", "out"], "--place out: broadcast has only --place in"),
        (["allreduce", "-n", "0"], "0 is not in the range x>=1"),
    ],
)
def test_wrong_usage(arguments, text):
    done = hrdma("bench", *arguments)
    assert done.returncode == 2 and text in " ".join(done.stderr.split()) and done.stdout == "", done


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"HRDMA_TIMEOUT": "soon"}, "HRDMA_TIMEOUT=soon: expected"),
        ({"HRDMA_TIMOUT": "3"}, "did you mean HRDMA_TIMEOUT?"),
        ({"WORLD_SIZE": "3"}, "RANK is not set"),
    ],
)
def test_a_wrong_environment_is_wrong_usage(environ, text):
    done = hrdma("bench", "allreduce", **environ)
    assert done.returncode == 2 and text in done.stderr and len(done.stderr.splitlines()) == 1, done


def test_a_provider_that_cannot_be_had_is_a_failure():
    done = hrdma("bench", "allreduce", "-n", "1", HRDMA_TRANSPORT="pigeon")
    assert done.returncode == 1 and "hrdma bench: " in done.stderr and "Traceback" not in done.stderr, done
    assert "'pigeon'" in done.stderr


def test_memory_that_cannot_be_had_is_a_failure():
    done = hrdma("bench", "allreduce", "-n", "1", "-b", "100000G", "-e", "100000G")
    assert done.returncode == 1 and "hrdma bench: rank 0: cannot get 107374182400000 bytes" in done.stderr, done


@pytest.mark.slow
def test_timeout_and_progress_on_stderr():
    start = time.monotonic()
    endless = ("-b", "4M", "-e", "4M", "-i", "1000000000", "--timeout", "10", "--json", "--progress")
    waits = {"HRDMA_TRANSPORT": "tcp", "HRDMA_FAULT": "tcp:delay=1:20ms"}
    done = hrdma("bench", "allreduce", "-n", "2", *endless, **waits)
    assert done.returncode == 124 and "timed out after 10 s" in done.stderr and time.monotonic() - start < 28, done
    assert done.stdout == "" and "# allreduce float32 4 MiB: " in done.stderr, done


def test_a_rank_that_dies_is_a_failure_and_no_traceback():
    done = hrdma(
        "bench", "allreduce", "-n", "2", "-e", "1K", HRDMA_TRANSPORT="tcp", HRDMA_FAULT="tcp:kill=after:20,seed=1"
    )
    assert done.returncode == 1 and "hrdma bench: rank " in done.stderr and "Traceback" not in done.stderr, done


def test_inside_a_job(tmp_path):
    command = ["bench", "allgather", "-n", "7", "-e", "1K", "--json", *QUICK]
    done = hrdma("run", "-n", "3", "--no-prefix", "--", sys.executable, "-m", "hrdma", *command)
    assert done.returncode == 0 and json.loads(done.stdout)["ranks"] == 3
    done = hrdma("run", "-n", "3", "--keep-going", "--", sys.executable, "-m", "hrdma", "bench", "pingpong")
    assert done.returncode == 2 and done.stderr.count("pingpong is between 2 ranks, not 3") == 1, done


# What it costs


def test_the_worker_starts_light():
    code = """
import sys
import hrdma.bench.worker
print(*sorted({"click", "rich", "numpy", "zmq", "hrdma._core"} & set(sys.modules)))
"""
    assert python("-c", code).stdout.strip() == ""
    code = """
import sys
from hrdma.bench import worker
from hrdma.bench.options import Options
worker.main(Options("allreduce", 8, 64, iters=1))
print(*sorted({"click", "rich"} & set(sys.modules)), file=sys.stderr)
"""
    done = python("-c", code)
    assert done.returncode == 0 and done.stderr.strip() == "", done


def overhead(comm):
    """Seconds per iteration of nothing, and what is on between the clock readings."""
    import gc
    from itertools import pairwise

    from hrdma.bench.measure import Bench

    bench = Bench(comm, Options("barrier"), lambda doing: None)
    seen = []
    bench._time(lambda: seen.append((gc.isenabled(), sys.getallocatedblocks())), 5)
    blocks = [after - before for (_, before), (_, after) in pairwise(seen[1:])]
    return [min(bench._time(int, 20000) for _ in range(5)), [on for on, _ in seen], gc.isenabled(), blocks]


def test_the_loop_measures_the_call_and_nothing_else():
    ((seconds, collecting, after, blocks),) = harness.ranks(overhead, 1)
    assert seconds < 1e-6  # calling int() included
    assert not any(collecting) and after
    assert max(blocks) <= 4  # what this test itself notes down


def slow(comm):
    from hrdma.bench.measure import Bench

    bench = Bench(comm, Options("barrier"), lambda doing: None)
    calls = []
    iters = bench._warm_up(lambda: (calls.append(1), time.sleep(0.03 * (1 + comm.rank))))
    return [len(calls), iters]


def test_slow_calls_are_not_made_often_and_all_ranks_agree():
    first, second = harness.ranks(slow, 2)
    assert first == second and first[0] <= 4 and first[1] == 1


def test_progress():
    stream, sys.stderr = sys.stderr, io.StringIO()
    try:
        with Progress(True, every=0.05) as progress:
            progress.begin("allreduce float32 64 MiB")
            progress("round 1 of 5")
            time.sleep(0.3)
        shown = sys.stderr.getvalue()
        with Progress(False, every=0.05) as progress:
            progress.begin("x")
            time.sleep(0.15)
        assert sys.stderr.getvalue() == shown
    finally:
        sys.stderr = stream
    lines = shown.splitlines()
    assert 2 <= len(lines) <= 6 and lines[0] == "# allreduce float32 64 MiB: round 1 of 5, 0 s so far"


@pytest.mark.parametrize(
    ("flags", "terminal", "shown"), [([], False, False), ([], True, True), (["--no-progress"], True, False)]
)
def test_progress_is_for_terminals(monkeypatch, flags, terminal, shown):
    from hrdma.cli.bench import command

    started = []
    monkeypatch.setattr("hrdma.launch.run", lambda argv, **how: started.append(argv) or 0)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with pytest.raises(SystemExit):
        command(["allreduce", *flags])
    assert Options.from_json(started[0][-1]).progress is shown


def test_values_travel_as_they_are():
    options = Options("reduce", begin=3, json=True, place="out", dtype="all")
    assert Options.from_json(options.to_json()) == options
    assert len(options.kinds()) == sum("sum" in reductions(dtype) for dtype in DTYPES)
    assert np.array_equal(Options("barrier", dtype="all").kinds(), [("uint8", "none")])

"""`schedule=`: a given schedule runs; it is proved, and agreed upon by all ranks, before anything is moved."""

import logging
import os
import pathlib
import time
from dataclasses import replace

import numpy as np
import pytest

import harness
import hrdma
from hrdma import given
from hrdma.topo import msccl, plan_file
from hrdma.topo.algorithms import build
from hrdma.topo.fabrics import parse
from hrdma.topo.planner import plan
from hrdma.topo.schedule import Schedule


def values(comm, count):
    return np.arange(count, dtype="float64") * comm.size + comm.rank


def total(comm, count):
    return np.arange(count) * comm.size**2 + comm.size * (comm.size - 1) / 2


def everything(comm):
    n, me = comm.size, comm.rank
    said = []
    logging.getLogger("hrdma").addHandler(logging.Handler())
    logging.getLogger("hrdma").handlers[-1].emit = lambda record: said.append(record.getMessage())
    logging.getLogger("hrdma").setLevel("INFO")
    for count in (0, 1, 7, 50_000):
        x, expected = values(comm, count), total(comm, count)
        ring = build("ring", "allreduce", n)
        assert (comm.allreduce(x.copy(), schedule=ring) == expected).all()
        out = np.zeros(count)
        assert comm.allreduce(x, "sum", out=out, schedule=ring, timeout=10) is out and (out == expected).all()
        assert np.allclose(comm.allreduce(x.copy(), "avg", schedule=ring), expected / n)
        assert (comm.allreduce(x.astype("int32"), "avg", schedule=ring) == expected // n).all()
        comm.reduce(x, 1, out=out, schedule=build("binomial", "reduce", n, root=1))
        assert me != 1 or (out == expected).all()
        y = x.copy()
        comm.broadcast(y, 1, schedule=build("binomial", "broadcast", n, root=1))
        assert (y == np.arange(count) * n + 1).all()
        joined = np.arange(count) * n + np.arange(n)[:, None]
        assert (comm.allgather(x, schedule=build("ring", "allgather", n)).reshape(n, count) == joined).all()
        blocks = np.concatenate([x + 1000 * rank for rank in range(n)])
        assert (
            comm.reduce_scatter(blocks, schedule=build("ring", "reduce_scatter", n)) == expected + 1000 * n * me
        ).all()
        found = comm.alltoall(blocks, schedule=build("pairwise", "alltoall", n)).reshape(n, count)
        assert (found == joined + 1000 * me).all()
        gathered = comm.gather(x, 2, schedule=build("direct", "gather", n, root=2))
        assert me != 2 or (gathered.reshape(n, count) == joined).all()
        own = comm.scatter(blocks, 2, out=np.zeros(count), schedule=build("direct", "scatter", n, root=2))
        assert (own == np.arange(count) * n + 2 + 1000 * me).all()
    return said


@pytest.mark.parametrize("transport", harness.transports())
def test_all_collectives_run_what_they_are_given(transport):
    for said in harness.ranks(everything, 4, env={"HRDMA_TRANSPORT": transport}):
        assert "allreduce on 4 ranks: ring, as given" in said
        planned = [line for line in said if ", as given" not in line]
        assert len(planned) == 1 and planned[0].startswith("allgather of 1 KiB on 4 ranks")  # what they told each other


def uneven(comm):
    n, counts = comm.size, [5, 0, 3]
    x = np.full(counts[comm.rank], float(comm.rank))
    found = comm.allgather(x, counts=counts, schedule=build("ring", "allgather", n))
    assert found.tolist() == [0.0] * 5 + [2.0] * 3
    share = comm.reduce_scatter(np.arange(8.0), counts=counts, schedule=build("ring", "reduce_scatter", n))
    assert share.tolist() == (3 * np.arange(8.0))[[0, 5, 5][comm.rank] :][: counts[comm.rank]].tolist()


def test_shares_may_differ():
    harness.ranks(uneven, 3)


def from_files(comm, paths):
    asked = []
    number = given.GivenSchedules.number
    given.GivenSchedules.number = lambda *call: asked.append(call) or number(*call)
    for _ in range(3):
        for path in paths:
            assert (comm.allreduce(values(comm, 1000), schedule=path) == total(comm, 1000)).all()
    requests = [comm.allreduce(values(comm, 300), schedule=path, async_op=True) for path in paths]
    assert all((request.wait() == total(comm, 300)).all() for request in requests)
    half = comm.split(comm.rank % 2)
    assert (half.allreduce(np.ones(10), schedule=build("ring", "allreduce", 2)) == 2).all()
    return len(asked)


def test_files_of_all_kinds_are_read_once(tmp_path):
    made = plan("allreduce", parse("bcube:2,2"), 1 << 20, algorithm="bml")
    paths = [str(tmp_path / name) for name in ("plan.json", "schedule.json", "program.xml")]
    plan_file.dump(made, paths[0])
    (tmp_path / "schedule.json").write_text(build("ring", "allreduce", 4).to_json())
    (tmp_path / "program.xml").write_text(msccl.dumps(build("halving", "allreduce", 4)))
    assert harness.ranks(from_files, 4, paths=paths) == [len(paths) + 1] * 4


def goes_on(comm, schedules):
    """What the first call raised; the second has a good one, and must do."""
    raised = ""
    try:
        comm.allreduce(values(comm, 100), schedule=schedules[comm.rank])
    except (ValueError, OSError) as error:
        raised = f"{type(error).__name__}: {error}"
    for algorithm in ("direct", "halving"):
        good = build(algorithm, "allreduce", comm.size)
        assert (comm.allreduce(values(comm, 100), schedule=good) == total(comm, 100)).all()
    assert (comm.allreduce(values(comm, 100)) == total(comm, 100)).all()
    return raised


def written(folder, name, schedule):
    (folder / name).write_text(schedule.to_json())
    return str(folder / name)


def wrong(schedule):
    """Without its last transfer."""
    return Schedule(schedule.collective, schedule.size, schedule.table[:-1].copy(), schedule.split, name="edited")


def test_another_schedule_on_another_rank_is_told_to_all(tmp_path):
    ring, other = (written(tmp_path, name, build(name, "allreduce", 3)) for name in ("ring", "halving"))
    found = harness.ranks(goes_on, 3, schedules=[ring, ring, other])
    digests = [build(name, "allreduce", 3).digest() for name in ("ring", "halving")]
    text = "ScheduleError: schedule= must mean the same on all ranks: rank 0 has ring ({}), rank 2 has halving ({})"
    assert found == [text.format(*digests)] * 3


def test_a_wrong_one_is_refused_on_all_ranks_before_anything_moves(tmp_path):
    ring = build("ring", "allreduce", 3)
    good, bad = written(tmp_path, "good", ring), written(tmp_path, "bad", wrong(ring))
    found = harness.ranks(goes_on, 3, schedules=[good, bad, good])
    assert found[1].startswith("ScheduleError: ") and "rank" in found[1] and "chunk" in found[1]
    assert (
        found[0]
        == found[2]
        == "ScheduleError: schedule=: rank 1 cannot use what it was given: " + (found[1].partition(": ")[2])
    )
    found = harness.ranks(
        goes_on, 2, schedules=[str(tmp_path / "nowhere"), written(tmp_path, "two", build("ring", "allreduce", 2))]
    )
    assert found[0].startswith("FileNotFoundError: ") and "rank 0 cannot use what it was given" in found[1]


def mixed(comm):
    ring = build("ring", "allreduce", comm.size)
    x = values(comm, 100)
    comm.allreduce(x, schedule=ring if comm.rank == 1 else None)


def test_a_rank_that_gives_none_is_named():
    for one in harness.outcomes(mixed, 3):
        assert one.error == "CollectiveMismatchError"
        assert "allgather(uint8, 256) to compare what schedule= means" in one.text and "rank 1" in one.text


def known_and_another(comm):
    comm.allreduce(values(comm, 100), schedule=build("ring", "allreduce", comm.size))
    comm.allreduce(values(comm, 100), schedule=build("ring" if comm.rank else "halving", "allreduce", comm.size))


def test_a_new_one_beside_a_known_one_is_a_mismatch():
    for one in harness.outcomes(known_and_another, 2):
        assert one.error == "CollectiveMismatchError" and "with schedule" in one.text


def refused(comm):
    n, found = comm.size, []
    calls = [
        lambda: comm.allreduce(np.ones(4), schedule=3),
        lambda: comm.allreduce(np.ones(4), schedule=build("ring", "allgather", n)),
        lambda: comm.allreduce(np.ones(4), schedule=build("ring", "allreduce", n + 1)),
        lambda: comm.broadcast(np.ones(4), 1, schedule=build("binomial", "broadcast", n, root=0)),
        lambda: comm.allreduce(np.ones(4), schedule=build("ring", "allreduce", n, rank=0)),
        lambda: comm.allreduce(np.ones(4), deterministic=True, schedule=build("ring", "allreduce", n)),
    ]
    for call in calls:
        try:
            call()
        except (TypeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    x = np.full(100, 0.1 * (comm.rank + 1), "float32")
    comm.allreduce(x, deterministic=True, schedule=build("direct", "allreduce", n))
    assert (x == (np.float32(0.1) + np.float32(0.2)) + np.float32(0.1 * 3)).all()
    assert (
        comm.allreduce(np.arange(4), deterministic=True, schedule=build("ring", "allreduce", n)) == 3 * np.arange(4)
    ).all()
    return found


def test_what_does_not_suit_the_call_is_refused():
    for found in harness.ranks(refused, 3):
        starts = [
            "TypeError: schedule=3: a Schedule of hrdma.topo or the path of a file is wanted",
            "ScheduleError: schedule= is for allgather (ring), the call is allreduce",
            "ScheduleError: schedule= is for 4 ranks (ring), the communicator has 3",
            "ScheduleError: schedule= has root 0 (binomial), the call root 1",
            "ScheduleError: ",
            "ScheduleError: deterministic=True needs rank order, and ring has another: ",
        ]
        assert len(found) == len(starts) and all(text.startswith(start) for text, start in zip(found, starts)), found


def useless(comm, schedules):
    """All ranks hear at once what this one cannot use, whatever the reason; then the communicator does."""
    n, said = comm.size, []
    good = build("ring", "allreduce", n)
    bad = [*schedules, os.fsencode(schedules[0]), 3, Large(comm, good.table)]
    for what in bad:
        begun = time.monotonic()
        try:
            comm.allreduce(values(comm, 10), schedule=what if comm.rank else build("ring", "allreduce", n))
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        assert time.monotonic() - begun < 20
    assert (comm.allreduce(values(comm, 100), schedule=good) == total(comm, 100)).all()
    return said


class Large(Schedule):
    """A schedule of which the proof takes more memory than there is."""

    def __init__(self, comm, table):
        super().__init__("allreduce", comm.size, table, name="large")

    def check(self, ordered=False, single=False):
        raise MemoryError


def test_whatever_makes_a_schedule_useless_is_told(tmp_path):
    (tmp_path / "deep").write_text("[" * 200_000)
    (tmp_path / "wide").write_text(Schedule("allreduce", 10_000_000, np.empty((0, 7), np.int32)).to_json())
    (tmp_path / "named").write_text(build("ring", "allreduce", 3).to_json().replace('"ring"', '"\\ud800"'))
    (tmp_path / "odd").write_text(wrong(build("ring", "allreduce", 2)).to_json())
    files = [str(tmp_path / name) for name in ("deep", "wide", "named", "odd", "nowhere\udcff")]
    first, second = harness.ranks(useless, 2, schedules=files, timeout=100)
    starts = [
        "RecursionError: ",
        f"ScheduleError: {files[1]}: it is for 10000000 ranks, the communicator has 2",
        f"ScheduleError: {files[2]}: it is for 3 ranks, the communicator has 2",
        "ScheduleError: ",
        "FileNotFoundError: ",
        "TypeError: schedule=b",
        "TypeError: schedule=3: a Schedule of hrdma.topo or the path of a file is wanted",
        "MemoryError: ",
    ]
    assert len(first) == len(second) == len(starts)
    assert all(text.startswith(start) for text, start in zip(second, starts)), second
    assert all(text.startswith("ScheduleError: schedule=: rank 1 cannot use what it was given: ") for text in first)
    assert first[-1].endswith("MemoryError")


def long_names(comm):
    made = build("ring", "allreduce", comm.size)
    name = "n" * 300 + str(comm.rank)
    with pytest.raises(hrdma.ScheduleError, match="must mean the same on all ranks: rank 0 has nnn"):
        comm.allreduce(values(comm, 10), schedule=replace(made, name=name))
    assert (comm.allreduce(values(comm, 10), schedule=replace(made, name="n" * 300)) == total(comm, 10)).all()


def test_names_that_differ_late_differ():
    harness.ranks(long_names, 2)


def again(comm, path):
    proofs, reads, asked = [], [], []
    check, read, told = Schedule.check, plan_file.prove, type(comm)._told
    Schedule.check = lambda self, *how: proofs.append(self.name) or check(self, *how)
    plan_file.prove = lambda *what, **how: reads.append(what) or read(*what, **how)
    type(comm)._told = lambda self, *what: asked.append(what) or told(self, *what)
    for _ in range(3 * given.PATHS):
        made = build("halving", "allreduce", comm.size)
        assert (comm.allreduce(values(comm, 10), schedule=made) == total(comm, 10)).all()
    assert (proofs, len(asked)) == (["halving"], 1)
    for _ in range(3):
        assert (comm.allreduce(values(comm, 10), schedule=pathlib.Path(path)) == total(comm, 10)).all()
        assert (comm.allreduce(values(comm, 10), schedule=path) == total(comm, 10)).all()
    assert (len(reads), len(asked)) == (1, 2)


def test_what_is_known_is_neither_read_nor_proved_again(tmp_path):
    harness.ranks(again, 2, path=written(tmp_path, "ring", build("ring", "allreduce", 2)))


def many(comm):
    n = comm.size
    kept = [build("ring", "allreduce", n, parts=parts) for parts in range(1, given.KEPT + 5)]
    for schedule in [*kept, kept[0], kept[-1]]:
        assert (comm.allreduce(values(comm, 100), schedule=schedule) == total(comm, 100)).all()
    return len(comm._given.schedules)


def test_old_ones_are_forgotten_alike():
    assert harness.ranks(many, 2) == [given.KEPT] * 2


def alone(comm):
    assert (comm.allreduce(np.arange(5), schedule=build("direct", "allreduce", 1)) == np.arange(5)).all()


def test_a_job_of_one_rank():
    harness.ranks(alone, 1)
    with pytest.raises(hrdma.ScheduleError):
        wrong(build("ring", "allreduce", 2)).check()

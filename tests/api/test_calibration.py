"""Measured costs: the file, what is believed, and that all ranks plan with the same ones."""

import json
import logging
import os
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

import harness
import hrdma
from hrdma import calibration
from hrdma.log import logger
from hrdma.topo.cost import DEFAULT_COST, NETWORK

SHM = replace(DEFAULT_COST["shm"], alpha=4.25e-7, name="measured for shm")
TCP = replace(DEFAULT_COST["tcp"], beta=3.5e-10, name="measured for tcp")


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "some" / "cache")


@pytest.fixture
def measured(monkeypatch):
    """Stands in for measuring; the names that were asked for."""
    asked = []

    def measure(name):
        asked.append(name)
        return {"shm": SHM, "tcp": TCP}[name]

    monkeypatch.setattr(calibration, "measure", measure)
    return asked


@pytest.fixture
def said():
    """Records of the log of level info and above."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield records
    logger.removeHandler(handler)
    logger.setLevel(level)


# -- the file --


def test_what_is_saved_is_loaded(folder):
    assert calibration.load(folder) == {}
    calibration.save(folder, {"shm": SHM, "tcp": TCP})
    assert calibration.load(folder) == {"shm": SHM, "tcp": TCP}
    calibration.save(folder, {"tcp": TCP})
    assert calibration.load(folder) == {"tcp": TCP}
    assert os.listdir(folder) == [os.path.basename(calibration.cache_file(folder))]  # no draft is left


def edited(folder, change):
    path = calibration.cache_file(folder)
    with open(path) as file:
        found = json.load(file)
    text = change(found)
    with open(path, "w") as file:
        file.write(text if isinstance(text, str) else json.dumps(found))


@pytest.mark.parametrize(
    "change",
    [
        lambda found: "",
        lambda found: json.dumps(found)[:-20],
        lambda found: "[1, 2]",
        lambda found: "\0\1\2",
        lambda found: found["machine"].update(kernel="2.4.1"),
        lambda found: found["machine"].update(cores=1000),
        lambda found: found["machine"].update(version="0.0.1"),
        lambda found: found["costs"]["shm"].update(alpha="fast"),
        lambda found: found["costs"]["shm"].update(beta=-1),
        lambda found: found["costs"]["shm"].update(beta=float("nan")),
        lambda found: found["costs"]["shm"].update(colour=3),
        lambda found: found["costs"]["shm"].update(alpha=0.5),
        lambda found: found["costs"]["shm"].update(latency=0.5),
        lambda found: found.pop("costs"),
    ],
)
def test_a_damaged_or_foreign_file_is_measured_again(folder, measured, change):
    calibration.save(folder, {"shm": SHM})
    edited(folder, change)
    assert calibration.load(folder) == {}
    assert calibration.costs(["shm"], folder) == {"shm": SHM} and measured == ["shm"]
    assert calibration.costs(["shm"], folder) == {"shm": SHM} and measured == ["shm"]


def test_only_what_is_missing_is_measured(folder, measured):
    calibration.save(folder, {"tcp": TCP})
    assert calibration.costs(["shm", "tcp", "loop", "elsewhere"], folder) == {"shm": SHM, "tcp": TCP}
    assert measured == ["shm"]
    assert calibration.load(folder) == {"shm": SHM, "tcp": TCP}


def test_who_may_not_measure_does_not(folder, measured):
    assert calibration.costs(["shm", "tcp"], folder, may_measure=False) == {} == calibration.load(folder)
    calibration.save(folder, {"tcp": TCP})
    assert calibration.costs(["shm", "tcp"], folder, may_measure=False) == {"tcp": TCP}
    assert not measured


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path, measured, said):
    (tmp_path / "file").write_text("")
    assert calibration.costs(["shm", "tcp"], str(tmp_path / "file" / "cache")) == {"shm": SHM, "tcp": TCP}
    once = [record for record in said if "HRDMA_CACHE_DIR" in record.getMessage()]
    assert len(once) == 1 and once[0].levelname == "INFO" and str(tmp_path) in once[0].getMessage()


def test_where_the_file_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert calibration.cache_file().startswith(f"{tmp_path}/.cache/hrdma/cost-")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert calibration.cache_file().startswith(f"{tmp_path}/x/hrdma/cost-")
    assert calibration.cache_file("~/y").startswith(f"{tmp_path}/y/cost-")
    here = calibration.cache_file("/a")
    monkeypatch.setattr(calibration, "machine", lambda: {"cpu": "another"})
    assert calibration.cache_file("/a") != here


# -- measuring --


def patiently(name, seconds=240):
    """Measures until the machine is not too busy."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            return calibration.measure(name)
        except RuntimeError as error:
            why = str(error)
            time.sleep(0.5)
    pytest.skip(f"the machine is too busy to measure {name}: {why}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_a_measurement_is_plausible_and_leaves_nothing(name):
    cost = patiently(name)
    threads, files, cores = threading.active_count(), len(os.listdir("/proc/self/fd")), os.sched_getaffinity(0)
    patiently(name)
    assert (threading.active_count(), os.sched_getaffinity(0)) == (threads, cores)
    assert len(os.listdir("/proc/self/fd")) == files
    assert not calibration._doubts(name, cost)
    assert cost.name == f"measured for {name}" and cost.pull == (name == "shm") and not cost.cores
    assert 1e-8 < cost.alpha < 1e-4 and 1e-11 < cost.beta < 1e-8 and 1e-12 < cost.gamma < 1e-9


def times(monkeypatch, seconds):
    """Every run of every probe takes what seconds(nth call) says. There is time for all passes, whatever else runs."""
    calls = iter(range(10**6))
    monkeypatch.setattr(calibration.measure, "__defaults__", (0.5,))
    monkeypatch.setattr(
        calibration, "_side_by_side", lambda pairs, cpus: [[seconds(next(calls)) for _ in range(3)] for _ in pairs[0]]
    )


@pytest.mark.parametrize(
    ("seconds", "why"),
    [
        (lambda call: 1e-4 * 1.5 ** min(call, 1000), "too busy: no two times of"),
        (lambda call: 0.5, "cannot be true"),
        (lambda call: 1e-9, "cannot be true"),
    ],
)
def test_nonsense_is_not_believed_and_not_kept(folder, monkeypatch, said, seconds, why):
    times(monkeypatch, seconds)
    with pytest.raises(RuntimeError, match=why):
        calibration.measure("tcp")
    times(monkeypatch, seconds)
    assert calibration.costs(["tcp"], folder) == {}
    assert [why in record.getMessage() and "defaults are used" in record.getMessage() for record in said] == [True]
    assert not os.path.exists(folder)


def test_the_fit_finds_what_it_was_made_from():
    for name, cost in (("shm", SHM), ("tcp", TCP)):
        cost = replace(cost, latency=6e-7, switch=4e-6)
        long = 8 * cost.eager
        double = 2 if len(os.sched_getaffinity(0)) == 1 else 1
        made = {
            "step": cost.alpha + cost.latency,
            "burst": cost.alpha * double,
            "move": (cost.message(long) + cost.latency + cost.beta * long) * double,
            "shared": 2 * cost.alpha + cost.latency + cost.switch,
        }
        found = calibration._fit(name, made, long, cost.eager, cost.pull)
        assert found.staged == 0
        for field in ("alpha", "latency", "switch", "beta") if double == 1 else ("alpha",):
            assert getattr(found, field) == pytest.approx(getattr(cost, field)), (name, field)
        slow = made | {"move": 3 * made["move"], "staged": made["move"]}  # in place, and through messages
        again = calibration._fit(name, slow, long, cost.eager, cost.pull)
        assert (again.staged, again.beta) == (calibration.STAGED_MOST, found.beta)
        shared = 2 * cost.alpha + cost.latency  # by this messages of one core would switch for nothing
        near = calibration._fit(name, made | {"shared": shared}, long, cost.eager, cost.pull)
        if double == 1:
            assert near.switch == pytest.approx(0.6 * shared if cost.pull else 0.0, abs=1e-12)


# -- all ranks plan alike --


def seeded(rank, folders, measures):
    """A job whose ranks have folders of their own; returns what each plans with."""
    os.environ["HRDMA_CACHE_DIR"] = folders[rank]
    asked = []

    def measure(name):
        asked.append(name)
        if not measures:
            raise RuntimeError("the machine is too busy")
        return replace(DEFAULT_COST[name], alpha=7e-7)

    calibration.measure = measure
    with hrdma.init() as comm:
        half = comm.split(comm.rank // 2)
        found = [comm.info()["cost"]["alpha"], half.info()["cost"]["alpha"], asked]
        comm.barrier()
        return found


def test_the_lowest_rank_that_has_costs_decides(tmp_path):
    folders = [str(tmp_path / str(rank)) for rank in range(4)]
    calibration.save(folders[1], {"shm": replace(SHM, alpha=5e-7)})
    calibration.save(folders[2], {"shm": replace(SHM, alpha=6e-7)})
    found = harness.ranks(seeded, 4, init=False, env={"HRDMA_TRANSPORT": "shm"}, folders=folders, measures=False)
    assert found == [[5e-7, 5e-7, ["shm"]], [5e-7, 5e-7, []], [5e-7, 6e-7, []], [5e-7, 6e-7, []]]


def test_rank_0_measures_for_all(tmp_path):
    folders = [str(tmp_path)] * 4
    env = {"HRDMA_TRANSPORT": "shm"}
    found = harness.ranks(seeded, 4, init=False, env=env, folders=folders, measures=True)
    assert found == [[7e-7, 7e-7, ["shm"]], *[[7e-7, 7e-7, []]] * 3]
    found = harness.ranks(seeded, 4, init=False, env=env, folders=folders, measures=False)
    assert found == [[7e-7, 7e-7, []]] * 4


def unmeasured(rank, folders):
    alphas = seeded(rank, folders, False)[:2]
    return [alpha == DEFAULT_COST["shm"].alpha for alpha in alphas]


def test_defaults_where_nobody_has_any(tmp_path):
    folders = [str(tmp_path)] * 2
    assert harness.ranks(unmeasured, 2, init=False, env={"HRDMA_TRANSPORT": "shm"}, folders=folders) == [[True] * 2] * 2


def elsewhere(rank, folder):
    os.environ["HRDMA_HOST_ID"] = f"host {rank}"
    os.environ["HRDMA_CACHE_DIR"] = folder
    with hrdma.init() as comm:
        found = comm.info()["cost"]
        comm.barrier()
        return found


def test_between_hosts_the_network_counts(tmp_path):
    calibration.save(str(tmp_path), {"tcp": TCP, "shm": SHM})
    one, two = harness.ranks(elsewhere, 2, init=False, folder=str(tmp_path))
    assert one == two
    assert (one["alpha"], one["beta"], one["latency"]) == (TCP.alpha, NETWORK.beta, NETWORK.latency)
    assert one["offload"] and one["cores"] == 0 and one["name"].startswith("measured for tcp, over a network")


def explained(comm):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    other = comm.dup()
    other._plan_override = "ring", 3
    x, y = np.full(999, comm.rank + 1.0), np.full(999, comm.rank + 1.0)
    comm.allreduce(x)
    other.allreduce(y)
    assert (x == y).all() and x[0] == 6
    comm.barrier()
    return lines


def test_the_log_says_which_and_why(tmp_path):
    calibration.save(str(tmp_path), {"shm": SHM})
    env = {"HRDMA_TRANSPORT": "shm", "HRDMA_LOG_LEVEL": "info", "HRDMA_CACHE_DIR": str(tmp_path)}
    for lines in harness.ranks(explained, 3, env=env):
        chosen, forced = (line for line in lines if line.startswith("allreduce"))
        assert "allreduce of 7.805 KiB on 3 ranks: " in chosen and "else" in chosen and "(measured for shm)" in chosen
        assert "ring in 3 parts" in forced and "no other" in forced


def through_messages(rank, folder, staged, registered, apart):
    """How the halves of an allreduce went: unasked, in pieces, read in place; what was put back."""
    os.environ["HRDMA_CACHE_DIR"] = folder
    calibration.measure = lambda name: replace(DEFAULT_COST[name], staged=staged)
    os.sched_getaffinity = lambda _: {0, 1}  # however many there are: as if each rank had its own
    found = []
    with hrdma.init() as comm:
        for elements in (1 << 16, 1 << 18, 1 << 20):
            x, out = ((hrdma.empty if registered else np.empty)(elements, "float32") for _ in range(2))
            x[:] = np.arange(elements) + comm.rank
            before = comm.stats()["counters"]
            total = comm.allreduce(x, out=out if apart else None)
            after = comm.stats()["counters"]
            assert (total == 2 * np.arange(elements) + 1).all()
            kinds = ("messages_eager", "transfers_segments", "transfers_pulled", "transfers_returned")
            found.append([after[what] - before[what] for what in kinds])
    return found


@pytest.mark.parametrize("staged", (0, 512 << 10))
def test_what_is_changed_goes_in_messages_where_that_was_faster(tmp_path, staged):
    env = {"HRDMA_TRANSPORT": "shm"}
    how = {"folder": str(tmp_path), "staged": staged, "registered": True, "apart": True}
    for found in harness.ranks(through_messages, 2, init=False, env=env, **how):
        assert [pulled for *_, pulled, _ in found] == ([0, 0, 1] if staged else [1, 1, 1])  # the other is borrowed
        assert [unasked + pieces for unasked, pieces, *_ in found] == ([1, 1, 0] if staged else [0, 0, 0])


@pytest.mark.parametrize("staged", (0, 512 << 10))
def test_registered_memory_gets_its_result_without_a_message(tmp_path, staged):
    """Whoever reduces a chunk writes the result back to where it lies, however dear it is to read what is changed."""
    how = {"folder": str(tmp_path), "staged": staged, "registered": True, "apart": False}
    for found in harness.ranks(through_messages, 2, init=False, env={"HRDMA_TRANSPORT": "shm"}, **how):
        assert found == [[0, 0, 1, 1]] * 3


def test_what_is_changed_in_plain_memory_goes_in_messages_unless_it_is_long(tmp_path):
    """Its core has just written it, and nobody waits where both send."""
    how = {"folder": str(tmp_path), "staged": 0, "registered": False, "apart": False}
    for found in harness.ranks(through_messages, 2, init=False, env={"HRDMA_TRANSPORT": "shm"}, **how):
        assert found[:2] == [[2, 0, 0, 0], [0, 2, 0, 0]]
        unasked, pieces, read, returned = found[2]
        assert unasked == returned == 0 and pieces + read == 2

"""What asks the peers: jobs of ranks, programs, environments; what hangs or fails is ended and says why. No peer is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from beside import across, environments, job
from beside.cells import Cell
from beside.environments import ROOT, Unavailable
from beside.job import Failure, Job, Program, Start, combine, refuse_shortcut

TOY = [sys.executable, str(Path(__file__).with_name("toy_rank.py")), "{socket}"]
PATHS = os.pathsep.join(str(ROOT / folder) for folder in (".", "benchmarks/peers"))
CELL = Cell("shm", 1, "allreduce", 4096)


def toy(fault: str = "", ranks: int = 1) -> Job:
    env = {"PYTHONPATH": PATHS, "TOY_FAULT": fault}
    return Job(Start([TOY] * ranks, env, [{"RANK": str(rank)} for rank in range(ranks)]), ranks)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(job, "END_SECONDS", 1.0)


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} goes on"
        time.sleep(0.01)


# -- jobs --


def test_a_job_answers_cell_after_cell_and_ends():
    with toy() as ranks:
        assert ranks.version == "toy 1"
        for nbytes in (4096, 1 << 20):
            found = ranks.measure(Cell("shm", 1, "allreduce", nbytes), 0.01, 4, 30)
            assert len(found.seconds) == 4 and all(0 < seconds < 1 for seconds in found.seconds)
            assert found.wrong == 0 and found.operations >= 4
        (process,) = ranks._processes
    assert process.poll() is not None


def test_ranks_agree_on_their_repetitions():
    with toy(ranks=2) as ranks:
        assert len(ranks.measure(CELL, 0.01, 3, 30).seconds) == 3


def test_a_wrong_element_of_a_result_is_counted():
    with toy("wrong") as ranks:
        assert ranks.measure(CELL, 0.01, 2, 30).wrong == 1


def test_a_changed_input_is_wrong_but_where_the_peer_may_change_it():
    with toy() as ranks:
        assert ranks.measure(Cell("shm", 1, "allgather", 4096), 0.01, 2, 30).wrong == 0
    with toy("spoils") as ranks:
        assert ranks.measure(Cell("shm", 1, "allgather", 4096), 0.01, 2, 30).wrong == 1
        assert ranks.measure(Cell("shm", 1, "alltoall", 4096), 0.01, 2, 30).wrong == 0


def test_a_job_whose_program_is_missing_says_so():
    with pytest.raises(Failure, match="/nowhere/mpiexec: No such file"):
        Job(Start([["/nowhere/mpiexec", "{socket}"]]), 1)


def test_an_error_on_a_rank_is_told():
    with toy("raises") as ranks, pytest.raises(Failure, match="rank 0: OSError: the cable is out"):
        ranks.measure(CELL, 0.01, 2, 30)


def test_what_hangs_is_ended_in_time_with_what_it_started():
    with toy("hangs") as ranks:
        begin = time.monotonic()
        with pytest.raises(Failure, match=r"0 of 1 ranks answered in time; \d+"):
            ranks.measure(CELL, 0.01, 2, 1.0)
        child = int(ranks._said())
        assert Path(f"/proc/{child}").exists()
    assert time.monotonic() - begin < 30
    wait_for_end(child)


def test_a_job_that_does_not_start_says_what_it_said():
    with pytest.raises(Failure, match=r"its launcher ended: no licence|a rank ended: no licence"):
        toy("leaves")


def test_ranks_that_never_come_are_given_up(monkeypatch):
    monkeypatch.setattr(job, "START_SECONDS", 1.0)
    with pytest.raises(Failure, match="0 of 1 ranks answered in time"):
        toy("never ready")


def test_the_slowest_rank_counts():
    found = combine([{"seconds": [1.0, 5.0], "wrong": 0}, {"seconds": [2.0, 3.0], "wrong": 7}])
    assert found.seconds == [2.0, 5.0] and found.wrong == 7


@pytest.mark.parametrize("answers", [[{"seconds": [1.0], "wrong": 0}, {"seconds": [], "wrong": 0}], [{"error": "no"}]])
def test_ranks_that_contradict_each_other_give_no_figure(answers):
    with pytest.raises(Failure):
        combine(answers)


def test_shared_memory_that_was_left_on_is_found():
    cell = Cell("tcp", 2, "pingpong", 4096)
    refuse_shortcut(cell, 100, 100 * 4200)
    refuse_shortcut(Cell("shm", 2, "pingpong", 4096), 100, 0)
    with pytest.raises(Failure, match="not over TCP: the network carried 4096 bytes for 100 operations of 409600"):
        refuse_shortcut(cell, 100, 4096)


def test_ranks_that_are_apart_are_given_a_file(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    env = {"PYTHONPATH": PATHS, "TOY_FAULT": ""}
    with Job(Start([TOY], env, [{"RANK": "0"}], apart=True), 1) as started:
        assert [file.is_socket() for file in tmp_path.rglob("socket")] == [True]
        assert started.measure(CELL, 0.01, 2, 10.0).wrong == 0
    assert not list(tmp_path.iterdir())


def test_what_stands_in_place_of_ssh_finds_the_namespace():
    agent = ROOT / "benchmarks" / "peers" / "into_namespace"

    def called(places: str) -> subprocess.CompletedProcess[str]:
        command = [str(agent), "-x", "-q", "10.0.0.2", "echo", "'a  b'", "$WORD"]
        env = {**os.environ, "BENCH_NAMESPACES": places, "WORD": "c"}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=20)

    done = called("10.0.0.1=/nowhere")
    assert done.returncode == 1 and done.stderr == "into_namespace: no namespace of 10.0.0.2\n"
    if across.possible():  # the own one will do
        done = called("10.0.0.1=/nowhere 10.0.0.2=/proc/self/ns/net")
        assert (done.returncode, done.stdout) == (0, "a  b c\n"), done.stderr


def test_a_job_on_tcp_that_sends_nothing_has_no_figure():
    with toy() as ranks, pytest.raises(Failure, match="not over TCP"):
        ranks.measure(Cell("tcp", 1, "allreduce", 64 << 20), 0.1, 2, 30)


# -- environments --


def test_a_command_that_takes_too_long_is_ended_with_its_children(tmp_path):
    begin = time.monotonic()
    with pytest.raises(Unavailable, match=r"no end within 0\.5 s"):
        environments.run(["sh", "-c", f"sleep 600 & echo $! >{tmp_path}/pid; wait"], 0.5)
    assert time.monotonic() - begin < 10
    child = int((tmp_path / "pid").read_text())
    wait_for_end(child)


def test_a_command_that_fails_says_why():
    with pytest.raises(Unavailable, match="ERROR: no such thing"):
        environments.run(["sh", "-c", "echo ERROR: no such thing >&2; echo goodbye >&2; exit 3"], 5)
    with pytest.raises(Unavailable, match="No such file"):
        environments.run(["/nonexistent/program"], 5)


def test_an_environment_is_made_once_and_again_when_it_should_hold_something_else(tmp_path, monkeypatch):
    commands: list[list[str]] = []

    def pretend(command, seconds, env=None):
        commands.append([str(word) for word in command])
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True)
        elif "broken" in command:
            raise Unavailable("ERROR: no matching distribution")
        return ""

    monkeypatch.setattr(environments, "ROOT", tmp_path)
    monkeypatch.setattr(environments, "HOME", tmp_path / "peers")
    monkeypatch.setattr(environments, "run", pretend)
    said: list[str] = []
    for packages in (["one"], ["one"], ["one", "two"]):
        assert environments.environment("x", packages, said.append) == tmp_path / "peers" / "x"
    assert said == ["installing one into peers/x", "installing one two into peers/x"]
    with pytest.raises(Unavailable, match="no matching"):
        environments.environment("x", ["broken"], said.append)
    with pytest.raises(Unavailable):  # a failure is not kept as a success
        environments.environment("x", ["broken"], said.append)


# -- the programs that measure the machine's limits --


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Programs are compiled into a folder of the test's own."""
    monkeypatch.setattr(environments, "HOME", tmp_path / "peers")
    return tmp_path


LIMITS = [
    ("limit_shm", "pingpong", 8, 2),
    ("limit_shm", "pingpong", 1 << 16, 2),
    ("limit_shm", "bandwidth", 1 << 20, 2),
    ("limit_shm", "allreduce", 1 << 16, 2),
    ("limit_shm", "allreduce", 12 << 20, 3),
    ("limit_shm", "alltoall", 1 << 16, 2),
    ("limit_shm", "alltoall", 12 << 20, 3),
    ("limit_tcp", "pingpong", 8, 2),
    ("limit_tcp", "bandwidth", 1 << 20, 2),
]


@pytest.mark.slow
def test_the_limits_move_what_they_should(home):
    for name, case, nbytes, world in LIMITS:
        found = Program(environments.compiled(name)).measure(Cell("shm", world, case, nbytes), 0.01, 3, 30)
        assert len(found.seconds) == 3 and found.wrong == 0, (name, case, nbytes)
    for name in ("limit_shm", "limit_tcp"):
        blocking = Program(environments.compiled(name), "sleep").measure(Cell("shm", 2, "pingpong", 8), 0.01, 2, 30)
        assert blocking.wrong == 0
    with pytest.raises(Failure, match="no case allgather"):
        Program(environments.compiled("limit_shm")).measure(Cell("shm", 2, "allgather", 64), 0.01, 2, 30)


SPOILED = [
    ("limit_shm", "allreduce", "sum[i] += x[i];", "sum[i] += 2 * x[i];"),
    ("limit_shm", "pingpong", "memcpy(slot->payload, mine, nbytes)", "memcpy(slot->payload, mine, nbytes / 2)"),
    ("limit_shm", "bandwidth", "memcpy(mine, buffers[0], nbytes)", "memcpy(mine, buffers[0], nbytes / 2)"),
    ("limit_shm", "alltoall", "r = (me + i) % ranks", "r = me"),
    ("limit_tcp", "bandwidth", "send(fd, x + done,", "send(fd, out + done,"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case", "right", "wrong"), SPOILED, ids=lambda value: value[:9])
def test_a_limit_that_does_less_than_it_should_is_found_out(tmp_path, name, case, right, wrong):
    source = (ROOT / "benchmarks" / "core" / f"{name}.c").read_text()
    assert source.count(right) == 1
    (tmp_path / "spoiled.c").write_text(source.replace(right, wrong))
    include = f"-I{ROOT / 'benchmarks' / 'core'}"
    environments.run(["cc", "-O1", "-pthread", include, tmp_path / "spoiled.c", "-o", tmp_path / "spoiled"], 60)
    found = Program(tmp_path / "spoiled").measure(Cell("shm", 2, case, 1 << 12), 0.01, 2, 30)
    assert found.wrong > 0


def test_a_preloaded_library_sets_the_congestion_control(home):
    library = environments.compiled("congestion", "-shared", "-fPIC")
    text = "import socket; print(socket.socket().getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16))"
    command = [sys.executable, "-c", text]

    def under(control: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "LD_PRELOAD": str(library), "BENCH_CONGESTION": control}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)

    assert "reno" in under("reno").stdout
    assert under("nonesuch").returncode == 1 and "congestion control nonesuch" in under("nonesuch").stderr


# -- the whole of it, with hrdma alone --


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp", "namespaces"])
def test_hrdma_alone_at_small_sizes(tmp_path, transport):
    if transport == "namespaces" and not across.possible():
        pytest.skip("needs root and CAP_NET_ADMIN, CAP_SYS_ADMIN")
    files = {name: tmp_path / name for name in ("json", "markdown")}
    words = f"--transport {transport} --world 2 --cases pingpong,alltoall --sizes 4K --peers hrdma,hrdma-numpy --rounds 2 --more 0"
    command = [sys.executable, str(ROOT / "benchmarks" / "side_by_side.py"), *words.split(), "--seconds", "0.01"]
    for name, path in files.items():
        command += [f"--{name}", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip("\n") == files["markdown"].read_text().rstrip("\n")
    found = json.loads(files["json"].read_text())
    assert found["wrong"] == 0 and not found["failures"]
    measured = {(figure["row"], figure["case"]) for figure in found["figures"]}
    assert measured == {(row, case) for row in ("hrdma", "hrdma-numpy") for case in ("pingpong", "alltoall")}
    assert all(len(figure["rounds"]) == 2 for figure in found["figures"])

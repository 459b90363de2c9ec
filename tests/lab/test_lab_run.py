"""`hrdma lab` as users call it; jobs of the library in a lab, and what carried their bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lab_jobs import environment

from hrdma.lab.lab import Lab
from hrdma.topo.fabrics import parse

JOB = str(Path(__file__).with_name("lab_jobs.py"))
SHOW = """
import json, os, socket
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HRDMA_TOKEN")
print(json.dumps([os.stat("/proc/self/ns/net").st_ino, *map(os.environ.get, names)]))
"""


def inode(lab: Lab, host: int) -> int:
    return os.stat(lab.namespace(host)).st_ino


def values(output: str) -> list:
    """What ranks have printed, in the order of the ranks."""
    lines = sorted(output.splitlines(), key=lambda line: int(line[1 : line.index("]")]))
    return [json.loads(line.partition("] ")[2]) for line in lines]


def words(value: object) -> str | None:
    """Of a case, for its name: the arguments."""
    return " ".join(value) if isinstance(value, list) else None


# a megabyte from rank 0 to rank 1; how often rank 1 slept meanwhile
SLEEPS = """
import numpy, hrdma
with hrdma.init() as comm:
    x = numpy.full(1 << 20, 1 - comm.rank, numpy.uint8)
    comm.barrier()
    before = comm.stats()["counters"]["sleeps"]
    comm.recv(x, 0) if comm.rank else comm.send(x, 1)
    print([comm.stats()["counters"]["sleeps"] - before, int(x.sum())])
"""

# an allreduce while both ranks compute; where the background thread may run: meanwhile, and when it has nothing more to do
TURNS = """
import contextlib, json, os, pathlib, time, numpy, hrdma
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
def may_run():  # it names itself when it first runs, and a list of threads that changes meanwhile may lack it
    until = time.monotonic() + 5
    while time.monotonic() < until:
        for task in pathlib.Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                if (task / "comm").read_text() == "hrdma-progress\\n":
                    return tuple(sorted(os.sched_getaffinity(int(task.name))))
        time.sleep(0.001)
    raise SystemExit("there is no thread hrdma-progress")
with hrdma.init() as comm:
    x, found = numpy.ones(1 << 20, numpy.float32), set()
    request = comm.allreduce(x, async_op=True)
    while not request.done:
        found.add(may_run())
        until = time.monotonic() + 0.002
        while time.monotonic() < until: pass
    comm.barrier()
    right, until = bool((x == comm.size).all()), time.monotonic() + 20
    while len(may_run()) < 2 and time.monotonic() < until: time.sleep(0.01)
    print(json.dumps([sorted(found), may_run(), right]))
"""


# --- run ---


def test_run_starts_a_rank_on_each_host_with_what_it_needs_to_meet(lab, hrdma):
    around = environment(RANK="7", MASTER_ADDR="192.0.2.1", MASTER_PORT="1")  # of another launcher: not for these ranks
    done = hrdma("run", "--name", lab.name, "--", sys.executable, "-c", SHOW, env=around)
    assert (done.returncode, done.stderr) == (0, "")
    found = values(done.stdout)
    assert [one[0] for one in found] == [inode(lab, host) for host in range(4)]
    assert [one[1:6] for one in found] == [[str(rank), "4", "0", "1", lab.addresses(0)[0]] for rank in range(4)]
    ports, tokens = {one[6] for one in found}, {one[7] for one in found}
    assert len(ports) == len(tokens) == 1 and int(ports.pop()) > 1023 and len(tokens.pop()) >= 32


def test_several_ranks_on_each_host(lab, hrdma):
    done = hrdma("run", "--name", lab.name, "--per-host", "2", "--", sys.executable, "-c", SHOW)
    found = values(done.stdout)
    assert [one[0] for one in found] == [inode(lab, rank // 2) for rank in range(8)]
    assert [one[1:5] for one in found] == [[str(rank), "8", str(rank % 2), "2"] for rank in range(8)]


def test_a_cluster_has_its_own_number_of_ranks_on_each_host(name, hrdma):
    with Lab.up(parse("cluster:2,3,1", rate="100mbit", latency=0), name) as own:
        found = values(hrdma("run", "--name", name, "--", sys.executable, "-c", SHOW).stdout)
        assert [one[0] for one in found] == [inode(own, rank // 3) for rank in range(6)]


@pytest.mark.parametrize(
    ("said", "seen"),
    [
        ({}, "0 cc=system"),
        ({"HRDMA_SPIN_US": "50", "HRDMA_TCP": "cc=reno"}, "50 cc=reno"),
        ({"HRDMA_TCP": "sndbuf=4M"}, "0 sndbuf=4M,cc=system"),
        ({"HRDMA_TCP": ""}, "0 cc=system"),
    ],
)
def test_ranks_are_as_on_machines_of_their_own_unless_they_are_told_to(lab, hrdma, said, seen):
    """The processors are those of all hosts, so nobody spins; and a network is between them."""
    text = "import os; print(os.environ['HRDMA_SPIN_US'], os.environ['HRDMA_TCP'])"
    done = hrdma("run", "--name", lab.name, "--", sys.executable, "-c", text, env=environment(**said))
    assert [line.partition("] ")[2] for line in done.stdout.splitlines()] == [seen] * 4


def test_a_slow_link_does_not_wake_its_receiver_for_every_packet(name, hrdma):
    with Lab.up(parse("star:2", rate="40mbit", latency=0), name):
        done = hrdma("run", "--name", name, "--", sys.executable, "-c", SLEEPS)
    assert done.returncode == 0, done.stderr
    sleeps, total = values(done.stdout)[1]
    assert total == 1 << 20
    assert 10 < sleeps < (1 << 20) / 1448 / 2  # it came in 724 packets, each of which woke it once


def test_when_one_rank_fails_all_are_stopped(lab, hrdma):
    text = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '2' else time.sleep(60)"
    start = time.monotonic()
    done = hrdma("run", "--name", lab.name, "--", sys.executable, "-c", text)
    assert done.returncode == 3 and time.monotonic() - start < 20
    assert "rank 2 exited with 3; stopping the others" in done.stderr
    assert not any(node["pids"] for node in lab.status()["nodes"])


def test_run_has_a_time_limit(lab, hrdma):
    done = hrdma("run", "--name", lab.name, "--timeout", "0.5", "--", "sleep", "60")
    assert done.returncode == 124
    assert not any(node["pids"] for node in lab.status()["nodes"])


def test_ranks_end_with_a_launcher_that_is_killed(lab):
    command = [sys.executable, "-m", "hrdma", "lab", "run", "--name", lab.name, "--", "sleep", "60"]
    process = subprocess.Popen(command, env=environment())
    end = time.monotonic() + 20

    def running() -> int:
        return sum(len(node["pids"]) for node in lab.status()["nodes"])

    while running() < 4 and time.monotonic() < end:
        time.sleep(0.05)
    assert running() == 4
    process.send_signal(signal.SIGKILL)
    process.wait()
    while running() and time.monotonic() < end:
        time.sleep(0.05)
    assert running() == 0


@pytest.mark.parametrize(("arguments", "code"), [(["true"], 0), (["false"], 1), (["no-such-command"], 127)])
def test_exit_codes_of_run_and_exec(lab, hrdma, arguments, code):
    assert hrdma("run", "--name", lab.name, "--", *arguments).returncode == code
    assert hrdma("exec", "--name", lab.name, "h1", "--", *arguments).returncode == code


def test_a_rank_that_cannot_enter_its_namespace_says_why(tmp_path):
    """Here the file is none; elsewhere it is a right that is missing."""
    text = "import sys; from hrdma import launch; sys.exit(launch.run(['true'], ranks=1, namespaces=sys.argv[1:]))"
    wrong = tmp_path / "none"
    wrong.touch()
    done = subprocess.run([sys.executable, "-c", text, str(wrong)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 126
    assert "[0] cannot enter the network namespace of the rank: setns: Invalid argument" in done.stderr


def test_a_lab_of_one_host(name, hrdma):
    with Lab.up(parse("star:1", rate="50mbit", latency=0), name) as own:
        done = hrdma("run", "--name", name, "--", JOB, "sum")
        assert done.returncode == 0, done.stderr
        assert values(done.stdout) == [{"rank": 0, "moved": {}}]
        assert [node["name"] for node in own.status()["nodes"]] == ["h0", "s0"]


# --- jobs of the library ---


def test_shared_memory_carries_nothing_between_hosts(lab, hrdma):
    done = hrdma("run", "--name", lab.name, "--", JOB, "sum")
    assert done.returncode == 0, done.stderr
    for one in values(done.stdout):
        assert list(one["moved"]) == ["tcp"]
        assert one["moved"]["tcp"] >= 8000


def test_ranks_of_one_host_use_its_memory_and_others_do_not(lab, hrdma):
    done = hrdma("run", "--name", lab.name, "--per-host", "2", "--", JOB, "sum")
    assert done.returncode == 0, done.stderr
    assert all(set(one["moved"]) == {"shm", "tcp"} for one in values(done.stdout))


def test_shared_memory_between_namespaces_is_noticed_on_every_rank(lab, hrdma):
    """Rank 1 shares memory with rank 0, and then goes to another host."""
    done = hrdma("run", "--name", lab.name, "--per-host", "2", "--", JOB, "astray", lab.namespace(3))
    assert done.returncode == 0, done.stderr
    text = "ranks 0 and 1 are on different hosts of the lab and exchange through shared memory"
    assert values(done.stdout) == [{"error": text}] * 8


@pytest.mark.parametrize("hosts", [2, 3])
def test_background_threads_of_two_ranks_share_two_processors_by_turns(name, hrdma, hosts):
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("needs two processors")
    with Lab.up(parse(f"mesh:{hosts}", rate="100mbit", latency=0), name):
        done = hrdma("run", "--name", name, "--", sys.executable, "-c", TURNS)
    assert done.returncode == 0 and not done.stderr, done.stderr
    alone = [[cpu] for cpu in cpus]
    for found, later, right in values(done.stdout):
        assert right and later == cpus
        assert [cpu for cpu in found if cpu != cpus] == (alone if hosts == 2 else [])


# --- status, exec, up ---


def test_status_counts_what_was_sent(lab, hrdma):
    def sent() -> list[int]:
        (entry,) = json.loads(hrdma("status", "--name", lab.name, "--json").stdout)
        return [nic["tx_bytes"] for nic in entry["nodes"][0]["nics"]]

    before = sent()
    text = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(bytes(1000), ('{}', 9))"
    ping = text.format(lab.addresses(1)[0])
    assert hrdma("exec", "--name", lab.name, "0", "--", sys.executable, "-c", ping).returncode == 0
    until = time.monotonic() + 10.0  # it leaves once its neighbour has said who it is
    while (found := [b - a for a, b in zip(before, sent())])[0] < 1042 and time.monotonic() < until:
        time.sleep(0.01)
    first, second = found
    assert first >= 1042 > 500 > second


def test_status_is_a_table_for_people(lab, hrdma):
    shown = hrdma("status", "--name", lab.name).stdout
    for word in (f"lab {lab.name}: bcube:2,2", "h3", "nic1", lab.addresses(3)[1] + "/24", "s3.port1", "50"):
        assert word in shown
    assert shown.count("nic0") == 4


def test_status_of_a_lab_that_is_not_there(root, hrdma):
    done = hrdma("status", "--name", "nosuchlab")
    assert done.returncode == 1 and "there is no lab 'nosuchlab'" in done.stderr


def test_exec_is_inside(lab, hrdma, iproute2):
    done = hrdma("exec", "--name", lab.name, "h2", "--", "ip", "-j", "-4", "addr", "show", "nic1")
    assert json.loads(done.stdout)[0]["addr_info"][0]["local"] == lab.addresses(2)[1]
    done = hrdma("exec", "--name", lab.name, "h9", "--", "true")
    assert done.returncode == 2
    assert f"lab '{lab.name}' has no node 'h9'; it has h0 to h3 and s0 to s3" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "shown", "rate"),
    [
        (
            ["bcube", "--n", "2", "--levels", "1", "--rate", "80mbit"],
            "bcube:2,1, 2 hosts with 2 NICs, 1 switches",
            80e6,
        ),
        (["ring", "--n", "2"], "ring:2, 2 hosts with 2 NICs, 0 switches", 200e6),
        (["torus", "--dims", "2x2", "--rate", "1gbit"], "torus:2x2, 4 hosts with 8 NICs, 0 switches", 1e9),
        (["mine.toml"], "mine, 2 hosts with 2 NICs, 0 switches", 30e6),
        (["mine.toml", "--rate", "40mbit"], "mine, 2 hosts with 2 NICs, 0 switches", 40e6),
        (["star:1"], "star:1, 1 hosts with 1 NICs, 1 switches", 200e6),
    ],
    ids=words,
)
def test_up_from_the_command_line(name, hrdma, tmp_path, arguments, shown, rate):
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\nhosts = 2\nswitches = 0\n[[link]]\na = [0, 0]\nb = [1, 0]\nrate = "30mbit"\nlatency = 0\n'
    )
    done = hrdma("up", *arguments, "--name", name, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"lab {name} is up: {shown}. Next:\n  hrdma lab run --name {name} -- COMMAND")
    assert {nic["rate_bit_s"] for node in Lab.find(name).nodes for nic in node["nics"]} == {rate}
    assert hrdma("up", "ring:2", "--name", name).returncode == 1  # taken
    assert hrdma("down", "--name", name).stdout == f"lab {name} is down\n"
    assert hrdma("down", "--name", name).stdout == f"there was no lab {name}\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["circle", "--n", "3"], "unknown fabric 'circle'"),
        (["ring", "--n", "1"], "number of hosts of a ring is 1"),
        (["torus", "--dims", "1x4"], "dimension 0 of a torus is 1"),
        (["ring:3", "--rate", "fast"], "rate 'fast' is not a number with a unit"),
        (["ring:3", "--rate", "0"], "rate '0' is not a number with a unit"),
        (["ring:3", "--rate", "0bit"], "rate '0bit' is zero"),
        (["ring:3", "--rate", "10gbps"], "for bits per second write 10gbit"),
        (["ring:3", "--rate", "10MB"], "rate '10MB' has the unknown unit 'MB'"),
        (["ring:3", "--latency", "1mbit"], "time '1mbit' has the unknown unit 'mbit'"),
        (["bcube", "--levels", "2"], "bcube takes --n with --levels or --dims, not --levels"),
        (["ring", "--levels", "4"], "ring takes --n, not --levels"),
        (["torus", "--n", "3", "--dims", "3x3"], "torus takes --dims, not --n with --dims"),
        (["leaf_spine", "--n", "2"], "leaf_spine takes its numbers behind the name, as in leaf_spine:2,2,2, not --n"),
        (["ring:3", "--n", "4"], "ring:3 says what the fabric is: leave out --n"),
        (["ring:3", "--rate", "1tbit"], "a lab has 100000 to"),
        (["star:100"], "has 100 hosts: a lab has 1 to 64"),
        (["ring:3", "--name", "No"], "lab name 'No'"),
        (["ring:3", "--packet", "1MiB"], "packets of 1048576 bytes: a lab's NICs take 1514 to 524280 as one"),
        (["absent.toml"], "absent.toml"),
        (["mine.toml", "--n", "3"], "mine.toml says what the fabric is: leave out --n"),
    ],
    ids=words,
)
def test_up_refuses_with_the_reason(name, hrdma, arguments, complaint):
    done = hrdma("up", *(arguments if "--name" in arguments else [*arguments, "--name", name]))
    assert done.returncode == (1 if "absent.toml" in arguments else 2)
    assert complaint in " ".join(done.stderr.split()) and done.stderr.count("\n") <= 5

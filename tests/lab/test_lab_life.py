"""Coming up, going down, crashing in between; names; what runs in a lab ends with it; who may do all this."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from lab_jobs import environment
from windows import one_good

from hrdma.control.link import listen
from hrdma.lab import lab as labs
from hrdma.lab import namespaces
from hrdma.lab.lab import Lab
from hrdma.places import reserve_port
from hrdma.topo.fabrics import parse

TWO = parse("ring:2", rate="50mbit", latency=0)


def traces(name: str) -> list[str]:
    """What the machine still has of a lab."""
    folders = (namespaces.FOLDER, labs.STATES)
    return sorted(entry for folder in folders for entry in os.listdir(folder) if name in entry)


def wait_for(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that in time"
        time.sleep(0.01)


# --- up and down ---


def test_up_and_down_leave_nothing(name, iproute2):
    with Lab.up(TWO, name) as lab:
        assert traces(name) == [f"hrdma-{name}-h0", f"hrdma-{name}-h1", f"{name}.json"]
        assert Lab.find(name).nodes == lab.nodes
    assert traces(name) == []
    names = {link["ifname"] for link in json.loads(subprocess.check_output(["ip", "-j", "link"]))}
    assert not names & {"nic0", "nic1"}
    assert labs.down(name) is False  # again is no error
    with pytest.raises(FileNotFoundError, match=f"there is no lab '{name}'"):
        Lab.find(name)


def test_a_name_that_is_taken_is_refused_and_its_lab_stays(name):
    with Lab.up(TWO, name) as lab:
        with pytest.raises(FileExistsError, match=rf"there is a lab '{name}'.* down --name {name}"):
            Lab.up(TWO, name)
        assert len(lab.status()["nodes"]) == 2


@pytest.mark.parametrize("wrong", ["", "Lab", "a/b", "../x", "-a", "a b", "x" * 33])
def test_names_that_cannot_be(root, wrong):
    with pytest.raises(ValueError, match="lower-case letters, digits and hyphens"):
        Lab.up(TWO, wrong)
    assert labs.down(wrong) is False
    with pytest.raises(FileNotFoundError):
        Lab.find(wrong)


def test_labs_at_once_have_networks_of_their_own(lab, name):
    with Lab.up(parse("bcube:2,2", rate="50mbit", latency=0), name) as other:
        mine, theirs = ({a for host in range(4) for a in each.addresses(host)} for each in (lab, other))
        assert len(mine) == len(theirs) == 8 and not mine & theirs
        assert {name, lab.name} <= set(labs.labs())
    assert len(lab.status()["nodes"]) == 8  # the other's end was not ours


def test_without_its_file_a_lab_is_found_by_name_and_removed(name):
    Lab.up(TWO, name)
    os.unlink(f"{labs.STATES}/{name}.json")
    with pytest.raises(RuntimeError, match=rf"only a part is there: remove it \(hrdma lab down --name {name}\)"):
        Lab.find(name)
    with pytest.raises(FileExistsError):
        Lab.up(TWO, name)
    assert labs.down(name) is True
    assert traces(name) == []


def test_a_lab_whose_namespaces_are_gone_is_removed(name):
    Lab.up(TWO, name)
    for node in ("h0", "h1"):
        namespaces.remove(name, node)
    with pytest.raises(RuntimeError, match="only a part"):
        Lab.find(name)
    assert labs.down(name) is True
    assert traces(name) == []


def test_a_namespace_of_which_only_the_name_was_made_is_removed(name):
    file = namespaces.path(name, "h0")
    os.close(os.open(file, os.O_CREAT | os.O_EXCL, 0))
    assert name in labs.labs()
    assert labs.down(name) is True
    assert traces(name) == []


def test_of_two_that_want_a_name_at_once_one_gets_it(name):
    command = [sys.executable, "-m", "hrdma", "lab", "up", "ring:3", "--name", name]
    both = [
        subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in "ab"
    ]
    assert sorted(process.wait(30) for process in both) == [0, 1]
    assert Lab.find(name).hosts == 3


def test_a_failure_on_the_way_leaves_nothing(name, monkeypatch):
    from hrdma.lab import wiring

    def fail(*_: object) -> None:
        raise RuntimeError("the kernel says no")

    monkeypatch.setattr(wiring, "_configure", fail)
    with pytest.raises(RuntimeError, match="the kernel says no"):
        Lab.up(TWO, name)
    assert traces(name) == []


def test_what_is_left_when_its_maker_is_killed_is_removed_by_all(name, hrdma, monkeypatch):
    text = (
        "import os, signal, sys\n"
        "from hrdma.lab import lab, wiring\n"
        "from hrdma.topo.fabrics import parse\n"
        "wiring._configure = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "lab.Lab.up(parse('ring:3', rate=5e7, latency=0), sys.argv[1])\n"
    )
    maker = subprocess.run([sys.executable, "-c", text, name], env=environment(), timeout=30)
    assert maker.returncode == -signal.SIGKILL
    assert traces(name) == [f"hrdma-{name}-h{number}" for number in range(3)]
    (entry,) = json.loads(hrdma("status", "--name", name, "--json").stdout)
    assert entry["complete"] is False

    from click.testing import CliRunner

    from hrdma.cli.lab import command

    monkeypatch.setattr(
        labs, "labs", lambda every=labs.labs: [one for one in every() if one == name]
    )  # not others' labs
    done = CliRunner().invoke(command, ["down", "--all"])
    assert (done.exit_code, done.output) == (0, f"lab {name} is down\n")
    assert traces(name) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_up_that_is_interrupted_leaves_nothing(name, number):
    command = [sys.executable, "-m", "hrdma", "lab", "up", "fat_tree:4", "--name", name]

    def interrupt() -> int:
        """Exit code; 0 where it was up before the signal came."""
        with subprocess.Popen(
            command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            wait_for(lambda: len(traces(name)) > 5 or process.poll() is not None)
            process.send_signal(number)
            code = process.wait(20)
        if code == 0:
            labs.down(name)
        assert code in (0, 128 + number)
        assert traces(name) == []
        return code

    one_good(interrupt, lambda code: code == 128 + number)


INTERRUPTED = """
import os, signal, sys, time
from hrdma.lab import namespaces
from hrdma.lab.lab import Lab, down
from hrdma.topo.fabrics import parse

def signalled(function):
    def call(*arguments):
        os.kill(os.getpid(), int(sys.argv[2]))
        time.sleep(0.3)
        return function(*arguments)
    return call

def main():
    number = int(sys.argv[2])  # may have been ignored by who started the tests
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    {what}
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_removal_that_is_interrupted_goes_on_to_its_end(name, number):
    """The signal comes before every namespace that is removed, and does what it does when all are."""
    Lab.up(TWO, name)
    text = (
        INTERRUPTED.format(what="namespaces.remove = signalled(namespaces.remove)\n    down(sys.argv[1])") + "main()\n"
    )
    command = [sys.executable, "-c", text, name, str(int(number))]
    done = subprocess.run(command, env=environment(), timeout=30, stderr=subprocess.DEVNULL)
    assert done.returncode == -number
    assert traces(name) == []


@pytest.mark.parametrize("twice", [False, True])
def test_what_a_thread_still_makes_when_up_is_interrupted_is_removed(name, twice):
    """The signal comes while a namespace is being made; then also while what was made is removed."""
    what = "namespaces._mount = signalled(namespaces._mount)"
    if twice:
        what += "; namespaces.remove = signalled(namespaces.remove)"
    text = INTERRUPTED.format(what=what) + (
        "main()\n"
        "from hrdma.cli.lab import command\n"
        "command(['up', 'ring:2', '--name', sys.argv[1]])\n"
    )  # fmt: skip
    number = signal.SIGTERM
    done = subprocess.run([sys.executable, "-c", text, name, str(int(number))], env=environment(), timeout=30)
    assert done.returncode == 128 + number
    assert traces(name) == []


# --- files and names that are not ours ---


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b"{}", b'{"version": 99}'], ids=repr)
def test_a_file_that_says_nothing_is_a_part_and_is_removed(name, hrdma, content):
    Lab.up(TWO, name)
    with open(f"{labs.STATES}/{name}.json", "wb") as file:
        file.write(content)
    with pytest.raises(RuntimeError, match="only a part is there"):
        Lab.find(name)
    shown = json.loads(hrdma("status", "--json").stdout)  # of all labs: one that is broken hides no other
    assert [entry["complete"] for entry in shown if entry["name"] == name] == [False]
    with Lab.up(TWO, f"{name}-2"):
        assert labs.down(name) is True
    assert traces(name) == []


def test_a_file_of_another_version_is_not_read(name):
    with Lab.up(TWO, name):
        path = f"{labs.STATES}/{name}.json"
        with open(path) as file:
            state = json.load(file)
        assert state["version"] == labs.VERSION
        with open(path, "w") as file:
            json.dump({**state, "version": labs.VERSION + 1}, file)
        with pytest.raises(RuntimeError, match="only a part is there"):
            Lab.find(name)


def test_a_lab_with_a_namespace_that_is_none_is_shown_as_broken(name, hrdma):
    Lab.up(TWO, name)
    namespaces.remove(name, "h1")
    os.close(os.open(namespaces.path(name, "h1"), os.O_CREAT | os.O_EXCL, 0))
    done = hrdma("status", "--name", name)
    assert done.returncode == 0 and f"lab {name}: " in done.stdout and "Invalid argument" in done.stdout


def test_names_that_no_lab_can_have_are_left_alone(name):
    foreign = [
        f"{labs.STATES}/{name.upper()}.json",
        f"{labs.STATES}/{name} x.json",
        f"{namespaces.FOLDER}/hrdma-{name.upper()}-h0",
    ]
    with Lab.up(TWO, name):
        try:
            for file in foreign:
                os.close(os.open(file, os.O_CREAT | os.O_EXCL, 0o600))
            assert [one for one in labs.labs() if name in one.lower()] == [name]
        finally:
            for file in foreign:
                os.unlink(file)


def test_down_of_all_goes_on_after_one_that_does_not_end(monkeypatch, root):
    from click.testing import CliRunner

    from hrdma.cli.lab import command

    def down(name: str) -> bool:
        if name == "a":
            raise RuntimeError("processes 7 of the lab do not end")
        return True

    monkeypatch.setattr(labs, "labs", lambda: ["a", "b"])
    monkeypatch.setattr(labs, "down", down)
    done = CliRunner().invoke(command, ["down", "--all"])
    assert done.exit_code == 1
    assert done.stdout == "lab b is down\n"
    assert done.stderr == "hrdma lab: lab a: processes 7 of the lab do not end\n"


# --- what runs in a lab ---


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


def ended(process: subprocess.Popen) -> bool:
    return process.poll() is not None


def test_processes_end_with_their_lab(name, lab, started_in):
    other = started_in(lab, 0, "sleep", "60")
    own = Lab.up(TWO, name)
    plain = started_in(own, 0, "sleep", "60")
    deaf = started_in(own, 1, sys.executable, "-c", DEAF)
    stopped = started_in(own, 1, "sleep", "60")
    deaf.stdout.readline()
    stopped.send_signal(signal.SIGSTOP)
    assert [node["pids"] for node in own.status()["nodes"]] == [[plain.pid], sorted([deaf.pid, stopped.pid])]
    own.down()
    assert (plain.wait(1), deaf.wait(1), stopped.wait(1)) == (-signal.SIGTERM, -signal.SIGKILL, -signal.SIGTERM)
    assert not ended(other)
    assert traces(name) == []


def test_a_job_ends_with_its_lab(name):
    own = Lab.up(TWO, name)
    command = [sys.executable, "-m", "hrdma", "lab", "run", "--name", name, "--", "sleep", "60"]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as job:
        wait_for(lambda: sum(len(node["pids"]) for node in own.status()["nodes"]) == 2)
        own.down()
        assert job.wait(10) == 128 + signal.SIGTERM
        assert "SIGTERM" in job.stderr.read()


def test_a_lab_is_not_removed_from_inside(lab, hrdma):
    done = hrdma(
        "exec", "--name", lab.name, "h0", "--", sys.executable, "-m", "hrdma", "lab", "down", "--name", lab.name
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "this process is inside the lab" in done.stderr
    assert len(lab.status()["nodes"]) == 8


# --- who may ---


def refused(arguments: list[str], drop: str) -> subprocess.CompletedProcess[str]:
    """`hrdma lab` in a process that has given rights away once everything is imported."""
    text = (
        "import sys, hrdma.cli, hrdma.cli.lab, hrdma.lab.lab, hrdma.lab.wiring, hrdma.topo.fabric_file\n"
        "import ctypes, os, rich.console\n"
        f"{drop}\n"
        "sys.argv = ['hrdma', 'lab', *sys.argv[1:]]\n"
        "hrdma.cli.main()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", text, *arguments], env=environment(), capture_output=True, text=True, timeout=30
    )


@pytest.mark.parametrize(
    "arguments",
    [["up", "ring:2"], ["down"], ["down", "--all"], ["status"], ["run", "--", "true"], ["exec", "h0", "--", "true"]],
    ids=" ".join,
)
def test_without_root(arguments):
    done = refused(arguments, "os.setuid(65534) if os.geteuid() == 0 else None")
    assert (done.returncode, done.stdout) == (126, "")
    assert done.stderr == (
        "hrdma lab: a lab is made of network namespaces, which only root may make: sudo hrdma lab ...\n"
    )


def test_root_without_the_rights(name):
    """As in a container: root by name."""
    done = subprocess.run(
        [sys.executable, "-m", "hrdma", "lab", "up", "ring:2", "--name", name],
        env=environment(), capture_output=True, text=True, timeout=30, preexec_fn=drop_rights,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (126, "")
    assert "not permitted (" in done.stderr and "a lab needs root (CAP_SYS_ADMIN, CAP_NET_ADMIN)" in done.stderr
    assert traces(name) == []


def drop_rights() -> None:
    PR_CAPBSET_DROP, CAP_SYS_ADMIN = 24, 21
    assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0) == 0


def test_a_job_s_port_is_free_at_every_address_of_its_host(name):
    def all_but_two_are_in_use() -> set[int]:
        with open("/proc/sys/net/ipv4/ip_local_port_range", "r+") as range_of_ports:
            range_of_ports.write("40000 40007")
        found = set()
        with contextlib.ExitStack() as stack:
            for port in (40000, 40001, 40004, 40005, 40006, 40007):  # at loopback alone
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            for _ in range(30):
                with reserve_port("") as kept, listen(socket.AF_INET, address, kept.getsockname()[1]) as there:
                    found.add(there.getsockname()[1])
        return found

    with Lab.up(TWO, name) as lab:
        (address, *_) = lab.addresses(0)
        found = namespaces.inside(lab.namespace(0), all_but_two_are_in_use)
        assert found and found <= {40002, 40003}

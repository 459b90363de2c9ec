"""The controller's socket when something goes wrong: hostile messages, failures, late answers, no descriptors, restarts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import lab
import pytest

from hrdma.errors import NetlinkError, RefusedError, RequestError
from hrdma.qos import cgroup
from hrdma.qos import controller as controller_module
from hrdma.qos.apply import Control
from hrdma.qos.client import MOST, Client, socket_path
from hrdma.qos.controller import Controller
from hrdma.qos.members import Peer
from hrdma.qos.policy import Job, Match, Policy
from hrdma.qos.record import holder

POLICY = Policy("tls-one", (Job("named", (Match(sport=2000),)),), rate=12_500_000, dscp_pool=(40, 41))


def registered(client: Client) -> list[str]:
    return client.status()["registered"]


@lab.isolated
def test_a_deeply_nested_message_is_refused_and_the_controller_goes_on(net):
    with lab.serving(net, POLICY), Client("v0", net.directory) as client:
        for text in (b"[" * 50_000, b'{"op":' * 20_000, b'{"op": "register", "job": ' + b"[" * 900 + b"]" * 900 + b"}"):
            client._socket.send(text)
            answer = json.loads(client._socket.recv(1 << 20))
            assert answer["error"] in ("RefusedError", "JSONDecodeError", "TypeError", "PolicyError"), answer
        assert registered(client) == []


@lab.isolated
def test_a_socket_is_found_by_its_path_from_another_namespace(net):
    with lab.serving(net, POLICY):
        path = socket_path("v0", net.directory)
        with net.other(), Client(path) as client:
            assert client.dev == "v0" and registered(client) == []
            with pytest.raises(RequestError, match="does not run"):
                Client("v0", net.directory)


def test_a_controller_that_accepts_nobody_is_waited_for_until_the_deadline(tmp_path):
    path = f"{tmp_path}/eth0@1.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(0)
        waiting = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(8)]
        for one in waiting:
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect(path)
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match=r"the controller of eth0 did not answer within 0\.3 s"):
            Client(path, timeout=0.3)
        assert 0.2 < time.monotonic() - begin < 5
        for one in waiting:
            one.close()


def failing(controller: Controller, words: str):
    """Has the controller's next change fail."""
    kept = controller.control.install

    def install(*arguments, **more):
        controller.control.install = kept
        raise NetlinkError(words)

    controller.control.install = install


@lab.isolated
def test_what_fails_leaves_registrations_as_they_were(net):
    """In one process: requests are given to the controller by hand."""
    with Controller("v0", POLICY, directory=net.directory) as controller:
        peer = Peer(os.getpid(), 0, sock=socket.socket())
        controller._peers.append(peer)
        controller._answer(peer, {"op": "register", "job": "guest"})
        kept, before = dict(peer.jobs), lab.dump()
        for request in (
            {"op": "unregister", "job": "guest"},
            {"op": "register", "job": "second"},
            {"op": "adopt", "job": "second"},
        ):
            failing(controller, "the test says so")
            with pytest.raises(NetlinkError, match="the test says so"):
                controller._answer(peer, request)
            assert peer.jobs == kept
            assert lab.dump() == before

        def refuse(*_):
            raise RefusedError("no cgroups here")

        enter, cgroup.enter = cgroup.enter, refuse
        try:
            with pytest.raises(RefusedError, match="no cgroups here"):
                controller._answer(peer, {"op": "adopt", "job": "second"})
        finally:
            cgroup.enter = enter
        assert peer.jobs == kept
        assert lab.dump() == before, "the job that came for this has gone again"
        assert not peer.adopted
        peer.sock.close()


@lab.isolated
def test_an_answer_after_its_deadline_is_not_the_next_ones(net):
    """A controller in a thread's place: a socket that answers when the test says."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(socket_path("v0", net.directory))
    listener.listen(1)

    def answer(to: socket.socket, **values) -> None:
        request = json.loads(to.recv(1 << 16))
        to.send(json.dumps({**values, "number": request["number"]}).encode())

    late, tell = os.pipe()

    def serve() -> None:
        sock, _ = listener.accept()
        answer(sock, policy="fifo", kind="htb", dev="v0")
        lab.word(late)
        answer(sock, band=1)
        answer(sock, band=2)
        sock.recv(1)

    pid = lab.child(serve)
    listener.close()
    with Client("v0", net.directory) as client:
        client._timeout = 0.2
        with pytest.raises(TimeoutError, match=r"the controller of v0 did not answer within 0.2 s"):
            client.register("first")
        os.write(tell, b"1")
        client._timeout = 20.0
        assert client.register("second") == {"band": 2}
    assert lab.ended(pid) == 0


@lab.isolated
def test_close_ends_the_registration_of_a_process_with_children(net):
    with lab.serving(net, POLICY), Client("v0", net.directory) as watcher:
        client = Client("v0", net.directory)
        client.register("guest")
        closer = lab.child(client.close)  # a copy that is closed by a child ends nothing
        assert lab.ended(closer) == 0
        assert registered(watcher) == ["guest"]
        child = lab.child(time.sleep, 60)  # has the connection too
        client.close()
        lab.eventually(lambda: registered(watcher) == [])
        lab.kill(child)


@lab.isolated
def test_a_process_that_is_killed_is_registered_no_more_though_its_child_lives(net):
    """The child has the connection too: it closes with the last of them."""
    ready, tell = os.pipe()

    def job():
        kept = Client("v0", net.directory)
        kept.register("guest")
        os.write(tell, str(lab.child(time.sleep, 60)).encode())
        time.sleep(60)

    with lab.serving(net, POLICY), Client("v0", net.directory) as watcher:
        member = lab.child(job)
        child = int(lab.word(ready))
        try:
            assert registered(watcher) == ["guest"]
            lab.kill(member)
            lab.eventually(lambda: registered(watcher) == [], 3)
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


@lab.isolated
def test_an_answer_that_is_long(net):
    """More than a socket takes by default; and more than a message may have, which is refused and ends nothing."""
    with Controller("v0", POLICY, directory=net.directory) as controller:
        client = Client.__new__(Client)
        ours, client._socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        controller_module._make_room(ours)
        client._dev, client._timeout, client._number, client._pid = "v0", 5.0, 0, os.getpid()
        peer = Peer(os.getpid(), 0, sock=ours)
        controller._peers.append(peer)
        for length, kept in ((300_000, True), (MOST, False)):
            controller._status = lambda length=length: {"registered": ["a" * length]}
            timer = threading.Timer(0.1, controller._serve, [peer])
            timer.start()
            if kept:
                assert len(registered(client)[0]) == length
            else:
                with pytest.raises(RequestError, match=r"the answer has 10\d{5} bytes, more than a message may have"):
                    client.status()
            timer.join()
            assert peer in controller._peers
        client.close()


@lab.isolated
def test_cgroups_that_cannot_be_swept_end_nothing(net):
    def fail(prefix):
        raise OSError(24, "Too many open files")

    cgroup.sweep = fail
    with Controller("v0", POLICY, directory=net.directory) as controller:
        controller._due["sweep"] = 0.0
        timer = threading.Timer(0.3, controller.stop)
        timer.start()
        controller.run(signals=False)
        timer.join()
        assert "sweep" not in controller._due
    assert not os.path.exists(socket_path("v0", net.directory))
    assert holder(net.directory, "v0") == 0


@lab.isolated
def test_registering_again_leaves_the_processs_other_jobs(net):
    pool = dataclasses.replace(POLICY, dscp_pool=(40, 41, 42))
    with lab.serving(net, pool) as pid:
        kept = [Client("v0", net.directory) for _ in range(2)]
        for client, job in zip(kept, ("one", "two")):
            client.register(job)
        lab.kill(pid)
    with lab.serving(net, pool) as pid:
        before = len(os.listdir(f"/proc/{pid}/fd"))
        with Client("v0", net.directory) as client:
            client.register("one")
            assert registered(client) == ["one", "two"]
            client.unregister("one")
            assert registered(client) == ["two"]
        lab.eventually(lambda: len(os.listdir(f"/proc/{pid}/fd")) == before)
    with lab.serving(
        net, dataclasses.replace(pool, most_jobs=1)
    ) as pid:  # lets in none of them, and keeps nothing of them
        assert not [name for name in descriptors(pid) if "pidfd" in name]
    for client in kept:
        client.close()


def descriptors(pid: int) -> list[str]:
    return [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]


@lab.isolated
def test_what_the_controller_may_not_do_is_no_refusal_of_the_job(net):
    with lab.serving(net, POLICY), Client("v0", net.directory) as client:
        lab.tc("qdisc replace dev v0 root pfifo limit 10")
        with pytest.raises(RequestError, match=r"the controller cannot change v0: .*somebody else made") as caught:
            client.register("guest")
        assert not isinstance(caught.value, RefusedError)
        assert client.status()["registered"] == []


def cpu(pid: int) -> float:
    """Seconds of processor time that a process has taken."""
    with open(f"/proc/{pid}/stat") as file:
        words = file.read().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@lab.isolated
def test_without_descriptors_it_waits_and_does_not_spin(net):
    rotating = dataclasses.replace(POLICY, policy="tls-rr", interval=0.2)
    with lab.serving(net, rotating) as pid:
        first = Client("v0", net.directory)
        taken = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (taken, 1024))
        late = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        late.connect(socket_path("v0", net.directory))  # the kernel takes it, the controller cannot
        before = cpu(pid)
        time.sleep(2)
        assert cpu(pid) - before < 0.5
        assert first._ask("hello", protocol=1)["dev"] == "v0"  # who is connected is served
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (1024, 1024))
        late.settimeout(5)
        late.send(b'{"op": "hello", "protocol": 1}')
        assert json.loads(late.recv(1000))["dev"] == "v0"
        late.close()
        rotation = first.status()["rotation"]
        lab.eventually(lambda: first.status()["rotation"] > rotation)  # it went on from where it was
        first.close()


@lab.isolated
def test_a_controller_with_another_policy_takes_over_who_has_registered(net):
    strict = Policy("strict", (Job("named", (Match(sport=2000),), band=0),), rate=12_500_000, guest_band=3)
    with lab.serving(net, POLICY) as pid:
        kept = Client("v0", net.directory)
        kept.register("guest", priority=5)
        other = Client("v0", net.directory)
        other.register("second")
        lab.kill(pid)
    with lab.serving(net, strict) as pid, Client("v0", net.directory) as client:
        bands = {row["job"]: row["band"] for row in client.status()["jobs"]}
        assert bands == {"named": 0, "guest": 5, "second": 3, "(others)": 7, "(acks)": -1}
        lab.kill(pid)
    with lab.serving(net, dataclasses.replace(strict, most_jobs=2)), Client("v0", net.directory) as client:
        assert len(registered(client)) == 1  # what this policy does not let in is registered no more
    kept.close()
    other.close()


@lab.isolated
def test_counters_are_kept_over_a_restart(net):
    policy = Policy(
        "least-attained", tuple(Job(f"j{p}", (Match(dport=p),)) for p in (5001, 5002)), rate=2_500_000, interval=0.3
    )
    with lab.serving(net, policy) as pid, Client("v0", net.directory) as client:
        with lab.Traffic(net, [5001]):
            lab.eventually(lambda: {row["job"]: row["band"] for row in client.status()["jobs"]}["j5001"] == 1)
        lab.kill(pid)
    slow = dataclasses.replace(policy, interval=60.0)
    with lab.serving(net, slow) as pid, Client("v0", net.directory) as client:
        assert {row["job"]: row["band"] for row in client.status()["jobs"]}["j5001"] == 1
        lab.kill(pid)
    with Control("v0", net.directory) as control:
        attained = control.installed.live["j5001"].attained
        assert attained > 0
        control.rotate()  # by the counters of now, which no controller has looked at
        assert control.installed.places["j5001"].band == 1
        live = control.installed.live["j5001"]
        assert attained <= live.attained == live.counter, "all that the kernel has counted, and none of it twice"


@lab.isolated
def test_watching_ends_when_it_is_reverted(net):
    words = [sys.executable, "-m", "hrdma", "qos", "status", "--dev", "v0", "--state", net.directory]
    with Control("v0", net.directory) as control:
        control.install(POLICY)
        watch = subprocess.Popen(
            [*words, "--watch", "--json", "--interval", "100ms"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert "named" in watch.stdout.readline()
        control.revert()
    _, errors = watch.communicate(timeout=20)
    assert watch.returncode == 1
    assert "has been reverted" in errors


@lab.isolated
def test_an_ingress_policy_has_no_commands_in_bands(net):
    inward = dataclasses.replace(POLICY, direction="ingress")
    with Control("v0", net.directory) as control:
        control.install(inward)
    command = ["qos", "run", "--dev", "v0", "--state", net.directory, "--job", "named", "--", "true"]
    done = subprocess.run([sys.executable, "-m", "hrdma", *command], capture_output=True, text=True, timeout=30)
    assert done.returncode == 3
    assert "'htb' at ingress knows jobs by their packets alone" in done.stderr
    with lab.serving(net, inward), Client("v0", net.directory) as client:
        with pytest.raises(RequestError, match="known by what is in them alone"):
            client.adopt("named")
        assert registered(client) == []


@lab.isolated
def test_a_policy_without_bands_starts_commands_as_they_are(net):
    alike = dataclasses.replace(POLICY, policy="fifo")
    with Control("v0", net.directory) as control:
        control.install(alike)
    command = ["qos", "run", "--dev", "v0", "--state", net.directory, "--job", "guest", "--", "false"]

    def run() -> int:
        return subprocess.run([sys.executable, "-m", "hrdma", *command], timeout=30).returncode

    assert run() == 1
    with lab.serving(net, alike), Client("v0", net.directory) as client:
        assert run() == 1
        client.adopt("guest")
        assert registered(client) == ["guest"]

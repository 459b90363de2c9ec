"""The controller's socket: registration, refusals, death, restart; and rotation that goes on by itself."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time

import lab
import pytest

from hrdma.errors import PolicyError, RefusedError, RequestError
from hrdma.qos import guard
from hrdma.qos.apply import Control
from hrdma.qos.client import Client, socket_path
from hrdma.qos.controller import Controller
from hrdma.qos.policy import Job, Match, Policy
from hrdma.qos.record import holder

POLICY = Policy("tls-one", (Job("named", (Match(sport=2000),)),), rate=12_500_000, dscp_pool=(40, 41), guest_band=2)


def serving(net: lab.Net, policy: Policy = POLICY, **more):
    return lab.serving(net, policy, **more)


def jobs(client: Client) -> dict[str, int]:
    return {row["job"]: row["band"] for row in client.status()["jobs"]}


@lab.isolated
def test_registration_lasts_as_long_as_the_connection(net):
    with serving(net) as pid, Client("v0", net.directory) as watcher:
        assert holder(net.directory, "v0") == pid
        assert jobs(watcher) == {"named": 0, "(others)": 7, "(acks)": -1}
        with Client("v0", net.directory) as client:
            lane = client.register("guest", size=1000)
            assert lane == client.register("guest", size=1000)
            assert lane["band"] == 2  # the policy's best for guests
            assert (lane["dscp"], lane["tos"]) == (40, 160)
            assert "u32" in lab.tc("filter show dev v0 parent 4853:")
            assert jobs(watcher) == {"named": 0, "guest": 2, "(others)": 7, "(acks)": -1}
            assert client.register("named")["dscp"] == 41
            with pytest.raises(RefusedError, match="no DSCP is left for job 'third'; the policy's dscp_pool has 2"):
                client.register("third")
            client.unregister("named")
            with pytest.raises(RefusedError, match="not registered for job 'named'"):
                client.unregister("named")
        lab.eventually(lambda: jobs(watcher) == {"named": 0, "(others)": 7, "(acks)": -1})

        def doomed():
            Client("v0", net.directory).register("doomed")
            os.kill(os.getpid(), signal.SIGKILL)

        assert lab.ended(lab.child(doomed)) == signal.SIGKILL
        lab.eventually(lambda: "doomed" not in jobs(watcher))


@lab.isolated
def test_what_a_job_may_not_do(net):
    strict = Policy("strict", (Job("named", (Match(sport=2000),), band=0),), rate=12_500_000, guest_band=3, most_jobs=3)
    with serving(net, strict), Client("v0", net.directory) as client:
        with pytest.raises(RefusedError, match="band 2 is above what the policy allows here: 3"):
            client.register("guest", band=2)
        with pytest.raises(RefusedError, match="the policy says the band of job 'named'"):
            client.register("named", band=1)
        with pytest.raises(PolicyError, match="9 is not a band, 0 to 6"):
            client.register("guest", band=9)
        with pytest.raises(PolicyError, match="is not a name"):
            client.register("../x")
        with pytest.raises(RequestError, match="unknown request 'dance'"):
            client._ask("dance")
        with pytest.raises(RequestError, match="unexpected keyword"):
            client._ask("register", job="x", colour=1)
        assert client.register("a", band=3)["band"] == 3
        assert client.register("b", band=6)["service_level"] == 1
        with pytest.raises(RefusedError, match="3 jobs are all that the policy allows"):
            client.register("c", band=6)
        assert jobs(client) == {"named": 0, "a": 3, "b": 6, "(others)": 7, "(acks)": -1}


@lab.isolated
def test_the_socket_is_for_a_group_and_messages_are_checked(net):
    with serving(net, group=os.getegid()):
        mode = os.stat(socket_path("v0", net.directory))
        assert stat.S_IMODE(mode.st_mode) == 0o660
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        raw.connect(socket_path("v0", net.directory))
        raw.settimeout(5)
        for junk in (b"{", b"[1]", b'"x"', b'{"op": "hello"}', b'{"op": "register"}', b"\xff\xfe"):
            raw.send(junk)
            assert b'"error"' in raw.recv(1 << 16), junk
        raw.close()
    with pytest.raises(RequestError, match="the controller of v0 does not run"):
        Client("v0", net.directory)
    with serving(net):
        assert stat.S_IMODE(os.stat(socket_path("v0", net.directory)).st_mode) == 0o600


@lab.isolated
def test_a_controller_that_is_killed_and_started_anew_goes_on(net):
    rotating = dataclasses.replace(POLICY, policy="tls-rr", interval=0.2)
    stayer_ready, tell = os.pipe()
    with serving(net, rotating) as pid:

        def stay():
            kept = Client("v0", net.directory)
            kept.register("stayer")
            os.write(tell, b"1")
            time.sleep(60)

        stayer = lab.child(stay)
        lab.word(stayer_ready)
        with Client("v0", net.directory) as client:
            lab.eventually(lambda: client.status()["rotation"] >= 3)
            client.register("leaver")
            lab.kill(pid)
            with pytest.raises((RequestError, OSError)):
                client.status()
            done = Control("v0", net.directory)
            assert {job.name for job in done.installed.policy.jobs} == {"named", "stayer", "leaver"}
            rotation = done.installed.rotation
            done.close()
            member = os.getpid()
        with serving(net, rotating), Client("v0", net.directory) as client:
            status = client.status()
            assert status["rotation"] >= rotation
            assert status["registered"] == ["leaver", "stayer"], member  # both processes still run
            client.register("leaver")  # by this process: in place of what it had before
            client.unregister("leaver")
            lab.eventually(lambda: client.status()["registered"] == ["stayer"])
            lab.kill(stayer)
            lab.eventually(lambda: client.status()["registered"] == [])


@lab.isolated
def test_sigterm_ends_it_and_what_is_installed_stays(net):
    with serving(net) as pid:
        before = lab.dump()
        os.kill(pid, signal.SIGTERM)
        assert lab.ended(pid) == 0
        assert lab.dump() == before
        assert not os.path.exists(socket_path("v0", net.directory))
    with Control("v0", net.directory) as control:
        assert control.revert()


@lab.isolated
def test_least_attained_service_moves_the_greedy_job_back(net):
    policy = Policy(
        "least-attained", tuple(Job(f"j{p}", (Match(dport=p),)) for p in (5001, 5002)), rate=2_500_000, interval=0.3
    )
    with serving(net, policy), Client("v0", net.directory) as client:
        with lab.Traffic(net, [5001]):
            lab.eventually(lambda: jobs(client)["j5001"] == 1)
        assert jobs(client)["j5002"] == 0


@pytest.mark.parametrize(("rate", "later", "goes_on"), [(0, 0, True), (12_500_000, 1000, True), (0, 1000, False)])
@lab.isolated
def test_a_link_that_goes_down_or_slows_does_not_end_the_controller(net, rate, later, goes_on):
    """With 1000 bytes per second the floors do not fit any more: what is installed stays, and the log says so."""
    policy = dataclasses.replace(POLICY, policy="tls-rr", interval=0.1, rate=rate)
    guard.link_rate = lambda dev: 1_250_000_000
    with Controller("v0", policy, directory=net.directory) as controller:
        before = controller.control.installed
        guard.link_rate = lambda dev: later

        def stop() -> None:
            time.sleep(0.8)
            with contextlib.suppress(AssertionError):
                lab.eventually(lambda: not goes_on or controller.control.installed.rotation > 2)
            controller.stop()

        stopper = threading.Thread(target=stop)
        stopper.start()
        controller.run(signals=False)
        stopper.join()
        after = controller.control.installed
        assert (after.rotation > 2) == goes_on
        assert after.device.rate == before.device.rate
        if later:
            with pytest.raises(
                PolicyError, match=r"qos\.rate: 400mbit is more than the link of v0 has"
            ):  # asked for anew
                controller.control.install(dataclasses.replace(policy, rate=50_000_000))


RUN = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); print(s.getsockopt(1, 12)); raise SystemExit(7)"


@lab.isolated
def test_run_gives_a_command_the_class_of_its_job(net):
    command = [sys.executable, "-m", "hrdma", "qos", "run", "--dev", "v0", "--state", net.directory, "--job"]

    def run(job: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, job, "--", sys.executable, "-c", RUN], capture_output=True, text=True, timeout=30
        )

    with serving(net):
        done = run("guest")
        if "CAP_BPF" in done.stderr or "cgroup version 2" in done.stderr or "cannot make a cgroup" in done.stderr:
            pytest.skip(f"this kernel does not let this user mark cgroups: {done.stderr.strip()}")
        assert done.returncode == 7, done.stderr
        assert int(done.stdout) >> 16 == 0x4853
        assert int(done.stdout) & 7 == 0
    with Control("v0", net.directory) as control:
        expected = control.installed.tree.classes["named"]
    done = run("named")
    assert (done.returncode, done.stdout.strip()) == (7, str(expected)), done.stderr
    done = run("nobody")
    assert done.returncode == 3
    assert "no job 'nobody' on v0: named" in done.stderr
    with Control("v0", net.directory) as control:
        assert control.revert()

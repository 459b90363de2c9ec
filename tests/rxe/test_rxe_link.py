"""`hrdma rxe` and `hrdma doctor` on a kernel that has soft-RoCE, beside iproute2's `rdma`; devices that are down or deleted."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import harness
import hrdma
import hrdma.cli
from hrdma import verbs
from hrdma.doctor import rdma


def devices(output) -> dict[str, str]:
    return {link["ifname"]: link["netdev"] for link in json.loads(output("rdma -j link"))}


def told(words: str, code: int = 0) -> str:
    """What a command of hrdma prints, errors where it fails; in this process, since to start Python takes seconds here."""
    done = CliRunner().invoke(hrdma.cli.command, shlex.split(words), prog_name="hrdma")
    assert done.exit_code == code, (words, done.output, done.exception)
    return done.stderr if code else done.stdout


@pytest.fixture
def card(guest, output):
    """A network card of our own, with an address."""
    output("ip link add try0 type veth peer name try1")
    try:
        output("ip address add 10.78.0.1/24 dev try0")
        output("ip link set try0 up")
        output("ip link set try1 up")
        yield "try0"
    finally:
        output("ip link delete try0")


@pytest.mark.timeout(240)
def test_up_status_doctor_down(guest, card, device, output):
    before = devices(output)
    assert "hrdma_try0 on try0" in told(f"rxe up --dev {card}")
    told(f"rxe up --dev {card}")
    assert devices(output) == before | {"hrdma_try0": card}
    known = {link["name"]: link for link in json.loads(told("rxe status --json"))}
    assert known["hrdma_try0"]["ours"] and not known[device]["ours"] and known[device]["netdev"] == before[device]

    report = json.loads(told("doctor --json"))
    found = {finding["subject"]: finding for finding in report["findings"]}
    for name in ("hrdma_try0", device):
        assert found[f"{name}:1"]["level"] == "ok" and "active" in found[f"{name}:1"]["text"]
        assert found[f"{name}:1 GIDs"]["level"] == "ok"
        assert found[f"{name}:1 exchange"]["figures"]["bandwidth"] > 0, found
    assert found["hrdma_try0:1 MTU"]["level"] == "warning" and "mtu 4200" in found["hrdma_try0:1 MTU"]["mend"]
    assert found[f"{device}:1 MTU"]["level"] == "ok" and report["level"] == "warning"

    assert "hrdma_try0 on try0: removed" in told("rxe down")
    assert devices(output) == before
    assert "no device" in told("rxe down")


def test_a_device_of_others_is_left_alone(guest, device, output):
    netdev = devices(output)[device]
    assert f"{netdev} has {device}, which others made" in told(f"rxe up --dev {netdev}", code=1)
    assert "no device" in told(f"rxe down --dev {netdev}")
    assert device in devices(output)


def opened(rank):
    """What is said of the devices, and the text of those that are used."""
    said = []
    hrdma.log.logger.warning = lambda text, *args: said.append(text % args)
    with hrdma.init(timeout=30) as comm:
        comm.barrier()
        text = comm.info()["domains"]["verbs"]
        comm.barrier()  # who ends is a rail lost
    return said, text


@pytest.mark.timeout(200)
def test_a_port_that_is_down_before_it_is_opened(guest, card, device, output, monkeypatch):
    told(f"rxe up --dev {card}")
    try:
        output(f"ip link set {card} down")
        text = "port 1 of hrdma_try0 is down: ip link set try0 up"
        env = {"HRDMA_TRANSPORT": "verbs,tcp", "HRDMA_REQUIRE": "verbs", "HRDMA_DEVICES": "hrdma_try0"}
        (alone,) = harness.outcomes(opened, 1, init=False, env=env, timeout=60)
        assert alone.error == "DeviceError" and text in alone.text, alone
        for said, used in harness.ranks(opened, 2, init=False, env=env | {"HRDMA_DEVICES": f"hrdma_try0,{device}"}):
            (line,) = said
            assert line.startswith(f"hrdma_try0 is not used: {text}") and f"1 rail: {device}" in used, (said, used)

        assert "hrdma_try0" in verbs.devices()
        for ask in (verbs.Device, verbs.found, verbs.choose):
            with pytest.raises(hrdma.DeviceError, match=text):
                ask("hrdma_try0")

        port, *_ = rdma.port(Path("/"), "hrdma_try0", 1)  # the whole of `hrdma doctor` tries every device
        assert (port.level, port.mend) == ("warning", "ip link set try0 up") and "down" in port.text, port
        assert ("hrdma_try0", 1) not in rdma.active(Path("/"))
        monkeypatch.setenv("HRDMA_DEVICES", "hrdma_try0")
        (rails,) = rdma.chosen()
        assert rails.level == "error" and text in rails.text, rails

        output(f"ip link set {card} up")
        with verbs.Device("hrdma_try0") as back:
            assert back.limits()["active"]
    finally:
        told(f"rxe down --dev {card}")


def deleted_meanwhile(comm):
    """Plain memory, an arena and memory that is exposed, which is what a device has open."""
    x, y = np.ones(1 << 16), hrdma.zeros(1 << 16)
    back = np.zeros(1)
    exposed = hrdma.Endpoint(comm, 1 - comm.rank).expose(np.zeros(1 << 16), write=True)
    deleting, said = None, "no error"
    try:
        while not back[0]:
            assert (comm.allreduce(x, out=x.copy()) == 2).all()
            comm.allreduce(y, out=y.copy())
            if comm.rank == 0 and not deleting:
                start = time.monotonic()
                deleting = subprocess.Popen(["rdma", "link", "delete", "gone0"])
            back[0] = deleting is None or deleting.poll() is not None
            comm.allreduce(back, op="min")
    except hrdma.PeerError as error:
        said = str(error)
    took = None
    if comm.rank == 0:
        assert deleting.wait(20) == 0
        took = time.monotonic() - start
    del exposed
    until = time.monotonic() + 10
    while "gone0 is gone" not in (domain := comm.info()["domains"]["verbs"]) and time.monotonic() < until:
        time.sleep(0.05)  # rank 0 has waited for both; this is rank 1
    if said == "no error":
        comm.barrier()  # who leaves before the other has looked is a rail lost
    return [took, said, domain]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("others", ["", ",rxe0"], ids=["alone", "rails"])
def test_a_device_is_deleted_while_ranks_use_it(guest, card, output, others):
    """`rdma link delete` waits until all who have the device open have closed it: not until they end."""
    output(f"rdma link add gone0 type rxe netdev {card}")
    try:
        env = {"HRDMA_TRANSPORT": "verbs", "HRDMA_DEVICES": f"gone0{others}"}
        found = harness.outcomes(deleted_meanwhile, 2, env=env, timeout=60)
    finally:
        subprocess.run(["rdma", "link", "delete", "gone0"], stderr=subprocess.DEVNULL, timeout=20)
    assert [one.status for one in found] == [0, 0], found
    (took, *first), (_, *second) = [one.value for one in found]
    assert took < 5, found
    for said, domain in (first, second):
        if others:
            assert said == "no error" and domain.startswith("2 rails (1 times lost"), found
            assert ": gone0 is gone; rxe0" in domain, found
        else:
            # the second to hear of it may hear first that the other one's connection has ended
            assert "the peer is gone" in said and domain == "gone0 is gone", found
    assert others or any("the RDMA device is gone" in said for said, _ in (first, second)), found
    assert "gone0" not in devices(output)


@pytest.mark.timeout(300)
def test_two_hosts_measure_the_way_between_them(other, guest, monkeypatch):
    here, there = guest["WIRE0_ADDR0"], guest["WIRE0_ADDR1"]
    monkeypatch.setenv("HRDMA_TOKEN", "doctor")
    command = "doctor --json --timeout 100 --peer"
    with other.start(f"hrdma {command} {here}", {"HRDMA_TOKEN": "doctor"}) as far:
        near = json.loads(told(f"{command} {there}"))
        ended = far.wait(60)
    assert ended.status == 0, ended.output
    for report, peer in ((near, there), (json.loads(ended.output), here)):
        found = {finding["subject"]: finding for finding in report["findings"]}
        for subject in (f"tcp to {peer}", f"rxe0:1 to {peer}", f"rxe1:1 to {peer}"):
            assert found[subject]["level"] == "ok" and found[subject]["figures"]["latency"] > 0, found[subject]

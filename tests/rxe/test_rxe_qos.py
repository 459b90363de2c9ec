"""hrdma.qos on a whole kernel: the kinds that a small one lacks, installed, used by packets, changed in place, and reverted."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct
import time
from pathlib import Path

import pytest

from hrdma.errors import DeviceError, NetlinkError
from hrdma.qos.apply import Control
from hrdma.qos.kinds import TABLE, mqprio
from hrdma.qos.objects import ROOT, Filter, Qdisc
from hrdma.qos.policy import Job, Match, Policy
from hrdma.qos.state import counters
from hrdma.qos.tree import FIRST
from hrdma.qos.wire import Wire

HERE, THERE = "10.88.0.1", "10.88.0.2"
HERE6, THERE6 = "fd88::1", "fd88::2"
RATE = 12_500_000
JOBS = (
    Job("port", (Match(dport=3000, proto="udp"),), band=1),
    Job("dscp", (Match(dscp=26),), band=3),
    Job("source", (Match(sport=2000),), band=5),
    Job("network", (Match(dst="10.99.0.0/16"), Match(dst="fd99::/16")), band=0),
)
STRICT = Policy("strict", JOBS, rate=RATE)
CARD = f"""
link set card0 up
link set card1 up
addr add {HERE}/24 dev card0
addr add {HERE6}/64 dev card0 nodad
neighbor add {THERE} lladdr 02:00:00:00:00:01 dev card0
neighbor add {THERE6} lladdr 02:00:00:00:00:01 dev card0
"""


@pytest.fixture
def card(guest, output):
    """A device with four transmit queues, whose packets go to one that nobody listens at."""
    output("ip link add card0 numtxqueues 4 type veth peer name card1")
    try:
        output("ip -batch -", given=CARD)
        yield "card0"
    finally:
        output("ip link del card0")


@pytest.fixture
def state(card, output):
    """What is on the card, as tc says; without counters."""

    def told() -> str:
        kinds = ("qdisc", "class", "filter")
        return output("tc -d -batch -", given="".join(f"{kind} show dev {card}\n" for kind in kinds))

    return told


def send(count: int, family: int, dport: int = 9, sport: int = 0, tos: int = 0) -> None:
    here, there = (HERE6, THERE6) if family == socket.AF_INET6 else (HERE, THERE)
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, tos)
        else:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
        sock.bind((here, sport))
        for _ in range(count):
            sock.sendto(bytes(100), (there, dport))


def check_packets(control: Control, *families: int) -> None:
    """Every job's packets are counted in its class, and in no other; of IPv4 where no family is given."""
    classes = control.installed.tree.counted
    cases = {"port": {"dport": 3000}, "dscp": {"tos": 104}, "source": {"sport": 2000}, None: {"dport": 3001}}
    for family in families or (socket.AF_INET,):
        for name, packet in cases.items():
            before = counters(control.wire, control.dev)
            send(5, family, **packet)
            time.sleep(0.05)
            after = counters(control.wire, control.dev)
            moved = {job: after[handle].packets - before[handle].packets for job, handle in classes.items()}
            assert moved == {job: 5 if job == name else 0 for job in classes}, (name, family)


@pytest.mark.parametrize("kind", ["prio", "ets"])
def test_bands_by_kind(card, state, tmp_path, kind):
    before = state()
    with Control(card, str(tmp_path)) as control:
        assert control.install(dataclasses.replace(STRICT, kind=kind)) > 0
        assert control.install(dataclasses.replace(STRICT, kind=kind)) == 0
        assert f"qdisc {kind} 4852: root" in state()
        check_packets(control, socket.AF_INET, socket.AF_INET6)
        for other in ("weighted", "fifo") if kind == "ets" else ("fifo",):
            for policy in (other, "strict"):  # the same back end: in place, and under the same handle
                assert control.install(dataclasses.replace(STRICT, policy=policy, kind=kind)) > 0
        check_packets(control)
        assert control.revert()
    assert state() == before


def test_no_module_is_asked_for_where_a_device_is_not_there(guest, tmp_path):
    """As if_nametoindex() has the kernel do, each time."""
    helper, asked, setting = tmp_path / "modprobe", tmp_path / "asked", Path("/proc/sys/kernel/modprobe")
    helper.write_text(f'#!/bin/sh\necho "$@" >>{asked}\n')
    helper.chmod(0o755)
    before = setting.read_text()
    try:
        setting.write_text(str(helper))
        with Wire() as wire, pytest.raises(DeviceError, match="no device 'nope1'"):
            wire.ifindex("nope1")
        with pytest.raises(OSError, match="no interface"):
            socket.if_nametoindex("nope2")
    finally:
        setting.write_text(before)
    assert "nope2" in asked.read_text() and "nope1" not in asked.read_text()


def flood(seconds: float) -> None:
    """Bare acknowledgements, and as many of the same length with FIN set: up to a thousand of each in a second."""
    end = time.monotonic() + seconds
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP) as sock:
        while time.monotonic() < end:
            for flags in (0x10, 0x11) * 5:
                with contextlib.suppress(OSError):
                    sock.sendto(struct.pack("!HHIIBBHHH", 5001, 4000, 1, 2, 5 << 4, flags, 500, 0, 0), (THERE, 0))
            time.sleep(0.005)


@pytest.mark.parametrize("kind", ["prio", "ets"])
def test_acknowledgements_have_a_queue_with_a_rate(card, state, tmp_path, kind):
    before, rate = state(), 5000
    asked, without = (dataclasses.replace(STRICT, kind=kind, acks=acks) for acks in (rate, 0))
    with Control(card, str(tmp_path)) as control:
        for policy in (asked, without, asked):  # in place
            assert control.install(policy) > 0
            assert control.install(policy) == 0
            assert state().count("qdisc tbf") == bool(policy.acks)
            check_packets(control)
        flood(1)
        first, start = counters(control.wire, control.dev), time.monotonic()
        flood(3)
        after, took = counters(control.wire, control.dev), time.monotonic() - start
        bytes_of = {handle: counter.nbytes - first[handle].nbytes for handle, counter in after.items()}
        assert bytes_of[control.installed.tree.acks] / took == pytest.approx(rate, rel=0.1)
        assert bytes_of[FIRST + 8] > rate * took, "everybody else's: those with FIN are not held back"
        assert control.revert()
    assert state() == before


def test_one_back_end_after_another(card, state, tmp_path):
    before = state()
    with Control(card, str(tmp_path)) as control:
        for kind in ("htb", "ets", "prio"):
            control.install(dataclasses.replace(STRICT, kind=kind))
            assert control.installed.kind == kind
            check_packets(control)
        old = state()
        with pytest.raises(NetlinkError, match="mqprio"):  # this card's driver divides no queues
            control.install(dataclasses.replace(STRICT, kind="mqprio"))
        assert control.installed.kind == "prio"
        assert state() == old
        check_packets(control)
        assert control.revert()
    assert state() == before


def test_a_weighted_job_keeps_its_queue_when_another_goes(card, state, tmp_path):
    policy = Policy("weighted", JOBS, rate=RATE, kind="ets")
    with Control(card, str(tmp_path)) as control:
        control.install(policy)
        check_packets(control)
        classes = control.installed.tree.classes
        fewer = dataclasses.replace(policy, jobs=JOBS[1:3])
        control.install(fewer)
        assert control.installed.tree.classes == {name: classes[name] for name in ("dscp", "source")}
        control.install(policy)
        check_packets(control)
        control.revert()


def test_queues_become_fq_and_back(card, state, tmp_path):
    before = state()
    with Control(card, str(tmp_path)) as control:
        for leaf in ("pfifo", "fq", "pfifo"):
            policy = dataclasses.replace(STRICT, kind="htb", leaf=leaf)
            assert control.install(policy) > 0
            assert control.install(policy) == 0
            assert state().count(f"qdisc {leaf} ") == len(JOBS) + 2  # everybody else's, and acknowledgements'
            check_packets(control)
        control.install(dataclasses.replace(STRICT, kind="htb", leaf="fq", policy="fifo"))
        assert "qdisc fq " in state()
        control.revert()
    assert state() == before


@pytest.mark.parametrize("kind", ["htb", "prio"])
def test_flower_where_there_is_no_u32(card, state, tmp_path, monkeypatch, kind):
    kept, before = Wire.request, state()

    def without_u32(self, verb, thing):
        if isinstance(thing, Filter) and thing.kind == "u32":
            raise self.refusal("add filter u32", thing, OSError(2, "No such file", "TC classifier not found"))
        kept(self, verb, thing)

    monkeypatch.setattr(Wire, "request", without_u32)
    policy = dataclasses.replace(STRICT, kind=kind)
    with Control(card, str(tmp_path)) as control:
        control.install(policy)
        assert control.installed.classifier == "flower"
        assert control.install(policy) == 0
        check_packets(control, socket.AF_INET, socket.AF_INET6)
        control.install(dataclasses.replace(policy, jobs=JOBS[1:]))
        assert control.revert()
    with Control(card, str(tmp_path)) as control:  # what arrives goes by a filter that takes everything
        control.install(dataclasses.replace(policy, kind="htb", direction="ingress"))
        assert control.installed.classifier == "flower"
        assert control.revert()
    assert state() == before


def test_auto_takes_what_there_is(card, state, tmp_path, monkeypatch):
    kept, before = Wire.request, state()

    def without_htb(self, verb, thing):
        if getattr(thing, "kind", "") == "htb":
            raise self.refusal("add qdisc htb", thing, OSError(2, "No such file", "Specified qdisc kind is unknown"))
        kept(self, verb, thing)

    monkeypatch.setattr(Wire, "request", without_htb)
    with Control(card, str(tmp_path)) as control:
        control.install(STRICT)
        assert control.installed.kind == "ets"
        check_packets(control)
        control.revert()
    assert state() == before


def test_mqprio_as_this_kernel_takes_and_shows_it(card, output):
    spec = mqprio.Mqprio(4, (*[0] * 8, 3, 2, 1, 0, 0, 0, 0, 0), (1, 1, 1, 1), (0, 1, 2, 3), hw=0)
    with Wire() as wire:
        wire.request("add", Qdisc(card, "mqprio", 0x48520000, ROOT, mqprio.encode(spec)))
        (found,) = (entry for entry in wire.dump("qdisc", wire.ifindex(card)) if entry.parent == ROOT)
        assert TABLE["mqprio"].decode(found.attrs[2]) == spec
    assert "mqprio 4852: root tc 4 map 0 0 0 0 0 0 0 0 3 2 1 0 0 0 0 0" in output(f"tc qdisc show dev {card}")


def test_mqprio_divides_the_queues(card, state, tmp_path, monkeypatch):
    """On a driver that leaves the order of its queues to chance (hw 0), for want of one that does not."""
    kept, before = mqprio.encode, state()
    monkeypatch.setattr(mqprio, "encode", lambda spec: kept(dataclasses.replace(spec, hw=0)))
    # The fourth class is of everybody else.
    jobs = tuple(dataclasses.replace(job, band=band) for band, job in enumerate(JOBS[:3]))
    policy = dataclasses.replace(STRICT, jobs=jobs, kind="mqprio")
    with Control(card, str(tmp_path)) as control:
        assert control.install(policy) > 0
        assert control.install(policy) == 0
        check_packets(control)
        assert control.revert()
    assert state() == before

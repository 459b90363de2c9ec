"""DCB without a NIC that has it: golden bytes of iproute2's dcb, and a driver in Python that takes and shows the kernel's messages."""

from __future__ import annotations

import struct

import lab
import pytest

from hrdma.errors import PolicyError, RefusedError
from hrdma.qos import dcb
from hrdma.qos.apply import Control
from hrdma.qos.objects import Dcb
from hrdma.qos.order import assign
from hrdma.qos.policy import Job, Match, Policy
from hrdma.qos.record import Record
from hrdma.qos.wire import Wire, attribute, attributes, framed

SHARES = (100, 0, 0, 0, 0, 0, 0, 0)
# All that a driver may have been told before: willing, a shaper, other shares for what arrives, advice, PFC's delay.
BEFORE = Dcb(
    "v0",
    8,
    (0,) * 8,
    (0,) * 8,
    SHARES,
    0,
    ((26, 3), (46, 5)),
    (255, 5),
    1,
    1,
    (50, 50, *(0,) * 6),
    tuple(range(24)),
    1,
    700,
)
JOBS = (Job("a", (Match(dscp=26),), band=0), Job("b", (Match(dscp=33),), band=2))
POLICY = Policy("strict", JOBS, rate=12_500_000, kind="dcb", lossless=True)


def test_golden_bytes():
    """What `dcb app add dev v0 dscp-prio 32:5` sends, without the header's sequence number and port."""
    want = Dcb("v0", 8, (0,) * 8, (0,) * 8, (0,) * 8, 0, ((32, 5),), None)
    (request,) = dcb.requests(want, Dcb("v0", 8, (0,) * 8, (0,) * 8, (0,) * 8, 0, (), None))
    data = framed(*request)
    golden = bytes.fromhex(
        "2c0000004f000500" + "00" * 8 + "001400000700010076300000" + "10000d80" + "0c00038008000100" + "05052000"
    )
    assert data[:8] + data[16:] == golden[:8] + golden[16:]
    asked = framed(*dcb.query("v0"))
    assert asked[:8] + asked[16:] == bytes.fromhex("1c0000004e000500" + "001500000700010076300000")


class Driver:
    """What the kernel and a driver do with dcbnl messages: the structures of linux/dcbnl.h, kept as bytes."""

    def __init__(self) -> None:
        self.ets = bytes([1, 8, 1]) + bytes(SHARES) + bytes(BEFORE.shares_in) + bytes(16) + bytes(range(24))
        self.pfc = struct.pack("=BBBxH", 8, 0, 1, 700) + bytes(130)
        self.apps = [(46, 5), (26, 3)]
        self.trust = [255, 5]
        self.failing = 0

    def send(self, request) -> list[tuple[int, bytes]]:
        data, kind = framed(*request), request[1]
        command, ieee = data[17], attributes(attributes(data, 20).get(dcb.IEEE, b""))
        if kind == dcb.RTM_GETDCB:
            return [(kind, data[:20] + attribute(dcb.IEEE, self.shown()))]
        if self.failing:
            self.failing -= 1
            return [(kind, data[:20] + attribute(dcb.IEEE, bytes([256 - 22])))]
        entries = self.entries(ieee.get(dcb.APPS, b""))
        if command == dcb.IEEE_DEL:
            self.apps = [app for app in self.apps if app not in entries]
        else:
            assert len(ieee.get(dcb.ETS, bytes(59))) == 59
            assert len(ieee.get(dcb.PFC, bytes(136))) == 136
            self.ets, self.pfc = ieee.get(dcb.ETS, self.ets)[:59], ieee.get(dcb.PFC, self.pfc)
            self.ets = self.ets[:1] + b"\x08" + self.ets[2:]
            self.apps = list(dict.fromkeys([*self.apps, *entries]))
            table = ieee.get(dcb.TRUST)
            self.trust = [table[i] for i in range(4, len(table), 8)] if table else self.trust
        return [(kind, data[:20] + attribute(dcb.IEEE, b"\0"))]

    def entries(self, table: bytes) -> list[tuple[int, int]]:
        return [(struct.unpack_from("=H", table, i + 6)[0], table[i + 5]) for i in range(0, len(table), 8)]

    def shown(self) -> bytes:
        apps = b"".join(attribute(1, struct.pack("=BBH", 5, priority, code)) for code, priority in self.apps)
        trust = b"".join(attribute(1, bytes([selector])) for selector in self.trust)
        parts = {dcb.ETS: self.ets, dcb.PFC: self.pfc, dcb.APPS: apps, dcb.TRUST: trust}
        return b"".join(attribute(number, value) for number, value in parts.items())


def test_what_a_driver_shows_is_read():
    driver = Driver()
    ((_, answer),) = driver.send(dcb.query("v0"))
    assert dcb.decode("v0", answer) == BEFORE


@pytest.mark.parametrize("policy", ["strict", "weighted"])
def test_what_is_sent_is_what_is_shown_and_the_way_back_too(policy):
    driver = Driver()
    wish = Policy(policy, JOBS, rate=12_500_000, kind="dcb", lossless=True)
    want = dcb.wanted(wish, assign(wish), BEFORE)
    for have, goal in ((BEFORE, want), (want, BEFORE)):
        for request in dcb.requests(goal, have):
            driver.send(request)
        assert dcb.decode("v0", driver.send(dcb.query("v0"))[0][1]) == goal
        assert dcb.requests(goal, goal) == []


def test_bands_are_priorities_and_classes():
    want = dcb.wanted(POLICY, assign(POLICY), BEFORE)
    assert want.apps == ((26, 7), (33, 5), (46, 5))  # 46 is somebody else's and stays
    assert want.class_of == tuple(range(8))
    assert want.lossless == 1 << 7 | 1 << 5
    assert want.trust == (5,)
    few = dcb.wanted(POLICY, assign(POLICY), Dcb("v0", 3, *[(0,) * 8] * 3, 0, (), None))
    assert few.class_of == (0, 0, 0, 0, 0, 0, 1, 2)
    assert few.trust is None
    words = "\n".join(dcb.commands(want))
    assert "dcb ets set dev v0 prio-tc 0:0 1:1 2:2" in words
    assert "dcb app replace dev v0 dscp-prio 26:7 33:5 46:5" in words
    assert "prio-pfc 0:off 1:off 2:off 3:off 4:off 5:on 6:off 7:on" in words


def test_shares_sum_to_a_hundred():
    policy = Policy("weighted", tuple(Job(f"j{i}", (Match(dscp=i),), weight=i + 1.0) for i in range(7)), kind="dcb")
    want = dcb.wanted(policy, assign(policy), BEFORE)
    assert sum(want.shares) == 100
    assert want.shares[7] < want.shares[1]
    assert set(want.selection) == {2}


def test_what_dcb_cannot_do():
    ports = Policy("strict", (Job("a", (Match(sport=1),), band=0),), kind="dcb")
    with pytest.raises(PolicyError, match=r"job\[0\].match: kind 'dcb' knows jobs by DSCP alone"):
        dcb.wanted(ports, assign(ports), BEFORE)
    with pytest.raises(PolicyError, match="is about kind = 'dcb' alone"):
        Policy("fifo", lossless=True)


@lab.isolated
def test_a_device_without_dcb(net):
    with (
        Control("v0", net.directory) as control,
        pytest.raises(RefusedError, match=r"v0 has no DCB.*CONFIG_DCB; kind = 'htb'"),
    ):
        control.install(POLICY)


@lab.isolated
def test_install_failure_and_revert(net):
    driver, send = Driver(), Wire.send

    def both(self, msg, kind, flags):
        return (
            driver.send((msg, kind, flags))
            if kind in (dcb.RTM_GETDCB, dcb.RTM_SETDCB)
            else send(self, msg, kind, flags)
        )

    Wire.send = both
    with Control("v0", net.directory) as control:
        driver.failing = 1
        with pytest.raises(Exception, match="cannot set the priorities of v0: Invalid argument"):
            control.install(POLICY)
        assert dcb.read(control.wire, "v0") == BEFORE
        assert Record.load(net.directory, "v0") is None
        assert control.install(POLICY) == 1
        assert control.install(POLICY) == 0
        assert dcb.read(control.wire, "v0").apps == ((26, 7), (33, 5), (46, 5))
    with Control("v0", net.directory) as control:
        assert control.revert()
        assert dcb.read(control.wire, "v0") == BEFORE

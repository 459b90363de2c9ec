"""Leases: given back when nobody renews, one keeper for each device, and a change that fails takes no lease along."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path

import lab
import pytest

from hrdma.errors import NetlinkError, RefusedError
from hrdma.qos import apply, lease
from hrdma.qos.apply import Control
from hrdma.qos.policy import Job, Match, Policy
from hrdma.qos.record import Record, take_keeper
from hrdma.qos.wire import Wire

POLICY = Policy("tls-rr", (Job("a", (Match(sport=2000),)), Job("b", (Match(dscp=26),))), rate=12_500_000)
OTHER = dataclasses.replace(POLICY, jobs=POLICY.jobs[:1])


def keepers(directory: str) -> list[int]:
    """Processes that keep a lease in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"hrdma.qos.lease" in words and directory.encode() in words:
            found.append(int(path.parent.name))
    return found


@lab.isolated
def test_a_lease_gives_the_device_back_when_its_holder_is_killed(net):
    before = lab.dump()

    def install():
        with Control("v0", net.directory) as control:
            control.install(POLICY, lease=3.0)
            os.kill(os.getpid(), signal.SIGKILL)

    assert lab.ended(lab.child(install)) == signal.SIGKILL
    assert lab.dump() != before
    lab.eventually(lambda: lab.dump() == before and Record.load(net.directory, "v0") is None, 15)
    lab.eventually(lambda: not keepers(net.directory))


@lab.isolated
def test_a_lease_is_renewed_while_it_lives(net):
    with lab.serving(net, POLICY, lease=3.0):
        time.sleep(7)
        assert "htb 4852:" in lab.dump()
    lab.eventually(lambda: "htb" not in lab.dump())
    lab.eventually(lambda: not keepers(net.directory))


@lab.isolated
def test_a_change_that_fails_does_not_bring_its_lease(net):
    kept = Wire.request

    def refuse(self, verb, thing):
        Wire.request = kept
        raise NetlinkError("cannot: the test says so", errno=12)

    with Control("v0", net.directory) as control:
        control.install(POLICY)
        before = lab.dump()
        Wire.request = refuse
        with pytest.raises(NetlinkError, match="the test says so"):
            control.install(OTHER, lease=0.2)
        record = Record.load(net.directory, "v0")
        assert (record.lease, record.pending, record.settled.policy) == (0.0, None, POLICY)
    time.sleep(0.5)
    with Control("v0", net.directory) as control:
        assert control.installed.policy == POLICY
        assert lab.dump() == before
        control.revert()
    lab.eventually(lambda: not keepers(net.directory))


@lab.isolated
def test_a_lease_for_what_is_installed_already(net):
    before = lab.dump()
    with Control("v0", net.directory) as control:
        control.install(POLICY)
        assert control.install(POLICY, lease=3.0) == 0
        assert lab.dump() != before
    lab.eventually(lambda: lab.dump() == before)
    lab.eventually(lambda: not keepers(net.directory))


@lab.isolated
def test_many_changes_have_one_keeper(net):
    with Control("v0", net.directory) as control:
        control.install(POLICY, lease=30.0)
        lab.eventually(lambda: len(keepers(net.directory)) == 1)
        first = keepers(net.directory)
        for _ in range(5):
            control.rotate()
        assert keepers(net.directory) == first
        assert control.revert()
        lab.eventually(lambda: not keepers(net.directory))
        control.install(POLICY, lease=30.0)  # a new lease has a new keeper
        lab.eventually(lambda: len(keepers(net.directory)) == 1)
        assert control.revert()
    lab.eventually(lambda: not keepers(net.directory))


@pytest.mark.parametrize("error", [TimeoutError("busy"), OSError(24, "Too many open files"), RefusedError("not now")])
@lab.isolated
def test_no_failure_ends_the_keeper(net, error):
    """The holder has been killed: a keeper that gives up is missed by nobody."""
    before = lab.dump()
    with Control("v0", net.directory) as control:
        apply.start_keeper = lambda *_: None  # the test is the keeper
        control.install(POLICY, lease=0.2)
    right = take_keeper("v0", net.directory)
    load, opened = Record.load, lease.Control
    failures = ["load", "open", "open", "load again"]

    def failing_load(directory, dev):
        if failures and failures[0].startswith("load"):
            failures.pop(0)
            raise error
        return load(directory, dev)

    def failing_open(dev, directory):
        if failures and failures[0] == "open":
            failures.pop(0)
            raise error
        return opened(dev, directory)

    lease.PACE, lease.Control, Record.load = 0.01, failing_open, failing_load
    try:
        lease.keep("v0", net.directory, right)
    finally:
        Record.load = load
    assert failures == []
    assert lab.dump() == before
    assert Record.load(net.directory, "v0") is None


@lab.isolated
def test_a_folder_by_a_relative_path(net):
    os.chdir(net.directory)
    os.mkdir("state")
    before = lab.dump()
    with Control("v0", "state") as control:
        control.install(POLICY, lease=3.0)
        assert lab.dump() != before
    os.chdir("/")
    lab.eventually(lambda: lab.dump() == before)
    lab.eventually(lambda: Record.load(f"{net.directory}/state", "v0") is None)  # which is removed after that
    lab.eventually(lambda: not keepers(f"{net.directory}/state"))

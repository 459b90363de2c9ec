"""What operators depend on: the host is as it was, whatever happened; nobody else's qdisc is touched; one controller at a time."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import socket
import struct
import time
from pathlib import Path

import lab
import pytest
from pyroute2 import IPRoute

from hrdma.errors import DeviceError, NetlinkError, PolicyError, RefusedError
from hrdma.qos import apply, guard
from hrdma.qos.apply import Control, look
from hrdma.qos.plan import plan
from hrdma.qos.policy import Job, Match, Policy
from hrdma.qos.record import Record, holder
from hrdma.qos.wire import Wire

POLICY = Policy(
    "tls-rr", (Job("a", (Match(sport=2000),)), Job("b", (Match(dscp=26), Match(src="10.9.0.0/24")))), rate=12_500_000
)
FOREIGN = (
    "qdisc add dev v0 root handle 5: htb default 1",
    "class add dev v0 parent 5: classid 5:1 htb rate 10mbit burst 20k",
    "class add dev v0 parent 5:1 classid 5:2 htb rate 5mbit ceil 10mbit prio 3 quantum 3000",
    "qdisc add dev v0 parent 5:2 handle 6: pfifo limit 33",
    "filter add dev v0 parent 5: protocol ip pref 4 u32 match ip dport 80 0xffff flowid 5:2",
    "filter add dev v0 parent 5: protocol ip pref 4 u32 match ip dport 81 0xffff flowid 5:1",
)


def foreign() -> str:
    for words in FOREIGN:
        lab.tc(words)
    return lab.dump()


def token_bucket() -> str:
    lab.tc("qdisc replace dev v0 root handle 8: tbf rate 3mbit burst 12k limit 30k")
    return lab.dump()


@pytest.mark.parametrize("direction", ["egress", "ingress"])
@lab.isolated
def test_revert_is_what_was_before(net, direction):
    policy = dataclasses.replace(POLICY, direction=direction)
    for prepare in (lab.dump, foreign, token_bucket):
        before = prepare()
        with Control("v0", net.directory) as control:
            assert control.install(policy, replace_root=True) > 20
            assert lab.dump() != before
            assert control.install(policy) == 0
            assert control.rotate() > 0
            assert control.revert()
            assert not control.revert()
        assert lab.dump() == before
        assert "hrq" not in Path("/proc/net/dev").read_text()
        assert Record.load(net.directory, "v0") is None


@lab.isolated
def test_a_foreign_root_stays(net):
    before = foreign()
    with Control("v0", net.directory) as control:
        with pytest.raises(RefusedError, match=r"somebody else made: htb 5:; --replace"):
            control.install(POLICY)
        assert lab.dump() == before
        assert control.record is None


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["filter add dev v0 parent 5: protocol ip pref 9 bpf bytecode '1,6 0 0 1,' flowid 5:1"], "filter bpf pref 9"),
        (
            ["filter add dev v0 parent 5: protocol ip pref 9 u32 match u32 0 0 action mirred egress mirror dev lo"],
            "actions",
        ),
        (["qdisc del dev v0 root", "qdisc add dev v0 root handle 5: estimator 1sec 4sec htb"], "rate estimator"),
    ],
)
@lab.isolated
def test_what_could_not_be_put_back_is_not_replaced(net, words, name):
    foreign()
    for line in words:
        lab.tc(line)
    before = lab.dump()
    with Control("v0", net.directory) as control, pytest.raises(RefusedError, match=f"could not be put back: .*{name}"):
        control.install(POLICY, replace_root=True)
    assert lab.dump() == before


@lab.isolated
def test_an_ingress_hook_of_somebody_else_stays(net):
    lab.tc("qdisc add dev v0 clsact")
    lab.tc("filter add dev v0 ingress protocol ip pref 1 u32 match u32 0 0 action mirred egress mirror dev lo")
    before = lab.dump() + lab.tc("filter show dev v0 ingress")
    with Control("v0", net.directory) as control:
        with pytest.raises(RefusedError, match="ingress qdisc already"):
            control.install(dataclasses.replace(POLICY, direction="ingress"))
        control.install(POLICY)  # the other side is free
        control.revert()
    assert lab.dump() + lab.tc("filter show dev v0 ingress") == before


class Cut(BaseException):
    """Stands for the end of the process: nothing of ours runs after it."""


@pytest.mark.parametrize("direction", ["egress", "ingress"])
@pytest.mark.parametrize("how", ["killed", "refused"])
@pytest.mark.slow
@lab.isolated
def test_a_failure_at_every_step(net, how, direction):
    """At every operation of install, of another policy in place of it, and of revert: the host is as before the command."""
    first = dataclasses.replace(POLICY, direction=direction)
    second = dataclasses.replace(first, jobs=(*first.jobs[1:], Job("c", (Match(dport=9),))), floor=50_000)
    before = foreign()

    def installed() -> str:
        return lab.dump() + (lab.dump(f"hrq{socket.if_nametoindex('v0')}") if direction == "ingress" else "")

    done = 0
    while not attempt(net, how, done, lambda control: control.install(first, replace_root=True)):
        Control("v0", net.directory).close()
        assert lab.dump() == before, done
        done += 1
    assert done > 20
    one = installed()
    done = 0
    while not attempt(net, how, done, lambda control: control.install(second)):
        with Control("v0", net.directory) as control:
            assert control.installed.policy == first
        with Wire() as wire:
            assert plan(look(wire, "v0")[1], control.installed.tree.objects) == ()
        assert sorted(installed().splitlines()) == sorted(one.splitlines()), done
        done += 1
    assert done > 5
    done = 0
    while not attempt(net, how, done, lambda control: control.revert()):
        Control("v0", net.directory).close()
        assert lab.dump() == before, done
        with Control("v0", net.directory) as control:
            control.install(second, replace_root=True)
        done += 1
    assert lab.dump() == before
    assert Record.load(net.directory, "v0") is None


def attempt(net, how: str, at: int, action) -> bool:
    """Does something in which the request with number `at` is the last one that is made, or is refused; whether it got through."""
    if how == "killed":
        pid = os.fork()
        if not pid:
            _sabotage(at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            with Control("v0", net.directory) as control:
                action(control)
            os._exit(0)
        return os.waitpid(pid, 0)[1] == 0
    kept = Wire.request

    def refuse():
        Wire.request = kept
        raise NetlinkError("cannot: the test says so", errno=12)

    with Control("v0", net.directory) as control:
        _sabotage(at, refuse)
        try:
            action(control)
        except NetlinkError as error:
            assert "the test says so" in str(error)
            return False
        finally:
            Wire.request = kept
    return True


def _sabotage(at: int, action) -> None:
    count, kept = iter(range(1 << 30)), Wire.request

    def request(self, verb, thing):
        if next(count) == at:
            action()
        kept(self, verb, thing)

    Wire.request = request


@lab.isolated
def test_two_at_once_exclude_each_other(net):
    with Control("v0", net.directory):
        assert holder(net.directory, "v0") == os.getpid()
        with pytest.raises(RefusedError, match=f"in the hands of process {os.getpid()}"):
            Control("v0", net.directory)
    assert holder(net.directory, "v0") == 0
    Control("v0", net.directory).close()


@lab.isolated
def test_a_lease_gives_the_device_back_when_its_holder_is_killed(net):
    before = lab.dump()
    pid = os.fork()
    if not pid:
        with Control("v0", net.directory) as control:
            control.install(POLICY, lease=3.0)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert lab.dump() != before
    deadline = time.monotonic() + 15
    while lab.dump() != before or Record.load(net.directory, "v0"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    time.sleep(1.2)  # the keeper ends


@lab.isolated
def test_somebody_who_takes_over_meanwhile_is_left_alone(net):
    with Control("v0", net.directory) as control:
        control.install(POLICY)
        lab.tc("qdisc replace dev v0 root handle 9: tbf rate 1mbit burst 10k limit 20k")
        before = lab.dump()
        with pytest.raises(RefusedError, match=r"neither ours nor the one before: tbf 9:.*--forget"):
            control.revert()
        with pytest.raises(RefusedError, match="somebody else made: tbf 9:"):
            control.rotate()
        assert lab.dump() == before
    assert apply.forget("v0", net.directory)
    assert not apply.forget("v0", net.directory)
    assert lab.dump() == before


@lab.isolated
def test_devices_that_are_not_there_or_go_away(net):
    with pytest.raises(DeviceError, match=r"no device 'eth9' in this network namespace; there are: .*v0"):
        Control("eth9", net.directory)
    with pytest.raises(DeviceError, match="is not the name of a device"):
        Control("../eth9", net.directory)
    assert os.listdir(net.directory) == []
    with Control("v0", net.directory) as control, IPRoute() as kernel:
        control.install(POLICY)
        kernel.link("del", ifname="v0")
        with pytest.raises(DeviceError, match="no device 'v0'"):
            control.rotate()
    with pytest.raises(DeviceError):
        Control("v0", net.directory)
    assert Record.load(net.directory, "v0") is None


@lab.isolated
def test_devices_that_are_refused(net):
    with Control("lo", net.directory) as control, pytest.raises(RefusedError, match=r"lo is loopback.*--anyway"):
        control.install(POLICY)
    with IPRoute() as kernel:
        kernel.route("add", dst="default", gateway=lab.THERE)
    before = lab.dump()
    os.environ["SSH_CONNECTION"] = "10.9.0.2 1 10.9.0.1 22"
    with Control("v0", net.directory) as control:
        with pytest.raises(RefusedError, match=r"default route.*SSH session.*--lease"):
            control.install(POLICY)
        assert lab.dump() == before
        control.install(POLICY, anyway=True)
        control.revert()
        del os.environ["SSH_CONNECTION"]
        if not guard.over_ssh():
            control.install(POLICY)


@lab.isolated
def test_rates_above_the_link(net):
    before = lab.dump()
    with Control("v0", net.directory) as control:
        with pytest.raises(PolicyError, match=r"qos.rate: 100gbit is more than the link of v0 has: 10gbit"):
            control.install(dataclasses.replace(POLICY, rate=12_500_000_000))
        with pytest.raises(PolicyError, match=r"2 floors of 8gbit are more than the 10gbit"):
            control.install(dataclasses.replace(POLICY, rate=0, floor=1_000_000_000))
    assert lab.dump() == before


@lab.isolated
def test_without_the_capability_it_says_so(net):
    header, nothing = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0)), ctypes.create_string_buffer(24)
    assert lab.libc.capset(header, nothing) == 0
    with pytest.raises(RefusedError, match="needs CAP_NET_ADMIN"):
        Control("v0", net.directory)
    with Wire() as wire, pytest.raises(RefusedError, match="CAP_NET_ADMIN"):
        wire.request("add", apply.wish_of(POLICY, "htb", look(wire, "v0")[0]).tree.objects[0])


@lab.isolated
def test_a_kernel_without_the_kind(net):
    """Every kind that this kernel lacks is an error that names the option; nothing is changed."""
    before = lab.dump()
    strict = Policy("strict", (Job("a", (Match(sport=2000),), band=0),), rate=12_500_000)
    with Control("v0", net.directory) as control:
        for kind, option in (("prio", "CONFIG_NET_SCH_PRIO"), ("ets", "CONFIG_NET_SCH_ETS")):
            try:
                control.install(dataclasses.replace(strict, kind=kind))
            except NetlinkError as error:
                assert option in str(error)
                assert "kind = 'htb'" in str(error)
            else:
                control.revert()
            assert lab.dump() == before


@lab.isolated
def test_auto_takes_the_next_back_end_where_the_first_is_missing(net):
    kept = Wire.request

    def without_htb(self, verb, thing):
        if getattr(thing, "kind", "") == "htb":
            raise self.refusal("add qdisc htb", thing, OSError(2, "No such file", "Specified qdisc kind is unknown"))
        kept(self, verb, thing)

    Wire.request = without_htb
    before = lab.dump()
    with Control("v0", net.directory) as control:
        with pytest.raises(NetlinkError, match=r"this kernel does not have htb .*CONFIG_NET_SCH_HTB"):
            control.install(POLICY)  # a policy that rotates has no other
        fixed = dataclasses.replace(POLICY, policy="tls-one")
        try:
            control.install(fixed)
        except NetlinkError as error:
            assert "CONFIG_NET_SCH_PRIO" in str(error)  # the last one that was tried
            assert control.record is None
        else:
            assert control.installed.kind in ("ets", "prio")
            control.revert()
    assert lab.dump() == before

"""From one tree to another: other kinds under one handle, other directions, and what stays when that fails."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import socket
from pathlib import Path

import cut
import lab
import pytest
from pyroute2 import IPRoute

from hrdma.errors import DeviceError, NetlinkError, RefusedError
from hrdma.qos.apply import Control
from hrdma.qos.kinds import flower, fq, pfifo
from hrdma.qos.objects import ROOT, Filter, Link, Qdisc, TClass
from hrdma.qos.order import assign
from hrdma.qos.plan import Op, plan
from hrdma.qos.policy import Job, Match, Policy
from hrdma.qos.proposal import look, slots_of, wish_of
from hrdma.qos.record import Record, holder
from hrdma.qos.tree import Device, build
from hrdma.qos.wire import Wire

POLICY = Policy("tls-one", (Job("a", (Match(sport=2000),)), Job("b", (Match(dscp=26),))), rate=12_500_000)
FIFO = dataclasses.replace(POLICY, policy="fifo")
INWARD = dataclasses.replace(POLICY, direction="ingress")


def settled(net: lab.Net) -> bool:
    """Whether the device has what the record says, and nothing is left to do."""
    with Control("v0", net.directory) as control, Wire() as wire:
        return plan(look(wire, "v0")[1], control.installed.tree.objects) == ()


@lab.isolated
def test_policies_of_all_shapes_follow_one_another(net):
    before = lab.dump()
    others = [FIFO, POLICY, INWARD, dataclasses.replace(INWARD, policy="fifo"), FIFO, INWARD, POLICY]
    for policy in others:
        with Control("v0", net.directory) as control:
            assert control.install(policy) > 0
            assert control.install(policy) == 0
        assert settled(net), policy
        assert ("hrq" in "".join(name for _, name in socket.if_nameindex())) == (policy.direction == "ingress")
    with Control("v0", net.directory) as control:
        assert control.revert()
    assert lab.dump() == before


def test_another_kind_under_a_handle_that_is_taken():
    """The kernel has no `replace` for that."""
    policy = dataclasses.replace(POLICY, acks=0)  # theirs hang at the outer qdisc, which stays
    want = build(policy, "htb", Device("v0", 3, 1000), {"a": 0, "b": 1}, assign(POLICY)).objects
    leaves = [thing for thing in want if isinstance(thing, Qdisc) and thing.kind == "pfifo"]
    paced = [dataclasses.replace(thing, kind="fq", options=fq.encode(fq.Fq())) for thing in leaves]
    after = [paced[leaves.index(thing)] if thing in leaves else thing for thing in want]
    assert plan(want, after) == tuple(
        op for old, new in zip(leaves, paced) for op in (Op("delete", old), Op("add", new))
    )
    single = build(FIFO, "htb", Device("v0", 3, 1000), {"a": 0, "b": 1}, {}).objects
    first, second, *rest = plan(want, single)
    assert (first.verb, first.thing.kind, second.verb, second.thing.kind) == ("delete", "htb", "add", "pfifo")
    assert rest == []  # classes, filters and queues have gone with the inner qdisc
    foreign = Qdisc("v0", "htb", 0x50000, ROOT)
    below = [TClass("v0", "htb", 0x50001, 0x50000), Qdisc("v0", "pfifo", 0x60000, 0x50001, pfifo.encode(pfifo.Pfifo()))]
    assert {op.verb for op in plan([foreign, *below], want, True)} == {"replace", "add"}


@pytest.mark.parametrize("how", ["killed", "refused"])
@pytest.mark.slow
@lab.isolated
def test_a_change_of_direction_that_fails_leaves_the_old_policy(net, how):
    lab.tc("qdisc replace dev v0 root handle 8: tbf rate 3mbit burst 12k limit 30k")
    before = lab.dump()
    for first, second in ((POLICY, INWARD), (INWARD, POLICY)):
        with Control("v0", net.directory) as control:
            control.install(first, replace_root=True)
        done = 0
        while not cut.attempt(net, how, done, lambda control, policy=second: control.install(policy)):
            with Control("v0", net.directory) as control:
                assert control.installed.policy == first, done
            assert settled(net), done
            done += 1
        assert done > 20
        assert settled(net)
    with Control("v0", net.directory) as control:
        assert control.revert()
    assert lab.dump() == before
    assert Record.load(net.directory, "v0") is None


@lab.isolated
def test_a_change_of_direction_to_where_somebody_elses_hook_is(net):
    lab.tc("qdisc add dev v0 ingress")
    with Control("v0", net.directory) as control:
        control.install(POLICY)
        before = lab.dump()
        with pytest.raises(RefusedError, match="ingress qdisc already"):
            control.install(INWARD)
        assert control.installed.policy == POLICY
        assert lab.dump() == before


def numberless(text: str) -> str:
    """What tc says without the numbers that the kernel gives to hash tables of filters, which are others each time."""
    return re.sub(r"\b(fh|ht) 8[0-9a-f]{2}\b", r"\1", text)


@pytest.mark.parametrize("first", [None, POLICY])
@lab.isolated
def test_a_record_that_cannot_be_written_undoes_the_change(net, first):
    kept, writes = Path.write_text, []

    def full(self, text):
        writes.append(self)
        if len(writes) > 1:  # what is pending still finds room, that it is done does not
            kept(self, text[:100])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return kept(self, text)

    with Control("v0", net.directory) as control:
        if first:
            control.install(first)
        before = numberless(lab.dump())
        Path.write_text = full
        try:
            with pytest.raises(RefusedError, match=r"cannot write the record .*No space left on device"):
                control.install(FIFO)
        finally:
            Path.write_text = kept
        assert len(writes) > 1
        assert numberless(lab.dump()) == before
        assert [name for name in os.listdir(net.directory) if name.endswith(".part")] == []
        assert control.install(FIFO) > 0
        assert control.install(FIFO) == 0
        assert control.revert()


@pytest.mark.parametrize("when", ["open", "closed"])
@lab.isolated
def test_a_device_that_goes_takes_its_ifb_along(net, when):
    control = Control("v0", net.directory)
    control.install(INWARD)
    if when == "closed":
        control.close()
    with IPRoute() as kernel:
        kernel.link("del", ifname="v0")
    if when == "closed":
        with pytest.raises(DeviceError, match="no device 'v0'"):
            Control("v0", net.directory)
    else:
        control.close()
    assert [name for _, name in socket.if_nameindex()] == ["lo"]
    assert Record.load(net.directory, "v0") is None


@pytest.mark.parametrize("policy", [POLICY, INWARD], ids=["egress", "ingress"])
@lab.isolated
def test_without_u32_flower_takes_its_place(net, policy):
    kept, before = Wire.request, lab.dump()

    def without_u32(self, verb, thing):
        if isinstance(thing, Filter) and thing.kind == "u32":
            raise self.refusal("add filter u32", thing, OSError(2, "No such file", "TC classifier not found"))
        kept(self, verb, thing)

    Wire.request = without_u32
    with Control("v0", net.directory) as control:
        try:
            control.install(policy)
        except NetlinkError as error:  # it was tried
            assert error.missing == "flower"
            assert "CONFIG_NET_CLS_FLOWER" in str(error)
            assert control.record is None
        else:
            assert control.installed.classifier == "flower"
            assert control.install(policy) == 0
            assert control.revert()
    assert lab.dump() == before


def test_trees_with_flower_have_the_same_shape():
    slots, device = {"a": 0, "b": 1}, Device("v0", 3, 1000)
    tree = build(INWARD, "htb", device, slots, assign(POLICY), "flower")
    filters = [thing for thing in tree.objects if isinstance(thing, Filter)]
    assert {thing.kind for thing in filters} == {"flower"}
    specs = [flower.decode(thing.options) for thing in filters]
    assert [(spec.ethertype, spec.proto, spec.sport, spec.dscp) for spec in specs] == [
        *((version, proto, 2000, None) for version in (0x800, 0x86DD) for proto in ("tcp", "udp")),
        *((version, None, None, 26) for version in (0x800, 0x86DD)),
        (0, None, None, None),
    ]
    (link,) = (thing for thing in tree.objects if isinstance(thing, Link))
    assert specs[-1].redirect == link.index
    assert len({(thing.parent, thing.pref) for thing in filters}) == len(filters)


def test_a_weighted_job_keeps_its_class_when_another_goes():
    policy = Policy("weighted", tuple(Job(f"j{i}", weight=i + 1.0) for i in range(3)))
    device = Device("v0", 3, 12_500_000)
    before = build(policy, "ets", device, slots_of(policy, {}, 15), assign(policy)).classes
    fewer = dataclasses.replace(policy, jobs=policy.jobs[1:])
    slots = slots_of(fewer, {"j0": 0, "j1": 1, "j2": 2}, 15)
    assert build(fewer, "ets", device, slots, assign(fewer)).classes == {name: before[name] for name in ("j1", "j2")}
    assert slots_of(fewer, {"j1": 99}, 15) == {"j1": 0, "j2": 1}  # from a policy with more numbers


@lab.isolated
def test_asking_who_holds_a_device_disturbs_nobody(net):
    ready, go = os.pipe()

    def ask():
        os.write(go, b"1")
        while True:
            holder(net.directory, "v0")

    Control("v0", net.directory).close()
    asker = lab.child(ask)
    lab.word(ready)
    for _ in range(300):
        Control("v0", net.directory).close()
    assert os.waitpid(asker, os.WNOHANG) == (0, 0), "nobody has asked"
    lab.kill(asker)
    assert holder(net.directory, "v0") == 0


@lab.isolated
def test_records_of_another_version_are_named(net):
    with Control("v0", net.directory) as control:
        control.install(POLICY)
    (name,) = (name for name in os.listdir(net.directory) if name.endswith(".json"))
    path = os.path.join(net.directory, name)
    with open(path) as file:
        text = file.read()
    for wrong in (text.replace('"version": ', '"version": 1'), text.replace('"rotation"', '"turn"'), "[]", "{}"):
        assert wrong != text
        with open(path, "w") as file:
            file.write(wrong)
        with pytest.raises(RefusedError, match=r"is not a record of this version of hrdma .*remove it"):
            Control("v0", net.directory)
    with open(path, "w") as file:
        file.write(text)
    with Control("v0", net.directory) as control:
        assert control.revert()


@lab.isolated
def test_files_are_named_by_a_number_that_no_other_namespace_gets(net):
    from hrdma.qos.files import stem

    here = stem("v0")
    with net.other():
        assert stem("v0") != here
    names = {here}
    for _ in range(20):
        lab.unshare(lab.CLONE_NEWNET)  # the one before has gone, and its inode is free
        names.add(stem("v0"))
    assert len(names) == 21


def test_places_by_counters_are_kept_without_new_ones():
    from hrdma.qos.order import Live
    from hrdma.qos.state import State

    policy = Policy("least-attained", (Job("a"), Job("b")), rate=1000, floor=1)
    state = State("v0", 3, False, 1, ())
    first = wish_of(policy, "htb", state, None, 0, {"a": Live(500), "b": Live(1)})
    assert (first.places["a"].band, first.places["b"].band) == (1, 0)
    again = wish_of(policy, "htb", state, first)
    assert again.places == first.places
    assert wish_of(policy, "htb", state, None).places["a"].band == 0

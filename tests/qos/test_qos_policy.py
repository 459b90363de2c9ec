"""Policies from text: every error has its line and key; units; which band a job has; the difference of two trees."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path

import pytest

from hrdma.errors import PolicyError, RefusedError
from hrdma.qos import ladder
from hrdma.qos.kinds import htb, pfifo
from hrdma.qos.objects import INGRESS, ROOT, Filter, Link, Qdisc, TClass
from hrdma.qos.order import Live, Place, assign, share_bands
from hrdma.qos.plan import Op, back, command, plan
from hrdma.qos.policy import BANDS, POLICIES, Job, Match, Policy, load, parse
from hrdma.qos.proposal import candidates, slots_of
from hrdma.qos.state import Counter
from hrdma.qos.status import Meter
from hrdma.qos.tree import Device, Tree, build
from hrdma.units import rate_text, rate_value, seconds_value, size_value

GOOD = """[qos]
policy = "tls-rr"
interval = "500ms"
rate = "10gbit"

[[job]]
name = "resnet-1"
model = "resnet32"
size = "1.9MB"
match = [{ sport = 2000 }, { dport = 3000, proto = "tcp" }]

[[job]]
name = "bert"
match = [{ dscp = 26 }]
"""


def test_a_good_policy(tmp_path):
    policy = parse(GOOD)
    assert (policy.interval, policy.rate) == (0.5, 1_250_000_000)
    assert policy.jobs[0] == Job("resnet-1", (Match(sport=2000), Match(dport=3000, proto="tcp")), "resnet32", 1_900_000)
    path = tmp_path / "p.toml"
    path.write_text(GOOD)
    assert load(str(path)) == policy


def test_the_readmes_policy():
    text = (Path(__file__).parents[2] / "qos" / "README.md").read_text()
    policy = parse(text.split("```toml")[1].split("```")[0])
    assert policy.jobs[0].match[3] == Match(cgroup="jobs/a")
    assert {f"`{name}`" for name in POLICIES} <= set(text.split())


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "text"),
    [
        ('"10gbit"', '"10gbps"', 4, "qos.rate", "tc reads it as bytes per second, which would be 80gbit; for bits per second write 10gbit"),
        ('"10gbit"', '"0gbit"', 4, "qos.rate", "is zero"),
        ('"10gbit"', '"10"', 4, "qos.rate", "not a number with a unit"),
        ('"10gbit"', "10", 4, "qos.rate", "not a number with a unit"),
        ('"500ms"', '"1ms"', 3, "qos.interval", "not between 100 ms and 24 h"),
        ('"tls-rr"', '"tls"', 2, "qos.policy", "'tls' is none of fifo, tls-one"),
        ('"tls-rr"', '"strict"', 6, "job[0].band", "needs a band for every job"),
        ("interval", "intervall", 3, "qos.intervall", "unknown; there are:"),
        ("dscp = 26", "dscp = 104", 14, "job[1].match[0].dscp", "104 is not a DSCP, 0 to 63; as a TOS or traffic class byte it would be DSCP 26"),
        ("dscp = 26", "dscp = 64", 14, "job[1].match[0].dscp", "it would be DSCP 16"),
        ("dscp = 26", "sport = 2000", 14, "job[1].match[0]", "overlaps job[0].match[0], {'sport': 2000}, of job 'resnet-1'"),
        ("dscp = 26", "sport = 70000", 14, "job[1].match[0].sport", "70000 is not a port"),
        ("dscp = 26", 'proto = "tcp"', 14, "job[1].match[0]", "matches everything"),
        ("dscp = 26", 'src = "10.1.0.1/8"', 14, "job[1].match[0].src", "has host bits set"),
        ("dscp = 26", 'src = "10.0.0.0/8", dst = "fd00::/8"', 14, "job[1].match[0]", "different IP versions"),
        ("dscp = 26", 'cgroup = "a/../b"', 14, "job[1].match[0].cgroup", "not a path below"),
        ("dscp = 26", 'cgroup = "a", sport = 1', 14, "job[1].match[0].cgroup", "stands alone"),
        ('name = "bert"', 'name = "resnet-1"', 13, "job[1].name", "is the name of job[0] too"),
        ('name = "bert"', 'name = "a b"', 13, "job[1].name", "is not a name"),
        ('name = "bert"', "", 12, "job[1]", "needs a name"),
        ('"1.9MB"', '"1.9MBit"', 9, "job[0].size", "unknown unit 'MBit'"),
        ('policy = "tls-rr"', "policy = ", 2, "file", "not TOML"),
        ('"10gbit"', '"1kbit"', 1, "qos.floor", "2 floors of 12500 bytes per second are more than the link's 125"),
        ("[qos]", "[qos]\nmost_jobs = 1", 13, "job[1]", "2 jobs; at most 1"),
        ('"10gbit"', '"10gbit"\nacks = 5', 5, "qos.acks", "not a number with a unit"),
        ('"10gbit"', '"10gbit"\nacks = true', 5, "qos.acks", "not a number with a unit"),
        ('"tls-rr"', '"fifo"\nacks = "1mbit"', 3, "qos.acks", "no bands for them to go before"),
        ("dscp = 26 }]", "dscp = 26 }]\nanswers = 104", 15, "job[1].answers", "it would be DSCP 26"),
        ("dscp = 26 }]", "dscp = 26 }]\nanswers = 26", 15, "job[1].answers", "overlaps job[1].match[0], {'dscp': 26}"),
        ('"10gbit"', '"10gbit"\n[[jobs]]', 5, "jobs", "unknown; there are: job, qos"),
        ('"10gbit"', '"10gbit"\nanswer_pool = [64]', 5, "qos.answer_pool", "it would be DSCP 16"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(old, new, line, key, text):
    assert old in GOOD
    with pytest.raises(PolicyError) as caught:
        parse(GOOD.replace(old, new, 1))
    assert text in str(caught.value)
    assert (caught.value.line, caught.value.key) == (line, key)


def test_sockets_of_a_cgroup_do_not_say_what_arrives():
    with pytest.raises(PolicyError, match=r"job\[0\]\.match\[0\]\.cgroup: is about sockets that send"):
        Policy("fifo", (Job("a", (Match(cgroup="a"),)),), direction="ingress")


def test_the_same_in_python_has_a_key_and_no_line():
    with pytest.raises(PolicyError, match=r"^job\[0\]\.match\[0\]\.dscp: 104") as caught:
        Policy("fifo", (Job("a", (Match(dscp=104),)),))
    assert caught.value.line == 0


def test_networks_overlap_by_their_addresses():
    Policy("fifo", (Job("a", (Match(src="10.0.0.0/9"),)), Job("b", (Match(src="10.128.0.0/9"),))))
    with pytest.raises(PolicyError, match="overlaps"):
        Policy("fifo", (Job("a", (Match(src="10.0.0.0/8"),)), Job("b", (Match(src="10.1.0.0/16"),))))


def test_a_thousand_jobs_are_checked_in_a_moment():
    start = time.perf_counter()
    Policy("fifo", tuple(Job(f"j{i}", (Match(sport=i + 1), Match(dport=i + 1))) for i in range(1000)))
    assert time.perf_counter() - start < 5


def test_units():
    assert [rate_value(text) for text in ("8bit", "100mbit", "2.5Gbit", "1tbit")] == [
        1,
        12_500_000,
        312_500_000,
        125 * 10**9,
    ]
    assert [rate_text(rate) for rate in (1, 12_500_000, 1.25e9)] == ["8bit", "100mbit", "10gbit"]
    assert [size_value(text) for text in ("64KiB", "1.9MB")] == [65536, 1_900_000]
    assert seconds_value("2min") == 120


# --- bands ---


def named(count: int, **more) -> tuple[Job, ...]:
    return tuple(Job(f"j{i}", (Match(sport=2000 + i),), **more) for i in range(count))


@pytest.mark.parametrize("count", [1, 6, 7, 8, 20, 21, 100])
@pytest.mark.parametrize("rotation", [0, 1, 5, 107])
def test_tensorlights_mapping(count, rotation):
    places = assign(Policy("tls-rr", named(count)), rotation)
    per = math.ceil(count / 7)
    assert [places[f"j{i}"].band for i in range(count)] == [(i + rotation) % count // per for i in range(count)]


def test_tls_one_stays():
    policy = Policy("tls-one", named(5))
    assert assign(policy, 3) == assign(policy, 0)


def test_groups_are_ordered_by_size_interleaved_or_not_and_never_beyond_the_last_band():
    models = [("big", 100), ("small", 1), ("middle", 10)]
    jobs = tuple(Job(f"j{i}", (), *models[i % 3]) for i in range(21))
    bands = [place.band for place in assign(Policy("tls-rr", jobs)).values()]
    assert [sorted({bands[i] for i in range(start, 21, 3)}) for start in (1, 2, 0)] == [[0, 1], [2, 3], [4, 5]]
    turned = [place.band for place in assign(Policy("tls-rr", jobs), 1).values()]
    assert turned != bands
    assert [sorted({turned[i] for i in range(start, 21, 3)}) for start in (1, 2, 0)] == [[0, 1], [2, 3], [4, 5]]
    for counts in ([1], [14, 1, 1, 1, 1, 1, 1], [1] * 9, [20, 1, 1, 1], [3, 3, 1]):
        shares = share_bands(counts)
        assert all(first >= 0 and first + share <= BANDS for first, share in shares), counts
        assert [first for first, _ in shares] == sorted(first for first, _ in shares)


def test_orders_by_live_counters():
    jobs = (Job("a", size=5), Job("b", size=9), Job("c", size=7, best_band=2))
    assert [p.band for p in assign(Policy("smallest-first", jobs)).values()] == [0, 2, 2]
    live = {"a": Live(100, 20.0), "b": Live(1, 1.0)}
    assert [p.band for p in assign(Policy("smallest-first", jobs), live=live).values()] == [2, 0, 2]
    assert [p.band for p in assign(Policy("least-attained", jobs), live=live).values()] == [2, 1, 2]


def test_the_meter_sees_updates_between_pauses():
    meter, one = Meter(), Tree("htb", (), {}, counted={"a": 8}, answers={"a": 9})
    for total, backlog in ((0, 0), (10, 5), (30, 0), (30, 0), (30, 0), (40, 0), (40, 0), (4, 0)):
        meter.look(one, {8: Counter(nbytes=total - 1, backlog=backlog), 9: Counter(nbytes=1)} if total else {})
    assert meter.live["a"] == Live(44, 20.0, 4)  # (30 + 10) / 2; the last look is of a class made anew
    meter.look(Tree("htb", (), {}), {})
    assert meter.live == {}


def test_a_meter_goes_on_from_an_earlier_ones_counter():
    meter = Meter()
    for total, attained in ((1000, 1000), (300, 1300), (300, 1300), (350, 1350)):  # the class is made anew once
        meter.look(Tree("htb", (), {}, counted={"a": 8}), {8: Counter(nbytes=total)})
        assert meter.live["a"].attained == attained
        meter = Meter(meter.live)  # as after a restart, or by a command


def test_slots_stay_and_the_smallest_free_ones_are_taken():
    assert slots_of(Policy("fifo", named(3)), {"j1": 0, "gone": 1}, 9) == {"j0": 1, "j1": 0, "j2": 2}


# --- trees and differences ---

DEVICE = Device("v0", 5, 12_500_000, queues=8)


def objects(policy: Policy, kind: str = "htb", rotation: int = 0):
    return build(policy, kind, DEVICE, slots_of(policy, {}, 1000), assign(policy, rotation)).objects


@pytest.mark.parametrize("kind", ["htb", "prio", "ets", "mqprio"])
@pytest.mark.parametrize("policy", ["fifo", "strict", "tls-one", "weighted", "tls-rr"])
def test_every_tree_is_what_it_says_and_planned_once(kind, policy):
    wish = Policy(policy, named(9, band=3), rate=12_500_000, kind=kind)
    if kind != "htb" and (policy == "tls-rr" or (policy == "weighted" and kind != "ets")):
        with pytest.raises(PolicyError, match="kind = 'htb'"):
            candidates(wish)
        return
    want = objects(wish, kind)
    ops = plan([], want)
    assert [op.verb for op in ops] == ["add"] * len(want)
    assert plan(want, want) == ()
    assert back(want, [Qdisc("v0", "noqueue", 0, ROOT)])[0].verb == "delete"
    for op in ops:
        assert command(op).startswith("tc ")
        assert getattr(op.thing, "kind", "") in command(op)


def test_a_rotation_changes_rates_of_rungs_and_nothing_else():
    policy = Policy("tls-rr", named(7))
    ops = plan(objects(policy), objects(policy, rotation=1))
    assert {(op.verb, type(op.thing)) for op in ops} == {("change", TClass)}
    for op in ops:
        spec = htb.decode(op.thing.options)
        assert op.thing.handle & 7  # never a leaf
        assert spec.rate in (ladder.ENDLESS, ladder.floor_of(policy.floor)[0])
    assert len(ops) == 6 + 6  # six jobs move back by one rung, one goes up by six


def test_a_job_that_goes_loses_its_filters_first_and_its_leaf_before_its_rungs():
    policy = Policy("tls-one", named(2))
    ops = plan(objects(policy), objects(dataclasses.replace(policy, jobs=policy.jobs[:1])))
    deleted = [op.thing for op in ops if op.verb == "delete"]
    kinds = [type(thing) for thing in deleted]
    assert kinds == [Filter] * 3 + [TClass] * 8
    assert [thing.handle & 7 for thing in deleted[3:]] == list(range(8))


def test_somebody_elses_root():
    want = objects(Policy("tls-one", named(1)))
    root = Qdisc("v0", "htb", 0x50000, ROOT, htb.encode(htb.HtbQdisc(1)))
    with pytest.raises(RefusedError, match="--replace"):
        plan([root], want)
    assert plan([root], want, replace=True)[0] == Op("replace", want[0])
    for lost, text in (
        (dataclasses.replace(root, kind="cake"), "qdisc cake 5:"),
        (dataclasses.replace(root, blocks=(0, 7)), "shared filter block 7"),
        (dataclasses.replace(root, offloaded=True), "hardware offload"),
        (dataclasses.replace(root, extras=("size table",)), "size table of htb 5:"),
    ):
        with pytest.raises(RefusedError, match=f"could not be put back: {text}"):
            plan([lost], want, replace=True)
    bpf = Filter("v0", "bpf", 0x50000, 3, 0x800, 1)
    with pytest.raises(RefusedError, match="filter bpf pref 3 of 5:"):
        plan([root, bpf], want, replace=True)
    beside = Filter("v0", "bpf", 0xFFFFFFF2, 3, 0x800, 1)  # on the ingress hook: stays where it is
    assert plan([root, Qdisc("v0", "clsact", 0xFFFF0000, INGRESS), beside], want, replace=True)


def test_the_way_back_from_any_point():
    want = objects(Policy("tls-one", named(2), direction="ingress"))
    before = [Qdisc("v0", "pfifo", 0x70000, ROOT, pfifo.encode(pfifo.Pfifo(5)))]
    ops = back([*before, *want], before)
    assert [(op.verb, type(op.thing)) for op in ops] == [("delete", Qdisc), ("delete", Link)]
    assert back(before, before) == ()
    with pytest.raises(RefusedError, match="neither ours nor the one before"):
        back([dataclasses.replace(before[0], handle=0x90000)], before)


@pytest.mark.parametrize("floor", [1, 12_500, 125_000, 10**7])
def test_floors_settle_in_time_and_are_not_below_what_is_asked(floor):
    rate, overhead = ladder.floor_of(floor)
    assert (ladder.LONGEST + overhead) / rate <= ladder.SETTLE * 1.001
    assert rate * ladder.TYPICAL / (ladder.TYPICAL + overhead) >= floor * 0.999


def test_weights_are_in_the_quanta():
    policy = Policy("weighted", tuple(Job(f"j{i}", (), weight=weight) for i, weight in enumerate((0.5, 1.0, 4.0))))
    places = assign(policy)
    assert places["j2"] == Place(0, 4.0)
    leaves = {thing.handle: htb.decode(thing.options).quantum for thing in objects(policy) if isinstance(thing, TClass)}
    quanta = [leaves[ladder.leaf_of(slot)] for slot in range(3)]
    assert [quantum / quanta[0] for quantum in quanta] == [1, 2, 8]

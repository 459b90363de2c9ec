"""What goes before all bands: bare acknowledgements, known by their headers, bounded by their rate; and answers of jobs."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import lab
import pytest
from pyroute2 import IPRoute
from windows import one_good

from hrdma.errors import PolicyError
from hrdma.qos import ladder
from hrdma.qos.apply import Control
from hrdma.qos.kinds import htb, tbf, u32
from hrdma.qos.members import Peer, effective
from hrdma.qos.objects import Qdisc, TClass
from hrdma.qos.order import assign
from hrdma.qos.policy import BANDS, Job, Match, Policy
from hrdma.qos.proposal import slots_of
from hrdma.qos.state import Counter, counters
from hrdma.qos.tree import FIRST, Device, Tree, build, check_kind

RATE = 1_000_000  # 8 Mbit/s: little to do for a busy machine
DEVICE = Device("v0", 5, RATE)
FIN, SYN, RST, PSH, ACK, URG, ECE, CWR = (1 << bit for bit in range(8))

# --- which packets these are ---


def packet(flags: int, words: int = 8, data: int = 0, version: int = 4, **odd: int) -> bytes:
    """IP and TCP headers, the latter of so many words, and data; no checksums."""
    tcp = struct.pack("!HHIIBBHHH", 5001, 4000, 1, 2, words << 4, flags, 500, 0, 0) + bytes(4 * words - 20 + data)
    if version == 6:
        return struct.pack("!IHBB32x", 6 << 28, len(tcp), odd.get("proto", 6), 64) + tcp
    options, length = odd.get("options", 0), 20 + 4 * odd.get("options", 0) + len(tcp)
    head = struct.pack(
        "!BBHHHBBH8x", 0x45 + options, 0, length, 7, odd.get("fragment", 0x4000), 64, odd.get("proto", 6), 0
    )
    return head + bytes(4 * options) + tcp


def known(data: bytes) -> bool:
    """Whether one of the filters takes it, as u32 does: by words of it under a mask."""
    protocol = 0x0800 if data[0] >> 4 == 4 else 0x86DD
    return any(
        all(int.from_bytes(data[at : at + 4], "big") & mask == value for value, mask, at in spec.keys)
        for ethertype, spec in u32.bare_acks()
        if ethertype == protocol and len(data) >= max(at + 4 for _, _, at in spec.keys)
    )


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("words", range(5, 16))
def test_an_acknowledgement_is_bare_without_data_and_with_no_other_flag(version, words):
    for ecn in (0, ECE, CWR, ECE | CWR):
        assert known(packet(ACK | ecn, words, version=version))
    for data in (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 1448, 60_000):
        assert not known(packet(ACK, words, data, version)), data
    for flags in range(64):
        assert known(packet(flags, words, version=version)) == (flags == ACK), flags


def test_what_is_not_tcp_or_not_whole_is_nobodys_acknowledgement():
    assert not known(packet(ACK, proto=17))
    assert not known(packet(ACK, proto=17, version=6))
    assert not known(packet(ACK, fragment=0x2000))
    assert not known(packet(ACK, fragment=3))
    assert not known(packet(ACK, options=2)), "TCP's header is elsewhere"


# --- what the tree is ---


def tree(policy: Policy, kind: str = "htb", classifier: str = "u32") -> Tree:
    return build(policy, kind, DEVICE, slots_of(policy, {}, 1000), assign(policy), classifier)


def spec_of(tree: Tree, handle: int) -> htb.HtbClass:
    return next(
        htb.decode(thing.options) for thing in tree.objects if isinstance(thing, TClass) and thing.handle == handle
    )


JOBS = (Job("a", (Match(sport=1),)), Job("b", (Match(sport=2),)))


def test_a_thirty_second_of_the_link_unless_the_policy_says_something_else():
    assert spec_of(tree(Policy("tls-one", JOBS)), ladder.ACKS_CLASS).rate == RATE // 32
    assert spec_of(tree(Policy("tls-one", JOBS, acks=RATE // 4)), ladder.ACKS_CLASS).rate == RATE // 4
    filters = [thing for thing in tree(Policy("tls-one", JOBS)).objects if getattr(thing, "pref", 0)]
    assert max(thing.pref for thing in filters[:22]) < min(thing.pref for thing in filters[22:])
    for without in (Policy("tls-one", JOBS, acks=0), Policy("fifo", JOBS)):
        assert tree(without).acks == 0
        assert not any(getattr(thing, "pref", 100) < 64 for thing in tree(without).objects)


def test_who_cannot_do_it_says_so_when_it_is_asked_for():
    asked = Policy("tls-one", JOBS, acks=RATE // 8)
    assert tree(Policy("tls-one", JOBS), classifier="flower").acks == 0
    with pytest.raises(PolicyError, match=r"do not look at lengths.*CONFIG_NET_CLS_U32"):
        tree(asked, classifier="flower")
    with pytest.raises(PolicyError, match="more than a quarter of the 8mbit"):
        tree(Policy("tls-one", JOBS, acks=RATE // 4 + 1))
    for kind in ("mqprio", "dcb"):
        with pytest.raises(PolicyError, match=f"kind '{kind}' has no class before all bands"):
            check_kind(asked, kind)


@pytest.mark.parametrize("kind", ["prio", "ets"])
def test_a_fixed_order_has_them_in_a_queue_with_a_rate(kind):
    asked, without = (tree(Policy("tls-one", JOBS, acks=acks), kind) for acks in (RATE // 8, None))
    assert (asked.acks, without.acks) == (FIRST, 0)
    assert asked.classes == without.classes == {"a": FIRST + 1, "b": FIRST + 2}
    first, second = (
        thing for thing in asked.objects if isinstance(thing, Qdisc) and thing.parent in (FIRST, FIRST + 1)
    )
    assert (first.kind, second.kind) == ("tbf", "pfifo")
    assert tbf.decode(first.options).rate == RATE // 8
    assert "tbf" not in {thing.kind for thing in without.objects}
    with pytest.raises(PolicyError, match=f"kind '{kind}'"):
        check_kind(Policy("weighted", JOBS, acks=RATE // 8), kind)


def test_answers_have_rungs_of_their_own_in_the_band_of_their_job():
    jobs = (Job("a", (Match(dscp=32),), band=4, answers=3), Job("b", (Match(dscp=33),), band=1))
    ours = tree(Policy("strict", jobs))
    assert set(ours.answers) == {"a"}
    leaf = ours.answers["a"]
    on = [spec_of(ours, leaf + level).rate == ladder.ENDLESS for level in range(1, BANDS + 1)]
    assert on == [level > 4 for level in range(1, BANDS + 1)]
    assert spec_of(ours, leaf).rate == ladder.ANSWERS_LEAST
    assert spec_of(ours, leaf).overhead == 0
    assert ladder.LONGEST / spec_of(ours, leaf).rate <= 2 * ladder.SETTLE * 1.001
    handles = [thing.handle for thing in ours.objects if isinstance(thing, TClass)]
    assert len(set(handles)) == len(handles)
    others = tree(Policy("strict", jobs), "prio")
    assert others.answers == {}
    assert (
        sum(u32.decode(thing.options).classid == others.classes["a"] for thing in others.objects if thing.kind == "u32")
        == 4
    )


def member(*jobs: str) -> Peer:
    return Peer(1, 0, {job: {"model": "", "size": 0, "band": None, "priority": None} for job in jobs})


def test_code_points_stay_and_answers_do_without_where_none_is_left():
    policy = Policy("tls-one", dscp_pool=(3, 4, 5), answer_pool=(3, 7, 11))
    first = effective(policy, [member("a"), member("b")], None)
    assert [(job.match[0].dscp, job.answers) for job in first.jobs] == [(3, 7), (4, 11)]
    more = effective(policy, [member("a", "new"), member("b")], first)
    assert {job.name: (job.match[0].dscp, job.answers) for job in more.jobs} == {
        "a": (3, 7),
        "new": (5, None),
        "b": (4, 11),
    }
    named = Policy(
        "tls-one", (Job("a", (Match(dscp=20),), answers=21), Job("c", (), answers=7)), answer_pool=(7, 20, 9)
    )
    assert [job.answers for job in effective(named, [member("a", "b")], None).jobs] == [21, 7, 9]


# --- what it does ---


def moved(control: Control, handle: int, seconds: float) -> float:
    """Bytes per second of a class."""
    before, start = counters(control.wire, "v0").get(handle, Counter()), time.monotonic()
    time.sleep(seconds)
    return (counters(control.wire, "v0").get(handle, Counter()).nbytes - before.nbytes) / (time.monotonic() - start)


@lab.isolated
def test_what_arrives_for_a_job_of_a_low_band_does_not_wait_for_its_acknowledgements(net):
    """Both ways in one test, so that without the class the rate is seen to be a fraction of what it is with it."""
    busy = 5001
    jobs = (Job("first", (Match(dport=busy),), band=0), Job("last", (Match(sport=4000),), band=6))
    # What comes in is shaped too, or it would be all of the machine.
    with net.other(), Control("v1", net.directory) as there:
        there.install(Policy("fifo", rate=RATE))
    with Control("v0", net.directory) as control:
        control.install(Policy("strict", jobs, rate=RATE, acks=0))
        with lab.Traffic(net, [busy]) as traffic:

            def measured(acks: int | None) -> tuple[float, float]:
                """Of the link: what comes in, and what leaves for the other job."""
                control.install(Policy("strict", jobs, rate=RATE, acks=acks))
                with lab.stream(net, 4000, inward=True) as (received, *_):
                    time.sleep(1)
                    before, start = received[0], time.monotonic()
                    share = moved(control, control.installed.tree.classes["first"], 2) / RATE
                    return (received[0] - before) / (time.monotonic() - start) / RATE, share

            def good(found: tuple[tuple[float, float], tuple[float, float]]) -> bool:
                (without, _), (rate, share) = found
                return rate > 0.8 and without < 0.6 * rate and share > 0.9  # 3 in 100 at most are for acknowledgements

            one_good(lambda: (measured(0), measured(None)), good, 8)
            assert traffic.streams[0].lost == 0


@lab.isolated
def test_a_flood_of_acknowledgements_takes_no_more_than_its_rate(net):
    busy = 5001
    jobs = (Job("first", (Match(dport=busy),), band=0),)
    stop = threading.Event()

    def flood() -> None:
        bare = packet(ACK)[20:]
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP) as sock:
            while not stop.is_set():
                with contextlib.suppress(OSError):
                    sock.sendto(bare, (lab.THERE, 0))

    with Control("v0", net.directory) as control:
        control.install(Policy("tls-one", jobs, rate=RATE, acks=RATE // 10))
        with lab.Traffic(net, [busy]) as traffic:
            thread = threading.Thread(target=flood)
            thread.start()
            time.sleep(1)
            classes = control.installed.tree
            try:
                for handle, rate, rel in (
                    (classes.acks, RATE // 10, 0.1),
                    (classes.classes["first"], 0.9 * RATE, 0.05),
                ):
                    one_good(
                        lambda handle=handle: moved(control, handle, 2),
                        lambda found, rate=rate, rel=rel: found == pytest.approx(rate, rel=rel),
                    )
            finally:
                stop.set()
                thread.join(5)
            assert traffic.streams[0].lost == 0


def resent(sock: socket.socket) -> int:
    """tcpi_total_retrans."""
    return struct.unpack_from("=I", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 100)[0]


def disordered(sock: socket.socket) -> int:
    """tcpi_rcv_ooopack: packets that came before others that were sent earlier."""
    return struct.unpack_from("=I", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232), 224)[0]


@contextlib.contextmanager
def both_ways(net: lab.Net, receive: int = 8 << 20) -> Iterator[Callable[[], tuple[float, int, int, int, int]]]:
    """Data both ways, in a band that gets a quarter of the link: what is sent here waits, what acknowledges the other way does not.
    Measures for a second: rate of bare acknowledgements, bytes that came here, that went there, segments sent again, packets that came out of order."""
    jobs = (Job("first", (Match(dport=5001),), band=0), Job("both", (Match(sport=4000),), band=1))
    with net.other(), Control("v1", net.directory) as there:
        there.install(Policy("fifo", rate=RATE))
    with Control("v0", net.directory) as control:
        control.install(Policy("strict", jobs, rate=RATE, floor=RATE // 4))
        with lab.Traffic(net, [5001]), lab.stream(net, 4000, inward=True, receive=receive) as (received, far, near):
            sent, back = threading.Event(), [0]

            def push() -> None:
                with contextlib.suppress(OSError):
                    while not sent.is_set():
                        near.send(bytes(1 << 14))

            def pull() -> None:
                with contextlib.suppress(OSError):
                    while data := far.recv(1 << 16):
                        back[0] += len(data)

            def counted() -> tuple[int, int, int, int]:
                return received[0], back[0], resent(near) + resent(far), disordered(near) + disordered(far)

            def measure() -> tuple[float, int, int, int, int]:
                before = counted()
                bare = moved(control, control.installed.tree.acks, 1)
                inward, outward, again, early = (now - then for now, then in zip(counted(), before))
                return bare, inward, outward, again, early

            threads = [threading.Thread(target=target) for target in (push, pull)]
            for thread in threads:
                thread.start()
            try:
                time.sleep(2)
                yield measure
            finally:
                sent.set()
                for end in (near, far):
                    with contextlib.suppress(OSError):  # what was under way may have ended the second with the first
                        end.shutdown(socket.SHUT_RDWR)
                for thread in threads:
                    thread.join(5)


def disturbed(found: tuple[float, int, int, int, int]) -> bool:
    """A machine that is short of time makes TCP send a few again. What is reordered makes it do so until it has learned to wait, and is
    counted all the time."""
    _, inward, outward, again, early = found
    return max(again, early) >= 0.01 * (inward + outward) / 1448 > 0


def undisturbed(found: tuple[float, int, int, int, int]) -> bool:
    bare, inward, outward = found[:3]
    return bare > 0 and min(inward, outward) > RATE // 10 and not disturbed(found)


@lab.isolated
def test_tcp_takes_acknowledgements_that_overtake_its_data_for_no_loss(net):
    with both_ways(net) as measure:
        one_good(measure, undisturbed)


@lab.isolated
def test_data_that_overtakes_data_would_be_taken_for_a_loss(net):
    """The negative test of the one above: half of the data, by a bit of its sequence number, goes with the acknowledgements."""
    kept = u32.bare_acks
    data = (0x0800, u32.U32(((6 << 16, 0xFF << 16, 8), (4000 << 16, 0xFFFF << 16, 20), (1 << 12, 1 << 12, 24))))
    u32.bare_acks = lambda: [*kept(), data]
    # Else a queue's packet is of up to 64 KiB, and the few that there are can all be on one side of the bit.
    with IPRoute() as kernel:
        kernel.link("set", index=kernel.link_lookup(ifname="v0")[0], gso_max_segs=1)
    with both_ways(net) as measure:
        one_good(measure, disturbed)


@lab.isolated
def test_data_that_waits_for_longer_than_a_window_lasts_is_not_taken(net):
    """Linux drops data that acknowledges what is older than the largest window (RFC 5961, 5.2): newer acknowledgements overtook it."""
    with both_ways(net, receive=1 << 14) as measure:
        one_good(measure, disturbed)


@lab.isolated
def test_a_socket_that_names_its_class_is_asked_too(net):
    """By its priority, as those of a marked cgroup: HTB asks no filter of the qdisc that has the class."""
    with Control("v0", net.directory) as control:
        control.install(Policy("strict", (Job("marked", band=6),), rate=RATE))
        tree = control.installed.tree
        with lab.stream(net, 4000, inward=True) as (_, far, near):
            near.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, tree.classes["marked"])
            time.sleep(0.2)
            before = counters(control.wire, "v0")

            def packets(handle: int) -> int:
                return counters(control.wire, "v0")[handle].packets - before[handle].packets

            lab.eventually(lambda: packets(tree.acks) > 1000)
            near.sendall(bytes(5000))
            far.recv(5000, socket.MSG_WAITALL)
            moved = packets(tree.acks), packets(tree.classes["marked"])
    assert 1 <= moved[1] < moved[0] / 10, moved

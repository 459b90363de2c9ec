"""Every way to know a job's packets, with real ones: what is sent is counted in the job's class. And TCP through many rotations."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

import lab
import pytest
from pyroute2 import IPRoute
from windows import one_good

from hrdma.errors import NetlinkError, RefusedError
from hrdma.qos import cgroup
from hrdma.qos.apply import Control
from hrdma.qos.policy import Job, Match, Policy
from hrdma.qos.state import counters

RATE = 12_500_000
HERE6, THERE6 = "fd09::1", "fd09::2"


def with_ipv6(net: lab.Net) -> None:
    for dev, address, where in (("v0", HERE6, contextlib.nullcontext()), ("v1", THERE6, net.other())):
        with where, IPRoute() as kernel:
            kernel.addr(
                "add", index=kernel.link_lookup(ifname=dev)[0], address=address, prefixlen=64, flags=2
            )  # no DAD


def send(count: int, family: int, kind: int = socket.SOCK_DGRAM, dport: int = 9, sport: int = 0, tos: int = 0) -> None:
    here, there = (HERE6, THERE6) if family == socket.AF_INET6 else (lab.HERE, lab.THERE)
    with socket.socket(family, kind) as sock:
        if tos and family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, tos)
        elif tos:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
        sock.bind((here, sport))
        for _ in range(count):
            sock.sendto(bytes(100), (there, dport))


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
@lab.isolated
def test_packets_find_the_class_of_their_job(net, family):
    with_ipv6(net)
    there, other = (THERE6, "fd0a::/16") if family == socket.AF_INET6 else (lab.THERE, "10.77.0.0/16")
    jobs = (
        Job("source port", (Match(sport=2000),)),
        Job("port and protocol", (Match(dport=3000, proto="udp"),)),
        Job("other protocol", (Match(dport=3001, proto="tcp"),)),
        Job("dscp", (Match(dscp=26),)),
        Job("address", (Match(dst=there, dport=3002),)),
        Job("other address", (Match(dst=other),)),
    )
    jobs = tuple(Job(job.name.replace(" ", "-"), job.match) for job in jobs)
    cases = {
        "source-port": {"sport": 2000},
        "port-and-protocol": {"dport": 3000},
        "dscp": {"tos": 104},
        "address": {"dport": 3002},
        None: {"dport": 3001},
    }
    with Control("v0", net.directory) as control:
        control.install(Policy("tls-one", jobs, rate=RATE))
        send(1, family)  # resolves the neighbour's address
        time.sleep(0.1)
        classes = control.installed.tree.classes
        for name, packet in cases.items():
            before = counters(control.wire, "v0")

            def moved(before=before) -> dict[str, int]:
                after = counters(control.wire, "v0")
                return {job: after[handle].packets - before[handle].packets for job, handle in classes.items()}

            send(7, family, **packet)
            time.sleep(0.1)
            lab.eventually(lambda moved=moved, name=name: sum(moved().values()) >= 7 * (name in classes))
            assert moved() == {job: 7 if job == name else 0 for job in classes}, name
        control.revert()


@lab.isolated
def test_what_arrives_is_ordered_by_the_ifb(net):
    jobs = (Job("a", (Match(dport=3000),)), Job("b", (Match(dport=3001),)))
    with Control("v0", net.directory) as control:
        control.install(Policy("tls-one", jobs, rate=RATE, direction="ingress"))
        sinks = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in jobs]
        for port, sink in enumerate(sinks, 3000):
            sink.bind((lab.HERE, port))
            sink.settimeout(5)
        with net.other(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for number in range(5):
                sock.sendto(bytes([number]), (lab.HERE, 3001))
        assert [sinks[1].recv(10) for _ in range(5)] == [bytes([number]) for number in range(5)]
        found = counters(control.wire, control.installed.carrier)
        classes = control.installed.tree.classes
        assert (found[classes["a"]].packets, found[classes["b"]].packets) == (0, 5)


@lab.isolated
def test_sockets_of_a_cgroup(net):
    name = f"qos-test-{os.getpid()}"
    policy = Policy("tls-one", (Job("a", (Match(sport=1),)), Job("b", (Match(cgroup=name),))), rate=RATE)
    try:
        folder = cgroup.mount_point() / name
        folder.mkdir()
    except (RefusedError, OSError) as error:
        pytest.skip(f"this kernel does not let this user make a cgroup: {error}")
    home = cgroup.mount_point() / next(
        line[3:].strip("/") for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")
    )
    try:
        with Control("v0", net.directory) as control:
            try:
                control.install(policy)
            except (RefusedError, NetlinkError) as error:
                assert control.record is None
                pytest.skip(f"this kernel does not let this user mark cgroups: {error}")
            expected = control.installed.tree.classes["b"]
            assert control.install(policy) == 0
            (folder / "cgroup.procs").write_text(str(os.getpid()))
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == expected
            assert priorities_of_a_connection() == [expected] * 2
            send(1, socket.AF_INET)
            time.sleep(0.1)
            before = counters(control.wire, "v0")[expected].packets
            send(3, socket.AF_INET, dport=4444)
            lab.eventually(lambda: counters(control.wire, "v0")[expected].packets - before >= 3)
            assert counters(control.wire, "v0")[expected].packets - before == 3
            control.revert()
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == 0
            assert priorities_of_a_connection() == [0] * 2
    finally:
        (home / "cgroup.procs").write_text(str(os.getpid()))
        folder.rmdir()


def priorities_of_a_connection() -> list[int]:
    """Of the socket that connects and of the one that is accepted, whose packets a server's are."""
    with (
        socket.create_server((lab.HERE, 0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=5) as near,
        listener.accept()[0] as far,
    ):
        return [end.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) for end in (near, far)]


@pytest.mark.slow
@lab.isolated
def test_a_hundred_rotations_under_a_tcp_stream(net):
    """No drop, no segment sent again, and the throughput of the same stream without rotations."""
    jobs = tuple(Job(f"j{port}", (Match(dport=port),)) for port in (5001, 5002, 5003))
    with Control("v0", net.directory) as control:
        control.install(Policy("tls-rr", jobs, rate=1_000_000))
        with lab.stream(net, 5001, inward=False) as (received, sender, _):

            def rate(rounds: int) -> float:
                before, start = received[0], time.monotonic()
                for _ in range(rounds):
                    if rounds == 100:
                        control.rotate()
                    time.sleep(0.08)
                return (received[0] - before) / (time.monotonic() - start)

            def measure() -> tuple[float, float, int]:
                """Rates without rotations and with them, and what was sent again meanwhile."""
                steady, resent = rate(30), retransmissions(sender)
                return steady, rate(100), retransmissions(sender) - resent

            time.sleep(1)
            drops = lab.drops()
            one_good(measure, lambda found: found[1] > 0.97 * found[0] and not found[2], 6)
            assert lab.drops() == drops
        assert control.installed.rotation % 100 == 0


def retransmissions(sock: socket.socket) -> int:
    """tcpi_total_retrans."""
    return int.from_bytes(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[100:104], "little")


@lab.isolated
def test_cgroups_are_marked_once_and_folders_do_not_stay(net):
    """Which cgroups are marked when: without the kernel's programs, which this user may not be let."""
    gone = set()
    marked: list[tuple[str, int]] = []
    kept = cgroup.mark, cgroup.unmark, cgroup.number
    cgroup.mark = lambda path, priority: marked.append((path, priority))
    cgroup.unmark = lambda path: marked.append((path, 0))
    cgroup.number = lambda path: 0 if path in gone else 7
    policy = Policy("tls-rr", (Job("a", (Match(cgroup="x"),)), Job("b", (Match(dport=1),))), rate=RATE)
    try:
        with Control("v0", net.directory) as control:
            control.install(policy)
            assert marked == [("x", control.installed.tree.classes["a"])]
            control.rotate()
            gone.add("x")
            control.rotate()  # a job that has ended is no reason not to go on
            assert len(marked) == 1
            gone.clear()
            control.rotate()
            assert len(marked) == 2, "it was made anew"
            more = Policy("tls-rr", (Job("a", (Match(cgroup="x"), Match(cgroup="y"))), policy.jobs[1]), rate=RATE)
            assert control.install(more) == 1
            assert marked[2][0] == "y"
            assert control.install(policy) == 0
            assert marked[3:] == [("y", 0)]
            control.revert()
            assert marked[4:] == [("x", 0)]
    finally:
        cgroup.mark, cgroup.unmark, cgroup.number = kept


def test_a_cgroup_that_cannot_be_marked_leaves_no_folder(tmp_path, monkeypatch):
    def refuse(path, priority):
        raise RefusedError("no programs here")

    monkeypatch.setattr(cgroup, "mount_point", lambda: tmp_path)
    monkeypatch.setattr(cgroup, "mark", refuse)
    with pytest.raises(RefusedError, match="no programs here"):
        cgroup.enter("dev-job", 5, os.getpid())
    assert os.listdir(tmp_path) == []


def test_a_refusal_by_the_kernel_names_every_capability(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(cgroup, "mount_point", lambda: tmp_path)
    monkeypatch.setattr(cgroup, "_bpf", refuse)
    for action in (lambda: cgroup.mark("", 5), lambda: cgroup.unmark("")):
        with pytest.raises(RefusedError, match="CAP_BPF and CAP_NET_ADMIN, and CAP_SYS_ADMIN where"):
            action()

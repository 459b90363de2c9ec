"""The network of a lab: who reaches whom and over how many hops, rates, what the kernel says of it; nothing outside."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from windows import one_good

from hrdma.lab import namespaces
from hrdma.lab.lab import Lab
from hrdma.qos.wire import NLM_F_REQUEST, RTM_GETLINK, Wire, attributes
from hrdma.topo.fabric import Fabric
from hrdma.topo.fabrics import parse, torus

PAYLOAD = 1448 / 1514  # of a full frame with TCP's headers


def inside(lab: Lab, node: int | str, function: Callable[[], Any]) -> Any:
    return namespaces.inside(lab.namespace(node), function)


def shown(lab: Lab, node: str, *command: str) -> Any:
    """What iproute2 says, as JSON."""
    return json.loads(inside(lab, node, lambda: subprocess.check_output(command, timeout=10)))


def udp() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.IPPROTO_IP, 12, 1)  # IP_RECVTTL
    sock.settimeout(5)
    return sock


def hops(lab: Lab) -> dict[tuple[int, int, int], int]:
    """Routing hops from each host to each NIC of all others, there and back over the same rail."""
    found = {}
    sockets: dict[tuple[int, int], socket.socket] = {}
    try:
        for host in range(lab.hosts):
            for nic, address in enumerate(lab.addresses(host)):
                sockets[host, nic] = inside(lab, host, udp)
                sockets[host, nic].bind((address, 0))
        for (dst, nic), target in sockets.items():
            for src in range(lab.hosts):
                source = sockets.get((src, nic))
                if src == dst or source is None:
                    continue
                for here, there in ((source, target), (target, source)):
                    here.sendto(b"%d" % src, there.getsockname())
                    data, ancillary, _, sender = there.recvmsg(16, 64)
                    assert (data, sender) == (b"%d" % src, here.getsockname())
                    ttl = int.from_bytes(ancillary[0][2], "little")
                    assert found.setdefault((src, dst, nic), 64 - ttl) == 64 - ttl
    finally:
        for sock in sockets.values():
            sock.close()
    return found


def test_every_host_reaches_every_nic_over_relays_bound_to_its_rail(lab):
    found = hops(lab)
    assert len(found) == 4 * 3 * 2
    for (src, dst, nic), count in found.items():
        assert count == (1 if src ^ dst == 3 else 0), f"host {src} to NIC {nic} of {dst}"  # 3: both digits differ


@pytest.mark.parametrize(
    ("text", "most"), [("torus:3x3", 1), ("mesh:2x3", 2), ("leaf_spine:2,2,2", 3), ("cluster:3,2,2", 0)]
)
def test_other_fabrics(name, text, most):
    with Lab.up(parse(text, rate="100mbit", latency=0), name) as lab:
        assert max(hops(lab).values()) == most


def test_what_the_kernel_says(lab, iproute2):
    links = {link["ifname"]: link for link in shown(lab, "h0", "ip", "-j", "-d", "link")}
    assert set(links) == {"lo", "nic0", "nic1"}
    for name in ("nic0", "nic1"):
        assert links[name]["linkinfo"]["info_kind"] == "veth"
        assert (links[name]["operstate"], links[name]["mtu"]) == ("UP", 1500)
    for node in ("h0", "s0"):
        kinds = [q for q in shown(lab, node, "tc", "-j", "qdisc") if q["kind"] == "tbf"]
        assert len(kinds) == 2
        assert {q["options"]["rate"] for q in kinds} == {50_000_000 // 8}  # tc shows bytes per second here
        assert [q["options"]["burst"] for q in kinds] == pytest.approx([6250, 6250], abs=8)  # 1 ms; kept as a time
    addresses = [entry["local"] for link in shown(lab, "h3", "ip", "-j", "-4", "addr") for entry in link["addr_info"]]
    assert addresses[1:] == lab.addresses(3)
    ports = [link for link in shown(lab, "s0", "ip", "-j", "link") if link.get("master") == "bridge"]
    assert [port["ifname"] for port in ports] == ["port0", "port1"]


def most_at_once(index: int) -> list[int]:
    """What the kernel says of a NIC here: bytes that it takes as one, over IPv6 and over IPv4."""
    with Wire() as wire:
        ((_, answer),) = wire.send(struct.pack("=4xi8x", index), RTM_GETLINK, NLM_F_REQUEST)
    if 63 not in attributes(answer, 32):
        pytest.skip("this kernel does not have IPv4 packets of more than 64 KiB (Linux 6.3)")
    return [int.from_bytes(attributes(answer, 32)[number], sys.byteorder) for number in (41, 63)]


def test_nics_take_large_packets_where_that_is_asked_for(lab, name):
    fast = parse("mesh:2", rate="4gbit", latency=0)
    for more, most in (({}, 65536), ({"packet": 458752}, 458752)):
        with Lab.up(fast, name, **more) as made:
            found = inside(made, 1, lambda: most_at_once(socket.if_nametoindex("nic0")))
            assert found == [most, most] and made.nodes[1]["nics"][0]["packet"] == most
            sender, receiver = pair(made, 0, 1, 0)
            with sender, receiver:
                transfer(sender, receiver, 20 << 20)  # all of it, or it fails
    with Lab.up(parse("leaf_spine:2,1,1", rate="4gbit", latency=0), name, packet=458752) as made:
        assert inside(made, "s0", lambda: most_at_once(socket.if_nametoindex("bridge"))) == [458752] * 2
    assert inside(lab, 0, lambda: most_at_once(socket.if_nametoindex("nic0"))) == [6250 * 1448 // 1514] * 2


def test_nothing_shows_in_the_machines_own_network(lab, iproute2):
    names = {link["ifname"] for link in json.loads(subprocess.check_output(["ip", "-j", "link"]))}
    assert not names & {"nic0", "nic1", "port0", "port1", "bridge"}
    routes = subprocess.check_output(["ip", "-j", "route"], text=True)
    assert not [address for host in range(4) for address in lab.addresses(host) if address in routes]


def transfer(sender: socket.socket, receiver: socket.socket, nbytes: int) -> float:
    """Bits per second at which a TCP stream arrives, the first tenth left out."""
    thread = threading.Thread(target=sender.sendall, args=(bytes(nbytes),))
    thread.start()
    got, start, first = 0, 0.0, 0
    while got < nbytes:
        more = len(receiver.recv(1 << 20))
        assert more, f"the stream ended after {got} of {nbytes} bytes"
        got += more
        if not start and got > nbytes // 10:
            start, first = time.monotonic(), got
    thread.join()
    return 8 * (got - first) / (time.monotonic() - start)


def pair(lab: Lab, src: int, dst: int, nic: int) -> tuple[socket.socket, socket.socket]:
    """A TCP connection to a NIC of a host, from the same NIC of another."""
    with inside(lab, dst, lambda: socket.create_server((lab.addresses(dst)[nic], 0))) as listener:
        listener.settimeout(5)
        source = (lab.addresses(src)[nic], 0)
        sender = inside(lab, src, lambda: socket.create_connection(listener.getsockname(), 5, source))
        receiver, _ = listener.accept()
    for sock in (sender, receiver):
        sock.settimeout(20)
    return sender, receiver


def test_a_stream_gets_the_rate_less_headers_and_no_more(lab):
    """Benchmarks say how near (benchmarks/bench_lab.py); here other work of this machine must not matter."""
    sender, receiver = pair(lab, 0, 3, 0)  # through a relaying host
    with sender, receiver:
        one_good(lambda: transfer(sender, receiver, 2_000_000) / (50e6 * PAYLOAD), lambda share: 0.6 < share < 1.03)
    sender, receiver = socket.socketpair()
    with sender, receiver:  # what is not limited is seen to be faster
        one_good(lambda: transfer(sender, receiver, 2_000_000), lambda rate: rate > 3 * 50e6)


def test_two_rails_carry_twice_as_much(lab):
    pairs = [pair(lab, 0, 3, nic) for nic in (0, 1)]

    def measure() -> tuple[float, float]:
        """Rates in one rail's: of both together, of the faster one."""
        rates: list[float] = []
        threads = [threading.Thread(target=lambda p=p: rates.append(transfer(*p, 2_000_000))) for p in pairs]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.monotonic() - start
        return 2 * 2_000_000 * 8 / took / (50e6 * PAYLOAD), max(rates) / (50e6 * PAYLOAD)

    one_good(measure, lambda found: found[0] > 1.2 and found[1] < 1.03)  # one rail alone cannot
    for sock in (sock for both in pairs for sock in both):
        sock.close()


def test_latency_is_kept_or_refused(lab, name, iproute2):
    """Kernels without netem cannot: then it is said, and nothing is left."""
    fabric = torus(2, rate=1e8, latency=5e-3)
    try:
        made = Lab.up(fabric, name)
    except RuntimeError as error:
        assert "a latency of 0.005 s: this kernel has no netem" in str(error)
        netem = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
        assert inside(lab, 0, lambda: subprocess.run(netem, capture_output=True)).returncode != 0
        assert name not in namespaces.labs()
        return
    with made:
        sender, receiver = pair(made, 0, 1, 0)
        with sender, receiver:

            def there_and_back() -> float:
                start = time.monotonic()
                sender.sendall(b"?")
                receiver.sendall(receiver.recv(1))
                sender.recv(1)
                return time.monotonic() - start

            one_good(there_and_back, lambda seconds: 0.010 <= seconds < 0.1)


def test_sixteen_hosts_are_up_in_seconds(name):
    start = time.monotonic()
    with Lab.up(parse("fat_tree:4", rate="100mbit", latency=0), name) as lab:
        assert time.monotonic() - start < 15  # 2 s where the machine does nothing else
        assert lab.hosts == 16
        sender, receiver = pair(lab, 0, 15, 0)
        with sender, receiver:
            sender.sendall(b"!")
            assert receiver.recv(1) == b"!"


def test_links_may_have_rates_of_their_own(name, iproute2):
    fabric = parse("star:3", rate="100mbit", latency=0)
    wide, slow = fabric.links[1]._replace(burst=50e3), fabric.links[2]._replace(rate=20e6, burst=1.0)
    fabric = Fabric("slow", 3, 1, (fabric.links[0], wide, slow))
    with Lab.up(fabric, name) as lab:
        assert [node["nics"][0]["rate_bit_s"] for node in lab.nodes[:3]] == [1e8, 1e8, 2e7]
        for node, rate, burst in (("h0", 1e8, 12500), ("h1", 1e8, 50000), ("h2", 2e7, 2 * 1514)):
            (bucket,) = [q for q in shown(lab, node, "tc", "-j", "qdisc") if q["kind"] == "tbf"]
            assert bucket["options"]["rate"] == rate / 8
            assert bucket["options"]["burst"] == pytest.approx(burst, abs=8)

"""Plans of labs, without a kernel: packets walk along the planned routes, and take the links that were predicted; what
a refusal of the kernel becomes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from pyroute2.netlink.exceptions import NetlinkError

from hrdma.lab.layout import BRIDGE, Plan, Route, plan
from hrdma.lab.wiring import _said
from hrdma.places import reserve_port
from hrdma.topo.fabric import Fabric, Link, Port
from hrdma.topo.fabrics import parse
from hrdma.topo.routing import Routes

DIRECT = (
    "ring:2",
    "ring:5",
    "ring:8",
    "mesh:3",
    "mesh:4x4",
    "mesh:2x3x2",
    "torus:2x2",
    "torus:3x3",
    "torus:4x4",
    "torus:2x4",
)
SWITCHED = ("star:1", "star:4", "bcube:2,2", "bcube:3,2", "bcube:2,4", "bcube:4x3", "cluster:4,3,2")
ROUTED = ("leaf_spine:2,3,2", "leaf_spine:4,4,4", "fat_tree:2", "fat_tree:4")


def subnet(address: str) -> str:
    return address.rpartition(".")[0]


class Walker:
    """Forwards packets as the kernels of a planned lab will: own addresses, then subnets, then routes."""

    def __init__(self, made: Plan) -> None:
        self.plan = made
        self.peers: dict[tuple[int, int], tuple[int, int]] = {}
        for a, b in made.wires:
            self.peers[a], self.peers[b] = b, a
        self.addresses: list[dict[str, int | str]] = []  # of each node: address -> NIC, or the bridge
        for node in made.nodes:
            own: dict[str, int | str] = {n.address.split("/")[0]: i for i, n in enumerate(node.nics) if n.address}
            self.addresses.append(own | {address.split("/")[0]: BRIDGE for address in node.bridge or ()})

    def owner(self, node: int, nic: int, address: str) -> tuple[int, list[int]]:
        """Who answers to an address on the wire at a NIC, and the nodes up to there. Bridges pass everything on."""
        there, port = self.peers[node, nic]
        if address in self.addresses[there]:
            return there, [there]
        assert self.plan.nodes[there].bridge is not None, f"nobody has {address} at {self.plan.nodes[node].name}.{nic}"
        for other in range(len(self.plan.nodes[there].nics)):
            end, end_nic = self.peers[there, other]
            if other != port and self.addresses[end].get(address) == end_nic:
                return end, [there, end]
        raise AssertionError(f"nobody has {address} at {self.plan.nodes[there].name}")

    def hops(self, node: int, target: str) -> Iterator[tuple[str, str]]:
        """Gateway (or the target itself) and interface: all ways on that the kernel may choose."""
        here = self.plan.nodes[node]
        near = {subnet(address): nic for address, nic in self.addresses[node].items()}
        if subnet(target) in near:
            nic = near[subnet(target)]
            yield target, nic if nic == BRIDGE else here.nics[nic].name
            return
        found = [route for route in here.routes if route.target == target]
        assert len(found) == 1, f"{here.name} has {len(found)} routes to {target}"
        for gateway, interface in found[0].hops:
            own = near.get(subnet(gateway))
            assert own is not None, f"{here.name}: gateway {gateway} is in none of its subnets"
            assert interface == (own if own == BRIDGE else here.nics[own].name)
            yield gateway, interface

    def paths(self, node: int, target: str, so_far: tuple[int, ...] = ()) -> Iterator[list[int]]:
        """Every sequence of nodes that a packet may take."""
        assert node not in so_far, f"a packet to {target} goes in circles: {so_far}"
        if target in self.addresses[node]:
            yield [node]
            return
        for gateway, interface in self.hops(node, target):
            nics = self.plan.nodes[node].nics
            if interface == BRIDGE:
                attached = [i for i in range(len(nics)) if gateway in self.addresses[self.peers[node, i][0]]]
                nic = attached[0]
            else:
                nic = next(i for i, one in enumerate(nics) if one.name == interface)
            end, via = self.owner(node, nic, gateway)
            for rest in self.paths(end, target, (*so_far, node)):
                yield [node, *via[:-1], *rest]


def all_paths(fabric: Fabric, made: Plan) -> dict[tuple[int, int, int], list[list[int]]]:
    walker = Walker(made)
    return {
        (src, dst, nic): list(walker.paths(src, address.address.split("/")[0]))
        for src in range(fabric.hosts)
        for dst in range(fabric.hosts)
        if src != dst
        for nic, address in enumerate(made.nodes[dst].nics)
    }


def nodes_on(fabric: Fabric, path: tuple[int, ...]) -> list[int]:
    return [fabric.ends(path[0])[0].node, *(fabric.ends(link)[1].node for link in path)]


@pytest.mark.parametrize("text", [*DIRECT, *SWITCHED, *ROUTED])
def test_every_host_reaches_every_nic_by_the_links_that_were_predicted(text):
    fabric = parse(text, rate=2e8, latency=0)
    made = plan(fabric, 130)
    routes = Routes(fabric)
    each = fabric.ranks_per_host
    for (src, dst, nic), paths in all_paths(fabric, made).items():
        assert paths
        wanted = [nodes_on(fabric, routes.path(src * each, dst * each, lane)) for lane in range(fabric.nics(src))]
        if text in ROUTED:
            assert wanted[0] in paths, f"{src} to NIC {nic} of {dst}"
            assert {len(path) for path in paths} == {len(wanted[0])}  # all are shortest
        elif fabric.kind == "mesh":  # where NICs are numbered otherwise at the edges
            assert len(paths) == 1 and paths[0] in wanted
        elif subnet(made.nodes[dst].nics[nic].address) in {subnet(one.address) for one in made.nodes[src].nics}:
            assert len(paths) == 1 and len(paths[0]) == min(map(len, wanted))  # neighbours on that wire
        else:
            assert paths == [wanted[nic]], f"{src} to NIC {nic} of {dst}"


def test_the_nics_of_a_bcube_are_reached_by_paths_that_share_no_link():
    fabric = parse("bcube:3,2", rate=2e8)
    paths = all_paths(fabric, plan(fabric, 128))
    (first,), (second,) = paths[0, 4, 0], paths[0, 4, 1]
    assert [node for node in first if node < 9] == [0, 1, 4]
    assert [node for node in second if node < 9] == [0, 3, 4]
    assert not set(pairwise(first)) & set(pairwise(second))


def test_the_spines_are_all_used():
    fabric = parse("leaf_spine:2,2,3", rate=2e8)
    spines = {path[2] for path in all_paths(fabric, plan(fabric, 128))[0, 2, 0]}
    assert spines == {6, 7, 8}


@pytest.mark.parametrize("text", [*DIRECT, *SWITCHED, *ROUTED])
def test_addresses_are_apart_within_and_between_labs(text):
    fabric = parse(text, rate=2e8)
    found = []
    for network in (128, 255):
        made = plan(fabric, network)
        for node in made.nodes:
            own = [nic.address for nic in node.nics if nic.address] + list(node.bridge or ())
            assert len({subnet(address) for address in own}) == len(own)  # or all would leave by one NIC
            found += own
        assert all(nic.address for node in made.nodes[: fabric.hosts] for nic in node.nics)
    assert len(set(found)) == len(found)
    assert all(address.startswith(("10.128.", "10.255.")) and address.endswith("/24") for address in found)


def test_two_nics_of_a_host_at_one_switch():
    links = tuple(Link(Port(host, nic), Port(3, 2 * host + nic), 2e8, 0.0) for host in range(3) for nic in range(2))
    fabric = Fabric("double", 3, 1, links)
    made = plan(fabric, 128)
    assert [nic.address for nic in made.nodes[1].nics] == ["10.128.0.2/24", "10.128.1.2/24"]
    assert all(len(paths) == 1 and len(paths[0]) == 3 for paths in all_paths(fabric, made).values())


@pytest.mark.parametrize("sabotage", ["lost", "circle", "elsewhere"])
def test_a_wrong_route_is_noticed(sabotage):
    """The walker can fail."""
    fabric = parse("ring:6", rate=2e8)
    made = plan(fabric, 128)
    node = made.nodes[1]
    place = next(i for i, route in enumerate(node.routes) if Walker(made).addresses[3].get(route.target) is not None)
    back = Route(node.routes[place].target, (("10.128.0.1", "nic1"),))  # to host 0, which sends it here
    elsewhere = Route(node.routes[place].target, (("10.128.3.4", "nic0"),))
    other = {"lost": [], "circle": [back], "elsewhere": [elsewhere]}[sabotage]
    wrong = replace(node, routes=(*node.routes[:place], *other, *node.routes[place + 1 :]))
    with pytest.raises(
        AssertionError, match={"lost": "0 routes", "circle": "circles", "elsewhere": "subnets"}[sabotage]
    ):
        all_paths(fabric, replace(made, nodes=(made.nodes[0], wrong, *made.nodes[2:])))


@pytest.mark.parametrize(
    ("text", "rate", "complaint"),
    [
        ("star:65", 2e8, "has 65 hosts: a lab has 1 to 64"),
        ("star:2", 1e4, "rate 10000 bit/s; a lab has 100000 to"),
        ("star:2", 1e12, r"rate 1e\+12 bit/s"),
        ("mesh:4x4x4", 2e8, None),
        ("leaf_spine:16,2,16", 2e8, "up to 256 subnets"),
    ],
)
def test_what_cannot_be_a_lab(text, rate, complaint):
    fabric = parse(text, rate=rate)
    if complaint is None:
        plan(fabric, 128)
    else:
        with pytest.raises(ValueError, match=complaint):
            plan(fabric, 128)


def test_bursts_that_the_kernel_cannot_count_are_refused():
    pair = parse("star:2", rate=8e6)
    most, more = (replace(pair, links=(pair.links[0], pair.links[1]._replace(burst=burst))) for burst in (1e6, 1e6 + 1))
    assert [node.nics[0].burst for node in plan(most, 128).nodes[:2]] == [2 * 1514, 1000000]
    with pytest.raises(ValueError, match=r"link 1 of star:2: burst 1e\+06 bytes; a lab has up to 1 s of the rate"):
        plan(more, 128)


def test_a_nic_takes_no_more_as_one_than_its_bucket_lets_through():
    for rate, asked, taken in ((4e9, 458752, 458752), (4e9, 524280, 478203), (1e9, 65536, 65536), (1e8, 65536, 11955)):
        (nic,) = plan(parse("star:1", rate=rate), 128, asked).nodes[0].nics
        assert nic.packet == taken
        assert nic.packet * 1514 / 1448 <= nic.burst  # with the headers of every frame
    for wrong in (1513, 524281):
        with pytest.raises(ValueError, match=f"packets of {wrong} bytes: a lab's NICs take 1514 to 524280 as one"):
            plan(parse("star:1", rate=1e9), 128, wrong)


# --- what the kernel says ---


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (NetlinkError(errno.EINVAL, "Device is up"), RuntimeError, "h0.nic0: rate: Device is up (errno 22)"),
        (
            OSError(errno.ENOSPC, "mount: No space left on device"),
            RuntimeError,
            "rate: mount: No space left .* (errno 28)",
        ),
        (
            NetlinkError(errno.EPERM, "Operation not permitted"),
            PermissionError,
            "not permitted (Operation not permitted); a",
        ),
        (NetlinkError(errno.ENOENT, "Qdisc kind is unknown"), RuntimeError, "h0.nic0: rate: no such thing"),
    ],
)
def test_errors_carry_the_kernels_words(error, kind, text):
    pattern = text.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(kind, match=pattern) as caught, _said("h0.nic0: rate", {errno.ENOENT: "no such thing"}):
        raise error
    assert caught.value.__cause__ is error


def test_a_port_that_cannot_be_had_leaves_no_socket():
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Cannot assign requested address"):
        reserve_port("192.0.2.1")
    assert len(os.listdir("/proc/self/fd")) == before

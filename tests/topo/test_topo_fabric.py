"""Fabrics: constructors, files, and everything that is refused, by the value that is wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod

import pytest

from hrdma.topo.fabric import Fabric, Link, Port, digits, number
from hrdma.topo.fabric_file import dump, dumps, find, load, loads
from hrdma.topo.fabrics import (
    bcube,
    burst_bytes,
    cluster,
    factors,
    fat_tree,
    latency_s,
    leaf_spine,
    mesh,
    parse,
    rate_bit_s,
    ring,
    star,
    torus,
)

ALL = (
    "ring:2", "ring:5", "star:1", "star:4", "mesh:4x4", "mesh:2x3x2", "torus:2x2", "torus:4x4", "torus:3x4x5", "bcube:3,2",
    "bcube:2,3", "bcube:4x3", "fat_tree:4", "leaf_spine:4,3,2", "cluster:4,3,2", "cluster:1,4",
)  # fmt: skip


WIRED = "hosts = 2\n[[link]]\na = [0, 0]\nb = [1, 0]\n"


def _link(a: tuple[int, int], b: tuple[int, int], rate: float = 1e9, latency: float = 1e-6, burst: float = 0.0) -> Link:
    return Link(Port(*a), Port(*b), rate, latency, burst)


@pytest.mark.parametrize("text", ALL)
def test_constructed_is_what_was_named_and_survives_a_file(text: str, tmp_path) -> None:
    fabric = parse(text, "200mbit", "50us")
    assert {link.rate for link in fabric.links} == {2e8} and {link.latency for link in fabric.links} == {5e-5}
    dump(fabric, tmp_path / "fabric.toml")
    again = load(tmp_path / "fabric.toml")
    assert again == fabric and again.digest() == fabric.digest()
    assert parse(text).digest() != fabric.digest()
    bursting = replace(fabric, links=tuple(link._replace(burst=6e3) for link in fabric.links))
    assert bursting.digest() != fabric.digest() and loads(dumps(bursting)) == bursting


def test_counts() -> None:
    for n, levels in ((3, 2), (2, 3), (4, 2), (8, 2)):
        fabric = bcube(n, levels)
        assert (fabric.hosts, fabric.switches, len(fabric.links)) == (
            n**levels,
            levels * n ** (levels - 1),
            levels * n**levels,
        )
        assert {fabric.nics(host) for host in range(fabric.hosts)} == {levels}
    assert (fat_tree(4).hosts, fat_tree(4).switches, len(fat_tree(4).links)) == (16, 20, 48)
    assert (leaf_spine(4, 3, 2).hosts, leaf_spine(4, 3, 2).switches) == (12, 6)
    assert (star(5).rails, ring(5).rails, torus(4, 4).rails, torus(2, 2).rails, mesh(3, 3).rails) == (1, 2, 4, 2, 4)
    assert Counter(mesh(3, 3).nics(host) for host in range(9)) == {2: 4, 3: 4, 4: 1}
    islands = cluster(4, 3, 2)
    assert (islands.hosts, islands.ranks, islands.rails) == (4, 12, 2)
    assert [islands.host_of(rank) for rank in (0, 2, 3, 11)] == [0, 0, 1, 3]
    assert torus(4, 4).nic_rate == 1e10


@pytest.mark.parametrize("shape", [(3, 3), (4, 3), (2, 3, 4)])
def test_a_nic_of_a_bcube_is_at_the_switch_of_its_level(shape: tuple[int, ...]) -> None:
    fabric = bcube(shape)
    at: dict[int, list[tuple[int, int]]] = {}
    for link in fabric.links:
        at.setdefault(link.b.node, []).append(link.a)
    for members in at.values():
        (level,) = {nic for _, nic in members}
        assert len(members) == shape[level]
        rest = {tuple(d for i, d in enumerate(digits(host, shape)) if i != level) for host, _ in members}
        assert len(rest) == 1


def test_nics_of_a_torus_go_up_before_down() -> None:
    fabric = torus(4, 3)
    for host in range(12):
        x, y = digits(host, (4, 3))
        ends = [number(d, (4, 3)) for d in (((x + 1) % 4, y), ((x - 1) % 4, y), (x, (y + 1) % 3), (x, (y - 1) % 3))]
        assert [node for _, node, _ in fabric.around[host]] == ends
        for directed, node, nic in fabric.around[host]:
            assert fabric.ends(directed)[0] == (host, nic) and fabric.ends(directed)[1].node == node
            assert fabric.ends(directed ^ 1) == fabric.ends(directed)[::-1]


def test_digits() -> None:
    for value in range(24):
        assert number(digits(value, (2, 3, 4)), (2, 3, 4)) == value
    assert digits(5, (3, 3)) == (2, 1)


def test_factors() -> None:
    assert (
        factors(12, 2) == (4, 3) and factors(30, 2) == (6, 5) and factors(24, 3) == (4, 3, 2) and factors(7, 1) == (7,)
    )
    for hosts in (16, 36, 60, 1024):
        assert prod(factors(hosts, 2)) == hosts
    with pytest.raises(ValueError, match="7 hosts cannot be written with 2 digits"):
        factors(7, 2)


def test_a_failed_link() -> None:
    fabric = bcube(3, 2)
    left = fabric.without(0)
    assert (left.kind, len(left.links), left.nics(0), left.rails) == ("", 17, 1, 2)
    assert left.links[0].a == Port(0, 0)  # what was its NIC 1
    with pytest.raises(ValueError, match="has no link 18; it has 18"):
        fabric.without(18)
    with pytest.raises(ValueError, match="host 0 has no NIC"):
        fabric.without(0, 1)


def test_rates_latencies_and_bursts() -> None:
    assert [burst_bytes(size) for size in ("6KB", "1MiB", 0, 7.5)] == [6e3, 2.0**20, 0.0, 7.5]
    assert [rate_bit_s(rate) for rate in ("200mbit", "10 Gbit", "1.5mbit", 1e9, 3)] == [2e8, 1e10, 1.5e6, 1e9, 3.0]
    assert [latency_s(time) for time in ("50us", "70ns", "0ms", "0", 0, 2e-6)] == [5e-5, 7e-8, 0.0, 0.0, 0.0, 2e-6]


@pytest.mark.parametrize(
    ("read", "wrong", "message"),
    [
        (rate_bit_s, "fast", "rate 'fast' is not a number with a unit; write for example '10gbit'"),
        (rate_bit_s, "10gbps", "ambiguous: .* would be 80gbit; for bits per second write 10gbit"),
        (rate_bit_s, "32MiB", "rate '32MiB' has the unknown unit 'MiB'; use one of bit, kbit"),
        (rate_bit_s, "10us", "rate '10us' has the unknown unit 'us'; use one of bit"),
        (rate_bit_s, "1e9", "rate '1e9' has the unknown unit|rate '1e9' is not a number with a unit"),
        (rate_bit_s, True, "rate is True; write a number of bit/s"),
        (rate_bit_s, [1], r"rate is \[1\]; write a number of bit/s"),
        (latency_s, "10mbit", "time '10mbit' has the unknown unit 'mbit'; use one of ns, us, ms"),
        (latency_s, "5", "time '5' is not a number with a unit; write for example '20s'"),
        (latency_s, {}, "latency is {}; write a number of seconds"),
    ],
)
def test_rates_and_latencies_that_are_refused(read, wrong, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(wrong)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("cube:3", "unknown fabric 'cube'"),
        ("bcube", "numbers of 'bcube' are ''"),
        ("bcube:3,2,1", "'bcube:3,2,1' has 3 numbers; bcube takes 1 to 2"),
        ("leaf_spine:4,3", "leaf_spine takes 3"),
        ("torus:1,4", "dimension 0 of a torus is 1; it must be at least 2"),
        ("mesh:4x1", "dimension 1 of a mesh is 1"),
        ("bcube:1,2", "level 0 of a BCube is 1; it must be at least 2"),
        ("bcube:3x1", "level 1 of a BCube is 1"),
        ("bcube:3,0", "number of levels of a BCube is 0"),
        ("ring:1", "hosts of a ring is 1"),
        ("star:0", "hosts of a star is 0"),
        ("fat_tree:3", "fat-tree's switches is 3; it must be even"),
        ("leaf_spine:4,0,2", "hosts at a leaf is 0"),
        ("cluster:4,0", "ranks_per_host is 0"),
        ("torus:4;4", "are '4;4'"),
        ("ring:9000000000", "ring:9000000000 has more links than the 1048576 that a fabric may have"),
        ("star:9000000000", "star:9000000000 has more links"),
        ("mesh:1000x1000x1000", "mesh:1000x1000x1000 has more links"),
        ("torus:1000x1000x1000", "has more links"),
        ("bcube:1000,4", "has more links"),
        ("bcube:2,9000000000", "has more links"),
        ("bcube:1000x1000x1000", "has more links"),
        ("fat_tree:100000", "has more links"),
        ("leaf_spine:2,2,9000000000", "has more links"),
        ("cluster:2,9000000000", "has more links"),
    ],
)
def test_names_that_are_refused(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parse(text)


@pytest.mark.parametrize(
    ("hosts", "switches", "links", "match"),
    [
        (2, 1, [_link((0, 0), (2, 0), 0.0), _link((1, 0), (2, 1))], r"link 0 \(0.0 to 2.0\) has rate 0.0"),
        (2, 0, [_link((0, 0), (1, 0), float("nan"))], "has rate nan"),
        (2, 0, [_link((0, 0), (1, 0), latency=-1.0)], "has latency -1.0"),
        (2, 0, [_link((0, 0), (1, 0), burst=-1.0)], "has burst -1.0; it must be 0 bytes or more"),
        (2, 0, [_link((0, 0), (1, 0), burst=float("inf"))], "has burst inf"),
        (2, 0, [_link((0, 0), (0, 1))], "joins a node with itself"),
        (2, 0, [_link((0, 0), (5, 0))], "names node 5; there are 2"),
        (2, 0, [_link((0, -1), (1, 0))], "names NIC -1"),
        (3, 0, [_link((0, 0), (1, 0)), _link((0, 0), (2, 0))], "takes NIC 0 of host 0, which has a link already"),
        (2, 0, [_link((0, 1), (1, 0))], "host 0 has a NIC 1 but no NIC 0"),
        (3, 1, [_link((0, 0), (3, 0)), _link((1, 0), (3, 1))], "host 2 has no NIC"),
        (4, 0, [_link((0, 0), (1, 0)), _link((2, 0), (3, 0))], "not connected: host 2 cannot be reached from host 0"),
        (2, 1, [_link((0, 0), (1, 0))], "not connected: switch 0 cannot be reached"),
        (0, 1, [], "hosts 0"),
        (9 * 10**9, 0, [_link((0, 0), (1, 0))], "9000000000 hosts and switches, but only 1 links; each needs one"),
        (2, 0, [_link((0, 9 * 10**9), (1, 0))], "host 0 has a NIC 9000000000 but no NIC 0"),
    ],
)
def test_wiring_that_is_refused(hosts: int, switches: int, links: list[Link], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Fabric("mine", hosts, switches, tuple(links))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("hosts = 2\n", "no 'link'"),
        ("fabric = 'bcube:3,2'\nhosts = 4\n".replace("'", '"'), "'hosts' beside 'fabric'"),
        ("hosts = 2\nspeed = 3\n", "unknown key 'speed'"),
        ("hosts = 2.5\n[[link]]\na = [0, 0]\nb = [1, 0]\n", "line 1: hosts is 2.5; it must be a whole number"),
        ("hosts = true\n[[link]]\na = [0, 0]\nb = [1, 0]\n", "line 1: hosts is True; it must be a whole number"),
        ("hosts = 2\n[[link]]\na = [0]\nb = [1, 0]\n", r"line 3: link 0: a is \[0\]; it must be \[node, NIC\]"),
        ("hosts = 2\n[[link]]\na = [0, 0]\nb = 1\n", r"line 4: link 0: b is 1; it must be \[node, NIC\]"),
        ("hosts = 2\n[[link]]\nb = [0, 0]\n", r"line 2: link 0: a is \[\]; it must be \[node, NIC\]"),
        ("hosts = 2\n[[link]]\na = [0, 0]\nb = [1, 0]\nspeed = 1\n", "line 5: link 0: unknown key 'speed'"),
        (WIRED + 'rate = "slow"\n', "line 5: link 0: rate: rate 'slow' is not a number with a unit"),
        (WIRED + 'latency = "1mbit"\n', "line 5: link 0: latency: time '1mbit' has the unknown unit 'mbit'"),
        (WIRED + 'burst = "6kbit"\n', "line 5: link 0: burst: size '6kbit' has the unknown unit 'kbit'"),
        ("burst = true\n" + WIRED, "line 1: burst: burst is True; write a number of bytes, or for example '6KB'"),
        ("rate = [1]\n" + WIRED, r"line 1: rate: rate is \[1\]; write a number of bit/s"),
        ('memory_rate = "9GB"\n' + WIRED, "line 1: memory_rate: rate '9GB' has the unknown unit 'GB'"),
        ("hosts = 2\nlink = 3\n", r"line 2: link is 3; it must be a list of tables, each under \[\[link\]\]"),
        ("hosts = 2\nlink = [1]\n", r"line 2: link is \[1\]; it must be a list of tables"),
        ("name = 3\n" + WIRED, "line 1: name is 3; it must be text"),
        ("fabric = 3\n", "line 1: fabric is 3; it must be text"),
        ('kind = "ring"\nshape = 2\n' + WIRED, "line 2: shape is 2; it must be a list of whole numbers"),
        ('kind = "ring"\nshape = ["a"]\n' + WIRED, r"line 2: shape is \['a'\]; it must be a list of whole numbers"),
        ('kind = "ring"\nshape = [2, 2]\n' + WIRED, r"shape \[2, 2\] is not one of a ring of 2 hosts"),
        ('kind = "ring"\nshape = [999999999]\n' + WIRED, r"shape \[999999999\] is not one of a ring of 2 hosts"),
        ('kind = "leaf_spine"\nshape = [2]\n' + WIRED, r"shape \[2\] is not one of a leaf_spine of 2 hosts"),
        ('kind = "cluster"\nshape = [2]\n' + WIRED, r"not complete: that of cluster:2,1,1 is \[2, 1, 1\]"),
        ("shape = [2]\n" + WIRED, "line 1: shape is that of a kind, and none is given"),
        ("interfaces = 3\n" + WIRED, "line 1: interfaces is 3; it must be a list of names for every host"),
        ("interfaces = [3, 4]\n" + WIRED, r"line 1: interfaces is \[3, 4\]; it must be a list of names"),
        ("hosts = \n", "line 1"),
    ],
)
def test_files_that_are_refused(text: str, match: str, tmp_path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=match) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_a_fabric_is_found_by_file_or_name(tmp_path) -> None:
    path = tmp_path / "two"
    path.write_text(WIRED)
    assert find(str(path)) == load(path)
    assert {link.rate for link in find(str(path), rate=5e6).links} == {5e6}
    assert {link.latency for link in find(str(path), rate=5e6).links} == {1e-6}
    assert find("ring:3", usual=("1mbit", 0)) == parse("ring:3", 1e6, 0)
    assert find("ring:3", 2e6, 1e-3, usual=("1mbit", 0)) == parse("ring:3", 2e6, 1e-3)
    with pytest.raises(FileNotFoundError):
        find(str(tmp_path / "absent.toml"))


def test_a_short_file_and_a_false_claim() -> None:
    assert loads('fabric = "torus:4x4"\nrate = "200mbit"\n') == parse("torus:4x4", "200mbit")
    assert {link.burst for link in loads('fabric = "torus:4x4"\nburst = "6KB"\n').links} == {6e3}
    two = "burst = 5\nhosts = 2\n[[link]]\na = [0, 0]\nb = [1, 0]\n[[link]]\na = [0, 1]\nb = [1, 1]\nburst = 0\n"
    assert [link.burst for link in loads(two).links] == [5.0, 0.0]
    wired = dumps(ring(4)).replace('kind = "ring"', 'kind = "star"')
    with pytest.raises(ValueError, match=r"are \(4, 0, 1\); those of star:4 are \(4, 1, 1\)"):
        loads(wired)
    crossed = dumps(torus(2, 3)).replace("shape = [2, 3]", "shape = [3, 2]")
    with pytest.raises(ValueError, match="leave out kind and shape"):
        loads(crossed)
    assert loads(crossed.replace('kind = "torus"\nshape = [3, 2]\n', "")).kind == ""

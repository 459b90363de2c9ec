"""Network: plans of a job that says on which fabric it runs; which NICs are its rails; what discovery measures with what."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from topo_reference import ROOTED, counts_of, run

from hrdma import _core, nics
from hrdma.discovery import Edge, _answer, _listen, _measure, pairs, rounds, slower
from hrdma.errors import ScheduleError
from hrdma.planning import NETWORK, Cost, Network, cost_of, lower, network, plan
from hrdma.runtime import Runtime
from hrdma.topo import plan_file
from hrdma.topo import program as isa
from hrdma.topo.algorithms.on_fabric import lookup
from hrdma.topo.fabric_file import dump, dumps, load, loads
from hrdma.topo.fabrics import parse
from hrdma.topo.infer import Nic
from hrdma.topo.planner import plan as on_fabric
from hrdma.topo.verify import check_programs
from hrdma.types import COLLECTIVES

BCUBE = Network(parse("bcube:2,2", rate="50mbit", latency=0))


def plans(on: Network, collective: str, counts, **how) -> list:
    size = on.fabric.ranks
    return [
        plan(collective, size=size, rank=rank, counts=counts, itemsize=8, dtype="int64", on=on, **how)
        for rank in range(size)
    ]


# --- plans ---


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("fabric", ("bcube:2,2", "torus:2x2", "cluster:2,2,2", "star:3"))
def test_plans_of_all_ranks_fit_and_compute(collective: str, fabric: str) -> None:
    on = Network(parse(fabric))
    for count in (0, 3, 5000):
        for in_place in (False, True):
            root = 1 if collective in ROOTED else 0
            made = plans(on, collective, count, root=root, in_place=in_place)
            assert all(one.choice is None and f"on {on.fabric.name}" in one.explanation for one in made)
            counts = [count] * on.fabric.ranks
            if collective not in ("allreduce", "reduce", "broadcast", "barrier"):
                counts = counts_like(collective, on.fabric.ranks, count)
            run(made, collective, counts, root, in_place, mapped=False, credits=2, seed=count)


def counts_like(collective: str, size: int, count: int) -> list:
    """As the reference writes blocks of one length."""
    example = counts_of(collective, size, "one")
    if isinstance(example[0], int):
        return [count] * size
    return [tuple([count] * size for _ in one) if isinstance(one, tuple) else [count] * size for one in example]


def test_what_arrives_in_a_round_waits_for_no_scratch() -> None:
    """By each of two NICs from two others at once: with less scratch one NIC waits for the other, and time doubles."""
    on, count = Network(parse("bcube:3,2", rate="50mbit", latency=0)), (32 << 20) // 4
    how = {"rank": 4, "counts": count, "itemsize": 4, "in_place": True}
    made = plan("allreduce", size=9, dtype="float32", algorithm="bml", on=on, **how)
    usual = lower(lookup("bml").build("allreduce", on.fabric, 1, 0, 4), **how)
    waiting = []
    for spec in (made, usual):
        receives = np.isin(spec.instrs["op"], (isa.RECV, isa.RECV_REDUCE, isa.BORROW))
        waiting.append(4 - (spec.instrs["after"][receives] == 0).sum())
    assert waiting == [0, 2] and made.tmp_bytes < 32 << 20


def test_large_vectors_take_all_rails() -> None:
    made = plans(BCUBE, "allreduce", 1 << 20, in_place=True)
    check_programs(made)
    for one in made:
        sends = one.instrs[one.instrs["op"] == isa.SEND]
        by_lane = [int(sends["len"][sends["lane"] == lane].sum()) for lane in (0, 1)]
        assert by_lane[0] == by_lane[1] == 8 * (1 << 20) * 3 // 4


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"dtype": "float32", "deterministic": True, "counts": 100}, "other orders than that of the ranks"),
        ({"dtype": "float32", "collective": "allgather", "counts": [1, 2, 3, 4]}, "blocks of one length"),
    ],
)
def test_what_no_fabric_plan_can_do_is_planned_as_ever_and_says_so(how: dict, reason: str) -> None:
    asked = {"collective": "allreduce", "size": 4, "rank": 1, "itemsize": 4, **how}
    found = plan(on=BCUBE, **asked)
    assert found.choice is not None and reason in found.reason
    assert found.explanation == f"{plan(**asked).explanation}; {found.reason}"
    assert (found.instrs == plan(**asked).instrs).all()


def test_whole_numbers_are_deterministic_anyhow() -> None:
    found = plan("allreduce", size=4, rank=0, counts=10, dtype="int64", itemsize=8, deterministic=True, on=BCUBE)
    assert found.choice is None


def test_one_algorithm_may_be_asked_for() -> None:
    found = plan("allreduce", size=4, rank=0, counts=1000, itemsize=4, algorithm="bml", parts=2, on=BCUBE)
    schedule = on_fabric("allreduce", BCUBE.fabric, 4096, algorithm="bml").schedule(0)
    assert len(found.instrs) >= len(lower(schedule, 0, 1000, 4).instrs) and "bml on bcube:2,2" in found.explanation
    with pytest.raises(ValueError, match="torus cannot plan allreduce on bcube:2,2: it needs a torus"):
        plan("allreduce", size=4, rank=0, counts=1000, itemsize=4, algorithm="torus", on=BCUBE)


def test_sizes_that_differ_little_share_a_plan() -> None:
    made = [BCUBE.plan("allreduce", rank=0, counts=n, itemsize=4, root=0, in_place=True, deterministic=False, cost=NETWORK)
            for n in (257, 300, 512, 513)]  # fmt: skip
    assert [one.reason.split(" on ")[0] for one in made] == ["allreduce of 2 KiB"] * 3 + ["allreduce of 4 KiB"]


def test_hosts_of_one_machine_share_its_cores_and_have_no_network_between() -> None:
    measured = {"tcp": Cost(9e-6, 5e-10, 2e-11, 1e-6).to_dict()}
    here = [{"host": f"boot.{n}", "machine": "boot", "cpus": "3", "costs": measured} for n in range(3)]
    cost = cost_of({"tcp"}, here, here)
    assert (cost.cores, cost.offload, cost.latency, cost.alpha) == (2, False, 1e-6, 9e-6)
    apart = [{**card, "machine": f"boot{n}"} for n, card in enumerate(here)]
    cost = cost_of({"tcp"}, apart, apart)
    assert (cost.cores, cost.offload, cost.latency) == (0, True, NETWORK.latency)
    assert cost_of({"tcp"}, here[:2], apart).cores == 2


# --- settings ---


def test_the_settings_name_a_fabric_a_file_or_a_plan(tmp_path) -> None:
    assert network("", "", 4) is None
    assert network("bcube:2,2", "", 4).fabric == parse("bcube:2,2")
    dump(BCUBE.fabric, tmp_path / "mine.toml")
    assert network(str(tmp_path / "mine.toml"), "", 4).fabric == BCUBE.fabric
    made = on_fabric("allreduce", BCUBE.fabric, 1 << 20, algorithm="hips-mesh")
    plan_file.dump(made, tmp_path / "plan.json")
    found = network("", str(tmp_path / "plan.json"), 4)
    assert found.fabric == BCUBE.fabric and found.digest() != BCUBE.digest()
    (one, other) = (
        plan(name, size=4, rank=0, counts=1000, itemsize=4, on=found) for name in ("allreduce", "allgather")
    )
    assert "hips-mesh" in one.explanation and "allgather" in other.explanation
    assert (one.instrs == lower(made.schedule(0), 0, 1000, 4).instrs).all()


def test_a_given_plan_runs_for_its_root_and_ranks_agree_on_that() -> None:
    made = on_fabric("broadcast", BCUBE.fabric, 1 << 20, root=2, algorithm="ring")
    given = Network(BCUBE.fabric, made)
    said = [
        plan("broadcast", size=4, rank=0, counts=1000, itemsize=4, root=root, on=given).explanation for root in (2, 1)
    ]
    assert "with root 2 of 1 MiB" in said[0] and "ring" in said[0]
    assert "with root 1 of 4 KiB" in said[1]
    assert Network(BCUBE.fabric, replace(made, root=1)).digest() != given.digest()
    # where there is no root the number does not matter
    summed = on_fabric("allreduce", BCUBE.fabric, 1 << 20, root=2, algorithm="ring")
    assert (
        "of 1 MiB"
        in plan("allreduce", size=4, rank=0, counts=1000, itemsize=4, on=Network(BCUBE.fabric, summed)).explanation
    )


@pytest.mark.parametrize(
    ("fabric", "ranks", "error", "match"),
    [
        ("bcube:2,2", 5, ValueError, r"bcube:2,2 \(bcube:2,2\) has 4 ranks, the job 5"),
        ("bcube", 4, ValueError, "numbers of 'bcube'"),
        ("absent.toml", 4, OSError, "absent.toml"),
    ],
)
def test_wrong_fabrics_are_refused(fabric, ranks, error, match) -> None:
    with pytest.raises(error, match=match):
        network(fabric, "", ranks)


def test_wrong_plans_are_refused(tmp_path) -> None:
    path = tmp_path / "plan.json"
    text = plan_file.dumps(on_fabric("allreduce", BCUBE.fabric, 1 << 20, algorithm="bml"))
    path.write_text(text)
    with pytest.raises(ScheduleError, match="the plan is for another fabric"):
        network("bcube:2,2", str(path), 4)
    with pytest.raises(ValueError, match="has 4 ranks, the job 3"):
        network("", str(path), 3)
    data = json.loads(text)
    data["schedule"]["rounds"][0].pop()
    path.write_text(json.dumps(data))
    with pytest.raises(ScheduleError, match=r"plan.json: rank \d, chunk \d") as caught:
        network("", str(path), 4)
    assert caught.value.rank is not None and caught.value.chunk is not None


# --- names of NICs ---


def test_names_of_nics_are_kept_in_files() -> None:
    named = replace(BCUBE.fabric, interfaces=(("eth1", "eth0"),) * 4)
    assert loads(dumps(named)) == named and named.digest() != BCUBE.fabric.digest()
    assert loads(dumps(BCUBE.fabric)).interfaces == ()
    assert named.without(0).interfaces == ()


@pytest.mark.parametrize("names", [(("a",),) * 4, (("a", "b"),) * 3, (("a", "a"),) * 4])
def test_names_of_other_nics_are_refused(names) -> None:
    with pytest.raises(ValueError, match=r"interfaces of host \d are .*; it has 2 NICs"):
        replace(BCUBE.fabric, interfaces=names)


def test_a_named_file_is_read(tmp_path) -> None:
    (tmp_path / "f.toml").write_text(
        'hosts = 2\ninterfaces = [["x"], ["y"]]\n[[link]]\na = [0, 0]\nb = [1, 0]\nrate = "1mbit"\n'
    )
    assert load(tmp_path / "f.toml").interfaces == (("x",), ("y",))


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ("", ["eth2", "eth10", "ib0"]),
        ("eth*", ["eth2", "eth10"]),
        ("^eth2", ["eth10", "ib0"]),
        ("10.1.0.0/16", ["eth10"]),
        ("ib0, 10.0.0.2", ["eth2", "ib0"]),
        ("eth*,^10.1.0.0/16", ["eth2"]),
        ("none", []),
    ],
)
def test_the_grammar_of_interfaces(monkeypatch, grammar: str, expected: list[str]) -> None:
    there = {
        "lo": None,
        "ib0": nics.Nic("ib0", "fd00::1", "fd00::/64"),
        "eth10": nics.Nic("eth10", "10.1.0.2", "10.1.0.0/24"),
        "eth2": nics.Nic("eth2", "10.0.0.2", "10.0.0.0/24"),
    }
    monkeypatch.setattr(nics.socket, "if_nameindex", lambda: list(enumerate(there, 1)))
    monkeypatch.setattr(nics, "_nic", there.get)
    assert [nic.name for nic in nics.nics(grammar)] == expected


def test_rails_are_as_many_as_the_core_has(monkeypatch, caplog) -> None:
    """The first rank of a host says that some of its NICs are not used."""
    there = [nics.Nic(f"eth{n}", f"10.{n}.0.1", f"10.{n}.0.0/16") for n in range(10)]
    monkeypatch.setattr(nics, "nics", lambda ifname="": there)
    fabric = parse("cluster:2,2,10")
    for rank in range(4):
        job = SimpleNamespace(
            network=Network(fabric),
            names=("tcp",),
            rank=rank,
            config=SimpleNamespace(ifname=""),
            log=logging.getLogger(),
        )
        assert Runtime._rails(job) == tuple(nic.name for nic in there[: _core.MAX_RAILS])
    said = [record.getMessage() for record in caplog.records]
    assert [text[:6] for text in said] == ["host 0", "host 1"]
    assert said[0].startswith("host 0 of cluster:2,2,10 has 10 NICs, of which 8 can be rails: ")


def test_this_host_is_read() -> None:
    for nic in nics.nics():
        assert nic.name != "lo" and "/" in nic.subnet


# --- what discovery measures ---


def test_every_nic_measures_every_other_of_its_subnet() -> None:
    hosts = [[Nic("n0", f"s{host // 3}"), Nic("n1", f"t{host % 3}"), Nic("alone", f"a{host}")] for host in range(9)]
    edges = pairs(hosts)
    assert sorted((edge.src, edge.dst) for edge in edges) == [
        ((a, nic), (b, nic))
        for a in range(9)
        for nic in (0, 1)
        for b in range(9)
        if a != b and (a // 3 == b // 3 if nic == 0 else a % 3 == b % 3)
    ]
    first = edges[: len(edges) // 2]
    ports = sorted((host, nic) for host in range(9) for nic in (0, 1))
    assert sorted(edge.src for edge in first) == sorted(edge.dst for edge in first) == ports, (
        "each with one, to begin with"
    )
    made = rounds(edges)
    assert sorted(edge for together in made for edge in together) == sorted(edges) and len(made) <= 8
    for together in made:
        for end in ("src", "dst"):
            hosts_of = [getattr(edge, end)[0] for edge in together]
            assert len(set(hosts_of)) == len(hosts_of)


def test_in_a_large_subnet_a_nic_measures_some() -> None:
    edges = pairs([[Nic("n", "s")]] * 100)
    assert len(edges) == len(set(edges)) == 700
    assert {(edge.dst[0] - edge.src[0]) % 100 for edge in edges} == {1, 2, 4, 8, 16, 32, 64}
    assert len(rounds(edges)) == 7


def test_two_nics_of_a_host_in_one_subnet_do_not_measure_each_other() -> None:
    edges = pairs([[Nic("a", "s"), Nic("b", "s")], [Nic("a", "s")]])
    assert edges and all(edge.src[0] != edge.dst[0] for edge in edges)


def test_several_nics_of_a_host_in_a_subnet() -> None:
    """Where two hosts have two NICs each in one subnet, or numbers differ, every NIC still meets all of the other hosts."""
    for hosts in (
        [[Nic("a", "s"), Nic("b", "s")]] * 2,
        [[Nic("a", "s"), Nic("b", "s")], [Nic("x", "t"), Nic("a", "s"), Nic("b", "s")], [Nic("a", "s"), Nic("b", "s")]],
    ):
        ports = [(h, n) for h, listed in enumerate(hosts) for n, nic in enumerate(listed) if nic.subnet == "s"]
        met = {(edge.src, edge.dst) for edge in pairs(hosts)}
        assert met == {(a, b) for a in ports for b in ports if a[0] != b[0]}


def test_a_pair_that_is_slower_than_its_nics_is_found() -> None:
    rates = {Edge("s", (a, 0), (b, 0)): 100.0 for a in range(4) for b in range(4) if a != b}
    rates |= {edge: 10.0 for edge in rates if 3 in (edge.src[0], edge.dst[0])}  # a slow NIC is not a slow path
    assert slower(rates) == []
    rates[Edge("s", (1, 0), (2, 0))] = 40.0
    assert slower(rates) == [(Edge("s", (1, 0), (2, 0)), 40.0, 100.0)]


def closes(address: tuple[str, int]) -> None:
    socket.create_connection(address, timeout=5).close()


def is_silent(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=5) as sock:
        sock.recv(1)


def speaks_slowly(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=5) as sock:
        for _ in range(50):
            sock.send(b"x")
            time.sleep(0.1)


def guesses(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=5) as sock:
        sock.sendall(bytes(16))


@pytest.mark.parametrize("stranger", [closes, is_silent, speaks_slowly, guesses])
def test_a_stranger_neither_ends_nor_delays_what_is_measured(stranger) -> None:
    nonce, listener = "ab" * 16, _listen("127.0.0.1")
    address = listener.getsockname()

    def come() -> None:
        try:
            stranger(address)
        except OSError:  # sent away
            pass

    with listener:
        visitor = threading.Thread(target=come)
        visitor.start()
        time.sleep(0.1)  # the stranger is the first in line
        answerer = threading.Thread(target=_answer, args=(listener, nonce))
        answerer.start()
        begun = time.monotonic()
        rate, latency = _measure("127.0.0.1", "127.0.0.1", address[1], nonce)
        answerer.join(5)
        assert rate > 0 and latency > 0 and not answerer.is_alive() and time.monotonic() - begun < 5
        visitor.join(5)
        assert not visitor.is_alive()


def test_an_answerer_to_whom_only_a_stranger_comes_ends() -> None:
    with _listen("127.0.0.1") as listener, socket.create_connection(listener.getsockname(), timeout=5) as sock:
        answerer = threading.Thread(target=_answer, args=(listener, "ab" * 16))
        answerer.start()
        end = time.monotonic() + 10
        while answerer.is_alive() and time.monotonic() < end:  # a byte at a time, each sooner than any patience ends
            try:
                sock.send(b"x")
            except OSError:
                break
            answerer.join(0.2)
        answerer.join(4)
        assert not answerer.is_alive() and time.monotonic() < end - 5

"""Plans on all NICs: which bytes leave by which, what is said where one is missing, discovery, measured beside predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from lab_jobs import environment
from windows import one_good

import harness
from hrdma.bench import fabrics as measuring
from hrdma.cli.measured import like_lab, verdict
from hrdma.lab import namespaces
from hrdma.lab.lab import LIKE_MACHINES, Lab
from hrdma.topo import fabric_file, plan_file
from hrdma.topo.cost import Cost
from hrdma.topo.fabric import Fabric
from hrdma.topo.fabrics import parse
from hrdma.topo.planner import plan

JOB = str(Path(__file__).with_name("rails_jobs.py"))
PAYLOAD = 4 * 200_000  # bytes of the vector in the jobs
FABRIC = "bcube:2,2"


def on_host(rank: int, files: list[str], arguments: list[str]) -> dict:
    """What one of the jobs returns on its rank, in the network namespace of its host."""
    import rails_jobs

    namespaces.enter(files[rank])
    return rails_jobs.MODES[arguments[0]](*arguments[1:])


def job(lab: Lab, *arguments: str, timeout: float = 60, **settings: str) -> tuple[list[dict], str]:
    """What the ranks returned, in their order, and what they printed; one on each host, as `hrdma lab run` starts them."""
    files = [lab.namespace(host) for host in range(lab.hosts)]
    settings = {**LIKE_MACHINES, "HRDMA_TOKEN": "secret", "MASTER_ADDR": lab.addresses(0)[0], **settings}
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    found = harness.outcomes(
        on_host, lab.hosts, init=False, timeout=timeout, env=alone | settings, files=files, arguments=list(arguments)
    )
    said = "".join(one.output for one in found)
    assert not any(one.error for one in found), said
    return [one.value for one in found], said


def topo(*arguments: str, timeout: float = 100, **how) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hrdma", "topo", *arguments]
    return subprocess.run(
        command, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, **how
    )


# --- rails ---


def test_a_plan_leaves_by_all_nics_at_once(lab):
    found, _ = job(lab, "summed", "bml", HRDMA_FABRIC=FABRIC)
    share = PAYLOAD * 3 / 4  # 2 (n - 1) / n of the vector, by two NICs
    for one in found:
        assert one["rails"] == ["nic0", "nic1"] and one["each"] == [2]
        for nic in ("nic0", "nic1"):
            assert 0.8 * share < one["moved"][nic] < 1.25 * share  # the last of it may still wait in the kernel


def only_by(found: list[dict], nic: str, least: float) -> None:
    """Every rank's payload went by the rail of this NIC; whose wire it left by is the routes' business."""
    for one in found:
        for name, nbytes in one["by_rail"].items():
            assert nbytes > least if name == nic else nbytes < 0.1 * least, found


def named(tmp_path: Path, name: str, *interfaces: str) -> str:
    """A file of a fabric whose hosts call their NICs so."""
    path = tmp_path / "named.toml"
    fabric_file.dump(replace(parse(name), interfaces=(interfaces,) * 4), path)
    return str(path)


def test_lane_0_alone_leaves_by_the_first_rail(lab, tmp_path):
    """direct has one lane: what goes to a host that differs in both digits is relayed by another's NIC 1."""
    least = 0.9 * PAYLOAD * 3 / 2  # 2 (n - 1) / n of the vector
    found, _ = job(lab, "summed", "direct", HRDMA_FABRIC=FABRIC)
    only_by(found, "nic0", least)
    assert all(one["moved"]["nic1"] > 0.9 * PAYLOAD / 2 for one in found)
    found, _ = job(lab, "summed", "direct", HRDMA_FABRIC=named(tmp_path, FABRIC, "nic1", "nic0"))
    assert [one["rails"] for one in found] == [["nic1", "nic0"]] * 4
    only_by(found, "nic1", least)


def test_a_fabric_of_one_nic_names_which(lab, tmp_path):
    found, _ = job(lab, "summed", "ring", HRDMA_FABRIC=named(tmp_path, "star:4", "nic1"))
    assert [one["rails"] for one in found] == [["nic1"]] * 4
    only_by(found, "nic1", 0.9 * PAYLOAD * 3 / 2)


def test_messages_of_users_keep_to_the_first_rail(lab, tmp_path):
    for fabric, first in ((FABRIC, "nic0"), (named(tmp_path, FABRIC, "nic1", "nic0"), "nic1")):
        found, _ = job(lab, "messages", HRDMA_FABRIC=fabric)
        assert [one["sizes"] for one in found] == [[10, 300_000, 20]] * 4
        only_by(found, first, 300_000)


def test_without_a_fabric_there_is_one_connection(lab):
    found, _ = job(lab, "summed")
    assert all(one["rails"] == [] and one["each"] == [1] for one in found)


def test_a_missing_nic_is_said_in_one_line_and_done_without(lab):
    found, said = job(lab, "summed", "bml", HRDMA_FABRIC=FABRIC, HRDMA_IFNAME="nic0")
    assert all(one["rails"] == [] and one["each"] == [1] for one in found)
    for host in range(4):
        text = f"host {host} of bcube:2,2 has 2 NICs, this one only nic0: what belongs to the others goes by the first"
        assert said.count(text) == 1


def test_a_cable_that_is_pulled_is_an_error_on_every_rank(name):
    with Lab.up(parse(FABRIC, rate="100mbit", latency=0), name) as own:
        found, _ = job(own, "cut", "nic1", timeout=90, HRDMA_FABRIC=FABRIC)
        assert {one["error"] for one in found} == {"PeerError"}
        assert max(one["after"] for one in found) < 25


# --- plans and discovery ---


def test_a_plan_from_a_file_is_what_runs(lab, tmp_path):
    path = tmp_path / "plan.json"
    plan_file.dump(plan("allreduce", parse(FABRIC), 1 << 20, algorithm="bml"), path)
    found, said = job(lab, "summed", HRDMA_PLAN=str(path), HRDMA_LOG_LEVEL="info")
    assert all(one["rails"] == ["nic0", "nic1"] for one in found)
    assert said.count("INFO: allreduce of 1 MiB on bcube:2,2, 4 ranks: bml") == 4
    path.write_text(path.read_text().replace('"collective": "allreduce"', '"collective": "broadcast"', 1))
    done = subprocess.run(
        [sys.executable, "-m", "hrdma", "lab", "run", "--name", lab.name, "--", JOB, "summed"],
        env=environment(HRDMA_PLAN=str(path)), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode and "the plan is for broadcast, its schedule for allreduce" in done.stderr + done.stdout


def test_a_job_discovers_its_fabric(lab, tmp_path):
    command = [sys.executable, "-m", "hrdma", "lab", "run", "--name", lab.name, "--", sys.executable, "-m", "hrdma"]

    def discover() -> list[tuple[float, float]]:
        """What was measured of each link."""
        done = subprocess.run(
            [*command, "topo", "discover", "-o", "found.toml"],
            env=environment(), capture_output=True, text=True, timeout=60, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = fabric_file.load(tmp_path / "found.toml")
        # four hosts in pairs are a torus as well: the wires are the same
        assert (found.kind, found.shape, found.interfaces) == ("torus", (2, 2), (("nic0", "nic1"),) * 4)
        assert done.stdout.startswith("[0] torus:2x2: 4 hosts, 0 switches") and found.digest() in done.stdout
        assert len(done.stdout.splitlines()) == 2  # rank 0 alone speaks
        assert {(link.a, link.b) for link in found.links} == {(link.a, link.b) for link in parse("torus:2x2").links}
        return [(link.rate, link.latency) for link in found.links]

    one_good(
        discover,
        lambda links: all(0.3 * 50e6 < rate < 1.05 * 50e6 and 0 < latency < 0.05 for rate, latency in links),
        5,
    )
    ran, _ = job(lab, "summed", "torus", HRDMA_FABRIC=str(tmp_path / "found.toml"))
    assert all(one["rails"] == ["nic0", "nic1"] for one in ran)


def test_a_job_may_discover_its_fabric_when_it_begins(lab):
    found, said = job(lab, "summed", HRDMA_FABRIC="discover", HRDMA_LOG_LEVEL="info")
    assert all(one["rails"] == ["nic0", "nic1"] and one["each"] == [2] for one in found)
    assert "INFO: allreduce of 1 MiB on torus:2x2, 4 ranks: " in said


def test_a_job_discovers_what_routers_join(name):
    """The hosts of a leaf have a subnet of their own."""
    with Lab.up(parse("leaf_spine:2,2,1", rate="100mbit", latency=0), name) as own:
        found, said = job(own, "summed", HRDMA_FABRIC="discover", HRDMA_LOG_LEVEL="info")
    assert all(one["rails"] == ["nic0"] for one in found)
    assert "INFO: allreduce of 1 MiB on star:4, 4 ranks: " in said


def test_discovery_names_a_pair_that_is_slower_than_its_nics(name):
    with Lab.up(parse("star:4", rate="100mbit", latency=0), name) as own:
        target = own.addresses(2)[0]
        for words in (
            "qdisc replace dev nic0 root handle 9: htb default 1",
            "class add dev nic0 parent 9: classid 9:1 htb rate 100mbit burst 6k",
            "class add dev nic0 parent 9: classid 9:2 htb rate 10mbit burst 6k",
            f"filter add dev nic0 protocol ip parent 9: u32 match ip dst {target}/32 flowid 9:2",
        ):
            enter = ["nsenter", f"--net={own.namespace(1)}", "tc", *words.split()]
            subprocess.run(enter, check=True, capture_output=True, timeout=10)

        def discover() -> list[str]:
            _, said = job(own, "summed", HRDMA_FABRIC="discover")
            return [line for line in said.splitlines() if "plans do not know of it" in line]

        one_good(discover, lambda slow: len(slow) == 1 and "host 1 (nic0) to host 2 (nic0)" in slow[0], 5)


# --- measured beside predicted ---


def test_compare_measures_in_a_lab(lab):
    done = topo("compare", "--fabric", FABRIC, "--size", "256KiB", "--measure", "--lab", lab.name, "--rounds", "1",
                "--algorithm", "bml", "--algorithm", "ring", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {one["algorithm"]: one for one in json.loads(done.stdout)["measurements"]}
    assert set(found) == {"bml", "ring"}
    for one in found.values():
        assert one["least"] <= one["measured"] <= one["most"] and one["measured"] > 0.5 * one["predicted"] > 0
        assert one["sent"] > one["per_nic"] > 0 and 0 < one["busy"] <= 1
        assert (
            list(one["carried"]) == ["tcp"] and 1 <= one["carried"]["tcp"] / (2 * 3 * (256 << 10)) < 1.1
        )  # of 4 ranks
    assert found["bml"]["predicted"] < found["ring"]["predicted"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--fabric", "torus:2x2"], "is bcube:2,2 of 5e+07 bit/s, bursts of 6250 B, not torus:2x2"),
        (["--fabric", FABRIC, "--rate", "1gbit"], "not bcube:2,2 of 1e+09 bit/s, bursts of 6250 B"),
        (["--fabric", FABRIC, "--collective", "broadcast"], "--measure runs allreduce, not broadcast"),
        (["--fabric", FABRIC, "--size", "5B"], "5 bytes are no whole number"),
        (["--fabric", FABRIC, "--algorithm", "nosuch"], "unknown algorithm 'nosuch'"),
    ],
)
def test_compare_refuses_to_measure_something_else(lab, arguments, complaint):
    asked = arguments if "--size" in arguments else [*arguments, "--size", "4KiB"]
    done = topo("compare", "--measure", "--lab", lab.name, *asked)
    assert done.returncode in (1, 2) and complaint in done.stderr


def test_the_caller_s_own_settings_are_not_those_of_a_measurement(lab, monkeypatch):
    monkeypatch.setenv("HRDMA_FABRIC", "ring:2")
    monkeypatch.setenv("HRDMA_PLAN", "nowhere.json")
    fabric = parse(FABRIC, rate=lab.nodes[0]["nics"][0]["rate_bit_s"], latency=0)
    cost = one_good(lambda: measuring.calibrated(lab, fabric), lambda cost: 0 < cost.latency < 0.05, 5)
    made = plan("allreduce", measuring.payload(fabric), 4096, cost, algorithm="ring")
    (one,) = measuring.measure(lab, fabric, [(4096, made.candidates[0])], rounds=1)
    assert one.measured > 0


class Lab4(SimpleNamespace):
    """Of a lab what a calibration and the command line look at."""

    name, fabric, hosts = "none", "star:4", 4
    nodes = [{"nics": [{"rate_bit_s": 50e6, "latency": 1e-3, "burst": 9000}]}] * 4


def test_pings_of_a_lab_with_latency_are_not_all_work(monkeypatch):
    ways = {1e-3: 2e-3, 0.0: 0.0}  # two links
    known = Cost(1e-5, 0.0, 0.0, latency=1e-6, cores=2)
    monkeypatch.setattr(measuring, "_job", lambda *_: {"cost": known.to_dict(), "way": 2e-3 + 13e-6})

    def made(latency: float) -> Fabric:
        star = parse("star:4", rate="50mbit", latency=latency)
        return replace(star, links=tuple(link._replace(burst=9000.0) for link in star.links))

    for latency, distance in ways.items():
        cost = measuring.calibrated(Lab4(), made(latency))
        assert cost.latency == pytest.approx(1e-6 + 2e-3 + 13e-6 - distance)
    assert measuring.calibrated(Lab4(), made(5e-3)) == known  # never below that of the connections
    with pytest.raises(RuntimeError, match=r"is star:4 of 5.*, bursts of 9000 B, not star:4 of 5.*, bursts of 6250 B"):
        measuring.calibrated(Lab4(), parse("star:4", rate="50mbit", latency=5e-3))


def test_what_is_not_said_of_the_links_is_the_lab_s(monkeypatch, tmp_path):
    monkeypatch.setattr(Lab, "find", lambda name: Lab4())
    for given, links in (
        ((None, None), (50e6, 1e-3, 9e3)),
        ((20e6, None), (20e6, 1e-3, 9e3)),
        ((None, 0.0), (50e6, 0.0, 9e3)),
    ):
        assert {link[2:] for link in like_lab("none", "star:4", *given).links} == {links}
    (tmp_path / "mine.toml").write_text('fabric = "star:4"\nburst = "3KB"\n')
    assert {link[2:] for link in like_lab("none", str(tmp_path / "mine.toml"), None, 0.0).links} == {(1e10, 0.0, 3e3)}


def test_the_plan_is_held_against_all_that_know_nothing_of_the_fabric():
    found = [
        measuring.Measurement(name, 1, 400, 1.0, seconds, seconds, seconds, 0.0, 0.0, 0.0, 0.0, {})
        for name, seconds in (("bml", 2.0), ("ring", 5.0), ("server-3", 4.0), ("hips-mesh", 1.0))
    ]
    assert verdict(found) == "planned: bml; it took 0.50 of the time of the best flat one, server-3"
    assert verdict([found[0], found[3]]) == ""


class Fake:
    """A communicator of two ranks; at first its results are right."""

    size, rank = 2, 0

    def __init__(self, then):
        self.then, self.right = then, True

    def dup(self):
        return self

    def stats(self):
        return {"peers": {}}

    def barrier(self):
        pass

    def allreduce(self, x, op="sum", out=None):
        if x.dtype == np.float32:
            out = x if out is None else out
            if self.right or self.then == "wrong":
                out[:] = x * 2 + 1
            if not self.right and self.then == "wrong":
                out[-1] += 1


@pytest.mark.parametrize("calls", (1, 3))
@pytest.mark.parametrize(("then", "count"), (("wrong", 1), ("nothing", 100)))
def test_a_wrong_result_would_be_noticed(calls, then, count):
    comm = Fake(then)
    job = measuring._Job(comm, [measuring._Case("ring", 1, 400, calls)])
    job.run(0)
    assert job.wrong == 0
    comm.right = False
    job.run(0)
    assert job.wrong == count

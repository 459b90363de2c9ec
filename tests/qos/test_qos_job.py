"""From `hrdma.init(job=..., priority=...)` to the wire: two ranks in two namespaces, a controller in each, bytes counted by class."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import lab
import pytest

from hrdma.qos.client import Client, socket_path
from hrdma.qos.policy import Job, Match, Policy
from hrdma.qos.record import Record
from hrdma.qos.state import counters
from hrdma.qos.wire import Wire

NBYTES = 2_000_000
RATE = 12_500_000
STRICT = Policy("strict", (Job("named", (Match(dscp=20),), band=1),), rate=RATE, guest_band=2)


@contextlib.contextmanager
def controllers(net: lab.Net, *policies: Policy) -> Iterator[None]:
    """One at v0 here, with a second policy one at v1 there as well; killed at the end."""
    with contextlib.ExitStack() as stack:
        for dev, policy in zip(("v0", "v1"), policies):
            stack.enter_context(lab.serving(net, policy, dev))
        yield


@dataclass
class Rank:
    """How a rank ended."""

    status: int
    found: dict
    log: str


def start(net: lab.Net, rank: int, settings: dict[str, str], *more: str, nbytes: int = NBYTES) -> subprocess.Popen[str]:
    """A rank, in the namespace of its number."""
    dev = ("v0", "v1")[rank]
    with net.other() if rank else contextlib.nullcontext():
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HRDMA_")}
        env = {
            **kept, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": lab.HERE, "MASTER_PORT": "29511",
            "HRDMA_TOKEN": "a", "HRDMA_TIMEOUT": "30", "HRDMA_QOS": socket_path(dev, net.directory), **settings,
        }  # fmt: skip
        command = [sys.executable, str(Path(__file__).parent / "job_rank.py"), str(nbytes), *more]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env)


def ended(process: subprocess.Popen[str]) -> Rank:
    try:
        out, log = process.communicate(timeout=50)
    finally:
        process.kill()
    return Rank(process.returncode, json.loads(out) if out else {}, log)


def exchange(net: lab.Net, *settings: dict[str, str]) -> list[Rank]:
    processes = [start(net, rank, settings[rank % len(settings)]) for rank in range(2)]
    return [ended(process) for process in processes]


def bytes_of(net: lab.Net, dev: str) -> dict[str, int]:
    with net.other() if dev == "v1" else contextlib.nullcontext(), Client(dev, net.directory) as client:
        return {row["job"]: row["nbytes"] for row in client.status()["jobs"]}


@lab.isolated
def test_a_jobs_bytes_leave_in_its_band_in_both_directions(net):
    with controllers(net, STRICT, Policy("tls-rr", rate=RATE, dscp_pool=(50,))):
        job = {"HRDMA_JOB": "resnet", "HRDMA_PRIORITY": "3", "HRDMA_LOG_LEVEL": "info"}
        ranks = [start(net, rank, job, "linger") for rank in range(2)]
        try:
            found = [json.loads(rank.stdout.readline() or "{}") for rank in ranks]
            assert [one.get("priority") for one in found] == [3, 3], ended(ranks[0])
            assert [one["dup"] for one in found] == [3, 3]
            here, there = (one["traffic"] for one in found)
            assert here == {
                "dev": "v0",
                "policy": "strict",
                "kind": "htb",
                "band": 3,
                "dscp": 32,
                "answers": 3,
                "stamped": ["tcp"],
            }
            assert (there["policy"], there["band"], there["dscp"]) == ("tls-rr", 0, 50)
            for dev in ("v0", "v1"):
                counted = bytes_of(net, dev)
                assert counted["resnet"] >= NBYTES, counted
                assert counted["(others)"] < NBYTES / 20, counted  # the control plane
            settled = Record.load(net.directory, "v0").settled
            with Wire() as wire:
                answers = counters(wire, "v0")[settled.tree.answers["resnet"]]
            assert answers.packets > 10, "by a connection of their own"
            assert answers.nbytes < NBYTES / 20, "which has no bulk"
            for rank in ranks:
                rank.stdin.write("go\n")
                rank.stdin.flush()
        finally:
            outcomes = [ended(rank) for rank in ranks]
        assert [one.status for one in outcomes] == [0, 0], outcomes
        assert "job resnet: band 3 of v0 (strict by htb), DSCP 32 on tcp" in outcomes[0].log
        assert "resnet" not in bytes_of(net, "v0"), "it registered, and is gone"


@lab.isolated
def test_a_job_that_leaves_takes_nothing_along_that_still_waits(net):
    """Its class goes with its registration; what is dropped with it comes again among the others' bytes."""
    slow = dataclasses.replace(STRICT, rate=100_000, floor=1000)
    with controllers(net, slow):
        job = {"HRDMA_JOB": "resnet", "HRDMA_TCP": "sndbuf=1M"}
        ranks = [start(net, rank, job if rank == 0 else {}, "leave", nbytes=60_000) for rank in range(2)]
        outcomes = [ended(rank) for rank in ranks]
        assert [one.status for one in outcomes] == [0, 0], outcomes
        assert bytes_of(net, "v0")["(others)"] < 30_000


@lab.isolated
def test_whoever_does_not_ask_is_nobodys_job(net):
    """The negative of the first test: no name, or the setting off."""
    with controllers(net, STRICT):
        for settings in ({}, {"HRDMA_JOB": "resnet", "HRDMA_QOS": "off"}):
            before = bytes_of(net, "v0")["(others)"]
            ranks = exchange(net, settings)
            assert [(rank.status, rank.found["traffic"], rank.log) for rank in ranks] == [(0, None, "")] * 2
            assert bytes_of(net, "v0")["(others)"] - before >= NBYTES


@lab.isolated
def test_without_a_controller_the_job_runs_and_one_line_says_so(net):
    ranks = exchange(net, {"HRDMA_JOB": "resnet", "HRDMA_PRIORITY": "0"})
    for rank, dev in zip(ranks, ("v0", "v1")):
        assert (rank.status, rank.found["traffic"], rank.found["priority"]) == (0, None, 0), rank
        assert rank.log.count("\n") == 1
        assert "job resnet: priority 0 acts inside the library only: the controller of " + dev in rank.log
    unnamed = exchange(net, {"HRDMA_JOB": "resnet", "HRDMA_QOS": ""})
    assert [rank.status for rank in unnamed] == [0, 0]


@lab.isolated
def test_the_policy_has_the_last_word(net):
    one = Policy("strict", rate=RATE, guest_band=5, most_jobs=1)
    with controllers(net, one, one):
        ranks = exchange(net, {"HRDMA_JOB": "urgent", "HRDMA_PRIORITY": "0"})
        assert [rank.found["traffic"]["band"] for rank in ranks] == [5, 5]
        with Client("v0", net.directory) as other:
            other.register("first")
            ranks = exchange(net, {"HRDMA_JOB": "second"})
        assert [rank.status for rank in ranks] == [1, 1]
        assert "RefusedError: 1 jobs are all that the policy allows; job 'second' is one too many" in ranks[0].log
        assert "rank 0" in ranks[1].log, "it learns whose init failed"


@lab.isolated
def test_a_named_job_has_the_band_and_the_dscp_of_the_policy(net):
    with controllers(net, STRICT):
        ranks = exchange(net, {"HRDMA_JOB": "named", "HRDMA_PRIORITY": "0"})
        assert (ranks[0].found["traffic"]["band"], ranks[0].found["traffic"]["dscp"]) == (1, 20)
        assert bytes_of(net, "v0")["named"] >= NBYTES


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("HRDMA_JOB", "a b", "expected a name"),
        ("HRDMA_JOB", "-x", "a letter or digit first"),
        ("HRDMA_PRIORITY", "8", "expected 0"),
        ("HRDMA_PRIORITY", "01", "0"),
        ("HRDMA_QOS", "/run/hrdma-qos/", "not of its folder"),
    ],
)
def test_wrong_settings_are_named(name, value, expected):
    from hrdma.config import Config

    with pytest.raises(ValueError, match=f"{name}={value}: .*{expected}"):
        Config.load({name: value})

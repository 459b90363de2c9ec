"""`hrdma info`: text at several widths, JSON, bad settings, what is not available, and whether its claims are true."""

from __future__ import annotations

import json

import numpy as np
import pytest
from commands import hrdma

import harness
from hrdma.cli.info import _large
from hrdma.cli.probe import siblings_may_read
from hrdma.config import SETTINGS


def document(**environ: str) -> dict:
    done = hrdma("info", "--json", **environ)
    return json.loads(done.stdout)


@pytest.mark.parametrize("columns", [80, 120])
def test_text(columns):
    done = hrdma("info", COLUMNS=str(columns))
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines) <= columns
    assert not any(line.endswith(" ") or "\x1b" in line for line in lines)
    words = " ".join(done.stdout.split())
    for setting in SETTINGS:
        assert sum(line.startswith(f"{setting.name} ") for line in lines) == 1, setting.name
    for name in ("shm", "tcp", "loop"):
        assert any(line.startswith(f"{name} ") for line in lines), name
    assert "large messages from hrdma.empty(): mapped" in words
    assert "127.0.0.1" in words
    assert "Providers, best first" in lines


def test_piped_output_has_one_line_for_each_setting():
    lines = hrdma("info").stdout.splitlines()
    settings = lines[next(i for i, line in enumerate(lines) if line.startswith("Settings")) + 1 :]
    assert len(settings) == len(SETTINGS) and max(map(len, lines)) <= 120
    assert "HRDMA_" not in hrdma("info", "--no-settings").stdout


def test_json():
    found = document(HRDMA_HEARTBEAT="7", HRDMA_TOKEN="deeply-hidden")
    assert found["problems"] == [] and found["job"] is None and found["cores"] >= 1
    rows = {row["name"]: row for row in found["settings"]}
    assert list(rows) == [setting.name for setting in SETTINGS]
    assert (rows["HRDMA_HEARTBEAT"]["value"], rows["HRDMA_HEARTBEAT"]["origin"]) == ("7", "environment")
    assert rows["HRDMA_SIMD"]["origin"] == "default" and all(row["help"] for row in rows.values())
    assert "deeply-hidden" not in json.dumps(found)
    providers = {entry["name"]: entry for entry in found["providers"]}
    assert providers["shm"]["state"] == providers["tcp"]["state"] == "used"
    assert "map" in providers["shm"]["caps"] and providers["shm"]["large"]


def test_order_and_what_is_left_out():
    found = document(HRDMA_TRANSPORT="tcp")
    found = [(entry["name"], entry["state"]) for entry in found["providers"] if entry["name"] != "verbs"]
    assert found == [
        ("tcp", "used"),
        ("shm", "left out"),
        ("loop", "used"),
    ]


def test_interfaces_are_shown_as_they_are_used():
    (tcp,) = [entry for entry in document(HRDMA_IFNAME="lo")["providers"] if entry["name"] == "tcp"]
    assert "lo 127.0.0.1:" in tcp["text"] and "eth" not in tcp["text"]
    assert "[::1]" not in tcp["text"] or "[::1]:" in hrdma("info", HRDMA_IFNAME="lo").stdout  # no markup of rich


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"HRDMA_TRASNPORT": "tcp"}, "HRDMA_TRASNPORT is not a setting of hrdma; did you mean HRDMA_TRANSPORT?"),
        ({"HRDMA_TIMEOUT": "-3"}, "HRDMA_TIMEOUT=-3: expected a positive number of seconds"),
        (
            {"HRDMA_TRANSPORT": "pigeon,tcp"},
            "HRDMA_TRANSPORT names pigeon, which is not available: no provider is called",
        ),
        ({"HRDMA_REQUIRE": "shm", "HRDMA_TRANSPORT": "tcp"}, "HRDMA_REQUIRE names shm, which is not used"),
        ({"HRDMA_REQUIRE": "pigeon"}, "HRDMA_REQUIRE names pigeon"),
        ({"HRDMA_SHM": "colour=red"}, "HRDMA_SHM=colour=red: "),
        ({"HRDMA_TCP": "colour=red"}, "HRDMA_TCP=colour=red: "),
        ({"RANK": "3", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "RANK=3 is out of range"),
    ],
)
def test_what_is_wrong_is_named_and_the_rest_is_shown(environ, problem):
    done = hrdma("info", **environ)
    assert done.returncode == 2 and f"hrdma info: {problem}" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "HRDMA_LOG_LEVEL" in done.stdout and "loop" in done.stdout
    done = hrdma("info", "--json", **environ)
    assert done.returncode == 2 and any(problem in text for text in json.loads(done.stdout)["problems"])


@pytest.mark.parametrize("name", ["HRDMA_TCP", "HRDMA_SHM"])
def test_examples_of_options_are_good_ones(name):
    (help_text,) = [setting.help for setting in SETTINGS if setting.name == name]
    example = help_text.partition("such as ")[2]
    assert example and hrdma("info", **{name: example}).returncode == 0, example


def test_two_problems_are_two_lines():
    done = hrdma("info", HRDMA_TIMEOUT="x", HRDMA_PORT="y")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 2


def test_job():
    found = document(RANK="1", WORLD_SIZE="4", MASTER_ADDR="10.0.0.1", MASTER_PORT="1234")
    assert found["job"] == {"launcher": "hrdma run or torchrun", "rank": 1, "size": 4, "address": "10.0.0.1:1234"}
    assert "rank 1 of 4" in hrdma("info", RANK="1", WORLD_SIZE="4", MASTER_ADDR="10.0.0.1").stdout


# What it says about large messages


def test_ways_of_large_messages():
    caps = ["map"]
    assert "read by process_vm_readv" in _large("shm", caps, "", (True, ""))
    refused = _large("shm", caps, "", (False, "operation not permitted; kernel.yama.ptrace_scope=1"))
    assert "staged" in refused and "ptrace_scope=1" in refused
    assert "staged" in _large("shm", caps, "ring=65536,cma=0", (True, "")) and _large("tcp", [], "", (True, "")) == ""
    (shm,) = [entry for entry in document(HRDMA_SHM="cma=0")["providers"] if entry["name"] == "shm"]
    assert "staged" in shm["large"]


def reading(comm):
    x = np.ones(1 << 20)
    comm.allreduce(x)
    return comm.info()["domains"]["shm"]


def test_the_probe_says_what_the_transport_finds():
    permitted, why = siblings_may_read()
    assert bool(why) is not permitted
    for text in harness.ranks(reading, 2, env={"HRDMA_TRANSPORT": "shm"}):
        assert f"process_vm_readv permitted to {int(permitted)} of 1 peers" in text

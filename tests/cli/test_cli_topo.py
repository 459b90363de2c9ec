"""`hrdma topo`: what it prints, what it writes, exit codes; and that it works without the compiled core."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import hrdma, python

from hrdma.topo.fabric_file import load
from hrdma.topo.fabrics import parse
from hrdma.topo.msccl import loads


def topo(*arguments: str, code: int = 0) -> str:
    done = hrdma("topo", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def test_compare_prints_steps_bytes_and_time() -> None:
    """With links alone: 0.889 and 1.778 of the vector through one NIC, and what does not fit."""
    rows = {}
    text = topo("compare", "--fabric", "bcube:3,2", "--latency", "0s", "--size", "575MB", "--message", "0s")
    for line in text.splitlines():
        if (words := line.split()) and words[0] in ("bml", "ring"):
            rows[words[0]] = words[-1]
    assert rows == {"bml": "0.889", "ring": "1.778"}
    assert "torus: it needs a torus or ring; bcube:3,2 is none" in text
    data = json.loads(topo("compare", "--fabric", "torus:4x4", "--size", "1GB", "--json", "--algorithm", "torus", "--algorithm",
                           "server-4"))  # fmt: skip
    assert {entry["algorithm"] for entry in data["candidates"]} == {"torus", "server-4"}
    assert "closed form" in topo("compare", "--fabric", "bcube:4,2", "--closed-forms")


def test_plan_check_and_the_ways_out(tmp_path: Path) -> None:
    plan, xml = str(tmp_path / "plan.json"), str(tmp_path / "plan.xml")
    assert "predicted" in topo("plan", "--fabric", "torus:3x3", "-o", plan)
    topo("plan", "--fabric", "torus:3x3", "-o", xml)
    loads(Path(xml).read_text()).check()
    assert json.loads(topo("plan", "--fabric", "torus:3x3", "--json"))["ranks"] == 9
    for path in (plan, xml):
        assert f"{path}: proved: torus" in topo("check", path)
    assert "for another fabric" in topo("check", plan, "--fabric", "star:9", code=1)
    data = json.loads(Path(plan).read_text())
    data["schedule"]["rounds"][2].pop()
    Path(plan).write_text(json.dumps(data))
    assert f"hrdma topo check: {plan}: rank" in topo("check", plan, code=1)
    Path(plan).write_text("neither")
    assert "neither JSON nor XML" in topo("check", plan, code=1)


def test_a_plan_is_checked_against_its_fabric_and_the_one_given(tmp_path: Path) -> None:
    plan, schedule, xml = (str(tmp_path / name) for name in ("plan.json", "schedule.json", "plan.xml"))
    topo("plan", "--fabric", "bcube:2,2", "--rate", "200mbit", "-o", plan)
    topo("plan", "--fabric", "bcube:2,2", "-o", xml)
    topo("check", plan, "--fabric", "bcube:2,2", "--rate", "200mbit")
    assert "for another fabric: bcube:2,2 (" in topo("check", plan, "--fabric", "bcube:2,2", code=1)
    assert "the plan is for 4 ranks on bcube:2,2; star:5 has 5" in topo("check", plan, "--fabric", "star:5", code=1)
    data = json.loads(Path(plan).read_text())
    Path(schedule).write_text(json.dumps(data["schedule"]))
    for path in (schedule, xml):
        topo("check", path, "--fabric", "star:4")
        assert f"{path}: it is for 4 ranks; star:5 has 5" in topo("check", path, "--fabric", "star:5", code=1)
    Path(plan).write_text(json.dumps(data | {"fabric": 'fabric = "star:5"'}))
    assert "the plan's schedule is for 4 ranks; star:5 has 5" in topo("check", plan, code=1)
    Path(plan).write_text(json.dumps(data | {"collective": "reduce"}))
    assert "the plan is for reduce, its schedule for allreduce" in topo("check", plan, code=1)
    assert "--rate and --latency are those of --fabric" in topo("check", plan, "--rate", "1gbit", code=2)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--size", "200mbit", "size '200mbit' has the unknown unit 'mbit'; use one of B, kB"),
        ("--rate", "10gbps", "for bits per second write 10gbit"),
        ("--rate", "32MiB", "rate '32MiB' has the unknown unit 'MiB'"),
        ("--latency", "10mbit", "time '10mbit' has the unknown unit 'mbit'"),
        ("--message", "7", "time '7' is not a number with a unit"),
    ],
)
def test_numbers_of_another_kind_are_refused(option: str, value: str, message: str) -> None:
    shown = " ".join(topo("compare", "--fabric", "star:2", option, value, code=2).split())
    assert message in shown.replace("│ ", "")


def test_simulate_with_trouble() -> None:
    good = topo("simulate", "--fabric", "bcube:3,2", "--algorithm", "bml")
    assert good.startswith("bml: allreduce of 32 MiB on bcube:3,2: ") and "busiest link" in good
    assert topo("simulate", "--fabric", "bcube:3,2", "--algorithm", "bml", "--slow", "3=2", "--fail", "1") != good
    assert "is not HOST=FACTOR" in topo("simulate", "--fabric", "star:4", "--slow", "x", code=2)
    assert "has no link 99" in topo("simulate", "--fabric", "star:4", "--fail", "99", code=2)
    assert "bml cannot plan this: it needs a bcube" in topo(
        "simulate", "--fabric", "star:4", "--algorithm", "bml", code=2
    )


@pytest.mark.slow
def test_long_simulations_say_how_far_they_are() -> None:
    shown = hrdma("topo", "simulate", "--fabric", "bcube:32,2", "--algorithm", "bml", "--accuracy", "0.3", timeout=110)
    said = [int(percent) for percent in re.findall("bml: ([0-9]+) % of 253952 transfers\n", shown.stderr)]
    assert shown.returncode == 0 and len(said) > 2 and said == sorted(set(said)) and said[-1] == 100


def test_show_draw_and_holds(tmp_path: Path) -> None:
    path = str(tmp_path / "fabric.toml")
    assert "host 3       0: switch 1, 1: switch 3" in topo("show", "--fabric", "bcube:2,2")
    topo("show", "--fabric", "bcube:2,2", "--rate", "200mbit", "-o", path)
    assert load(path) == parse("bcube:2,2", rate=200e6)
    assert "0.2 Gbit/s" in topo("show", "--fabric", path)
    assert "1 Gbit/s" in topo("show", "--fabric", path, "--rate", "1gbit")
    for extra in ((), ("--bare",), ("--algorithm", "bml", "--round", "1")):
        topo("draw", "--fabric", path, "-o", str(tmp_path / "x.svg"), *extra)
        assert (tmp_path / "x.svg").read_text().startswith("<svg")
    assert "x.png does not end in .svg" in topo("draw", "--fabric", path, "-o", str(tmp_path / "x.png"), code=2)
    assert not (tmp_path / "x.png").exists()
    assert "round 3" in topo("holds", "--fabric", "bcube:2,2", "--algorithm", "bml")


@pytest.mark.parametrize(
    ("fabric", "message"),
    [("bcube:1,2", "level 0 of a BCube is 1"), ("torus:1x4", "dimension 0 of a torus is 1"), ("magic:3", "unknown fabric 'magic'"),
     ("nothing.toml", "nothing.toml")],
)  # fmt: skip
def test_bad_fabrics(fabric: str, message: str) -> None:
    found = hrdma("topo", "show", "--fabric", fabric)
    assert found.returncode in (1, 2) and message in found.stderr and "Traceback" not in found.stderr


def test_it_works_without_the_compiled_core() -> None:
    code = "import sys; sys.modules['hrdma._core'] = None; from hrdma.cli import main; sys.argv[1:] = %r; main()"
    done = python("-c", code % ["topo", "compare", "--fabric", "bcube:2,2"])
    assert done.returncode == 0 and "bml" in done.stdout, done.stderr

"""The benchmarks of programs on Ray: what they say that they move, what they ask for, tables and timelines. A run needs Ray, and root."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

import pytest
from bench_objects_apps import PROGRAMS, WAYS, measure, table
from bench_objects_failure import summary, text_of
from objects_failure_picture import draw


class Asked:
    """A group of programs that answers: hrdma takes half the time, and both learn."""

    def __init__(self) -> None:
        self.asked: list[dict] = []

    def ask(self, **what):
        self.asked.append(what)
        each = 0.05 if what["way"] == "hrdma" else 0.1
        return {"done": [each * (step + 1) for step in range(what["steps"])], "score": 0.25}


@pytest.mark.skipif(find_spec("sklearn") is None, reason="scikit-learn is not installed: pip install hrdma[demo]")
def test_sizes_are_those_that_are_moved():
    from hrdma.examples import async_sgd, cart_pole

    assert async_sgd.Training(PROGRAMS["sgd"].size).network.theta.nbytes == PROGRAMS["sgd"].nbytes
    assert cart_pole.Learning(PROGRAMS["rl"].size).policy.theta.nbytes == PROGRAMS["rl"].nbytes
    assert async_sgd.digits()[0][0].nbytes * PROGRAMS["serving"].size == PROGRAMS["serving"].nbytes


def test_ways_take_turns():
    group = Asked()
    found = measure(group, ["serving", "rl"], 2)
    programs = ["serving", "serving", "rl", "rl"]
    assert [what["program"] for what in group.asked] == programs * 3
    ways = ["hrdma", "ray"] * 2 + ["ray", "hrdma"] * 2 + ["hrdma", "ray"] * 2
    assert [what["way"] for what in group.asked] == ways, "who comes first is not always the same"
    assert all(len(found[name][way]) == 2 for name in found for way in WAYS), "the first turn of each is not counted"


def test_a_table_has_the_ratio_of_medians():
    found = measure(Asked(), ["serving"], 3)
    text = table(found, argparse.Namespace(hosts=8, rate="100mbit", rounds=3))
    assert "10.00 (10.00 to 10.00) | 20.00 (20.00 to 20.00) | **2.0x** | 3.3x |" in text
    assert "test accuracy 0.25, 0.25" in text


DONE = [0.2, 0.4, 0.6, 0.8, 1.5, 2.2, 2.4, 2.6, 2.8]  # one was killed after a second, and came back after two
SECONDS = (1.0, 2.0, 3.0)


def test_a_timeline_has_the_pause():
    found = summary(DONE, SECONDS)
    assert found["per_second"] == [4, 1, 4]
    assert (found["before"], found["during"], found["after"]) == (4, 1, 4)
    assert found["longest_pause"] == pytest.approx(0.7) and found["longest_pause_ended"] in (1.5, 2.2)
    lines = text_of(found, SECONDS).splitlines()
    assert lines[1].endswith("<- killed") and lines[2].endswith("<- back") and lines[0].endswith("#" * 40)


def test_a_picture_has_a_line_for_each():
    from xml.dom.minidom import parseString

    drawn = parseString(draw({"a": [4, 1, 4], "b": [2, 0, 2]}, 1, 2, "steps"))
    lines = [line.getAttribute("points").split() for line in drawn.getElementsByTagName("polyline")]
    assert [len(points) for points in lines] == [3, 3]
    heights = [float(points[1].split(",")[1]) for points in lines]
    assert heights[0] < heights[1], "less is lower"

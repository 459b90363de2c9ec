"""Pictures and tables of who holds what: they are well formed, and show what the schedule does."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from hrdma.errors import ScheduleError
from hrdma.topo.algorithms.on_fabric import lookup
from hrdma.topo.draw import draw, positions
from hrdma.topo.fabrics import parse
from hrdma.topo.holdings import holdings
from hrdma.topo.schedule import Schedule, Transfer

SVG = "{http://www.w3.org/2000/svg}"
FABRICS = (
    "ring:5",
    "star:4",
    "mesh:3x3",
    "torus:4x4",
    "torus:3x3x3",
    "bcube:3,2",
    "fat_tree:4",
    "leaf_spine:3,2,2",
    "cluster:2,2,2",
)


@pytest.mark.parametrize("text", FABRICS)
def test_nodes_have_places_of_their_own(text: str) -> None:
    fabric = parse(text)
    placed = positions(fabric)
    assert len({(round(x, 3), round(y, 3)) for x, y in placed}) == fabric.nodes
    assert all(0 <= x <= 1 and 0 <= y <= 1 for x, y in placed)
    picture = ET.fromstring(draw(fabric))
    assert len(list(picture.iter(f"{SVG}circle"))) == fabric.hosts
    assert len(list(picture.iter(f"{SVG}path"))) == 2 * len(fabric.links)


def test_the_picture_in_the_readme_is_what_is_drawn() -> None:
    fabric = parse("bcube:3,2")
    drawn = draw(fabric, lookup("bml").build("allreduce", fabric, 1, 0, None), 18 << 20)
    assert (Path(__file__).parents[2] / "topo" / "bml.svg").read_text() == drawn
    panels = list(ET.fromstring(drawn).iter(f"{SVG}g"))
    assert len(panels) == 5 and all(len(set(widths(panel))) == 1 for panel in panels)  # all links, in all rounds alike


def widths(panel: ET.Element) -> list[float]:
    return [float(path.attrib["stroke-width"]) for path in panel.iter(f"{SVG}path")]


def test_loads_show() -> None:
    """One message: two links, out of one host and into the other, are wide; a second round has others."""
    rounds = [[Transfer(0, 1, 0)], [Transfer(0, 2, 0), Transfer(1, 3, 0)]]
    picture = ET.fromstring(draw(parse("star:4"), Schedule.of("broadcast", 4, rounds, name="a < b"), 1 << 20))
    whole, first, second = picture.iter(f"{SVG}g")
    assert sum(width > 3 for width in widths(first)) == 2
    assert sum(width > 3 for width in widths(second)) == 4
    assert sum(width > 3 for width in widths(whole)) == 1  # the link that carries both of rank 0
    assert next(whole.iter(f"{SVG}text")).text == "a < b, broadcast of 1 MiB, 2 rounds: up to 2 MiB a link"
    only = ET.fromstring(draw(parse("star:4"), Schedule.of("broadcast", 4, rounds), rounds=[1]))
    assert len(list(only.iter(f"{SVG}g"))) == 2


def test_long_schedules_show_their_beginning() -> None:
    fabric = parse("star:16")
    picture = ET.fromstring(draw(fabric, lookup("ring").build("allreduce", fabric, 1, 0, None)))
    assert len(list(picture.iter(f"{SVG}g"))) == 24


def test_what_cannot_be_drawn() -> None:
    schedule = lookup("ring").build("allreduce", parse("star:4"), 1, 0, None)
    with pytest.raises(ValueError, match="ring has no round 6; it has 6"):
        draw(parse("star:4"), schedule, rounds=[6])
    with pytest.raises(ValueError, match="star:500 has 501 nodes; pictures show up to 400"):
        draw(parse("star:500"))
    with pytest.raises(ScheduleError, match="for 4 ranks; star:5 has 5"):
        draw(parse("star:5"), schedule)


def test_who_holds_what() -> None:
    text = holdings(lookup("ring").build("allreduce", parse("ring:3"), 1, 0, None))
    assert text.splitlines()[7:11] == [
        "round 0  0    1    2",
        "rank 0   0    0,2  0",
        "rank 1   1    1    0,1",
        "rank 2   1,2  2    2",
    ]
    assert text.splitlines()[-3:] == ["rank 0   *  *  *", "rank 1   *  *  *", "rank 2   *  *  *"]
    assert "." in holdings(lookup("direct").build("gather", parse("star:3"), 1, 0, None))
    assert "0-2" in holdings(lookup("ring").build("allreduce", parse("ring:5"), 1, 0, None))


def test_who_holds_what_is_for_small_cases() -> None:
    schedule = lookup("ring").build("allreduce", parse("star:40"), 1, 0, None)
    with pytest.raises(ValueError, match="40 ranks times 40 chunks are too many"):
        holdings(schedule)
    with pytest.raises(ValueError, match="rank 1's view"):
        holdings(schedule.for_rank(1))

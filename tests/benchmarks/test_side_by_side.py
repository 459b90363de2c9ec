"""The pure parts of the side-by-side benchmark: what is asked for, ratios, tables, the command line."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import side_by_side
from beside import report
from beside.cells import CASES, FULL, QUICK, Cell, Selection, cells, parse_list, parse_sizes
from beside.job import Failure, Found
from beside.report import Figure, Table, document, markdown, scaled, short
from beside.roster import EVERYWHERE, QUICK_ROWS, ROWS, Row

# -- what is asked for --


def test_a_selection_is_its_cells_those_of_one_job_together():
    found = list(cells(Selection(("shm", "tcp"), (2, 4), ("pingpong", "allreduce"), (4096,))))
    assert found == [
        Cell("shm", 2, "pingpong", 4096),
        Cell("shm", 2, "allreduce", 4096),
        Cell("shm", 4, "allreduce", 4096),
        Cell("tcp", 2, "pingpong", 4096),
        Cell("tcp", 2, "allreduce", 4096),
        Cell("tcp", 4, "allreduce", 4096),
    ]


def test_sizes_are_those_of_the_case_where_none_are_given():
    found = Counter(cell.case for cell in cells(Selection(("shm",), (2,), tuple(CASES))))
    assert found == {name: len(case.sizes) for name, case in CASES.items()}


def test_ranks_and_cases_are_those_of_the_transport_where_none_are_given():
    found = {(cell.world, cell.case) for cell in cells(Selection(("tcp-cubic",)))}
    assert found == {(2, "pingpong"), (2, "bandwidth"), (2, "allreduce")}
    assert {cell.world for cell in cells(Selection(("shm",)))} == {2, 4, 8}
    assert {cell.world for cell in cells(Selection(("tcp-cubic",), (3,)))} == {3}


@pytest.mark.parametrize("selection", [FULL, QUICK])
def test_what_make_asks_for_is_valid(selection):
    selection.validate()


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        (Selection(("ib",), (2,), ("allreduce",)), "no transport 'ib'; there are: shm, tcp"),
        (Selection(("shm",), (2,), ("barrier",)), "no case 'barrier'"),
        (Selection(("shm",), (1,), ("allreduce",)), "1 ranks"),
        (Selection(("shm",), (4,), ("pingpong",)), "nothing to measure"),
        (Selection(("shm",), (4,), ("alltoall",), (8,)), "an element of 4 bytes for each rank"),
    ],
)
def test_what_is_not_there_is_refused(selection, words):
    with pytest.raises(ValueError, match=words):
        selection.validate()


def test_lists_and_sizes_are_read():
    assert parse_list(" a, b ,,") == ("a", "b")
    assert parse_sizes("8,4K,1.5M") == (8, 4096, 3 << 19)
    for text in ("", ","):
        with pytest.raises(ValueError):
            parse_list(text)
    with pytest.raises(ValueError, match="'4X' is not a size"):
        parse_sizes("4K,4X")


def test_every_row_can_have_a_figure_and_quick_rows_are_rows():
    every = list(cells(FULL))
    assert all(any(row.has(cell) for cell in every) for row in ROWS.values())
    assert set(QUICK_ROWS) <= set(ROWS)
    assert not ROWS["pyzmq"].has(Cell("shm", 2, "allreduce", 4096))
    for cell in every:  # a ratio to the limit has one meaning
        assert sum(row.bound and row.has(cell) for row in ROWS.values()) <= 1


# -- what was found --

SMALL, LARGE = Cell("shm", 2, "allreduce", 4096), Cell("shm", 2, "allreduce", 64 << 20)
STREAM = Cell("shm", 2, "bandwidth", 1 << 20)


def made() -> Table:
    """Open MPI is the fastest right one; MPICH is faster, and wrong."""
    table = Table()
    for milliseconds in ([2.0, 2.2, 9.9], [1.9, 2.0, 2.1], [2.4, 2.4, 2.4]):
        table.add("hrdma", LARGE, [value / 1e3 for value in milliseconds], 0)
    table.add("openmpi", LARGE, [8.8e-3], 0)
    table.add("impi", LARGE, [9e-3], 0)
    table.add("mpich", LARGE, [1e-3], 3)
    table.add("limit", LARGE, [1.1e-3], 0)
    table.failures["gloo", LARGE] = "no figure within 60 s"
    table.absent["ucx"] = "ERROR: no matching distribution"
    table.lines[LARGE] = [52e-9, 243e-9, 50e-9]
    table.versions |= {"hrdma": "hrdma 0.1.0", "openmpi": "Open MPI v5"}
    return table


def test_the_median_of_the_rounds_medians_counts():
    figure = made().figures["hrdma", LARGE]
    assert figure.each == [2.2e-3, 2.0e-3, 2.4e-3]
    assert figure.seconds == 2.2e-3


def test_ratios_are_to_the_fastest_peer_that_was_right_and_to_the_limit():
    table = made()
    assert table.best(LARGE) == "openmpi"
    assert table.gain("hrdma", LARGE) == pytest.approx(4.0)
    assert table.distance("hrdma", LARGE) == pytest.approx(2.0)
    assert table.gain("openmpi", LARGE) == 1.0
    assert table.wrong == 3


def test_what_ratios_are_made_of_is_unsettled_where_rounds_differ():
    table = made()  # 2.0 to 2.4 ms: a fifth
    assert table.unsettled(LARGE) == [] and table.unsettled(SMALL) == []
    table.add("impi", LARGE, [12e-3], 0)
    table.add("pyzmq", LARGE, [40e-3], 0)
    table.add("gloo", LARGE, [1e-3], 0)  # has failed since
    assert table.unsettled(LARGE) == ["hrdma", "openmpi", "impi", "limit"]  # no third peer, none that is wrong
    table.add("pyzmq", LARGE, [7e-3], 0)  # in one round before the second
    assert table.unsettled(LARGE) == ["hrdma", "openmpi", "impi", "limit", "pyzmq"]
    for _ in range(2):
        table.add("pyzmq", LARGE, [7e-3], 0)
    assert table.unsettled(LARGE) == ["hrdma", "openmpi", "limit", "pyzmq"]


def test_there_is_no_ratio_without_both_figures():
    table = made()
    assert table.best(SMALL) is None
    assert table.gain("hrdma", SMALL) is None and table.distance("hrdma", SMALL) is None
    table.add("openmpi", SMALL, [1e-6], 0)
    assert table.gain("hrdma", SMALL) is None


def test_tables_show_median_range_ratios_and_what_went_wrong():
    lines = markdown(made(), "3 rounds.").splitlines()
    assert "## shm, 2 ranks: allreduce, ms" in lines
    assert "| | 64 MiB |" in lines
    assert "| hrdma, registered | 2.20 (2.00-2.40) |" in lines
    assert "| Open MPI | **8.80** |" in lines
    assert "| Intel MPI | 9.00 |" in lines
    assert "| MPICH | 1.00 **3 wrong** |" in lines
    assert "| Gloo (always TCP) | failed |" in lines
    assert "| *hrdma, registered: faster than the best peer* | 4.00x |" in lines
    assert "| *hrdma, registered: the limit's time* | 2.00x |" in lines
    assert "| *8 bytes from core to core, ns* | 52.0 (50.0-243) |" in lines
    assert "- UCX (ucxx): left out: ERROR: no matching distribution" in lines
    assert "- Gloo (always TCP) failed at shm, 2 ranks, allreduce 64 MiB: no figure within 60 s" in lines


def test_the_document_can_be_read_again():
    found = json.loads(json.dumps(document(made(), "")))
    mine = next(figure for figure in found["figures"] if figure["row"] == "hrdma")
    assert mine["nbytes"] == 64 << 20 and mine["unit"] == "ms" and mine["shown"] == pytest.approx(2.2)
    assert mine["faster_than_best"] == pytest.approx(4.0) and mine["over_limit"] == pytest.approx(2.0)
    assert found["wrong"] == 3 and found["failures"][0]["why"] == "no figure within 60 s"
    assert found["lines"] == [{**vars(LARGE), "rounds": [52e-9, 243e-9, 50e-9]}]


def test_a_bandwidth_is_that_of_the_median_time():
    figure = Figure([[(1 << 20) / 4e9], [(1 << 20) / 8e9]])
    assert report.shown(figure, STREAM) == "5.33 (4.00-8.00)"


def test_figures_are_in_the_unit_of_their_case():
    assert scaled(1e-3, LARGE) == 1.0
    assert scaled(1e-6, Cell("shm", 2, "pingpong", 8)) == pytest.approx(1.0)
    assert scaled((1 << 20) / 5e9, STREAM) == pytest.approx(5.0)
    assert [short(value) for value in (1234.6, 12.345, 0.012345, 0.000123)] == ["1235", "12.3", "0.0123", "0.00012"]


@pytest.mark.parametrize(("idle", "busy"), [(100, 0.0), (50, 0.5), (0, 1.0)])
def test_other_work_is_noticed(monkeypatch, idle, busy):
    """Between two looks all cores together have 100 ticks; the ninth and tenth number are part of the first two."""
    texts = iter(("cpu 0 0 0 0 0 0 0 0 0 0\ncpu0 1", f"cpu {100 - idle} 0 0 {idle} 0 0 0 0 50 50\ncpu0 1"))
    monkeypatch.setattr(report.Path, "read_text", lambda path: next(texts))
    assert report.busy_cores(0.0) == pytest.approx(busy * (os.cpu_count() or 1))


# -- rows in turn --


class Pretended:
    """A row's job that answers at once, or fails."""

    def __init__(self, asked: list[str], name: str, fails: bool) -> None:
        self.asked, self.name, self.fails = asked, name, fails
        self.version = name
        self.ended = 0

    def measure(self, cell: Cell, seconds: float, repetitions: int, limit: float) -> Found:
        self.asked.append(self.name)
        if self.fails:
            raise Failure("it fell over")
        return Found([seconds], 0)

    def end(self) -> None:
        self.ended += 1


class Silent(side_by_side.Progress):
    def say(self, text: str) -> None:
        pass


def bench(
    monkeypatch, fails: str = "", sizes: str = "4K", rounds: int = 3
) -> tuple[side_by_side.Bench, list[str], list[Pretended]]:
    asked: list[str] = []
    jobs: list[Pretended] = []

    def row(name: str) -> Row:
        def open_(transport, ranks, say):
            jobs.append(Pretended(asked, name, name == fails))
            return jobs[-1]

        return Row(name, name, "peer", open_)

    monkeypatch.setattr(side_by_side, "compiled", lambda name: Path(name))
    monkeypatch.setattr(side_by_side, "Program", lambda path: Pretended([], path.name, False))
    options = side_by_side.arguments(
        ["--transport", "shm", "--world", "2", "--cases", "reduce", "--sizes", sizes, "--rounds", str(rounds)]
    )
    options.rows = [row(name) for name in ("hrdma", "openmpi")]
    return side_by_side.Bench(options, Silent()), asked, jobs


def test_rows_take_turns_in_every_round(monkeypatch):
    run, asked, jobs = bench(monkeypatch)
    run.run()
    assert asked == ["hrdma", "openmpi", "openmpi", "hrdma", "hrdma", "openmpi"]  # none is always the first
    assert len(jobs) == 2 and all(job.ended for job in jobs)
    assert all(len(figure.rounds) == 3 for figure in run.table.figures.values())


def test_how_far_apart_the_cores_are_is_looked_at_in_each_round(monkeypatch):
    monkeypatch.setattr(side_by_side.os, "sched_getaffinity", lambda pid: {0, 1})
    run, _, _ = bench(monkeypatch)
    run.run()
    assert list(run.table.lines.values()) == [[side_by_side.LINE_SECONDS] * 3]


def test_cores_that_cannot_be_looked_at_are_so_once(monkeypatch):
    monkeypatch.setattr(side_by_side.os, "sched_getaffinity", lambda pid: {0, 1})
    run, asked, _ = bench(monkeypatch)
    looks = []
    monkeypatch.setattr(side_by_side, "Program", lambda path: Pretended(looks, path.name, True))
    run.run()
    assert looks == ["limit_shm"] and not run.table.lines and len(asked) == 6


def test_of_one_core_there_is_nothing_to_look_at(monkeypatch):
    monkeypatch.setattr(side_by_side.os, "sched_getaffinity", lambda pid: {0})
    run, asked, _ = bench(monkeypatch)
    run.run()
    assert not run.table.lines and len(asked) == 6


def test_a_row_that_fails_is_ended_named_and_not_asked_again(monkeypatch):
    run, asked, jobs = bench(monkeypatch, fails="openmpi")
    run.run()
    assert asked == ["hrdma", "openmpi", "hrdma", "hrdma"]  # the second round would have begun with it
    assert all(job.ended for job in jobs)
    assert list(run.table.failures.values()) == ["it fell over"]


def test_cells_that_have_not_settled_get_more_rounds(monkeypatch):
    run, asked, _ = bench(monkeypatch, sizes="4K,64K", rounds=1)
    looked = []
    monkeypatch.setattr(run.table, "unsettled", lambda cell: looked.append(cell) or ["openmpi"] * (cell.nbytes > 4096))
    run.run()
    assert asked == ["hrdma", "openmpi", "openmpi", "hrdma", *["openmpi"] * 4]
    assert [cell.nbytes for cell in looked] == [4096, 65536] * 4
    assert side_by_side.arguments(["--quick"]).more == 0 and side_by_side.arguments([]).more == 4


def test_each_cell_of_a_round_begins_with_another_row(monkeypatch):
    run, asked, _ = bench(monkeypatch, sizes="4K,64K,1M", rounds=1)
    run.run()
    assert asked == ["hrdma", "openmpi", "openmpi", "hrdma", "hrdma", "openmpi"]


def test_a_place_that_cannot_be_made_is_left_out(monkeypatch):
    run, asked, jobs = bench(monkeypatch)
    run._options.rows = [replace(row, transports=EVERYWHERE) for row in run._options.rows]

    def refused(called: str = "") -> None:
        raise PermissionError("not root")

    monkeypatch.setattr(side_by_side.across, "joined", refused)
    run._options.selection = Selection(("namespaces", "shm"), (2,), ("reduce",), (4096,))
    run.run()
    assert len(asked) == 6 and all(job.ended for job in jobs)
    assert {cell.transport for _, cell in run.table.figures} == {"shm"}
    assert {(name, cell.transport, why) for (name, cell), why in run.table.failures.items()} == {
        (name, "namespaces", "not root") for name in ("hrdma", "openmpi")
    }


# -- the command line --


def test_selection_by_words():
    options = side_by_side.arguments(
        ["--transport", "tcp", "--world", "2,4", "--cases", "allreduce", "--sizes", "4K", "--peers", "hrdma,mpich"]
    )
    assert options.selection == Selection(("tcp",), (2, 4), ("allreduce",), (4096,))
    assert [row.name for row in options.rows] == ["hrdma", "mpich"]
    quick = side_by_side.arguments(["--quick"])
    assert quick.selection == QUICK and tuple(row.name for row in quick.rows) == QUICK_ROWS
    assert side_by_side.arguments([]).selection == FULL


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--peers nobody", "no 'nobody' here; there are: hrdma"),
        ("--cases nothing", "no case 'nothing'"),
        ("--world two", "'two'"),
        ("--sizes 4X", "'4X' is not a size"),
        ("--rounds 0", "must be positive"),
        ("--seconds 0", "must be positive"),
    ],
)
def test_wrong_words_are_refused(words, said, capsys):
    with pytest.raises(SystemExit) as exit_:
        side_by_side.arguments(words.split())
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err

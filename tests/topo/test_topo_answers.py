"""Answers: which messages may end without being sent, that results stay right, and that the proof misses no damage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from topo_reference import mixed, run

from hrdma import planning
from hrdma.errors import ScheduleError
from hrdma.topo import program as isa
from hrdma.topo.algorithms import ALGORITHMS, build
from hrdma.topo.answers import answer
from hrdma.topo.lower import lower
from hrdma.topo.program import ProgramSpec
from hrdma.topo.verify import check_programs


def programs(name="direct", size=3, count=600, parts=1, collective="allreduce", in_place=True) -> list[ProgramSpec]:
    schedule = build(name, collective, size, parts=parts)
    found = [lower(schedule, rank, count, 8, in_place=in_place) for rank in range(size)]
    for spec in found:
        answer(spec)
    return found


def answers(spec: ProgramSpec) -> np.ndarray:
    return np.flatnonzero(spec.instrs["flags"] & isa.RETURNS)


def edited(spec: ProgramSpec, index: int, **fields) -> ProgramSpec:
    instrs = spec.instrs.copy()
    for field, value in fields.items():
        instrs[field][index] = value
    return replace(spec, instrs=instrs)


@pytest.mark.parametrize("name", [n for n, a in ALGORITHMS.items() if "allreduce" in a.collectives])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("parts", [1, 3])
def test_results_are_right_whatever_is_put_back(name: str, size: int, parts: int) -> None:
    if parts > 1 and "allreduce" not in ALGORITHMS[name].parts:
        parts = 1
    found = programs(name, size, parts=parts)
    for seed in range(6):
        run(found, "allreduce", [600] * size, 0, True, prove=not seed, mapped=True, credits=seed % 3, seed=seed)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_direct_allreduce_in_place_answers_nothing_by_messages(size: int, parts: int) -> None:
    for spec in programs(size=size, parts=parts):
        ops = spec.instrs["op"][answers(spec)]
        assert (ops == isa.SEND).sum() == (ops == isa.RECV).sum() == (size - 1) * parts
        assert (spec.instrs["op"] == isa.SEND).sum() == 2 * (size - 1) * parts


def test_in_rank_order_it_is_still_one_association() -> None:
    found = programs(size=4)
    for seed in range(8):
        run(found, "allreduce", [600] * 4, 0, True, op=mixed, mapped=True, seed=seed)


@pytest.mark.parametrize("collective", ["reduce", "reduce_scatter", "broadcast", "allgather", "alltoall"])
def test_other_collectives_have_no_answers(collective: str) -> None:
    names = [n for n, a in ALGORITHMS.items() if collective in a.collectives and n != "scatter_gather"]
    assert names
    for name in names:
        for spec in programs(name, collective=collective, in_place=collective != "broadcast"):
            assert not len(answers(spec))


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_what_is_reduced_for_the_root_is_put_there(size: int, parts: int) -> None:
    """The root lends as many chunks as it gets back; the others have the results in scratch, or not even there."""
    found = programs("scatter_gather", size, parts=parts, collective="reduce")
    for spec in found:
        marked = answers(spec)
        ops = set(spec.instrs["op"][marked].tolist())
        assert len(marked) == parts * (size - 1 if spec.rank == 0 else 1)
        assert ops == {isa.RECV if spec.rank == 0 else isa.SEND}
        assert spec.rank == 0 or (spec.instrs["src_buf"][marked] == isa.BUF_TMP).all()
    for seed in range(6):
        run(found, "reduce", [600] * size, 0, True, prove=not seed, mapped=True, credits=seed % 3, seed=seed)
        run(found, "reduce", [600] * size, 0, True, op=mixed, mapped=True, seed=seed)


@pytest.mark.parametrize("root", [1, 2])
def test_a_root_that_works_out_of_place_is_sent_its_results(root: int) -> None:
    schedule = build("scatter_gather", "reduce", 3, parts=2, root=root)
    found = [lower(schedule, rank, 600, 8, in_place=False) for rank in range(3)]
    for spec in found:
        answer(spec)
    assert not len(answers(found[root])) and all(len(answers(spec)) for spec in found if spec.rank != root)
    for seed in range(6):
        run(found, "reduce", [600] * 3, root, False, prove=not seed, mapped=True, seed=seed)


def test_what_is_in_scratch_for_one_answer_is_read_by_nobody_else() -> None:
    """A copy of it that waits for the answer alone could find that it never came there."""
    found = programs("scatter_gather", 2, collective="reduce")
    check_programs(found)
    spec = found[1]
    (send,) = answers(spec).tolist()
    reads = np.zeros(1, spec.instrs.dtype)
    fields = {"op": isa.COPY, "peer": -1, "after": 1, "len": spec.instrs["len"][send], "dst_buf": isa.BUF_TMP,
              "dst_off": spec.tmp_bytes, "src_buf": isa.BUF_TMP, "src_off": spec.instrs["src_off"][send]}  # fmt: skip
    for field, value in fields.items():
        reads[field] = value
    instrs = np.concatenate([spec.instrs, reads])
    assert spec.instrs["nunlock"][send] == 0
    instrs["unlock"][send], instrs["nunlock"][send] = len(spec.unlocks), 1
    unlocks = np.append(spec.unlocks, np.uint32(len(instrs) - 1))
    longer = replace(spec, instrs=instrs, unlocks=unlocks, tmp_bytes=spec.tmp_bytes + int(spec.instrs["len"][send]))
    with pytest.raises(ScheduleError, match="an edge of its own is missing"):
        check_programs([found[0], longer])


def test_out_of_place_the_input_stays_the_callers() -> None:
    assert not any(len(answers(spec)) for spec in programs(in_place=False))


def test_the_planner_marks_where_memory_is_mapped() -> None:
    for mapped in (True, False):
        found = planning.plan(
            "allreduce", size=4, rank=0, counts=1 << 18, itemsize=4, dtype="float32", in_place=True, mapped=mapped,
            algorithm="direct",
        )  # fmt: skip
        assert len(answers(found)) == (6 if mapped else 0)


@pytest.mark.parametrize("size", [2, 4])
def test_a_wrong_answer_is_caught(size: int) -> None:
    found = programs(size=size)
    check_programs(found)
    for index in answers(found[1]).tolist():
        for other in range(len(found[1].instrs)):
            if other == found[1].instrs["ref"][index]:
                continue
            with pytest.raises(ScheduleError, match=r"no answer|in no order"):
                check_programs([found[0], edited(found[1], index, ref=other), *found[2:]])
        with pytest.raises(ScheduleError, match="no answer"):
            check_programs([found[0], edited(found[1], index, ref=len(found[1].instrs)), *found[2:]])


def test_what_is_lent_is_touched_by_nobody_until_it_is_back() -> None:
    """Neither read, as the answer may be there early, nor written, as it may be there already; in whatever order."""
    found = programs(size=2)
    (receive,) = (k for k in answers(found[1]).tolist() if found[1].instrs["op"][k] == isa.RECV)
    spec, send = found[1], int(found[1].instrs["ref"][receive])
    for reads in (True, False):
        whole = np.append(spec.instrs, spec.instrs[:1])
        there, apart = ("src", "dst") if reads else ("dst", "src")
        for name, value in {
            "op": isa.COPY, "peer": -1, "flags": 0, "ref": 0, "nref": 0, "after": 1, "len": whole["len"][receive], "unlock": len(spec.unlocks),
            "nunlock": 1, f"{there}_buf": isa.BUF_OUT, f"{there}_off": whole["dst_off"][receive], f"{apart}_buf": isa.BUF_TMP,
            f"{apart}_off": spec.tmp_bytes,
        }.items():  # fmt: skip
            whole[name][-1] = value
        # between both: it waits for the SEND, and the RECV for it
        unlocks = np.append(spec.unlocks, [receive]).astype("u4")
        begin, n = int(whole["unlock"][send]), int(whole["nunlock"][send])
        unlocks = np.append(unlocks, [*unlocks[begin : begin + n], len(spec.instrs)]).astype("u4")
        whole["unlock"][send], whole["nunlock"][send] = len(unlocks) - n - 1, n + 1
        whole["after"][receive] += 1
        more = replace(spec, instrs=whole, unlocks=unlocks, tmp_bytes=spec.tmp_bytes + int(whole["len"][receive]))
        with pytest.raises(ScheduleError, match="no answer"):
            check_programs([found[0], more])


def test_who_answers_nothing_meets_who_would() -> None:
    """A rank that puts nothing back, or lets nobody, is served by messages."""
    found = programs(size=3)
    for index in answers(found[1]).tolist():
        flags = int(found[1].instrs["flags"][index]) & ~isa.RETURNS
        found[1] = edited(found[1], index, flags=flags)
    for seed in range(6):
        run(found, "allreduce", [600] * 3, 0, True, mapped=True, seed=seed)


def test_chunks_of_two_parts_may_not_be_confused() -> None:
    """Two chunks between the same two ranks, the same in all but their places: each side is right, and both are not."""
    found = programs(size=2, parts=2)
    mine = found[1]
    sends = [k for k in answers(mine).tolist() if mine.instrs["op"][k] == isa.SEND]
    first, second = sends
    tags = mine.instrs["tag"][first], mine.instrs["tag"][second]
    crossed = edited(edited(mine, first, tag=tags[1]), second, tag=tags[0])
    with pytest.raises(ScheduleError, match="takes for the answer"):
        check_programs([found[0], crossed])


def test_what_others_touch_is_not_open() -> None:
    """Were it marked all the same, the proof would see that the peer's write and they have no order."""
    spec = programs("halving", size=4)[0]
    receives = [k for k in np.flatnonzero(spec.instrs["op"] == isa.RECV).tolist() if k not in answers(spec)]
    sends = np.flatnonzero(spec.instrs["op"] == isa.SEND).tolist()
    assert receives
    rest = programs("halving", size=4)[1:]
    for receive in receives:
        for send in sends:
            marked = edited(spec, receive, ref=send, flags=spec.instrs["flags"][receive] | isa.RETURNS)
            fits = all(spec.instrs[f][send] == spec.instrs[f][receive] for f in ("peer", "len"))
            if not fits or spec.instrs["src_off"][send] != spec.instrs["dst_off"][receive]:
                with pytest.raises(ScheduleError):
                    check_programs([marked, *rest])

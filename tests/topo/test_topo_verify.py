"""The proof of programs: every kind of damage to a right set of programs is caught."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from topo_reference import counts_of, run

from hrdma.errors import ScheduleError
from hrdma.topo import program as isa
from hrdma.topo.algorithms import ALGORITHMS, build
from hrdma.topo.lower import lower
from hrdma.topo.program import INSTR, REF, ProgramSpec
from hrdma.topo.verify import check_programs


def _programs(name="direct", collective="allreduce", size=3, count=100, in_place=True, parts=1, itemsize=8):
    schedule = build(name, collective, size, parts=parts)
    return [lower(schedule, r, count, itemsize, in_place=in_place) for r in range(size)]


def _edited(spec: ProgramSpec, index: int, **fields) -> ProgramSpec:
    instrs = spec.instrs.copy()
    for field, value in fields.items():
        instrs[field][index] = value
    return replace(spec, instrs=instrs)


def _without_edge(spec: ProgramSpec, index: int, edge: int) -> ProgramSpec:
    """The program when instruction `index` no longer unlocks the `edge`-th of those that wait for it."""
    instrs, unlocks = spec.instrs.copy(), spec.unlocks.tolist()
    at = int(instrs["unlock"][index]) + edge
    instrs["after"][unlocks.pop(at)] -= 1
    instrs["nunlock"][index] -= 1
    instrs["unlock"] -= (instrs["unlock"] > at).astype(np.uint32)
    return replace(spec, instrs=instrs, unlocks=np.array(unlocks, np.uint32))


def _find(spec: ProgramSpec, op: int) -> int:
    return int(np.flatnonzero(spec.instrs["op"] == op)[0])


def _hand(rank: int, size: int, *instrs: dict, waits: dict[int, list[int]], out: int = 64, alias=0) -> ProgramSpec:
    """A program written by hand: `waits[i]` are the instructions that i waits for."""
    table, unlocks = np.zeros(len(instrs), INSTR), []
    for index, fields in enumerate(instrs):
        table["peer"][index] = -1
        for field, value in {"dst_buf": isa.BUF_OUT, "src_buf": isa.BUF_OUT, **fields}.items():
            table[field][index] = value
        table["after"][index] = len(waits.get(index, ()))
        table["unlock"][index] = len(unlocks)
        unlocks += [i for i, deps in waits.items() if index in deps]
        table["nunlock"][index] = len(unlocks) - table["unlock"][index]
    return ProgramSpec(table, np.array(unlocks, np.uint32), np.empty(0, REF), out, out, 0, size, rank, alias)


@pytest.mark.parametrize("name", [n for n, a in ALGORITHMS.items() if "allreduce" in a.collectives])
@pytest.mark.parametrize("in_place", [False, True])
def test_every_dependency_is_needed_or_implied(name: str, in_place: bool) -> None:
    """Takes away each dependency in turn: it is missed by the proof, or the others imply it and nothing changes."""
    programs = _programs(name, size=3, count=30, in_place=in_place)
    check_programs(programs)
    missed = 0
    for rank, spec in enumerate(programs):
        for index in range(len(spec.instrs)):
            for edge in range(int(spec.instrs["nunlock"][index])):
                damaged = list(programs)
                damaged[rank] = _without_edge(spec, index, edge)
                try:
                    check_programs(damaged)
                except ScheduleError as error:
                    assert error.rank == rank and "in no order" in str(error)
                    missed += 1
                    continue
                for seed in range(4):
                    run(damaged, "allreduce", [30] * 3, 0, in_place, seed=seed, prove=False, mapped=bool(seed & 1))
    assert missed >= 3


def test_messages_that_do_not_pair() -> None:
    programs = _programs()
    send = _find(programs[1], isa.SEND)
    for fields, match in (
        ({"tag": 77}, "rank 1: send .* tag 77, meets no receive"),
        ({"len": 8}, "rank 1: send .* has 8 bytes, rank . expects"),
        ({"peer": 1}, "rank 1: instruction . has peer 1"),
        ({"op": isa.NOP}, "receive . from rank 1, tag ., meets no send"),
    ):
        with pytest.raises(ScheduleError, match=match):
            check_programs([programs[0], _edited(programs[1], send, **fields), programs[2]])
    twice = _hand(0, 2, *[{"op": isa.SEND, "peer": 1, "len": 8}] * 2, waits={})
    once = _hand(1, 2, {"op": isa.RECV, "peer": 0, "len": 8}, waits={})
    with pytest.raises(ScheduleError, match="two sends to rank 1 have tag 0"):
        check_programs([twice, once])
    again = _hand(1, 2, *[{"op": isa.RECV, "peer": 0, "len": 8, "dst_off": off} for off in (0, 8)], waits={})
    with pytest.raises(ScheduleError, match="two receives from rank 0 have tag 0"):
        check_programs([twice, again])


def test_memory() -> None:
    programs = _programs(in_place=False)
    last = len(programs[0].instrs) - 1
    for index, fields, match in (
        (last, {"dst_off": 800}, "reaches byte"),
        (last, {"dst_buf": isa.BUF_IN}, "writes to the caller's input"),
        (last, {"op": 9}, "malformed"),
        (last, {"after": 5}, "waits for 5, but"),
        (_find(programs[0], isa.REDUCE), {"nref": 0}, "reduces 0 operands"),
        (_find(programs[0], isa.BORROW), {"len": 8}, "borrows nothing"),
    ):
        with pytest.raises(ScheduleError, match=match):
            check_programs([_edited(programs[0], index, **fields), *programs[1:]])
    with pytest.raises(ScheduleError, match="is that of rank 1 of 3"):
        check_programs([programs[1], programs[0], programs[2]])


def test_a_local_cycle() -> None:
    loop = _hand(0, 1, {"op": isa.NOP}, {"op": isa.NOP}, waits={0: [1], 1: [0]})
    with pytest.raises(ScheduleError, match="waits for itself"):
        check_programs([loop])


def test_deadlock_of_an_exchange_in_place() -> None:
    """Send, then receive over it: right under credits, a deadlock when both sends wait for their receives."""
    pair = [
        _hand(
            r, 2, {"op": isa.SEND, "peer": 1 - r, "len": 64}, {"op": isa.RECV, "peer": 1 - r, "len": 64}, waits={1: [0]}
        )
        for r in (0, 1)
    ]
    with pytest.raises(ScheduleError, match="deadlock"):
        check_programs(pair)


def test_deadlock_of_two_lenders() -> None:
    """Both borrow what the other may not give up before its own reduction."""
    pair = []
    for r in (0, 1):
        spec = _hand(
            r, 2, {"op": isa.SEND, "peer": 1 - r, "len": 64}, {"op": isa.BORROW, "peer": 1 - r, "len": 64, "dst_buf": isa.BUF_TMP},
            {"op": isa.REDUCE, "len": 64, "nref": 2}, waits={2: [0, 1]},
        )  # fmt: skip
        pair.append(replace(spec, refs=np.array([(isa.BUF_OUT, 0), (isa.BUF_BORROWED, 1)], REF), tmp_bytes=64))
    with pytest.raises(ScheduleError, match="deadlock"):
        check_programs(pair)


@pytest.mark.parametrize("by_itself", [False, True])
def test_what_is_reduced_out_of_its_message_is_read_by_nobody_else(by_itself: bool) -> None:
    pair = []
    for r in (0, 1):
        spec = _hand(
            r, 2, {"op": isa.SEND, "peer": 1 - r, "len": 32}, {"op": isa.RECV, "peer": 1 - r, "len": 32, "dst_buf": isa.BUF_TMP},
            {"op": isa.REDUCE, "len": 32, "nref": 2}, {"op": isa.COPY, "len": 32, "src_buf": isa.BUF_TMP, "dst_off": 32},
            waits={2: [0, 1], 3: [1, 2] if by_itself else [2]},
        )  # fmt: skip
        pair.append(replace(spec, refs=np.array([(isa.BUF_OUT, 0), (isa.BUF_TMP, 0)], REF), tmp_bytes=32))
    if by_itself:
        check_programs(pair)
        return
    with pytest.raises(ScheduleError, match="instruction 3 reads what 1 has for 2 alone"):
        check_programs(pair)


def test_the_interpreter_finds_wrong_programs() -> None:
    """The runner is a checker too: it must fail when a dependency or a message is missing."""
    programs = _programs("ring", size=3, count=300, in_place=True)
    damaged = [_edited(programs[0], _find(programs[0], isa.SEND), tag=99), *programs[1:]]
    with pytest.raises(ScheduleError, match="nothing can go on"):
        run(damaged, "allreduce", [300] * 3, 0, True, prove=False)
    spec = programs[0]
    index = int(np.flatnonzero((spec.instrs["op"] == isa.RECV_REDUCE) & (spec.instrs["nunlock"] > 0))[0])
    damaged = [_without_edge(spec, index, 0), *programs[1:]]
    wrong = 0
    for seed in range(20):
        try:
            run(damaged, "allreduce", [300] * 3, 0, True, prove=False, seed=seed, credits=2)
        except AssertionError:
            wrong += 1
    assert wrong


def test_text_of_a_program() -> None:
    text = str(_programs("exchange", size=2, count=16, itemsize=4)[0])
    assert "rank 0 of 2: 3 instructions" in text
    assert "REDUCE" in text and "after [0, 1]" in text


@pytest.mark.parametrize("collective", ["allgather", "alltoall", "gather"])
def test_zero_counts_send_nothing(collective: str) -> None:
    counts = counts_of(collective, 4, "zero")
    assert all(len(lower(build("direct", collective, 4), r, counts[r], 8).instrs) == 0 for r in range(4))

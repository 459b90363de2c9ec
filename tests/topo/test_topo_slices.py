"""Slices, and copies of them: results stay right whoever copies, and scratch is used again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from topo_reference import mixed, run

from hrdma.errors import ScheduleError
from hrdma.planning import plan
from hrdma.topo import program as isa
from hrdma.topo.algorithms import ALGORITHMS, build
from hrdma.topo.answers import answer
from hrdma.topo.cost import DEFAULT_COST
from hrdma.topo.lower import lower
from hrdma.topo.program import ProgramSpec
from hrdma.topo.slices import copied, joined, lengths, slicing
from hrdma.topo.verify import check_programs

VECTORS = ("allreduce", "reduce", "broadcast")
EVERY = [(collective, name) for collective in VECTORS for name, a in ALGORITHMS.items() if collective in a.collectives]
SLICES = (700, 700, 700, 401)


def slices(collective: str, name: str, size: int, rank: int, in_place: bool, root: int, copying: bool = False):
    found = []
    for count in SLICES:
        spec = lower(build(name, collective, size, root=root), rank, count, 8, in_place=in_place or copying)
        answer(spec)
        found.append(copied(spec, in_place) if copying else spec)
    return found


def programs(collective="allreduce", name="direct", size=3, in_place=True, root=0, copying=lambda rank: True, ahead=1):
    return [joined(slices(collective, name, size, rank, in_place, root, copying(rank)), ahead) for rank in range(size)]


def sends(spec: ProgramSpec) -> np.ndarray:
    return spec.instrs[spec.instrs["op"] == isa.SEND]


@pytest.mark.parametrize("in_place", (False, True))
@pytest.mark.parametrize("size", (2, 3, 4))
@pytest.mark.parametrize("collective, name", EVERY)
def test_results_are_right_whoever_copies(collective: str, name: str, size: int, in_place: bool) -> None:
    root = size - 1
    for seed, (ahead, copying) in enumerate(
        (
            (1, lambda rank: False), (1, lambda rank: True), (1, lambda rank: rank % 2 > 0), (1, lambda rank: rank == root),
            (2, lambda rank: False), (3, lambda rank: rank % 2 > 0),
        )
    ):  # fmt: skip
        found = programs(collective, name, size, in_place or collective == "broadcast", root, copying, ahead)
        for mapped in (False, True):
            run(
                found,
                collective,
                [sum(SLICES)] * size,
                root,
                in_place,
                prove=not mapped,
                mapped=mapped,
                credits=seed,
                seed=seed,
            )


def test_in_rank_order_it_is_still_one_association() -> None:
    run(programs(), "allreduce", [sum(SLICES)] * 3, 0, True, op=mixed)


def test_more_operands_than_an_instruction_takes() -> None:
    size = isa.REDUCE_MAX_SRC + 2
    schedule = build("direct", "allreduce", size)
    found = [copied(lower(schedule, rank, size, 8, in_place=True), True) for rank in range(size)]
    run(found, "allreduce", [size] * size, 0, True, op=mixed)


@pytest.mark.parametrize("collective, name", EVERY)
def test_only_copies_touch_the_callers_buffers_and_later_slices_use_their_scratch_again(
    collective: str, name: str
) -> None:
    for rank in range(4):
        own = slices(collective, name, 4, rank, True, 0)
        found = slices(collective, name, 4, rank, False, 0, True)
        for count, spec, bare in zip(SLICES, found, own):
            inner = spec.instrs[1:-1]
            assert (inner["dst_buf"] == isa.BUF_TMP).all() and (inner["src_buf"] == isa.BUF_TMP).all()
            assert (inner["op"] == bare.instrs["op"]).all() and (spec.in_bytes, spec.out_bytes) == (
                bare.in_bytes, bare.out_bytes,
            )  # fmt: skip
            first, last = spec.instrs[[0, -1]]
            assert (first["op"], first["src_buf"], first["len"]) == (isa.COPY, isa.BUF_IN, 8 * count)
            assert last["op"] == (isa.COPY if bare.out_bytes else isa.NOP) and last["len"] == bare.out_bytes
            assert not bare.out_bytes or (last["dst_buf"], last["src_off"]) == (isa.BUF_OUT, first["dst_off"])
            assert bare.tmp_bytes + 8 * count <= spec.tmp_bytes <= bare.tmp_bytes + 8 * count + 8192
        assert joined(found).tmp_bytes == found[0].tmp_bytes == max(spec.tmp_bytes for spec in found)


def test_to_a_copy_results_may_be_put_back() -> None:
    bare, spec = slices("allreduce", "direct", 3, 0, True, 0)[0], slices("allreduce", "direct", 3, 0, False, 0, True)[0]
    assert (
        np.count_nonzero(spec.instrs["flags"] & isa.RETURNS)
        == np.count_nonzero(bare.instrs["flags"] & isa.RETURNS)
        == 4
    )


def test_the_proof_misses_no_copy_that_comes_too_early() -> None:
    found = programs()
    check_programs(found)
    spec = found[0]
    for copy in np.flatnonzero(spec.instrs["op"] == isa.COPY).tolist():
        instrs, unlocks = spec.instrs.copy(), spec.unlocks.copy()
        begin, n = instrs["unlock"][copy], instrs["nunlock"][copy]
        if instrs["dst_buf"][copy] == isa.BUF_OUT and copy > len(instrs) * 3 // 4:
            continue  # of the last slice: no later one is in that scratch
        for other in unlocks[begin : begin + n]:
            instrs["after"][other] -= 1
        instrs["nunlock"][copy] = 0
        with pytest.raises(ScheduleError, match="rank 0"):
            check_programs([replace(spec, instrs=instrs), *found[1:]])


@pytest.mark.parametrize("itemsize", (1, 2, 8, 12))
@pytest.mark.parametrize("nbytes", (1, 4 << 20, (4 << 20) + 24, 15_999_984, 24 << 20))
def test_slices_are_alike_and_make_up_the_vector(itemsize: int, nbytes: int) -> None:
    count = -(-nbytes // itemsize)
    found = lengths(count, itemsize, 1 << 20)
    assert sum(found) == count and len(set(found[:-1])) <= 1 and 0 < found[-1] <= found[0]
    assert found[0] * itemsize <= 1.5 * (1 << 20) + 4096
    assert len(found) == 1 or itemsize == 12 or found[0] * itemsize % 4096 == 0


@pytest.mark.parametrize("collective", ("allreduce", "reduce"))
def test_long_vectors_are_cut_where_ranks_share_cores(collective: str) -> None:
    crowded = replace(DEFAULT_COST["shm"], cores=2)

    def planned(nbytes: int, cost=crowded, sliced: bool = True, size: int = 4, **more):
        shape = {
            "size": size,
            "counts": nbytes // 4,
            "itemsize": 4,
            "dtype": "float32",
            "in_place": True,
            "mapped": True,
        }
        return [plan(collective, rank=rank, cost=cost, sliced=sliced, **shape | more) for rank in range(size)]

    for nbytes, number in (
        (3 << 20, 3),
        ((4 << 20) + 4, 4),
        (5 << 20, 5),
        ((16 << 20) - 4, 16),
        (256 << 20, 256),
    ):
        found = planned(nbytes)
        check_programs(found)
        assert f"in {number} slices; plain arrays are copied" in found[0].explanation
        assert found[0].choice.nbytes == -(-nbytes // number // 4096) * 4096
        for spec in found:
            assert spec.slices == number and spec.aside == isa.ASIDE_WITHIN
            assert (sends(spec)["src_buf"] == isa.BUF_TMP).all() and spec.instrs["tag"].max() < 1 << 24
            assert spec.tmp_bytes < 3 * found[0].choice.nbytes
    whole = (
        planned(8 << 20, cost=replace(crowded, cores=4)), planned(8 << 20, mapped=False), planned(8 << 20, sliced=False),
        planned(8 << 20, size=16),
    )  # fmt: skip
    for found in whole:
        assert {spec.slices for spec in found} == {1} and not any(spec.aside for spec in found)
    assert [all(spec.sliceable for spec in found) for found in whole] == [False, False, True, False]


@pytest.mark.parametrize("in_place", (False, True))
@pytest.mark.parametrize("size", (3, 4))
@pytest.mark.parametrize("collective", ("allreduce", "reduce"))
def test_what_is_planned_in_slices_is_right(collective: str, size: int, in_place: bool) -> None:
    cost, count = replace(DEFAULT_COST["shm"], cores=2), (3 << 20) // 8 + 5
    shape = {
        "size": size,
        "counts": count,
        "itemsize": 8,
        "dtype": "float64",
        "root": 1,
        "in_place": in_place,
        "mapped": True,
    }
    found = [plan(collective, rank=rank, cost=cost, sliced=True, **shape) for rank in range(size)]
    assert {spec.slices for spec in found} == {3}
    assert [spec.out_bytes > 0 for spec in found] == [collective == "allreduce" or rank == 1 for rank in range(size)]
    run(found, collective, [count] * size, 1, in_place, mapped=True)


@pytest.mark.parametrize("collective", ("broadcast", "allgather", "alltoall"))
def test_what_goes_one_way_only_is_not_cut(collective: str) -> None:
    assert not slicing(collective, 4, 8 << 20, replace(DEFAULT_COST["shm"], cores=2), True)


@pytest.mark.parametrize("in_place", (False, True))
@pytest.mark.parametrize("transport", ("shm", "tcp"))
def test_an_allreduce_of_two_ranks_is_cut_where_each_has_a_core(transport: str, in_place: bool) -> None:
    cost = replace(DEFAULT_COST[transport], cores=2)
    mapped = transport == "shm"

    def planned(nbytes: int, collective: str = "allreduce", cost=cost, **more):
        shape = {"counts": nbytes // 4, "itemsize": 4, "dtype": "float32", "mapped": mapped, "in_place": in_place}
        shape |= {"size": 2, "sliced": True} | more
        return [plan(collective, rank=rank, cost=cost, **shape) for rank in range(shape["size"])]

    for nbytes, number in ((4 << 20, 8), ((5 << 20) + 4, 10), (24 << 20, 48)):
        found = planned(nbytes)
        check_programs(found)
        number //= 1 if mapped else 2
        assert found[0].explanation.endswith(f"in {number} slices")
        for spec in found:
            assert (spec.slices, spec.aside, spec.sliceable) == (number, 0, mapped)
            assert (sends(spec)["src_buf"] != isa.BUF_TMP).all()
            # what begins at once: the first slice, or two
            begin = spec.instrs[(spec.instrs["after"] == 0) & (spec.instrs["op"] == isa.SEND)]
            begun = {int(tag) >> 16 for tag in begin["tag"]}
            assert begun == ({0} if mapped else {0, 1})
    for found in (
        planned(4 << 20, "reduce"), planned(4 << 20, size=3, cost=replace(cost, cores=4)), planned(4 << 20, cost=replace(cost, cores=1)),
        planned(4 << 20, cost=replace(cost, cores=0)), planned(4 << 20, cost=replace(cost, offload=True)),
        planned(4 << 20, cost=None), planned(2 << 20, sliced=False), *([] if mapped else [planned(33 << 20)]),
    ):  # fmt: skip
        assert {spec.slices for spec in found} == {1}


def test_scratch_of_slices_under_way_at_once_is_their_own() -> None:
    specs = slices("allreduce", "exchange", 2, 0, True, 0)
    one, two = joined(specs), joined(specs, 2)
    assert 0 < one.tmp_bytes < two.tmp_bytes == 2 * one.tmp_bytes

    def rooms(spec: ProgramSpec) -> list[int]:
        landing = spec.instrs[(spec.instrs["op"] == isa.RECV) & (spec.instrs["dst_buf"] == isa.BUF_TMP)]
        return landing["dst_off"].tolist()

    assert len(set(rooms(one))) == 1 and len(set(rooms(two))) == 2
    assert all(a != b for a, b in zip(rooms(two), rooms(two)[1:]))

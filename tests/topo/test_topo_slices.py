"""Slices, and copies of them: results stay right whoever copies, and scratch is used again."""

from __future__ import annotations

import itertools
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
COPIED = [name for collective, name in EVERY if collective == "allreduce"]
SLICES = (700, 700, 700, 401)


def slices(collective: str, name: str, size: int, rank: int, in_place: bool, root: int, copying: bool = False):
    """`copying`: on a copy, as allreduces."""
    found = []
    for count in SLICES:
        spec = lower(
            build(name, "allreduce" if copying else collective, size, root=root),
            rank,
            count,
            8,
            in_place=in_place or copying,
        )
        answer(spec)
        found.append(copied(spec, in_place, collective == "allreduce" or rank == root) if copying else spec)
    return found


def programs(collective="allreduce", name="direct", size=3, in_place=True, root=0, copying=lambda rank: True, ahead=1):
    return [joined(slices(collective, name, size, rank, in_place, root, copying(rank)), ahead) for rank in range(size)]


def sends(spec: ProgramSpec) -> np.ndarray:
    return spec.instrs[spec.instrs["op"] == isa.SEND]


def check(found: list[ProgramSpec], collective: str, root: int, in_place: bool, seed: int) -> None:
    for mapped in (False, True):
        counts = [sum(SLICES)] * len(found)
        run(found, collective, counts, root, in_place, prove=not mapped, mapped=mapped, credits=seed, seed=seed)


@pytest.mark.parametrize("in_place", (False, True))
@pytest.mark.parametrize("size", (2, 3, 4))
@pytest.mark.parametrize("collective, name", EVERY)
def test_results_are_right_however_many_are_under_way(collective: str, name: str, size: int, in_place: bool) -> None:
    for ahead in (1, 2, 3):
        there = in_place or collective == "broadcast"
        check(
            programs(collective, name, size, there, size - 1, lambda rank: False, ahead),
            collective,
            size - 1,
            in_place,
            ahead,
        )


@pytest.mark.parametrize("in_place", (False, True))
@pytest.mark.parametrize("size", (2, 3, 4))
@pytest.mark.parametrize("name", COPIED)
def test_results_are_right_whoever_copies(name: str, size: int, in_place: bool) -> None:
    ways = (lambda rank: True, lambda rank: rank % 2 > 0, lambda rank: rank == size - 1)
    for seed, (ahead, copying) in enumerate(itertools.product((1, 3), ways)):
        check(programs("allreduce", name, size, in_place, 0, copying, ahead), "allreduce", 0, in_place, seed)


@pytest.mark.parametrize("in_place", (False, True))
@pytest.mark.parametrize("size", (2, 3, 4))
@pytest.mark.parametrize("name", COPIED)
def test_of_a_reduce_the_root_takes_the_result_of_an_allreduce(name: str, size: int, in_place: bool) -> None:
    for root in range(size):
        check(programs("reduce", name, size, in_place, root), "reduce", root, in_place, root)


def test_in_rank_order_it_is_still_one_association() -> None:
    run(programs(), "allreduce", [sum(SLICES)] * 3, 0, True, op=mixed)


def test_more_operands_than_an_instruction_takes() -> None:
    size = isa.REDUCE_MAX_SRC + 2
    schedule = build("direct", "allreduce", size)
    found = [copied(lower(schedule, rank, size, 8, in_place=True), True) for rank in range(size)]
    run(found, "allreduce", [size] * size, 0, True, op=mixed)


@pytest.mark.parametrize("out", (False, True))
@pytest.mark.parametrize("name", COPIED)
def test_peers_see_scratch_alone_which_later_slices_use_again(name: str, out: bool) -> None:
    for rank in range(4):
        own = slices("allreduce", name, 4, rank, True, 0)
        found = slices("allreduce" if out else "reduce", name, 4, rank, False, (rank + 1) % 4, True)
        for count, spec, bare in zip(SLICES, found, own):
            ops, seen = spec.instrs["op"], np.isin(spec.instrs["op"], (isa.SEND, isa.RECV, isa.RECV_REDUCE, isa.BORROW))
            assert (ops[ops != isa.COPY] == bare.instrs["op"]).all()
            lies = np.where(ops == isa.SEND, spec.instrs["src_buf"], spec.instrs["dst_buf"])
            answers = spec.instrs["flags"] & isa.RETURNS > 0
            assert (lies[seen & ~answers] == isa.BUF_TMP).all()
            assert (spec.in_bytes, spec.out_bytes) == (8 * count, 8 * count * out)
            assert 8 * count <= spec.tmp_bytes - bare.tmp_bytes <= 8 * count + 8192
            for into in (True, False):  # all but what is summed here and not sent away
                copies = spec.instrs[(ops == isa.COPY) & ((spec.instrs["dst_buf"] == isa.BUF_TMP) == into)]
                stays = bare.instrs["len"][bare.instrs["op"] == isa.REDUCE].sum() if name == "direct" else 0
                assert copies["len"].sum() == (8 * count - stays if into or out else 0)
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
            sent = sends(spec)
            assert (sent["src_buf"][sent["flags"] & isa.RETURNS == 0] == isa.BUF_TMP).all()
            assert spec.instrs["tag"].max() < 1 << 24
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


@pytest.mark.parametrize("rounded", (False, True))
@pytest.mark.parametrize("size", (3, 5, 6, 8, 15))
def test_one_slice_is_copied_by_some_ranks_and_not_by_others(size: int, rounded: bool) -> None:
    """And in place on some: cython/bind lets each rank decide below 1.5 MiB."""
    cost = replace(DEFAULT_COST["shm"], cores=2)
    for name in [None] if rounded else [None, *COPIED]:
        for nbytes in (32 << 10, 100_000, (3 << 19) - 4):
            shape = {"counts": nbytes // 4, "itemsize": 4, "dtype": "float32", "mapped": True, "deterministic": rounded}
            shape |= {"size": size, "cost": cost, "algorithm": name}
            for odd in (0, 1):
                some = [{"sliced": rank % 2 == odd, "in_place": rank % 3 == odd} for rank in range(size)]
                found = [plan("allreduce", rank=rank, **shape, **some[rank]) for rank in range(size)]
                check_programs(found)
                assert {spec.slices for spec in found} == {1} and len({spec.choice for spec in found}) == 1
                assert [spec.aside == isa.ASIDE_WITHIN for spec in found] == [each["sliced"] for each in some]
    more = plan("allreduce", size=size, rank=0, cost=cost, counts=3 << 17, itemsize=4, mapped=True, sliced=True)
    assert more.slices == 2


@pytest.mark.parametrize("rounded", (False, True))
@pytest.mark.parametrize("nbytes", (128 << 10, (3 << 19) - 8, 3 << 19))
def test_a_reduce_on_copies_is_right(nbytes: int, rounded: bool) -> None:
    cost, count = replace(DEFAULT_COST["shm"], cores=2), nbytes // 8
    shape = {"size": 4, "counts": count, "itemsize": 8, "dtype": "float64", "root": 2, "in_place": True, "mapped": True}
    found = [plan("reduce", rank=rank, cost=cost, sliced=True, deterministic=rounded, **shape) for rank in range(4)]
    assert {spec.slices for spec in found} == {1 if nbytes < 3 << 19 else 2}
    assert {spec.aside for spec in found} == {isa.ASIDE_WITHIN}
    run(found, "reduce", [count] * 4, 2, True, mapped=True, op=mixed if rounded else np.add)


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

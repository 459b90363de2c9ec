"""plan(): what a communicator asks for, end to end; the mirror of the core's structures."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from topo_reference import PER_RANK, ROOTED, counts_of, mixed, run

from hrdma.errors import ScheduleError
from hrdma.planning import INSTR, REF, cost_of, lower, plan
from hrdma.topo import program as isa
from hrdma.topo.algorithms import ALGORITHMS, build
from hrdma.topo.choice import choose
from hrdma.topo.cost import DEFAULT_COST, Cost
from hrdma.topo.layout import layout
from hrdma.topo.schedule import Schedule, Transfer
from hrdma.types import COLLECTIVES

INCLUDE = Path(__file__).resolve().parents[2] / "cython" / "include"


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("size", (1, 2, 3, 5, 8))
def test_plans_of_all_ranks_fit_and_compute(collective: str, size: int) -> None:
    for case, kind in enumerate(("zero", "one", "odd", "even")):
        counts = counts_of(collective, size, kind)
        root = size - 1 if collective in ROOTED else 0
        for mapped in (False, True):
            in_place = bool((case ^ mapped) & 1)
            plans = [
                plan(collective, size=size, rank=r, counts=counts[r], itemsize=8, dtype="int64", op="sum", root=root,
                     in_place=in_place, mapped=mapped)
                for r in range(size)
            ]  # fmt: skip
            assert len({p.explanation for p in plans}) == 1 or collective == "alltoall"
            run(plans, collective, counts, root, in_place, mapped=mapped, credits=0 if mapped else 2, seed=case)


@pytest.mark.parametrize("collective", ("allreduce", "reduce", "reduce_scatter"))
@pytest.mark.parametrize("count", (3, 5000))
def test_deterministic_is_left_to_right_in_rank_order(collective: str, count: int) -> None:
    for size in (2, 3, 8):
        plans = [
            plan(
                collective,
                size=size,
                rank=r,
                counts=count,
                itemsize=8,
                dtype="float64",
                deterministic=True,
                in_place=True,
            )
            for r in range(size)
        ]
        run(plans, collective, [count] * size, 0, True, op=mixed, seed=size)
        assert "in rank order" in plans[0].explanation
    exact = plan(collective, size=8, rank=0, counts=count, itemsize=8, dtype="int64", deterministic=True)
    assert "in rank order" not in exact.explanation  # integers: any association is the same


def test_alltoall_plans_agree_though_counts_differ() -> None:
    counts = counts_of("alltoall", 6, "odd")
    names = {plan("alltoall", size=6, rank=r, counts=counts[r], itemsize=8).choice.algorithm for r in range(6)}
    assert len(names) == 1


def test_large_results_bypass_the_cache() -> None:
    def flags(count: int) -> int:
        spec = lower(build("direct", "allgather", 2), 0, count, 8)
        return int(spec.instrs["flags"][spec.instrs["op"] == isa.RECV][0]) & isa.NT

    assert flags(100) == 0 and flags(4 << 20) == isa.NT


@pytest.mark.parametrize("collective", ("allreduce", "reduce_scatter", "reduce"))
@pytest.mark.parametrize("mapped", (False, True))
def test_scratch_stays_small_for_long_vectors(collective: str, mapped: bool) -> None:
    for size in (2, 8, 16):
        count = (64 << 20) // 4 // (size if collective == "reduce_scatter" else 1)
        made = plan(
            collective, size=size, rank=0, counts=count, itemsize=4, dtype="float32", mapped=mapped, deterministic=True
        )
        assert made.tmp_bytes <= 16 << 20


def test_chunks_of_long_vectors_begin_at_cache_lines() -> None:
    spec = lower(build("ring", "allreduce", 3, parts=2), 0, 1_000_003, 4)
    assert not (spec.instrs["dst_off"] % 64).any() and not (spec.instrs["src_off"] % 64).any()
    assert (spec.instrs["len"] % 64).any()


@pytest.mark.parametrize("name", [n for n, a in ALGORITHMS.items() if "allreduce" in a.collectives])
@pytest.mark.parametrize(
    ("nbytes", "fits"),
    [(4 * 65536, True), (16 * 65536, True), (4 * 65536 - 512, True), (4 * 70000, False), (4096, False)],
)
def test_messages_do_not_end_just_behind_full_packets(name: str, nbytes: int, fits: bool) -> None:
    packet, count = 65408, nbytes // 8
    cost = Cost(7e-6, 3e-10, 2.5e-11, packet=packet)
    plans = [
        plan("allreduce", size=4, rank=r, counts=count, itemsize=8, dtype="int64", in_place=True, cost=cost, algorithm=name, parts=1)
        for r in range(4)
    ]  # fmt: skip
    run(plans, "allreduce", [count] * 4, 0, True)
    if not fits:
        without = replace(cost, packet=0)
        equal = [
            plan("allreduce", size=4, rank=r, counts=count, itemsize=8, dtype="int64", in_place=True, cost=without, algorithm=name, parts=1)
            for r in range(4)
        ]  # fmt: skip
        assert [made.instrs.tobytes() for made in plans] == [made.instrs.tobytes() for made in equal]
    elif build(name, "allreduce", 4).split == 4:
        sent = np.concatenate([made.instrs["len"][made.instrs["op"] == isa.SEND] for made in plans])
        behind = sent % packet
        assert (behind == 0).sum() >= len(sent) / 2 and set(behind) <= {0, nbytes % (4 * packet)}


@pytest.mark.parametrize("split", [2, 4, 8, 16, 32])
def test_the_last_block_goes_unasked_as_the_others_do(split: int) -> None:
    cost = DEFAULT_COST["tcp"]
    for limit, block in ((cost.loose, 64 << 10), (cost.eager, 256 << 10), (cost.eager, 512 << 10)):
        lens = layout(build("ring", "allreduce", split), 0, split * block, 1, packet=cost.packet).lens
        full = block // cost.packet * cost.packet
        if (block - full) * split > 4096:
            full = block  # the last would have too much
        assert lens == [full] * (split - 1) + [split * block - full * (split - 1)] and lens[-1] <= limit


def test_packets_are_those_of_one_host() -> None:
    card = {"host": "a", "machine": "m", "cpus": "3", "costs": {}}
    assert cost_of({"tcp"}, [card, card], [card]).packet == 65408
    assert cost_of({"tcp"}, [card, card | {"host": "b"}], [card]).packet == 0
    assert cost_of({"shm"}, [card, card], [card]).packet == 0


@pytest.mark.parametrize("size", (2, 8))
def test_ranks_that_share_cores_do_not_double_what_they_read_in_place(size: int) -> None:
    cost = Cost(1e-3, 1e-12, 1e-12, eager=32 << 10, pull=True)

    def planned(nbytes: int, cores: int, mapped: bool) -> tuple:
        shape = {"size": size, "counts": nbytes // 4, "itemsize": 4, "dtype": "float32", "mapped": mapped}
        return plan("allreduce", rank=0, cost=replace(cost, cores=cores), **shape).choice.table

    for nbytes, cores, mapped, without in (
        (8192, 1, True, True),
        (8192, 8, True, False),
        (4096, 1, True, size > 2),
        (2044, 1, True, False),
        (8192, 1, False, False),
    ):
        assert ("doubling" not in {name for name, *_ in planned(nbytes, cores, mapped)}) == without


def test_what_all_are_sent_alike_moves_to_each_core_once() -> None:
    cost = Cost(2e-7, 1e-10, 2e-11, 2e-7, 1e-6, 32 << 10, pull=True, shown=8 << 10, cores=2)

    def seconds(nbytes: int, size: int = 4, **changed) -> float:
        return choose("allreduce", size, nbytes, replace(cost, **changed), algorithm="exchange").seconds

    for nbytes in (2048, 8192):
        for size in (4, 8):
            spared = cost.beta * nbytes * (size - 1 - cost.cores) * size / cost.cores
            assert seconds(nbytes, size) == pytest.approx(seconds(nbytes, size, shown=0) - spared)
    assert seconds(4096, 3) == seconds(4096, 3, shown=0), "each core needs it as often as there are others"
    for nbytes, changed in ((2044, {}), (8196, {}), (4096, {"cores": 0}), (4096, {"pull": False})):
        assert seconds(nbytes, **changed) == seconds(nbytes, shown=0, **changed), (nbytes, changed)
    with pytest.raises(ValueError, match="shown must not be negative"):
        replace(cost, shown=-1)


def test_a_cost_decides() -> None:
    slow = Cost(1e-3, 1e-12, 1e-12)
    assert (
        plan("allreduce", size=16, rank=0, counts=1 << 16, itemsize=4, dtype="float32", cost=slow).choice.algorithm
        == "doubling"
    )


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"collective": "allmagic"}, "unknown collective 'allmagic'"),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
        ({"op": "sub"}, "unknown op 'sub'"),
        ({"rank": 4}, r"rank 4 is not in \[0, 4\)"),
        ({"collective": "broadcast", "root": -1}, r"root -1 is not in \[0, 4\)"),
        ({"itemsize": 0}, "itemsize must be at least 1, not 0"),
        ({"counts": -5}, "count must not be negative, but holds -5"),
        ({"collective": "allgather", "counts": [1, 2, 3]}, "counts has 3 entries; 4 are needed"),
        ({"collective": "alltoall", "counts": ([1] * 4, [1] * 3)}, "receive counts has 3 entries"),
        ({"collective": "alltoall", "counts": ([1] * 4, [2] * 4)}, "rank 1 sends itself 1 elements but expects 2"),
    ],
)
def test_bad_arguments(fields: dict, match: str) -> None:
    arguments = {
        "collective": "allreduce",
        "size": 4,
        "rank": 1,
        "counts": 8,
        "itemsize": 4,
        "dtype": "float32",
        **fields,
    }
    with pytest.raises(ValueError, match=match):
        plan(arguments.pop("collective"), **arguments)


def test_names_are_ignored_where_nothing_is_reduced() -> None:
    assert len(plan("allgather", size=2, rank=0, counts=4, itemsize=3, dtype="", op=None, root=None).instrs)


def test_lowering_a_chunk_that_is_not_there_is_refused() -> None:
    schedule = Schedule.of("broadcast", 3, [[Transfer(1, 2, 0)]])
    with pytest.raises(ScheduleError, match="rank 1 uses chunk 0 in round 0 before it has it") as caught:
        lower(schedule, 1, 10, 4)
    assert (caught.value.rank, caught.value.chunk) == (1, 0)


def test_tags_are_few_and_the_core_s_limit_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = build("ring", "allreduce", 4, parts=3)
    for rank in range(4):
        spec = lower(schedule, rank, 1000, 4)
        sends = spec.instrs[spec.instrs["op"] == isa.SEND]
        assert sorted(sends["tag"].tolist()) == list(range(len(sends)))
    monkeypatch.setattr("hrdma.topo.lower._TAGS", 17)
    with pytest.raises(ScheduleError, match="18 messages between two ranks; the core takes 17: use fewer parts"):
        lower(schedule, 0, 1000, 4)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_core_takes_every_program(name: str) -> None:
    core = pytest.importorskip("hrdma._core", reason="the extension is not built")
    for collective in ALGORITHMS[name].collectives:
        for size in (1, 2, 5, 8):
            schedule = build(name, collective, size)
            for in_place in (False, True):
                s = lower(schedule, size - 1, 100, 8, in_place=in_place)
                core.Program(s.instrs, s.unlocks, s.refs, s.in_bytes, s.out_bytes, s.tmp_bytes, size)


@pytest.mark.parametrize("collective", sorted(PER_RANK))
def test_uniform_counts_are_one_number(collective: str) -> None:
    a, b = (plan(collective, size=4, rank=1, counts=c, itemsize=4, dtype="int32", root=1) for c in (9, [9] * 4))
    assert np.array_equal(a.instrs, b.instrs) and (a.in_bytes, a.out_bytes) == (b.in_bytes, b.out_bytes)


def test_the_mirror_is_what_the_header_says() -> None:
    """Offsets by the compiler, codes by the text of program.h."""
    text = (INCLUDE / "hr" / "program.h").read_text()
    codes = re.search(r"enum hr_opcode \{(.*?)HR_OPCODES", text, re.S)
    assert codes
    names = re.findall(r"HR_OP_(\w+)", re.sub(r"/\*.*?\*/", "", codes.group(1)))
    assert [getattr(isa, name) for name in names] == list(range(7))
    assert re.search(r"HR_BUF_IN,\s+HR_BUF_OUT,\s+HR_BUF_TMP,\s+HR_BUF_BORROWED", text)
    for name in ("SCALE", "NT", "SWAP", "STAGED", "CHANGED"):
        assert int(re.search(rf"HR_INSTR_{name} = (\d+)", text).group(1)) == getattr(isa, name)
    assert f"HR_REDUCE_MAX_SRC {isa.REDUCE_MAX_SRC}" in (INCLUDE / "hr" / "reduce.h").read_text()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: offsets cannot be asked of it")
def test_the_mirror_has_the_compilers_offsets(tmp_path: Path) -> None:
    fields = [("hr_instr", name) for name in INSTR.names] + [("hr_ref", name) for name in REF.names]
    prints = "".join(f'printf("%zu\\n", offsetof(struct {s}, {f}));' for s, f in fields)
    source = tmp_path / "offsets.c"
    source.write_text(
        '#include <stddef.h>\n#include <stdio.h>\n#include "hr/status.h"\n#include "hr/program.h"\n'
        f'int main(void) {{ {prints} printf("%zu\\n%zu\\n", sizeof(struct hr_instr), sizeof(struct hr_ref)); return 0; }}\n'
    )
    subprocess.run(["cc", "-I", str(INCLUDE), "-o", str(tmp_path / "offsets"), str(source)], check=True, timeout=60)
    printed = subprocess.run([str(tmp_path / "offsets")], check=True, capture_output=True, text=True, timeout=10).stdout
    mirror = [(INSTR if s == "hr_instr" else REF).fields[f][1] for s, f in fields]
    assert [int(line) for line in printed.split()] == [*mirror, INSTR.itemsize, REF.itemsize]


def staged(collective: str, size: int, elements: int, flag: int = isa.STAGED, **options) -> list[list[bool]]:
    """Of each rank's sends, whether they go in messages though they could be read in place (or have another flag)."""
    cost = Cost(2e-7, 1e-10, 2e-11, 2e-7, eager=32 << 10, pull=True, staged=128 << 10)
    plans = [
        plan(collective, size=size, rank=rank, counts=elements, itemsize=4, dtype="float32", mapped=True, cost=cost, **options)
        for rank in range(size)
    ]  # fmt: skip
    return [[bool(i["flags"] & flag) for i in p.instrs if i["op"] == isa.SEND] for p in plans]


def test_what_a_program_changes_goes_in_messages_where_they_are_faster() -> None:
    half = 32 << 10  # elements: its bytes are as many as may be
    assert staged("allreduce", 2, 2 * half, in_place=True, algorithm="direct") == [[True, True]] * 2
    assert staged("allreduce", 2, 2 * half, algorithm="direct") == [[False, True]] * 2, "nobody writes the input"
    assert staged("allreduce", 2, 4 * half, in_place=True, algorithm="direct") == [[False, False]] * 2, "too long"
    assert staged("allreduce", 4, half, in_place=True, algorithm="direct") == [[False] * 6] * 4, "they are borrowed"
    assert all(map(all, staged("allreduce", 4, half, in_place=True, algorithm="ring")))
    assert not any(map(any, staged("broadcast", 2, half, algorithm="direct")))
    assert staged("allgather", 2, half, in_place=True, algorithm="direct") == [[False]] * 2, (
        "each changes the other's block"
    )


def test_what_a_program_changes_is_marked_whatever_its_length() -> None:
    n, flag = 1 << 20, isa.CHANGED
    assert staged("allreduce", 2, n, flag, in_place=True, algorithm="direct") == [[True, True]] * 2
    assert staged("allreduce", 2, n, flag, algorithm="direct") == [[False, True]] * 2, "nobody writes the input"
    assert all(map(all, staged("allreduce", 4, n, flag, in_place=True, algorithm="direct"))), "borrowed ones, too"
    assert not any(map(any, staged("broadcast", 2, n, flag, algorithm="direct")))
    assert not any(map(any, staged("alltoall", 2, n, flag)))


@pytest.mark.parametrize(
    "collective, nbytes, in_place, root, others",
    (
        ("allreduce", 16380, True, 0, 0), ("allreduce", 16384, True, 3, 3), ("allreduce", 131072, False, 0, 0), ("allreduce", 131088, False, 3, 3),
        ("allreduce", (3 << 20) + 524288, True, 3, 3), ("allreduce", 4 << 20, True, 0, 0),
        ("reduce", 1 << 20, True, 3, 1), ("broadcast", 1 << 20, True, 1, 0), ("broadcast", 32768, True, 0, 0),
        ("allgather", 131072, False, 0, 0), ("allgather", 131088, False, 1, 1), ("allgather", 131088, True, 3, 3),
        ("allgather", 8 << 20, False, 1, 1), ("allgather", 10 << 20, False, 0, 0),
        ("reduce_scatter", 1 << 20, False, 1, 1), ("reduce_scatter", 1 << 20, True, 3, 3),
        ("alltoall", 131072, False, 0, 0), ("alltoall", 1 << 20, False, 1, 1), ("alltoall", 1 << 20, True, 0, 0),
        ("scatter", 1 << 20, False, 1, 0), ("gather", 1 << 20, False, 0, 1),
    ),
)  # fmt: skip
def test_what_of_plain_arrays_is_copied_aside(
    collective: str, nbytes: int, in_place: bool, root: int, others: int
) -> None:
    blocks = 1 if collective in ("allreduce", "reduce", "broadcast") else 4
    fields: dict = {"size": 4, "counts": nbytes // 4 // blocks, "itemsize": 4, "dtype": "float32", "in_place": in_place}
    crowded = replace(DEFAULT_COST["shm"], cores=2)
    for rank in range(4):
        found = plan(collective, rank=rank, cost=crowded, mapped=True, **fields)
        assert found.aside == (root if rank == 0 else others), rank
        assert plan(collective, rank=rank, cost=replace(crowded, cores=4), mapped=True, **fields).aside == 0
        assert plan(collective, rank=rank, cost=replace(DEFAULT_COST["tcp"], cores=2), **fields).aside == 0
        assert plan(collective, rank=rank, mapped=True, **fields).aside == 0

"""What every collective must compute, by numpy alone, and a runner of lowered programs against it."""

from __future__ import annotations

import numpy as np

from hrdma.topo.interpret import execute
from hrdma.topo.schedule import offsets
from hrdma.topo.verify import check_programs

GARBAGE = -77
REDUCING = ("allreduce", "reduce", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
PER_RANK = ("allgather", "reduce_scatter", "gather", "scatter")


def mixed(a, b):
    """Neither commutative nor associative, so that every order of operands shows."""
    return a * 31 + b * 7 + (a ^ b)


def counts_of(collective: str, size: int, kind: str):
    """Counts for every rank: a list of what each rank passes as `counts`."""
    n = {"zero": 0, "one": 1, "few": max(1, size - 1), "odd": 1037, "even": 64 * size}[kind]
    if collective in PER_RANK and kind == "odd":
        return [[(7 * r) % 5 * 13 for r in range(size)]] * size
    if collective == "alltoall" and kind == "odd":
        matrix = [[(3 * s + 5 * d) % 4 * 11 for d in range(size)] for s in range(size)]
        return [(matrix[r], [matrix[s][r] for s in range(size)]) for r in range(size)]
    return [n] * size


def vectors(collective: str, size: int, rank: int, counts, root: int):
    """This rank's input, and the lengths of its blocks in input and output."""
    if collective == "barrier":
        sent = received = [0]
    elif collective in ("allreduce", "reduce", "broadcast"):
        sent = received = [counts]
        if collective == "reduce" and rank != root:
            received = [0]
    elif collective == "alltoall":
        sent, received = counts if isinstance(counts, tuple) else ([counts] * size, [counts] * size)
    else:
        blocks = counts if isinstance(counts, list) else [counts] * size
        own = [blocks[rank]]
        sent = {"allgather": own, "gather": own, "reduce_scatter": blocks, "scatter": blocks if rank == root else [0]}[
            collective
        ]
        received = {
            "allgather": blocks,
            "gather": blocks if rank == root else [0],
            "reduce_scatter": own,
            "scatter": own,
        }[collective]
    data = np.arange(sum(sent), dtype=np.int64) * size + rank
    if collective == "broadcast" and rank != root:
        data = np.full(sum(sent), GARBAGE, np.int64)
    return data, sent, received


def expected(collective: str, size: int, counts: list, root: int, op) -> list[np.ndarray]:
    """Every rank's output; reductions left to right in rank order."""
    given = [vectors(collective, size, r, counts[r], root) for r in range(size)]
    ins = [g[0] for g in given]
    at = [offsets(g[1]) for g in given]
    total = ins[0]
    if collective in REDUCING:
        for x in ins[1:]:
            total = op(total, x)
    found = []
    for rank in range(size):
        if collective == "allreduce" or (collective == "reduce" and rank == root):
            found.append(total)
        elif collective == "broadcast":
            found.append(ins[root])
        elif collective == "allgather" or (collective == "gather" and rank == root):
            found.append(np.concatenate(ins))
        elif collective == "reduce_scatter":
            found.append(total[at[0][rank] : at[0][rank + 1]])
        elif collective == "scatter":
            found.append(ins[root][at[root][rank] : at[root][rank + 1]])
        elif collective == "alltoall":
            found.append(np.concatenate([ins[s][at[s][rank] : at[s][rank + 1]] for s in range(size)]))
        else:
            found.append(np.empty(0, np.int64))
    return found


def run(
    programs, collective: str, counts: list, root: int, in_place: bool, op=np.add, prove: bool = True, **how
) -> None:
    """Proves the programs, runs them, and compares with `expected`; `how`: options of execute."""
    size = len(programs)
    if prove:
        check_programs(programs)
    wanted = expected(collective, size, counts, root, op)
    buffers, windows = [], []
    for rank, spec in enumerate(programs):
        data, sent, received = vectors(collective, size, rank, counts[rank], root)
        assert spec.in_bytes == 8 * sum(sent) and spec.out_bytes == 8 * sum(received), (spec.in_bytes, spec.out_bytes)
        if spec.alias is None:
            assert not in_place or not (len(data) and len(wanted[rank])) or collective in ROOTED
            buffers.append(data)
            windows.append((0, data[:0], data[:0]))
            continue
        shift = spec.alias // 8
        whole = np.full(max(len(data), sum(received)), GARBAGE, np.int64)
        start = max(shift, 0)
        whole[start : start + len(data)] = data
        buffers.append(whole)
        mine = max(-shift, 0)
        windows.append((mine, whole[:mine].copy(), whole[mine + sum(received) :].copy()))
    for rank, (out, want) in enumerate(zip(execute(programs, buffers, op, **how), wanted, strict=True)):
        start, before, after = windows[rank]
        got = out[start : start + len(want)]
        assert np.array_equal(got, want), f"rank {rank}: {got[:12]} is not {want[:12]}"
        if programs[rank].alias is not None:  # what is not the result is left alone
            assert np.array_equal(out[:start], before) and np.array_equal(out[start + len(want) :], after)

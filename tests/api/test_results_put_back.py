"""Results written back to where operands lie, and messages that both ends copy: any mix of memory, sizes and calls is right.

Ranks have registered arrays, slices of larger ones, plain arrays; what lies beside a slice is on the same pages.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

import harness
import hrdma

POOL = 3 << 20
COUNTS = (1, 7, 1000, 5000, 20_000, 100_000, 262_144, 500_001)
OFFSETS = (0, 1, 64, 4096, 4096 + 24)  # elements
LENGTHS = (700_000, 1 << 20, 2_000_003, 3_000_000)  # bytes of messages


def memory(kind: str, pool: np.ndarray, offset: int, count: int, dtype: str) -> np.ndarray:
    if kind == "registered":
        return hrdma.empty(count, dtype)
    if kind == "plain":
        return np.empty(count, dtype)
    pool[:] = 0xA5
    return pool[offset : offset + count * np.dtype(dtype).itemsize].view(dtype)


def reduce_some(comm, rng: random.Random, pools: list[np.ndarray]) -> None:
    """One to three allreduces at a time, of one type and size."""
    dtype = rng.choice(("float32", "float64", "int32", "int8", "uint16", "float16"))
    size = np.dtype(dtype).itemsize
    count = min(rng.choice(COUNTS), POOL // size - 2 * max(OFFSETS))
    started = []
    for pool in pools[: rng.choice((1, 1, 3))]:
        kinds = [rng.choice(("registered", "plain", "slice")) for _ in range(comm.size)]
        offset = rng.choice(OFFSETS) * size
        x = memory(kinds[comm.rank], pool, offset, count, dtype)
        base = np.arange(count) % 7
        x[:] = base * comm.size + comm.rank
        op, how = (
            rng.choice(("sum", "max", "min")),
            {"priority": rng.choice((None, 0, 7)), "async_op": rng.random() < 0.5},
        )
        call = comm.allreduce(x, op=op, deterministic=rng.random() < 0.2, **how)
        beside = (pool, offset, offset + count * size) if kinds[comm.rank] == "slice" else None
        started.append((call if how["async_op"] else None, x, base, op, beside))
    n = comm.size
    for call, x, base, op, beside in started:
        if call is not None:
            call.wait(30)
        wanted = {"sum": base * n * n + n * (n - 1) // 2, "max": base * n + n - 1, "min": base * n}[op]
        assert np.array_equal(x, wanted.astype(x.dtype)), (x.dtype, count, op)
        if beside:
            pool, start, stop = beside
            assert (pool[:start] == 0xA5).all() and (pool[stop:] == 0xA5).all()


def send_one(comm, rng: random.Random, pools: list[np.ndarray]) -> None:
    offset = rng.choice((0, 1, 64, 4095, 4096))
    length = min(rng.choice(LENGTHS), POOL - offset - 1)
    source, target = rng.sample(range(comm.size), 2)
    given = np.arange(length) % 251
    plain = {rank: rng.random() < 0.5 for rank in (source, target)}
    pool = np.empty(POOL, "uint8") if plain.get(comm.rank) else pools[comm.rank == target]
    if comm.rank == source:
        pool[offset : offset + length] = given
        comm.send(pool[offset : offset + length], target)
    elif comm.rank == target:
        pool[:] = 0x5A
        comm.recv(pool[offset : offset + length], source)
        assert (pool[offset : offset + length] == given).all()
        assert (pool[:offset] == 0x5A).all() and (pool[offset + length :] == 0x5A).all()


def any_mix(comm, rounds: int) -> dict[str, int]:
    rng = random.Random(comm.size)  # the same on all ranks
    pools = [hrdma.empty(POOL, "uint8") for _ in range(3)]
    for _ in range(rounds):
        reduce_some(comm, rng, pools)
        if rng.random() < 0.3:
            send_one(comm, rng, pools)
    return comm.stats()["counters"]


@pytest.mark.parametrize("ranks", (2, 3, 5))
def test_any_mix_of_memory_is_right(ranks):
    found = harness.ranks(any_mix, ranks, env={"HRDMA_TRANSPORT": "shm"}, rounds=80)
    assert all(counters["transfers_returned"] for counters in found)
    if ranks == 2:  # both say it of the same messages
        assert found[0]["transfers_shared"] == found[1]["transfers_shared"]


def test_without_shared_memory_nothing_is_put_back():
    for counters in harness.ranks(any_mix, 2, env={"HRDMA_TRANSPORT": "tcp"}, rounds=10):
        assert counters["transfers_returned"] == counters["transfers_shared"] == 0

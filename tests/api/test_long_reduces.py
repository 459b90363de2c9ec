"""Long reduces on shared memory: every rank sums a share, and puts it where the root's operand lies, if that can be.

Two ranks do so only where both say that they have registered memory and wait for the end of the call. Whatever they have and
do, they must always choose alike, and the result must be right.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

import harness
import hrdma
from hrdma import calibration
from hrdma.topo.cost import DEFAULT_COST

# bytes, from below to above those which this is about
LENGTHS = (65_536, 98_304, 98_308, 131_072, 262_148, 1 << 20, 5 << 20)
SHM = {"HRDMA_TRANSPORT": "shm"}


def filled(x: np.ndarray, rank: int, round: int) -> np.ndarray:
    x[:] = np.arange(x.size) % 50 + 100 * rank + round % 7
    return x


def summed(count: int, round: int, size: int) -> np.ndarray:
    return (size * (np.arange(count) % 50 + round % 7) + 100 * sum(range(size))).astype("float32")


def reduced(comm, kinds: str, nbytes: int, calls: int, root: int = 0) -> int:
    """So many calls that wait; how many results this rank has put back."""
    count = nbytes // 4
    x = hrdma.empty(count) if kinds[comm.rank] == "r" else np.empty(count, "float32")
    before = comm.stats()["counters"]["transfers_returned"]
    for i in range(calls):
        comm.reduce(filled(x, comm.rank, i), root=root)
        expected = summed(count, i, comm.size) if comm.rank == root else filled(x.copy(), comm.rank, i)
        assert np.array_equal(x, expected)
    return comm.stats()["counters"]["transfers_returned"] - before


@pytest.mark.parametrize("root", (0, 1))
@pytest.mark.parametrize("nbytes", (131_072, 5 << 20))
def test_registered_arrays_get_their_results_put_back(root, nbytes):
    found = harness.ranks(reduced, 2, env=SHM, kinds="rr", nbytes=nbytes, calls=10, root=root)
    assert found[1 - root] >= 10 and found[root] == 0


@pytest.mark.parametrize("ranks", (3, 4))
def test_every_rank_puts_its_share_back(ranks):
    found = harness.ranks(reduced, ranks, env=SHM, kinds="r" * ranks, nbytes=1 << 20, calls=5, root=1)
    assert found[1] == 0 and all(count >= 5 for rank, count in enumerate(found) if rank != 1)


@pytest.mark.parametrize("kinds", ("pp", "rp", "pr"))
def test_two_ranks_of_which_one_has_no_registered_array_ask_in_one_call_of_65(kinds):
    """That one call may put results back as well; those between it and the next do not."""
    found = harness.ranks(reduced, 2, env=SHM, kinds=kinds, nbytes=131_072, calls=66)
    assert max(found) <= 2


@pytest.mark.parametrize("env", ({"HRDMA_TRANSPORT": "tcp"}, SHM))
def test_others_are_as_they_were(env):
    nbytes = 131_072 if env != SHM else 98_304
    assert harness.ranks(reduced, 2, env=env, kinds="rr", nbytes=nbytes, calls=5) == [0, 0]


def change(comm) -> list[int]:
    """From registered arrays to plain ones, and back: that is seen when 64 calls have passed."""
    return [reduced(comm, kinds, 131_072, calls) for kinds, calls in (("rr", 5), ("rp", 30), ("rr", 64))]


def test_a_change_of_memory_is_followed():
    found = harness.ranks(change, 2, env=SHM)
    assert found[0] == [0, 0, 0]
    assert found[1][0] == 5 and found[1][1] <= 1 and found[1][2] >= 28


def alternating(comm, lengths: tuple[int, ...], calls: int) -> None:
    """Registered arrays of these lengths in turns with plain ones of 1 MiB: what is said of some must not change what is counted."""
    arrays = [hrdma.empty(nbytes // 4) for nbytes in lengths]
    arrays.insert(1, np.empty(1 << 18, "float32"))
    for i in range(calls):
        x = filled(arrays[i % len(arrays)], comm.rank, i)
        comm.reduce(x, timeout=20)
        assert comm.rank or np.array_equal(x, summed(x.size, i, 2)), i


@pytest.mark.parametrize("lengths", ((98_304,), (131_072,), (139_264, 221_184), (98_304, 1 << 21)))
@pytest.mark.parametrize("beta", (2e-11, 1.2e-10))
def test_lengths_that_are_not_shared_after_all_change_nothing(lengths, beta, tmp_path):
    """By these costs `direct` is chosen for some of what could be shared: there only one rank sends anything."""
    cost = replace(DEFAULT_COST["shm"], alpha=1.5e-6, beta=beta)
    calibration.save(str(tmp_path), {"shm": cost, "tcp": DEFAULT_COST["tcp"]})
    harness.ranks(alternating, 2, env=SHM | {"HRDMA_CACHE_DIR": str(tmp_path)}, lengths=lengths, calls=220)


def averaged(comm) -> None:
    x = hrdma.empty(1 << 18)
    for deterministic in (False, True):
        x[:] = comm.rank + 1
        comm.reduce(x, root=1, op="avg", deterministic=deterministic)
        assert comm.rank != 1 or (x == (comm.size + 1) / 2).all()


@pytest.mark.parametrize("ranks", (2, 3))
def test_averages(ranks):
    harness.ranks(averaged, ranks, env=SHM)


def any_order(comm, rounds: int, seed: int) -> None:
    """The same calls on all ranks, each with memory of its own kind, waited for at once, later or together."""
    both, own = random.Random(seed), random.Random(seed * 9 + comm.rank)
    waiting: list[tuple] = []
    for i in range(rounds):
        count, root = both.choice(LENGTHS) // 4, both.randrange(comm.size)
        x = hrdma.empty(count + 1024) if own.random() < 0.8 else np.empty(count + 1024, "float32")
        start = 0 if own.random() < 0.8 else own.randrange(1024)
        x = filled(x[start : start + count], comm.rank, i)
        out = np.empty(count, "float32") if comm.rank == root and own.random() < 0.2 else None
        asynchronous = own.random() < 0.2
        call = comm.reduce(x, root, out=out, async_op=asynchronous, deterministic=both.random() < 0.2)
        if comm.rank == root:
            expected = x if out is None else out
            waiting.append((call if asynchronous else None, expected, i))
        elif asynchronous:
            waiting.append((call, None, i))
        if both.random() < 0.2:
            comm.barrier()
        if own.random() < 0.5:
            check(waiting, comm.size)
    check(waiting, comm.size)


def check(waiting: list[tuple], size: int) -> None:
    for request, result, i in waiting:
        if request is not None:
            request.wait(30)
        assert result is None or np.array_equal(result, summed(result.size, i, size)), i
    waiting.clear()


@pytest.mark.parametrize("seed", (1, 2))
@pytest.mark.parametrize("ranks", (2, 3))
def test_any_order_of_calls_is_right(ranks, seed):
    harness.ranks(any_order, ranks, env=SHM, rounds=150, seed=seed)

"""Collectives of plain arrays on ranks that share cores: copied to where peers map them, and back, where that is faster."""

from __future__ import annotations

import functools
import os
import random

import numpy as np
import pytest

import harness
import hrdma

KIB = 1024


def count_of(comm) -> int:
    return comm.stats()["counters"]["runs_aside"]


def every_collective(comm, nbytes: int, asynchronous: bool, registered: bool) -> dict[str, int]:
    """All of them on vectors of so many bytes, twice; how many runs worked on copies."""
    size, rank, block = comm.size, comm.rank, nbytes // 4 // comm.size
    count = block * size

    def new(elements: int) -> np.ndarray:
        return hrdma.empty(elements, "int32") if registered else np.empty(elements, "int32")

    base = np.arange(count, dtype="int32") % 1000
    total = base * size + size * (size - 1) // 2
    owner = np.repeat(np.arange(size, dtype="int32"), block)
    mine = slice(rank * block, (rank + 1) * block)
    found = {}
    x, other, part = new(count), new(count), new(block)

    def counted(name: str, start) -> None:
        x[:] = base + rank
        other[:], part[:] = -1, -1
        before = count_of(comm)
        result = start(async_op=asynchronous)
        if asynchronous:
            result.wait(30)
        found[name] = count_of(comm) - before

    for _ in range(2):
        counted("allreduce", functools.partial(comm.allreduce, x))
        assert (x == total).all()
        counted("allreduce out", functools.partial(comm.allreduce, x, out=other))
        assert (x == base + rank).all() and (other == total).all()
        counted("reduce", functools.partial(comm.reduce, x, 1))
        assert (x == (total if rank == 1 else base + rank)).all()
        counted("reduce_scatter", functools.partial(comm.reduce_scatter, x, out=part))
        assert (x == base + rank).all() and (part == total[mine]).all()
        counted("reduce_scatter in place", functools.partial(comm.reduce_scatter, x, out=x[mine]))
        assert (x[mine] == total[mine]).all()
        assert (np.delete(x, mine) == np.delete(base + rank, mine)).all()
        counted("allgather", functools.partial(comm.allgather, x[mine], out=other))
        assert (other == base + owner).all() and (x == base + rank).all()
        counted("allgather in place", functools.partial(comm.allgather, x[mine], out=x))
        assert (x == base + owner).all()
        counted("alltoall", functools.partial(comm.alltoall, x, out=other))
        assert (other == np.tile(base[mine], size) + owner).all() and (x == base + rank).all()
        # of the root's nothing is written
        given = np.frombuffer(total.tobytes(), "int32") if rank == 0 and not registered else x
        counted("broadcast", functools.partial(comm.broadcast, given, 0))
        assert (given == (base if registered else total)).all()
    return found


def on_two_cores(rank: int, **how) -> dict[str, int]:
    """However many there are: three ranks share them."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    with hrdma.init() as comm:
        return every_collective(comm, **how)


@pytest.mark.parametrize("asynchronous", (False, True))
@pytest.mark.parametrize("ranks", (3, 5))
def test_results_are_right_and_copies_counted(ranks: int, asynchronous: bool) -> None:
    # of a vector; None: it depends on the algorithm, which depends on what messages cost here
    for kib, vectors, blocks in ((12, 0, 0), (36, 1, None), (30 * ranks, 1, None), (40 * ranks, 1, 1), (2048, 1, 1)):
        nbytes = (kib * KIB + 4 * ranks - 1) // (4 * ranks) * (4 * ranks)
        how = {"nbytes": nbytes, "asynchronous": asynchronous, "registered": False}
        jobs = harness.ranks(on_two_cores, ranks, init=False, env={"HRDMA_TRANSPORT": "shm"}, **how)
        for rank, found in enumerate(jobs):
            for name, runs in found.items():
                wanted = (
                    blocks if name.startswith(("allreduce out", "allgather", "reduce_scatter", "alltoall")) else vectors
                )
                if name not in ("broadcast", "reduce") or rank == 0:  # not all others send something
                    assert runs == wanted or wanted is None, (name, rank, kib)


@pytest.mark.parametrize("registered, transport", ((True, "shm"), (False, "tcp")))
def test_what_peers_map_or_cannot_map_is_not_copied(registered: bool, transport: str) -> None:
    how = {"nbytes": 393216, "asynchronous": False, "registered": registered}
    for found in harness.ranks(on_two_cores, 3, init=False, env={"HRDMA_TRANSPORT": transport}, **how):
        assert not any(found.values()), found


def in_slices(rank: int, nbytes: int, asynchronous: bool, registered: tuple[bool, ...]) -> None:
    """Long vectors: from the second call of such a length on, if all ranks had them in plain memory and waited."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    with hrdma.init() as comm:
        size, count = comm.size, nbytes // 4
        arrays = {memory: new((2, count), "float32") for memory, new in ((False, np.empty), (True, hrdma.empty))}
        x, other = arrays[registered[rank]]
        base = (np.arange(count) % 8191).astype("float32") * np.float32(0.1)
        own, total = base + np.float32(rank), base.copy()
        for another in range(1, size):
            total += base + np.float32(another)

        def counted(start) -> int:
            before = count_of(comm)
            result = start(async_op=asynchronous)
            if asynchronous:
                result.wait(60)
            return count_of(comm) - before

        comm._plan_override = ("direct", 1)  # here it would depend on what messages cost
        sliced = not asynchronous and not any(registered)
        for call in range(3):
            x[:], other[:] = own, -1
            assert counted(functools.partial(comm.allreduce, x, deterministic=True)) == (sliced and call > 0)
            assert np.array_equal(x, total)
            x[:] = own
            assert counted(functools.partial(comm.allreduce, x, "max", out=other)) == sliced
            assert np.array_equal(x, own) and np.array_equal(other, base + np.float32(size - 1))
        if not any(registered):  # who has only the result in plain memory has nothing to copy
            for call in range(2):
                arrays[True][0][:] = own
                runs = counted(functools.partial(comm.allreduce, arrays[True][0], "max", out=other))
                assert runs == (sliced and call == 0)  # goes on as was said of the last one
                assert np.array_equal(other, base + np.float32(size - 1))
            x[:] = own
            for _ in range(2):  # one rank does not wait: nobody knows of all the others that they do
                if rank == 1:
                    comm.allreduce(x, "max", async_op=True).wait(60)
                else:
                    assert not counted(functools.partial(comm.allreduce, x, "max"))
            x[:] = own
            assert counted(functools.partial(comm.allreduce, x, "max")) == 0
            x[:] = own
            assert counted(functools.partial(comm.allreduce, x.view("int32"), "max")) == sliced  # another type
            x[:] = own
            with comm.dup() as another:  # knows nothing yet
                assert counted(functools.partial(another.allreduce, x, "max")) == 0
            x[:] = own
        if sliced:  # one rank has it elsewhere: what is under way goes on as all had said, and then they all know
            x = arrays[rank == size - 1][0]
            for slices in (1, 0, 0):
                x[:] = own
                assert counted(functools.partial(comm.allreduce, x, deterministic=True)) == slices
                assert np.array_equal(x, total)
            x = arrays[False][0]
            x[:] = own
        comm._plan_override = None
        for call in range(3):
            root = call % size
            assert counted(functools.partial(comm.reduce, x, root, "min")) == (sliced and call > 0)
            assert np.array_equal(x, base if rank == root else own)
            x[:] = own


@pytest.mark.parametrize("asynchronous", (False, True))
@pytest.mark.parametrize("nbytes", (4 << 20, (13 << 20) + 12))
@pytest.mark.parametrize("registered", ((False,) * 3, (False,) * 5, (True, False, True)))
def test_long_vectors_go_in_slices_where_nobody_can_map_them(
    registered: tuple[bool, ...], nbytes: int, asynchronous: bool
) -> None:
    how = {"nbytes": nbytes, "asynchronous": asynchronous, "registered": registered}
    harness.ranks(in_slices, len(registered), init=False, env={"HRDMA_TRANSPORT": "shm"}, **how)


def at_random(rank: int, seed: int) -> int:
    """What all ranks call in common is drawn alike, where each has its arrays and whether it waits is not. How many went in slices."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    together, alone = random.Random(seed), random.Random(1000 * seed + rank)
    with hrdma.init() as comm, comm.dup() as other:
        arrays = [(np.empty(9 << 20, "uint8"), hrdma.empty(9 << 20, "uint8")) for _ in range(2)]
        strange, sliced = 0.0, 0
        for call in range(48):
            if call % 12 == 0:
                strange = together.choice((0.0, 0.1, 0.5))
            on, dtype = together.choice((comm, other)), together.choice(("float32", "int32", "float16", "int8"))
            nbytes = together.choice((4 << 20, 8 << 20, together.randrange(4 << 20, 9 << 20) // 8 * 8))
            x, out = (pair[alone.random() < strange][:nbytes].view(dtype) for pair in arrays)
            base = (np.arange(len(x), dtype="int32") % 37 + call % 3).astype(dtype)
            x[:] = base + np.dtype(dtype).type(rank)
            which, root = together.randrange(3), call % comm.size
            on._plan_override = ("direct", 1) if which else None
            start, result = (
                (functools.partial(on.reduce, x, root, "max"), x if rank == root else None),
                (functools.partial(on.allreduce, x, "max"), x),
                (functools.partial(on.allreduce, x, "max", out=out), out),
            )[which]
            before = count_of(comm)
            if alone.random() < strange:
                start(async_op=True).wait(60)
            else:
                start()
            sliced += count_of(comm) - before
            assert result is None or np.array_equal(result, base + np.dtype(dtype).type(comm.size - 1)), call
        return sliced


@pytest.mark.parametrize("seed", range(4))
def test_ranks_agree_whatever_each_of_them_has(seed: int) -> None:
    found = harness.ranks(at_random, 3 + seed % 2, init=False, env={"HRDMA_TRANSPORT": "shm"}, seed=seed)
    assert len(set(found)) == 1 and found[0] > 0


def each_by_its_own(rank: int, seed: int) -> None:
    """Vectors of one slice: who has plain memory copies, whatever others have and whether they wait; results are the same."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    together, alone = random.Random(seed), random.Random(1000 * seed + rank)
    with hrdma.init() as comm:
        most = 1536 * KIB
        arrays = [(np.empty(most, "uint8"), hrdma.empty(most, "uint8")) for _ in range(2)]
        comm.allreduce(np.zeros(16 * KIB, "float32"))  # after this it is known that ranks share cores
        for call in range(60):
            nbytes = together.choice((32 * KIB, 32 * KIB - 8, most - 8, most, together.randrange(8, most // 8) * 8))
            dtype = together.choice(("float32", "float64", "float16", "int8"))
            registered = alone.random() < 0.4
            x, out = (
                pair[where][:nbytes].view(dtype) for pair, where in zip(arrays, (registered, alone.random() < 0.4))
            )
            base = (np.arange(len(x), dtype="int32") % 37 + call % 3).astype(dtype)
            x[:] = base + np.dtype(dtype).type(rank)
            sums, waits, apart = together.random() < 0.5, alone.random() < 0.6, alone.random() < 0.5
            if not apart:
                out = x
            before = count_of(comm)
            more = {"deterministic": True} if call % 5 == 0 else {}
            result = comm.allreduce(x, "sum" if sums else "max", out=out if apart else None, async_op=not waits, **more)
            if not waits:
                result.wait(60)
            if 32 * KIB <= nbytes < most and not (registered and apart):
                assert count_of(comm) - before == (not registered), (call, nbytes)
            highest = comm.size - 1
            expected = (
                base * np.dtype(dtype).type(comm.size) + np.dtype(dtype).type(highest * comm.size // 2)
                if sums
                else base + np.dtype(dtype).type(highest)
            )
            assert np.array_equal(out, expected), (call, nbytes, dtype)
            assert out is x or np.array_equal(x, base + np.dtype(dtype).type(rank))


@pytest.mark.parametrize("seed", range(4))
def test_one_slice_is_copied_by_whom_it_helps(seed: int) -> None:
    harness.ranks(each_by_its_own, 3 + seed % 2, init=False, env={"HRDMA_TRANSPORT": "shm"}, seed=seed)

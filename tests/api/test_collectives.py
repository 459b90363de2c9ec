"""Every collective on several ranks against numpy: types, operators, sizes, places, transports, counts, threads."""

import itertools
import threading

import numpy as np
import pytest

import harness
import hrdma
from hrdma.types import DTYPES, OPS

SIZES = (0, 1, 5, 1000, 100003)
NUMPY_OPS = {
    "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum, "avg": np.add, "band": np.bitwise_and,
    "bor": np.bitwise_or, "bxor": np.bitwise_xor,
}  # fmt: skip


def numpy_dtype(name):
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def values(count, rank, size, dtype, op="sum"):
    """value[i] = i * size + rank, folded where the type or the operator cannot hold it exactly."""
    whole = np.arange(count, dtype="int64") * size + rank
    if op == "prod":
        whole = whole % 3 + 1
    elif dtype.itemsize <= 2 and dtype.kind not in "iu":
        whole = whole % 31
    return whole.astype(dtype)


def combined(op, arrays):
    """Rank order, left to right; 16-bit types in 32 bits, rounded once."""
    dtype = arrays[0].dtype
    wide = np.dtype("float32") if dtype.itemsize == 2 and dtype.kind not in "iu" else dtype
    total = arrays[0].astype(wide)
    for array in arrays[1:]:
        with np.errstate(over="ignore"):
            total = NUMPY_OPS[op](total, array.astype(wide), dtype=wide)
    if op == "avg" and dtype.kind in "iu":
        return toward_zero(total, len(arrays))
    if op == "avg":
        total = total * wide.type(1 / len(arrays))
    return total.astype(dtype)


def toward_zero(total, n):
    """Python's integers have no bounds; numpy's division rounds down."""
    return np.array([abs(x) // n * (1 if x > 0 else -1) for x in total.tolist()], total.dtype)


def same(found, wanted, exact, what):
    found, wanted = np.asarray(found).reshape(-1), wanted.reshape(-1)
    assert found.dtype == wanted.dtype and found.size == wanted.size, what
    bits = f"u{found.itemsize}"
    if np.array_equal(found.view(bits), wanted.view(bits)):
        return
    if exact or wanted.dtype.kind in "iu":
        bad = np.flatnonzero(found.view(bits) != wanted.view(bits))
    else:
        tolerance = 2.0**-6 if found.itemsize == 2 else 1e-6
        a, b = found.astype("float64"), wanted.astype("float64")
        bad = np.flatnonzero(~(np.abs(a - b) <= tolerance * np.abs(b)))
    assert not bad.size, (
        f"{what}: {bad.size} of {found.size} wrong, first [{bad[0]}] {found[bad[0]]} not {wanted[bad[0]]}"
    )


def places(x):
    """The same contents in memory of several kinds."""
    registered = hrdma.empty(x.shape, x.dtype)
    registered[...] = x
    return [registered, x.copy()]


def reductions(comm, dtypes, ops, sizes):
    n, me = comm.size, comm.rank
    for name, op, count in itertools.product(dtypes, ops, sizes):
        dtype = numpy_dtype(name)
        if op in ("band", "bor", "bxor") and dtype.kind not in "iu":
            continue
        arrays = [values(count, r, n, dtype, op) for r in range(n)]
        wanted = combined(op, arrays)
        for exact in (False, True):
            for x in places(arrays[me]):
                what = f"{op} {name} {count} deterministic={exact} rank {me} of {n}"
                how = {"deterministic": exact}
                out = hrdma.zeros(count, dtype)
                same(comm.allreduce(x, op, out=out, **how), wanted, exact, f"allreduce out of place {what}")
                same(x, arrays[me], True, f"input of allreduce {what}")
                root = count % n
                got = comm.reduce(x, root, op, out=out, **how)
                if me == root:
                    same(got, wanted, exact, f"reduce out of place {what}")
                else:
                    assert got is None
                same(x, arrays[me], True, f"input of reduce {what}")
                counts = [count // n + (r < count % n) for r in range(n)]
                mine = slice(sum(counts[:me]), sum(counts[: me + 1]))
                got = comm.reduce_scatter(x, op, counts=counts, **how)
                same(got, wanted[mine], exact, f"reduce_scatter {what}")
                same(x, arrays[me], True, f"input of reduce_scatter {what}")
                comm.reduce_scatter(x, op, out=x[mine], counts=counts, **how)
                same(x[mine], wanted[mine], exact, f"reduce_scatter in place {what}")
                x[...] = arrays[me]
                got = comm.reduce(x, root, op, **how)
                same(x, wanted if me == root else arrays[me], exact or me != root, f"reduce in place {what}")
                x[...] = arrays[me]
                same(comm.allreduce(x, op, **how), wanted, exact, f"allreduce in place {what}")


def movement(comm, dtypes, sizes):
    n, me = comm.size, comm.rank
    for name, count in itertools.product(dtypes, sizes):
        dtype = numpy_dtype(name)
        arrays = [values(count, r, n, dtype) for r in range(n)]
        root = (count + 1) % n
        what = f"{name} {count} rank {me} of {n}"
        joined = np.concatenate(arrays)
        for x in places(arrays[me]):
            got = x if me == root else np.zeros_like(x)
            assert comm.broadcast(got, root) is got
            same(got, arrays[root], True, f"broadcast {what}")
            same(comm.allgather(x), joined, True, f"allgather {what}")
            out = hrdma.zeros(n * count, dtype)
            out[me * count : (me + 1) * count] = x
            comm.allgather(out[me * count : (me + 1) * count], out)
            same(out, joined, True, f"allgather in place {what}")
            got = comm.gather(x, root)
            if me == root:
                same(got, joined, True, f"gather {what}")
            else:
                assert got is None
            got = comm.scatter(joined if me == root else None, root, out=np.zeros(count, dtype))
            same(got, arrays[me], True, f"scatter {what}")
            parts = np.concatenate([arrays[me] + dtype.type(r) for r in range(n)])
            same(comm.alltoall(parts), np.concatenate([a + dtype.type(me) for a in arrays]), True, f"alltoall {what}")
            swapped = parts.copy()
            comm.alltoall(swapped, swapped)
            same(swapped, np.concatenate([a + dtype.type(me) for a in arrays]), True, f"alltoall in place {what}")
        # uneven shares, one of them empty
        counts = [(count * (r % 3)) // 2 for r in range(n)]
        uneven = [values(c, r, n, dtype) for r, c in enumerate(counts)]
        joined = np.concatenate(uneven)
        same(comm.allgather(uneven[me], counts=counts), joined, True, f"allgather uneven {what}")
        got = comm.gather(uneven[me], root, counts=counts)
        if me == root:
            same(got, joined, True, f"gather uneven {what}")
        got = comm.scatter(joined, root, out=np.zeros(counts[me], dtype), counts=counts)
        same(got, uneven[me], True, f"scatter uneven {what}")
        table = [[(count * ((3 * s + d) % 4)) // 3 for d in range(n)] for s in range(n)]
        source = np.concatenate([values(table[me][d], me, n, dtype) + dtype.type(d) for d in range(n)])
        wanted = np.concatenate([values(table[s][me], s, n, dtype) + dtype.type(me) for s in range(n)])
        got = comm.alltoall(source, counts=(table[me], [table[s][me] for s in range(n)]))
        same(got, wanted, True, f"alltoall uneven {what}")


@pytest.mark.parametrize("transport", harness.transports())
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_reductions(n, transport):
    dtypes = [name for name in DTYPES if name in ("int32", "uint8", "float32", "bfloat16", "float64")]
    harness.ranks(
        reductions, n, env={"HRDMA_TRANSPORT": transport}, timeout=120, dtypes=dtypes, ops=["sum", "max"], sizes=SIZES
    )


@pytest.mark.parametrize("transport", harness.transports())
def test_every_type_and_operator(transport):
    harness.ranks(
        reductions,
        3,
        env={"HRDMA_TRANSPORT": transport},
        timeout=120,
        dtypes=list(DTYPES),
        ops=list(OPS),
        sizes=[7, 1000],
    )


@pytest.mark.parametrize("transport", harness.transports())
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_movement(n, transport):
    harness.ranks(
        movement,
        n,
        env={"HRDMA_TRANSPORT": transport},
        timeout=120,
        dtypes=["int8", "float32", "bfloat16", "int64"],
        sizes=SIZES,
    )


def everything(comm):
    reductions(comm, DTYPES, ["sum"], [0, 7, 1000])
    reductions(comm, ["float32"], ["max"], [8193, 100_003])
    movement(comm, DTYPES, [7])
    movement(comm, ["int64"], [0, 8193, 100_003])
    comm.barrier()


def test_everything_on_a_device():
    """Every collective, type and class of size (none, inline, copied, written by the device): also run in guests."""
    harness.ranks(everything, 2, env={"HRDMA_TRANSPORT": "verbs"}, timeout=120)


def test_the_comparison_can_fail():
    """A wrong offset, a wrong rank and a lost contribution are seen."""
    x = values(100, 0, 3, np.dtype("float32"))
    for wrong in (np.roll(x, 1), values(100, 1, 3, np.dtype("float32")), x - x):
        with pytest.raises(AssertionError, match="wrong, first"):
            same(wrong, x, False, "x")


def large(comm, megabytes):
    n, me = comm.size, comm.rank
    count = megabytes * (1 << 20) // 4
    dtype = np.dtype("float32")
    base = (np.arange(count, dtype="int64") % 4099).astype(dtype)
    for make in (hrdma.empty, np.empty):
        x = make(count, "float32")
        x[:] = base + me
        comm.allreduce(x)
        assert (x == base * n + n * (n - 1) // 2).all()
        y = comm.allgather(x[: count // n])
        assert all((part == x[: count // n]).all() for part in y.reshape(n, -1))
        if me == 0:
            x[:] = base
        comm.broadcast(x)
        assert (x == base).all()


@pytest.mark.parametrize("transport", harness.transports())
def test_large(transport):
    harness.ranks(large, 3, env={"HRDMA_TRANSPORT": transport}, megabytes=24)


def in_threads(comm, rounds):
    """Each thread has a duplicate; collectives and messages of different threads do not meet."""
    n, me = comm.size, comm.rank
    failures = []

    def body(own, seed):
        try:
            for i in range(rounds):
                x = np.full(100 + 50 * seed, me + seed + i, "int64")
                own.allreduce(x)
                assert (x == n * (seed + i) + n * (n - 1) // 2).all()
                out = np.zeros(3, "int64")
                status = own.sendrecv(np.full(3, me * 1000 + seed), (me + 1) % n, out, (me - 1) % n, tag=7)
                assert status == ((me - 1) % n, 24) and (out == (me - 1) % n * 1000 + seed).all()
        except BaseException as error:
            failures.append(f"thread {seed}: {error!r}")

    own = [comm.dup() for _ in range(4)]
    threads = [threading.Thread(target=body, args=(child, seed)) for seed, child in enumerate(own)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.parametrize("transport", harness.transports())
def test_threads_with_communicators_of_their_own(transport):
    harness.ranks(in_threads, 3, env={"HRDMA_TRANSPORT": transport}, rounds=50)


def asynchronous(comm):
    import asyncio

    n, me = comm.size, comm.rank
    arrays = [hrdma.empty(1000 + i) for i in range(20)]
    for i, x in enumerate(arrays):
        x[:] = i + me
    requests = [comm.allreduce(x, async_op=True, priority=i % 8) for i, x in enumerate(arrays)]
    for i in reversed(range(20)):
        assert requests[i].wait() is arrays[i]
        assert (arrays[i] == n * i + n * (n - 1) // 2).all()

    async def body():
        x = np.full(5, float(me))
        gathered, total = await asyncio.gather(
            _result(comm.allgather(x, async_op=True)), _result(comm.allreduce(x.copy(), async_op=True))
        )
        await comm.barrier(async_op=True)
        return gathered.tolist(), total.tolist()

    gathered, total = asyncio.run(body())
    assert gathered == [float(r) for r in range(n) for _ in range(5)]
    assert total == [n * (n - 1) / 2] * 5


async def _result(request):
    return await request


@pytest.mark.parametrize("transport", harness.transports())
def test_asynchronous_collectives(transport):
    harness.ranks(asynchronous, 3, env={"HRDMA_TRANSPORT": transport})


def groups(comm):
    n, me = comm.size, comm.rank
    half = comm.split(me % 2, key=-me)
    assert half.members == tuple(r for r in reversed(range(n)) if r % 2 == me % 2)
    x = half.allreduce(np.array([me]))
    assert x[0] == sum(r for r in range(n) if r % 2 == me % 2)
    some = comm.split(None if me == 0 else 7)
    assert (some is None) == (me == 0)
    if some is not None:
        assert some.size == n - 1 and some.rank == me - 1
        assert some.allgather(np.array([me])).tolist() == list(range(1, n))
        inner = some.split(0, key=some.rank)
        assert inner.members == tuple(range(1, n))
    return [comm.id, half.id]


def test_split():
    ids = harness.ranks(groups, 5)
    assert len({world for world, _ in ids}) == 1
    assert ids[0][1] == ids[2][1] == ids[4][1] and ids[1][1] == ids[3][1] != ids[0][1]

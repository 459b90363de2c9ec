"""Registered memory as numpy arrays, and the reduction kernels by hand."""

import gc
import os

import numpy as np
import pytest

import harness
import hrdma
from hrdma import _core
from hrdma.cli.probe import siblings_may_read
from hrdma.types import DTYPES, OPS


def used():
    return hrdma.memory_stats()["bytes_used"]


@pytest.mark.parametrize("shape", [0, 1, 7, (3, 5), (0, 4), (), [2, 2], np.int64(3)])
@pytest.mark.parametrize("dtype", ["float32", "int8", np.float64, "complex128", "bool"])
def test_empty_makes_such_arrays(shape, dtype):
    x = hrdma.empty(shape, dtype)
    wanted = np.empty(shape, dtype)
    assert (x.shape, x.dtype) == (wanted.shape, wanted.dtype)
    assert x.flags.c_contiguous and x.flags.writeable
    assert x.ctypes.data % 64 == 0
    assert hrdma.is_registered(x)


def test_zeros_are_zero_in_used_memory():
    x = hrdma.empty(1000)
    x.fill(3)
    del x
    assert not hrdma.zeros(1000).any()


def test_memory_goes_back_with_the_last_view():
    gc.collect()
    before = used()
    x = hrdma.empty(1 << 16, "uint8")
    view = x[10:20]
    assert used() >= before + (1 << 16)
    del x
    view[:] = 5
    assert used() >= before + (1 << 16)
    del view
    assert used() == before


def test_other_memory_is_not_registered():
    assert not hrdma.is_registered(np.zeros(10))
    x = hrdma.empty(100, "uint8")
    assert hrdma.is_registered(x[3:50])
    assert hrdma.is_registered(memoryview(x))


def test_bfloat16_comes_from_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert hrdma.empty(4, "bfloat16").dtype == ml_dtypes.bfloat16


def test_bfloat16_without_ml_dtypes_names_the_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(TypeError, match=r"pip install hrdma\[bf16\]"):
        hrdma.empty(4, "bfloat16")


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "text"),
    [
        (-1, "float32", ValueError, "negative extent"),
        (3, "object", TypeError, "Python objects"),
        ("x", "float32", TypeError, "shape 'x': an integer or a tuple of integers"),
        ("3", "float32", TypeError, "shape '3'"),
        (2.7, "float32", TypeError, "shape 2.7: an integer"),
        ((2, 3.0), "float32", TypeError, r"shape \(2, 3.0\): an integer"),
        (3, "float31", TypeError, "float31"),
        ((1 << 62, 4), "float64", MemoryError, "more than this machine can address"),
        (1 << 50, "uint8", MemoryError, "cannot get 1125899906842624 bytes"),
    ],
)
def test_what_cannot_be_had_is_refused(shape, dtype, error, text):
    with pytest.raises(error, match=text):
        hrdma.empty(shape, dtype)


NUMPY_OPS = {
    "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum, "band": np.bitwise_and,
    "bor": np.bitwise_or, "bxor": np.bitwise_xor,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "bfloat16"])
@pytest.mark.parametrize("op", NUMPY_OPS)
def test_reduce_is_numpys(op, dtype):
    if op in ("band", "bor", "bxor") and dtype.startswith("float"):
        with pytest.raises(TypeError, match=f"op '{op}' is not defined for {dtype}"):
            _core.reduce(op, dtype, np.zeros(1, dtype), [np.zeros(1, dtype)])
        return
    x = (np.arange(37) % 11).astype(dtype)
    y = (np.arange(37) % 7 + 1).astype(dtype)
    out = np.empty_like(x)
    _core.reduce(op, dtype, out, [x, y])
    np.testing.assert_array_equal(out, NUMPY_OPS[op](x, y))


def test_reduce_avg_scales():
    out = np.empty(5, "float32")
    _core.reduce("avg", "float32", out, [np.full(5, 3, "float32"), np.full(5, 5, "float32")], 0.5)
    assert out.tolist() == [4.0] * 5


@pytest.mark.parametrize("dtype", [name for name in DTYPES if "int" in name])
def test_averages_of_integers_are_cut_toward_zero(dtype):
    """Also of sums that have wrapped, as those of numpy do: -128 - 1 is 127 in int8."""
    ends = np.iinfo(dtype)
    x = np.array([0, 1, 5, 7, ends.max, ends.min, ends.max, ends.min] * 9, dtype)
    y = np.array([0, 1, -8 if ends.min else 8, -1 if ends.min else 9, 1, -1 if ends.min else 1, 0, 0] * 9, dtype)
    for n in (2, 3, 100, 1000):
        out = np.empty_like(x)
        _core.reduce("avg", dtype, out, [x, y], 1 / n)
        with np.errstate(over="ignore"):
            total = (x + y).tolist()
        assert out.tolist() == [abs(value) // n * (1 if value > 0 else -1) for value in total]
    for scale in (0.0, -0.5, 1.5, float("nan")):
        with pytest.raises(ValueError, match="1/n for n from 1"):
            _core.reduce("avg", dtype, x, [x], scale)


def test_reduce_refuses():
    x = np.zeros(4, "float32")
    with pytest.raises(ValueError, match="unknown op 'sub': one of sum"):
        _core.reduce("sub", "float32", x, [x])
    with pytest.raises(TypeError, match="dtype 'complex64' cannot be reduced"):
        _core.reduce("sum", "complex64", x, [x])
    with pytest.raises(ValueError, match="source 1 has 8 bytes, dst 16"):
        _core.reduce("sum", "float32", x, [x, x[:2]])
    with pytest.raises(ValueError, match="65 sources"):
        _core.reduce("sum", "float32", x, [x] * 65)
    with pytest.raises(ValueError, match="read-only"):
        _core.reduce("sum", "float32", bytes(16), [x])


def test_dtypes_and_ops_have_the_order_of_the_core():
    """One element of each type in the core's numbering has the size that the name says."""
    sizes = [1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8]
    for name, size in zip(DTYPES, sizes):
        out = bytearray(size)
        _core.reduce("max", name, out, [bytes(size)])
        with pytest.raises(ValueError, match="bytes"):
            _core.reduce("max", name, out, [bytes(size), bytes(size + 1)])
    assert len(OPS) == 8


def long_and_plain(comm, crossing):
    """How 40 messages of numpy arrays of 4 MiB went: one after the other, or in alltoalls, where both send."""
    x = np.arange(8 << 20, dtype="uint8").reshape(2, -1)
    y = np.zeros_like(x)
    sent, came, other = x[1 - comm.rank], y[1 - comm.rank], 1 - comm.rank
    before = comm.stats()["counters"]
    for i in range(40):
        x[:, 0], came[0] = i, 255
        if crossing:
            comm.alltoall(x, y)
        elif comm.rank == 0:
            comm.send(sent, other)
        else:
            comm.recv(came, other)
        comm.barrier()
        if crossing or comm.rank == 1:
            assert came[0] == i and (came[1:] == x[comm.rank][1:]).all()
    after = comm.stats()["counters"]
    return [after[kind] - before[kind] for kind in ("transfers_pulled", "transfers_segments")]


@pytest.mark.parametrize("crossing", [False, True])
def test_a_long_plain_array_goes_the_way_that_is_faster(crossing):
    """Read by the kernel, or copied by both through the ring, where each has a core; each is tried, by both at once where both send."""
    found = harness.ranks(long_and_plain, 2, crossing=crossing, env={"HRDMA_TRANSPORT": "shm"})
    (other, asked), (read, relayed) = found if crossing else ([0, found[0][1]], [found[1][0], 0])
    assert read + asked == 40 and other + relayed == 40 * crossing
    if not siblings_may_read()[0]:
        assert read == 0
    elif len(os.sched_getaffinity(0)) < 2:
        assert read == 40
    else:
        assert read >= 8 and asked >= 8
        assert not crossing or abs(other - read) <= 2, "one chooses for both"


def short_and_plain(comm):
    """How 100 messages of numpy arrays of 64 KiB went, one after the other: unasked, read, in pieces."""
    x, y = np.arange(8192.0), np.zeros(8192)
    before = comm.stats()["counters"]
    for i in range(100):
        if comm.rank == 0:
            x[0] = i
            comm.send(x, 1)
        else:
            comm.recv(y, 0)
            assert y[0] == i and (y[1:] == x[1:]).all()
    comm.barrier()
    kinds = ("messages_eager", "transfers_pulled", "transfers_segments")
    after = comm.stats()["counters"]
    return [after[kind] - before[kind] for kind in kinds]


def test_a_short_plain_array_goes_the_way_that_is_faster():
    (unasked, _, pieces), (_, read, _) = harness.ranks(short_and_plain, 2, env={"HRDMA_TRANSPORT": "shm"})
    assert unasked < 20 and read + pieces == 100  # the barrier has messages of its own
    if len(os.sched_getaffinity(0)) > 1:
        assert bool(read) == bool(siblings_may_read()[0]) and pieces > 0, "each way was tried"

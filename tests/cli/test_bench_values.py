"""The checker of the benchmark: its expectations against plain Python, and that it notices what is wrong."""

from __future__ import annotations

import functools
import math
import operator

import numpy as np
import pytest

from hrdma.bench.cases import CASES, NONE, SHARE, Case, Situation, reductions
from hrdma.bench.sizes import counts, parse_size, show_size
from hrdma.bench.values import BLOCK, EXACT, PERIOD, Values, dtype_of
from hrdma.types import DTYPES

PLAIN = {
    "sum": sum,
    "avg": lambda values: sum(values) / len(values),
    "prod": math.prod,
    "min": min,
    "max": max,
    "band": lambda values: functools.reduce(operator.and_, values),
    "bor": lambda values: functools.reduce(operator.or_, values),
    "bxor": lambda values: functools.reduce(operator.xor, values),
}
KINDS = [(dtype, op) for dtype in DTYPES for op in reductions(dtype)]


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8", 8), ("64K", 65536), ("1.5m", 3 << 19), ("2GiB", 2 << 30), ("0", 0), ("7B", 7)]
)
def test_parse_size(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "-1", "1T", "K", "1e3", "8 8"])
def test_parse_size_refuses(text):
    with pytest.raises(ValueError, match="is not a size: bytes, or a number with K, M or G"):
        parse_size(text)


def test_show_size():
    assert [show_size(n) for n in (0, 1000, 1024, 3 << 19, 5 << 30)] == ["0 B", "1000 B", "1 KiB", "1.5 MiB", "5 GiB"]


@pytest.mark.parametrize(
    ("begin", "end", "factor", "itemsize", "shares", "expected"),
    [
        (8, 128, 4, 4, 1, [2, 8, 32]),
        (8, 100, 4, 4, 1, [2, 8, 25]),  # the end itself is the last
        (8, 8, 2, 8, 1, [1]),
        (0, 16, 4, 4, 1, [0, 1, 4]),  # what is not 0 has at least an element; each count once
        (8, 256, 4, 4, 3, [3, 6, 30, 63]),  # whole shares, leftovers cut off
        (1, 1, 2, 8, 5, [5]),
        (0, 0, 2, 4, 3, [0]),
    ],
)
def test_counts(begin, end, factor, itemsize, shares, expected):
    assert list(counts(begin, end, factor, itemsize, shares)) == expected


def test_counts_end():
    assert list(counts(0, 256 << 20, 2, 1))[-1] == 256 << 20
    for shares in range(1, 9):
        assert all(count % shares == 0 for count in counts(8, 1 << 20, 4, 4, shares))


# Expectations


@pytest.mark.parametrize("size", [1, 3, 31])
@pytest.mark.parametrize(("dtype", "op"), KINDS)
def test_reductions_are_those_of_plain_python(dtype, op, size):
    values = Values(dtype, size, op)
    parts = [values.of(rank, first=5).tolist() for rank in range(size)]
    found = values.reduced(first=5)
    assert found.dtype == dtype_of(dtype) and found.size == PERIOD
    for i in range(0, PERIOD, 50):
        exact = PLAIN["sum" if op == "avg" and dtype not in EXACT else op](
            [part[i] if op not in ("band", "bor", "bxor") else int(part[i]) for part in parts]
        )
        if dtype in EXACT:
            with np.errstate(over="ignore"):
                assert found[i] == np.float64(exact).astype(dtype_of(dtype))
            if op == "sum":
                assert float(found[i]) == exact  # no rounding, so the order of additions does not matter
        else:
            bits = dtype_of(dtype).itemsize * 8
            if op == "avg":
                wrapped = int(np.int64(exact).astype(dtype))
                assert found[i] == abs(wrapped) // size * (1 if wrapped > 0 else -1)
            else:
                assert (int(found[i]) - int(exact)) % (1 << bits) == 0  # integers wrap


@pytest.mark.parametrize("dtype", DTYPES)
def test_contributions_differ_by_rank_and_place(dtype):
    values = Values(dtype, 8)
    ranks = [values.of(rank).astype(np.float64) for rank in range(8)]
    for rank in range(1, 8):
        assert np.count_nonzero(ranks[rank] == ranks[0]) < PERIOD // 30
    for shift in (1, 2, 64, 4096, 65536, 1 << 20):
        assert np.count_nonzero(np.roll(ranks[0], shift % PERIOD) == ranks[0]) < PERIOD // 30
    assert min(ranks[0]) >= 1  # a buffer of zeros is wrong everywhere


@pytest.mark.parametrize("count", [0, 1, PERIOD, BLOCK - 1, BLOCK, 2 * BLOCK + 77])
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32", "float64"])
def test_fill_and_compare(dtype, count):
    values = Values(dtype, 4, "sum")
    buffer = np.zeros(count, dtype_of(dtype))
    values.fill(buffer, 2)
    assert values.count_wrong(buffer, values.of(2)) == 0
    for offset in (1, 100):
        assert values.count_wrong(buffer[offset:], values.of(2, first=offset)) == 0
    for at in {0, count // 2, count - 1} if count else ():
        spoilt = buffer.copy()
        spoilt.view(np.uint8)[at * spoilt.itemsize] ^= 1  # one bit
        assert values.count_wrong(spoilt, values.of(2)) == 1
    if count > PERIOD:
        assert values.count_wrong(buffer, values.of(1)) > 0.9 * count
        assert values.count_wrong(np.roll(buffer, 1), values.of(2)) > 0.9 * count
        assert values.count_wrong(np.zeros_like(buffer), values.of(2)) == count


@pytest.mark.parametrize("dtype", EXACT)
def test_averages_may_differ_in_the_last_place_only(dtype):
    values = Values(dtype, 3, "avg")
    good = values.reduced()
    near = good.copy()
    near.view(f"u{near.itemsize}")[:] += 1
    assert values.count_wrong(near, good) == 0
    near.view(f"u{near.itemsize}")[:] += 8
    assert values.count_wrong(near, good) == near.size
    nan = good.copy()
    nan[7] = np.nan
    assert values.count_wrong(nan, good) == 1 and Values(dtype, 3, "sum").count_wrong(nan, good) == 1


def sizes_of(case: Case) -> list[int]:
    return [2] if case.pair else [1, 2, 3, 5]


@pytest.mark.parametrize(
    ("case", "size"),
    [(case, size) for case in CASES.values() if case.moves for size in sizes_of(case)],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_element_of_a_result_has_one_expectation(case, size):
    values = Values("int64", size, "sum" if case.reduces else None)
    root, share = size - 1, 30
    count = share * size
    for rank in range(size):
        at = Situation(rank, size, root, count, share if case.shared else count)
        blocks = [(begin, end) for begin, end, _ in case.want(at, values)]
        covered = [place for begin, end in blocks for place in range(begin, end)]
        if case.out == NONE:
            length = count
        elif not case.has("out", rank, root):
            length = 0
        else:
            length = share if case.out == SHARE else count
        assert covered == list(range(length))

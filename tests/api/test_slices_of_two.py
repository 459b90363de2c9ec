"""Long allreduces of two ranks that have a core each: in slices, if peers cannot map their arrays."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

import harness
import hrdma

CORES = len(os.sched_getaffinity(0))


def watched(comm) -> list[str]:
    """What is planned from now on."""
    found: list[str] = []
    plan = comm._plan

    def seen(*shape):
        program = plan(*shape)
        found.append(program.explanation)
        return program

    comm._plan = seen
    return found


def new(registered: bool, nbytes: int) -> np.ndarray:
    return hrdma.empty(nbytes, "uint8") if registered else np.empty(nbytes, "uint8")


def in_slices(comm, kinds: str, nbytes: int, asynchronous: bool) -> list[bool]:
    """Several calls; of each plan whether it is one of slices."""
    plans = watched(comm)
    x, out = (new(kinds[comm.rank] == "r", nbytes).view("float32") for _ in range(2))
    base = (np.arange(len(x)) % 4093).astype("float32")
    for call in range(4):
        x[:] = base * (comm.rank + 1) + call
        for result in (out, x):
            request = comm.allreduce(x, out=None if result is x else result, async_op=asynchronous)
            if asynchronous:
                request.wait(30)
            assert np.array_equal(result, base * 3 + 2 * call)
    return ["slices" in plan for plan in plans]


@pytest.mark.parametrize("asynchronous", (False, True))
@pytest.mark.parametrize("nbytes", (768 << 10, (5 << 20) + 8))
@pytest.mark.parametrize("kinds", ("pp", "pr", "rr"))
def test_they_are_cut_where_both_ranks_have_plain_arrays_and_wait(kinds: str, nbytes: int, asynchronous: bool) -> None:
    env = {"HRDMA_TRANSPORT": "shm"}
    found = harness.ranks(in_slices, 2, env=env, kinds=kinds, nbytes=nbytes, asynchronous=asynchronous)
    cut = kinds == "pp" and not asynchronous and CORES > 1
    # the first call is not in place; what was said of it holds for the next, which is
    assert found == [[False, True, True] if cut else [False, False]] * 2


@pytest.mark.parametrize("asynchronous", (False, True))
@pytest.mark.parametrize("nbytes", (768 << 10, (5 << 20) + 8, 33 << 20))
def test_over_tcp_it_does_not_matter_what_they_have(nbytes: int, asynchronous: bool) -> None:
    env = {"HRDMA_TRANSPORT": "tcp"}
    found = harness.ranks(in_slices, 2, env=env, kinds="pr", nbytes=nbytes, asynchronous=asynchronous)
    assert found == [[CORES > 1 and 2 << 20 < nbytes <= 32 << 20] * 2] * 2


def at_random(comm, seed: int) -> int:
    """What both call is drawn alike, where each has its arrays and whether it waits is not. How many plans were of slices."""
    together, alone = random.Random(seed), random.Random(1000 * seed + comm.rank)
    arrays = [(new(False, 6 << 20), new(True, 6 << 20)) for _ in range(2)]
    with comm.dup() as other:
        plans = [watched(comm), watched(other)]
        strange = 0.0
        for call in range(60):
            if call % 12 == 0:
                strange = together.choice((0.0, 0.1, 0.5))
            on, dtype = together.choice((comm, other)), together.choice(("float32", "int32", "float16", "int8"))
            nbytes = together.choice((1 << 20, 4 << 20, together.randrange(700 << 10, 6 << 20) // 8 * 8))
            x, out = (pair[alone.random() < strange][:nbytes].view(dtype) for pair in arrays)
            base = (np.arange(len(x), dtype="int32") % 37 + call % 3).astype(dtype)
            x[:] = base + np.dtype(dtype).type(comm.rank)
            result, urgent = together.choice((x, out)), together.choice((None, 7))
            to = None if result is x else result
            if alone.random() < strange:
                on.allreduce(x, "max", out=to, async_op=True, priority=urgent).wait(60)
            else:
                on.allreduce(x, "max", out=to, priority=urgent)
            assert np.array_equal(result, base + np.dtype(dtype).type(1)), call
    return sum("slices" in plan for found in plans for plan in found)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("transport", ("shm", "tcp"))
def test_ranks_agree_whatever_each_of_them_has(transport: str, seed: int) -> None:
    found = harness.ranks(at_random, 2, env={"HRDMA_TRANSPORT": transport}, seed=seed)
    assert found[0] == found[1] and (found[0] > 0) == (CORES > 1)

"""Short allreduces of two ranks: how one goes depends on the memory of both, which each knows of the other from the call before.

Whatever the ranks have, wait for and do in between, they must always choose alike, and the result must be right.
"""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

import harness
import hrdma
from hrdma import calibration
from hrdma.topo.cost import DEFAULT_COST

SIZES = (2048, 4096, 4100, 8192, 20_000, 65_536, 65_540)  # bytes, from below to above those which this is about


@pytest.fixture(scope="module")
def plain_costs(tmp_path_factory) -> dict[str, str]:
    """What is planned for 4 KiB or 8 depends on the machine, and on what else it did when that was measured; here it is the usual."""
    folder = str(tmp_path_factory.mktemp("costs"))
    calibration.save(folder, {name: DEFAULT_COST[name] for name in ("shm", "tcp")})
    return {"HRDMA_CACHE_DIR": folder}


@pytest.fixture
def shm(plain_costs) -> dict[str, str]:
    return plain_costs | {"HRDMA_TRANSPORT": "shm"}


def put_back(comm) -> int:
    return comm.stats()["counters"]["transfers_returned"]


def filled(x: np.ndarray, rank: int, round: int) -> np.ndarray:
    x[:] = np.arange(x.size) % 50 + 100 * rank + round % 7
    return x


def summed(count: int, round: int) -> np.ndarray:
    return (2 * (np.arange(count) % 50 + round % 7) + 100).astype("float32")


def same_again(comm, kinds: str, nbytes: int, calls: int) -> int:
    """So many calls that wait; how many results were put back."""
    count = nbytes // 4
    x = hrdma.empty(count) if kinds[comm.rank] == "r" else np.empty(count, "float32")
    before = put_back(comm)
    for i in range(calls):
        comm.allreduce(filled(x, comm.rank, i))
        assert np.array_equal(x, summed(count, i))
    return put_back(comm) - before


@pytest.mark.parametrize("nbytes", (4096, 8192, 20_000))
def test_registered_arrays_get_their_results_put_back(shm, nbytes):
    found = harness.ranks(same_again, 2, env=shm, kinds="rr", nbytes=nbytes, calls=20)
    assert found in ([19, 19], [20, 20])  # the first one only says what they have, unless it is that long anyway


@pytest.mark.parametrize("kinds", ("pp", "rp", "pr"))
def test_other_arrays_are_sent(shm, kinds):
    assert harness.ranks(same_again, 2, env=shm, kinds=kinds, nbytes=4096, calls=20) == [0, 0]


@pytest.mark.parametrize("transport", ("tcp", "shm"))
def test_shorter_ones_are_sent(plain_costs, transport):
    env = plain_costs | {"HRDMA_TRANSPORT": transport}
    nbytes = 4096 if transport == "tcp" else 2048
    assert harness.ranks(same_again, 2, env=env, kinds="rr", nbytes=nbytes, calls=5) == [0, 0]


def change(comm) -> list[int]:
    """From registered to plain arrays and back, here only and on both ranks; each change is one call late."""
    found = []
    for kinds in ("rr", "rp", "rr", "pp", "rr"):
        found.append(same_again(comm, kinds, 8192, 6))
    return found


def test_each_change_of_memory_is_followed(shm):
    for found in harness.ranks(change, 2, env=shm):
        assert min(found[0], found[2], found[4]) >= 5
        assert max(found[1], found[3]) <= 1


def any_order(comm, rounds: int, seed: int) -> None:
    """The same calls on both ranks, each with memory of its own kind, waited for at once, later or together."""
    both, own = random.Random(seed), random.Random(seed * 2 + comm.rank)
    open_calls: list[tuple] = []
    for i in range(rounds):
        count = both.choice(SIZES) // 4
        x = hrdma.empty(count + 1024) if own.random() < 0.8 else np.empty(count + 1024, "float32")
        start = 0 if own.random() < 0.8 else own.randrange(1024)
        x = filled(x[start : start + count], comm.rank, i)
        apart = own.random() < 0.1
        out = np.empty(count, "float32") if apart else x
        asynchronous = own.random() < 0.2
        done = comm.allreduce(x, out=out if apart else None, async_op=asynchronous, deterministic=both.random() < 0.2)
        open_calls.append((done if asynchronous else None, out, i))
        if both.random() < 0.2:
            comm.barrier()
        if own.random() < 0.5:
            check(open_calls)
    check(open_calls)


def check(open_calls: list[tuple]) -> None:
    for request, out, i in open_calls:
        if request is not None:
            request.wait(30)
        assert np.array_equal(out, summed(out.size, i)), i
    open_calls.clear()


@pytest.mark.parametrize("seed", (1, 2, 3))
def test_any_order_of_calls_is_right(shm, seed):
    harness.ranks(any_order, 2, env=shm, rounds=400, seed=seed)


def closed_while_planned(comm) -> str:
    """What a call raises when another thread closes its communicator while it is planned."""
    other = comm.dup()
    if comm.rank == 0:
        plan = other._plan

        def slow(*call):
            thread = threading.Thread(target=other.close)
            thread.start()
            thread.join(10)
            return plan(*call)

        other._plan = slow
        with pytest.raises(ValueError, match="closed"):
            other.allreduce(hrdma.zeros(1024), timeout=10)
    comm.barrier()
    return "told" if comm.rank == 0 else ""


def test_a_communicator_that_is_closed_while_a_call_is_planned_is_found_closed(shm):
    assert harness.ranks(closed_while_planned, 2, env=shm) == ["told", ""]


def exposed(comm) -> int:
    """Arrays that peers may read at any time are open to nobody: how many messages eight calls take."""
    x = hrdma.empty(1024)
    memory = hrdma.Endpoint(comm, 1 - comm.rank).expose(x, read=True)
    before = comm.stats()["counters"]["messages_eager"]
    for i in range(8):
        comm.allreduce(filled(x, comm.rank, i))
        assert np.array_equal(x, summed(1024, i))
    sent = comm.stats()["counters"]["messages_eager"] - before
    memory.close()
    return sent


def test_what_is_exposed_is_exchanged_whole(shm):
    assert harness.ranks(exposed, 2, env=shm) == [8, 8]

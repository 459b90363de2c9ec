"""Jobs that say on which fabric they run: results, agreement of the ranks, what is said. All on one host; see tests/lab for NICs."""

import os

import numpy as np
import pytest

import harness
import hrdma

FABRIC = {"HRDMA_FABRIC": "bcube:2,2"}


def everything(comm):
    n, me = comm.size, comm.rank
    for count in (1, 7, 3000, 200_000):
        x = np.arange(count, dtype="float64") * n + me
        total = np.arange(count) * n * n + n * (n - 1) / 2
        assert (comm.allreduce(x.copy()) == total).all()
        assert np.allclose(comm.allreduce(x.copy(), "avg"), total / n)
        whole = x.astype("int64") - 7  # some sums are negative, and cut toward zero
        assert (comm.allreduce(whole, "avg") == np.trunc((total - 7 * n) / n)).all()
        out = np.zeros(count)
        comm.reduce(x, root=2, out=out)
        assert me != 2 or (out == total).all()
        y = x.copy()
        comm.broadcast(y, root=1)
        assert (y == np.arange(count) * n + 1).all()
        gathered = comm.allgather(x)
        assert (gathered.reshape(n, count) == np.arange(count) * n + np.arange(n)[:, None]).all()
        blocks = np.concatenate([x + 1000 * rank for rank in range(n)])
        assert (comm.reduce_scatter(blocks) == total + 1000 * n * me).all()
        assert (
            comm.alltoall(blocks).reshape(n, count) == np.arange(count) * n + np.arange(n)[:, None] + 1000 * me
        ).all()
        comm.barrier()
    half = comm.split(me % 2)
    assert (half.allreduce(np.ones(1000)) == 2).all()
    x = np.full(1000, 0.1 * (me + 1), "float32")
    comm.allreduce(x, deterministic=True)
    comm.dup().allreduce(x.copy(), deterministic=True)
    expected = np.float32(0.1)
    for rank in range(1, n):
        expected = expected + np.float32(0.1 * (rank + 1))
    assert (x == expected).all()
    return comm.info()["fabric"]


@pytest.mark.parametrize("transport", harness.transports())
def test_collectives_follow_the_plan(transport):
    found = harness.outcomes(everything, 4, env={**FABRIC, "HRDMA_TRANSPORT": transport, "HRDMA_LOG_LEVEL": "info"})
    assert [(one.status, one.value) for one in found] == [(0, "bcube:2,2")] * 4, found[0].output
    assert "on bcube:2,2, 4 ranks: bml" in found[0].output
    said = "WARNING: allreduce is not planned for bcube:2,2: plans for a fabric reduce in other orders"
    assert [one.output.count(said) for one in found] == [1, 0, 0, 0]


def given(rank, fabrics):
    with hrdma.init(fabric=fabrics[rank]):
        pass


def test_ranks_that_mean_different_fabrics_are_told():
    found = harness.outcomes(given, 4, init=False, fabrics=["bcube:2,2", "bcube:2,2", "star:4", ""])
    for one in found:
        assert one.error == "ValueError"
        assert "must mean the same on all ranks: rank 0 has" in one.text and "rank 2 has" in one.text


def test_the_fabric_may_be_discovered_when_the_job_begins():
    found = harness.outcomes(everything, 4, env={"HRDMA_FABRIC": "discover"})
    assert [(one.status, one.value) for one in found] == [(0, "cluster:1,4,1")] * 4, found[0].output
    for one in harness.outcomes(given, 2, init=False, fabrics=["discover", "ring:2"]):
        assert one.error == "ValueError" and "rank 0 has discover, rank 1 has" in one.text
    alone = harness.outcomes(given, 1, init=False, fabrics=["discover"])
    assert [one.status for one in alone] == [0]
    for one in harness.outcomes(given, 2, init=False, fabrics=["discover"] * 2, env={"HRDMA_PLAN": "mine.json"}):
        assert (
            one.text == "HRDMA_PLAN=mine.json is for a fabric that is known: HRDMA_FABRIC=discover does not go with it"
        )


def counted(asked, name, usual):
    return lambda *given, **how: asked.append(name) or usual(*given, **how)


def opened(rank):
    from hrdma import calibration, providers, runtime

    asked = []
    for where, name in ((providers, "_usable"), (calibration, "costs"), (runtime.Runtime, "_open")):
        setattr(where, name, counted(asked, name, getattr(where, name)))
    with hrdma.init(fabric="discover"):
        return sorted(asked)


def test_what_discovery_does_not_change_is_done_once():
    """On one host there are no rails: the providers stay open, and their costs stand."""
    assert harness.ranks(opened, 2, init=False) == [["_open", *["_usable"] * 3, "costs"]] * 2


def gone_meanwhile(rank):
    from hrdma import discovery

    if rank == 1:
        discovery.pairs = lambda hosts: os._exit(3)  # when the others have heard its NICs
    hrdma.init(fabric="discover")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_rank_that_is_lost_while_the_network_is_measured_is_lost_to_init(transport):
    found = harness.outcomes(gone_meanwhile, 3, init=False, env={"HRDMA_TRANSPORT": transport})
    assert found[1].status == 3
    for one in (found[0], found[2]):
        assert one.error == "PeerError" and one.text.startswith("init: discover: ")
        said = {name: one.fields[name] for name in ("rank", "operation", "phase", "transport")}
        assert said == {"rank": 1, "operation": "init", "phase": "connect", "transport": transport}


def test_a_fabric_of_another_size_is_refused():
    found = harness.outcomes(given, 2, init=False, fabrics=["ring:3", "ring:3"])
    assert {(one.error, one.text) for one in found} == {
        ("ValueError", "the fabric ring:3 (ring:3) has 3 ranks, the job 2")
    }


def measured(comm):
    from hrdma.planning import discover

    fabric = discover(comm)
    return [fabric.name, fabric.digest(), list(fabric.interfaces)]


def test_ranks_of_one_host_discover_its_memory():
    found = harness.ranks(measured, 2)
    assert found[0] == found[1] and found[0][0].startswith("cluster:1,2") and found[0][2] == []

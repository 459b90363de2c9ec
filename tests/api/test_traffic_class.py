"""The class that a traffic controller gives a job is on its connections, RDMA's included, and is read back."""

from __future__ import annotations

import numpy as np
import pytest

import harness

DSCP, ANSWERS, BAND = 26, 34, 2


class Controller:
    """What a rank needs of a controller."""

    dev, policy, kind = "eth0", "tls-one", "htb"

    def register(self, job, *, priority):
        return {"band": BAND, "dscp": DSCP, "answers": ANSWERS}

    def close(self) -> None:
        pass


def classed(_rank):
    import hrdma
    from hrdma import traffic

    def join(config, engine, **_):
        found = traffic.Membership(Controller(), config.job, None)
        found.stamp(engine)
        return found

    traffic.join = join
    with hrdma.init(job="resnet") as comm:
        x = hrdma.zeros(1 << 18, "float32") + comm.rank
        comm.allreduce(x)
        assert (x == 1).all()
        return comm.info()["traffic"]["stamped"], str(comm._runtime.traffic)


@pytest.mark.parametrize("transport", ["tcp", "verbs"])
def test_connections_carry_the_class_of_the_job(transport):
    for stamped, text in harness.ranks(classed, 2, init=False, env={"HRDMA_TRANSPORT": transport}):
        assert stamped == [transport]
        assert text == f"job resnet: band {BAND} of eth0 (tls-one by htb), DSCP {DSCP} on {transport}"


def test_every_rail_carries_it():
    env = {"HRDMA_TRANSPORT": "verbs", "HRDMA_DEVICES": "sim2,sim2"}
    assert [stamped for stamped, _ in harness.ranks(classed, 2, init=False, env=env)] == [["verbs"]] * 2


def test_shared_memory_has_none():
    for stamped, text in harness.ranks(classed, 2, init=False, env={"HRDMA_TRANSPORT": "shm"}):
        assert stamped == [] and text.endswith("nothing: no connection of this rank can carry it")


def set_early(comm):
    """Those that are there already keep theirs."""
    engine = comm._runtime.engine
    assert not engine.traffic_class("verbs", DSCP, DSCP, BAND)
    with pytest.raises(ValueError, match="64"):
        engine.traffic_class("verbs", 64, DSCP, BAND)
    x = np.ones(10)
    comm.allreduce(x)
    return x[0]


def test_a_queue_pair_that_is_up_keeps_its_class():
    assert harness.ranks(set_early, 2, env={"HRDMA_TRANSPORT": "verbs"}) == [2, 2]

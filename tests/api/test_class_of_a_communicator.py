"""A communicator's own traffic class: connections of its own, with that class on their packets, at both ends."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import numpy as np
import pytest

import harness

URGENT, BULK = 46, 10
IP_TOS_OF = {socket.AF_INET: (socket.IPPROTO_IP, socket.IP_TOS), socket.AF_INET6: (socket.IPPROTO_IPV6, 67)}


def classes_of_sockets():
    """DSCPs of this process's connected TCP sockets."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            one = socket.socket(fileno=os.dup(int(name)))
            with one:
                if one.family in IP_TOS_OF and one.type == socket.SOCK_STREAM:
                    one.getpeername()
                    found.append(one.getsockopt(*IP_TOS_OF[one.family]) >> 2)
    return sorted(found)


def check(comm, seed=1):
    """Everything that a communicator can do, briefly."""
    import hrdma

    rank, size = comm.rank, comm.size
    for n in (1, 300_000):
        x = np.full(n, rank + seed, "int64")
        comm.allreduce(x)
        assert (x == sum(range(seed, seed + size))).all()
    x = np.full(200_000, rank)
    y = np.empty_like(x)
    comm.sendrecv(x, (rank + 1) % size, y, (rank - 1) % size)
    assert (y == (rank - 1) % size).all()
    if rank == 0:
        for _ in range(1, size):
            comm.recv(y, src=hrdma.ANY_SOURCE, tag=3)
    else:
        comm.send(x, dst=0, tag=3)
    comm.barrier()


def all_of_it(comm):
    import hrdma

    urgent = comm.dup(traffic_class=URGENT)
    bulk = comm.split(0, -comm.rank, traffic_class=BULK)
    for each in (comm, urgent, bulk, urgent.dup(), urgent.split(0), comm.dup(traffic_class=URGENT)):
        check(each)
    name = comm.info()["transports"][1 - min(comm.rank, 1)]
    assert comm.traffic_class is None and comm.info()["traffic_class"] is None
    assert urgent.info()["traffic_class"] == {"dscp": URGENT, "stamped": [name]}
    assert urgent.dup().traffic_class == urgent.split(0).traffic_class == URGENT
    assert bulk.info()["traffic_class"] == {"dscp": BULK, "stamped": [name]}
    found = classes_of_sockets() if name == "tcp" else []
    engine = comm._runtime.engine
    assert engine.class_taken(name, URGENT) and not engine.class_taken(name, 11)
    assert set(engine.peer_stats((comm.rank + 1) % comm.size)) >= {"rails", "connected"}
    # one-sided, on a communicator with a class
    if comm.size > 1:
        there = (comm.rank + 1) % comm.size
        endpoint = hrdma.Endpoint(urgent, there)
        back = hrdma.Endpoint(urgent, (comm.rank - 1) % comm.size)
        x = hrdma.empty(1 << 16, "uint8")
        y = hrdma.zeros(1 << 16, "uint8")
        x[:] = comm.rank + 1
        exposed = back.expose(y, write=True)
        mine = bytes(exposed)
        table = np.empty((comm.size, len(mine)), "uint8")
        comm.allgather(np.frombuffer(mine, "uint8").copy(), table)
        endpoint.write(x, endpoint.remote(table[there].tobytes()), notify=7)
        assert back.notified(timeout=20) == 7
        assert (y == (comm.rank - 1) % comm.size + 1).all()
    return found, len(comm._runtime.classes)


@pytest.mark.parametrize(("transport", "devices"), [("tcp", ""), ("verbs", "sim2"), ("verbs", "sim2,sim2")])
def test_what_a_communicator_with_a_class_sends_goes_by_connections_of_that_class(transport, devices):
    env = {"HRDMA_TRANSPORT": transport, "HRDMA_DEVICES": devices} if devices else {"HRDMA_TRANSPORT": transport}
    for sockets, pairs in harness.ranks(all_of_it, 3, env=env):
        assert pairs == 4  # two classes, two peers; asked for again they are there
        if transport == "tcp":
            assert sockets.count(URGENT) == sockets.count(BULK) == 2


def nothing_leaves_the_host(comm):
    urgent = comm.dup(traffic_class=URGENT)
    check(urgent)
    return urgent.info()["traffic_class"], len(comm._runtime.classes)


def test_over_shared_memory_there_is_no_class_and_no_connection():
    for told, pairs in harness.ranks(nothing_leaves_the_host, 2, env={"HRDMA_TRANSPORT": "shm"}):
        assert told == {"dscp": URGENT, "stamped": []} and pairs == 0


def some_have_it(comm):
    """Ranks of one colour have a class, one other none, and one takes no part."""
    color = [0, 0, 1, None][comm.rank]
    part = comm.split(color, traffic_class=URGENT if color == 0 else None)
    if part is not None:
        check(part)
    check(comm)
    return (part and part.traffic_class, sorted(comm._runtime.classes))


def test_ranks_of_one_colour_only():
    found = harness.ranks(some_have_it, 4, env={"HRDMA_TRANSPORT": "verbs"})
    assert found == [[URGENT, [[1, URGENT]]], [URGENT, [[0, URGENT]]], [None, []], [None, []]]


def in_two_threads(comm):
    """Two communicators ask for classes at once, in another order on each rank: whoever they meet is of their class."""
    parents = [comm.dup(), comm.dup()]
    wanted = [(parents[0], URGENT), (parents[1], BULK)]
    made = {}

    def make(parent, dscp):
        made[dscp] = parent.dup(traffic_class=dscp)
        check(made[dscp])

    threads = [threading.Thread(target=make, args=each) for each in (wanted if comm.rank else reversed(wanted))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(comm)
    return sorted(made)


@pytest.mark.parametrize("transport", ["tcp", "verbs"])
def test_two_classes_at_once(transport):
    assert harness.ranks(in_two_threads, 2, env={"HRDMA_TRANSPORT": transport}) == [[BULK, URGENT]] * 2


def wrong(comm):
    for given in (-1, 64, 10**30):
        with pytest.raises(ValueError, match="0 to 63"):
            comm.dup(traffic_class=given)
    for given in ("46", 4.5):
        with pytest.raises(TypeError):
            comm.split(0, traffic_class=given)
    with pytest.raises(ValueError, match="same on all ranks of a communicator: 10, 11 were given") as refused:
        comm.dup(traffic_class=10 + comm.rank)
    with pytest.raises(ValueError, match="same on all ranks"):
        comm.split(0, traffic_class=10 if comm.rank else None)
    check(comm)
    return str(refused.value)


def test_what_is_no_class_or_not_that_of_all_is_refused():
    assert len(set(harness.ranks(wrong, 2, env={"HRDMA_TRANSPORT": "tcp"}))) == 1


def survivors(comm):
    import hrdma

    urgent = comm.dup(traffic_class=URGENT)
    check(urgent)
    if comm.rank == 2:
        for rank in range(2):  # it is through with all, and has read it: nothing of it is lost
            comm.recv(np.empty(1), src=rank)
        os._exit(0)
    comm.send(np.empty(1), dst=2)
    for each in (urgent, comm):
        with pytest.raises(hrdma.PeerError):
            each.barrier(timeout=20)
    left = urgent.shrink(timeout=20)
    check(left)
    again = left.dup(traffic_class=BULK)  # those who are lost are no concern of a new class
    check(again)
    stamped = again.info()["traffic_class"]["stamped"]
    again.barrier()
    return left.traffic_class, left.size, stamped


@pytest.mark.parametrize("transport", ["tcp", "verbs"])
def test_a_lost_rank_breaks_it_and_the_survivors_keep_the_class(transport):
    found = harness.outcomes(survivors, 3, env={"HRDMA_TRANSPORT": transport})
    assert [one.value for one in found] == [[URGENT, 2, [transport]]] * 2 + [None], [one.output for one in found]


def whole_job(comm):
    check(comm)
    told = comm.info()["traffic"]
    sockets = classes_of_sockets()
    comm.barrier()
    return told["dscp"], told["dev"], told["stamped"], str(comm._runtime.traffic), sockets


@pytest.mark.parametrize("transport", ["tcp", "verbs"])
def test_the_whole_job_has_a_class_without_a_controller(transport):
    env = {"HRDMA_TRANSPORT": transport, "HRDMA_TRAFFIC_CLASS": "34"}
    for dscp, dev, stamped, text, sockets in harness.ranks(whole_job, 2, env=env):
        assert (dscp, dev, stamped, text) == (34, None, [transport], f"DSCP 34 on {transport}")
        assert transport != "tcp" or 34 in sockets


@pytest.mark.parametrize("text", ["64", "-1", "0x10", "urgent"])
def test_a_setting_that_is_no_class_is_refused(text):
    from hrdma.config import Config

    with pytest.raises(ValueError, match="a DSCP, 0 to 63"):
        Config.load({"HRDMA_TRAFFIC_CLASS": text})


def in_vain(comm, how):
    """Rank 1 cannot dial, once, half-way, or does not: no rank has the class, nobody is lost, and later it can be had."""
    import hrdma
    from hrdma import classes

    dial = classes.dial

    def once(runtime, rank, dscp=classes.NO_CLASS):
        classes.dial = dial
        if how == "forgets":
            return
        if how == "half":
            dial(runtime, rank, dscp)
        raise (ValueError if how == "full" else DeviceError)("no queue pair is left")

    DeviceError = hrdma.DeviceError
    if comm.rank == 1:
        classes.dial = once
    parent = comm.dup()
    parent.timeout = 8.0
    with pytest.raises(DeviceError, match=f"^traffic class {URGENT}: .*rank [01]: cannot be connected") as refused:
        parent.dup(traffic_class=URGENT)
    check(parent)
    assert parent.shrink(timeout=20).size == comm.size
    for dscp in (BULK, URGENT):
        made = comm.dup(traffic_class=dscp)
        check(made)
        assert made.info()["traffic_class"]["stamped"] == [comm.info()["transports"][1 - comm.rank]]
        made.barrier()
    return str(refused.value)


@pytest.mark.parametrize("how", ["fails", "half", "full", "forgets"])
@pytest.mark.parametrize("transport", ["tcp", "verbs"])
def test_a_class_that_cannot_be_had_is_refused_on_all_ranks_and_may_be_had_later(transport, how):
    first, second = harness.ranks(in_vain, 2, env={"HRDMA_TRANSPORT": transport}, how=how)
    if how != "forgets":
        assert "rank 1: cannot be connected (no queue pair is left)" in second and "rank 0" not in first

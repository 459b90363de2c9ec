"""Two guests: packets carry the class that each host's controller gave the job, or that a communicator has, in both directions."""

from __future__ import annotations

import os
import re

import pytest
from nursery import Rank, environment

import hrdma
from hrdma import traffic

DSCPS = (26, 46)  # of the controllers of the two hosts
OWN = 34  # of a communicator
NBYTES = 8 << 18


class Controller:
    dev, policy, kind = "wire0", "tls-one", "htb"

    def register(self, job, *, priority):
        return {"band": 2, "dscp": int(os.environ["CLASS"])}

    def close(self):
        pass


def join(config, engine, **_):
    found = traffic.Membership(Controller(), config.job, None)
    found.stamp(engine)
    return found


def stamped(me):
    traffic.join = join
    with hrdma.init(timeout=60, job="resnet") as comm:
        x = hrdma.zeros(1 << 18, "int64") + comm.rank
        comm.allreduce(x)
        assert (x == 1).all()
        comm.barrier()
        print(comm.info()["traffic"]["stamped"], flush=True)
        own = comm.dup(traffic_class=OWN)
        for _ in range(2):
            own.allreduce(x)
        assert (x == 4).all()
        print(own.info()["traffic_class"]["stamped"], flush=True)
        own.barrier()


def counted(text: str) -> list[int]:
    """Bytes that each filter has seen, in order of their priority."""
    return [int(number) for number in re.findall(r"Sent (\d+) bytes", text)]


@pytest.mark.timeout(200)
def test_packets_of_a_job_carry_its_class(other, guest, output, tmp_path):
    roce = "match ip protocol 17 0xff match ip dport 4791 0xffff"
    commands = ["tc qdisc replace dev wire0 root handle 1: prio"]
    for order, dscp in enumerate((*DSCPS, OWN, 0), 1):
        commands.append(
            f"tc filter add dev wire0 parent 1: protocol ip prio {order} u32 {roce} match ip tos {dscp << 2:#x} 0xfc action pass"
        )
    env = {"HRDMA_TRANSPORT": "verbs", "HRDMA_DEVICES": "rxe0", "HRDMA_TOKEN": "two guests", "WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": guest["HOSTS_ADDR0"], "MASTER_PORT": "7712"}
    try:
        for command in commands:
            output(command)
            other.run(command)
        with other.fork(stamped, env | {"RANK": "1", "CLASS": str(DSCPS[1])}) as there:
            here = Rank(0, tmp_path / "rank0")
            here.start(stamped, environment() | env | {"RANK": "0", "CLASS": str(DSCPS[0])}, {})
            here.value(100)
            assert here.ended() == 0
            ended = there.wait(30)
        found = [counted(output("tc -s filter show dev wire0")), counted(other.run("tc -s filter show dev wire0"))]
    finally:
        output("tc qdisc del dev wire0 root")
        other.run("tc qdisc del dev wire0 root")
    assert ended.status == 0, ended.output
    assert here.log.read_text().split("\n")[:2] == ended.output.split("\n")[:2] == ["['verbs']"] * 2
    for host, bytes_of in enumerate(found):
        first, second, own, none = bytes_of
        assert (first, second)[host] > NBYTES / 2, found
        assert (second, first)[host] == 0, found
        assert own > 2 * (first, second)[host] * 0.8, found  # the same twice
        assert none < NBYTES / 10, found  # the tried pairs, before

"""Two guests: packets carry the class that each host's controller gave the job, or that a communicator has, in both directions."""

from __future__ import annotations

import os
import re
import shlex
import subprocess

import pytest

DSCPS = (26, 46)  # of the controllers of the two hosts
OWN = 34  # of a communicator
NBYTES = 8 << 18
JOB = """
import os, sys
import numpy as np
import hrdma
from hrdma import traffic

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

traffic.join = join
with hrdma.init(timeout=60, job="resnet") as comm:
    x = hrdma.zeros(1 << 18, "int64") + comm.rank
    comm.allreduce(x)
    assert (x == 1).all()
    comm.barrier()
    print(comm.info()["traffic"]["stamped"], flush=True)
    own = comm.dup(traffic_class=int(os.environ["OWN"]))
    for _ in range(2):
        own.allreduce(x)
    assert (x == 4).all()
    print(own.info()["traffic_class"]["stamped"], flush=True)
    own.barrier()
"""


def counted(text: str) -> list[int]:
    """Bytes that each filter has seen, in order of their priority."""
    return [int(number) for number in re.findall(r"Sent (\d+) bytes", text)]


@pytest.mark.timeout(200)
def test_packets_of_a_job_carry_its_class(other, guest, output):
    roce = "match ip protocol 17 0xff match ip dport 4791 0xffff"
    commands = ["tc qdisc replace dev wire0 root handle 1: prio"]
    for order, dscp in enumerate((*DSCPS, OWN, 0), 1):
        commands.append(
            f"tc filter add dev wire0 parent 1: protocol ip prio {order} u32 {roce} match ip tos {dscp << 2:#x} 0xfc action pass"
        )
    env = {"HRDMA_TRANSPORT": "verbs", "HRDMA_DEVICES": "rxe0", "HRDMA_TOKEN": "two guests", "WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": guest["HOSTS_ADDR0"], "MASTER_PORT": "7712", "OWN": str(OWN)}
    job = f"python -c {shlex.quote(JOB)}"
    try:
        for command in commands:
            output(command)
            other.run(command)
        with other.start(job, env | {"RANK": "1", "CLASS": str(DSCPS[1])}) as program:
            mine = os.environ | env | {"RANK": "0", "CLASS": str(DSCPS[0])}
            done = subprocess.run(shlex.split(job), env=mine, capture_output=True, text=True, timeout=100)
            ended = program.wait(30)
        found = [counted(output("tc -s filter show dev wire0")), counted(other.run("tc -s filter show dev wire0"))]
    finally:
        output("tc qdisc del dev wire0 root")
        other.run("tc qdisc del dev wire0 root")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{ended.output}"
    assert ended.status == 0, ended.output
    assert done.stdout.split("\n")[:2] == ended.output.split("\n")[:2] == ["['verbs']"] * 2
    for host, bytes_of in enumerate(found):
        first, second, own, none = bytes_of
        assert (first, second)[host] > NBYTES / 2, found
        assert (second, first)[host] == 0, found
        assert own > 2 * (first, second)[host] * 0.8, found  # the same twice
        assert none < NBYTES / 10, found  # the tried pairs, before

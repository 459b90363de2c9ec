"""Two guests: a connection finds out which GIDs carry packets, and leaves those that do not; interfaces choose devices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from nursery import Rank, environment

import hrdma

GIDS = Path("/sys/class/infiniband/rxe0/ports/1/gids")


def summed(me):
    with hrdma.init(timeout=60) as comm:
        n = 1 << 18
        x = hrdma.zeros(n, "int64")
        x[:] = np.arange(n) * 2 + comm.rank
        comm.allreduce(x)
        assert (x == np.arange(n) * 4 + 1).all()
        comm.barrier()
        return comm.info()["domains"]["verbs"]


@pytest.fixture
def job(other, guest, tmp_path):
    """Runs the job with a rank on each host; what rank 0 says of its device. Options are those of both."""

    def run(**options: str) -> str:
        env = {
            "HRDMA_TRANSPORT": "verbs",
            "HRDMA_TOKEN": "two guests",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": guest["HOSTS_ADDR0"],
            "MASTER_PORT": "7711",
            **options,
        }
        with other.fork(summed, env | {"RANK": "1"}) as there:
            here = Rank(0, tmp_path / "rank0")
            here.start(summed, environment() | env | {"RANK": "0"}, {})
            text = here.value(100)
            assert here.ended() == 0
            ended = there.wait(30)
        assert ended.status == 0, ended.output
        return text

    return run


def test_ipv4_is_taken_first(job, guest):
    assert f"GID 1 ::ffff:{guest['WIRE0_ADDR0']} (IPv4, wire0, MTU" in job(HRDMA_DEVICES="rxe0")


@pytest.mark.timeout(200)
def test_what_a_firewall_drops_is_left(job, output):
    """RoCE over IPv4 is dropped on its way out, TCP passes: the link-local GIDs carry the job."""
    assert (GIDS / "0").read_text().startswith("fe80")
    output("tc qdisc replace dev wire0 root handle 1: prio")
    try:
        match = "match ip protocol 17 0xff match ip dport 4791 0xffff"
        output(f"tc filter add dev wire0 parent 1: protocol ip u32 {match} action drop")
        text = job(HRDMA_DEVICES="rxe0")
        shown = output("tc -s filter show dev wire0")
    finally:
        output("tc qdisc del dev wire0 root")
    assert "GID 0 fe80" in text and "left: GID 1: " in text, text
    assert "dropped 0" not in shown, shown


def test_an_interface_chooses_the_device(job, guest):
    text = job(HRDMA_DEVICES="rxe*", HRDMA_IFNAME="wire1")
    assert text.startswith("rxe1") and guest["WIRE1_ADDR0"] in text, text

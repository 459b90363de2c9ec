"""Two guests, one wire or two: what is silent for a moment goes on, and what stays silent is lost by heartbeat.

Not by retries; and of two rails none is lost when both are silent.
"""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest
from nursery import Rank, environment

import hrdma

HEARTBEAT = 5.0
PAUSE = 1.5  # more than half a second, after which the retries of a queue pair with the usual time-out end


def job(me):
    with hrdma.init(timeout=60) as comm:
        x = hrdma.zeros(1 << 16, "int64")
        sent, start = 0, time.monotonic()
        while time.monotonic() - start < 100:
            x[:] = sent + comm.rank
            try:
                comm.allreduce(x, timeout=40)
            except hrdma.PeerError as error:
                print("lost", error.transport, "|", error, flush=True)
                me.tell("lost")
                break
            assert (x == 2 * sent + 1).all()
            sent += 1
            assert "times lost" not in comm.info()["domains"]["verbs"], comm.info()["domains"]["verbs"]
            me.tell("sum")


def sums(rank: Rank, more: int) -> None:
    """Waits until so many more sums were right."""
    before = sum(one["event"] == "sum" for one in rank.news)
    rank.event("sum", seconds=100, count=before + more)


def carried(wire: str) -> int:
    return int(Path(f"/sys/class/net/{wire}/statistics/tx_bytes").read_text())


def at_once(verb: str, wires: list[str], what: str = "") -> str:
    """Changes all wires by one process: a rail that is silent for half a second longer than another is lost."""
    lines = "".join(f"qdisc {verb} dev {wire} root{what}\\n" for wire in wires)
    return f"sh -c 'printf %b \"{lines}\" | tc -force -batch - 2>/dev/null; true'"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("rails", [1, 2])
def test_silence(other, guest, output, tmp_path, rails):
    if rails > int(guest["WIRES"]):
        pytest.skip(f"needs {rails} wires: --wires {rails}")
    wires = [f"wire{i}" for i in range(rails)]
    silent, mended = at_once("replace", wires, " netem loss 100%"), at_once("del", wires)
    devices = ",".join(f"rxe{i}" for i in range(rails))
    env = {"HRDMA_TRANSPORT": "verbs", "HRDMA_DEVICES": devices, "HRDMA_TOKEN": "two guests", "WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": guest["WIRE0_ADDR0"], "MASTER_PORT": "7713", "HRDMA_HEARTBEAT": f"{HEARTBEAT:g}"}
    with other.fork(job, env | {"RANK": "1"}) as there:
        here = Rank(0, tmp_path / "rank0")
        try:
            before = [carried(wire) for wire in wires]
            here.start(job, environment() | env | {"RANK": "0"}, {})
            sums(here, 6)
            while not all(carried(wire) > was + (1 << 17) for wire, was in zip(wires, before)):
                sums(here, 1)  # which end after 100 s
            output(silent)
            time.sleep(PAUSE)
            output(mended)
            start = time.monotonic()
            while time.monotonic() < start + 2 * PAUSE:  # TCP, and so heartbeats, need longer to come back
                sums(here, 1)
            sums(here, 20)
            start = time.monotonic()
            output(silent)
            other.run(silent)  # nor does the other's goodbye get here
            took = here.event("lost", seconds=60)["time"] - start
            here.ended(30)
            ended = there.wait(30)  # while it is silent still: else it may hear that this rank has ended
        finally:
            here.signal(signal.SIGKILL)
            output(mended)
            other.run(mended)
    told = here.log.read_text()
    said = re.search(r"lost verbs \| (.*)", told)
    assert said and f"silent for {HEARTBEAT:g} s" in said[1], told
    assert "retries" not in said[1], told
    assert took > HEARTBEAT * 0.8, told
    assert "lost verbs" in ended.output and f"silent for {HEARTBEAT:g} s" in ended.output, ended.output[-1000:]

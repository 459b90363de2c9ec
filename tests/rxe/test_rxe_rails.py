"""Two guests, two wires, one job that checks every result: it uses both rails, whatever happens to them.

One wire loses and reorders packets: no rail is lost for it, and no byte differs. It is pulled in mid-transfer: the job
goes on by the other, and uses it again when it is mended. Both are pulled: the job goes on over tcp, which finds a wire
of its own, says so, and is back on RDMA when they are mended.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from nursery import Rank, environment

import hrdma

pytestmark = pytest.mark.skipif(os.environ.get("WIRES", "2") == "1", reason="needs two wires: --wires 2")


def received():
    return int(Path("/sys/class/net/wire0/statistics/rx_bytes").read_text())


RAILS = r"2 rails(?: .([0-9]+) times lost, ([0-9]+) used again.)?, tcp (?:stands by|allowed) .0 times.: rxe0"


def job(me):
    with hrdma.init(timeout=60, fallback="tcp") as comm:
        n = 1 << 18
        x = hrdma.zeros(n, "int64")
        back = np.zeros(1, "int64")
        i = 0
        while not back[0]:
            x[:] = np.arange(n) * 2 + comm.rank + i
            comm.allreduce(x, timeout=60)
            assert (x == np.arange(n) * 4 + 1 + 2 * i).all(), i
            text = comm.info()["domains"]["verbs"]
            found = re.match(RAILS, text)
            print("lost" if found[1] else "whole", flush=True)
            back[0] = int(found[2] or 0)
            comm.allreduce(back, op="min", timeout=60)
            i += 1
        mended = received()
        back[0] = 0
        while not back[0]:
            x[:] = np.arange(n) * 2 + comm.rank + i
            comm.allreduce(x, timeout=60)
            assert (x == np.arange(n) * 4 + 1 + 2 * i).all(), i
            back[0] = received() > mended + (2 << 20)
            comm.allreduce(back, op="min", timeout=60)
            i += 1
        print("both", flush=True)
        back[0] = 0
        part = x[: 1 << 16]
        while not back[0]:
            part[:] = np.arange(part.size) * 2 + comm.rank + i
            comm.allreduce(part, timeout=60)
            assert (part == np.arange(part.size) * 4 + 1 + 2 * i).all(), i
            peer = comm.stats()["peers"][1 - comm.rank]
            print("by", peer["provider"], flush=True)
            back[0] = peer["fallbacks"] and peer["provider"] == "verbs"
            comm.allreduce(back, op="min", timeout=60)
            i += 1
        print("over", comm.stats()["peers"][1 - comm.rank]["fallbacks"])


MEND = "sh -c 'for w in {}; do tc qdisc del dev $w root 2>/dev/null; ip link set $w up; done'"
LOSE = "sh -c 'for w in {}; do tc qdisc add dev $w root netem loss 100%; done'"
PULL = "sh -c 'for w in {}; do ip link set $w down; done'"
SPOIL = "tc qdisc add dev wire0 root netem delay 1ms loss 1% reorder 25% 50%"
BOTH = "wire0 wire1"


def sent(wire: int) -> int:
    return int(Path(f"/sys/class/net/wire{wire}/statistics/tx_bytes").read_text())


def gaps() -> int:
    """Packets that came before one that was missing."""
    return int(Path("/sys/class/infiniband/rxe0/ports/1/hw_counters/out_of_seq_request").read_text())


def sent_elsewhere() -> int:
    """Bytes that left by cards without a device."""
    cards = [card for card in Path("/sys/class/net").iterdir() if card.name not in ("lo", "wire0", "wire1")]
    return sum(int((card / "statistics/tx_bytes").read_text()) for card in cards)


def pull(other, wires: str) -> None:
    """Takes wires away in mid-transfer.

    Soft-RoCE of Linux 6.1 panics when packets of a queue pair that has ended come free later, as those do that lie in a
    card that is down. So first they are lost, then the card is empty, then it goes down.
    """
    other.run(LOSE.format(wires))
    time.sleep(0.4)
    other.run(PULL.format(wires))


def until(holds: Callable[[], bool], here: Rank, what: str) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert not here.told("ended"), here.shown()
        assert time.monotonic() < deadline, f"not within 60 s: {what}\n{here.shown()[-2000:]}"
        time.sleep(0.05)


@pytest.mark.timeout(280)
def test_wires_that_are_pulled_are_taken_over_and_used_again(other, guest, tmp_path):
    env = {
        "HRDMA_TRANSPORT": "verbs",
        "HRDMA_DEVICES": "rxe0,rxe1",
        "HRDMA_TOKEN": "two guests",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": guest["HOSTS_ADDR0"],
        "MASTER_PORT": "7713",
    }
    before = sent(0), sent(1)
    here = Rank(0, tmp_path / "rank0")
    output = here.log
    with other.fork(job, env | {"RANK": "1"}) as there:
        here.start(job, environment() | env | {"RANK": "0"}, {})
        try:
            until(lambda: all(sent(i) > before[i] + (2 << 20) for i in range(2)), here, "both rails carry")
            was, missed = sent(0), gaps()
            other.run(SPOIL)
            until(lambda: sent(0) > was + (2 << 20) and gaps() > missed + 5, here, "packets are lost and passed")
            other.run(MEND.format("wire0"))
            assert "lost" not in output.read_text()
            pull(other, "wire0")
            until(lambda: "lost" in output.read_text(), here, "the rail is lost, and the job goes on")
            alone = sent(1)
            until(lambda: sent(1) > alone + (2 << 20), here, "the other one carries all")
            other.run(MEND.format("wire0"))
            until(lambda: "both" in output.read_text(), here, "the mended wire carries again, both ways")
            pull(other, BOTH)
            until(lambda: "by tcp" in output.read_text(), here, "no rail is left, and tcp carries")
            before_tcp = sent_elsewhere()
            until(lambda: sent_elsewhere() > before_tcp + (1 << 19), here, "it goes by another wire")
            other.run(MEND.format(BOTH))
            here.ended(100)
        finally:
            here.signal(signal.SIGKILL)
            other.run(MEND.format(BOTH))
        ended = there.wait(30)
    assert here.ended() == 0 and output.read_text().endswith("over 1\n"), f"{output.read_text()[-2000:]}{ended.output}"
    assert ended.status == 0, ended.output
    assert output.read_text().count("no rail of verbs is left to rank 1 (rxe") == 1
    assert output.read_text().count("the connection to rank 1 is over verbs again (rxe") == 1

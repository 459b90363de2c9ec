"""Two guests, one wire: what is silent for a moment goes on, and what stays silent is lost by heartbeat, not by retries."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time

import pytest

HEARTBEAT = 5.0
PAUSE = 1.5  # more than half a second, after which the retries of a queue pair with the usual time-out end
JOB = """
import time
import hrdma

with hrdma.init(timeout=60) as comm:
    x = hrdma.zeros(1 << 16, "int64")
    sent, start = 0, time.monotonic()
    while time.monotonic() - start < 100:
        x[:] = sent + comm.rank
        try:
            comm.allreduce(x, timeout=40)
        except hrdma.PeerError as error:
            print("lost", error.transport, "|", error, flush=True)
            break
        assert (x == 2 * sent + 1).all()
        sent += 1
        print("sum", sent, flush=True)
"""


def sums(program, more: int) -> None:
    """Reads until so many more sums were right."""
    for _ in range(more):
        line = program.stdout.readline()
        assert line.startswith("sum"), line + program.stdout.read()


@pytest.mark.timeout(200)
def test_silence(other, guest, output):
    silent = "tc qdisc replace dev wire0 root netem loss 100%"
    env = {"HRDMA_TRANSPORT": "verbs", "HRDMA_DEVICES": "rxe0", "HRDMA_TOKEN": "two guests", "WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": guest["WIRE0_ADDR0"], "MASTER_PORT": "7713", "HRDMA_HEARTBEAT": f"{HEARTBEAT:g}"}
    job = f"python -u -c {shlex.quote(JOB)}"
    with other.start(job, env | {"RANK": "1"}) as there:
        mine = os.environ | env | {"RANK": "0"}
        program = subprocess.Popen(
            shlex.split(job), env=mine, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            sums(program, 3)
            output(silent)
            time.sleep(PAUSE)
            output("tc qdisc del dev wire0 root")
            sums(program, 20)
            start = time.monotonic()
            output(silent)
            other.run(silent)  # nor does the other's goodbye get here
            told = next(line for line in program.stdout if not line.startswith(("sum", "[")))
            took = time.monotonic() - start
            program.wait(30)
        finally:
            program.kill()
            output("tc qdisc del dev wire0 root")
            other.run("tc qdisc del dev wire0 root")
        ended = there.wait(30)
    said = re.search(r"lost verbs \| (.*)", told)
    assert said and f"silent for {HEARTBEAT:g} s" in said[1], told
    assert "retries" not in said[1], told
    assert took > HEARTBEAT * 0.8, told
    assert "lost verbs" in ended.output and f"silent for {HEARTBEAT:g} s" in ended.output, ended.output[-1000:]

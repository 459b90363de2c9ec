"""Two guests: every wire carries packets and RDMA, and the cards' counters, qdiscs and link states see it."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import perftest
import pytest

WIRES = range(int(os.environ.get("WIRES", "1")))
MESSAGE = 65536
COUNT = 100


def counter(wire: int, name: str) -> int:
    return int(Path(f"/sys/class/net/wire{wire}/statistics/{name}").read_text())


def counter_there(other, wire: int, name: str) -> int:
    return int(other.run("cat", f"/sys/class/net/wire{wire}/statistics/{name}"))


@pytest.mark.parametrize("wire", WIRES)
def test_ping(other, guest, output, wire):
    assert " 0% packet loss" in output("ping", "-c", "3", "-i", "0.2", "-W", "5", guest[f"WIRE{wire}_ADDR1"])


@pytest.mark.parametrize("wire", WIRES)
def test_bytes_cross_this_wire_and_no_other(other, guest, output, wire):
    before = [counter(one, "tx_bytes") for one in WIRES]
    before_there = counter_there(other, wire, "rx_bytes")
    command = perftest.arguments("ib_send_bw", f"rxe{wire}", "-s", str(MESSAGE), "-n", str(COUNT))
    with other.start(*command) as server:
        perftest.wait_for_server(other.run)
        told = output(*command, guest["HOSTS_ADDR1"])
        ended = server.wait(10)
    assert ended.status == 0, ended.output
    assert perftest.bandwidth(told) > 0
    sent = [counter(one, "tx_bytes") - was for one, was in zip(WIRES, before)]
    assert sent[wire] >= MESSAGE * COUNT
    assert counter_there(other, wire, "rx_bytes") - before_there >= MESSAGE * COUNT
    assert all(sent[one] < MESSAGE for one in WIRES if one != wire), sent


def test_a_shaper_holds_rdma_to_its_rate(other, guest, output):
    rate = 20e6 / 8  # bytes per second
    output(*"tc qdisc replace dev wire0 root handle 1: htb default 1".split())
    try:
        output(*"tc class add dev wire0 parent 1: classid 1:1 htb rate 20mbit burst 32k".split())
        command = perftest.arguments("ib_write_bw", "rxe0", "-s", str(MESSAGE), "-n", str(COUNT), "-t", "16")
        with other.start(*command):
            perftest.wait_for_server(other.run)
            told = output(*command, guest["HOSTS_ADDR1"])
        shown = output(*"tc -s class show dev wire0".split())
    finally:
        output(*"tc qdisc del dev wire0 root".split())
    assert int(re.findall(r"Sent (\d+) bytes", shown)[0]) >= MESSAGE * COUNT, shown
    assert perftest.bandwidth(told) < 1.1 * rate


def test_a_link_that_goes_down_in_mid_transfer_is_an_error(other, guest, output):
    command = perftest.arguments("ib_write_bw", "rxe0", "-s", str(MESSAGE), "-D", "60")
    start = counter(0, "tx_bytes")
    with other.start(*command):
        perftest.wait_for_server(other.run)
        client = subprocess.Popen(
            [*command, guest["HOSTS_ADDR1"]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            deadline = time.monotonic() + 20
            while counter(0, "tx_bytes") < start + 10 * MESSAGE:
                assert time.monotonic() < deadline, "nothing was sent"
                time.sleep(0.05)
            other.run(*"ip link set wire0 down".split())
            told, _ = client.communicate(timeout=40)
        finally:
            client.kill()
            client.wait()
            other.run(*"ip link set wire0 up".split())
    assert client.returncode != 0
    assert "transport retry counter exceeded" in told or "Completion with error" in told, told

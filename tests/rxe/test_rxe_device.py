"""One guest: its soft-RoCE device is up, libibverbs and perftest work on it, hrdma works beside it."""

from __future__ import annotations

import ipaddress
import json
import re
import shlex
import subprocess
from pathlib import Path

import perftest
from click.testing import CliRunner

import hrdma.cli

SYSFS = Path("/sys/class/infiniband")


def test_link_is_active(guest, device, output):
    links = {link["ifname"]: link for link in json.loads(output("rdma -j link"))}
    assert links[device]["state"] == "ACTIVE"
    assert links[device]["netdev"] == "wire0"
    assert (SYSFS / device / "ports/1/state").read_text() == "4: ACTIVE\n"


def test_first_gid_of_a_name_is_the_address(guest, device):
    port = SYSFS / device / "ports/1"
    gid = ipaddress.IPv6Address((port / "gids" / perftest.GID_INDEX).read_text().strip())
    assert str(gid.ipv4_mapped) == guest["WIRE0_ADDR0"]
    assert (port / "gid_attrs/types" / perftest.GID_INDEX).read_text() == "RoCE v2\n"


def test_libibverbs_sees_the_largest_mtu(guest, device, output):
    told = output(f"ibv_devinfo -d {device}")
    assert re.search(r"state:\s+PORT_ACTIVE", told), told
    assert re.search(r"active_mtu:\s+4096", told), told


def test_perftest_writes(guest, device, output):
    command = perftest.command("ib_write_bw", device, "-s 65536 -n 200")
    counter = SYSFS / device / "ports/1/hw_counters/sent_pkts"
    before = int(counter.read_text())
    with subprocess.Popen(shlex.split(command), stdout=subprocess.DEVNULL) as server:
        try:
            perftest.wait_for_server(output)
            told = output(f"{command} 127.0.0.1")
            assert server.wait(10) == 0
        finally:
            server.kill()
    assert perftest.messages(told) == 200
    assert int(counter.read_text()) - before >= 200 * 65536 // 4096


def test_a_device_that_is_not_there_fails(guest):
    command = perftest.command("ib_write_bw", "rxe9", "-n 200")
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=30)
    assert done.returncode != 0
    assert "rxe9" in done.stdout + done.stderr


def test_hrdma_runs_here(guest):
    done = CliRunner().invoke(hrdma.cli.command, ["info"])  # in this process, since to start Python takes seconds here
    assert done.exit_code == 0 and "shm" in done.output, (done.output, done.exception)

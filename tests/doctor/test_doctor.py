"""`hrdma doctor`: findings of made-up hosts (folders that look like /sys and /proc), exchanges, two of them as peers."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hrdma.config import Config
from hrdma.doctor import exchange, host, rdma
from hrdma.doctor.finding import ERROR, OK, WARNING, Finding, worst
from hrdma.doctor.peer import rails
from hrdma.errors import DeviceError

LINK_LOCAL = "fe80:0000:0000:0000:5054:00ff:fe77:0001"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a4d:0001"
NONE = "0000:0000:0000:0000:0000:0000:0000:0000"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def device(gids: list[str], state: str = "4: ACTIVE", types: str = "RoCE v2") -> dict[str, str]:
    port = "sys/class/infiniband/mlx5_0/ports/1"
    files = {f"{port}/gids/{i}": gid for i, gid in enumerate(gids)}
    files |= {f"{port}/gid_attrs/types/{i}": types for i, gid in enumerate(gids) if gid != NONE}
    files |= {f"{port}/gid_attrs/ndevs/{i}": "eth7" for i, gid in enumerate(gids) if gid != NONE}
    return files | {f"{port}/state": state, f"{port}/link_layer": "Ethernet", f"{port}/rate": "100 Gb/sec (4X EDR)"}


def test_levels():
    assert worst([]) == OK
    assert worst([Finding(OK, "a", ""), Finding(ERROR, "b", ""), Finding(WARNING, "c", "")]) == ERROR


@pytest.mark.parametrize(
    ("files", "usable", "quota"),
    [
        ({"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/cpu.max": "max 100000"}, 4, None),
        ({"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/cpu.max": "150000 100000"}, 4, 1.5),
        ({"proc/self/cgroup": "0::/job/inner", "sys/fs/cgroup/job/cpu.max": "50000 100000"}, 1, 0.5),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/x",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            8,
            2,
        ),
        ({"proc/self/cgroup": "4:cpu:/", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"}, 8, None),
        ({}, 1, None),
    ],
)
def test_cores_and_quota(tmp_path, files, usable, quota):
    found = host.cores(tree(tmp_path, files), usable)
    assert found.level == (OK if quota is None else WARNING)
    assert found.figures.get("quota") == quota and bool(found.mend) == (quota is not None)


def test_limits_of_memory_and_processes(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job",
            "sys/fs/cgroup/job/memory.max": str(512 << 20),
            "sys/fs/cgroup/job/pids.max": "100",
        },
    )
    found = {finding.subject: finding for finding in host.memory(root)}
    assert found["memory limit"].level == found["process limit"].level == WARNING
    assert found["memory limit"].figures == {"limit": 512 << 20}
    (tmp_path / "sys/fs/cgroup/job/memory.max").write_text("max\n")
    (tmp_path / "sys/fs/cgroup/job/pids.max").write_text("9999\n")
    assert list(host.memory(root)) == []


@pytest.mark.parametrize(
    ("caps", "soft", "hard", "devices", "level", "mend"),
    [
        ("0000000000004000", 65536, 65536, True, OK, ""),
        ("0000000000000000", resource.RLIM_INFINITY, resource.RLIM_INFINITY, True, OK, ""),
        ("0000000000000000", 65536, 65536, False, OK, ""),
        ("0000000000000000", 1 << 30, 1 << 30, True, OK, ""),
        ("0000000000000000", 65536, resource.RLIM_INFINITY, True, WARNING, "ulimit -l unlimited"),
        ("0000000000000000", 65536, 65536, True, WARNING, "limits.d"),
    ],
)
def test_memlock(tmp_path, caps, soft, hard, devices, level, mend):
    root = tree(tmp_path, {"proc/self/status": f"Name:\tpython\nCapEff:\t{caps}"} | (device([IPV4]) if devices else {}))
    found = host.locked(root, soft, hard)
    assert found.level == level and mend in found.mend
    assert ("only RDMA devices need it" in found.text) == (not devices)


def test_pinned_is_what_provider_verbs_has():
    source = Path(__file__).parents[2] / "cython/providers/verbs/verbs.c"
    assert f"#define PIN ({host.PINNED >> 20}u << 20)" in source.read_text()


def test_shared_memory_says_what_the_kernel_refuses():
    found = {finding.subject: finding for finding in host.shared((False, "operation not permitted"))}
    assert found["ptrace scope"].level == WARNING and "operation not permitted" in found["ptrace scope"].text
    assert "ptrace_scope" in found["ptrace scope"].mend


@pytest.mark.parametrize(
    ("files", "level", "mend"),
    [
        ({}, WARNING, "sim"),
        ({"lib/modules/6.1/modules.dep": "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko: x"}, WARNING, "hrdma rxe up"),
        (device([IPV4]), ERROR, "modprobe ib_uverbs"),
        (device([IPV4]) | {"sys/class/infiniband_verbs/uverbs0/ibdev": "mlx5_0"}, OK, ""),
    ],
)
def test_kernel(tmp_path, files, level, mend):
    (found,) = rdma.kernel(tree(tmp_path, files), "6.1")
    assert found.level == level and mend in found.mend


@pytest.mark.parametrize(
    ("gids", "level"),
    [([LINK_LOCAL, IPV4, NONE], OK), ([LINK_LOCAL, NONE], WARNING), ([NONE, NONE], ERROR), ([], ERROR)],
)
def test_gids(tmp_path, gids, level):
    found = {finding.subject: finding for finding in rdma.port(tree(tmp_path, device(gids)), "mlx5_0", 1)}
    assert found["mlx5_0:1"].level == OK and "active" in found["mlx5_0:1"].text and "100 Gb" in found["mlx5_0:1"].text
    assert found["mlx5_0:1 GIDs"].level == level
    assert ("1: 10.77.0.1 RoCE v2" in found["mlx5_0:1 GIDs"].text) == (level == OK)
    assert bool(found["mlx5_0:1 GIDs"].mend) == (level != OK)


def test_a_port_that_is_down(tmp_path):
    root = tree(tmp_path, device([IPV4], state="1: DOWN"))
    found = next(rdma.port(root, "mlx5_0", 1))
    assert found.level == WARNING and found.mend == "ip link set eth7 up"


def test_an_exchange_has_figures_and_notices_changed_bytes():
    figures = exchange.with_itself("sim")
    assert 0 < figures["latency"] < 1 and figures["bandwidth"] > 1e3

    class Forgetful(exchange.End):
        def _end(self):
            super()._end()
            self.bytes[exchange.SIZE + 5] ^= 1

    with Forgetful("sim") as here, exchange.End("sim") as there:
        here.connect(there.card())
        there.connect(here.card())
        with pytest.raises(ValueError, match=r"1 of \d+ bytes came back changed over sim"):
            here.probe(there.card())


def test_an_exchange_that_fails_is_an_error_with_its_reason():
    def probe():
        with exchange.End("sim") as here:
            exchange.End("sim", port=9)
        return here

    found = rdma.measured("x exchange", "with itself", probe)
    assert found.level == ERROR and "sim has no port 9" in found.text


@pytest.mark.parametrize(
    ("devices", "gid", "found", "warnings"),
    [
        ("sim", None, [("sim", 1, 0)], 0),
        ("sim,sim", None, [("sim", 1, 0)] * 2, 0),
        ("sim2", None, [("sim2", 1, 1)], 0),
        ("sim2:2, sim", None, [("sim2", 2, 1), ("sim", 1, 0)], 0),
        ("sim,sim2", 2, [None, ("sim2", 1, 2)], 1),
        ("no_such_*,sim", None, [("sim", 1, 0)], 1),
        ("sim,sim,sim,sim", None, [("sim", 1, 0)] * 3, 1),
    ],
)
def test_rails_are_the_devices_that_are_named(devices, gid, found, warnings):
    said = []
    config = Config.load({"HRDMA_DEVICES": devices, "HRDMA_VERBS": "" if gid is None else f"pin=1M,gid={gid}"})
    assert rails(Path("/nowhere"), config, said.append) == found and len(said) == warnings


def test_rails_that_cannot_be_had():
    for devices, error, text in (("sim,nope", DeviceError, "nope|libibverbs"), ("sim:1x", ValueError, "1x")):
        with pytest.raises(error, match=text):
            rails(Path("/nowhere"), Config.load({"HRDMA_DEVICES": devices}), print)
    with pytest.raises(ValueError, match="gid=x"):
        rails(Path("/nowhere"), Config.load({"HRDMA_VERBS": "gid=x"}), print)


def test_rails_are_all_active_ports_where_none_is_named(tmp_path, monkeypatch):
    ports = [f"sys/class/infiniband/mlx5_{n}/ports/{port}/state" for n in (0, 1) for port in (1, 2)]
    root = tree(tmp_path, dict.fromkeys(ports, "4: ACTIVE") | {ports[1]: "1: DOWN"})
    monkeypatch.setattr(rdma.verbs, "devices", lambda: ["mlx5_0", "mlx5_1", "sim"])
    monkeypatch.setattr(rdma.verbs, "library", str)

    def choose(name, *, ifname, gid_index):
        if name == "mlx5_1:1":
            raise DeviceError(f"{ifname} excludes its GIDs")
        return [(*name.split(":"), gid_index)]

    monkeypatch.setattr(rdma.verbs, "choose", choose)
    said = []
    config = Config.load({"HRDMA_IFNAME": "eth9", "HRDMA_VERBS": "gid=3"})
    assert rails(root, config, said.append) == [("mlx5_0", "1", 3), None, ("mlx5_1", "2", 3)]
    assert said == ["eth9 excludes its GIDs"] and rails(Path("/nowhere"), config, print) == []


@pytest.mark.parametrize(
    ("environ", "texts"),
    [
        (
            {"HRDMA_DEVICES": "sim2"},
            ["GID 1 (IPv4-mapped RoCE v2 198.18.", "is chosen: IPv4-mapped RoCE v2 goes before global IPv6 RoCE v2;"],
        ),
        (
            {"HRDMA_DEVICES": "sim2"},
            ["sim2, named, NUMA distance 10, MTU 4096; port 1: ", "port 2 GID 0 (link-local RoCE v2 fe80::"],
        ),
        ({"HRDMA_DEVICES": "sim2:2", "HRDMA_VERBS": "gid=2"}, ["port 2: GID 2 (global IPv6", "gid=2 asks for it"]),
        ({"HRDMA_DEVICES": "sim"}, ["is chosen: there is no other"]),
    ],
)
def test_the_reason_for_a_choice_is_told(monkeypatch, environ, texts):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    (found,) = rdma.chosen()
    assert found.level == OK and found.subject == "rail 0"
    assert all(text in found.text for text in texts), found.text


def test_what_is_named_and_not_had_is_an_error(monkeypatch):
    assert list(rdma.chosen()) == [] or rdma.active(Path("/"))  # nobody asked
    monkeypatch.setenv("HRDMA_DEVICES", "sim,nope")
    (found,) = rdma.chosen()
    assert found.level == ERROR and ("nope" in found.text or "libibverbs" in found.text)
    monkeypatch.setenv("HRDMA_DEVICES", "nope*, sim2")
    warned, found = rdma.chosen()
    assert warned.level == WARNING and "nope* is not used" in warned.text and found.subject == "rail 0"


def test_what_cannot_be_asked_is_a_finding(tmp_path, monkeypatch):
    def refuse(*_):
        raise DeviceError("cannot list the RDMA devices: Operation not permitted")

    root = tree(tmp_path, device([IPV4]) | {"sys/class/infiniband/mlx5_0/device/numa_node": "0"})
    monkeypatch.setattr(rdma.verbs, "devices", refuse)
    monkeypatch.setattr(rdma.verbs, "library", str)
    found = {finding.subject: finding for finding in rdma.examine(root)}
    assert found["libibverbs"].level == ERROR and "not permitted" in found["libibverbs"].text
    assert "mlx5_0" not in found and rdma.active(root) == []
    monkeypatch.setattr(rdma.verbs, "library", lambda: "libibverbs has no symbol ibv_x")
    assert rdma.library(True)[1].level == ERROR and rdma.library(False)[1].level == OK

    def exhausted(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("hrdma.qos.wire.Wire", exhausted)
    found = {finding.subject: finding for finding in rdma.port(root, "mlx5_0", 1)}
    assert found["mlx5_0:1 PFC"].level == WARNING and "Too many open files" in found["mlx5_0:1 PFC"].text


@contextlib.contextmanager
def doctor(*words: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """One that runs, and that ends with the block whatever happens in it."""
    kept = {name: value for name, value in os.environ.items() if name != "COLUMNS" and not name.startswith("HRDMA_")}
    with subprocess.Popen(
        [sys.executable, "-m", "hrdma", "doctor", *words],
        env=kept | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_command_shows_and_counts():
    with doctor() as process:
        out, err = process.communicate(timeout=60)
    lines = out.splitlines()
    assert err == "" and process.returncode in (0, 1) and max(map(len, lines)) <= 120
    for subject in ("cores", "memlock", "libibverbs", "sim exchange"):
        assert any(f" {subject} " in f"{line} " for line in lines), subject
    assert lines[-1].endswith("errors") and (process.returncode == 1) == (not lines[-1].endswith(" 0 errors"))


def test_two_of_them_measure_the_way_between_them():
    port = str(29600 + os.getpid() % 2000)
    words = ("--json", "--peer", "127.0.0.1", "--port", port, "--timeout", "40")
    with doctor(*words, HRDMA_DEVICES="sim,sim2") as one, doctor(*words, HRDMA_DEVICES="sim, sim2") as other:
        for process in (one, other):
            out, err = process.communicate(timeout=100)
            assert process.returncode == 0, out + err
            found = {finding["subject"]: finding for finding in json.loads(out)["findings"]}
            for subject in ("tcp to 127.0.0.1", "sim:1 to 127.0.0.1", "sim2:1 to 127.0.0.1"):
                figures = found[subject]["figures"]
                assert found[subject]["level"] == "ok" and figures["latency"] > 0 and figures["bandwidth"] > 0


def test_a_peer_that_does_not_come_is_an_error_in_time():
    with doctor("--json", "--peer", "127.0.0.1", "--port", str(31600 + os.getpid() % 900), "--timeout", "1") as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    last = json.loads(out)["findings"][-1]
    assert last["level"] == "error" and "hrdma doctor --peer" in last["mend"]

"""This host without RDMA: cores, limits of its control group, registered and locked memory, shared memory, networks.

Files of the kernel are read below a root that tests replace. Whatever the kernel does not show is left out, not guessed.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hrdma.doctor.finding import OK, WARNING, Finding

__all__ = ["cores", "examine", "locked", "memory", "networks", "read", "registered", "shared"]

CAP_IPC_LOCK = 14
PINNED = 64 << 20  # bytes outside arenas that provider verbs registers unless HRDMA_VERBS=pin= says otherwise
UNLIMITED = 1 << 60  # control groups of the first version write a number where there is no limit


def read(path: Path) -> str:
    """Contents without the end of the line; empty where it is not there or may not be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def examine(root: Path, may_read: tuple[bool, str]) -> Iterator[Finding]:
    """Everything in this file; `may_read`: whether ranks may read each other's memory, and what the kernel said."""
    yield cores(root, len(os.sched_getaffinity(0)))
    yield from memory(root)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield locked(root, soft, hard)
    yield from shared(may_read)
    yield from networks(root)


def _groups(root: Path) -> Iterator[tuple[str, Path]]:
    """Controllers and folders of this process's control groups; of the second version ("") its parents too."""
    for line in read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if not names:
            inner = root / "sys/fs/cgroup" / path.lstrip("/")
            yield from (("", folder) for folder in (inner, *inner.parents) if (root / "sys/fs") in folder.parents)
        for name in filter(None, names.split(",")):
            mounted = root / "sys/fs/cgroup" / name
            yield name, mounted / path.lstrip("/")
            yield name, mounted  # in a container the group itself is what is mounted


def _quota(root: Path) -> float:
    """Cores' worth of time that the control groups give; infinite where they do not limit it."""
    least = float("inf")
    for name, folder in _groups(root):
        if name == "":
            quota, _, period = read(folder / "cpu.max").partition(" ")
        else:
            quota, period = read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):
            least = min(least, int(quota) / int(period))
    return least


def cores(root: Path, usable: int) -> Finding:
    """Cores that this process may use, and whether a quota lets it use them."""
    quota = _quota(root)
    if quota >= usable:
        return Finding(OK, "cores", f"{usable} usable", figures={"cores": usable})
    return Finding(
        WARNING,
        "cores",
        f"{usable} usable, and the control group gives the time of {quota:g}: ranks that wait are stopped in between",
        f"raise the quota (docker run --cpus {usable}), or start ranks on fewer cores: taskset -c 0 hrdma run ...",
        {"cores": usable, "quota": quota},
    )


def memory(root: Path) -> Iterator[Finding]:
    """Memory and processes that the control groups allow."""
    least = min(
        (
            int(text)
            for name, folder in _groups(root)
            if (text := read(folder / ("memory.limit_in_bytes" if name == "memory" else "memory.max"))).isdecimal()
        ),
        default=UNLIMITED,
    )
    if least < UNLIMITED:
        low = least < 1 << 30
        yield Finding(
            WARNING if low else OK,
            "memory limit",
            f"the control group allows {least >> 20} MiB, registered memory included",
            "raise it: docker run --memory 4g, or MemoryMax= of the service" if low else "",
            {"limit": least},
        )
    most = [int(text) for _, folder in _groups(root) if (text := read(folder / "pids.max")).isdecimal()]
    if most and min(most) < 256:
        yield Finding(
            WARNING,
            "process limit",
            f"the control group allows {min(most)} threads, and a rank has several",
            "raise it: docker run --pids-limit 4096, or TasksMax= of the service",
            {"limit": min(most)},
        )


def locked(root: Path, soft: int, hard: int) -> Finding:
    """Whether as much memory may be locked as RDMA devices need."""
    caps = [line.split()[1] for line in read(root / "proc/self/status").splitlines() if line.startswith("CapEff")]
    if caps and int(caps[0], 16) >> CAP_IPC_LOCK & 1:
        return Finding(OK, "memlock", "this process may lock any amount (CAP_IPC_LOCK)")
    if soft == resource.RLIM_INFINITY:
        return Finding(OK, "memlock", "unlimited")
    figures = {"limit": float(soft)}
    devices = any((root / "sys/class/infiniband").glob("*"))
    if not devices:
        return Finding(OK, "memlock", f"{soft >> 10} KiB; only RDMA devices need it", figures=figures)
    if soft >= 16 * PINNED:
        return Finding(OK, "memlock", f"{soft >> 20} MiB, enough for the RDMA devices here", figures=figures)
    may_raise = hard == resource.RLIM_INFINITY or hard >= 16 * PINNED
    lasting = "a line '* - memlock unlimited' in /etc/security/limits.d/rdma.conf and a new login; in containers --ulimit memlock=-1"
    return Finding(
        WARNING,
        "memlock",
        f"{soft >> 10} KiB: a rank registers {PINNED >> 20} MiB and its arenas with an RDMA device",
        "ulimit -l unlimited" if may_raise else lasting,
        figures,
    )


def registered() -> dict[str, Any]:
    """Of a registered buffer of 4 MiB: whether it is available, why not, whether it is in huge pages."""
    import hrdma

    try:
        block = hrdma.empty(4 << 20, "uint8")
    except MemoryError as error:
        return {"available": False, "why": str(error), "huge": False}
    huge = hrdma.memory_stats()["bytes_huge"] > 0
    del block
    return {"available": True, "why": "", "huge": huge}


def shared(may_read: tuple[bool, str]) -> Iterator[Finding]:
    """Provider shm: registered memory, and whether ranks may read each other's other memory."""
    block = registered()
    if not block["available"]:
        yield Finding(WARNING, "registered memory", block["why"], "raise the memory limit, or free some")
    else:
        pages = "huge pages" if block["huge"] else "small pages: huge ones are 2 to 3 times as fast"
        mend = "" if block["huge"] else "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
        yield Finding(OK if block["huge"] else WARNING, "registered memory", f"hrdma.empty() has {pages}", mend)
    able, why = may_read
    yield Finding(
        OK if able else WARNING,
        "ptrace scope",
        "ranks may read each other's memory: plain arrays are copied once"
        if able
        else f"ranks may not read each other's memory ({why}): plain arrays are copied twice, hrdma.empty() is not",
        "" if able else "sysctl kernel.yama.ptrace_scope=0, or buffers from hrdma.empty()",
    )


def networks(root: Path) -> Iterator[Finding]:
    """Provider tcp: the interfaces that it can use."""
    from hrdma.nics import nics

    found = nics()
    if not found:
        yield Finding(
            WARNING, "tcp", "no interface but loopback is up: only ranks of this host are reached", "ip link set ... up"
        )
    for nic in found:
        card = root / "sys/class/net" / nic.name
        speed, mtu = read(card / "speed"), read(card / "mtu")
        rate = f", {speed} Mbit/s" if speed.isdecimal() and int(speed) else ""
        yield Finding(OK, f"tcp {nic.name}", f"{nic.address}, MTU {mtu or 'unknown'}{rate}")

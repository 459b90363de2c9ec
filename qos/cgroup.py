"""Sockets of a cgroup get a priority when they are opened: a BPF program of four instructions, assembled here.

    r2 = PRIORITY;  *(u32 *)(ctx + offsetof(struct bpf_sock, priority)) = r2;  r0 = 1;  exit

A priority that is the number of a class sends a socket's packets to that class, with no filter. It needs cgroup version 2, and
CAP_BPF beside CAP_NET_ADMIN. Sockets that were open before are not touched. The kernel keeps a program as long as its cgroup.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import platform
import struct
from pathlib import Path

from hrdma.errors import NetlinkError, RefusedError

__all__ = ["PARENT", "enter", "leave", "mark", "mount_point", "program", "sweep", "unmark"]

PARENT = "hrdma-qos"  #: of the cgroups that this package makes
NAME = b"hrdma_qos"
SYSCALL = {"x86_64": 321, "aarch64": 280}
PROG_LOAD, PROG_ATTACH, PROG_DETACH, PROG_FD_BY_ID, OBJ_INFO, PROG_QUERY = 5, 8, 9, 13, 15, 16
CGROUP_SOCK, SOCK_CREATE, ALLOW_MULTI = 9, 2, 2
MOST_PROGRAMS = 64  # of one cgroup, as the kernel has it
_libc = ctypes.CDLL(None, use_errno=True)


def program(priority: int) -> bytes:
    """The instructions that set a new socket's priority."""

    def instruction(code: int, target: int, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
        return struct.pack("=BBhI", code, target | source << 4, offset, value)

    move32, store32, move64, leave = 0xB4, 0x63, 0xB7, 0x95
    return (
        instruction(move32, 2, value=priority)
        + instruction(store32, 1, source=2, offset=20)  # bpf_sock: bound_dev_if family type protocol mark priority
        + instruction(move64, 0, value=1)
        + instruction(leave, 0)
    )


def mount_point() -> Path:
    """Where cgroup version 2 is mounted; RefusedError where it is not."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        words = line.split()
        if words[2] == "cgroup2":
            return Path(words[1])
    raise RefusedError(
        "jobs by cgroup need cgroup version 2, which is not mounted: mount -t cgroup2 none /sys/fs/cgroup/unified"
    )


def _bpf(command: int, attributes: bytes | ctypes.Array[ctypes.c_char]) -> int:
    number = SYSCALL.get(platform.machine())
    if number is None:
        raise RefusedError(f"jobs by cgroup are not possible on {platform.machine()}; match them by port or DSCP")
    data = (ctypes.c_char * 128).from_buffer_copy(bytes(attributes).ljust(128, b"\0"))
    result = _libc.syscall(number, command, data, 128)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if isinstance(attributes, ctypes.Array):
        ctypes.memmove(attributes, data, len(attributes))
    return result


def _open(path: str) -> int:
    try:
        return os.open(mount_point() / path.strip("/"), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise RefusedError(f"there is no cgroup {path!r} below {mount_point()}") from None


def mark(path: str, priority: int) -> None:
    """Gives the sockets that a cgroup's processes open from now on this `SO_PRIORITY`, in place of an earlier one of ours.

    Raises
    ------
    RefusedError
        No such cgroup, or no permission.
    NetlinkError
        The kernel has no such programs.
    """
    group = _open(path)
    try:
        _detach(group)
        code, license_ = ctypes.create_string_buffer(program(priority)), ctypes.create_string_buffer(b"Apache-2.0")
        loaded = struct.pack(
            "=IIQQIIQII16s", CGROUP_SOCK, 4, ctypes.addressof(code), ctypes.addressof(license_), 0, 0, 0, 0, 0, NAME
        )
        # The name is followed by the interface and the attach type.
        fd = _bpf(PROG_LOAD, loaded + struct.pack("=II", 0, SOCK_CREATE))
        try:
            _bpf(PROG_ATTACH, struct.pack("=IIII", group, fd, SOCK_CREATE, ALLOW_MULTI))
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            raise RefusedError(f"cannot mark cgroup {path!r}: this needs CAP_BPF beside CAP_NET_ADMIN") from None
        raise NetlinkError(
            f"cannot mark cgroup {path!r}: {error.strerror}; jobs by cgroup need CONFIG_CGROUP_BPF",
            errno=error.errno or 0,
        ) from None
    finally:
        os.close(group)


def unmark(path: str) -> None:
    """Takes our program off a cgroup; nothing where the cgroup is gone, or there is none."""
    try:
        group = _open(path)
    except RefusedError:
        return
    try:
        _detach(group)
    finally:
        os.close(group)


def _detach(group: int) -> None:
    numbers = (ctypes.c_uint32 * MOST_PROGRAMS)()
    query = (ctypes.c_char * 32).from_buffer_copy(
        struct.pack("=IIIIQII", group, SOCK_CREATE, 0, 0, ctypes.addressof(numbers), MOST_PROGRAMS, 0)
    )
    _bpf(PROG_QUERY, query)
    for number in numbers[: struct.unpack_from("=I", query, 24)[0]]:
        fd = _bpf(PROG_FD_BY_ID, struct.pack("=III", number, 0, 0))
        try:
            info = ctypes.create_string_buffer(80)
            _bpf(OBJ_INFO, struct.pack("=IIQ", fd, len(info), ctypes.addressof(info)))
            if info.raw[64:80].rstrip(b"\0") == NAME:
                _bpf(PROG_DETACH, struct.pack("=IIII", group, fd, SOCK_CREATE, 0))
        finally:
            os.close(fd)


def enter(name: str, priority: int, pid: int) -> str:
    """Moves a process to a marked cgroup of this package; its children start there.

    Returns
    -------
    str
        The cgroup it was in before, relative to the mount point.
    """
    before = next(line[3:] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if line.startswith("0::"))
    root = mount_point()
    try:
        (root / PARENT / name).mkdir(parents=True, exist_ok=True)
        mark(f"{PARENT}/{name}", priority)
        (root / PARENT / name / "cgroup.procs").write_text(str(pid))
    except PermissionError as error:
        raise RefusedError(
            f"cannot make a cgroup below {root}: {error.strerror}; run as root, or beside a controller"
        ) from None
    return before


def leave(pid: int, before: str) -> None:
    """Moves a process back to the cgroup that `enter` told."""
    (mount_point() / before.strip("/") / "cgroup.procs").write_text(str(pid))


def sweep(prefix: str) -> None:
    """Removes the cgroups of this package whose names start so and in which nobody is left."""
    try:
        parent = mount_point() / PARENT
    except RefusedError:
        return
    for path in (*parent.glob(f"{glob.escape(prefix)}*"), parent):
        try:
            path.rmdir()
        except OSError:  # somebody is in it, or it is gone
            pass

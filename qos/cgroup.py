"""Sockets of a cgroup get a priority when they are opened or accepted: two small BPF programs, assembled here.

    a socket is made          r2 = PRIORITY;  *(u32 *)(ctx + offsetof(struct bpf_sock, priority)) = r2;  r0 = 1;  exit
    one has been accepted     bpf_setsockopt(ctx, SOL_SOCKET, SO_PRIORITY, &PRIORITY, 4), when ctx->op says so;  r0 = 1;  exit

The second one is for servers: the kernel makes the socket of an accepted connection without the first one, and without the
priority of the socket that listens.

A priority that is the number of a class sends a socket's packets to that class, with no filter. It needs cgroup version 2, and
CAP_BPF beside CAP_NET_ADMIN; where a cgroup has a program already, CAP_SYS_ADMIN, without which the kernel does not say
whose it is. Sockets that were open before are not touched. The kernel keeps a program as long as its cgroup.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import platform
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from hrdma.errors import NetlinkError, RefusedError

__all__ = ["PARENT", "enter", "leave", "mark", "mount_point", "number", "programs", "sweep", "unmark"]

PARENT = "hrdma-qos"  #: of the cgroups that this package makes
NAME = b"hrdma_qos"
SYSCALL = {"x86_64": 321, "aarch64": 280}
PROG_LOAD, PROG_ATTACH, PROG_DETACH, PROG_FD_BY_ID, OBJ_INFO, PROG_QUERY = 5, 8, 9, 13, 15, 16
ALLOW_MULTI = 2
CGROUP_SOCK, SOCK_OPS = 9, 13  # types of programs
ON_CREATE, ON_EVENT = 2, 3  # where they are attached: BPF_CGROUP_INET_SOCK_CREATE, BPF_CGROUP_SOCK_OPS
PASSIVE_ESTABLISHED = 5  # the event of a connection that was accepted
SETSOCKOPT = 49  # bpf_setsockopt
MOST_PROGRAMS = 64  # of one cgroup, as the kernel has it
_libc = ctypes.CDLL(None, use_errno=True)


def programs(priority: int) -> dict[int, tuple[int, bytes]]:
    """Type and instructions of what gives sockets their priority, by where it is attached."""

    def instruction(code: int, target: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
        return struct.pack("=BBhI", code, target | source << 4, offset, value)

    move32, move64, copy64, add64 = 0xB4, 0xB7, 0xBF, 0x07
    load32, store32, store32_value, unless_equal, call, leave = 0x61, 0x63, 0x62, 0x55, 0x85, 0x95
    end = instruction(move64, 0, value=1) + instruction(leave)
    created = instruction(move32, 2, value=priority) + instruction(
        store32,
        1,
        source=2,
        offset=20,  # bpf_sock: bound_dev_if family type protocol mark priority
    )
    accepted = (
        instruction(load32, 2, source=1, offset=0)  # bpf_sock_ops: op
        + instruction(unless_equal, 2, offset=7, value=PASSIVE_ESTABLISHED)  # over all but the end
        + instruction(store32_value, 10, offset=-4, value=priority)
        + instruction(move64, 2, value=socket.SOL_SOCKET)
        + instruction(move64, 3, value=socket.SO_PRIORITY)
        + instruction(copy64, 4, source=10)
        + instruction(add64, 4, value=(1 << 32) - 4)
        + instruction(move64, 5, value=4)
        + instruction(call, value=SETSOCKOPT)
    )
    return {ON_CREATE: (CGROUP_SOCK, created + end), ON_EVENT: (SOCK_OPS, accepted + end)}


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
    call = SYSCALL.get(platform.machine())
    if call is None:
        raise RefusedError(f"jobs by cgroup are not possible on {platform.machine()}; match them by port or DSCP")
    data = (ctypes.c_char * 128).from_buffer_copy(bytes(attributes).ljust(128, b"\0"))
    result = _libc.syscall(call, command, data, 128)
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


def number(path: str) -> int:
    """What tells a cgroup from one that is made anew under the same name; 0 where there is none."""
    try:
        return os.stat(mount_point() / path.strip("/")).st_ino
    except OSError:
        return 0


@contextlib.contextmanager
def _told(path: str) -> Iterator[None]:
    """Turns the kernel's errors into those of this package."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            raise RefusedError(
                f"cannot mark cgroup {path!r}: this needs CAP_BPF and CAP_NET_ADMIN, and CAP_SYS_ADMIN where the cgroup has a program"
                " already; run as root, or give all three to the service (systemd: AmbientCapabilities=CAP_BPF CAP_NET_ADMIN"
                " CAP_SYS_ADMIN)"
            ) from None
        raise NetlinkError(
            f"cannot mark cgroup {path!r}: {error.strerror}; jobs by cgroup need CONFIG_CGROUP_BPF",
            errno=error.errno or 0,
        ) from None


def mark(path: str, priority: int) -> None:
    """Gives the sockets that a cgroup's processes open or accept from now on this `SO_PRIORITY`, in place of an earlier one of ours.

    Raises
    ------
    RefusedError
        No such cgroup, or no permission.
    NetlinkError
        The kernel has no such programs.
    """
    group = _open(path)
    try:
        with _told(path):
            _detach(group)
            try:
                for place, (kind, instructions) in programs(priority).items():
                    fd = _load(kind, place, instructions)
                    try:
                        _bpf(PROG_ATTACH, struct.pack("=IIII", group, fd, place, ALLOW_MULTI))
                    finally:
                        os.close(fd)
            except OSError:
                _detach(group)
                raise
    finally:
        os.close(group)


def unmark(path: str) -> None:
    """Takes our programs off a cgroup; nothing where the cgroup is gone, or there is none."""
    try:
        group = _open(path)
    except RefusedError:
        return
    try:
        with _told(path):
            _detach(group)
    finally:
        os.close(group)


def _load(kind: int, place: int, instructions: bytes) -> int:
    """A descriptor of the program in the kernel."""
    code, license_ = ctypes.create_string_buffer(instructions), ctypes.create_string_buffer(b"Apache-2.0")
    where = ctypes.addressof(code), ctypes.addressof(license_)
    count = len(instructions) // 8
    loaded = struct.pack("=IIQQIIQII16s", kind, count, *where, 0, 0, 0, 0, 0, NAME)
    return _bpf(PROG_LOAD, loaded + struct.pack("=II", 0, place))  # the name is followed by the interface and the place


def _detach(group: int) -> None:
    for place in (ON_CREATE, ON_EVENT):
        numbers = (ctypes.c_uint32 * MOST_PROGRAMS)()
        query = (ctypes.c_char * 32).from_buffer_copy(
            struct.pack("=IIIIQII", group, place, 0, 0, ctypes.addressof(numbers), MOST_PROGRAMS, 0)
        )
        _bpf(PROG_QUERY, query)
        for known in numbers[: struct.unpack_from("=I", query, 24)[0]]:
            fd = _bpf(PROG_FD_BY_ID, struct.pack("=III", known, 0, 0))
            try:
                info = ctypes.create_string_buffer(80)
                _bpf(OBJ_INFO, struct.pack("=IIQ", fd, len(info), ctypes.addressof(info)))
                if info.raw[64:80].rstrip(b"\0") == NAME:
                    _bpf(PROG_DETACH, struct.pack("=IIII", group, fd, place, 0))
            finally:
                os.close(fd)


def enter(name: str, priority: int, pid: int) -> str:
    """Moves a process to a marked cgroup of this package; its children start there. Where it fails no folder is left.

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
    except BaseException as error:
        sweep(name)
        if isinstance(error, PermissionError):
            raise RefusedError(
                f"cannot make a cgroup below {root}: {error.strerror}; run as root, or beside a controller"
            ) from None
        raise
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

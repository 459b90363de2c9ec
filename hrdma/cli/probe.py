"""Asks the kernel what the shm provider will ask it: may processes of one parent read each other's memory?"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

__all__ = ["siblings_may_read"]

YAMA = "/proc/sys/kernel/yama/ptrace_scope"


class _Range(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def siblings_may_read() -> tuple[bool, str]:
    """Whether process_vm_readv works between siblings, as the ranks of a launcher are, and what the kernel said.

    Returns
    -------
    tuple of (bool, str)
        The text names the refusal; empty where it is permitted.

    Notes
    -----
    Forks two children that live for a moment. Call it while this process has one thread.
    """
    word = ctypes.create_string_buffer(b"hrdma", 8)  # at the same address in both children
    hold, release = os.pipe()
    result, say = os.pipe()
    read = _fork(lambda: _stay(release, hold))
    try:
        asker = _fork(lambda: os.write(say, b"%d" % _read_word(read, ctypes.addressof(word))))
        os.close(say)
        os.waitpid(asker, 0)
        errno = int(os.read(result, 8) or b"5")
    finally:
        os.close(release)
        os.waitpid(read, 0)
        os.close(hold)
        os.close(result)
    if errno == 0:
        return True, ""
    text = os.strerror(errno).lower()
    try:
        with open(YAMA) as file:
            scope = file.read().strip()
    except OSError:
        scope = "0"
    return False, f"{text}; kernel.yama.ptrace_scope={scope}" if scope != "0" else text


def _stay(release: int, hold: int) -> None:
    """Until the parent lets go."""
    os.close(release)
    os.read(hold, 1)


def _fork(body: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(0)
    return pid


def _read_word(pid: int, address: int) -> int:
    """0, or the errno of reading eight bytes of another process."""
    seen = ctypes.create_string_buffer(8)
    here = _Range(ctypes.cast(seen, ctypes.c_void_p), 8)
    there = _Range(address, 8)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    done = libc.process_vm_readv(
        pid, ctypes.byref(here), ctypes.c_ulong(1), ctypes.byref(there), ctypes.c_ulong(1), ctypes.c_ulong(0)
    )
    return 0 if done == 8 and seen.raw.startswith(b"hrdma") else ctypes.get_errno() or 5

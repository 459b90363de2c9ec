"""Where the ranks of a job run on this machine: network namespaces, the terminal, and the port at which they meet."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import termios
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["CLONE_NEWNET", "Place", "enter_network", "leave_terminal", "places", "reserve_port"]

CLONE_NEWNET = 0x40000000  # linux/sched.h
_libc = ctypes.CDLL(None, use_errno=True)


class Place(NamedTuple):
    """Where a rank runs: an open network namespace (-1: this one), and its place among the ranks there."""

    namespace: int
    local_rank: int
    local_size: int


def places(ranks: int, namespaces: Sequence[str], stack: contextlib.ExitStack) -> list[Place]:
    """The place of every rank.

    Parameters
    ----------
    ranks : int
    namespaces : sequence of str
        A file for every rank; none: all run in this process's.
    stack : ExitStack
        Closes the namespaces.

    Raises
    ------
    OSError
        A file cannot be opened.
    """
    files = list(namespaces) or [""] * ranks
    opened = {"": -1}
    for file in set(files) - {""}:
        opened[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, opened[file])
    return [Place(opened[file], files[:rank].count(file), files.count(file)) for rank, file in enumerate(files)]


def enter_network(namespace: int) -> None:
    """Moves the calling thread into an open network namespace.

    Raises
    ------
    OSError
        It is none, or this process may not enter it.
    """
    if _libc.setns(namespace, CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def leave_terminal() -> None:
    """Of this process alone, which stays in its session: of a background group the terminal would stop who reads it."""
    with contextlib.suppress(OSError):
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
        fcntl.ioctl(terminal, termios.TIOCNOTTY)
        os.close(terminal)


def reserve_port(address: str) -> socket.socket:
    """A port that stays ours: bound but not listening, so that rank 0 can listen on it and nobody else gets it.

    Rank 0 listens at the address of a loopback, else at all addresses (`hrdma.control.link.listen`): then the port must be free at
    all, and the address is "". The socket is the caller's to close, once the ranks have ended.
    """
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, 0))
        stack.pop_all()
    return sock

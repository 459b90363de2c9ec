"""Where the ranks of a job run on this machine: their network namespaces, and the port at which they meet."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["CLONE_NEWNET", "Place", "enter_network", "places", "reserve_port"]

CLONE_NEWNET = 0x40000000  # linux/sched.h
PORTS = 100  # that are tried, when one is in use at some address
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


def reserve_port(address: str) -> socket.socket:
    """A port that stays ours: bound but not listening, so that rank 0 can listen on it and nobody else gets it.

    Rank 0 listens at all addresses where this one is not loopback's (`hrdma.control.link.listen`), and a port that is free at
    one may be in use at another. The socket is the caller's to close, once the ranks have ended.
    """
    everywhere = address if address.startswith("127.") else ""
    left = PORTS
    while True:
        left -= 1
        with contextlib.ExitStack() as stack, contextlib.ExitStack() as probe:
            sock = _bound(stack, address, 0)
            try:
                _bound(probe, everywhere, sock.getsockname()[1])
            except OSError as error:
                if error.errno != errno.EADDRINUSE or not left:
                    raise
                continue
            stack.pop_all()
            return sock


def _bound(stack: contextlib.ExitStack, address: str, port: int) -> socket.socket:
    sock = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((address, port))
    return sock

"""Where the files of a device are: its record, its locks and the controller's socket.

Devices of two network namespaces may have one name, and share a folder. A namespace's cookie tells it from all others since the machine
was started; the number of its inode would not, since the kernel gives that to the next namespace when one is gone.
"""

from __future__ import annotations

import os
import socket
import struct

from hrdma.errors import DeviceError

__all__ = ["DIRECTORY", "namespace", "path_of", "stem"]

DIRECTORY = "/run/hrdma-qos"
SO_NETNS_COOKIE = 71


def namespace() -> str:
    """The network namespace of this thread: its cookie, or ``i`` and its inode where the kernel is older than 5.14."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            return str(struct.unpack("=Q", sock.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8))[0])
        except OSError:
            return f"i{os.stat('/proc/thread-self/ns/net').st_ino}"


def stem(dev: str) -> str:
    """What the names of a device's files begin with."""
    if not dev or "/" in dev:
        raise DeviceError(f"{dev!r} is not the name of a device")
    return f"{dev}@{namespace()}"


def path_of(dev: str, end: str, directory: str = DIRECTORY) -> str:
    """A file of a device in this network namespace: ``json``, ``lock``, ``lease`` or ``sock``."""
    return os.path.join(directory, f"{stem(dev)}.{end}")

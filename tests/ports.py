"""A port for a job that a test starts."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on; not one that the kernel might give to somebody in the meantime."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port

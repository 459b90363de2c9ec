"""Runs a program of perftest with its two ends, and reads its table. What bandwidth that shows is not asked: it is 0 where the
program cannot tell how fast the processor's clock is."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

GID_INDEX = "1"  # soft-RoCE's IPv4-mapped address
PORT = 18515
LISTEN_SECONDS = 20


def command(program: str, device: str, options: str) -> str:
    """The server's command line; the client's has the server's address after it."""
    return f"{program} -d {device} -x {GID_INDEX} -p {PORT} -F {options}"


def wait_for_server(output: Callable[..., str]) -> None:
    """Until a program listens on perftest's port; `output` runs commands on the host on which it does."""
    deadline = time.monotonic() + LISTEN_SECONDS
    while f":{PORT} " not in output("ss -Hltn"):
        assert time.monotonic() < deadline, f"no server of perftest within {LISTEN_SECONDS} s"
        time.sleep(0.1)


def messages(text: str) -> int:
    """How many it was to move, in its table, which it shows once it is through."""
    rows = re.findall(r"^\s*\d+\s+(\d+)\s+[\d.]+\s+[\d.]+\s+[\d.]+\s*$", text, re.MULTILINE)
    assert len(rows) == 1, f"no row of numbers in:\n{text}"
    return int(rows[0])

"""Runs the `hrdma` command as a user does: in a process of its own, without HRDMA_* and launchers' variables."""

from __future__ import annotations

import os
import subprocess
import sys

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "COLUMNS", "NO_COLOR")


def environment(**added: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in NAMES and not key.startswith("HRDMA_")}
    return {**kept, "HRDMA_TIMEOUT": "30", **added}


def hrdma(*arguments: str, timeout: float = 60, **added: str) -> subprocess.CompletedProcess[str]:
    """Keyword arguments are environment variables."""
    return python("-m", "hrdma", *arguments, timeout=timeout, **added)


def python(*arguments: str, timeout: float = 60, **added: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment(**added),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )

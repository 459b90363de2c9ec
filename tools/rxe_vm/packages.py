"""What the host needs for the virtual machine: packages of Debian, brought by tools/bootstrap as root or named otherwise."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: The guest's root is the host's, so what its tests call is installed here too.
NEEDED = [
    "qemu-system-x86",
    "busybox-static",
    "kmod",
    "iproute2",
    "iputils-ping",
    "rdma-core",
    "ibverbs-providers",
    "ibverbs-utils",
    "perftest",
    "python3-pyverbs",
]

INSTALL_SECONDS = 600


class StageError(Exception):
    """The virtual machine cannot be had, or it broke; the text says why and what mends it."""


def missing() -> list[str]:
    """Names of `NEEDED` that are not installed; all of them where there is no dpkg."""
    query = ["dpkg-query", "--show", "--showformat=${Package} ${db:Status-Status}\n", *NEEDED]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.splitlines()
    except FileNotFoundError:
        return NEEDED
    return [name for name in NEEDED if f"{name} installed" not in lines]


def bring() -> None:
    """Installs what is missing, as root; otherwise raises `StageError` that names it."""
    if names := missing():
        command = [ROOT / "tools" / "bootstrap", "packages", *names]
        try:
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=INSTALL_SECONDS)
        except subprocess.TimeoutExpired:
            raise StageError(f"apt did not install {' '.join(names)} within {INSTALL_SECONDS} s") from None
        if done.returncode:
            raise StageError(done.stderr.strip())

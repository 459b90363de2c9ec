"""For tests of tools/rxe_vm: its modules can be imported, and where QEMU is not to be had, tests that boot say so."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.append(str(TOOLS))


@pytest.fixture(scope="session")
def run() -> Path:
    """The program that runs a command in guests; as root it installs what it needs."""
    from rxe_vm import kernel, main, packages

    if platform.machine() != "x86_64":
        pytest.skip(f"the virtual machine is for x86-64, this is {platform.machine()}")
    names = packages.missing()
    if names and os.getuid() != 0:
        pytest.skip(f"not installed: sudo apt install {' '.join(names)}")
    try:
        packages.bring()
        kernel.kernel(main.CACHE)
    except packages.StageError as error:
        pytest.skip(str(error))
    return TOOLS / "rxe_vm" / "run"

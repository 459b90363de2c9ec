"""The other interpreters that are promised: the package built, installed and used with each that this machine has."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from test_packaging import HASTY, ROOT, run

MINORS = (10, 11, 12, 13, 14)  # of Python 3: requires-python, and the newest that README names

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

JOB = """
import sys
import numpy as np, hrdma, hrdma.objects
with hrdma.init() as comm:
    x = np.arange(1000, dtype="float32") * comm.size + comm.rank
    comm.allreduce(x)
    assert (x == np.arange(1000, dtype="float32") * 4 + 1).all(), x
    request = comm.broadcast(hrdma.zeros(1 << 20), async_op=True)
    assert request.wait(10).nbytes == 4 << 20
    try:
        comm.allreduce(np.array([object()]))
    except TypeError as error:
        assert "Python objects" in str(error)
    print("rank", comm.rank, "on", *sys.version_info[:2], flush=True)
"""


def interpreter(minor: int) -> str | None:
    """One on PATH, or one that pyenv or uv keeps."""
    name = f"python3.{minor}"
    homes = (Path.home() / ".pyenv/versions", Path.home() / ".local/share/uv/python")
    kept = [str(path) for home in homes for path in sorted(home.glob(f"*3.{minor}.*/bin/{name}"))]
    for path in filter(None, [shutil.which(name), *kept]):
        asked = "import sys, venv, ensurepip; print(sys.version_info[1])"
        found = subprocess.run([path, "-c", asked], capture_output=True, text=True)  # a shim may stand for none
        if found.returncode == 0 and found.stdout.strip() == str(minor):
            return path
    return None


@pytest.mark.parametrize("minor", MINORS)
def test_a_job_on_this_interpreter(minor, tmp_path):
    path = interpreter(minor)
    if path is None:
        pytest.skip(f"no python3.{minor} with venv on this machine")
    kept = shutil.ignore_patterns(".*", "build", "dist", "*.so", "*.egg-info", "__pycache__", "_core.c")
    shutil.copytree(ROOT, tmp_path / "tree", ignore=kept)
    compiler = tmp_path / "cc"
    compiler.write_text(HASTY)
    compiler.chmod(0o755)
    run(path, "-m", "venv", "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--prefer-binary", tmp_path / "tree", cwd=tmp_path, CC=str(compiler))
    (tmp_path / "job.py").write_text(JOB)
    for transport in ("shm", "tcp"):
        command = (python.with_name("hrdma"), "run", "-n", "2", "--timeout", "60", "job.py")
        output = run(*command, cwd=tmp_path, HRDMA_TRANSPORT=transport)
        assert all(f"rank {rank} on 3 {minor}" in output for rank in range(2)), output

"""Where a peer's packages live: one virtual environment each under build/peers, made on demand and kept.

An environment counts when its stamp says that it holds what is asked for now, under this Python; so runs after the first one
need no network, and one that was interrupted while it installed is made anew.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["HOME", "ROOT", "Unavailable", "compiled", "environment", "run"]

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "build" / "peers"
INSTALL_SECONDS = 600
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-Wall", "-Wextra", "-pthread")


class Unavailable(Exception):
    """A peer cannot be had here; the text says why."""


def run(command: Sequence[str | Path], seconds: float, env: dict[str, str] | None = None) -> str:
    """Standard output of a command that must succeed in time; its whole process group ends with it.

    Raises
    ------
    Unavailable
        It could not be started, failed, or took longer.
    """
    words = [str(word) for word in command]
    try:
        process = subprocess.Popen(
            words,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        raise Unavailable(f"{words[0]}: {error.strerror}") from None
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{Path(words[0]).name} {words[1]}: no end within {seconds:g} s") from None
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    if process.returncode:
        said = (err.strip() or out.strip() or f"status {process.returncode}").splitlines()
        raise Unavailable(next((line for line in reversed(said) if "ERROR" in line.upper()), said[-1]))
    return out


def environment(name: str, packages: Sequence[str], say: Callable[[str], None]) -> Path:
    """The folder of a virtual environment that holds these packages.

    Raises
    ------
    Unavailable
        They cannot be installed.
    """
    folder = HOME / name
    stamp = folder / "holds.json"
    holds = json.dumps({"python": sys.version, "packages": list(packages)})
    with alone(name):
        if stamp.exists() and stamp.read_text() == holds:
            return folder
        say(f"installing {' '.join(packages)} into {folder.relative_to(ROOT)}")
        shutil.rmtree(folder, ignore_errors=True)
        run([sys.executable, "-m", "venv", folder], INSTALL_SECONDS)
        pip = ["-m", "pip", "--quiet", "--disable-pip-version-check", "install", *packages]
        run([folder / "bin" / "python", *pip], INSTALL_SECONDS)
        stamp.write_text(holds)
    return folder


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Only one process at a time makes what has this name; the others wait until it is there, or has failed."""
    HOME.mkdir(parents=True, exist_ok=True)
    with (HOME / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compiled(name: str, *flags: str) -> Path:
    """A program or, with flags for one, a library of benchmarks/core, compiled for this machine where its source is younger.

    Raises
    ------
    Unavailable
        There is no compiler, or it failed.
    """
    folder = ROOT / "benchmarks" / "core"
    source, program = folder / f"{name}.c", HOME / "limits" / name
    youngest = max(path.stat().st_mtime for path in (source, *folder.glob("*.h"), Path(__file__)))
    with alone(name):
        if not program.exists() or program.stat().st_mtime < youngest:
            program.parent.mkdir(parents=True, exist_ok=True)
            half = program.with_suffix(
                ".part"
            )  # a running program's file cannot be written, and half of one not be run
            run(["cc", *FLAGS, *flags, source, "-lm", "-o", half], 60)
            half.replace(program)
    return program

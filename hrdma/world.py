"""Which rank this process is: read from the environment that a launcher set.

`hrdma run` and torchrun set ``RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT``; mpiexec and srun
set names of their own and no address. Where all ranks of such a job are on one host they need none: `World.job` is
then a name that exactly the ranks of this launch share, and `hrdma.control.meeting` turns it into an address.
"""

from __future__ import annotations

import operator
import os
import re
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hrdma.config import Config

__all__ = ["World", "host_identity", "machine_identity", "takes_turns", "world_from_env", "world_of", "yields_within"]

DEFAULT_PORT = 29500


class Names(NamedTuple):
    """The variables of one launcher; the first that is set counts."""

    launcher: str
    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()


# The first row whose rank is set decides. RANK comes first: torchrun and `hrdma run` may themselves run under Slurm.
LAUNCHERS: tuple[Names, ...] = (
    Names("RANK", "RANK", ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    Names(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    Names(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    Names("PMI", "PMI_RANK", ("PMI_SIZE",), ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",)),
    Names("Slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",)),
    Names("PMIx", "PMIX_RANK", ("PMIX_SIZE", "WORLD_SIZE")),
)


@dataclass(frozen=True)
class World:
    """A process's place in its job.

    Attributes
    ----------
    rank, size : int
        This rank, and how many there are.
    local_rank, local_size : int or None
        The same among the ranks of this host; None where the launcher does not say.
    master_addr : str
        Name or address at which rank 0 is met; empty when `job` stands in for it, or when there is one rank.
    master_port : int
        TCP port there.
    job : str
        Name shared by exactly the ranks of this launch on this host; empty when there is an address.
    launcher : str
        Whose variables were read; empty when there were none.
    listener : socket or None
        Already listening at the address; rank 0 has one where `hrdma.control.meet` chose the port.
    """

    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    master_addr: str = ""
    master_port: int = DEFAULT_PORT
    job: str = ""
    launcher: str = ""
    listener: socket.socket | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"world size {self.size}: at least 1 rank is needed")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is out of range for a world of {self.size}: 0 to {self.size - 1}")


def world_from_env(config: Config | None = None, environ: Mapping[str, str] | None = None) -> World:
    """Reads rank, size and meeting point from the environment.

    Parameters
    ----------
    config : Config, optional
        Its `port` goes before MASTER_PORT.
    environ : mapping, optional
        Read instead of ``os.environ``.

    Returns
    -------
    World
        Rank 0 of 1 where no launcher has left a trace.

    Raises
    ------
    ValueError
        A variable is missing or malformed; the message names it.
    """
    environ = os.environ if environ is None else environ
    names = next((names for names in LAUNCHERS if environ.get(names.rank)), None)
    if names is None:
        if environ.get("WORLD_SIZE", "1") not in ("", "1"):
            raise ValueError(f"WORLD_SIZE={environ['WORLD_SIZE']} but RANK is not set: set RANK on every rank")
        return World(0, 1, 0, 1)
    rank = _number(environ, names.rank)
    size_name = next((name for name in names.size if environ.get(name)), None)
    if size_name is None:
        raise ValueError(f"{names.rank}={rank} but {names.size[-1]} is not set: set it to the number of ranks")
    size = _number(environ, size_name)
    if size < 1:
        raise ValueError(f"{size_name}={size}: at least 1 rank is needed")
    if rank >= size:
        raise ValueError(f"{names.rank}={rank} is out of range for {size_name}={size}: 0 to {size - 1}")
    local_rank = _optional(environ, names.local_rank)
    local_size = _optional(environ, names.local_size)
    address = environ.get("MASTER_ADDR", "").strip().strip("[]")
    port = _master_port(environ)
    if config is not None and config.port is not None:
        port = config.port
    job = ""
    if not address and size > 1:
        job = _job_name(names, environ, size, local_size)
        if not job:
            raise ValueError(
                f"MASTER_ADDR is not set: set it, on all {size} ranks, to the address of the host of rank 0"
            )
    return World(rank, size, local_rank, local_size, address, port, job, names.launcher)


def world_of(config: Config, rank: int | None, size: int | None, master: str | None) -> World:
    """The world that the arguments of :func:`hrdma.init` name; what they leave open is read from the environment."""
    if (rank is None) != (size is None):
        raise ValueError("rank and size go together: pass both or neither")
    changes: dict[str, Any] = {}
    if master is not None:
        if not isinstance(master, str):
            raise TypeError(f"master={master!r}: text is wanted, 'address:port'")
        address, _, port = master.rpartition(":")
        if not address or not _is_port(port):
            raise ValueError(f"master={master!r}: 'address:port' is wanted, with a port of 1 to 65535")
        changes = {"master_addr": address.strip("[]"), "master_port": int(port), "job": ""}
    if rank is not None and size is not None:
        rank, size = _whole("rank", rank), _whole("size", size)
        environment = {} if master is not None else os.environ
        held = _master_port(environment)
        world = World(
            rank,
            size,
            master_addr=environment.get("MASTER_ADDR", "").strip().strip("[]") or ("127.0.0.1" if size == 1 else ""),
            master_port=config.port or held,
        )
        if size > 1 and master is None and not world.master_addr:
            raise ValueError("MASTER_ADDR is not set: pass master='address:port' or set it on all ranks")
    else:
        world = world_from_env(config)
    return replace(world, **changes)


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: an integer is wanted, not a {type(value).__name__}") from None


def _is_port(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,5}", text) is not None and 0 < int(text) < 65536


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ[name].strip()
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise ValueError(f"{name}={value}: expected a whole number, 0 or more")
    return int(value)


def _optional(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    name = next((name for name in names if environ.get(name)), None)
    return None if name is None else _number(environ, name)


def _master_port(environ: Mapping[str, str]) -> int:
    value = environ.get("MASTER_PORT", "").strip()
    if not value:
        return DEFAULT_PORT
    if not _is_port(value):
        raise ValueError(f"MASTER_PORT={value}: expected a port number, 1 to 65535")
    port = int(value)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("true", "1"):
        # The agent of torchrun listens on MASTER_PORT itself and goes on doing so while the ranks run.
        if port == 65535:
            raise ValueError("MASTER_PORT=65535 is held by torchrun and there is no port after it: set HRDMA_PORT")
        port += 1
    return port


def _job_name(names: Names, environ: Mapping[str, str], size: int, local_size: int | None) -> str:
    """A name that exactly the ranks of this launch share; empty when they are not, or may not be, on one host."""
    if local_size is not None and local_size < size:
        return ""
    if names.launcher == "RANK":
        return ""
    if environ.get("SLURM_JOB_ID") and names.launcher in ("Slurm", "PMI", "PMIx"):
        nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES")
        step = environ.get("SLURM_STEP_ID")
        return f"slurm:{environ['SLURM_JOB_ID']}.{step}" if nodes == "1" and step else ""
    if environ.get("PMIX_NAMESPACE"):
        return f"pmix:{environ['PMIX_NAMESPACE']}:{environ.get('PMIX_SERVER_URI2', '')}"
    if environ.get("PMI_PORT"):
        return f"pmi-port:{environ['PMI_PORT']}"
    proxy = _pmi_proxy(environ.get("PMI_FD", "")) or _ancestor()
    return f"pid:{proxy}:{_started(proxy)}" if proxy else ""


def _pmi_proxy(descriptor: str) -> int:
    """Process at the other end of PMI_FD: the launcher's proxy on this host made the socket pair. 0 when unknown."""
    if not re.fullmatch(r"[0-9]{1,9}", descriptor):
        return 0
    try:
        with socket.socket(fileno=os.dup(int(descriptor))) as pair:
            credentials = pair.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return 0
    return int(struct.unpack("3i", credentials)[0])


# Per-host daemons of launchers, as the kernel shows them (15 characters at most).
_DAEMONS = ("hydra_pmi_proxy", "hydra_bstrap_pr", "prted", "prterun", "orted", "mpiexec", "mpirun", "mpiexec.gforker")


def _ancestor() -> int:
    """The nearest ancestor that is a launcher's daemon; 0 when there is none."""
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat") as file:
                head, _, tail = file.read().rpartition(")")
        except OSError:
            return 0
        if head.partition("(")[2] in _DAEMONS:
            return pid
        pid = int(tail.split()[1])
    return 0


def _started(pid: int) -> str:
    """Start time of a process in clock ticks: pids are used again, pid and start time are not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def host_identity(override: str = "") -> str:
    """What ranks of one host have in common and others have not: boot id and network namespace.

    Two namespaces of one machine count as two hosts, else shared memory would silently carry the traffic of a network
    lab that is built from namespaces.
    """
    if override:
        return override
    try:
        return f"{machine_identity()}.{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return f"{os.uname().nodename}.{os.getpid()}"  # no proc: nobody is known to be local


def machine_identity(override: str = "") -> str:
    """What ranks have in common whose hosts share a kernel, and so its cores: the boot id."""
    if override:
        return override
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return f"{os.uname().nodename}.{os.getpid()}"


def yields_within(root: Path = Path("/")) -> str:
    """The group of tasks in which alone a yield gives way, where the kernel makes one of each session (autogroup).

    Empty where it does not: that is off, or control groups share out the processors; also for processes that no session was ever
    made for, which are a group too, and where the kernel does not say.
    Of control groups of the second version each but the outermost has a file ``cgroup.type``, of the first the outermost
    alone has one ``release_agent``: in a container the path does not tell.
    """
    proc, groups = root / "proc", root / "sys/fs/cgroup"
    try:
        if (proc / "sys/kernel/sched_autogroup_enabled").read_text().strip() != "1":
            return ""
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            folder = groups / names / path.lstrip("/")
            if "cpu" in names.split(",") and not (folder / "release_agent").exists():
                return ""
            while not names and (folder / "cgroup.type").exists():
                if "cpu" in (folder / "cgroup.controllers").read_text().split():
                    return ""
                folder = folder.parent
        return (proc / "self/autogroup").read_text().split()[0]
    except (OSError, ValueError, IndexError):
        return ""


def takes_turns(cards: Sequence[Mapping[str, Any]], rank: int) -> bool:
    """Whether a rank's background thread and another's are to share a core, by turns: two ranks that have two cores.

    Parameters
    ----------
    cards : sequence of mapping
        ``machine`` and ``cpus`` (a mask in hexadecimal digits) of every rank.
    rank : int
    """
    own = cards[rank]
    mask = int(own["cpus"], 16)
    beside = [int(card["cpus"], 16) for card in cards if card["machine"] == own["machine"]]
    return [other for other in beside if other & mask] == [mask, mask] and bin(mask).count("1") == 2

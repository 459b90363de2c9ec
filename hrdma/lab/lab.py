"""`Lab`: a network of namespaces on this machine, brought up from a fabric, found by name, taken down without a trace.

What the kernel has is what counts: a lab is there when namespaces with its name are. The file
`/run/hrdma/labs/NAME.json` is written last when it comes up and removed last when it goes down; namespaces without it
are an interrupted start, which `down` removes as well. A file that is none of ours, or of another version, counts as
none. A lock on the folder keeps two commands from building or removing at once; the kernel frees it when its holder
dies. Once begun a removal goes on to its end: signals that would end this process are held back meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hrdma import launch, places
from hrdma.lab import DEFAULT_NAME, PACKET, namespaces

if TYPE_CHECKING:
    from hrdma.topo.fabric import Fabric

__all__ = ["Lab", "down", "labs", "need_root"]

STATES = "/run/hrdma/labs"
LOCK_TIMEOUT = 60.0
# Hosts of a lab share the processors: who spins keeps others from their work. And they stand for machines with a network
# in between, whose congestion control is the system's (of a lab: the lab's).
LIKE_MACHINES = {"HRDMA_SPIN_US": "0", "HRDMA_TCP": "cc=system"}
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NETWORKS = range(128, 256)  # second octet of 10.x; one for each lab
VERSION = 2  # of the file
_KEYS = {"version", "name", "fabric", "network", "hosts", "ranks_per_host", "nodes"}


def _like_machines(asked: Mapping[str, str]) -> dict[str, str]:
    """What ranks of a lab are given, where a variable or a congestion control is not asked for."""
    given = {name: asked.get(name) or value for name, value in LIKE_MACHINES.items()}
    if not any(option.strip().startswith("cc=") for option in given["HRDMA_TCP"].split(",")):
        given["HRDMA_TCP"] += "," + LIKE_MACHINES["HRDMA_TCP"]
    return given


def need_root() -> None:
    """Raises PermissionError, with what to do, where this process is not root."""
    if os.geteuid() != 0:
        raise PermissionError("a lab is made of network namespaces, which only root may make: sudo hrdma lab ...")


def labs() -> list[str]:
    """Names of all labs of this machine, those of which only a part is there too."""
    files = []
    with contextlib.suppress(FileNotFoundError):
        files = [name.removesuffix(".json") for name in os.listdir(STATES) if name.endswith(".json")]
    return sorted({*(name for name in files if namespaces.is_name(name)), *namespaces.labs()})


class Lab:
    """A lab that is up. Get one by `Lab.up` or `Lab.find`; as a context manager it goes down at the end.

    Attributes
    ----------
    name : str
    fabric : str
        Name of the fabric.
    hosts : int
    ranks_per_host : int
    nodes : list of dict
        Hosts, then switches: ``name``, and ``nics`` with ``name``, ``address`` (empty for a port of a bridge),
        ``peer`` (the other end), ``rate_bit_s``, ``latency``, ``burst``, ``packet``.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)
        self.name: str = state["name"]
        self.fabric: str = state["fabric"]
        self.hosts: int = state["hosts"]
        self.ranks_per_host: int = state["ranks_per_host"]
        self.nodes: list[dict[str, Any]] = state["nodes"]

    @classmethod
    def up(cls, fabric: Fabric, name: str = DEFAULT_NAME, packet: int = PACKET) -> Lab:
        """Brings a lab up.

        Parameters
        ----------
        fabric : Fabric
            Up to 64 hosts; each link's rate, latency and burst are kept to in both directions.
        name : str
            Lower-case letters, digits and hyphens.
        packet : int
            Bytes that a NIC takes from TCP as one, at most: 65536 as most do, up to 524280 as with BIG TCP, which costs
            fewer interrupts on fast links. No more than a link's bucket lets through at once (1 ms of the rate).

        Raises
        ------
        PermissionError
            Not root, or not allowed to make namespaces.
        ValueError
            The name is malformed, the fabric cannot be a lab, or NICs take no such packets.
        FileExistsError
            There is a lab of this name.
        RuntimeError
            The kernel refuses something (such as a latency, without netem). Nothing is left then.

        Notes
        -----
        Time: 9 hosts at 6 switches 0.6 s of a processor, 16 hosts of a fat-tree at 20 switches 1 s.
        """
        need_root()
        if not namespaces.is_name(name):
            raise ValueError(f"lab name {name!r}: up to 32 lower-case letters, digits and hyphens")
        from hrdma.lab.layout import plan  # here: numpy and pyroute2 are not for commands that only look or run
        from hrdma.lab.wiring import build

        with _locked():
            if name in labs():
                raise FileExistsError(
                    f"there is a lab {name!r}: take it down (hrdma lab down --name {name}) or name another"
                )
            network = _free_network()
            layout = plan(fabric, network, packet)
            state = {
                "version": VERSION,
                "name": name,
                "fabric": fabric.name,
                "network": network,
                "hosts": layout.hosts,
                "ranks_per_host": fabric.ranks_per_host,
                "nodes": [{"name": node.name, "nics": [vars(nic) for nic in node.nics]} for node in layout.nodes],
            }
            try:
                build(name, layout)
                _write(state)
            except BaseException:
                _remove(name)
                raise
        return cls(state)

    @classmethod
    def find(cls, name: str = DEFAULT_NAME) -> Lab:
        """The lab of a name.

        Raises
        ------
        FileNotFoundError
            There is none.
        RuntimeError
            Only a part of it is there.
        """
        state = _read(name) if namespaces.is_name(name) else None
        there = namespaces.namespaces().get(name, [])
        if name not in labs():
            others = ", ".join(labs())
            raise FileNotFoundError(
                f"there is no lab {name!r}" + (f"; there are: {others}" if others else ": hrdma lab up")
            )
        if state is None or [node["name"] for node in state["nodes"]] != there:
            raise RuntimeError(f"of lab {name!r} only a part is there: remove it (hrdma lab down --name {name})")
        return cls(state)

    def down(self) -> None:
        """As `down`."""
        down(self.name)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def namespace(self, node: int | str) -> str:
        """File of the network namespace of a host (number or ``h0``) or a switch (``s0``).

        Raises
        ------
        ValueError
            There is no such node.
        """
        name = str(node) if not str(node).isdecimal() else f"h{int(node)}"
        if name not in [entry["name"] for entry in self.nodes]:
            switches = len(self.nodes) - self.hosts
            ends = f"h0 to h{self.hosts - 1}" + (f" and s0 to s{switches - 1}" if switches else "")
            raise ValueError(f"lab {self.name!r} has no node {node!r}; it has {ends}")
        return namespaces.path(self.name, name)

    def addresses(self, host: int) -> list[str]:
        """Addresses of a host's NICs, in the order of the NICs."""
        return [nic["address"].partition("/")[0] for nic in self.nodes[host]["nics"]]

    def run(
        self,
        command: Sequence[str],
        *,
        ranks_per_host: int | None = None,
        timeout: float | None = None,
        prefix: bool = True,
        keep_going: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> int:
        """Runs a command as the ranks of a job, each on its host, and waits for them: `hrdma.launch.run` in namespaces.

        Parameters
        ----------
        command : sequence of str
            Program and arguments; a program that ends in ``.py`` is run by this interpreter.
        ranks_per_host : int, optional
            Rank r is on host ``r // ranks_per_host``. The fabric's where it is not given: 1 but for clusters.
        timeout, prefix, keep_going, env
            As for `hrdma.launch.run`. Ranks sleep at once while they wait, unless ``HRDMA_SPIN_US`` says otherwise, and take
            hosts for machines (``cc=system``), unless ``HRDMA_TCP`` names a congestion control.

        Returns
        -------
        int
            The exit code, as that of `hrdma.launch.run`.

        Raises
        ------
        PermissionError
            Not root.
        """
        need_root()
        each = self.ranks_per_host if ranks_per_host is None else ranks_per_host
        if each < 1:
            raise ValueError(f"{each} ranks on each host: at least 1 is needed")
        files = [self.namespace(host) for host in range(self.hosts) for _ in range(each)]

        address = self.addresses(0)[0] if self.addresses(0) else "127.0.0.1"
        with namespaces.inside(files[0], lambda: places.reserve_port("")) as port:
            return launch.run(
                command,
                ranks=len(files),
                timeout=timeout,
                prefix=prefix,
                keep_going=keep_going,
                env={**(env or {}), **_like_machines({**os.environ, **(env or {})})},
                namespaces=files,
                meeting=(address, port),
            )

    def status(self) -> dict[str, Any]:
        """What the lab is and does: its plan, and by node the processes, by NIC the bytes sent and received."""
        running = namespaces.processes(self.namespace(node["name"]) for node in self.nodes)
        nodes = []
        for node in self.nodes:
            file = self.namespace(node["name"])
            moved = namespaces.counters(file)
            nics = [{**nic, **moved.get(nic["name"], {})} for nic in node["nics"]]
            nodes.append(
                {"name": node["name"], "namespace": os.path.basename(file), "pids": running[file], "nics": nics}
            )
        kept = {key: self._state[key] for key in ("name", "fabric", "hosts", "ranks_per_host")}
        return {**kept, "complete": True, "nodes": nodes}


def down(name: str) -> bool:
    """Takes a lab down, whatever is left of it: ends the processes in it, removes namespaces and state.

    Returns
    -------
    bool
        False where there was nothing.

    Raises
    ------
    PermissionError
        Not root.
    RuntimeError
        This process is inside the lab, or one in it does not end.

    Notes
    -----
    Blocks up to 7 s for processes that do not end when asked. Can be called again after any error.
    """
    need_root()
    with _locked():
        if name not in labs():
            return False
        _remove(name)
        return True


def _remove(name: str) -> None:
    with _signals_held_back():
        nodes = namespaces.namespaces().get(name, [])
        namespaces.stop_processes(namespaces.path(name, node) for node in nodes)
        for node in nodes:
            namespaces.remove(name, node)
        for file in (_file(name), _unfinished(name)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file)


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """What SIGINT, SIGTERM and SIGHUP do, they do afterwards. Other threads than the main one never run handlers."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(each, signal.signal(each, lambda number, _: came.append(number))) for each in STOPPING]
    try:
        yield
    finally:
        for each, handler in before:
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
        if came:
            signal.raise_signal(came[0])


# --- state ---


def _file(name: str) -> str:
    return f"{STATES}/{name}.json"


def _unfinished(name: str) -> str:
    return f"{STATES}/{name}.new"


def _read(name: str) -> dict[str, Any] | None:
    """The state of a lab; None when there is none that this version has written."""
    try:
        with open(_file(name)) as file:
            state = json.load(file)
    except (OSError, ValueError):
        return None
    ours = isinstance(state, dict) and set(state) >= _KEYS and (state["version"], state["name"]) == (VERSION, name)
    return state if ours else None


def _write(state: Mapping[str, Any]) -> None:
    with open(_unfinished(state["name"]), "w") as file:
        json.dump(state, file, indent=1)
    os.replace(file.name, _file(state["name"]))


def _free_network() -> int:
    used = {state["network"] for state in map(_read, labs()) if state}
    for network in NETWORKS:
        if network not in used:
            return network
    raise RuntimeError(f"{len(NETWORKS)} labs are up: take some down (hrdma lab down --all)")


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    os.makedirs(STATES, exist_ok=True)
    descriptor = os.open(STATES, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end = time.monotonic() + LOCK_TIMEOUT
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError(
                        f"another hrdma lab command has held the lock on {STATES} for {LOCK_TIMEOUT:g} s"
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)

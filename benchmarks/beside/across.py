"""Two network namespaces of this machine, for the two ranks of a job that is not on one host. Needs root.

They are joined by a link without a rate, and have the machine's congestion control. Launchers of MPIs reach the other by a
program in place of ssh, `peers/into_namespace`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from beside.environments import ROOT
from hrdma.lab import namespaces
from hrdma.lab.lab import Lab
from hrdma.topo.fabrics import parse

__all__ = ["TRANSPORT", "in_first", "joined", "launched", "name", "possible"]

TRANSPORT = "namespaces"
_AGENT = str(ROOT / "benchmarks" / "peers" / "into_namespace")
_RATE = "10gbit"  # taken off again
_PATIENCE = 10  # seconds
_NEEDED = (12, 21)  # CAP_NET_ADMIN, CAP_SYS_ADMIN
_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def name() -> str:
    """Of the lab, and so of the namespaces of this process."""
    return f"beside-{os.getpid()}"


def possible() -> bool:
    """Whether this process may make namespaces."""
    effective = int(Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0], 16)
    return os.geteuid() == 0 and all(effective >> bit & 1 for bit in _NEEDED)


def _as_outside(control: str) -> None:
    """Takes the rates off the links of this namespace, and gives it a congestion control.

    Waits until they are up, which is up to a second after they were made: an MPI started before takes loopback.
    """
    with IPRoute() as ip:
        for link in ip.get_links():
            if link.get_attr("IFLA_IFNAME") != "lo":
                with contextlib.suppress(NetlinkError):  # not one of the lab's: tunnels that a kernel puts everywhere
                    ip.tc("del", index=link["index"], parent=0xFFFFFFFF)
        end = time.monotonic() + _PATIENCE
        while {link.get_attr("IFLA_OPERSTATE") for link in ip.get_links(kind="veth")} != {"UP"}:
            if time.monotonic() > end:
                raise TimeoutError(f"a link between the namespaces is not up after {_PATIENCE} s")
            time.sleep(0.01)
    _CONTROL.write_text(control)


@contextlib.contextmanager
def joined(called: str = "") -> Iterator[Lab]:
    """The two, as long as it is entered.

    Raises
    ------
    OSError, RuntimeError
        They cannot be made: not root, or the kernel refuses something.
    """
    control = _CONTROL.read_text()
    with Lab.up(parse("mesh:2", rate=_RATE, latency=0), name=called or name()) as lab:
        for host in range(lab.hosts):
            namespaces.inside(lab.namespace(host), partial(_as_outside, control))
        yield lab


def in_first(command: Sequence[str]) -> list[str]:
    """A command, run in the first."""
    return ["nsenter", f"--net={Lab.find(name()).namespace(0)}", *command]


def launched(agent: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Options of an mpiexec that starts one rank in each, and what has to be in its environment.

    Parameters
    ----------
    agent : sequence of str
        Its options up to the one that names a program in place of ssh.
    """
    lab = Lab.find(name())
    places = {lab.addresses(host)[0]: lab.namespace(host) for host in range(lab.hosts)}
    words = [*agent, _AGENT, "-hosts", ",".join(places)]
    return words, {"BENCH_NAMESPACES": " ".join(f"{address}={file}" for address, file in places.items())}

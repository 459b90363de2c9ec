"""Cython-wrapped verbs: RDMA devices by hand, on libibverbs or on the simulated device ``sim``.

For who wants queue pairs rather than communicators. The two ends tell each other their addresses by any other means.

>>> from hrdma import verbs
>>> with verbs.Device("sim") as device:
...     pd, cq = verbs.ProtectionDomain(device), verbs.CompletionQueue(device)
...     here, there = verbs.QueuePair(pd, cq), verbs.QueuePair(pd, cq)
...     here.connect(there.address)
...     there.connect(here.address)
...     source = verbs.MemoryRegion(pd, b"hello")
...     target = verbs.MemoryRegion(pd, bytearray(5), remote_write=True)
...     here.write(source, target.address, target.rkey)
...     done = here.poll(timeout=5)[0].check()

Closing the device closes the rest. See `README.md` for what holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hrdma._core import (
    Completion,
    CompletionQueue,
    Device,
    MemoryRegion,
    Piece,
    ProtectionDomain,
    QueuePair,
    QueuePairAddress,
    SharedReceiveQueue,
)
from hrdma._core import verbs_devices as devices
from hrdma._core import verbs_found as _found
from hrdma._core import verbs_library as library

__all__ = [
    "Completion",
    "CompletionQueue",
    "Device",
    "Found",
    "MemoryRegion",
    "Path",
    "Piece",
    "ProtectionDomain",
    "QueuePair",
    "QueuePairAddress",
    "SharedReceiveQueue",
    "choose",
    "devices",
    "found",
    "library",
]


class Path(NamedTuple):
    """A GID of an active port.

    Attributes
    ----------
    port, gid_index : int
    gid : str
        As an IPv6 address.
    kind : str
        Such as ``"IPv4-mapped RoCE v2"``.
    interface : str
        The network interface behind it; empty where none is known.
    mtu : int
        Bytes.
    """

    port: int
    gid_index: int
    gid: str
    kind: str
    interface: str
    mtu: int


class Found(NamedTuple):
    """A device that a communicator would use.

    Attributes
    ----------
    name : str
    reason : str
        Why this device.
    distance : int
        As the kernel counts between NUMA nodes: 10 for the same one.
    why : str
        Why the first of its paths is the first.
    paths : list of Path
        Those that could be used, best first, at most 8.
    """

    name: str
    reason: str
    distance: int
    why: str
    paths: list[Path]


def found(
    names: str = "",
    *,
    ifname: str = "",
    gid_index: int | None = None,
    warn: Callable[[str], object] | None = None,
) -> list[Found | None]:
    """Which devices a communicator would use, and what of them: chosen as provider verbs does.

    Parameters
    ----------
    names : str
        As HRDMA_DEVICES: ``"mlx5_0,mlx5_*:1"``, best first; empty: the real ones; ``"*"``: software, if there is no
        other.
    ifname : str
        As HRDMA_IFNAME: interfaces, or networks, that GIDs may be of.
    gid_index : int, optional
        That GID alone.
    warn : callable, optional
        Called with one line of text where something of `names` is done without.

    Returns
    -------
    list of (Found or None)
        By number of the rail. None: the device that is named there will not do now. At least one that is not None; at
        most three entries.

    Raises
    ------
    DeviceError
        None will do, or one that is named is not there, or has no such port; the message says why.
    ValueError
        `ifname`, or a port in `names`, is wrong.

    Notes
    -----
    Opens every device that comes into question for a moment.
    """
    return [one and Found(*one[:4], [Path(*path) for path in one[4]]) for one in _found(names, ifname, gid_index, warn)]


def choose(
    names: str = "",
    *,
    ifname: str = "",
    gid_index: int | None = None,
    warn: Callable[[str], object] | None = None,
) -> list[tuple[str, int, int] | None]:
    """`found` in short: name, port and GID index of the best path, which are the arguments of `Device`.

    Parameters, exceptions and cost are those of `found`.
    """
    places = found(names, ifname=ifname, gid_index=gid_index, warn=warn)
    return [one and (one.name, one.paths[0].port, one.paths[0].gid_index) for one in places]

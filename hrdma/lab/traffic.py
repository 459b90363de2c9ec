"""Which provider carried how much, and the proof that shared memory carried nothing between hosts of a lab.

All hosts of a lab are one machine, so shared memory *could* carry everything and a measurement would be worth nothing.
The library tells hosts apart by boot id and network namespace; this does not trust it and asks the kernel again.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hrdma.communicator import Communicator

__all__ = ["bytes_by_provider", "check_wires"]


def bytes_by_provider(comm: Communicator) -> dict[str, int]:
    """Bytes that this rank has sent and received by provider, as far as it has peers.

    Returns
    -------
    dict
        Provider to bytes in both directions together: ``{"tcp": 67108864}``.
    """
    found: dict[str, int] = {}
    for peer in comm.stats()["peers"].values():
        found[peer["provider"]] = found.get(peer["provider"], 0) + peer["tx_bytes"] + peer["rx_bytes"]
    return found


def check_wires(comm: Communicator) -> dict[str, int]:
    """Fails where shared memory joins two hosts. All ranks of the communicator call it.

    Returns
    -------
    dict
        As `bytes_by_provider`, from before the call.

    Raises
    ------
    RuntimeError
        On every rank: two ranks in different network namespaces are connected by shared memory. The message names them.

    Notes
    -----
    Two allgathers of a few bytes for each rank.
    """
    peers = comm.stats()["peers"]
    moved = bytes_by_provider(comm)
    namespaces = np.empty(comm.size, np.uint64)
    comm.allgather(np.array([os.stat("/proc/self/ns/net").st_ino], np.uint64), namespaces)
    wrong = np.zeros(comm.size, np.uint8)
    for peer, entry in peers.items():
        wrong[peer] = entry["provider"] == "shm" and namespaces[peer] != namespaces[comm.rank]
    everyone = np.empty((comm.size, comm.size), np.uint8)
    comm.allgather(wrong, everyone)
    for rank, peer in np.argwhere(everyone):
        raise RuntimeError(
            f"ranks {rank} and {peer} are on different hosts of the lab and exchange through shared memory"
        )
    return moved

"""Traffic classes of communicators: ``comm.dup(traffic_class=46)`` has connections of its own, whose packets carry that DSCP.

A queue pair has one class from its first packet to its last, and a switch may carry what is urgent past what is not: so a
class is a set of connections beside the usual ones, made when a communicator first asks for it and shared by all that have
it. Each end stamps what it sends. Whatever is called on such a communicator, its one-sided operations included, goes by
them; over shared memory nothing leaves the host, and nothing is made.

The service level, or the socket's priority, is the class selector of the DSCP: its first three bits.
"""

from __future__ import annotations

import operator
import time
from array import array
from typing import TYPE_CHECKING

from hrdma.errors import DeviceError, PeerError
from hrdma.providers import domain_of_rail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hrdma.communicator import Communicator
    from hrdma.runtime import Runtime

__all__ = ["NO_CLASS", "connect", "dial", "dscp_of", "stamped"]

NO_CLASS = -1
_CARRIERS = ("verbs", "tcp")  # whose packets have a class
_FAILED = ("", "cannot be connected", "is not what the device says when it is read back")


def dscp_of(given: int | None) -> int:
    """The DSCP that a caller gave; NO_CLASS for None.

    Raises
    ------
    TypeError, ValueError
        It is no integer, or not one of 0 to 63.
    """
    if given is None:
        return NO_CLASS
    dscp = operator.index(given)
    if not 0 <= dscp <= 63:
        raise ValueError(f"traffic_class {dscp}: a DSCP is 0 to 63")
    return dscp


def dial(runtime: Runtime, rank: int, dscp: int = NO_CLASS) -> None:
    """Begins the connections to a rank: the usual ones, or those of a class beside them."""
    addresses = runtime.cards[rank]["addresses"]
    for name in [runtime.provider(runtime.rank, rank), *map(domain_of_rail, range(1, runtime.rails_to(rank)))]:
        for _ in range(runtime.streams_to(rank)):
            runtime.engine.connect(rank, name, bytes.fromhex(addresses[name]), runtime.rank < rank, dscp)


def connect(parent: Communicator, members: Sequence[int], dscp: int, timeout: float | None) -> None:
    """Connects these ranks of the world by connections of that class. Called by all ranks of the parent.

    Parameters
    ----------
    parent : Communicator
    members : sequence of int
        Of the new communicator; empty, or with NO_CLASS, where this rank has nothing to connect.
    dscp : int
    timeout : float, optional
        Seconds, for all of it; half of them for connecting.

    Raises
    ------
    DeviceError
        On every rank: one of them could not connect, or its device did not take the class. The parent goes on, and the
        class may be asked for again.
    PeerError, TimeoutError

    Notes
    -----
    Costs two allgathers of 8 bytes, and for each new pair of ranks what connecting costs.
    """
    runtime = parent._runtime
    seconds = parent._deadline_seconds(timeout)
    begun = time.monotonic()
    connected_by, deadline = begun + seconds / 2, begun + seconds  # who waits in vain still has time to say so
    others = [] if dscp == NO_CLASS else [rank for rank in members if rank != runtime.rank]
    ways = {rank: runtime.provider(runtime.rank, rank) for rank in others}
    others = [rank for rank in others if ways[rank] in _CARRIERS]
    new: list[tuple[int, int]] = []
    stands = False
    failed: Exception | None = None
    try:
        try:
            with runtime.dialing:  # a class is connected once, whoever asks
                new = [(rank, dscp) for rank in others if (rank, dscp) not in runtime.classes]
                runtime.classes.update(new)
            for rank, _ in new:
                dial(runtime, rank, dscp)
        except Exception as error:
            failed = error
        _agree(parent, dscp, failed is not None, failed, deadline)
        try:
            if others:
                runtime.engine.connect_wait(_left(connected_by), dscp)
        except (PeerError, TimeoutError) as error:
            failed = error
        forgot = [name for name in {ways[rank] for rank in others} if not runtime.engine.class_taken(name, dscp)]
        _agree(parent, dscp, 1 if failed is not None else 2 if forgot else 0, failed, deadline)
        stands = True
    finally:
        if new:
            if not stands:
                runtime.classes.difference_update(new)
            runtime.engine.class_end(dscp, stands)


def stamped(parent: Communicator, dscp: int) -> list[str]:
    """Providers whose connections to the ranks of a communicator carry its class; of a device it is read back."""
    runtime = parent._runtime
    names = {runtime.provider(runtime.rank, rank) for rank in parent.members if (rank, dscp) in runtime.classes}
    return sorted(name for name in names if runtime.engine.class_taken(name, dscp))


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _agree(parent: Communicator, dscp: int, outcome: int, failed: Exception | None, deadline: float) -> None:
    """All go on, or none does; outcome: of this rank, as `_FAILED` numbers them."""
    found = array("q", bytes(8 * parent.size))
    parent.allgather(array("q", [outcome]), found, timeout=_left(deadline))
    if not any(found):
        return
    which = "a traffic class" if dscp == NO_CLASS else f"traffic class {dscp}"
    words = "; ".join(f"rank {rank}: {_FAILED[said]}" for rank, said in enumerate(found) if said)
    raise DeviceError(f"{which}: {words}{f' ({failed})' if failed is not None else ''}") from failed

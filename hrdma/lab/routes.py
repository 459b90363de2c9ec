"""Next hops: which way a packet leaves a node of a fabric towards one address of a host.

Hosts go where `hrdma.topo.routing` says, so that what is measured in a lab takes the links on which it was predicted.
Its routes depend on the lane; packets have no lane, but an address: **what goes to NIC j of a host goes as lane j
does.** In a BCube the wrong digits are corrected beginning with level j, in a torus or mesh the coordinates beginning
with the dimension of NIC j; so the paths to the NICs of a host are apart where they can be.

::

    bcube:3,2, from 0 to 4:   4 = (1, 1) is wrong in both digits

        to NIC 0:  0 --level 0--> 1 --level 1--> 4
        to NIC 1:  0 --level 1--> 3 --level 0--> 4

Switches that are joined to other switches spread flows over all ports that begin a shortest path, as switches do
(equal-cost multipath): the kernel's hash of addresses and ports decides, the prediction has a hash of its own.

Every hop is nearer to the target than the one before, so that packets cannot go in circles.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from hrdma.topo.fabric import Fabric
from hrdma.topo.routing import Routes

__all__ = ["Exit", "NextHops"]


class Exit(NamedTuple):
    """One end of a link, seen from its node."""

    node: int  #: at the other end
    nic: int  #: NIC or port here
    peer_nic: int  #: NIC or port there


class NextHops:
    """Next hops in a fabric.

    Attributes
    ----------
    exits : list of list of Exit
        The links of each node, in the order of its NICs.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._routes = Routes(fabric)
        self.exits = [[self._exit(directed) for directed, _, _ in ways] for ways in fabric.around]

    def _exit(self, directed: int) -> Exit:
        here, there = self._fabric.ends(directed)
        return Exit(there.node, here.nic, there.nic)

    def of_host(self, host: int, target: int, nic: int) -> list[Exit]:
        """The path from a host to a NIC of another, link by link."""
        each = self._fabric.ranks_per_host
        lane = self._same_dimension(host, target, nic) if self._fabric.kind == "mesh" else nic
        return [self._exit(directed) for directed in self._routes.path(host * each, target * each, lane)]

    def of_switches(self, target: int) -> dict[int, list[Exit]]:
        """For each switch the exits that begin a shortest path to a host.

        Notes
        -----
        A breadth-first search: time proportional to the number of links.
        """
        distance = {target: 0}
        waiting = deque([target])
        while waiting:
            node = waiting.popleft()
            for end in self.exits[node]:
                if end.node not in distance:
                    distance[end.node] = distance[node] + 1
                    waiting.append(end.node)
        switches = range(self._fabric.hosts, self._fabric.nodes)
        return {s: [end for end in self.exits[s] if distance[end.node] == distance[s] - 1] for s in switches}

    def _same_dimension(self, host: int, target: int, nic: int) -> int:
        """The NIC of a mesh's host in the dimension of another's: at the edges some are missing, so numbers differ."""
        wanted = self._stride(self.exits[target][nic].node, target)
        return next(end.nic for end in self.exits[host] if self._stride(end.node, host) == wanted)

    @staticmethod
    def _stride(a: int, b: int) -> int:
        return abs(a - b)  # neighbours in a mesh differ by one step of their dimension

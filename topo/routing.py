"""Routes: over which directed links a message goes from one rank to another; what a schedule puts on each link.

A message leaves by the NIC that its transfer names as `lane`, where a shortest route begins there; else routing decides:

* BCube: digit correction. The digits that differ are made equal one after the other, beginning with level `lane`; each
  hop is host - switch - host, so hosts in between relay.
* ring, torus, mesh: dimension order, beginning with the dimension of NIC `lane`, the shorter way round.
* all others: shortest routes; where several ways on are as short, a hash of both ends and the lane picks one, as switches
  do for flows (equal-cost multipath), collisions included.

Ranks of one host reach each other through its memory: two more directed links per rank, out and in, numbered after those
of the fabric: `2 len(links) + 2 rank` and the next.

References
----------
Guo et al.: BCube, SIGCOMM, 2009 (BCubeRouting). Hopps: Analysis of an Equal-Cost Multi-Path Algorithm, RFC 2992, 2000.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hrdma.errors import ScheduleError
from hrdma.topo.fabric import Fabric, digits
from hrdma.topo.schedule import CHUNK, DST, LANE, ROUND, SPAN, SRC, Schedule, blocks

__all__ = ["Routes", "bind", "chunk_bytes", "link_loads"]

_GRIDS = ("ring", "torus", "mesh")


class Routes:
    """Routes of a fabric, remembered.

    Parameters
    ----------
    fabric : Fabric
    failed : iterable of int
        Links (by index) that carry nothing: what would cross one takes a shortest way round them.

    Attributes
    ----------
    rates, latencies, bursts : ndarray of float, shape (directed links,)
        bit/s, seconds and bytes.

    Raises
    ------
    ValueError
        No such link; from `path`: without the failed links there is no way.
    """

    def __init__(self, fabric: Fabric, failed: Iterable[int] = ()) -> None:
        self.fabric = fabric
        self.failed = frozenset(failed)
        for link in sorted(self.failed):
            if not 0 <= link < len(fabric.links):
                raise ValueError(f"{fabric.name} has no link {link}; it has {len(fabric.links)}")
        memory = 2 * fabric.ranks if fabric.ranks_per_host > 1 else 0
        wires = [link[2:] for link in fabric.links for _ in range(2)]
        inside = (fabric.memory_rate, fabric.memory_latency / 2, 0.0)
        table = np.array([*wires, *[inside] * memory], float).reshape(-1, 3)
        self.rates, self.latencies, self.bursts = table.T.copy()
        self._known: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._away: dict[int, list[int]] = {}
        self._digits = [digits(host, fabric.shape) for host in range(fabric.hosts)] if self._regular else []

    @property
    def _regular(self) -> bool:
        return self.fabric.kind in ("bcube", *_GRIDS)

    def path(self, src: int, dst: int, lane: int = 0) -> tuple[int, ...]:
        """The directed links from one rank to another, in order."""
        key = src, dst, lane
        if key not in self._known:
            fabric = self.fabric
            a, b = fabric.host_of(src), fabric.host_of(dst)
            if a == b:
                base = 2 * len(fabric.links)
                self._known[key] = (base + 2 * src, base + 2 * dst + 1)
            else:
                way: tuple[int, ...] = ()
                if self._regular:
                    way = (self._corrected if fabric.kind == "bcube" else self._ordered)(a, b, lane)
                if not way or any(directed >> 1 in self.failed for directed in way):
                    way = self._shortest(a, b, lane)
                self._known[key] = way
        return self._known[key]

    def _corrected(self, a: int, b: int, lane: int) -> tuple[int, ...]:
        fabric, found = self.fabric, []
        here, stop = self._digits[a], self._digits[b]
        levels = len(fabric.shape)
        strides = np.cumprod([1, *fabric.shape]).tolist()
        for level in ((lane + step) % levels for step in range(levels)):
            if here[level] != stop[level]:
                target = a + (stop[level] - here[level]) * strides[level]
                found += [fabric.around[a][level][0], fabric.around[target][level][0] ^ 1]
                a = target
        return tuple(found)

    def _ordered(self, a: int, b: int, lane: int) -> tuple[int, ...]:
        fabric, found = self.fabric, []
        shape, wrap = fabric.shape, fabric.kind != "mesh"
        strides = np.cumprod([1, *shape]).tolist()
        first = 0
        if lane < fabric.nics(a):
            beyond = abs(fabric.around[a][lane][1] - a)
            first = max(d for d in range(len(shape)) if strides[d] <= beyond)
        for dimension in ((first + step) % len(shape) for step in range(len(shape))):
            side, stride = shape[dimension], strides[dimension]
            while a // stride % side != self._digits[b][dimension]:
                digit, ahead = a // stride % side, (self._digits[b][dimension] - a // stride % side) % side
                up = ahead <= side // 2 if wrap else self._digits[b][dimension] > digit
                target = a + ((digit + (1 if up else -1)) % side - digit) * stride
                found.append(next(directed for directed, node, _ in fabric.around[a] if node == target))
                a = target
        return tuple(found)

    def _distances(self, host: int) -> list[int]:
        """Hops of every node to a host."""
        if host not in self._away:
            away = [-1] * self.fabric.nodes
            away[host], todo = 0, [host]
            for node in todo:
                for directed, other, _ in self.fabric.around[node]:
                    if away[other] < 0 and directed >> 1 not in self.failed:
                        away[other] = away[node] + 1
                        todo.append(other)
            self._away[host] = away
        return self._away[host]

    def _shortest(self, a: int, b: int, lane: int) -> tuple[int, ...]:
        fabric, away, found, node = self.fabric, self._distances(b), [], a
        if away[a] < 0:
            raise ValueError(f"{fabric.name}: no way from host {a} to host {b} without links {sorted(self.failed)}")
        while node != b:
            ways = [
                way for way in fabric.around[node]
                if away[way[1]] == away[node] - 1 and way[0] >> 1 not in self.failed
            ]  # fmt: skip
            chosen = next((way for way in ways if node == a and way[2] == lane), None)
            chosen = chosen or ways[_mixed(a, b, lane, node) % len(ways)]
            found.append(chosen[0])
            node = chosen[1]
        return tuple(found)


def _mixed(*values: int) -> int:
    """A hash that is the same everywhere."""
    mixed = 0x9E3779B9
    for value in values:
        mixed = (mixed ^ (value + 1)) * 0x85EBCA6B & 0xFFFFFFFF
        mixed ^= mixed >> 13
    return mixed * 0xC2B2AE35 >> 7 & 0xFFFFFF


def bind(schedule: Schedule, routes: Routes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The route of every transfer, compactly.

    Returns
    -------
    which : ndarray of int, shape (transfers,)
        Index of each transfer's route.
    start, links : ndarray of int
        Route i is ``links[start[i]:start[i + 1]]``.

    Raises
    ------
    ScheduleError
        When the schedule is for another number of ranks than the fabric has.
    """
    fabric = routes.fabric
    if schedule.size != fabric.ranks:
        raise ScheduleError(f"the schedule is for {schedule.size} ranks; {fabric.name} has {fabric.ranks}")
    table = schedule.table.astype(np.int64)
    keys = (table[:, SRC] * schedule.size + table[:, DST]) * 256 + table[:, LANE]
    distinct, which = np.unique(keys, return_inverse=True)
    paths = [routes.path(k // 256 // schedule.size, k // 256 % schedule.size, k % 256) for k in distinct.tolist()]
    start = np.cumsum([0, *map(len, paths)])
    return which, start, np.fromiter((link for path in paths for link in path), np.int64, int(start[-1]))


def chunk_bytes(schedule: Schedule, nbytes: float) -> np.ndarray:
    """Bytes of every transfer of a schedule whose whole vector has `nbytes` (alltoall: what one rank sends)."""
    size, split = schedule.size, schedule.split
    nblocks = size if schedule.collective == "alltoall" else blocks(schedule.collective, size)
    if schedule.weights is None:
        return schedule.table[:, SPAN] * (nbytes / nblocks / split)
    edges = np.concatenate([[0.0], np.cumsum(schedule.weights)]) / sum(schedule.weights)

    def at(chunk: np.ndarray) -> np.ndarray:
        return (chunk // split + edges[chunk % split]) * (nbytes / nblocks)

    first = schedule.table[:, CHUNK].astype(np.int64)
    return at(first + schedule.table[:, SPAN]) - at(first)


def link_loads(schedule: Schedule, routes: Routes, nbytes: float) -> np.ndarray:
    """Bytes that each round puts on each directed link: shape (rounds, directed links)."""
    which, start, links = bind(schedule, routes)
    hops = np.diff(start)[which]
    at = np.repeat(start[:-1][which] - np.concatenate([[0], np.cumsum(hops)[:-1]]), hops) + np.arange(hops.sum())
    loads = np.zeros((schedule.nrounds, len(routes.rates)))
    np.add.at(
        loads, (np.repeat(schedule.table[:, ROUND], hops), links[at]), np.repeat(chunk_bytes(schedule, nbytes), hops)
    )
    return loads

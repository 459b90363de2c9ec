"""Event-driven simulation of a schedule on a fabric: what contention, a slow host or a failed link do to it.

Every transfer is a flow of fluid over the directed links of its route; those of one connection (source, destination, lane)
follow each other. The flows of a moment share the links fairly (max-min: no flow can get more without taking from one that
has no more); whenever one starts or ends, all rates are computed anew.

    A --10--> switch --10--> C     two flows into C get 5 each; when that of B ends, that of A goes on with 10
    B --10--> switch

A link with a burst has a bucket of so many bytes, full in the beginning. While there is something in it the link holds nothing
up, and it empties by what the link carries beyond its rate; it fills while the link carries less.

A transfer starts when what it sends is there (`hrdma.topo.depend`), its sender's core has prepared it (`Cost.message`, one
message after the other), and the latency has passed; its operands are reduced by the receiver's core, one result after the
other (`Cost.gamma`). Links say what moving costs; `beta` is the cores' part of it where `Cost.offload` does not say that
they have none. `switch` and `pull` are not used.

Where all ranks share cores (`Cost.cores`), as hosts made on one machine do, work of any rank waits for the core that is free
first. What a message takes on its way between such hosts (`Cost.latency`) is work of the same cores, the kernel's, and is
counted as that; the latency of links is distance, during which no core does anything.

References
----------
Bertsekas, Gallager: Data Networks, 2nd edition, 1992, section 6.5 (max-min fair flow control).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from hrdma.errors import ScheduleError
from hrdma.topo.cost import LANDED, Cost, effort
from hrdma.topo.depend import graph
from hrdma.topo.fabric import Fabric
from hrdma.topo.routing import Routes, bind, chunk_bytes
from hrdma.topo.schedule import CHUNK, DST, OP, REDUCE, ROUND, SRC, Schedule

__all__ = ["WIRES", "Simulation", "fair", "simulate"]

WIRES = Cost(0.0, 0.0, 0.0, offload=True, name="links alone")
_EVENTS = 3  # of a chunk in a round, one after the other: it may start, it has arrived, it is reduced
_EQUAL = 1e-9  # relative: times and rates that close are the same
_EMPTY = 1e-6  # of a bucket


class Simulation(NamedTuple):
    """What a simulation found, in seconds and bytes."""

    seconds: float  #: until the last rank has its result
    finished: np.ndarray  #: per rank, when its last result is there
    round_ends: np.ndarray  #: per round, when the last of its transfers has arrived
    link_bytes: np.ndarray  #: per directed link (then memory out and in per rank where hosts have several ranks)
    link_rates: np.ndarray  #: bit/s of the same
    events: int

    @property
    def utilisation(self) -> np.ndarray:
        """Per directed link, what it carried over what its rate carries in that time: 1 is busy all the time, bursts make it more. 0
        where all took no time."""
        return self.link_bytes * 8 / self.link_rates / self.seconds if self.seconds else 0.0 * self.link_bytes


def fair(ways: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Max-min fair rates of flows.

    Parameters
    ----------
    ways : ndarray of int, shape (flows, hops)
        Links of each flow, filled up with ``len(capacity)``.
    capacity : ndarray of float, shape (links,)

    Returns
    -------
    ndarray of float, shape (flows,)

    Notes
    -----
    In each pass all links are filled whose flows are held lower nowhere else. Cost: flows times hops per pass; one pass
    where all is symmetric, at most one per link.
    """
    nlinks = len(capacity)
    left = np.append(capacity, np.inf)
    rates, todo = np.zeros(len(ways)), np.arange(len(ways))
    while len(todo):
        crossed = ways[todo]
        count = np.bincount(crossed.ravel(), minlength=nlinks + 1)
        share = left / np.maximum(count, 1)
        shares = share[crossed]
        least = shares.min(axis=1)
        lowest = np.full(nlinks + 1, np.inf)
        np.minimum.at(lowest, crossed.ravel(), np.repeat(least, crossed.shape[1]))
        tight = lowest >= share * (1 - _EQUAL)
        settled = (tight[crossed] & (shares <= least[:, None] * (1 + _EQUAL))).any(axis=1)
        rates[todo[settled]] = least[settled]
        taken = np.repeat(least[settled], crossed.shape[1])
        left[:nlinks] -= np.bincount(crossed[settled].ravel(), taken, nlinks + 1)[:nlinks]
        np.maximum(left, 0.0, out=left)
        todo = todo[~settled]
    return rates


def simulate(
    schedule: Schedule,
    fabric: Fabric,
    nbytes: float,
    cost: Cost = WIRES,
    *,
    slow: Mapping[int, float] | None = None,
    failed: Iterable[int] = (),
    accuracy: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
) -> Simulation:
    """Runs a schedule on a fabric, in simulated time.

    Parameters
    ----------
    schedule : Schedule
        Complete.
    fabric : Fabric
        With as many ranks.
    nbytes : float
        Of the whole vector (of all blocks together; alltoall: what one rank sends).
    cost : Cost
        What a message and a reduction cost the cores; `WIRES`: nothing.
    slow : mapping of int to float, optional
        Hosts that are so many times slower: their links, memory and cores.
    failed : iterable of int
        Links (by index) that carry nothing; flows take another way.
    accuracy : float
        0: exact. Else about the share of the result by which it may be too early: events that close to each other count
        as one, and far fewer rates are computed where nothing is symmetric.
    progress : callable, optional
        Called with (transfers that arrived, all transfers) after every moment.

    Raises
    ------
    ScheduleError
        One rank's view, or for another number of ranks.
    ValueError
        Bytes below 0, an accuracy not in [0, 1), a host or link that is not there, a factor not above 0, no way left between two hosts.

    Notes
    -----
    Cost: the graph, and per moment at which something starts or ends some numpy over the flows of that moment.
    """
    if schedule.view is not None:
        raise ScheduleError(f"this is rank {schedule.view}'s view; only a complete schedule can be simulated")
    if not 0 <= nbytes < float("inf") or not 0 <= accuracy < 1:
        raise ValueError(f"out of range: {nbytes} bytes (0 or more), accuracy {accuracy} (in [0, 1))")
    return _Simulator(schedule, fabric, nbytes, cost, dict(slow or {}), failed, accuracy).run(progress)


class _Simulator:
    """The state of one simulation: flows that move, and nodes that are due at a time to come."""

    def __init__(
        self, schedule, fabric: Fabric, nbytes: float, cost: Cost, slow: dict, failed, accuracy: float
    ) -> None:
        routes = Routes(fabric, failed)
        which, start, links = bind(schedule, routes)
        hops = np.diff(start)
        self.ways = np.full((len(hops), int(hops.max(initial=1))), len(routes.rates))
        self.ways[np.repeat(np.arange(len(hops)), hops), np.arange(len(links)) - np.repeat(start[:-1], hops)] = links
        self.ways, self.connection = self.ways[which], which
        self.busy = np.zeros(len(hops), bool)
        self.queues: dict[int, deque[int]] = {}  # of connections: transfers that wait for those before them
        burden = np.ones(schedule.size)
        for host, factor in slow.items():
            if not 0 <= host < fabric.hosts:
                raise ValueError(f"{fabric.name} has no host {host}; it has {fabric.hosts}")
            if not factor > 0:
                raise ValueError(f"host {host} cannot be {factor} times slower; the factor is above 0")
            ranks = range(host * fabric.ranks_per_host, (host + 1) * fabric.ranks_per_host)
            wires = [other for directed, _, _ in fabric.around[host] for other in (directed, directed ^ 1)]
            if fabric.ranks_per_host > 1:
                wires += [2 * len(fabric.links) + 2 * rank + end for rank in ranks for end in (0, 1)]
            routes.rates[wires] /= factor
            routes.bursts[wires] /= factor
            burden[ranks] *= factor
        self.schedule, self.routes = schedule, routes
        self.bytes = chunk_bytes(schedule, nbytes).astype(float)
        self.carried = np.bincount(
            self.ways.ravel(), np.repeat(self.bytes, self.ways.shape[1]), len(routes.rates) + 1
        )[:-1]  # fmt: skip
        least = float((np.maximum(self.carried - routes.bursts, 0) * 8 / routes.rates).max(initial=0.0))
        self.tick = accuracy * least / max(1, _EVENTS * schedule.nrounds)
        latencies = np.append(routes.latencies, 0.0)
        self.latency = latencies[self.ways].sum(axis=1)
        src, dst = schedule.table[:, SRC], schedule.table[:, DST]
        long = self.bytes > cost.eager
        self.work = np.where(long, cost.message(float("inf")), cost.alpha) * burden[src]
        self.graph = graph(schedule)
        self.waits = self.graph.waits.copy()
        first, operands = self.graph.first, self.graph.operands
        each = np.array([effort(n) for n in range(int(operands.max(initial=1)) + 2)])
        sent, meets = (schedule.table[:, [ROUND, end, CHUNK]].astype(np.int64) for end in (SRC, DST))
        scale = np.array([schedule.size * schedule.chunks, schedule.chunks, 1])
        passes = each[operands + 1] + LANDED * np.isin(meets[first] @ scale, sent @ scale)
        reducing = np.where(schedule.table[first, OP] == REDUCE, operands * passes, 0.0)
        folding = cost.gamma * self.bytes[first] * reducing * burden[dst[first]]
        self.pool = [0.0] * cost.cores if 0 < cost.cores < schedule.size else []  # when each shared core is done
        if self.pool:
            self.work += cost.latency * burden[src]
            if not cost.offload:
                self.work += cost.beta * self.bytes * burden[src]
        else:
            self.latency += cost.latency
        # nodes in one order: transfers, results, fences
        fences = len(self.waits) - len(src) - len(first)
        self.rank = np.concatenate([src, dst[first], np.zeros(fences, src.dtype)])
        self.work = np.concatenate([self.work, folding, np.zeros(fences)])
        self.free = np.zeros(schedule.size)  # when each rank's core is done
        self.due, self.due_at = np.empty(0, np.int64), np.empty(0)
        self.moving, self.left, self.rates = np.empty(0, np.int64), np.empty(0), np.empty(0)
        self.bursting = bool(routes.bursts.any())
        self.buckets = np.append(routes.bursts, np.inf)  # bytes that may pass at once now
        self.drain = np.zeros(len(routes.rates))  # bytes per second that a link carries beyond its rate

    def run(self, progress: Callable[[int, int], None] | None) -> Simulation:
        transfers, now, events, arrived, stale = len(self.bytes), 0.0, 0, 0, False
        done = np.zeros(len(self.waits))
        self.enable(np.flatnonzero(self.waits == 0), now)
        while len(self.due) or len(self.moving):
            if stale:
                self.share()
            ends = self.left / self.rates
            before, now = now, min(self.due_at.min(initial=np.inf), now + ends.min(initial=np.inf), now + self.empty())
            margin = max(self.tick, now * 1e-13)
            self.left -= self.rates * (now - before)
            stale = self.fill(now - before, margin)
            ended = self.left <= np.maximum(self.rates * margin, self.bytes[self.moving] * _EQUAL)
            over = self.moving[ended]
            ripe = self.due_at <= now + margin
            fresh, others = self.due[ripe], ~ripe
            self.due, self.due_at = self.due[others], self.due_at[others]
            begun = fresh[fresh < transfers]
            empty = self.bytes[begun] == 0
            finished = np.concatenate([over, begun[empty], fresh[fresh >= transfers]])
            begun = self.admitted(over, begun[~empty])
            if len(over) or len(begun):
                self.moving = np.concatenate([self.moving[~ended], begun])
                self.left = np.concatenate([self.left[~ended], self.bytes[begun]])
                stale = True
            arrived += len(over) + int(empty.sum())
            while len(finished):
                done[finished] = now
                finished = self.enable(self.released(finished), now)
            events += 1
            if progress:
                progress(arrived, transfers)
        return self.found(done, events)

    def open(self) -> np.ndarray:
        """Which links hold nothing up, as there is something in their buckets; the last stands for the hops that are not."""
        return self.buckets > np.append(self.routes.bursts, 0.0) * _EMPTY

    def share(self) -> None:
        """Gives what moves its rates. What no link of its route holds up passes at once, as far as the buckets go."""
        capacity, ways = self.routes.rates / 8, self.ways[self.moving]
        if self.bursting:
            for each in np.flatnonzero(self.open()[ways].all(axis=1)).tolist():
                passed = min(self.buckets[ways[each]].min(), self.left[each])
                self.left[each] -= passed
                self.buckets[ways[each]] -= passed
            held = ~self.open()[ways].all(axis=1)  # of the others nothing is left
            self.rates = np.ones(len(ways))
            self.rates[held] = fair(ways[held], np.where(self.open()[:-1], np.inf, capacity))
            carried = np.bincount(ways.ravel(), np.repeat(self.rates * held, ways.shape[1]), len(self.buckets))
            self.drain = carried[:-1] - capacity
        else:
            self.rates = fair(ways, capacity)

    def empty(self) -> float:
        """Seconds until the next bucket is empty."""
        emptying = self.open()[:-1] & (self.drain > 0) if self.bursting else np.empty(0, np.int64)
        return float((self.buckets[:-1][emptying] / self.drain[emptying]).min(initial=np.inf))

    def fill(self, seconds: float, margin: float) -> bool:
        """Time has passed for the buckets. Returns whether one is empty now that was not; those are that would be within the margin."""
        if not self.bursting:
            return False
        before = self.open()
        level = np.clip(self.buckets[:-1] - self.drain * seconds, 0.0, self.routes.bursts)
        self.buckets[:-1] = np.where((self.drain > 0) & (level <= self.drain * margin), 0.0, level)
        return bool((before & ~self.open()).any())

    def admitted(self, over: np.ndarray, begun: np.ndarray) -> np.ndarray:
        """Those that move from now on, as transfers end and others would begin."""
        following: list[int] = []
        self.busy[self.connection[over]] = False
        if self.queues:
            for c in self.connection[over].tolist():
                if c in self.queues:
                    following.append(self.queues[c].popleft())
                    self.busy[c] = True
                    if not self.queues[c]:
                        del self.queues[c]
        begun = np.sort(begun)
        lines, first = np.unique(self.connection[begun], return_index=True)
        goes = np.zeros(len(begun), bool)
        goes[first[~self.busy[lines]]] = True
        for transfer in begun[~goes].tolist():
            self.queues.setdefault(int(self.connection[transfer]), deque()).append(transfer)
        self.busy[lines] = True
        return np.concatenate([np.array(following, np.int64), begun[goes]])

    def released(self, nodes: np.ndarray) -> np.ndarray:
        """Those that waited for the last of these nodes."""
        start, length = self.graph.start[nodes], self.graph.start[nodes + 1] - self.graph.start[nodes]
        at = np.repeat(start - np.cumsum(length) + length, length) + np.arange(length.sum())
        freed, times = np.unique(self.graph.then[at], return_counts=True)
        self.waits[freed] -= times
        return freed[self.waits[freed] == 0]

    def enable(self, nodes: np.ndarray, now: float) -> np.ndarray:
        """Gives nodes their turn on their rank's core, and says when they are due; returns those that are done at once."""
        transfers = len(self.bytes)
        work = self.work[nodes]
        at = np.full(len(nodes), now)
        busy = np.flatnonzero(work > 0).tolist()
        if self.pool:
            for each in sorted(busy, key=lambda each: (nodes[each] < transfers, nodes[each])):
                begins = max(heapq.heappop(self.pool), now)
                at[each] = begins + work[each]
                heapq.heappush(self.pool, at[each])
        elif busy:
            # results before sends: what was received is handled first
            order = np.array(busy)[np.lexsort((nodes[busy], nodes[busy] < transfers, self.rank[nodes[busy]]))]
            ranks, total = self.rank[nodes[order]], np.cumsum(work[order])
            opens = np.flatnonzero(np.append(True, ranks[1:] != ranks[:-1]))
            members = np.diff(np.append(opens, len(ranks)))
            base = np.maximum(self.free[ranks[opens]], now) - (total[opens] - work[order][opens])
            at[order] = np.repeat(base, members) + total
            self.free[ranks[opens]] = at[order][opens + members - 1]
        sends = nodes < transfers
        at[sends] += self.latency[nodes[sends]]
        instant = ~sends & (at <= now)
        self.due, self.due_at = np.append(self.due, nodes[~instant]), np.append(self.due_at, at[~instant])
        return nodes[instant]

    def found(self, done: np.ndarray, events: int) -> Simulation:
        schedule, transfers = self.schedule, len(self.bytes)
        results = done[transfers : transfers + self.graph.results]
        finished, ends = np.zeros(schedule.size), np.zeros(schedule.nrounds)
        np.maximum.at(finished, schedule.table[self.graph.first, DST], results)
        np.maximum.at(ends, schedule.table[:, ROUND], done[:transfers])
        return Simulation(float(finished.max(initial=0.0)), finished, ends, self.carried, self.routes.rates, events)

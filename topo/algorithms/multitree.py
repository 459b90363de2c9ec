"""MultiTree: a spanning tree from every rank, all grown at once so that no link is used twice in a step.

Tree r carries chunk r (1 / ranks of the vector). Downwards the trees are the allgather, backwards in time the
reduce-scatter. They are grown step by step: in each step every directed link may be taken once, only ranks that joined
before the step may be parents, and the trees take turns, one new rank each, until a whole round of turns adds nothing.

    ring of 3, trees of 0, 1 and 2

      step 0   0>1 of tree 0, 1>2 of tree 1, 2>0 of tree 2, then 0>2, 1>0, 2>1: all links are taken, all trees complete

Where hosts are joined through switches an edge takes every link of the shortest free way between two hosts that goes
through switches only, nearer hosts first.

Steps 2 T with T found by growing (at least (ranks - 1) / links of a rank); a step takes 1 / ranks of the vector, so bytes
per link are T / ranks of the vector per phase. Growing costs O(ranks**2 * links) at worst: some seconds for 256 hosts.
Steps are kept apart by `window` 1: without contention nothing else is needed.

References
----------
Huang, Majumder, Kim, Muzahid, Yum, Kim: Communication Algorithm-Architecture Co-Design for Distributed Deep Learning,
ISCA, 2021.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache

import numpy as np

from hrdma.topo.cost import Work
from hrdma.topo.fabric import Fabric
from hrdma.topo.phases import COLLECTIVES, Written, assemble
from hrdma.topo.schedule import REDUCE, Schedule, rows

__all__ = ["COLLECTIVES", "build", "fits", "grow", "work"]


def fits(fabric: Fabric) -> str:
    """Why it cannot be had on a fabric; empty when it can."""
    if fabric.ranks_per_host > 1:
        return "it has one rank per host"
    return "" if fabric.hosts <= 256 else f"growing trees for {fabric.hosts} hosts takes too long; the limit is 256"


@lru_cache(maxsize=16)
def grow(fabric: Fabric) -> tuple[tuple[int, int, int, int, int, int], ...]:
    """Edges of the trees: (step, tree, parent, child, NIC of the parent, NIC of the child).

    Returns
    -------
    tuple
        In the order in which they joined.
    """
    hosts = fabric.hosts
    members = [[root] for root in range(hosts)]
    joined = [{root} for root in range(hosts)]
    edges, step, missing = [], 0, hosts * (hosts - 1)
    direct = not fabric.switches
    while missing:
        taken: set[int] = set()
        old = [len(listed) for listed in members]
        first = [0] * hosts  # parents before this one have no free way left; links only get fewer within a step
        added = True
        while added:
            added = False
            for tree in range(hosts):
                if len(joined[tree]) == hosts:
                    continue
                while first[tree] < old[tree]:
                    parent = members[tree][first[tree]]
                    way = (_next if direct else _through)(fabric, parent, joined[tree], taken)
                    if way:
                        break
                    first[tree] += 1
                else:
                    continue
                taken.update(way)
                (_, out), (child, into) = fabric.ends(way[0])[0], fabric.ends(way[-1])[1]
                members[tree].append(child)
                joined[tree].add(child)
                edges.append((step, tree, parent, child, out, into))
                missing -= 1
                added = True
        step += 1
    return tuple(edges)


def _next(fabric: Fabric, parent: int, joined: set[int], taken: set[int]) -> list[int]:
    """The first free link to a host that is not in the tree."""
    for directed, node, _ in fabric.around[parent]:
        if directed not in taken and node not in joined:
            return [directed]
    return []


def _through(fabric: Fabric, parent: int, joined: set[int], taken: set[int]) -> list[int]:
    """The links of a shortest free way through switches to a host that is not in the tree."""
    todo: deque[tuple[int, tuple[int, ...]]] = deque([(parent, ())])
    seen = {parent}
    while todo:
        node, way = todo.popleft()
        for directed, other, _ in fabric.around[node]:
            if directed in taken or other in seen:
                continue
            if other < fabric.hosts:
                if other not in joined:
                    return [*way, directed]
                continue
            seen.add(other)
            todo.append((other, (*way, directed)))
    return []


def build(collective: str, fabric: Fabric, parts: int = 1, root: int = 0, rank: int | None = None) -> Schedule:
    """The schedule; `parts` is not used: steps overlap nowhere."""
    edges = np.array(grow(fabric), np.int32).reshape(-1, 6)
    steps = int(edges[:, 0].max(initial=-1)) + 1
    step, tree, parent, child, out, into = edges.T
    table = rows(steps - 1 - step, child, parent, tree, REDUCE, 1, into)
    written = Written(table, out, np.arange(fabric.hosts, dtype=np.int32), steps)
    return assemble(collective, fabric.hosts, written, "multitree", root, rank, window=1)


def work(collective: str, fabric: Fabric, nbytes: float, parts: int = 1) -> Work:
    """Closed form, once the trees are grown. Exact where links join hosts: at a switch steps do not stay apart."""
    edges = grow(fabric)
    steps = edges[-1][0] + 1 if edges else 0
    phases = 2 if collective == "allreduce" else 1
    shared = nbytes * (1 - 1 / fabric.hosts)
    copied = 0.0 if collective == "reduce_scatter" else shared
    reduced = 0.0 if collective == "allgather" else shared
    rails = (fabric.hosts - 1) / steps if steps else 1.0
    return Work(phases * steps, phases * (fabric.hosts - 1), phases * shared, copied, reduced, rails=rails)

"""Which levels, threads and NICs a fabric has for the construction of `levels`: hips, bml, torus, cluster.

    bml on BCube(3, 2): thread 0 levels 0 1, thread 1 levels 1 0 (rotated), mesh inside; all NICs are busy in every round
    torus on 4 x 4:     threads (dimension 0 1, up), (0 1, down), (1 0, up), (1 0, down), rings inside
    hips:               one thread, levels 0 1 ..., and any scheme inside; on a fabric without levels of its own, those of
                        its size as a product
    cluster:            first the ranks of a host through its memory, then equal ranks of all hosts; as many threads as
                        rails, and in each the ranks of a host take different rails

Steps, bytes and references are in `levels`. Torus rings and the rotation over dimensions are this project's form of HiPS
on a torus, of which only the outline is published.
"""

from __future__ import annotations

import numpy as np

from hrdma.topo.algorithms import levels
from hrdma.topo.algorithms.levels import Thread
from hrdma.topo.cost import Work
from hrdma.topo.fabric import Fabric
from hrdma.topo.fabrics import factors
from hrdma.topo.phases import COLLECTIVES, ROOTED, assemble
from hrdma.topo.schedule import Schedule

__all__ = ["HIERARCHIES", "build", "collectives", "fits", "shape_of", "work"]

#: name -> what the fabric must be, scheme inside the groups
HIERARCHIES: dict[str, tuple[str, str]] = {
    "bml": ("bcube", "mesh"),
    "torus": ("torus", "ring"),
    "hips-mesh": ("", "mesh"),
    "hips-ring": ("", "ring"),
    "hips-halving": ("", "halving"),
    "hips-server": ("", "server"),
    "cluster-mesh": ("cluster", "mesh"),
    "cluster-ring": ("cluster", "ring"),
    "cluster-halving": ("cluster", "halving"),
}
_GRIDS = ("torus", "ring", "mesh")


def shape_of(fabric: Fabric) -> tuple[int, ...]:
    """The digits of a fabric's ranks, least significant first; empty: it has no levels."""
    shape = fabric.shape
    if fabric.kind in ("bcube", "torus", "mesh", "ring"):
        return shape
    if fabric.kind == "cluster":
        return tuple(n for n in (fabric.ranks_per_host, fabric.hosts) if n > 1)
    if fabric.kind == "leaf_spine":
        return tuple(n for n in (shape[1], shape[0]) if n > 1)
    if fabric.kind == "fat_tree":
        return tuple(n for n in (shape[0] // 2, shape[0] // 2, shape[0]) if n > 1)
    try:
        return factors(fabric.ranks, 2)
    except ValueError:
        return (fabric.ranks,) if fabric.ranks > 1 else ()


def fits(name: str, fabric: Fabric) -> str:
    """Why an algorithm cannot be had on a fabric; empty when it can."""
    wanted, scheme = HIERARCHIES[name]
    shape = shape_of(fabric)
    if wanted == "torus" and fabric.kind not in ("torus", "ring"):
        return f"it needs a torus or ring; {fabric.name} is none"
    if wanted not in ("", "torus") and fabric.kind != wanted:
        return f"it needs a {wanted}; {fabric.name} is none"
    if not shape:
        return f"{fabric.name} has one rank"
    if scheme == "halving" and any(n & (n - 1) for n in shape):
        return f"halving needs groups that are powers of two; those of {fabric.name} are {shape}"
    return ""


def collectives(name: str) -> tuple[str, ...]:
    """What an algorithm can do."""
    scheme = HIERARCHIES[name][1]
    if scheme == "server":
        return ("allreduce",)
    return COLLECTIVES if scheme == "halving" else COLLECTIVES + ROOTED


def _threads(name: str, fabric: Fabric, parts: int) -> list[Thread]:
    scheme, h = HIERARCHIES[name][1], len(shape_of(fabric))
    straight = tuple(range(h))
    if name in ("bml", "torus"):
        ways = (True,) if name == "bml" or max(fabric.shape) == 2 else (True, False)
        orders = [straight[p:] + straight[:p] for p in range(h)]
        return [Thread(order, (scheme,) * h, way) for order in orders for way in ways for _ in range(parts)]
    if name.startswith("cluster") and fabric.ranks_per_host > 1 and h > 1:
        return [Thread(straight, ("mesh", scheme))] * (fabric.rails * parts)
    return [Thread(straight, (scheme,) * h)] * (fabric.rails * parts if name.startswith("cluster") else parts)


def _lanes(fabric: Fabric, parts: int) -> levels.Lanes:
    """The NICs at both ends of a message, from the level and the digits."""
    shape = fabric.shape

    def lanes(level: int, src: np.ndarray, dst: np.ndarray, ranks: np.ndarray, thread: int):
        if fabric.kind == "bcube":
            lane = np.full(len(src), level, np.int32)
            return lane, lane
        if fabric.kind in ("torus", "ring"):
            up = sum(2 if n > 2 else 1 for n in shape[:level])
            down = up + 1 if shape[level] > 2 else up
            ahead = (dst - src) % shape[level] <= shape[level] // 2
            return np.where(ahead, up, down), np.where(ahead, down, up)
        if fabric.kind == "cluster" and (level == 1 or fabric.ranks_per_host == 1):
            lane = (ranks % fabric.ranks_per_host + thread // parts) % fabric.rails
            return lane, lane
        lane = np.zeros(len(src), np.int32)
        return lane, lane

    return lanes


def build(
    name: str, collective: str, fabric: Fabric, parts: int = 1, root: int = 0, rank: int | None = None
) -> Schedule:
    """The schedule; `parts`: pieces of each thread that move on their own."""
    lanes, shape = _lanes(fabric, parts), shape_of(fabric)
    if HIERARCHIES[name][1] == "server":
        return levels.served(shape, lanes, name, rank)
    center = root if collective in ROOTED else None
    written = levels.write(shape, _threads(name, fabric, parts), lanes, rank, center)
    return assemble(collective, fabric.ranks, written, name, root, rank)


def work(name: str, collective: str, fabric: Fabric, nbytes: float, parts: int = 1) -> Work | None:
    """Closed form of allreduce, reduce-scatter and allgather; None: there is none."""
    shape, size = shape_of(fabric), fabric.ranks
    if HIERARCHIES[name][1] == "server":
        spent = sum(n - 1 for n in shape)
        return Work(2 * len(shape), 2 * spent, 2 * nbytes * spent, nbytes, nbytes * spent, 1 / size)
    if collective not in COLLECTIVES or (fabric.kind == "mesh" and HIERARCHIES[name][1] != "mesh"):
        return None
    threads = _threads(name, fabric, parts)
    if fabric.kind in _GRIDS and HIERARCHIES[name][1] in ("mesh", "halving") and max(shape) > 2:
        return None  # members of a group are several hops apart and share links
    if fabric.kind != "cluster":
        return levels.work(shape, threads, nbytes, lambda level, thread: _nic(fabric, level, thread), collective)
    found = levels.work(shape, threads, nbytes, lambda level, thread: level, collective)
    across = (1 - 1 / fabric.hosts) / fabric.rails
    inside = (1 - 1 / fabric.ranks_per_host) * fabric.nic_rate / fabric.memory_rate
    return found._replace(rails=(1 - 1 / size) / (inside + across))


def _nic(fabric: Fabric, level: int, thread: Thread) -> object:
    if fabric.kind in ("torus", "ring"):
        return (level, thread.forward or fabric.shape[level] == 2)
    return level if fabric.kind == "bcube" else 0

"""The table of algorithms that plan for a fabric: flat ones (`ALGORITHMS`), and those that know hosts, levels and links.

One name is one algorithm with everything fixed; ``server-P`` stands for any number of servers. Adding one: a file with
`build` and `work` (closed form), and its line in `_written`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from hrdma.topo.algorithms import ALGORITHMS, hierarchy, multitree, relay, server, trees
from hrdma.topo.cost import Work
from hrdma.topo.fabric import Fabric
from hrdma.topo.schedule import Schedule

__all__ = ["OnFabric", "known", "lookup", "refusal"]


class OnFabric(NamedTuple):
    """An algorithm on any fabric that it fits."""

    build: Callable[..., Schedule]  #: (collective, fabric, parts, root, rank)
    work: Callable[..., Work | None]  #: (collective, fabric, nbytes, parts); None: no closed form
    collectives: tuple[str, ...]
    fits: Callable[[Fabric], str]  #: why not; empty: it does
    parts: tuple[str, ...]  #: collectives that can be cut in pieces
    flat: bool = False  #: knows nothing of the fabric: its closed form ignores contention


def _flat(build, work, collectives: tuple[str, ...], parts: tuple[str, ...]) -> OnFabric:
    return OnFabric(
        lambda collective, fabric, parts=1, root=0, rank=None: build(collective, fabric.ranks, parts, root, rank),
        lambda collective, fabric, nbytes, parts=1: work(collective, fabric.ranks, nbytes, parts),
        collectives, lambda fabric: "", parts, True,
    )  # fmt: skip


def _server(servers: int) -> OnFabric:
    able = _flat(
        lambda collective, size, parts, root, rank: server.build(size, servers, parts, rank),
        lambda collective, size, nbytes, parts: server.work(size, servers, nbytes, parts),
        server.COLLECTIVES, server.COLLECTIVES,
    )  # fmt: skip
    few = f"it has {servers} servers among {{}} ranks"
    return able._replace(fits=lambda fabric: "" if 1 <= servers <= fabric.ranks else few.format(fabric.ranks))


def _written() -> dict[str, OnFabric]:
    found = {"server-1": _server(1)}
    found.update((name, _flat(a.build, a.work, a.collectives, a.parts)) for name, a in ALGORITHMS.items())
    found["tree"] = _flat(trees.build, trees.work, trees.COLLECTIVES, trees.COLLECTIVES)
    for name in hierarchy.HIERARCHIES:
        able = hierarchy.collectives(name)
        found[name] = OnFabric(
            partial(hierarchy.build, name), partial(hierarchy.work, name), able, partial(hierarchy.fits, name),
            () if name == "hips-server" else able,
        )  # fmt: skip
    found["multitree"] = OnFabric(multitree.build, multitree.work, multitree.COLLECTIVES, multitree.fits, ())
    found["relay"] = OnFabric(relay.build, relay.work, relay.COLLECTIVES, relay.fits, ())
    return found


_TABLE = _written()


def known() -> tuple[str, ...]:
    """All names."""
    return tuple(_TABLE)


def lookup(name: str) -> OnFabric:
    """An algorithm by name.

    Raises
    ------
    ValueError
        An unknown name.
    """
    if name in _TABLE:
        return _TABLE[name]
    if name.startswith("server-") and name[7:].isdecimal():
        return _server(int(name[7:]))
    raise ValueError(f"unknown algorithm {name!r}; known: {', '.join(_TABLE)}, and server-P for P servers")


def refusal(name: str, collective: str, fabric: Fabric) -> str:
    """Why an algorithm cannot plan a collective on a fabric; empty when it can."""
    able = lookup(name)
    if collective not in able.collectives:
        return f"it cannot do {collective}"
    return able.fits(fabric)

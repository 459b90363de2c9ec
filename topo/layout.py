"""Where the chunks of a collective lie in one rank's memory, and who brings and who wants which.

This is the definition of every collective's buffers; all offsets and lengths are bytes.

    collective      in                     out                      brings          wants
    allreduce       n                      n                        all             all
    reduce          n                      n at root, else 0        all             root
    broadcast       n (the same as out)    n                        root            all
    allgather       counts[rank]           sum(counts)              block r: r      all
    reduce_scatter  sum(counts)            counts[rank]             all             block r: r
    gather          counts[rank]           sum(counts) at root      block r: r      root
    scatter         sum(counts) at root    counts[rank]             root            block r: r
    alltoall        sum(send counts)       sum(receive counts)      block (s,d): s  block (s,d): d
    barrier         0                      0                        all             all
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from hrdma.topo.schedule import Schedule, offsets

__all__ = ["Layout", "block_counts", "bringers", "layout", "takers"]

_ALIGN = 64  # chunks of long vectors begin at whole cache lines
_ALIGN_FROM = 4096
_SURPLUS = 4096  # bytes that the last chunk of a block may have more; limits of what goes unasked leave them room


class Layout(NamedTuple):
    """Per chunk: length, offset in IN (-1: not brought by this rank) and in OUT (-1: not wanted)."""

    lens: list[int]
    in_off: list[int]
    out_off: list[int]
    in_bytes: int
    out_bytes: int
    alias: int | None  #: in place: where byte 0 of IN is in OUT


def bringers(collective: str, size: int, root: int, block: int) -> range:
    """The ranks that contribute to a block."""
    if collective in ("broadcast", "scatter"):
        return range(root, root + 1)
    if collective in ("allgather", "gather"):
        return range(block, block + 1)
    return range(block // size, block // size + 1) if collective == "alltoall" else range(size)


def takers(collective: str, size: int, root: int, block: int) -> range:
    """The ranks that must hold a block's result."""
    if collective in ("reduce", "gather"):
        return range(root, root + 1)
    if collective in ("reduce_scatter", "scatter"):
        return range(block, block + 1)
    return range(block % size, block % size + 1) if collective == "alltoall" else range(size)


def _edges(count: int, schedule: Schedule, itemsize: int, packet: int) -> list[int]:
    """Element bounds of the chunks of one block."""
    split, weights = schedule.split, schedule.weights
    if split == 1:
        return [0, count]
    fit = packet // itemsize  # elements of a full packet
    full = count // split // fit * fit if fit else 0  # of full packets
    if full and weights is None and (count - full * split) * itemsize <= _SURPLUS:
        return [*(full * part for part in range(split)), count]
    if weights is None:
        bounds = [count * part // split for part in range(split + 1)]
    else:
        cumulated = offsets(weights)
        bounds = [count * edge // cumulated[-1] for edge in cumulated]
    if count * itemsize >= _ALIGN_FROM * split:
        step = max(1, _ALIGN // itemsize)
        bounds = [bound // step * step for bound in bounds]
        bounds[-1] = count
    return bounds


def _listed(counts, n: int, what: str) -> list[int]:
    listed = (
        [int(counts)] * n if isinstance(counts, int) or not hasattr(counts, "__len__") else [int(c) for c in counts]
    )
    if len(listed) != n:
        raise ValueError(f"{what} has {len(listed)} entries; {n} are needed, one per rank")
    if listed and min(listed) < 0:
        raise ValueError(f"{what} must not be negative, but holds {min(listed)}")
    return listed


def block_counts(collective: str, size: int, rank: int, counts) -> list[int]:
    """Elements of every block; blocks of an alltoall that do not touch this rank count 0 unless all blocks are alike.

    Parameters
    ----------
    counts : int, sequence of int, or pair of sequences
        Elements: of the vector (allreduce, reduce, broadcast), of each rank's block (allgather, reduce_scatter, gather,
        scatter; one int: all alike), or for alltoall what this rank sends to and receives from each rank (one int: all
        alike).
    """
    if collective == "barrier":
        return [0]
    if collective in ("allreduce", "reduce", "broadcast"):
        return _listed(counts, 1, "count")
    if collective != "alltoall":
        return _listed(counts, size, "counts")
    if not hasattr(counts, "__len__"):
        return _listed(counts, size * size, "counts")
    send, recv = counts
    send, recv = _listed(send, size, "send counts"), _listed(recv, size, "receive counts")
    if send[rank] != recv[rank]:
        raise ValueError(f"rank {rank} sends itself {send[rank]} elements but expects {recv[rank]}")
    listed = [0] * (size * size)
    listed[rank * size : (rank + 1) * size] = send
    listed[rank::size] = recv
    return listed


def layout(
    schedule: Schedule, rank: int, counts: int | Sequence, itemsize: int, in_place: bool = False, packet: int = 0
) -> Layout:
    """Byte ranges of every chunk in a rank's buffers. `counts` as in `block_counts`, `packet` as in `Cost`.

    Chunks of a block have one length, but where that would be a little more than full packets: those have full ones, and
    the last has the rest, too.
    """
    collective, size, root, split = schedule.collective, schedule.size, schedule.root, schedule.split
    per_block = block_counts(collective, size, rank, counts)
    chunks = len(per_block) * split
    lens, in_off, out_off = [0] * chunks, [-1] * chunks, [-1] * chunks
    in_at = out_at = 0
    alias = None
    known: dict[int, tuple[list[int], list[int]]] = {}
    here: Iterable[int] = range(len(per_block))
    if collective == "alltoall":
        here = sorted({*range(rank * size, (rank + 1) * size), *range(rank, size * size, size)})
    for block in here:
        count, at = per_block[block], slice(block * split, (block + 1) * split)
        if count not in known:
            edges = [edge * itemsize for edge in _edges(count, schedule, itemsize, packet)]
            known[count] = edges, [b - a for a, b in pairwise(edges)]
        edges, lens[at] = known[count]
        brought = rank in bringers(collective, size, root, block)
        wanted = rank in takers(collective, size, root, block)
        if brought and wanted and alias is None:
            alias = out_at - in_at
        if brought:
            in_off[at] = [in_at + edge for edge in edges[:-1]]
            in_at += edges[-1]
        if wanted:
            out_off[at] = [out_at + edge for edge in edges[:-1]]
            out_at += edges[-1]
    if collective == "alltoall" and not hasattr(counts, "__len__"):
        lens = known[per_block[0]][1] * len(per_block)  # blocks of others, which this rank may relay
    if collective == "broadcast":
        in_at, alias, in_place = out_at, 0, True
    return Layout(
        lens, in_off, out_off, in_at, out_at, (alias if collective != "alltoall" else 0) if in_place else None
    )

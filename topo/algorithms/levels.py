"""Level by level: HiPS, BML, rotated torus rings and hierarchical clusters are one construction.

Ranks are numbers with digits, one per level of the fabric. A *group* of level l are the ranks that differ in digit l only:
hosts at one switch of a BCube, a ring of a torus, the ranks of a host. A reduce-scatter goes through the levels in some
order, and inside each group uses a flat *scheme* on what is left of the vector: after the first level 1/n of it, after the
second 1/n**2, ... The vector is cut into *threads*, each with an order of levels of its own.

    HiPS, one thread, levels 0 1, mesh inside each group; 4 ranks with digits (d1 d0) 00 01 10 11, shares a b c d

      round 0   level 0   00 > 01: cd    01 > 00: ab    10 > 11: cd    11 > 10: ab      0x and 1x have summed among them
      round 1   level 1   00 > 10: b     10 > 00: a     01 > 11: d     11 > 01: c       all is complete

    BML has as many threads as levels, thread p begins with level p: in every round every NIC is busy, each by one thread.
    A torus has two threads per dimension, one up and one down its rings: all 2 d links are busy in every round.

The order of a thread's shares follows the digits of their owners in the thread's order of levels, most significant first,
so what goes to one neighbour is always one run of chunks: one message.

Schemes: mesh (all members exchange at once, 1 round), ring (n - 1 rounds), halving (log2 n rounds, n a power of two), and
server (the first member of each group gets all; it stays whole, so only allreduce).

Cost for N = n**h ranks of h NICs, per phase: a thread moves (N - 1) / N of its part of the vector, whatever the scheme;
with rotated threads on all NICs an allreduce of W bytes takes 2 (N - 1) / N * W / (NICs * B) seconds, in 2 h rounds with a
mesh and 2 h (n - 1) with rings. With one thread one NIC works at a time.

References
----------
Wang, Li, Cheng, Geng, Jiang, Wu, Bai: Impact of Network Topology on the Performance of DML: HiPS, NetAI, 2018.
Wang, Li, Cheng, Geng, Jiang, Wu, Bai: BML: A High-performance, Low-cost Gradient Synchronization Algorithm for DML
Training, NeurIPS, 2018.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import numpy as np

from hrdma.topo.cost import Work, effort
from hrdma.topo.phases import Written
from hrdma.topo.schedule import COPY, DST, REDUCE, SRC, Schedule, involved, join, rows

__all__ = ["SCHEMES", "Thread", "served", "work", "write"]

SCHEMES = ("mesh", "ring", "halving", "server")

Lanes = Callable[[int, np.ndarray, np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray]]


class Thread(NamedTuple):
    """A part of the vector and its way through the levels."""

    order: tuple[int, ...]
    schemes: tuple[str, ...]  #: per level of the order
    forward: bool = True  #: direction of rings


def _rounds(scheme: str, n: int) -> int:
    if scheme == "ring":
        return n - 1
    return n.bit_length() - 1 if scheme == "halving" else 1


def write(
    shape: tuple[int, ...], threads: list[Thread], lanes: Lanes, rank: int | None = None, root: int | None = None
) -> Written:
    """The reduce-scatter of all threads.

    Parameters
    ----------
    shape : tuple of int
        Digits of the ranks, level 0 least significant.
    threads : list of Thread
    lanes : callable
        (level, source digits, destination digits, sources, thread) to the NICs at both ends of a message.
    rank : int, optional
        Only the rows that touch this rank, in time and memory of their number.
    root : int, optional
        Also which rows lead away from this rank in the order of the levels (`Written.inward`): mesh and ring only.
    """
    size = prod(shape)
    strides = [prod(shape[:level]) for level in range(len(shape))]
    tables, backs, inwards, owners, last = [], [], [], [], 0
    for number, thread in enumerate(threads):
        first, sub, everyone = 0, size, np.arange(size, dtype=np.int32)
        owner = np.zeros(size, np.int32)
        begun: list[tuple[int, int]] = []  # (level, chunks of a share) of the stages before: the base of a rank's range
        for stage, (level, scheme) in enumerate(zip(thread.order, thread.schemes)):
            n = shape[level]
            sub //= n
            owner += everyone // sub % n * strides[level]
            if rank is None:
                ranks = everyone
            else:
                ranks = rank + (np.arange(n, dtype=np.int32) - rank // strides[level] % n) * strides[level]
            base = sum((ranks // strides[lv] % shape[lv] * st for lv, st in begun), np.zeros(len(ranks), np.int32))
            step, digit, other, share, span = _scheme(scheme, ranks // strides[level] % n, n, thread.forward)
            table = rows(
                first + step, ranks, ranks + (other - digit) * strides[level],
                number * size + base + share * sub, REDUCE, span * sub,
            )  # fmt: skip
            here, there, sources, _ = np.broadcast_arrays(digit, other, ranks, step)
            away = None
            if root is not None:
                away = _away(root, shape, strides, thread, stage, scheme, here, there, sources, share)
            lane, back = lanes(level, here.ravel(), there.ravel(), sources.ravel(), number)
            table[:, 6] = lane
            keep = np.ones(len(table), bool) if rank is None else (table[:, SRC] == rank) | (table[:, DST] == rank)
            tables.append(table[keep])
            backs.append(np.broadcast_to(back, len(table))[keep])
            if away is not None:
                inwards.append(away.ravel()[keep])
            begun.append((level, sub))
            first += _rounds(scheme, n)
        owners.append(owner)
        last = max(last, first)
    table = np.concatenate(tables) if tables else rows(0, [], [], [], REDUCE)
    back = np.concatenate(backs).astype(np.int32) if backs else np.empty(0, np.int32)
    inward = np.concatenate(inwards) if inwards else (np.empty(0, bool) if root is not None else None)
    return Written(table, back, np.concatenate(owners), last, inward)


def _scheme(scheme: str, digit: np.ndarray, n: int, forward: bool) -> tuple:
    """Columns of one group's reduce-scatter: round, source and destination digits, share, shares."""
    if scheme == "mesh":
        ahead = np.arange(1, n, dtype=np.int32)[:, None]
        other = (digit + ahead) % n
        return np.zeros_like(other), digit, other, other, 1
    if scheme == "ring":
        step, way = np.arange(n - 1, dtype=np.int32)[:, None], 1 if forward else -1
        return step, digit, (digit + way) % n, (digit - way * (1 + step)) % n, 1
    step = np.arange(n.bit_length() - 1, dtype=np.int32)[:, None]
    half = n >> (step + 1)
    other = digit ^ half
    return step, digit, other, other // half * half, half


def served(shape: tuple[int, ...], lanes: Lanes, name: str, rank: int | None = None) -> Schedule:
    """The allreduce with a server in each group: up to the first member of each group, level by level, and back."""
    size = prod(shape)
    strides = [prod(shape[:level]) for level in range(len(shape))]
    tables, there = [], np.arange(size, dtype=np.int32)
    for level, (n, stride) in enumerate(zip(shape, strides)):
        digit = there // stride % n
        sources, there = there[digit > 0], there[digit == 0]
        digit = digit[digit > 0]
        lane, back = lanes(level, digit, np.zeros_like(digit), sources, 0)
        up = rows(level, sources, sources - digit * stride, 0, REDUCE, 1, lane)
        down = rows(2 * len(shape) - 1 - level, sources - digit * stride, sources, 0, COPY, 1, back)
        tables += [up, down]
    return Schedule("allreduce", size, involved(join(*tables), rank), name=name, view=rank)


def work(
    shape: tuple[int, ...], threads: list[Thread], nbytes: float, nic: Callable[[int, Thread], object], collective: str
) -> Work:
    """The closed form of allreduce, reduce-scatter or allgather.

    `nic` names the NIC that a thread uses on a level. Exact where every group of a round carries as much.
    """
    phases = 2 if collective == "allreduce" else 1
    size, part = prod(shape), nbytes / len(threads)
    loads: dict[object, float] = {}
    steps, messages, busiest, operands = 0, 0, 0.0, 2
    for thread in threads:
        left, moved, rounds = part, 0.0, 0
        for level, scheme in zip(thread.order, thread.schemes):
            n = shape[level]
            left /= n
            moved += left * (n - 1)
            key = nic(level, thread)
            loads[key] = loads.get(key, 0.0) + left * (n - 1)
            rounds += _rounds(scheme, n)
            messages += n - 1 if scheme == "mesh" else _rounds(scheme, n)
            operands = max(operands, n if scheme == "mesh" else 2)
        steps, busiest = max(steps, rounds), max(busiest, moved)
    busiest = max(busiest, *loads.values())
    shared = nbytes * (size - 1) / size
    copied = 0.0 if collective == "reduce_scatter" else shared
    reduced = 0.0 if collective == "allgather" else shared
    rails = shared / busiest if busiest else 1.0
    return Work(phases * steps, phases * messages, phases * shared, copied, reduced, 1.0, effort(operands), rails)


def _away(root, shape, strides, thread, stage, scheme, digit, other, ranks, share) -> np.ndarray:
    """Whether a row is on a way out of the root: its source has the root's digits at all levels still to come but this,
    and on this level it is, as the row's share travels from the root's digit to its owner, one of those that it passes."""
    on = np.ones(digit.shape, bool)
    for level in thread.order[stage + 1 :]:
        on &= ranks // strides[level] % shape[level] == root // strides[level] % shape[level]
    level = thread.order[stage]
    n, start = shape[level], root // strides[level] % shape[level]
    if scheme == "mesh":
        return on & (digit == start)
    way = 1 if thread.forward else -1
    return on & ((digit - start) * way % n < (share - start) * way % n)

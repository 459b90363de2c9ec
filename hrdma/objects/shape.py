"""The shape of a reduction: which degree costs least, and who is whose parent when objects arrive in any order.

Arriving objects take positions 0, 1, 2, ... and the positions form a tree in generalised in-order: first child's subtree,
the node, then the second child. Early arrivals sit low and left, so that sums start with the first two. The number of
positions need not be known: the tree grows at its top, and what is fixed stays fixed.

    binary, 7 positions            chain                     star
            3                      0 -> 1 -> 2 -> ROOT       0   1   2
        1       5                                             \\  |  /
      0   2   4   6                                            ROOT

Above all stands ROOT, where the result is wanted. Positions that are empty are passed over: a node's parent is its
nearest ancestor that is filled. Cost of n objects of S bytes with latency L and bandwidth B (Zhuang et al., SIGCOMM 2021):
star ``L + nS/B``, chain ``nL + S/B``, binary ``L log2(n) + 2S/B``.
"""

from __future__ import annotations

import math
from collections.abc import Collection

__all__ = ["BINARY", "CHAIN", "ROOT", "STAR", "cost", "degree", "parent"]

ROOT = -1
CHAIN, BINARY, STAR = "chain", "binary", "star"


def cost(shape: str, n: int, nbytes: int, latency: float, bandwidth: float) -> float:
    """Predicted seconds of a reduction.

    Parameters
    ----------
    shape : str
        "star", "binary" or "chain".
    n : int
        Objects.
    nbytes : int
        Bytes of each.
    latency, bandwidth : float
        Seconds; bytes per second.
    """
    if shape == STAR:
        return latency + n * nbytes / bandwidth
    if shape == CHAIN:
        return n * latency + nbytes / bandwidth
    return latency * math.log2(max(2, n)) + 2 * nbytes / bandwidth


def degree(n: int, nbytes: int, latency: float, bandwidth: float) -> str:
    """The shape that costs least; the simpler one among equals."""
    return min((STAR, CHAIN, BINARY), key=lambda shape: cost(shape, n, nbytes, latency, bandwidth))


def parent(shape: str, position: int, filled: Collection[int], last: int) -> int:
    """The nearest filled ancestor of a position, or ROOT; no position is above `last`. Cost: O(log n) for a tree."""
    if shape == STAR:
        return ROOT
    if shape == CHAIN:
        return next((above for above in range(position + 1, last + 1) if above in filled), ROOT)
    # In-order numbers from 1: the lowest set bit is the height. A parent has the next bit set instead.
    number, bit = position + 1, (position + 1) & -(position + 1)
    while bit <= last + 1:
        number = (number - bit) | (bit << 1)
        bit <<= 1
        if number - 1 in filled:
            return number - 1
    return ROOT

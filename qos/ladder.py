"""The HTB tree of a rotating policy: a band is a rung of borrowing, not a `prio`.

    4852:    htb                     shapes the whole to the link's rate
     4852:1                          the one class
      4853:  htb                     only orders, never holds back
       4853:7 - 4853:1               default: rung 7, behind everybody there
       4853:f - e - d - c - b - a - 9 - 8 - 6000: pfifo      job in slot 0
       4853:17 - 16 - ...            job in slot 1

Why not TensorLights' classes with `prio`: HTB looks at a class's `prio` when it becomes busy, and a class that never runs empty
keeps its old one for ever. Moving filters instead would reorder flows, deleting the tree loses packets.

Each job has a leaf below seven classes, one on each of HTB's levels 1 to 7. HTB serves levels in order, and a class borrows from its
nearest ancestor that has tokens. So a job in band b has rungs above b that have practically none ("off") and from b on
practically any number ("on"): it is served at level b + 1, strictly after the bands before it. A rate counts from the next packet
on, also for busy classes. Moving a job changes rates and nothing else: its packets stay where they are, in order.

What it costs: an off rung, like the leaf's floor, lets a packet pass whenever it is out of debt, and stays in debt for
as long as a packet costs there. `floor_of` bounds that by SETTLE, whatever the packet's size, by charging every packet an
overhead. All rungs of a job cost the same, so that they get in and out of debt together and a job has one floor, not eight. A
promotion takes effect when the debt is over: at most 2 SETTLE.
"""

from __future__ import annotations

from dataclasses import replace

from hrdma.qos.kinds import htb
from hrdma.qos.kinds.htb import TICK, HtbClass, HtbQdisc
from hrdma.qos.objects import ROOT, Object, Qdisc, TClass
from hrdma.qos.order import Place
from hrdma.qos.policy import BANDS

__all__ = ["DEFAULT_CLASS", "INNER", "OUTER", "SHAPER", "floor_of", "job_classes", "leaf_of", "queue_handle", "trunk"]

OUTER, INNER = 0x4852, 0x4853  #: major numbers
QUEUES = 0x6000  # major number of the queue of slot 0
DEFAULT_CLASS = INNER << 16 | 1
SHAPER = OUTER << 16 | 1  # the class that everything passes
DEFAULT_ROW = 7  # of HTB: the last
SETTLE = 0.2  # seconds that the costliest packet keeps a rung in debt
LONGEST, TYPICAL = (
    65_536,
    1500,
)  # bytes of a packet: the most that segmentation offload makes, and what floors are told in
MOST_OVERHEAD = 0xFFFF
ENDLESS = 125 * 10**9  # bytes per second: 1 Tbit/s, more than any link has
SAVED = round(1e-3 / TICK)  # ticks of burst where there is no shortage
TURN = 2e-3  # seconds of the link in the lightest job's turn


def leaf_of(slot: int) -> int:
    """The class that holds a job's queue: what filters and sockets name."""
    return INNER << 16 | (slot + 1) * 8


def queue_handle(slot: int) -> int:
    return QUEUES + slot << 16


def floor_of(floor: int) -> tuple[int, int]:
    """Rate and overhead by which packets of 1500 bytes have the floor, and the longest packet costs SETTLE or less.

    Parameters
    ----------
    floor : int
        Bytes per second.

    Notes
    -----
    Solves (LONGEST + o) / r = SETTLE and r TYPICAL / (TYPICAL + o) = floor for o; where o comes out above 16 bits the rate is
    what settles in time, and the floor is higher than asked for.
    """
    budget = SETTLE * floor
    overhead = 0.0
    if budget < LONGEST:
        overhead = TYPICAL * (LONGEST - budget) / (budget - TYPICAL) if budget > TYPICAL else MOST_OVERHEAD
    whole = min(MOST_OVERHEAD, round(overhead))
    return max(round((LONGEST + whole) / SETTLE), round(floor * (TYPICAL + whole) / TYPICAL)), whole


_ON = HtbClass(ENDLESS, ENDLESS, SAVED, SAVED, LONGEST)


def turn_of(rate: int) -> int:
    """Bytes of the lightest job's turn among its equals, by the link's bytes per second.

    Notes
    -----
    Weights count where a turn holds the longest packet and is held by what a socket keeps waiting. TCP makes its packets as long as
    it sends in 1 ms, so twice that is enough, and no more than the longest packet there is.
    """
    return min(LONGEST, max(2 * TYPICAL, round(rate * TURN)))


def trunk(dev: str, rate: int, floor: int) -> list[Object]:
    """What all jobs share: both qdiscs, the shaping class and the default class."""
    burst = round((TYPICAL / rate + 1e-3) / TICK)
    slow, overhead = floor_of(floor)
    shaping = HtbClass(rate, rate, burst, burst, LONGEST)
    last = replace(_ON, rate=slow, overhead=overhead, burst=0, prio=DEFAULT_ROW)
    root, inner = OUTER << 16, INNER << 16
    return [
        Qdisc(dev, "htb", root, ROOT, htb.encode(HtbQdisc(default=1))),
        TClass(dev, "htb", root | 1, root, htb.encode(shaping)),
        Qdisc(dev, "htb", inner, root | 1, htb.encode(HtbQdisc(default=DEFAULT_CLASS & 0xFFFF))),
        TClass(dev, "htb", inner | BANDS, inner, htb.encode(_ON)),
        TClass(dev, "htb", DEFAULT_CLASS, inner | BANDS, htb.encode(last)),
    ]


def job_classes(dev: str, slot: int, place: Place, floor: int, turn: float) -> list[TClass]:
    """The rungs and the leaf of one job, from the root down.

    Parameters
    ----------
    turn : float
        Bytes in a turn of a job of weight 1.
    """
    slow, overhead = floor_of(floor)
    off = replace(_ON, rate=slow, overhead=overhead, burst=0)
    leaf, parent = leaf_of(slot), INNER << 16
    found = []
    for level in range(BANDS, 0, -1):
        spec = _ON if level > place.band else off
        found.append(TClass(dev, "htb", leaf + level, parent, htb.encode(spec)))
        parent = leaf + level
    weighed = replace(off, quantum=round(turn * place.weight))
    return [*found, TClass(dev, "htb", leaf, parent, htb.encode(weighed))]

"""The HTB tree of a rotating policy: a band is a rung of borrowing, not a `prio`.

    4852:    htb                     shapes the whole to the link's rate
     4852:2                          the one class below it
      4852:3 - pfifo                 bare acknowledgements, up to their rate before the next one
      4852:1                         all else: the rest of the rate, and what acknowledgements leave
       4853:  htb                    only orders, never holds back
        4853:7 - 4853:1              default: rung 7, behind everybody there
        4853:f - e - d - c - b - a - 9 - 8 - 6000: pfifo      job in slot 0
        4853:17 - 16 - ...           job in slot 1
        4853:200f - ...              answers of the job in slot 0: rungs of their own, in the same band

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

Answers of a job (its credit, clear to send, small messages) must not wait for a floor that counts packets: what is sent to the
job waits for them. They have the same ladder again with a floor that counts bytes, so they go before all bands up to that rate
and in the band of the job beyond it. In the job's own ladder they would put its rungs in debt.
"""

from __future__ import annotations

from dataclasses import replace

from hrdma.qos.kinds import htb
from hrdma.qos.kinds.htb import TICK, HtbClass, HtbQdisc
from hrdma.qos.objects import ROOT, Object, Qdisc, TClass
from hrdma.qos.order import Place
from hrdma.qos.policy import BANDS

__all__ = [
    "ACKS_CLASS",
    "ANSWERS",
    "DEFAULT_CLASS",
    "INNER",
    "OUTER",
    "PART",
    "SHAPER",
    "answers_class",
    "floor_class",
    "floor_of",
    "job_classes",
    "leaf_of",
    "queue_handle",
    "trunk",
]

OUTER, INNER = 0x4852, 0x4853  #: major numbers
QUEUES = 0x6000  # major number of the queue of slot 0
DEFAULT_CLASS = INNER << 16 | 1
WHOLE = OUTER << 16 | 2  # the class that everything passes
SHAPER = OUTER << 16 | 1  # the same, but for bare acknowledgements
ACKS_CLASS = OUTER << 16 | 3
DEFAULT_ROW = 7  # of HTB: the last
SETTLE = 0.2  # seconds that the costliest packet keeps a rung in debt
LONGEST, TYPICAL = (
    65_536,
    1500,
)  # bytes of a packet: the most that segmentation offload makes, and what floors are told in
MOST_OVERHEAD = 0xFFFF
ENDLESS = 125 * 10**9  # bytes per second: 1 Tbit/s, more than any link has
SAVED = round(1e-3 / TICK)  # ticks of burst where there is no shortage
BURST = round(20e-3 / TICK)  # ... of acknowledgements and answers, which come in bursts, as what they answer does
PART = 32  # one byte in so many of the link is for acknowledgements, and for answers of each job
ANSWERS_LEAST = round(LONGEST / (2 * SETTLE))  # bytes per second: the longest packet keeps them in debt for 2 SETTLE
ANSWERS = 1024  # number of the slot of a job's answers, beside that of the job
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


def trunk(dev: str, rate: int, floor: int, acks: int) -> list[Object]:
    """What all jobs share: both qdiscs, the shaping classes and the default class.

    Notes
    -----
    `acks` bytes per second of bare acknowledgements go first, on HTB's level of leaves, by their `prio`, which never changes. Then all
    else has the rest of the rate for itself, so nobody starves by them. They are told apart up here, where a socket that names
    its class below by its priority is asked all the same.
    """
    burst = round((TYPICAL / rate + 1e-3) / TICK)
    whole = HtbClass(rate, rate, burst, burst, LONGEST)
    shaping = replace(whole, rate=rate - acks, prio=1)
    last = replace(floor_class(floor), prio=DEFAULT_ROW)
    root, inner = OUTER << 16, INNER << 16
    return [
        Qdisc(dev, "htb", root, ROOT, htb.encode(HtbQdisc(default=1))),
        TClass(dev, "htb", WHOLE, root, htb.encode(whole)),
        TClass(dev, "htb", SHAPER, WHOLE, htb.encode(shaping)),
        Qdisc(dev, "htb", inner, root | 1, htb.encode(HtbQdisc(default=DEFAULT_CLASS & 0xFFFF))),
        TClass(dev, "htb", inner | BANDS, inner, htb.encode(_ON)),
        TClass(dev, "htb", DEFAULT_CLASS, inner | BANDS, htb.encode(last)),
        *([TClass(dev, "htb", ACKS_CLASS, WHOLE, htb.encode(replace(whole, rate=acks, burst=BURST)))] if acks else []),
    ]


def floor_class(floor: int) -> HtbClass:
    """A class that has a floor in bytes per second and no more: an off rung, or the leaf of a job."""
    slow, overhead = floor_of(floor)
    return replace(_ON, rate=slow, overhead=overhead, burst=0)


def answers_class(rate: int) -> HtbClass:
    """The same for answers, by the link's rate."""
    return replace(_ON, rate=max(rate // PART, ANSWERS_LEAST), burst=BURST)


def job_classes(dev: str, slot: int, place: Place, off: HtbClass, turn: float) -> list[TClass]:
    """The rungs and the leaf of one job, from the root down.

    Parameters
    ----------
    off : HtbClass
        What its rungs above its band are.
    turn : float
        Bytes in a turn of a job of weight 1.
    """
    leaf, parent = leaf_of(slot), INNER << 16
    found = []
    for level in range(BANDS, 0, -1):
        spec = _ON if level > place.band else off
        found.append(TClass(dev, "htb", leaf + level, parent, htb.encode(spec)))
        parent = leaf + level
    weighed = replace(off, quantum=round(turn * place.weight))
    return [*found, TClass(dev, "htb", leaf, parent, htb.encode(weighed))]

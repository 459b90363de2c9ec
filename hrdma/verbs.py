"""Cython-wrapped verbs: RDMA devices by hand, on libibverbs or on the simulated device ``sim``.

For who wants queue pairs rather than communicators. The two ends tell each other their addresses by any other means.

>>> from hrdma import verbs
>>> with verbs.Device("sim") as device:
...     pd, cq = verbs.ProtectionDomain(device), verbs.CompletionQueue(device)
...     here, there = verbs.QueuePair(pd, cq), verbs.QueuePair(pd, cq)
...     here.connect(there.address)
...     there.connect(here.address)
...     source = verbs.MemoryRegion(pd, b"hello")
...     target = verbs.MemoryRegion(pd, bytearray(5), remote_write=True)
...     here.write(source, target.address, target.rkey)
...     done = here.poll(timeout=5)[0].check()

Closing the device closes the rest. See `README.md` for what holds.
"""

from __future__ import annotations

from hrdma._core import (
    Completion,
    CompletionQueue,
    Device,
    MemoryRegion,
    Piece,
    ProtectionDomain,
    QueuePair,
    QueuePairAddress,
    SharedReceiveQueue,
)
from hrdma._core import VerbsFound as Found
from hrdma._core import VerbsPath as Path
from hrdma._core import verbs_choose as choose
from hrdma._core import verbs_devices as devices
from hrdma._core import verbs_found as found
from hrdma._core import verbs_library as library

__all__ = [
    "Completion",
    "CompletionQueue",
    "Device",
    "Found",
    "MemoryRegion",
    "Path",
    "Piece",
    "ProtectionDomain",
    "QueuePair",
    "QueuePairAddress",
    "SharedReceiveQueue",
    "choose",
    "devices",
    "found",
    "library",
]

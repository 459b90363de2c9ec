"""hrdma: arrays between processes and hosts at the speed of the hardware.

Importing this package loads nothing else: each public name is fetched when it is first used, so that
:mod:`hrdma.topo` and :mod:`hrdma.qos` work where the compiled core is not there.

>>> import hrdma
>>> with hrdma.init() as comm:
...     x = hrdma.empty(1 << 20)
...     x.fill(comm.rank)
...     comm.allreduce(x)
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hrdma._core import Endpoint, Memory, RemoteMemory, Request, empty, is_registered, memory_stats, zeros
    from hrdma.communicator import Communicator
    from hrdma.errors import (
        CollectiveMismatchError,
        CollectiveTimeoutError,
        DeviceError,
        HrdmaError,
        PeerError,
        RequestError,
        ScheduleError,
    )
    from hrdma.runtime import finalize, init
    from hrdma.types import Status

__version__ = "0.1.0"

#: As ``src=`` of a receive: whichever message comes first.
ANY_SOURCE = -1

_HOME = {
    "CollectiveMismatchError": "hrdma.errors",
    "CollectiveTimeoutError": "hrdma.errors",
    "Communicator": "hrdma.communicator",
    "DeviceError": "hrdma.errors",
    "Endpoint": "hrdma._core",
    "HrdmaError": "hrdma.errors",
    "Memory": "hrdma._core",
    "PeerError": "hrdma.errors",
    "RemoteMemory": "hrdma._core",
    "Request": "hrdma._core",
    "RequestError": "hrdma.errors",
    "ScheduleError": "hrdma.errors",
    "Status": "hrdma.types",
    "empty": "hrdma._core",
    "finalize": "hrdma.runtime",
    "init": "hrdma.runtime",
    "is_registered": "hrdma._core",
    "memory_stats": "hrdma._core",
    "zeros": "hrdma._core",
}

__all__ = [
    "ANY_SOURCE",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "Communicator",
    "DeviceError",
    "Endpoint",
    "HrdmaError",
    "Memory",
    "PeerError",
    "RemoteMemory",
    "Request",
    "RequestError",
    "ScheduleError",
    "Status",
    "__version__",
    "empty",
    "finalize",
    "init",
    "is_registered",
    "memory_stats",
    "zeros",
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'hrdma' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

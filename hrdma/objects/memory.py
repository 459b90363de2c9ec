"""Bytes of this process that streams move, and their registrations with RDMA devices: made when first needed, kept."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from hrdma.errors import HrdmaError

if TYPE_CHECKING:
    from hrdma.verbs import MemoryRegion, ProtectionDomain

__all__ = ["Gone", "Memory"]


class Gone(HrdmaError):
    """The memory was let go of: nobody needs what should go there, or come from there."""


class Memory:
    """A view of bytes. From any thread."""

    base = 0  #: where it begins in what is registered

    def __init__(self, view: memoryview) -> None:
        self.view, self.nbytes = view, len(view)
        self._regions: dict[ProtectionDomain, MemoryRegion] | None = {}  # None: it was let go of
        self._registering = threading.Lock()

    def region(self, domain: ProtectionDomain) -> MemoryRegion:
        """Its registration, for peers to read.

        Raises
        ------
        HrdmaError
            The device or the memlock limit refuses.
        Gone
            It was let go of.

        Notes
        -----
        Cost: once a system call that pins the pages, about 0.1 ms a MiB.
        """
        from hrdma.verbs import MemoryRegion

        with self._registering:
            if self._regions is None:
                raise Gone("the memory is gone")
            if domain not in self._regions:
                try:
                    made = MemoryRegion(domain, self.view, remote_read=True)
                except HrdmaError:
                    private = self.private()
                    if private is None:
                        raise
                    made = MemoryRegion(domain, private, remote_read=True)
                self._regions[domain] = made
            return self._regions[domain]

    def private(self) -> memoryview | None:
        """The same bytes, where the view cannot be registered and something else can."""
        return None

    def deregister(self) -> None:
        """Lets go of it. Where a thread is posting at this moment, the registration goes with that thread's queue pair."""
        with self._registering:
            regions, self._regions = self._regions or {}, None
        for region in regions.values():
            with contextlib.suppress(HrdmaError):
                region.close()

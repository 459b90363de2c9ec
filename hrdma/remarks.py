"""What the engine has to tell people: devices that were left, rails that were lost and are used again. Each a line of the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hrdma.runtime import Runtime

__all__ = ["Remarks"]


class Remarks:
    """Logs them: those of opening at once, others in the control thread as they come."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._descriptor = -1  # what is watched

    def watch(self) -> None:
        """From now on, until `close`; the engine is the last one."""
        runtime = self._runtime
        self.say()
        if runtime.control is not None:
            self._descriptor = runtime.engine.remarks_fd()
            runtime.control.watch(self._descriptor, self.say)

    def close(self) -> None:
        """To be called before the engine is closed. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0 and self._runtime.control is not None:
            self._runtime.control.unwatch(descriptor)
        self.say()

    def say(self) -> None:
        """Those that there are."""
        if not self._runtime.engine.closed:
            for text in self._runtime.engine.remarks():
                self._runtime.log.warning("%s", text)

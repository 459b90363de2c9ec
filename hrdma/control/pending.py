"""A call that waits for an agreement: the control thread tells it how it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Pending"]


class Pending:
    """A call of `ControlPlane.agree` or `exchange` that waits.

    Parameters
    ----------
    key : str
        Names the agreement.
    whole : bool
        All must come: it need not wait for the others once one is gone.

    Attributes
    ----------
    decision : dict or None
        What the coordinator said.
    error : Exception or None
        Why there will be no decision.
    missing : list of int or None
        Who had not come shortly before the deadline.
    """

    def __init__(self, key: str, *, whole: bool) -> None:
        self.key = key
        self.whole = whole
        self.decision: dict[str, Any] | None = None
        self.error: Exception | None = None
        self.missing: list[int] | None = None
        self._changed = threading.Event()

    def decide(self, decision: dict[str, Any]) -> None:
        self.decision = decision
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._changed.set()

    def wait(self, deadline: float, ask: Callable[[], object]) -> dict[str, Any]:
        """The decision; shortly before the deadline `ask` asks the coordinator who is missing.

        Raises
        ------
        TimeoutError
            There is none at the deadline.
        """
        started = time.monotonic()
        late = deadline - min(0.2, max(0.0, deadline - started) / 10)
        if not self._changed.wait(max(0.0, late - started)):
            ask()
            self._changed.wait(max(0.0, deadline - time.monotonic()))
        if self.decision is None:
            raise self.error or TimeoutError(self._late(deadline - started))
        return self.decision

    def _late(self, seconds: float) -> str:
        who = "the coordinator did not answer"
        if self.missing:
            ranks = ", ".join(map(str, self.missing[:16]))
            who = f"rank{'s' if len(self.missing) > 1 else ''} {ranks} did not answer"
        return f"agreement {self.key!r}: {who} within {max(0.1, round(seconds, 1)):g} s"

"""An operation of a client that is on its way: wait for it, await it, cancel it."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from hrdma import _core

__all__ = ["After", "Request", "Several", "cancel"]

Withdraw = Callable[[Sequence["Request"]], None]


class Request:
    """What ``async_op=True`` returns; the same methods as :class:`hrdma.Request`.

    The deadline is that of the call. When it passes, or on ``cancel()``, the node is told, and the result is dropped.
    """

    def __init__(
        self, operation: str, timeout: float, withdraw: Withdraw | None = None,
        drive: Callable[[Request, float], None] | None = None, number: int = 0,
    ) -> None:  # fmt: skip
        self._operation = operation
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._withdraw = withdraw or (lambda _: None)  # told of all that end too early at one time
        self.number = number  # of the question
        self._drive = drive  # receives in the thread that waits, for so many seconds at most
        self._settled = False
        self._ended: threading.Event | None = None  # for those who wait without receiving themselves
        self._lock = threading.Lock()
        self._value: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        state = "pending" if not self.done else "done" if self._error is None else "failed"
        return f"<Request {self._operation} {state}>"

    def settle(self, value: Any = None, error: BaseException | None = None) -> bool:
        """Ends it, once: False when it had ended before."""
        with self._lock:
            if self._settled:
                return False
            self._value, self._error = value, error
            self._settled = True
            if self._ended is not None:
                self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
        return True

    def check(self) -> None:
        """Raises where it was canceled, or its deadline has passed."""
        if not self._settled and time.monotonic() > self._deadline:
            self._expire()
        if self._error is not None:
            raise self._error

    def then(self, call: Callable[[], object]) -> None:
        """Runs a call when it has ended, in the thread that ends it; at once when it has."""
        with self._lock:
            if not self._settled:
                self._callbacks.append(call)
                return
        call()

    @property
    def canceled(self) -> bool:
        """Whether it ended by ``cancel()``."""
        return isinstance(self._error, asyncio.CancelledError)

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._settled

    @property
    def value(self) -> Any:
        """The result, where it has ended well; else None."""
        return self._value

    def wait(self, timeout: float | None = None) -> Any:
        """Blocks until it is done and returns the result.

        Parameters
        ----------
        timeout : float, optional
            Seconds. When they have passed, TimeoutError is raised and the operation goes on. None: until its own deadline.
        """
        until = self._deadline
        if timeout is not None:
            until = min(until, time.monotonic() + _core.seconds_of(timeout))
        if self._drive is not None and not self._settled:
            self._drive(self, max(0.0, until - time.monotonic()))
        if not self._settled and not self._event().wait(max(0.0, until - time.monotonic())):
            if time.monotonic() < self._deadline:
                raise TimeoutError(f"{self._operation} is not done after {timeout} s; it goes on")
            self._expire()
        if self._error is not None:
            raise self._error
        return self._value

    def _event(self) -> threading.Event:
        with self._lock:
            if self._ended is None:
                self._ended = threading.Event()
                if self._settled:
                    self._ended.set()
            return self._ended

    def result(self) -> Any:
        """As :meth:`wait` without a timeout of its own."""
        return self.wait()

    def cancel(self) -> bool:
        """Ends it now; False when it had ended before."""
        return cancel([self]) == 1

    def _expire(self) -> None:
        if self.settle(error=TimeoutError(f"{self._operation} is not done after {self._timeout:.3g} s")):
            self._withdraw([self])

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.done:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()

            def ring() -> None:
                if not future.done():
                    future.set_result(None)

            def settled() -> None:
                try:
                    loop.call_soon_threadsafe(ring)
                except RuntimeError:
                    return  # that loop is closed: nobody waits there

            self.then(settled)
            timer = loop.call_later(max(0.0, self._deadline - time.monotonic()), self._expire)
            try:
                yield from future.__await__()
            except BaseException:
                self.cancel()
                raise
            finally:
                timer.cancel()
        return self.wait()


def cancel(requests: Iterable[Request]) -> int:
    """Ends those that have not ended, and tells each node once. Returns how many."""
    ended: dict[Withdraw, list[Request]] = {}
    try:
        for request in requests:
            if request.settle(error=asyncio.CancelledError()):
                ended.setdefault(request._withdraw, []).append(request)
    finally:
        for withdraw, several in ended.items():
            withdraw(several)
    return sum(map(len, ended.values()))


def _cancel(requests: Sequence[Request], _: Sequence[Request]) -> None:
    # No method of the requests below: one that held itself would keep its result until garbage is collected.
    cancel(requests)


class After(Request):
    """Ends as the second of two does, when the first has ended well; as the first when that has not."""

    def __init__(
        self, operation: str, timeout: float, drive: Callable[[Request, float], None], first: Request, second: Request
    ) -> None:
        super().__init__(operation, timeout, functools.partial(_cancel, (first, second)), drive)
        self._both = first, second
        for request in self._both:
            request.then(self._one)

    def _one(self) -> None:
        first, second = self._both
        if first.done and (first._error is not None or second.done):
            last = second if first._error is None else first
            self.settle(last._value, last._error)
            second.cancel()


class Several(Request):
    """Ends when so many others have, or when its time has passed, and cancels the rest.

    Parameters
    ----------
    requests : list of Request
        Whose values say whether what they asked for is there.
    count : int
    result : callable
        Makes the result of a list that says of each whether it was there, or failed.
    """

    def __init__(
        self, operation: str, timeout: float, drive: Callable[[Request, float], None],
        requests: list[Request], count: int, result: Callable[[list[bool]], Any],
    ) -> None:  # fmt: skip
        super().__init__(operation, timeout, functools.partial(_cancel, requests), drive)
        self._requests, self._result = requests, result
        self._missing = count
        for request in requests:
            request.then(self._one)

    def _one(self) -> None:
        with self._lock:
            self._missing -= 1
            enough = self._missing == 0
        if enough and not self.done:
            self._expire()

    def _expire(self) -> None:
        """What there is counts."""
        cancel(self._requests)
        self.settle(self._result([not request.canceled and request._value is not False for request in self._requests]))

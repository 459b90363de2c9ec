"""Every exception that hrdma raises beyond the builtins TimeoutError, ValueError and TypeError."""

from __future__ import annotations

__all__ = [
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DeviceError",
    "HrdmaError",
    "NetlinkError",
    "ObjectLost",
    "ObjectStoreFull",
    "PeerError",
    "PolicyError",
    "RefusedError",
    "RequestError",
    "ScheduleError",
]


class HrdmaError(RuntimeError):
    """Base of all errors of this library."""


class RequestError(HrdmaError):
    """This operation failed; its connection and its communicator go on unless a subclass says otherwise."""


class CollectiveMismatchError(RequestError):
    """Ranks called different collectives, or the same one with different arguments. The communicator is broken."""


class CollectiveTimeoutError(RequestError, TimeoutError):
    """Another rank gave up a collective when its deadline had passed. The communicator is broken, on all ranks.

    The rank itself gets the builtin TimeoutError, which this one is too: what catches that finds all ranks.

    Attributes
    ----------
    rank : int
        The rank that gave up, in the communicator that raised.
    operation : str
        The collective that it gave up: ``"allreduce"``, ...; empty where this rank had not called it yet.
    sequence : int
        Running number of that collective on the communicator, from 0.
    """

    def __init__(self, message: str, *, rank: int = -1, operation: str = "", sequence: int = -1) -> None:
        super().__init__(message)
        self.rank = rank
        self.operation = operation
        self.sequence = sequence

    def __reduce__(self):
        return (_collective_timeout, (str(self), self.rank, self.operation, self.sequence))


def _collective_timeout(message, rank, operation, sequence):
    return CollectiveTimeoutError(message, rank=rank, operation=operation, sequence=sequence)


class ObjectLost(RequestError):
    """The object has no copy left anywhere, or was deleted. Whoever can make it again may put it again.

    Attributes
    ----------
    ref : str
        The object's reference as text.
    """

    def __init__(self, message: str, *, ref: str = "") -> None:
        super().__init__(message)
        self.ref = ref

    def __reduce__(self):
        return (_object_lost, (str(self), self.ref))


def _object_lost(message, ref):
    return ObjectLost(message, ref=ref)


class ObjectStoreFull(RequestError):
    """A node store has no room and nothing in it may go. The message says who holds what; nothing was stored."""


class PeerError(HrdmaError):
    """A rank or the connection to it is gone; every communicator that contains the rank is broken.

    Attributes
    ----------
    rank : int
        The rank to blame in the communicator that raised; -1 when it is not known.
    operation : str
        What was called here: ``"allreduce"``, ``"recv"``, ...
    sequence : int
        Running number of the operation on its communicator, from 0; -1 outside one.
    phase : str
        How far it was: ``"init"``, ``"connect"``, ``"post"``, ``"match"``, ``"transfer"``, ``"finish"`` or ``"close"``.
    transport : str
        Provider of the connection: ``"shm"``, ``"tcp"``, ...
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int = -1,
        operation: str = "",
        sequence: int = -1,
        phase: str = "",
        transport: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.operation = operation
        self.sequence = sequence
        self.phase = phase
        self.transport = transport

    def __reduce__(self):
        return (_peer_error, (str(self), self.rank, self.operation, self.sequence, self.phase, self.transport))


def _peer_error(message, rank, operation, sequence, phase, transport):
    return PeerError(message, rank=rank, operation=operation, sequence=sequence, phase=phase, transport=transport)


class DeviceError(HrdmaError):
    """The device is gone or cannot be opened; every connection on it is lost."""


class ScheduleError(HrdmaError, ValueError):
    """A schedule is wrong. The message names the rank and the chunk.

    Attributes
    ----------
    rank, chunk : int or None
        Where the proof failed.
    """

    def __init__(self, message: str, *, rank: int | None = None, chunk: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.chunk = chunk


class PolicyError(HrdmaError, ValueError):
    """A traffic policy is wrong. Nothing was changed.

    Attributes
    ----------
    line : int
        Line of the policy's text, from 1; 0 where it did not come from one.
    key : str
        What is wrong there: ``"qos.rate"``, ``"job[2].match[0].sport"``, ...
    """

    def __init__(self, message: str, *, line: int = 0, key: str = "") -> None:
        where = f"line {line}, {key}: " if line else f"{key}: " if key else ""
        super().__init__(where + message)
        self.line = line
        self.key = key


class RefusedError(RequestError):
    """Refused because it could do harm, or may not be done by this process. Nothing was changed."""


class NetlinkError(RequestError):
    """The kernel refused a change of traffic control.

    Attributes
    ----------
    errno : int
        The kernel's error number.
    words : str
        What the kernel said beyond the number; empty on kernels that say nothing.
    missing : str
        The kind of qdisc, classifier or device that this kernel does not have; empty where it refused something else.
    """

    def __init__(self, message: str, *, errno: int = 0, words: str = "", missing: str = "") -> None:
        super().__init__(message)
        self.errno = errno
        self.words = words
        self.missing = missing

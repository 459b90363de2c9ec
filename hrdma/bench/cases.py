"""What can be measured: for each case its buffers, its call, its expected result and its bus factor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from hrdma.communicator import Communicator

__all__ = ["CASES", "Case", "pattern", "reduced"]


def _modulus(dtype: np.dtype, op: str) -> int:
    """Small enough for exact arithmetic in every type, prime so that wrong offsets show."""
    if op == "prod":
        return 2
    return 7 if dtype.itemsize < 4 else 241


def pattern(first: int, count: int, rank: int, dtype: np.dtype, op: str = "sum") -> np.ndarray:
    """Element i of a rank's contribution is (i + rank) mod m + 1, for i in [first, first + count)."""
    import numpy as np

    values = (np.arange(first, first + count, dtype=np.int64) + rank) % _modulus(dtype, op) + 1
    return values.astype(dtype)


def reduced(first: int, count: int, size: int, dtype: np.dtype, op: str) -> np.ndarray:
    """The reduction of all ranks' patterns, computed in 64 bits and converted once."""
    import numpy as np

    from_ranks = (pattern(first, count, rank, np.dtype(np.int64), op) for rank in range(size))
    if dtype.itemsize < 4:  # the pattern depends on the width of the type
        from_ranks = (pattern(first, count, rank, dtype, op).astype(np.int64) for rank in range(size))
    functions: dict[str, Callable[[Any, Any], Any]] = {
        "sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
        "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
    }  # fmt: skip
    total: Any = next(from_ranks)
    for values in from_ranks:
        total = functions[op](total, values)
    if op == "avg":
        total = total.astype(np.float64) / size
    return total.astype(dtype)


@dataclass(frozen=True)
class Case:
    """One pattern.

    The size of a row is that of nccl-tests: the larger of a rank's buffers. shares: the size is cut into this many equal parts
    per rank count (1 or "n"); factor(n): busbw / algbw; reduces: whether op matters.
    """

    name: str
    call: Callable[[Communicator, np.ndarray, np.ndarray, Any], None]
    send_shares: bool  # the send buffer is size / n instead of size
    recv_shares: bool
    factor: Callable[[int], float]
    reduces: bool = False
    rooted: bool = False
    in_place: bool = False  # one buffer for both
    pair: bool = False


def _allreduce(comm: Communicator, x: np.ndarray, out: np.ndarray, how: Any) -> None:
    comm.allreduce(x, how.op, deterministic=how.deterministic or None)


def _reduce(comm: Communicator, x: np.ndarray, out: np.ndarray, how: Any) -> None:
    target = out if comm.rank == how.root else None
    comm.reduce(x, how.root, how.op, out=target, deterministic=how.deterministic or None)


def _broadcast(comm: Communicator, x: np.ndarray, out: np.ndarray, how: Any) -> None:
    comm.broadcast(x, how.root)


def _allgather(comm: Communicator, x: np.ndarray, out: np.ndarray, how: Any) -> None:
    comm.allgather(x, out)


def _reduce_scatter(comm: Communicator, x: np.ndarray, out: np.ndarray, how: Any) -> None:
    comm.reduce_scatter(x, how.op, out=out, deterministic=how.deterministic or None)


def _gather(comm: Communicator, x: np.ndarray, out: np.ndarray, how: Any) -> None:
    comm.gather(x, how.root, out=out if comm.rank == how.root else None)


def _scatter(comm: Communicator, x: np.ndarray, out: np.ndarray, how: Any) -> None:
    comm.scatter(x if comm.rank == how.root else None, how.root, out=out)


def _alltoall(comm: Communicator, x: np.ndarray, out: np.ndarray, how: Any) -> None:
    comm.alltoall(x, out)


def _pingpong(comm: Communicator, x: np.ndarray, out: np.ndarray, how: Any) -> None:
    if comm.rank == 0:
        comm.send(x, 1)
        comm.recv(out, 1)
    else:
        comm.recv(out, 0)
        comm.send(x, 0)


def _bandwidth(comm: Communicator, x: np.ndarray, out: np.ndarray, how: Any) -> None:
    if comm.rank == 0:
        comm.send(x, 1)
    else:
        comm.recv(out, 0)


def _most(n: int) -> float:
    return (n - 1) / n


def _one(n: int) -> float:
    return 1.0


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("pingpong", _pingpong, False, False, _one, pair=True),
        Case("bandwidth", _bandwidth, False, False, _one, pair=True),
        Case("allreduce", _allreduce, False, False, lambda n: 2 * (n - 1) / n, reduces=True, in_place=True),
        Case("reduce", _reduce, False, False, _one, reduces=True, rooted=True),
        Case("broadcast", _broadcast, False, False, _one, rooted=True, in_place=True),
        Case("allgather", _allgather, True, False, _most),
        Case("reduce_scatter", _reduce_scatter, False, True, _most, reduces=True),
        Case("gather", _gather, True, False, _most, rooted=True),
        Case("scatter", _scatter, False, True, _most, rooted=True),
        Case("alltoall", _alltoall, False, False, _most),
    )
}

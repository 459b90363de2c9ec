"""What can be measured: for each case who holds which buffers, the call, the expected result and the bus factor.

Words as in nccl-tests: the size of a row is that of the larger buffer of a rank ("whole"); where ranks hold a part
each, a "share" is whole / n. algbw = size / time; busbw = algbw * factor(n) is what the wires carry, to be held against
the hardware's limit whatever n is.

    case             x          out          busbw / algbw     in place
    allreduce        whole      whole        2 (n - 1) / n     out is x (default)
    reduce           whole      whole@root   1                 out is x (default)
    broadcast        whole                   1                 always
    allgather        share      whole        (n - 1) / n       x is this rank's share of out
    reduce_scatter   whole      share        (n - 1) / n       out is this rank's share of x
    gather           share      whole@root   (n - 1) / n       at the root, x is its share of out
    scatter          whole@root share        (n - 1) / n       at the root, out is its share of x
    alltoall         whole      whole        (n - 1) / n       out is x
    pingpong         whole      whole        1                 never
    bandwidth        whole@0    whole@1      1                 never
    barrier                                  0                 never
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

from hrdma.types import DTYPES, OPS

if TYPE_CHECKING:
    import numpy as np

    from hrdma.bench.values import Values
    from hrdma.communicator import Communicator
    from hrdma.types import Op

    Call = Callable[[], object]
    Block = tuple[int, int, np.ndarray]  #: begin and end in the result, and one period of what must be there

__all__ = ["CASES", "Case", "Situation", "reductions"]

NONE, WHOLE, SHARE = range(3)
FLIGHT = 16 << 20  # bytes that `bandwidth` has in flight at once
MESSAGES = 64  # or so many messages


@dataclass(frozen=True)
class Situation:
    """Where a call takes place: this rank, all ranks, the root, elements of the whole and of a share."""

    rank: int
    size: int
    root: int
    count: int
    share: int


@dataclass(frozen=True)
class Case:
    """One pattern.

    Attributes
    ----------
    bind : function
        (comm, x, out, op, root) to the call that is measured. The call does nothing but its operation: arguments are
        looked up before.
    want : function
        (situation, values) to the blocks that the result of this rank must hold.
    x, out : int
        NONE, WHOLE or SHARE.
    x_at, out_at : int or None
        The only rank that has this buffer; -1 stands for the root, None for all ranks.
    factor : function
        Of the number of ranks: busbw / algbw.
    places : tuple of str
        "in" or "out" of place, the default first.
    burst : function
        Of the size in bytes: operations that one call makes.
    """

    name: str
    bind: Callable[[Communicator, np.ndarray, np.ndarray, Op, int], Call]
    want: Callable[[Situation, Values], Iterator[Block]]
    x: int
    out: int
    factor: Callable[[int], float]
    places: tuple[str, ...] = ("out",)
    x_at: int | None = None
    out_at: int | None = None
    reduces: bool = False
    rooted: bool = False
    pair: bool = False
    burst: Callable[[int], int] = lambda nbytes: 1

    def has(self, which: str, rank: int, root: int) -> bool:
        """Whether a rank has the buffer "x" or "out"."""
        kind, at = (self.x, self.x_at) if which == "x" else (self.out, self.out_at)
        return kind != NONE and (at is None or rank == (root if at == -1 else at))

    @property
    def moves(self) -> bool:
        """Whether there is any data."""
        return self.x != NONE or self.out != NONE

    @property
    def shared(self) -> bool:
        """Whether ranks hold equal shares, so that counts are multiples of their number."""
        return SHARE in (self.x, self.out) or self.name == "alltoall"


def reductions(dtype: str) -> tuple[Op, ...]:
    """The operators that an element type has."""
    absent = ("band", "bor", "bxor") if dtype in ("float16", "bfloat16", "float32", "float64") else ()
    assert dtype in DTYPES
    return tuple(cast("Op", op) for op in OPS if op not in absent)


# -- the calls --


def _allreduce(comm: Communicator, x: np.ndarray, out: np.ndarray, op: Op, root: int) -> Call:
    return partial(comm.allreduce, x, op) if out is x else lambda: comm.allreduce(x, op, out=out)


def _reduce(comm: Communicator, x: np.ndarray, out: np.ndarray, op: Op, root: int) -> Call:
    if out is x or comm.rank != root:
        return partial(comm.reduce, x, root, op)
    return lambda: comm.reduce(x, root, op, out=out)


def _broadcast(comm: Communicator, x: np.ndarray, out: np.ndarray, op: Op, root: int) -> Call:
    return partial(comm.broadcast, x, root)


def _allgather(comm: Communicator, x: np.ndarray, out: np.ndarray, op: Op, root: int) -> Call:
    return partial(comm.allgather, x, out)


def _reduce_scatter(comm: Communicator, x: np.ndarray, out: np.ndarray, op: Op, root: int) -> Call:
    return lambda: comm.reduce_scatter(x, op, out=out)


def _gather(comm: Communicator, x: np.ndarray, out: np.ndarray, op: Op, root: int) -> Call:
    return (lambda: comm.gather(x, root, out=out)) if comm.rank == root else partial(comm.gather, x, root)


def _scatter(comm: Communicator, x: np.ndarray, out: np.ndarray, op: Op, root: int) -> Call:
    source = x if comm.rank == root else None
    return lambda: comm.scatter(source, root, out=out)


def _alltoall(comm: Communicator, x: np.ndarray, out: np.ndarray, op: Op, root: int) -> Call:
    return partial(comm.alltoall, x, out)


def _barrier(comm: Communicator, x: np.ndarray, out: np.ndarray, op: Op, root: int) -> Call:
    return comm.barrier


def _pingpong(comm: Communicator, x: np.ndarray, out: np.ndarray, op: Op, root: int) -> Call:
    send, recv = comm.send, comm.recv

    def ping() -> None:
        send(x, 1)
        recv(out, 1)

    def pong() -> None:
        recv(out, 0)
        send(x, 0)

    return ping if comm.rank == 0 else pong


def _window(nbytes: int) -> int:
    return max(2, min(MESSAGES, FLIGHT // max(nbytes, 1)))


def _bandwidth(comm: Communicator, x: np.ndarray, out: np.ndarray, op: Op, root: int) -> Call:
    buffer = x if comm.rank == 0 else out
    post = partial(comm.isend, x, 1) if comm.rank == 0 else partial(comm.irecv, out, 0)
    window = range(_window(buffer.nbytes))

    def stream() -> None:
        for request in [post() for _ in window]:
            request.wait()

    return stream


# -- what must come out --


def _everywhere(at: Situation, values: Values) -> Iterator[Block]:
    yield 0, at.count, values.reduced()


def _at_root(at: Situation, values: Values) -> Iterator[Block]:
    if at.rank == at.root:
        yield 0, at.count, values.reduced()


def _of_root(at: Situation, values: Values) -> Iterator[Block]:
    yield 0, at.count, values.of(at.root)


def _of_all(at: Situation, values: Values) -> Iterator[Block]:
    for peer in range(at.size):
        yield at.share * peer, at.share * (peer + 1), values.of(peer)


def _of_all_at_root(at: Situation, values: Values) -> Iterator[Block]:
    if at.rank == at.root:
        yield from _of_all(at, values)


def _share_of_sum(at: Situation, values: Values) -> Iterator[Block]:
    yield 0, at.share, values.reduced(at.share * at.rank)


def _share_of_root(at: Situation, values: Values) -> Iterator[Block]:
    yield 0, at.share, values.of(at.root, at.share * at.rank)


def _exchanged(at: Situation, values: Values) -> Iterator[Block]:
    for peer in range(at.size):
        yield at.share * peer, at.share * (peer + 1), values.of(peer, at.share * at.rank)


def _of_other(at: Situation, values: Values) -> Iterator[Block]:
    yield 0, at.count, values.of(1 - at.rank)


def _of_first(at: Situation, values: Values) -> Iterator[Block]:
    if at.rank == 1:
        yield 0, at.count, values.of(0)


def _nothing(at: Situation, values: Values) -> Iterator[Block]:
    return iter(())


def _most(n: int) -> float:
    return (n - 1) / n


def _one(n: int) -> float:
    return 1.0


BOTH = ("out", "in")
CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(
            "allreduce", _allreduce, _everywhere, WHOLE, WHOLE, lambda n: 2 * (n - 1) / n, ("in", "out"), reduces=True
        ),
        Case("reduce", _reduce, _at_root, WHOLE, WHOLE, _one, ("in", "out"), out_at=-1, reduces=True, rooted=True),
        Case("broadcast", _broadcast, _of_root, WHOLE, NONE, _one, ("in",), rooted=True),
        Case("allgather", _allgather, _of_all, SHARE, WHOLE, _most, BOTH),
        Case("reduce_scatter", _reduce_scatter, _share_of_sum, WHOLE, SHARE, _most, BOTH, reduces=True),
        Case("gather", _gather, _of_all_at_root, SHARE, WHOLE, _most, BOTH, out_at=-1, rooted=True),
        Case("scatter", _scatter, _share_of_root, WHOLE, SHARE, _most, BOTH, x_at=-1, rooted=True),
        Case("alltoall", _alltoall, _exchanged, WHOLE, WHOLE, _most, BOTH),
        Case("barrier", _barrier, _nothing, NONE, NONE, lambda n: 0.0),
        Case("pingpong", _pingpong, _of_other, WHOLE, WHOLE, _one, pair=True, burst=lambda nbytes: 2),
        Case("bandwidth", _bandwidth, _of_first, WHOLE, WHOLE, _one, x_at=0, out_at=1, pair=True, burst=_window),
    )
}

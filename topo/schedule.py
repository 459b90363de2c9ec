"""The schedule: which chunk goes from which rank to which in which round, as immutable data.

A collective works on a vector that is made of *blocks*: one for allreduce, reduce, broadcast and barrier; one per rank
for allgather, reduce_scatter, gather and scatter; one per (source, destination) for alltoall. A schedule cuts every
block into `split` *chunks*; chunk `block * split + part` is the same share of the vector on every rank. How many
elements that is, is decided when the schedule is lowered, from the real counts: chunks of different size and empty ones
are fine.

A transfer moves `span` consecutive chunks in one message. All transfers of a round read what its start left; rounds
order meaning, not time: what runs when is left to the data. `copy` replaces the receiver's chunk. The `reduce`
transfers that reach one (rank, chunk) in one round are one reduction over several operands, evaluated left to right by
the rank that holds the operand, the receiver's own value at its own rank's place. So both ends of an exchange compute
the same bits.

The transfers lie in one int32 array, a row each, sorted by round, because a plan for many ranks has many of them;
`rounds` shows them as objects.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hrdma.errors import ScheduleError
from hrdma.types import COLLECTIVES

__all__ = [
    "CHUNK",
    "COPY",
    "DST",
    "LANE",
    "OP",
    "REDUCE",
    "ROUND",
    "SPAN",
    "SRC",
    "Schedule",
    "Transfer",
    "blocks",
    "rows",
]

ROUND, SRC, DST, CHUNK, SPAN, OP, LANE = range(7)
COPY, REDUCE = 0, 1
_OPS = ("copy", "reduce")
_FORMAT = "hrdma.schedule"
_VERSION = 1
_HEAD = ("collective", "size", "split", "root", "name", "weights", "window", "view")


class Transfer(NamedTuple):
    """One message: `span` consecutive chunks from one rank to another."""

    src: int
    dst: int
    chunk: int
    op: str = "copy"  #: "copy" or "reduce"
    lane: int = 0  #: rail it prefers
    span: int = 1


def blocks(collective: str, size: int) -> int:
    """Number of blocks of a collective's vector."""
    if collective == "alltoall":
        return size * size
    return size if collective in ("allgather", "reduce_scatter", "gather", "scatter") else 1


def rows(rnd, src, dst, chunk, op: int, span=1, lane=0) -> np.ndarray:
    """Transfers from broadcastable columns, in the order of the broadcast shape."""
    shape = np.broadcast_shapes(
        np.shape(rnd), np.shape(src), np.shape(dst), np.shape(chunk), np.shape(span), np.shape(lane)
    )
    table = np.empty((*shape, 7), np.int32)
    for column, values in enumerate((rnd, src, dst, chunk, span, op, lane)):
        table[..., column] = values
    return table.reshape(-1, 7)


@dataclass(frozen=True, eq=False)
class Schedule:
    """A collective's transfers, for all ranks or (a view) for those that touch one rank.

    Parameters
    ----------
    collective : str
        One of `hrdma.types.COLLECTIVES`.
    size : int
        Ranks.
    table : ndarray of int32, shape (n, 7)
        Columns ``ROUND SRC DST CHUNK SPAN OP LANE``, sorted by round. Made read-only.
    split : int
        Chunks per block.
    root : int
        For broadcast, reduce, gather and scatter.
    name : str
        Of the algorithm that wrote it.
    weights : tuple of int, optional
        `split` relative sizes of a block's chunks; equal when None.
    window : int
        A rank starts the sends of a round when its sends of `window` rounds before have ended; 0: no such limit.
    view : int, optional
        The rank to which the table was narrowed; None: complete.

    Notes
    -----
    Nothing is validated here except the shape: `check` proves a complete schedule, and names rank and chunk.
    """

    collective: str
    size: int
    table: np.ndarray
    split: int = 1
    root: int = 0
    name: str = ""
    weights: tuple[int, ...] | None = None
    window: int = 0
    view: int | None = None

    def __post_init__(self) -> None:
        if self.table.ndim != 2 or self.table.shape[1] != 7:
            raise ScheduleError(f"a table of transfers has 7 columns; this one has shape {self.table.shape}")
        self.table.flags.writeable = False
        for field in ("size", "split", "root", "window"):  # numbers of numpy print otherwise, and are no JSON
            object.__setattr__(self, field, operator.index(getattr(self, field)))
        if self.view is not None:
            object.__setattr__(self, "view", operator.index(self.view))
        if self.weights is not None:
            object.__setattr__(self, "weights", tuple(map(operator.index, self.weights)))

    @classmethod
    def of(cls, collective: str, size: int, rounds: Iterable[Iterable[Transfer]], **fields) -> Schedule:
        """A schedule from rounds of transfers; `fields` as in the class."""
        listed = []
        for index, transfers in enumerate(rounds):
            for t in transfers:
                if t.op not in _OPS:
                    raise ScheduleError(f"op of a transfer is copy or reduce, not {t.op!r}", rank=t.dst, chunk=t.chunk)
                listed.append((index, t.src, t.dst, t.chunk, t.span, _OPS.index(t.op), t.lane))
        return cls(collective, size, np.array(listed, np.int32).reshape(-1, 7), **fields)

    @property
    def blocks(self) -> int:
        return blocks(self.collective, self.size)

    @property
    def chunks(self) -> int:
        return self.blocks * self.split

    @property
    def nrounds(self) -> int:
        return int(self.table[-1, ROUND]) + 1 if len(self.table) else 0

    @property
    def rounds(self) -> tuple[tuple[Transfer, ...], ...]:
        """The transfers as objects, round by round."""
        found: list[list[Transfer]] = [[] for _ in range(self.nrounds)]
        for rnd, src, dst, chunk, span, op, lane in self.table.tolist():
            found[rnd].append(Transfer(src, dst, chunk, _OPS[op], lane, span))
        return tuple(tuple(r) for r in found)

    def for_rank(self, rank: int) -> Schedule:
        """The transfers that `rank` sends or receives."""
        if self.view == rank:
            return self
        if self.view is not None:
            raise ScheduleError(
                f"this is the view of rank {self.view}; it does not hold rank {rank}'s transfers", rank=rank
            )
        mine = (self.table[:, SRC] == rank) | (self.table[:, DST] == rank)
        return Schedule(
            self.collective,
            self.size,
            self.table[mine],
            self.split,
            self.root,
            self.name,
            self.weights,
            self.window,
            rank,
        )

    def check(self, ordered: bool = False, single: bool = False) -> None:
        """Proves that every rank ends with what the collective promises. See `hrdma.topo.check.check`.

        Raises
        ------
        ScheduleError
            Naming rank and chunk.
        """
        from hrdma.topo.check import check

        check(self, ordered=ordered, single=single)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Schedule)
            and self._fields() == other._fields()
            and np.array_equal(self.table, other.table)
        )

    def __hash__(self) -> int:
        return hash((self._fields(), self.table.tobytes()))

    def _fields(self) -> tuple:
        return tuple(getattr(self, field) for field in _HEAD)

    def digest(self) -> str:
        """16 digits that are the same in every process, and differ where schedules do. Computed once."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        said = hashlib.blake2b(repr(self._fields()).encode(), digest_size=8)
        said.update(self.table.astype("<i4").tobytes())
        return said.hexdigest()

    def to_json(self) -> str:
        """Text that `from_json` reads back: one line per round, so that plans can be compared and edited."""
        head = {"format": _FORMAT, "version": _VERSION}
        head.update((field, getattr(self, field)) for field in _HEAD)
        head["columns"] = ["src", "dst", "chunk", "span", "op", "lane"]
        listed = [[[t.src, t.dst, t.chunk, t.span, t.op, t.lane] for t in transfers] for transfers in self.rounds]
        body = ",\n  ".join(json.dumps(transfers) for transfers in listed)
        return json.dumps(head, indent=1)[:-2] + ',\n "rounds": [\n  ' + body + "\n ]\n}\n"

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Reads what `to_json` wrote. The proof is the caller's: see `check`.

        Raises
        ------
        ScheduleError
            When the text is not a schedule of this version.
        """
        try:
            data = json.loads(text)
            if data.get("format") != _FORMAT or data.get("version") != _VERSION:
                raise ScheduleError(
                    f"not a schedule of version {_VERSION}: {data.get('format')!r}, version {data.get('version')!r}"
                )
            if data["collective"] not in COLLECTIVES:
                raise ScheduleError(f"unknown collective {data['collective']!r}; known: {', '.join(COLLECTIVES)}")
            weights = data["weights"]
            rounds = [[Transfer(s, d, c, op, lane, span) for s, d, c, span, op, lane in r] for r in data["rounds"]]
            return cls.of(
                data["collective"], int(data["size"]), rounds, split=int(data["split"]), root=int(data["root"]),
                name=str(data["name"]), weights=None if weights is None else tuple(int(w) for w in weights),
                window=int(data["window"]), view=data["view"],
            )  # fmt: skip
        except ScheduleError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ScheduleError(f"not a schedule: {type(error).__name__}: {error}") from error

    def __str__(self) -> str:
        """The rounds as a table: ``0>1:4-7+`` is chunks 4 to 7 from rank 0 to 1, added to what is there."""
        head = f"{self.name or 'schedule'}: {self.collective}, {self.size} ranks, {self.chunks} chunks"
        head += f", {len(self.table)} transfers"
        lines = [head if self.view is None else f"{head}, as rank {self.view} sees it"]
        for index, transfers in enumerate(self.rounds):
            lines.append(f"{index:4} | " + "  ".join(_brief(t) for t in transfers))
        return "\n".join(lines)


def _brief(t: Transfer) -> str:
    span = f"{t.chunk}" if t.span == 1 else f"{t.chunk}-{t.chunk + t.span - 1}"
    return f"{t.src}>{t.dst}:{span}" + ("+" if t.op == "reduce" else "") + (f"@{t.lane}" if t.lane else "")


def join(*tables: np.ndarray) -> np.ndarray:
    """Several tables as one, sorted by round; the order within a round is kept."""
    table = np.concatenate(tables) if len(tables) > 1 else tables[0]
    return table[np.argsort(table[:, ROUND], kind="stable")]


def involved(table: np.ndarray, rank: int | None) -> np.ndarray:
    """The rows of a table that touch a rank; all when it is None."""
    return table if rank is None else table[(table[:, SRC] == rank) | (table[:, DST] == rank)]


def offsets(counts: Sequence[int]) -> list[int]:
    """Where each of several adjacent ranges starts, and where the last one ends."""
    total, found = 0, [0]
    for count in counts:
        total += count
        found.append(total)
    return found

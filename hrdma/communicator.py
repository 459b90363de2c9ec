"""Communicator: a group of ranks with a name of its own on the wire.

What must be fast is inherited from the compiled :class:`hrdma._core.CommunicatorBase`. Here is what happens seldom: making
new communicators, planning a collective the first time it is called, saying who is where when one is stuck.

Ids need no agreement on the wire: all members of a communicator make its children in the same order, so parent, running
number and colour name a child alike everywhere.
"""

from __future__ import annotations

import hashlib
import operator
import threading
import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hrdma import _core
from hrdma.classes import NO_CLASS, connect, dscp_of, stamped
from hrdma.errors import PeerError
from hrdma.given import GivenSchedules
from hrdma.types import DTYPES

if TYPE_CHECKING:
    from types import TracebackType

    from hrdma.planning import Cost
    from hrdma.runtime import Runtime

__all__ = ["Communicator", "cost_for"]

_LANDING = 64 << 10  # bytes; shorter operands are few messages, of which the first are reduced while others come
VERDICT_SECONDS = 2.0  # how long a rank that saw a mismatch waits to be told who differs


class Communicator(_core.CommunicatorBase):
    """Ranks that send to each other and call collectives together.

    :func:`hrdma.init` makes the first one; :meth:`split`, :meth:`dup` and :meth:`shrink` make more.

    Attributes
    ----------
    rank, size : int
        This rank, and how many there are.
    timeout : float
        Default deadline of calls, seconds.
    priority : int
        Default priority of calls: 0 (most urgent) to 7; at first that of the job (``HRDMA_PRIORITY``, 4).
    deterministic : bool
        Default of ``deterministic=``.
    traffic_class : int or None
        DSCP of all that is sent on it, where it has a class of its own (`dup`, `split`); None: the job's.

    Notes
    -----
    Point-to-point calls may come from any thread. Collectives are called in the same order on all ranks, so threads
    that call them each take a communicator of their own (:meth:`dup`).

    A lost rank breaks exactly the communicators that contain it: pending and later calls raise the same PeerError.
    """

    _plan_override: tuple[str, int | None] | None = (
        None  # (algorithm, parts) for measurements; set before the first call
    )

    def __init__(self, runtime: Runtime, id: int, members: Sequence[int], dscp: int = NO_CLASS) -> None:
        members = tuple(members)
        rank = members.index(runtime.rank)
        super().__init__(runtime.engine, id, members, rank, timeout=runtime.config.timeout, dscp=dscp)
        self.traffic_class = None if dscp == NO_CLASS else dscp
        self.priority = runtime.config.priority
        self._runtime = runtime
        self._members = members
        self._children = 0
        self._cost: Cost | None = None
        self._given = GivenSchedules()
        self._sentenced = threading.Event()
        self._sentence_text = ""
        runtime.communicators[id] = self

    def __repr__(self) -> str:
        return f"<Communicator {self.id:#x} rank {self.rank} of {self.size}{' closed' if self.closed else ''}>"

    # -- making and ending ---------------------------------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0, *, traffic_class: int | None = None) -> Communicator | None:
        """Parts the ranks into new communicators, one for each colour. Collective.

        Parameters
        ----------
        color : int or None
            Ranks of one colour get a communicator together; None: this rank gets none.
        key : int
            Orders the ranks of the new communicator; equal ones by their rank here.
        traffic_class : int, optional
            As for `dup`; one for each colour.

        Returns
        -------
        Communicator or None

        Raises
        ------
        TypeError, ValueError
            Colour or key is no integer, or none of 64 bits; before anything is sent. Or ranks of one colour gave different
            classes: then on all of them.
        DeviceError
            As `dup`.

        Notes
        -----
        Costs one allgather of 32 bytes.
        """
        dscp = NO_CLASS if color is None else dscp_of(traffic_class)
        mine = array("q", [color is not None, _of_64_bits("color", color or 0), _of_64_bits("key", key), dscp])
        found = array("q", bytes(32 * self.size))
        self.allgather(mine, found)
        child = self._children
        self._children += 1
        rows = [found[4 * rank : 4 * rank + 4] for rank in range(self.size)]
        group = sorted((row[2], rank) for rank, row in enumerate(rows) if row[0] and mine[0] and row[1] == mine[1])
        members = [self._members[rank] for _, rank in group]
        if any(row[3] != NO_CLASS for row in rows):
            _one_class({(row[1], row[3]) for row in rows if row[0]})
            connect(self, members, dscp, None)
        if color is None:
            return None
        return self._child((child, "split", mine[1]), members, dscp)

    def dup(self, *, traffic_class: int | None = None) -> Communicator:
        """A second communicator of the same ranks, for another thread, or for traffic of another class. Collective.

        Parameters
        ----------
        traffic_class : int, optional
            DSCP, 0 to 63, of all packets that are sent on it and on what is made from it: those of queue pairs (traffic class
            and service level), and of sockets. None: as this one. Shared memory has none.

        Raises
        ------
        TypeError, ValueError
            It is no DSCP, before anything is sent; or the ranks gave different ones: then on all of them. (Where some give none
            the others wait for them until the deadline.)
        DeviceError
            On all ranks: there can be no such connections, as queue pairs have run out for one, or a device does not keep the class.

        Notes
        -----
        Costs no traffic without a class. With one: three allgathers of 8 bytes, and for each pair of ranks that has none of that
        class yet its connections, with their memory: as many as it has already.
        """
        self._state()
        dscp = dscp_of(traffic_class)
        child = self._children
        self._children += 1
        if dscp != NO_CLASS:
            found = array("q", bytes(8 * self.size))
            self.allgather(array("q", [dscp]), found)
            _one_class({(0, each) for each in found})
            connect(self, self._members, dscp, None)
        return self._child((child, "dup"), self._members, dscp)

    def shrink(self, timeout: float | None = None) -> Communicator:
        """The survivors' communicator, after a failure. Called by all of them.

        Parameters
        ----------
        timeout : float, optional
            Seconds within which all survivors must have called it.

        Returns
        -------
        Communicator
            Without the ranks that are lost. What was sent on this one is dropped; this one stays broken.

        Raises
        ------
        TimeoutError
            A rank that is not known to be lost did not call.
        PeerError
            The others go on without this rank: it was expelled, or they have no connection to it.

        Notes
        -----
        Two living ranks that have lost each other cannot both stay: the higher one goes.
        """
        self._state()
        seconds = self._deadline_seconds(timeout)
        child = self._children
        self._children += 1
        control = self._runtime.control
        survivors = list(self._members)
        if control is not None:
            stats = {rank: self._runtime.engine.peer_stats(rank) for rank in survivors}
            cut = [rank for rank, found in stats.items() if found is None or not found["connected"]]
            present = control.agree(
                f"shrink:{self.id:x}:{child}", survivors, {"cut": cut}, deadline=time.monotonic() + seconds
            )
            survivors = _connected(sorted(present, key=self._members.index), present)
            if self._runtime.rank not in survivors:
                raise PeerError(
                    f"shrink: ranks {survivors} go on without this one: they have lost the connection to it",
                    rank=self.rank,
                    operation="shrink",
                    phase="connect",
                )
        return self._child((child, "shrink", *survivors), survivors)

    def _child(self, name: tuple, members: Sequence[int], dscp: int = NO_CLASS) -> Communicator:
        if dscp == NO_CLASS and self.traffic_class is not None:
            dscp = self.traffic_class
        child = Communicator(self._runtime, _hash64(f"{self.id:x}/{'/'.join(map(str, name))}"), members, dscp)
        child.timeout, child.priority, child.deterministic = self.timeout, self.priority, self.deterministic
        return child

    def close(self) -> None:
        """Ends it here: pending calls fail, late messages are dropped. Closing the first one leaves the job.

        Idempotent. The other ranks' communicators are not touched; their calls that need this rank fail.
        """
        from hrdma.runtime import WORLD_ID

        if self.id == WORLD_ID:
            self._runtime.close()
        else:
            self._close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- what it is, what it did ---------------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks in the world of rank 0, 1, ... here."""
        return self._members

    def info(self) -> dict[str, Any]:
        """What this communicator is made of.

        Returns
        -------
        dict
            ``rank``, ``size``, ``members``, ``transports`` (provider by rank; tcp while that stands in for verbs), ``mapped``
            (whether peers' registered memory is read in place), ``cost`` (parameters of the planner), ``domains`` (text by provider), ``fabric`` (its name, or
            None), ``rails`` (interfaces, in the order of lanes; empty where only one is used), ``job`` (its name),
            ``traffic`` (`hrdma.traffic.Stamp.to_dict`, None where the job has no class), ``traffic_class`` (None, or of this
            communicator alone: ``dscp``, and ``stamped``, the providers whose connections carry it, read back from devices).
        """
        runtime = self._runtime
        return {
            "rank": self.rank,
            "size": self.size,
            "members": list(self._members),
            "transports": {rank: self._carrier(peer) for rank, peer in enumerate(self._members)},
            "mapped": self._mapped(),
            "cost": self._costs().to_dict(),
            "domains": {name: domain["text"] for name, domain in runtime.engine.domains().items()},
            "fabric": None if runtime.network is None else runtime.network.fabric.name,
            "rails": list(runtime.rails),
            "job": runtime.config.job,
            "traffic": runtime.traffic and runtime.traffic.to_dict(),
            "traffic_class": None
            if self.traffic_class is None
            else {"dscp": self.traffic_class, "stamped": stamped(self, self.traffic_class)},
        }

    def _carrier(self, peer: int) -> str:
        """The provider to a rank of the world; where another has to stand in for it now, that one."""
        runtime = self._runtime
        found = None if peer == runtime.rank else runtime.engine.peer_stats(peer)
        return found["provider"] if found else runtime.provider(runtime.rank, peer)

    def stats(self) -> dict[str, Any]:
        """Traffic of this process with the ranks of this communicator, over whatever communicator it went.

        Returns
        -------
        dict
            ``peers``: by rank ``provider`` (what stands in for it while one does), ``fallbacks`` (how often), ``tx_bytes``, ``rx_bytes``, ``tx_msgs``, ``rx_msgs``, ``busy`` (seconds with bulk in
            flight, as far as this side has heard), ``rate`` (bytes per second, measured by the engine), ``rails`` (connections side by side) and ``busbw``
            (bytes per busy second);
            ``tx_bytes``, ``rx_bytes``: sums; ``counters`` of the engine; ``memory``: registered memory of the process; ``faults`` that were injected into it.
        """
        engine = self._runtime.engine
        peers = {}
        for rank, member in enumerate(self._members):
            found = engine.peer_stats(member)
            if found is not None and rank != self.rank:
                moved = found["tx_bytes"] + found["rx_bytes"]
                peers[rank] = {**found, "busbw": moved / found["busy"] if found["busy"] > 0 else 0.0}
        return {
            "peers": peers,
            "tx_bytes": sum(peer["tx_bytes"] for peer in peers.values()),
            "rx_bytes": sum(peer["rx_bytes"] for peer in peers.values()),
            "counters": engine.counters(),
            "memory": _core.memory_stats(),
            "faults": _core.faults_fired(),
        }

    # -- planning, called by the core when a collective is new ---------------------------------------------------------------------

    def _plan(
        self,
        collective: str,
        counts: Any,
        itemsize: int,
        dtype: str,
        op: str | None,
        root: int | None,
        in_place: bool,
        deterministic: bool,
        schedule: int,
        opened: bool = False,
        sliced: bool = False,
    ) -> _core.Program:
        from hrdma.planning import plan

        shown, signed = _describe(collective, counts, dtype, op, root, deterministic)
        mark = self._given.mark(schedule)
        shown, signed = shown + mark, signed + mark
        algorithm, parts = self._plan_override or (None, None)
        # of all ranks, in their order: a part of them has no fabric of its own
        network = self._runtime.network if self._members == tuple(range(self._runtime.size)) else None
        spec = plan(
            collective,
            size=self.size,
            rank=self.rank,
            counts=counts,
            itemsize=itemsize,
            dtype=dtype if dtype in DTYPES else "uint8",
            op=op or "sum",
            root=root or 0,
            deterministic=deterministic,
            in_place=in_place,
            cost=self._costs(),
            mapped=self._mapped(),
            opened=opened,
            sliced=sliced,
            landing=self._landing(),
            algorithm=algorithm,
            parts=parts,
            on=network,
            schedule=self._given.schedules.get(schedule),
        )
        self._runtime.log.info("%s", spec.explanation)
        if spec.choice is not None and spec.reason and spec.reason not in self._runtime.told:
            self._runtime.told.add(spec.reason)
            if self.rank == 0:
                self._runtime.log.warning("%s is %s", collective, spec.reason)
        return _core.Program(
            spec.instrs,
            spec.unlocks,
            spec.refs,
            spec.in_bytes,
            spec.out_bytes,
            spec.tmp_bytes,
            self.size,
            text=shown,
            signature=_hash64(signed),
            explanation=spec.explanation,
            pairs=_pairs(counts) if collective == "alltoall" and not isinstance(counts, int) else "",
            aside=spec.aside,
            sliceable=spec.sliceable,
        )

    def _give(self, schedule: Any, timeout: float | None) -> int:
        return self._given.number(self, schedule, timeout)

    def _mapped(self) -> bool:
        """Whether every pair can read each other's registered memory in place; the same on all ranks."""
        runtime = self._runtime
        return all(
            name == "loop" or all("map" in runtime.cards[rank]["caps"][name] for rank in self._members)
            for name in runtime.links(self._members)
        )

    def _landing(self) -> int:
        """From which length on operands land, where all that comes over a network is written by devices."""
        runtime, own = self._runtime, self._members[self.rank]
        caps = [runtime.cards[own]["caps"][name] for name in runtime.links(self._members) if name != "loop"]
        written = [words for words in caps if "map" not in words]
        return _LANDING if written and all("confirms" in words for words in written) else 0

    def _costs(self) -> Cost:
        if self._cost is None:
            self._cost = cost_for(self)
        return self._cost

    # -- called by the core from the thread that waits, and by the control plane -----------------------------------------------------

    def _stalled(self, operation: str, sequence: int, signature: int, text: str) -> None:
        if self._runtime.control is not None:
            self._runtime.control.report_stall(self.id, self._members, sequence, signature, text, self._recent())

    def _verdict(self, operation: str, sequence: int, signature: int, text: str) -> str | None:
        if self._runtime.control is not None and not self._sentenced.is_set():
            self._runtime.control.report_mismatch(self.id, self._members, sequence, signature, text, self._recent())
            self._sentenced.wait(VERDICT_SECONDS)
        return self._sentence_text or None

    def _whereabouts(self, operation: str, sequence: int) -> str:
        if self._runtime.control is None:
            return ""
        return "; ".join(f"rank {rank}: {where}" for rank, where in self._runtime.control.stalls(self.id).items())

    def _sentence(self, text: str) -> None:
        """The control plane has found out whose calls do not match."""
        self._sentence_text = self._sentence_text or text
        self._sentenced.set()
        # Told to the peers as well: who leaves now must not be taken for lost by one that hears the verdict a moment later.
        self._break(text, mismatch=True, tell=True)


def cost_for(comm: Communicator) -> Cost:
    """Cost parameters of a communicator; the same on all ranks."""
    from hrdma.planning import cost_of

    runtime = comm._runtime
    return cost_of(runtime.links(comm.members), [runtime.cards[rank] for rank in comm.members], runtime.cards)


def _one_class(found: set[tuple[int, int]]) -> None:
    """Pairs of colour and class: one class for each."""
    colors = [color for color, _ in found]
    for color in colors:
        if colors.count(color) > 1:
            given = sorted("none" if each == NO_CLASS else str(each) for of, each in found if of == color)
            raise ValueError(
                f"traffic_class= must be the same on all ranks of a communicator: {', '.join(given)} were given"
            )


def _of_64_bits(name: str, value: int) -> int:
    number = operator.index(value)
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"{name} {number} is out of range: -2**63 to 2**63 - 1 are there")
    return number


def _hash64(text: str) -> int:
    """64 bits that are the same in every process; never 0."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") or 1


def _describe(
    collective: str, counts: Any, dtype: str, op: str | None, root: int | None, deterministic: bool
) -> tuple[str, str]:
    """A call in words for people, and in words that differ wherever ranks must not."""
    if collective == "barrier":
        return "barrier()", "barrier()"
    if isinstance(counts, int):
        shown = signed = str(counts)
    elif collective == "alltoall":
        signed = "counts"  # each rank has its own
        shown = " ".join(f"{way} {_shown(each)}" for way, each in zip(("sends", "takes"), counts))
    else:
        signed, shown = f"counts={list(counts)}", f"counts={_shown(counts)}"
    rest = [
        *([op] if op is not None else []),
        *([f"root={root}"] if root is not None else []),
        *(["deterministic"] if deterministic else []),
    ]
    return tuple(f"{collective}({', '.join([dtype, which, *rest])})" for which in (shown, signed))  # type: ignore[return-value]


def _pairs(counts: tuple[Sequence[int], Sequence[int]]) -> str:
    """To whom an alltoall sends something, and from whom it takes something: `hrdma.control.stalls` compares them."""
    masks = (sum(1 << rank for rank, count in enumerate(each) if count) for each in counts)
    return ":".join(f"{mask:x}" for mask in masks)


def _shown(counts: Sequence[int]) -> str:
    if len(counts) <= 8:
        return str(list(counts))
    return f"{list(counts[:6])}... of {len(counts)}, {sum(counts)} in all"


def _connected(ranks: list[int], payloads: dict[int, dict[str, Any]]) -> list[int]:
    """Those of ranks that all reach each other, the earlier ones first."""
    kept: list[int] = []
    for rank in ranks:
        if all(other not in payloads[rank]["cut"] and rank not in payloads[other]["cut"] for other in kept):
            kept.append(rank)
    return kept

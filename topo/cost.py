"""What a schedule costs: alpha, beta, gamma of a connection, closed forms of algorithms, critical path of any schedule.

A message costs `alpha` of its sender's and receiver's time, a byte that moves `beta`, a byte that is reduced into
another `gamma`; a step that must wait for another rank adds `latency`. A message that is too long to be sent unasked
(`eager`) is announced and answered before it moves: two messages more. Where peers' memory is read in place (`pull`) a
sender does nothing for a byte, and there is one message more, which says that the memory is free again. Moving hides
behind reducing only where other hands than the cores' do it (`offload`).

Where ranks share cores, work of the ranks of a core adds up, and a step waits until the others of a core have had their
turn (`switch` for each). An algorithm in which some ranks idle (`Work.share`) leaves the cores to the others. What several
ranks are sent alike (`Work.copies`) is copied once there (`shown`), and moves to each core once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

from hrdma.errors import ScheduleError
from hrdma.topo.schedule import COPY, Schedule, blocks

__all__ = ["DEFAULT_COST", "LANDED", "SHOWN", "Cost", "Work", "effort", "predict"]


SHOWN = 2 << 10  # bytes: from here on ranks that share cores are shown what they are sent alike


@dataclass(frozen=True)
class Cost:
    """Parameters of the connections between ranks, in seconds.

    Attributes
    ----------
    alpha : float
        Per message.
    beta : float
        Per byte moved.
    gamma : float
        Per byte that is reduced into another (two operands; `effort` scales it for more).
    latency : float
        Per step that waits for another rank.
    switch : float
        Per step and per rank more than one on a core.
    eager : int
        Bytes up to which a message is sent unasked.
    loose : int
        The same where ranks share cores and each has several peers at a time.
    pull : bool
        Peers' memory is read in place.
    packet : int
        Bytes of a message that fill a packet of the kernel (of loopback, IPv4), where a few bytes more cost as much as
        another one; 0: they do not.
    shown : int
        Bytes, from 2 KiB on, up to which that is worth reckoning with: what several ranks are sent alike is copied once
        where they share cores and memory; 0: never.
    staged : int
        Bytes up to which it is better copied through messages, where the program changes it.
    cores : int
        Cores that all ranks share; 0: each rank has its own.
    offload : bool
        Bytes move without the cores (RDMA, or a network slower than they are).
    name : str
        Where the numbers come from.
    """

    alpha: float
    beta: float
    gamma: float
    latency: float = 0.0
    switch: float = 0.0
    eager: int = 1 << 62
    loose: int = 1 << 62
    pull: bool = False
    packet: int = 0
    shown: int = 0
    staged: int = 0
    cores: int = 0
    offload: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        for field in ("alpha", "beta", "gamma", "latency", "switch"):
            value = getattr(self, field)
            if not 0 <= value < 1:
                raise ValueError(f"{field} must be seconds in [0, 1), not {value}")
        for field in ("cores", "eager", "loose", "packet", "shown", "staged"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must not be negative, but is {getattr(self, field)}")

    def message(self, nbytes: float, *, loose: bool = False) -> float:
        """Seconds for one message, without those for its bytes."""
        if nbytes <= (min(self.eager, self.loose) if loose else self.eager):
            return self.alpha
        return 2 * self.alpha if self.pull else 3 * self.alpha + 2 * self.latency

    def crowd(self, size: int) -> int:
        """Ranks on the fullest core."""
        return -(-size // self.cores) if self.cores else 1

    def step(self, size: int) -> float:
        """Seconds that one of so many ranks waits in a step."""
        return self.latency + self.switch * (self.crowd(size) - 1)

    def moves(self, nbytes: float, copies: float, size: int) -> float:
        """What part of its bytes moves of so many messages of one payload: once to each core, where it is shown."""
        shown = self.pull and self.crowd(size) > 1 and SHOWN <= nbytes <= self.shown
        return min(1.0, self.cores / copies) if shown else 1.0

    def to_dict(self) -> dict:
        """For a cache file; `Cost(**data)` reads it back."""
        return asdict(self)


# Orders of magnitude for a recent host; a job measures its own (hrdma/calibration.py).
DEFAULT_COST: dict[str, Cost] = {
    "loop": Cost(2e-7, 1e-10, 2.5e-11, pull=True, name="default for loop"),
    "shm": Cost(
        2.5e-7, 1.2e-10, 2.5e-11, 2e-7, 1e-6, 32 << 10, 32 << 10, pull=True, shown=8 << 10, name="default for shm"
    ),
    "tcp": Cost(7e-6, 3e-10, 2.5e-11, 5e-7, 1e-6, 516 << 10, 68 << 10, packet=65408, name="default for tcp"),
    "verbs": Cost(1e-6, 8e-11, 2.5e-11, 2e-6, 5e-6, 4 << 10, offload=True, name="default for verbs"),
}

NETWORK = Cost(7e-6, 8e-10, 2.5e-11, 2e-5, 5e-6, 516 << 10, offload=True, name="a network of 10 Gbit/s")


def effort(operands: int) -> float:
    """Memory traffic per reduced byte of one pass over many operands, against one over two: it writes only once."""
    return (operands + 1) / (3 * (operands - 1)) if operands > 1 else 1.0


LANDED = 2 / 3  #: effort more where an operand lands in scratch first, as what it is reduced into is being sent


class Work(NamedTuple):
    """What an algorithm does on its critical path, as a closed form of size and bytes."""

    steps: float  #: dependent steps
    messages: float
    sent: float  #: bytes that leave senders
    copied: float  #: bytes that arrive and replace
    reduced: float  #: bytes that arrive and are reduced
    share: float = 1.0  #: of the ranks, busy on average
    effort: float = 1.0  #: per reduced byte, against a reduction of two operands
    rails: float = 1.0  #: NICs of a rank that carry its bytes at once, on average
    copies: float = 1.0  #: messages, one after the other, of the same payload

    @property
    def per_nic(self) -> float:
        """Bytes that leave by the busiest NIC."""
        return self.sent / self.rails

    def seconds(self, size: int, cost: Cost, parts: int = 1) -> float:
        """Predicted time. With several parts the shorter of moving and reducing may hide behind the longer."""
        arriving = self.copied + self.reduced
        most = max(self.sent, arriving)
        moves = cost.moves(most / max(self.messages, 1), self.copies, size)
        moving = cost.beta * moves * (arriving if cost.pull else most) / self.rails
        reducing = cost.gamma * self.reduced * self.effort
        loose = cost.crowd(size) > 1 and self.messages > self.steps * parts
        path = self.messages * cost.message(most / max(self.messages, 1), loose=loose)
        hidden = min(moving, reducing) * (1 - 1 / parts) if cost.offload else 0.0
        alone = path + moving + reducing - hidden
        # who pulls is busy instead of the sender: over all ranks it is the same
        work = path + reducing + (0.0 if cost.offload else cost.beta * moves * most)
        return max(alone, work * self.share * cost.crowd(size)) + self.steps * cost.step(size)


def predict(schedule: Schedule, nbytes: float, cost: Cost) -> float:
    """Seconds until the last rank has its result: the critical path through data and ports.

    Parameters
    ----------
    schedule : Schedule
        Complete.
    nbytes : float
        Of the whole vector (of all blocks together; alltoall: what one rank sends).
    cost : Cost

    Raises
    ------
    ScheduleError
        When it is one rank's view.

    Notes
    -----
    A rank sends one message at a time and receives one at a time, in the order of the table; equal chunks are assumed
    unless the schedule has weights. Contention inside a network is not modelled. Cost: linear in the transfers.
    """
    if schedule.view is not None:
        raise ScheduleError(f"this is the view of rank {schedule.view}; only a complete schedule has a critical path")
    size, split = schedule.size, schedule.split
    nblocks = size if schedule.collective == "alltoall" else blocks(schedule.collective, size)
    weights = schedule.weights or (1,) * split
    unit = nbytes / nblocks / sum(weights)
    chunk_bytes = [unit * w for w in weights]
    sending, receiving, busy = [0.0] * size, [0.0] * size, [0.0] * size
    ready: dict[tuple[int, int], float] = {}
    pending: dict[tuple[int, int], float] = {}
    operands: dict[tuple[int, int, int], int] = {}
    sends: set[tuple[int, int, int]] = set()
    for rnd, src, dst, chunk, *_ in schedule.table.tolist():
        operands[rnd, dst, chunk] = operands.get((rnd, dst, chunk), 1) + 1
        sends.add((rnd, src, chunk))
    now, end, waiting = -1, 0.0, cost.step(size)
    for rnd, src, dst, chunk, span, op, _ in schedule.table.tolist():
        if rnd != now:
            ready.update(pending)
            pending.clear()
            now = rnd
        length = sum(chunk_bytes[c % split] for c in range(chunk, chunk + span))
        moving = cost.beta * length
        start = max(ready.get((src, c), 0.0) for c in range(chunk, chunk + span))
        start = max(start, receiving[dst], 0.0 if cost.pull else sending[src])
        arrived = start + cost.message(length) + moving
        if not cost.pull:
            sending[src] = arrived
        passes = effort(operands[rnd, dst, chunk]) + (LANDED if (rnd, dst, chunk) in sends else 0.0)
        reducing = 0.0 if op == COPY else cost.gamma * length * passes
        receiving[dst] = arrived
        if op != COPY:
            own = max(ready.get((dst, c), 0.0) for c in range(chunk, chunk + span))
            arrived = max(arrived, own) + reducing
            if cost.pull or not cost.offload:
                receiving[dst] = arrived
        busy[dst] += cost.message(length) + reducing + (0.0 if cost.offload else moving)
        for c in range(chunk, chunk + span):
            key = dst, c
            pending[key] = max(pending.get(key, 0.0), arrived + waiting)
        end = max(end, arrived + waiting)
    if cost.crowd(size) > 1:
        end = max(end, sum(busy) / size * cost.crowd(size))
    return end

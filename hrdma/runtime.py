"""init and finalize: from the environment to the communicator of all ranks, and back.

What happens, each step under one deadline: the configuration is read; the providers are opened; the ranks meet in the
control plane and exchange cards (host, addresses, capabilities); every pair gets a connection. A card holds all that a
choice depends on, so each rank chooses for itself and all choose alike: the provider of a pair, the cost of a collective.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from hrdma import _core, traffic
from hrdma.classes import dial
from hrdma.config import Config
from hrdma.errors import DeviceError, PeerError
from hrdma.log import configure, logger
from hrdma.providers import RAILED, chosen, domain_of_rail
from hrdma.remarks import Remarks
from hrdma.world import host_identity, machine_identity, takes_turns, world_of, yields_within

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hrdma.communicator import Communicator
    from hrdma.control import ControlPlane
    from hrdma.planning import Network
    from hrdma.traffic import Stamp
    from hrdma.world import World

__all__ = ["Runtime", "finalize", "init"]

DISCOVER = "discover"  # of HRDMA_FABRIC: the network is measured before the ranks are connected
CLOSE_SECONDS = 5.0
BLAME_SECONDS = 0.3  # how long a failed init waits to learn which rank was lost first
APART = (
    "%d ranks share %d cores, but not their session, within which alone they give way to each other: short waits take "
    "longer than they need. Start them from one session, as hrdma run does, or sysctl kernel.sched_autogroup_enabled=0"
)
WORLD_ID = 1  # of the communicator of all ranks; all other ids are hashes


class Runtime:
    """This process in its job: the engine, the control plane, the cards of all ranks, the open communicators."""

    def __init__(self, config: Config, world: World) -> None:
        self.deadline = time.monotonic() + config.timeout
        if world.size > 1:
            from hrdma.control import meet

            world, config = meet(world, config, deadline=self.deadline)  # the engine needs the token
        self.config = config
        self.rank = world.rank
        self.size = world.size
        self.log = logger
        self.seconds = config.timeout
        self.communicators: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()
        self.lost: dict[int, str] = {}
        self.told: set[str] = set()  # why calls are not planned for the fabric; each is said once
        self.control: ControlPlane | None = None
        self.cards: list[dict[str, Any]] = []
        self.network = _network(config, world.size)
        self.names = chosen(config)
        self.rails = self._rails()
        self.traffic: Stamp | None = None
        self.dialing = threading.Lock()  # of classes
        self.classes: set[tuple[int, int]] = set()  # of rank and DSCP: what is connected beside the usual (classes.py)
        self._lock = threading.Lock()
        self._closed = False
        self.pid = os.getpid()
        self.engine = self._open(world)
        self.remarks = Remarks(self)
        try:
            self.remarks.say()
            self._join(world)
            if config.fabric == DISCOVER:
                self._discover(world)
            self._register()
            self._connect()
        except BaseException:
            self.close(0.0)
            raise

    # -- opening ---------------------------------------------------------------------------------------------------------

    def _open(self, world: World) -> _core.Engine:
        config = self.config
        options = {name: config.options(name) for name in self.names}
        if config.host_id and "shm" in options:
            digest = hashlib.blake2b(config.host_id.encode(), digest_size=16).hexdigest()
            options["shm"] = ",".join(filter(None, [options["shm"], f"host={digest}"]))
        if config.simd != "auto":
            _core.reduce_isa(config.simd)
        rails = map(domain_of_rail, range(1, len(self.rails)))
        domains = [*(name for name in self.names if name != "loop"), *rails]
        engine = functools.partial(
            _core.Engine,
            self.rank,
            token=config.token.encode() or None,
            insecure=config.insecure,
            ifname=config.ifname or None,
            rails=f"{RAILED}:{','.join(self.rails)}" if self.rails else None,
            options=";".join(f"{name}:{text}" for name, text in options.items() if text) or None,
            devices=f"verbs:{config.hardware()}" if config.hardware() else None,
            fault=config.fault or None,
            local_peers=max(0, (world.local_size or world.size) - 1),
            spin_us=config.spin_us,
        )
        try:
            return engine(",".join(domains))
        except DeviceError as error:
            if "verbs" not in domains or config.transport or config.hardware() or "verbs" in config.faulty():
                raise
            without = engine(",".join(name for name in domains if name != "verbs"))  # raises if it was another's fault
            self.log.info("verbs is not used: %s", error)
            return without

    def _rails(self) -> tuple[str, ...]:
        if self.network is None or RAILED not in self.names:
            return ()
        from hrdma.nics import rails

        return rails(self.network.fabric, self.rank, self.config.ifname, _core.MAX_RAILS, self.log.warning)

    def _card(self) -> dict[str, Any]:
        domains = self.engine.domains()
        mask = sum(1 << cpu for cpu in os.sched_getaffinity(0))
        return {
            "host": host_identity(self.config.host_id),
            "machine": machine_identity(self.config.host_id),
            "pid": os.getpid(),
            "cpus": f"{mask:x}",
            "yields": yields_within(),
            "costs": self._measured([name for name in domains if name not in ("loop", "verbs") and ":" not in name]),
            **self._opened(),
        }

    def _opened(self) -> dict[str, Any]:
        """The part of the card that says what this rank can be reached by."""
        domains = self.engine.domains()
        return {
            "transport": [name for name in domains if name != "loop" and ":" not in name],
            "rails": self.rails,
            "network": self.network.digest() if self.network else DISCOVER * (self.config.fabric == DISCOVER),
            "addresses": {name: domain["address"].hex() for name, domain in domains.items()},
            "caps": {name: domain["caps"] for name, domain in domains.items()},
            "streams": self._streams(domains),
        }

    def _streams(self, names: Iterable[str]) -> int:
        """Tcp connections that this rank wants to each peer, by rail; 0: it did not say. The provider has checked the text."""
        parts = dict(part.split("=") for part in self.config.tcp.split(",") if part)
        return int(parts.get("streams", 0)) if "tcp" in names else 1

    def _measured(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Costs of providers as they were measured on this machine; rank 0 measures what never was."""
        if self.size == 1:
            return {}
        from hrdma.calibration import costs

        found = costs(names, self.config.cache_dir, may_measure=self.rank == 0)
        return {name: cost.to_dict() for name, cost in found.items()}

    def _join(self, world: World) -> None:
        card = self._card()
        if self.size == 1:
            self.cards = [card]
            return
        from hrdma.control import ControlPlane

        self.control = ControlPlane.join(world, self.config, card, deadline=self.deadline)
        self.cards = [member.card for member in sorted(self.control.members, key=lambda member: member.rank)]
        self.control.start(self._on_lost, self._on_verdict, on_ask=self._on_ask)
        self._compare()

    def _compare(self) -> None:
        """Ranks that plan for different networks would wait for each other."""
        first = self.cards[0]["network"]
        for rank, other in enumerate(self.cards):
            if other["network"] != first:
                raise ValueError(
                    f"HRDMA_FABRIC and HRDMA_PLAN must mean the same on all ranks: rank 0 has {first or 'none'}, "
                    f"rank {rank} has {other['network'] or 'none'}"
                )

    def _discover(self, world: World) -> None:
        """Measures the network; where it has rails, the providers are opened anew on them."""
        from hrdma.planning import discovered

        if self.control is None:
            return
        exchange = self.control.exchange

        def tell(key: str, said: dict[str, Any]) -> list[dict[str, Any]]:
            return exchange(f"discover:{key}", said, deadline=self.deadline)

        with self._blaming():
            self.network = discovered(self.rank, self.cards, self.config.ifname, tell)
            self.rails = self._rails()
            if self.rails:
                before, self.engine = self.engine, self._open(world)
                before.close(0.0)
            opened = tell("opened", self._opened())
        self.cards = [card | news for card, news in zip(self.cards, opened)]
        self._compare()

    def _register(self) -> None:
        """With the traffic controller of this host, where the job has a name."""
        first = next(rank for rank, card in enumerate(self.cards) if card["host"] == self.cards[self.rank]["host"])
        self.traffic = traffic.join(self.config, self.engine, deadline=self.deadline, tell=self.rank == first)

    def _connect(self) -> None:
        own = self.cards[self.rank]
        local = [card for card in self.cards if card["host"] == own["host"]]
        cpus = functools.reduce(lambda a, b: a | b, (int(card["cpus"], 16) for card in local))
        cores, groups = bin(cpus).count("1"), {card["yields"] for card in local}
        self.engine.locality(len(local), cores, takes_turns(self.cards, self.rank))
        if len(local) > cores and len(groups) > 1 and own is local[0]:
            self.log.warning(APART, len(local), cores)
        self.engine.connect(self.rank, "loop", bytes.fromhex(own["addresses"]["loop"]), True)
        for rank in range(self.size):
            if rank != self.rank:
                dial(self, rank)
        with self._lock:
            lost = dict(self.lost)  # before their connections had begun
        for rank, reason in lost.items():
            self.engine.peer_lost(rank, reason)
        try:
            self.engine.connect_wait(max(0.0, self.deadline - time.monotonic()))
        except PeerError as error:
            rank, transport = self._first_lost(error.rank), self.provider(self.rank, error.rank)
            text = f"{error} (over {transport})"
            if rank != error.rank:
                text = f"cannot connect to rank {rank} (over {transport}): {self.lost[rank]}; then {error}"
            raise PeerError(text, rank=rank, operation="init", phase="connect", transport=transport) from None
        if self.traffic is not None:
            self.traffic.stamp(self.engine)
            self.log.info("%s", self.traffic)
        self._all_connected()
        if self.size > 1:
            chosen: dict[str, list[str]] = {}
            for rank in range(self.size):
                if rank != self.rank:
                    chosen.setdefault(self.provider(self.rank, rank), []).append(str(rank))
            text = ", ".join(f"{name} to {' '.join(ranks)}" for name, ranks in chosen.items())
            self.log.info("rank %d of %d connected: %s", self.rank, self.size, text)
            if "verbs" in chosen:
                self.log.info("verbs: %s", self.engine.domains()["verbs"]["text"])

    def _all_connected(self) -> None:
        """Waits for the others' connections: who leaves at once after init must not fail the init of another rank."""
        if self.control is None:
            return
        self.remarks.watch()
        with self._blaming():
            self.control.barrier(deadline=self.deadline)

    @contextlib.contextmanager
    def _blaming(self) -> Iterator[None]:
        """A rank that the control plane loses meanwhile is one that init has lost."""
        try:
            yield
        except PeerError as error:
            transport = self.provider(self.rank, error.rank)
            raise PeerError(
                f"init: {error}", rank=error.rank, operation="init", phase="connect", transport=transport
            ) from None

    def _first_lost(self, rank: int) -> int:
        """Who is to blame when the connection to a rank failed: itself, or a lost rank because of which it gave up, too.

        The connection may tell sooner than the control plane, hence a moment of patience.
        """
        until = time.monotonic() + BLAME_SECONDS
        while not self.lost and time.monotonic() < until:
            time.sleep(0.005)
        with self._lock:
            return next(iter(self.lost), rank)

    # -- what all ranks see alike --------------------------------------------------------------------------------------------

    def provider(self, a: int, b: int) -> str:
        """The provider that connects two ranks; the same whichever of them asks.

        Raises
        ------
        DeviceError
            They share none, or none that ``HRDMA_REQUIRE`` admits.
        """
        if a == b:
            return "loop"
        first, second = (self.cards[rank] for rank in sorted((a, b)))
        same_host = first["host"] == second["host"]
        common = [
            name
            for name in first["transport"]
            if name in second["transport"] and (same_host or "local" not in first["caps"][name])
        ]
        if not common:
            raise DeviceError(
                f"ranks {a} and {b} share no provider: rank {min(a, b)} has {' '.join(first['transport']) or 'none'}, rank "
                f"{max(a, b)} {' '.join(second['transport']) or 'none'}, they are on {'one host' if same_host else 'two hosts'}; "
                "set HRDMA_TRANSPORT alike, with tcp in it"
            )
        if self.config.require and common[0] not in self.config.require:
            raise DeviceError(
                f"HRDMA_REQUIRE={','.join(self.config.require)} but ranks {a} and {b} would be connected over {common[0]}"
            )
        return common[0]

    def rails_to(self, rank: int) -> int:
        """Connections side by side between this rank and another."""
        own, other = self.cards[self.rank], self.cards[rank]
        if own["host"] == other["host"] or self.provider(self.rank, rank) != RAILED:
            return 1
        return max(1, min(len(own["rails"]), len(other["rails"])))

    def streams_to(self, rank: int) -> int:
        """Connections by each rail: the fewest that either of the two wants.

        Two between hosts: no segments and writes go by the first, so that what acknowledges the other direction's bulk need
        not wait behind them.
        """
        own, other = self.cards[self.rank], self.cards[rank]
        if self.provider(self.rank, rank) != "tcp":
            return 1
        usual = 1 if own["host"] == other["host"] else 2
        return min(own["streams"] or usual, other["streams"] or usual)

    def links(self, members: Sequence[int]) -> set[str]:
        """Providers between the ranks of a communicator; by host and transport, so that its cost grows with hosts only."""
        kinds: dict[tuple, list[int]] = {}
        for rank in members:
            card = self.cards[rank]
            kinds.setdefault((card["host"], tuple(card["transport"])), []).append(rank)
        groups = list(kinds.values())
        found = {self.provider(group[0], group[1]) for group in groups if len(group) > 1}
        found.update(self.provider(a[0], b[0]) for i, a in enumerate(groups) for b in groups[:i])
        return found

    # -- called by the control plane's thread ------------------------------------------------------------------------------------

    def _on_lost(self, rank: int, reason: str) -> None:
        with self._lock:
            self.lost.setdefault(rank, reason)
        # Ranks that leave in good order are no matter for here: they say so on each connection, behind their last message.
        self.engine.peer_lost(rank, reason)

    def _on_verdict(self, comm_id: int, text: str) -> None:
        communicator = self.communicators.get(comm_id)
        if communicator is not None:
            communicator._sentence(text)

    def _on_ask(self, comm_id: int) -> tuple[Sequence[int], int, int, str, Sequence[tuple[int, int, str, str]]] | None:
        communicator = self.communicators.get(comm_id)
        recent = [] if communicator is None else communicator._recent()
        return None if communicator is None or not recent else (communicator.members, *recent[-1][:3], recent)

    # -- closing ---------------------------------------------------------------------------------------------------------------

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Says goodbye and stops, within the given seconds. Idempotent; in a forked child it only lets go."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        deadline = time.monotonic() + seconds
        if os.getpid() != self.pid:
            if self.traffic is not None:
                self.traffic.close()
            if self.control is not None:
                self.control.abandon()
            return
        self.remarks.close()
        try:
            self.engine.close(seconds)
        finally:
            # Not sooner: a job's class goes with its last member, and what waits in it goes too.
            if self.traffic is not None:
                self.traffic.close()
        if self.control is not None:
            self.control.leave(deadline=max(deadline, time.monotonic() + 0.1))

    @property
    def closed(self) -> bool:
        """Whether it can be used no more."""
        return self._closed or os.getpid() != self.pid


def _network(config: Config, ranks: int) -> Network | None:
    if config.fabric == DISCOVER and config.plan:
        raise ValueError(
            f"HRDMA_PLAN={config.plan} is for a fabric that is known: HRDMA_FABRIC={DISCOVER} does not go with it"
        )
    if config.fabric in ("", DISCOVER) and not config.plan:
        return None
    from hrdma.planning import network

    return network(config.fabric, config.plan, ranks)


_runtime: Runtime | None = None
_world: Communicator | None = None
_init_lock = threading.Lock()


def init(
    rank: int | None = None,
    size: int | None = None,
    *,
    master: str | None = None,
    token: str | None = None,
    transport: str | Sequence[str] | None = None,
    timeout: float | None = None,
    **settings: Any,
) -> Communicator:
    """Joins the job that the environment names and returns the communicator of all its ranks.

    Parameters
    ----------
    rank, size : int, optional
        None: as the launcher set them (``hrdma run``, torchrun, mpiexec, srun); rank 0 of 1 without a launcher.
    master : str, optional
        ``"address:port"`` at which rank 0 is met. None: ``MASTER_ADDR`` and ``MASTER_PORT``.
    token : str, optional
        Secret of the job; proved by challenge, never sent. None: ``HRDMA_TOKEN``.
    transport : str or sequence of str, optional
        Providers that may be used, best first.
    timeout : float, optional
        Seconds for this call and default of all others.
    **settings
        Any other setting of :class:`hrdma.config.Config` by its name: ``fabric="cluster.toml"`` plans collectives for
        that network and uses all of its NICs (``"discover"``: it is measured first), ``plan="mine.json"`` runs a schedule of one's own;
        ``job="resnet", priority=2`` registers with the traffic controller of each rank's host, where there is one, and
        stamps what the ranks send (`hrdma.traffic`); ``fallback="tcp"`` lets RDMA connections without a rail go on over tcp.

    Returns
    -------
    Communicator

    Raises
    ------
    ValueError
        The environment or an argument is wrong, or init was called before; nothing was opened. Or ranks were given
        different fabrics or plans; the message names one that differs.
    ScheduleError
        The plan is wrong, or is for another fabric; nothing was opened.
    DeviceError
        A provider that was asked for cannot be had.
    RefusedError
        The traffic controller does not let the job in.
    PeerError, TimeoutError
        A rank did not come, or went away meanwhile; what was opened is closed again.

    Notes
    -----
    Blocks until all ranks have come. Call :func:`finalize`, leave a ``with`` block of the communicator, or just end the
    process: that closes in good order too.
    """
    global _runtime, _world
    from hrdma.communicator import Communicator

    with _init_lock:
        if _runtime is not None and not _runtime.closed:
            raise ValueError(
                "hrdma.init() was called before: use its communicator, comm.dup(), or hrdma.finalize() first"
            )
        if isinstance(transport, str):
            transport = transport.split(",")
        config = Config.load(
            token=token, transport=None if transport is None else list(transport), timeout=timeout, **settings
        )
        world = world_of(config, rank, size, master)
        configure(config.log_level, world.rank if world.size > 1 else None)
        runtime = Runtime(config, world)
        _world = Communicator(runtime, WORLD_ID, range(world.size))
        if _runtime is None:
            atexit.register(finalize)
        _runtime = runtime
        return _world


def finalize(timeout: float = CLOSE_SECONDS) -> None:
    """Closes all communicators and leaves the job; waits at most so many seconds for what was sent to leave.

    Idempotent. Runs by itself at the end of the process.
    """
    global _runtime, _world
    seconds = _core.seconds_of(timeout)
    runtime, _runtime, _world = _runtime, None, None
    if runtime is not None:
        runtime.close(seconds)

"""A job at the traffic controller of its host (`hrdma qos serve`): registers, and stamps its connections.

The controller is reached by its Unix socket alone, and the open socket is the registration: it ends with the process,
however that ends. Every rank registers with the controller of its own host and stamps what it sends itself, so both
directions of a connection are ordered, each by the host that sends. A rotation changes what the controller does with
the stamp, never the stamp, so nobody has to be told. That stamp is the DSCP. Between hosts the first of the connections to a
peer has another one: it carries what answers the peer's bulk, and small messages, which need not wait behind bands.

The socket's priority is set beside it, from the band at registration, for what else on the host may look at it (a VLAN's egress
map): under a policy that rotates it is soon out of date, and our own trees do not look at it.

Without a controller it is stamped with the DSCP that ``HRDMA_TRAFFIC_CLASS`` names, or not at all: the priority then orders
what this library has to send, and no more. A communicator may have a class of its own beside that: `hrdma.classes`.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from hrdma.errors import DeviceError, PolicyError, RefusedError, RequestError
from hrdma.qos.client import Client, controlled

if TYPE_CHECKING:
    from hrdma import _core
    from hrdma.config import Config

__all__ = ["Membership", "Stamp", "join", "urgency"]

log = logging.getLogger("hrdma")
ANSWER_SECONDS = 10.0  # for the controller, which may be at work on the kernel's tables
OFF = "off"


class Stamp:
    """The class of all that this process sends, but for communicators that have their own.

    Attributes
    ----------
    dscp, answers : int
        The code point, and that of answers; the same where they are not told apart.
    band : int
        Priority beside it, 0 the most urgent.
    stamped : list of str
        Providers whose connections carry it.
    """

    def __init__(self, dscp: int, answers: int, band: int) -> None:
        self.dscp, self.answers, self.band = dscp, answers, band
        self.stamped: list[str] = []

    def stamp(self, engine: _core.Engine) -> None:
        """Gives every connection of the engine the job's class, for what leaves from now on.

        Before there are any it is for those to come, as RDMA's have it from their beginning; afterwards `stamped` says which
        have it, and those of RDMA are read back from the device.
        """
        self.stamped = [
            name for name in engine.domains() if engine.traffic_class(name, self.dscp, self.answers, self.band)
        ]

    def __str__(self) -> str:
        where = ", ".join(self.stamped) or "nothing: no connection of this rank can carry it"
        return f"DSCP {self.dscp} on {where}"

    def to_dict(self) -> dict[str, Any]:
        """``dev``, ``policy``, ``kind`` (of the controller, else None), ``band``, ``dscp``, ``answers``, ``stamped``."""
        return {
            "dev": None, "policy": None, "kind": None,
            "band": self.band, "dscp": self.dscp, "answers": self.answers, "stamped": self.stamped,
        }  # fmt: skip

    def close(self) -> None:
        """Nobody was told of it."""


class Membership(Stamp):
    """This process's registration with a controller, and the class that it gave; `close` ends it.

    Attributes
    ----------
    job, dev : str
    band : int
        At registration; a policy that rotates changes it.
    """

    def __init__(self, client: Client, job: str, priority: int | None) -> None:
        self.job, self.dev = job, client.dev
        self._client = client
        lane = client.register(job, priority=priority)
        answers = lane.get("answers")
        super().__init__(lane["dscp"], lane["dscp"] if answers is None else answers, lane["band"])

    def __str__(self) -> str:
        return f"job {self.job}: band {self.band} of {self.dev} ({self._client.policy} by {self._client.kind}), {super().__str__()}"

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"dev": self.dev, "policy": self._client.policy, "kind": self._client.kind}

    def close(self) -> None:
        self._client.close()


def urgency(dscp: int) -> int:
    """Of a DSCP: 0, the most urgent, to 7. Its first three bits are the class selector."""
    return 7 - (dscp >> 3)


def join(config: Config, engine: _core.Engine, *, deadline: float, tell: bool) -> Stamp | None:
    """The class of the job: as the controller of this host gives it, or as the configuration says.

    Parameters
    ----------
    config : Config
        Its ``job``, ``priority``, ``qos`` and ``traffic_class``.
    engine : Engine
        Its connections to come have the job's class.
    deadline : float
        On the monotonic clock.
    tell : bool
        Log a warning where there is a job and no controller; one rank of a host is enough.

    Returns
    -------
    Stamp or None
        A `Membership` where a job is named and a controller answers. None: neither that nor ``traffic_class``.

    Raises
    ------
    RefusedError
        The controller does not let this job in.
    """
    found = _registered(config, deadline, tell)
    if found is None and config.traffic_class is not None:
        found = Stamp(config.traffic_class, config.traffic_class, urgency(config.traffic_class))
    if found is not None:
        found.stamp(engine)
    return found


def _registered(config: Config, deadline: float, tell: bool) -> Stamp | None:
    if not config.job or config.qos == OFF:
        return None
    client = None
    try:
        client = Client(config.qos or _only(), timeout=max(0.1, min(ANSWER_SECONDS, (deadline - time.monotonic()) / 2)))
        given = config.origins.get("priority", "default") != "default"
        return Membership(client, config.job, config.priority if given else None)
    except (RequestError, DeviceError, OSError) as error:
        if client is not None:
            client.close()
        if isinstance(error, RefusedError):
            raise
        line = "job %s: priority %d acts inside the library only: %s"
        log.log(logging.WARNING if tell else logging.DEBUG, line, config.job, config.priority, error)
        return None
    except BaseException as error:
        if client is not None:
            client.close()
        if isinstance(error, PolicyError):
            raise RefusedError(f"the traffic controller does not let job {config.job} in: {error}") from None
        raise


def _only() -> str:
    """The device of the only controller; RequestError where there is none, or more than one."""
    found = controlled()
    if not found:
        raise RequestError("no controller in this network namespace (`hrdma qos serve POLICY --dev DEV` is one)")
    if len(found) > 1:
        raise RequestError(f"controllers of {', '.join(found)}: name one by HRDMA_QOS")
    return found[0]

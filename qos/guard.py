"""What is refused before anything is touched: no permission, loopback, the device that an operator's session runs over."""

from __future__ import annotations

import os
from pathlib import Path

from hrdma.errors import PolicyError, RefusedError
from hrdma.qos.policy import Policy
from hrdma.qos.state import State, link_rate
from hrdma.qos.wire import Wire, has_net_admin
from hrdma.units import rate_text

__all__ = ["check_device", "check_permission", "over_ssh", "rate_of"]

SSH_VARIABLES = ("SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY")


def check_permission() -> None:
    """Raises RefusedError where this process may not change traffic control."""
    if not has_net_admin():
        raise RefusedError(
            "this needs CAP_NET_ADMIN, which this process does not have: run it as root, or give the capability to"
            " the service that runs it (systemd: AmbientCapabilities=CAP_NET_ADMIN)"
        )


def over_ssh() -> bool:
    """Whether this process was started from an SSH session: by its environment, or where sudo cleared that, by its ancestors."""
    if any(name in os.environ for name in SSH_VARIABLES):
        return True
    pid = os.getpid()
    while pid > 1:
        try:
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:  # an ancestor in another pid namespace, or hidden
            return False
        values = dict(line.split(":\t", 1) for line in status if ":\t" in line)
        if values["Name"].startswith("sshd"):
            return True
        pid = int(values["PPid"])
    return False


def check_device(wire: Wire, state: State, anyway: bool) -> None:
    """Raises RefusedError for loopback and for the default route's device in an SSH session, unless told `anyway`."""
    if anyway:
        return
    if state.loopback:
        raise RefusedError(f"{state.dev} is loopback: everything on this host would wait behind jobs; --anyway does it")
    if over_ssh() and state.index in wire.default_routes():
        raise RefusedError(
            f"{state.dev} has the default route, and this is an SSH session that may run over it; --anyway does it,"
            " best with --lease 60, so that a lost session gives the device back"
        )


def rate_of(policy: Policy, dev: str, known: int = 0) -> int:
    """Bytes per second to shape to: the policy's rate, or the link's; PolicyError where it is neither known nor possible.

    `known` is what was found for the same rate before. It holds on where the link has gone down meanwhile, or is slower: a cable
    that is out for a while is no reason to refuse a change that has nothing to do with it.
    """
    link = link_rate(dev)
    if known:
        link = max(link, policy.rate) or known
    if not policy.rate and not link:
        raise PolicyError(
            f'the driver of {dev} does not say how fast the link is; write for example rate = "10gbit"', key="qos.rate"
        )
    if link and policy.rate > link:
        raise PolicyError(
            f"{rate_text(policy.rate)} is more than the link of {dev} has: {rate_text(link)}", key="qos.rate"
        )
    rate = policy.rate or link
    if policy.floor * len(policy.jobs) > rate:
        raise PolicyError(
            f"{len(policy.jobs)} floors of {rate_text(policy.floor)} are more than the {rate_text(rate)} of {dev}",
            key="qos.floor",
        )
    return rate

"""Which providers a job uses: what was asked for, else what this machine has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hrdma import _core
from hrdma.errors import DeviceError
from hrdma.log import logger

if TYPE_CHECKING:
    from hrdma.config import Config

__all__ = ["AUTOMATIC", "RAILED", "chosen", "domain_of_rail"]

RAILED = "tcp"  # the provider that is opened once for each NIC of a fabric
AUTOMATIC = ("shm", "verbs", "tcp")  # what is tried, best first, where HRDMA_TRANSPORT says nothing


def chosen(config: Config) -> tuple[str, ...]:
    """Their names, best first. What is missing is logged.

    Raises
    ------
    DeviceError
        ``HRDMA_REQUIRE`` names another; with the reason why it is not used.
    ValueError
        ``HRDMA_FAULT`` does.
    """
    names = config.transport or tuple(name for name in AUTOMATIC if _usable(name, config))
    absent = [name for name in config.require if name not in names]
    if absent:
        reasons = "; ".join(f"{name}: {_why_not(name)}" for name in absent)
        raise DeviceError(f"HRDMA_REQUIRE={','.join(config.require)} but {', '.join(absent)} is not used: {reasons}")
    for name in config.faulty():
        if name not in (*names, "loop"):
            raise ValueError(f"HRDMA_FAULT={config.fault} but {name} is not used: {_why_not(name)}")
    if config.fallback != "none" and "verbs" in config.require:
        logger.info("HRDMA_FALLBACK=%s has no effect: HRDMA_REQUIRE=verbs", config.fallback)
    return tuple(names)


def domain_of_rail(number: int) -> str:
    """What the domain of a rail is called, in the engine and on the card."""
    return f"{RAILED}:{number}"


def _usable(name: str, config: Config) -> bool:
    if name == "verbs" and config.hardware():
        return True  # asked for: what is wrong with it is an error, not a reason to do without
    devices, why = _core.provider_devices(name)
    if not devices:
        level = "info" if name == "verbs" else "warning"  # most machines have none
        getattr(logger, level)("%s is not used: %s", name, why or "no device")
    return devices > 0


def _why_not(name: str) -> str:
    try:
        devices, why = _core.provider_devices(name)
    except ValueError as error:
        return str(error)
    return "it is not in HRDMA_TRANSPORT" if devices else why or "no device"

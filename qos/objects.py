"""Qdiscs, classes, filters, links: what a device's traffic control consists of, as plain frozen data.

Options stay the bytes that the kernel gave or takes. So a foreign tree can be kept and put back without this package knowing
every kind there is; those that it knows are read by `hrdma.qos.kinds`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

__all__ = [
    "INGRESS",
    "ROOT",
    "TC_H_CLSACT",
    "Dcb",
    "Filter",
    "Link",
    "Object",
    "Qdisc",
    "TClass",
    "handle_text",
    "of_json",
    "to_json",
]

ROOT = 0xFFFFFFFF  #: TC_H_ROOT
INGRESS = TC_H_CLSACT = 0xFFFFFFF1  #: TC_H_INGRESS, of qdiscs ``ingress`` and ``clsact`` alike


def handle_text(handle: int) -> str:
    """A handle as tc writes it: ``1:``, ``4853:a``, ``root``."""
    if handle == ROOT:
        return "root"
    major, minor = handle >> 16, handle & 0xFFFF
    return f"{major:x}:{minor:x}" if minor else f"{major:x}:"


@dataclass(frozen=True)
class Link:
    """A device that is made for a tree: an IFB."""

    name: str
    index: int = 0  #: asked for, so that filters can name it before it is there
    kind: str = "ifb"


@dataclass(frozen=True)
class Qdisc:
    """A queueing discipline; its parent is `ROOT`, `INGRESS` or a class."""

    dev: str
    kind: str
    handle: int
    parent: int
    options: bytes = b""
    blocks: tuple[int, int] = (0, 0)  #: shared filter blocks of ingress and egress; 0 is none
    offloaded: bool = False
    extras: tuple[
        str, ...
    ] = ()  #: attributes that a dump shows but nobody can recreate from it: a size table, an estimator


@dataclass(frozen=True)
class TClass:
    """A class of a classful qdisc."""

    dev: str
    kind: str
    handle: int
    parent: int
    options: bytes = b""
    extras: tuple[str, ...] = ()


@dataclass(frozen=True)
class Filter:
    """A classifier; `pref` orders them and is called prio by tc."""

    dev: str
    kind: str
    parent: int
    pref: int
    protocol: int  #: EtherType, host order
    handle: int = 0
    options: bytes = b""
    chain: int = 0


@dataclass(frozen=True)
class Dcb:
    """A NIC's own priorities; `hrdma.qos.dcb` reads and writes them."""

    dev: str
    classes: int  #: traffic classes that it has
    class_of: tuple[int, ...]  #: of each of the 8 priorities
    selection: tuple[int, ...]  #: of each of 8 classes: 0 strict, 2 a share
    shares: tuple[int, ...]  #: of each of 8 classes: percent
    lossless: int  #: priorities with PFC, a bit each
    apps: tuple[tuple[int, int], ...]  #: DSCP and priority
    trust: tuple[int, ...] | None  #: order of selectors; None where the driver does not tell


Object = Link | Qdisc | TClass | Filter
_TYPES: dict[str, type] = {"link": Link, "qdisc": Qdisc, "class": TClass, "filter": Filter}
_NAMES = {kind: name for name, kind in _TYPES.items()}


def to_json(thing: Object) -> dict[str, Any]:
    """For the journal: bytes as hexadecimal."""
    values: dict[str, Any] = {"type": _NAMES[type(thing)]}
    for f in fields(thing):
        value = getattr(thing, f.name)
        values[f.name] = value.hex() if isinstance(value, bytes) else list(value) if isinstance(value, tuple) else value
    return values


def of_json(values: Mapping[str, Any]) -> Object:
    """What `to_json` wrote."""
    rest = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items() if name != "type"
    }
    if "options" in rest:
        rest["options"] = bytes.fromhex(str(rest["options"]))
    return _TYPES[values["type"]](**rest)

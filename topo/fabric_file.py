"""Fabrics in TOML files: `load`, `dump`.

    fabric = "bcube:3,2"          # what `hrdma.topo.fabrics.parse` reads
    rate = "200mbit"
    latency = "50us"

or, wired by hand:

    name = "two racks"
    hosts = 4
    switches = 2
    rate = "10gbit"               # of the links that do not say; so with latency

    [[link]]
    a = [0, 0]                    # node, NIC; hosts come first, then switches
    b = [4, 0]

A wired file may name a `kind` and its `shape` (as `dump` does): then algorithms and routing rely on it, so its wiring is
compared with that of the constructor.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hrdma.topo.fabric import Fabric, Link, Port
from hrdma.topo.fabrics import CONSTRUCTORS, LATENCY, RATE, parse, quantity

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["dump", "dumps", "load", "loads"]

_HEAD = ("name", "hosts", "switches", "kind", "shape", "ranks_per_host", "memory_rate", "memory_latency")
_KNOWN = {*_HEAD, "fabric", "rate", "latency", "link"}


def dumps(fabric: Fabric) -> str:
    """The text of a file that `loads` reads back to an equal fabric."""
    lines = [f"{key} = {json.dumps(getattr(fabric, key))}" for key in _HEAD if getattr(fabric, key) not in ("", ())]
    for a, b, rate, latency in fabric.links:
        lines += ["", "[[link]]", f"a = [{a.node}, {a.nic}]", f"b = [{b.node}, {b.nic}]"]
        lines += [f"rate = {float(rate)!r}", f"latency = {float(latency)!r}"]
    return "\n".join(lines) + "\n"


def dump(fabric: Fabric, path: str | Path) -> None:
    """Writes a fabric to a file."""
    Path(path).write_text(dumps(fabric))


def load(path: str | Path) -> Fabric:
    """A fabric from a file; errors name the file.

    Raises
    ------
    ValueError
        When it is not TOML, or not a fabric.
    OSError
        When it cannot be read.
    """
    try:
        return loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def loads(text: str) -> Fabric:
    """A fabric from the text of a file; see `load`."""
    data = tomllib.loads(text)  # its error is a ValueError, with line and column
    if unknown := sorted(set(data) - _KNOWN):
        raise ValueError(f"unknown key {unknown[0]!r}; known: {', '.join(sorted(_KNOWN))}")
    rate, latency = quantity(data.get("rate", RATE)), quantity(data.get("latency", LATENCY))
    if "fabric" in data:
        if more := sorted(set(data) - {"fabric", "rate", "latency"}):
            raise ValueError(f"{more[0]!r} beside 'fabric': the fabric {data['fabric']!r} has its own")
        return parse(str(data["fabric"]), rate, latency)
    for key in ("hosts", "link"):
        if key not in data:
            raise ValueError(f'no {key!r}: a fabric has hosts and links, or is named, as in fabric = "bcube:3,2"')
    links = tuple(_link(index, given, rate, latency) for index, given in enumerate(data["link"]))
    fields = {key: data[key] for key in _HEAD if key in data}
    for key in ("hosts", "switches", "ranks_per_host"):
        if key in fields and not isinstance(fields[key], int):
            raise ValueError(f"{key} is {fields[key]!r}; it must be a whole number")
    for key in ("memory_rate", "memory_latency"):
        if key in fields:
            fields[key] = quantity(fields[key])
    fields["shape"] = tuple(int(n) for n in fields.get("shape", ()))
    fabric = Fabric(**{"name": "unnamed", "switches": 0, **fields, "links": links})
    if fabric.kind:
        _compare(fabric)
    return fabric


def _link(index: int, given: dict[str, Any], rate: float, latency: float) -> Link:
    what = f"link {index}"
    if unknown := sorted(set(given) - {"a", "b", "rate", "latency"}):
        raise ValueError(f"{what}: unknown key {unknown[0]!r}; known: a, b, rate, latency")
    ports = []
    for end in ("a", "b"):
        port = given.get(end)
        if not isinstance(port, list) or len(port) != 2 or not all(isinstance(n, int) for n in port):
            raise ValueError(f"{what}: {end} is {port!r}; write [node, NIC]")
        ports.append(Port(*port))
    return Link(ports[0], ports[1], quantity(given.get("rate", rate)), quantity(given.get("latency", latency)))


def _compare(fabric: Fabric) -> None:
    """The wiring is that of the kind which it claims."""
    if fabric.kind not in CONSTRUCTORS or not fabric.shape:
        raise ValueError(f"kind {fabric.kind!r} needs a shape, and to be one of {', '.join(CONSTRUCTORS)}")
    if fabric.kind == "bcube":
        model = CONSTRUCTORS["bcube"][0](fabric.shape)
    else:
        model = CONSTRUCTORS[fabric.kind][0](*fabric.shape)
    counts = [(f.hosts, f.switches, f.ranks_per_host) for f in (fabric, model)]
    if counts[0] != counts[1]:
        raise ValueError(f"(hosts, switches, ranks_per_host) are {counts[0]}; those of {model.name} are {counts[1]}")
    wires = [{tuple(sorted((link.a, link.b))) for link in f.links} for f in (fabric, model)]
    if odd := sorted(wires[0] ^ wires[1]):
        (a, b), here = odd[0], odd[0] in wires[0]
        raise ValueError(
            f"the link {a.node}.{a.nic} to {b.node}.{b.nic} is {'not in' if here else 'missing:'} {model.name}"
            f"{'' if here else ' has it'}; leave out kind and shape for a fabric of your own"
        )

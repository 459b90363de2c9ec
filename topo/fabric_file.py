"""Fabrics in TOML files: `load`, `dump`; and `find`, which takes a file or a name.

    fabric = "bcube:3,2"          # what `hrdma.topo.fabrics.parse` reads
    rate = "200mbit"
    latency = "50us"
    burst = "6KB"                 # that a link lets pass at once after a rest, as rate limiters do; without: none

or, wired by hand:

    name = "two racks"
    hosts = 4
    switches = 2
    rate = "10gbit"               # of the links that do not say; so with latency and burst. Numbers are bit/s, seconds, bytes

    [[link]]
    a = [0, 0]                    # node, NIC; hosts come first, then switches
    b = [4, 0]

Where a job runs, ``interfaces = [["eth0", "eth1"], ...]`` (beside `hosts`) names the NICs of every host, in their order; the
order of the names decides where it is missing.

A wired file may name a `kind` and its `shape` (as `dump` does): then algorithms and routing rely on it, so its wiring is
compared with that of the constructor.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hrdma.topo.fabric import Fabric, Link, Port
from hrdma.topo.fabrics import CONSTRUCTORS, LATENCY, RATE, burst_bytes, latency_s, parse, rate_bit_s

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["dump", "dumps", "find", "load", "loads"]

_HEAD = ("name", "hosts", "switches", "kind", "shape", "ranks_per_host", "memory_rate", "memory_latency", "interfaces")
_OF_LINKS = ("rate", "latency", "burst")
_KNOWN = {*_HEAD, "fabric", *_OF_LINKS, "link"}
_NAMED = ("fabric", *_OF_LINKS)
_OF_LINK = ("a", "b", *_OF_LINKS)


def dumps(fabric: Fabric) -> str:
    """The text of a file that `loads` reads back to an equal fabric."""
    lines = [f"{key} = {json.dumps(getattr(fabric, key))}" for key in _HEAD if getattr(fabric, key) not in ("", ())]
    for a, b, rate, latency, burst in fabric.links:
        lines += ["", "[[link]]", f"a = [{a.node}, {a.nic}]", f"b = [{b.node}, {b.nic}]"]
        lines += [f"rate = {float(rate)!r}", f"latency = {float(latency)!r}"]
        lines += [f"burst = {float(burst)!r}"] if burst else []
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
    try:
        return _built(_Table(data, _KNOWN))
    except _KeyError as error:
        raise ValueError(f"line {_line(text, error.link, error.key)}: {error}") from error


def find(
    text: str,
    rate: float | None = None,
    latency: float | None = None,
    *,
    usual: tuple[str | float, str | float] = (RATE, LATENCY),
) -> Fabric:
    """The fabric that a user names: by a file, or as `hrdma.topo.fabrics.parse` reads it.

    Parameters
    ----------
    text : str
        A file where there is one, or where it ends in ``.toml``.
    rate, latency : float, optional
        bit/s and seconds of every link, whatever the file says.
    usual : (str or float, str or float)
        Those of a name without them.

    Raises
    ------
    ValueError
        As `load` and `parse`.
    OSError
        The file cannot be read.
    """
    if not text.endswith(".toml") and not Path(text).is_file():
        return parse(text, usual[0] if rate is None else rate, usual[1] if latency is None else latency)
    fabric = load(text)
    links = (
        link._replace(rate=link.rate if rate is None else rate, latency=link.latency if latency is None else latency)
        for link in fabric.links
    )
    return replace(fabric, links=tuple(links))


class _KeyError(ValueError):
    """What is wrong with a key of the file, or of one of its links."""

    def __init__(self, message: str, key: str, link: int | None) -> None:
        super().__init__(message if link is None else f"link {link}: {message}")
        self.key = key
        self.link = link


def _line(text: str, link: int | None, key: str) -> int:
    """Where a key stands; where it does not, the head of its link."""
    at, near = -1, 1
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*\[\[\s*link\s*\]\]", line):
            at += 1
            near = number if at == link else near
        elif at == (-1 if link is None else link) and re.match(rf"\s*\"?{re.escape(key)}\"?\s*=", line):
            return number
    return near


class _Table:
    """The keys of the file or of a link, each of the type that it must have."""

    def __init__(self, data: Mapping[str, Any], known: Collection[str], link: int | None = None) -> None:
        self.data, self.link = data, link
        if unknown := sorted(set(data) - set(known)):
            raise self.wrong(unknown[0], f"unknown key {unknown[0]!r}; known: {', '.join(sorted(known))}")

    def wrong(self, key: str, message: str) -> _KeyError:
        return _KeyError(message, key, self.link)

    def text(self, key: str, default: str) -> str:
        return self._typed(key, default, "text", lambda value: isinstance(value, str))

    def whole(self, key: str, default: int) -> int:
        return self._typed(key, default, "a whole number", _is_whole)

    def wholes(self, key: str, what: str = "a list of whole numbers") -> tuple[int, ...]:
        return tuple(self._typed(key, [], what, lambda value: isinstance(value, list) and all(map(_is_whole, value))))

    def tables(self, key: str) -> list[dict[str, Any]]:
        return self._typed(key, [], f"a list of tables, each under [[{key}]]", lambda value: _is_list_of(dict, value))

    def names(self, key: str) -> tuple[tuple[str, ...], ...]:
        found = self._typed(
            key, [], 'a list of names for every host, as in [["eth0", "eth1"], ["eth0", "eth1"]]',
            lambda value: _is_list_of(list, value) and all(_is_list_of(str, names) for names in value),
        )  # fmt: skip
        return tuple(map(tuple, found))

    def number(self, key: str, default: float, read: Callable[[str | float], float]) -> float:
        try:
            return read(self.data.get(key, default))
        except ValueError as error:
            raise self.wrong(key, f"{key}: {error}") from error

    def _typed(self, key: str, default: Any, what: str, fits: Callable[[Any], bool]) -> Any:
        value = self.data.get(key, default)
        if not fits(value):
            raise self.wrong(key, f"{key} is {value!r}; it must be {what}")
        return value


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, kind) for entry in value)


def _built(table: _Table) -> Fabric:
    usual = _numbers(table, {"rate": RATE, "latency": LATENCY, "burst": 0.0})
    if "fabric" in table.data:
        name = table.text("fabric", "")
        if more := sorted(set(table.data) - set(_NAMED)):
            raise table.wrong(more[0], f"{more[0]!r} beside 'fabric': the fabric {name!r} has its own")
        made = parse(name, usual["rate"], usual["latency"])
        return replace(made, links=tuple(link._replace(burst=usual["burst"]) for link in made.links))
    if "shape" in table.data and not table.data.get("kind"):
        raise table.wrong("shape", "shape is that of a kind, and none is given")
    for key in ("hosts", "link"):
        if key not in table.data:
            raise ValueError(f'no {key!r}: a fabric has hosts and links, or is named, as in fabric = "bcube:3,2"')
    links = [_link(_Table(link, _OF_LINK, index), usual) for index, link in enumerate(table.tables("link"))]
    fabric = Fabric(
        name=table.text("name", "unnamed"),
        hosts=table.whole("hosts", 0),
        switches=table.whole("switches", 0),
        links=tuple(links),
        kind=table.text("kind", ""),
        shape=table.wholes("shape"),
        ranks_per_host=table.whole("ranks_per_host", 1),
        memory_rate=table.number("memory_rate", Fabric.memory_rate, rate_bit_s),
        memory_latency=table.number("memory_latency", Fabric.memory_latency, latency_s),
        interfaces=table.names("interfaces"),
    )
    if fabric.kind:
        _compare(fabric)
    return fabric


def _numbers(table: _Table, usual: Mapping[str, float]) -> dict[str, float]:
    """What a table says of links, and the usual where it does not."""
    readers = {"rate": rate_bit_s, "latency": latency_s, "burst": burst_bytes}
    return {key: table.number(key, usual[key], read) for key, read in readers.items()}


def _link(table: _Table, usual: Mapping[str, float]) -> Link:
    def port(end: str) -> Port:
        numbers = table.wholes(end, "[node, NIC]")
        if len(numbers) != 2:
            raise table.wrong(end, f"{end} is {list(numbers)}; it must be [node, NIC]")
        return Port(*numbers)

    return Link(port("a"), port("b"), **_numbers(table, usual))


def _compare(fabric: Fabric) -> None:
    """The wiring is that of the kind which it claims."""
    if fabric.kind not in CONSTRUCTORS or not fabric.shape:
        raise ValueError(f"kind {fabric.kind!r} needs a shape, and to be one of {', '.join(CONSTRUCTORS)}")
    shape, (make, least, most) = fabric.shape, CONSTRUCTORS[fabric.kind]
    most = -1 if fabric.kind == "bcube" else most  # of which the shape is the digits, not the arguments
    if len(shape) < least or 0 <= most < len(shape) or max(shape) > max(fabric.nodes, fabric.ranks):
        raise ValueError(f"shape {list(shape)} is not one of a {fabric.kind} of {fabric.hosts} hosts")
    model = make(shape) if fabric.kind == "bcube" else make(*shape)
    if shape != model.shape:
        raise ValueError(f"shape {list(shape)} is not complete: that of {model.name} is {list(model.shape)}")
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

"""`hrdma info`: what this machine and this configuration give, and why something is missing."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from hrdma.config import Config

__all__ = ["collect", "command"]

EXIT_PROBLEMS = 2
USED, LEFT_OUT, ABSENT = "used", "left out", "not available"


def collect(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Everything that `hrdma info` prints, as plain data.

    Parameters
    ----------
    environ : mapping, optional
        Read instead of ``os.environ``.

    Returns
    -------
    dict
        ``version``, ``python``, ``system``, ``cores``, ``reductions`` (instruction set), ``memlock`` (bytes, -1
        unlimited), ``memory`` (of a registered buffer of 4 MiB: available, why, huge), ``job`` (None, or launcher,
        rank, size, address), ``providers`` (list of name, state, why, text, large, caps), ``settings`` (list of name,
        value, origin, help), ``problems`` (list of str).

    Notes
    -----
    Opens every provider for a moment. Forks, so call it before other threads are started.
    """
    import resource

    from hrdma.cli.probe import siblings_may_read

    may_read = siblings_may_read()  # before the engines below have threads
    from hrdma import __version__, _core
    from hrdma.doctor.host import registered
    from hrdma.providers import AUTOMATIC

    config, problems = _configuration(os.environ if environ is None else environ)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    names = [*config.transport, *(name for name in AUTOMATIC if name not in config.transport)]
    providers = [_provider(config, name, may_read) for name in [*(name for name in names if name != "loop"), "loop"]]
    for entry in providers:
        if entry.pop("refused", False):
            problems.append(f"HRDMA_{entry['name'].upper()}={config.options(entry['name'])}: {entry['why']}")
        elif entry["state"] == ABSENT and entry["name"] in (*config.transport, *config.require):
            which = "HRDMA_TRANSPORT" if entry["name"] in config.transport else "HRDMA_REQUIRE"
            problems.append(f"{which} names {entry['name']}, which is not available: {entry['why']}")
    known = {entry["name"] for entry in providers if entry["state"] == USED}
    problems.extend(
        f"HRDMA_REQUIRE names {name}, which is not used: HRDMA_TRANSPORT leaves it out"
        for name in config.require
        if name not in known and not any(name in problem for problem in problems)
    )
    return {
        "version": __version__,
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "reductions": _core.reduce_isa(),
        "memlock": {"soft": soft, "hard": hard},
        "memory": registered(),
        "job": _job(config, environ, problems),
        "providers": providers,
        "settings": [row._asdict() for row in config.rows()],
        "problems": problems,
    }


def _configuration(environ: Mapping[str, str]) -> tuple[Config, list[str]]:
    """The configuration without the variables that are wrong, and what is wrong with those."""
    from hrdma.config import PREFIX, Config

    good, problems = {}, []
    for name, value in environ.items():
        if not name.startswith(PREFIX):
            continue
        try:
            Config.load({name: value})
            good[name] = value
        except ValueError as error:
            problems.append(str(error).replace("; `hrdma info` lists them", ""))
    return Config.load(good), problems


def _job(config: Config, environ: Mapping[str, str] | None, problems: list[str]) -> dict[str, Any] | None:
    """The job in which this process stands, as its launcher's variables say; None outside one."""
    from hrdma.world import world_from_env

    try:
        world = world_from_env(config, environ)
    except ValueError as error:
        problems.append(str(error))
        return None
    if not world.launcher:
        return None
    return {
        "launcher": "hrdma run or torchrun" if world.launcher == "RANK" else world.launcher,
        "rank": world.rank,
        "size": world.size,
        "address": f"{world.master_addr}:{world.master_port}" if world.master_addr else "",
    }


def _provider(config: Config, name: str, may_read: tuple[bool, str]) -> dict[str, Any]:
    from hrdma import _core

    entry: dict[str, Any] = {"name": name, "state": USED, "why": "", "text": "", "large": "", "caps": []}
    options = config.options(name)
    try:
        count, why = _core.provider_devices(name)
        if not count and not (name == "verbs" and config.hardware()):
            return entry | {"state": ABSENT, "why": why or "no device"}
        engine = _core.Engine(
            0,
            "" if name == "loop" else name,
            ifname=config.ifname or None,
            options=f"{name}:{options}" if options else None,
            devices=f"verbs:{config.hardware()}" if config.hardware() else None,
            token=config.token.encode() or None,
        )
    except (ValueError, RuntimeError, OSError) as error:
        return entry | {"state": ABSENT, "why": str(error), "refused": bool(options)}
    domain = engine.domains()[name]
    engine.close(0.1)
    entry |= {
        "text": domain["text"],
        "caps": sorted(domain["caps"]),
        "large": _large(name, domain["caps"], options, may_read),
    }
    if config.transport and name not in (*config.transport, "loop"):
        entry |= {"state": LEFT_OUT, "why": "HRDMA_TRANSPORT does not name it"}
    return entry


def _large(name: str, caps: list[str], options: str, may_read: tuple[bool, str]) -> str:
    """Which way large messages go between ranks of this host over shared memory; empty for other providers."""
    if name != "shm":
        return ""
    if "cma=0" in options.split(","):
        other = "staged through the rings, since HRDMA_SHM says cma=0"
    elif may_read[0]:
        other = "staged through the rings; where ranks share cores or it is faster, read by process_vm_readv and written by process_vm_writev"
    else:
        other = f"staged through the rings, since the kernel refuses process_vm_readv ({may_read[1]})"
    copied = "in collectives of ranks that share cores, below 4 MiB, copied to where the peer maps it"
    return f"from hrdma.empty(): mapped by the peer and read in place; from other memory: {other}; {copied}"


def _bytes(value: int) -> str:
    if value < 0:
        return "unlimited"
    return f"{value >> 20} MiB" if value >= 1 << 20 else f"{value >> 10} KiB"


@click.command("info")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--settings/--no-settings", default=True, show_default=True, help="Show the HRDMA_* settings.")
def command(as_json: bool, settings: bool) -> None:
    """Shows what this machine and this configuration give.

    Which providers there are, best first, and why one is not available; which way large messages go; the job that the
    environment names; the effective configuration and where each value comes from.

    \b
    Exit codes:
        0  all is well
        2  a setting is wrong, or names what cannot be had (the rest is shown)
    """
    found = collect()
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        from hrdma.cli.show import show

        show(*_parts(found, settings))
    for problem in found["problems"]:
        click.echo(f"hrdma info: {problem}", err=True)
    sys.exit(EXIT_PROBLEMS if found["problems"] else 0)


def _parts(found: dict[str, Any], settings: bool) -> Iterator[Table | Text]:
    from rich.table import Table
    from rich.text import Text

    def grid(rows: Sequence[tuple[Text | str, ...]], title: str, *fixed: int) -> Iterator[Table | Text]:
        yield Text(title, "bold")
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for column in range(len(rows[0])):
            table.add_column(no_wrap=column in fixed, overflow="fold")
        for row in rows:
            table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
        yield table

    lock, memory, job = found["memlock"], found["memory"], found["job"]
    pages = "in huge pages" if memory["huge"] else "in small pages: huge ones are 2 to 3 times as fast"
    where = "none: this process is alone"
    if job:
        where = f"rank {job['rank']} of {job['size']}, started by {job['launcher']}"
        where += f", meets at {job['address']}" if job["address"] else ", meets through the launcher"
    rows = [
        ("system", f"{found['system']}, {found['cores']} cores, Python {found['python']}"),
        ("reductions", found["reductions"]),
        ("memory", f"registered {pages}" if memory["available"] else memory["why"]),
        ("memlock", f"{_bytes(lock['soft'])} (hard limit {_bytes(lock['hard'])})"),
        ("job", where),
    ]
    yield from grid(rows, f"hrdma {found['version']}", 0)
    yield Text()
    styles = {USED: "green", LEFT_OUT: "yellow", ABSENT: "red"}
    lines: list[tuple[Text | str, ...]] = []
    for entry in found["providers"]:
        state = "for itself" if entry["name"] == "loop" else entry["state"]
        texts = [entry["why"], entry["text"]]
        texts += [f"large messages {entry['large']}"] if entry["large"] else []
        texts += [f"can: {' '.join(entry['caps'])}"] if entry["caps"] else []
        for number, text in enumerate(filter(None, texts)):
            name, shown = (entry["name"], state) if number == 0 else ("", "")
            lines.append((Text(name, "bold"), Text(shown, styles[entry["state"]]), text))
    yield from grid(lines, "Providers, best first", 0, 1)
    if settings:
        yield Text()
        shown_rows = [
            (
                row["name"],
                Text(row["value"] or "-", "bold" if row["origin"] != "default" else ""),
                row["origin"],
                Text(row["help"], "dim"),
            )
            for row in found["settings"]
        ]
        yield from grid(shown_rows, "Settings: the argument of a call, else the environment, else the default", 0, 2)

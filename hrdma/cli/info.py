"""`hrdma info`: what this machine and this configuration give, and why something is missing."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

__all__ = ["collect", "command"]


def collect() -> dict[str, Any]:
    """Everything that `hrdma info` prints, as plain data.

    Returns
    -------
    dict
        ``version``, ``python``, ``providers`` (list of name, available, why, text, caps, address bytes), ``reductions`` (instruction
        set), ``cores``, ``memory`` (arenas, memlock), ``settings`` (list of name, value, origin, help).
    """
    import resource

    from hrdma import __version__, _core
    from hrdma.config import Config
    from hrdma.runtime import AUTOMATIC

    config = Config.load()
    providers: list[dict[str, Any]] = []
    for name in (*AUTOMATIC, "loop"):
        count, why = _core.provider_devices(name)
        entry: dict[str, Any] = {"name": name, "available": count > 0, "why": why or "", "text": "", "caps": []}
        if count > 0:
            try:
                engine = _core.Engine(
                    0, name, ifname=config.ifname or None, options=_options(config, name), token=config.token.encode() or None
                )
            except Exception as error:
                entry.update(available=False, why=str(error))
            else:
                domain = engine.domains()[name]
                entry.update(text=domain["text"], caps=sorted(domain["caps"]))
                engine.close(0.1)
        providers.append(entry)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "version": __version__,
        "python": sys.version.split()[0],
        "cores": len(os.sched_getaffinity(0)),
        "reductions": _core.reduce_isa(),
        "memlock": {"soft": soft, "hard": hard},
        "providers": providers,
        "settings": [row._asdict() for row in config.rows()],
    }


def _options(config: Any, name: str) -> str | None:
    text = config.options(name)
    return f"{name}:{text}" if text else None


def _bytes(value: int) -> str:
    return "unlimited" if value < 0 else f"{value / 1024:g} KiB"


@click.command("info")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--settings/--no-settings", default=True, help="Show the HRDMA_* settings.")
def command(as_json: bool, settings: bool) -> None:
    """Shows providers, devices, why something is not available, and the effective configuration."""
    found = collect()
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=False)
    lock = found["memlock"]
    console.print(
        f"hrdma {found['version']}, Python {found['python']}, {found['cores']} cores, reductions with {found['reductions']}, "
        f"memlock {_bytes(lock['soft'])} (hard {_bytes(lock['hard'])})",
        highlight=False,
    )
    table = Table(title="Providers, best first", title_justify="left", show_edge=False)
    for title in ("name", "state", "what", "capabilities"):
        table.add_column(title, overflow="fold")
    for entry in found["providers"]:
        table.add_row(
            entry["name"],
            "ok" if entry["available"] else "not available",
            entry["text"] if entry["available"] else entry["why"],
            " ".join(entry["caps"]),
        )
    console.print(table)
    if settings:
        table = Table(title="Settings: argument of the call > environment > default", title_justify="left", show_edge=False)
        for title in ("name", "value", "from", "help"):
            table.add_column(title, overflow="fold")
        for row in found["settings"]:
            table.add_row(row["name"], row["value"], row["origin"], row["help"])
        console.print(table)

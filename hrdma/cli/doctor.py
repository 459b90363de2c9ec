"""`hrdma doctor`: looks at this host, its RDMA devices and the way to a peer, and says what mends what is wrong."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hrdma.doctor.finding import Finding

__all__ = ["collect", "command"]

PORT = 29577


def collect(peer: str = "", port: int = PORT, timeout: float = 60.0) -> list[Finding]:
    """Everything that `hrdma doctor` prints.

    Parameters
    ----------
    peer : str
        Name or address of a host on which the same runs; empty: this host alone.
    port : int
        Of the rendezvous with the peer.
    timeout : float
        Seconds that the peer may take.

    Notes
    -----
    Forks, so call it before other threads are started. Opens every RDMA device for a moment.
    """
    from hrdma.cli.probe import siblings_may_read

    may_read = siblings_may_read()  # before there are threads
    from hrdma.doctor import host, rdma

    root = Path("/")
    found = [*host.examine(root, may_read), *rdma.examine(root)]
    if peer:
        from hrdma.doctor.peer import examine

        found += examine(peer, port, timeout)
    return found


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--peer", default="", metavar="HOST", help="Measure the way to HOST too, where the same runs.")
@click.option("--port", default=PORT, show_default=True, type=click.IntRange(1, 65535), help="To meet the peer at.")
@click.option(
    "--timeout",
    default=60.0,
    show_default=True,
    type=click.FloatRange(1, 3600),
    help="Seconds that the peer may take.",
)
def command(as_json: bool, peer: str, port: int, timeout: float) -> None:
    """Looks for what is wrong or slow, and says what mends it.

    Cores, limits, registered memory, networks; RDMA modules, libraries, devices,
    ports, GIDs, MTU, flow control, and an exchange over each device; which
    devices and GIDs a job with these settings would use, and why.

    With --peer, run it on both hosts, each with the other's address: latency and
    bandwidth over tcp and over each pair of RDMA devices. HRDMA_TOKEN has to be
    the same on both, HRDMA_DEVICES chooses the devices (sim and sim2 too), with
    HRDMA_IFNAME and HRDMA_VERBS=gid= as for a job.

    \b
    Exit codes:
        0  all is well, or there are only warnings
        1  something that is there does not work
        2  wrong usage
    """
    from hrdma.doctor.finding import ERROR, worst

    found = collect(peer, port, timeout)
    level = worst(found)
    if as_json:
        click.echo(json.dumps({"level": level, "findings": [_plain(finding) for finding in found]}, indent=2))
    else:
        _show(found)
    sys.exit(1 if level == ERROR else 0)


def _plain(finding: Finding) -> dict[str, Any]:
    return dataclasses.asdict(finding)


def _show(found: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    from hrdma.cli.show import show
    from hrdma.doctor.finding import LEVELS

    styles = dict(zip(LEVELS, ("green", "yellow", "red")))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in found:
        table.add_row(Text(finding.level, styles[finding.level]), Text(finding.subject, "bold"), Text(finding.text))
        if finding.mend:
            table.add_row("", "", Text(f"-> {finding.mend}", "cyan"))
    show(table)
    counts = [sum(finding.level == level for finding in found) for level in LEVELS]
    click.echo(f"\n{counts[0]} ok, {counts[1]} warnings, {counts[2]} errors")

"""`hrdma rxe`: soft-RoCE devices; the work is in hrdma.rxe."""

from __future__ import annotations

import dataclasses
import json

import click

from hrdma.cli.privileged import Privileged

__all__ = ["command"]

DEV = click.option("--dev", default="", metavar="NAME", help="Network device, such as eth0.")


@click.group("rxe", cls=Privileged)
def command() -> None:
    """Soft-RoCE: an RDMA device on any network card, to try provider verbs.

    Slower than tcp, and good for tests. The device on eth0 is hrdma_eth0;
    HRDMA_DEVICES=hrdma_eth0 uses it. Devices of other names are left alone.

    \b
    Exit codes:
        0  success; what was so before is success too
        1  the command failed: no such network device, no soft-RoCE, the kernel
        2  wrong usage
      126  not root
    """


@command.command()
@DEV
def up(dev: str) -> None:
    """Makes a device; without --dev on the first interface that is up."""
    from hrdma import rxe

    link = rxe.up(dev)
    click.echo(f"{link.name} on {link.netdev}: {link.state}; HRDMA_DEVICES={link.name} uses it")


@command.command()
@DEV
def down(dev: str) -> None:
    """Removes the device that `up` made; without --dev all of them."""
    from hrdma import rxe

    for link in (gone := rxe.down(dev)):
        click.echo(f"{link.name} on {link.netdev}: removed")
    if not gone:
        click.echo("no device that hrdma made")


@command.command()
@DEV
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def status(dev: str, as_json: bool) -> None:
    """Lists the RDMA devices of this host."""
    from hrdma import rxe

    found = [link for link in rxe.links() if dev in ("", link.netdev)]
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(link) | {"ours": link.ours} for link in found], indent=2))
        return
    for link in found:
        by = "made by hrdma" if link.ours else "made by others"
        click.echo(f"{link.name} on {link.netdev or 'no network device'}: {link.state}, {by}")
    if not found:
        click.echo("no RDMA device")

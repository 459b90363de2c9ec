"""The `hrdma` command: info, doctor, rxe, run, bench, topo, lab, qos. Each is a file of its own, imported when it is called."""

from __future__ import annotations

import importlib
import sys

import click

__all__ = ["command", "main"]

EXIT_FAILED = 1
EXIT_USAGE = 2

# name -> module with `command`, and the line shown by --help (so that --help imports none of them)
COMMANDS = {
    "info": ("hrdma.cli.info", "Providers, why one is not available, the effective configuration."),
    "doctor": ("hrdma.cli.doctor", "What is wrong or slow on this host and on the way to a peer, and what mends it."),
    "rxe": ("hrdma.cli.rxe", "Soft-RoCE devices on network cards: up, down, status."),
    "run": ("hrdma.launch", "Start the ranks of a job on this host."),
    "qos": ("hrdma.qos.cli", "NIC priorities: which job's bytes leave this host first."),
    "bench": ("hrdma.cli.bench", "Measure and verify a collective or a point-to-point pattern."),
    "topo": ("hrdma.cli.topo", "Plan collectives for a fabric: compare, prove, predict, draw."),
    "lab": ("hrdma.cli.lab", "A network of any fabric on this machine: up, run, status, exec, down."),
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        return importlib.import_module(COMMANDS[name][0]).command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hrdma", prog_name="hrdma")
def command() -> None:
    """Moves arrays between processes and hosts: shared memory, TCP, RDMA.

    \b
    Exit codes:
        0  success
        1  the command failed
        2  wrong usage: an option, or an HRDMA_* setting
      124  run, bench: the time of --timeout was over
      126  lab, rxe: not root
      127  run: no such command
      128 + n  run, bench: a rank, or the command itself, was ended by signal n
    `hrdma run` gives the exit code of the first rank that failed.
    """


def main() -> None:
    """Entry point of the console script."""
    try:
        command(prog_name="hrdma")
    except (ValueError, ImportError, RuntimeError, OSError) as error:
        click.echo(f"hrdma: {error}", err=True)
        sys.exit(EXIT_USAGE if isinstance(error, ValueError) else EXIT_FAILED)

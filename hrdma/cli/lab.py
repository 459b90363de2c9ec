"""`hrdma lab`: the options and what is shown; the work is in hrdma.lab."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from typing import Any

import click

from hrdma.cli.privileged import EXIT_FAILED, Privileged
from hrdma.cli.quantities import RATE, SIZE, TIME
from hrdma.lab import DEFAULT_NAME

__all__ = ["command"]

EXIT_NOT_FOUND = 127
DEFAULT_RATE = "200mbit"


@click.group("lab", cls=Privileged)
def command() -> None:
    """A network of any fabric on this machine, to try and measure in. Needs root.

    Hosts and switches are network namespaces, links are veth pairs with the rate
    that you say; nothing shows in the machine's own network. A lab stays until
    `hrdma lab down`.

    \b
    hrdma lab up bcube --n 3 --levels 2 --rate 200mbit
    hrdma lab run -- hrdma bench allreduce -e 4M
    hrdma lab down

    \b
    Exit codes:
        0  success
        1  the command failed: no such lab, a name that is taken, the kernel
        2  wrong usage, a fabric, rate or packet that cannot be
      126  not root, or not permitted to make network namespaces
    `run` and `exec` give the exit code of the command, 127 where there is none;
    `run` as `hrdma run`: 124 after the timeout, 128 + n after signal n.
    """


def _named(function: Any) -> Any:
    return click.option("--name", default=DEFAULT_NAME, show_default=True, help="Which lab.")(function)


@command.command("up")
@click.argument("spec", metavar="SPEC")
@click.option("--n", type=click.IntRange(1), help="Hosts of a ring or star, ports of a BCube's or fat-tree's switches.")
@click.option("--levels", type=click.IntRange(1), help="With --n: levels of a BCube, NICs of a host.")
@click.option(
    "--dims", metavar="AxB", help="Sides of a torus or mesh, hosts at the switches of each level of a BCube: 4x4."
)
@click.option(
    "--rate", type=RATE, help=f"Of every link, each way: 200mbit, 1gbit.  [default: the file's, or {DEFAULT_RATE}]"
)
@click.option("--latency", type=TIME, help="Of every link, each way: 0ms, 50us.  [default: the file's, or 0]")
@click.option(
    "--packet",
    type=SIZE,
    default="64KiB",
    show_default=True,
    help="Most that a NIC takes as one, up to 511KiB and 1 ms of the rate; above 64KiB: Linux 6.3.",
)
@_named
def up(
    spec: str,
    n: int | None,
    levels: int | None,
    dims: str | None,
    rate: float | None,
    latency: float | None,
    packet: float,
    name: str,
) -> None:
    """Bring a lab up.

    SPEC is a kind of fabric with its numbers, or a TOML file:

    \b
    hrdma lab up bcube --n 3 --levels 2
    hrdma lab up torus --dims 3x3 --rate 100mbit --name torus
    hrdma lab up leaf_spine:2,4,2
    hrdma lab up fabric.toml

    Exit codes: 0 it is up; 1 the name is taken, or the kernel refuses something; 2 wrong usage or a fabric that cannot
    be; 126 not root; 128 + n after signal n. Unless it is 0, nothing is left.
    """
    from hrdma.lab.lab import STOPPING, Lab, need_root
    from hrdma.topo.fabric_file import find

    need_root()
    for number in STOPPING:
        signal.signal(number, _leave)
    given = {"--n": n, "--levels": levels, "--dims": dims}
    text = _fabric_name(spec, {option: str(value) for option, value in given.items() if value is not None})
    lab = Lab.up(find(text, rate, latency, usual=(DEFAULT_RATE, 0.0)), name, int(packet))
    switches = len(lab.nodes) - lab.hosts
    nics = sum(len(node["nics"]) for node in lab.nodes[: lab.hosts])
    program = "hrdma" if shutil.which("hrdma") or not sys.argv[0].endswith("hrdma") else os.path.relpath(sys.argv[0])
    option = "" if name == DEFAULT_NAME else f" --name {name}"
    click.echo(f"lab {name} is up: {lab.fabric}, {lab.hosts} hosts with {nics} NICs, {switches} switches. Next:")
    for words, what in (
        (f"run{option} -- COMMAND", "one rank on each host"),
        (f"exec{option} h0 -- COMMAND", "a command on one host"),
        (f"status{option}", "addresses, traffic, processes"),
        (f"down{option}", "take it down"),
    ):
        click.echo(f"  {program} lab {words:28} {what}")


def _leave(number: int, _: object) -> None:
    """A signal as an exception, so that what was begun is removed; once, so that removing is not interrupted."""
    from hrdma.lab.lab import STOPPING

    for each in STOPPING:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


# Which options say the numbers of a fabric; those of the others stand behind its name.
_OPTIONS = {
    "ring": (("--n",),),
    "star": (("--n",),),
    "fat_tree": (("--n",),),
    "bcube": (("--n", "--levels"), ("--dims",)),
    "torus": (("--dims",),),
    "mesh": (("--dims",),),
    "leaf_spine": (),
    "cluster": (),
}


def _fabric_name(spec: str, options: dict[str, str]) -> str:
    """The file or the name of a fabric, the numbers in options included."""
    if not options:
        return spec
    if spec.endswith(".toml") or ":" in spec:
        raise click.UsageError(f"{spec} says what the fabric is: leave out {' and '.join(options)}")
    if spec in _OPTIONS and tuple(options) not in _OPTIONS[spec]:
        ways = " or ".join(" with ".join(form) for form in _OPTIONS[spec])
        ways = ways or f"its numbers behind the name, as in {spec}:2,2,2"
        raise click.UsageError(f"{spec} takes {ways}, not {' with '.join(options)}")
    return f"{spec}:{','.join(options.values())}"


@command.command("run", context_settings={"allow_interspersed_args": False})
@_named
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds after which all are stopped.")
@click.option("--per-host", type=click.IntRange(1), help="Ranks on each host.  [default: 1; of a cluster: its own]")
@click.option("--prefix/--no-prefix", default=True, help="Show the rank in front of each line (default).")
@click.option("--keep-going", is_flag=True, help="Do not stop the other ranks when one fails.")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [ARGS]...", required=True)
@click.pass_context
def run(
    ctx: click.Context,
    name: str,
    timeout: float | None,
    per_host: int | None,
    prefix: bool,
    keep_going: bool,
    args: tuple[str, ...],
) -> None:
    """Run a command as the ranks of a job, one on each host.

    \b
    hrdma lab run train.py --lr 0.1
    hrdma lab run --timeout 60 -- hrdma bench allreduce -e 4M

    The ranks find each other as under `hrdma run`; their output comes by line with the rank in front; when one fails,
    all are stopped.

    Exit code: that of the first rank that failed (128 + signal when it was killed), 124 after the timeout, 127 when
    there is no such command, 126 not root.
    """
    from hrdma.lab.lab import Lab, need_root

    need_root()
    lab = Lab.find(name)
    ctx.exit(lab.run(_found(args), ranks_per_host=per_host, timeout=timeout, prefix=prefix, keep_going=keep_going))


def _found(args: tuple[str, ...]) -> list[str]:
    """The command, with this installation's own `hrdma` and `python` where the path has none."""
    own = os.path.join(os.path.dirname(sys.executable), args[0])
    return [
        own if shutil.which(args[0]) is None and os.sep not in args[0] and os.path.exists(own) else args[0],
        *args[1:],
    ]


@command.command("exec", context_settings={"allow_interspersed_args": False})
@_named
@click.argument("host", metavar="HOST")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [ARGS]...", required=True)
@click.pass_context
def execute(ctx: click.Context, name: str, host: str, args: tuple[str, ...]) -> None:
    """Run a command on one host: 0 or h0; or on a switch: s0.

    Its network is the host's, everything else this machine's (/sys/class/net shows the machine's interfaces).

    Exit code: that of the command, 127 when there is no such command.
    """
    from hrdma.lab import namespaces
    from hrdma.lab.lab import Lab, need_root

    need_root()
    file = Lab.find(name).namespace(host)
    words = _found(args[1:] if args[0] == "--" else args)
    if shutil.which(words[0]) is None:
        click.echo(f"hrdma lab: no such command: {words[0]}", err=True)
        ctx.exit(EXIT_NOT_FOUND)
    namespaces.enter(file)
    sys.stdout.flush()
    os.execvp(words[0], words)


@command.command("status")
@click.option("--name", help="Only this lab.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def status(name: str | None, as_json: bool) -> None:
    """Show the labs of this machine: addresses, rates, traffic, processes.

    The table has the hosts, --json the switches too.

    Exit code: 0; 1 when the lab that --name asks for is not there; 126 not root.
    """
    from hrdma.lab import lab as module

    module.need_root()
    need = [name] if name is not None else module.labs()
    found: list[dict[str, Any]] = []
    for each in need:
        try:
            found.append(module.Lab.find(each).status())
        except (RuntimeError, OSError) as error:
            if name is not None and isinstance(error, FileNotFoundError):
                raise
            found.append({"name": each, "complete": False, "error": f"lab {each}: {error}"})
    if as_json:
        click.echo(json.dumps(found, indent=1))
    elif not found:
        click.echo("no lab is up: hrdma lab up bcube --n 3 --levels 2")
    else:
        for entry in found:
            _show(entry)


def _show(entry: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    if not entry["complete"]:
        click.echo(entry["error"])
        return
    table = Table(title=f"lab {entry['name']}: {entry['fabric']}", title_justify="left", box=None)
    for column in ("node", "NIC", "address", "peer"):
        table.add_column(column)
    for column in ("Mbit/s", "us", "sent B", "received B", "processes"):
        table.add_column(column, justify="right")
    for node in entry["nodes"][: entry["hosts"]]:
        for index, nic in enumerate(node["nics"]):
            first = (node["name"], str(len(node["pids"]))) if index == 0 else ("", "")
            table.add_row(
                first[0],
                nic["name"],
                nic["address"],
                nic["peer"],
                f"{nic['rate_bit_s'] / 1e6:g}",
                f"{nic['latency'] * 1e6:g}",
                f"{nic['tx_bytes']}",
                f"{nic['rx_bytes']}",
                first[1],
            )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


@command.command("down")
@_named
@click.option(
    "--all", "everything", is_flag=True, help="All labs of this machine, and what is left of interrupted ones."
)
def down(name: str, everything: bool) -> None:
    """Take a lab down: end what runs in it, remove its namespaces. Can be repeated.

    Exit code: 0, also where there was nothing; 1 when a process does not end, the
    other labs of --all are down then; 126 not root.
    """
    from hrdma.lab import lab

    lab.need_root()
    failed = False
    for each in lab.labs() if everything else [name]:
        try:
            click.echo(f"lab {each} is down" if lab.down(each) else f"there was no lab {each}")
        except PermissionError:
            raise
        except (RuntimeError, OSError) as error:
            click.echo(f"hrdma lab: lab {each}: {error}", err=True)
            failed = True
    if failed:
        sys.exit(EXIT_FAILED)

"""`hrdma topo`: fabrics, plans and predictions, without a network and without a job."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hrdma.cli.quantities import RATE, SIZE, TIME
from hrdma.lab import DEFAULT_NAME

if TYPE_CHECKING:
    from hrdma.topo.cost import Cost
    from hrdma.topo.fabric import Fabric
    from hrdma.topo.planner import Candidate
    from hrdma.topo.schedule import Schedule

__all__ = ["command"]

EXIT_WRONG = 1
LONG = 100_000  # transfers whose simulation takes long enough to say how far it is


def _with_fabric(function: Callable) -> Callable:
    """The options that say which fabric."""
    for option in (
        click.option("--latency", type=TIME, help="Of its links, such as 5us.  [default: the file's, or 1us]"),
        click.option("--rate", type=RATE, help="Of its links, such as 200mbit.  [default: the file's, or 10gbit]"),
        click.option("--fabric", "text", required=True, help="Such as bcube:3,2 or torus:4x4, or a TOML file."),
    ):
        function = option(function)
    return function


def _with_collective(function: Callable) -> Callable:
    """The options that say what is to be done on it."""
    for option in (
        click.option(
            "--message",
            type=TIME,
            help="Core time of a message, such as 7us; 0s: links alone. By default that of TCP; with --measure, as found in the lab.",
        ),
        click.option("--root", default=0, show_default=True, help="Of broadcast, reduce, gather and scatter."),
        click.option("--size", "nbytes", type=SIZE, default="32MiB", show_default=True, help="Of the whole vector."),
        click.option("--collective", default="allreduce", show_default=True),
    ):
        function = option(function)
    return function


def _cost(message: float | None) -> Cost:
    from dataclasses import replace

    from hrdma.topo.cost import NETWORK
    from hrdma.topo.simulate import WIRES

    if message is None:
        return NETWORK
    return replace(NETWORK, alpha=message, name="") if message else WIRES


def _schedule(
    algorithm: str | None,
    plan: str | None,
    collective: str,
    fabric: Fabric,
    nbytes: float,
    root: int,
    parts: int,
    cost,
) -> Schedule:
    """Of a file, of an algorithm, or the planner's."""
    from hrdma.topo.algorithms.on_fabric import lookup, refusal
    from hrdma.topo.plan_file import schedule_of
    from hrdma.topo.planner import plan as planned

    if plan is not None:
        return schedule_of(plan)
    if algorithm is None:
        return planned(collective, fabric, nbytes, cost, root=root).schedule()
    if why := refusal(algorithm, collective, fabric):
        raise ValueError(f"{algorithm} cannot plan this: {why}")
    if not 0 <= root < fabric.ranks or parts < 1:
        raise ValueError(f"out of range: root {root} of {fabric.ranks} ranks, {parts} parts")
    return lookup(algorithm).build(collective, fabric, parts, root, None)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on the error stream where that is a terminal, else a line now and then."""
    from rich.console import Console
    from rich.progress import Progress

    console, lines = Console(stderr=True), sys.stderr
    tenth: dict[str, int] = {}
    if console.is_terminal:
        with Progress(console=console, transient=True) as bar:
            tasks: dict[str, Any] = {}

            def show(name: str, done: int, total: int) -> None:
                if name not in tasks:
                    tasks[name] = bar.add_task(name, total=total)
                bar.update(tasks[name], completed=done)

            yield show
        return

    def tell(name: str, done: int, total: int) -> None:
        now = 10 * done // max(total, 1)
        if total >= LONG and now != tenth.get(name, 0):
            tenth[name] = now
            lines.write(f"{name}: {10 * now} % of {total} transfers\n")
            lines.flush()

    yield tell


@click.group("topo", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Plans collectives for a fabric, proves, predicts and draws them.

    A fabric is ring:N star:N mesh:AxB torus:AxB bcube:N,LEVELS bcube:AxB fat_tree:K leaf_spine:LEAVES,HOSTS,SPINES
    cluster:HOSTS,RANKS,RAILS, or a TOML file.

    \b
    Exit codes:
        0  success
        1  check: the plan is wrong, or is for another fabric
        2  a wrong argument, or a file that is none of ours
    """


@command.command("show")
@_with_fabric
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write it as a TOML file, to be edited.")
def show(text: str, rate: float | None, latency: float | None, output: str | None) -> None:
    """Shows a fabric: who is wired to whom."""
    from hrdma.topo.fabric_file import dump, find

    fabric = find(text, rate, latency)
    if output:
        dump(fabric, output)
        return
    click.echo(f"{fabric}\ndigest {fabric.digest()}")
    for node in range(fabric.nodes):
        ways = ", ".join(f"{nic}: {fabric.label(other)}" for _, other, nic in fabric.around[node])
        click.echo(f"  {fabric.label(node):12} {ways}")


@command.command("discover")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write it as a TOML file, for HRDMA_FABRIC.")
def discover(output: str | None) -> None:
    """Measures the fabric of a job; every rank runs it, rank 0 says what it is.

    \b
    hrdma lab run -- hrdma topo discover -o fabric.toml
    HRDMA_FABRIC=fabric.toml hrdma lab run -- python train.py
    """
    import hrdma
    from hrdma.planning import discover as measured
    from hrdma.topo.fabric_file import dump

    with hrdma.init() as comm:
        fabric = measured(comm)
        if comm.rank == 0:
            if output:
                dump(fabric, output)
            click.echo(f"{fabric}\ndigest {fabric.digest()}")
        comm.barrier()


@command.command("compare")
@_with_fabric
@_with_collective
@click.option("--algorithm", "names", multiple=True, help="Only this one; may be repeated. server-P takes P servers.")
@click.option(
    "--simulate/--closed-forms", "simulated", default=None, help="How to predict; by default simulate up to 64 ranks."
)
@click.option("--measure", is_flag=True, help="Run each in a lab of this fabric, and show the difference. Needs root.")
@click.option("--lab", "lab_name", default=DEFAULT_NAME, show_default=True, help="With --measure: which lab.")
@click.option(
    "--rounds", default=3, show_default=True, type=click.IntRange(1), help="With --measure: the median counts."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def compare(
    text: str, rate, latency, collective: str, nbytes: float, root: int, message, names: tuple[str, ...], simulated: bool | None,
    measure: bool, lab_name: str, rounds: int, as_json: bool,
) -> None:  # fmt: skip
    """Every algorithm's steps, bytes per NIC and predicted time.

    \b
    hrdma lab up bcube --n 3 --levels 2 --rate 200mbit
    hrdma topo compare --fabric bcube:3,2 --size 32MiB --measure
    """
    from hrdma.topo.fabric_file import find
    from hrdma.topo.planner import compare as compared

    if measure:
        from hrdma.cli.measured import like_lab, show

        with _progress() as progress:
            show(
                like_lab(lab_name, text, rate, latency),
                lab_name,
                collective,
                nbytes,
                None if message is None else _cost(message),
                names,
                rounds,
                as_json,
                progress,
            )
        return
    fabric = find(text, rate, latency)
    with _progress() as progress:
        found, refused = compared(
            collective, fabric, nbytes, _cost(message), root=root, names=names or None, simulated=simulated,
            progress=progress,
        )  # fmt: skip
    if as_json:
        document = {"fabric": fabric.name, "digest": fabric.digest(), "collective": collective, "nbytes": nbytes}
        document |= {"candidates": [c._asdict() for c in found], "refused": refused}
        click.echo(json.dumps(document, indent=2))
        return
    _table(fabric, collective, nbytes, found)
    for name, why in refused:
        click.echo(f"{name}: {why}", err=bool(names))
    if names and not found:
        sys.exit(2)


def _table(fabric: Fabric, collective: str, nbytes: float, found: list[Candidate]) -> None:
    from rich.table import Table

    from hrdma.cli.show import show
    from hrdma.units import in_bytes, in_seconds

    unit = nbytes * 8 / fabric.nic_rate
    click.echo(f"{collective} of {in_bytes(nbytes)} on {fabric}")
    table = Table(box=None, pad_edge=False)
    for column, justify in (("algorithm", "left"), ("parts", "right"), ("steps", "right"), ("per NIC", "right"),
                            ("predicted", "right"), ("W/B", "right"), ("", "left")):  # fmt: skip
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for c in found:
        table.add_row(
            c.algorithm, str(c.parts), str(c.steps), in_bytes(c.per_nic), in_seconds(c.seconds),
            f"{c.seconds / unit:.3f}" if unit else "-", "" if c.simulated else "closed form",
        )  # fmt: skip
    show(table)


@command.command("plan")
@_with_fabric
@_with_collective
@click.option("--algorithm", help="Only this one.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write the plan: .json, or .xml for MSCCL.")
@click.option("--json", "as_json", is_flag=True, help="Print the reasons as one JSON document.")
def plan(
    text: str, rate, latency, collective: str, nbytes: float, root: int, message, algorithm: str | None, output: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """The cheapest plan, and why; proved before it is written."""
    from hrdma.topo import msccl, plan_file
    from hrdma.topo.fabric_file import find
    from hrdma.topo.planner import plan as planned

    fabric = find(text, rate, latency)
    made = planned(collective, fabric, nbytes, _cost(message), root=root, algorithm=algorithm)
    click.echo(json.dumps(made.to_dict(), indent=2) if as_json else made.explain())
    if output:
        made.check()
        if output.endswith(".xml"):
            Path(output).write_text(msccl.dumps(made.schedule()))
        else:
            plan_file.dump(made, output)


@command.command("check")
@click.argument("path", type=click.Path(exists=True, dir_okay=False))
@click.option("--fabric", "text", help="It must be for this one.")
@click.option("--rate", type=RATE, help="Of the fabric's links.  [default: the file's, or 10gbit]")
@click.option("--latency", type=TIME, help="Of the fabric's links.  [default: the file's, or 1us]")
def check(path: str, text: str | None, rate: float | None, latency: float | None) -> None:
    """Proves a plan, a schedule (JSON) or an XML of MSCCL.

    A plan must be for its own fabric, and for the one that is given: links and
    rates. Of the other two only the number of ranks can be compared.
    """
    from hrdma.errors import ScheduleError
    from hrdma.topo.fabric_file import find
    from hrdma.topo.plan_file import prove

    if text is None and (rate, latency) != (None, None):
        raise click.UsageError("--rate and --latency are those of --fabric")
    try:
        schedule = prove(path, None if text is None else find(text, rate, latency))
    except ScheduleError as error:
        click.echo(f"hrdma topo check: {error}", err=True)
        sys.exit(EXIT_WRONG)
    click.echo(f"{path}: proved: {str(schedule).splitlines()[0]}")


def _with_schedule(function: Callable) -> Callable:
    """The options that say which schedule."""
    for option in (
        click.option("--plan", "path", type=click.Path(exists=True, dir_okay=False), help="The schedule of this file."),
        click.option("--parts", default=1, show_default=True, help="With --algorithm: pieces of each share."),
        click.option("--algorithm", help="Its schedule; by default the planner's."),
    ):
        function = option(function)
    return function


@command.command("simulate")
@_with_fabric
@_with_collective
@_with_schedule
@click.option(
    "--slow", multiple=True, metavar="HOST=FACTOR", help="This host is so many times slower; may be repeated."
)
@click.option("--fail", multiple=True, type=int, metavar="LINK", help="This link carries nothing; may be repeated.")
@click.option("--accuracy", default=0.0, show_default=True, help="Share of the result that may be lost for speed.")
def simulate(
    text: str, rate, latency, collective: str, nbytes: float, root: int, message, algorithm, parts: int, path, slow, fail,
    accuracy: float,
) -> None:  # fmt: skip
    """Predicts one schedule, with a slow host or a failed link if you like."""
    from hrdma.topo.fabric_file import find
    from hrdma.topo.simulate import simulate as simulated
    from hrdma.units import in_bytes, in_seconds

    fabric, cost = find(text, rate, latency), _cost(message)
    factors = {}
    for given in slow:
        host, _, factor = given.partition("=")
        if not host.isdecimal() or not factor.replace(".", "", 1).isdecimal():
            raise ValueError(f"--slow {given!r} is not HOST=FACTOR, such as 3=2.5")
        factors[int(host)] = float(factor)
    schedule = _schedule(algorithm, path, collective, fabric, nbytes, root, parts, cost)
    with _progress() as progress:
        found = simulated(
            schedule, fabric, nbytes, cost, slow=factors, failed=fail, accuracy=accuracy,
            progress=lambda done, total: progress(schedule.name or "schedule", done, total),
        )  # fmt: skip
    busiest = int(found.utilisation.argmax()) if len(found.utilisation) else 0
    click.echo(
        f"{schedule.name or 'schedule'}: {schedule.collective} of {in_bytes(nbytes)} on {fabric.name}: "
        f"{in_seconds(found.seconds)}, {len(schedule.table)} transfers, {found.events} moments"
    )
    if busiest < 2 * len(fabric.links):
        a, b = fabric.ends(busiest)
        busy = found.utilisation[busiest]
        click.echo(
            f"  busiest link: {fabric.label(a.node)} to {fabric.label(b.node)}, {in_bytes(found.link_bytes[busiest])}, "
            + (f"{busy:.0%} of the time" if busy <= 1 else f"at {busy:.2f} times its rate")
        )
    last = int(found.finished.argmax())
    click.echo(
        f"  first rank done after {in_seconds(found.finished.min())}, last (rank {last}) {in_seconds(found.seconds)}"
    )


@command.command("draw")
@_with_fabric
@_with_collective
@_with_schedule
@click.option("--bare", is_flag=True, help="Only the fabric.")
@click.option("--round", "rounds", multiple=True, type=int, help="Only these rounds; may be repeated.")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="An SVG file.")
def draw(
    text: str, rate, latency, collective: str, nbytes: float, root: int, message, algorithm, parts: int, path, bare: bool,
    rounds: tuple[int, ...], output: str,
) -> None:  # fmt: skip
    """Draws the fabric, and the load on each link: of all rounds together, then of each."""
    from hrdma.topo.draw import draw as drawn
    from hrdma.topo.fabric_file import find

    if not output.endswith(".svg"):
        raise ValueError(f"pictures are SVG: {output} does not end in .svg")
    fabric = find(text, rate, latency)
    schedule = None
    if not bare:
        schedule = _schedule(algorithm, path, collective, fabric, nbytes, root, parts, _cost(message))
    Path(output).write_text(drawn(fabric, schedule, nbytes, rounds or None))


@command.command("holds")
@_with_fabric
@_with_collective
@_with_schedule
def holds(
    text: str, rate, latency, collective: str, nbytes: float, root: int, message, algorithm, parts: int, path
) -> None:
    """Who holds what after each round, for small cases."""
    from hrdma.topo.fabric_file import find
    from hrdma.topo.holdings import holdings

    fabric = find(text, rate, latency)
    click.echo(holdings(_schedule(algorithm, path, collective, fabric, nbytes, root, parts, _cost(message))))

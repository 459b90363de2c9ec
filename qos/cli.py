"""`hrdma qos`: show, plan, install, status, rotate, revert, serve, run."""

from __future__ import annotations

import dataclasses
import functools
import grp
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from hrdma.errors import HrdmaError, RefusedError, RequestError
from hrdma.qos import cgroup, dcb
from hrdma.qos.apply import Control, forget
from hrdma.qos.client import Client
from hrdma.qos.controller import Controller
from hrdma.qos.files import DIRECTORY, stem
from hrdma.qos.objects import handle_text
from hrdma.qos.plan import Op
from hrdma.qos.plan import command as tc_command
from hrdma.qos.policy import Policy, load
from hrdma.qos.proposal import candidates, crosses, difference, look, wish_of
from hrdma.qos.record import Record, holder
from hrdma.qos.state import chosen, counters
from hrdma.qos.status import Row, rows
from hrdma.qos.wire import Wire
from hrdma.units import rate_text, seconds_value

__all__ = ["command"]

EXIT_REFUSED = 3


def _careful(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives refusals their own exit code; other errors are the business of the `hrdma` command."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RefusedError as error:
            click.echo(f"hrdma: refused: {error}", err=True)
            sys.exit(EXIT_REFUSED)

    return call


class _Seconds(click.ParamType):
    name = "time"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, float):
            return value
        try:
            return seconds_value(value if not value.replace(".", "", 1).isdecimal() else f"{value}s")
        except ValueError as error:
            self.fail(str(error))


def _options(*wanted: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    known = {
        "dev": click.option("--dev", required=True, help="Network device."),
        "state": click.option(
            "--state", "directory", default=DIRECTORY, show_default=True, help="Folder of records and locks."
        ),
        "replace": click.option(
            "--replace",
            "replace_root",
            is_flag=True,
            help="Replace a root qdisc of somebody else; revert puts it back.",
        ),
        "anyway": click.option("--anyway", is_flag=True, help="Also loopback, and the device of an SSH session."),
        "lease": click.option(
            "--lease", type=_Seconds(), help="Give the device back after this time unless a controller renews it."
        ),
        "json": click.option("--json", "as_json", is_flag=True, help="Machine-readable."),
    }

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(wanted):
            function = known[name](function)
        return function

    return add


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Decides whose bytes leave this host first: priority bands for jobs at a network device.

    \b
    Exit codes:
        0  success; also where there was nothing to do
        1  the kernel refused, or the device or the controller is gone;
           what had been changed was undone
        2  wrong usage, or a wrong policy (the message names line and key)
        3  refused: no permission, somebody else's qdisc, another controller,
           a device that is not to be touched
      128 + n  run: the command was ended by signal n
    `hrdma qos run` otherwise gives the command's own exit code.

    install, rotate, revert, serve and run can be repeated. They need CAP_NET_ADMIN.
    """


def _load(path: str) -> Policy:
    try:
        return load(path)
    except OSError as error:
        raise click.UsageError(f"cannot read the policy: {error}") from None


@command.command()
@_options("dev", "state", "json")
@_careful
def show(dev: str, directory: str, as_json: bool) -> None:
    """What is on a device now, as tc commands, and what is recorded of it."""
    with Wire() as wire:
        _, have = look(wire, dev)
    record, pid = Record.load(directory, dev), holder(directory, dev)
    lines = [tc_command(Op("add", thing)) for thing in chosen(have)]
    settled = record.settled if record else None
    facts = {
        "dev": dev,
        "installed": settled and {"policy": settled.policy.policy, "kind": settled.kind, "rotation": settled.rotation},
        "half_done": bool(record and (record.settled is None or record.pending)),
        "lease": record.lease if record else 0.0,
        "process": pid,
        "commands": lines,
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    for line in lines:
        click.echo(line)
    if settled:
        click.echo(
            f"# {settled.policy.policy} by {settled.kind}, rotated {settled.rotation} times, shapes to {rate_text(settled.device.rate)}"
        )
    elif not lines:
        click.echo(f"# nothing but the kernel's default is on {dev}")
    if facts["half_done"]:
        click.echo("# a change was cut off; the next install, rotate or revert mends it")
    if pid:
        click.echo(f"# in the hands of process {pid}")


def _proposal(policy: Policy, dev: str, directory: str, replace_root: bool) -> tuple[str, list[str]]:
    """Back end and commands of an install, without doing any."""
    record = Record.load(directory, dev)
    settled = record.settled if record else None
    kinds = candidates(policy)
    with Wire() as wire:
        state, have = look(wire, dev, every_class=True)
    kind = settled.kind if settled and settled.kind in kinds else kinds[0]
    wish = wish_of(policy, kind, state)
    if not crosses(settled, wish):
        wish = wish_of(policy, kind, state, settled, classifier=settled.classifier if settled else "u32")
    tree = wish.tree
    lines = [tc_command(op) for op in difference(record if settled else None, have, wish, replace_root)]
    if tree.dcb and not (state.dcb and dcb.alike(tree.dcb, state.dcb)):
        lines += dcb.commands(tree.dcb)
    marked = record.marked if record else {}
    for path, priority in tree.marks(policy).items():
        if path not in marked or marked[path][0] != priority:
            lines.append(
                f"# sockets of cgroup {path} get priority {handle_text(priority)}; tc and dcb have no command for it"
            )
    return kind, lines


def _print_plan(policy: Policy, dev: str, directory: str, replace_root: bool, as_json: bool) -> None:
    kind, lines = _proposal(policy, dev, directory, replace_root)
    if as_json:
        click.echo(json.dumps({"dev": dev, "kind": kind, "commands": lines}))
        return
    for line in lines:
        click.echo(line)
    auto = " if this kernel has it" if policy.kind == "auto" else ""
    click.echo(f"# {len(lines)} changes of {dev} by back end {kind}{auto}" if lines else f"# nothing to do on {dev}")


@command.command(name="plan")
@click.argument("path", metavar="POLICY", type=click.Path(dir_okay=False))
@_options("dev", "state", "replace", "json")
@_careful
def plan_command(path: str, dev: str, directory: str, replace_root: bool, as_json: bool) -> None:
    """What install would do, as the tc and dcb commands that do the same. Changes nothing, needs no permission.

    Back end `auto` is planned as the first one that can do what the policy asks for; install takes the first of them that
    the kernel has. Bursts are rounded as tc does.
    """
    _print_plan(_load(path), dev, directory, replace_root, as_json)


@command.command()
@click.argument("path", metavar="POLICY", type=click.Path(dir_okay=False))
@_options("dev", "state", "replace", "anyway", "lease")
@click.option("--dry-run", is_flag=True, help="Print the plan, change nothing.")
@_careful
def install(
    path: str, dev: str, directory: str, replace_root: bool, anyway: bool, lease: float | None, dry_run: bool
) -> None:
    """Makes a device follow a policy. Rotations are by hand or by `serve`."""
    policy = _load(path)
    if dry_run:
        _print_plan(policy, dev, directory, replace_root, False)
        return
    with Control(dev, directory) as control:
        start = time.monotonic()
        count = control.install(policy, replace_root=replace_root, anyway=anyway, lease=lease or 0.0)
        took = time.monotonic() - start
        click.echo(f"{dev}: {policy.policy} by {control.installed.kind}, {count} changes in {took * 1e3:.0f} ms")


@command.command()
@_options("dev", "state")
@_careful
def rotate(dev: str, directory: str) -> None:
    """Moves every job on by one position, now; by way of the controller where one runs."""
    if holder(directory, dev):
        with Client(dev, directory) as client:
            click.echo(f"{dev}: {client.rotate()} changes by the controller")
        return
    with Control(dev, directory) as control:
        click.echo(f"{dev}: {control.rotate()} changes, rotated {control.installed.rotation} times")


@command.command()
@_options("dev", "state")
@click.option("--forget", "forget_it", is_flag=True, help="Leave what is there, and forget what was there before.")
@_careful
def revert(dev: str, directory: str, forget_it: bool) -> None:
    """Puts back what was on the device before the first install."""
    if forget_it:
        done = forget(dev, directory)
    else:
        with Control(dev, directory) as control:
            # A revert that was cut off, or a lease that is over, is dealt with by opening the device.
            done = control.revert()
    text = "forgotten" if forget_it else "as it was before"
    click.echo(f"{dev}: {text}" if done else f"{dev}: nothing is installed")


def _looks(dev: str, directory: str, interval: float) -> Iterator[tuple[str, list[Row]]]:
    """Title and rows, again and again; from the counters, which anybody may read."""
    record = Record.load(directory, dev)
    if record is None or record.settled is None:
        raise RefusedError(f"nothing is installed on {dev}")
    with Wire() as wire:
        at, before = time.monotonic(), counters(wire, record.settled.carrier)
        while True:
            time.sleep(interval)
            record = Record.load(directory, dev)
            wish = record.settled if record else None
            if wish is None:
                raise RequestError(f"what was installed on {dev} has been reverted")
            now, after = time.monotonic(), counters(wire, wish.carrier)
            title = f"{dev}: {wish.policy.policy} by {wish.kind}, rotated {wish.rotation} times"
            yield title, rows(wish, before, after, now - at)
            at, before = now, after


@command.command()
@_options("dev", "state", "json")
@click.option("--watch", is_flag=True, help="Go on until interrupted.")
@click.option("--interval", type=_Seconds(), default=1.0, show_default="1s", help="Time over which rates are taken.")
@_careful
def status(dev: str, directory: str, as_json: bool, watch: bool, interval: float) -> None:
    """Per job and band: bytes, rate, drops, backlog, share."""
    console = Console()
    for title, found in _looks(dev, directory, interval):
        if as_json:
            click.echo(json.dumps({"title": title, "jobs": [dataclasses.asdict(row) for row in found]}))
        else:
            table = Table("band", "job", "bytes", "rate", "drops", "backlog", "share", title=title)
            for row in found:
                cells = (row.nbytes, rate_text(round(row.rate)), row.drops, row.backlog, f"{row.share:.1%}")
                table.add_row(str(row.band), row.job, *map(str, cells))
            console.print(table)
        if not watch:
            return


@command.command()
@click.argument("path", metavar="POLICY", type=click.Path(dir_okay=False))
@_options("dev", "state", "replace", "anyway", "lease")
@click.option("--group", help="Group whose members may register jobs; without it root and this user alone.")
@_careful
def serve(
    path: str, dev: str, directory: str, replace_root: bool, anyway: bool, lease: float | None, group: str | None
) -> None:
    """The controller: installs, rotates, takes registrations, renews the lease; until SIGTERM. What is installed stays."""
    try:
        gid = grp.getgrnam(group).gr_gid if group else None
    except KeyError:
        raise click.UsageError(f"there is no group {group!r}") from None
    with Controller(
        dev, _load(path), directory=directory, group=gid, lease=lease or 0.0, replace_root=replace_root, anyway=anyway
    ) as controller:
        click.echo(f"{dev}: serving {controller.policy.policy} by {controller.control.installed.kind}")
        controller.run()


@command.command(context_settings={"ignore_unknown_options": True})
@_options("dev", "state")
@click.option("--job", required=True, help="Its band is this job's.")
@click.argument("words", metavar="-- CMD...", nargs=-1, required=True, type=click.UNPROCESSED)
@_careful
def run(dev: str, directory: str, job: str, words: tuple[str, ...]) -> None:
    """Starts any command in a job's band: every socket that it opens or accepts has the job's class."""
    if holder(directory, dev):
        with Client(dev, directory) as client:
            client.adopt(job)
            status = _call(words)
        sys.exit(status)
    record = Record.load(directory, dev)
    wish = record.settled if record else None
    if wish and wish.policy.policy == "fifo":  # all jobs are alike
        sys.exit(_call(words))
    if wish is None or job not in wish.tree.classes:
        known = ", ".join(wish.tree.classes) if wish else "nothing is installed"
        raise RefusedError(f"no job {job!r} on {dev}: {known}; with `hrdma qos serve` any job can be started")
    if wish.by_packet:
        raise RefusedError(
            f"back end {wish.kind!r} at {wish.policy.direction} knows jobs by their packets alone; match the job by port"
        )
    prefix = f"{stem(dev)}-"
    before = cgroup.enter(prefix + job, wish.tree.classes[job], os.getpid())
    try:
        status = _call(words)
    finally:
        cgroup.leave(os.getpid(), before)
        cgroup.sweep(prefix)
    sys.exit(status)


def _call(words: tuple[str, ...]) -> int:
    """Exit code of a command, as a shell gives it; SIGINT and SIGTERM are for it."""
    try:
        child = subprocess.Popen(words)
    except OSError as error:
        raise HrdmaError(f"cannot start {words[0]!r}: {error.strerror}") from None
    before = {number: signal.signal(number, lambda n, _: child.send_signal(n)) for number in (signal.SIGTERM,)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code

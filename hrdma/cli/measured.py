"""`hrdma topo compare --measure`: predictions beside what a lab of the fabric measures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hrdma.bench.fabrics import Measurement
    from hrdma.topo.cost import Cost
    from hrdma.topo.fabric import Fabric
    from hrdma.topo.planner import Candidate

__all__ = ["like_lab", "show", "verdict"]


def like_lab(name: str, text: str, rate: float | None, latency: float | None) -> Fabric:
    """The fabric that a user names, with links as the lab's are, where neither the user nor a file says others."""
    from hrdma.lab.lab import Lab
    from hrdma.topo.fabric_file import find

    lab = Lab.find(name)
    if text.endswith(".toml") or Path(text).is_file():
        return find(text, rate, latency)
    nic = lab.nodes[0]["nics"][0]
    made = find(text, rate, latency, usual=(nic["rate_bit_s"], nic["latency"]))
    return replace(made, links=tuple(link._replace(burst=nic["burst"]) for link in made.links))


def verdict(found: Sequence[Measurement]) -> str:
    """What was planned (the first) beside the fastest of those that know nothing of the fabric; empty: there is none."""
    from hrdma.topo.algorithms.on_fabric import lookup

    flat = min((one for one in found if lookup(one.algorithm).flat), key=lambda one: one.measured, default=None)
    if flat is None:
        return ""
    ratio = found[0].measured / flat.measured
    return f"planned: {found[0].algorithm}; it took {ratio:.2f} of the time of the best flat one, {flat.algorithm}"


def show(
    fabric: Fabric, name: str, collective: str, nbytes: float, cost: Cost | None, names: tuple[str, ...], rounds: int, as_json: bool,
    progress: Callable[[str, int, int], None],
) -> None:  # fmt: skip
    """Predicts, runs, and prints both. Without a cost it is found out in the lab, before.

    Raises
    ------
    ValueError
        Another collective than allreduce, a size that is no whole number of float32, an unknown algorithm.
    RuntimeError
        The lab is of another fabric, or the job in it failed.
    """
    from hrdma.bench.fabrics import calibrated, measure, payload, plain
    from hrdma.lab.lab import Lab
    from hrdma.topo.planner import compare
    from hrdma.units import in_bytes, in_seconds

    if collective != "allreduce":
        raise ValueError(f"--measure runs allreduce, not {collective}")
    if nbytes < 4 or nbytes % 4:
        raise ValueError(f"--measure sums float32: {nbytes:g} bytes are no whole number of them")
    lab = Lab.find(name)
    cost = cost or calibrated(lab, fabric)
    seen, refused = compare(
        collective, payload(fabric), nbytes, cost, names=names or None, simulated=True, progress=progress
    )
    listed: list[Candidate] = []  # of each algorithm its best number of parts
    for candidate in seen:
        if candidate.algorithm not in [one.algorithm for one in listed]:
            listed.append(candidate)
    found = measure(lab, fabric, [(int(nbytes), candidate) for candidate in listed], rounds=rounds)
    if as_json:
        document = {"fabric": fabric.name, "digest": fabric.digest(), "collective": collective, "nbytes": nbytes}
        click.echo(json.dumps(document | {"measurements": plain(found), "refused": refused}, indent=2))
        return
    click.echo(f"{collective} of {in_bytes(nbytes)} on {fabric}")
    click.echo(
        f"{'algorithm':14}{'parts':>6}{'predicted':>11}{'measured':>11}{'off by':>8}{'per NIC':>12}{'lab':>6}{'busy':>6}  carried by"
    )
    for one in found:
        click.echo(
            f"{one.algorithm:14}{one.parts:6}{in_seconds(one.predicted):>11}{in_seconds(one.measured):>11}{one.off:+8.0%}"
            f"{in_bytes(one.sent):>12}{one.lab:6.0%}{one.busy:6.0%}  {one.carriers}"
        )
    if text := verdict(found):
        click.echo(text)
    click.echo("lab: this job's share of the processors, busy: with whatever else they did")
    click.echo("shared memory carried nothing between hosts; every result was right")
    for algorithm, why in refused:
        click.echo(f"{algorithm}: {why}", err=bool(names))

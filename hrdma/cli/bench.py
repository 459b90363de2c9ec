"""`hrdma bench`: the options; the measuring is in hrdma.bench, run by every rank."""

from __future__ import annotations

import sys
from typing import Any

import click

from hrdma.bench.cases import CASES
from hrdma.bench.options import Options
from hrdma.bench.sizes import parse_size
from hrdma.types import DTYPES, OPS

__all__ = ["command"]


class _Size(click.ParamType):
    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


SIZE = _Size()
HELP = f"""Measures CASE on ranks of this host, or on the job in which it is started: under hrdma run, torchrun,
mpiexec or srun the job's ranks take part and -n is ignored.

CASE is one of {", ".join(CASES)}.

Prints the columns of nccl-tests: size and count of the larger buffer of a rank, type, redop, root, time of one
operation (median of the rounds, the slowest rank counts), algorithm and bus bandwidth, and how many elements of all
ranks were wrong. pingpong and bandwidth are between 2 ranks and give the time of one message; bandwidth keeps several in flight.

Every row is checked: one more operation runs on known values, and the result is compared with what numpy computes.

\b
hrdma bench allreduce -n 4 -b 8 -e 256M
HRDMA_TRANSPORT=tcp hrdma bench pingpong -e 64K
mpiexec -n 8 hrdma bench alltoall -d int8 --json

\b
Exit codes:
    0  all results were right
    1  a result was wrong, or the transport failed
    2  wrong usage: an option, an HRDMA_* setting, or a job that does not fit
  124  the time of --timeout was over
  128 + n  a rank, or the command itself, was ended by signal n
"""


@click.command("bench", help=HELP)
@click.argument("case", metavar="CASE", type=click.Choice(list(CASES)))
@click.option("-n", "--ranks", default=2, show_default=True, type=click.IntRange(1), help="How many ranks to start.")
@click.option("-b", "--begin", default="8", show_default=True, type=SIZE, help="Smallest size: bytes, or K, M, G.")
@click.option("-e", "--end", default="256M", show_default=True, type=SIZE, help="Largest size.")
@click.option("-f", "--factor", default=4, show_default=True, type=click.IntRange(2), help="From one size to the next.")
@click.option(
    "-i", "--iters", default=0, type=click.IntRange(0), help="Iterations of a round.  [default: enough for 0.1 s]"
)
@click.option(
    "-w", "--warmup", default=5, show_default=True, type=click.IntRange(1), help="Iterations before, at most."
)
@click.option("-r", "--rounds", default=5, show_default=True, type=click.IntRange(1), help="Rounds of each size.")
@click.option(
    "-d",
    "--dtype",
    default="float32",
    show_default=True,
    metavar="TYPE",
    type=click.Choice([*DTYPES, "all"]),
    help=f"Element type: {', '.join(DTYPES)}, or all.",
)
@click.option(
    "-o",
    "--op",
    default="sum",
    show_default=True,
    metavar="OP",
    type=click.Choice([*OPS, "all"]),
    help=f"Reduction: {', '.join(OPS)}, or all.",
)
@click.option("--root", default=0, show_default=True, type=click.IntRange(0), help="Root of those that have one.")
@click.option(
    "--place",
    default="",
    metavar="in|out",
    type=click.Choice(["", "in", "out"]),
    help="Result in the memory of the input, or apart.  [default: in for allreduce, reduce, broadcast]",
)
@click.option(
    "--memory",
    default="registered",
    show_default=True,
    type=click.Choice(["registered", "plain"]),
    help="Buffers from hrdma.empty, or from numpy.empty.",
)
@click.option("--deterministic", is_flag=True, help="Reduce in rank order, whatever the algorithm would have been.")
@click.option("--check/--no-check", default=True, show_default=True, help="Check the results.")
@click.option("--json", is_flag=True, help="Print one JSON document instead of the table.")
@click.option(
    "--progress/--no-progress",
    default=None,
    help="Say on stderr what takes long.  [default: where stderr is a terminal]",
)
@click.option(
    "--timeout",
    default=600.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Seconds for everything; not inside a job.",
)
def command(ranks: int, timeout: float, progress: bool | None, **given: Any) -> None:
    if progress is None:
        progress = sys.stderr.isatty()
    options = Options(progress=progress, **given)
    from hrdma.config import Config
    from hrdma.world import world_from_env

    config = Config.load()
    if world_from_env(config).size > 1:
        from hrdma.bench.worker import main

        sys.exit(main(options))
    try:
        options.validate(ranks)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    from hrdma.launch import run

    argv = [sys.executable, "-m", "hrdma.bench.worker", options.to_json()]
    sys.exit(run(argv, ranks=ranks, timeout=timeout, prefix=False))

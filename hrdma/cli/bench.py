"""`hrdma bench`: the options; the measuring is in hrdma.bench, run by every rank."""

from __future__ import annotations

import os
import sys

import click

from hrdma.bench.cases import CASES
from hrdma.bench.sizes import parse_size
from hrdma.types import DTYPES, OPS

__all__ = ["command"]


class _Size(click.ParamType):
    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


SIZE = _Size()


@click.command("bench")
@click.argument("case", metavar="CASE", type=click.Choice(sorted(CASES)))
@click.option("-n", "--ranks", default=2, show_default=True, type=click.IntRange(1), help="How many ranks (ignored inside a job).")
@click.option("-b", "--begin", default="8", show_default=True, type=SIZE, help="Smallest size: bytes, or with K, M, G (1024).")
@click.option("-e", "--end", default="256M", show_default=True, type=SIZE, help="Largest size.")
@click.option("-f", "--factor", default=4, show_default=True, type=click.IntRange(2), help="Factor from one size to the next.")
@click.option("-i", "--iters", default=0, type=click.IntRange(0), help="Iterations per size; 0: enough for about 0.2 s.")
@click.option("-w", "--warmup", default=5, show_default=True, type=click.IntRange(0), help="Iterations before, not counted.")
@click.option("-r", "--rounds", default=3, show_default=True, type=click.IntRange(1), help="Rounds; the median is shown.")
@click.option("-d", "--dtype", default="float32", show_default=True, type=click.Choice(DTYPES))
@click.option("-o", "--op", default="sum", show_default=True, type=click.Choice(OPS))
@click.option("--root", default=0, show_default=True, type=click.IntRange(0))
@click.option(
    "--memory",
    default="registered",
    show_default=True,
    type=click.Choice(["registered", "plain"]),
    help="Buffers from hrdma.empty() or from numpy.",
)
@click.option("--deterministic", is_flag=True, help="One association in rank order.")
@click.option("--check/--no-check", default=True, show_default=True, help="Recompute and compare every result.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Also write the rows to this file; - for standard output only.")
@click.option("--timeout", default=600.0, show_default=True, type=click.FloatRange(0, min_open=True), help="Seconds for everything.")
def command(case: str, ranks: int, timeout: float, begin: int, end: int, **options: object) -> None:
    """Measures CASE on ranks of this host, or on the job it is started in (under hrdma run, torchrun, mpiexec, srun).

    Prints nccl-tests columns: size and count of the buffer, type, redop, root, median time, algorithm and bus bandwidth, wrong
    elements. Exit code 1 when anything was wrong.
    """
    if end < begin:
        raise click.UsageError(f"-e {end} is below -b {begin}")
    argv = [case, f"--begin={begin}", f"--end={end}", *_as_argv(options)]
    from hrdma.world import world_from_env

    if world_from_env().size > 1:
        from hrdma.bench.worker import main

        sys.exit(main(argv))
    from hrdma.launch import run

    if CASES[case].pair and ranks != 2:
        raise click.UsageError(f"{case} is between 2 ranks, not {ranks}")
    environment = {key: os.environ[key] for key in ("HRDMA_TOKEN",) if key in os.environ}
    sys.exit(run([sys.executable, "-m", "hrdma.bench.worker", *argv], ranks=ranks, timeout=timeout, prefix=False, env=environment))


def _as_argv(options: dict[str, object]) -> list[str]:
    argv = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            argv.append(flag)
        elif value is not False and value is not None:
            argv.append(f"{flag}={value}")
    return argv

"""Reductions of all element types beside float32, per byte: `hrdma bench allreduce --dtype all`, in turns, as ratios.

    python benchmarks/bench_dtypes.py                               2 ranks, shared memory; 256 KiB, 4 MiB, 64 MiB
    python benchmarks/bench_dtypes.py --transport tcp --rounds 3
    python benchmarks/bench_dtypes.py --ranks 4 --op max

A round measures every size, and of each size every type in turn; a figure is the median of the rounds of a type's time over
float32's of the same bytes and the same round, with the range. Above 1 is slower. All results are checked.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from statistics import median

from beside.report import busy_cores

from hrdma.bench.sizes import parse_size, show_size

LIMIT = 600.0  # seconds for one size
Times = dict[tuple[str, int], list[float]]  # of a type and bytes: microseconds of each round


def measure(size: str, options: argparse.Namespace) -> list[dict]:
    """The rows of `hrdma bench` at one size, one for each type.

    Raises
    ------
    RuntimeError
        It failed, or a result was wrong.
    """
    command = [sys.executable, "-m", "hrdma", "bench", "allreduce", "--ranks", str(options.ranks), "--op", options.op]
    command += ["--begin", size, "--end", size, "--dtype", "all", "--iters", str(options.iters)]
    command += ["--rounds", "3", "--json"]
    env = os.environ | {"HRDMA_TRANSPORT": options.transport, "HRDMA_REQUIRE": options.transport}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"{size}: status {done.returncode}, wrong results")
    return json.loads(done.stdout)["rows"]


def table(times: Times, sizes: list[int]) -> str:
    """Markdown: a line for each type, float32 first in microseconds, the others as ratios to it."""
    types = sorted({name for name, _ in times}, key=lambda name: (name != "float32", name))
    lines = ["| | " + " | ".join(show_size(size) for size in sizes) + " |", "|---|" + "---:|" * len(sizes)]
    for name in types:
        cells = []
        for size in sizes:
            mine, base = times[name, size], times["float32", size]
            if name == "float32":
                cells.append(f"{median(mine):.0f} us, {size / median(mine) / 1e3:.1f} GB/s")
            else:
                ratios = [one / other for one, other in zip(mine, base)]
                cells.append(f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["256K", "4M", "64M"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--op", default="sum", choices=("sum", "prod", "min", "max"))
    parser.add_argument("--transport", choices=("shm", "tcp"), default="shm")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iters", type=int, default=0, help="calls in a measurement (default: enough for 0.1 s)")
    options = parser.parse_args()
    sizes = [parse_size(size) for size in options.sizes]
    busy = busy_cores()
    times: Times = defaultdict(list)
    for number in range(options.rounds):
        for size in options.sizes:
            print(f"# round {number + 1}, {size}", file=sys.stderr, flush=True)
            for row in measure(size, options):
                times[row["type"], row["size"]].append(row["time_us"])
    print(f"allreduce, {options.op}, {options.ranks} ranks, {options.transport}, {options.rounds} rounds;", end=" ")
    print(f"other work kept {busy:.1f} cores busy as it began\n\n{table(times, sizes)}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
        sys.exit(f"bench_dtypes: {error}")

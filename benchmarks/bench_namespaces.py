"""TCP between two network namespaces beside TCP over loopback: `hrdma bench` in both, in turns. Needs root.

    sudo python benchmarks/bench_namespaces.py                      8 B, 64 KiB, 1 MiB, 16 MiB; five rounds
    sudo python benchmarks/bench_namespaces.py --cases allreduce --sizes 64M

The namespaces are two hosts of a lab joined by one link (veth), whose rate is taken off, so that nothing limits it but the
processors. Ranks take these for containers of one machine, and wait as they do on loopback. Medians of rounds; the ratio is
that of the same round, above 1 where the namespaces are slower. All results are checked.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from beside.across import joined
from beside.report import busy_cores

from hrdma.bench.sizes import parse_size, show_size

CASES = ("pingpong", "bandwidth", "allreduce")
LIMIT = 120.0  # seconds for one case at one size
HRDMA = [sys.executable, "-m", "hrdma"]
ENV = {  # as between containers of one machine, not as a lab has it for hosts
    "HRDMA_TRANSPORT": "tcp",
    "HRDMA_REQUIRE": "tcp",
    "HRDMA_SPIN_US": "-1",
    "HRDMA_TCP": os.environ.get("HRDMA_TCP") or "cc=auto",
}


def measure(case: str, size: str, prefix: Sequence[str], iters: int) -> float:
    """Microseconds of one operation, as `hrdma bench` says; RuntimeError where it failed or a result was wrong."""
    command = [*prefix, *HRDMA, "bench", case, "--begin", size, "--end", size, "--rounds", "3", "--json"]
    command += ["--iters", str(iters)]
    done = subprocess.run(command, env=os.environ | ENV, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"{case}, {size}: status {done.returncode}, wrong results")
    return json.loads(done.stdout)["rows"][0]["time_us"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--sizes", nargs="+", default=["8", "64K", "1M", "16M"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iters", type=int, default=0, help="calls in a measurement (default: enough for 0.1 s)")
    parser.add_argument("--name", default=f"unlimited-{os.getpid()}", help="of the lab")
    options = parser.parse_args()
    ways = {"loopback": [], "namespaces": [*HRDMA, "lab", "run", "--name", options.name, "--no-prefix", "--"]}
    cells = [(case, size) for case in options.cases for size in options.sizes]
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    busy = busy_cores()
    with joined(options.name):
        for number in range(options.rounds):
            print(f"# round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
            for case, size in cells:
                for way, prefix in ways.items():
                    found[case, size, way].append(measure(case, size, prefix, options.iters))
    print(f"{options.rounds} rounds; other work kept {busy:.1f} cores busy as it began; us\n")
    print("| | loopback | two namespaces | ratio |\n|---|---:|---:|---:|")
    for case, size in cells:
        here, there = (found[case, size, way] for way in ways)
        ratios = sorted(after / before for before, after in zip(here, there))
        spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"| {case}, {show_size(parse_size(size))} | {median(here):.1f} | {median(there):.1f} | {spread} |")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
        sys.exit(f"bench_namespaces: {error}")

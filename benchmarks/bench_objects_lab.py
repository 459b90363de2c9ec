"""Objects between hosts of a lab, beside Gloo, MPI, Ray and Dask on the same links. Needs root.

    sudo python benchmarks/bench_objects_lab.py                       8 hosts of 100 Mbit/s, 32 MiB, hrdma alone
    sudo python benchmarks/bench_objects_lab.py --hosts 4 --sizes 1K 32K 1M 32M --peers hrdma gloo mpich ray dask
    sudo python benchmarks/bench_objects_lab.py --stagger 0.3 --peers hrdma gloo mpich

Every host has one object (broadcast: host 0 alone), put before the clock starts. broadcast: all others have it; gather: host
0 has all; reduce: host 0 has the sum; allreduce: all have. The clock is the slowest host's. With --stagger, host i's object
is there, or its receiver asks, i times so many seconds after the start; the time is counted from the start too. Bound: the
bytes that the busiest link must carry over its rate less headers, and what --stagger adds. Every result is checked in full.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from beside.environments import Unavailable
from beside.report import busy_share, ticks
from objects_groups import PEERS, Group

from hrdma.bench.sizes import parse_size
from hrdma.lab.lab import Lab
from hrdma.topo.fabrics import parse, rate_bit_s

OPERATIONS = ("broadcast", "gather", "reduce", "allreduce")
SHARE = 1448 / 1514  # payload of a full frame


def bound(operation: str, nbytes: int, hosts: int, rate: float, stagger: float) -> float:
    """Seconds that the busiest link needs at least, when the last host comes late."""
    wire = 8 * nbytes / (rate * SHARE)
    if operation == "gather":  # what came before the last one is there by then
        return max((hosts - 1) * wire, (hosts - 1) * stagger + wire if stagger else 0.0)
    return (hosts - 1) * stagger + wire * (2 if operation == "allreduce" and not stagger else 1)


def measure(name: str, lab: Lab, cells: list[tuple[str, int]], options: argparse.Namespace) -> dict[str, Any]:
    """Of each cell the seconds of its rounds; or why the peer is left out."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            group = Group(name, lab, folder, print)
        except Unavailable as why:
            return {"left out": str(why)}
        try:
            before = ticks()
            for operation, nbytes in cells:
                times = [group.measure(operation, max(1, nbytes // 4), options.stagger) for _ in range(options.rounds)]
                found[f"{operation} {nbytes}"] = times
                print(f"  {name:6} {operation:10} {nbytes:>9} B  {shown(times)}", flush=True)
            found["busy"] = busy_share(before, ticks())
        except (Unavailable, OSError) as why:
            found["failed"] = str(why)
        finally:
            group.close()
    return found


def shown(times: list[float]) -> str:
    return f"{statistics.median(times) * 1e3:.1f} ms ({min(times) * 1e3:.1f} to {max(times) * 1e3:.1f})"


def table(all_: dict[str, dict[str, Any]], cells: list[tuple[str, int]], options: argparse.Namespace) -> str:
    """Markdown: medians in ms, and how often the time that the links need; beside the first row the ratio to each other."""
    rate, lines = rate_bit_s(options.rate), []
    names = [name for name in all_ if "left out" not in all_[name]]
    lines.append(f"| {options.hosts} hosts of {options.rate} | bound | " + " | ".join(names) + " |")
    lines.append("|---|---:|" + "---:|" * len(names))
    for operation, nbytes in cells:
        least = bound(operation, nbytes, options.hosts, rate, options.stagger)
        row = [f"{operation}, {nbytes} B", f"{least * 1e3:.1f} ms"]
        medians = {
            name: statistics.median(times) for name in names if (times := all_[name].get(f"{operation} {nbytes}"))
        }
        first = medians.get(names[0]) if names else None
        for name in names:
            if name not in medians:
                row.append("failed")
            elif name == names[0] or first is None:
                row.append(f"{medians[name] * 1e3:.1f} ms, {medians[name] / least:.2f}x bound")
            else:
                row.append(f"{medians[name] * 1e3:.1f} ms ({medians[name] / first:.2f}x)")
        lines.append("| " + " | ".join(row) + " |")
    for name, found in all_.items():
        lines += [f"\n{name} {key}: {found[key]}" for key in ("left out", "failed") if key in found]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--sizes", nargs="+", default=["32M"])
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=["hrdma"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stagger", type=float, default=0.0, help="seconds between arrivals")
    parser.add_argument("--name", default=f"objects-{os.getpid()}", help="of the lab")
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that labs and processes end on the way out
    cells = [(operation, parse_size(size)) for operation in options.operations for size in options.sizes]
    found: dict[str, dict[str, Any]] = {}
    fabric = parse(f"star:{options.hosts}", rate=options.rate, latency=0)
    for name in options.peers:  # a lab each: what one leaves is gone
        with Lab.up(fabric, name=options.name) as lab:
            found[name] = measure(name, lab, cells, options)
    print("\n" + table(found, cells, options))
    busy = {name: f"{one['busy']:.0%}" for name, one in found.items() if "busy" in one}
    print(f"\nprocessors busy: {busy}")
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), "found": found}, indent=1))
    return 1 if "failed" in found.get("hrdma", {}) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Objects between hosts of a lab, beside Gloo, MPI, Ray and Dask on the same links. Needs root.

    sudo python benchmarks/bench_objects_lab.py                       8 hosts of 100 Mbit/s, 32 MiB, hrdma alone
    sudo python benchmarks/bench_objects_lab.py --hosts 4 --sizes 1K 32K 1M 32M --peers hrdma gloo mpich ray dask
    sudo python benchmarks/bench_objects_lab.py --stagger 0.3 --peers hrdma gloo mpich
    sudo python benchmarks/bench_objects_lab.py --sizes 1K --row 20 --peers hrdma ray

Every host has one object (broadcast: host 0 alone), put before the clock starts. broadcast: all others have it; gather: host
0 has all; reduce: host 0 has the sum; allreduce: all have. The clock is the slowest host's. With --stagger, host i's object
is there, or its receiver asks, i times so many seconds after the start; the time is counted from the start too. Bound: the
bytes that the busiest link must carry over its rate less headers, and what --stagger adds. With --row, so many operations
follow each other on each host without a pause, and the time is that of one. Every result is checked in full.

All peers are up in the same lab, and take turns: in each round, each cell is measured of one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from beside.environments import Unavailable
from beside.report import busy_share, ticks
from objects_groups import PEERS, Group

from hrdma.bench.sizes import parse_size
from hrdma.lab.lab import Lab
from hrdma.topo.fabrics import parse, rate_bit_s

IDLE = 3.0  # seconds for which it is seen what peers take that wait
OPERATIONS = ("broadcast", "gather", "reduce", "allreduce")
SHARE = 1448 / 1514  # payload of a full frame


def bound(operation: str, nbytes: int, hosts: int, rate: float, stagger: float) -> float:
    """Seconds that the busiest link needs at least, when the last host comes late."""
    wire = 8 * nbytes / (rate * SHARE)
    if operation == "gather":  # what came before the last one is there by then
        return max((hosts - 1) * wire, (hosts - 1) * stagger + wire if stagger else 0.0)
    return (hosts - 1) * stagger + wire * (2 if operation == "allreduce" and not stagger else 1)


class Peer:
    """One that takes its turns, and what was found of it."""

    def __init__(self, name: str, lab: Lab, folder: str) -> None:
        self.name = name
        self.found: dict[str, Any] = {}
        self._busy, self._all = 0, 0
        Path(folder).mkdir()
        try:
            self.group: Group | None = Group(name, lab, folder, print)
        except Unavailable as why:
            self.group, self.found["left out"] = None, str(why)

    def turn(self, operation: str, nbytes: int, stagger: float, row: int) -> None:
        """Measures an operation once; a peer that fails has no more turns."""
        if self.group is None:
            return
        total, idle = ticks()
        try:
            seconds = self.group.measure(operation, max(1, nbytes // 4), stagger, row)
        except (Unavailable, OSError) as why:
            self.found["failed"] = str(why)
            self.close()
            return
        self.found.setdefault(f"{operation} {nbytes}", []).append(seconds)
        self._busy, self._all = self._busy - total + idle, self._all - total
        total, idle = ticks()
        self._busy, self._all = self._busy + total - idle, self._all + total
        self.found["busy"] = self._busy / max(1, self._all)
        print(f"  {self.name:6} {operation:10} {nbytes:>9} B  {seconds * 1e3:9.1f} ms", flush=True)

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
            self.group = None


def measure(lab: Lab, cells: list[tuple[str, int]], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Of each peer, for each cell, the seconds of its rounds; or why there are none. Peers take turns."""
    peers: list[Peer] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in options.peers:
                peers.append(Peer(name, lab, f"{folder}/{name}"))
            before = ticks()
            time.sleep(IDLE)
            print(f"all wait: processors busy {busy_share(before, ticks()):.0%}", flush=True)
            for _ in range(options.rounds):
                for operation, nbytes in cells:
                    for peer in peers:
                        peer.turn(operation, nbytes, options.stagger, options.row)
        finally:
            for peer in peers:
                peer.close()
    return {peer.name: peer.found for peer in peers}


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
    parser.add_argument("--row", type=int, default=1, help="operations without a pause between them")
    parser.add_argument("--name", default=f"objects-{os.getpid()}", help="of the lab")
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    if options.row > 1 and (options.stagger or not {"hrdma", "ray"}.issuperset(options.peers)):
        parser.error("--row: of hrdma and ray alone, without --stagger")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that labs and processes end on the way out
    cells = [(operation, parse_size(size)) for operation in options.operations for size in options.sizes]
    with Lab.up(parse(f"star:{options.hosts}", rate=options.rate, latency=0), name=options.name) as lab:
        found = measure(lab, cells, options)
    print("\n" + table(found, cells, options))
    busy = {name: f"{one['busy']:.0%}" for name, one in found.items() if "busy" in one}
    print(f"\nprocessors busy: {busy}")
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), "found": found}, indent=1))
    return 1 if "failed" in found.get("hrdma", {}) else 0


if __name__ == "__main__":
    sys.exit(main())

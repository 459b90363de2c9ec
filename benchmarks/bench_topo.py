"""Prints the figures of the planner beside those that are published or derived: no network, one process.

    python benchmarks/bench_topo.py [--nbytes 575MB] [--quick]

Times in W/B are times for the whole vector through one NIC. Links alone: no work of the cores, no latency; elsewhere the
cost of a network of 10 Gbit/s (`hrdma.topo.cost.NETWORK`). --quick leaves out what takes longer than some seconds.

* steps of MultiTree per phase;
* allreduce on BCube and torus: closed form and simulation;
* growth from 16 to 1024 servers, two levels kept: HiPS and ring on BCube;
* how much less HiPS takes than the flat algorithms on the same fabric;
* how long planning, proving and simulating take.
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable

from hrdma.topo.algorithms import multitree
from hrdma.topo.algorithms.on_fabric import lookup
from hrdma.topo.cost import NETWORK, Cost
from hrdma.topo.fabrics import parse, quantity
from hrdma.topo.lower import lower
from hrdma.topo.planner import on_fabric
from hrdma.topo.simulate import WIRES, simulate

STEPS = {"torus:2x2": 2, "torus:4x4": 5, "torus:8x8": 17, "mesh:4x4": 10, "mesh:8x8": 32, "bcube:3,2": 6, "bcube:4,2": 8,
         "bcube:2,3": 3}  # fmt: skip
UNITS = [
    ("bml", "bcube:3,2", 0.889), ("ring", "bcube:3,2", 1.778), ("hips-mesh", "bcube:3,2", 1.778),
    ("multitree", "bcube:3,2", 1.333), ("bml", "bcube:4,2", 0.938), ("multitree", "bcube:4,2", 1.0),
    ("bml", "bcube:2,3", 0.583), ("multitree", "bcube:2,3", 0.75), ("torus", "torus:4x4", 0.469),
    ("multitree", "torus:4x4", 0.625), ("ring", "torus:4x4", 1.875), ("torus", "torus:8x8", 0.492),
    ("multitree", "torus:8x8", 0.531), ("ring", "torus:8x8", 1.969), ("multitree", "mesh:4x4", 1.25),
    ("multitree", "mesh:8x8", 1.0),
]  # fmt: skip
GROWTH = ("bcube:4,2", "bcube:8,2", "bcube:16,2", "bcube:32,2")
FLAT = ("server-1", "direct", "ring")


def seconds(name: str, fabric: str, nbytes: float, cost: Cost, latency: float = 1e-6) -> float:
    """Simulated; exact where that is quick."""
    made = parse(fabric, latency=latency)
    schedule = lookup(name).build("allreduce", made, 1, 0, None)
    return simulate(schedule, made, nbytes, cost, accuracy=0.0 if made.ranks <= 64 else 0.01).seconds


def closed(name: str, fabric: str, nbytes: float, cost: Cost) -> float:
    made = parse(fabric)
    return lookup(name).work("allreduce", made, nbytes).seconds(made.ranks, on_fabric(cost, made))


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def steps() -> None:
    print("MultiTree, steps per phase      found  derived")
    for fabric, derived in STEPS.items():
        print(f"  {fabric:28} {multitree.grow(parse(fabric))[-1][0] + 1:6} {derived:8}")


def units(nbytes: float) -> None:
    print("\nallreduce in W/B, links alone   closed form  simulated  derived")
    for name, fabric, derived in UNITS:
        made = parse(fabric)
        form = lookup(name).work("allreduce", made, nbytes).per_nic / nbytes
        found = seconds(name, fabric, nbytes, WIRES, 0.0) / (nbytes * 8 / made.nic_rate)
        print(f"  {name:10} {fabric:18} {form:12.3f} {found:10.3f} {derived:8.3f}")
    print(
        "  MultiTree counts on steps in lockstep: at the switches of a BCube flows of different steps meet, and cost time."
    )


def growth(quick: bool) -> None:
    print("\ngrowth from 16 to 1024 servers, BCube of 2 levels (published: HiPS 6.5 %, ring 44.6 %)")
    print("  gradient     algorithm   " + "".join(f"{fabric:>13}" for fabric in GROWTH) + "    growth  simulated")
    for nbytes in (25e6, 100e6, 575e6):
        for name in ("bml", "hips-mesh", "ring"):
            times = [closed(name, fabric, nbytes, NETWORK) for fabric in GROWTH]
            line = f"  {nbytes / 1e6:5.0f} MB     {name:12}" + "".join(f"{t * 1e3:10.1f} ms" for t in times)
            line += f" {times[-1] / times[0] - 1:9.1%}"
            if not quick:
                first, last = (seconds(name, GROWTH[end], nbytes, NETWORK) for end in (0, -1))
                line += f" {last / first - 1:9.1%}"
            print(line, flush=True)
    print(
        "  The bytes alone grow by 6.6 %: (N - 1) / N. What the ring adds is the cost of 2 (N - 1) steps, so its growth"
    )
    print("  depends on the gradient's size against the time of a step.")


def reductions(nbytes: float) -> None:
    print("\nless time than flat algorithms on the same fabric (published: BCube 37.5 to 61.9 %, torus 49.6 to 66.4 %)")
    print(
        "                          " + "".join(f"{name:>12}" for name in FLAT) + "   (direct: every rank serves 1 / N)"
    )
    for name, fabrics in (("bml", ("bcube:3,2", "bcube:4,2", "bcube:8,2")), ("hips-mesh", ("bcube:4,2",)),
                          ("torus", ("torus:4x4", "torus:8x8")), ("hips-ring", ("torus:4x4",))):  # fmt: skip
        for fabric in fabrics:
            own = seconds(name, fabric, nbytes, NETWORK)
            shown = "".join(f"{1 - own / seconds(flat, fabric, nbytes, NETWORK):12.1%}" for flat in FLAT)
            print(f"  {name:10} {fabric:12}  {shown}", flush=True)


def scale(quick: bool) -> None:
    print("\nhow long it takes                               time      limit")
    for name, fabric in (("bml", "bcube:8,4"), ("torus", "torus:16x16x16")):
        made = parse(fabric)

        def program(name=name, made=made) -> None:
            lower(lookup(name).build("allreduce", made, 1, 0, 77), 77, 25_000_000, 4, in_place=True)

        best = min(timed(program) for _ in range(5))
        tracemalloc.start()
        program()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        what = f"one rank of 4096, {name} on {fabric}"
        print(f"  {what:44}{best * 1e3:8.1f} ms    100 ms, {peak / 1e6:.1f} MB of 50 MB")
    for name, fabric in (("bml", "bcube:16,2"), ("torus", "torus:16x16"), ("ring", "star:256"), ("direct", "star:256")):
        schedule = lookup(name).build("allreduce", parse(fabric), 1, 0, None)
        print(
            f"  {f'proof of {len(schedule.table)} transfers, {name} on {fabric}':44}{timed(schedule.check):8.1f} s      10 s"
        )
    if quick:
        return
    for name, fabric in (("bml", "bcube:32,2"), ("ring", "bcube:32,2"), ("torus", "torus:32x32")):
        took = timed(lambda name=name, fabric=fabric: seconds(name, fabric, 100e6, NETWORK))
        print(f"  {f'simulation, {name} on {fabric}':44}{took:8.1f} s      60 s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nbytes", default="575MB", type=quantity, help="of the gradient (575MB: VGG-19)")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    steps()
    units(args.nbytes)
    growth(args.quick)
    reductions(args.nbytes)
    scale(args.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Hierarchical synchronisation measured in a lab beside its prediction and beside the published reductions.

    sudo python benchmarks/bench_hips.py [--fabric bcube:3,2] [--rate 25mbit] [--sizes 1MiB 32MiB] [--rounds 3]

Brings up a lab of the fabric (network namespaces; root), runs parameter server, mesh, ring, HiPS and the fabric's own
algorithm (BML on a BCube, torus on a torus) in interleaved rounds on all NICs, and prints medians, what was predicted
before the run from the configured rates less headers and from pings, the bytes that left the busiest NIC, and which share
of the processors this lab and all work together took. Every result is checked; the run fails where shared memory carried
anything between hosts.

Without --sizes: the gradients of LeNet-5 (61,706 float32) and of VGG-19 (143,667,240 float32), these at a scale that
keeps bytes over rate as they were published: 575 MB at 10 Gbit/s are 1.4 MB at 25 Mbit/s.

What is published: HiPS reduces the time of synchronisation against the flat algorithms by 18.7 to 56.4 % on a testbed of
BCube, by 37.5 to 61.9 % on BCube and 49.6 to 66.4 % on torus in simulation.

References: Geng et al.: HiPS: Hierarchical Parameter Synchronization in Large-Scale Distributed Machine Learning, NetAI,
2018; Wang et al.: BML: A High-performance, Low-cost Gradient Synchronization Algorithm for DML Training, NeurIPS, 2018.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from hrdma.bench.fabrics import Measurement, calibrated, measure, payload, plain
from hrdma.lab.lab import Lab
from hrdma.topo.cost import Cost
from hrdma.topo.fabric import Fabric
from hrdma.topo.fabrics import parse
from hrdma.topo.planner import Candidate, compare
from hrdma.units import in_bytes, in_seconds, size_value

LENET = 4 * 61_706
VGG = 4 * 143_667_240
PUBLISHED_RATE = 10e9  # of the links at which VGG-19 was synchronised
FLAT = ("server-1", "direct", "ring")
LONG = {"server-1": "parameter server", "direct": "mesh", "hips-mesh": "HiPS, one thread", "bml": "HiPS: BML"}
PUBLISHED = {"bcube": "18.7 to 56.4 % (testbed), 37.5 to 61.9 % (simulation)", "torus": "49.6 to 66.4 % (simulation)"}
MOST_BUSY = 0.7


def predicted(fabric: Fabric, cost: Cost, nbytes: int, names: tuple[str, ...]) -> list[Candidate]:
    """Of each algorithm its best number of parts, in the order of the names."""
    found, refused = compare("allreduce", fabric, nbytes, cost, names=names, simulated=True)
    for name, why in refused:
        print(f"{name} is left out: {why}")
    best = {candidate.algorithm: candidate for candidate in reversed(found)}
    return [best[name] for name in names if name in best]


def show(fabric: Fabric, label: str, found: list[Measurement]) -> None:
    unit = found[0].nbytes * 8 / payload(fabric).nic_rate
    print(f"\n{label}, {in_bytes(found[0].nbytes)} on {fabric.name}")
    print(
        f"  {'':18}{'predicted':>10}{'measured':>10} {'(range)':18}{'off by':>7}{'W/B':>7}{'per NIC':>11}{'lab':>6}{'busy':>6}  carried by"
    )
    for one in found:
        name, spread = LONG.get(one.algorithm, one.algorithm), f"({in_seconds(one.least)} to {in_seconds(one.most)})"
        print(
            f"  {name:18}{in_seconds(one.predicted):>10}{in_seconds(one.measured):>10} {spread:18}{one.off:+7.1%}"
            f"{one.measured / unit:7.3f}{in_bytes(one.sent):>11}{one.lab:6.0%}{one.busy:6.0%}  {one.carriers}"
        )
    own = found[-1]
    reductions = [f"{1 - own.measured / one.measured:.1%} of {one.algorithm}" for one in found if one.algorithm in FLAT]
    print(f"  {own.algorithm} saves {', '.join(reductions)}; published: {PUBLISHED.get(fabric.kind, 'nothing')}")
    for which, share in (
        ("this lab", max(one.lab for one in found)),
        ("all work together", max(one.busy for one in found)),
    ):
        if share > MOST_BUSY:
            print(
                f"  The processors, which all hosts share: {which} took up to {share:.0%} of them; what differs may be theirs."
            )
            break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fabric", default="bcube:3,2")
    parser.add_argument("--rate", default="25mbit")
    parser.add_argument("--sizes", nargs="+", default=[])
    parser.add_argument("--algorithms", nargs="+", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    fabric = parse(options.fabric, rate=options.rate, latency=0)
    own = {"bcube": "bml", "torus": "torus", "ring": "torus"}.get(fabric.kind, "hips-ring")
    names = tuple(options.algorithms) or (*FLAT, "hips-mesh", own)
    scaled = round(VGG * fabric.nic_rate / PUBLISHED_RATE) // 4 * 4
    sizes = [(f"allreduce of {size}", size_value(size) // 4 * 4) for size in options.sizes]
    sizes = sizes or [("LeNet-5", LENET), ("VGG-19, scaled", scaled)]
    everything: list[Measurement] = []
    with Lab.up(fabric, name=f"hips-{os.getpid()}") as lab:
        cost = calibrated(lab, fabric)
        planned = [(label, nbytes, predicted(payload(fabric), cost, nbytes, names)) for label, nbytes in sizes]
        for label, nbytes, candidates in planned:
            found = measure(lab, fabric, [(nbytes, candidate) for candidate in candidates], rounds=options.rounds)
            show(fabric, label, found)
            everything += found
    print("\nShared memory carried nothing between hosts; every result was right.")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"fabric": fabric.name, "measurements": plain(everything)}, file, indent=1)


if __name__ == "__main__":
    try:
        main()
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"bench_hips: {error}")

"""Three small programs on Ray, whose arrays hrdma.objects moves or Ray itself, on the hosts of a lab. Needs root, Ray and scikit-learn.

    sudo python benchmarks/bench_objects_apps.py                  8 hosts of 100 Mbit/s
    sudo python benchmarks/bench_objects_apps.py --hosts 4 --programs serving --rounds 1

sgd: asynchronous SGD, host 0 takes the first half of the gradients of the others (hrdma.examples.async_sgd); serving: a model
on each host, each request is broadcast to all, most votes count (hrdma.examples.ensemble); rl: actors balance poles, their
gradients are reduced as they arrive, the next policy goes back (hrdma.examples.cart_pole). Sizes are those of the publication over
100, as the links are: its hosts had 10 Gbit/s. Computing is real and small, on processors that all hosts share.

Both ways have the same actors and take turns, some steps at a time, with parameters of their own; a step ends when its result
is at host 0. What a program has learned is checked at the end, for both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beside.environments import Unavailable
from beside.report import busy_share, ticks
from objects_groups import Programs, programs

WAYS = ("ray", "hrdma")


@dataclass(frozen=True)
class Program:
    size: int  # units of the hidden layer, or images of a request
    nbytes: int  # of parameters or of a request
    like: str
    steps: int  # of a turn
    published: float  # at most, over Ray
    enough: float  # of what it is to learn, after the steps of `least` turns
    least: int
    what: str


PROGRAMS = {
    "sgd": Program(8148, 2_444_440, "AlexNet's 61 million parameters", 10, 7.8, 0.9, 6, "test accuracy"),
    "serving": Program(1966, 503_296, "64 x 3 x 256 x 256 floats", 20, 3.3, 0.9, 1, "test accuracy"),
    "rl": Program(256, 659_468, "a policy of 64 MB", 20, 3.9, 100, 6, "steps a pole stays up"),
}


def measure(group: Programs, names: list[str], rounds: int) -> dict[str, dict[str, Any]]:
    """Of each program and way the steps a second of each turn, and what it has learned by the last."""
    found: dict[str, dict[str, Any]] = {name: {way: [] for way in WAYS} for name in names}
    for number in range(rounds + 1):
        for name in names:
            program = PROGRAMS[name]
            for way in WAYS if number % 2 else WAYS[::-1]:
                steps = program.steps if number else 2  # round 0: who connects, connects
                said = group.ask(program=name, way=way, steps=steps, size=program.size)
                if number:
                    rate = len(said["done"]) / said["done"][-1]
                    found[name][way].append(rate)
                    found[name][f"{way} score"] = said["score"]
                    print(f"  {name:7} {way:5} {rate:7.2f} a second, {program.what} {said['score']:.3g}", flush=True)
    return found


def table(found: dict[str, dict[str, Any]], options: argparse.Namespace) -> str:
    lines = [f"{options.hosts} hosts of {options.rate}; steps a second, medians of {options.rounds} (range)", ""]
    lines.append("| program | moved | as | Ray | hrdma in Ray | speed-up | published, at most | learned: Ray, hrdma |")
    lines.append("|---|---:|---|---:|---:|---:|---:|---:|")
    for name, each in found.items():
        program = PROGRAMS[name]
        medians = {way: statistics.median(each[way]) for way in WAYS}
        shown = [f"{medians[way]:.2f} ({min(each[way]):.2f} to {max(each[way]):.2f})" for way in WAYS]
        ratio = medians["hrdma"] / medians["ray"]
        scores = ", ".join(f"{each[f'{way} score']:.3g}" for way in WAYS)
        lines.append(
            f"| {name} | {program.nbytes} B | {program.like} | {shown[0]} | {shown[1]} | **{ratio:.1f}x** | "
            f"{program.published}x | {program.what} {scores} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--rounds", type=int, default=6, help="turns of each way in each program")
    parser.add_argument("--name", default=f"apps-{os.getpid()}", help="of the lab")
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    if options.hosts < 3:
        parser.error(f"--hosts {options.hosts}: at least 3, a server and two workers")
    try:
        with programs(options.hosts, options.rate, options.name) as group:
            before = ticks()
            found = measure(group, options.programs, options.rounds)
            busy = busy_share(before, ticks())
    except Unavailable as why:
        print(f"left out: {why}")
        return 2
    print("\n" + table(found, options) + f"\n\nprocessors busy: {busy:.0%}")
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), "found": found, "busy": busy}, indent=1))
    bad = [
        f"{name}, {way}: {PROGRAMS[name].what} {found[name][f'{way} score']:.3g}"
        for name in found
        for way in WAYS
        if options.rounds >= PROGRAMS[name].least and found[name][f"{way} score"] < PROGRAMS[name].enough
    ]
    print("\n".join(f"has not learned: {each}" for each in bad))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

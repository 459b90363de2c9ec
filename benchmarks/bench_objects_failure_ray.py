"""Training on Ray while one of its hosts is killed and comes back: steps in each second, through hrdma and through Ray itself.

    sudo python benchmarks/bench_objects_failure_ray.py                          8 workers, gradients of the first 7
    sudo python benchmarks/bench_objects_failure_ray.py --svg found.svg --json found.json

Needs root, Ray and scikit-learn. A lab of a server and 8 workers on links of 100 Mbit/s; asynchronous SGD with 1 MiB of parameters
(hrdma.examples.async_sgd; ResNet-50's over 100). All processes of a worker's host are killed, Ray's and hrdma's; later Ray is started
there again, and restarts the worker. Once with each way; what counts as back is when Ray is started, which takes it some seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from bench_objects_failure import summary, text_of
from beside.environments import Unavailable
from objects_failure_picture import draw
from objects_groups import Programs, programs

HIDDEN = 3495
VICTIM = 1
PATIENCE = 90.0  # seconds
WAYS = {"hrdma": "hrdma in Ray", "ray": "Ray"}


def timeline(group: Programs, way: str, seconds: tuple[float, float, float]) -> dict[str, Any]:
    lost, back, end = seconds

    def fate() -> None:
        begin = time.monotonic()
        time.sleep(lost)
        group.kill(VICTIM)
        time.sleep(max(0.0, begin + back - time.monotonic()))
        group.start(VICTIM)

    patience = time.monotonic() + PATIENCE  # for one that was killed before, and is still coming up
    while not any(VICTIM in each for each in group.ask(program="failure", way=way, size=HIDDEN, steps=5)["taken"]):
        if time.monotonic() > patience:
            raise RuntimeError(f"the worker on host {VICTIM} has not come up within {PATIENCE:g} s")
    said = group.ask(fate, program="failure", way=way, size=HIDDEN, seconds=end)
    taking = [at for at, each in zip(said["done"], said["taken"]) if VICTIM in each]
    until = max((at for at in taking if at < back), default=None)
    again = min((at for at in taking if at >= back), default=None)
    used = {"used_until": until, "used_again": again}
    return {**summary(said["done"], seconds), **used, "accuracy": said["score"]}


def text(found: dict[str, Any], seconds: tuple[float, float, float]) -> str:
    def at(moment: float | None) -> str:
        return "never" if moment is None else f"{moment:.1f} s"

    used = f"gradients of the killed one are used until {at(found['used_until'])}, again from {at(found['used_again'])}"
    return f"{text_of(found, seconds)}\n{used}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument(
        "--seconds", type=float, nargs=3, default=[20, 35, 60], help="when one is killed, comes back, and all ends"
    )
    parser.add_argument("--name", default=f"failure-{os.getpid()}", help="of the lab")
    parser.add_argument("--svg", help="draw a picture into this file")
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    found = {}
    try:
        with programs(options.workers + 1, options.rate, options.name) as group:
            for way, name in WAYS.items():
                found[way] = timeline(group, way, options.seconds)
                print(f"{name}\n{text(found[way], options.seconds)}\n", flush=True)
    except Unavailable as why:
        print(f"left out: {why}")
        return 2
    if options.svg:
        lines = {name: found[way]["per_second"] for way, name in WAYS.items()}
        Path(options.svg).write_text(draw(lines, *options.seconds[:2], "steps a second"))
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), "found": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

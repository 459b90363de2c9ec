"""Cost of the traffic controller: install, rotation, revert, a look at the counters, and CPU of a controller that rotates.

    python benchmarks/bench_qos.py [--jobs 100] [--rounds 20]

Runs on a pair of virtual devices in a network namespace of its own, which ends with it; needs root, or user namespaces. Each
time is from the call to the read-back that finds the kernel as planned, with the record written; the median of the rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pyroute2 import IPRoute

from hrdma.qos.apply import Control
from hrdma.qos.controller import Controller
from hrdma.qos.policy import Job, Match, Policy
from hrdma.qos.state import counters

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000


def isolate() -> None:
    """A namespace with v0 and v1."""
    libc, user = ctypes.CDLL(None, use_errno=True), os.geteuid()
    if libc.unshare(CLONE_NEWNET | (CLONE_NEWUSER if user else 0)):
        raise SystemExit(f"cannot make a network namespace: {os.strerror(ctypes.get_errno())}; run as root")
    if user:
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    with IPRoute() as kernel:
        kernel.link("add", ifname="v0", kind="veth", peer={"ifname": "v1"})
        for name in ("lo", "v0", "v1"):
            kernel.link("set", index=kernel.link_lookup(ifname=name)[0], state="up")


def timed(action: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = action()
    return (time.perf_counter() - start) * 1e3, result


def show(what: str, times: list[float], note: object = "") -> None:
    print(f"{what:<34}{statistics.median(times):>10.1f}{min(times):>10.1f}{max(times):>10.1f}  {note}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    isolate()
    jobs = tuple(Job(f"j{i}", (Match(sport=2000 + i), Match(dport=3000 + i))) for i in range(options.jobs))
    policy = Policy("tls-rr", jobs, rate=1_250_000_000, interval=0.5)
    with tempfile.TemporaryDirectory() as directory:
        print(f"# {options.jobs} jobs, tls-rr by htb, {options.rounds} rounds")
        print(f"{'# ms':<34}{'median':>10}{'min':>10}{'max':>10}")
        with Control("v0", directory) as control:
            installs, reverts = [], []
            for _ in range(max(3, options.rounds // 5)):
                took, count = timed(lambda: control.install(policy))
                installs.append(took)
                reverts.append(timed(control.revert)[0])
            show("install", installs, f"{count} changes of the kernel")
            show("revert", reverts)
            control.install(policy)
            show(
                "install again (nothing to do)",
                [timed(lambda: control.install(policy))[0] for _ in range(options.rounds)],
            )
            rotations = [timed(control.rotate) for _ in range(options.rounds)]
            show("one rotation", [took for took, _ in rotations], f"{rotations[0][1]} changes of the kernel")
            show(
                "look at the counters", [timed(lambda: counters(control.wire, "v0"))[0] for _ in range(options.rounds)]
            )
        with Controller("v0", policy, directory=directory) as controller:
            threading.Timer(5, controller.stop).start()
            start, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
            controller.run(signals=False)
            wall, now = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
            cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
            each = cpu * policy.interval / wall
            print(f"CPU of the controller: {each * 1e3:.1f} ms an interval, {each / 20:.2%} of a core at T = 20 s")


if __name__ == "__main__":
    main()

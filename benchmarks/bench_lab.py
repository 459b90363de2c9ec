"""How true a lab's links are: what a TCP stream gets of the rate, one way, both ways and through a relaying host.

Needs root. Prints, for each rate, goodput beside what the headers leave of the rate (1448 of 1514 bytes), the median of
rounds that are interleaved and the worst, and the share of this machine's processors that was busy. No provider takes
part: plain sockets, read and written 1 MiB at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import socket
import sys
import threading
import time
from statistics import median

from beside.report import busy_share, ticks

from hrdma.lab.lab import Lab
from hrdma.topo.fabrics import parse, quantity

CASES = (("star:2", "one"), ("star:2", "both"), ("mesh:3", "one"))
SHARE = 1448 / 1514  # payload of a full frame
PIECE = bytearray(1 << 20)
PORT = 5000
WARM_UP = 0.5  # seconds that are not counted: slow start, and the full bucket at the beginning


def send(address: str, end: float) -> None:
    with socket.create_connection((address, PORT), timeout=5) as sock:
        while time.monotonic() < end:
            sock.sendall(PIECE)


def receive(listener: socket.socket, seconds: float) -> float:
    """Goodput in bit/s."""
    sock, _ = listener.accept()
    with sock:
        sock.settimeout(5)
        into = bytearray(len(PIECE))
        begun, got = time.monotonic(), 0
        while (now := time.monotonic()) < begun + WARM_UP:
            sock.recv_into(into)
        start = now
        while now < start + seconds:
            got += sock.recv_into(into)
            now = time.monotonic()
        while sock.recv_into(into):  # the sender ends on its own
            pass
        return 8 * got / (now - start)


def rank_main(pattern: str, seconds: float, addresses: list[str]) -> None:
    """Rank 0 sends to the last; with `both` the last sends to rank 0 as well."""
    rank, last = int(os.environ["RANK"]), len(addresses) - 1
    sends, receives = (True, True) if pattern == "both" else (rank == 0, rank == last)
    if rank not in (0, last):
        return
    with socket.create_server((addresses[rank], PORT)) as listener:
        listener.settimeout(10)
        time.sleep(0.3)  # until the other listens
        end = time.monotonic() + seconds + WARM_UP + 0.5
        thread = threading.Thread(target=send, args=(addresses[last - rank], end))
        if sends:
            thread.start()
        if receives:
            print(f"goodput {receive(listener, seconds):.0f}", flush=True)
        if sends:
            thread.join()


def measure(spec: str, pattern: str, rate: str, seconds: float) -> tuple[list[float], float]:
    """Goodput of each direction in bit/s, and the busy share of the processors."""
    with Lab.up(parse(spec, rate=rate, latency=0), name=f"bench-{os.getpid()}") as lab:
        addresses = [lab.addresses(host)[0] for host in range(lab.hosts)]
        output = io.TextIOWrapper(io.BytesIO())
        before = ticks()
        with contextlib.redirect_stdout(output):
            code = lab.run([__file__, "--rank", pattern, str(seconds), *addresses], timeout=seconds + 30, prefix=False)
        used = busy_share(before, ticks())
        if code:
            sys.exit(f"{spec}, {pattern} at {rate}: the ranks ended with exit code {code}")
        output.seek(0)
        return [float(line.split()[1]) for line in output], used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["50mbit", "200mbit", "1gbit"])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cases = [(spec, ways, rate) for rate in options.rates for spec, ways in CASES]
    found: dict[tuple[str, str, str], list[tuple[list[float], float]]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for case in cases:
            found[case].append(measure(*case, options.seconds))
    print(
        f"{'fabric':10} {'ways':6} {'rate':>9} {'Mbit/s':>10} {'expected':>10} {'off by':>8} {'worst':>8} {'busy':>6}"
    )
    for (spec, ways, rate), rounds in found.items():
        wanted = quantity(rate) * SHARE
        goodputs = [goodput for each, _ in rounds for goodput in each]
        middle, used = median(goodputs), median(share for _, share in rounds)
        off = f"{middle / wanted - 1:+8.2%} {min(goodputs) / wanted - 1:+8.2%}"
        print(f"{spec:10} {ways:6} {rate:>9} {middle / 1e6:10.2f} {wanted / 1e6:10.2f} {off} {used:6.0%}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2], float(sys.argv[3]), sys.argv[4:])
    else:
        main()

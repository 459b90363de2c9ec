"""Instructions of one call of RDMA from Python, on the simulated device: `python benchmarks/bench_verbs.py --instructions`.

From the difference of two runs of callgrind that differ in nothing but the number of calls.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile

CALLS = {
    "QueuePair.write 8 B, posted and polled": "here.write(source, target.address, target.rkey); cq.poll(1, timeout=5)",
    "Endpoint.write 8 B, to oneself": "end.write(x, remote)",
    "Endpoint.read 8 B, to oneself": "end.read(x, remote)",
}
PROGRAM = """
import hrdma
from hrdma import verbs
comm = hrdma.init(0, 1, timeout=60)
device = verbs.Device("sim")
pd, cq = verbs.ProtectionDomain(device), verbs.CompletionQueue(device)
here, there = verbs.QueuePair(pd, cq), verbs.QueuePair(pd, cq)
here.connect(there.address)
there.connect(here.address)
source, target = verbs.MemoryRegion(pd, bytes(8)), verbs.MemoryRegion(pd, bytearray(8), remote_write=True)
end, x = hrdma.Endpoint(comm, 0), hrdma.zeros(8, "uint8")
memory = end.expose(x, write=True)
remote = end.remote(bytes(memory))
for _ in range({count}):
    {call}
"""


def instructions(few: int = 1000, many: int = 21000) -> None:
    """Instructions of one call, all threads, from the difference of two runs."""
    print(f"{'instructions of one call':44}{'':>10}")
    for name, call in CALLS.items():
        totals = []
        for count in (few, many):
            with tempfile.TemporaryDirectory() as folder:
                done = subprocess.run(
                    ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out", sys.executable, "-c",
                     PROGRAM.format(count=count, call=call)],
                    capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONHASHSEED": "0"},
                )  # fmt: skip
            match = re.search(r"Collected : (\d+)", done.stderr)
            if done.returncode or not match:
                raise RuntimeError(f"callgrind failed: {done.stderr[-2000:]}")
            totals.append(int(match[1]))
        print(f"{name:44}{(totals[1] - totals[0]) / (many - few):10.0f}")

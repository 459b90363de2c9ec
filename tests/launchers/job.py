"""A job that knows nothing of launchers: allreduce, send and recv, split; each rank leaves its findings in a folder."""

import json
import os
import sys

import numpy as np

import hrdma

with hrdma.init() as comm:
    x = hrdma.empty(1000, "float64")
    x[:] = np.arange(1000) * comm.size + comm.rank
    comm.allreduce(x)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sending = comm.isend(np.array([comm.rank]), right, tag=3)
    heard = np.zeros(1, int)
    comm.recv(heard, left, tag=3)
    sending.wait()
    half = comm.split(comm.rank % 2, key=-comm.rank)
    y = half.allreduce(np.array([comm.rank]))
    found = {
        "rank": comm.rank,
        "size": comm.size,
        "sum": float(x.sum()),
        "heard": int(heard[0]),
        "members": list(half.members),
        "half": int(y[0]),
        "transports": comm.info()["transports"],
        "pid": os.getpid(),
    }
    with open(os.path.join(sys.argv[1], f"rank{comm.rank}.json"), "w") as file:
        json.dump(found, file)

"""A rank of a job in the tests: exchanges bytes with the other one, and prints what it has of the controller.

python job_rank.py NBYTES [until a line comes on stdin]
"""

from __future__ import annotations

import json
import sys

import numpy as np

import hrdma


def main(nbytes: int, linger: bool) -> None:
    with hrdma.init() as comm:
        x, y = np.full(nbytes, comm.rank + 1, np.uint8), np.empty(nbytes, np.uint8)
        comm.sendrecv(x, 1 - comm.rank, y)
        assert (y == 2 - comm.rank).all()
        info = comm.info()
        found = {"job": info["job"], "traffic": info["traffic"], "priority": comm.priority, "dup": comm.dup().priority}
        print(json.dumps(found), flush=True)
        if linger:
            sys.stdin.readline()
            comm.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), len(sys.argv) > 2)

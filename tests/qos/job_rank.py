"""A rank of a job in the tests: exchanges bytes with the other one, and prints what it has of the controller.

python job_rank.py NBYTES           sends and receives
python job_rank.py NBYTES linger    the same, and stays until a line comes on stdin
python job_rank.py NBYTES leave     rank 0 sends, and leaves as soon as its bytes are the library's
"""

from __future__ import annotations

import json
import sys

import numpy as np

import hrdma


def main(nbytes: int, how: str) -> None:
    with hrdma.init() as comm:
        x, y = np.full(nbytes, comm.rank + 1, np.uint8), np.empty(nbytes, np.uint8)
        info = comm.info()
        found = {"job": info["job"], "traffic": info["traffic"], "priority": comm.priority}
        if how == "leave":
            print(json.dumps(found), flush=True)
            if comm.rank:
                comm.recv(y, src=0)
                assert (y == 1).all()
            else:
                comm.send(x, dst=1)
            return
        comm.sendrecv(x, 1 - comm.rank, y)
        assert (y == 2 - comm.rank).all()
        print(json.dumps({**found, "dup": comm.dup().priority}), flush=True)
        if how == "linger":
            sys.stdin.readline()
            comm.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")

"""What the tests of labs share: an environment, and the job that ranks run: ``python lab_jobs.py MODE``."""

from __future__ import annotations

import json
import os
import sys


def environment(**added: str) -> dict[str, str]:
    """This process's, without HRDMA_*; a terminal wide enough for tables."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HRDMA_")}
    return {**kept, "HRDMA_TIMEOUT": "30", "COLUMNS": "120", **added}


def sum_up(mode: str, *arguments: str) -> None:
    """An allreduce; then each rank prints what providers carried, or what is wrong with that.

    With ``astray FILE`` rank 1 has by then moved to another host's network namespace.
    """
    import numpy as np

    import hrdma
    from hrdma.lab import namespaces
    from hrdma.lab.traffic import bytes_by_provider, check_wires

    with hrdma.init() as comm:
        x = np.arange(1000, dtype=np.float64) * comm.size + comm.rank
        comm.allreduce(x)
        assert (x == np.arange(1000) * comm.size**2 + sum(range(comm.size))).all()
        moved = bytes_by_provider(comm)
        comm.barrier()
        if mode == "astray" and comm.rank == 1:
            namespaces.enter(arguments[0])
        try:
            check_wires(comm)
        except RuntimeError as error:
            print(json.dumps({"error": str(error)}), flush=True)
        else:
            print(json.dumps({"rank": comm.rank, "moved": moved}), flush=True)


if __name__ == "__main__":
    sum_up(*sys.argv[1:])

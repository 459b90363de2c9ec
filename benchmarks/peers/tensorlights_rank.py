"""What a rank of bench_tensorlights.py does: a server sends its model to all workers, who sleep and send as much back.

    python tensorlights_rank.py '{"job": 0, "rank": 1, ...}'     over Gloo, which knows nothing of hrdma or of bands; needs torch

The steps are the same over this library, which has its own call in bench_tensorlights.py.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL, GRADIENT = 1, 2  # tags


@dataclass(frozen=True)
class Work:
    """Of one rank; times in seconds."""

    job: int
    rank: int  #: 0 is the server
    workers: int
    nbytes: int  #: of a model
    steps: int
    compute: float
    noise: float  #: part of it, either way
    delay: float  #: of the start
    limit: float


Ended = Callable[[], object]  # waits for a message's end


def steps(
    work: Work,
    model: Any,
    gradients: Sequence[Any],
    send: Callable[[Any, int, int], Ended],
    receive: Callable[[Any, int, int], Ended],
) -> dict[str, Any]:
    """Does the work; when it began, how long it took, and when a worker had each model.

    Parameters
    ----------
    work : Work
    model, gradients : array or tensor, sequence of them
        Of bytes; a worker has no gradients.
    send, receive : callable
        Begin with a message: what, the other rank, tag.

    Raises
    ------
    RuntimeError
        The server got a gradient of another step.
    """
    noise, arrivals = random.Random(1000 * work.job + work.rank), []
    time.sleep(work.delay)
    start = time.monotonic()
    for step in range(work.steps):
        if work.rank == 0:
            model[-1] = step
            ends = [receive(to, 1 + i, GRADIENT) for i, to in enumerate(gradients)]
            ends += [send(model, 1 + i, MODEL) for i in range(work.workers)]
            for end in ends:
                end()
            if any(gradient[-1] != step for gradient in gradients):
                raise RuntimeError(f"step {step}: a gradient of another step arrived")
        else:
            receive(model, 0, MODEL)()
            arrivals.append(time.monotonic())
            time.sleep(work.compute * noise.uniform(1 - work.noise, 1 + work.noise))
            send(model, 0, GRADIENT)()
    return {"start": start, "took": time.monotonic() - start, "arrivals": arrivals}


def over_gloo(work: Work, ready: str, go: str, result: str) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=work.limit)
    dist.init_process_group("gloo", timeout=limit)
    model = torch.zeros(work.nbytes, dtype=torch.uint8)
    gradients = [torch.zeros_like(model) for _ in range(work.workers if work.rank == 0 else 0)]
    dist.barrier()
    with open(ready, "wb", 0) as tell, open(go, "rb", 0) as hold:
        tell.write(b"1")
        hold.read(1)
    found = steps(
        work, model, gradients, lambda what, to, tag: dist.isend(what, to, tag=tag).wait,
        lambda what, source, tag: dist.irecv(what, source, tag=tag).wait,
    )  # fmt: skip
    found["carried"] = {"gloo": 2 * work.steps * work.workers * work.nbytes}
    Path(result).write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    over_gloo(Work(**json.loads(sys.argv[1])), *sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # torch's threads are slow to end, and nothing is left to be done

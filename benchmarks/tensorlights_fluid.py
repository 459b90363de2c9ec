"""What TensorLights' policies give where links are shared without delay, loss or windows: a fluid model; pure.

    servers' host   out ====> j0 j0 j0 j1 j1 j1 ...    models: shared alike under FIFO, by strict bands otherwise
                    in  <==== j0 j0 j0 j1 j1 j1 ...    gradients: shared alike, whatever the policy

Workers' own links are left out: they carry less than the servers'. What the model shows and a short run hides: under FIFO
jobs that began apart fall into step with each other, as whoever sends while others do is slowed down until they end
together. That takes some hundred steps; from then on the link idles while all compute, which is what bands mend.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

__all__ = ["completion"]

BANDS = 7
SLACK = 1e-12  # of a transfer, or a second: rounding


def completion(
    policy: str, servers: Sequence[int], workers: int, steps: int, *, transfer: float, compute: float, stagger: float,
    noise: float = 0.0, interval: float = float("inf"),
) -> list[float]:  # fmt: skip
    """Seconds that each job takes, from its start.

    Parameters
    ----------
    policy : str
        ``fifo``, ``tls-one`` or ``tls-rr``.
    servers : sequence of int
        The host of each job's server.
    workers, steps : int
        Of each job.
    transfer : float
        Seconds in which a link alone carries one model to one worker.
    compute, stagger : float
        Seconds that a worker computes, and between starts of jobs.
    noise : float, optional
        Part of `compute` that varies, either way; as in the benchmark, seeded by job and rank.
    interval : float, optional
        Seconds between rotations.

    Raises
    ------
    ValueError
        The policy has another name.

    Notes
    -----
    Cost: events (two for each model, and more) times transfers at a time.
    """
    if policy not in ("fifo", "tls-one", "tls-rr"):
        raise ValueError(f"policy {policy!r}: fifo, tls-one, tls-rr")
    jobs, each = len(servers), -(-len(servers) // BANDS)
    chance = {(job, rank): random.Random(1000 * job + rank) for job in range(jobs) for rank in range(1, workers + 1)}
    out: dict[tuple[int, int], float] = {}  # by job and rank: the part of a model that is still to come
    back: dict[tuple[int, int], float] = {}
    timers = [(job * stagger, job, 0) for job in range(jobs)]  # rank 0: a step begins; else a worker has computed
    now, turn, turns_at = 0.0, 0, interval if policy == "tls-rr" else float("inf")
    missing, done, took = [0] * jobs, [0] * jobs, [0.0] * jobs

    def served(flows: dict[tuple[int, int], float], ordered: bool) -> dict[tuple[int, int], float]:
        """The rate of each, in transfers per second."""
        band = {flow: (flow[0] + turn) % jobs // each if ordered else 0 for flow in flows}
        best = {host: min(band[flow] for flow in flows if servers[flow[0]] == host)
                for host in {servers[job] for job, _ in flows}}  # fmt: skip
        first = [flow for flow in flows if band[flow] == best[servers[flow[0]]]]
        count = {host: sum(servers[job] == host for job, _ in first) for host in best}
        return {flow: 1 / transfer / count[servers[flow[0]]] for flow in first}

    while timers or out or back:
        rates = ((out, served(out, policy != "fifo")), (back, served(back, False)))
        ends = [now + flows[flow] / rate for flows, of in rates for flow, rate in of.items()]
        ends += [timers[0][0]] if timers else []
        before, now = now, min(*ends, turns_at)
        for flows, of in rates:
            for flow, rate in of.items():
                flows[flow] -= rate * (now - before)
        for job, rank in [flow for flow, left in out.items() if left <= SLACK]:
            del out[job, rank]
            lasts = compute * chance[job, rank].uniform(1 - noise, 1 + noise)
            heapq.heappush(timers, (now + lasts, job, rank))
        for job, rank in [flow for flow, left in back.items() if left <= SLACK]:
            del back[job, rank]
            missing[job] -= 1
            if missing[job]:
                continue
            done[job] += 1
            took[job] = now - job * stagger
            if done[job] < steps:
                heapq.heappush(timers, (now, job, 0))
        while timers and timers[0][0] <= now + SLACK:
            _, job, rank = heapq.heappop(timers)
            if rank:
                back[job, rank] = 1.0
            else:
                missing[job] = workers
                out.update({(job, worker): 1.0 for worker in range(1, workers + 1)})
        if turns_at <= now + SLACK:
            turn, turns_at = turn + 1, turns_at + interval
    return took

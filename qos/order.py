"""Which band each job has: a pure function of the policy, the rotation count and the counters.

    21 jobs, tls-rr:   per = ceil(21 / 7) = 3 jobs in a band
    r = 0    jobs 0 1 2 | 3 4 5 | ... | 18 19 20      bands 0 ... 6
    r = 1    jobs 20 0 1 | 2 3 4 | ... | 17 18 19     pos(i) = (i + r) mod m, band = pos // per

References: the rotation and the bands are those of the published code of TensorLights (X. S. Huang, A. Chen, T. S. E. Ng, "Green,
Yellow, Yield: End-Host Traffic Scheduling for Distributed Deep Learning with TensorLights", HPBDC 2019). Two things differ,
both where jobs of several models are mixed: groups are all jobs of one model, not neighbours in the list; and the bands of
all groups together are never more than seven.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hrdma.qos.policy import BANDS, Job, Policy

__all__ = ["Live", "Place", "assign", "share_bands"]


@dataclass(frozen=True)
class Live:
    """What the counters said about a job."""

    attained: int = 0  #: bytes that it has sent
    update: float = 0.0  #: bytes of one of its updates, a moving average; 0 before the first one has ended
    counter: int = 0  #: of its class at the last look; less than `attained` where the class was made anew since


@dataclass(frozen=True)
class Place:
    """Where a job stands."""

    band: int  #: 0 is served first
    weight: float = 1.0  #: share among those of its band


def assign(policy: Policy, rotation: int = 0, live: Mapping[str, Live] | None = None) -> dict[str, Place]:
    """The place of every job.

    Parameters
    ----------
    policy : Policy
    rotation : int, optional
        How often the order has been rotated; counts for ``tls-rr`` alone.
    live : mapping of str to Live, optional
        Counters by job, for ``smallest-first`` and ``least-attained``; without an entry a job has sent nothing.

    Notes
    -----
    Cost: a sort of the jobs. No job is put above its ``best_band``.
    """
    jobs, live = policy.jobs, live or {}
    bands: dict[str, int]
    if policy.policy in ("tls-one", "tls-rr"):
        bands = _lights(jobs, rotation if policy.policy == "tls-rr" else 0)
    elif policy.policy == "strict":
        bands = {job.name: job.band or 0 for job in jobs}
    elif policy.policy == "smallest-first":
        bands = _ranked(jobs, [live.get(job.name, Live()).update or job.size for job in jobs])
    elif policy.policy == "least-attained":
        bands = _ranked(jobs, [live.get(job.name, Live()).attained for job in jobs])
    else:
        bands = {job.name: 0 for job in jobs}
    weighted = policy.policy == "weighted"
    return {job.name: Place(max(bands[job.name], job.best_band), job.weight if weighted else 1.0) for job in jobs}


def _lights(jobs: Sequence[Job], rotation: int) -> dict[str, int]:
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.model, []).append(job)
    ordered = sorted(groups.values(), key=lambda group: (max(job.size for job in group), group[0].model))
    bands = {}
    for group, (first, count) in zip(ordered, share_bands([len(group) for group in ordered])):
        per = -(-len(group) // count)
        for i, job in enumerate(group):
            bands[job.name] = first + (i + rotation) % len(group) // per
    return bands


def share_bands(counts: Sequence[int]) -> list[tuple[int, int]]:
    """First band and number of bands of each group, by its number of jobs; never beyond the seventh band.

    Each group gets ``max(1, floor(7 n / total))``; where the ones that were raised to 1 make it more than seven, the largest
    gives one up. More than seven groups share bands with their neighbours.
    """
    if len(counts) > BANDS:
        return [(i * BANDS // len(counts), 1) for i in range(len(counts))]
    total = sum(counts)
    shares = [max(1, BANDS * count // total) for count in counts]
    while sum(shares) > BANDS:
        shares[max(range(len(shares)), key=lambda i: shares[i])] -= 1
    return [(sum(shares[:i]), share) for i, share in enumerate(shares)]


def _ranked(jobs: Sequence[Job], keys: Sequence[float]) -> dict[str, int]:
    """Smallest key first, as many to a band as there have to be; equals in the order of the policy."""
    per = max(1, -(-len(jobs) // BANDS))
    ranked = sorted(range(len(jobs)), key=lambda i: keys[i])
    return {jobs[i].name: rank // per for rank, i in enumerate(ranked)}

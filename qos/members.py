"""Who has registered with a controller, and what its policy becomes by them; no socket and no kernel but /proc."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hrdma.errors import PolicyError, RefusedError
from hrdma.qos.policy import BANDS, Job, Match, Policy

__all__ = ["Peer", "asked", "codes", "effective", "start_of"]


@dataclass(eq=False)
class Peer:
    """A connection of a process, or of one that registered with an earlier controller and still runs."""

    pid: int
    uid: int
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)  #: what it asked for, by job
    sock: socket.socket | None = None
    process: int | None = None  #: its pidfd; None where it is in a pid namespace that is not seen from here
    adopted: bool = False

    def close(self) -> None:
        """Lets go of its descriptors."""
        if self.sock is not None:
            self.sock.close()
        if self.process is not None:
            os.close(self.process)
            self.process = None

    def to_json(self) -> dict[str, Any]:
        """For the record of the device."""
        return {"pid": self.pid, "uid": self.uid, "start": start_of(self.pid), "jobs": self.jobs}


def asked(
    policy: Policy,
    job: str,
    model: str = "",
    size: int = 0,
    band: int | None = None,
    priority: int | None = None,
) -> dict[str, Any]:
    """What a process asks for a job, checked; RefusedError or PolicyError where the policy does not let it."""
    named = any(known.name == job for known in policy.jobs)
    if band is not None and policy.policy != "strict":
        raise RefusedError(f"policy {policy.policy!r} gives out the bands itself; register without one")
    if named and band is not None:
        raise RefusedError(f"the policy says the band of job {job!r}; register without one")
    if band is not None and type(band) is not int:
        raise PolicyError(f"{band!r} is not a band, 0 to {BANDS - 1}", key="band")
    if band is not None and band < policy.guest_band:
        raise RefusedError(f"band {band} is above what the policy allows here: {policy.guest_band}")
    if priority is not None and (type(priority) is not int or not 0 <= priority <= BANDS):
        raise RefusedError(f"priority {priority!r} is not 0 to {BANDS}")
    return {"model": model, "size": size, "band": band, "priority": priority}


def _guest(policy: Policy, name: str, values: Mapping[str, Any]) -> Job:
    """A job that the policy does not name. Its wish is kept as it was asked for, since the next controller's policy may be another."""
    band = None
    if policy.policy == "strict":
        wish = values["band"] if values["band"] is not None else min(values["priority"] or 0, BANDS - 1)
        band = max(wish, policy.guest_band)
    return Job(name, (), values["model"], values["size"], band=band, best_band=policy.guest_band)


def effective(policy: Policy, peers: Sequence[Peer], before: Policy | None) -> Policy:
    """The policy with those who registered: jobs that it does not name at the end, and for each job that has members a DSCP, and one
    for its answers.

    Parameters
    ----------
    before : Policy or None
        What is installed: a job keeps the DSCPs that it has there.

    Raises
    ------
    RefusedError, PolicyError
        Too many jobs, no DSCP left, a name or size that is none.
    """
    wanted: dict[str, dict[str, Any]] = {}
    for peer in peers:
        for job, values in peer.jobs.items():
            wanted.setdefault(job, values)
    jobs = list(policy.jobs)
    names = {job.name: i for i, job in enumerate(jobs)}
    for name, values in wanted.items():
        if name not in names:
            if len(jobs) >= policy.most_jobs:
                raise RefusedError(f"{len(jobs)} jobs are all that the policy allows; job {name!r} is one too many")
            names[name] = len(jobs)
            jobs.append(_guest(policy, name, values))
    settled = {name: code for name, code in codes(before) if name in wanted} if before else {}
    taken = {code for _, code in codes(replace(policy, jobs=tuple(jobs)))}
    taken.update(job.answers for job in jobs if job.answers is not None)
    for name in wanted:
        member = jobs[names[name]]
        if any(match.given.keys() == {"dscp"} for match in member.match):
            continue
        code = _free(name, settled, policy.dscp_pool, taken)
        if code is None:
            raise RefusedError(f"no DSCP is left for job {name!r}; the policy's dscp_pool has {len(policy.dscp_pool)}")
        taken.add(code)
        jobs[names[name]] = replace(member, match=(*member.match, Match(dscp=code)))
    had = {job.name: job.answers for job in before.jobs if job.answers is not None} if before else {}
    settled = {name: code for name, code in had.items() if name in wanted}
    taken.update(policy.dscp_pool)
    for name in wanted:
        member = jobs[names[name]]
        if member.answers is None:  # where no code point is left, a job's answers stay with the rest of it
            code = _free(name, settled, policy.answer_pool, taken)
            jobs[names[name]] = replace(member, answers=code)
            taken.update(() if code is None else (code,))
    return replace(policy, jobs=tuple(jobs))


def _free(name: str, settled: Mapping[str, int], pool: Sequence[int], taken: Collection[int]) -> int | None:
    """The code point that a job has, else the first of a pool that no job has; None where all are taken."""
    theirs = [settled[name]] if name in settled else []
    kept = set(settled.values())
    return next((code for code in [*theirs, *(code for code in pool if code not in kept)] if code not in taken), None)


def codes(policy: Policy) -> list[tuple[str, int]]:
    """Job and DSCP of every match by DSCP alone."""
    return [
        (job.name, match.dscp)
        for job in policy.jobs
        for match in job.match
        if match.dscp is not None and match.given.keys() == {"dscp"}
    ]


def start_of(pid: int) -> int:
    """When a process was started, in ticks: with its number it is told from a later one; 0 where it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])

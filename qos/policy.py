"""What an operator wants: jobs, how to know their packets, and who goes first. Frozen, from TOML or built in Python.

    [qos]                            [[job]]
    policy = "tls-rr"                name = "resnet-1"
    interval = "20s"                 model = "resnet32"
    rate = "10gbit"                  size = "1.9MB"
                                     match = [{ sport = 2000 }, { dport = 3000 }]

A job's packets are those of any of its matches; all keys of one match hold together. Two jobs whose matches have the same
keys must differ in one of them. Matches with different keys (a source port here, a destination port there) can always meet in
one packet; then the job that is written first has it.
"""

from __future__ import annotations

import ipaddress
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hrdma.errors import PolicyError
from hrdma.units import rate_value, seconds_value, size_value

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["BANDS", "DEFAULT_BAND", "KINDS", "POLICIES", "Job", "Match", "Policy", "load", "parse"]

BANDS = 7  #: bands of jobs, 0 first
DEFAULT_BAND = 7  #: of everything that belongs to no job
POLICIES = ("fifo", "tls-one", "tls-rr", "strict", "weighted", "smallest-first", "least-attained")
KINDS = ("auto", "htb", "prio", "ets", "mqprio", "dcb")
MOST_MATCHES = 15  # of one job; the numbers of its filters leave room for so many, and for its answers
MOST_JOBS = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class Match:
    """Packets that agree with every key given here.

    Parameters
    ----------
    sport, dport : int, optional
        Ports of TCP or UDP, 1 to 65535.
    proto : {"tcp", "udp"}, optional
        Left out: both.
    src, dst : str, optional
        Address or network, IPv4 or IPv6.
    dscp : int, optional
        Differentiated services code point, 0 to 63: the upper six bits of the byte called TOS or traffic class.
    cgroup : str, optional
        A cgroup of version 2, relative to its mount point; alone in its match. What its processes send on sockets opened
        from then on, or accepted by those.
    """

    sport: int | None = None
    dport: int | None = None
    proto: str | None = None
    src: str | None = None
    dst: str | None = None
    dscp: int | None = None
    cgroup: str | None = None

    @property
    def given(self) -> dict[str, Any]:
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}

    def overlaps(self, other: Match) -> bool:
        """Whether both have the same keys, and there are packets that agree with both."""
        mine, theirs = self.given, other.given
        keys = mine.keys() - {"proto"}
        if keys != theirs.keys() - {"proto"} or len({mine.get("proto"), theirs.get("proto")} - {None}) == 2:
            return False
        return all(
            _networks_meet(mine[key], theirs[key]) if key in ("src", "dst") else mine[key] == theirs[key]
            for key in keys
        )


def _networks_meet(one: str, other: str) -> bool:
    first, second = ipaddress.ip_network(one), ipaddress.ip_network(other)
    return first.version == second.version and first.overlaps(second)


@dataclass(frozen=True)
class Job:
    """What shares one priority.

    Parameters
    ----------
    name : str
        Letters, digits, ``.``, ``_``, ``-``; at most 63.
    match : tuple of Match
        Its packets; may be empty for a job that only registers or is started by ``hrdma qos run``.
    model : str, optional
        Jobs of one model are a group: they take turns among themselves (``tls-one``, ``tls-rr``).
    size : int, optional
        Bytes of one update. Groups, and jobs under ``smallest-first``, are ordered by it, small first.
    weight : float, optional
        Share under ``weighted``, 0.01 to 100.
    band : int, optional
        Its band under ``strict``: 0 to 6.
    best_band : int, optional
        No policy, and no registration, puts it above this band.
    answers : int, optional
        DSCP of the connections by which its processes answer others: under kind ``htb`` a part of the link's rate goes
        before all bands, the rest in the job's. Given to jobs that register; to name here where another host sorts by it.
    """

    name: str
    match: tuple[Match, ...] = ()
    model: str = ""
    size: int = 0
    weight: float = 1.0
    band: int | None = None
    best_band: int = 0
    answers: int | None = None


@dataclass(frozen=True)
class Policy:
    """The wish for one device.

    Parameters
    ----------
    policy : str
        One of `POLICIES`.
    jobs : tuple of Job
    rate : int, optional
        Bytes per second of the link; 0 asks the device.
    floor : int, optional
        Bytes per second that every job gets whatever its band, in packets of 1500 bytes.
    acks : int, optional
        Bytes per second at which TCP's bare acknowledgements go before all bands. 0: they stay in the band of their job.
        Left out (None): a thirty-second of the rate where HTB and u32 do it, else 0.
    interval : float, optional
        Seconds between rotations, or between looks at the counters.
    kind : str, optional
        Back end, one of `KINDS`.
    leaf : {"pfifo", "fq"}, optional
        Queue of each job.
    direction : {"egress", "ingress"}, optional
        Ingress orders what arrives, for the incast direction, through an IFB device.
    most_jobs : int, optional
        Registrations beyond the jobs named here are refused when there are so many jobs.
    dscp_pool : tuple of int, optional
        Code points given to jobs that register.
    answer_pool : tuple of int, optional
        Code points for their answers (`Job.answers`), as far as they last and are not in `dscp_pool`.
    lossless : bool, optional
        Under kind ``dcb``: PFC for the priorities of jobs.
    guest_band : int, optional
        No job that registers without being named here is put above this band.
    """

    policy: str
    jobs: tuple[Job, ...] = ()
    rate: int = 0
    floor: int = 12_500
    acks: int | None = None
    interval: float = 20.0
    kind: str = "auto"
    leaf: str = "pfifo"
    direction: str = "egress"
    most_jobs: int = MOST_JOBS
    dscp_pool: tuple[int, ...] = field(default=tuple(range(32, 46)))
    answer_pool: tuple[int, ...] = field(default=tuple(range(3, 64, 4)))  # RFC 2474's pool for local use
    lossless: bool = False
    guest_band: int = 0

    def __post_init__(self) -> None:
        _check(self, {})

    @property
    def rotates(self) -> bool:
        """Whether the order of jobs changes while it is installed."""
        return self.policy == "tls-rr" or self.counts

    @property
    def counts(self) -> bool:
        """Whether that order comes from the counters."""
        return self.policy in ("smallest-first", "least-attained")


def load(path: str) -> Policy:
    """The policy in a TOML file; PolicyError names line and key, OSError where it cannot be read."""
    with open(path, encoding="utf-8") as file:
        return parse(file.read())


def parse(text: str) -> Policy:
    """The policy in TOML text.

    Raises
    ------
    PolicyError
        With the line and the key of what is wrong.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        raise PolicyError(f"not TOML: {error}", line=int(line[1]) if line else 1, key="file") from None
    return _Reader(_lines(text)).policy(table)


def _lines(text: str) -> dict[str, int]:
    """Line of every key: ``qos.rate``, ``job[1].name``; a heading counts as the table itself."""
    found: dict[str, int] = {}
    prefix, jobs = "", -1
    for number, line in enumerate(text.splitlines(), 1):
        if heading := re.match(r"\s*(\[\[?)\s*([\w.-]+)\s*\]", line):
            jobs += heading[1] == "[["
            prefix = f"{heading[2]}[{jobs}]" if heading[1] == "[[" else heading[2]
            found.setdefault(heading[2], number)
            found.setdefault(prefix, number)
        elif key := re.match(r"\s*\"?([\w-]+)\"?\s*=", line):
            found.setdefault(f"{prefix}.{key[1]}" if prefix else key[1], number)
    return found


_UNITS = (
    ("rate", rate_value),
    ("floor", rate_value),
    ("acks", lambda value: value if value == 0 else rate_value(value)),
    ("interval", seconds_value),
)


class _Reader:
    """Turns tables into the classes above; every error has the line of the nearest key that is known."""

    def __init__(self, lines: Mapping[str, int]) -> None:
        self.lines = lines

    def fail(self, key: str, message: str) -> PolicyError:
        near = key
        while near and near not in self.lines:
            near = re.sub(r"(\.?[^.\[\]]+|\[\d+\])$", "", near)
        return PolicyError(message, line=self.lines.get(near, 1), key=key)

    def known(self, table: Any, where: str, names: set[str]) -> None:
        if not isinstance(table, dict):
            raise self.fail(where, f"{table!r} is not a table")
        for name in table:
            if name not in names:
                raise self.fail(f"{where}.{name}" if where else name, f"unknown; there are: {', '.join(sorted(names))}")

    def policy(self, table: dict[str, Any]) -> Policy:
        self.known(table, "", {"qos", "job"})
        settings = table.get("qos", {})
        self.known(settings, "qos", {f.name for f in fields(Policy)} - {"jobs"})
        if "policy" not in settings:
            raise self.fail("qos", f"needs policy = one of {', '.join(POLICIES)}")
        values = dict(settings)
        for name, convert in _UNITS:
            if name in values:
                values[name] = self.convert(f"qos.{name}", convert, values[name])
        for name in ("dscp_pool", "answer_pool"):
            if name in values:
                values[name] = tuple(self.listed(f"qos.{name}", values[name]))
        jobs = self.listed("job", table.get("job", []))
        built = object.__new__(Policy)
        for f in fields(Policy):
            object.__setattr__(built, f.name, values.get(f.name, f.default))
        object.__setattr__(built, "jobs", tuple(self.job(entry, f"job[{i}]") for i, entry in enumerate(jobs)))
        _check(built, self.lines)
        return built

    def job(self, table: Any, where: str) -> Job:
        self.known(table, where, {f.name for f in fields(Job)})
        values = dict(table)
        if "name" not in values:
            raise self.fail(where, "needs a name")
        if "size" in values:
            values["size"] = self.convert(f"{where}.size", size_value, values["size"])
        matches = self.listed(f"{where}.match", values.get("match", []))
        for i, entry in enumerate(matches):
            self.known(entry, f"{where}.match[{i}]", {f.name for f in fields(Match)})
        values["match"] = tuple(Match(**entry) for entry in matches)
        return Job(**values)

    def convert(self, key: str, convert: Any, value: object) -> Any:
        try:
            return convert(value)
        except ValueError as error:
            raise self.fail(key, str(error)) from None

    def listed(self, key: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise self.fail(key, f"{value!r} is not a list")
        return value


def _check(policy: Policy, lines: Mapping[str, int]) -> None:
    """Raises PolicyError for the first thing that is wrong, with its line where there are lines."""
    reader = _Reader(lines)

    def need(right: bool, key: str, message: str) -> None:
        if not right:
            error = reader.fail(key, message)
            raise error if lines else PolicyError(message, key=key)

    def number(value: object, low: float, high: float) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high

    def whole(value: object, low: int, high: int) -> bool:
        return number(value, low, high) and isinstance(value, int)

    for key, choices in (
        ("policy", POLICIES),
        ("kind", KINDS),
        ("leaf", ("pfifo", "fq")),
        ("direction", ("egress", "ingress")),
    ):
        value = getattr(policy, key)
        need(value in choices, f"qos.{key}", f"{value!r} is none of {', '.join(choices)}")
    need(whole(policy.rate, 0, 1 << 40), "qos.rate", f"{policy.rate!r} bytes per second is not the rate of a link")
    need(whole(policy.floor, 0, 1 << 40), "qos.floor", f"{policy.floor!r} bytes per second is not a rate")
    need(policy.acks is None or whole(policy.acks, 0, 1 << 40), "qos.acks",
         f"{policy.acks!r} bytes per second is not a rate, nor 0 for none")  # fmt: skip
    need(not policy.acks or policy.policy != "fifo", "qos.acks", "policy 'fifo' has no bands for them to go before")
    need(number(policy.interval, 0.1, 86_400), "qos.interval", f"{policy.interval!r} s is not between 100 ms and 24 h")
    need(
        whole(policy.most_jobs, 1, MOST_JOBS), "qos.most_jobs", f"{policy.most_jobs!r} is not between 1 and {MOST_JOBS}"
    )
    need(isinstance(policy.lossless, bool), "qos.lossless", f"{policy.lossless!r} is neither true nor false")
    need(policy.kind == "dcb" or not policy.lossless, "qos.lossless", "is about kind = 'dcb' alone")
    need(
        whole(policy.guest_band, 0, BANDS - 1),
        "qos.guest_band",
        f"{policy.guest_band!r} is not a band, 0 to {BANDS - 1}",
    )
    for key in ("dscp_pool", "answer_pool"):
        for code in getattr(policy, key):
            need(whole(code, 0, 63), f"qos.{key}", _not_dscp(code))
    need(
        len(policy.jobs) <= policy.most_jobs,
        f"job[{policy.most_jobs}]",
        f"{len(policy.jobs)} jobs; at most {policy.most_jobs} are possible",
    )
    names: dict[str, int] = {}
    for i, job in enumerate(policy.jobs):
        at = f"job[{i}]"
        need(isinstance(job.name, str) and _NAME.fullmatch(job.name) is not None, f"{at}.name",
             f"{job.name!r} is not a name of letters, digits, '.', '_', '-'")  # fmt: skip
        need(job.name not in names, f"{at}.name", f"{job.name!r} is the name of job[{names.get(job.name)}] too")
        names[job.name] = i
        need(isinstance(job.model, str), f"{at}.model", f"{job.model!r} is not a name")
        need(whole(job.size, 0, 1 << 50), f"{at}.size", f"{job.size!r} is not a size in bytes")
        need(number(job.weight, 0.01, 100), f"{at}.weight", f"{job.weight!r} is not between 0.01 and 100")
        need(
            whole(job.best_band, 0, BANDS - 1), f"{at}.best_band", f"{job.best_band!r} is not a band, 0 to {BANDS - 1}"
        )
        need(
            job.band is None or whole(job.band, 0, BANDS - 1),
            f"{at}.band",
            f"{job.band!r} is not a band, 0 to {BANDS - 1}",
        )
        need(
            job.band is not None or policy.policy != "strict",
            f"{at}.band",
            "policy 'strict' needs a band for every job",
        )
        need(job.answers is None or whole(job.answers, 0, 63), f"{at}.answers", _not_dscp(job.answers))
        need(
            len(job.match) <= MOST_MATCHES,
            f"{at}.match",
            f"{len(job.match)} matches; at most {MOST_MATCHES} are possible",
        )
        for k, match in enumerate(job.match):
            _check_match(match, f"{at}.match[{k}]", need)
            need(match.cgroup is None or policy.direction == "egress", f"{at}.match[{k}].cgroup",
                 "is about sockets that send; what arrives (direction 'ingress') is known by its packets alone")  # fmt: skip
    _check_overlaps(policy, need)
    floors = policy.floor * len(policy.jobs)
    need(not policy.rate or floors <= policy.rate, "qos.floor",
         f"{len(policy.jobs)} floors of {policy.floor} bytes per second are more than the link's {policy.rate}")  # fmt: skip


def _not_dscp(code: object) -> str:
    if isinstance(code, int) and 63 < code < 256 and code % 4 == 0:
        return f"{code} is not a DSCP, 0 to 63; as a TOS or traffic class byte it would be DSCP {code // 4}"
    return f"{code!r} is not a DSCP, 0 to 63"


def _check_match(match: Match, at: str, need: Any) -> None:
    given = match.given
    need(bool(given.keys() - {"proto"}), at, "matches everything; name a port, a DSCP, an address or a cgroup")
    for key in ("sport", "dport"):
        value = given.get(key, 1)
        need(isinstance(value, int) and 1 <= value <= 65535, f"{at}.{key}", f"{value!r} is not a port, 1 to 65535")
    need(given.get("proto", "tcp") in ("tcp", "udp"), f"{at}.proto", f"{match.proto!r} is neither tcp nor udp")
    need(isinstance(given.get("dscp", 0), int) and 0 <= given.get("dscp", 0) <= 63, f"{at}.dscp", _not_dscp(match.dscp))
    versions = set()
    for key in given.keys() & {"src", "dst"}:
        try:
            versions.add(ipaddress.ip_network(given[key]).version)
        except (ValueError, TypeError) as error:
            need(False, f"{at}.{key}", f"{given[key]!r} is not an address or network: {error}")
    need(len(versions) < 2, at, "src and dst are of different IP versions: no packet has both")
    if match.cgroup is not None:
        need(
            len(given) == 1,
            f"{at}.cgroup",
            "stands alone in its match: it is known when a socket is opened, not by packet",
        )
        path = match.cgroup
        safe = isinstance(path, str) and path.strip("/") and ".." not in path.split("/")
        need(bool(safe), f"{at}.cgroup", f"{path!r} is not a path below the mount point of cgroup2")


def _check_overlaps(policy: Policy, need: Any) -> None:
    # Only matches with the same keys can overlap, and most differ in a port: comparing within such a bucket keeps
    # a thousand jobs cheap.
    seen: dict[tuple[Any, ...], list[tuple[str, str, Match]]] = {}
    for i, job in enumerate(policy.jobs):
        matches = [(f"match[{k}]", match) for k, match in enumerate(job.match)]
        if job.answers is not None:
            matches.append(("answers", Match(dscp=job.answers)))
        for key, match in matches:
            given = match.given
            exact = tuple(sorted((name, value) for name, value in given.items() if name not in ("proto", "src", "dst")))
            bucket = seen.setdefault((exact, "src" in given, "dst" in given), [])
            for where, name, other in bucket:
                need(not match.overlaps(other), f"job[{i}].{key}",
                     f"{given} of job {job.name!r} overlaps {where}, {other.given}, of job {name!r}")  # fmt: skip
            bucket.append((f"job[{i}].{key}", job.name, match))

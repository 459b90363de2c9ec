"""Every HRDMA_* setting: one table, one way to read it, one way to print it.

A value comes from the argument of the call, else from the environment, else from the default. Unknown ``HRDMA_*``
names are refused rather than ignored: a misspelt switch that silently does nothing costs its user an afternoon. An
empty variable counts as unset. What belongs to one provider goes into that provider's option string (``HRDMA_TCP``,
``HRDMA_SHM``, ``HRDMA_VERBS``), which the provider itself checks, so that the names here stay few.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Number
from typing import Any, NamedTuple

from hrdma.world import World, world_from_env

__all__ = ["SETTINGS", "Config", "Setting", "World", "world_from_env"]

PREFIX = "HRDMA_"
LOG_LEVELS = ("error", "warning", "info", "debug", "trace")
SIMD_LEVELS = ("auto", "scalar", "avx2", "avx512", "neon")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def _text(value: str) -> str:
    return value


def _flag(value: str) -> bool:
    if value.lower() in _TRUE:
        return True
    if value.lower() in _FALSE:
        return False
    raise ValueError("expected 1 or 0")


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError("expected a positive number of seconds")
    return seconds


def _priority(value: str) -> int:
    if value not in tuple("01234567"):
        raise ValueError("expected 0 (most urgent) to 7")
    return int(value)


def _dscp(value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,2}", value) or int(value) > 63:
        raise ValueError("expected a DSCP, 0 to 63")
    return int(value)


def _job(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", value):
        raise ValueError("expected a name of letters, digits, '.', '_', '-', a letter or digit first")
    return value


def _controller(value: str) -> str:
    if value.endswith("/"):
        raise ValueError("expected a device, the path of a controller's socket (not of its folder), or off")
    return value


def _port(value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", value) or not 0 < int(value) < 65536:
        raise ValueError("expected a port number, 1 to 65535")
    return int(value)


def _spin(value: str) -> int:
    if not re.fullmatch(r"-1|[0-9]{1,6}", value):
        raise ValueError("expected microseconds, 0 to 999999, or -1 (adaptive)")
    return int(value)


def _choice(names: tuple[str, ...]) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value.lower() not in names:
            raise ValueError(f"expected one of {', '.join(names)}")
        return value.lower()

    return parse


def _names(value: str) -> tuple[str, ...]:
    names = tuple(name.strip().lower() for name in value.split(","))
    if len(set(names)) < len(names) or not all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names):
        raise ValueError("expected distinct provider names with commas between, such as shm,tcp")
    return names


def _options(value: str) -> str:
    if not all(re.fullmatch(r"[a-z_]+=[^,=\s]+", part) for part in value.split(",")):
        raise ValueError("expected key=value pairs with commas between")
    for name, owner in (
        ("fallback", "HRDMA_FALLBACK, which HRDMA_REQUIRE=verbs overrides"),
        ("silence", "HRDMA_HEARTBEAT"),
    ):
        if value.startswith(f"{name}=") or f",{name}=" in value:
            raise ValueError(f"{name}= is not set here but by {owner}")
    return value


def _fault(value: str) -> str:
    parts = [part.strip() for part in value.split(";")]
    names = [part.partition(":")[0] for part in parts]
    options = r"[a-z_]+=[^,=\s]+"
    if len(set(names)) < len(names) or not all(
        re.fullmatch(rf"[a-z][a-z0-9_]*:{options}(,{options})*", part) for part in parts
    ):
        raise ValueError("expected provider:option=value, such as tcp:drop=0.01,seed=7, with ; between providers")
    return ";".join(parts)


class Setting(NamedTuple):
    """One row of the table."""

    name: str  #: the environment variable
    parse: Callable[[str], Any]  #: text to value; raises ValueError saying what it expected
    default: Any
    help: str

    @property
    def field(self) -> str:
        """Name of the attribute of `Config` and of the keyword of `Config.load`."""
        return self.name.removeprefix(PREFIX).lower()


SETTINGS: tuple[Setting, ...] = (
    Setting("HRDMA_LOG_LEVEL", _choice(LOG_LEVELS), "warning", f"what is logged: {', '.join(LOG_LEVELS)}"),
    Setting("HRDMA_TRANSPORT", _names, (), "providers that may be used, best first (shm,tcp); unset: all that work"),
    Setting("HRDMA_REQUIRE", _names, (), "providers without which init raises instead of falling back"),
    Setting("HRDMA_IFNAME", _text, "", "network interfaces: name, glob, ^exclude or CIDR, with commas between"),
    Setting(
        "HRDMA_FABRIC",
        _text,
        "",
        "network that collectives are planned for: TOML file, bcube:3,2, or discover",
    ),
    Setting("HRDMA_PLAN", _text, "", "file of `hrdma topo plan -o`: the schedule that its collective runs"),
    Setting("HRDMA_HOST_ID", _text, "", "overrides what tells hosts apart (boot id and network namespace)"),
    Setting("HRDMA_PORT", _port, None, "port of the rendezvous on MASTER_ADDR; unset: MASTER_PORT"),
    Setting("HRDMA_TOKEN", _text, "", "secret that all ranks of the job share; proved by challenge, never sent"),
    Setting("HRDMA_INSECURE", _flag, False, "1: accept peers of other hosts although there is no HRDMA_TOKEN"),
    Setting("HRDMA_TIMEOUT", _seconds, 300.0, "seconds that any call may take where none are given, init included"),
    Setting("HRDMA_HEARTBEAT", _seconds, 5.0, "seconds of silence after which a rank counts as lost"),
    Setting("HRDMA_SPIN_US", _spin, -1, "microseconds a waiting call polls before it sleeps; -1: adaptive"),
    Setting("HRDMA_SIMD", _choice(SIMD_LEVELS), "auto", f"instruction set of reductions: {', '.join(SIMD_LEVELS)}"),
    Setting("HRDMA_TCP", _options, "", "options of provider tcp, such as cc=system,sndbuf=4M"),
    Setting("HRDMA_SHM", _options, "", "options of provider shm, such as ring=1048576,cma=0"),
    Setting("HRDMA_VERBS", _options, "", "options of provider verbs, such as gid=3,pin=256M"),
    Setting(
        "HRDMA_FALLBACK", _choice(("none", "tcp")), "none", "tcp: a verbs connection without a rail goes on over tcp"
    ),
    Setting(
        "HRDMA_DEVICES",
        _text,
        "",
        "RDMA devices, used together: mlx5_0,mlx5_*:1; simulated: sim, sim_rxe",
    ),
    Setting("HRDMA_FAULT", _fault, "", "inject faults into a provider, such as tcp:drop=0.01,seed=7"),
    Setting("HRDMA_JOB", _job, "", "registers the job under this name with the traffic controller of its host"),
    Setting("HRDMA_PRIORITY", _priority, 4, "of calls, and the job's wish to the controller: 0 (most urgent) to 7"),
    Setting("HRDMA_TRAFFIC_CLASS", _dscp, None, "DSCP of what the job sends, 0 to 63; a controller goes before it"),
    Setting("HRDMA_QOS", _controller, "", "controller: of device eth0, a socket's path, or off; unset: the only one"),
    Setting("HRDMA_CACHE_DIR", _text, "", "folder of measured cost parameters; unset: ~/.cache/hrdma"),
    Setting("HRDMA_STRICT", _flag, False, "test runs only: a skipped test that CI must not skip fails"),
)
_BY_NAME = {setting.name: setting for setting in SETTINGS}
_BY_FIELD = {setting.field: setting for setting in SETTINGS}


class Row(NamedTuple):
    """One line of the printed configuration."""

    name: str
    value: str
    origin: str
    help: str


@dataclass(frozen=True)
class Config:
    """The effective configuration of a process. Make it with `Config.load`.

    Attributes are the lower-case names of `SETTINGS` without the prefix; times are seconds.
    """

    log_level: str = "warning"
    transport: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    ifname: str = ""
    fabric: str = ""
    plan: str = ""
    host_id: str = ""
    port: int | None = None
    token: str = field(default="", repr=False)
    insecure: bool = False
    timeout: float = 300.0
    heartbeat: float = 5.0
    spin_us: int = -1
    simd: str = "auto"
    tcp: str = ""
    shm: str = ""
    verbs: str = ""
    fallback: str = "none"
    devices: str = ""
    fault: str = ""
    job: str = ""
    priority: int = 4
    traffic_class: int | None = None
    qos: str = ""
    cache_dir: str = ""
    strict: bool = False
    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Config:
        """Reads the configuration: argument, else environment, else default.

        Parameters
        ----------
        environ : mapping, optional
            Read instead of ``os.environ``.
        **overrides
            Settings by attribute name (``timeout=5``, ``transport=["shm"]``); None means not given.

        Raises
        ------
        ValueError
            A value is malformed, or an ``HRDMA_*`` variable is not known; the message names it and the nearest one.
        TypeError
            An override is not a setting, or of a type that has no text, such as a Fabric for ``fabric=``.
        """
        environ = os.environ if environ is None else environ
        for name in environ:
            if name.startswith(PREFIX) and name not in _BY_NAME:
                raise ValueError(f"{name} is not a setting of hrdma{_nearest(name, _BY_NAME)}")
        for key in overrides:
            if key not in _BY_FIELD:
                raise TypeError(f"{key!r} is not a setting of hrdma{_nearest(key, _BY_FIELD)}")
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for setting in SETTINGS:
            given = overrides.get(setting.field)
            variable = environ.get(setting.name, "")
            if given is not None:
                if not isinstance(given, (str, os.PathLike, Number, Mapping, tuple, list)):
                    raise TypeError(f"{setting.field}= takes text as {setting.name} does, not a {type(given).__name__}")
                values[setting.field] = _parse(setting, setting.field, _as_text(given))
                origins[setting.field] = "argument"
            elif variable.strip():
                values[setting.field] = _parse(setting, setting.name, variable)
                origins[setting.field] = "environment"
            else:
                values[setting.field] = setting.default
                origins[setting.field] = "default"
        return cls(**values, origins=origins)

    def rows(self) -> list[Row]:
        """The configuration as rows of name, value, origin and help, for printing. The token is not shown."""
        rows = []
        for setting in SETTINGS:
            value = getattr(self, setting.field)
            text = "(set)" if setting.field == "token" and value else _as_text(value)
            rows.append(Row(setting.name, text, self.origins.get(setting.field, "default"), setting.help))
        return rows

    def describe(self) -> str:
        """The configuration as text, one setting a line: ``HRDMA_TIMEOUT=300  (default)``."""
        return "\n".join(f"{row.name}={row.value}  ({row.origin})" for row in self.rows())

    def options(self, provider: str) -> str:
        """The option string of a provider; empty where it has none. Where verbs is required it is told of no fallback.

        Verbs is told how long a peer may be silent before the control plane counts it lost: its retries last longer.
        """
        text = getattr(self, provider) if provider in ("tcp", "shm", "verbs") else ""
        if provider != "verbs":
            return text
        falls = self.fallback != "none" and "verbs" not in self.require
        own = [f"fallback={self.fallback}" if falls else "", f"silence={self.heartbeat:g}"]
        return ",".join(filter(None, [text, *own]))

    def gid(self) -> int | None:
        """What HRDMA_VERBS says of the GID: its index, or None.

        Raises
        ------
        ValueError
            It is no number.
        """
        text = dict(part.partition("=")[::2] for part in self.verbs.split(",")).get("gid")
        if text is not None and not text.isdecimal():
            raise ValueError(f"verbs option gid={text}: an index of the port's GID table, 0 to 255")
        return None if text is None else int(text)

    def faulty(self) -> tuple[str, ...]:
        """The providers into which faults are injected."""
        return tuple(part.partition(":")[0] for part in self.fault.split(";") if part)

    def hardware(self) -> str:
        """The devices that provider verbs may take; empty: it takes none that are software.

        Where verbs is required and nothing is named, any device will do.
        """
        return self.devices or ("*" if "verbs" in self.require else "")


def _parse(setting: Setting, label: str, value: str) -> Any:
    shown = "(hidden)" if setting.field == "token" else value
    if not value.strip():
        return setting.default
    try:
        return setting.parse(value.strip())
    except ValueError as error:
        raise ValueError(f"{label}={shown}: {error}") from None


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ",".join(f"{key}={item}" for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return ",".join(str(item) for item in value)
    return str(value)


def _nearest(name: str, known: Iterable[str]) -> str:
    """Ends a refusal: names the known name that is most like this one, compared without the common prefix."""
    bare = {other.removeprefix(PREFIX): other for other in known}
    found = difflib.get_close_matches(name.removeprefix(PREFIX), list(bare), n=1, cutoff=0.6)
    return f"; did you mean {bare[found[0]]}?" if found else "; `hrdma info` lists them"

"""Settings: precedence, refusals, printing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hrdma.config import SETTINGS, Config
from hrdma.topo.fabrics import parse


def test_each_setting_is_an_attribute_with_the_same_default():
    attributes = {field.name: field.default for field in dataclasses.fields(Config) if field.name != "origins"}
    assert attributes == {setting.field: setting.default for setting in SETTINGS}
    assert Config() == Config.load({})


def test_argument_goes_before_environment_before_default():
    environ = {"HRDMA_TIMEOUT": "7", "HRDMA_HEARTBEAT": "2.5", "OTHER": "x"}
    config = Config.load(environ, timeout=3, spin_us=None)
    assert (config.timeout, config.heartbeat, config.spin_us) == (3.0, 2.5, -1)
    assert [config.origins[name] for name in ("timeout", "heartbeat", "spin_us")] == [
        "argument",
        "environment",
        "default",
    ]


@pytest.mark.parametrize(
    ("environ", "field", "value"),
    [
        ({"HRDMA_TRANSPORT": "shm, TCP"}, "transport", ("shm", "tcp")),
        ({"HRDMA_INSECURE": "yes"}, "insecure", True),
        ({"HRDMA_INSECURE": "0"}, "insecure", False),
        ({"HRDMA_LOG_LEVEL": "INFO"}, "log_level", "info"),
        ({"HRDMA_TCP": "cc=cubic,streams=2"}, "tcp", "cc=cubic,streams=2"),
        ({"HRDMA_PORT": "65535"}, "port", 65535),
        ({"HRDMA_PORT": ""}, "port", None),
        ({"HRDMA_SPIN_US": "-1"}, "spin_us", -1),
        (
            {"HRDMA_FAULT": "tcp:delay=0.1:2ms,ops=send+write; shm:kill=after:3"},
            "fault",
            "tcp:delay=0.1:2ms,ops=send+write;shm:kill=after:3",
        ),
    ],
)
def test_values_are_read(environ, field, value):
    assert getattr(Config.load(environ), field) == value


def test_arguments_may_be_python_values():
    config = Config.load({}, transport=["tcp"], tcp={"cc": "reno"}, insecure=True, port=5)
    assert (config.transport, config.tcp, config.insecure, config.port) == (("tcp",), "cc=reno", True, 5)
    assert config.options("tcp") == "cc=reno" and config.options("loop") == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HRDMA_TIMEOUT", "0"),
        ("HRDMA_TIMEOUT", "-1"),
        ("HRDMA_TIMEOUT", "inf"),
        ("HRDMA_TIMEOUT", "5s"),
        ("HRDMA_TIMEOUT", "e"),
        ("HRDMA_PORT", "0"),
        ("HRDMA_PORT", "65536"),
        ("HRDMA_PORT", "http"),
        ("HRDMA_INSECURE", "maybe"),
        ("HRDMA_LOG_LEVEL", "loud"),
        ("HRDMA_TRANSPORT", "shm,,tcp"),
        ("HRDMA_TRANSPORT", "shm,shm"),
        ("HRDMA_SIMD", "mmx"),
        ("HRDMA_SPIN_US", "-2"),
        ("HRDMA_TCP", "cubic"),
        ("HRDMA_SHM", "ring=1,,"),
        ("HRDMA_FAULT", "zzz"),
        ("HRDMA_FAULT", "drop=0.1"),
        ("HRDMA_FAULT", "tcp:drop"),
        ("HRDMA_FAULT", "tcp:drop=0.1;"),
        ("HRDMA_FAULT", "tcp:drop=0.1;tcp:seed=3"),
    ],
)
def test_malformed_values_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name}={value}: expected"):
        Config.load({name: value})


def test_a_wrong_argument_is_named():
    with pytest.raises(ValueError, match=r"^timeout=-1: expected"):
        Config.load({}, timeout=-1)
    with pytest.raises(TypeError, match="did you mean timeout"):
        Config.load({}, timeuot=1)


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match="HRDMA_TIMOUT is not a setting of hrdma; did you mean HRDMA_TIMEOUT"):
        Config.load({"HRDMA_TIMOUT": "3"})
    with pytest.raises(ValueError, match="HRDMA_XYZZY is not a setting of hrdma; `hrdma info`"):
        Config.load({"HRDMA_XYZZY": ""})


def test_an_argument_without_a_text_is_refused():
    """A Fabric's text is for people: as a setting it would be taken for a name."""
    with pytest.raises(TypeError, match="fabric= takes text as HRDMA_FABRIC does, not a Fabric"):
        Config.load({}, fabric=parse("ring:2"))
    assert Config.load({}, fabric=Path("mine.toml")).fabric == "mine.toml"


def test_printed_with_origin_and_without_the_token():
    config = Config.load({"HRDMA_TOKEN": "very-secret"}, timeout=2.5)
    text = config.describe()
    assert "HRDMA_TIMEOUT=2.5  (argument)" in text and "HRDMA_TOKEN=(set)  (environment)" in text
    assert "very-secret" not in text + repr(config)
    assert [row.name for row in config.rows()] == [setting.name for setting in SETTINGS]
    assert all(row.help for row in config.rows())

"""The guest's kernel has the queueing disciplines, classifiers and actions that tests of NIC priorities need."""

from __future__ import annotations

import subprocess

import pytest

QDISCS = {
    "htb": "default 1",
    "prio": "bands 3",
    "ets": "bands 3 strict 1 quanta 3000 1500",
    "mqprio": "num_tc 2 map 0 1 queues 1@0 1@1 hw 0",
    "netem": "delay 1ms loss 1%",
    "tbf": "rate 10mbit burst 32k latency 50ms",
    "fq": "",
}
FILTERS = {
    "flower": "flower ip_proto udp dst_port 4791 ip_tos 0x20/0xfc classid 1:1",
    "u32": "u32 match ip tos 0x20 0xfc classid 1:1",
    "basic": "basic classid 1:1",
    "fw": "handle 5 fw classid 1:1",
    "matchall": "matchall classid 1:1",
}
ACTIONS = {"skbedit": "skbedit priority 3", "mirred": "mirred egress redirect dev lo", "gact": "gact drop"}


@pytest.fixture
def card(guest, output):
    """A network device with several queues of its own, and no traffic."""
    output("ip link add card0 numtxqueues 4 type veth peer name card1")
    yield "card0"
    output("ip link del card0")


@pytest.mark.parametrize("kind", QDISCS)
def test_qdisc(card, output, kind):
    output(f"tc qdisc add dev {card} root handle 1: {kind} {QDISCS[kind]}")
    assert f"qdisc {kind} 1: root" in output(f"tc qdisc show dev {card}")


def test_ingress(card, output):
    output(f"tc qdisc add dev {card} clsact")
    output(f"tc filter add dev {card} ingress matchall action drop")
    assert " matchall " in output(f"tc filter show dev {card} ingress")


@pytest.mark.parametrize("kind", FILTERS)
def test_classifier(card, output, kind):
    output(f"tc qdisc add dev {card} root handle 1: htb")
    output(f"tc filter add dev {card} parent 1: protocol ip prio 1 {FILTERS[kind]}")
    assert f" {kind} " in output(f"tc filter show dev {card} parent 1:")


@pytest.mark.parametrize("kind", ACTIONS)
def test_action(card, output, kind):
    output(f"tc qdisc add dev {card} root handle 1: htb")
    output(f"tc filter add dev {card} parent 1: protocol ip prio 1 flower action {ACTIONS[kind]}")
    assert kind in output(f"tc filter show dev {card} parent 1:")


def test_a_kind_that_is_not_there_is_refused(card):
    done = subprocess.run(
        f"tc qdisc add dev {card} root handle 1: nothing".split(), capture_output=True, text=True, timeout=30
    )
    assert done.returncode != 0
    assert "qdisc kind is unknown" in done.stderr

"""Who calls where ranks wait for each other and is none of them: turned away, and said once for each reason."""

import re
import socket
import time

import pytest

import harness

HELLO = b"hrdm\1\0\0\0" + bytes(56)  # of another job, or of none: whom it calls and when are wrong
STRANGE = {
    "it does not speak this protocol": (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 300, bytes(64), b"hrdm\2\0\0\0"),
    "it does not know the job token, or is not of this job": (HELLO + bytes(32),),
}


def knock(place: tuple[str, int], sent: bytes) -> None:
    """Until it is turned away."""
    with socket.create_connection(place, 5) as sock:
        sock.settimeout(10)
        sock.sendall(sent)
        try:
            while sock.recv(100):
                pass
        except ConnectionResetError:
            pass


def knocks(comm, provider):
    text = comm.info()["domains"][provider]
    address, port = re.search(r"((?:\d+\.){3}\d+):(\d+)", text).groups()
    for _ in range(3):
        for sent in (sent for each in STRANGE.values() for sent in each):
            knock((address, int(port)), sent)
    with socket.create_connection((address, int(port)), 5):
        pass  # a port scan alone is not worth a line
    comm.barrier()
    time.sleep(0.1)
    return address


@pytest.mark.parametrize(
    ("provider", "devices", "n"), [("tcp", None, 2), ("tcp", None, 1), ("verbs", None, 2), ("verbs", "sim,sim2", 2)]
)
def test_strangers_are_turned_away_and_that_is_said_once(provider, devices, n):
    env = {"HRDMA_TRANSPORT": provider} | ({"HRDMA_DEVICES": devices} if devices else {})
    for found in harness.outcomes(knocks, n, env=env, provider=provider):
        assert found.status == 0, found.output
        lines = [line for line in found.output.splitlines() if "turned away" in line]
        assert len(lines) == len(STRANGE), found.output
        for reason in STRANGE:
            pattern = rf"WARNING.*{provider}: turned away a caller at {re.escape(found.value)}:\d+: {reason}"
            assert sum(bool(re.search(pattern, line, re.IGNORECASE)) for line in lines) == 1, found.output


def test_faults_around_a_provider_do_not_hide_strangers():
    for found in harness.outcomes(
        knocks, 2, env={"HRDMA_TRANSPORT": "tcp", "HRDMA_FAULT": "tcp:seed=1"}, provider="tcp"
    ):
        assert found.status == 0 and found.output.count("turned away") == len(STRANGE), found.output

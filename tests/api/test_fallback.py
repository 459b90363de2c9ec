"""HRDMA_FALLBACK=tcp: a connection whose RDMA rails are lost goes on over tcp, says so once, and goes back; on devices ``sim``."""

from __future__ import annotations

import logging
import re
import time

import numpy as np
import pytest
from test_endpoint import exchanged, facing

import harness
import hrdma
from hrdma.config import Config

SIM = {"HRDMA_TRANSPORT": "verbs", "HRDMA_DEVICES": "sim2", "HRDMA_LOG_LEVEL": "warning"}
ALLOWED = SIM | {"HRDMA_FALLBACK": "tcp"}
FAILS = {"HRDMA_VERBS": "wc_error=0.02,fault_budget=2"}  # each rank's queue pair, twice
NEVER = {"HRDMA_VERBS": "deaf=16"}  # no pair of GIDs carries anything

FELL = r"no rail of verbs is left to rank {} \(sim2: .+\): the connection goes on over tcp"
BACK = r"the connection to rank {} is over verbs again \(sim2\)"


class Lines(logging.Handler):
    """What is logged from now on."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("hrdma").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def sums_are_right(comm, i):
    x = hrdma.empty(150_000, "int64") if i % 2 else np.empty(150_000, "int64")
    x[:] = np.arange(x.size) * 2 + comm.rank + i
    comm.allreduce(x, timeout=20)
    assert (x == np.arange(x.size) * 4 + 1 + 2 * i).all(), i
    peer = 1 - comm.rank
    comm.sendrecv(x[:500] + comm.rank, peer, x[500:1000], peer, timeout=20)
    assert (x[500:1000] == x[:500] + peer).all(), i


def there_and_back(comm):
    """Until the connection was over tcp and is over RDMA again, at both ends; what both saw of it."""
    lines = Lines()
    peer = 1 - comm.rank
    first = comm.stats()["peers"][peer]["fallbacks"]  # in init, perhaps
    seen = set()
    until = time.monotonic() + 40
    for i in range(100_000):
        sums_are_right(comm, i)
        found = comm.stats()["peers"][peer]
        seen.add(found["provider"])
        over = np.array([int(found["fallbacks"] > 0 and found["provider"] == "verbs" and len(lines.texts) >= 2)])
        comm.allreduce(over, op="min", timeout=20)
        if over[0]:
            break
        assert time.monotonic() < until, (seen, lines.texts, comm.info()["domains"]["verbs"])
    while True:  # the control thread may have to log yet what the last calls met with, and more may fail until then
        texts = list(lines.texts)  # first: what is said has been counted
        times, domain = comm.stats()["peers"][peer]["fallbacks"], comm.info()["domains"]["verbs"]
        said = sum("goes on over tcp" in text for text in texts)
        if (said >= times - first and f"({times} times)" in domain) or time.monotonic() > until + 10:
            break
        time.sleep(0.05)
    time.sleep(1.0)  # whoever leaves while the other's last rail fails is lost to it, and here one soon does
    return sorted(seen), first, times, texts, domain


def test_the_connection_goes_on_over_tcp_and_back_and_each_is_said_once():
    for rank, (seen, first, times, texts, domain) in enumerate(harness.ranks(there_and_back, 2, env=ALLOWED | FAILS)):
        assert seen == ["tcp", "verbs"] or (seen == ["verbs"] and times)
        fell = [text for text in texts if re.fullmatch(FELL.format(1 - rank), text)]
        back = [text for text in texts if re.fullmatch(BACK.format(1 - rank), text)]
        assert times - first <= len(fell) <= times and -1 <= len(fell) - len(back) <= 1, texts
        assert len(fell) + len(back) == len(texts), texts
        assert re.match(
            rf"1 rail \(\d+ times lost, \d+ used again\), tcp \w+( \w+)? \({times} times\): sim2", domain
        ), domain


def one_sided(comm):
    """Writes, reads, notifications and atomics of a connection that no rail carries."""
    lines = Lines()
    peer = 1 - comm.rank
    comm.barrier()
    assert comm.stats()["peers"][peer]["provider"] == "tcp" == comm.info()["transports"][peer]
    end, x, _memory, remote = facing(comm)
    data = np.random.default_rng(comm.rank).integers(0, 256, 500_000).astype("uint8")
    if comm.rank == 0:
        end.write(data, remote, 64, notify=7)
        end.write(data[:3], remote, 600_001, notify=8)
    else:
        assert [end.notified(timeout=20) for _ in range(2)] == [7, 8]
    back = np.zeros(500_000, "uint8")
    if comm.rank == 0:
        end.read(back, remote, 64)
        assert (back == data).all()
        with pytest.raises(ValueError):
            end.read(np.zeros(10, "uint8"), remote, (1 << 20) - 5)
    for i in range(100):
        before = end.fetch_add(remote, 8 * (1 << 16), 1, timeout=20)
        assert before == i
    assert end.compare_swap(remote, 8 * (1 << 16), 100, 5, timeout=20) == 100
    comm.barrier()
    assert x.view("uint64")[1 << 16] == 5
    exchanged(comm)
    return comm.stats()["peers"][peer]["fallbacks"], lines.texts


def test_one_sided_access_without_any_rail():
    for times, texts in harness.ranks(one_sided, 2, env=ALLOWED | NEVER):
        assert times == 1 and not texts  # it was said in init


def begun_by_argument(rank):
    lines = Lines()
    comm = hrdma.init(timeout=20, fallback="tcp")
    comm.barrier()
    return lines.texts


def test_the_argument_of_init_allows_it_and_both_ends_have_to():
    for rank, texts in enumerate(harness.ranks(begun_by_argument, 2, init=False, env=SIM | NEVER)):
        assert len(texts) == 1 and re.fullmatch(FELL.format(1 - rank), texts[0]), texts


def until_lost(comm):
    try:
        for i in range(100_000):
            sums_are_right(comm, i)
    except hrdma.PeerError as error:
        return error.transport, str(error), comm.stats()["peers"][1 - comm.rank]["fallbacks"]
    raise AssertionError("nothing happened")


@pytest.mark.parametrize(
    "env",
    [SIM, SIM | {"HRDMA_FALLBACK": "none"}, ALLOWED | {"HRDMA_REQUIRE": "verbs"}],
    ids=["unset", "none", "required"],
)
def test_where_it_is_not_allowed_the_peer_is_lost(env):
    for transport, text, times in harness.ranks(until_lost, 2, env=env | FAILS):
        assert transport == "verbs" and not times, text


def test_what_to_fall_back_on_is_checked():
    with pytest.raises(ValueError, match=r"HRDMA_FALLBACK=pigeons: expected one of none, tcp"):
        Config.load({"HRDMA_FALLBACK": "pigeons"})
    assert (
        Config.load({"HRDMA_FALLBACK": "tcp", "HRDMA_VERBS": "pin=1M"}).options("verbs")
        == "pin=1M,fallback=tcp,silence=5"
    )
    assert Config.load({"HRDMA_FALLBACK": "tcp", "HRDMA_REQUIRE": "verbs"}).options("verbs") == "silence=5"
    with pytest.raises(ValueError, match=r"HRDMA_VERBS.*HRDMA_FALLBACK"):
        Config.load({"HRDMA_VERBS": "pin=1M,fallback=tcp"})

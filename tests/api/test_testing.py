"""hrdma.testing: a job on ranks of its own, against faults that must fire; what comes back, what is refused, what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import hrdma
from hrdma.testing import DeviceFaults, FaultNeverFired, TransportFaults, ranks


def sums(comm, calls=60, n=20_000):
    """Checked allreduces; how many, and what the process has had of faults."""
    x = np.empty(n, "int64")
    for i in range(calls):
        x[:] = np.arange(n) * comm.size + comm.rank + i
        comm.allreduce(x, timeout=20)
        assert (x == comm.size * (np.arange(n) * comm.size + i) + sum(range(comm.size))).all(), i
    return calls, comm.stats()["faults"]


def test_a_job_with_two_rails_survives_errors_of_queue_pairs():
    found = ranks(sums, 2, faults=DeviceFaults(completion=0.01, rails=2, budget=3), calls=120)
    assert [one.result()[0] for one in found] == [120, 120]
    assert [one.exit_code for one in found] == [0, 0]
    assert sum(one.faults for one in found) >= max(one.value[1] for one in found) >= 1


@pytest.mark.parametrize("status", ["retry", "rnr"])
def test_with_one_rail_it_is_an_error_with_its_fields(status):
    words = {"retry": "transport retries exceeded", "rnr": "receiver-not-ready"}[status]
    found = ranks(sums, 2, faults=DeviceFaults(completion=0.05, status=status, budget=1, rank=0), calls=5000)
    assert [one.faults for one in found] == [1, 0]
    for one in found:
        assert isinstance(one.error, hrdma.PeerError) and one.value is None and one.exit_code == 1
        assert one.error.rank == 1 - one.rank and one.error.transport == "verbs"
        assert one.error.operation in ("allreduce", "init")
        assert "PeerError" in one.output
    assert words in str(found[0].error)
    with pytest.raises(hrdma.PeerError) as raised:
        found[0].result()
    assert "rank 0 wrote:\nTraceback" in str(raised.value.__cause__)


def test_memory_that_cannot_be_registered_goes_through_buffers():
    found = ranks(sums, 2, faults=DeviceFaults(registration=0.5), calls=20, n=200_000)
    assert [one.result()[0] for one in found] == [20, 20]
    assert sum(one.faults for one in found) >= 1


def pings(comm):
    """Messages one way, each before the next; how many arrived before the first that failed."""
    for i in range(500):
        try:
            if comm.rank == 0:
                comm.send(np.full(8, i), 1, timeout=5)
            else:
                comm.recv(np.empty(8, "int64"), 0, timeout=5)
        except hrdma.HrdmaError:
            return i
    return -1


def test_a_seed_is_repeated():
    def first(seed):
        return ranks(pings, 2, faults=TransportFaults(error=0.03, seed=seed, budget=1, rank=0))[0]

    a, b, c = first(7), first(7), first(8)
    assert a.faults == b.faults == 1
    assert a.value == b.value >= 0
    assert a.value != c.value


def test_a_fault_that_never_fires_fails_the_test():
    faults = DeviceFaults(completion=1e-12, seed=42)
    with pytest.raises(
        FaultNeverFired, match=r"completion=1e-12.*seed 42\nrank 0: returned\nrank 1: returned"
    ) as raised:
        ranks(sums, 2, faults=faults, calls=1)
    assert isinstance(raised.value, AssertionError)
    assert [one.value for one in raised.value.outcomes] == [(1, 0)] * 2
    ranks(sums, 1, calls=1)  # without faults there are none to fire


def test_a_process_that_is_killed_by_plan_has_had_its_fault():
    found = ranks(sums, 2, faults=TransportFaults(kill_process=20, rank=1), calls=5000)
    assert isinstance(found[1].error, ChildProcessError) and "SIGKILL" in str(found[1].error)
    assert found[1].exit_code == -9 and [one.faults for one in found] == [0, 1]
    assert isinstance(found[0].error, hrdma.PeerError) and found[0].error.rank == 1


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def hangs(comm, deaf):
    child = subprocess.Popen(["sleep", "1234"])
    print("child", child.pid)
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while comm.rank == 1:
        time.sleep(1)


@pytest.mark.parametrize("deaf", [False, True], ids=["asked", "killed"])
def test_what_hangs_is_stopped_with_all_that_it_started(deaf):
    found = ranks(hangs, 2, timeout=5, deaf=deaf)
    assert found[0].error is None
    assert isinstance(found[1].error, TimeoutError) and "rank 1 did not end within 5 s" in str(found[1].error)
    assert found[1].exit_code == (-9 if deaf else -15)
    assert ("in hangs" in found[1].output) != deaf
    for one in found:
        pid = int(one.output.split("child ")[1].split()[0])
        until = time.monotonic() + 5
        while runs(pid):
            assert time.monotonic() < until
            time.sleep(0.01)


class OddError(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a}{b}")


def ends(comm, how):
    if how == "odd":
        raise OddError(1, 2)
    if how == "exit":
        os._exit(7)
    return lambda: 0


def test_ends_that_cannot_be_handed_over_are_told():
    odd, left, value = (ranks(ends, 1, how=how)[0] for how in ("odd", "exit", "value"))
    assert isinstance(odd.error, RuntimeError) and str(odd.error) == "OddError: 12"
    assert isinstance(left.error, ChildProcessError) and "exited with 7" in str(left.error) and left.exit_code == 7
    assert value.error is not None and "pickle" in str(value.error)


SCRIPT = """
from hrdma.testing import ranks
class Pair:
    def __init__(self, rank): self.rank = rank
def main(comm, pair): return Pair(comm.rank + pair.rank)
if __name__ == "__main__":
    print([one.result().rank for one in ranks(main, 2, pair=Pair(5))])
"""


def test_it_works_in_a_script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[5, 6]\n", done.stderr


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DeviceFaults(completion=2), "completion=2: a probability"),
        (lambda: DeviceFaults(status="odd"), "status='odd': one of retry"),
        (lambda: DeviceFaults(rails=4), "rails=4: a whole number, 1 to 3"),
        (lambda: DeviceFaults(budget=0), "budget=0"),
        (lambda: DeviceFaults(seed=-1), "seed=-1"),
        (lambda: TransportFaults(provider="pigeon"), "provider='pigeon': one of shm"),
        (lambda: TransportFaults(drop=0.6, error=0.6), "add up to 1.2"),
        (lambda: TransportFaults(delay=0.1, delay_time=0), "delay_time=0: seconds above 0"),
        (lambda: TransportFaults(kill=1, kill_process=1), "one of them"),
        (lambda: ranks(sums, 0), "size=0"),
        (lambda: ranks(sums, 1, timeout=0), "timeout=0"),
        (lambda: ranks(lambda comm: 0, 1), "at the top of a module"),
        (lambda: ranks(sums, 1, calls=lambda: 0), "cannot be pickled"),
        (lambda: ranks(sums, 2, faults=DeviceFaults(rank=2)), "there are 2 ranks"),
        (
            lambda: ranks(sums, 2, faults=DeviceFaults(), env={"HRDMA_VERBS": "gid=1"}),
            "HRDMA_VERBS is set by the faults",
        ),
    ],
)
def test_what_is_wrong_is_named_and_starts_nothing(make, words):
    with pytest.raises(ValueError) as raised:
        make()
    assert words in str(raised.value)


def test_settings_of_a_job():
    assert DeviceFaults(completion=0.5, rails=2, seed=4, budget=3, fallback=True, rank=1).environment(1) == {
        "HRDMA_TRANSPORT": "verbs",
        "HRDMA_DEVICES": "sim2,sim2",
        "HRDMA_FALLBACK": "tcp",
        "HRDMA_VERBS": "wc_error=0.5,wc_status=retry,fault_seed=4,fault_budget=3",
    }
    assert "HRDMA_VERBS" not in DeviceFaults(completion=0.5, rank=1).environment(0)
    assert TransportFaults(delay=0.25, kill=9).environment() == {
        "HRDMA_TRANSPORT": "tcp",
        "HRDMA_FAULT": "tcp:delay=0.25:0.002s,kill=after:9,seed=1",
    }

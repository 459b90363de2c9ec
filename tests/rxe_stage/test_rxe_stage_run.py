"""tools/rxe_vm/run: exit codes, output, results; and that panics, hangs and kills are told and leave nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.xdist_group("rxe"), pytest.mark.slow, pytest.mark.timeout(150)]

BOOT = "100"  # seconds, with plenty for a machine that does other things


@pytest.fixture
def outcome(run, tmp_path):
    """Exit code, output and errors of ``run ... -- sh -c script``; its results are in tmp_path."""

    def ended(script: str, *options: str) -> tuple[int, str, str]:
        command = [run, "--timeout", BOOT, "--out", tmp_path, *options, "--", "sh", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=140)
        return done.returncode, done.stdout, done.stderr

    return ended


def test_output_results_environment_and_exit_code(outcome, tmp_path, monkeypatch):
    """Of two guests, whose first exit code that is not zero is that of all."""
    monkeypatch.setenv("HRDMA_STRICT", "it's\nexit 9")  # not a command
    inside = Path(__file__).with_name("written_in_the_guest")
    script = f"""
        sleep 1000 &  # holds the output open
        pwd
        echo "$HOSTS $HOST $HRDMA_STRICT"
        echo bad >/dev/stderr
        echo "only in $HOST" >{inside} && cat {inside}
        echo result >"$RXE_OUT/found$HOST"
        printf end
        exit $((HOST * 3))
    """
    try:
        code, told, errors = outcome(script, "--hosts", "2")
        assert (code, errors) == (3, "")
        for host in range(2):
            lines = [line[4:] for line in told.splitlines() if line.startswith(f"[{host}] ")]
            root = str(Path(__file__).parents[2])
            assert lines == [root, f"2 {host} it's", "exit 9", "bad", f"only in {host}", "end"], told
            assert (tmp_path / f"found{host}").read_text() == "result\n"
        assert not inside.exists()
    finally:
        inside.unlink(missing_ok=True)


def test_a_panic(outcome, tmp_path):
    code, _, errors = outcome("echo 1 >/proc/sys/kernel/sysrq; echo c >/proc/sysrq-trigger; sleep 100")
    assert code == 125
    assert "guest 0 died while running its command" in errors
    assert "Kernel panic" in errors
    assert "Kernel panic" in (tmp_path / "console0.log").read_text()


def test_a_hang_in_the_command(outcome):
    code, told, errors = outcome("echo here; sleep 1000", "--timeout", "15", "--cores", "1")
    assert code == 124
    assert "out of time: guest 0 is " in errors
    assert "rxe_vm: " in errors  # the console's last lines
    if told:
        assert "is running its command" in errors


def test_a_hang_at_boot(outcome):
    code, _, errors = outcome("true", "--timeout", "1")
    assert code == 124
    assert "out of time: guest 0 is booting" in errors


def machines_of(pid: int) -> list[int]:
    """Children that run QEMU: before it starts them, `run` has others, which end."""
    found = []
    for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{word}/comm").read_text().startswith("qemu"):
                found.append(int(word))
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_takes_its_machines_along(run, tmp_path, number):
    command = [run, "--hosts", "2", "--out", tmp_path, "--", "sleep", "1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            deadline = time.monotonic() + 30
            while len(pids := machines_of(process.pid)) < 2 and time.monotonic() < deadline:
                time.sleep(0.1)
            machines = [os.pidfd_open(pid) for pid in pids]
            assert len(machines) == 2, process.poll()
            process.send_signal(number)
            assert process.wait(20) == (-9 if number == signal.SIGKILL else 128 + number)
            for machine in machines:
                assert select.select([machine], [], [], 10)[0], "QEMU lives on"
                os.close(machine)
        finally:
            process.kill()


def test_one_folder_is_for_one_run(outcome, tmp_path):
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        code, _, errors = outcome("true")
    finally:
        os.close(folder)
    assert code == 125
    assert "another run writes to" in errors


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--wires", "0"], "--wires 0: must be 1 to 16"),
        (["--cores", "0"], "--cores 0: must be 1 to 64"),
        (["--memory", "1"], "--memory 1: must be 256"),
        (["--timeout", "nan"], "--timeout nan: must be"),
        (["--hosts", "3"], "argument --hosts: invalid choice"),
    ],
)
def test_options_that_cannot_be(outcome, words, expected):
    code, _, errors = outcome("true", *words)
    assert code == 2
    assert expected in errors

"""`hrdma run`: environment, output, exit codes, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

RUN = [sys.executable, "-m", "hrdma.launch"]


def run(*arguments: str, timeout: float = 20, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUN, *arguments], capture_output=True, text=True, timeout=timeout, **options)


@pytest.fixture
def script(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "job.py"
        path.write_text(
            "import os, sys, time, signal, subprocess\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(text)
        )
        return str(path)

    return write


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def gone(pids: list[int], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        if time.monotonic() > end:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return False
        time.sleep(0.01)
    return True


def pids_in(folder: Path, count: int) -> list[int]:
    """The numbers that processes have left in files here."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        found = [path.read_text() for path in folder.glob("pid*")]
        if len(found) == count and all(found):
            return [int(text) for text in found]
        time.sleep(0.01)
    raise AssertionError(f"{len(list(folder.glob('pid*')))} of {count} processes started")


LEAVE_PIDS = """
    child = subprocess.Popen(["sleep", "60"])
    for pid in (os.getpid(), child.pid):
        open(os.path.join(sys.argv[1], f"pid{pid}"), "w").write(str(pid))
"""


def test_environment_and_arguments(script):
    path = script("""
        names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR".split()
        print(*[os.environ[name] for name in names], sys.argv[1:])
        store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
        print("port", os.environ["MASTER_PORT"], len(os.environ["HRDMA_TOKEN"]), store)
    """)
    environ = {**os.environ, "RANK": "7", "WORLD_SIZE": "9", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environ.pop("HRDMA_TOKEN", None)
    done = run("-n", "2", path, "-n", "5", "--timeout", "x", "-m", "y", env=environ)
    assert done.returncode == 0 and done.stderr == ""
    lines = sorted(done.stdout.splitlines())
    arguments = "['-n', '5', '--timeout', 'x', '-m', 'y']"
    assert lines[0] == f"[0] 0 2 0 2 127.0.0.1 {arguments}" and lines[2] == f"[1] 1 2 1 2 127.0.0.1 {arguments}"
    assert lines[1].startswith("[0] port ") and lines[1].endswith(" 64 None") and lines[1][4:] == lines[3][4:]


def test_modules_and_programs():
    done = run("-n", "1", "-m", "timeit", "-n", "1", "-r", "1", "pass")
    assert done.returncode == 0 and "[0] 1 loop" in done.stdout
    done = run("-n", "2", "--no-prefix", "echo", "-n", "hi")
    assert done.returncode == 0 and done.stdout == "hi\nhi\n"
    done = run("-n", "1", "no-such-program")
    assert done.returncode == 127 and "no such command: no-such-program" in done.stderr
    done = run("-n", "1", "no-such-file.py")
    assert done.returncode == 127 and "no such file: no-such-file.py" in done.stderr


@pytest.mark.parametrize(
    "arguments", [["-n", "0", "x.py"], ["x.py"], ["-n", "2"], ["-n", "2", "--timeout", "0", "x.py"]]
)
def test_wrong_usage(arguments):
    assert run(*arguments).returncode == 2


def test_ranks_can_meet(script):
    path = script("""
        from hrdma.config import Config, world_from_env
        from hrdma.control import ControlPlane
        deadline = time.monotonic() + 10
        plane = ControlPlane.join(world_from_env(), Config.load(), {"rank": rank}, deadline=deadline)
        plane.barrier(deadline=deadline)
        print([member.card["rank"] for member in plane.members])
        plane.leave(deadline=deadline)
    """)
    done = run("-n", "3", path)
    assert done.returncode == 0 and done.stderr == ""
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] [0, 1, 2]" for rank in range(3)]


def test_lines_stay_whole_and_partial_ones_are_kept(script):
    path = script("""
        for i in range(200):
            for part in (f"{rank}-{i}-", "x" * 50, "\\n"):
                sys.stdout.write(part); sys.stdout.flush()
        sys.stderr.write("tail"); sys.stderr.flush()
    """)
    done = run("-n", "3", path)
    lines = done.stdout.splitlines()
    assert len(lines) == 600
    for rank in range(3):
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert own == [f"[{rank}] {rank}-{i}-{'x' * 50}" for i in range(200)]
    assert sorted(done.stderr.splitlines()) == ["[0] tail", "[1] tail", "[2] tail"]


def test_input_goes_to_rank_0(script):
    done = run("-n", "2", script("print(repr(sys.stdin.read()))"), input="abc")
    assert sorted(done.stdout.splitlines()) == ["[0] 'abc'", "[1] ''"]


def test_ranks_are_groups_of_one_session(script):
    """The kernel schedules by session: of ranks in sessions of their own none would pass a core on by yielding."""
    path = script("""
        group = "/proc/self/autogroup"
        print(os.getpgid(0) == os.getpid(), os.getsid(0), os.path.exists(group) and open(group).read().strip())
    """)
    lines = {line.partition(" ")[2] for line in run("-n", "3", path).stdout.splitlines()}
    assert len(lines) == 1 and lines.pop().startswith(f"True {os.getsid(0)} ")


@contextlib.contextmanager
def in_terminal(*arguments: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """The launcher as the job in front of a terminal, and the end at which a user would sit."""
    user, terminal = pty.openpty()
    try:
        launcher = subprocess.Popen(
            [*RUN, *arguments], stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(terminal)
        try:
            yield user, launcher
        finally:
            launcher.kill()
            launcher.wait(5)
    finally:
        os.close(user)


def seen_until(user: int, text: bytes) -> bytes:
    seen, end = b"", time.monotonic() + 10
    while text not in seen:
        ready, _, _ = select.select([user], [], [], max(0.0, end - time.monotonic()))
        assert ready, seen
        seen += os.read(user, 4096)
    return seen


def test_rank_0_reads_from_the_terminal(script):
    path = script("print('got', repr(sys.stdin.readline()), flush=True)")
    with in_terminal("-n", "2", path) as (user, launcher):
        seen_until(user, b"got ''")
        os.write(user, b"word\n")
        seen_until(user, rb"got 'word\n'")
        assert launcher.wait(10) == 0


def test_the_terminals_interrupt_comes_to_ranks_by_the_launcher(script, tmp_path):
    path = script("""
        interrupts = []
        signal.signal(signal.SIGINT, lambda *_: interrupts.append(1))
        print("there", flush=True)
        while not interrupts: time.sleep(0.01)
        time.sleep(0.5)
        print(f"interrupted {len(interrupts)} times by {os.getppid()}", flush=True)
    """)
    with in_terminal("-n", "1", path) as (user, launcher):
        seen_until(user, b"there")
        os.write(user, b"\x03")
        seen_until(user, b"interrupted 1 times")
        assert launcher.wait(10) == 130


def test_the_first_failure_stops_all_and_is_the_exit_code(script, tmp_path):
    all_there = (
        "sum(os.path.getsize(one.path) > 0 for one in os.scandir(sys.argv[1]) if one.name.startswith('pid')) == 6"
    )
    path = script(LEAVE_PIDS + f"    while rank == 1:\n        if {all_there}: sys.exit(3)\n    time.sleep(60)")
    begun = time.monotonic()
    done = run("-n", "3", path, str(tmp_path))
    assert done.returncode == 3 and time.monotonic() - begun < 20
    assert "hrdma run: rank 1 exited with 3; stopping the others" in done.stderr
    assert gone(pids_in(tmp_path, 6))


def test_a_killed_rank(script):
    done = run("-n", "2", script("if rank == 0: os.kill(os.getpid(), 9)\ntime.sleep(60)"))
    assert done.returncode == 137 and "rank 0 was killed by SIGKILL; stopping the others" in done.stderr


def test_keep_going(script):
    done = run("-n", "2", "--keep-going", script("if rank == 0: sys.exit(4)\ntime.sleep(0.5)\nprint('done')"))
    assert done.returncode == 4 and done.stdout == "[1] done\n"


def test_a_rank_that_ignores_the_request_is_killed(script, tmp_path, monkeypatch):
    path = script("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        if rank == 0: time.sleep(0.5); sys.exit(1)
        time.sleep(60)
    """)
    code = "import sys, hrdma.launch as l; l.GRACE = 0.5; sys.exit(l.run([sys.argv[1]], ranks=2))"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=20)
    assert done.returncode == 1


@pytest.mark.parametrize("timeout", ["inf", "1e300"])
def test_no_timeout_is_beyond_a_clock(script, timeout):
    done = run("-n", "1", "--timeout", timeout, script("pass"))
    assert (done.returncode, done.stderr) == (0, "")


def test_timeout(script, tmp_path):
    path = script(LEAVE_PIDS + "    if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n    time.sleep(60)")
    for seconds in ("1", "5", "20"):  # until which the ranks have started, however busy the machine is
        folder = tmp_path / seconds
        folder.mkdir()
        done = run("-n", "2", "--timeout", seconds, path, str(folder))
        assert done.returncode == 124 and f"timed out after {seconds} s; stopping ranks 0, 1" in done.stderr
        if len(list(folder.glob("pid*"))) == 4:
            break
    assert gone(pids_in(folder, 4))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupting_leaves_nothing(script, tmp_path, number, code):
    path = script(LEAVE_PIDS + "    time.sleep(60)")
    launcher = subprocess.Popen([*RUN, "-n", "2", path, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    pids = pids_in(tmp_path, 4)
    launcher.send_signal(number)
    launcher.communicate(timeout=10)
    assert launcher.returncode == code
    assert gone(pids)


def test_killing_the_launcher_leaves_nothing(script, tmp_path):
    path = script(LEAVE_PIDS + "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    time.sleep(60)")
    launcher = subprocess.Popen([*RUN, "-n", "2", path, str(tmp_path)], stdout=subprocess.DEVNULL)
    pids = pids_in(tmp_path, 4)
    launcher.kill()
    launcher.wait(5)
    assert gone(pids)


def test_user_signals_are_passed_on(script, tmp_path):
    path = script("""
        signal.signal(signal.SIGUSR1, lambda *_: (print("got it", flush=True), os._exit(0)))
        open(os.path.join(sys.argv[1], f"pid{rank}"), "w").write(str(os.getpid()))
        time.sleep(60)
    """)
    launcher = subprocess.Popen([*RUN, "-n", "2", path, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    pids_in(tmp_path, 2)
    launcher.send_signal(signal.SIGUSR1)
    out, _ = launcher.communicate(timeout=10)
    assert launcher.returncode == 0 and sorted(out.splitlines()) == ["[0] got it", "[1] got it"]


def test_a_closed_pipe_ends_the_job(script, tmp_path):
    path = script(LEAVE_PIDS + "    while True: print('x', flush=True); time.sleep(0.01)")
    launcher = subprocess.Popen(
        [*RUN, "-n", "2", path, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    launcher.stdout.readline()
    pids = pids_in(tmp_path, 4)
    launcher.stdout.close()
    _, errors = launcher.communicate(timeout=10)
    assert launcher.returncode == 128 + signal.SIGPIPE and "Exception" not in errors
    assert gone(pids)

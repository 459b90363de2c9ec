"""`hrdma run`: starts the ranks of a job on this host, shows their output by line, and leaves nothing running.

Each rank leads a process group of its own, so that stopping it stops what it started, and has no terminal. All are in one
session: ranks that share cores wait by yielding, and where the kernel groups tasks by session
(`kernel.sched_autogroup_enabled`) that gives way to those of the own session alone. Three things end ranks: the launcher
itself; the kernel, which kills each rank when the launcher dies (PR_SET_PDEATHSIG); and a guard, a small process that sees
the launcher's death as the end of a pipe and kills the ranks' process groups, for what the ranks had started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import BinaryIO

import click

from hrdma.places import Place, enter_network, leave_terminal, places, reserve_port

__all__ = ["command", "main", "run"]

LOOPBACK = "127.0.0.1"
GRACE = 5.0  # seconds between asking ranks to end and killing them
LONGEST_LINE = 1 << 20  # bytes held back for the end of a line
EXIT_TIMEOUT = 124  # as timeout(1)
LONGEST = 1e9  # seconds that a clock takes
LONGEST_SLEEP = 1e5  # seconds that epoll takes at once
EXIT_NOT_PERMITTED = 126
EXIT_NOT_FOUND = 127
EXIT_SIGNAL = 128  # plus the signal's number
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_COLOURS = (36, 33, 32, 35, 34, 31)
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


class _Rank:
    """One process and what it has written of its current lines."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], prefix: bytes) -> None:
        self.rank = rank
        self.process = process
        self.prefix = prefix
        self.partial: dict[int, bytes] = {1: b"", 2: b""}

    def signal(self, number: int) -> None:
        """To the whole group, which may outlive its leader."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def run(
    command: Sequence[str],
    *,
    ranks: int,
    timeout: float | None = None,
    prefix: bool = True,
    keep_going: bool = False,
    env: Mapping[str, str] | None = None,
    namespaces: Sequence[str] = (),
    meeting: tuple[str, socket.socket] | None = None,
) -> int:
    """Runs a command as the ranks of a job on this host and waits for them.

    Parameters
    ----------
    command : sequence of str
        Program and arguments; a program that ends in ``.py`` is run by this interpreter.
    ranks : int
        How many.
    timeout : float, optional
        Seconds after which all are stopped.
    prefix : bool
        Put the rank in front of each line of output.
    keep_going : bool
        Do not stop the other ranks when one fails.
    env : mapping, optional
        Added to the environment.
    namespaces : sequence of str, optional
        The network namespace (file) that each rank runs in; ranks of one count as a host of their own. This
        process's where none are given.
    meeting : (str, socket), optional
        The address at which rank 0 is met, and a socket of `hrdma.places.reserve_port` that keeps the port. Loopback where it is
        not given.

    Returns
    -------
    int
        0; or the exit code of the first rank that failed, 128 plus the number of the signal that ended it; 124 after
        the timeout; 126 when a rank cannot enter its namespace; 127 when there is no such command; 128 plus the number of a signal that ended the launcher.

    Notes
    -----
    Call it from the main thread: it handles signals. It prints only the ranks' output, and why they are stopped.
    """
    if ranks < 1:
        raise ValueError(f"{ranks} ranks: at least 1 is needed")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout of {timeout} s: it must be above 0")
    argv = [sys.executable, *command] if command[0].endswith(".py") else list(command)
    if shutil.which(argv[0]) is None:
        _say(f"no such command: {argv[0]}")
        return EXIT_NOT_FOUND
    if argv[0] == sys.executable and command[0].endswith(".py") and not os.path.isfile(command[0]):
        _say(f"no such file: {command[0]}")
        return EXIT_NOT_FOUND
    if namespaces and len(namespaces) != ranks:
        raise ValueError(f"{len(namespaces)} namespaces for {ranks} ranks: one for each is needed")
    with contextlib.ExitStack() as stack:
        where = places(ranks, namespaces, stack)
        address, kept = meeting or (LOOPBACK, stack.enter_context(reserve_port(LOOPBACK)))
        given = {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(kept.getsockname()[1]),
            **_shared(os.environ),
            **_shared(env or {}),
        }
        return _Job(prefix=prefix, keep_going=keep_going).run(argv, where, given, timeout)


def _shared(environ: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key not in _OWN}


class _Job:
    """The ranks of one call of `run`."""

    def __init__(self, *, prefix: bool, keep_going: bool) -> None:
        self._prefix = prefix
        self._keep_going = keep_going
        self._ranks: list[_Rank] = []
        self._running: dict[int, _Rank] = {}
        self._code = 0
        self._kill_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._token = secrets.token_hex(32)

    def run(self, argv: list[str], where: list[Place], env: dict[str, str], timeout: float | None) -> int:
        end = None if timeout is None else time.monotonic() + min(timeout, LONGEST)
        sys.stdout.flush()
        sys.stderr.flush()
        guard = _Guard()
        with _Signals() as signals:
            self._selector.register(signals.descriptor, selectors.EVENT_READ, None)
            try:
                for rank, place in enumerate(where):
                    self._start(rank, len(where), place, argv, env, guard)
                while self._running:
                    self._turn(signals, end, timeout)
            finally:
                # The ranks are not reaped yet, so that no other process can have got their numbers.
                for entry in self._ranks:
                    entry.signal(signal.SIGKILL)
                self._drain()
                self._selector.close()
                guard.dismiss()
                for entry in self._ranks:
                    entry.process.wait()
        return self._code

    def _start(self, rank: int, count: int, place: Place, argv: list[str], env: dict[str, str], guard: _Guard) -> None:
        environment = {
            "HRDMA_TOKEN": self._token,
            "PYTHONUNBUFFERED": "1",
            **env,
            "RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_RANK": str(place.local_rank),
            "LOCAL_WORLD_SIZE": str(place.local_size),
        }
        parent = os.getpid()

        def before_exec() -> None:
            os.setpgid(0, 0)
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(EXIT_SIGNAL + signal.SIGKILL)
            leave_terminal()
            if place.namespace < 0:
                return
            try:
                enter_network(place.namespace)
            except OSError as error:  # of an exception here only its type would reach the launcher
                os.write(2, f"cannot enter the network namespace of the rank: {error.strerror}\n".encode())
                os._exit(EXIT_NOT_PERMITTED)

        process = subprocess.Popen(
            argv,
            env=environment,
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=before_exec,
        )
        guard.watch(process.pid)
        entry = _Rank(rank, process, self._label(rank))
        self._ranks.append(entry)
        self._running[rank] = entry
        for stream, pipe in ((1, process.stdout), (2, process.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, (entry, stream))

    def _turn(self, signals: _Signals, end: float | None, timeout: float | None) -> None:
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            for entry in self._running.values():
                entry.signal(signal.SIGKILL)
            self._kill_at = now + GRACE
        if end is not None and now >= end and self._kill_at is None:
            which = ", ".join(str(rank) for rank in self._running)
            _say(f"timed out after {timeout:g} s; stopping rank{'s' if len(self._running) > 1 else ''} {which}")
            self._fail(EXIT_TIMEOUT)
            self._stop(signal.SIGTERM)
        times = [when for when in (self._kill_at, end if self._kill_at is None else None) if when is not None]
        wait = min(max(0.0, min(times) - time.monotonic()), LONGEST_SLEEP) if times else None
        for key, _ in self._selector.select(wait):
            if key.data is None:
                for number in signals.read():
                    self._signalled(number)
            else:
                self._read(key.fileobj, *key.data)  # type: ignore[arg-type]
        for rank, entry in list(self._running.items()):
            found = os.waitid(os.P_PID, entry.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                del self._running[rank]
                self._ended(rank, found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)

    def _ended(self, rank: int, code: int) -> None:
        if code == 0:
            return
        if self._kill_at is None:
            how = f"exited with {code}" if code > 0 else f"was killed by {_signal_name(-code)}"
            others = bool(self._running) and not self._keep_going
            _say(f"rank {rank} {how}" + ("; stopping the others" if others else ""))
        self._fail(code if code > 0 else EXIT_SIGNAL - code)
        if self._running and self._kill_at is None and not self._keep_going:
            self._stop(signal.SIGTERM)

    def _signalled(self, number: int) -> None:
        if number in _PASSED_ON:
            for entry in self._running.values():
                entry.signal(number)
        elif number in _STOPPING:
            if self._kill_at is not None and self._code == EXIT_SIGNAL + number:
                self._kill_at = time.monotonic()  # asked twice: at once
                return
            self._fail(EXIT_SIGNAL + number)
            self._stop(number)

    def _stop(self, number: int) -> None:
        for entry in self._running.values():
            entry.signal(number)
            entry.signal(signal.SIGCONT)  # a stopped process takes no signal but SIGKILL
        if self._kill_at is None:
            self._kill_at = time.monotonic() + GRACE

    def _fail(self, code: int) -> None:
        self._code = self._code or code

    # Output

    def _label(self, rank: int) -> bytes:
        if not self._prefix:
            return b""
        if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
            return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m[{rank}]\x1b[0m ".encode()
        return f"[{rank}] ".encode()

    def _read(self, pipe: BinaryIO, entry: _Rank, stream: int) -> None:
        try:
            data = os.read(pipe.fileno(), 65536)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(pipe)
            pipe.close()
            data = b"\n" if entry.partial[stream] else b""
        *lines, entry.partial[stream] = (entry.partial[stream] + data).split(b"\n")
        if len(entry.partial[stream]) > LONGEST_LINE:
            lines.append(entry.partial[stream])
            entry.partial[stream] = b""
        if lines:
            self._write(stream, b"".join(entry.prefix + line + b"\n" for line in lines))

    def _write(self, stream: int, data: bytes) -> None:
        output = sys.stdout if stream == 1 else sys.stderr
        try:
            output.buffer.write(data)
            output.buffer.flush()
        except BrokenPipeError:
            # Nobody reads any more: end as a program in a pipeline does.
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), output.fileno())
            self._fail(EXIT_SIGNAL + signal.SIGPIPE)
            self._stop(signal.SIGTERM)

    def _drain(self) -> None:
        """What is left in the pipes after the end of all ranks; a stray process may still hold their other ends."""
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            pipes = [key for key in self._selector.get_map().values() if key.data is not None]
            ready = self._selector.select(0.05) if pipes else []
            found = [key for key, _ in ready if key.data is not None]
            if not found:
                break
            for key in found:
                self._read(key.fileobj, *key.data)  # type: ignore[arg-type]
        for entry in self._ranks:
            for stream, rest in entry.partial.items():
                if rest:
                    self._write(stream, entry.prefix + rest + b"\n")
            for pipe in (entry.process.stdout, entry.process.stderr):
                if pipe is not None:
                    pipe.close()


class _Signals:
    """Signals as bytes in a pipe, while it is entered; the handlers from before come back afterwards."""

    def __enter__(self) -> _Signals:
        self.descriptor, self._sink = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup = signal.set_wakeup_fd(self._sink, warn_on_full_buffer=False)
        self._before = {
            number: signal.signal(number, lambda *_: None) for number in (signal.SIGCHLD, *_STOPPING, *_PASSED_ON)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self.descriptor)
        os.close(self._sink)

    def read(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            return os.read(self.descriptor, 4096)
        return b""


# Set here for each rank, whatever a launcher around this one has set. Torch's agent store is not ours.
_OWN = frozenset(
    (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
    )
)


class _Guard:
    """A process that kills the process groups named to it when this one ends without having dismissed it."""

    def __init__(self) -> None:
        source, self._sink = os.pipe2(os.O_CLOEXEC)
        self._pid = os.fork()
        if self._pid != 0:
            os.close(source)
            return
        try:
            os.close(self._sink)
            self._stand(source)
        finally:
            os._exit(0)

    def watch(self, group: int) -> None:
        self._tell(f"{group}\n")

    def dismiss(self) -> None:
        self._tell("0\n")
        os.close(self._sink)
        os.waitpid(self._pid, 0)

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._sink, line.encode())

    @staticmethod
    def _stand(source: int) -> None:
        os.setsid()
        for number in (*_STOPPING, *_PASSED_ON):
            signal.signal(number, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        data = b""
        while part := os.read(source, 4096):
            data += part
        groups = [int(group) for group in data.split()]
        for group in groups if 0 not in groups else ():
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"hrdma run: {text}\n")
        sys.stderr.flush()


class _RunCommand(click.Command):
    """Options end where the job's own command begins: at the script, or behind ``-m module``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        valued = {name for param in self.params if not getattr(param, "is_flag", False) for name in param.opts}
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] != "--":
            if args[at] == "-m":
                at += 2
                break
            at += 2 if args[at] in valued else 1
        if at < len(args) and args[at] != "--":
            args = [*args[:at], "--", *args[at:]]
        return super().parse_args(ctx, args)


@click.command("run", cls=_RunCommand)
@click.option("-n", "ranks", type=click.IntRange(min=1), required=True, help="Number of ranks.")
@click.option("-m", "module", metavar="MODULE", help="Run a Python module instead of a script.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds after which all are stopped.")
@click.option("--prefix/--no-prefix", default=True, help="Show the rank in front of each line (default).")
@click.option("--keep-going", is_flag=True, help="Do not stop the other ranks when one fails.")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
@click.pass_context
def command(
    ctx: click.Context,
    ranks: int,
    module: str | None,
    timeout: float | None,
    prefix: bool,
    keep_going: bool,
    args: tuple[str, ...],
) -> None:
    """Run a script, module or program as the ranks of a job on this host.

    \b
    hrdma run -n 4 train.py --lr 0.1
    hrdma run -n 4 -m package.train --lr 0.1

    Exit code: that of the first rank that failed (128 + signal when it was killed), 124 after the timeout, 127 when
    there is no such command.
    """
    argv = [sys.executable, "-m", module, *args] if module else list(args)
    if not argv:
        raise click.UsageError("name a script or program, or -m MODULE")
    ctx.exit(run(argv, ranks=ranks, timeout=timeout, prefix=prefix, keep_going=keep_going))


def main() -> None:
    """Entry point of ``python -m hrdma.launch``."""
    command(prog_name="hrdma run")


if __name__ == "__main__":
    main()

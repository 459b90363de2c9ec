"""The command line: runs a command in one or two guests, passes on its output, and ends with its exit code."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rxe_vm.initramfs import initramfs
from rxe_vm.kernel import Kernel, kernel
from rxe_vm.machine import CONTROL_WIRE, MTU, ClockError, Guest, OutOfTimeError, Size, accelerator, serve
from rxe_vm.packages import ROOT, StageError, bring
from rxe_vm.wires import Wires

CACHE = ROOT / "build" / "rxe_vm"
BOOTS = 3  # of guests whose clocks are wrong
OUT_OF_TIME, BROKEN = 124, 125  # exit codes that are not the command's, as those of timeout(1)

QDISCS = (
    "sch_htb sch_prio sch_ets sch_mqprio sch_netem sch_tbf sch_fq sch_ingress "
    "cls_u32 cls_flower cls_basic cls_fw cls_matchall act_skbedit act_mirred act_gact act_police ifb"
)


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/rxe_vm/run",
        usage="%(prog)s [options] -- command ...",
        description="Runs a command in this checkout, in one or two virtual machines with soft-RoCE devices.",
        epilog=f"Exit code: the command's (with two guests the first that is not 0); {OUT_OF_TIME} at the deadline, "
        f"{BROKEN} when a guest cannot be had or died.",
    )
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1, help="guests; the command runs in each (1)")
    parser.add_argument("--wires", type=int, default=1, metavar="N", help="wires, each with a device rxe0 ... (1)")
    parser.add_argument("--timeout", type=float, default=300, metavar="S", help="seconds for all, boot included (300)")
    parser.add_argument(
        "--cores", type=int, metavar="N", help="processors of each guest (its share of this machine's, at most 4)"
    )
    parser.add_argument("--memory", type=int, default=2048, metavar="M", help="MiB for each guest (2048)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where $RXE_OUT and the consoles go (build/rxe_vm/out, which is emptied before)",
    )
    parser.add_argument("command", nargs="+", help=argparse.SUPPRESS)
    known = parser.parse_args(words)
    for name, least, most in (("wires", 1, 16), ("cores", 1, 64), ("timeout", 1, 86400), ("memory", 256, 1 << 20)):
        if (value := getattr(known, name)) is not None and not least <= value <= most:
            parser.error(f"--{name} {value}: must be {least} to {most}")
    return known


def job(host: int, asked: argparse.Namespace, unpacked: Kernel) -> dict[str, str]:
    """Environment of the command in this guest, and what guest/start reads."""
    found = {name: value for name, value in os.environ.items() if name.startswith("HRDMA_")}
    found |= {"HOST": str(host), "HOSTS": str(asked.hosts), "WIRES": str(asked.wires)}
    for other in range(2):
        for wire in range(asked.wires):
            found[f"WIRE{wire}_ADDR{other}"] = f"10.77.{wire}.{other + 1}"
        if asked.hosts == 2:
            found[f"HOSTS_ADDR{other}"] = f"10.77.{CONTROL_WIRE}.{other + 1}"
    return found | {
        "RXE_ROOT": str(ROOT),
        "RXE_MODULES": str(unpacked.modules),
        "RXE_QDISCS": QDISCS,
        "RXE_MTU": str(MTU),
        "RXE_CONTROL": str(CONTROL_WIRE),
    }


@contextlib.contextmanager
def results(asked: Path | None) -> Iterator[Path]:
    """The folder for what guests write, ours alone; only the default one is emptied, as nobody else's files are in it."""
    folder = (asked or CACHE / "out").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StageError(f"another run writes to {folder}; choose another folder: --out DIR") from None
        for old in folder.iterdir() if asked is None else ():
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
        yield folder
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def guests(asked: argparse.Namespace) -> Iterator[tuple[list[Guest], Wires]]:
    """Running guests and the wires between them; ended on the way out."""
    bring()
    unpacked = kernel(CACHE)
    how = accelerator(unpacked, CACHE)
    size = Size(asked.memory, asked.cores or max(1, min(4, (os.cpu_count() or 1) // asked.hosts)))
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(results(asked.out))
        theirs: list[dict[int, socket.socket]] = [{} for _ in range(asked.hosts)]
        pairs = []
        with contextlib.ExitStack() as passed:  # what QEMU has then
            for wire in (*range(asked.wires), CONTROL_WIRE) if asked.hosts == 2 else ():
                ours = []
                for host in range(2):
                    near, far = socket.socketpair()
                    ours.append(stack.enter_context(near))
                    theirs[host][wire] = passed.enter_context(far)
                pairs.append((ours[0], ours[1]))
            started = []
            for host in range(asked.hosts):
                archive = initramfs(unpacked, job(host, asked, unpacked), asked.command)
                started.append(Guest(host, unpacked, how, size, archive, theirs[host], out))
                stack.callback(started[-1].end)
        yield started, Wires(pairs)


class Printer:
    """Writes the guests' output: as it comes from one, in whole lines with the guest's number from two."""

    def __init__(self, hosts: int) -> None:
        self._rest = [b""] * hosts

    def __call__(self, host: int, data: bytes) -> None:
        if len(self._rest) == 2:
            if not data and self._rest[host]:
                data = b"\n"
            *lines, self._rest[host] = (self._rest[host] + data).split(b"\n")
            data = b"".join(b"[%d] %s\n" % (host, line) for line in lines)
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def leave(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def main(words: list[str]) -> int:
    asked = arguments(words)
    deadline = time.monotonic() + asked.timeout
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, leave)
    for left in reversed(range(BOOTS)):
        try:
            with guests(asked) as (running, wires):
                codes = serve(running, wires, deadline, Printer(asked.hosts))
                if any(b"Call Trace" in guest.console for guest in running):
                    print(f"rxe_vm: a guest's kernel complained, see {running[0].log.parent}", file=sys.stderr)
            return next((code for code in codes if code), 0)
        except ClockError as error:
            print(f"rxe_vm: its clock is wrong: {error}{'; booting again' if left else ''}", file=sys.stderr)
        except StageError as error:
            print(f"rxe_vm: {error}", file=sys.stderr)
            return OUT_OF_TIME if isinstance(error, OutOfTimeError) else BROKEN
    return BROKEN

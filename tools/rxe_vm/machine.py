"""Virtual machines: QEMU's command line, its processes, and what they say, until every guest's job has ended.

Nothing outlives the process that starts them. Guests are linked and heard over pairs of connected sockets, so there is no
port and no file; the initramfs is memory too. The kernel kills QEMU with its parent (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import os
import re
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rxe_vm.initramfs import initramfs
from rxe_vm.kernel import Kernel
from rxe_vm.packages import StageError
from rxe_vm.wires import Wires

MTU = 4200  # the wires': the smallest round number that gives soft-RoCE its largest MTU, 4096
CONTROL_WIRE = 255  # links two guests beside the wires under test; no device is made on it
TAIL_LINES = 25
PROBE_SECONDS = 10
PR_SET_PDEATHSIG = 1

#: Programs lie at the same addresses each time, so what QEMU has translated for one start of Python serves the next.
#: An oops in a driver ends the guest. Stalls are the host's doing: the guest shares its cores with whatever runs there.
KERNEL_OPTIONS = (
    "console=ttyS0 loglevel=5 panic=-1 oops=panic mitigations=off init_on_alloc=0 "
    "norandmaps tsc=reliable no_timer_check nowatchdog rcupdate.rcu_cpu_stall_suppress=1"
)

#: QEMU translates rep movsb and rep movsq as loops of single bytes and words, and multiplies without carry bit by bit.
#: A kernel that finds none of them copies by plain moves and has CRC32 from a table: soft-RoCE is then 2.3 times as fast.
TRANSLATED_CPU = "max,erms=off,fsrm=off,pclmulqdq=off"
TRANSLATED_OPTIONS = "clearcpuid=rep_good"

STEP = re.compile(rb"rxe_vm: ([0-9.]+) s: ")  #: guest/init tells so of each step, and when, until the job begins

_libc = ctypes.CDLL(None, use_errno=True)


class OutOfTimeError(StageError):
    """A guest was not done at its deadline."""


class ClockError(StageError):
    """A guest's clock runs at another speed than time: it was set by a loop that the host interrupted."""


def clock_is_wrong(said: float, passed: float) -> bool:
    """Whether a guest that says it has run for `said` seconds cannot have, `passed` seconds after its start.

    Before its clock starts, and what it says is heard, pass a second or two, more on a busy host; a clock that was set
    while the host was away is wrong by several times.
    """
    return said > 1.5 * passed + 1 or said < passed / 4 - 2


class Size(NamedTuple):
    """What one guest gets."""

    memory: int  #: MiB
    cores: int


class Guest:
    """One virtual machine, running from its construction to `end`.

    Parameters
    ----------
    host : int
        Its number.
    wires : dict of int to socket
        This guest's ends, by the wires' numbers; they are the caller's to close.
    out : Path
        Existing folder, writable in the guest as $RXE_OUT; the console's text is put there as well.
    """

    def __init__(
        self,
        host: int,
        kernel: Kernel,
        accelerator: str,
        size: Size,
        archive: bytes,
        wires: dict[int, socket.socket],
        out: Path,
    ) -> None:
        self.host = host
        self.phase = "booting"
        self._started = time.monotonic()
        self.code: int | None = None  #: exit code of the job
        self.console = bytearray()
        self.log = out / f"console{host}.log"
        self._control = b""
        self.ports: dict[str, socket.socket] = {}
        theirs: dict[str, socket.socket] = {}
        initrd = _memory_file(archive)
        try:
            for name in ("console", "output", "control"):
                self.ports[name], theirs[name] = socket.socketpair()
            command = _command(kernel, accelerator, size, initrd)
            command += ["-device", "virtio-serial-pci", "-serial", "chardev:console"]
            for name, end in theirs.items():
                command += ["-chardev", f"socket,id={name},fd={end.fileno()}"]
                if name != "console":
                    command += ["-device", f"virtserialport,chardev={name},name={name}"]
            for tag, path, how in (("host", "/", ",readonly=on"), ("out", str(out), "")):
                path = path.replace(",", ",,")
                command += ["-fsdev", f"local,id={tag},path={path},security_model=none,multidevs=remap{how}"]
                command += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
            for wire, end in wires.items():
                command += ["-netdev", f"socket,id=wire{wire},fd={end.fileno()}"]
                card = f"virtio-net-pci,netdev=wire{wire},mac=52:54:00:77:{wire:02x}:{host:02x}"
                command += ["-device", f"{card},host_mtu={MTU},speed=1000,duplex=full,romfile="]
            self._process = _start(command, [initrd, *(end.fileno() for end in (*theirs.values(), *wires.values()))])
        except BaseException:
            for port in self.ports.values():
                port.close()
            raise
        finally:
            os.close(initrd)
            for end in theirs.values():
                end.close()

    def take(self, name: str, data: bytes) -> None:
        """Uses what came from the port console or control; ClockError where a clock is wrong, before the job begins."""
        if name == "console":
            known = len(re.findall(STEP, self.console))
            self.console += data
            for said in re.findall(STEP, self.console)[known:]:
                passed = time.monotonic() - self._started
                if clock_is_wrong(float(said), passed):
                    raise ClockError(f"guest {self.host} says {said.decode()} s after {passed:.1f} s")
            return
        *lines, self._control = (self._control + data).split(b"\n")
        for line in lines:
            if line == b"ready":
                self.phase = "running its command"
            elif match := re.fullmatch(rb"exit (\d+)", line):
                self.code = int(match[1])
                self.phase = f"ended with exit code {self.code}"

    def end(self) -> None:
        """Ends the machine now; its console goes to a file."""
        self._process.kill()
        self._process.wait()
        for port in self.ports.values():
            port.close()
        self.log.write_bytes(self.console.replace(b"\r", b""))

    def told(self) -> str:
        """The end of the console: what came before a panic, not the registers after it."""
        lines = self.console.decode(errors="replace").replace("\r", "").splitlines()
        panic = next((place for place, line in enumerate(lines) if "Kernel panic" in line), len(lines))
        shown = "\n".join(f"    {line}" for line in lines[: panic + 5][-TAIL_LINES:]) or "    (nothing)"
        return f"last lines of the console of guest {self.host} (all of it: {self.log}):\n{shown}"


def serve(guests: Sequence[Guest], wires: Wires, deadline: float, show: Callable[[int, bytes], None]) -> list[int]:
    """Passes on frames, and what the jobs print, until all have ended; returns their exit codes.

    Parameters
    ----------
    deadline : float
        On the monotonic clock.
    show : callable
        Gets a guest's number and bytes of its output; no bytes: that was all.

    Raises
    ------
    OutOfTimeError
        At the deadline. The guests still run.
    StageError
        A machine ended before its job, as after a panic of its kernel. Others may still run.
    """
    with selectors.DefaultSelector() as selector:
        for guest in guests:
            for name, port in guest.ports.items():
                selector.register(port, selectors.EVENT_READ, (guest, name))
        while any(guest.code is None for guest in guests):
            left = deadline - time.monotonic()
            pause = wires.watch(selector)
            ready = selector.select(max(0.0, left if pause is None else min(pause, left)))
            if left <= 0:
                late = [guest for guest in guests if guest.code is None]
                phases = ", ".join(f"guest {guest.host} is {guest.phase}" for guest in late)
                raise OutOfTimeError("\n".join([f"out of time: {phases}", *(guest.told() for guest in late)]))
            wires.turn({key.fileobj: events for key, events in ready if key.data is wires})
            for key, _ in ready:
                if key.data is wires:
                    continue
                guest, name = key.data
                data = _received(guest.ports[name])
                if not data:
                    selector.unregister(guest.ports[name])
                if name == "output":
                    show(guest.host, data)
                elif data:
                    guest.take(name, data)
                elif name == "control" and guest.code is None:
                    raise StageError(_obituary(guest))
        for guest in guests:
            _drain(guest, show)
    return [guest.code for guest in guests if guest.code is not None]


def accelerator(kernel: Kernel, cache: Path) -> str:
    """QEMU's -accel: hardware virtualisation where a guest really runs under it, else QEMU's translator.

    A /dev/kvm can accept a machine and never run it, so a guest is booted that ends itself; the answer holds until the
    host is booted again.
    """
    translator = "tcg,thread=multi"
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return translator
    known = cache / "accelerator"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    if known.exists() and known.read_text().startswith(boot):
        return known.read_text().split()[1]
    initrd = _memory_file(initramfs(kernel, {"RXE_PROBE": "1"}, []))
    command = [*_command(kernel, "kvm", Size(256, 1), initrd), "-serial", "stdio"]
    process = _start(command, [initrd], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        said, _ = process.communicate(timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        said = b""
    finally:
        os.close(initrd)
        process.kill()
        process.communicate()
    answer = "kvm" if b"rxe_vm: alive" in said else translator
    known.write_text(f"{boot} {answer}\n")
    return answer


def _command(kernel: Kernel, accelerator: str, size: Size, initrd: int) -> list[str]:
    """The part of QEMU's command line that every machine has; `initrd` is a descriptor."""
    cpu, options = "max", KERNEL_OPTIONS
    if accelerator != "kvm":
        cpu, options = TRANSLATED_CPU, f"{options} {TRANSLATED_OPTIONS}"
    command = ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]
    command += ["-accel", accelerator, "-cpu", cpu, "-smp", str(size.cores), "-m", str(size.memory)]
    return [*command, "-kernel", str(kernel.image), "-initrd", f"/dev/fd/{initrd}", "-append", options]


def _start(
    command: list[str], descriptors: list[int], stdout: int = subprocess.DEVNULL, stderr: int | None = None
) -> subprocess.Popen[bytes]:
    """Starts QEMU so that it dies with this process, also when that is killed."""
    parent = os.getpid()

    def die_with_parent() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=descriptors,
        preexec_fn=die_with_parent,
    )


def _memory_file(data: bytes) -> int:
    descriptor = os.memfd_create("initramfs")
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(data)
    return descriptor


def _received(port: socket.socket) -> bytes:
    try:
        return port.recv(65536)
    except ConnectionResetError:
        return b""


def _drain(guest: Guest, show: Callable[[int, bytes], None]) -> None:
    """Takes what is in the sockets still: the exit code can come before the last output."""
    for name, port in guest.ports.items():
        port.setblocking(False)
        try:
            while data := port.recv(65536):
                show(guest.host, data) if name == "output" else guest.take(name, data)
        except (BlockingIOError, ConnectionResetError):
            pass
    show(guest.host, b"")


def _obituary(guest: Guest) -> str:
    """Why a machine is gone, as far as its console tells."""
    told = guest.console.decode(errors="replace").replace("\r", "")
    reasons = re.findall(r"Kernel panic.*|BUG:.*|Oops:.*", told)
    return "\n".join([f"guest {guest.host} died while {guest.phase}", *dict.fromkeys(reasons), guest.told()])

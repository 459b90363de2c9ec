"""Two network namespaces with a wire between them, for a test that runs in a process of its own.

    @lab.isolated
    def test_it(net):
        ...                       # runs in a child, whose namespace has v0, 10.9.0.1; v1, 10.9.0.2 is in the other one

The namespaces have no names: they are gone when the child is, however it ends. Without root the child makes a user namespace
first, in which it may change traffic control as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import select
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pyroute2 import IPRoute
from pyroute2.ethtool import Ethtool

from hrdma.errors import NetlinkError
from hrdma.qos.controller import Controller
from hrdma.qos.kinds import htb
from hrdma.qos.objects import ROOT, Qdisc
from hrdma.qos.policy import Policy
from hrdma.qos.wire import Wire

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
HERE, THERE = "10.9.0.1", "10.9.0.2"
SIZE = 1400  # bytes of a datagram
SO_RCVBUFFORCE = 33  # of asm-generic/socket.h: beyond what the machine allows users
SKIPPED = 77
Skip = pytest.skip.Exception
libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    if libc.unshare(flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@dataclass
class Net:
    """The child's two namespaces: it is in the first one."""

    here: int
    there: int
    directory: str  #: for records

    @contextlib.contextmanager
    def other(self) -> Iterator[None]:
        """Inside, sockets of this thread are made in the other namespace."""
        libc.setns(self.there, CLONE_NEWNET)
        try:
            yield
        finally:
            libc.setns(self.here, CLONE_NEWNET)


@contextlib.contextmanager
def stream(
    net: Net, port: int, *, inward: bool, receive: int = 0
) -> Iterator[tuple[list[int], socket.socket, socket.socket]]:
    """A TCP stream from there to here (inward) or from here to there, as fast as it goes: bytes received, sender, receiver.
    With so many bytes to receive into, where the kernel shall not choose."""
    far = net.other if inward else contextlib.nullcontext
    near = contextlib.nullcontext if inward else net.other
    address = (HERE if inward else THERE, port)
    with near():
        listener = socket.create_server(address)
    if receive:
        try:
            listener.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, receive)
        except PermissionError:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    with far():
        sender = socket.create_connection(address, timeout=5)
    sender.settimeout(None)  # however long it is held back; its end ends those that wait
    sink, _ = listener.accept()
    received, stop = [0], threading.Event()

    def push() -> None:
        with contextlib.suppress(OSError):
            while not stop.is_set():
                sender.send(bytes(1 << 14))

    def pull() -> None:
        with contextlib.suppress(OSError):
            while data := sink.recv(1 << 16):
                received[0] += len(data)

    threads = [threading.Thread(target=target) for target in (push, pull)]
    for thread in threads:
        thread.start()
    try:
        yield received, sender, sink
    finally:
        stop.set()
        with contextlib.suppress(OSError):  # its user may have ended it
            sender.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(5)
        for end in (listener, sender, sink):
            end.close()


def tc(words: str, given: str = "") -> str:
    """What tc says; only for comparison. Words are parted as a shell does it; so much is given to it to read."""
    done = subprocess.run(["tc", *shlex.split(words)], input=given, capture_output=True, text=True, timeout=10)
    assert done.returncode == 0, f"tc {words}: {done.stderr}"
    return done.stdout


def dump(dev: str = "v0") -> str:
    """Everything that tc shows of a device, without counters."""
    shows = "".join(f"{what} show dev {dev}\n" for what in ("qdisc", "class", "filter"))
    text = tc("-d -batch -", shows)
    return re.sub(r"direct_packets_stat \d+", "", text)


def _namespaces(directory: str) -> Net:
    if os.geteuid():
        user, group = os.geteuid(), os.getegid()
        unshare(CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    fds = []
    for _ in range(2):
        unshare(CLONE_NEWNET)
        fds.append(os.open("/proc/self/ns/net", os.O_RDONLY))
    there, here = fds
    libc.setns(here, CLONE_NEWNET)
    net = Net(here, there, directory)
    with IPRoute() as kernel:
        kernel.link("add", ifname="v0", kind="veth", peer={"ifname": "v1", "net_ns_fd": there})
        _up(kernel, "v0", HERE)
    with net.other(), IPRoute() as kernel:
        _up(kernel, "v1", THERE)
    _need_htb()
    return net


def _need_htb() -> None:
    """Without root a module that is not loaded yet is as good as none."""
    root = Qdisc("v0", "htb", 0x10000, ROOT, htb.encode(htb.HtbQdisc()))
    with Wire() as wire:
        try:
            wire.request("add", root)
        except NetlinkError as error:
            if not error.missing:
                raise
            pytest.skip(f"this kernel does not have what is tested: {error}")
        wire.request("delete", root)


def _up(kernel: IPRoute, dev: str, address: str) -> None:
    index = kernel.link_lookup(ifname=dev)[0]
    kernel.addr("add", index=index, address=address, prefixlen=24)
    kernel.link("set", index=index, state="up")
    kernel.link("set", index=1, state="up")


@functools.cache
def reason_not() -> str:
    """Why there can be no namespaces here; empty where there can."""
    if shutil.which("tc") is None:
        return "tc is not installed, with which states are compared: apt install iproute2"
    pid = os.fork()
    if not pid:
        status = 1
        try:
            unshare(CLONE_NEWNET | (CLONE_NEWUSER if os.geteuid() else 0))
            status = 0
        finally:
            os._exit(status)
    return "" if ended(pid) == 0 else "this kernel does not let this user make a network namespace"


def isolated(function: Callable[[Net], None]) -> Callable[..., None]:
    """Runs a test in a child with namespaces; what it raises fails the test."""

    @functools.wraps(function)
    def test(tmp_path: Path, **arguments: object) -> None:
        if reason := reason_not():
            pytest.skip(reason)
        failure = tmp_path / "failure"  # no pipe: a grandchild that stays would keep it open
        pid = os.fork()
        if not pid:
            os.setpgid(0, 0)
            status = 0
            try:
                function(_namespaces(str(tmp_path)), **arguments)
            except Skip as skip:
                failure.write_text(str(skip))
                status = SKIPPED
            except BaseException:
                failure.write_text(traceback.format_exc())
                status = 1
            os._exit(status)
        try:
            status = os.waitpid(pid, 0)[1]
        finally:
            _end(pid)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == SKIPPED:
            pytest.skip(failure.read_text())
        if status:
            pytest.fail(
                failure.read_text() if failure.exists() else f"the child ended with status {status}", pytrace=False
            )

    del test.__wrapped__  # pytest would ask for a fixture `net`
    names = [name for name in function.__code__.co_varnames[: function.__code__.co_argcount] if name != "net"]
    test.__signature__ = _signature(names)  # type: ignore[attr-defined]
    return test


def _signature(names: list[str]) -> object:
    import inspect

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, kind) for name in ["tmp_path", *names]])


# --- processes that the test starts in its namespaces ---


def child(action: Callable[..., object], *arguments: object) -> int:
    """A process that does something and then ends, whatever comes of it."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        action(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def ended(pid: int, seconds: float = 30) -> int:
    """The wait status of a child; one that does not end in time is killed, and fails the test."""
    fd = os.pidfd_open(pid)
    try:
        if not select.select([fd], [], [], seconds)[0]:
            kill(pid)
            raise AssertionError(f"process {pid} has not ended within {seconds} s")
        return os.waitpid(pid, 0)[1]
    finally:
        os.close(fd)


def kill(pid: int) -> None:
    """Ends a child now; nothing where it has ended and its status was taken."""
    with contextlib.suppress(ChildProcessError):
        if not os.waitpid(pid, os.WNOHANG)[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def word(fd: int, seconds: float = 30) -> bytes:
    """What a child writes into a pipe first; it fails the test where nothing comes in time."""
    assert select.select([fd], [], [], seconds)[0], f"nothing came within {seconds} s"
    return os.read(fd, 100)


@contextlib.contextmanager
def serving(net: Net, policy: Policy, dev: str = "v0", **more: Any) -> Iterator[int]:
    """A controller in a child, of v0 here or v1 there; killed at the end unless it has gone."""
    ready, go = os.pipe()

    def serve() -> None:
        os.close(ready)
        place = net.other() if dev == "v1" else contextlib.nullcontext()
        with place, Controller(dev, policy, directory=net.directory, **more) as controller:
            os.write(go, b"1")
            controller.run()

    pid = child(serve)
    os.close(go)
    try:
        assert word(ready) == b"1", "the controller has not started"
        yield pid
    finally:
        os.close(ready)
        kill(pid)


def eventually(condition: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


# --- traffic ---


@dataclass
class Stream:
    """Datagrams with running numbers from here to a port there, always more than the link carries."""

    port: int
    arrived: int = 0  #: datagrams
    reordered: int = 0
    lost: int = 0
    last: int = -1
    sock: socket.socket = field(init=False, repr=False)
    sink: socket.socket = field(init=False, repr=False)


class Traffic:
    """Streams that never run empty, and their rates. Sending blocks when a socket's 256 KiB wait, so no queue overflows.

    All on one processor: veth leaves a packet with the processor that sends it, and two would overtake each other. The kernel may
    still take one from the queue on another, where a timer of the device's own packets runs: with receive offload packets stand in
    one line behind it, in the order of the queue. veth asks for that only where the sender cuts nothing up itself.
    """

    def __init__(self, net: Net, ports: list[int]) -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of this test's own process
        with net.other(), contextlib.closing(Ethtool()) as ethtool:
            ethtool.set_offload_flag("v1", "generic-receive-offload", True)
        with contextlib.closing(Ethtool()) as ethtool:
            ethtool.set_offload_flag("v0", "tcp-segmentation-offload", False)
        self.streams = [Stream(port) for port in ports]
        for stream in self.streams:
            stream.sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            stream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
            stream.sock.settimeout(1)
            stream.sock.connect((THERE, stream.port))
            with net.other():
                stream.sink = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                stream.sink.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
                stream.sink.bind((THERE, stream.port))
                stream.sink.settimeout(0.2)
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(stream,)) for stream in self.streams]
        self._threads += [threading.Thread(target=self._receive, args=(stream,)) for stream in self.streams]

    def _send(self, stream: Stream) -> None:
        number, pad = 0, bytes(SIZE - 8)
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                stream.sock.send(struct.pack("=Q", number) + pad)
                number += 1

    def _receive(self, stream: Stream) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                (number,) = struct.unpack_from("=Q", stream.sink.recv(SIZE))
                stream.arrived += 1
                stream.reordered += number < stream.last
                stream.lost += max(0, number - stream.last - 1)
                stream.last = max(stream.last, number)

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(5)
        for stream in self.streams:
            stream.sock.close()
            stream.sink.close()

    def shares(self, seconds: float) -> list[float]:
        """Share of each stream in what arrives during so many seconds."""
        before = [stream.arrived for stream in self.streams]
        time.sleep(seconds)
        counts = [stream.arrived - start for stream, start in zip(self.streams, before)]
        return [count / max(1, sum(counts)) for count in counts]


def drops(dev: str = "v0") -> int:
    """Packets that the device's classes have dropped."""
    from hrdma.qos.state import counters

    with Wire() as wire:
        return sum(counter.drops for counter in counters(wire, dev).values())

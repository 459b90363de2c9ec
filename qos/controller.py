"""The controller: has one device for as long as it runs, rotates, renews the lease, and takes registrations of jobs.

A thread, a loop, a socket. The socket is of the kind SEQPACKET: one message each way, JSON, and the kernel says which process
is at the other end and when it is gone. So nobody can register for somebody else, and no heartbeat is needed.

What is installed outlives the controller: it is in the record, together with who has registered, and the next
controller goes on from there. To be rid of it: a lease, or `hrdma qos revert`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import selectors
import signal
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hrdma.errors import HrdmaError, PolicyError, RefusedError, RequestError
from hrdma.qos import cgroup
from hrdma.qos.apply import Control
from hrdma.qos.client import MOST, PROTOCOL, socket_path
from hrdma.qos.files import DIRECTORY, stem
from hrdma.qos.members import Peer, asked, codes, effective, start_of
from hrdma.qos.policy import BANDS, Policy
from hrdma.qos.state import counters
from hrdma.qos.status import Meter, rows

__all__ = ["Controller"]

log = logging.getLogger("hrdma")


SWEEP = 0.5  # seconds in which a process that has closed its connection may end
PAUSE = 1.0  # seconds without new connections after one for which there was no descriptor
SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
SO_SNDBUFFORCE = 32


def _make_room(sock: socket.socket) -> None:
    """For the longest answer, or as much as this process may have."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, MOST)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST)


def _without(jobs: dict[str, Any], job: str) -> dict[str, Any]:
    return {name: values for name, values in jobs.items() if name != job}


class Controller:
    """Runs a policy on a device.

    Parameters
    ----------
    dev : str
    policy : Policy
    directory : str, optional
    group : int, optional
        Group whose members may connect; left out: root and this user alone.
    lease : float, optional
        Seconds after which the device is given back unless this controller lives; 0 is for ever.
    replace_root, anyway : bool, optional
        See `Control.install`.

    Raises
    ------
    RefusedError, PolicyError, NetlinkError, DeviceError
        As `Control.install`.
    """

    def __init__(
        self,
        dev: str,
        policy: Policy,
        *,
        directory: str = DIRECTORY,
        group: int | None = None,
        lease: float = 0.0,
        replace_root: bool = False,
        anyway: bool = False,
    ) -> None:
        self.policy = policy
        self.control = Control(dev, directory, patience=1.0)
        directory = self.control.directory
        self._stack = contextlib.ExitStack()
        self._stack.callback(self.control.close)
        try:
            self._selector = self._stack.enter_context(selectors.DefaultSelector())
            self._groups = f"{stem(dev)}-"  # what the names of the device's cgroups begin with
            self._peers: list[Peer] = []
            self._stack.callback(self._close_peers)
            self._due: dict[str, float] = {}  # what `run` does when, on the monotonic clock
            self._restore()
            settled = self.control.record.settled if self.control.record else None
            self.meter = Meter(settled.live if settled else None)
            self.control.install(self._effective(), lease=lease, replace_root=replace_root, anyway=anyway)
            self._last_look: tuple[float, dict[int, Any]] = (time.monotonic(), self._counters())
            self._listen(socket_path(dev, directory), group)
        except BaseException:
            self._stack.close()
            raise

    def _listen(self, path: str, group: int | None) -> None:
        Path(path).unlink(missing_ok=True)  # of a controller that was killed: the lock says that there is no other
        listener = self._stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC))
        listener.setblocking(False)
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        self._stack.callback(Path(path).unlink, missing_ok=True)
        if group is not None:
            os.chown(path, -1, group)
            os.chmod(path, 0o660)
        listener.listen(128)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._listener = listener
        self._wake, self._waker = socket.socketpair()
        for end in (self._wake, self._waker):
            end.setblocking(False)
            self._stack.callback(end.close)
        self._selector.register(self._wake, selectors.EVENT_READ, lambda: None)
        self._stopped = False

    def close(self) -> None:
        """Gives the device out of hand; what is installed stays."""
        try:
            self._guarded(self._sweep)
        finally:
            self._stack.close()

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the loop ---

    def stop(self) -> None:
        """Makes `run` return; from any thread or signal handler."""
        self._stopped = True
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"\0")

    def run(self, *, signals: bool = True) -> None:
        """Serves until `stop`, or SIGTERM or SIGINT where `signals` are to be handled (main thread only).

        Raises
        ------
        DeviceError
            The device is gone.
        """
        before = (
            {number: signal.signal(number, lambda *_: self.stop()) for number in (signal.SIGTERM, signal.SIGINT)}
            if signals
            else {}
        )
        lease = self.control.record.lease / 3 if self.control.record else 0.0
        if self.policy.rotates:
            self._due["rotate"] = time.monotonic() + self.policy.interval
        if lease:
            self._due["renew"] = time.monotonic() + lease
        try:
            while not self._stopped:
                wait = min(self._due.values()) - time.monotonic() if self._due else None
                for key, _ in self._selector.select(wait if wait is None else max(0.0, wait)):
                    key.data()
                now = time.monotonic()
                for what in [what for what, at in self._due.items() if at <= now]:
                    at = self._due.pop(what)
                    if what == "rotate":
                        self._due[what] = max(at + self.policy.interval, now)
                        self._guarded(self._rotate)
                    elif what == "renew":
                        self._due[what] = now + lease
                        self._guarded(self.control.renew)
                    elif what == "listen":
                        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
                    else:
                        self._guarded(self._sweep)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _guarded(self, action: Any) -> None:
        """A change that fails is undone and said; the controller goes on with what is installed."""
        try:
            action()
        except (RequestError, PolicyError, OSError) as error:
            log.error("%s: %s", self.control.dev, error)

    def _rotate(self) -> int:
        installed = self.control.installed
        if installed.policy.policy == "tls-rr":
            return self.control.rotate()
        self.meter.look(installed.tree, self._counters())
        return self.control.rotate(live=self.meter.live)

    def _counters(self) -> dict[int, Any]:
        return counters(self.control.wire, self.control.installed.carrier)

    def _sweep(self) -> None:
        cgroup.sweep(self._groups)

    def _close_peers(self) -> None:
        for peer in self._peers:
            peer.close()

    # --- peers ---

    def _accept(self) -> None:
        sock = None
        try:
            # Keeps a place for the second descriptor, so that no connection is accepted in vain.
            spare = os.dup(self._listener.fileno())
            try:
                sock, _ = self._listener.accept()
            finally:
                os.close(spare)
            sock.setblocking(False)
            pid, uid, _ = struct.unpack("=3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            # Its children have the connection too, and may live on.
            process = os.pidfd_open(pid) if pid else None
        except OSError as error:
            if sock is not None:
                sock.close()
            if error.errno in SHORT:  # it waits on: without a pause the loop would turn as fast as it can
                log.error(
                    "%s: cannot accept a connection: %s; raise the limit: ulimit -n", self.control.dev, error.strerror
                )
                self._selector.unregister(self._listener)
                self._due["listen"] = time.monotonic() + PAUSE
            return  # or it has gone already
        _make_room(sock)
        peer = Peer(pid, uid, sock=sock, process=process)
        self._peers.append(peer)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._serve(peer))
        self._watch(peer)

    def _watch(self, peer: Peer) -> None:
        if peer.process is not None:
            self._selector.register(peer.process, selectors.EVENT_READ, lambda: self._gone(peer))

    def _serve(self, peer: Peer) -> None:
        if peer not in self._peers:  # its process has ended, as the same look has found
            return
        assert peer.sock is not None
        try:
            data = peer.sock.recv(MOST)
        except OSError:
            data = b""
        if not data:
            self._gone(peer)
            return
        number = None
        try:
            request = json.loads(data)
            if not isinstance(request, dict):
                raise RefusedError(f"a {type(request).__name__} is not a request: an object with op is")
            number = request.pop("number", None)
            answer = self._answer(peer, request)
        except RecursionError:
            answer = {"error": "RefusedError", "message": "the request is nested too deeply"}
        except (HrdmaError, ValueError, KeyError, TypeError, OSError) as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        self._reply(peer, {**answer, "number": number} if type(number) is int else answer)

    def _reply(self, peer: Peer, answer: dict[str, Any]) -> None:
        assert peer.sock is not None
        data = json.dumps(answer).encode()
        try:
            if len(data) > MOST:
                raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
            peer.sock.send(data)
        except OSError as error:
            if error.errno == errno.EMSGSIZE and "error" not in answer:
                words = f"the answer has {len(data)} bytes, more than a message may have; as root: sysctl -w net.core.wmem_max={MOST}"
                self._reply(peer, {"error": "RequestError", "message": words, "number": answer.get("number")})
            else:  # it reads nothing, or is gone: its registrations go with the connection
                self._gone(peer)

    def _gone(self, peer: Peer) -> None:
        if peer not in self._peers:  # its connection and its process have ended in one look
            return
        self._peers.remove(peer)
        for end in (peer.sock, peer.process):
            if end is not None:
                self._selector.unregister(end)
        peer.close()
        if peer.adopted:
            self._due["sweep"] = time.monotonic() + SWEEP
        if peer.jobs:
            peer.jobs = {}
            self._guarded(self._install)

    def _restore(self) -> None:
        """Those who registered with an earlier controller and still run count as registered until they end."""
        for member in self.control.record.members if self.control.record else ():
            try:
                fd = os.pidfd_open(member["pid"])
            except OSError:
                continue
            if start_of(member["pid"]) != member["start"]:
                os.close(fd)
                continue
            peer = Peer(member["pid"], member["uid"], dict(member["jobs"]), process=fd)
            self._peers.append(peer)
            try:
                self._effective()
            except (RefusedError, PolicyError) as error:
                log.warning("%s: process %d is registered no more: %s", self.control.dev, peer.pid, error)
                self._peers.remove(peer)
                peer.close()
                continue
            self._watch(peer)

    # --- requests ---

    def _answer(self, peer: Peer, request: dict[str, Any]) -> dict[str, Any]:
        op = request.pop("op", None)
        if op == "hello":
            if request["protocol"] != PROTOCOL:
                raise RefusedError(f"protocol {request['protocol']!r}; this controller speaks {PROTOCOL}")
            return {"policy": self.policy.policy, "kind": self.control.installed.kind, "dev": self.control.dev}
        if op == "register":
            return self._register(peer, **request)
        if op == "unregister":
            with self._or_as_before():
                if request["job"] not in peer.jobs:
                    raise RefusedError(f"this process is not registered for job {request['job']!r}")
                peer.jobs = _without(peer.jobs, request["job"])
                self._install()
            return {}
        if op == "adopt":
            self._adopt(peer, request["job"])
            return {}
        if op == "status":
            return self._status()
        if op == "rotate":
            if peer.uid not in (0, os.geteuid()):
                raise RefusedError(f"user {peer.uid} may register jobs, and not rotate")
            return {"operations": self._rotate() if self.policy.rotates else 0}
        raise RefusedError(f"unknown request {op!r}; there are: hello, register, unregister, adopt, status, rotate")

    @contextlib.contextmanager
    def _or_as_before(self) -> Iterator[None]:
        """What fails leaves registrations as they were, here and on the device."""
        before = [(peer, peer.jobs) for peer in self._peers]
        try:
            yield
        except BaseException:
            for peer, jobs in before:
                peer.jobs = jobs
            self._guarded(self._install)
            raise

    def _register(self, peer: Peer, job: str, **wishes: Any) -> dict[str, Any]:
        values = asked(self.policy, job, **wishes)
        with self._or_as_before():
            peer.jobs = {**peer.jobs, job: values}
            for other in self._peers:  # the same process may have registered with the controller before this one
                if other.sock is None and other.pid == peer.pid:
                    other.jobs = _without(other.jobs, job)
            self._install()
        return self._lane(job)

    def _adopt(self, peer: Peer, job: str) -> None:
        with self._or_as_before():
            lane = self._lane(job) if job in peer.jobs else self._register(peer, job)
            if self.policy.policy == "fifo":
                return  # there are no classes that it could miss
            if lane["so_priority"] is None:
                raise RefusedError(
                    "a job's packets are known by what is in them alone here, by the back end or the direction; match the job by port"
                )
            cgroup.enter(f"{self._groups}{job}", lane["so_priority"], peer.pid)
            peer.adopted = True

    def _lane(self, job: str) -> dict[str, Any]:
        """What a member of a job stamps on its traffic."""
        installed = self.control.installed
        handle = installed.tree.classes.get(job)
        dscp = next((code for name, code in codes(installed.policy) if name == job), None)
        band = installed.places[job].band
        answers = next((known.answers for known in installed.policy.jobs if known.name == job), None)
        return {
            "band": band, "dscp": dscp, "tos": None if dscp is None else dscp << 2, "service_level": BANDS - band,
            "so_priority": None if installed.by_packet else handle, "answers": answers,
        }  # fmt: skip

    def _effective(self) -> Policy:
        """The policy with those who registered."""
        record = self.control.record
        return effective(self.policy, self._peers, record.settled.policy if record and record.settled else None)

    def _install(self) -> None:
        wish = self._effective()
        try:
            if wish != self.control.installed.policy:  # the second rank of a job changes nothing
                self.control.install(wish)
            members = tuple(peer.to_json() for peer in self._peers if peer.jobs)
            if self.control.record and self.control.record.members != members:
                self.control.remember(members)
        except RefusedError as error:  # it is the controller that may not, not the job
            raise RequestError(f"the controller cannot change {self.control.dev}: {error}") from None

    def _status(self) -> dict[str, Any]:
        installed = self.control.installed
        at, before = self._last_look
        now, after = time.monotonic(), self._counters()
        self._last_look = now, after
        found = [asdict(row) for row in rows(installed, before, after, now - at)]
        names = {job for peer in self._peers for job in peer.jobs}
        return {
            "dev": self.control.dev, "kind": installed.kind, "policy": installed.policy.policy,
            "rotation": installed.rotation, "registered": sorted(names), "jobs": found,
        }  # fmt: skip

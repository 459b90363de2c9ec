"""A process's side of the controller: registers for a job, and is told what to stamp on its traffic.

    with Client("eth0") as controller:
        lane = controller.register("resnet")     # {"band": 0, "dscp": 32, "tos": 128, "service_level": 7, ...}

The connection is the registration: when it closes, because of `close` or because the process is gone, the controller knows.
Requests are numbered and answers have the number, so that one that comes after its deadline is not taken for the next one's.
"""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

from hrdma.errors import DeviceError, HrdmaError, PolicyError, RefusedError, RequestError
from hrdma.qos.files import DIRECTORY, namespace, path_of

__all__ = ["DIRECTORY", "MOST", "PROTOCOL", "Client", "controlled", "socket_path"]

PROTOCOL = 1
MOST = 1 << 20  # bytes of a message
_ERRORS: dict[str, type[HrdmaError]] = {
    "PolicyError": PolicyError,
    "RefusedError": RefusedError,
    "DeviceError": DeviceError,
}


def socket_path(dev: str, directory: str = DIRECTORY) -> str:
    """Where the controller of a device listens, in this network namespace."""
    return path_of(dev, "sock", directory)


def controlled(directory: str = DIRECTORY) -> list[str]:
    """Devices of this network namespace of which a controller runs, or has run and been killed."""
    end = f"@{namespace()}.sock"
    try:
        return sorted(name.removesuffix(end) for name in os.listdir(directory) if name.endswith(end))
    except OSError:  # there has never been one, or it is not for this user
        return []


class Client:
    """A connection to the controller of a device. Not for several threads.

    Parameters
    ----------
    dev : str
        The device; with a slash in it, the path of the controller's socket (of a folder that another container mounts, say).
    directory : str, optional
        Where the controller keeps its records.
    timeout : float, optional
        Seconds for the connection, and for each answer.

    Raises
    ------
    RequestError
        No controller, or not for this user.
    TimeoutError
        It did not answer in time.
    """

    def __init__(self, dev: str, directory: str = DIRECTORY, timeout: float = 10.0) -> None:
        path = dev if "/" in dev else socket_path(dev, directory)
        dev = os.path.basename(path).partition("@")[0]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._socket.settimeout(timeout)
        self.dev, self._timeout, self._number, self._pid = dev, timeout, 0, os.getpid()
        try:
            self._connect(path)
            hello = self._ask("hello", protocol=PROTOCOL)
        except TimeoutError:
            self._socket.close()
            raise
        except OSError as error:
            self._socket.close()
            reason = "is not for this user" if isinstance(error, PermissionError) else "does not run"
            raise RequestError(f"the controller of {dev} {reason}: {path}: {error.strerror}") from None
        except BaseException:
            self._socket.close()
            raise
        self.policy: str = hello["policy"]
        self.kind: str = hello["kind"]

    def _connect(self, path: str) -> None:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return self._socket.connect(path)
            except BlockingIOError:  # as many wait already as may: the controller has not looked for a while
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"the controller of {self.dev} did not answer within {self._timeout:g} s"
                    ) from None
                time.sleep(0.02)

    def close(self) -> None:
        """Ends the registrations of this connection; in a forked child it only lets go of them."""
        if os.getpid() == self._pid:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)  # children that were forked have the connection too
            except OSError:  # the controller has gone first
                pass
        self._socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, op: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        deadline = time.monotonic() + self._timeout
        answer: dict[str, Any] = {}
        try:
            self._socket.settimeout(self._timeout)
            self._socket.send(json.dumps({"op": op, "number": self._number, **values}).encode())
            while answer.get("number") != self._number:
                self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
                data = self._socket.recv(MOST)
                if not data:
                    raise RequestError(
                        "the controller is gone; what it installed stays, register again when it is back"
                    )
                answer = json.loads(data)
        except TimeoutError:
            raise TimeoutError(f"the controller of {self.dev} did not answer within {self._timeout:g} s") from None
        if "error" in answer:
            raise _ERRORS.get(answer["error"], RequestError)(answer["message"])
        return {name: value for name, value in answer.items() if name != "number"}

    def register(
        self, job: str, *, model: str = "", size: int = 0, band: int | None = None, priority: int | None = None
    ) -> dict[str, Any]:
        """Joins a job, which is made if the policy does not name it; a second time with the same wishes it changes nothing, with others
        it moves a job that the policy does not name.

        Parameters
        ----------
        job : str
        model, size : str, int, optional
            See `hrdma.qos.policy.Job`; for a job that the policy does not name.
        band : int, optional
            Under ``strict``: the band of such a job.
        priority : int, optional
            The same as a wish, 0 to 7: the nearest band that the policy allows. Where it gives out the bands itself
            this changes nothing.

        Returns
        -------
        dict
            ``band`` now, ``dscp``, ``tos`` (the byte: dscp * 4, also the traffic class of a queue pair), ``service_level`` (7 for
            band 0, as the NIC's priorities are),
            ``so_priority`` (the class; needs CAP_NET_ADMIN to set), or None where the back end knows jobs by packet alone,
            ``answers``, the DSCP of connections that carry nothing but answers and small messages, or None where there is none.

        Raises
        ------
        RefusedError
            A band above what the policy allows, too many jobs, no DSCP left.
        PolicyError
            A name, size or band that is none.
        """
        return self._ask("register", job=job, model=model, size=size, band=band, priority=priority)

    def unregister(self, job: str) -> None:
        """Leaves a job; one that the policy does not name goes with its last member."""
        self._ask("unregister", job=job)

    def adopt(self, job: str) -> None:
        """Registers, and has the controller move this process, and what it starts from now on, to the job's cgroup."""
        self._ask("adopt", job=job)

    def status(self) -> dict[str, Any]:
        """Policy, rotation, and a row for each job: see `hrdma.qos.status.Row`."""
        return self._ask("status")

    def rotate(self) -> int:
        """Rotates now, and returns how many operations it took; for root and the controller's own user."""
        return self._ask("rotate")["operations"]

"""A process's side of the controller: registers for a job, and is told what to stamp on its traffic.

    with Client("eth0") as controller:
        lane = controller.register("resnet")     # {"band": 0, "dscp": 32, "tos": 128, "service_level": 0, ...}

The connection is the registration: when it closes, because of `close` or because the process is gone, the controller knows.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from hrdma.errors import DeviceError, HrdmaError, PolicyError, RefusedError, RequestError

__all__ = ["MOST", "PROTOCOL", "Client", "socket_path"]

PROTOCOL = 1
DIRECTORY = "/run/hrdma-qos"
MOST = 1 << 20  # bytes of a message
_ERRORS: dict[str, type[HrdmaError]] = {
    "PolicyError": PolicyError,
    "RefusedError": RefusedError,
    "DeviceError": DeviceError,
}


def socket_path(dev: str, directory: str = DIRECTORY) -> str:
    """Where the controller of a device listens, in this network namespace."""
    return os.path.join(directory, f"{dev}@{os.stat('/proc/thread-self/ns/net').st_ino}.sock")


class Client:
    """A connection to the controller of a device. Not for several threads.

    Parameters
    ----------
    dev : str
    directory : str, optional
        Where the controller keeps its records.
    timeout : float, optional
        Seconds for each answer.

    Raises
    ------
    RequestError
        No controller, or not for this user.
    TimeoutError
        It did not answer in time.
    """

    def __init__(self, dev: str, directory: str = DIRECTORY, timeout: float = 10.0) -> None:
        path = socket_path(dev, directory)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(path)
            hello = self._ask("hello", protocol=PROTOCOL)
        except OSError as error:
            self._socket.close()
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"the controller of {dev} did not answer within {timeout:g} s") from None
            reason = "is not for this user" if isinstance(error, PermissionError) else "does not run"
            raise RequestError(f"the controller of {dev} {reason}: {path}: {error.strerror}") from None
        except BaseException:
            self._socket.close()
            raise
        self.policy: str = hello["policy"]
        self.kind: str = hello["kind"]

    def close(self) -> None:
        """Ends the registrations of this connection."""
        self._socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, op: str, **values: Any) -> dict[str, Any]:
        self._socket.send(json.dumps({"op": op, **values}).encode())
        data = self._socket.recv(MOST)
        if not data:
            raise RequestError("the controller is gone; what it installed stays, register again when it is back")
        answer = json.loads(data)
        if "error" in answer:
            raise _ERRORS.get(answer["error"], RequestError)(answer["message"])
        return answer

    def register(self, job: str, *, model: str = "", size: int = 0, band: int | None = None) -> dict[str, Any]:
        """Joins a job, which is made if the policy does not name it; a second time it changes nothing.

        Parameters
        ----------
        job : str
        model, size : str, int, optional
            See `hrdma.qos.policy.Job`; for a job that the policy does not name.
        band : int, optional
            Under ``strict``: the band of such a job.

        Returns
        -------
        dict
            ``band`` now, ``dscp``, ``tos`` (the byte: dscp * 4, also the traffic class of a queue pair), ``service_level`` (7 for
            band 0, as the NIC's priorities are),
            ``so_priority`` (the class; needs CAP_NET_ADMIN to set), or None where the back end knows jobs by packet alone.

        Raises
        ------
        RefusedError
            A band above what the policy allows, too many jobs, no DSCP left.
        PolicyError
            A name, size or band that is none.
        """
        return self._ask("register", job=job, model=model, size=size, band=band)

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

"""Finding the node of this host, or starting one."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import time

from hrdma.config import Config
from hrdma.control.wire import job_key
from hrdma.errors import HrdmaError, PeerError
from hrdma.objects.client import Client
from hrdma.objects.cluster import address_of
from hrdma.objects.sessions import local_name

__all__ = ["LINGER", "connect", "reach"]

LINGER = 2.0  # seconds that a node stays after its last client, where it was started by one
AGAIN = 0.01  # seconds between two looks for a node that somebody else is starting

_children: list[subprocess.Popen[str]] = []


def connect(
    address: str | None = None, *, node: str = "", capacity: int | None = None, token: str | None = None,
    timeout: float | None = None, start: bool = True, owner: bool = False,
) -> Client:  # fmt: skip
    """Connects to the objects of a job, through the node of this host; starts that node where there is none.

    Parameters
    ----------
    address : str, optional
        ``tcp://host:port`` where the first node listens, the same for all hosts of the job. On that host itself, the node that
        is started listens there; on others it joins there. None: this host alone.
    node : str
        Which node, where one host has several: for tests.
    capacity : int, optional
        Bytes of the store, where a node is started; None: three tenths of this host's memory.
    token : str, optional
        Secret of the job; None: ``HRDMA_TOKEN``.
    timeout : float, optional
        Seconds that this call, and by default later ones, may take; None: ``HRDMA_TIMEOUT``.
    start : bool
        False: where there is no node, raise PeerError instead of starting one.
    owner : bool
        True: what this client puts, and reductions that it gives no name, are deleted when its connection ends, however it
        ends, its node's death excepted; arrays that others got from them stay valid. False: they stay until they are deleted, or the last node ends.

    Returns
    -------
    Client
        Close it, or use it in a ``with`` statement.

    Raises
    ------
    TimeoutError, PeerError, HrdmaError
        No node could be reached or started; the message says why.

    Notes
    -----
    A node that was started here is a process of its own. It outlives the client that started it, and ends a moment after its
    last client went, with all its objects. ``python -m hrdma.objects`` starts one that stays.
    """
    config = Config.load(token=token, timeout=timeout)
    if address is not None:
        address_of(address)
    deadline = time.monotonic() + config.timeout
    while True:
        try:
            return reach(config, address or "", node, deadline, owner=owner)
        except ConnectionRefusedError:
            if not start:
                raise PeerError(
                    "this host has no node with this address, name, job token and user: run python -m hrdma.objects",
                    operation="connect",
                ) from None
        if time.monotonic() > deadline:
            raise TimeoutError(f"no node came up on this host within {config.timeout:g} s")
        _start(address, node, capacity, config, deadline)


def reach(config: Config, address: str, node: str, deadline: float, *, owner: bool) -> Client:
    """A client of the node of this host, where there is one.

    Raises
    ------
    ConnectionRefusedError
        There is none.
    TimeoutError, PeerError
        It does not answer before the deadline, or hangs up.
    """
    key = job_key(config.token)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        sock.connect(local_name(key, address, node))
        return Client(sock, key, config.timeout, deadline, owner=owner)
    except BaseException:
        sock.close()
        raise


def _start(address: str | None, node: str, capacity: int | None, config: Config, deadline: float) -> None:
    """Starts a node and waits until it is up, or says that there is another one."""
    _children[:] = [child for child in _children if child.poll() is None]
    left = deadline - time.monotonic()
    command = [sys.executable, "-m", "hrdma.objects", f"--linger={LINGER}", f"--timeout={left}", "--quiet-when-up"]
    command += [f"--address={address}"] if address else []
    command += [f"--node={node}"] if node else []
    command += [f"--capacity={capacity}"] if capacity is not None else []
    environment = {**os.environ, "HRDMA_TOKEN": config.token}
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    _children.append(child)
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector, child.stdout:
        selector.register(child.stdout, selectors.EVENT_READ)
        if not selector.select(max(0.0, left)):
            child.kill()
            raise TimeoutError(f"the node that was started did not come up within {left:g} s")
        line = child.stdout.readline()
    said = json.loads(line) if line else {"error": f"it ended with status {child.wait(5)} and said nothing"}
    if said.get("taken"):
        time.sleep(AGAIN)
    elif "error" in said:
        kind = TimeoutError if said.get("kind") == "TimeoutError" else HrdmaError
        raise kind(f"cannot start a node on this host: {said['error']}")

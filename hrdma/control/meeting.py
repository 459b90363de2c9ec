"""Where the ranks of mpiexec or srun meet when nothing says MASTER_ADDR and all of them are on one host.

`World.job` names this launch. Rank 0 listens on an abstract Unix socket whose name is a hash of it, and hands to each
rank of its own user (the kernel tells who calls) the port at which it listens and a token made for this job. An
abstract name leaves no file behind, whatever happens; a stranger who took the name first is found out by his user id.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

from hrdma.control.link import listen
from hrdma.errors import HrdmaError

if TYPE_CHECKING:
    from hrdma.config import Config
    from hrdma.world import World

__all__ = ["meet"]

RETRY = 0.01  # seconds between attempts while rank 0 is not there yet
ANSWER_LIMIT = 4096
_RANK = struct.Struct(">I")


def meet(world: World, config: Config, *, deadline: float) -> tuple[World, Config]:
    """Finds the address of rank 0, and a token, where the launcher gave none.

    Parameters
    ----------
    world, config
        As read from the environment.
    deadline : float
        On the clock of ``time.monotonic``.

    Returns
    -------
    World, Config
        The same ones where there is an address; else with `master_addr`, `master_port` and `token` filled in.

    Raises
    ------
    TimeoutError
        Rank 0 did not come before the deadline.
    HrdmaError
        Another user holds the name.

    Notes
    -----
    On rank 0 a daemon thread serves the others until all have come or the deadline has passed. Call it once.
    """
    if world.size == 1 or world.master_addr or not world.job:
        return world, config
    name = f"\0hrdma-{os.getuid()}-{hashlib.sha256(world.job.encode()).hexdigest()[:32]}"
    if world.rank == 0:
        token = config.token or secrets.token_hex(32)
        server = _claim(name, world, deadline)
        listener = listen(socket.AF_INET, "127.0.0.1", 0)
        port = listener.getsockname()[1]
        answer = json.dumps({"port": port, "token": token}).encode()
        threading.Thread(
            target=_serve, args=(server, world.size, answer, deadline), name="hrdma-meeting", daemon=True
        ).start()
        found = dataclasses.replace(world, master_addr="127.0.0.1", master_port=port, listener=listener)
    else:
        port, token = _ask(name, world, deadline)
        found = dataclasses.replace(world, master_addr="127.0.0.1", master_port=port)
    origins = {**config.origins, "token": "launcher" if not config.token else config.origins.get("token", "argument")}
    return found, dataclasses.replace(config, token=token, origins=origins)


def _claim(name: str, world: World, deadline: float) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        while True:
            try:
                server.bind(name)
                server.listen(128)
                return server
            except OSError as error:
                # An earlier job of the same launch may still be letting go of the name.
                if time.monotonic() >= deadline:
                    text = f"rank 0 cannot meet the others through {world.launcher}: {error.strerror}; set MASTER_ADDR"
                    raise HrdmaError(text) from None
            time.sleep(RETRY)
    except BaseException:
        server.close()
        raise


def _serve(server: socket.socket, size: int, answer: bytes, deadline: float) -> None:
    waiting = set(range(1, size))
    with server:
        while waiting and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(OSError, struct.error):
                peer, _ = server.accept()
                with peer:
                    if _owner(peer) == os.getuid():
                        peer.settimeout(1.0)
                        (rank,) = _RANK.unpack(peer.recv(_RANK.size))
                        peer.sendall(answer)
                        waiting.discard(rank)


def _ask(name: str, world: World, deadline: float) -> tuple[int, str]:
    started = time.monotonic()
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            try:
                sock.settimeout(max(RETRY, deadline - time.monotonic()))
                sock.connect(name)
                if _owner(sock) != os.getuid():
                    text = f"user {_owner(sock)} holds the name at which the ranks of {world.launcher} meet"
                    raise HrdmaError(f"{text}: set MASTER_ADDR and HRDMA_TOKEN")
                sock.sendall(_RANK.pack(world.rank))
                answer = json.loads(_read(sock))
                return int(answer["port"]), str(answer["token"])
            except (OSError, ValueError, KeyError, TypeError):
                # Nobody there yet, or rank 0 ended while we asked.
                time.sleep(RETRY)
    raise TimeoutError(
        f"rank 0 did not arrive within {max(0.1, round(deadline - started, 1)):g} s on this host, where the ranks of {world.launcher} "
        "meet when MASTER_ADDR is not set; set it if they run on several hosts"
    )


def _read(sock: socket.socket) -> bytes:
    data = b""
    while len(data) <= ANSWER_LIMIT and (part := sock.recv(ANSWER_LIMIT)):
        data += part
    return data


def _owner(sock: socket.socket) -> int:
    """User id of the process at the other end."""
    return int(struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[1])

"""One rank under test: joins as its environment says, obeys JSON commands on stdin and tells what happens on stdout.

A command is ``{"do": name, "id": n, ...}``; its answer ``{"id": n, "result": ...}`` or ``{"id": n, "error": [type,
text]}``.
Callbacks come as ``{"event": name, ...}`` with the monotonic time.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import socket
import sys
import threading
import time

import zmq

from hrdma.config import Config, world_from_env
from hrdma.control import ControlPlane, link, meet, wire
from hrdma.log import configure

lock = threading.Lock()


def tell(**message) -> None:
    with lock:
        sys.stdout.write(json.dumps({**message, "time": time.monotonic()}) + "\n")
        sys.stdout.flush()


class Warnings(logging.Handler):
    """Tells what is logged as an event."""

    def emit(self, record: logging.LogRecord) -> None:
        tell(event="warned", text=record.getMessage())


def forked_child() -> int:
    """Forks a child that lives on for a minute, or until stdin ends."""
    pid = os.fork()
    if pid == 0:
        os.close(1)
        time.sleep(60)
        os._exit(0)
    return pid


def cut(plane: ControlPlane) -> None:
    """Breaks the connections of this rank, as a network would; both ends see it."""
    for descriptor in plane._loop.descriptors():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
            copy.getpeername()
            copy.shutdown(socket.SHUT_RDWR)


def part_hang_ups(seconds: float) -> None:
    """Connections of this rank's listener that end are told of one by one, so far apart."""
    events, held, last = link.Listener.events, [], [0.0]

    def one_by_one(listener) -> list[tuple[int, int]]:
        found = []
        for event in events(listener):
            (held if event[0] == zmq.EVENT_DISCONNECTED else found).append(event)
        if held and time.monotonic() >= last[0] + seconds:
            last[0] = time.monotonic()
            found.append(held.pop(0))
        return found

    def look(listener) -> bool:
        listener.pending = link.Link.look(listener) or bool(held)
        return listener.pending

    link.Listener.events, link.Listener.look = one_by_one, look


def obey(plane: ControlPlane, do: str, a: dict):
    deadline = time.monotonic() + a.get("seconds", 5.0)
    if do == "barrier":
        return plane.barrier(deadline=deadline)
    if do == "agree":
        return plane.agree(a["key"], a["members"], a["payload"], deadline=deadline)
    if do == "agrees":
        # As fast as possible, until so many have none of the dead in them: key -> result.
        found, without = {}, 0
        while without < a["without"]:
            number = len(found)
            try:
                found[number] = plane.agree(f"many:{number}", a["members"], {"n": number}, deadline=deadline)
            except Exception as error:
                found[number] = repr(error)
                break
            without += not found[number].keys() & set(a["dead"])
            if not number:
                tell(event="agreed")
        return found
    if do == "stall":
        return plane.report_stall(a["comm"], a["members"], a["sequence"], a["signature"], a["text"])
    if do == "mismatch":
        return plane.report_mismatch(a["comm"], a["members"], a["sequence"], a["signature"], a["text"])
    if do == "stalls":
        return plane.stalls(a["comm"])
    if do == "lost":
        return [plane.lost, sorted(plane.left), plane.epoch]
    if do == "leave":
        return plane.leave(deadline=deadline)
    if do == "leaving":  # waits until it is
        while not plane._leaving and time.monotonic() < deadline:
            time.sleep(0.01)
        return plane._leaving
    if do == "abandon":
        return plane.abandon()
    if do == "cut":
        return cut(plane)
    if do == "hold_gil":
        return ctypes.PyDLL(None).usleep(int(a["hold"] * 1e6))
    if do == "fork":
        return forked_child()
    if do == "use_in_child":
        pid = os.fork()
        if pid == 0:
            try:
                plane.barrier(deadline=time.monotonic() + 1)
            except Exception as error:
                tell(id=a["id"], result=f"{type(error).__name__}: {error}")
            os._exit(0)
        os.waitpid(pid, 0)
        return None
    if do == "cpu":
        return time.process_time()
    if do == "threads":
        return sorted(thread.name for thread in threading.enumerate())
    raise ValueError(do)


def main() -> None:
    options = json.loads(sys.argv[1])
    if "protocol" in options:
        wire.PROTOCOL = options["protocol"]
    if "apart" in options:
        part_hang_ups(options["apart"])
    config = Config.load(**options.get("config", {}))
    configure(config.log_level, None)
    logging.getLogger("hrdma").addHandler(Warnings(logging.WARNING))
    deadline = time.monotonic() + options.get("seconds", 10.0)
    started = time.monotonic()
    try:
        world, config = meet(world_from_env(config), config, deadline=deadline)
        plane = ControlPlane.join(world, config, {"pid": os.getpid()}, deadline=deadline)
    except Exception as error:
        tell(event="failed", type=type(error).__name__, text=str(error), took=time.monotonic() - started)
        sys.exit(3)
    plane.start(
        lambda rank, reason: tell(event="lost", rank=rank, reason=reason),
        lambda comm, text: tell(event="verdict", comm=comm, text=text),
        on_left=lambda rank, reason: tell(event="left", rank=rank, reason=reason),
    )
    cards = [member.card["pid"] for member in plane.members]
    tell(event="joined", rank=plane.rank, size=plane.size, pids=cards, took=time.monotonic() - started)
    for line in sys.stdin:
        command = json.loads(line)

        def work(command=command) -> None:
            try:
                tell(id=command["id"], result=obey(plane, command["do"], command))
            except Exception as error:
                tell(id=command["id"], error=[type(error).__name__, str(error)])

        if command.get("thread", True):
            threading.Thread(target=work, daemon=True).start()
        else:
            work()


if __name__ == "__main__":
    main()

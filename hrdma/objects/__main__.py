"""``python -m hrdma.objects``: the node of this host, until it is told to end."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import resource
import signal
import socket
import sys

from hrdma.config import Config
from hrdma.control.link import is_loopback, resolve
from hrdma.control.wire import job_key
from hrdma.log import configure
from hrdma.objects.cluster import address_of, address_towards
from hrdma.objects.node import Node
from hrdma.objects.sessions import Sessions, local_name
from hrdma.objects.store import usual_capacity


def main(arguments: list[str] | None = None) -> int:
    """Runs a node; prints one line of JSON when it is up or cannot come up."""
    options = _parser().parse_args(arguments)
    config = Config.load(timeout=options.timeout)
    configure(config.log_level)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard) if hard != resource.RLIM_INFINITY else (soft, hard))
    told, tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(told, True)
    # Not an Event that handlers set: two signals together run one handler inside the other, which waits for it; and a
    # signal that comes just before this thread waits, or to another thread, does not run its handler.
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)

    def over() -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(tell, b"over")

    # Who has the name is the node of this host: it is taken before anything is started.
    name = local_name(job_key(config.token), options.address or "", options.node)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.bind(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            _say({"taken": True, "error": "this host has a node for this address already"})
            return 1
    try:
        listen, seeds = _place(options.address, options.join)
        node = Node(config, listen, seeds, options.capacity)
        node.start(config.timeout)
    except Exception as error:
        _say({"error": str(error) or type(error).__name__, "kind": type(error).__name__})
        return 1
    try:
        sessions = Sessions(node, name, linger=options.linger)
    except OSError:
        node.close()
        _say({"taken": True, "error": "this host has a node for this address already"})
        return 1
    sessions.deserted = node.broken = over
    _say({"up": f"tcp://{node.cluster.host}:{node.cluster.port}", "pid": os.getpid()})
    if options.quiet_when_up:
        os.close(1)
    os.read(told, 1)
    for number in (signal.SIGTERM, signal.SIGINT):  # more of them: the interpreter, when it ends, sets handlers back
        signal.signal(number, signal.SIG_IGN)
    sessions.close()
    node.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hrdma.objects", description=__doc__)
    parser.add_argument("--address", help="tcp://host:port of the first node; listened at where that is this host")
    parser.add_argument("--join", action="append", default=[], help="tcp://host:port of a node; may be repeated")
    parser.add_argument("--node", default="", help="name, where a host has several")
    parser.add_argument("--capacity", type=int, default=usual_capacity(), help="bytes of the store")
    parser.add_argument("--linger", type=float, help="end so many seconds after the last client went")
    parser.add_argument("--timeout", type=float, help="seconds to come up")
    parser.add_argument("--quiet-when-up", action="store_true", help="close the standard output when up")
    return parser


def _say(line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)


def _place(address: str | None, join: list[str]) -> tuple[tuple[str, int], list[tuple[str, int]]]:
    """Where to listen, and whom to ask: whoever can listen at the address founds the cluster, the others join it there."""
    if join:
        seeds = [address_of(text) for text in join]
        return (address_towards(*seeds[0]), 0), seeds
    if address is None:
        return ("127.0.0.1", 0), []
    host, port = address_of(address)
    family, numeric = resolve(host, port)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((numeric, port))
            return (numeric, port), []
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                raise
    here = numeric if is_loopback(numeric) else address_towards(numeric, port)
    return (here, 0), [(numeric, port)]


if __name__ == "__main__":
    sys.exit(main())

"""How ranks meet, and what each of them is told when they cannot; with real processes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import zmq
from control_jobs import until_connected
from machine import took
from ports import free_port

from hrdma.config import Config
from hrdma.control import ControlPlane, Member, join, wire
from hrdma.world import World


def until_listening(port: int) -> None:
    end = time.monotonic() + 15
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.01)
    raise AssertionError(f"nobody listens on port {port}")


def failures(ranks) -> list[tuple[str, str]]:
    found = [rank.event("failed") for rank in ranks]
    assert all(rank.wait() == 3 for rank in ranks)
    return [(message["type"], message["text"]) for message in found]


def test_all_meet_and_see_the_same_table(start):
    ranks = start(4).joined()
    tables = [rank.event("joined")["pids"] for rank in ranks]
    assert tables == [[rank.process.pid for rank in ranks]] * 4
    assert ranks.do("barrier") == [None] * 4


def test_joining_is_quick(start):
    """Measured from the arrival of the last rank, which finds the others waiting."""
    port = free_port()
    ranks = start(4, [0, 1, 2], port=port)
    until_connected(port, 2)
    joined = start(4, [3], port=port).joined()[0].event("joined")
    ranks.joined()
    assert took(joined["time"] - joined["took"], joined["time"]) < 0.1


def test_rank_0_may_come_last(start):
    port = free_port()
    others = start(3, [1, 2], port=port)
    time.sleep(0.4)
    assert start(3, [0], port=port).joined()[0].event("joined")["size"] == 3
    others.joined()


def test_rank_0_is_called_again_soon_and_then_less_often(monkeypatch):
    monkeypatch.setattr(join, "time", SimpleNamespace(monotonic=lambda: 100.0))
    dialog = SimpleNamespace(welcome=False, call=SimpleNamespace(up=False, reached=False))
    pauses = []

    def at(name, when, call):
        if name == "redial":
            pauses.append(round(when - 100, 6))

    loop = SimpleNamespace(at=at, listener=SimpleNamespace(port=1), dial=lambda *_: dialog)
    guest = join.Guest(loop, None, World(1, 2, master_addr="127.0.0.1"), {}, 110.0)
    guest.begin()
    for _ in range(7):
        guest.ended(dialog)
    assert pauses == [0.001, 0.002, 0.004, 0.008, 0.016, 0.02, 0.02]


def test_no_token_is_enough_on_one_host(start):
    start(2, token=None).joined()


def test_over_an_address_that_is_not_loopback(start):
    """Peers of this host are recognised by their address, whatever MASTER_ADDR says."""
    address = own_address()
    if not address:
        pytest.skip("this host has no address but loopback")
    ranks = start(3, env={"MASTER_ADDR": address}, token=None).joined()
    ranks[0].signal(signal.SIGKILL)
    numbers = [rank.ask("agree", key="k", members=[0, 1, 2], payload={}) for rank in ranks[1:]]
    assert [rank.answer(n) for rank, n in zip(ranks[1:], numbers, strict=True)] == [{"1": {}, "2": {}}] * 2


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        return sock.getsockname()[0]


def test_ipv6(start):
    start(2, env={"MASTER_ADDR": "::1"}).joined().do("barrier")


def test_a_world_of_one_needs_no_network():
    plane = ControlPlane.join(World(0, 1), Config(), {"a": 1}, deadline=time.monotonic())
    assert plane.members == [Member(0, {"a": 1})]
    plane.start(lambda *_: None, lambda *_: None)
    assert plane.agree("k", [0], {"x": 1}, deadline=time.monotonic()) == {0: {"x": 1}}
    plane.barrier(deadline=time.monotonic())
    plane.report_stall(1, [0], 0, 0, "barrier()")
    plane.leave(deadline=time.monotonic())
    plane.abandon()


def test_a_card_has_a_limit():
    with pytest.raises(ValueError, match="at most 4096"):
        ControlPlane.join(World(0, 1), Config(), {"a": "x" * 5000}, deadline=time.monotonic())


# Errors


def test_missing_ranks_are_named_to_all(start):
    port = free_port()
    ranks = start(4, [0, 1], port=port, seconds=2.5)
    text = f"ranks 2, 3 did not arrive within 2.5 s at 127.0.0.1:{port}"
    assert failures(ranks) == [("TimeoutError", text)] * 2


def test_missing_rank_0_is_named(start):
    port = free_port()
    (found,) = failures(start(2, [1], port=port, seconds=0.5))
    expected = f"rank 0 did not arrive within 0.5 s at 127.0.0.1:{port} (nobody listens there)"
    assert found == ("TimeoutError", expected)


def test_something_else_at_the_port(start):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ranks = start(2, port=port, seconds=1.0)
        zero, one = failures(ranks)
    assert zero[0] == "HrdmaError" and f"cannot listen at 127.0.0.1:{port}: Address already in use" in zero[1]
    assert "another job, a second rank 0 of this one or another program may hold the port" in zero[1]
    assert "MASTER_PORT" in zero[1] and "HRDMA_PORT" in zero[1]
    assert one[0] == "TimeoutError" and "(what listens there does not answer)" in one[1]


def test_world_sizes_differ(start):
    ranks = start(3, each={1: {"env": {"WORLD_SIZE": "4"}}})
    assert failures(ranks) == [("ValueError", "rank 1 was started with a world size of 4, rank 0 with 3")] * 3


def test_a_rank_twice(start):
    port = free_port()
    found = failures(start(3, [0, 1, 1], port=port))
    assert len(set(found)) == 1 and found[0][0] == "ValueError"
    assert found[0][1].startswith("two processes claim to be rank 1: process ")


def test_a_late_twin_is_refused_and_harms_nobody(start):
    port = free_port()
    ranks = start(2, port=port).joined()
    (found,) = failures(start(2, [1], port=port))
    assert found == ("ValueError", "rank 1 was refused: all 2 ranks of the job that runs here have arrived already")
    assert ranks.do("barrier") == [None, None]


@pytest.mark.parametrize("theirs", ["other", ""])
def test_a_wrong_token_does_not_join_and_does_not_disturb(start, theirs):
    port = free_port()
    ranks = start(2, [0], port=port)
    (found,) = failures(start(2, [1], port=port, token=theirs))
    assert found[0] == "PeerError" and "HRDMA_TOKEN must be the same" in found[1]
    ranks += start(2, [1], port=port)
    ranks[0].event("joined")
    ranks[1].event("joined")
    ranks[0].process.stdin.close()
    ranks[0].wait()
    assert ranks[0].errors.count("its job token differs") == 1


def test_a_wrong_token_is_hinted_at_when_time_is_up(start):
    port = free_port()
    ranks = start(2, [0], port=port, seconds=4)  # in which rank 1 starts and knocks
    failures(start(2, [1], port=port, token="other"))
    (found,) = failures(ranks)
    assert found[0] == "TimeoutError" and "rank 1 did not arrive" in found[1] and "HRDMA_TOKEN" in found[1]


def test_another_version_is_refused_by_name(start):
    port = free_port()
    ranks = start(2, [0], port=port)
    (found,) = failures(start(2, [1], port=port, protocol=9))
    assert found == (
        "PeerError",
        f"version mismatch: rank 0 at 127.0.0.1:{port} speaks control protocol 3; this rank speaks 9: "
        "install the same hrdma for all ranks",
    )
    ranks += start(2, [1], port=port)
    assert all(rank.event("joined") for rank in ranks)


def test_a_rank_dies_while_joining(start):
    port = free_port()
    ranks = start(4, [0, 1, 2], port=port, seconds=10)
    until_connected(port, 2)
    killed = ranks[1].signal(signal.SIGKILL)
    rest = [ranks[0], ranks[2]]
    assert failures(rest) == [("PeerError", "rank 1 was lost while the ranks were joining")] * 2
    assert all(took(killed, rank.events("failed")[0]["time"]) < 0.5 for rank in rest)


def test_rank_0_dies_while_joining(start):
    port = free_port()
    ranks = start(3, [0, 1], port=port, seconds=10)
    until_connected(port, 1)
    killed = ranks[0].signal(signal.SIGKILL)
    (found,) = failures(ranks[1:])
    assert found == ("PeerError", f"rank 0 at 127.0.0.1:{port} was lost while the ranks were joining")
    assert took(killed, ranks[1].events("failed")[0]["time"]) < 0.5


def test_a_name_that_does_not_resolve(start):
    (found,) = failures(start(2, [1], env={"MASTER_ADDR": "no-such-host.invalid"}, seconds=0.6))
    assert found[0] == "TimeoutError" and "MASTER_ADDR=no-such-host.invalid" in found[1]


# Strangers


def throw_garbage(port: int, seed: int, stop: threading.Event) -> None:
    """Bytes of all kinds: random, half a ZMTP greeting, HTTP, a valid ZMTP peer with wrong and oversized frames."""
    rng = random.Random(seed)
    greeting = bytes([0xFF, 0, 0, 0, 0, 0, 0, 0, 1, 0x7F, 3, 0]) + b"NULL".ljust(20, b"\0") + bytes(32)
    context = zmq.Context(1)
    while not stop.is_set():
        try:
            with socket.create_connection(("127.0.0.1", port), 0.2) as sock:
                choice = rng.randrange(4)
                if choice == 0:
                    sock.sendall(rng.randbytes(rng.randrange(2000)))
                elif choice == 1:
                    sock.sendall(greeting[: rng.randrange(len(greeting))])
                elif choice == 2:
                    sock.sendall(greeting + rng.randbytes(500))
                else:
                    sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        except OSError:
            time.sleep(0.01)
        peer = context.socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 20)
        peer.connect(f"tcp://127.0.0.1:{port}")
        hello = wire.encode(wire.Kind.HELLO, {"rank": 1, "size": 2, "nonce": "x", "purpose": "join"}, limit=1 << 20)
        frames = [rng.randbytes(40), hello[:-2], wire.encode(wire.Kind.LEAVE, {}, limit=1 << 20), hello]
        forged = wire.encode(wire.Kind.PROOF, {"proof": "0" * 64, "private": "{}"}, limit=1 << 20)
        peer.send_multipart([frames[rng.randrange(4)]] if rng.random() < 0.8 else [b"a", b"b"])
        peer.send(forged)
        if rng.random() < 0.05:
            peer.send(bytes(3 << 20))
        peer.close()
    context.destroy(linger=0)


NO_FRAMES = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "binary": b"\xff" * 100,
    "zeros": bytes(200),
    "TLS": bytes.fromhex("16030100c8010000c4") + bytes(range(196)),
    "nothing": b"",
}


def test_bytes_of_no_protocol_are_logged_once(start):
    """libzmq drops them without a word; a frame above the limit, too."""
    port = free_port()
    ranks = start(2, [0], port=port)
    until_listening(port)
    for _ in range(3):
        with contextlib.ExitStack() as stack:
            for sent in NO_FRAMES.values():
                stack.enter_context(socket.create_connection(("127.0.0.1", port), 5)).sendall(sent)
            time.sleep(0.2)
    with zmq.Context(1) as context:
        peer = context.socket(zmq.DEALER)
        peer.connect(f"tcp://127.0.0.1:{port}")
        peer.send(bytes(3 << 20))
        time.sleep(0.2)
        peer.close(0)
    ranks += start(2, [1], port=port)
    ranks.joined()
    lines = [line for line in ranks[0].errors.splitlines() if "dropped a peer at 127.0.0.1" in line]
    assert sum("no frame of this protocol came" in line for line in lines) == 1, ranks[0].errors
    assert len(lines) == len(set(lines)), ranks[0].errors


def test_strangers_are_dropped_and_logged_once(start):
    port = free_port()
    stop = threading.Event()
    throwers = [threading.Thread(target=throw_garbage, args=(port, seed, stop)) for seed in range(2)]
    ranks = start(2, [0], port=port)
    for thrower in throwers:
        thrower.start()
    try:
        time.sleep(0.7)
        ranks += start(2, [1], port=port)
        ranks[0].event("joined")
        for number in range(20):
            numbers = [rank.ask("agree", key=str(number), members=[0, 1], payload={}) for rank in ranks]
            assert [rank.answer(n) for rank, n in zip(ranks, numbers, strict=True)] == [{"0": {}, "1": {}}] * 2
            time.sleep(0.02)
    finally:
        stop.set()
        for thrower in throwers:
            thrower.join(5)
    assert ranks[0].events("lost") == ranks[1].events("lost") == []
    os.kill(ranks[0].process.pid, signal.SIGTERM)
    ranks[0].wait()
    lines = [line for line in ranks[0].errors.splitlines() if "dropped a peer" in line]
    assert lines and len(lines) == len(set(lines)) < 20, ranks[0].errors

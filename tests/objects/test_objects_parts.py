"""The parts by themselves: segments, room in the store, messages."""

from __future__ import annotations

import os
import socket
import threading
import time

import numpy as np
import pytest
from rig import eventually

from hrdma.control.wire import Kind, decode, encode, job_key
from hrdma.errors import ObjectLost
from hrdma.objects import streams
from hrdma.objects.asker import Asker, keepers
from hrdma.objects.packets import MOST, pack, unpack
from hrdma.objects.ref import INLINE
from hrdma.objects.sessions import LIMIT, local_name
from hrdma.objects.store import Part, Segment, Store

META = {"kind": "bytes", "dtype": "uint8", "shape": [1 << 20], "nbytes": 1 << 20}
KEY = job_key("secret")


def test_a_segment_can_be_changed_by_its_maker_alone(segment):
    import mmap

    segment.view[5] = 7
    with pytest.raises(PermissionError):
        mmap.mmap(segment.writer, segment.nbytes)
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(segment.writer, b"x", 0)
    with pytest.raises(OSError):
        os.ftruncate(segment.writer, 0)
    with mmap.mmap(segment.reader, segment.nbytes, mmap.MAP_SHARED, mmap.PROT_READ) as view:
        assert view[5] == 7


def test_whoever_waits_for_bytes_gets_them_or_hears_that_none_come(segment):
    found = []
    threads = [threading.Thread(target=lambda: found.append(segment.wait_for(99))) for _ in range(2)]
    threads[0].start()
    segment.advance(100)
    threads[0].join(5)
    segment.progress = 0
    threads[1].start()
    segment.abort()
    threads[1].join(5)
    assert found == [100, -1]
    assert segment.wait_for(1 << 30, timeout=0.01) == -1


def test_who_waits_for_a_piece_hears_that_its_segment_will_not_come(segment):
    segment.parts = [Part(segment, 0, 1 << 19), Part(segment, 1 << 19, 1 << 20)]
    found = []
    threads = [threading.Thread(target=lambda part=part: found.append(part.wait_for(99, 10))) for part in segment.parts]
    for thread in threads:
        thread.start()
    segment.parts[1].advance(100)
    threads[1].join(5)
    assert found == [100] and threads[0].is_alive()
    segment.abort()
    threads[0].join(5)
    assert found == [100, -1]


def test_a_pinned_segment_stays(segment):
    store = Store(2 << 20)
    assert store.reserve(1 << 20)
    store.objects["s"] = segment
    assert segment.pin()
    store.made(segment, 1 << 20)
    store.discard(segment)
    assert store.used == 1 << 20 and segment.view[0] == 0
    assert "s 1048576 bytes, deleted, in use 1 times" in store.holders()
    store.unpin(segment)
    assert store.used == 0 and not segment.pin() and store.holders() == "0 of 2097152 bytes are taken"
    store.discard(segment)
    assert store.used == 0, "once is enough"


def test_the_least_recently_used_spare_goes_first():
    store = Store(3 << 20)
    for i, name in enumerate("abc"):
        assert store.reserve(1 << 20)
        made = store.objects[name] = Segment(name, META, "g")
        store.made(made, 1 << 20)
        made.complete, made.used = True, float((i + 1) % 3)
    asked, result = [], []

    def evict(segment, then):
        asked.append(segment.name)
        if segment.name != "c":  # that one is no spare
            store.evict(segment)
        then()

    store.make_room(2 << 20, evict, result.append)
    assert (asked, result) == (["c", "a", "b"], [None])
    store.make_room(1 << 20, evict, result.append)
    assert "only copy" in str(result[1])
    store.discard(store.objects["c"])
    assert store.used == 2 << 20


def test_malformed_requests_end_the_client_and_not_the_node(rig, client):
    for frame in (b"x", encode(Kind.OBJECT, {"verb": "take"}, limit=LIMIT), encode(Kind.OBJECT, {}, limit=LIMIT)):
        bad = rig.client("a")
        bad._sock.send(frame)
        eventually(lambda bad=bad: bad._gone is not None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(local_name(KEY, "", rig._prefix + "a"))
        stranger.settimeout(5)
        stranger.send(encode(Kind.OBJECT, {"verb": "info", "n": 1}, limit=LIMIT))
        stranger.send(encode(Kind.HELLO, {"rank": 0, "nonce": "1"}, limit=LIMIT))
        assert decode(stranger.recv(LIMIT), limit=LIMIT)[0] is Kind.CHALLENGE, "before that, nothing is answered"
    assert client.put(b"still here") is not None


def test_questions_are_asked_again_when_the_keeper_changes():
    sent, answers = [], []
    asker = Asker(lambda node, body: sent.append((node, body["n"])))
    asker.view((1, 2, 3))
    number = asker.ask("watch", "x", answers.append)
    first = keepers("x", (1, 2, 3))[0]
    assert sent == [(first, number)]
    rest = tuple(node for node in (1, 2, 3) if node != first)
    asker.view(rest)
    assert sent[1:] == [(keepers("x", (1, 2, 3))[1], number)], "the backup is the new keeper"
    asker.answered(number, {"n": number})
    asker.answered(number, {"n": number})
    assert len(answers) == 1
    asker.view((1, 2, 3))
    assert len(sent) == 2


def test_messages_share_frames_and_contents_follow_them():
    messages = [{"verb": "put", "inline": bytes([i]) * i, "n": i} for i in range(50)] + [
        {"verb": "get", "inline": None}
    ]
    for limit, count in ((LIMIT, 1), (1000, None)):
        frames = pack(messages, limit=limit, e=7)
        assert len(frames) == count or (count is None and len(frames) > 2)
        bodies = [decode(frame, limit=limit)[1] for frame in frames]
        assert [message for body in bodies for message in unpack(body)] == messages
        assert {body["e"] for body in bodies} == {7}
    frames = pack([{"inline": bytes(MOST)}, {"n": 1}, {"n": 2}], limit=LIMIT)
    assert [len(unpack(decode(frame, limit=LIMIT)[1])) for frame in frames] == [1, 2], "alone it may be longer"
    with pytest.raises(ValueError, match="above the limit"):
        pack([{"inline": b""}, {"inline": bytes(1000)}], limit=1000)
    for wrong in (
        {"all": [{"inline": 3}], "tail": b"xy"},
        {"all": [{"inline": -1}], "tail": b""},
        {"all": [{"inline": "1"}], "tail": b"x"},
        {"all": [{"n": 1}], "tail": b"x"},
    ):
        with pytest.raises(ValueError, match="bytes"):
            unpack(wrong)


def test_what_one_turn_says_leaves_in_one_frame_each(rig, client, monkeypatch):
    """A reduction of objects whose names come from here: its inputs are here, and the backup hears of it once."""
    rig.grow("b", "c")
    rig.settle()
    refs = [client.ref() for _ in range(8)]
    clients = [rig.client(name) for name in "abc"]
    for i, ref in enumerate(refs):
        clients[i % 3].put(np.full(8, i, "float32"), id=ref.id)
    cluster, sent = rig.nodes["a"].node.cluster, []
    say = cluster._say
    monkeypatch.setattr(
        cluster, "_say", lambda dialog, bodies: (sent.append((dialog.rank, bodies)), say(dialog, bodies))
    )
    assert [int(each[0]) for each in client.get(refs)] == list(range(8))
    assert not sent, "all of it was here"
    total = client.reduce(refs)
    assert client.get(total)[0] == 28
    assert client.contributors(total) == refs
    told = [[body["verb"] for body in bodies] for _, bodies in sent]
    assert told == [["facts"]]
    assert clients[1].get(total)[0] == 28


def test_more_than_one_packet_can_take(client):
    refs = [client.put(np.full(INLINE, i, "uint8")) for i in range(12)]
    assert [int(each[-1]) for each in client.get(refs)] == list(range(12))
    many = refs * 500
    assert client.wait(many, len(many), timeout=20) == (many, [])
    with pytest.raises(TypeError, match="expected an ObjectRef, not int"):
        client.get(5)


def test_several_at_hand_come_without_a_question(client, monkeypatch):
    refs = [client.put(np.full(3, i)) for i in range(5)] + [client.put(b"six")]
    asked, say = [], client._say
    monkeypatch.setattr(client, "_say", lambda *messages: (asked.append(messages), say(*messages)))
    found = client.get(refs)
    assert [each[0] for each in found[:5]] == list(range(5)) and found[5] == b"six"
    assert not found[0].flags.writeable and found[0].shape == (3,)
    assert not asked
    late = client.ref()
    with pytest.raises(TimeoutError, match=late.id):
        client.get([refs[0], late], timeout=0.2)
    assert [message["verb"] for message in asked[0]] == ["get", "get"]
    wide = client.put(np.zeros((1,) * 60))
    assert [each.shape for each in client.get([wide] * 400)] == [(1,) * 60] * 400


def test_one_of_several_that_is_lost(client):
    refs = [client.put(b"x"), client.put(b"y"), client.ref()]
    client.delete(refs[1])
    with pytest.raises(ObjectLost):
        client.get(refs, timeout=5)
    assert not client._pending, "the others are not waited for"
    assert [bytes(each) for each in client.get([refs[0], refs[0]])] == [b"x", b"x"]
    requests = client.get([refs[0], refs[2]], async_op=True, timeout=5)
    client.put(b"z", id=refs[2].id)
    assert [bytes(request.wait()) for request in requests] == [b"x", b"z"]
    assert client.get([]) == []


def test_a_put_that_timed_out_gives_its_name_back(client):
    value, late = bytes(META["nbytes"]), 0
    for n in range(20):  # before the node has answered, after it, and in the middle of the copy
        try:
            client.put(value, id=f"x{n}", timeout=n * 5e-5)
        except TimeoutError:
            late += 1
            client.put(value, id=f"x{n}", timeout=5)
        client.delete(client.ref(f"x{n}"))
    assert late


def test_a_fork_after_the_end_of_a_client_closes_nobodys_descriptors(rig, client):
    client.put(b"x")
    client.close()
    ends = [end for _ in range(8) for end in os.pipe()]  # some have the numbers that the client's had
    child = os.fork()
    if not child:
        try:
            for end in ends:
                os.fstat(end)
            os._exit(0)
        finally:
            os._exit(1)
    try:
        assert os.waitpid(child, 0)[1] == 0
    finally:
        for end in ends:
            os.close(end)


def test_a_forked_child_does_not_keep_a_connection_up(rig, client):
    other = rig.client("a")
    view = other.get(other.put(bytes(1 << 20), id="x"))
    child = os.fork()
    if child == 0:
        time.sleep(60 if view[0] == 0 else 0)
        os._exit(0)
    try:
        other.close()
        client.delete(client.ref("x"))
        eventually(lambda: client.info()["used"] == 0)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_blocks_are_short_on_slow_links():
    assert streams.block_of(0.0) == streams.block_of(1e6) == streams.LEAST_BLOCK
    assert streams.block_of(25e6) == 3 * streams.LEAST_BLOCK
    assert streams.block_of(1e12) == streams.BLOCK


def test_what_is_measured_takes_the_place_of_a_guess(rig, client):
    """Then better values count at once, and worse ones little: they may be those of a busy host."""
    node = rig.nodes["a"].node
    guessed, size = node.bandwidth, 1 << 24
    node.measured(size // 1024, 1.0)
    assert node.bandwidth == guessed, "too short to tell"
    node.measured(size, size / 12e6)
    assert node.bandwidth == pytest.approx(12e6)
    node.measured(size, size / 2e6)
    assert node.bandwidth == pytest.approx(10e6)
    node.measured(size, size / 20e6)
    assert node.bandwidth == pytest.approx(20e6)
    node.measured(1 << 19, (1 << 19) / 10e6)
    assert node.bandwidth == pytest.approx(19e6), "a short one says less"
    node.absorbed(size, size / 1e6)
    node.absorbed(size, size / 30e6)
    eventually(lambda: node.bandwidth == pytest.approx(30e6))
    node.absorbed(size, size / 1e6)
    node.absorbed(0, 1.0)
    client.info()  # behind them in the node's queue
    assert node.bandwidth == pytest.approx(30e6), "a sum may have waited"


def test_sums_are_measured_too(rig):
    """Otherwise who only reduces would never know the links."""
    rig.grow("a", "b")
    clients = {name: rig.client(name) for name in "ab"}
    refs = [each.put(np.ones(1 << 18, "float32"), id=name) for name, each in clients.items()]
    total = clients["a"].reduce(refs)
    assert clients["a"].get(total)[-1] == 2
    node = rig.nodes["a"].node
    eventually(lambda: node._bandwidth_known and node.received == 1 << 20)


def test_latency_is_the_least_since_the_nodes_changed(rig):
    """A ping that waited behind other work says nothing about the way: of a slow way short chains would be made."""
    rig.grow("a", "b")
    rig.settle()
    node = rig.nodes["a"].node
    other = next(each for each in node.cluster.nodes if each != node.cluster.me)

    def pong(seconds: float) -> None:
        node.heard_from(other, {"verb": "pong", "time": time.monotonic() - 2 * seconds})

    eventually(lambda: node._latency_known and node.latency < 0.1)
    before, measured = node.latency, threading.Event()
    node.post(lambda: (pong(5.0), measured.set()))
    assert measured.wait(5) and node.latency <= before
    rig.grow("c")
    rig.settle()
    again = []
    node.post(lambda: (setattr(node, "_latency_known", False), pong(5.0), again.append(node.latency), pong(0.0)))
    eventually(lambda: again and again[0] > 4 and node.latency < 0.1)


def test_what_a_client_does_not_name_its_own_node_keeps():
    nodes = (1, 2, 0x1F)
    rest = (1, 2)
    assert [keepers(f"{node:x}-0", nodes)[0] for node in nodes] == list(nodes)
    for name in ("1f-0", "1f-1", "1f-2", "1f-3"):
        assert keepers(name, nodes) == (0x1F, keepers(name, rest)[0]), "its backup takes over"


def test_small_objects_of_this_host_cross_no_network(rig):
    """A get of one asks nobody, and what this host reduces is reduced here."""
    rig.grow("a", "b", "c")
    rig.settle()
    client, node, said = rig.client("a"), rig.nodes["a"].node, []
    mine = client.put(np.ones(4, "float32"))
    send = node.cluster.send

    def heard(to, body):
        if body["verb"] not in ("ping", "pong"):
            said.append((to == node.cluster.me, body["verb"]))
        send(to, body)

    node.cluster.send = heard
    assert client.get(mine).sum() == 4
    assert not said
    assert client.get(client.reduce([mine])).sum() == 4
    assert {verb for own, verb in said if not own} <= {"facts", "acked", "ping", "pong"}, (
        "all but what its backup is told"
    )


def test_a_segment_that_comes_late_takes_no_others_place(rig, client, monkeypatch):
    """A sum that was begun anew has two segments of one name, made in two threads."""
    node, kept, work = rig.nodes["a"].node, [], []
    with monkeypatch.context() as patch:
        patch.setattr(node._makers, "submit", work.append)
        node.post(lambda: node.make_segment("x", META, "1", lambda late, _: node.store.discard(late)))
        node.post(lambda: node.make_segment("x", META, "2", lambda made, _: kept.append(made)))
        eventually(lambda: len(work) == 2)
    for make in reversed(work):
        make()
    client.info()
    assert node.store.objects["x"] is kept[0] and not kept[0].aborted
    assert client.info()["used"] == META["nbytes"]

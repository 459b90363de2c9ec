"""Streams of bytes between nodes, whichever way they go: what comes to be there, ends, strangers."""

from __future__ import annotations

import errno
import socket
import threading

import pytest
from rig import eventually

from hrdma.config import Config
from hrdma.control.wire import Kind, encode, job_key
from hrdma.errors import HrdmaError
from hrdma.objects import carriers, streams
from hrdma.objects.memory import Memory
from hrdma.objects.sessions import LIMIT
from hrdma.objects.store import Part, Segment

KEY = job_key("secret")


class Feeding:
    def __init__(self, segment, key=KEY, **settings):
        self.segment, self.served = segment, 0
        ways = carriers.Carriers(Config.load({}, **settings))
        self.feeder = streams.Feeder(
            key, self.find, ways, lambda sock, release: False, host="127.0.0.1", open_to_all=False
        )

    def find(self, request):
        return (self.segment, self.done) if request["id"] == "s" else None

    def done(self):
        self.served += 1


@pytest.fixture
def feeding(segment, way):
    made = Feeding(segment, **way)
    yield made
    made.feeder.close()


@pytest.fixture
def pull(feeding, way):
    """Opens a stream from the feeder into memory."""
    ways = carriers.Carriers(Config.load({}, **way))

    def opened(request, into=None, key=KEY, port=None):
        into = into or Memory(memoryview(bytearray(1 << 20)))
        return streams.open_stream(key, ways, (7, "127.0.0.1", port or feeding.feeder.port), request, 8, into, 1)

    return opened


def request(offset=0, name="s"):
    return {"id": name, "gen": "g", "offset": offset}


def test_a_stream_brings_what_comes_to_be_there(feeding, pull, segment):
    segment.view[:] = bytes(range(256)) * 4096
    segment.advance(1000)
    into = Memory(memoryview(bytearray(1 << 20)))
    stream = pull(request(256), into)
    got = 0
    while got < 744:
        got += stream.read(got, into.nbytes)
    assert got == 744 and into.view[:744] == segment.view[256:1000]
    segment.advance(segment.nbytes)
    while got < segment.nbytes - 256:
        n = stream.read(got, into.nbytes)
        assert n
        got += n
    assert got == segment.nbytes - 256 and into.view[:got] == segment.view[256:]
    stream.close()
    eventually(lambda: feeding.served == 1)


def test_a_stream_ends_when_there_will_be_no_more_and_when_it_is_cancelled(feeding, pull, segment):
    first = pull(request())
    threading.Timer(0.05, first.cancel).start()
    assert first.read(0, 8) == 0
    second = pull(request())
    threading.Timer(0.05, segment.abort).start()
    assert second.read(0, 8) == 0
    first.close()
    second.close()
    eventually(lambda: feeding.served == 2)


def test_a_part_of_one_segment_fills_a_part_of_another(feeding, pull, segment):
    segment.view[:] = bytes(range(251)) * 4177 + bytes(149)
    feeding.segment = Part(segment, 4096, 300_000)
    feeding.segment.advance(200_000)
    other = Segment("t", segment.meta, "g")
    target = Part(other, 64, 64 + 300_000 - 4096)
    stream = pull(request(100), target)
    got = 100
    while got < 200_000:
        got += stream.read(got, target.nbytes)
    feeding.segment.advance(300_000 - 4096)
    while got < target.nbytes:
        n = stream.read(got, target.nbytes)
        assert n
        got += n
    stream.close()
    assert other.view[164 : 64 + target.nbytes] == segment.view[4196:300_000]
    assert not any(other.view[:164]) and not any(other.view[64 + target.nbytes :])
    eventually(lambda: feeding.served == 1)
    other.close()


def test_streams_of_strangers(feeding, pull):
    port = feeding.feeder.port
    with pytest.raises(HrdmaError, match="does not hold our job token"):
        pull(request(), key=job_key("other"))
    with pytest.raises(HrdmaError, match="not here"):
        pull(request(name="t"))
    for garbage in (b"", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 64, encode(Kind.OBJECT, {}, limit=LIMIT)):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            try:
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
            except OSError as error:  # it may be closed before all was said
                assert error.errno in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN), error
    assert feeding.served == 0
    pull(request()).close()


def test_a_feeder_that_does_not_hold_the_token_is_not_believed(pull):
    listener = socket.create_server(("127.0.0.1", 0))

    def impostor():
        sock, _ = listener.accept()
        sock.sendall(encode(Kind.CHALLENGE, {"nonce": "0"}, limit=LIMIT))
        sock.recv(4096)
        sock.sendall(encode(Kind.WELCOME, {"proof": "0" * 64}, limit=LIMIT))
        sock.recv(1)  # until it hangs up
        sock.close()

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(HrdmaError, match="does not hold our job token"):
        pull(request(), port=listener.getsockname()[1])
    thread.join()
    listener.close()

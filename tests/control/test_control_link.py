"""The sockets below the control thread: what they signal, and what they do not."""

from __future__ import annotations

import select
import socket

import pytest
import zmq

from hrdma.control.link import Call, Listener, listen, url

WAIT = 10.0


class Waiting:
    """A listener and a call to it, and an epoll on what both signal, as the control thread has."""

    def __init__(self, context):
        self.listener = Listener(context, listen(socket.AF_INET, "127.0.0.1", 0), 1, 5.0)
        self.call = Call(context, url("127.0.0.1", self.listener.port), 1, 5.0)
        self.links = (self.listener, self.call)
        self.epoll = select.epoll()
        for link in self.links:
            for signal in link.signals:
                self.epoll.register(signal, select.EPOLLIN)

    def turn(self, link):
        """Waits as the control thread does, until there is something for this link; what its peer has is left."""
        while not link.look():
            ready = {descriptor for descriptor, _ in self.epoll.poll(WAIT)}
            assert ready, "nothing was signalled"
            other = self.links[link is self.listener]
            if not ready.isdisjoint(other.signals):
                other.events()
            if not ready.isdisjoint(link.signals):
                return

    def close(self):
        for link in self.links:
            link.close()
        self.epoll.close()


@pytest.fixture
def waiting():
    with zmq.Context() as context:
        made = Waiting(context)
        yield made
        made.close()


def heard(waiting, count):
    found = []
    while len(found) < count:
        waiting.turn(waiting.listener)
        waiting.listener.events()
        found += waiting.listener.receive()
    return found


def test_the_first_event_is_signalled(waiting):
    """Nobody asks the monitor before."""
    for link in waiting.links:
        assert link.look() is False
    seen = []
    while zmq.EVENT_HANDSHAKE_SUCCEEDED not in seen:
        ready = {descriptor for descriptor, _ in waiting.epoll.poll(WAIT)}
        assert ready, "nothing was signalled"
        if waiting.call.signals[0] in ready:
            waiting.call.receive()
        if not ready.isdisjoint(waiting.listener.signals):
            waiting.listener.events()
            waiting.listener.receive()
        if waiting.call.signals[1] in ready:
            seen += [event for event, _ in waiting.call.events()]


def test_what_comes_while_the_socket_is_used_is_seen(waiting):
    """To send takes notice of what has come, and with it the signal: the thread would sleep for ever."""
    waiting.call.send(b"first")
    (first,) = heard(waiting, 1)
    for round_ in range(200):
        waiting.listener.send(first.identity, b"there")
        while not waiting.call.look():
            assert waiting.epoll.poll(WAIT), "nothing was signalled"
            waiting.call.send(b"meanwhile")  # may take the signal
        assert waiting.call.receive() == [b"there"], round_


def test_a_batch_leaves_the_rest_pending(waiting):
    for i in range(600):
        waiting.call.send(b"%d" % i)
    found = heard(waiting, 600)
    assert [int(each.frame) for each in found] == list(range(600))
    waiting.listener.bind_rank(found[0].identity, found[0].descriptor, 3)
    waiting.call.send(b"known")
    (known,) = heard(waiting, 1)
    assert (known.frame, known.descriptor, known.address) == (b"known", found[0].descriptor, "")
    waiting.call.socket.send_multipart([b"two", b"parts"])
    waiting.call.send(b"one")
    assert [each.frame for each in heard(waiting, 2)] == [b"", b"one"], "what is not one frame is none of ours"

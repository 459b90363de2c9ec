"""Parts of tools/rxe_vm without a machine: frames on wires, the initramfs, the kernel's image, what is missing."""

from __future__ import annotations

import contextlib
import io
import lzma
import selectors
import shutil
import socket
import struct
import sys
import time

import pytest

from rxe_vm import initramfs, kernel, machine, main, packages, wires

BIG = 60_000


def frame(number: int, length: int = 100) -> bytes:
    return struct.pack(">I", length) + bytes([number]) * length


@pytest.fixture
def lane():
    """A lane, and the sockets of the guests at its two ends."""
    pairs = [socket.socketpair() for _ in range(2)]
    (sender, source), (sink, receiver) = pairs
    for one in (source, sink, receiver):
        one.setblocking(False)
    yield wires.Lane(source, sink), sender, receiver
    for pair in pairs:
        for one in pair:
            one.close()


def received(receiver: socket.socket) -> bytes:
    data = b""
    while True:
        try:
            data += receiver.recv(1 << 20)
        except BlockingIOError:
            return data


@pytest.mark.parametrize(
    ("data", "length"),
    [(b"", 0), (b"\0\0", 0), (frame(1), 104), (frame(1) + frame(2)[:-1], 104), (frame(1) + frame(2, 0), 108)],
)
def test_whole_frames(data, length):
    assert wires.whole_frames(data) == length


def test_a_frame_in_pieces_is_passed_on_whole(lane):
    one, sender, receiver = lane
    text = frame(1) + frame(2)
    for place in range(0, len(text), 30):
        sender.sendall(text[place : place + 30])
        assert one.read()
    assert received(receiver) == text
    assert not one.blocked


def test_what_is_not_taken_is_lost_but_for_the_frame_that_has_begun(lane, monkeypatch):
    one, sender, receiver = lane
    number = 0
    while not one.full:
        sender.sendall(frame(number % 256, BIG))
        one.read()
        number += 1
    one.lose()
    assert one.full  # patience is not over
    monkeypatch.setattr(wires, "PATIENCE", 0.0)
    one.lose()
    assert not one.full
    data = received(receiver)
    one.write()
    data += received(receiver)
    monkeypatch.undo()
    sender.sendall(frame(255))
    one.read()
    data += received(receiver)
    whole = wires.whole_frames(data)
    assert whole == len(data)  # no frame is cut
    assert data.endswith(frame(255))
    assert 0 < len(data) // BIG < number


def test_a_far_end_that_takes_nothing_costs_patience_once(lane, monkeypatch):
    one, sender, _ = lane
    while not one.full:
        sender.sendall(frame(1, 999))
        one.read()
    monkeypatch.setattr(wires, "PATIENCE", 0.0)
    one.lose()
    monkeypatch.setattr(wires, "PATIENCE", time.monotonic() - one._progress)
    for _ in range(100):
        sender.sendall(frame(2, 999))
        one.read()
        one.lose()
        assert not one.full


def test_frames_cross_in_both_directions():
    ends = [socket.socketpair() for _ in range(2)]
    both = wires.Wires([(ends[0][0], ends[1][0])])
    with selectors.DefaultSelector() as selector:
        for far, other in ((0, 1), (1, 0)):
            ends[far][1].sendall(frame(far))
            assert both.watch(selector) is None
            both.turn({key.fileobj: events for key, events in selector.select(5)})
            assert ends[other][1].recv(1000) == frame(far)
        ends[0][1].close()  # a guest that is gone
        both.watch(selector)
        both.turn({key.fileobj: events for key, events in selector.select(5)})
        both.watch(selector)
        assert selector.select(0) == []  # is not looked at for ever
    for pair in ends:
        for one in pair:
            one.close()


def test_an_entry_of_the_archive():
    text = initramfs._entry(7, "folder/file", 0o100644, b"12345")
    fields = [int(text[place : place + 8], 16) for place in range(6, 110, 8)]
    assert (text[:6], fields[0], fields[1], fields[6], fields[11]) == (
        b"070701",
        7,
        0o100644,
        5,
        len("folder/file") + 1,
    )
    assert text[110:] == b"folder/file\0" + b"\0\0" + b"12345" + b"\0\0\0"


def image(payload: bytes) -> bytes:
    """A bzImage of two sectors of set-up, with this payload 16 bytes after them."""
    head = bytearray(1024 + 16)
    head[0x1F1] = 1
    head[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", head, 0x248, 16, len(payload))
    return bytes(head) + payload + b"rest"


def test_the_kernel_in_its_image():
    assert kernel.unpacked(image(lzma.compress(b"\x7fELF kernel") + struct.pack("<I", 11))) == b"\x7fELF kernel"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (bytes(2048), "not a bzImage"),
        (image(b"gzip" * 9), "not packed with xz"),
        (image(lzma.compress(b"x" * 999)[:50]), "ends within"),
    ],
)
def test_an_image_that_is_something_else(data, expected):
    with pytest.raises(packages.StageError, match=expected):
        kernel.unpacked(data)


def test_a_command_that_fails_is_told_with_its_words():
    with pytest.raises(packages.StageError, match=r"exit status 3\nno such"):
        kernel._output(sys.executable, "-c", "import sys; print('no such', file=sys.stderr); sys.exit(3)")
    with pytest.raises(packages.StageError, match="not here"):
        kernel._output("no-such-program")


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(packages, "NEEDED", ["bash", "no-such-package"])
    if shutil.which("dpkg-query"):
        assert packages.missing() == ["no-such-package"]
    else:
        assert packages.missing() == ["bash", "no-such-package"]


def test_lines_of_one_guest_and_numbered_ones_of_two(monkeypatch):
    class Out:
        buffer = io.BytesIO()

    monkeypatch.setattr(main.sys, "stdout", Out)
    show = main.Printer(1)
    for data in (b"a", b"b\nc", b""):
        show(0, data)
    assert Out.buffer.getvalue() == b"ab\nc"
    Out.buffer = io.BytesIO()
    show = main.Printer(2)
    for host, data in ((0, b"a"), (1, b"x\ny"), (0, b"b\n"), (1, b""), (0, b"")):
        show(host, data)
    assert Out.buffer.getvalue() == b"[1] x\n[0] ab\n[1] y\n"


@pytest.mark.parametrize(
    ("said", "passed", "wrong"),
    [
        (1.85, 2.5, False),
        (5.29, 25.0, False),
        (0.9, 1.0, False),
        (16.02, 2.5, True),
        (53.2, 7.0, True),
        (0.5, 11.0, True),
    ],
)
def test_a_clock_that_runs_at_another_speed_is_told(said, passed, wrong):
    assert machine.clock_is_wrong(said, passed) is wrong


def test_a_guest_tells_its_clock_step_by_step():
    guest = machine.Guest.__new__(machine.Guest)
    guest.host, guest.console, guest._started = 1, bytearray(), time.monotonic() - 3
    guest.take("console", b"[ 0.5] up\nrxe_vm: 1.8")
    guest.take("console", b"5 s: loading modules\n[ 4966.5] hrtimer\n")
    with pytest.raises(machine.ClockError, match=r"guest 1 says 35.74 s after 3\.\d s"):
        guest.take("console", b"rxe_vm: 35.74 s: mounting the root of the host\n")


@pytest.mark.parametrize(("wrong", "code"), [(0, 7), (2, 7), (3, main.BROKEN)])
def test_guests_with_wrong_clocks_are_booted_again(monkeypatch, capsys, wrong, code):
    boots = []

    @contextlib.contextmanager
    def guests(asked):
        boots.append(asked)
        yield [], None

    def serve(*_):
        if len(boots) <= wrong:
            raise machine.ClockError("guest 0 says 9 s after 1 s")
        return [7]

    monkeypatch.setattr(main, "guests", guests)
    monkeypatch.setattr(main, "serve", serve)
    assert main.main(["--", "true"]) == code
    assert len(boots) == min(wrong + 1, main.BOOTS)
    assert capsys.readouterr().err.count("its clock is wrong") == wrong

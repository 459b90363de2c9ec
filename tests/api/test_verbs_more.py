"""hrdma.verbs on the simulated device, or on HRDMA_TEST_DEVICE: atomics, shared receive queues, closing while posting."""

import gc
import struct
import threading
import time

import numpy as np
import pytest
from test_verbs import DEVICE, SIZE, Pair

import hrdma
from hrdma import verbs

TOP = (1 << 64) - 1


@pytest.fixture
def pair():
    pair = Pair(inline=64)
    yield pair
    pair.device.close()


class Word:
    """A 64-bit integer that peers may change, and one of ours for what was there before."""

    def __init__(self, pair, value=0, **rights):
        self.there = np.array([value, 99], "uint64")
        self.before = np.zeros(1, "uint64")
        self.region = verbs.MemoryRegion(pair.pd, self.there, **(rights or {"remote_atomic": True}))
        self.local = verbs.MemoryRegion(pair.pd, self.before)
        self.place = (self.region.address, self.region.rkey)


def test_fetch_add_and_compare_swap(pair):
    assert pair.device.limits()["atomics"]
    here, word = pair.qps[0], Word(pair, 40)
    here.fetch_add(word.local, *word.place, 2, wr_id=1 << 50)
    (done,) = pair.ended(0)
    assert (done.check().opcode, done.wr_id, word.before[0], word.there[0]) == ("fetch_add", 1 << 50, 40, 42)
    here.fetch_add(word.local, *word.place, TOP)  # less one
    pair.ended(0)[0].check()
    assert (word.before[0], word.there[0]) == (42, 41)
    here.compare_swap(word.local, *word.place, 7, 1)
    assert pair.ended(0)[0].check().opcode == "compare_swap"
    assert (word.before[0], word.there[0]) == (41, 41)
    here.compare_swap(word.local, *word.place, 41, TOP)
    pair.ended(0)[0].check()
    assert (word.before[0], word.there.tolist()) == (41, [TOP, 99])


def test_sums_of_two_queue_pairs_lose_nothing(pair):
    word, turns = Word(pair), 200
    before = [np.zeros(turns, "uint64") for _ in range(2)]
    regions = [verbs.MemoryRegion(pair.pd, x) for x in before]

    def add(side):
        for turn in range(turns):
            pair.qps[side].fetch_add(regions[side][8 * turn : 8 * turn + 8], *word.place, 1)
            pair.ended(side)[0].check()

    threads = [threading.Thread(target=add, args=(side,)) for side in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert word.there[0] == 2 * turns
    assert sorted(np.concatenate(before).tolist()) == list(range(2 * turns))  # every value was seen once


@pytest.mark.parametrize(
    ("piece", "offset", "error", "words"),
    [
        (slice(0, 4), 0, ValueError, "8 bytes"),
        (slice(0, 8), 4, ValueError, "multiple of 8"),
    ],
)
def test_atomics_that_cannot_be(pair, piece, offset, error, words):
    word = Word(pair, 5)
    address, rkey = word.place
    with pytest.raises(error, match=words):
        pair.qps[0].fetch_add(word.local[piece], address + offset, rkey, 1)
    with pytest.raises(error, match=words):
        pair.qps[0].compare_swap(word.local[piece], address + offset, rkey, 1, 1)
    for value in (-1, -(1 << 70), TOP + 1):
        for post, operands, name in (("fetch_add", (value,), "add"), ("compare_swap", (value, 1), "compare")):
            with pytest.raises(error, match=f"^{name}={value}: 0 to "):
                getattr(pair.qps[0], post)(word.local, address, rkey, *operands)
        with pytest.raises(error, match=f"^swap={value}: 0 to "):
            pair.qps[0].compare_swap(word.local, address, rkey, 1, value)
    with pytest.raises(ValueError, match="8 bytes"):
        pair.qps[0].fetch_add([word.local, word.local], address, rkey, 1)
    assert pair.cqs[0].poll() == [] and word.there[0] == 5 and pair.qps[0].state == "rts"


@pytest.mark.parametrize("wrong", [None, 7, b"bytes", "text"])
@pytest.mark.parametrize("post", ["post_send", "post_recv", "write", "read", "fetch_add", "compare_swap"])
def test_what_is_no_region_in_a_batch_is_refused(pair, post, wrong):
    """Nothing of the batch is posted, not even what comes before it."""
    word = Word(pair, 5)
    more = {"post_send": (), "post_recv": (), "write": word.place, "read": word.place, "fetch_add": (*word.place, 1)}
    for batch in ([wrong], [word.local, wrong], [wrong, word.local]):
        with pytest.raises(TypeError, match=f"not {type(wrong).__name__}"):
            getattr(pair.qps[0], post)(batch, *more.get(post, (*word.place, 5, 1)))
    assert pair.cqs[0].poll() == [] and word.there[0] == 5 and pair.qps[0].state == "rts"
    pair.qps[1].post_recv(pair.regions[1], wr_id=4)
    pair.qps[0].post_send(pair.regions[0][:3])
    assert [one.check().wr_id for one in pair.ended(1)] == [4]


@pytest.mark.parametrize(
    ("start", "end"),
    [(0, SIZE + 1), (SIZE + 1, SIZE + 1), (5, 4), (-1, 4), (-5, -4), (0, 1 << 64), (-1 << 64, 1 << 70)],
)
def test_a_piece_is_within_its_region(pair, start, end):
    with pytest.raises(ValueError, match=rf"start={start}, end={end}: not within <MemoryRegion of {SIZE} bytes"):
        verbs.Piece(pair.regions[0], start, end)


def test_pieces_by_hand_are_those_of_slices(pair):
    for start, end in ((0, SIZE), (0, 0), (SIZE, SIZE), (7, 7), (7, 9)):
        piece, same = verbs.Piece(pair.regions[0], start, end), pair.regions[0][start:end]
        assert (piece.start, piece.end, len(piece)) == (same.start, same.end, len(same)) == (start, end, end - start)
    with pytest.raises(TypeError):
        verbs.Piece(pair.regions[0], 0, 1.5)
    with pytest.raises(TypeError):
        verbs.Piece(None, 0, 0)


@pytest.mark.parametrize("what", [verbs.Device, verbs.choose, lambda wrong: verbs.choose("sim", ifname=wrong)])
def test_none_is_no_name(what):
    with pytest.raises(TypeError, match=r"must not be None|got NoneType"):
        what(None)


def test_memory_without_the_right_is_refused(pair):
    word = Word(pair, 5, remote_read=True, remote_write=True)
    pair.qps[0].fetch_add(word.local, *word.place, 1)
    (failed,) = pair.ended(0)
    assert not failed.ok and "remote access error" in failed.status and word.there[0] == 5


class Many:
    """Queue pairs of one side that share a receive queue, each with a peer of its own."""

    def __init__(self, peers, recvs=64):
        self.device = verbs.Device(DEVICE)
        self.pd, self.cq = verbs.ProtectionDomain(self.device), verbs.CompletionQueue(self.device)
        self.srq = verbs.SharedReceiveQueue(self.pd, recvs)
        self.sent = verbs.CompletionQueue(self.device)
        self.qps = [verbs.QueuePair(self.pd, self.cq, srq=self.srq) for _ in range(peers)]
        self.far = [verbs.QueuePair(self.pd, self.sent) for _ in range(peers)]
        for qp, far in zip(self.qps, self.far):
            qp.connect(far.address)
            far.connect(qp.address)
        self.array = np.zeros((recvs, 10_000), "uint8")
        self.region = verbs.MemoryRegion(self.pd, self.array, remote_write=True)

    def place(self, number):
        return self.region[number * 10_000 : (number + 1) * 10_000]

    def ended(self, cq, count):
        found = []
        while len(found) < count:
            got = cq.poll(timeout=10)
            assert got, f"{len(found)} of {count} ended"
            found += got
        return found


@pytest.fixture
def many():
    many = Many(3)
    yield many
    many.device.close()


def test_messages_to_many_take_receives_of_one_queue(many):
    assert many.device.limits()["shared_queues"] > 0 and many.qps[0].srq is many.srq
    many.srq.post_recv([many.place(i) for i in range(30)], wr_id=100)
    data = [np.full(9_001 + i, i + 1, "uint8") for i in range(3)]  # several packets each, so that they mingle
    regions = [verbs.MemoryRegion(many.pd, x) for x in data]
    for _ in range(10):
        for far, region in zip(many.far, regions):
            far.post_send(region)
    taken = set()
    for one in many.ended(many.cq, 30):
        side = [qp.num for qp in many.qps].index(one.check().qp_num)
        assert one.nbytes == len(data[side])
        assert (many.array[one.wr_id - 100, : one.nbytes] == side + 1).all()
        taken.add(one.wr_id)
    assert taken == set(range(100, 130))
    assert all(one.check() for one in many.ended(many.sent, 30))


def test_an_empty_queue_is_an_error_of_the_sender_after_a_while(many):
    source = verbs.MemoryRegion(many.pd, b"late")
    many.far[1].post_send(source)
    (failed,) = many.ended(many.sent, 1)
    assert (failed.ok, failed.code) == (False, 13) and many.cq.poll() == []
    many.srq.post_recv(many.place(0), wr_id=4)
    many.far[2].post_send(source)
    assert [one.check().wr_id for one in many.ended(many.cq, 1)] == [4]


def test_a_write_with_immediate_data_takes_one(many):
    many.srq.post_recv(many.region[:0], wr_id=9)
    source = verbs.MemoryRegion(many.pd, b"told")
    many.far[0].write(source, many.region.address + 50, many.region.rkey, imm=77)
    (got,) = many.ended(many.cq, 1)
    assert (got.check().wr_id, got.opcode, got.imm) == (9, "recv of write", 77)
    assert many.array.tobytes()[50:54] == b"told"


def test_a_queue_pair_that_breaks_leaves_the_queue_to_the_others(many):
    many.srq.post_recv([many.place(i) for i in range(4)])
    source = verbs.MemoryRegion(many.pd, bytes(100))
    many.far[0].write(source, many.region.address, many.region.rkey ^ 0x5500)
    assert not many.ended(many.sent, 1)[0].ok
    assert many.qps[0].state == "err" and many.qps[1].state == "rts"
    many.far[1].post_send(source)
    assert [one.check().qp_num for one in many.ended(many.cq, 1)] == [many.qps[1].num]


def test_limits_of_shared_queues(many):
    with pytest.raises(hrdma.RequestError, match=r"after \d+ of 5000; it has room for 64 receives"):
        many.srq.post_recv([many.region[:1]] * 5000)
    with pytest.raises(ValueError, match=r"receives from <SharedReceiveQueue of 64 .*post there"):
        many.qps[0].post_recv(many.region)
    with pytest.raises(ValueError, match="recvs=0"):
        verbs.SharedReceiveQueue(many.pd, 0)
    with pytest.raises(hrdma.DeviceError, match="shared queue of 1000000000 receives"):
        verbs.SharedReceiveQueue(many.pd, 1_000_000_000)
    stranger = verbs.ProtectionDomain(many.device)
    with pytest.raises(ValueError, match="another protection domain"):
        verbs.QueuePair(stranger, many.cq, srq=many.srq)
    with pytest.raises(ValueError, match="another protection domain"):
        many.srq.post_recv(verbs.MemoryRegion(stranger, bytearray(9)))
    with pytest.raises(TypeError, match="not NoneType"):
        many.srq.post_recv([many.place(0), None])


def test_a_shared_queue_is_closed_after_its_queue_pairs_and_keeps_its_memory(many):
    array = bytearray(10)
    many.srq.post_recv(verbs.MemoryRegion(many.pd, array))
    gc.collect()
    with pytest.raises(BufferError):
        array.append(1)
    many.srq.close()
    assert all(qp.closed for qp in many.qps) and not many.far[0].closed
    gc.collect()
    array.append(1)
    with pytest.raises(ValueError, match="is closed"):
        many.srq.post_recv(many.region)


def test_a_region_is_not_closed_while_it_is_posted_inline():
    """The bytes of an inline post are read while posting, without the GIL: `close` has to refuse just then."""
    batch = 1500  # so that it takes some time, and ends within the peer's region
    pair = Pair(inline=64, sends=batch + 1)
    stop, refused, turns, problems = time.monotonic() + 20, 0, 0, []
    with pair.device:
        while (refused < 3 or turns < 5) and time.monotonic() < stop and not problems:
            turns += 1
            region = verbs.MemoryRegion(pair.pd, struct.pack("=B", turns % 250 + 1) * 64)
            pieces = [region] * batch
            begin = threading.Event()

            def post(pieces=pieces, begin=begin):
                begin.set()
                try:
                    pair.qps[0].write(
                        pieces, pair.regions[1].address, pair.regions[1].rkey, inline=True, signaled=False
                    )
                except ValueError as error:  # it was closed before
                    if "is closed" not in str(error):
                        problems.append(error)
                except Exception as error:
                    problems.append(error)

            thread = threading.Thread(target=post)
            thread.start()
            begin.wait()
            while not region.closed:
                try:
                    region.close()
                except hrdma.RequestError as error:
                    assert "in use by another thread" in str(error)
                    refused += 1
            thread.join()
            pair.qps[0].read(pair.regions[0][:64], pair.regions[1].address, pair.regions[1].rkey)
            assert pair.ended(0)[0].check().opcode == "read"  # after the writes, which makes room for the next
            assert len(set(pair.arrays[0][:64].tolist())) == 1
    assert not problems and refused >= 3


class Apart:
    """Two connected queue pairs, each with a queue for the ends of sending and another for those of receiving."""

    def __init__(self, **how):
        self.device = verbs.Device(DEVICE)
        self.pd = verbs.ProtectionDomain(self.device)
        self.cqs = [verbs.CompletionQueue(self.device, **how) for _ in range(4)]
        self.qps = [verbs.QueuePair(self.pd, *self.cqs[i : i + 2]) for i in (0, 2)]
        for qp, other in zip(self.qps, reversed(self.qps)):
            qp.connect(other.address)
        self.region = verbs.MemoryRegion(self.pd, bytearray(1000))


def test_a_queue_pair_polls_its_completion_queue(pair):
    here, there = pair.qps
    assert here.poll() == [] and here.poll(limit=64, timeout=0.01) == []
    there.post_recv([pair.regions[1][i : i + 9] for i in range(3)], wr_id=7)
    here.post_send([pair.regions[0][:9]] * 3, wr_id=4)
    found = [there.poll(2, timeout=10), there.poll(timeout=10)]
    while sum(map(len, found)) < 3:
        found.append(there.poll(timeout=10))
    assert max(map(len, found)) <= 2
    assert [(one.check().wr_id, one.opcode) for some in found for one in some] == [(i, "recv") for i in (7, 8, 9)]
    sent = []
    while len(sent) < 3:
        sent += here.poll(timeout=10)
    assert [one.check().wr_id for one in sent] == [4, 5, 6]
    assert pair.cqs[0].poll() == pair.cqs[1].poll() == []
    with pytest.raises(ValueError, match="limit=65"):
        here.poll(65)
    with pytest.raises(ValueError, match="timeout -1: seconds are wanted"):
        here.poll(timeout=-1)
    here.close()
    with pytest.raises(ValueError, match=r"<QueuePair closed .* is closed"):
        here.poll()


@pytest.mark.parametrize("spin_us", [0, 60_000_000])
def test_a_queue_pair_of_two_queues_waits_for_either(spin_us):
    two = Apart(spin_us=spin_us)
    with two.device:
        (here, there), region = two.qps, two.region
        start = time.monotonic()
        assert here.poll(timeout=0.3) == [] and 0.3 <= time.monotonic() - start < 2
        here.post_recv([region[:10], region[10:20]])
        there.post_recv(region[20:30])
        for _ in range(2):  # whichever of the queues is asked first
            timer = threading.Timer(0.1, there.post_send, [region[30:40]])
            timer.start()
            assert [one.check().opcode for one in here.poll(timeout=20)] == ["recv"]
            timer.join()
        here.post_send(region[40:50])
        assert [one.check().opcode for one in here.poll(timeout=20)] == ["send"]
        found = []
        while len(found) < 3:
            found += there.poll(limit=1, timeout=10)
        assert sorted(one.check().opcode for one in found) == ["recv", "send", "send"]
        assert [queue.poll() for queue in two.cqs] == [[]] * 4


def test_neither_of_two_queues_keeps_the_other_waiting():
    two = Apart()
    with two.device:
        (here, there), region = two.qps, two.region
        here.post_recv([region[:1]] * 20)
        there.post_recv([region[:1]] * 20)
        there.post_send([region[1:2]] * 20)
        here.post_send([region[1:2]] * 20)
        stop, theirs = time.monotonic() + 10, 0
        while theirs < 40 and time.monotonic() < stop:  # then all of ours have come, too
            theirs += len(there.poll(timeout=1))
        time.sleep(0.1)
        assert [here.poll(1)[0].opcode for _ in range(10)].count("send") == 5


def test_a_queue_pair_that_polls_is_not_closed(pair):
    begins = threading.Event()
    waits = threading.Thread(target=lambda: (begins.set(), pair.qps[0].poll(timeout=20)))
    waits.start()
    begins.wait()
    time.sleep(0.2)
    for one in (pair.qps[0], pair.cqs[0], pair.device):
        with pytest.raises(hrdma.RequestError, match="in use by another thread"):
            one.close()
    pair.qps[0].post_recv(pair.regions[0])
    pair.qps[1].post_send(pair.regions[1][:10])  # what it waits for
    waits.join()
    pair.qps[0].close()

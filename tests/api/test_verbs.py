"""hrdma.verbs on the simulated device, or on HRDMA_TEST_DEVICE: moving bytes, limits, errors, who is closed before whom."""

import gc
import os
import signal
import threading
import time

import numpy as np
import pytest

import hrdma
from hrdma import verbs

DEVICE = os.environ.get("HRDMA_TEST_DEVICE") or "sim"
SIZE = 100_000


class Pair:
    """Two connected queue pairs of one device, with a region of SIZE bytes each that its peer may use."""

    def __init__(self, device=DEVICE, **how):
        self.device = verbs.Device(device)
        self.pd = verbs.ProtectionDomain(self.device)
        self.cqs = [verbs.CompletionQueue(self.device) for _ in range(2)]
        self.qps = [verbs.QueuePair(self.pd, cq, **how) for cq in self.cqs]
        for qp, other in zip(self.qps, reversed(self.qps)):
            qp.connect(other.address)
        self.arrays = [np.zeros(SIZE, "uint8") for _ in range(2)]
        self.regions = [verbs.MemoryRegion(self.pd, x, remote_read=True, remote_write=True) for x in self.arrays]
        self.arrays[0][:] = np.arange(SIZE) * 7 % 251

    def ended(self, side, count=1):
        found = []
        while len(found) < count:
            got = self.cqs[side].poll(timeout=10)
            assert got, f"{len(found)} of {count} work requests ended"
            found += got
        return found


@pytest.fixture
def pair():
    pair = Pair(inline=16)
    yield pair
    pair.device.close()


def test_devices():
    assert DEVICE in verbs.devices() and verbs.devices()[-1] == "sim"
    with verbs.Device(DEVICE) as device:
        limits = device.limits()
        assert limits["active"] and limits["queue_pairs"] > 2 and limits["ports"] >= device.port
        assert device.mtu in (256, 512, 1024, 2048, 4096) and ":" in device.gid
    assert device.closed
    with pytest.raises(ValueError, match=f"<Device {DEVICE}:1> is closed"):
        device.limits()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("carrier_pigeon",), "carrier_pigeon|libibverbs"),
        ((DEVICE, 77), f"{DEVICE} has no port 77"),
        ((DEVICE, 1, 4000), "has no GID 4000"),
        ((DEVICE, 1, 1 << 40), f"has no GID {1 << 40}"),
    ],
)
def test_what_is_not_there(arguments, words):
    with pytest.raises(hrdma.DeviceError, match=words):
        verbs.Device(*arguments)


@pytest.mark.parametrize("index", [-1, -2, -(1 << 70)])
def test_a_negative_gid_index_is_refused(index):
    for what in (lambda: verbs.Device(DEVICE, 1, index), lambda: verbs.choose("sim", gid_index=index)):
        with pytest.raises(ValueError, match=f"gid_index={index}: 0 or more"):
            what()
    with verbs.Device(DEVICE, 1, None) as device:
        assert device.gid_index >= 0


def test_class_and_service_level_are_set_and_read_back(pair):
    for dscp, sl in ((0, 0), (46, 5), (63, 15)):
        with verbs.QueuePair(pair.pd, pair.cqs[0]) as qp:
            qp.connect(qp.address, dscp=dscp, sl=sl)
            assert qp.dscp == dscp
            # Elsewhere it may be the three bits of a VLAN's priority; soft-RoCE forgets it.
            assert qp.sl in ({sl} if DEVICE == "sim" else {sl, sl & 7, 0})


def test_messages_come_in_order_with_their_immediate_data(pair):
    here, there = pair.qps
    there.post_recv([pair.regions[1][i * 100 : i * 100 + 100] for i in range(3)], wr_id=40)
    here.post_send([pair.regions[0][i * 100 : i * 100 + 50 + i] for i in range(2)], wr_id=1 << 60, imm=0xFEEDBEEF)
    here.post_send(pair.regions[0][:0])
    got = [one.check() for one in pair.ended(1, 3)]
    assert [(one.wr_id, one.opcode, one.nbytes, one.imm) for one in got] == [
        (40, "recv", 50, 0xFEEDBEEF),
        (41, "recv", 51, 0xFEEDBEEF),
        (42, "recv", 0, None),
    ]
    assert [one.check().wr_id for one in pair.ended(0, 3)] == [1 << 60, (1 << 60) + 1, 0]
    assert (pair.arrays[1][:50] == pair.arrays[0][:50]).all() and (
        pair.arrays[1][100:151] == pair.arrays[0][100:151]
    ).all()
    assert not pair.arrays[1][50:100].any() and not pair.arrays[1][151:].any()


def test_writes_and_reads(pair):
    (here, _), (x, y), (mine, theirs) = pair.qps, pair.arrays, pair.regions
    here.write([mine[:60_000], mine[60_000:]], theirs.address, theirs.rkey, signaled=False)
    here.read(mine[:9], theirs.address + 1, theirs.rkey, wr_id=5)
    (done,) = pair.ended(0)  # the writes are not told
    assert (done.wr_id, done.check().opcode) == (5, "read")
    assert (x[:9] == y[1:10]).all() and (x[9:] == y[9:]).all()


def test_a_write_with_immediate_data_is_told(pair):
    here, there = pair.qps
    there.post_recv(pair.regions[1][:0], wr_id=8)
    here.write(pair.regions[0][:64], pair.regions[1].address + 5, pair.regions[1].rkey, imm=3)
    (got,) = pair.ended(1)
    assert (got.wr_id, got.opcode, got.nbytes, got.imm) == (8, "recv of write", 64, 3)
    assert (pair.arrays[1][5:69] == pair.arrays[0][:64]).all()


def test_inline_bytes_are_taken_while_posting(pair):
    assert pair.qps[0].inline == 16
    pair.qps[0].write(pair.regions[0][:16], pair.regions[1].address, pair.regions[1].rkey, inline=True)
    sent, pair.arrays[0][:] = pair.arrays[0][:16].copy(), 0
    pair.ended(0)[0].check()
    assert (pair.arrays[1][:16] == sent).all()
    with pytest.raises(hrdma.RequestError, match=r"write on <QueuePair \d+ on .*after 0 of 1"):
        pair.qps[0].write(pair.regions[0][:5000], pair.regions[1].address, pair.regions[1].rkey, inline=True)


def test_memory_of_many_kinds(pair):
    for source in (b"from bytes", bytearray(b"from an array"), memoryview(b"a view"), hrdma.empty(77, "float32")):
        nbytes = memoryview(source).nbytes
        with verbs.MemoryRegion(pair.pd, source) as region:
            assert len(region) == nbytes
            pair.qps[0].write(region, pair.regions[1].address, pair.regions[1].rkey)
            pair.ended(0)[0].check()
        assert pair.arrays[1][:nbytes].tobytes() == bytes(source)


@pytest.mark.parametrize(
    ("buffer", "how", "error", "words"),
    [
        (b"", {}, ValueError, "empty"),
        (b"constant", {"remote_write": True}, (ValueError, BufferError, TypeError), "read-only|writable|writeable"),
        (np.zeros((4, 4))[:, :2], {}, (ValueError, BufferError, TypeError), "contiguous"),
        (7, {}, TypeError, "int"),
    ],
)
def test_memory_that_cannot_be_registered(pair, buffer, how, error, words):
    with pytest.raises(error, match=words):
        verbs.MemoryRegion(pair.pd, buffer, **how)


def test_a_wrong_key_fails_with_status_and_vendor_code_and_ends_both(pair):
    pair.qps[1].post_recv(pair.regions[1])
    pair.qps[0].write(pair.regions[0], pair.regions[1].address + 1, pair.regions[1].rkey, wr_id=3)
    (failed,) = pair.ended(0)
    assert (failed.ok, failed.wr_id, failed.code) == (False, 3, 10)
    text = rf"work request 3 of queue pair {pair.qps[0].num} failed: remote access error.*\(status 10, vendor code 0x"
    with pytest.raises(hrdma.RequestError, match=text):
        failed.check()
    assert "flushed" in pair.ended(1)[0].status
    assert [qp.state for qp in pair.qps] == ["err", "err"]
    assert not pair.arrays[1].any()


def test_a_message_larger_than_its_receive_is_an_error_at_both_ends(pair):
    pair.qps[1].post_recv(pair.regions[1][:10], wr_id=5)
    pair.qps[0].post_send(pair.regions[0][:11])
    # soft-RoCE calls it an operation error, at both ends
    with pytest.raises(hrdma.RequestError, match=r"failed: remote (invalid request|operation error): .* receive"):
        pair.ended(0)[0].check()
    with pytest.raises(
        hrdma.RequestError,
        match=r"work request 5 .* failed: local (length|queue pair operation) error: .*larger than its receive",
    ):
        pair.ended(1)[0].check()
    assert [qp.state for qp in pair.qps] == ["err", "err"]
    assert not pair.arrays[1][10:].any()


@pytest.mark.parametrize(
    ("name", "vendor", "sender", "receiver"),
    [
        ("sim", 0, "remote invalid request", "local length"),
        ("sim_rxe", 0xFFFFFF, "remote operation", "local queue pair operation"),
    ],
)
def test_a_simulated_device_has_the_errors_of_the_specification_or_of_soft_roce(name, vendor, sender, receiver):
    pair = Pair(name)
    with pair.device as device:
        assert device.limits()["vendor"] == vendor
        pair.qps[1].post_recv(pair.regions[1][:10])
        pair.qps[0].post_send(pair.regions[0][:11])
        assert sender in pair.ended(0)[0].status and receiver in pair.ended(1)[0].status


def test_a_peer_that_is_gone_is_an_error_in_time(pair):
    pair.qps[1].close()
    start = time.monotonic()
    pair.qps[0].post_send(pair.regions[0][:10])
    (failed,) = pair.cqs[0].poll(timeout=30)
    assert not failed.ok and time.monotonic() - start < 25


def test_a_full_queue_says_how_many_were_posted():
    pair = Pair(sends=4)
    with pair.device, pytest.raises(hrdma.RequestError, match=r"after \d+ of 5000; .*poll for completions"):
        pair.qps[0].post_send([pair.regions[0][:0]] * 5000)


def test_more_queue_pairs_and_regions_than_the_device_has():
    """Those that there are go on, and one that is closed makes room."""
    with verbs.Device("sim") as device:
        limits, pd, buffer = device.limits(), verbs.ProtectionDomain(device), bytearray(8)
        cq = verbs.CompletionQueue(device)
        qps = [verbs.QueuePair(pd, cq, sends=1, recvs=1) for _ in range(limits["queue_pairs"])]
        with pytest.raises(
            hrdma.DeviceError, match=r"1 sends.* on sim: Cannot allocate memory; it has 4096 queue pairs"
        ):
            verbs.QueuePair(pd, cq, sends=1, recvs=1)
        qps.pop().close()
        for qp, other in ((qps[0], qps[1]), (qps[1], qps[0])):
            qp.connect(other.address)
        regions = [verbs.MemoryRegion(pd, buffer) for _ in range(limits["regions"])]
        with pytest.raises(
            hrdma.RequestError, match=r"8 bytes on sim: Cannot allocate memory; it has room for 16384 reg"
        ):
            verbs.MemoryRegion(pd, buffer)
        regions.pop().close()
        last = verbs.MemoryRegion(pd, b"the last")
        verbs.QueuePair(pd, cq, sends=1, recvs=1)
        qps[1].post_recv(regions[0])
        qps[0].post_send(last)
        assert all(one.ok for _ in range(2) for one in cq.poll(1, timeout=10)) and buffer == b"the last"


def test_limits_of_arguments(pair):
    with pytest.raises(ValueError, match="limit=0"):
        pair.cqs[0].poll(0)
    with pytest.raises(ValueError, match="timeout -1: seconds are wanted"):
        pair.cqs[0].poll(timeout=-1)
    with pytest.raises(OverflowError):
        pair.qps[0].post_send(pair.regions[0], imm=1 << 32)
    with pytest.raises(TypeError):
        pair.qps[0].post_send(b"not registered")
    with pytest.raises(TypeError, match=r"region\[start:end\]"):
        pair.regions[0][::2]
    stranger = verbs.MemoryRegion(verbs.ProtectionDomain(pair.device), bytearray(9))
    with pytest.raises(ValueError, match="another protection domain"):
        pair.qps[0].post_recv(stranger)
    with pytest.raises(hrdma.RequestError, match=r"finds no way|does not get"):
        pair.qps[0].connect(pair.qps[1].address)  # it is connected
    with pytest.raises(ValueError, match="mtu=5"):
        pair.qps[0].connect(pair.qps[1].address._replace(mtu=5))
    for wrong in (0, -1, 8001, float("nan")):
        with pytest.raises(ValueError, match=f"ack_timeout={wrong}"):
            pair.qps[0].connect(pair.qps[1].address, ack_timeout=wrong)
    for name, wrong in (("dscp", -1), ("dscp", 64), ("sl", -1), ("sl", 16)):
        with pytest.raises(ValueError, match=f"{name}={wrong}: 0 to"):
            pair.qps[0].connect(pair.qps[1].address, **{name: wrong})
    with pytest.raises(hrdma.DeviceError, match="queue pair of 1000000000 sends"):
        verbs.QueuePair(pair.pd, pair.cqs[0], sends=1_000_000_000)


def test_waiting_sleeps_until_something_comes_and_no_longer_than_told(pair):
    start, used = time.monotonic(), time.process_time()
    assert pair.cqs[1].poll(timeout=0.4) == []
    assert 0.4 <= time.monotonic() - start < 2 and time.process_time() - used < 0.3
    pair.qps[1].post_recv(pair.regions[1])
    timer = threading.Timer(0.2, pair.qps[0].post_send, [pair.regions[0][:10]])
    timer.start()
    (got,) = pair.cqs[1].poll(timeout=20)
    timer.join()
    assert got.check().nbytes == 10


def test_waiting_polls_for_as_long_as_asked(pair):
    keen = verbs.CompletionQueue(pair.device, spin_us=10_000_000)
    qp, other = (verbs.QueuePair(pair.pd, cq) for cq in (keen, pair.cqs[0]))
    start, used = time.monotonic(), time.thread_time()
    assert keen.poll(timeout=0.3) == []
    assert 0.3 <= time.monotonic() - start < 2
    assert time.thread_time() - used > 0.01  # asleep it would be a tenth of that
    qp.connect(other.address)
    other.connect(qp.address)
    qp.post_recv(pair.regions[1])
    timer = threading.Timer(0.2, other.post_send, [pair.regions[0][:10]])
    timer.start()
    (got,) = keen.poll(timeout=20)
    timer.join()
    assert got.check().nbytes == 10
    with pytest.raises(ValueError, match="spin_us=-1: microseconds, 0 or more"):
        verbs.CompletionQueue(pair.device, spin_us=-1)


@pytest.mark.parametrize("spin_us", [0, 60_000_000])
def test_a_signal_interrupts_a_wait(pair, spin_us):
    def stop(*_):
        raise KeyboardInterrupt

    queue = verbs.CompletionQueue(pair.device, spin_us=spin_us)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            queue.poll(timeout=30)
        assert time.monotonic() - start < 5
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_what_another_thread_uses_is_not_closed(pair):
    begins = threading.Event()
    waits = threading.Thread(target=lambda: (begins.set(), pair.cqs[0].poll(timeout=20)))
    waits.start()
    begins.wait()
    time.sleep(0.2)
    with pytest.raises(hrdma.RequestError, match="in use by another thread"):
        pair.device.close()
    assert not pair.device.closed and not pair.qps[0].closed
    pair.qps[0].post_recv(pair.regions[0])
    pair.qps[1].post_send(pair.regions[1][:10])  # what it waits for
    waits.join()


def test_dependants_are_closed_before_their_owner(pair):
    pair.qps[0].post_recv(pair.regions[0])
    pair.cqs[0].close()
    assert pair.qps[0].closed and not pair.qps[1].closed and not pair.regions[0].closed
    pair.pd.close()
    assert pair.qps[1].closed and pair.regions[0].closed and not pair.cqs[1].closed
    pair.device.close()
    pair.device.close()
    assert pair.cqs[1].closed
    for use in (lambda: pair.qps[0].num, lambda: pair.cqs[1].poll(), lambda: pair.regions[1].rkey):
        with pytest.raises(ValueError, match="is closed"):
            use()


@pytest.mark.parametrize("collected", [False, True], ids=["dropped", "collected"])
def test_what_nobody_holds_closes_itself_and_gives_memory_and_descriptors_back(collected):
    gc.collect()  # what other tests have left
    files, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for _ in range(3):
        pair = Pair()
        pair.cycle = [pair, pair.pd, *pair.cqs, *pair.qps] if collected else []
        array = bytearray(10)
        pair.qps[0].post_recv(verbs.MemoryRegion(pair.pd, array))
        gc.collect()
        with pytest.raises(BufferError):
            array.append(1)  # the device has it, although nobody else has the region
        del pair
        gc.collect()
        array.append(1)
    assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == (files, threads)


def test_a_closed_queue_pair_keeps_no_memory(pair):
    array = bytearray(10)
    pair.qps[0].post_recv(verbs.MemoryRegion(pair.pd, array))
    pair.qps[0].close()
    gc.collect()
    array.append(1)


@pytest.mark.parametrize("post", ["post_send", "post_recv"])
def test_a_batch_whose_making_closes_the_queue_pair(pair, post):
    def batch():
        yield pair.regions[0]
        pair.qps[0].close()

    with pytest.raises(ValueError, match="is closed"):
        getattr(pair.qps[0], post)(batch())


def test_a_batch_whose_making_closes_a_region(pair):
    def batch():
        yield pair.regions[0][:10]
        pair.regions[0].close()

    with pytest.raises(ValueError, match="is closed"):
        pair.qps[0].post_send(batch())


def test_an_owner_is_not_closed_while_what_depends_on_it_is_made(pair):
    class Tensor:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **how):
            for owner in (pair.pd, pair.device):
                with pytest.raises(hrdma.RequestError, match="in use"):
                    owner.close()
            return np.zeros(10, "uint8").__dlpack__()

    assert len(verbs.MemoryRegion(pair.pd, Tensor())) == 10
    with pytest.raises(ValueError, match="empty"):
        verbs.MemoryRegion(pair.pd, b"")
    pair.pd.close()  # what failed to be made is not in the way
    assert pair.pd.closed


def test_a_forked_child_is_refused_and_does_no_harm(pair):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(20)
            with pytest.raises(ValueError, match="before fork"):
                pair.qps[0].post_send(pair.regions[0])
            pair.device.close()
            del pair
            gc.collect()
            code = 0
        finally:  # whatever happens, it is no second pytest
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    test_writes_and_reads(pair)

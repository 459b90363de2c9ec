"""hrdma.verbs on a device that is not simulated, with a queue pair of pyverbs at the other end: a second opinion."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hrdma import verbs

HERE = Path(__file__).parent
SIZE = 1 << 20


class Other:
    """`pyverbs_peer.py` as a process: methods are requests. When it is closed the process waits for its next use."""

    def __init__(self, idle: list[Other]) -> None:
        self._idle = idle
        self._asked = False  # something that it has not answered
        command = ["/usr/bin/python3", HERE / "pyverbs_peer.py"]
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        )

    def __call__(self, do: str, **arguments: Any) -> Any:
        assert self.process.stdin and self.process.stdout
        self._asked = True
        self.process.stdin.write(json.dumps({"do": do} | arguments) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line.startswith("{"), line + self.process.stdout.read()
        answer = json.loads(line)
        self._asked = False
        assert "error" not in answer, answer
        return answer["value"]

    def close(self) -> None:
        if not self._asked:
            self("close")
            self._idle.append(self)
        else:
            self.end()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def another() -> Iterator[Callable[[], Other]]:
    """Gives a peer that nobody uses: in a guest to start one takes seconds."""
    idle: list[Other] = []
    yield lambda: idle.pop() if idle else Other(idle)
    for other in idle:
        other.end()


@pytest.fixture
def ends(device, another):
    """Our queue pair with its region and array, and the other end."""
    other = another()
    try:
        with verbs.Device(device) as opened:
            pd, cq = verbs.ProtectionDomain(opened), verbs.CompletionQueue(opened)
            qp = verbs.QueuePair(pd, cq)
            array = np.zeros(SIZE, "uint8")
            rights = {"remote_read": True, "remote_write": True, "remote_atomic": True}
            region = verbs.MemoryRegion(pd, array, **rights)
            there = other("open", device=device, gid_index=opened.gid_index)
            other("connect", **qp.address._asdict())
            qp.connect([there[name] for name in ("gid", "lid", "num", "psn", "mtu")])
            yield qp, cq, region, array, other, there
    finally:
        other.close()


def ended(cq):
    (one,) = cq.poll(1, timeout=20)
    return one.check()


def pattern(nbytes, seed):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype="uint8")


SIZES = (1, 4096, 4097, 100_000)  # around the largest packet


def test_we_send_and_pyverbs_receives(ends):
    qp, cq, region, array, other, _ = ends
    for turn, nbytes in enumerate(SIZES):
        array[:nbytes] = pattern(nbytes, turn)
        other("post", kind="recv", at=10, nbytes=nbytes, wr_id=7 + turn)
        qp.post_send(region[:nbytes], imm=0x01020304)
        assert ended(cq).opcode == "send"
        assert other("poll") == {"wr_id": 7 + turn, "status": 0, "nbytes": nbytes, "imm": 0x01020304}
        assert bytes.fromhex(other("look", at=10, nbytes=nbytes)) == array[:nbytes].tobytes()


def test_pyverbs_sends_and_we_receive(ends):
    qp, cq, region, array, other, _ = ends
    for turn, nbytes in enumerate(SIZES):
        data = pattern(nbytes, 10 + turn)
        other("fill", at=3, data=data.tobytes().hex())
        array[:] = 0
        qp.post_recv(region[5:], wr_id=9 + turn)
        other("post", kind="send", at=3, nbytes=nbytes, imm=0xFEEDBEEF)
        got = ended(cq)
        assert (got.wr_id, got.opcode, got.nbytes, got.imm) == (9 + turn, "recv", nbytes, 0xFEEDBEEF)
        assert (array[5 : 5 + nbytes] == data).all() and not array[5 + nbytes :].any()
        assert other("poll")["status"] == 0


def test_we_write_and_read_the_memory_of_pyverbs(ends):
    qp, cq, region, array, other, there = ends
    array[:300_000] = pattern(300_000, 3)
    qp.write([region[:100_000], region[100_000:300_000]], there["address"] + 77, there["rkey"], signaled=False)
    qp.read(region[400_000:700_000], there["address"] + 77, there["rkey"])
    assert ended(cq).opcode == "read"
    assert (array[400_000:700_000] == array[:300_000]).all()
    assert bytes.fromhex(other("look", at=77, nbytes=1000)) == array[:1000].tobytes()


def test_pyverbs_writes_and_reads_our_memory(ends):
    qp, cq, region, array, other, _ = ends
    data = pattern(200_000, 4)
    other("fill", at=0, data=data.tobytes().hex())
    qp.post_recv(region[:0], wr_id=6)
    remote = {"remote": region.address + 11, "rkey": region.rkey}
    other("post", kind="write", at=0, nbytes=200_000, imm=5, **remote)
    got = ended(cq)
    assert (got.wr_id, got.opcode, got.nbytes, got.imm) == (6, "recv of write", 200_000, 5)
    assert (array[11:200_011] == data).all()
    assert other("poll")["status"] == 0
    other("post", kind="read", at=500_000, nbytes=200_000, **remote)
    assert other("poll")["status"] == 0
    assert bytes.fromhex(other("look", at=500_000, nbytes=200_000)) == data.tobytes()


def word(data):
    return int(np.frombuffer(bytes(data), "uint64")[0])


def test_our_atomics_change_the_memory_of_pyverbs(ends):
    qp, cq, region, array, other, there = ends
    other("fill", at=64, data=np.array([40], "uint64").tobytes().hex())
    place = (there["address"] + 64, there["rkey"])
    qp.fetch_add(region[:8], *place, 2)
    assert ended(cq).opcode == "fetch_add"
    qp.compare_swap(region[8:16], *place, 42, 1 << 63)
    assert ended(cq).opcode == "compare_swap"
    qp.compare_swap(region[16:24], *place, 42, 5)
    ended(cq)
    assert [word(array[at : at + 8]) for at in (0, 8, 16)] == [40, 42, 1 << 63]
    assert word(bytes.fromhex(other("look", at=64, nbytes=8))) == 1 << 63


def test_atomics_of_pyverbs_change_our_memory(ends):
    _, _, region, array, other, _ = ends
    array[80:88] = np.frombuffer(np.array([1000], "uint64").tobytes(), "uint8")
    place = {"remote": region.address + 80, "rkey": region.rkey}
    other("atomic", kind="fetch_add", at=0, operand=(1 << 64) - 1, **place)
    assert other("poll")["status"] == 0
    assert (word(bytes.fromhex(other("look", at=0, nbytes=8))), word(array[80:88])) == (1000, 999)
    other("atomic", kind="compare_swap", at=8, operand=999, swap=7, **place)
    assert other("poll")["status"] == 0
    assert (word(bytes.fromhex(other("look", at=8, nbytes=8))), word(array[80:88])) == (999, 7)


def test_pyverbs_sends_to_our_shared_queue(ends, another):
    qp, cq, region, array, _, _ = ends
    srq = verbs.SharedReceiveQueue(qp.pd, 8)
    srq.post_recv([region[i * 10_000 : (i + 1) * 10_000] for i in range(2)], wr_id=20)
    others = [another(), another()]
    try:
        mine = [verbs.QueuePair(qp.pd, cq, srq=srq) for _ in others]
        for one, other in zip(mine, others):
            there = other("open", device=qp.pd.device.name, gid_index=qp.pd.device.gid_index)
            other("connect", **one.address._asdict())
            one.connect([there[name] for name in ("gid", "lid", "num", "psn", "mtu")])
        for turn, (one, other) in enumerate(zip(mine, others)):
            data = pattern(9000, turn)
            other("fill", at=0, data=data.tobytes().hex())
            other("post", kind="send", at=0, nbytes=9000)
            got = ended(cq)
            assert (got.wr_id, got.nbytes, got.qp_num) == (20 + turn, 9000, one.num)
            assert (array[turn * 10_000 : turn * 10_000 + 9000] == data).all()
    finally:
        for other in others:
            other.close()


def test_both_have_the_same_name_for_a_wrong_key(ends, another):
    qp, cq, region, _, _, there = ends
    qp.write(region[:8], there["address"], there["rkey"] ^ 0x5500)
    (ours,) = cq.poll(1, timeout=20)
    assert not ours.ok and "remote access error" in ours.status
    assert qp.state == "err"
    fresh = another()
    try:
        with verbs.QueuePair(qp.pd, cq) as second:
            there = fresh("open", device=qp.pd.device.name, gid_index=qp.pd.device.gid_index)
            fresh("connect", **second.address._asdict())
            second.connect([there[name] for name in ("gid", "lid", "num", "psn", "mtu")])
            fresh("post", kind="write", at=0, nbytes=8, remote=region.address, rkey=region.rkey ^ 0x5500)
            assert fresh("poll")["status"] == ours.code
    finally:
        fresh.close()

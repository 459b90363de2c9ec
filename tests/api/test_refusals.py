"""What is refused before anything is sent: memory that means nothing elsewhere, numbers beyond every range."""

import ctypes

import numpy as np
import pytest

import harness
import hrdma
from hrdma import _core, verbs
from hrdma.objects.ref import describe
from hrdma.objects.request import Request

# -- Python objects ------------------------------------------------------------------------------------------------------------


class Named(np.ndarray):
    """Not numpy's own class, so the buffer protocol is asked."""


HELD = np.dtype([("n", "i8"), ("name", "O")])
DATED = np.dtype([("when", "M8[s]"), ("name", "O")])  # has no format string
OBJECTS = {
    "objects": np.array([None, {}, "x"], dtype=object),
    "none of them": np.zeros((0, 3), dtype=object),
    "one without axes": np.array(None, dtype=object),
    "structures": np.zeros(3, HELD),
    "structures in structures": np.zeros(2, [("a", "i4"), ("b", HELD, (2,))]),
    "structures without a format": np.zeros(3, DATED),
    "a subclass": np.array([1, "x"], dtype=object).view(Named),
    "a view of objects": memoryview(np.array([None, 1], dtype=object)),
    "a view of structures": memoryview(np.zeros(3, HELD)),
    "bytes of objects": memoryview(np.array([None, 1], dtype=object)).cast("B"),
    "words of objects": memoryview(np.array([None, 1], dtype=object)).cast("B").cast("q")[1:],
    "bytes of structures": memoryview(np.zeros(3, HELD)).cast("B"),
    "of ctypes": (ctypes.py_object * 2)(1, 2),
}
ENTRIES = {
    "isend": lambda c, x, y: c.isend(x, 0),
    "recv": lambda c, x, y: c.recv(x, 0),
    "irecv": lambda c, x, y: c.irecv(x, 0),
    "sendrecv": lambda c, x, y: c.sendrecv(x, 0, y, 0),
    "sendrecv into": lambda c, x, y: c.sendrecv(y, 0, x, 0),
    "allreduce": lambda c, x, y: c.allreduce(x),
    "reduce": lambda c, x, y: c.reduce(x),
    "reduce_scatter": lambda c, x, y: c.reduce_scatter(x),
    "broadcast": lambda c, x, y: c.broadcast(x),
    "broadcast, asynchronous": lambda c, x, y: c.broadcast(x, async_op=True),
    "allgather": lambda c, x, y: c.allgather(x),
    "allgather into": lambda c, x, y: c.allgather(y, out=x),
    "gather": lambda c, x, y: c.gather(x),
    "gather into": lambda c, x, y: c.gather(y, out=x),
    "scatter": lambda c, x, y: c.scatter(x),
    "scatter into": lambda c, x, y: c.scatter(y, out=x),
    "alltoall": lambda c, x, y: c.alltoall(x),
    "expose": lambda c, x, y: hrdma.Endpoint(c, 0).expose(x),
    "is_registered": lambda c, x, y: hrdma.is_registered(x),
    "kernel": lambda c, x, y: _core.reduce("sum", "int64", x, [x]),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", OBJECTS)
def test_python_objects_never_leave(comm, entry, kind):
    """Their addresses would be taken for objects, or given back to the allocator, in another process."""
    with pytest.raises(TypeError, match="are or hold Python objects"):
        ENTRIES[entry](comm, OBJECTS[kind], np.zeros(3))


def test_objects_are_refused_by_their_type(comm):
    with pytest.raises(TypeError, match=r"of this ndarray \(dtype object\) are or hold Python objects"):
        comm.broadcast(OBJECTS["objects"])
    with pytest.raises(TypeError, match=r"of this memoryview \(dtype O\) are"):
        comm.isend(OBJECTS["a view of objects"], 0)
    with pytest.raises(TypeError, match=r"dtype \[\('n', '<i8'\), \('name', 'O'\)\]"):
        comm.isend(OBJECTS["structures"], 0)


@pytest.mark.parametrize("kind", [kind for kind in OBJECTS if kind != "of ctypes"])
def test_objects_are_not_put(kind):
    with pytest.raises(TypeError, match=r"objects are bytes or arrays of numbers, not .*(object|'O'|O:name)"):
        describe(OBJECTS[kind])
    assert describe(memoryview(np.zeros(3, [("O", "i4")])))[1].nbytes == 12


def test_regions_of_objects_are_refused():
    with (
        verbs.Device("sim") as device,
        verbs.ProtectionDomain(device) as pd,
        pytest.raises(TypeError, match="dtype object"),
    ):
        verbs.MemoryRegion(pd, OBJECTS["objects"])


@pytest.mark.parametrize(
    "x",
    [
        np.zeros(3, [("O", "i4"), ("NOO", "f8")]),
        np.zeros(3, "M8[s]"),
        np.zeros(3, "U2"),
        np.zeros(3, [("when", "M8[s]")]),
        np.zeros(3, "f4").view(Named),
    ],
)
def test_other_types_of_fixed_size_go_on(comm, x):
    out = bytearray(x.nbytes)
    comm.isend(x, 0, tag=8)
    assert comm.recv(out, 0, tag=8).nbytes == x.nbytes
    assert comm.allgather(x).nbytes == x.nbytes


# -- DLPack ----------------------------------------------------------------------------------------------------------------------


class Tensor:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **how):
        return self.array.__dlpack__(**how)

    def __dlpack_device__(self):
        return 1, 0


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 3), (2, 3, 0)])
def test_nothing_is_contiguous(comm, shape):
    """What steps such arrays have is their maker's whim."""
    x = Tensor(np.zeros(shape, "f4"))
    assert comm.allreduce(x) is x
    comm.isend(x, 0, tag=9)
    assert comm.recv(Tensor(np.zeros(shape, "f4")), 0, tag=9) == (0, 0)
    assert comm.allgather(x).size == 0


# -- numbers ---------------------------------------------------------------------------------------------------------------------

HUGE = 2**70


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda c: c.send(b"x", HUGE), f"dst {HUGE} is out of range"),
        (lambda c: c.isend(b"x", -HUGE), f"dst -{HUGE} is out of range"),
        (lambda c: c.irecv(bytearray(1), HUGE), f"src {HUGE} is out of range"),
        (lambda c: c.irecv(bytearray(1), -HUGE), f"src -{HUGE} is out of range"),
        (lambda c: c.sendrecv(b"x", HUGE, bytearray(1)), f"dst {HUGE} is out of range"),
        (lambda c: c.broadcast(np.zeros(1), HUGE), f"root {HUGE} is out of range"),
        (lambda c: hrdma.Endpoint(c, HUGE), f"rank {HUGE} is out of range"),
        (lambda c: c.isend(b"x", 0, HUGE), f"tag {HUGE} is out of range: 0 to 2"),
        (lambda c: c.isend(b"x", 0, -HUGE), f"tag -{HUGE} is out of range"),
        (lambda c: c.sendrecv(b"x", 0, bytearray(1), recv_tag=HUGE), f"tag {HUGE} is out of range"),
        (lambda c: c.split(HUGE), f"color {HUGE} is out of range"),
        (lambda c: c.split(1, 2**64), f"key {2**64} is out of range"),
        (lambda c: c.split(-HUGE), f"color -{HUGE} is out of range"),
        (lambda c: c.allgather(np.zeros(2), counts=[HUGE]), "more elements than memory can hold"),
        (lambda c: c.allgather(np.zeros(2), counts=[2**61]), "more elements than memory can hold"),
        (lambda c: c.gather(np.zeros(2), counts=[HUGE]), "more elements than memory can hold"),
        (lambda c: c.scatter(np.zeros(2), counts=[HUGE]), "more elements than memory can hold"),
        (lambda c: c.reduce_scatter(np.zeros(2), counts=[HUGE]), "more elements than memory can hold"),
        (lambda c: c.alltoall(np.zeros(2), counts=([2], [HUGE])), "more elements than memory can hold"),
        (lambda c: c.barrier(timeout=10**400), "timeout: more seconds than a float can say"),
        (lambda c: c.irecv(bytearray(1), timeout=-(10**400)), "timeout: more seconds"),
        (lambda c: c.shrink(10**400), "timeout: more seconds"),
        (lambda c: c.shrink(-1), "timeout -1: seconds are wanted"),
        (lambda c: setattr(c, "timeout", 10**400), "timeout: more seconds"),
        (lambda c: c.isend(b"x", 0, priority=HUGE), f"priority {HUGE}: 0"),
        (lambda c: hrdma.init(timeout=10**400), "called before"),
        (lambda c: hrdma.finalize(10**400), "timeout: more seconds than a float can say"),
        (lambda c: hrdma.finalize(timeout=-1), "timeout -1: seconds are wanted, 0 or more"),
        (lambda c: hrdma.finalize(float("nan")), "timeout nan: seconds are wanted"),
        (lambda c: answered().wait(10**400), "timeout: more seconds"),
        (lambda c: answered().wait(float("nan")), "timeout nan: seconds"),
        (lambda c: answered().wait(-0.5), "timeout -0.5: seconds"),
    ],
)
def test_numbers_beyond_64_bits_are_refused_as_others_are(comm, call, text):
    with pytest.raises(ValueError, match=text):
        call(comm)


def answered():
    request = Request("get", 5.0)
    request.settle(1)
    return request


@pytest.mark.parametrize("timeout", [10**400, -1, float("nan"), -float("inf")])
def test_completions_are_waited_for_no_such_time(timeout):
    with verbs.Device("sim") as device, verbs.ProtectionDomain(device) as pd, verbs.CompletionQueue(device) as cq:
        with verbs.QueuePair(pd, cq) as qp:
            for queue in (cq, qp):
                with pytest.raises(ValueError, match=r"timeout.*seconds"):
                    queue.poll(timeout=timeout)
        with pytest.raises(TypeError, match="timeout 'soon': seconds are wanted"):
            cq.poll(timeout="soon")


def test_no_end_of_time_is_beyond_a_clock():
    assert _core.seconds_of(float("inf")) == _core.seconds_of(1e300) == _core.seconds_of(10**300) == 1e9
    with pytest.raises(TypeError, match=r"timeout None: seconds are wanted$"):
        hrdma.finalize(None)


def scattered(comm):
    """Elsewhere than on the root only its own count is compared with a buffer."""
    try:
        comm.scatter(out=np.zeros(3), root=1 - comm.rank, counts=[3, 2**70] if comm.rank == 0 else [2**70, 3])
    except ValueError as error:
        return str(error)


def test_huge_counts_of_other_ranks_are_refused():
    first, second = harness.ranks(scattered, 2)
    assert first == f"counts=[3, {HUGE}]: more elements than memory can hold"
    assert second == f"counts=[{HUGE}, 3]: more elements than memory can hold"


# -- faults ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("zzz", "HRDMA_FAULT=zzz: expected provider:option=value"),
        ("nope:drop=0.1", "HRDMA_FAULT=nope:drop=0.1 but nope is not used: no provider is called 'nope'"),
        ("tcp:drop=0.5", "HRDMA_FAULT=tcp:drop=0.5 but tcp is not used: it is not in HRDMA_TRANSPORT"),
        ("shm:seed=3;tcp:drop=0.5", "but tcp is not used"),
        ("shm:dorp=0.5", "dorp"),
        ("shm:seed=3;loop:seed=4", None),
    ],
)
def test_faults_that_nothing_would_inject_are_refused(fault, text):
    """They were passed over, and a test of what a loss does found that it does nothing."""
    (found,) = harness.outcomes(nothing, 1, env={"HRDMA_TRANSPORT": "shm", "HRDMA_FAULT": fault})
    if text is None:
        assert found.status == 0, found.output
    else:
        assert (found.error, text in found.text) == ("ValueError", True), found.text


def nothing(comm):
    return comm.size

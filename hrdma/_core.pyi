"""Types of the compiled module; the docstrings are in cython/bind."""

from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, overload

import numpy as np

from hrdma.types import Op, Status

Buffer = Any  # anything with the buffer protocol, or a CPU tensor with DLPack
Given = Any  # a hrdma.topo.schedule.Schedule, the path of a file, or None
_B = TypeVar("_B")
_R = TypeVar("_R", bound=Resource)

MAX_RAILS: int
SHELF_BYTES: int
SHELF_PLACES: int

def empty(shape: int | Sequence[int], dtype: Any = "float32") -> np.ndarray: ...
def zeros(shape: int | Sequence[int], dtype: Any = "float32") -> np.ndarray: ...
def is_registered(x: Buffer) -> bool: ...
def memory_stats() -> dict[str, int]: ...
def reduce(
    op: str, dtype: str, dst: Buffer, srcs: Sequence[Buffer], scale: float = 1.0, nontemporal: bool = False
) -> None: ...
def reduce_isa(force: str | None = None) -> str: ...
def faults_fired() -> int: ...
def seconds_of(timeout: Any) -> float: ...
def provider_devices(name: str) -> tuple[int, str]: ...

class Block:
    def __init__(self, nbytes: int) -> None: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Shelf:
    def __init__(self, memory: Buffer, writer: bool = False) -> None: ...
    def put(self, name: str, meta: bytes, content: bytes) -> bool: ...
    def remove(self, name: str) -> None: ...
    def clear(self) -> None: ...
    def hold(self, home: int, seconds: float) -> None: ...
    def hear(self, place: int, number: int) -> None: ...
    def heard(self, place: int) -> int: ...
    def take(self, names: Sequence[str], home: int) -> list[tuple[bytes, bytes] | None] | None: ...

class Engine:
    def __init__(
        self,
        self_id: int,
        providers: str,
        *,
        token: bytes | None = None,
        insecure: bool = False,
        epoch: int = 0,
        ifname: str | None = None,
        rails: str | None = None,
        options: str | None = None,
        devices: str | None = None,
        fault: str | None = None,
        local_peers: int = 0,
        spin_us: int = -1,
        eager_credit: int = 0,
    ) -> None: ...
    @property
    def closed(self) -> bool: ...
    def domains(self) -> dict[str, dict[str, Any]]: ...
    def locality(self, local_ranks: int, cores: int, turns: bool = False) -> None: ...
    def connect(self, peer_id: int, provider: str, address: bytes, active: bool, dscp: int = -1) -> None: ...
    def connect_wait(self, seconds: float, dscp: int = -1) -> None: ...
    def traffic_class(self, provider: str, dscp: int, answers: int, priority: int) -> bool: ...
    def class_taken(self, provider: str, dscp: int) -> bool: ...
    def class_end(self, dscp: int, stands: bool) -> None: ...
    def peer_lost(self, peer_id: int, reason: str) -> None: ...
    def counters(self) -> dict[str, int]: ...
    def peer_stats(self, peer_id: int) -> dict[str, Any] | None: ...
    def remarks_fd(self) -> int: ...
    def remarks(self) -> list[str]: ...
    def progress(self) -> int: ...
    def close(self, seconds: float = 5.0) -> None: ...

class Program:
    signature: int
    text: str
    explanation: str
    pairs: str
    def __init__(
        self,
        instrs: Buffer,
        unlocks: Buffer,
        refs: Buffer,
        in_bytes: int,
        out_bytes: int,
        tmp_bytes: int,
        size: int,
        *,
        text: str = "",
        signature: int = 0,
        explanation: str = "",
        pairs: str = "",
        aside: int = 0,
        sliceable: bool = False,
    ) -> None: ...
    @property
    def nbytes(self) -> tuple[int, int]: ...

class Request:
    @property
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> Any: ...
    def result(self) -> Any: ...
    def cancel(self) -> bool: ...
    def __await__(self) -> Generator[Any, None, Any]: ...

class Channel:
    rank: int
    size: int
    id: int
    timeout: float
    priority: int
    def __init__(
        self, engine: Engine, id: int, peers: Sequence[int], rank: int, *, timeout: float = 300.0, dscp: int = -1
    ) -> None: ...
    @property
    def closed(self) -> bool: ...
    def _close(self) -> None: ...
    def _deadline_seconds(self, timeout: float | None) -> float: ...
    def _break(self, reason: str, blame: int = -1, mismatch: bool = False, tell: bool = False) -> None: ...
    def _state(self) -> tuple[int, int, str, str, str] | None: ...
    def _stalled(self, operation: str, sequence: int, signature: int, text: str) -> None: ...
    def _verdict(self, operation: str, sequence: int, signature: int, text: str) -> str | None: ...
    def _whereabouts(self, operation: str, sequence: int) -> str: ...

class Messenger(Channel):
    def send(
        self, x: Buffer, dst: int, tag: int = 0, *, timeout: float | None = None, priority: int | None = None
    ) -> None: ...
    def recv(
        self, x: Buffer, src: int = -1, tag: int = 0, *, timeout: float | None = None, priority: int | None = None
    ) -> Status: ...
    def isend(
        self, x: Buffer, dst: int, tag: int = 0, *, timeout: float | None = None, priority: int | None = None
    ) -> Request: ...
    def irecv(
        self, x: Buffer, src: int = -1, tag: int = 0, *, timeout: float | None = None, priority: int | None = None
    ) -> Request: ...
    def sendrecv(
        self,
        x: Buffer,
        dst: int,
        out: Buffer,
        src: int = -1,
        tag: int = 0,
        *,
        recv_tag: int | None = None,
        timeout: float | None = None,
        priority: int | None = None,
    ) -> Status: ...

class Planned(Messenger):
    deterministic: bool
    @property
    def _files(self) -> dict[str, int]: ...
    def _recent(self) -> list[tuple[int, int, str, str]]: ...
    def _plan(
        self, collective: str, counts: Any, itemsize: int, dtype: str, op: str | None, root: int | None, in_place: bool,
        deterministic: bool, schedule: int, opened: bool = False, sliced: bool = False,
    ) -> Program: ...  # fmt: skip
    def _give(self, schedule: Any, timeout: float | None) -> int: ...
    def _told(self, mine: bytes, timeout: float | None) -> bytearray: ...
    def _forget_given(self, number: int) -> None: ...

class CommunicatorBase(Planned):
    @overload
    def allreduce(
        self,
        x: _B,
        op: Op = "sum",
        *,
        out: None = None,
        async_op: Literal[False] = False,
        priority: int | None = None,
        timeout: float | None = None,
        deterministic: bool | None = None,
        schedule: Given = None,
    ) -> _B: ...
    @overload
    def allreduce(
        self,
        x: Buffer,
        op: Op = "sum",
        *,
        out: Buffer | None = None,
        async_op: bool = False,
        priority: int | None = None,
        timeout: float | None = None,
        deterministic: bool | None = None,
        schedule: Given = None,
    ) -> Any: ...
    def reduce(
        self,
        x: Buffer,
        root: int = 0,
        op: Op = "sum",
        *,
        out: Buffer | None = None,
        async_op: bool = False,
        priority: int | None = None,
        timeout: float | None = None,
        deterministic: bool | None = None,
        schedule: Given = None,
    ) -> Any: ...
    def reduce_scatter(
        self,
        x: Buffer,
        op: Op = "sum",
        *,
        out: Buffer | None = None,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        priority: int | None = None,
        timeout: float | None = None,
        deterministic: bool | None = None,
        schedule: Given = None,
    ) -> Any: ...
    def broadcast(
        self,
        x: Buffer,
        root: int = 0,
        *,
        async_op: bool = False,
        priority: int | None = None,
        timeout: float | None = None,
        schedule: Given = None,
    ) -> Any: ...
    def allgather(
        self,
        x: Buffer,
        out: Buffer | None = None,
        *,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        priority: int | None = None,
        timeout: float | None = None,
        schedule: Given = None,
    ) -> Any: ...
    def gather(
        self,
        x: Buffer,
        root: int = 0,
        *,
        out: Buffer | None = None,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        priority: int | None = None,
        timeout: float | None = None,
        schedule: Given = None,
    ) -> Any: ...
    def scatter(
        self,
        x: Buffer | None = None,
        root: int = 0,
        *,
        out: Buffer | None = None,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        priority: int | None = None,
        timeout: float | None = None,
        schedule: Given = None,
    ) -> Any: ...
    def alltoall(
        self,
        x: Buffer,
        out: Buffer | None = None,
        *,
        counts: tuple[Sequence[int], Sequence[int]] | None = None,
        async_op: bool = False,
        priority: int | None = None,
        timeout: float | None = None,
        schedule: Given = None,
    ) -> Any: ...
    def barrier(
        self, *, async_op: bool = False, priority: int | None = None, timeout: float | None = None
    ) -> Request | None: ...

class Memory:
    nbytes: int
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
    def __bytes__(self) -> bytes: ...
    def __len__(self) -> int: ...
    def __enter__(self) -> Memory: ...
    def __exit__(self, *_: object) -> None: ...

class RemoteMemory:
    nbytes: int
    def __len__(self) -> int: ...

class Endpoint:
    rank: int
    def __init__(self, comm: Messenger, rank: int) -> None: ...
    def expose(
        self, x: Buffer, *, read: bool = True, write: bool = False, atomic: bool = False, timeout: float | None = None
    ) -> Memory: ...
    def remote(self, descriptor: Buffer) -> RemoteMemory: ...
    def write(
        self,
        x: Buffer,
        remote: RemoteMemory,
        offset: int = 0,
        *,
        notify: int | None = None,
        async_op: bool = False,
        timeout: float | None = None,
        priority: int | None = None,
    ) -> Request | None: ...
    def read(
        self,
        x: Buffer,
        remote: RemoteMemory,
        offset: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
        priority: int | None = None,
    ) -> Request | None: ...
    def fetch_add(
        self,
        remote: RemoteMemory,
        offset: int,
        value: int,
        *,
        async_op: bool = False,
        timeout: float | None = None,
        priority: int | None = None,
    ) -> Any: ...
    def compare_swap(
        self,
        remote: RemoteMemory,
        offset: int,
        compare: int,
        swap: int,
        *,
        async_op: bool = False,
        timeout: float | None = None,
        priority: int | None = None,
    ) -> Any: ...
    def notified(self, *, async_op: bool = False, timeout: float | None = None) -> Any: ...

# hrdma.verbs

class QueuePairAddress(NamedTuple):
    gid: str
    lid: int
    num: int
    psn: int
    mtu: int

class Resource:
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
    def __enter__(self: _R) -> _R: ...
    def __exit__(self, *_: object) -> None: ...

def verbs_devices() -> list[str]: ...
def verbs_library() -> str: ...
def verbs_found(
    names: str, ifname: str, gid_index: int | None, warn: Callable[[str], object] | None
) -> list[tuple[str, str, int, str, list[tuple[int, int, str, str, str, int]]] | None]: ...

class Device(Resource):
    name: str
    port: int
    gid_index: int
    def __init__(self, name: str, port: int = 1, gid_index: int | None = None) -> None: ...
    @property
    def gid(self) -> str: ...
    @property
    def lid(self) -> int: ...
    @property
    def mtu(self) -> int: ...
    def limits(self) -> dict[str, Any]: ...

class ProtectionDomain(Resource):
    device: Device
    def __init__(self, device: Device) -> None: ...

class Piece:
    region: MemoryRegion
    start: int
    end: int
    def __init__(self, region: MemoryRegion, start: int, end: int) -> None: ...
    def __len__(self) -> int: ...

class MemoryRegion(Resource):
    pd: ProtectionDomain
    def __init__(
        self,
        pd: ProtectionDomain,
        buffer: Buffer,
        *,
        remote_read: bool = False,
        remote_write: bool = False,
        remote_atomic: bool = False,
    ) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def lkey(self) -> int: ...
    @property
    def rkey(self) -> int: ...
    def __len__(self) -> int: ...
    def __getitem__(self, place: slice) -> Piece: ...

class Completion:
    wr_id: int
    ok: bool
    status: str
    opcode: str
    nbytes: int
    imm: int | None
    qp_num: int
    code: int
    vendor_code: int
    def check(self) -> Completion: ...

class CompletionQueue(Resource):
    device: Device
    spin_us: int
    def __init__(self, device: Device, entries: int = 256, spin_us: int = 50) -> None: ...
    def poll(self, limit: int = 16, timeout: float = 0.0) -> list[Completion]: ...

_Memory = MemoryRegion | Piece
_Pieces = _Memory | Sequence[_Memory]

class SharedReceiveQueue(Resource):
    pd: ProtectionDomain
    recvs: int
    def __init__(self, pd: ProtectionDomain, recvs: int = 256) -> None: ...
    def post_recv(self, what: _Pieces, *, wr_id: int = 0) -> None: ...

class QueuePair(Resource):
    pd: ProtectionDomain
    send_cq: CompletionQueue
    recv_cq: CompletionQueue
    srq: SharedReceiveQueue | None
    sends: int
    recvs: int
    inline: int
    def __init__(
        self,
        pd: ProtectionDomain,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue | None = None,
        *,
        sends: int = 64,
        recvs: int = 64,
        inline: int = 0,
        srq: SharedReceiveQueue | None = None,
    ) -> None: ...
    num: int
    state: str
    address: QueuePairAddress
    dscp: int
    sl: int
    def connect(
        self, address: QueuePairAddress | Sequence[Any], *, dscp: int = 0, sl: int = 0, ack_timeout: float | None = None
    ) -> None: ...
    def post_send(
        self, what: _Pieces, *, wr_id: int = 0, imm: int | None = None, signaled: bool = True, inline: bool = False
    ) -> None: ...
    def write(
        self,
        what: _Pieces,
        remote: int,
        rkey: int,
        *,
        wr_id: int = 0,
        imm: int | None = None,
        signaled: bool = True,
        inline: bool = False,
    ) -> None: ...
    def read(self, what: _Pieces, remote: int, rkey: int, *, wr_id: int = 0, signaled: bool = True) -> None: ...
    def fetch_add(
        self, what: _Memory, remote: int, rkey: int, add: int, *, wr_id: int = 0, signaled: bool = True
    ) -> None: ...
    def compare_swap(
        self, what: _Memory, remote: int, rkey: int, compare: int, swap: int, *, wr_id: int = 0, signaled: bool = True
    ) -> None: ...
    def post_recv(self, what: _Pieces, *, wr_id: int = 0) -> None: ...
    def poll(self, limit: int = 16, timeout: float = 0.0) -> list[Completion]: ...

"""Types of the compiled module; the docstrings are in cython/bind."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Literal, TypeVar, overload

import numpy as np

from hrdma.types import Op, Status

Buffer = Any  # anything with the buffer protocol, or a CPU tensor with DLPack
_B = TypeVar("_B")

MAX_RAILS: int

def empty(shape: int | Sequence[int], dtype: Any = "float32") -> np.ndarray: ...
def zeros(shape: int | Sequence[int], dtype: Any = "float32") -> np.ndarray: ...
def is_registered(x: Buffer) -> bool: ...
def memory_stats() -> dict[str, int]: ...
def reduce(
    op: str, dtype: str, dst: Buffer, srcs: Sequence[Buffer], scale: float = 1.0, nontemporal: bool = False
) -> None: ...
def reduce_isa(force: str | None = None) -> str: ...
def provider_devices(name: str) -> tuple[int, str]: ...

class Block:
    def __init__(self, nbytes: int, writable_by_peers: bool = False) -> None: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

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
        options: str | None = None,
        fault: str | None = None,
        local_peers: int = 0,
        spin_us: int = -1,
        eager_credit: int = 0,
    ) -> None: ...
    @property
    def closed(self) -> bool: ...
    def domains(self) -> dict[str, dict[str, Any]]: ...
    def locality(self, local_ranks: int, cores: int) -> None: ...
    def connect(self, peer_id: int, provider: str, address: bytes, active: bool) -> None: ...
    def connect_wait(self, seconds: float) -> None: ...
    def peer_lost(self, peer_id: int, reason: str) -> None: ...
    def counters(self) -> dict[str, int]: ...
    def peer_stats(self, peer_id: int) -> dict[str, Any] | None: ...
    def progress(self) -> int: ...
    def close(self, seconds: float = 5.0) -> None: ...

class Program:
    signature: int
    text: str
    explanation: str
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
    def __init__(self, engine: Engine, id: int, peers: Sequence[int], rank: int, *, timeout: float = 300.0) -> None: ...
    @property
    def closed(self) -> bool: ...
    def _close(self) -> None: ...
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
    def _recent(self) -> list[tuple[int, int, str]]: ...
    def _plan(
        self,
        collective: str,
        counts: Any,
        itemsize: int,
        dtype: str,
        op: str | None,
        root: int | None,
        in_place: bool,
        deterministic: bool,
    ) -> Program: ...

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
    ) -> Any: ...
    def broadcast(
        self,
        x: Buffer,
        root: int = 0,
        *,
        async_op: bool = False,
        priority: int | None = None,
        timeout: float | None = None,
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
    ) -> Any: ...
    def barrier(
        self, *, async_op: bool = False, priority: int | None = None, timeout: float | None = None
    ) -> Request | None: ...

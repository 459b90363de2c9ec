"""Names shared by every layer: element types, reduction operators, collectives. Imports nothing of hrdma."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["COLLECTIVES", "DTYPES", "DTYPE_CODE", "OPS", "OP_CODE", "Collective", "DType", "Op", "Status"]

DType = Literal[
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
]
Op = Literal["sum", "prod", "min", "max", "avg", "band", "bor", "bxor"]
Collective = Literal[
    "allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "gather", "scatter", "alltoall", "barrier"
]

# The order is that of hr_dtype and hr_redop in cython/include/hr/reduce.h (tests compare them).
DTYPES: tuple[str, ...] = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32", "float64",
)  # fmt: skip
DTYPE_CODE: dict[str, int] = {name: code for code, name in enumerate(DTYPES)}
OPS: tuple[str, ...] = ("sum", "prod", "min", "max", "avg", "band", "bor", "bxor")
OP_CODE: dict[str, int] = {name: code for code, name in enumerate(OPS)}
COLLECTIVES: tuple[str, ...] = (
    "allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "gather", "scatter", "alltoall", "barrier",
)  # fmt: skip


class Status(NamedTuple):
    """What a receive brought."""

    source: int  #: rank of the sender
    nbytes: int  #: bytes received

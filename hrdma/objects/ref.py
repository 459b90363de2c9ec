"""References to objects, and what describes an object's bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["INLINE", "ObjectRef", "describe", "rebuild"]

INLINE = 1 << 16  # bytes up to which an object lives in the directory itself
LONGEST_ID = 200

_TEXT = re.compile(r"hrdma:([0-9a-f]{16}):(.+)", re.DOTALL)


@dataclass(frozen=True)
class ObjectRef:
    """Names an object of one job. Small, hashable, printable; may be pickled or sent as text.

    The object need not exist yet. A reference keeps nothing alive, and works in any process of the same job.

    Attributes
    ----------
    job : str
        Which job: 16 hexadecimal digits, the same in all its clients.
    id : str
        Which object: chosen by whoever made it, else the number of that one's node and 32 random hexadecimal digits.
    """

    job: str
    id: str

    def __str__(self) -> str:
        return f"hrdma:{self.job}:{self.id}"

    @classmethod
    def parse(cls, text: str) -> ObjectRef:
        """The reference that `str` printed.

        Raises
        ------
        ValueError
            The text is no reference.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no object reference: it should look like hrdma:0123456789abcdef:name")
        return cls(match[1], check_id(match[2]))


def check_id(name: str) -> str:
    """A name for an object."""
    if not isinstance(name, str):
        raise TypeError(f"id must be a string, not {type(name).__name__}")
    if not 0 < len(name) <= LONGEST_ID:
        raise ValueError(f"id of {len(name)} characters: between 1 and {LONGEST_ID} work")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"id {name!r} is not Unicode text: it has half a surrogate pair") from None
    return name


def describe(value: Any) -> tuple[dict[str, Any], memoryview]:
    """What the others have to know of a value, and its bytes.

    Parameters
    ----------
    value : array or buffer
        An array (C-contiguous or copied into that order), or bytes-like.

    Raises
    ------
    TypeError
        It is neither, or its elements are Python objects or structures.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        view = memoryview(value)
        if "O" in re.sub(":[^:]*:", "", view.format):  # names of fields stand between colons
            raise TypeError(
                f"objects are bytes or arrays of numbers, not a memoryview of Python objects ({view.format})"
            )
        dtype = getattr(view.obj, "dtype", None)
        if getattr(dtype, "hasobject", False):  # it was cast
            raise TypeError(f"objects are bytes or arrays of numbers, not a view of an array of {dtype}")
        data = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
        return {"kind": "bytes", "dtype": "uint8", "shape": [data.nbytes], "nbytes": data.nbytes}, data
    array = np.asarray(value)
    if array.dtype.name != "bfloat16" and array.dtype.kind not in "biufc":
        raise TypeError(f"objects are bytes or arrays of numbers, not {type(value).__name__} of {array.dtype}")
    dtype = array.dtype.newbyteorder("=")
    array = np.ascontiguousarray(array, dtype).reshape(array.shape)
    meta = {"kind": "array", "dtype": dtype.name, "shape": list(array.shape), "nbytes": array.nbytes}
    return meta, array.reshape(-1).view(np.uint8).data


def rebuild(meta: dict[str, Any], data: Any) -> Any:
    """The value that these bytes are: a read-only array on them, or bytes.

    Parameters
    ----------
    meta : dict
        From `describe`.
    data : buffer
        Of ``meta["nbytes"]`` bytes; the array keeps it alive.
    """
    if meta["kind"] == "bytes":
        return memoryview(data).toreadonly() if not isinstance(data, bytes) else data
    shape: Sequence[int] = meta["shape"]
    array = np.frombuffer(data, _dtype(meta["dtype"]), count=math.prod(shape)).reshape(shape)
    array.flags.writeable = False
    return array


def _dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)

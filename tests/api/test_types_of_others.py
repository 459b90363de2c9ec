"""Element types of other packages: those of ml_dtypes, bfloat16 first of all."""

import numpy as np
import pytest

from hrdma.types import DTYPE_CODE

ml_dtypes = pytest.importorskip("ml_dtypes")


def test_bfloat16_arrays(comm):
    x = np.arange(5).astype(ml_dtypes.bfloat16)
    assert comm.allreduce(x, "avg") is x
    assert comm.allreduce(np.array([-7, 7]), "avg").tolist() == [-7, 7]
    assert comm.allgather(x).dtype == ml_dtypes.bfloat16
    with pytest.raises(TypeError, match="not defined for bfloat16"):
        comm.allreduce(x, "band")
    with pytest.raises(TypeError, match="out holds float16, x bfloat16"):
        comm.allreduce(x, out=np.zeros(5, "float16"))


def test_arrays_of_another_package_are_known_when_they_come_again(comm, monkeypatch):
    for name in ("bfloat16", "float8_e4m3fn"):
        x = np.arange(6).astype(getattr(ml_dtypes, name))
        for _ in range(3):
            assert comm.allgather(x.reshape(2, 3)[1:]).tolist() == [[3, 4, 5]]
            with pytest.raises((ValueError, TypeError), match="contiguous"):
                comm.allgather(x[::2])
            locked = x.copy()
            locked.flags.writeable = False
            assert comm.allgather(locked).tolist() == x.tolist()
            with pytest.raises((ValueError, TypeError), match="read-only"):
                comm.allgather(x, out=locked)
    with pytest.raises(TypeError, match=r"elements of this type \(1 bytes\)"):
        comm.allreduce(x)
    x = np.arange(6).astype(ml_dtypes.bfloat16)
    with pytest.raises(TypeError, match="cannot be reduced"):
        comm.allreduce(x.view(x.dtype.newbyteorder()))
    monkeypatch.delitem(DTYPE_CODE, "bfloat16")  # by which a type is found that is not known
    assert comm.allreduce(x) is x

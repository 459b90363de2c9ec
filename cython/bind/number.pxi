# number.pxi - Python's integers, which have no bounds, as those of C, which have: for checks that say what was wrong.
cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object x, int *overflow) except? -1


cdef inline long long whole(object number) except? -1:
    """An integer; what no 64 bits hold becomes the nearest that they do."""
    cdef int overflow = 0
    cdef long long value = PyLong_AsLongLongAndOverflow(number, &overflow)
    return value if overflow == 0 else 0x7fffffffffffffff if overflow > 0 else -0x7fffffffffffffff


cdef inline uint64_t word_of(str name, object number) except? 0xffffffffffffffff:
    """An unsigned integer of 64 bits."""
    try:
        return number
    except OverflowError:
        raise ValueError(f"{name}={number}: 0 to 2**64 - 1") from None

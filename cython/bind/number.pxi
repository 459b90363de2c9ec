# number.pxi - Python's integers, which have no bounds, as those of C, which have: for checks that say what was wrong.
cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object x, int *overflow) except? -1


cdef inline long long whole(object number) except? -1:
    """An integer; what no 64 bits hold becomes the nearest that they do."""
    cdef int overflow = 0
    cdef long long value = PyLong_AsLongLongAndOverflow(number, &overflow)
    return value if overflow == 0 else 0x7fffffffffffffff if overflow > 0 else -0x7fffffffffffffff

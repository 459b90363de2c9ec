# memory.pxi - registered memory: blocks of the core's arenas as numpy arrays.
from libc.errno cimport errno


cdef class Block:
    """One block of an arena. Arrays made on it hold it; it goes back when the last of them does."""

    cdef void *ptr
    cdef Py_ssize_t nbytes

    def __cinit__(self, size_t nbytes):
        cdef uint32_t flags = HR_ARENA_WRITABLE_BY_PEERS if nbytes >= hr_page() else 0  # results are put back there
        with nogil:
            self.ptr = hr_arena_alloc(nbytes, flags)
        if self.ptr == NULL:
            raise MemoryError(
                f"cannot get {nbytes} bytes of registered memory: {_os.strerror(errno)}; "
                "see free -m, the limit of the container's memory, and ulimit -l"
            )
        self.nbytes = <Py_ssize_t> nbytes

    def __dealloc__(self):
        if self.ptr != NULL:
            hr_arena_free(self.ptr)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.ptr, self.nbytes, False, flags)

    def __len__(self):
        return self.nbytes


cdef extern from "Python.h":
    int PyBuffer_FillInfo(Py_buffer *view, object exporter, void *buf, Py_ssize_t size, bint readonly,
                          int flags) except -1


def empty(shape, dtype="float32"):
    """An uninitialised array in registered memory.

    Peers on this host read such memory in place and devices need not pin it again, so large transfers from and into it
    are the fastest there are. Any other C-contiguous buffer works too.

    Parameters
    ----------
    shape : int or tuple of int
    dtype : dtype or str
        Anything that numpy knows, or ``"bfloat16"`` (needs ml_dtypes).

    Returns
    -------
    numpy.ndarray
        64-byte aligned. Its memory goes back when the last array that uses it is gone.

    Raises
    ------
    TypeError
        An extent that is no integer, a dtype of Python objects.
    ValueError
        A negative extent.
    MemoryError
        The host has no more; nothing was taken.

    Notes
    -----
    An array of a page (4 KiB) and more has its pages to itself, and the job's other processes on this host map them
    for writing: results of collectives are put there, and long messages copied there by both ends, while the call that
    says so is in progress. After an error of that call nobody changes the array any more: what a process that was
    stopped in the middle could still write to is exchanged for new pages at the same place, whose contents are
    undefined.

    After fork a child shares these pages with its parent: it may read and write them, and allocates none of its own.
    """
    import numpy

    kind = numpy_dtype(dtype)
    if kind.hasobject:
        raise TypeError(f"dtype {kind} holds Python objects: registered memory takes plain data")
    given = shape
    try:
        shape = tuple([_index(extent) for extent in (shape if isinstance(shape, (tuple, list)) else (shape,))])
    except TypeError:
        raise TypeError(f"shape {given!r}: an integer or a tuple of integers is wanted") from None
    nbytes = kind.itemsize
    for extent in shape:
        if extent < 0:
            raise ValueError(f"negative extent in shape {shape}")
        nbytes *= extent
    if nbytes > PY_SSIZE_T_MAX:
        raise MemoryError(f"shape {shape} of {kind} takes {nbytes} bytes, more than this machine can address")
    return numpy.ndarray(shape, kind, Block(nbytes))


def zeros(shape, dtype="float32"):
    """As :func:`empty`, filled with zeros."""
    array = empty(shape, dtype)
    array.fill(0)
    return array


def is_registered(x):
    """Whether all of x lies in registered memory.

    Parameters
    ----------
    x : array or buffer
        C-contiguous.
    """
    cdef Span span
    cdef hr_arena_info info
    span_open(x, False, &span)
    found = hr_arena_find(span.ptr, span.nbytes, &info)
    span_close(&span)
    return found


def memory_stats():
    """What the arenas hold: ``arenas``, ``blocks``, ``bytes_mapped``, ``bytes_used``, ``bytes_huge``."""
    cdef hr_arena_stats stats
    hr_arena_read_stats(&stats)
    return {
        "arenas": stats.arenas,
        "blocks": stats.blocks,
        "bytes_mapped": stats.bytes_mapped,
        "bytes_used": stats.bytes_used,
        "bytes_huge": stats.bytes_huge,
    }


cdef extern from "Python.h":
    Py_ssize_t PY_SSIZE_T_MAX


def reduce(op, dtype, dst, srcs, double scale=1.0, bint nontemporal=False):
    """Applies a reduction kernel: ``dst = srcs[0] op srcs[1] op ...``, left to right. For tests and benchmarks.

    Parameters
    ----------
    op, dtype : str
        Names of :mod:`hrdma.types`.
    dst : writable buffer
    srcs : sequence of buffers
        1 to 64, of the size of ``dst``; one may be ``dst`` itself.
    scale : float
        For ``"avg"``: what the sum is multiplied by, 1/n. Of integers: the sum is divided by n, rounded toward zero.
    nontemporal : bool
        The result will not be read soon.
    """
    cdef Span target, source
    cdef const void *pointers[64]
    cdef int n = len(srcs), i, code, kind
    cdef size_t count
    kind = check_dtype(dtype)
    code = check_op(op, kind)
    if op == "avg" and kind < DTYPE_CODE["float16"] and not 2.0**-31 <= scale <= 1.0:
        raise ValueError(f"scale={scale}: 1/n for n from 1 to 2**31, for integers")
    if not 0 < n <= 64:
        raise ValueError(f"{n} sources: between 1 and 64 work")
    held = []
    span_open(dst, True, &target)
    try:
        for i in range(n):
            span_open(srcs[i], False, &source)
            pointers[i] = source.ptr
            nbytes = source.nbytes
            span_close(&source)
            held.append(srcs[i])
            if nbytes != target.nbytes:
                raise ValueError(f"source {i} has {nbytes} bytes, dst {target.nbytes}")
        count = target.nbytes // hr_dtype_size(<hr_dtype> kind)
        with nogil:
            hr_reduce(<hr_redop> code, <hr_dtype> kind, target.ptr, pointers, n, count, scale,
                      HR_STORE_UNREAD if nontemporal else HR_STORE_CACHED)
    finally:
        span_close(&target)


def reduce_isa(force=None):
    """The instruction set of the reduction kernels; ``force`` names another one, for tests (``""``: the best)."""
    cdef bytes name
    if force is not None:
        name = force.encode()
        if not hr_reduce_force_isa(<const char *> name if name else <const char *> NULL):
            raise ValueError(f"instruction set {force!r} is not there on this machine")
    return text_of(hr_reduce_isa())


cdef int check_dtype(object dtype) except -1:
    code = DTYPE_CODE.get(dtype)
    if code is None:
        raise TypeError(f"dtype {dtype!r} cannot be reduced: one of {', '.join(DTYPE_CODE)} can")
    return code


cdef dict op_codes = OP_CODE  # typed, so that no bound method is made for each look


cdef int check_op(object op, int dtype) except -1:
    code = op_codes.get(op)
    if code is None:
        raise ValueError(f"unknown op {op!r}: one of {', '.join(OP_CODE)}")
    if not hr_reduce_supported(<hr_redop> <int> code, <hr_dtype> dtype):
        raise TypeError(f"op {op!r} is not defined for {text_of(hr_dtype_name(<hr_dtype> dtype))}")
    return code

# buffer.pxi - from a Python object to memory: numpy's arrays, the buffer protocol, then DLPack.
#
# A Span is one argument while a call has it: where it lies, how many bytes, how many elements of which type. It lives
# on the caller's stack for blocking calls and inside a Request for the others; either way span_close() gives it back,
# and until then the exporter may not move or free the memory. dtype is an hr_dtype, or -1 for types that the core
# moves and cannot reduce (bool, complex, structured).
from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_FULL_RO, PyBUF_WRITABLE
from cpython.object cimport Py_TYPE, PyObject, PyTypeObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.string cimport memset, strcmp

import weakref as _weakref
from functools import partial as _partial

from hrdma.types import DTYPE_CODE, OP_CODE

cdef extern from "Python.h":
    # Cython's own Py_buffer counts references through obj; here a plain pointer is wanted, NULL while nothing is held.
    ctypedef struct View "Py_buffer":
        void *buf
        PyObject *obj
        Py_ssize_t len
        Py_ssize_t itemsize
        char *format

    bint PyObject_CheckBuffer(object x) noexcept
    int PyObject_GetBuffer(object x, View *view, int flags) except -1
    void PyBuffer_Release(View *view) noexcept


cdef extern from *:
    """
    /* The exchange structs of DLPack 1.0 (dlpack.h), as far as they are read here. */
    typedef struct { int32_t device_type, device_id; } hr_dl_device;
    typedef struct { uint8_t code, bits; uint16_t lanes; } hr_dl_type;
    typedef struct {
        void *data;
        hr_dl_device device;
        int32_t ndim;
        hr_dl_type dtype;
        int64_t *shape, *strides;
        uint64_t byte_offset;
    } hr_dl_tensor;
    typedef struct { hr_dl_tensor dl_tensor; } hr_dl_managed;
    typedef struct {
        struct { uint32_t major, minor; } version;
        void *manager_ctx;
        void (*deleter)(void *);
        uint64_t flags;
        hr_dl_tensor dl_tensor;
    } hr_dl_managed_versioned;
    """
    ctypedef struct hr_dl_device:
        int32_t device_type
    ctypedef struct hr_dl_type:
        uint8_t code
        uint8_t bits
        uint16_t lanes
    ctypedef struct hr_dl_tensor:
        void *data
        hr_dl_device device
        int32_t ndim
        hr_dl_type dtype
        int64_t *shape
        int64_t *strides
        uint64_t byte_offset
    ctypedef struct hr_dl_managed:
        hr_dl_tensor dl_tensor
    ctypedef struct hr_dl_managed_versioned:
        uint64_t flags
        hr_dl_tensor dl_tensor


cdef extern from *:
    """
    /* The head of an array and of its type, as numpy's ABI has had them since 1.0 (ndarraytypes.h). */
    typedef struct {
        PyObject_HEAD
        PyTypeObject *typeobj;
        char kind, type, byteorder, flags;
        int type_num;
    } hr_numpy_type;
    typedef struct {
        PyObject_HEAD
        void *data;
        int nd;
        Py_ssize_t *dimensions, *strides;
        PyObject *base;
        hr_numpy_type *descr;
        int flags;
    } hr_numpy_array;
    """
    ctypedef struct hr_numpy_type:
        char byteorder
        int type_num
    ctypedef struct hr_numpy_array:
        void *data
        int nd
        Py_ssize_t *dimensions
        PyObject *base
        hr_numpy_type *descr
        int flags

cdef enum:
    NUMPY_OWNS = 0x4
    NUMPY_CONTIGUOUS = 0x1
    NUMPY_WRITEABLE = 0x400
    NUMPY_OTHERS = 256  # from here on types of other packages, each of one size, in the order in which they came
    NUMPY_TYPES = 320

cdef enum:
    DL_CPU = 1
    DL_OPAQUE = 3
    DL_READ_ONLY = 1

cdef struct Span:
    void *ptr
    size_t nbytes
    size_t count
    size_t itemsize
    int dtype
    View view         # view.obj is NULL where the memory came by another way than the buffer protocol
    PyObject *keep    # the array or DLPack's capsule then: as long as it lives, so does the memory


cdef inline void span_close(Span *span) noexcept:
    if span.view.obj != NULL:
        PyBuffer_Release(&span.view)
    if span.keep != NULL:
        Py_XDECREF(span.keep)
        span.keep = NULL


cdef bint span_numpy(object x, bint writable, Span *span) noexcept:
    """An array itself, contiguous, of numbers in native order. 0: ask it by the buffer protocol, which takes longer.

    As there, a reference is what keeps others from resizing it.
    """
    cdef hr_numpy_array *array = <hr_numpy_array *> <PyObject *> x
    cdef int wanted = NUMPY_CONTIGUOUS | (NUMPY_WRITEABLE if writable else 0), number = array.descr.type_num, i
    if array.flags & wanted != wanted or not 0 <= number < NUMPY_TYPES or not NUMPY_SIZE[number]:
        return False
    if array.descr.byteorder not in (c"=", c"|"):
        return False
    span.count = 1
    for i in range(array.nd):
        span.count *= <size_t> array.dimensions[i]
    span.ptr = array.data
    span.itemsize = NUMPY_SIZE[number]
    span.nbytes = span.count * span.itemsize
    span.dtype = NUMPY_DTYPE[number]
    span.keep = <PyObject *> x
    Py_INCREF(x)
    if registers and span.nbytes >= KEPT_LEAST:
        keep_memory(<hr_numpy_array *> <PyObject *> x)
    return True


cdef bint registers = False   # a connection of this process has to register what it moves
cdef dict kept_memory = {}    # address of an array that owns its memory: [reference to it, id of the memory, where]
cdef enum:
    KEPT_LEAST = 64 << 10     # bytes; shorter ones are copied
    KEPT_MOST = 1024          # arrays; those that come later are registered by each operation


cdef void keep_memory(hr_numpy_array *array) noexcept:
    """Tells the core of the memory under an array, until the array that owns it ends: it may stay registered that long.

    A weak reference also keeps numpy from resizing it.
    """
    cdef size_t key
    while array.base != NULL and Py_TYPE(<object> array.base) == NDARRAY:
        array = <hr_numpy_array *> array.base
    key = <size_t> array
    if array.base != NULL or not array.flags & NUMPY_OWNS:
        return
    entry = kept_memory.get(key)
    if entry is not None and <size_t> entry[2] == <size_t> array.data or len(kept_memory) >= KEPT_MOST:
        return
    try:
        if entry is not None:  # unpickled into: it is the same array, and other memory
            forget_memory(key, None)
        owner = <object> <PyObject *> array
        nbytes = <size_t> owner.nbytes
        if nbytes >= KEPT_LEAST:
            entry = [_weakref.ref(owner, _partial(forget_memory, key)), 0, <size_t> array.data]
            kept_memory[key] = entry  # before it is known: its end is told from here on
            entry[1] = hr_memory_keep(array.data, nbytes)
    except Exception:  # it is registered by each operation then
        pass


def forget_memory(size_t key, reference):
    """The array is about to give its memory back."""
    entry = kept_memory.pop(key, None)
    if entry is not None:
        hr_memory_forget(entry[1])


cdef inline int span_open(object x, bint writable, Span *span) except -1:
    """Memory of x as bytes, for send and recv. On error nothing is held."""
    span.view.obj = NULL
    span.keep = NULL
    if Py_TYPE(x) == NDARRAY and span_numpy(x, writable, span):
        return 0
    if not PyObject_CheckBuffer(x):
        return span_dlpack(x, writable, span)
    return span_buffer(x, writable, span, False)


cdef inline int span_open_typed(object x, bint writable, Span *span) except -1:
    """Memory of x with its element type, for collectives. On error nothing is held."""
    span.view.obj = NULL
    span.keep = NULL
    if Py_TYPE(x) == NDARRAY and span_numpy(x, writable, span):
        return 0
    if not PyObject_CheckBuffer(x):
        return span_dlpack(x, writable, span)
    return span_buffer(x, writable, span, True)


cdef int span_buffer(object x, bint writable, Span *span, bint typed) except -1:
    """By the buffer protocol. Its format is always asked for: an object's address must not leave the process."""
    cdef int flags = PyBUF_C_CONTIGUOUS | (PyBUF_WRITABLE if writable else 0)
    try:
        PyObject_GetBuffer(x, &span.view, flags | PyBUF_FORMAT)
    except (BufferError, ValueError, TypeError) as error:
        # numpy cannot put the types of ml_dtypes, nor dates, into a format string; their name says what they are.
        dtype = getattr(x, "dtype", None)
        if dtype is None and typed:
            span_refuse(x, writable, error)
        if getattr(dtype, "hasobject", False):
            refuse_objects(x, dtype)
        try:
            PyObject_GetBuffer(x, &span.view, flags)
        except (BufferError, ValueError, TypeError) as again:
            span_refuse(x, writable, again)
        span.dtype = DTYPE_CODE.get(getattr(dtype, "name", None), -1)
        if span.dtype >= 0 and hr_dtype_size(<hr_dtype> span.dtype) != <size_t> span.view.itemsize:
            span.dtype = -1
        if not getattr(dtype, "isnative", True):
            span.dtype = -1
        elif Py_TYPE(x) == NDARRAY:
            numpy_learn_other((<hr_numpy_array *> <PyObject *> x).descr, span)
    else:
        if format_has_objects(span.view.format):
            try:
                refuse_objects(x, getattr(x, "dtype", text_of(span.view.format)))
            finally:
                span_close(span)
        if isinstance(x, memoryview) and exports_objects(x.obj):  # it was cast, and its format says bytes
            try:
                refuse_objects(x, getattr(x.obj, "dtype", "O"))
            finally:
                span_close(span)
        span.dtype = dtype_of_format(span.view.format, <size_t> span.view.itemsize)
    span.ptr = span.view.buf
    span.nbytes = <size_t> span.view.len
    span.itemsize = <size_t> span.view.itemsize
    span.count = span.nbytes // span.itemsize if span.itemsize else 0
    return 0


cdef int refuse_objects(object x, object dtype) except -1:
    raise TypeError(f"the elements of this {type(x).__name__} (dtype {dtype}) are or hold Python objects, whose "
                    "addresses mean nothing to another process: convert them, as by x.astype(float)")


cdef bint exports_objects(object exporter) except -1:
    """Whether what a view was made of has Python objects."""
    cdef View view
    dtype = getattr(exporter, "dtype", None)
    if dtype is not None:
        return bool(getattr(dtype, "hasobject", False))
    if not PyObject_CheckBuffer(exporter):
        return False
    try:
        PyObject_GetBuffer(exporter, &view, PyBUF_FULL_RO)
    except (BufferError, ValueError, TypeError):
        return False
    found = format_has_objects(view.format)
    PyBuffer_Release(&view)
    return found


cdef bint format_has_objects(const char *format) noexcept:
    """Whether an O is among the types; the names of fields stand between colons."""
    cdef bint name = False
    if format == NULL:
        return False
    while format[0]:
        if format[0] == c":":
            name = not name
        elif format[0] == c"O" and not name:
            return True
        format += 1
    return False


cdef int span_refuse(object x, bint writable, object error) except -1:
    """Says why x cannot be used, with the mend."""
    kind = type(x).__name__
    try:
        view = memoryview(x)
    except (BufferError, ValueError, TypeError):
        flags = getattr(x, "flags", None)
        contiguous = getattr(flags, "c_contiguous", True)
        readonly = not getattr(flags, "writeable", True)
    else:
        contiguous = view.c_contiguous
        readonly = view.readonly
    if not contiguous:
        raise ValueError(f"the {kind} is not C-contiguous: pass numpy.ascontiguousarray(x)") from error
    if writable and readonly:
        raise ValueError(f"the {kind} is read-only and this call writes into it: pass a writable array") from error
    raise TypeError(f"cannot use the memory of this {kind}: {error}") from error


cdef int dtype_of_format(const char *format, size_t itemsize) noexcept:
    cdef char kind
    cdef int width
    if format == NULL:
        return <int> HR_UINT8
    if format[0] in (c"=", c"@") or (format[0] == c"<" and LITTLE_ENDIAN) or (
        format[0] in (c">", c"!") and not LITTLE_ENDIAN
    ):
        format += 1
    kind = format[0]
    if kind == 0 or format[1] != 0:
        return -1
    # Widths come from itemsize: "l" is four bytes in one format and eight in another.
    width = 0 if itemsize == 1 else 1 if itemsize == 2 else 2 if itemsize == 4 else 3 if itemsize == 8 else -1
    if width < 0:
        return -1
    if kind in (c"b", c"h", c"i", c"l", c"q", c"n"):
        return width                   # int8 .. int64
    if kind in (c"B", c"H", c"I", c"L", c"Q", c"N"):
        return 4 + width               # uint8 .. uint64
    if kind in (c"e", c"f", c"d") and itemsize >= 2:
        return 8 if width == 1 else 8 + width  # float16, float32, float64
    return -1


cdef bint LITTLE_ENDIAN = __import__("sys").byteorder == "little"


cdef PyTypeObject *NDARRAY = NULL  # numpy.ndarray, where its arrays are as said above
cdef size_t[NUMPY_TYPES] NUMPY_SIZE
cdef int[NUMPY_TYPES] NUMPY_DTYPE


cdef void numpy_learn_other(hr_numpy_type *descr, const Span *span) noexcept:
    """A type of another package, bfloat16 for one: its next array need not be asked, which takes a microsecond."""
    if NUMPY_OTHERS <= descr.type_num < NUMPY_TYPES:
        NUMPY_DTYPE[descr.type_num] = span.dtype
        NUMPY_SIZE[descr.type_num] = <size_t> span.view.itemsize


cdef int numpy_learn() except -1:
    """Fills the tables, and tries what is said above of arrays."""
    global NDARRAY
    cdef Span span
    import numpy

    for letter in "bhilqBHILQefd":
        dtype = numpy.dtype(letter)
        NUMPY_DTYPE[dtype.num] = dtype_of_format(letter.encode(), dtype.itemsize)
        NUMPY_SIZE[dtype.num] = dtype.itemsize
    sample = numpy.arange(12, dtype="int16").reshape(2, 6)[1:]
    span.view.obj = NULL
    if span_numpy(sample, True, &span):
        if (<size_t> sample.ctypes.data, 12, 6, 2, DTYPE_CODE["int16"]) == (
            <size_t> span.ptr, span.nbytes, span.count, span.itemsize, span.dtype
        ) and not span_numpy(numpy.broadcast_to(sample, (2, 6)), False, &span):
            NDARRAY = Py_TYPE(sample)
        span_close(&span)
    return 0


cdef int span_dlpack(object x, bint writable, Span *span) except -1:
    """Memory of an object that speaks DLPack alone (a torch tensor). The capsule is kept, not consumed."""
    cdef hr_dl_tensor *tensor
    cdef uint64_t flags = 0
    cdef int64_t stride = 1, extent
    cdef int i
    kind = type(x).__name__
    if not hasattr(x, "__dlpack__") or not hasattr(x, "__dlpack_device__"):
        raise TypeError(f"a {kind} has no memory to work on: pass an array, a buffer or a CPU tensor")
    device = x.__dlpack_device__()
    if int(device[0]) != DL_CPU:
        raise TypeError(f"the {kind} is on device {tuple(map(int, device))}: only CPU memory works, pass x.cpu()")
    try:
        try:
            capsule = x.__dlpack__(max_version=(1, 0))
        except TypeError:
            capsule = x.__dlpack__()
    except (RuntimeError, BufferError, ValueError) as error:
        raise ValueError(f"the {kind} cannot be exported: {error}") from error
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        versioned = <hr_dl_managed_versioned *> PyCapsule_GetPointer(capsule, "dltensor_versioned")
        tensor = &versioned.dl_tensor
        flags = versioned.flags
    elif PyCapsule_IsValid(capsule, "dltensor"):
        tensor = &(<hr_dl_managed *> PyCapsule_GetPointer(capsule, "dltensor")).dl_tensor
    else:
        raise TypeError(f"__dlpack__ of the {kind} gave no DLPack capsule")
    if writable and flags & DL_READ_ONLY:
        raise ValueError(f"the {kind} is read-only and this call writes into it: pass a writable array")
    if tensor.dtype.code == DL_OPAQUE:
        raise TypeError(f"the elements of the {kind} are handles, which mean nothing to another process")
    span.count = 1
    for i in range(tensor.ndim):
        span.count *= <size_t> tensor.shape[i]
    for i in reversed(range(tensor.ndim)):
        extent = tensor.shape[i]
        if span.count and tensor.strides != NULL and extent > 1 and tensor.strides[i] != stride:
            raise ValueError(f"the {kind} is not C-contiguous: pass x.contiguous()")
        stride *= extent
    span.itemsize = (tensor.dtype.bits * tensor.dtype.lanes + 7) // 8
    span.nbytes = span.count * span.itemsize
    span.ptr = <char *> tensor.data + tensor.byte_offset if tensor.data != NULL else NULL
    span.dtype = -1
    if tensor.dtype.lanes == 1 and tensor.dtype.code < 5:
        name = ("int", "uint", "float", "", "bfloat")[tensor.dtype.code] + str(tensor.dtype.bits)
        span.dtype = DTYPE_CODE.get(name, -1)
    Py_INCREF(capsule)
    span.keep = <PyObject *> capsule
    return 0


cdef str dtype_name(int dtype, size_t itemsize):
    """For signatures and messages: what all ranks must agree on. Types that are moved only differ by their size."""
    return text_of(hr_dtype_name(<hr_dtype> dtype)) if dtype >= 0 else f"{itemsize}-byte elements"


cdef inline void span_none(Span *span) noexcept:
    """Nothing, to be closed or not; field by field, as a memset of so few lines takes 10 ns on an EPYC (`rep stos`)."""
    span.ptr = NULL
    span.nbytes = span.count = span.itemsize = 0
    span.dtype = 0
    span.view.obj = NULL
    span.keep = NULL


cdef inline bint overlap(Span *a, Span *b) noexcept:
    cdef char *p = <char *> a.ptr
    cdef char *q = <char *> b.ptr
    return a.nbytes and b.nbytes and p < q + b.nbytes and q < p + a.nbytes


cdef object numpy_dtype(object dtype):
    """A numpy dtype; bfloat16, by name, from ml_dtypes."""
    import numpy

    if isinstance(dtype, str) and dtype == "bfloat16":
        try:
            from ml_dtypes import bfloat16
        except ImportError:
            raise TypeError("bfloat16 needs the package ml_dtypes: pip install hrdma[bf16]") from None
        return numpy.dtype(bfloat16)
    return numpy.dtype(dtype)


cdef object array_dtype(object x, Span *span):
    """The numpy dtype for a result that goes with x."""
    dtype = getattr(x, "dtype", None)
    if type(dtype).__module__.partition(".")[0] == "numpy":
        return dtype
    if span.dtype >= 0:
        return numpy_dtype(text_of(hr_dtype_name(<hr_dtype> span.dtype)))
    if span.view.obj != NULL and span.view.format != NULL:
        return numpy_dtype(text_of(span.view.format))
    raise TypeError(f"cannot make an array like this {type(x).__name__}: pass out=")


cdef tuple shape_of(object x, Span *span):
    shape = getattr(x, "shape", None)
    return (span.count,) if shape is None else tuple(shape)

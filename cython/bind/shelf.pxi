# shelf.pxi - small objects that one process lays out and others read, for hrdma.objects.
from cpython.bytes cimport PyBytes_FromStringAndSize

SHELF_BYTES, SHELF_PLACES = HR_SHELF_BYTES, HR_SHELF_PLACES


cdef class Shelf:
    """Small objects in shared memory (``hr/shelf.h``), as their one writer or as a reader. Holds the memory.

    Parameters
    ----------
    memory : buffer
        Of ``SHELF_BYTES`` bytes, zero when the writer comes to it; writable for the writer.
    writer : bool
    """

    cdef Span span
    cdef hr_shelf *shelf
    cdef bint writer

    def __cinit__(self, memory, bint writer=False):
        span_open(memory, writer, &self.span)
        if self.span.nbytes < HR_SHELF_BYTES:
            raise ValueError(f"{self.span.nbytes} bytes for a shelf of {HR_SHELF_BYTES}")
        self.shelf = <hr_shelf *> self.span.ptr
        self.writer = writer

    def __dealloc__(self):
        span_close(&self.span)

    cdef int writes(self) except -1:
        if not self.writer:
            raise TypeError("this shelf can only be read")
        return 0

    def put(self, str name, bytes meta, bytes content):
        """Lays an object out; False where it is too large."""
        cdef bytes key = name.encode("utf-8", "surrogatepass")
        self.writes()
        return hr_shelf_put(self.shelf, <const char *> key, len(key), <const char *> meta, len(meta),
                            <const char *> content, len(content))

    def remove(self, str name):
        """Takes an object away, where it is there."""
        cdef bytes key = name.encode("utf-8", "surrogatepass")
        self.writes()
        hr_shelf_remove(self.shelf, <const char *> key, len(key))

    def clear(self):
        """Takes all away."""
        self.writes()
        hr_shelf_clear(self.shelf)

    def hold(self, uint64_t home, double seconds):
        """All that is there holds for so long, for those who know the writer by this number."""
        self.writes()
        hr_shelf_hold(self.shelf, home, hr_now() + <int64_t> (seconds * 1e9))

    def hear(self, int place, uint64_t number):
        """What the reader at this place has said is known up to this number."""
        self.writes()
        if not 0 <= place < HR_SHELF_PLACES:
            raise ValueError(f"place {place}: 0 to {HR_SHELF_PLACES - 1}")
        hr_shelf_hear(self.shelf, place, number)

    def heard(self, int place):
        """What the writer said last with `hear`."""
        if not 0 <= place < HR_SHELF_PLACES:
            raise ValueError(f"place {place}: 0 to {HR_SHELF_PLACES - 1}")
        return hr_shelf_heard(self.shelf, place)

    def take(self, names, uint64_t home):
        """Description and content of each object, None where it is not there; None where nothing holds any more."""
        cdef hr_shelf_record record
        cdef bytes key, meta, content
        found = []
        for name in names:
            key = (<str?> name).encode("utf-8", "surrogatepass")
            there = None
            if hr_shelf_find(self.shelf, <const char *> key, len(key), &record):
                meta = PyBytes_FromStringAndSize(NULL, record.meta)
                content = PyBytes_FromStringAndSize(NULL, record.content)
                if hr_shelf_read(self.shelf, &record, <char *> meta, <char *> content):
                    there = (meta, content)
            found.append(there)
        return found if hr_shelf_holds(self.shelf, home) else None

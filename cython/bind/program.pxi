# program.pxi - a schedule bound to this rank, kept with what a call needs to know about it.


# What a call looks up its program by. Compared field by field, so no object is made for a call that was seen before.
cdef struct Key:
    uint64_t count
    uint32_t itemsize
    int16_t collective
    int16_t dtype
    int16_t op
    int16_t flags
    int32_t root
    int32_t schedule  # 0: planned here; else the number of one that was given, or AGREEMENT


cdef class Program:
    """The core's copy of one planned collective.

    Parameters
    ----------
    instrs, unlocks, refs : arrays
        As struct hr_instr, uint32 and struct hr_ref (hrdma/planning.py).
    in_bytes, out_bytes, tmp_bytes : int
    size : int
        Ranks of the communicator.
    text : str
        ``"allreduce(float32, 1000, sum)"``: the same on all ranks, shown when they disagree.
    signature : int
        64 bits of a hash of that text.
    pairs : str
        Of an alltoall with counts: to whom something is sent and from whom it is taken (`hrdma.control.stalls`).
    aside : int
        Buffers that peers cannot map are replaced by room that they can, for the time of a run: 1, the input is copied
        there; 2, the output is copied back; 3, both. 0: they are not. 4: the program does so itself, in scratch.
    sliceable : bool
        As in `hrdma.planning.Plan`.

    Raises
    ------
    ValueError
        The core found it inconsistent; the message names the instruction.
    """

    cdef hr_program *handle
    cdef readonly uint64_t signature
    cdef readonly str text
    cdef readonly str explanation
    cdef readonly str pairs
    cdef uint64_t in_bytes, out_bytes
    cdef uint64_t instructions
    cdef bint sliceable
    cdef Key key

    def __cinit__(self, instrs, unlocks, refs, uint64_t in_bytes, uint64_t out_bytes, uint64_t tmp_bytes, int size, *,
                  str text="", uint64_t signature=0, str explanation="", str pairs="", uint32_t aside=0,
                  bint sliceable=False):
        cdef Span i, u, r
        cdef char detail[256]
        cdef hr_status status
        cdef hr_program *handle = NULL
        detail[0] = 0
        span_open(instrs, False, &i)
        try:
            span_open(unlocks, False, &u)
            try:
                span_open(refs, False, &r)
                if i.nbytes % sizeof(hr_instr) or u.nbytes % sizeof(uint32_t) or r.nbytes % sizeof(hr_ref):
                    span_close(&r)
                    raise ValueError(f"arrays of {i.nbytes}, {u.nbytes} and {r.nbytes} bytes are no program")
                status = hr_program_new(
                    <const hr_instr *> i.ptr, <uint32_t> (i.nbytes // sizeof(hr_instr)),
                    <const uint32_t *> u.ptr, <uint32_t> (u.nbytes // sizeof(uint32_t)),
                    <const hr_ref *> r.ptr, <uint32_t> (r.nbytes // sizeof(hr_ref)),
                    in_bytes, out_bytes, tmp_bytes, size, &handle, detail)
                span_close(&r)
            finally:
                span_close(&u)
        finally:
            span_close(&i)
        if status != HR_OK:
            raise status_error(status, with_detail(f"program of {text or 'a collective'}", detail))
        if aside:
            hr_program_set_aside(handle, aside)
        self.handle = handle
        self.instructions = len(instrs)
        self.in_bytes = in_bytes
        self.out_bytes = out_bytes
        self.text = text
        self.signature = signature
        self.explanation = explanation
        self.pairs = pairs
        self.sliceable = sliceable

    def __dealloc__(self):
        if self.handle != NULL:
            hr_program_put(self.handle)

    @property
    def nbytes(self):
        """Bytes of the input and of the output."""
        return self.in_bytes, self.out_bytes


cdef enum:
    KEY_IN_PLACE = 1
    KEY_DETERMINISTIC = 2
    KEY_OPENED = 4  # as `opened` of hrdma.planning.plan
    KEY_SLICED = 8  # as `sliced`
    OPENED_LEAST = 4096  # bytes: where each rank sums a half of it, below that two messages take longer than one
    OPENED_MOST = 65536  # longer ones are summed so whatever was said
    SHARED_LEAST = 131072  # bytes of a reduce that both ranks share, `pulls` of scatter_gather in topo/algorithms
    COPIED_LEAST = 32768  # bytes of an allreduce that ranks which share cores make of copies, each as it has them,
    SLICED_LEAST = 1572864  # and from here on in slices, if all do
    SLICED_MOST = 268435456  # planned in 12 to 30 ms
    TAKEN_LEAST = 131072  # of a reduce, if all do
    TAKEN_MOST = 25165824  # what goes to one rank is as fast where it lies from there on
    APART_LEAST = 786432  # bytes of an allreduce that two ranks with a core each take in slices
    APART_MOST = 50331648
    SHARED_TRIAL = 64  # after so many of memory that could not be opened the next one asks again
    SLOTS = 64  # a power of two
    INSTRUCTIONS = 262144  # of programs that are kept, some 100 MB at most
    AGREEMENT = -1  # what ranks say of a given schedule: no program of users is like it
    RECENT = 8  # calls told of when ranks disagree; RECENT in control/stalls.py


cdef inline bint key_equal(const Key *a, const Key *b) noexcept:
    return (a.count == b.count and a.itemsize == b.itemsize and a.collective == b.collective and a.dtype == b.dtype
            and a.op == b.op and a.flags == b.flags and a.root == b.root and a.schedule == b.schedule)


cdef inline unsigned key_slot(const Key *key) noexcept:
    cdef uint64_t h = key.count * 0x9E3779B97F4A7C15ull
    h ^= (<uint64_t> (<uint32_t> key.root) << 32) + (<uint64_t> key.itemsize << 20)
    h ^= (<uint64_t> (<uint16_t> key.dtype) << 12) ^ (<uint64_t> (<uint32_t> key.schedule) << 24)
    h ^= (<uint64_t> key.collective << 8) + (<uint64_t> key.op << 4) + <uint64_t> key.flags
    h *= 0xD6E8FEB86659FD93ull  # the slot is of bits 40 to 45: what was put in above has no say
    return <unsigned> (h >> 40) & (SLOTS - 1)

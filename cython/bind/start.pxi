# start.pxi - what all collectives share: which program a call wants, its run, how buffers are shared out.
#
# A program is planned once (in Python, `_plan`) and then found again by its Key without making an object. Element
# counts, never bytes, are what users and planner talk about.
cdef enum:
    ALLREDUCE
    REDUCE
    BROADCAST
    ALLGATHER
    REDUCE_SCATTER
    GATHER
    SCATTER
    ALLTOALL
    BARRIER

cdef extern from *:
    """
    static const char *const hr_collectives[] = {"allreduce", "reduce", "broadcast", "allgather", "reduce_scatter",
                                                 "gather", "scatter", "alltoall", "barrier"};
    """
    const char *NAMES "hr_collectives"[9]


cdef class Planned(Messenger):
    """Runs planned collectives. The second part of CommunicatorBase."""

    cdef dict programs
    cdef readonly dict _files    # numbers of schedules that came from files, by path
    cdef PyObject *slots[SLOTS]  # borrowed from programs
    cdef bint rank_order         # the default of deterministic=
    cdef PyObject *recent[RECENT]  # owned: programs of the collectives that were started last, by sequence number
    cdef uint32_t opened  # lengths of allreduces, by bits, whose last call both ranks could have opened: below
    cdef uint64_t shut  # lengths of reduces, by bits, whose last call one rank could not have opened
    cdef int shut_calls  # of such lengths, since all were forgotten
    cdef uint64_t planned  # instructions of programs
    cdef bint copies  # ranks share cores and memory: known from the first program on
    cdef uint64_t plain  # lengths of long vectors, by bits, whose last call all ranks made of memory that is not mapped

    def __cinit__(self):
        self.programs = {}
        self._files = {}
        memset(self.recent, 0, sizeof(self.recent))

    def __dealloc__(self):
        for i in range(RECENT):
            Py_XDECREF(self.recent[i])

    @property
    def deterministic(self):
        """Default of ``deterministic=``: one association, rank order, whatever the algorithm would have been."""
        return self.rank_order

    @deterministic.setter
    def deterministic(self, value):
        self.rank_order = bool(value)

    def _plan(self, collective, counts, itemsize, dtype, op, root, in_place, deterministic, schedule, opened, sliced):
        """Makes the :class:`Program` for a call; a subclass in Python does."""
        raise NotImplementedError

    def _give(self, schedule, timeout):
        """The number, from 1, of a schedule on which all ranks agree; a subclass in Python makes it so."""
        raise NotImplementedError

    def _told(self, bytes mine, timeout):
        """What every rank says of its schedule, as many bytes each, one behind the other. Collective."""
        cdef Span source, target
        cdef Key key
        self.check()
        span_none(&source)
        span_none(&target)
        found = bytearray(len(mine) * self.size)
        try:
            span_open_typed(mine, False, &source)
            self.set_key(&key, ALLGATHER, &source, source.count)
            key.schedule = AGREEMENT
            self.open_out(mine, &source, found, &target, len(found))
            return self.start(&key, None, &source, &target, found, timeout, None, False)
        finally:
            span_close(&source)
            span_close(&target)

    def _forget_given(self, number):
        """The schedule of this number is not known any more; nor is what was planned for it."""
        self._files = {path: known for path, known in self._files.items() if known != number}
        memset(self.slots, 0, sizeof(self.slots))
        self.programs = {name: program for name, program in self.programs.items() if name[7] != number}

    def _recent(self):
        """``(sequence, signature, text, pairs)`` of the collectives that were started last, the newest at the end."""
        cdef int64_t number
        found = []
        for number in range(max(0, self.sequence - RECENT), self.sequence):
            program = <Program> self.recent[number % RECENT]
            found.append((number, program.signature, program.text, program.pairs))
        return found

    cdef inline void remember(self, Program program) noexcept:
        """What is started now, under the next number."""
        cdef int place = <int> (self.sequence % RECENT)
        cdef PyObject *before = self.recent[place]
        Py_INCREF(program)
        self.recent[place] = <PyObject *> program
        self.sequence += 1
        Py_XDECREF(before)

    cdef inline int set_key(self, Key *key, int collective, Span *span, size_t count) except -1:
        key.collective = collective
        key.count = count
        key.itemsize = <uint32_t> span.itemsize
        key.dtype = span.dtype
        key.op = 0
        key.flags = 0
        key.root = 0
        key.schedule = 0
        return 0

    cdef inline int set_op(self, Key *key, object op, object deterministic) except -1:
        if key.dtype < 0:
            known = ", ".join(DTYPE_CODE)
            raise TypeError(f"elements of this type ({key.itemsize} bytes) cannot be reduced: {known} can")
        key.op = check_op(op, key.dtype)
        if self.rank_order if deterministic is None else deterministic:
            key.flags |= KEY_DETERMINISTIC
        return 0

    cdef inline int set_root(self, Key *key, object root) except -1:
        key.root = self.rank_of("root", root, False)
        return 0

    cdef inline int set_schedule(self, Key *key, object schedule, object timeout) except -1:
        if schedule is not None:
            number = self._files.get(schedule) if type(schedule) is str else None
            key.schedule = self._give(schedule, timeout) if number is None else number
        return 0

    cdef int set_alias(self, Key *key, Span *source, Span *target, size_t source_shift, size_t target_shift) except -1:
        """In place when x and out begin at the same byte, as shifted; any other overlap is refused."""
        if not overlap(source, target):
            return 0
        if <char *> source.ptr + source_shift != <char *> target.ptr + target_shift:
            raise ValueError("x and out overlap: pass separate buffers, or exactly the block to work on in place")
        key.flags |= KEY_IN_PLACE
        return 0

    cdef Program lookup(self, Key *key, object counts):
        cdef PyObject *found
        if counts is None:
            found = self.slots[key_slot(key)]
            if found != NULL and key_equal(&(<Program> found).key, key):
                return <Program> found
        return self.lookup_slow(key, counts)

    cdef Program lookup_slow(self, Key *key, object counts):
        cdef Program program
        if counts is None:
            counts = key.count
        name = (key.collective, counts, key.itemsize, key.dtype, key.op, key.root, key.flags, key.schedule)
        program = self.programs.get(name)
        if program is None:
            program = self._plan(
                text_of(NAMES[key.collective]), counts, max(key.itemsize, 1), dtype_name(key.dtype, key.itemsize),
                text_of(hr_redop_name(<hr_redop> key.op)) if self.reduces(key) else None,
                key.root if key.collective in (REDUCE, BROADCAST, GATHER, SCATTER) else None,
                bool(key.flags & KEY_IN_PLACE), bool(key.flags & KEY_DETERMINISTIC), key.schedule,
                bool(key.flags & KEY_OPENED), bool(key.flags & KEY_SLICED))
            program.key = key[0]
            self.planned += program.instructions
            if len(self.programs) >= 4096 or self.planned > INSTRUCTIONS:
                # Bounded for callers whose sizes never repeat. Programs that run are held by their calls.
                memset(self.slots, 0, sizeof(self.slots))
                self.programs.clear()
                self.planned = program.instructions
            self.programs[name] = program
        if isinstance(counts, int):
            self.slots[key_slot(key)] = <PyObject *> program
        return program

    cdef inline bint reduces(self, Key *key) noexcept:
        return key.collective == ALLREDUCE or key.collective == REDUCE or key.collective == REDUCE_SCATTER

    # Which algorithm is best for a short allreduce of two ranks depends on where the memory of both lies, and both must
    # choose alike. So each says of every such call whether its memory could be open to the other and whether it waits
    # for the end of the call. If both have said yes, both know that before they begin the next one of that length, for
    # collectives of one communicator are called one after the other.
    # A long reduce is the same the other way round: in the algorithm for open memory both say it, in others only those
    # who send something to the root. So it begins with the first, goes on with the others where one has said no, and
    # asks again now and then. (Where another one was planned all the same nobody says anything: `mutual` in the core.)
    # Whether a long vector goes in slices where ranks map memory (hrdma.topo.slices) is known in the same way: all have
    # said of the last call of such a length that peers cannot map their input, and that they wait. Where not everyone
    # says something to every other, nobody finds that all have said it. What one slice is may be copied by some ranks
    # and not by others, so there each goes by its own.

    cdef inline uint32_t openable(self, Key *key) noexcept:
        """The bit of a call whose algorithm depends on what was said; 0: it does not. The same on both ranks."""
        cdef uint64_t nbytes = key.count * key.itemsize
        if self.size != 2 or key.collective != ALLREDUCE or key.schedule or nbytes < OPENED_LEAST:
            return 0
        return <uint32_t> 1 << (nbytes // OPENED_LEAST) if nbytes <= OPENED_MOST else 0

    cdef inline uint64_t closable(self, Key *key) noexcept:
        """The same of a reduce."""
        cdef uint64_t nbytes = key.count * key.itemsize, bit = 1
        if self.size != 2 or key.collective != REDUCE or key.schedule or nbytes < SHARED_LEAST:
            return 0
        while nbytes > 1:
            nbytes >>= 1
            bit <<= 1
        return bit

    cdef inline uint64_t sliceable(self, Key *key) noexcept:
        """The same of a vector that is taken in slices, or not: two bits for each power of two."""
        cdef uint64_t nbytes = key.count * key.itemsize
        cdef uint64_t least = SLICED_LEAST, most = SLICED_MOST, bit = 1
        if self.size == 2:
            least, most = APART_LEAST, APART_MOST if key.collective == ALLREDUCE else 0
        elif key.collective == REDUCE:
            least, most = TAKEN_LEAST, TAKEN_MOST
            bit <<= 32
        elif key.collective != ALLREDUCE:
            return 0
        if key.schedule or nbytes < least or nbytes > most:
            return 0
        while nbytes >= 2 * <uint64_t> TAKEN_LEAST:
            nbytes >>= 1
            bit <<= 2
        return bit << 1 if 2 * nbytes >= 3 * <uint64_t> TAKEN_LEAST else bit

    cdef inline bint copied(self, Key *key, const void *inp) noexcept:
        """Whether this rank makes one slice of copies."""
        cdef uint64_t nbytes = key.count * key.itemsize
        cdef hr_arena_info info
        return (self.copies and key.collective == ALLREDUCE and not key.schedule and nbytes >= COPIED_LEAST
                and nbytes < SLICED_LEAST and not hr_arena_find(inp, nbytes, &info))

    cdef inline void asked(self, uint64_t closable) noexcept:
        """A reduce has begun. Until it has ended well nobody has said yes."""
        if not self.shut & closable:
            self.shut |= closable
            return
        self.shut_calls += 1
        if self.shut_calls == SHARED_TRIAL:
            self.shut_calls = 0
            self.shut = 0

    cdef object start(self, Key *key, object counts, Span *source, Span *target, object value, object timeout,
                      object priority, bint async_op):
        """Runs the program of key on the two buffers; ``value`` is what the call gives back."""
        cdef hr_request req
        cdef Call call
        cdef hr_status status
        cdef Request request
        cdef void *inp = source.ptr
        cdef void *out = target.ptr
        cdef hr_dtype dtype = <hr_dtype> key.dtype if key.dtype >= 0 else HR_UINT8
        cdef double seconds = self.deadline_seconds(timeout)
        cdef int urgency = self.priority_of(priority)
        cdef uint32_t openable = self.openable(key)
        cdef uint64_t closable = self.closable(key)
        cdef bint asks = closable and not self.shut & closable
        cdef uint64_t sliceable = self.sliceable(key)
        cdef Program program
        if asks or self.opened & openable:
            key.flags |= KEY_OPENED
        if self.plain & sliceable or self.copied(key, inp):
            key.flags |= KEY_SLICED
        program = self.lookup(key, counts)
        self.copies |= program.sliceable and self.size > 2
        self.check()  # another thread may have closed it while this call was planned
        if program.in_bytes > source.nbytes or program.out_bytes > target.nbytes:
            raise ValueError(f"{program.text} wants buffers of {program.in_bytes} and {program.out_bytes} bytes; "
                             f"they have {source.nbytes} and {target.nbytes}")
        call.operation = NAMES[key.collective]
        call.sequence = self.sequence
        call.seconds = seconds
        call.deadline = 0
        call.peer = -1
        call.anonymous = False
        call.program = <PyObject *> program
        if async_op:
            request = Request()
            request.value = value
            span_move(&request.source, source)
            span_move(&request.target, target)
            request.prepare(self, &call, urgency)
            self.remember(program)
            status = hr_run(self.handle, program.handle, inp, out, dtype, <hr_redop> key.op, program.signature,
                            &request.req)
            if status == HR_OK:
                self.opened &= ~openable
                self.plain &= ~sliceable
                self.asked(closable)
            request.launched(status)
            return request
        req.flags = HR_REQ_WOULD if (openable or asks) and (key.flags & KEY_IN_PLACE or not program.out_bytes) else 0
        if sliceable and program.sliceable:
            req.flags = HR_REQ_WOULD | HR_REQ_PLAIN
        req.user = NULL
        req.priority = urgency
        self.remember(program)
        status = hr_run(self.handle, program.handle, inp, out, dtype, <hr_redop> key.op, program.signature, &req)
        if status != HR_OK:
            self.fail_post(status, &call)
        self.opened &= ~openable
        self.plain &= ~sliceable
        self.asked(closable)
        try:
            self.finish(&req, &call)
        finally:  # whatever is raised: the peer goes by what it was told
            if req.flags & HR_REQ_WOULD and req.flags & HR_REQ_HEARD and req.done and req.status == HR_OK:
                self.opened |= openable
                self.plain |= sliceable
                self.shut &= ~closable
        return value

    cdef tuple check_counts(self, object counts, str name, Span *span):
        """One count per rank, of elements as the buffer has them."""
        try:
            found = tuple([_index(count) for count in counts])
        except TypeError:
            raise TypeError(f"{name}={counts!r}: a sequence of {self.size} integers is wanted, one per rank") from None
        if len(found) != self.size:
            raise ValueError(f"{name} has {len(found)} entries, the communicator {self.size} ranks")
        if min(found) < 0:
            raise ValueError(f"{name}={list(found)}: counts are 0 or more")
        if sum(found) * max(<Py_ssize_t> span.itemsize, 1) > PY_SSIZE_T_MAX:
            raise ValueError(f"{name}={list(found)}: more elements than memory can hold")
        return found

    cdef size_t share(self, Span *span, str what) except? <size_t> -1:
        """Elements per rank of a buffer that all ranks share evenly."""
        if span.count % self.size:
            raise ValueError(f"{what} has {span.count} elements, not a multiple of {self.size} ranks: pass counts=")
        return span.count // self.size

    cdef int open_out(self, object x, Span *source, object out, Span *target, size_t count) except -1:
        """Opens out, which takes so many elements of the type of x."""
        span_open_typed(out, True, target)
        if target.dtype != source.dtype or target.itemsize != source.itemsize:
            raise TypeError(f"out holds {dtype_name(target.dtype, target.itemsize)}, x "
                            f"{dtype_name(source.dtype, source.itemsize)}: they must be alike")
        if target.count != count:
            raise ValueError(f"out has {target.count} elements, {count} are wanted")
        return 0

    # How buffers are shared out and joined.

    cdef tuple shares(self, Span *span, object counts, str what):
        """Of a buffer that is shared out: (elements of this rank's share, elements before it, counts)."""
        if counts is None:
            share = self.share(span, what)
            return share, share * self.rank, None
        counts = self.check_counts(counts, "counts", span)
        if sum(counts) != span.count:
            raise ValueError(f"{what} has {span.count} elements, counts add up to {sum(counts)}")
        return counts[self.rank], sum(counts[:self.rank]), counts

    cdef tuple joined(self, Span *span, object counts):
        """Of x when all are joined: (elements before this rank's, elements in all, counts)."""
        if counts is None:
            return span.count * <size_t> self.rank, span.count * <size_t> self.size, None
        counts = self.check_counts(counts, "counts", span)
        if counts[self.rank] != span.count:
            raise ValueError(f"x has {span.count} elements, counts[{self.rank}] is {counts[self.rank]}")
        return sum(counts[:self.rank]), sum(counts), counts

    cdef tuple joined_shape(self, object x, Span *span, size_t total, object counts):
        shape = shape_of(x, span)
        return (total,) if counts is not None or not shape else (shape[0] * self.size, *shape[1:])

    cdef tuple cut_shape(self, object x, Span *span, size_t share, object counts):
        shape = shape_of(x, span)
        if counts is not None or not shape or shape[0] % self.size:
            return (share,)
        return (shape[0] // self.size, *shape[1:])


cdef inline void span_move(Span *target, Span *source) noexcept:
    """The target holds the memory from now on."""
    target[0] = source[0]
    source.view.obj = NULL
    source.keep = NULL

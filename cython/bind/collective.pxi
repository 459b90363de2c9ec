# collective.pxi - collectives: what the arguments mean in memory, which program that is, and its run.
#
# Every method does the same: open the buffers, say in a Key which program is wanted, and start() it. A program is planned
# once (in Python, `_plan`) and then found again without making an object. Element counts, never bytes, are what users and
# planner talk about.
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


cdef class CommunicatorBase(Messenger):
    """Collectives; with point to point below, everything of a communicator that must be fast.

    All ranks of a communicator call the same collectives in the same order. A call whose buffers, counts, types or ranks
    are wrong raises ValueError or TypeError before anything is sent.
    """

    cdef dict programs
    cdef PyObject *slots[SLOTS]  # borrowed from programs
    cdef bint rank_order         # the default of deterministic=
    cdef Program current         # of the collective that was started last

    def __cinit__(self):
        self.programs = {}

    @property
    def deterministic(self):
        """Default of ``deterministic=``: one association, rank order, whatever the algorithm would have been."""
        return self.rank_order

    @deterministic.setter
    def deterministic(self, value):
        self.rank_order = bool(value)

    def _plan(self, collective, counts, itemsize, dtype, op, root, in_place, deterministic):
        """Makes the :class:`Program` for a call; a subclass in Python does."""
        raise NotImplementedError

    def _current(self):
        """``(sequence, signature, text)`` of the collective that was started last; None before the first."""
        program = self.current
        return None if program is None else (self.sequence - 1, program.signature, program.text)

    # -- the parts that all collectives share ---------------------------------------------------------------------------

    cdef inline int set_key(self, Key *key, int collective, Span *span, size_t count) except -1:
        key.collective = collective
        key.count = count
        key.itemsize = <uint32_t> span.itemsize
        key.dtype = span.dtype
        key.op = 0
        key.flags = 0
        key.root = 0
        return 0

    cdef inline int set_op(self, Key *key, object op, object deterministic) except -1:
        if key.dtype < 0:
            raise TypeError(f"elements of this type ({key.itemsize} bytes) cannot be reduced: {', '.join(DTYPE_CODE)} can")
        key.op = check_op(op, key.dtype)
        if self.rank_order if deterministic is None else deterministic:
            key.flags |= KEY_DETERMINISTIC
        return 0

    cdef inline int set_root(self, Key *key, object root) except -1:
        key.root = self.rank_of("root", root, False)
        return 0

    cdef int set_alias(self, Key *key, Span *source, Span *target, size_t source_shift, size_t target_shift) except -1:
        """In place when x and out begin at the same byte, as shifted; any other overlap is refused."""
        if not overlap(source, target):
            return 0
        if <char *> source.ptr + source_shift != <char *> target.ptr + target_shift:
            raise ValueError("x and out overlap: pass separate buffers, or the very block that the other one takes the place of")
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
        name = (key.collective, counts, key.itemsize, key.dtype, key.op, key.root, key.flags)
        program = self.programs.get(name)
        if program is None:
            program = self._plan(
                text_of(NAMES[key.collective]), counts, max(key.itemsize, 1), dtype_name(key.dtype, key.itemsize),
                text_of(hr_redop_name(<hr_redop> key.op)) if self.reduces(key) else None,
                key.root if key.collective in (REDUCE, BROADCAST, GATHER, SCATTER) else None,
                bool(key.flags & KEY_IN_PLACE), bool(key.flags & KEY_DETERMINISTIC))
            program.key = key[0]
            if len(self.programs) >= 4096:
                # Bounded for callers whose sizes never repeat. Programs that run are held by their calls.
                memset(self.slots, 0, sizeof(self.slots))
                self.programs.clear()
            self.programs[name] = program
        if isinstance(counts, int):
            self.slots[key_slot(key)] = <PyObject *> program
        return program

    cdef inline bint reduces(self, Key *key) noexcept:
        return key.collective == ALLREDUCE or key.collective == REDUCE or key.collective == REDUCE_SCATTER

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
        cdef Program program = self.lookup(key, counts)
        if program.in_bytes > source.nbytes or program.out_bytes > target.nbytes:
            raise ValueError(f"{program.text} wants buffers of {program.in_bytes} and {program.out_bytes} bytes; they have "
                             f"{source.nbytes} and {target.nbytes}")
        self.current = program
        call.operation = NAMES[key.collective]
        call.sequence = self.sequence
        call.seconds = seconds
        call.peer = -1
        call.anonymous = False
        call.program = <PyObject *> program
        if async_op:
            request = Request()
            request.value = value
            span_move(&request.source, source)
            span_move(&request.target, target)
            request.prepare(self, &call, urgency)
            self.sequence += 1
            request.launched(hr_run(self.handle, program.handle, inp, out, dtype, <hr_redop> key.op, program.signature,
                                    &request.req))
            return request
        req.flags = 0
        req.user = NULL
        req.priority = urgency
        self.sequence += 1
        status = hr_run(self.handle, program.handle, inp, out, dtype, <hr_redop> key.op, program.signature, &req)
        if status != HR_OK:
            self.fail_post(status, &call)
        self.finish(&req, &call)
        return value

    cdef tuple check_counts(self, object counts, str name):
        """One count per rank."""
        try:
            found = tuple([_index(count) for count in counts])
        except TypeError:
            raise TypeError(f"{name}={counts!r}: a sequence of {self.size} integers is wanted, one per rank") from None
        if len(found) != self.size:
            raise ValueError(f"{name} has {len(found)} entries, the communicator {self.size} ranks")
        if min(found) < 0:
            raise ValueError(f"{name}={list(found)}: counts are 0 or more")
        return found

    cdef size_t share(self, Span *span, str what) except? <size_t> -1:
        """Elements per rank of a buffer that all ranks share evenly."""
        if span.count % self.size:
            raise ValueError(f"{what} has {span.count} elements, which {self.size} ranks cannot share evenly: pass counts=")
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

    # -- reductions ---------------------------------------------------------------------------------------------------------

    def allreduce(self, x, op="sum", *, out=None, async_op=False, priority=None, timeout=None, deterministic=None):
        """Combines x of all ranks, element by element; every rank gets the result.

        Parameters
        ----------
        x : array or buffer
            C-contiguous, the same count and type on all ranks: int8 to int64, uint8 to uint64, float16, bfloat16,
            float32, float64.
        op : str
            ``sum prod min max`` for all types, ``avg`` for floating ones, ``band bor bxor`` for integers.
        out : array or buffer, optional
            Where the result goes, of the count and type of x. None: x itself.
        async_op : bool
            Returns a :class:`Request` at once.
        priority : int, optional
            0 (most urgent) to 7.
        timeout : float, optional
            Seconds; passing it breaks the communicator.
        deterministic : bool, optional
            One association: rank order, left to right, a 32-bit accumulator for 16-bit types. All ranks say the same.

        Returns
        -------
        array or Request
            out, or x.

        Raises
        ------
        TimeoutError, PeerError, CollectiveMismatchError
            The communicator is broken; the result's contents are undefined.

        Notes
        -----
        2 (n - 1) / n of the bytes leave each rank for large x. On one host with x from :func:`hrdma.empty` peers' memory
        is reduced in place.
        """
        cdef Span source, target
        cdef Key key
        self.check()
        span_none(&source)
        span_none(&target)
        try:
            span_open_typed(x, out is None, &source)
            self.set_key(&key, ALLREDUCE, &source, source.count)
            self.set_op(&key, op, deterministic)
            if out is None:
                key.flags |= KEY_IN_PLACE
                target.ptr = source.ptr
                target.nbytes = source.nbytes
                out = x
            else:
                self.open_out(x, &source, out, &target, source.count)
                self.set_alias(&key, &source, &target, 0, 0)
            return self.start(&key, None, &source, &target, out, timeout, priority, async_op)
        finally:
            span_close(&source)
            span_close(&target)

    def reduce(self, x, root=0, op="sum", *, out=None, async_op=False, priority=None, timeout=None, deterministic=None):
        """Combines x of all ranks; the root gets the result.

        Parameters
        ----------
        root : int
        out : array or buffer, optional
            On the root: where the result goes; None: x itself. Not looked at elsewhere, where x is only read.
        x, op, async_op, priority, timeout, deterministic
            As in :meth:`allreduce`.

        Returns
        -------
        array, None or Request
            out or x on the root, None on the others.
        """
        cdef Span source, target
        cdef Key key
        self.check()
        span_none(&source)
        span_none(&target)
        try:
            at_root = self.rank_of("root", root, False) == self.rank
            span_open_typed(x, at_root and out is None, &source)
            self.set_key(&key, REDUCE, &source, source.count)
            self.set_root(&key, root)
            self.set_op(&key, op, deterministic)
            if not at_root:
                out = None
            elif out is None:
                key.flags |= KEY_IN_PLACE
                target.ptr = source.ptr
                target.nbytes = source.nbytes
                out = x
            else:
                self.open_out(x, &source, out, &target, source.count)
                self.set_alias(&key, &source, &target, 0, 0)
            return self.start(&key, None, &source, &target, out, timeout, priority, async_op)
        finally:
            span_close(&source)
            span_close(&target)

    def reduce_scatter(self, x, op="sum", *, out=None, counts=None, async_op=False, priority=None, timeout=None,
                       deterministic=None):
        """Combines x of all ranks; every rank gets its share of the result.

        Parameters
        ----------
        x : array or buffer
            The shares of rank 0, 1, ... one behind the other.
        out : array or buffer, optional
            This rank's share; may be that very part of x. None: a new array, cut along the first axis of x where that
            is a multiple of the ranks, else one-dimensional.
        counts : sequence of int, optional
            Elements of each share, the same on all ranks. None: all alike.
        op, async_op, priority, timeout, deterministic
            As in :meth:`allreduce`.

        Returns
        -------
        array or Request
        """
        cdef Span source, target
        cdef Key key
        cdef size_t share, before
        self.check()
        span_none(&source)
        span_none(&target)
        try:
            span_open_typed(x, False, &source)
            share, before, counts = self.shares(&source, counts, "x")
            self.set_key(&key, REDUCE_SCATTER, &source, share)
            self.set_op(&key, op, deterministic)
            if out is None:
                out = empty(self.cut_shape(x, &source, share, counts), array_dtype(x, &source))
            self.open_out(x, &source, out, &target, share)
            self.set_alias(&key, &source, &target, before * source.itemsize, 0)
            return self.start(&key, counts, &source, &target, out, timeout, priority, async_op)
        finally:
            span_close(&source)
            span_close(&target)

    # -- movement -----------------------------------------------------------------------------------------------------------

    def broadcast(self, x, root=0, *, async_op=False, priority=None, timeout=None):
        """Gives every rank the root's x.

        Parameters
        ----------
        x : array or buffer
            C-contiguous, the same count and type on all ranks; any type of fixed size. Written on all ranks but the root.
        root : int
        async_op, priority, timeout
            As in :meth:`allreduce`.

        Returns
        -------
        array or Request
            x.
        """
        cdef Span source, target
        cdef Key key
        self.check()
        span_none(&source)
        span_none(&target)
        try:
            at_root = self.rank_of("root", root, False) == self.rank
            span_open_typed(x, not at_root, &source)
            self.set_key(&key, BROADCAST, &source, source.count)
            self.set_root(&key, root)
            key.flags = KEY_IN_PLACE
            target.ptr = source.ptr
            target.nbytes = source.nbytes
            return self.start(&key, None, &source, &target, x, timeout, priority, async_op)
        finally:
            span_close(&source)
            span_close(&target)

    def allgather(self, x, out=None, *, counts=None, async_op=False, priority=None, timeout=None):
        """Gives every rank the x of all, one behind the other.

        Parameters
        ----------
        x : array or buffer
            C-contiguous, any type of fixed size, the same on all ranks.
        out : array or buffer, optional
            Takes the elements of all ranks; x may be this rank's very part of it. None: a new array, joined along the
            first axis of x (one-dimensional with counts).
        counts : sequence of int, optional
            Elements that each rank brings, the same on all ranks. None: all alike.
        async_op, priority, timeout
            As in :meth:`allreduce`.

        Returns
        -------
        array or Request
        """
        cdef Span source, target
        cdef Key key
        cdef size_t before, total
        self.check()
        span_none(&source)
        span_none(&target)
        try:
            span_open_typed(x, False, &source)
            before, total, counts = self.joined(&source, counts)
            self.set_key(&key, ALLGATHER, &source, source.count)
            if out is None:
                out = empty(self.joined_shape(x, &source, total, counts), array_dtype(x, &source))
            self.open_out(x, &source, out, &target, total)
            self.set_alias(&key, &source, &target, 0, before * source.itemsize)
            return self.start(&key, counts, &source, &target, out, timeout, priority, async_op)
        finally:
            span_close(&source)
            span_close(&target)

    def gather(self, x, root=0, *, out=None, counts=None, async_op=False, priority=None, timeout=None):
        """Gives the root the x of all ranks, one behind the other.

        Parameters
        ----------
        root : int
        out : array or buffer, optional
            On the root, as in :meth:`allgather`. Not looked at elsewhere.
        x, counts, async_op, priority, timeout
            As in :meth:`allgather`.

        Returns
        -------
        array, None or Request
            The array on the root, None on the others.
        """
        cdef Span source, target
        cdef Key key
        cdef size_t before, total
        self.check()
        span_none(&source)
        span_none(&target)
        try:
            span_open_typed(x, False, &source)
            before, total, counts = self.joined(&source, counts)
            self.set_key(&key, GATHER, &source, source.count)
            self.set_root(&key, root)
            if key.root != self.rank:
                out = None
            else:
                if out is None:
                    out = empty(self.joined_shape(x, &source, total, counts), array_dtype(x, &source))
                self.open_out(x, &source, out, &target, total)
                self.set_alias(&key, &source, &target, 0, before * source.itemsize)
            return self.start(&key, counts, &source, &target, out, timeout, priority, async_op)
        finally:
            span_close(&source)
            span_close(&target)

    def scatter(self, x=None, root=0, *, out=None, counts=None, async_op=False, priority=None, timeout=None):
        """Gives every rank its share of the root's x.

        Parameters
        ----------
        x : array or buffer
            On the root: the shares of rank 0, 1, ... one behind the other. Not looked at elsewhere.
        root : int
        out : array or buffer
            This rank's share. The others than the root must pass it, for they know neither type nor count; on the root it
            may be that very part of x, and None makes a new array as in :meth:`reduce_scatter`.
        counts : sequence of int, optional
            Elements of each share, the same on all ranks. None: all alike.
        async_op, priority, timeout
            As in :meth:`allreduce`.

        Returns
        -------
        array or Request
            out.
        """
        cdef Span source, target
        cdef Key key
        cdef size_t share, before
        self.check()
        span_none(&source)
        span_none(&target)
        try:
            if self.rank_of("root", root, False) != self.rank:
                if out is None:
                    raise ValueError(f"scatter needs out= on rank {self.rank}: only the root, rank {root}, knows type and count")
                span_open_typed(out, True, &target)
                share = target.count
                if counts is not None:
                    counts = self.check_counts(counts, "counts")
                    if counts[self.rank] != share:
                        raise ValueError(f"out has {share} elements, counts[{self.rank}] is {counts[self.rank]}")
                self.set_key(&key, SCATTER, &target, share)
            else:
                if x is None:
                    raise ValueError(f"scatter needs x on its root, rank {root}")
                span_open_typed(x, False, &source)
                share, before, counts = self.shares(&source, counts, "x")
                self.set_key(&key, SCATTER, &source, share)
                if out is None:
                    out = empty(self.cut_shape(x, &source, share, counts), array_dtype(x, &source))
                self.open_out(x, &source, out, &target, share)
                self.set_alias(&key, &source, &target, before * source.itemsize, 0)
            self.set_root(&key, root)
            return self.start(&key, counts, &source, &target, out, timeout, priority, async_op)
        finally:
            span_close(&source)
            span_close(&target)

    def alltoall(self, x, out=None, *, counts=None, async_op=False, priority=None, timeout=None):
        """Sends a part of x to every rank and receives one from every rank.

        Parameters
        ----------
        x : array or buffer
            The parts for rank 0, 1, ... one behind the other; any type of fixed size, the same on all ranks.
        out : array or buffer, optional
            The parts from rank 0, 1, ...; may be x itself where both have the same count. None: a new array, of the shape
            of x (one-dimensional with counts).
        counts : (sequence of int, sequence of int), optional
            Elements to send to and to receive from each rank. None: all alike.
        async_op, priority, timeout
            As in :meth:`allreduce`.

        Returns
        -------
        array or Request
        """
        cdef Span source, target
        cdef Key key
        cdef size_t total, share = 0
        self.check()
        span_none(&source)
        span_none(&target)
        try:
            span_open_typed(x, False, &source)
            total = source.count
            if counts is None:
                share = self.share(&source, "x")
            else:
                try:
                    send, recv = counts
                except (TypeError, ValueError):
                    raise TypeError("counts of alltoall are a pair: (to send to each rank, to receive from each rank)") from None
                counts = (self.check_counts(send, "send counts"), self.check_counts(recv, "receive counts"))
                if sum(counts[0]) != source.count:
                    raise ValueError(f"x has {source.count} elements, the send counts add up to {sum(counts[0])}")
                if counts[0][self.rank] != counts[1][self.rank]:
                    raise ValueError(f"rank {self.rank} sends itself {counts[0][self.rank]} elements but expects "
                                     f"{counts[1][self.rank]}")
                total = sum(counts[1])
            self.set_key(&key, ALLTOALL, &source, share)
            if out is None:
                shape = shape_of(x, &source) if counts is None else (total,)
                out = empty(shape, array_dtype(x, &source))
            self.open_out(x, &source, out, &target, total)
            self.set_alias(&key, &source, &target, 0, 0)
            return self.start(&key, counts, &source, &target, out, timeout, priority, async_op)
        finally:
            span_close(&source)
            span_close(&target)

    def barrier(self, *, async_op=False, priority=None, timeout=None):
        """Returns when every rank has called it."""
        cdef Span source, target
        cdef Key key
        self.check()
        span_none(&source)
        span_none(&target)
        source.itemsize = 1
        self.set_key(&key, BARRIER, &source, 0)
        return self.start(&key, None, &source, &target, None, timeout, priority, async_op)

    # -- shapes and shares ----------------------------------------------------------------------------------------------------

    cdef tuple shares(self, Span *span, object counts, str what):
        """Of a buffer that is shared out: (elements of this rank's share, elements before it, counts)."""
        if counts is None:
            share = self.share(span, what)
            return share, share * self.rank, None
        counts = self.check_counts(counts, "counts")
        if sum(counts) != span.count:
            raise ValueError(f"{what} has {span.count} elements, counts add up to {sum(counts)}")
        return counts[self.rank], sum(counts[:self.rank]), counts

    cdef tuple joined(self, Span *span, object counts):
        """Of x when all are joined: (elements before this rank's, elements in all, counts)."""
        if counts is None:
            return span.count * <size_t> self.rank, span.count * <size_t> self.size, None
        counts = self.check_counts(counts, "counts")
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

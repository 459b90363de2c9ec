# collective.pxi - the collectives: what their arguments mean in memory.
#
# Every method does the same: open the buffers, say in a Key which program is wanted, and start() it.

cdef class CommunicatorBase(Planned):
    """Collectives; with point to point below, everything of a communicator that must be fast.

    All ranks of a communicator call the same collectives in the same order. A call whose buffers, counts, types or
    ranks are wrong raises ValueError or TypeError before anything is sent.
    """

    # Reductions.

    def allreduce(self, x, op="sum", *, out=None, async_op=False, priority=None, timeout=None, deterministic=None,
                  schedule=None):
        """Combines x of all ranks, element by element; every rank gets the result.

        Parameters
        ----------
        x : array or buffer
            C-contiguous, the same count and type on all ranks: int8 to int64, uint8 to uint64, float16, bfloat16,
            float32, float64.
        op : str
            ``sum prod min max avg`` for all types, ``band bor bxor`` for integers. Sums of integers wrap, and ``avg``
            divides them by the number of ranks, rounded toward zero, as NCCL does.
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
        schedule : hrdma.topo.schedule.Schedule, str or path, optional
            Runs this one in place of what would be planned: a complete schedule for as many ranks, or the file of a
            plan (``hrdma topo plan -o``), of a schedule (JSON) or of an MSCCL program (XML). A file is read when it is
            first used on a communicator, and known by its path then.

        Returns
        -------
        array or Request
            out, or x.

        Raises
        ------
        TimeoutError, PeerError, CollectiveMismatchError
            The communicator is broken; the result's contents are undefined.
        ScheduleError
            The schedule is wrong, with rank and chunk, or is for another call, or is another one on another rank, which
            the message names. Nothing was moved, and the communicator goes on: where the schedule was new to it on all
            ranks. Where some of them knew theirs already the calls differ: CollectiveMismatchError.

        Notes
        -----
        2 (n - 1) / n of the bytes leave each rank for large x. On one host with x from :func:`hrdma.empty` peers'
        memory is reduced in place, and without `out` the result is written back to it; of 4 to 64 KiB on two ranks from
        the second call on of such a length that waits on both. Other memory is copied to where
        that can be done if ranks share cores, and the result back: from 16 KiB to below 4 MiB in place; on 3 to 15
        ranks all of 32 KiB to below 1.5 MiB, from the communicator's second call on, and in slices up to 256 MiB, from
        the second call on of such a length that waits on all of them: ``runs_aside`` of :meth:`stats`.

        A schedule is proved and compared with that of the other ranks (an allgather of 256 bytes, which blocks and has
        a deadline of its own) when it is new to the communicator; later calls find its program. A path costs them
        nothing more; a Schedule is known by its digest, which each object computes once, linear in its transfers.
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
            self.set_schedule(&key, schedule, timeout)
            return self.start(&key, None, &source, &target, out, timeout, priority, async_op)
        finally:
            span_close(&source)
            span_close(&target)

    def reduce(self, x, root=0, op="sum", *, out=None, async_op=False, priority=None, timeout=None, deterministic=None,
               schedule=None):
        """Combines x of all ranks; the root gets the result.

        Parameters
        ----------
        root : int
        out : array or buffer, optional
            On the root: where the result goes; None: x itself. Not looked at elsewhere, where x is only read.
        x, op, async_op, priority, timeout, deterministic, schedule
            As in :meth:`allreduce`.

        Returns
        -------
        array, None or Request
            out or x on the root, None on the others.

        Notes
        -----
        On one host, from 128 KiB on, every rank combines a share of x, and without `out` on the root writes it to where
        the root's x lies; of two ranks where both have x from :func:`hrdma.empty` and wait for the call. Where one of
        them has not, that is found out anew in one call of 65. On 3 to 15 ranks that share cores other memory of 128
        KiB to 24 MiB is copied, in slices, to where peers can map it, as in :meth:`allreduce`.
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
            self.set_schedule(&key, schedule, timeout)
            return self.start(&key, None, &source, &target, out, timeout, priority, async_op)
        finally:
            span_close(&source)
            span_close(&target)

    def reduce_scatter(self, x, op="sum", *, out=None, counts=None, async_op=False, priority=None, timeout=None,
                       deterministic=None, schedule=None):
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
        op, async_op, priority, timeout, deterministic, schedule
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
            self.set_schedule(&key, schedule, timeout)
            return self.start(&key, counts, &source, &target, out, timeout, priority, async_op)
        finally:
            span_close(&source)
            span_close(&target)

    # Movement.

    def broadcast(self, x, root=0, *, async_op=False, priority=None, timeout=None, schedule=None):
        """Gives every rank the root's x.

        Parameters
        ----------
        x : array or buffer
            C-contiguous, the same count and type on all ranks; any type of fixed size. Written on all ranks but the
            root.
        root : int
        async_op, priority, timeout, schedule
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
            self.set_schedule(&key, schedule, timeout)
            return self.start(&key, None, &source, &target, x, timeout, priority, async_op)
        finally:
            span_close(&source)
            span_close(&target)

    def allgather(self, x, out=None, *, counts=None, async_op=False, priority=None, timeout=None, schedule=None):
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
        async_op, priority, timeout, schedule
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
            self.set_schedule(&key, schedule, timeout)
            return self.start(&key, counts, &source, &target, out, timeout, priority, async_op)
        finally:
            span_close(&source)
            span_close(&target)

    def gather(self, x, root=0, *, out=None, counts=None, async_op=False, priority=None, timeout=None, schedule=None):
        """Gives the root the x of all ranks, one behind the other.

        Parameters
        ----------
        root : int
        out : array or buffer, optional
            On the root, as in :meth:`allgather`. Not looked at elsewhere.
        x, counts, async_op, priority, timeout, schedule
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
            self.set_schedule(&key, schedule, timeout)
            return self.start(&key, counts, &source, &target, out, timeout, priority, async_op)
        finally:
            span_close(&source)
            span_close(&target)

    def scatter(self, x=None, root=0, *, out=None, counts=None, async_op=False, priority=None, timeout=None,
                schedule=None):
        """Gives every rank its share of the root's x.

        Parameters
        ----------
        x : array or buffer
            On the root: the shares of rank 0, 1, ... one behind the other. Not looked at elsewhere.
        root : int
        out : array or buffer
            This rank's share. The others than the root must pass it, for they know neither type nor count; on the root
            it may be that very part of x, and None makes a new array as in :meth:`reduce_scatter`.
        counts : sequence of int, optional
            Elements of each share, the same on all ranks. None: all alike.
        async_op, priority, timeout, schedule
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
                    raise ValueError(f"scatter needs out= on rank {self.rank}: only rank {root} knows type and count")
                span_open_typed(out, True, &target)
                share = target.count
                if counts is not None:
                    counts = self.check_counts(counts, "counts", &target)
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
            self.set_schedule(&key, schedule, timeout)
            return self.start(&key, counts, &source, &target, out, timeout, priority, async_op)
        finally:
            span_close(&source)
            span_close(&target)

    def alltoall(self, x, out=None, *, counts=None, async_op=False, priority=None, timeout=None, schedule=None):
        """Sends a part of x to every rank and receives one from every rank.

        Parameters
        ----------
        x : array or buffer
            The parts for rank 0, 1, ... one behind the other; any type of fixed size, the same on all ranks.
        out : array or buffer, optional
            The parts from rank 0, 1, ...; may be x itself where both have the same count. None: a new array, of the
            shape of x (one-dimensional with counts).
        counts : (sequence of int, sequence of int), optional
            Elements to send to and to receive from each rank. None: all alike.
        async_op, priority, timeout, schedule
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
                    raise TypeError("counts of alltoall are a pair: (to send to each, to receive from each)") from None
                counts = (self.check_counts(send, "send counts", &source),
                          self.check_counts(recv, "receive counts", &source))
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
            self.set_schedule(&key, schedule, timeout)
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

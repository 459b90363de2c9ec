# message.pxi - point to point: send, recv, isend, irecv, sendrecv.

cdef int64_t TAG_MAX = (1 << 31) - 1


cdef inline uint32_t tag_of(object tag) except? 0xFFFFFFFF:
    cdef long long value
    if not isinstance(tag, int):
        raise TypeError(f"tag {tag!r} is not an integer")
    value = whole(tag)
    if not 0 <= value <= TAG_MAX:
        raise ValueError(f"tag {tag} is out of range: 0 to 2**31 - 1 are there")
    return <uint32_t> value


cdef class Messenger(Channel):
    """Point to point on a communicator. The first part of CommunicatorBase."""

    cdef object last_status  # of the last receive; given again when equal, so a stream of messages makes no objects
    cdef int last_source
    cdef uint64_t last_nbytes

    cdef inline object status_of(self, hr_request *req):
        if self.last_status is None or self.last_source != req.peer or self.last_nbytes != req.nbytes:
            self.last_source = req.peer
            self.last_nbytes = req.nbytes
            self.last_status = Status(req.peer, req.nbytes)
        return self.last_status

    cdef int refuse_rank(self, str name, object rank) except -1:
        raise ValueError(f"{name} {rank} is out of range: this communicator has ranks 0 to {self.size - 1}")

    cdef inline int rank_of(self, str name, object rank, bint any_source) except? -1:
        cdef long long value
        if not isinstance(rank, int):
            rank = _index(rank)
        value = whole(rank)
        if not 0 <= value < self.size and not (any_source and value == HR_ANY_SOURCE):
            self.refuse_rank(name, rank)
        return <int> value

    cdef inline void describe(self, Call *call, const char *operation, double seconds, int peer) noexcept:
        call.operation = operation
        call.sequence = self.messages
        call.seconds = seconds
        call.deadline = 0
        call.peer = peer
        call.anonymous = peer == HR_ANY_SOURCE
        call.program = NULL
        self.messages += 1

    def send(self, x, dst, tag=0, *, timeout=None, priority=None):
        """Sends the memory of x and returns when it may be changed again.

        Parameters
        ----------
        x : array or buffer
            C-contiguous, any element type but Python objects; its bytes are sent.
        dst : int
            Rank of the receiver; not one's own (``isend`` can do that).
        tag : int
            0 to 2**31 - 1. Messages of one sender with one tag are received in the order in which they were sent.
        timeout : float, optional
            Seconds; None: the communicator's.
        priority : int, optional
            0 (most urgent) to 7; None: the communicator's.

        Raises
        ------
        ValueError, TypeError
            Before anything is sent.
        TimeoutError
            Nobody received it in time. It is withdrawn; the communicator goes on.
        PeerError
            The receiver is gone; the communicator is broken.

        Notes
        -----
        Blocks until the message was copied into the transport (small) or read by the receiver (large). At most one
        copy on the sender's side, none where the memory is registered (:func:`hrdma.empty`) or can be read in place.
        """
        cdef hr_request req
        cdef Span span
        cdef Call call
        cdef hr_status status
        self.check()
        cdef int peer = self.rank_of("dst", dst, False)
        cdef uint32_t label = tag_of(tag)
        if peer == self.rank:
            raise ValueError(f"rank {peer} sends to itself: a blocking send could never be received, use isend")
        self.describe(&call, b"send", self.deadline_seconds(timeout), peer)
        req.flags = 0
        req.user = NULL
        req.priority = self.priority_of(priority)
        span_open(x, False, &span)
        try:
            status = hr_isend(self.handle, span.ptr, span.nbytes, peer, label, &req)
            if status != HR_OK:
                self.fail_post(status, &call)
            self.finish(&req, &call)
        finally:
            span_close(&span)

    def recv(self, x, src=HR_ANY_SOURCE, tag=0, *, timeout=None, priority=None):
        """Receives one message into the memory of x.

        Parameters
        ----------
        x : writable array or buffer
            C-contiguous, at least as large as the message.
        src : int
            Rank of the sender, or :data:`hrdma.ANY_SOURCE` (the default): whichever message comes first.
        tag, timeout, priority
            As in :meth:`send`.

        Returns
        -------
        Status
            ``source`` and ``nbytes`` of the message.

        Raises
        ------
        ValueError, TypeError
            Before anything is posted.
        TimeoutError
            Nothing came in time. The receive is withdrawn and x will not be changed; the communicator goes on.
        RequestError
            The message is larger than x; it is lost.
        PeerError
            The sender is gone; the communicator is broken.
        """
        cdef hr_request req
        cdef Span span
        cdef Call call
        cdef hr_status status
        self.check()
        cdef int peer = self.rank_of("src", src, True)
        cdef uint32_t label = tag_of(tag)
        self.describe(&call, b"recv", self.deadline_seconds(timeout), peer)
        req.flags = 0
        req.user = NULL
        req.priority = self.priority_of(priority)
        span_open(x, True, &span)
        try:
            status = hr_irecv(self.handle, span.ptr, span.nbytes, peer, label, &req)
            if status != HR_OK:
                self.fail_post(status, &call)
            self.finish(&req, &call)
            return self.status_of(&req)
        finally:
            span_close(&span)

    def isend(self, x, dst, tag=0, *, timeout=None, priority=None):
        """Starts a :meth:`send`, to oneself too, and returns a :class:`Request`."""
        cdef Call call
        self.check()
        cdef int peer = self.rank_of("dst", dst, False)
        cdef uint32_t label = tag_of(tag)
        cdef int urgency = self.priority_of(priority)
        self.describe(&call, b"isend", self.deadline_seconds(timeout), peer)
        request = Request()
        span_open(x, False, &request.source)
        request.prepare(self, &call, urgency)
        request.launched(hr_isend(self.handle, request.source.ptr, request.source.nbytes, peer, label, &request.req))
        return request

    def irecv(self, x, src=HR_ANY_SOURCE, tag=0, *, timeout=None, priority=None):
        """Starts a :meth:`recv` and returns a :class:`Request`."""
        cdef Call call
        self.check()
        cdef int peer = self.rank_of("src", src, True)
        cdef uint32_t label = tag_of(tag)
        cdef int urgency = self.priority_of(priority)
        self.describe(&call, b"irecv", self.deadline_seconds(timeout), peer)
        request = Request()
        request.yields = YIELDS_STATUS
        span_open(x, True, &request.target)
        request.prepare(self, &call, urgency)
        request.launched(hr_irecv(self.handle, request.target.ptr, request.target.nbytes, peer, label, &request.req))
        return request

    def sendrecv(self, x, dst, out, src=HR_ANY_SOURCE, tag=0, *, recv_tag=None, timeout=None, priority=None):
        """Sends x and receives into out at the same time; the way to exchange without a deadlock.

        Parameters
        ----------
        x, out : arrays or buffers
            C-contiguous; they must not overlap.
        dst, src : int
            Ranks; both may be one's own.
        tag, recv_tag : int
            Of the message sent and of the one received; recv_tag None: the same.

        Returns
        -------
        Status
            Of the message received.
        """
        cdef hr_request sent, received
        cdef Span source, target
        cdef Call call
        cdef hr_status status
        self.check()
        cdef int to = self.rank_of("dst", dst, False), come = self.rank_of("src", src, True)
        cdef uint32_t label = tag_of(tag), label_in = label if recv_tag is None else tag_of(recv_tag)
        self.describe(&call, b"sendrecv", self.deadline_seconds(timeout), come)
        sent.flags = received.flags = 0
        sent.user = received.user = NULL
        sent.priority = received.priority = self.priority_of(priority)
        span_open(x, False, &source)
        try:
            span_open(out, True, &target)
            try:
                if overlap(&source, &target):
                    raise ValueError("x and out overlap: send from one buffer and receive into another")
                status = hr_irecv(self.handle, target.ptr, target.nbytes, come, label_in, &received)
                if status != HR_OK:
                    self.fail_post(status, &call)
                status = hr_isend(self.handle, source.ptr, source.nbytes, to, label, &sent)
                if status != HR_OK:
                    self.cancel(&received, HR_ERR_CANCELED)
                    call.peer = to
                    self.fail_post(status, &call)
                try:
                    call.peer = to
                    call.anonymous = False
                    self.finish(&sent, &call)
                except BaseException:
                    self.cancel(&received, HR_ERR_CANCELED)
                    raise
                call.peer = come
                call.anonymous = come == HR_ANY_SOURCE
                self.finish(&received, &call)
                return self.status_of(&received)
            finally:
                span_close(&target)
        finally:
            span_close(&source)


from operator import index as _index

# request.pxi - one asynchronous operation: waitable, awaitable, cancellable.
#
# The core's request lives inside the Python object, and the engine owns a reference to that object from the start of
# the operation until it was reaped from the engine's done list: dropping a Request that is on its way is harmless. The
# buffers are held just as long.


cdef enum:
    YIELDS_VALUE   # None, or the array that was given
    YIELDS_STATUS  # of a receive
    YIELDS_WORD    # of an atomic
    YIELDS_NOTE    # of a notification


cdef class Request:
    """An operation that was started with ``isend``, ``irecv`` or ``async_op=True``.

    ``await request``, ``request.wait()`` and ``request.result()`` give the result: the array of a collective, the
    :class:`~hrdma.types.Status` of a receive, the integer of an atomic or a notification, None for a send or a write.

    Notes
    -----
    Until it is done, the buffers belong to the operation: do not change what is sent, do not read what is received.
    Any thread may wait; progress is made whether or not anybody does.
    """

    cdef hr_request req
    cdef Span source
    cdef Span target
    cdef Channel channel
    cdef Program program
    cdef Call call
    cdef int64_t started
    cdef object value
    cdef list waiters   # of asyncio: (loop, future)
    cdef bint reaped
    cdef int yields     # what its result is made of
    cdef uint64_t word  # what an atomic found
    cdef object keep    # the remote memory of a one-sided operation

    def __cinit__(self):
        memset(&self.req, 0, sizeof(self.req))
        memset(&self.source, 0, sizeof(self.source))
        memset(&self.target, 0, sizeof(self.target))
        self.reaped = True

    def __dealloc__(self):
        self.release()

    def __repr__(self):
        state = "pending" if not self.req.done else "done" if self.req.status == HR_OK else "failed"
        return f"<Request {text_of(self.call.operation)} #{self.call.sequence} {state}>"

    cdef void release(self) noexcept:
        span_close(&self.source)
        span_close(&self.target)

    cdef int prepare(self, Channel channel, Call *call, int priority) except -1:
        self.channel = channel
        self.call = call[0]
        if call.program != NULL:
            self.program = <Program> call.program
        self.req.flags = HR_REQ_ASYNC
        self.req.priority = priority
        self.req.user = <void *> self
        self.started = hr_now()
        # The engine's reference, taken before the start: another thread may reap the request at once.
        self.reaped = False
        channel.engine.pending += 1
        Py_INCREF(self)
        return 0

    cdef int launched(self, hr_status status) except -1:
        """The core took it, or did not: then what it was given is given back."""
        if status == HR_OK:
            if self.channel.engine.pending > 16:
                self.channel.engine.reap()
            return 0
        self.channel.engine.pending -= 1
        self.reaped = True
        self.release()
        Py_XDECREF(<PyObject *> self)
        self.channel.fail_post(status, &self.call)
        return 0

    cdef int finished(self) except -1:
        """Reaped: the core will not touch it again."""
        self.reaped = True
        self.release()
        if self.waiters:
            waiters, self.waiters = self.waiters, None
            for loop, future in waiters:
                try:
                    loop.call_soon_threadsafe(_settle, self.channel.engine, loop, future)
                except RuntimeError:
                    self.channel.engine.loops.pop(loop, None)  # that loop is closed; nobody waits there any more
        return 0

    @property
    def done(self):
        """Whether it has ended, well or not. Never waits.

        Where the deadline given when it was started has passed, it is ended now: `wait` then raises TimeoutError.
        """
        if not self.reaped and self.channel.engine.handle != NULL and self.channel.engine.forked_at == forks:
            self.channel.engine.reap()
            if not self.req.done and hr_now() >= self.own_deadline():
                self.channel.give_up(&self.req, &self.call, HR_ERR_TIMEOUT)
                self.channel.engine.reap()
        return bool(self.req.done)

    cdef int64_t own_deadline(self) noexcept:
        return self.started + <int64_t> (self.call.seconds * 1e9)

    def wait(self, timeout=None):
        """Blocks until it is done and returns the result.

        Parameters
        ----------
        timeout : float, optional
            Seconds. When they have passed, TimeoutError is raised *and the operation goes on*: wait again, or
            ``cancel()``. None: until the deadline given when it was started; then it is cancelled.

        Raises
        ------
        TimeoutError, PeerError, RequestError, DeviceError
            As the blocking call would.
        """
        cdef int64_t now, own, deadline, since
        cdef hr_status status
        cdef hr_engine *engine
        if not self.req.done:
            own = self.own_deadline()
            deadline = own if timeout is None else deadline_in(seconds_of(timeout))
            self.channel.engine.check()
            engine = self.channel.engine.handle
            since = now = hr_now()
            while True:
                self.channel.engine.inside += 1
                with nogil:
                    status = hr_wait(engine, &self.req, min(deadline, min(own, now + SLICE_NS)), 0)
                    now = hr_now()
                self.channel.engine.inside -= 1
                if status == HR_OK:
                    break
                PyErr_CheckSignals()
                if self.call.program != NULL and now - since >= SLICE_NS:
                    self.channel.stalled(&self.call)
                if self.channel.engine.handle == NULL:
                    break  # closed meanwhile, which has ended the request
                if now >= own:
                    self.channel.give_up(&self.req, &self.call, HR_ERR_TIMEOUT)
                    break
                if now >= deadline:
                    raise TimeoutError(f"{text_of(self.call.operation)} #{self.call.sequence} is not done after "
                                       f"{timeout} s; it goes on")
        if not self.reaped and self.channel.engine.handle != NULL and self.channel.engine.forked_at == forks:
            self.channel.engine.reap()
        if self.req.status != HR_OK:
            self.channel.fail(&self.req, &self.call)
        if self.value is None:
            if self.yields == YIELDS_STATUS:
                self.value = Status(self.req.peer, self.req.nbytes)
            elif self.yields == YIELDS_WORD:
                self.value = self.word
            elif self.yields == YIELDS_NOTE:
                self.value = self.req.nbytes
        return self.value

    def result(self):
        """As :meth:`wait` without a timeout of its own."""
        return self.wait()

    def cancel(self):
        """Ends it now. A collective that is cancelled breaks its communicator.

        Returns
        -------
        bool
            Whether it was cancelled; False when it had ended before.
        """
        if not self.req.done:
            self.channel.engine.check()
            self.channel.give_up(&self.req, &self.call, HR_ERR_CANCELED)
            self.channel.engine.reap()
        return self.req.status == HR_ERR_CANCELED

    def __await__(self):
        if not self.done:
            import asyncio

            loop = asyncio.get_running_loop()
            future = loop.create_future()
            if self.waiters is None:
                self.waiters = []
            self.waiters.append((loop, future))
            self.channel.engine.watch(loop)
            self._tick(loop, future)
            self.channel.engine.reap()  # it may have ended before the loop began to look
            try:
                yield from future.__await__()
            except BaseException:
                # The task is cancelled: the buffers must be its owner's again.
                self.cancel()
                raise
        return self.wait()

    def _tick(self, loop, future):
        """Once a second while a task waits: says where we stand, and keeps the deadline."""
        cdef int64_t now, own
        if self.req.done or future.done():
            return
        now = hr_now()
        own = self.own_deadline()
        if now >= own:
            self.channel.give_up(&self.req, &self.call, HR_ERR_TIMEOUT)
            self.channel.engine.reap()
            return
        if self.call.program != NULL and now - self.started >= SLICE_NS:
            self.channel.stalled(&self.call)
        loop.call_later(min(1.0, (own - now) * 1e-9), self._tick, loop, future)


def _settle(Engine engine, loop, future):
    engine.unwatch(loop)
    if not future.done():
        future.set_result(None)


from hrdma.types import Status

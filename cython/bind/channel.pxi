# channel.pxi - a communicator's handle in the core, and how a call on it waits, gives up and fails.
#
# A blocking call keeps its request on the stack. It polls a few times with the GIL held, because a small message is
# there sooner than the GIL could be given away and taken back; only then does it look at the clock, release the GIL
# and sleep in slices. Whatever happens, it returns after the core is done with the request: the caller's buffer is the
# caller's again.
from cpython.exc cimport PyErr_CheckSignals
from libc.math cimport isnan

cdef enum:
    POLLS = 200

cdef int64_t SLICE_NS = 1000000000
cdef double SECONDS_MAX = 1e9


cdef struct Call:  # what messages say about a call
    const char *operation
    int64_t sequence
    double seconds
    int64_t deadline   # of all waits of the call; 0: none has begun
    int peer           # -1: none; HR_ANY_SOURCE prints as such where anonymous is set
    bint anonymous
    PyObject *program  # borrowed; NULL: point to point


cdef inline int64_t deadline_in(double seconds) noexcept:
    return hr_now() + <int64_t> (min(seconds, SECONDS_MAX) * 1e9)


cpdef double seconds_of(object timeout) except -1.0:
    """A timeout as seconds: every one that a user gives comes by here. More than any clock has is as long as that."""
    cdef double seconds
    try:
        seconds = float(timeout)
    except (TypeError, ValueError):
        default = "" if timeout is None else ", or None for the default"
        raise TypeError(f"timeout {timeout!r}: seconds are wanted{default}") from None
    except OverflowError:
        raise ValueError("timeout: more seconds than a float can say; float('inf') is as long") from None
    if isnan(seconds) or seconds < 0:
        raise ValueError(f"timeout {timeout!r}: seconds are wanted, 0 or more")
    return min(seconds, SECONDS_MAX)


cdef class Channel:
    """Base of CommunicatorBase: the handle and its state. Made by ``Communicator``, not by users."""

    cdef hr_comm *handle
    cdef Engine engine
    cdef readonly int rank
    cdef readonly int size
    cdef readonly uint64_t id
    cdef double seconds         # default deadline
    cdef int urgency            # default priority
    cdef int64_t sequence       # of the next collective
    cdef int64_t messages       # of the next point-to-point call
    cdef str ended              # the collective that was given up here and broke this, in words; None: none has
    cdef int64_t ended_sequence
    cdef object __weakref__

    def __init__(self, Engine engine, uint64_t id, peers, int rank, *, timeout=300.0, int dscp=-1):
        cdef uint64_t[:] table
        cdef hr_status status
        import array

        engine.check()
        if self.handle != NULL:
            raise ValueError("this communicator is open already")
        self.engine = engine
        self.id = id
        self.rank = rank
        self.size = len(peers)
        self.seconds = seconds_of(timeout)
        self.urgency = HR_PRIORITY_DEFAULT
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not in a communicator of {self.size}")
        table = array.array("Q", peers)
        status = hr_comm_open_classed(engine.handle, id, &table[0], self.size, rank, dscp, &self.handle)
        if status != HR_OK:
            self.handle = NULL
            raise status_error(status, f"cannot open communicator {id:#x} of {self.size} ranks: "
                               f"{text_of(hr_status_text(status))}")
        engine.channels.add(self)

    def __dealloc__(self):
        # A request on its way holds its communicator: nothing is pending here.
        if self.handle != NULL and self.engine.handle != NULL and self.engine.forked_at == forks:
            hr_comm_close(self.handle)

    def _close(self):
        self.release()

    cdef int release(self) except -1:
        handle = self.handle
        self.handle = NULL
        if handle != NULL and self.engine.handle != NULL and self.engine.forked_at == forks:
            hr_comm_close(handle)
        return 0

    cdef inline int check(self) except -1:
        if self.handle == NULL or self.engine.forked_at != forks:
            self.refuse()
        return 0

    cdef int refuse(self) except -1:
        if self.engine is None:
            raise ValueError("this communicator was never opened: hrdma.init() and split() make communicators")
        if self.engine.forked_at == forks:
            raise ValueError("this communicator is closed")
        self.engine.check()
        return 0

    cdef inline double deadline_seconds(self, object timeout) except -1.0:
        return self.seconds if timeout is None else seconds_of(timeout)

    cdef inline int priority_of(self, object priority) except -1:
        return self.urgency if priority is None else self.checked_priority(priority)

    cdef int checked_priority(self, object priority) except -1:
        if not isinstance(priority, int) or not 0 <= priority < HR_PRIORITIES:
            raise ValueError(f"priority {priority!r}: 0 (most urgent) to {HR_PRIORITIES - 1} are there")
        return priority

    @property
    def closed(self):
        """Whether it can be used no more: closed here, or inherited over a fork."""
        return self.handle == NULL or self.engine.forked_at != forks

    @property
    def timeout(self):
        """Default deadline of calls, in seconds."""
        return self.seconds

    @timeout.setter
    def timeout(self, value):
        self.seconds = seconds_of(value)

    @property
    def priority(self):
        """Default priority of calls: 0 (most urgent) to 7."""
        return self.urgency

    @priority.setter
    def priority(self, value):
        self.urgency = self.checked_priority(value)

    def _deadline_seconds(self, timeout):
        """Of a call that is given this one: checked, and the default for None."""
        return self.deadline_seconds(timeout)

    def _break(self, str reason, int blame=-1, bint mismatch=False, bint tell=False):
        """Pending and later calls fail with this; the first break wins."""
        cdef bytes text = reason.encode()
        cdef const char *detail = text
        if self.handle == NULL or self.engine.handle == NULL or self.engine.forked_at != forks:
            return
        hr_comm_break(self.handle, HR_ERR_MISMATCH if mismatch else HR_ERR_PEER_LOST if blame >= 0 else HR_ERR_BROKEN,
                      blame, HR_PHASE_NONE, detail, tell)

    def _state(self):
        """Why it is broken: None, or ``(status, rank, phase, provider, detail)``."""
        cdef hr_comm_state state
        self.check()
        hr_comm_read_state(self.handle, &state)
        if state.status == HR_OK:
            return None
        return (state.status, state.peer, text_of(hr_phase_name(<hr_phase> state.phase)), text_of(state.provider),
                text_of(state.detail))

    # What a subclass in Python adds. Called with the GIL, from the thread that waits.

    def _stalled(self, operation, sequence, signature, text):
        """A collective has waited for one more second."""

    def _verdict(self, operation, sequence, signature, text):
        """The core saw another rank's signature: who differs, once that is known; None where nobody can say."""

    def _recent(self):
        """``(sequence, signature, text, pairs)`` of the collectives that were started last, the newest at the end."""
        return []

    def _whereabouts(self, operation, sequence):
        """Words for a message about a timeout: which rank is where; empty where nothing is known."""
        return ""

    # Waiting.

    cdef inline int finish(self, hr_request *req, Call *call) except -1:
        # HR_FOREVER: the bound is the number of polls, and no clock is read.
        if hr_wait(self.engine.handle, req, HR_FOREVER, POLLS) != HR_OK:
            self.block(req, call)
        if req.status != HR_OK:
            self.fail(req, call)
        return 0

    cdef int block(self, hr_request *req, Call *call) except -1:
        cdef hr_engine *engine = self.engine.handle
        cdef int64_t now = hr_now()
        cdef int64_t start = now, deadline
        cdef hr_status status
        if not call.deadline:
            call.deadline = now + <int64_t> (call.seconds * 1e9)
        deadline = call.deadline
        while True:
            self.engine.inside += 1
            with nogil:
                status = hr_wait(engine, req, min(deadline, now + SLICE_NS), 0)
                if status != HR_OK:
                    now = hr_now()
            self.engine.inside -= 1
            if status == HR_OK:
                return 0
            try:
                PyErr_CheckSignals()
                if now - start >= SLICE_NS and call.program != NULL:
                    self.stalled(call)
            except BaseException:
                self.give_up(req, call, HR_ERR_CANCELED)
                raise
            if self.engine.handle == NULL:
                return 0  # it was closed meanwhile, by another thread or a signal handler, which has ended the request
            if now >= deadline:
                self.give_up(req, call, HR_ERR_TIMEOUT)
                return 0

    cdef int stalled(self, Call *call) except -1:
        program = <Program> call.program
        self._stalled(text_of(call.operation), call.sequence, program.signature, program.text)
        return 0

    cdef int cancel(self, hr_request *req, hr_status status) except -1:
        cdef hr_engine *engine = self.engine.handle
        if engine == NULL:
            return 0
        self.engine.inside += 1
        with nogil:
            hr_cancel(engine, req, status)
        self.engine.inside -= 1
        return 0

    cdef int give_up(self, hr_request *req, Call *call, hr_status status) except -1:
        """Cancels; of a collective it is kept for those who call later, since it breaks the communicator."""
        cdef bint first = call.program != NULL and self.ended is None
        if first:
            self.ended_sequence = call.sequence
            self.ended = f"{(<Program> call.program).text} #{call.sequence} " + (
                f"did not complete within {call.seconds:g} s" if status == HR_ERR_TIMEOUT else "was canceled")
        self.cancel(req, status)
        if first and req.status != status:
            self.ended = None  # it had ended meanwhile
        return 0

    # Failing.

    cdef int fail(self, hr_request *req, Call *call) except -1:
        raise self.failure(<hr_status> req.status, req.peer, <hr_phase> req.phase, req.provider, req.nbytes, call)

    cdef int fail_post(self, hr_status status, Call *call) except -1:
        """The core took nothing."""
        raise self.failure(status, -1, HR_PHASE_NONE, NULL, 0, call)

    cdef object failure(self, hr_status status, int blame, hr_phase phase, const char *provider, uint64_t nbytes,
                        Call *call):
        cdef hr_comm_state state
        cdef str operation = text_of(call.operation)
        cdef str what = f"{operation} #{call.sequence}"
        cdef str detail = "", transport = text_of(provider), stage
        if call.program == NULL:
            what += " from any source" if call.anonymous else f" with rank {call.peer}" if call.peer >= 0 else ""
        else:
            what = f"{(<Program> call.program).text} #{call.sequence}"
        memset(&state, 0, sizeof(state))
        if self.handle != NULL and self.engine.handle != NULL:
            hr_comm_read_state(self.handle, &state)
        elif status == HR_ERR_BROKEN or status == HR_ERR_CANCELED:
            return status_error(status, f"{what}: the communicator was closed meanwhile")
        if state.status != HR_OK:
            # The first break decides what every pending and later call says.
            if status == HR_ERR_BROKEN:
                status = <hr_status> state.status
            if status == <hr_status> state.status:
                detail = text_of(state.detail)
                blame = state.peer if blame < 0 else blame
                phase = <hr_phase> state.phase if phase == HR_PHASE_NONE else phase
                transport = transport or text_of(state.provider)
        if blame < 0 and hr_is_peer_error(status):
            blame = call.peer
        stage = text_of(hr_phase_name(phase))
        if (self.ended is not None and status in (HR_ERR_TIMEOUT, HR_ERR_CANCELED) and status == state.status
                and (call.program == NULL or call.sequence != self.ended_sequence)):
            message = f"{what}: the communicator is broken: {self.ended} (comm.shrink(), on all ranks, makes a new one)"
        elif status == HR_ERR_BROKEN and state.cause in (HR_ERR_TIMEOUT, HR_ERR_CANCELED) and state.sequence >= 0:
            return self.given_up(&state, what)
        elif status == HR_ERR_TIMEOUT:
            where = self._whereabouts(operation, call.sequence)
            message = f"{what} did not complete within {call.seconds:g} s" + (f" ({where})" if where else "")
        elif status == HR_ERR_TRUNCATED:
            message = (f"{what}: the message" + (f" of {nbytes} bytes" if nbytes else "")
                       + " is larger than the buffer given for it: receive into a larger one")
        elif status == HR_ERR_MISMATCH:
            found = None
            if call.program != NULL:
                program = <Program> call.program
                found = self._verdict(operation, call.sequence, program.signature, program.text)
            message = found or f"{what}: ranks disagree about which collective this is"
            if not found and detail:
                message += f": {detail}"
        elif hr_is_peer_error(status):
            whom = f"rank {blame}" if blame >= 0 else "a rank"
            message = f"{what}: {whom}: {text_of(hr_status_text(status))}" + (f" ({detail})" if detail else "")
            message += f" in phase {stage}" + (f" over {transport}" if transport else "")
        else:
            message = f"{what}: {text_of(hr_status_text(status))}" + (f": {detail}" if detail else "")
        return status_error(status, message, blame, operation, call.sequence, stage, transport)

    cdef object given_up(self, hr_comm_state *state, str what):
        """Another rank gave up a collective, which this one may have called as well."""
        known = [call[2] for call in self._recent() if call[0] == state.sequence]
        which = f"{known[0] if known else 'collective'} #{state.sequence}"
        late = state.cause == HR_ERR_TIMEOUT
        how = f"gave up {which}, which did not complete within its deadline" if late else f"canceled {which}"
        message = (f"{what}: the communicator is broken: rank {state.peer} {how} (comm.shrink(), on all ranks, makes a "
                   "new one)")
        if not late:
            return RequestError(message)
        operation = known[0].partition("(")[0] if known else ""
        return CollectiveTimeoutError(message, rank=state.peer, operation=operation, sequence=state.sequence)

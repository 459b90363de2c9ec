# verbs_queue.pxi - hrdma.verbs: completion queues, polled without the GIL.
from libc.stdlib cimport calloc, free
from posix.fcntl cimport F_GETFL, F_SETFL, O_NONBLOCK, fcntl

import collections as _collections
import math as _math
import secrets as _secrets

cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events
    int POLLIN
    int poll(pollfd *fds, unsigned long n, int timeout) noexcept

cdef extern from "<arpa/inet.h>" nogil:
    uint32_t htonl(uint32_t value) noexcept
    uint32_t ntohl(uint32_t value) noexcept

cdef enum:
    VERBS_SLICE = 100   # milliseconds of polling or sleep between two looks at signals
    VERBS_POLL = 64     # completions in one call

VERBS_OPCODES = {
    <int> IBV_WC_SEND: "send",
    <int> IBV_WC_RDMA_WRITE: "write",
    <int> IBV_WC_RDMA_READ: "read",
    <int> IBV_WC_COMP_SWAP: "compare_swap",
    <int> IBV_WC_FETCH_ADD: "fetch_add",
    <int> IBV_WC_RECV: "recv",
    <int> IBV_WC_RECV_RDMA_WITH_IMM: "recv of write",
}

QueuePairAddress = _collections.namedtuple("QueuePairAddress", ["gid", "lid", "num", "psn", "mtu"])
QueuePairAddress.__doc__ = "What a queue pair must know of its peer: GID as text, LID, number, first PSN, MTU in bytes."


cdef class Completion:
    """How a work request ended.

    Attributes
    ----------
    wr_id : int
        What was given when it was posted.
    ok : bool
    status : str
        ``"success"``, or what went wrong.
    opcode : str
        ``send``, ``write``, ``read``, ``fetch_add``, ``compare_swap``, ``recv``, ``recv of write`` (with immediate
        data); unknown when it failed.
    nbytes : int
        Of what was received.
    imm : int or None
        Immediate data that came with it.
    qp_num, code, vendor_code : int
        The queue pair; the status and the device's own code.
    """

    cdef readonly uint64_t wr_id
    cdef readonly bint ok
    cdef readonly str status, opcode
    cdef readonly uint32_t nbytes, qp_num, code, vendor_code
    cdef readonly object imm

    def check(self):
        """Returns itself, or raises `RequestError` with the status and the vendor's code."""
        if not self.ok:
            raise RequestError(f"work request {self.wr_id} of queue pair {self.qp_num} failed: {self.status} "
                               f"(status {self.code}, vendor code 0x{self.vendor_code:x})")
        return self

    def __repr__(self):
        return f"<Completion {self.wr_id} {self.opcode}: {self.status}>"


cdef Completion completion_of(const ibv_wc *wc):
    cdef Completion found = Completion.__new__(Completion)
    found.wr_id, found.code, found.vendor_code, found.qp_num = wc.wr_id, <uint32_t> wc.status, wc.vendor_err, wc.qp_num
    found.ok = wc.status == IBV_WC_SUCCESS
    found.status = "success" if found.ok else text_of(hr_verbs_wc_text(wc.status))
    found.opcode = VERBS_OPCODES.get(<int> wc.opcode, "other") if found.ok else "unknown"
    if found.ok and wc.opcode >= IBV_WC_RECV:
        found.nbytes = wc.byte_len
        if wc.wc_flags & IBV_WC_WITH_IMM:
            found.imm = ntohl(wc.imm_data)
    return found


cdef class CompletionQueue(Resource):
    """Where the ends of work requests are found.

    Parameters
    ----------
    device : Device
    entries : int
        At least as many as work requests may be under way on its queue pairs: what does not fit breaks the queue.
    spin_us : int
        Microseconds for which `poll` with a timeout keeps a processor before it sleeps, 0 or more.

    Raises
    ------
    DeviceError
        The device has no more, or not of that size.
    """

    cdef ibv_comp_channel *channel
    cdef ibv_cq *cq
    cdef readonly Device device
    cdef readonly int spin_us

    def __cinit__(self, Device device not None, int entries=256, int spin_us=50):
        cdef int flags, rc
        if spin_us < 0:
            raise ValueError(f"spin_us={spin_us}: microseconds, 0 or more")
        self.device, self.spin_us = device, spin_us
        self.begin(2, (device,))
        self.channel = self.verbs.create_comp_channel(device.ctx)
        if self.channel != NULL:
            self.cq = self.verbs.create_cq(device.ctx, entries, NULL, self.channel, 0)
        if self.cq == NULL:
            rc = errno
            raise DeviceError(f"cannot make a completion queue of {entries} entries on {device.name}: "
                              f"{_os.strerror(rc)}; see Device.limits()")
        flags = fcntl(self.channel.fd, F_GETFL)
        fcntl(self.channel.fd, F_SETFL, flags | O_NONBLOCK)
        self.opened()

    def __dealloc__(self):
        if not self.drop() and self.cq == NULL and self.channel != NULL:  # it did not get further than that
            self.verbs.destroy_comp_channel(self.channel)

    cdef int release(self) noexcept:
        cdef int rc = self.verbs.destroy_cq(self.cq)
        if not rc:
            self.verbs.destroy_comp_channel(self.channel)  # only its queue would keep it
        return rc

    cdef void clear(self) noexcept nogil:
        """The events that a sleep ended with."""
        cdef ibv_cq *cq
        cdef void *context
        while self.verbs.get_cq_event(self.channel, &cq, &context) == 0:
            self.verbs.ack_cq_events(cq, 1)

    def poll(self, int limit=16, timeout=0.0):
        """Completions in the order in which they came.

        Parameters
        ----------
        limit : int
            At most so many, 1 to 64.
        timeout : float
            Seconds to wait for the first one.

        Returns
        -------
        list of Completion
            Empty when none came in time.

        Raises
        ------
        DeviceError
            The queue has lost completions, because more came than it has entries: close it.

        Notes
        -----
        Runs without the GIL: polls for `spin_us`, then sleeps until the device tells, with a look at signals ten times
        a second.
        """
        return polled(self, None, limit, timeout)

    def __repr__(self):
        return f"<CompletionQueue of {self.cq.cqe if self.live else 0} entries on {self.device.name}>"


cdef enum:  # what polled() finds instead of a number
    LOST_FIRST = -1
    LOST_SECOND = -2


cdef int asked(CompletionQueue first, CompletionQueue second, int limit, ibv_wc *found) noexcept nogil:
    """What `ibv_poll_cq` finds in the one, and then in the other, if there is one."""
    cdef int n = ibv_poll_cq(first.cq, limit, found), more
    if n < 0:
        return LOST_FIRST
    if second is None or n == limit:
        return n
    more = ibv_poll_cq(second.cq, limit - n, found + n)
    return n + more if more >= 0 else n if n else LOST_SECOND


cdef void sleep_on(CompletionQueue first, CompletionQueue second, int64_t until) noexcept nogil:
    """Until something may have come, a slice is over or the time has come."""
    cdef pollfd waits[2]
    cdef int64_t left = (until - hr_now()) // 1000000 + 1
    waits[0].fd, waits[0].events = first.channel.fd, <short> POLLIN
    waits[1].fd, waits[1].events = -1 if second is None else second.channel.fd, <short> POLLIN
    poll(waits, 2, <int> (VERBS_SLICE if left > VERBS_SLICE else left if left > 0 else 0))
    first.clear()
    if second is not None:
        second.clear()


cdef int await_some(CompletionQueue first, CompletionQueue second, int limit, ibv_wc *found, int64_t spins,
                    int64_t until) noexcept nogil:
    """What `asked` finds: asked until the first moment, then asleep until the second, a slice of it all."""
    cdef int64_t now = hr_now()
    cdef int64_t stop = min(until, now + VERBS_SLICE * 1000000)
    cdef int n = 0
    while not n and now < min(spins, stop):
        n = asked(first, second, limit, found)
        now = hr_now()
    if not n and now < stop:  # armed, then looked again: what came in between would not wake
        ibv_req_notify_cq(first.cq, 0)
        if second is not None:
            ibv_req_notify_cq(second.cq, 0)
        n = asked(first, second, limit, found)
        if not n:
            sleep_on(first, second, until)
            n = asked(first, second, limit, found)
    return n


cdef list polled(CompletionQueue first, CompletionQueue second, int limit, object timeout):
    """What `poll` gives, of one queue (`second` is None) or of two."""
    cdef ibv_wc found[VERBS_POLL]
    cdef int64_t until, spins
    cdef int n, turn, spin_us = first.spin_us
    cdef double seconds = seconds_of(timeout)
    first.check()
    if second is not None:
        second.check()
        spin_us = max(spin_us, second.spin_us)
    if not 1 <= limit <= VERBS_POLL:
        raise ValueError(f"limit={limit}: 1 to {<int> VERBS_POLL}")
    first.inside += 1
    if second is not None:
        second.inside += 1
    try:
        with nogil:
            n = asked(first, second, limit, found)
        if not n and seconds > 0:
            spins = hr_now() + <int64_t> spin_us * 1000
            until = hr_now() + <int64_t> (seconds * 1e9)
            while not n and hr_now() < until:
                PyErr_CheckSignals()
                with nogil:
                    n = await_some(first, second, limit, found, spins, until)
    finally:
        first.inside -= 1
        if second is not None:
            second.inside -= 1
    if n < 0:
        first = first if n == LOST_FIRST else second
        raise DeviceError(f"{first!r} has lost completions: more came than it has entries")
    return [completion_of(&found[turn]) for turn in range(n)]

# endpoint.pxi - Endpoint: reads, writes and atomics in the memory of one peer, and notifications, over any provider.
#
# A descriptor is what the provider gives, behind a head that says whose memory it is and for whom: a descriptor in the
# wrong hands is an error of its own and never reaches a device. Nor does a damaged one: what providers make of such
# bytes differs, and some notice nothing before they are used.
cimport cython
from libc.string cimport memcpy

import struct as _struct
import zlib as _zlib

# Mark, access and a check above it, communicator, rank of the owner, rank of the peer, length; the provider's bytes.
cdef object DESCRIPTOR = _struct.Struct(f"<4sIQIIQ{<int> HR_DESC_BYTES}s")
cdef bytes DESCRIPTOR_MARK = b"hrM2"
cdef tuple ACCESS_WORDS = (("read", HR_ACCESS_REMOTE_READ), ("write", HR_ACCESS_REMOTE_WRITE),
                           ("atomic", HR_ACCESS_REMOTE_ATOMIC))


cdef str access_text(uint32_t access):
    return ", ".join([word for word, bit in ACCESS_WORDS if access & bit])


cdef bytes descriptor_of(uint32_t access, comm, owner, peer, nbytes, bytes inner):
    """With three bytes of a CRC over all the others."""
    cdef bytes text = DESCRIPTOR.pack(DESCRIPTOR_MARK, access, comm, owner, peer, nbytes, inner)
    return text[:5] + (<uint32_t> _zlib.crc32(text)).to_bytes(4, "little")[:3] + text[8:]


@cython.no_gc_clear  # the communicator must be there when this is closed
cdef class Memory:
    """Memory of this process that one peer may use. Made by `Endpoint.expose`; ``bytes(memory)`` is for the peer.

    Attributes
    ----------
    nbytes : int
    closed : bool

    Notes
    -----
    The buffer is kept until this is closed, by ``close()``, ``with``, the communicator, or when nobody holds it.
    """

    cdef hr_exposed *handle
    cdef Span span
    cdef Messenger channel
    cdef bytes text
    cdef readonly size_t nbytes

    def __dealloc__(self):
        self.release()
        span_close(&self.span)  # where it was never exposed

    cdef int release(self) noexcept:
        cdef hr_exposed *handle = self.handle
        cdef hr_engine *engine
        self.handle = NULL
        # NULL: another thread may still be taking it back. A child of fork leaves its parent's memory as it is.
        if handle != NULL and self.channel.engine.forked_at == forks:
            engine = self.channel.engine.handle
            self.channel.engine.inside += 1
            with nogil:
                hr_conceal(engine, handle)
            self.channel.engine.inside -= 1
            span_close(&self.span)
        return 0

    @property
    def closed(self):
        return self.handle == NULL or self.channel.closed

    def close(self):
        """Takes it back: once this returns nothing that the peer does changes the memory. Closing twice is harmless.

        Notes
        -----
        What the peer is doing there fails or is passed over, and a connection that cannot keep that promise otherwise
        is cut: agree with the peer first.
        """
        self.release()

    def __bytes__(self):
        return self.text

    def __len__(self):
        return self.nbytes

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __repr__(self):
        return f"<Memory of {self.nbytes} bytes{', closed' if self.closed else ''}>"


@cython.no_gc_clear
cdef class RemoteMemory:
    """Memory of a peer. Made by `Endpoint.remote` from what the peer sent."""

    cdef hr_rmem rmem
    cdef Messenger channel
    cdef int peer
    cdef uint32_t access
    cdef bint live
    cdef readonly size_t nbytes

    def __dealloc__(self):
        cdef Messenger channel = self.channel
        if self.live and channel.handle != NULL and channel.engine.handle != NULL and channel.engine.forked_at == forks:
            hr_release(channel.handle, self.peer, &self.rmem)

    def __len__(self):
        return self.nbytes

    def __repr__(self):
        return f"<RemoteMemory of {self.nbytes} bytes of rank {self.peer}: {access_text(self.access)}>"


cdef class Endpoint:
    """One-sided access to the memory of one peer, and its access to ours.

    Parameters
    ----------
    comm : Communicator
    rank : int
        Of the peer in it.

    Notes
    -----
    The peer takes no part in what happens to its memory, and need not be calling anything. Operations of one endpoint
    are not ordered among each other: wait for one before starting another that builds on it. Only a notification comes
    after the bytes of its own write, and an atomic after those of every write of its priority that was started before
    it. Every call has a deadline, as those of the communicator, and raises the same errors.

    Examples
    --------
    >>> mine = hrdma.Endpoint(comm, 1).expose(x, write=True)           # on rank 0
    >>> comm.send(bytes(mine), dst=1)
    >>> there = hrdma.Endpoint(comm, 0)                                # on rank 1
    >>> there.write(y, there.remote(received), offset=64, notify=7)
    """

    cdef Messenger channel
    cdef readonly int rank

    def __cinit__(self, Messenger comm not None, rank):
        comm.check()
        self.channel = comm
        self.rank = comm.rank_of("rank", rank, False)

    def __repr__(self):
        return f"<Endpoint to rank {self.rank}>"

    def expose(self, x, *, bint read=True, bint write=False, bint atomic=False, timeout=None):
        """Lets the peer use the memory of x.

        Parameters
        ----------
        x : array or buffer
            C-contiguous and not empty; writable where the peer may change it. From `hrdma.empty`, if every transport is
            to reach it for reading, and without pinning.
        read, write, atomic : bool
            What the peer may do.

        Returns
        -------
        Memory

        Raises
        ------
        ValueError, TypeError
            Nothing is allowed, or x is empty or not of that kind, or is for atomics and its address no multiple of 8.
        RequestError
            The transport cannot give this peer such memory, or may not pin so much; the message has the limit that
            was hit, and the mend.
        PeerError
            The peer is gone.
        """
        cdef Memory memory = Memory.__new__(Memory)
        cdef char detail[256]
        cdef hr_desc desc
        cdef hr_status status
        cdef Call call
        cdef int64_t deadline
        cdef uint32_t access = ((HR_ACCESS_REMOTE_READ if read else 0) | (HR_ACCESS_REMOTE_WRITE if write else 0)
                                | (HR_ACCESS_REMOTE_ATOMIC if atomic else 0))
        self.channel.check()
        if not access:
            raise ValueError("read, write and atomic are all False: the peer could do nothing")
        self.channel.describe(&call, b"expose", self.channel.deadline_seconds(timeout), self.rank)
        memory.channel = self.channel
        span_open(x, write or atomic, &memory.span)
        memory.nbytes = memory.span.nbytes
        if not memory.nbytes:
            raise ValueError("an empty buffer cannot be exposed")
        if atomic and <uint64_t> memory.span.ptr % 8:
            raise ValueError(f"x begins {<uint64_t> memory.span.ptr % 8} bytes after a multiple of 8: atomics need one")
        deadline = deadline_in(call.seconds)
        while True:
            status = hr_expose(self.channel.handle, self.rank, memory.span.ptr, memory.nbytes, access, &desc,
                               &memory.handle, detail)
            if status != HR_AGAIN:
                break
            if hr_now() > deadline:
                status = HR_ERR_TIMEOUT
                break
            PyErr_CheckSignals()
            self.channel.engine.progress()
            self.channel.check()  # another thread may have closed it meanwhile
        if status == HR_ERR_UNSUPPORTED:
            raise RequestError(f"rank {self.rank} cannot reach this memory for {access_text(access)}: take it from "
                               "hrdma.empty()")
        if status == HR_ERR_NOMEM:
            raise RequestError(f"{memory.nbytes} bytes cannot be registered for rank {self.rank}: "
                               f"{text_of(detail) or 'no memory is left'}"
                               + ("" if is_registered(x) else "; take them from hrdma.empty()"))
        if status != HR_OK:
            self.channel.fail_post(status, &call)
        memory.text = descriptor_of(access, self.channel.id, self.channel.rank, self.rank, memory.nbytes,
                                    (<char *> desc.bytes)[:HR_DESC_BYTES])
        return memory

    def remote(self, descriptor):
        """The peer's memory, from the ``bytes(memory)`` that it sent.

        Parameters
        ----------
        descriptor : bytes or buffer

        Returns
        -------
        RemoteMemory

        Raises
        ------
        ValueError
            It is no descriptor, a damaged one, or one of another rank, for another rank, or of another communicator.
        RequestError
            The transport refuses it, as where the peer has taken that memory back.
        PeerError
            The peer is gone.
        """
        cdef RemoteMemory found = RemoteMemory.__new__(RemoteMemory)
        cdef hr_desc desc
        cdef hr_status status
        cdef Call call
        cdef bytes given = bytes(descriptor)
        self.channel.check()
        if len(given) != DESCRIPTOR.size or given[:4] != DESCRIPTOR_MARK:
            raise ValueError(f"{len(given)} bytes are no descriptor of memory: send the {DESCRIPTOR.size} of "
                             "bytes(endpoint.expose(...))")
        _, access, comm, owner, peer, nbytes, inner = DESCRIPTOR.unpack(given)
        access &= 0xff
        if given != descriptor_of(access, comm, owner, peer, nbytes, inner):
            raise ValueError("a damaged descriptor: its bytes do not fit its checksum; send all of them unchanged")
        if (comm, owner, peer) != (self.channel.id, self.rank, self.channel.rank):
            raise ValueError(f"a descriptor of rank {owner} for rank {peer} of communicator {comm:#x} is of no use to "
                             f"rank {self.channel.rank} of {self.channel.id:#x} for rank {self.rank}")
        self.channel.describe(&call, b"remote", self.channel.seconds, self.rank)
        memcpy(desc.bytes, <const char *> inner, HR_DESC_BYTES)
        status = hr_import(self.channel.handle, self.rank, &desc, &found.rmem)
        if status != HR_OK:
            self.channel.fail_post(status, &call)
        found.channel, found.peer, found.access, found.live = self.channel, self.rank, access, True
        found.nbytes = min(nbytes, found.rmem.len)
        return found

    cdef uint64_t place(self, RemoteMemory remote, offset, size_t nbytes, uint32_t access) except? 0xffffffffffffffff:
        """The offset, checked."""
        if remote is None:
            raise TypeError("remote is None: Endpoint.remote() makes it of what the peer sent")
        if remote.channel is not self.channel or remote.peer != self.rank:
            raise ValueError(f"{remote!r} is not of this endpoint's rank {self.rank}")
        if not remote.access & access:
            raise ValueError(f"{remote!r} is not for {access_text(access)}")
        cdef long long at = whole(offset)
        if at < 0 or <size_t> at > remote.nbytes or nbytes > remote.nbytes - <size_t> at:
            raise ValueError(f"{nbytes} bytes at offset {offset} are not within {remote!r}")
        return <uint64_t> at

    def write(self, x, RemoteMemory remote, offset=0, *, notify=None, bint async_op=False, timeout=None,
              priority=None):
        """Writes the memory of x into the peer's.

        Parameters
        ----------
        x : array or buffer
            C-contiguous; its bytes are written.
        remote : RemoteMemory
            Exposed with ``write=True``.
        offset : int
            In bytes.
        notify : int, optional
            0 to 2**32 - 1: the peer's `notified` gives it once the bytes are there.
        async_op : bool
            Returns a `Request`.
        timeout, priority
            As in `Communicator.send`.

        Raises
        ------
        ValueError, TypeError
            Before anything is written: beyond the end, not for writing.
        TimeoutError
            The deadline came first; part of it may be there. Where it could not be withdrawn, the connection is cut.
        RequestError
            The transport refuses.
        PeerError
            The peer is gone; the communicator is broken.

        Notes
        -----
        Returns when x may be changed. The bytes have arrived when the peer was notified, and when a later atomic of
        this endpoint has returned; a `read` may still see what was there before. A write to memory that the peer has
        taken back meanwhile is passed over or fails.
        """
        cdef hr_request req
        cdef Request request
        cdef Span span
        cdef Call call
        cdef uint64_t at
        cdef uint32_t value = 0
        cdef long long number
        cdef const uint32_t *told = NULL
        cdef hr_status status
        self.channel.check()
        if notify is not None:
            number = whole(notify)
            if not 0 <= number <= 0xffffffff:
                raise ValueError(f"notify={notify}: 0 to 2**32 - 1")
            value, told = <uint32_t> number, &value
        self.channel.describe(&call, b"write", self.channel.deadline_seconds(timeout), self.rank)
        req.priority = self.channel.priority_of(priority)
        if async_op:
            request = Request()
            span_open(x, False, &request.source)
            at = self.place(remote, offset, request.source.nbytes, HR_ACCESS_REMOTE_WRITE)
            request.keep = remote
            request.prepare(self.channel, &call, req.priority)
            request.launched(hr_iwrite(self.channel.handle, self.rank, request.source.ptr, request.source.nbytes,
                                       &remote.rmem, at, told, &request.req))
            return request
        req.flags = 0
        req.user = NULL
        span_open(x, False, &span)
        try:
            at = self.place(remote, offset, span.nbytes, HR_ACCESS_REMOTE_WRITE)
            status = hr_iwrite(self.channel.handle, self.rank, span.ptr, span.nbytes, &remote.rmem, at, told, &req)
            if status != HR_OK:
                self.channel.fail_post(status, &call)
            self.channel.finish(&req, &call)
        finally:
            span_close(&span)

    def read(self, x, RemoteMemory remote, offset=0, *, bint async_op=False, timeout=None, priority=None):
        """Reads the peer's memory into that of x, as many bytes as x has. Parameters and errors as `write`.

        After an error the contents of x are undefined, and x is not changed any more.
        """
        cdef hr_request req
        cdef Request request
        cdef Span span
        cdef Call call
        cdef uint64_t at
        cdef hr_status status
        self.channel.check()
        self.channel.describe(&call, b"read", self.channel.deadline_seconds(timeout), self.rank)
        req.priority = self.channel.priority_of(priority)
        if async_op:
            request = Request()
            span_open(x, True, &request.target)
            at = self.place(remote, offset, request.target.nbytes, HR_ACCESS_REMOTE_READ)
            request.keep = remote
            request.prepare(self.channel, &call, req.priority)
            request.launched(hr_iread(self.channel.handle, self.rank, request.target.ptr, request.target.nbytes,
                                      &remote.rmem, at, &request.req))
            return request
        req.flags = 0
        req.user = NULL
        span_open(x, True, &span)
        try:
            at = self.place(remote, offset, span.nbytes, HR_ACCESS_REMOTE_READ)
            status = hr_iread(self.channel.handle, self.rank, span.ptr, span.nbytes, &remote.rmem, at, &req)
            if status != HR_OK:
                self.channel.fail_post(status, &call)
            self.channel.finish(&req, &call)
        finally:
            span_close(&span)

    cdef object atomic(self, const char *name, hr_atomic_op op, RemoteMemory remote, offset, uint64_t operand,
                       uint64_t compare, bint async_op, timeout, priority):
        cdef Request request
        cdef Call call
        cdef uint64_t at
        self.channel.check()
        self.channel.describe(&call, name, self.channel.deadline_seconds(timeout), self.rank)
        at = self.place(remote, offset, 8, HR_ACCESS_REMOTE_ATOMIC)
        if at % 8:
            raise ValueError(f"offset {offset}: a multiple of 8")
        request = Request()
        request.yields, request.keep = YIELDS_WORD, remote
        request.prepare(self.channel, &call, self.channel.priority_of(priority))
        request.launched(hr_iatomic(self.channel.handle, self.rank, op, &request.word, operand, compare, &remote.rmem,
                                    at, &request.req))
        if async_op:
            return request
        try:
            return request.wait()
        except BaseException:
            request.cancel()  # an interrupt leaves nothing on its way
            raise

    def fetch_add(self, RemoteMemory remote, offset, value, *, bint async_op=False, timeout=None, priority=None):
        """Adds to the 64-bit integer at `offset` of the peer's memory, and returns what was there.

        Parameters
        ----------
        remote : RemoteMemory
            Exposed with ``atomic=True``, 8-aligned.
        offset : int
            A multiple of 8.
        value : int
            0 to 2**64 - 1; the sum wraps.

        Returns
        -------
        int or Request
            Unsigned.

        Raises
        ------
        ValueError, TimeoutError, RequestError, PeerError
            As `write`. After a TimeoutError it may have been done.

        Notes
        -----
        Atomic among the operations of all peers that come by the same transport.
        """
        return self.atomic(b"fetch_add", HR_ATOMIC_FETCH_ADD, remote, offset, word_of("value", value), 0, async_op,
                           timeout, priority)

    def compare_swap(self, RemoteMemory remote, offset, compare, swap, *, bint async_op=False, timeout=None,
                     priority=None):
        """Where the 64-bit integer at `offset` is `compare`, it becomes `swap`; returns what was there.

        Else as `fetch_add`.
        """
        return self.atomic(b"compare_swap", HR_ATOMIC_CMP_SWAP, remote, offset, word_of("swap", swap),
                           word_of("compare", compare), async_op, timeout, priority)

    def notified(self, *, bint async_op=False, timeout=None):
        """The value of the peer's next notification, in the order of its writes; waits for it.

        Returns
        -------
        int or Request

        Raises
        ------
        TimeoutError
            None came in time. Ask again.
        PeerError
            The peer is gone. Where it said goodbye, those that had come are given first; where it was lost, the
            communicator is broken and they are lost with it.

        Notes
        -----
        Notifications that nobody asks for are kept, 65536 of each rank; the next one costs the connection to that rank.
        """
        cdef hr_request req
        cdef Request request
        cdef Call call
        cdef hr_status status
        self.channel.check()
        self.channel.describe(&call, b"notified", self.channel.deadline_seconds(timeout), self.rank)
        if async_op:
            request = Request()
            request.yields = YIELDS_NOTE
            request.prepare(self.channel, &call, HR_PRIORITY_DEFAULT)
            request.launched(hr_inotified(self.channel.handle, self.rank, &request.req))
            return request
        req.flags = 0
        req.user = NULL
        req.priority = HR_PRIORITY_DEFAULT
        status = hr_inotified(self.channel.handle, self.rank, &req)
        if status != HR_OK:
            self.channel.fail_post(status, &call)
        self.channel.finish(&req, &call)
        return req.nbytes

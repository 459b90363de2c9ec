# verbs_srq.pxi - hrdma.verbs: shared receive queues; what they have in common with queue pairs, batches of pieces.


cdef list pieces_of(Resource user, ProtectionDomain pd, set used, what):
    """The batch; every region is checked and kept. That there is nothing else, such as None, is checked first."""
    cdef Piece piece
    batch = [what] if isinstance(what, (MemoryRegion, Piece)) else list(what)
    for one in batch:
        if not isinstance(one, (MemoryRegion, Piece)):
            raise TypeError(f"regions and pieces of them can be posted, not {type(one).__name__}")
    batch = [Piece(one, 0, (<MemoryRegion> one).span.nbytes) if isinstance(one, MemoryRegion) else one for one in batch]
    user.check()  # what made the sequence may have closed it
    for piece in batch:
        piece.region.check()
        if piece.region.pd is not pd:
            raise ValueError(f"{piece.region!r} is of another protection domain")
        if len(piece) > 0xffffffff:
            raise ValueError(f"a piece of {len(piece)} bytes: less than 4 GiB, and what Device.limits() says")
        used.add(piece.region)
    return batch


cdef int use(Resource user, list batch, int more) except -1:
    """Nobody closes it, or the regions, while the device is given work."""
    cdef Piece piece
    user.inside += more
    for piece in batch:
        piece.region.inside += more
    return 0


cdef int recvs_of(list batch, wr_id, ibv_recv_wr **wrs_p) except -1:
    """The work requests of a batch of receives, to be freed; `wr_id` counts up."""
    cdef ibv_recv_wr *wrs
    cdef ibv_sge *sges
    cdef Piece piece
    cdef uint64_t first = wr_id
    cdef int i, n = <int> len(batch)
    wrs = <ibv_recv_wr *> calloc(n, sizeof(ibv_recv_wr) + sizeof(ibv_sge))
    if wrs == NULL:
        raise MemoryError()
    sges = <ibv_sge *> (wrs + n)
    for i in range(n):
        piece = batch[i]
        sges[i].addr = <uint64_t> piece.region.span.ptr + piece.start
        sges[i].length, sges[i].lkey = <uint32_t> (piece.end - piece.start), piece.region.mr.lkey
        wrs[i].wr_id, wrs[i].next = first + <uint64_t> i, &wrs[i + 1] if i + 1 < n else NULL
        wrs[i].sg_list, wrs[i].num_sge = &sges[i], 1 if sges[i].length else 0
    wrs_p[0] = wrs
    return 0


cdef class SharedReceiveQueue(Resource):
    """Receives for many queue pairs: each message takes the oldest one, whichever of them it came to.

    Parameters
    ----------
    pd : ProtectionDomain
    recvs : int
        Receives that may be posted at a time.

    Raises
    ------
    DeviceError
        The device has no more, or not of that size, or none at all: `Device.limits`.

    Notes
    -----
    The ends of receives are in the completion queue of the queue pair that took them; `Completion.qp_num` says which.
    Where none is posted senders come again for some milliseconds, and then fail: keep it filled. Closing it closes its
    queue pairs.
    """

    cdef ibv_srq *srq
    cdef set used
    cdef readonly ProtectionDomain pd
    cdef readonly int recvs

    def __cinit__(self, ProtectionDomain pd not None, int recvs=256):
        cdef ibv_srq_init_attr init
        cdef int rc
        if recvs < 1:
            raise ValueError(f"recvs={recvs}: at least 1")
        self.pd, self.recvs = pd, recvs
        self.used = set()
        self.begin(1, (pd,))
        memset(&init, 0, sizeof(init))
        init.attr.max_wr, init.attr.max_sge = recvs, 1
        self.srq = self.verbs.create_srq(pd.pd, &init)
        if self.srq == NULL:
            rc = errno
            raise DeviceError(f"cannot make a shared queue of {recvs} receives on {pd.device.name}: "
                              f"{_os.strerror(rc)}; see Device.limits()")
        self.opened()

    def __dealloc__(self):
        self.drop()

    cdef int release(self) noexcept:
        cdef int rc = self.verbs.destroy_srq(self.srq)
        if not rc:
            self.used.clear()
        return rc

    def post_recv(self, what, *, wr_id=0):
        """As `QueuePair.post_recv`, for whichever queue pair needs it first."""
        cdef ibv_recv_wr *wrs = NULL
        cdef ibv_recv_wr *bad = NULL
        cdef int i, rc
        batch = pieces_of(self, self.pd, self.used, what)
        if not batch:
            return
        recvs_of(batch, wr_id, &wrs)
        use(self, batch, 1)
        with nogil:
            rc = ibv_post_srq_recv(self.srq, wrs, &bad)
        use(self, batch, -1)
        i = <int> (bad - wrs) if bad != NULL else 0
        free(wrs)
        if rc:
            rc = rc if rc > 0 else errno
            raise RequestError(f"post_recv on {self!r}: {_os.strerror(rc)} after {i} of {len(batch)}; it has room for "
                               f"{self.recvs} receives")

    def __repr__(self):
        return f"<SharedReceiveQueue of {self.recvs} receives on {self.pd.device.name}>"

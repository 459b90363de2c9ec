# verbs_qp.pxi - hrdma.verbs: reliable queue pairs; posting one work request, or a batch with one ring of the door bell.


cdef class QueuePair(Resource):
    """A reliable connection to one other queue pair.

    Parameters
    ----------
    pd : ProtectionDomain
    send_cq, recv_cq : CompletionQueue
        Where its ends are told; one for both where `recv_cq` is not given.
    sends, recvs : int
        Work requests that may be under way.
    inline : int
        Bytes that may be sent with ``inline=True``.
    srq : SharedReceiveQueue, optional
        Where its receives are taken from, instead of a queue of its own; `recvs` then says nothing.

    Attributes
    ----------
    num : int
    inline : int
        What the device made of it.
    state : str
        As the device has it: ``reset init rtr rts sqd sqe err``.
    address : QueuePairAddress
        What the peer's `connect` needs.
    dscp, sl : int
        Of what it sends, as the device has them since `connect`.

    Raises
    ------
    DeviceError
        The device has no more, or not with so many work requests.

    Notes
    -----
    Regions that were posted stay registered as long as the queue pair is there, unless they are closed. Posting from
    several threads is allowed; the order is then undefined.
    """

    cdef ibv_qp *qp
    cdef set used
    cdef uint32_t psn
    cdef bint recv_first
    cdef readonly ProtectionDomain pd
    cdef readonly CompletionQueue send_cq, recv_cq
    cdef readonly SharedReceiveQueue srq
    cdef readonly int sends, recvs, inline

    def __cinit__(self, ProtectionDomain pd not None, CompletionQueue send_cq not None, recv_cq=None, *, int sends=64,
                  int recvs=64, int inline=0, SharedReceiveQueue srq=None):
        cdef ibv_qp_init_attr init
        cdef ibv_qp_attr attr
        cdef CompletionQueue second = send_cq if recv_cq is None else recv_cq
        cdef int rc
        if send_cq.device is not pd.device or second.device is not pd.device:
            raise ValueError("the protection domain and the completion queues are of different devices")
        if sends < 1 or recvs < 1 or inline < 0:
            raise ValueError(f"sends={sends}, recvs={recvs}, inline={inline}: at least 1, 1 and 0")
        if srq is not None and srq.pd is not pd:
            raise ValueError(f"{srq!r} is of another protection domain")
        self.pd, self.send_cq, self.recv_cq, self.srq = pd, send_cq, second, srq
        self.sends, self.recvs = sends, recvs
        self.used = set()
        self.psn = _secrets.randbits(24)
        self.begin(0, (pd, send_cq, second) if srq is None else (pd, send_cq, second, srq))
        memset(&init, 0, sizeof(init))
        init.send_cq, init.recv_cq, init.qp_type = send_cq.cq, second.cq, IBV_QPT_RC
        init.cap.max_send_wr, init.cap.max_recv_wr, init.cap.max_inline_data = sends, recvs, inline
        init.cap.max_send_sge = init.cap.max_recv_sge = 1
        if srq is not None:
            init.srq, init.cap.max_recv_wr, init.cap.max_recv_sge = srq.srq, 0, 0
        self.qp = self.verbs.create_qp(pd.pd, &init)
        if self.qp == NULL:
            rc = errno
            raise DeviceError(f"cannot make a queue pair of {sends} sends, {recvs} receives and {inline} inline bytes "
                              f"on {pd.device.name}: {_os.strerror(rc)}"
                              + pd.device.has("; it has {queue_pairs} queue pairs in all, of {work_requests} sends "
                                              "and receives at most", rc))
        self.opened()
        self.inline = min(inline, <int> init.cap.max_inline_data)
        memset(&attr, 0, sizeof(attr))
        attr.qp_state = IBV_QPS_INIT
        attr.port_num = <uint8_t> pd.device.port
        attr.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC
        self.modify(&attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "cannot be set up")

    def __dealloc__(self):
        self.drop()

    cdef int release(self) noexcept:
        cdef int rc = self.verbs.destroy_qp(self.qp)
        if not rc:
            self.used.clear()
        return rc

    cdef int modify(self, ibv_qp_attr *attr, int mask, str what) except -1:
        cdef int rc = self.verbs.modify_qp(self.qp, attr, mask)
        if rc:
            raise RequestError(f"{self!r} {what}: {_os.strerror(rc)}")
        return 0

    @property
    def num(self):
        self.check()
        return self.qp.qp_num

    @property
    def state(self):
        cdef ibv_qp_attr attr
        cdef ibv_qp_init_attr init
        self.check()
        rc = self.verbs.query_qp(self.qp, &attr, IBV_QP_STATE, &init)
        if rc:
            raise RequestError(f"{self!r} cannot be asked for its state: {_os.strerror(rc)}")
        return ("reset", "init", "rtr", "rts", "sqd", "sqe", "err")[<int> attr.qp_state]

    @property
    def address(self):
        cdef Device device = self.pd.device
        return QueuePairAddress(device.gid, device.lid, self.num, self.psn, device.mtu)

    cdef int way(self, ibv_qp_attr *attr) except -1:
        """What the device has of the way to the peer."""
        cdef ibv_qp_init_attr init
        self.check()
        memset(attr, 0, sizeof(attr[0]))
        rc = self.verbs.query_qp(self.qp, attr, IBV_QP_AV, &init)
        if rc:
            raise RequestError(f"{self!r} cannot be asked for the way to its peer: {_os.strerror(rc)}")
        return 0

    @property
    def dscp(self):
        cdef ibv_qp_attr attr
        self.way(&attr)
        return attr.ah_attr.grh.traffic_class >> 2

    @property
    def sl(self):
        cdef ibv_qp_attr attr
        self.way(&attr)
        return attr.ah_attr.sl

    def connect(self, address, *, int dscp=0, int sl=0, ack_timeout=None):
        """Makes it ready to receive and to send; the peer does the same with this one's address, in any order.

        Parameters
        ----------
        address : QueuePairAddress or tuple
            Of the peer; what a queue pair of another library tells will do.
        dscp : int
            Traffic class on Ethernet, 0 to 63.
        sl : int
            Service level, 0 to 15: on InfiniBand the lane that packets take; on Ethernet its lower three bits are the
            priority of frames that have a VLAN.
        ack_timeout : float, optional
            Seconds without an acknowledgement after which it sends again, rounded up to a power of two times 4.096 us;
            left out, 67 ms. To be more than packets wait for the wire: behind a shaper, or in a low band, that is long.

        Raises
        ------
        RequestError
            There is no way there, or it was connected before. Use another queue pair.

        Notes
        -----
        Nothing is sent: whether the peer is there shows with the first work request, after seven such times. Of `dscp`
        and `sl` the properties of those names say what the device has taken: soft-RoCE forgets `sl`.
        """
        cdef Device device = self.pd.device
        cdef int exponent = HR_VERBS_ACK_TIMEOUT
        cdef ibv_qp_attr attr
        gid, lid, num, psn, mtu = address
        if mtu not in (256, 512, 1024, 2048, 4096):
            raise ValueError(f"mtu={mtu}: 256, 512, 1024, 2048 or 4096")
        if not 0 <= dscp <= 63:
            raise ValueError(f"dscp={dscp}: 0 to 63")
        if not 0 <= sl <= 15:
            raise ValueError(f"sl={sl}: 0 to 15")
        if ack_timeout is not None:
            if not 0 < ack_timeout <= 8000:
                raise ValueError(f"ack_timeout={ack_timeout}: more than 0, at most 8000 s")
            exponent = max(1, _math.ceil(_math.log2(ack_timeout / 4.096e-6)))
        raw = _ipaddress.IPv6Address(gid).packed
        self.check()
        memset(&attr, 0, sizeof(attr))
        attr.qp_state = IBV_QPS_RTR
        attr.path_mtu = <ibv_mtu> (<int> (min(<int> mtu, device.mtu)).bit_length() - 8)
        attr.dest_qp_num, attr.rq_psn = num, psn
        attr.max_dest_rd_atomic = <uint8_t> self.reads()
        attr.min_rnr_timer = HR_VERBS_RNR_TIMER
        attr.ah_attr.port_num, attr.ah_attr.dlid, attr.ah_attr.sl = <uint8_t> device.port, lid, <uint8_t> sl
        if device.attr.link_layer == IBV_LINK_LAYER_ETHERNET:
            attr.ah_attr.is_global = 1
            memcpy(attr.ah_attr.grh.dgid.raw, <const char *> raw, 16)
            attr.ah_attr.grh.sgid_index, attr.ah_attr.grh.hop_limit = <uint8_t> device.gid_index, HR_VERBS_HOPS
            attr.ah_attr.grh.traffic_class = <uint8_t> (dscp << 2)
        self.modify(&attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER, f"finds no way to {gid}")
        memset(&attr, 0, sizeof(attr))
        attr.qp_state = IBV_QPS_RTS
        attr.timeout, attr.retry_cnt, attr.rnr_retry = <uint8_t> exponent, HR_VERBS_RETRIES, HR_VERBS_RETRIES
        attr.sq_psn, attr.max_rd_atomic = self.psn, <uint8_t> self.reads()
        self.modify(&attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                    IBV_QP_MAX_QP_RD_ATOMIC, "does not get ready to send")

    cdef int reads(self) except -1:
        """Under way at a time, in either direction."""
        return max(1, min(HR_VERBS_READS, <int> self.pd.device.limits()["reads"]))

    def post_send(self, what, *, wr_id=0, imm=None, bint signaled=True, bint inline=False):
        """Sends to the receives that the peer has posted, a message for each piece.

        Parameters
        ----------
        what : MemoryRegion, Piece, or a sequence of them
            A sequence is a batch: one work request for each, whose `wr_id` counts up.
        wr_id : int
            Comes back in the `Completion`; 64 bits.
        imm : int, optional
            32 bits that come with each message.
        signaled : bool
            False: no completion unless it fails. Every so often one must be signaled, or the queue fills up.
        inline : bool
            The bytes are copied while posting.

        Raises
        ------
        RequestError
            The queue is full, or the device refuses; the message says how many of a batch were posted.

        Notes
        -----
        Returns when it was posted. The memory belongs to the device until its completion was polled.
        """
        opcode = IBV_WR_SEND if imm is None else IBV_WR_SEND_WITH_IMM
        self.post("post_send", what, opcode, 0, 0, wr_id, imm, signaled, inline)

    def write(self, what, remote, rkey, *, wr_id=0, imm=None, bint signaled=True, bint inline=False):
        """Writes into the peer's memory at address `remote`; a batch one piece after the other. Else as `post_send`.

        With `imm` each piece uses a receive of the peer, which is told of it.
        """
        opcode = IBV_WR_RDMA_WRITE if imm is None else IBV_WR_RDMA_WRITE_WITH_IMM
        self.post("write", what, opcode, remote, rkey, wr_id, imm, signaled, inline)

    def read(self, what, remote, rkey, *, wr_id=0, bint signaled=True):
        """Reads the peer's memory at address `remote` into the pieces. Else as `write`."""
        self.post("read", what, IBV_WR_RDMA_READ, remote, rkey, wr_id, None, signaled, False)

    cdef int post(self, str name, what, ibv_wr_opcode opcode, remote, rkey, wr_id, imm, bint signaled,
                  bint inline) except -1:
        cdef ibv_send_wr *wrs
        cdef ibv_send_wr *bad = NULL
        cdef ibv_sge *sges
        cdef Piece piece
        cdef uint64_t at = remote, first = wr_id
        cdef uint32_t key = rkey, word = 0 if imm is None else imm
        cdef int i, rc, n
        batch = pieces_of(self, self.pd, self.used, what)
        n = <int> len(batch)
        if not n:
            return 0
        wrs = <ibv_send_wr *> calloc(n, sizeof(ibv_send_wr) + sizeof(ibv_sge))
        if wrs == NULL:
            raise MemoryError()
        sges = <ibv_sge *> (wrs + n)
        for i in range(n):
            piece = batch[i]
            sges[i].addr = <uint64_t> piece.region.span.ptr + piece.start
            sges[i].length, sges[i].lkey = <uint32_t> (piece.end - piece.start), piece.region.mr.lkey
            wrs[i].wr_id, wrs[i].opcode = first + <uint64_t> i, opcode
            wrs[i].next = &wrs[i + 1] if i + 1 < n else NULL
            wrs[i].sg_list, wrs[i].num_sge = &sges[i], 1 if sges[i].length else 0
            wrs[i].send_flags = (IBV_SEND_SIGNALED if signaled else 0) | (IBV_SEND_INLINE if inline else 0)
            wrs[i].imm_data = htonl(word)
            if opcode != IBV_WR_SEND and opcode != IBV_WR_SEND_WITH_IMM:
                wrs[i].remote_addr, wrs[i].remote_key = at, key
                at += sges[i].length
        use(self, batch, 1)
        with nogil:
            rc = ibv_post_send(self.qp, wrs, &bad)
        use(self, batch, -1)
        i = <int> (bad - wrs) if bad != NULL else 0
        free(wrs)
        if rc:
            self.refused(name, rc, i, n, self.sends)
        return 0

    cdef int atomic(self, str name, what, ibv_wr_opcode opcode, remote, rkey, uint64_t operand, uint64_t swap, wr_id,
                    bint signaled) except -1:
        cdef ibv_send_wr wr
        cdef ibv_send_wr *bad = NULL
        cdef ibv_sge sge
        cdef Piece piece
        cdef int rc
        batch = pieces_of(self, self.pd, self.used, what)
        if len(batch) != 1 or len(batch[0]) != 8 or remote % 8:
            raise ValueError(f"{name}: one piece of 8 bytes, and a remote address that is a multiple of 8, not "
                             f"{[len(one) for one in batch]} and {remote:#x}")
        piece = batch[0]
        memset(&wr, 0, sizeof(wr))
        sge.addr, sge.length, sge.lkey = <uint64_t> piece.region.span.ptr + piece.start, 8, piece.region.mr.lkey
        wr.wr_id, wr.opcode, wr.sg_list, wr.num_sge = wr_id, opcode, &sge, 1
        wr.send_flags = IBV_SEND_SIGNALED if signaled else 0
        wr.atomic_addr, wr.atomic_key, wr.compare_add, wr.swap = remote, rkey, operand, swap
        use(self, batch, 1)
        with nogil:
            rc = ibv_post_send(self.qp, &wr, &bad)
        use(self, batch, -1)
        if rc:
            self.refused(name, rc, 0, 1, self.sends)
        return 0

    def fetch_add(self, what, remote, rkey, add, *, wr_id=0, bint signaled=True):
        """Adds to the 64-bit integer at the peer's address `remote`, at once; what was there before comes into `what`.

        Parameters
        ----------
        what : MemoryRegion or Piece
            8 bytes.
        remote : int
            A multiple of 8, in a region with ``remote_atomic``.
        add : int
            0 to 2**64 - 1; the sum wraps.

        Raises
        ------
        ValueError
            Not 8 bytes, not aligned, or `add` out of bounds; nothing was posted.
        RequestError
            As `post_send`.

        Notes
        -----
        Atomic among the accesses of the device; whether the processors take part is for the device to say (`limits`).
        """
        self.atomic("fetch_add", what, IBV_WR_ATOMIC_FETCH_AND_ADD, remote, rkey, word_of("add", add), 0, wr_id,
                    signaled)

    def compare_swap(self, what, remote, rkey, compare, swap, *, wr_id=0, bint signaled=True):
        """Where the 64-bit integer at `remote` is `compare`, it becomes `swap`; what was there comes into `what`.

        Else as `fetch_add`.
        """
        self.atomic("compare_swap", what, IBV_WR_ATOMIC_CMP_AND_SWP, remote, rkey, word_of("compare", compare),
                    word_of("swap", swap), wr_id, signaled)

    def post_recv(self, what, *, wr_id=0):
        """Gives the device memory for the peer's next messages, a piece for each; a batch as in `post_send`."""
        cdef ibv_recv_wr *wrs = NULL
        cdef ibv_recv_wr *bad = NULL
        cdef int i, rc
        if self.srq is not None:
            raise ValueError(f"{self!r} receives from {self.srq!r}: post there")
        batch = pieces_of(self, self.pd, self.used, what)
        if not batch:
            return
        recvs_of(batch, wr_id, &wrs)
        use(self, batch, 1)
        with nogil:
            rc = ibv_post_recv(self.qp, wrs, &bad)
        use(self, batch, -1)
        i = <int> (bad - wrs) if bad != NULL else 0
        free(wrs)
        if rc:
            self.refused("post_recv", rc, i, len(batch), self.recvs)

    def poll(self, int limit=16, timeout=0.0):
        """Completions of its queues, those of sending and of receiving, which are often the same.

        Parameters
        ----------
        limit : int
            At most so many, 1 to 64.
        timeout : float
            Seconds to wait for the first one, of either.

        Returns
        -------
        list of Completion
            Empty when none came in time. Those of one queue are in the order in which they came.

        Raises
        ------
        DeviceError
            A queue has lost completions, because more came than it has entries: close it.

        Notes
        -----
        As `CompletionQueue.poll`, with the longer ``spin_us`` of the two. What is found is taken: from a queue that
        other queue pairs have as well, theirs too, which `Completion.qp_num` tells. Two queues take turns in being
        asked first, so that neither keeps the other waiting.
        """
        self.check()
        self.inside += 1
        self.recv_first = not self.recv_first
        try:
            if self.send_cq is self.recv_cq:
                return polled(self.send_cq, None, limit, timeout)
            if self.recv_first:
                return polled(self.recv_cq, self.send_cq, limit, timeout)
            return polled(self.send_cq, self.recv_cq, limit, timeout)
        finally:
            self.inside -= 1

    cdef int refused(self, str name, int rc, int posted, int n, int room) except -1:
        rc = rc if rc > 0 else errno
        raise RequestError(f"{name} on {self!r}: {_os.strerror(rc)} after {posted} of {n}; it has room for {room} work "
                           "requests (poll for completions), and must be connected to send")

    def __repr__(self):
        return f"<QueuePair {self.qp.qp_num if self.live else 'closed'} on {self.pd.device.name}>"

# verbs_device.pxi - hrdma.verbs: devices, protection domains, registered memory; who is closed before whom.
#
# Every object keeps its owners alive and is known to them, so that closing an owner closes what depends on it first:
# queue pairs, then memory, completion queues, protection domains, the device. One that another thread is in the middle
# of using is not closed, and neither is anything above it. What nobody holds any more closes itself.
cimport cython
from libc.errno cimport ENOSYS, errno
from libc.string cimport memcpy
from verbs cimport *

import ipaddress as _ipaddress
import errno as _errno
import resource as _resource


@cython.no_gc_clear  # owners must be there when this is closed; a tuple, since the collector empties lists
cdef class Resource:
    """What the objects of `hrdma.verbs` have in common: ``close()``, ``closed``, and ``with``."""

    cdef object __weakref__
    cdef tuple owners
    cdef object dependants
    cdef const hr_verbs_backend *verbs
    cdef int order, forked_at, inside  # inside: calls that use it now
    cdef bint live, beginning

    cdef int begin(self, int order, tuple owners) except -1:
        """Until it is opened, or was not, its owners are in use."""
        self.order = order
        self.forked_at = forks
        self.owners = owners
        self.dependants = _weakref.WeakSet()
        for owner in owners:
            (<Resource> owner).check()
            self.verbs = (<Resource> owner).verbs
        for owner in owners:
            (<Resource> owner).inside += 1
        self.beginning = True
        return 0

    cdef int opened(self) except -1:
        self.live = True
        for owner in self.owners:
            (<Resource> owner).dependants.add(self)
        self.begun()
        return 0

    cdef void begun(self) noexcept:
        if self.beginning:
            for owner in self.owners:
                (<Resource> owner).inside -= 1
        self.beginning = False

    cdef int check(self) except -1:
        if self.forked_at != forks:
            raise ValueError(f"{self!r} was opened before fork: open the device again in the child")
        if not self.live:
            raise ValueError(f"{self!r} is closed")
        return 0

    cdef bint busy(self):
        # Itself last: between that look and what the caller does next no other thread runs.
        return self.live and (any([(<Resource> one).busy() for one in list(self.dependants)]) or self.inside > 0)

    cdef int release(self) noexcept:
        """Gives the device's object back; an errno, and then the device has it still."""
        return 0

    cdef int drop(self) noexcept:
        """For __dealloc__: nothing depends on what nobody holds. A forked child leaves its parent's device alone."""
        self.begun()
        if not self.live or self.forked_at != forks:
            return 0
        self.live = False
        return self.release()

    @property
    def closed(self):
        return not self.live or self.forked_at != forks

    def close(self):
        """Closes it, and what depends on it first. Closing twice is harmless.

        Raises
        ------
        RequestError
            Another thread is using it or what depends on it; it was not closed.
        DeviceError
            The device does not give it up; it is open still, and so is its memory.
        """
        cdef int rc = 0
        if self.closed:
            return
        if self.busy():
            raise RequestError(f"{self!r} is in use by another thread: end its call first")
        self.live = False  # nobody begins anything with it from here on
        try:
            for one in sorted(self.dependants, key=lambda one: (<Resource> one).order):
                one.close()
            rc = self.release()
            self.live = rc != 0
        except BaseException:
            self.live = True
            raise
        if rc:
            raise DeviceError(f"{self!r} cannot be closed: {_os.strerror(rc)}")

    def __enter__(self):
        self.check()
        return self

    def __exit__(self, *_):
        self.close()


cdef const hr_verbs_backend *backend_of(str name, const char **why_p) noexcept:
    return &hr_verbs_sim if hr_verbs_sim_named(name.encode(errors="replace")) else hr_verbs_lib(why_p)


def verbs_devices():
    """Names of the RDMA devices of this host, and ``"sim"``, the simulated one, which is last and everywhere.

    Whether their ports can be used `Device` finds out, or `found`.

    Raises
    ------
    DeviceError
        libibverbs is there, and cannot list them.
    """
    cdef const char *why = NULL
    cdef const hr_verbs_backend *verbs = hr_verbs_lib(&why)
    cdef ibv_device **found
    cdef int n = 0
    names = []
    if verbs != NULL:
        found = verbs.get_device_list(&n)
        if found == NULL and errno != ENOSYS:  # a kernel without RDMA
            raise DeviceError(f"cannot list the RDMA devices: {_os.strerror(errno)}")
        if found != NULL:
            names = [text_of(found[i].name) for i in range(n)]
            verbs.free_device_list(found)
    return [*names, "sim"]


def verbs_library():
    """Why libibverbs cannot be used, and what mends that; empty where it can."""
    cdef const char *why = NULL
    return "" if hr_verbs_lib(&why) != NULL else text_of(why)


cdef int gid_of(gid_index) except -2:
    """What is asked for; -1: the one that is best."""
    if gid_index is None:
        return -1
    cdef long long wanted = whole(gid_index)
    if wanted < 0:
        raise ValueError(f"gid_index={gid_index}: 0 or more; None for the one that is best")
    return <int> min(wanted, 0x7fffffff)


cdef class Device(Resource):
    """An opened RDMA device and one of its ports.

    Parameters
    ----------
    name : str
        One of `devices()`.
    port : int
    gid_index : int, optional
        Which of the port's GIDs its queue pairs have. None: RoCE v2 of an IPv4 address if there is one, else of a
        global IPv6 address, else of a link-local one.

    Attributes
    ----------
    name : str
    port, gid_index, lid, mtu : int
        MTU in bytes.
    gid : str
        As an IPv6 address.

    Raises
    ------
    DeviceError
        There is no such device, port or GID, the port is down, it cannot be opened, or libibverbs is missing; the
        message has the mend.
    ValueError
        The GID index is negative.
    """

    cdef ibv_context *ctx
    cdef ibv_port_attr attr
    cdef ibv_gid own
    cdef readonly str name
    cdef readonly int port, gid_index

    def __cinit__(self, str name not None, int port=1, gid_index=None):
        cdef const char *why = NULL
        cdef char idle[256]
        cdef int n = 0, i, rc, wanted = gid_of(gid_index)
        cdef ibv_device **found
        self.name, self.port = name, port
        self.begin(4, ())
        self.verbs = backend_of(name, &why)
        if self.verbs == NULL:
            raise DeviceError(text_of(why))
        if not 1 <= port <= 255:
            raise DeviceError(f"{name} has no port {port}")
        found = self.verbs.get_device_list(&n)
        for i in range(n if found != NULL else 0):
            if text_of(found[i].name) == name:
                self.ctx = self.verbs.open_device(found[i])
                why = b"it cannot be opened"
        rc = errno
        if found != NULL:
            self.verbs.free_device_list(found)
        if self.ctx == NULL:
            if why == NULL:
                raise DeviceError(f"no RDMA device is called {name!r}: there are {verbs_devices()}")
            mend = " (access to /dev/infiniband, and its driver: apt install ibverbs-providers)"
            raise DeviceError(f"cannot open {name}: {_os.strerror(rc)}{'' if self.verbs == &hr_verbs_sim else mend}")
        self.opened()
        rc = self.verbs.query_port(self.ctx, <uint8_t> port, &self.attr)
        if rc:
            raise DeviceError(f"{name} has no port {port}: {_os.strerror(rc)}")
        if self.attr.state != IBV_PORT_ACTIVE:  # each work request would find out by itself, after all its retries
            hr_verbs_port_idle(self.ctx.device, port, &self.attr, idle)
            raise DeviceError(text_of(idle))
        self.gid_index = hr_verbs_gid_choose(self.verbs, self.ctx, <uint8_t> port, self.attr.gid_tbl_len, wanted,
                                             &self.own)
        if self.gid_index < 0:
            which = "GID" if gid_index is None else f"GID {gid_index}"
            raise DeviceError(f"port {port} of {name} has no {which}: it has {self.attr.gid_tbl_len} entries; give its "
                              "interface an address")

    def __dealloc__(self):
        self.drop()

    cdef int release(self) noexcept:
        return self.verbs.close_device(self.ctx)

    @property
    def gid(self):
        return str(_ipaddress.IPv6Address((<char *> self.own.raw)[:16]))

    @property
    def lid(self):
        return self.attr.lid

    @property
    def mtu(self):
        return 128 << <int> self.attr.active_mtu

    def limits(self):
        """What the device can do.

        Returns
        -------
        dict
            ``vendor``, ``firmware``, ``queue_pairs``, ``work_requests`` of one queue pair, ``completions`` of one
            queue, ``regions``, ``region_bytes``, ``message_bytes``, ``reads`` under way at a time, ``ports``;
            ``shared_queues``: shared receive queues; ``atomics``: it has them; ``active``: the port can be used.
        """
        cdef ibv_device_attr attr
        self.check()
        rc = self.verbs.query_device(self.ctx, &attr)
        rc = rc or self.verbs.query_port(self.ctx, <uint8_t> self.port, &self.attr)
        if rc:
            raise DeviceError(f"{self.name} cannot be asked for its limits: {_os.strerror(rc)}")
        return {
            "vendor": attr.vendor_id, "firmware": text_of(attr.fw_ver), "queue_pairs": attr.max_qp,
            "work_requests": attr.max_qp_wr, "completions": attr.max_cqe, "regions": attr.max_mr,
            "region_bytes": attr.max_mr_size, "message_bytes": self.attr.max_msg_sz, "reads": attr.max_qp_rd_atom,
            "ports": attr.phys_port_cnt, "shared_queues": attr.max_srq, "atomics": attr.atomic_cap != IBV_ATOMIC_NONE,
            "active": self.attr.state == IBV_PORT_ACTIVE,
        }

    cdef str has(self, str words, int error):
        """Words with the device's limits, where these may be why something failed; empty where it cannot be asked."""
        if error not in (_errno.ENOMEM, _errno.ENOSPC, _errno.EINVAL):
            return ""
        try:
            return words.format(**self.limits())
        except DeviceError:
            return ""

    def __repr__(self):
        return f"<Device {self.name}:{self.port}>"


cdef class ProtectionDomain(Resource):
    """Queue pairs and the memory that they may touch.

    Raises
    ------
    DeviceError
        The device has no more.
    """

    cdef ibv_pd *pd
    cdef readonly Device device

    def __cinit__(self, Device device not None):
        self.device = device
        self.begin(3, (device,))
        self.pd = self.verbs.alloc_pd(device.ctx)
        if self.pd == NULL:
            raise DeviceError(f"cannot make a protection domain on {device.name}: {_os.strerror(errno)}")
        self.opened()

    def __dealloc__(self):
        self.drop()

    cdef int release(self) noexcept:
        return self.verbs.dealloc_pd(self.pd)

    def __repr__(self):
        return f"<ProtectionDomain of {self.device.name}>"


cdef class MemoryRegion(Resource):
    """Memory that the device may read and write, pinned while this is open. ``region[a:b]`` is a piece of it.

    Parameters
    ----------
    pd : ProtectionDomain
    buffer : object
        Anything contiguous with the buffer protocol, or a CPU tensor with DLPack; it is kept and cannot be resized
        meanwhile. What is read-only can be sent from and read by peers.
    remote_read, remote_write, remote_atomic : bool
        What a peer that knows ``address`` and ``rkey`` may do.

    Attributes
    ----------
    address, lkey, rkey : int

    Raises
    ------
    ValueError
        The buffer is empty, or read-only and to be written.
    RequestError
        The device or the memlock limit refuses; the message has the limit.

    Notes
    -----
    Cost: a system call, and every page is touched. Closing it while a peer writes ends the queue pair with an error.
    """

    cdef ibv_mr *mr
    cdef Span span
    cdef readonly ProtectionDomain pd

    def __cinit__(self, ProtectionDomain pd not None, buffer, *, bint remote_read=False, bint remote_write=False,
                  bint remote_atomic=False):
        cdef int access = 0, rc
        self.pd = pd
        self.begin(1, (pd,))
        try:
            span_open(buffer, True, &self.span)
            access = IBV_ACCESS_LOCAL_WRITE
        except (BufferError, TypeError, ValueError):
            if remote_write or remote_atomic:
                raise
            span_open(buffer, False, &self.span)
        if not self.span.nbytes:
            raise ValueError("an empty buffer cannot be registered")
        access |= IBV_ACCESS_REMOTE_READ if remote_read else 0
        access |= IBV_ACCESS_REMOTE_WRITE if remote_write else 0
        access |= IBV_ACCESS_REMOTE_ATOMIC if remote_atomic else 0
        with nogil:
            self.mr = self.verbs.reg_mr(pd.pd, self.span.ptr, self.span.nbytes, access)
        if self.mr == NULL:
            rc = errno
            limit = _resource.getrlimit(_resource.RLIMIT_MEMLOCK)[0]
            bound = f"; the memlock limit is {limit} bytes: ulimit -l unlimited"
            raise RequestError(f"cannot register {self.span.nbytes} bytes on {pd.device.name}: {_os.strerror(rc)}"
                               + pd.device.has("; it has room for {regions} regions in all", rc)
                               + (bound if limit != _resource.RLIM_INFINITY else ""))
        self.opened()

    def __dealloc__(self):
        if not self.drop():  # otherwise the device has it still, and the buffer stays for ever
            span_close(&self.span)

    cdef int release(self) noexcept:
        cdef int rc = self.verbs.dereg_mr(self.mr)
        if not rc:
            span_close(&self.span)
        return rc

    @property
    def address(self):
        self.check()
        return <uint64_t> self.span.ptr

    @property
    def lkey(self):
        self.check()
        return self.mr.lkey

    @property
    def rkey(self):
        self.check()
        return self.mr.rkey

    def __len__(self):
        return self.span.nbytes

    def __getitem__(self, place):
        if not isinstance(place, slice) or not (place.step is None or place.step == 1):
            raise TypeError("a piece of a region is region[start:end], in bytes")
        start, end, _ = place.indices(<Py_ssize_t> self.span.nbytes)
        return Piece(self, start, max(start, end))

    def __repr__(self):
        return f"<MemoryRegion of {self.span.nbytes} bytes on {self.pd.device.name}>"


cdef class Piece:
    """Some bytes of a region: what a work request moves. Made by ``region[a:b]``.

    Parameters
    ----------
    region : MemoryRegion
    start, end : int
        In bytes, ``0 <= start <= end <= len(region)``.

    Raises
    ------
    ValueError
        They are not within the region. A slice is cut to it instead.
    """

    cdef readonly MemoryRegion region
    cdef readonly size_t start, end

    def __cinit__(self, MemoryRegion region not None, start, end):
        cdef long long first = whole(start), last = whole(end)
        if not 0 <= first <= last or <size_t> last > region.span.nbytes:
            raise ValueError(f"start={start}, end={end}: not within {region!r}")
        self.region, self.start, self.end = region, <size_t> first, <size_t> last

    def __len__(self):
        return self.end - self.start

# engine.pxi - this process's place in a job: domains, connections, finished asynchronous requests.

MAX_RAILS = HR_MAX_RAILS


cdef class Engine:
    """Opens the providers and keeps the connections of one process.

    Parameters
    ----------
    self_id : int
        This process among the job's peers: its rank in the world.
    providers : str
        Names in order of preference, ``"shm,tcp"``; ``loop``, for oneself, is always there. ``"tcp,tcp:1"`` opens two
        domains of a provider, for two rails.
    token : bytes or None
        Secret of the job. None: peers on this host alone are believed, unless ``insecure``.
    ifname, rails, options, devices, fault : str or None
        Interface grammar, of all providers; ``"tcp:nic0,nic1"``, instead of it for rails 0 and 1 of tcp;
        ``"tcp:cc=cubic;shm:ring=1M"``; in the same form ``"verbs:mlx5_0"`` and faults to inject.
    spin_us : int
        How long a wait spins before it sleeps; -1 adapts.

    Raises
    ------
    DeviceError, RequestError, ValueError
        A provider that was asked for cannot be opened.
    """

    cdef hr_engine *handle
    cdef int forked_at
    cdef int inside         # calls that use the handle without the GIL
    cdef Py_ssize_t pending  # asynchronous requests on their way
    cdef object channels    # weak: those that must be closed before the engine
    cdef object loops       # asyncio loop -> how many of its futures wait
    cdef object __weakref__

    def __cinit__(self, uint64_t self_id, str providers, *, token=None, bint insecure=False, uint32_t epoch=0,
                  ifname=None, rails=None, options=None, devices=None, fault=None, int local_peers=0,
                  int spin_us=-1, uint64_t eager_credit=0):
        cdef hr_config config
        cdef char detail[256]
        cdef hr_status status
        cdef hr_engine *handle = NULL
        cdef bytes names = providers.encode()
        cdef bytes interfaces = (ifname or "").encode()
        cdef bytes lanes = (rails or "").encode()
        cdef bytes settings = (options or "").encode()
        cdef bytes hardware = (devices or "").encode()
        cdef bytes faults = (fault or "").encode()
        memset(&config, 0, sizeof(config))
        detail[0] = 0
        self.forked_at = forks
        self.channels = _weakref.WeakSet()
        self.loops = {}
        config.self_id = self_id
        config.providers = names
        config.ifname = <const char *> interfaces if interfaces else NULL
        config.rails = <const char *> lanes if lanes else NULL
        config.options = <const char *> settings if settings else NULL
        config.devices = <const char *> hardware if hardware else NULL
        config.fault = <const char *> faults if faults else NULL
        config.local_peers = local_peers
        config.spin_us = spin_us
        config.eager_credit = eager_credit
        if token:
            hr_auth_init(&config.auth, <const char *> <bytes> token, len(token), insecure, epoch)
        else:
            hr_auth_init(&config.auth, NULL, 0, insecure, epoch)
        with nogil:
            status = hr_engine_open(&config, &handle, detail)
        if status != HR_OK:
            message = f"cannot open the transport: {text_of(hr_status_text(status))}"
            raise status_error(status, with_detail(message, detail))
        self.handle = handle

    def __dealloc__(self):
        # An engine of the parent is left alone in a forked child: its threads are not there to be stopped.
        if self.handle != NULL and self.forked_at == forks:
            with nogil:
                hr_engine_close(self.handle, 0)

    cdef int check(self) except -1:
        if self.forked_at != forks:
            raise ValueError("used after fork: call hrdma.init() in the child, or start children before hrdma.init()")
        if self.handle == NULL:
            raise ValueError("the transport is closed: call hrdma.init() again")
        return 0

    cdef hr_engine *enter(self) except NULL:
        """For a call without the GIL, until ``inside`` is taken back: another thread may close the engine meanwhile."""
        self.check()
        self.inside += 1
        return self.handle

    @property
    def closed(self):
        return self.handle == NULL or self.forked_at != forks

    def domains(self):
        """What was opened.

        Returns
        -------
        dict
            Name of the provider, with ``:1`` for rail 1, to ``{"address": bytes, "caps": [...], "text": str,
            "eager_max", "segment",
            "max_send"}``.
        """
        cdef const char *name
        cdef char text[HR_ABOUT]
        cdef uint8_t address[HR_MAX_ADDR]
        cdef size_t size
        cdef hr_caps caps
        cdef int i = 0
        self.check()
        found = {}
        while True:
            size = sizeof(address)
            text[0] = 0
            if not hr_engine_domain(self.handle, i, &name, address, &size, &caps, text):
                return found
            found[text_of(name)] = {
                "address": (<char *> address)[:size],
                "caps": [word for bit, word in CAPS if caps.flags & bit],
                "text": text_of(text),
                "max_send": caps.max_send,
                "eager_max": caps.eager_max,
                "segment": caps.segment,
            }
            i += 1

    def locality(self, int local_ranks, int cores, bint turns=False):
        """How many ranks of the job share this host and how many cores they share; decides how to wait.

        turns: these are two ranks on two cores, and their background threads share one of them, by turns.
        """
        self.check()
        hr_engine_set_locality(self.handle, local_ranks, cores, turns)

    def connect(self, uint64_t peer_id, str provider, bytes address, bint active, int dscp=-1):
        """Begins to connect; both sides call it, one of them with ``active``. Rails are connected in turn.

        A DSCP of 0 to 63 makes a connection of a traffic class of its own, beside the one without (-1).
        """
        cdef bytes name = provider.encode()
        cdef const char *provider_name = name
        cdef const char *where = address
        cdef size_t size = len(address)
        cdef hr_status status
        cdef hr_engine *handle = self.enter()
        with nogil:
            status = hr_connect_classed(handle, peer_id, provider_name, where, size, active, dscp)
        self.inside -= 1
        if status == HR_OK:
            learn_registers(self.handle, provider_name)
        else:
            raise status_error(status, f"cannot connect to rank {peer_id} over {provider}: "
                               f"{text_of(hr_status_text(status))}", <int> peer_id, "init", -1, "connect", provider)

    def connect_wait(self, double seconds, int dscp=-1):
        """Until all begun connections stand, or those of a class, at most so many seconds.

        Raises
        ------
        PeerError, TimeoutError
            Names the first rank that could not be reached.
        """
        cdef int64_t deadline = deadline_in(seconds), now
        cdef uint64_t peer = 0
        cdef char detail[256]
        cdef hr_status status
        cdef hr_engine *handle
        while True:
            # Short pieces: a rank that dies meanwhile is told by another thread, Ctrl-C by the interpreter.
            detail[0] = 0
            handle = self.enter()
            with nogil:
                now = hr_now()
                status = hr_connect_wait_classed(handle, dscp, min(deadline, now + SLICE_NS // 4), &peer, detail)
            self.inside -= 1
            PyErr_CheckSignals()
            if status == HR_OK:
                return
            if status == HR_INTERRUPTED or (status == HR_ERR_TIMEOUT and hr_now() < deadline):
                continue
            raise status_error(
                status,
                with_detail(f"no connection to rank {peer} within {seconds:.3g} s" if status == HR_ERR_TIMEOUT else
                            f"cannot connect to rank {peer}: {text_of(hr_status_text(status))}", detail),
                <int> peer, "init", -1, "connect",
            )

    def traffic_class(self, str provider, int dscp, int answers, int priority):
        """Stamps every connection over a provider, those to come included, for what leaves from now on.

        RDMA's connections have their class from the beginning or not at all: say it before they are made, too.

        Parameters
        ----------
        provider : str
        dscp : int
            0 to 63.
        answers : int
            The same, for the first of several streams to a peer: what answers its bulk, and small messages.
        priority : int
            0, the most urgent, to 7.

        Returns
        -------
        bool
            Whether there are any, and all carry it: shared memory and some sockets cannot. Of a device it is read
            back.
        """
        cdef bytes name = provider.encode()
        cdef const char *provider_name = name
        cdef hr_status status
        cdef hr_engine *handle = self.enter()
        with nogil:
            status = hr_set_class(handle, provider_name, dscp, answers, priority)
        self.inside -= 1
        if status not in (HR_OK, HR_ERR_UNSUPPORTED):
            text = text_of(hr_status_text(status))
            raise status_error(status, f"dscp {dscp} and {answers}, priority {priority}: {text}")
        return status == HR_OK

    def class_taken(self, str provider, int dscp):
        """Whether all connections of that traffic class over a provider have it; of a device it is read back."""
        cdef bytes name = provider.encode()
        cdef const char *provider_name = name
        cdef hr_status status
        cdef hr_engine *handle = self.enter()
        with nogil:
            status = hr_class_taken(handle, provider_name, dscp)
        self.inside -= 1
        return status == HR_OK

    def class_end(self, int dscp, bint stands):
        """All ranks have said how connecting a class went: it stands, or what there is of it is forgotten."""
        cdef hr_engine *handle = self.enter()
        with nogil:
            if stands:
                hr_class_settle(handle, dscp)
            else:
                hr_class_forget(handle, dscp)
        self.inside -= 1

    def peer_lost(self, uint64_t peer_id, str reason):
        """The control plane knows that this peer is gone: breaks every communicator that holds it."""
        cdef bytes text = reason.encode()
        cdef const char *detail = text
        cdef hr_engine *handle
        if self.closed:
            return
        handle = self.enter()
        with nogil:
            hr_peer_lost(handle, peer_id, HR_ERR_PEER_LOST, detail)
        self.inside -= 1

    def counters(self):
        """The engine's counters, by name."""
        cdef hr_counter found[64]
        cdef int n, i
        self.check()
        n = hr_engine_counters(self.handle, found, 64)
        return {text_of(found[i].name): found[i].value for i in range(min(n, 64))}

    def peer_stats(self, uint64_t peer_id):
        """Traffic with one peer, or None where there is no connection.

        Returns
        -------
        dict or None
            ``provider``, ``connected``, ``tx_bytes``, ``rx_bytes``, ``tx_msgs``, ``rx_msgs``, ``busy`` (seconds with
            bulk in flight, as far as this side has heard), ``rate`` (bytes per second as measured; 0 unknown),
            ``rails``; ``fallbacks``, how often another provider had to stand in: while one does, it is named as
            ``provider``.
        """
        cdef hr_peer_stats stats
        self.check()
        if not hr_read_peer_stats(self.handle, peer_id, &stats):
            return None
        return {
            "provider": text_of(stats.provider if stats.carrier == NULL else stats.carrier),
            "connected": bool(stats.connected),
            "tx_bytes": stats.tx_bytes,
            "rx_bytes": stats.rx_bytes,
            "tx_msgs": stats.tx_msgs,
            "rx_msgs": stats.rx_msgs,
            "busy": stats.busy_ns * 1e-9,
            "rate": stats.rate,
            "rails": stats.rails,
            "fallbacks": stats.fell,
        }

    def remarks_fd(self):
        """A descriptor that is readable while :meth:`remarks` has something to tell."""
        self.check()
        return hr_engine_remark_fd(self.handle)

    def remarks(self):
        """What people should read of, since this was asked last; the 16 newest are kept.

        Returns
        -------
        list of str
        """
        cdef hr_remark remark
        self.check()
        found = []
        while hr_engine_remark(self.handle, &remark):
            text = text_of(remark.text)
            if remark.kind in (HR_REMARK_LEFT, HR_REMARK_STRANGER):
                found.append(text)
            elif remark.kind == HR_REMARK_FELL:
                found.append(f"no rail of {text_of(remark.provider)} is left to rank {remark.peer_id} ({text}): the "
                             f"connection goes on over {text_of(remark.by)}")
            else:
                found.append(f"the connection to rank {remark.peer_id} is over {text_of(remark.provider)} again "
                             f"({text})")
        return found

    def progress(self):
        """One pass of progress; for callers with a loop of their own."""
        cdef int events
        cdef hr_engine *handle = self.enter()
        with nogil:
            events = hr_progress(handle)
        self.inside -= 1
        self.reap()
        return events

    cdef int reap(self) except -1:
        """Takes the finished asynchronous requests from the engine and lets go of them and their buffers."""
        cdef hr_request *req
        cdef hr_request *following
        if self.pending == 0 or self.handle == NULL:
            return 0
        req = hr_engine_reap(self.handle)
        while req != NULL:
            following = req.next
            request = <Request> req.user
            self.pending -= 1
            Py_XDECREF(<PyObject *> request)  # the engine's reference, taken in Request.launched()
            request.finished()
            req = following
        return 0

    def _readable(self):
        # The descriptor is level-triggered: reaping empties it.
        self.reap()

    cdef int watch(self, object loop) except -1:
        n = self.loops.get(loop, 0)
        if n == 0:
            loop.add_reader(hr_engine_done_fd(self.handle), self._readable)
        self.loops[loop] = n + 1
        return 0

    cdef int unwatch(self, object loop) except -1:
        n = self.loops.pop(loop, 0) - 1
        if n > 0:
            self.loops[loop] = n
        elif n == 0 and self.handle != NULL and not loop.is_closed():
            loop.remove_reader(hr_engine_done_fd(self.handle))
        return 0

    def close(self, double seconds=5.0):
        """Closes every communicator, waits until what was sent has left (bounded), says goodbye, stops.

        Threads that are blocked in a call here come back with an error first.
        """
        cdef hr_engine *handle
        cdef int64_t deadline
        if self.handle == NULL:
            return
        if self.forked_at != forks:
            self.handle = NULL
            return
        deadline = deadline_in(seconds)
        for channel in list(self.channels):
            (<Channel> channel).release()
        self.reap()
        while self.inside and hr_now() < deadline:
            _sleep(0.001)
        handle = self.handle
        self.handle = NULL
        if self.inside:
            return  # a thread is still inside: rather leak the engine than pull it away under its feet
        for loop in list(self.loops):
            loop.remove_reader(hr_engine_done_fd(handle))
        self.loops.clear()
        with nogil:
            hr_engine_close(handle, deadline)


from time import sleep as _sleep

cdef tuple CAPS = (
    (HR_CAP_READ, "read"), (HR_CAP_WRITE, "write"), (HR_CAP_ATOMIC, "atomic"), (HR_CAP_MAP, "map"),
    (HR_CAP_ANYMEM, "anymem"), (HR_CAP_REVOKE, "revoke"), (HR_CAP_LOCAL, "local"),
    (HR_CAP_CONFIRMS, "confirms"), (HR_CAP_PINS, "pins"), (HR_CAP_RELAYS, "relays"),
)


cdef void learn_registers(hr_engine *handle, const char *provider) noexcept:
    """Whether memory has to be registered for this one: what calls are given is noted from now on (buffer.pxi)."""
    global registers
    cdef const char *name
    cdef char text[HR_ABOUT]
    cdef uint8_t address[HR_MAX_ADDR]
    cdef size_t size = sizeof(address)
    cdef hr_caps caps
    cdef int i = 0
    while hr_engine_domain(handle, i, &name, address, &size, &caps, text):
        registers = registers or (caps.flags & HR_CAP_PINS != 0 and strcmp(name, provider) == 0)
        size = sizeof(address)
        i += 1


def faults_fired():
    """Faults that were injected into this process, by whatever asked for them; of engines that are closed as well."""
    return hr_faults_fired()


def provider_devices(str name):
    """How many devices a provider has now, and why there are none.

    Returns
    -------
    tuple of (int, str)
    """
    cdef bytes text = name.encode()
    cdef const hr_provider *provider = hr_provider_find(text)
    cdef const char *why = NULL
    if provider == NULL:
        raise ValueError(f"no provider is called {name!r}")
    n = provider.device_count(&why)
    return n, text_of(why)

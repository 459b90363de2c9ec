# hr.pxd - what the binding uses of the C core; the only file that declares C of hr/.
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "hr/status.h" nogil:
    ctypedef enum hr_status:
        HR_OK
        HR_INPROGRESS
        HR_AGAIN
        HR_INTERRUPTED
        HR_ERR_INVALID
        HR_ERR_TRUNCATED
        HR_ERR_CANCELED
        HR_ERR_TIMEOUT
        HR_ERR_MISMATCH
        HR_ERR_NOMEM
        HR_ERR_UNSUPPORTED
        HR_ERR_ACCESS
        HR_ERR_IO
        HR_ERR_BROKEN
        HR_ERR_PEER_LOST
        HR_ERR_PROTOCOL
        HR_ERR_UNREACHABLE
        HR_ERR_AUTH
        HR_ERR_CLOSED
        HR_ERR_DEVICE
        HR_ERR_NO_DEVICE

    bint hr_is_peer_error(hr_status status) noexcept
    bint hr_is_device_error(hr_status status) noexcept
    const char *hr_status_text(hr_status status) noexcept


cdef extern from "hr/reduce.h" nogil:
    ctypedef enum hr_dtype:
        HR_UINT8
        HR_DTYPES

    ctypedef enum hr_redop:
        HR_SUM
        HR_REDOPS

    ctypedef enum hr_store:
        HR_STORE_CACHED
        HR_STORE_UNREAD

    int HR_REDUCE_MAX_SRC
    size_t hr_dtype_size(hr_dtype t) noexcept
    const char *hr_dtype_name(hr_dtype t) noexcept
    const char *hr_redop_name(hr_redop op) noexcept
    bint hr_reduce_supported(hr_redop op, hr_dtype t) noexcept
    void hr_reduce(hr_redop op, hr_dtype t, void *dst, const void *const *src, int nsrc, size_t count, double scale,
                   hr_store store) noexcept
    const char *hr_reduce_isa() noexcept
    bint hr_reduce_force_isa(const char *name) noexcept


cdef extern from "hr/memory.h" nogil:
    int HR_ARENA_WRITABLE_BY_PEERS

    struct hr_arena_info:
        uint64_t id
        int fd
        void *base
        size_t size
        uint32_t flags

    struct hr_arena_stats:
        uint64_t arenas
        uint64_t bytes_mapped
        uint64_t bytes_used
        uint64_t bytes_huge
        uint64_t blocks

    void *hr_arena_alloc(size_t size, uint32_t flags) noexcept
    size_t hr_page() noexcept
    void hr_arena_free(void *block) noexcept
    uint64_t hr_memory_keep(void *base, size_t size) noexcept
    void hr_memory_forget(uint64_t id) noexcept
    bint hr_arena_find(const void *addr, size_t size, hr_arena_info *info_p) noexcept
    void hr_arena_read_stats "hr_arena_stats"(hr_arena_stats *stats_p) noexcept


cdef extern from "hr/fault.h" nogil:
    uint64_t hr_faults_fired() noexcept


cdef extern from "hr/auth.h" nogil:
    struct hr_auth:
        int have_token

    void hr_auth_init(hr_auth *auth, const void *token, size_t size, int insecure, uint32_t epoch) noexcept


cdef extern from "hr/program.h" nogil:
    struct hr_ref:
        uint32_t buf
        uint64_t off

    struct hr_instr:
        uint8_t op

    struct hr_program:
        pass

    hr_status hr_program_new(const hr_instr *instrs, uint32_t ninstr, const uint32_t *unlocks, uint32_t nunlock,
                             const hr_ref *refs, uint32_t nref, uint64_t in_bytes, uint64_t out_bytes,
                             uint64_t tmp_bytes, int size, hr_program **program_p, char *detail) noexcept
    void hr_program_set_aside(hr_program *program, uint32_t what) noexcept
    void hr_program_put(hr_program *program) noexcept


cdef extern from "hr/provider.h" nogil:
    enum:
        HR_MAX_ADDR
        HR_LEFT
        HR_ABOUT
        HR_CAP_READ
        HR_CAP_WRITE
        HR_CAP_ATOMIC
        HR_CAP_MAP
        HR_CAP_ANYMEM
        HR_CAP_REVOKE
        HR_CAP_LOCAL
        HR_CAP_PINS
        HR_CAP_RELAYS
        HR_CAP_CONFIRMS

    struct hr_caps:
        uint32_t flags
        uint32_t max_send
        uint32_t eager_max
        uint32_t segment
        uint64_t window

    struct hr_provider:
        const char *name
        int (*device_count)(const char **why_p) noexcept

    const hr_provider *hr_provider_find(const char *name) noexcept


cdef extern from "hr/hr.h" nogil:
    const int64_t HR_FOREVER
    enum:
        HR_ANY_SOURCE
        HR_MAX_RAILS
        HR_PRIORITIES
        HR_PRIORITY_DEFAULT
        HR_REQ_ASYNC
        HR_REQ_WOULD
        HR_REQ_HEARD
        HR_REQ_PLAIN

    enum hr_phase:
        HR_PHASE_NONE
        HR_PHASE_CLOSE

    const char *hr_phase_name(hr_phase phase) noexcept

    struct hr_engine:
        pass

    struct hr_comm:
        pass

    struct hr_request:
        int32_t done
        int32_t status
        int32_t peer
        int32_t phase
        uint64_t nbytes
        const char *provider
        uint32_t flags
        int32_t priority
        void *user
        hr_request *next

    struct hr_config:
        uint64_t self_id
        const char *providers
        const char *ifname
        const char *rails
        const char *options
        const char *devices
        const char *fault
        int local_peers
        int spin_us
        uint64_t eager_credit
        hr_auth auth

    hr_status hr_engine_open(const hr_config *config, hr_engine **engine_p, char *detail) noexcept
    void hr_engine_close(hr_engine *engine, int64_t deadline) noexcept
    void hr_engine_set_locality(hr_engine *engine, int local_ranks, int cores, int turns) noexcept
    bint hr_engine_domain(hr_engine *engine, int i, const char **name_p, void *addr, size_t *addr_len_p,
                          hr_caps *caps_p, char *text) noexcept

    enum hr_remark_kind:
        HR_REMARK_LEFT
        HR_REMARK_FELL
        HR_REMARK_BACK
        HR_REMARK_STRANGER

    struct hr_remark:
        hr_remark_kind kind
        uint64_t peer_id
        const char *provider
        const char *by
        char text[256]

    int hr_engine_remark_fd(hr_engine *engine) noexcept
    bint hr_engine_remark(hr_engine *engine, hr_remark *remark_p) noexcept

    hr_status hr_connect_classed(hr_engine *engine, uint64_t peer_id, const char *provider, const void *addr,
                                 size_t size, int active, int dscp) noexcept
    hr_status hr_connect_wait_classed(hr_engine *engine, int dscp, int64_t deadline, uint64_t *peer_p,
                                      char *detail) noexcept
    void hr_class_settle(hr_engine *engine, int dscp) noexcept
    void hr_class_forget(hr_engine *engine, int dscp) noexcept
    hr_status hr_set_class(hr_engine *engine, const char *provider, int dscp, int answers, int priority) noexcept
    hr_status hr_class_taken(hr_engine *engine, const char *provider, int dscp) noexcept
    void hr_peer_lost(hr_engine *engine, uint64_t peer_id, hr_status why, const char *detail) noexcept
    int hr_engine_done_fd(hr_engine *engine) noexcept
    hr_request *hr_engine_reap(hr_engine *engine) noexcept

    struct hr_comm_state:
        int32_t status
        int32_t peer
        int32_t phase
        int32_t cause
        int64_t sequence
        const char *provider
        char detail[160]

    hr_status hr_comm_open_classed(hr_engine *engine, uint64_t id, const uint64_t *peers, int size, int rank,
                                   int dscp, hr_comm **comm_p) noexcept
    void hr_comm_close(hr_comm *comm) noexcept
    void hr_comm_break(hr_comm *comm, hr_status status, int peer, hr_phase phase, const char *detail,
                       int tell) noexcept
    void hr_comm_read_state "hr_comm_state"(hr_comm *comm, hr_comm_state *state_p) noexcept

    hr_status hr_isend(hr_comm *comm, const void *buf, size_t size, int dst, uint32_t tag,
                       hr_request *req) noexcept
    hr_status hr_irecv(hr_comm *comm, void *buf, size_t size, int src, uint32_t tag, hr_request *req) noexcept
    struct hr_desc:
        uint8_t bytes[32]
    struct hr_rmem:
        uint64_t len
    enum:
        HR_DESC_BYTES
        HR_ACCESS_REMOTE_READ
        HR_ACCESS_REMOTE_WRITE
        HR_ACCESS_REMOTE_ATOMIC
    enum hr_atomic_op:
        HR_ATOMIC_FETCH_ADD
        HR_ATOMIC_CMP_SWAP
    struct hr_exposed:
        pass

    hr_status hr_expose(hr_comm *comm, int rank, void *addr, size_t size, uint32_t access, hr_desc *desc_p,
                        hr_exposed **exposed_p, char *detail) noexcept
    void hr_conceal(hr_engine *engine, hr_exposed *exposed) noexcept
    hr_status hr_import(hr_comm *comm, int rank, const hr_desc *desc, hr_rmem *rmem_p) noexcept
    void hr_release(hr_comm *comm, int rank, hr_rmem *rmem) noexcept
    hr_status hr_iwrite(hr_comm *comm, int rank, const void *buf, size_t size, const hr_rmem *remote, uint64_t offset,
                        const uint32_t *notify, hr_request *req) noexcept
    hr_status hr_iread(hr_comm *comm, int rank, void *buf, size_t size, const hr_rmem *remote, uint64_t offset,
                       hr_request *req) noexcept
    hr_status hr_iatomic(hr_comm *comm, int rank, hr_atomic_op op, uint64_t *before, uint64_t operand,
                         uint64_t compare, const hr_rmem *remote, uint64_t offset, hr_request *req) noexcept
    hr_status hr_inotified(hr_comm *comm, int rank, hr_request *req) noexcept
    hr_status hr_run(hr_comm *comm, hr_program *program, const void *inp, void *out, hr_dtype dtype, hr_redop op,
                     uint64_t sig, hr_request *req) noexcept

    hr_status hr_wait(hr_engine *engine, hr_request *req, int64_t deadline, int polls) noexcept
    void hr_cancel(hr_engine *engine, hr_request *req, hr_status status) noexcept
    int hr_progress(hr_engine *engine) noexcept

    struct hr_counter:
        const char *name
        uint64_t value

    int hr_engine_counters(hr_engine *engine, hr_counter *counters, int n) noexcept

    struct hr_peer_stats:
        const char *provider
        const char *carrier
        uint64_t tx_bytes
        uint64_t rx_bytes
        uint64_t tx_msgs
        uint64_t rx_msgs
        uint64_t busy_ns
        double rate
        int connected
        int rails
        uint32_t fell

    bint hr_read_peer_stats "hr_peer_stats"(hr_engine *engine, uint64_t peer_id, hr_peer_stats *stats_p) noexcept

    int64_t hr_now() noexcept


cdef extern from "hr/shelf.h" nogil:
    struct hr_shelf:
        pass

    struct hr_shelf_record:
        size_t meta
        size_t content

    size_t HR_SHELF_BYTES
    int HR_SHELF_PLACES

    bint hr_shelf_put(hr_shelf *shelf, const void *name, size_t length, const void *meta, size_t nmeta,
                      const void *content, size_t ncontent) noexcept
    void hr_shelf_remove(hr_shelf *shelf, const void *name, size_t length) noexcept
    void hr_shelf_clear(hr_shelf *shelf) noexcept
    void hr_shelf_hold(hr_shelf *shelf, uint64_t home, int64_t until) noexcept
    void hr_shelf_hear(hr_shelf *shelf, int place, uint64_t number) noexcept
    bint hr_shelf_holds(const hr_shelf *shelf, uint64_t home) noexcept
    bint hr_shelf_find(const hr_shelf *shelf, const void *name, size_t length, hr_shelf_record *record_p) noexcept
    bint hr_shelf_read(const hr_shelf *shelf, const hr_shelf_record *record, void *meta, void *content) noexcept
    uint64_t hr_shelf_heard(const hr_shelf *shelf, int place) noexcept

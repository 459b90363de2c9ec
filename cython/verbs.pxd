# verbs.pxd - what hrdma.verbs uses of provider verbs: the table of a backend and the structs of the verbs.
from hr cimport hr_status
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "providers/verbs/backend.h" nogil:
    int IBV_SEND_SIGNALED
    int IBV_SEND_INLINE
    int IBV_ACCESS_LOCAL_WRITE
    int IBV_ACCESS_REMOTE_WRITE
    int IBV_ACCESS_REMOTE_READ
    int IBV_ACCESS_REMOTE_ATOMIC
    int IBV_QP_STATE
    int IBV_QP_ACCESS_FLAGS
    int IBV_QP_PKEY_INDEX
    int IBV_QP_PORT
    int IBV_QP_AV
    int IBV_QP_PATH_MTU
    int IBV_QP_TIMEOUT
    int IBV_QP_RETRY_CNT
    int IBV_QP_RNR_RETRY
    int IBV_QP_RQ_PSN
    int IBV_QP_MAX_QP_RD_ATOMIC
    int IBV_QP_MIN_RNR_TIMER
    int IBV_QP_SQ_PSN
    int IBV_QP_MAX_DEST_RD_ATOMIC
    int IBV_QP_DEST_QPN
    int IBV_WC_WITH_IMM
    int IBV_LINK_LAYER_ETHERNET
    int HR_VERBS_ACK_TIMEOUT
    int HR_VERBS_RETRIES
    int HR_VERBS_RNR_TIMER
    int HR_VERBS_HOPS
    int HR_VERBS_READS

    enum ibv_qp_state:
        IBV_QPS_RESET
        IBV_QPS_INIT
        IBV_QPS_RTR
        IBV_QPS_RTS
        IBV_QPS_ERR
    enum ibv_qp_type:
        IBV_QPT_RC
    enum ibv_mtu:
        pass
    enum ibv_port_state:
        IBV_PORT_ACTIVE
    enum ibv_wr_opcode:
        IBV_WR_RDMA_WRITE
        IBV_WR_RDMA_WRITE_WITH_IMM
        IBV_WR_SEND
        IBV_WR_SEND_WITH_IMM
        IBV_WR_RDMA_READ
        IBV_WR_ATOMIC_CMP_AND_SWP
        IBV_WR_ATOMIC_FETCH_AND_ADD
    enum ibv_atomic_cap:
        IBV_ATOMIC_NONE
    enum ibv_wc_status:
        IBV_WC_SUCCESS
    enum ibv_wc_opcode:
        IBV_WC_SEND
        IBV_WC_RDMA_WRITE
        IBV_WC_RDMA_READ
        IBV_WC_COMP_SWAP
        IBV_WC_FETCH_ADD
        IBV_WC_RECV
        IBV_WC_RECV_RDMA_WITH_IMM

    union ibv_gid:
        uint8_t raw[16]
    struct ibv_device:
        char name[64]
    struct ibv_context:
        ibv_device *device
    struct ibv_pd:
        pass
    struct ibv_mr:
        uint32_t lkey
        uint32_t rkey
    struct ibv_comp_channel:
        int fd
    struct ibv_cq:
        int cqe
    struct ibv_qp:
        uint32_t qp_num
    struct ibv_sge:
        uint64_t addr
        uint32_t length
        uint32_t lkey
    struct ibv_recv_wr:
        uint64_t wr_id
        ibv_recv_wr *next
        ibv_sge *sg_list
        int num_sge
    struct ibv_send_wr:
        uint64_t wr_id
        ibv_send_wr *next
        ibv_sge *sg_list
        int num_sge
        ibv_wr_opcode opcode
        unsigned send_flags
        uint32_t imm_data
        uint64_t remote_addr "wr.rdma.remote_addr"
        uint32_t remote_key "wr.rdma.rkey"
        uint64_t atomic_addr "wr.atomic.remote_addr"
        uint64_t compare_add "wr.atomic.compare_add"
        uint64_t swap "wr.atomic.swap"
        uint32_t atomic_key "wr.atomic.rkey"
    struct ibv_wc:
        uint64_t wr_id
        ibv_wc_status status
        ibv_wc_opcode opcode
        uint32_t vendor_err
        uint32_t byte_len
        uint32_t imm_data
        uint32_t qp_num
        unsigned wc_flags
    struct ibv_srq:
        pass
    struct ibv_srq_attr:
        uint32_t max_wr
        uint32_t max_sge
    struct ibv_srq_init_attr:
        ibv_srq_attr attr
    struct ibv_qp_cap:
        uint32_t max_send_wr
        uint32_t max_recv_wr
        uint32_t max_send_sge
        uint32_t max_recv_sge
        uint32_t max_inline_data
    struct ibv_qp_init_attr:
        ibv_cq *send_cq
        ibv_cq *recv_cq
        ibv_srq *srq
        ibv_qp_cap cap
        ibv_qp_type qp_type
    struct ibv_global_route:
        ibv_gid dgid
        uint8_t sgid_index
        uint8_t hop_limit
        uint8_t traffic_class
    struct ibv_ah_attr:
        ibv_global_route grh
        uint16_t dlid
        uint8_t sl
        uint8_t is_global
        uint8_t port_num
    struct ibv_qp_attr:
        ibv_qp_state qp_state
        ibv_mtu path_mtu
        uint32_t rq_psn
        uint32_t sq_psn
        uint32_t dest_qp_num
        unsigned qp_access_flags
        ibv_ah_attr ah_attr
        uint8_t max_rd_atomic
        uint8_t max_dest_rd_atomic
        uint8_t min_rnr_timer
        uint8_t port_num
        uint8_t timeout
        uint8_t retry_cnt
        uint8_t rnr_retry
    struct ibv_device_attr:
        char fw_ver[64]
        uint64_t max_mr_size
        uint32_t vendor_id
        uint32_t vendor_part_id
        int max_qp
        int max_qp_wr
        int max_cqe
        int max_mr
        int max_qp_rd_atom
        ibv_atomic_cap atomic_cap
        int max_srq
        uint8_t phys_port_cnt
    struct ibv_port_attr:
        ibv_port_state state
        ibv_mtu active_mtu
        int gid_tbl_len
        uint32_t max_msg_sz
        uint16_t lid
        uint8_t link_layer

    struct hr_verbs_backend:
        ibv_device **(*get_device_list)(int *n_p) noexcept nogil
        void (*free_device_list)(ibv_device **list) noexcept nogil
        ibv_context *(*open_device)(ibv_device *device) noexcept nogil
        int (*close_device)(ibv_context *ctx) noexcept nogil
        int (*query_device)(ibv_context *ctx, ibv_device_attr *attr) noexcept nogil
        int (*query_port)(ibv_context *ctx, uint8_t port, ibv_port_attr *attr) noexcept nogil
        ibv_pd *(*alloc_pd)(ibv_context *ctx) noexcept nogil
        int (*dealloc_pd)(ibv_pd *pd) noexcept nogil
        ibv_mr *(*reg_mr)(ibv_pd *pd, void *addr, size_t len, int access) noexcept nogil
        int (*dereg_mr)(ibv_mr *mr) noexcept nogil
        ibv_comp_channel *(*create_comp_channel)(ibv_context *ctx) noexcept nogil
        int (*destroy_comp_channel)(ibv_comp_channel *channel) noexcept nogil
        ibv_cq *(*create_cq)(ibv_context *ctx, int cqe, void *cq_context, ibv_comp_channel *channel,
                             int vector) noexcept nogil
        int (*destroy_cq)(ibv_cq *cq) noexcept nogil
        int (*get_cq_event)(ibv_comp_channel *channel, ibv_cq **cq, void **cq_context) noexcept nogil
        void (*ack_cq_events)(ibv_cq *cq, unsigned n) noexcept nogil
        ibv_srq *(*create_srq)(ibv_pd *pd, ibv_srq_init_attr *attr) noexcept nogil
        int (*destroy_srq)(ibv_srq *srq) noexcept nogil
        ibv_qp *(*create_qp)(ibv_pd *pd, ibv_qp_init_attr *attr) noexcept nogil
        int (*modify_qp)(ibv_qp *qp, ibv_qp_attr *attr, int mask) noexcept nogil
        int (*query_qp)(ibv_qp *qp, ibv_qp_attr *attr, int mask, ibv_qp_init_attr *init) noexcept nogil
        int (*destroy_qp)(ibv_qp *qp) noexcept nogil

    const hr_verbs_backend *hr_verbs_lib(const char **why_p) noexcept
    const hr_verbs_backend hr_verbs_sim
    int hr_verbs_sim_named(const char *name) noexcept
    int hr_verbs_gid_choose(const hr_verbs_backend *verbs, ibv_context *ctx, uint8_t port, int entries, int wanted,
                            ibv_gid *gid_p) noexcept
    const char *hr_verbs_wc_text(ibv_wc_status status) noexcept

    int ibv_post_send(ibv_qp *qp, ibv_send_wr *wr, ibv_send_wr **bad_wr) noexcept
    int ibv_post_recv(ibv_qp *qp, ibv_recv_wr *wr, ibv_recv_wr **bad_wr) noexcept
    int ibv_post_srq_recv(ibv_srq *srq, ibv_recv_wr *wr, ibv_recv_wr **bad_wr) noexcept
    int ibv_poll_cq(ibv_cq *cq, int n, ibv_wc *wc) noexcept
    int ibv_req_notify_cq(ibv_cq *cq, int solicited_only) noexcept


cdef extern from "providers/verbs/paths.h" nogil:
    enum:
        HR_VERBS_PATHS
        HR_VERBS_RAILS

    struct hr_verbs_wish:
        int port
        int gid
        const char *ifname
    struct hr_verbs_path:
        ibv_gid gid
        uint8_t port
        uint8_t index
        uint8_t mtu
        char *ndev
    struct hr_verbs_paths:
        hr_verbs_path list[HR_VERBS_PATHS]
        int n
    struct hr_verbs_found:
        const hr_verbs_backend *verbs
        ibv_context *ctx
        hr_verbs_wish wish
        hr_verbs_paths paths
        int distance
        char *reason

    void hr_verbs_path_kind(const hr_verbs_path *path, char *text) noexcept
    void hr_verbs_port_idle(const ibv_device *device, int port, const ibv_port_attr *attr, char *text) noexcept
    void hr_verbs_path_why(const hr_verbs_wish *wish, const hr_verbs_paths *paths, int i, char *text) noexcept

    hr_status hr_verbs_devices_find(const hr_verbs_wish *wish, const char *device, hr_verbs_found *found, int *n_p,
                                    char *left, char *detail) noexcept

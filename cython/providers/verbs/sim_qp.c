/* sim_qp.c - queue pairs of the simulated device: states, posting, completing, flushing. */

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "providers/verbs/sim.h"

static struct sim_context *ctx_of(const struct sim_qp *qp) { return sim_of(qp->base.context); }

/* 12 bits of index, 11 of generation, never 0. */
struct sim_qp *sim_qp_find(struct sim_context *ctx, uint32_t qpn) {
    struct sim_qp *qp = ctx->qps[qpn % SIM_MAX_QP];
    return qp && qp->base.qp_num == qpn ? qp : NULL;
}

struct ibv_qp *sim_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init) {
    struct sim_context *ctx = sim_of(pd->context);
    struct sim_qp *qp = NULL;
    int i = 0;
    if (init->qp_type != IBV_QPT_RC || init->cap.max_send_wr > SIM_MAX_WR || init->cap.max_recv_wr > SIM_MAX_WR ||
        init->cap.max_send_sge > SIM_SGE || init->cap.max_recv_sge > SIM_SGE ||
        init->cap.max_inline_data > SIM_INLINE) {
        errno = EINVAL;
        return NULL;
    }
    qp = calloc(1, sizeof *qp);
    if (qp) {
        qp->cap = init->cap;
        if (init->srq) qp->cap.max_recv_wr = 1;
        qp->sq = calloc(init->cap.max_send_wr + 1, sizeof *qp->sq);
        qp->rq = calloc(qp->cap.max_recv_wr + 1, sizeof *qp->rq);
    }
    pthread_mutex_lock(&ctx->lock);
    while (i < SIM_MAX_QP && ctx->qps[i]) i++;
    if (!qp || !qp->sq || !qp->rq || i == SIM_MAX_QP) {
        pthread_mutex_unlock(&ctx->lock);
        if (qp) free(qp->sq), free(qp->rq);
        free(qp);
        errno = ENOMEM;
        return NULL;
    }
    qp->base = (struct ibv_qp){.context = pd->context,
                               .qp_context = init->qp_context,
                               .pd = pd,
                               .send_cq = init->send_cq,
                               .recv_cq = init->recv_cq,
                               .srq = init->srq,
                               .qp_type = IBV_QPT_RC,
                               .state = IBV_QPS_RESET};
    ctx->generation[i] = (uint16_t)(ctx->generation[i] % 2047 + 1);
    qp->base.qp_num = (uint32_t)ctx->generation[i] << 12 | (uint32_t)i;
    qp->sig_all = init->sq_sig_all;
    qp->in = qp->out = -1;
    ctx->qps[i] = qp;
    ctx->nqps++;
    pthread_mutex_unlock(&ctx->lock);
    init->cap.max_inline_data = qp->cap.max_inline_data = SIM_INLINE;
    return &qp->base;
}

int sim_destroy_qp(struct ibv_qp *base) {
    struct sim_context *ctx = sim_of(base->context);
    struct sim_qp *qp = (struct sim_qp *)base;
    pthread_mutex_lock(&ctx->lock);
    sim_hang_up(qp);
    sim_srq_clean(qp);
    ctx->qps[base->qp_num % SIM_MAX_QP] = NULL;
    ctx->nqps--;
    pthread_mutex_unlock(&ctx->lock);
    free(qp->sq);
    free(qp->rq);
    free(qp);
    return 0;
}

/* ---- completing ---- */

static enum ibv_wc_opcode wc_opcode(enum ibv_wr_opcode opcode) {
    switch (opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM: return IBV_WC_RDMA_WRITE;
    case IBV_WR_RDMA_READ: return IBV_WC_RDMA_READ;
    case IBV_WR_ATOMIC_CMP_AND_SWP: return IBV_WC_COMP_SWAP;
    case IBV_WR_ATOMIC_FETCH_AND_ADD: return IBV_WC_FETCH_ADD;
    default: return IBV_WC_SEND;
    }
}

static struct sim_wqe *wqe_at(struct sim_qp *qp, uint32_t i) { return &qp->sq[i % qp->cap.max_send_wr]; }

static int is_atomic(enum ibv_wr_opcode opcode) {
    return opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

static int has_imm(enum ibv_wr_opcode opcode) {
    return opcode == IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

/* Errors are always told, successes when that was asked for. */
void sim_complete(struct sim_qp *qp, enum ibv_wc_status status) {
    const struct sim_wqe *wqe = wqe_at(qp, qp->sq_head++);
    struct ibv_wc wc = {.wr_id = wqe->wr.wr_id,
                        .status = status,
                        .opcode = wc_opcode(wqe->wr.opcode),
                        .byte_len = wqe->len,
                        .qp_num = qp->base.qp_num,
                        .wc_flags = has_imm(wqe->wr.opcode) ? IBV_WC_WITH_IMM : 0};
    if (status != IBV_WC_SUCCESS || qp->sig_all || wqe->wr.send_flags & IBV_SEND_SIGNALED)
        sim_cq_push((struct sim_cq *)qp->base.send_cq, &wc);
}

void sim_complete_recv(struct sim_qp *qp, enum ibv_wc_status status, enum ibv_wc_opcode opcode, uint64_t len,
                       const struct sim_packet *packet) {
    struct ibv_wc wc = {.wr_id = qp->rq[qp->rq_head++ % qp->cap.max_recv_wr].wr_id,
                        .status = status,
                        .opcode = opcode,
                        .byte_len = (uint32_t)len,
                        .qp_num = qp->base.qp_num,
                        .src_qp = qp->attr.dest_qp_num,
                        .wc_flags = IBV_WC_GRH}; /* which every packet of RoCE has */
    if (packet && packet->flags & SIM_IMM) {
        wc.wc_flags |= IBV_WC_WITH_IMM;
        wc.imm_data = packet->imm;
    }
    sim_cq_push((struct sim_cq *)qp->base.recv_cq, &wc);
}

/* What was posted goes to the device. */
static void take_in(struct sim_qp *qp) {
    for (; qp->untold; qp->untold--) {
        struct sim_wqe *wqe = wqe_at(qp, qp->sq_tail++);
        uint32_t packets = is_atomic(wqe->wr.opcode) ? 1 : sim_packets(wqe->len);
        wqe->first = qp->psn;
        wqe->last = (qp->psn + packets - 1) & SIM_PSN;
        qp->psn = (wqe->last + 1) & SIM_PSN;
    }
}

static void flush_sends(struct sim_qp *qp) {
    while (qp->sq_head != qp->sq_tail) sim_complete(qp, IBV_WC_WR_FLUSH_ERR);
    qp->sq_at = qp->sq_tail;
}

void sim_qp_error(struct sim_qp *qp) {
    if (qp->base.state == IBV_QPS_ERR) return;
    qp->base.state = IBV_QPS_ERR;
    sim_hang_up(qp);
    take_in(qp);
    flush_sends(qp);
    if (qp->base.srq && ctx_of(qp)->keeps) qp->rq_head = qp->rq_tail;
    if (qp->base.srq) sim_srq_last(qp);
    while (qp->rq_head != qp->rq_tail) sim_complete_recv(qp, IBV_WC_WR_FLUSH_ERR, IBV_WC_RECV, 0, NULL);
}

/* ---- states ---- */

/* What each step needs, and may have, as the InfiniBand specification's table of transitions has it for reliable
 * connections. */
static int transition(enum ibv_qp_state from, enum ibv_qp_state to, int mask) {
    static const struct {
        enum ibv_qp_state from, to;
        int needs, may;
    } steps[] = {
        {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
        {IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
        {IBV_QPS_INIT, IBV_QPS_RTR,
         IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
             IBV_QP_MIN_RNR_TIMER,
         IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX},
        {IBV_QPS_RTR, IBV_QPS_RTS,
         IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
         IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
        {IBV_QPS_RTS, IBV_QPS_RTS, 0, IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
    };
    mask &= ~IBV_QP_STATE;
    if (to == IBV_QPS_RESET || (to == IBV_QPS_ERR && from != IBV_QPS_RESET)) return !mask;
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++)
        if (steps[i].from == from && steps[i].to == to)
            return (mask & steps[i].needs) == steps[i].needs && !(mask & ~(steps[i].needs | steps[i].may));
    return 0;
}

static void take(struct ibv_qp_attr *have, const struct ibv_qp_attr *attr, int mask) {
    if (mask & IBV_QP_ACCESS_FLAGS) have->qp_access_flags = attr->qp_access_flags;
    if (mask & IBV_QP_PKEY_INDEX) have->pkey_index = attr->pkey_index;
    if (mask & IBV_QP_PORT) have->port_num = attr->port_num;
    if (mask & IBV_QP_AV) have->ah_attr = attr->ah_attr;
    if (mask & IBV_QP_PATH_MTU) have->path_mtu = attr->path_mtu;
    if (mask & IBV_QP_TIMEOUT) have->timeout = attr->timeout;
    if (mask & IBV_QP_RETRY_CNT) have->retry_cnt = attr->retry_cnt;
    if (mask & IBV_QP_RNR_RETRY) have->rnr_retry = attr->rnr_retry;
    if (mask & IBV_QP_RQ_PSN) have->rq_psn = attr->rq_psn & SIM_PSN;
    if (mask & IBV_QP_MAX_QP_RD_ATOMIC) have->max_rd_atomic = attr->max_rd_atomic;
    if (mask & IBV_QP_MIN_RNR_TIMER) have->min_rnr_timer = attr->min_rnr_timer;
    if (mask & IBV_QP_SQ_PSN) have->sq_psn = attr->sq_psn & SIM_PSN;
    if (mask & IBV_QP_MAX_DEST_RD_ATOMIC) have->max_dest_rd_atomic = attr->max_dest_rd_atomic;
    if (mask & IBV_QP_DEST_QPN) have->dest_qp_num = attr->dest_qp_num;
}

static void reset(struct sim_qp *qp) {
    sim_hang_up(qp);
    qp->sq_head = qp->sq_tail = qp->sq_at = qp->at_off = qp->untold = 0;
    qp->rq_head = qp->rq_tail = 0;
    qp->gone = qp->reads = qp->nak_sent = 0;
    qp->offset = 0;
}

int sim_modify_qp(struct ibv_qp *base, struct ibv_qp_attr *attr, int mask) {
    struct sim_context *ctx = sim_of(base->context);
    struct sim_qp *qp = (struct sim_qp *)base;
    int rc = 0;
    pthread_mutex_lock(&ctx->lock);
    enum ibv_qp_state to = mask & IBV_QP_STATE ? attr->qp_state : base->state;
    if (!transition(base->state, to, mask) ||
        (mask & IBV_QP_PORT && (attr->port_num < 1 || attr->port_num > ctx->ports)) ||
        (mask & IBV_QP_AV && attr->ah_attr.grh.sgid_index >= ctx->ngids) ||
        (mask & IBV_QP_AV && !attr->ah_attr.is_global) ||
        (mask & IBV_QP_MAX_QP_RD_ATOMIC && attr->max_rd_atomic > SIM_RD_ATOMIC)) {
        rc = EINVAL;
    } else {
        take(&qp->attr, attr, mask);
        if (to == IBV_QPS_ERR) {
            sim_qp_error(qp);
        } else if (to == IBV_QPS_RESET) {
            reset(qp);
        } else if (to == IBV_QPS_RTR && base->state != to) {
            base->state = to;
            qp->expect = qp->attr.rq_psn;
            sim_pair(qp);
        } else if (to == IBV_QPS_RTS && base->state != to) {
            base->state = to;
            qp->psn = qp->attr.sq_psn;
            qp->rnr_left = qp->attr.rnr_retry;
            qp->retry_left = qp->attr.retry_cnt;
            qp->silent = 0;
            sim_dial(qp);
        }
        base->state = to;
    }
    pthread_mutex_unlock(&ctx->lock);
    return rc;
}

int sim_query_qp(struct ibv_qp *base, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init) {
    struct sim_qp *qp = (struct sim_qp *)base;
    (void)mask;
    pthread_mutex_lock(&ctx_of(qp)->lock);
    *attr = qp->attr;
    attr->qp_state = attr->cur_qp_state = base->state;
    attr->cap = qp->cap;
    *init = (struct ibv_qp_init_attr){
        .qp_context = base->qp_context, .send_cq = base->send_cq, .recv_cq = base->recv_cq, .cap = qp->cap};
    init->qp_type = IBV_QPT_RC;
    init->sq_sig_all = qp->sig_all;
    pthread_mutex_unlock(&ctx_of(qp)->lock);
    return 0;
}

/* ---- posting ---- */

/* Takes a copy: lists and inline data belong to the caller again when post_send returns. */
static int wqe_fill(struct sim_qp *qp, struct sim_wqe *wqe, const struct ibv_send_wr *wr) {
    uint64_t len = 0;
    if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->cap.max_send_sge ||
        (unsigned)wr->opcode > IBV_WR_ATOMIC_FETCH_AND_ADD)
        return EINVAL;
    for (int i = 0; i < wr->num_sge; i++) len += wr->sg_list[i].length;
    if (len > SIM_MAX_MSG || (is_atomic(wr->opcode) && (len != 8 || wr->wr.atomic.remote_addr % 8))) return EINVAL;
    int is_inline = wr->send_flags & IBV_SEND_INLINE;
    if (is_inline && (len > qp->cap.max_inline_data || wr->opcode == IBV_WR_RDMA_READ || is_atomic(wr->opcode)))
        return ENOMEM;
    memset(wqe, 0, offsetof(struct sim_wqe, data));
    wqe->wr = *wr;
    wqe->len = (uint32_t)len;
    wqe->have = 0;
    wqe->answered = 0;
    uint8_t *at = wqe->data;
    for (int i = 0; i < wr->num_sge; i++) {
        wqe->sge[i] = wr->sg_list[i];
        if (!is_inline) continue;
        memcpy(at, (const void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length);
        at += wr->sg_list[i].length;
    }
    return 0;
}

int sim_post_send(struct ibv_qp *base, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr) {
    struct sim_qp *qp = (struct sim_qp *)base;
    struct sim_context *ctx = ctx_of(qp);
    struct ibv_send_wr *first = wr;
    int rc = 0;
    pthread_mutex_lock(&ctx->lock);
    int ready = base->state == IBV_QPS_RTS || base->state == IBV_QPS_ERR;
    for (; wr && (ready || ctx->as_soft_roce); wr = wr->next, qp->untold++) {
        uint32_t at = qp->sq_tail + qp->untold;
        rc = at - qp->sq_head < qp->cap.max_send_wr ? wqe_fill(qp, wqe_at(qp, at), wr) : ENOMEM;
        if (rc) break;
    }
    if (!ready) rc = EINVAL;
    if (rc) *bad_wr = ready ? wr : first;
    if (ready) take_in(qp);
    if (base->state == IBV_QPS_RTS) sim_transmit(qp);
    if (base->state == IBV_QPS_ERR) flush_sends(qp);
    pthread_mutex_unlock(&ctx->lock);
    return rc;
}

int sim_rwqe_fill(struct sim_rwqe *rwqe, const struct ibv_recv_wr *wr, uint32_t waiting, uint32_t cap) {
    if (wr->num_sge < 0 || wr->num_sge > SIM_SGE) return EINVAL;
    if (waiting >= cap) return ENOMEM;
    rwqe->wr_id = wr->wr_id;
    rwqe->num_sge = wr->num_sge;
    for (int i = 0; i < wr->num_sge; i++) rwqe->sge[i] = wr->sg_list[i];
    return 0;
}

int sim_post_recv(struct ibv_qp *base, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr) {
    struct sim_qp *qp = (struct sim_qp *)base;
    int rc = 0;
    pthread_mutex_lock(&ctx_of(qp)->lock);
    for (; wr; wr = wr->next) {
        if (base->state == IBV_QPS_RESET || base->srq || (uint32_t)wr->num_sge > qp->cap.max_recv_sge)
            rc = EINVAL;
        else
            rc = sim_rwqe_fill(&qp->rq[qp->rq_tail % qp->cap.max_recv_wr], wr, qp->rq_tail - qp->rq_head,
                               qp->cap.max_recv_wr);
        if (rc) break;
        qp->rq_tail++;
        if (base->state == IBV_QPS_ERR && !ctx_of(qp)->as_soft_roce)
            sim_complete_recv(qp, IBV_WC_WR_FLUSH_ERR, IBV_WC_RECV, 0, NULL);
    }
    if (rc) *bad_wr = wr;
    pthread_mutex_unlock(&ctx_of(qp)->lock);
    return rc;
}

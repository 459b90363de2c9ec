/* sim_resp.c - the responder of the simulated device: requests in order, checked, executed, answered. */

#include <string.h>

#include "providers/verbs/sim.h"

/* ---- answers ---- */

static struct sim_answer *answer_at(struct sim_qp *qp, uint32_t i) { return &qp->answers[i % SIM_ANSWERS]; }

static void answer(struct sim_qp *qp, struct sim_answer a) {
    uint32_t waiting = qp->answer_tail - qp->answer_head;
    if (a.op == SIM_ACK && waiting && answer_at(qp, qp->answer_tail - 1)->op == SIM_ACK) {
        answer_at(qp, qp->answer_tail - 1)->psn = a.psn; /* one acknowledgement stands for those before it */
    } else if (waiting < SIM_ANSWERS) {
        *answer_at(qp, qp->answer_tail++) = a;
    } else {
        sim_qp_error(qp); /* more unanswered reads than the requester may have */
        return;
    }
    sim_answer_pump(qp);
}

static void refuse(struct sim_qp *qp, enum sim_nak nak, uint32_t psn) {
    answer(qp, (struct sim_answer){.op = SIM_NAK, .nak = (uint8_t)nak, .psn = psn});
}

/* A fault of the requester's takes both queue pairs down. The answer leaves first. */
static void refuse_for_good(struct sim_qp *qp, enum sim_nak nak, uint32_t psn) {
    refuse(qp, nak, psn);
    sim_qp_error(qp);
}

static int allowed(struct sim_qp *qp, uint32_t rkey, uint64_t addr, uint64_t len, int access) {
    return sim_mr_allows(sim_of(qp->base.context), qp->base.pd, rkey, addr, len, access);
}

/* A queue pair that peers may not read does not know what a read is: such a request is invalid, whatever its key. */
static int knows(const struct sim_qp *qp, uint8_t op) {
    static const unsigned rights[] = {[SIM_WRITE] = IBV_ACCESS_REMOTE_WRITE,
                                      [SIM_READ] = IBV_ACCESS_REMOTE_READ,
                                      [SIM_CAS] = IBV_ACCESS_REMOTE_ATOMIC,
                                      [SIM_ADD] = IBV_ACCESS_REMOTE_ATOMIC};
    return op == SIM_SEND || (op < sizeof rights / sizeof rights[0] && qp->attr.qp_access_flags & rights[op]);
}

/* The next packet of the answer to a read; the region may be gone by now. 0: the queue pair has failed. */
static int next_data(struct sim_qp *qp, struct sim_answer *a, struct sim_packet *p, uint8_t *payload, size_t *len_p) {
    uint64_t left = a->len - a->sent;
    *len_p = left < SIM_MTU ? (size_t)left : SIM_MTU;
    p->psn = (a->psn + (uint32_t)(a->sent / SIM_MTU)) & SIM_PSN;
    if (*len_p && !allowed(qp, a->rkey, a->addr + a->sent, *len_p, IBV_ACCESS_REMOTE_READ)) return 0;
    return sim_dma(sim_of(qp->base.context), payload, (const void *)(uintptr_t)(a->addr + a->sent), *len_p);
}

void sim_answer_pump(struct sim_qp *qp) {
    uint8_t payload[SIM_MTU];
    while (qp->answer_head != qp->answer_tail && qp->in >= 0 && !qp->in_waits) {
        struct sim_answer *a = answer_at(qp, qp->answer_head);
        struct sim_packet p = {
            .op = a->op, .nak = a->nak, .psn = a->psn, .addr = a->addr, .flags = SIM_FIRST | SIM_LAST};
        size_t len = 0;
        if (a->op == SIM_DATA && !next_data(qp, a, &p, payload, &len)) {
            qp->answer_head = qp->answer_tail;
            refuse_for_good(qp, SIM_NAK_ACCESS, p.psn);
            return;
        }
        if (sim_wire_send(qp, 0, &p, payload, len) <= 0) return;
        a->sent += len;
        if (a->op != SIM_DATA || a->sent == a->len) qp->answer_head++;
    }
}

/* ---- requests ---- */

static void accept_packet(struct sim_qp *qp, uint32_t packets) {
    qp->expect = (qp->expect + packets) & SIM_PSN;
    qp->nak_sent = 0;
}

static void acknowledge(struct sim_qp *qp, uint32_t psn) { answer(qp, (struct sim_answer){.op = SIM_ACK, .psn = psn}); }

static struct sim_rwqe *posted(struct sim_qp *qp, uint32_t psn) {
    if (qp->rq_head == qp->rq_tail && qp->base.srq) sim_srq_take(qp);
    if (qp->rq_head != qp->rq_tail) return &qp->rq[qp->rq_head % qp->cap.max_recv_wr];
    qp->nak_sent = 1;
    refuse(qp, SIM_NAK_RNR, psn);
    return NULL;
}

/* What arrives cannot be put there. soft-RoCE's copying fails in one way, whatever the reason. */
static void refuse_send(struct sim_qp *qp, enum ibv_wc_status status, enum sim_nak nak, uint32_t psn) {
    int same = sim_of(qp->base.context)->as_soft_roce;
    sim_complete_recv(qp, same ? IBV_WC_LOC_QP_OP_ERR : status, IBV_WC_RECV, 0, NULL);
    refuse_for_good(qp, same ? SIM_NAK_OPERATION : nak, psn);
}

static void on_send(struct sim_qp *qp, const struct sim_packet *p, const void *payload, size_t len) {
    const struct sim_rwqe *rwqe = posted(qp, p->psn);
    uint64_t room = 0;
    if (!rwqe) return;
    if (p->flags & SIM_FIRST) qp->offset = 0;
    for (int i = 0; i < rwqe->num_sge; i++) room += rwqe->sge[i].length;
    if (len > room - qp->offset) {
        refuse_send(qp, IBV_WC_LOC_LEN_ERR, SIM_NAK_INVALID, p->psn);
        return;
    }
    if (!sim_scatter(qp, rwqe->sge, rwqe->num_sge, qp->offset, payload, len)) {
        refuse_send(qp, IBV_WC_LOC_PROT_ERR, SIM_NAK_OPERATION, p->psn);
        return;
    }
    qp->offset += len;
    accept_packet(qp, 1);
    if (!(p->flags & SIM_LAST)) return;
    sim_complete_recv(qp, IBV_WC_SUCCESS, IBV_WC_RECV, qp->offset, p);
    acknowledge(qp, p->psn);
}

/* The requester may not write there. soft-RoCE has taken the receive of immediate data by then, and ends it so, too. */
static void refuse_write(struct sim_qp *qp, const struct sim_packet *p) {
    if (sim_of(qp->base.context)->as_soft_roce && p->flags & SIM_IMM)
        sim_complete_recv(qp, IBV_WC_REM_ACCESS_ERR, IBV_WC_RECV_RDMA_WITH_IMM, 0, NULL);
    refuse_for_good(qp, SIM_NAK_ACCESS, p->psn);
}

static void on_write(struct sim_qp *qp, const struct sim_packet *p, const void *payload, size_t len) {
    if (sim_of(qp->base.context)->as_soft_roce && p->flags & SIM_IMM && !posted(qp, p->psn)) return;
    if (p->flags & SIM_FIRST) {
        if (p->len && !allowed(qp, p->rkey, p->addr, p->len, IBV_ACCESS_REMOTE_WRITE)) {
            refuse_write(qp, p);
            return;
        }
        qp->offset = 0;
        qp->address = p->addr;
        qp->rkey = p->rkey;
        qp->total = p->len;
    }
    /* Every packet anew: the region may have been deregistered meanwhile. */
    if (len > qp->total - qp->offset ||
        (len && !allowed(qp, qp->rkey, qp->address + qp->offset, len, IBV_ACCESS_REMOTE_WRITE))) {
        refuse_write(qp, p);
        return;
    }
    if (p->flags & SIM_IMM && !posted(qp, p->psn)) return;
    if (len && !sim_dma(sim_of(qp->base.context), (void *)(uintptr_t)(qp->address + qp->offset), payload, len)) {
        refuse_for_good(qp, SIM_NAK_ACCESS, p->psn);
        return;
    }
    qp->offset += len;
    accept_packet(qp, 1);
    if (!(p->flags & SIM_LAST)) return;
    if (p->flags & SIM_IMM) sim_complete_recv(qp, IBV_WC_SUCCESS, IBV_WC_RECV_RDMA_WITH_IMM, qp->offset, p);
    acknowledge(qp, p->psn);
}

static void on_read(struct sim_qp *qp, const struct sim_packet *p) {
    if (p->len && !allowed(qp, p->rkey, p->addr, p->len, IBV_ACCESS_REMOTE_READ)) {
        refuse_for_good(qp, SIM_NAK_ACCESS, p->psn);
        return;
    }
    accept_packet(qp, sim_packets(p->len));
    answer(qp, (struct sim_answer){.op = SIM_DATA, .psn = p->psn, .addr = p->addr, .len = p->len, .rkey = p->rkey});
}

static void on_atomic(struct sim_qp *qp, const struct sim_packet *p) {
    struct sim_context *ctx = sim_of(qp->base.context);
    uint64_t before, *at = (uint64_t *)(uintptr_t)p->addr;
    if (p->addr % 8) {
        refuse_for_good(qp, SIM_NAK_INVALID, p->psn);
        return;
    }
    if (!allowed(qp, p->rkey, p->addr, 8, IBV_ACCESS_REMOTE_ATOMIC) || (ctx->tcp && !sim_touch(&before, at, 8))) {
        refuse_for_good(qp, SIM_NAK_ACCESS, p->psn);
        return;
    }
    before = p->compare;
    if (p->op == SIM_ADD)
        before = __atomic_fetch_add(at, p->operand, __ATOMIC_SEQ_CST);
    else /* leaves in `before` what it found */
        __atomic_compare_exchange_n(at, &before, p->operand, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    accept_packet(qp, 1);
    answer(qp, (struct sim_answer){.op = SIM_OLD, .psn = p->psn, .addr = before});
}

void sim_on_request(struct sim_qp *qp, const struct sim_packet *p, const void *payload, size_t len) {
    if (qp->base.state != IBV_QPS_RTR && qp->base.state != IBV_QPS_RTS) return;
    if (p->psn != qp->expect) {
        /* Behind: it was executed and is acknowledged again. Ahead: something is missing, which is said once. */
        if (sim_psn_before(p->psn, qp->expect)) {
            acknowledge(qp, (qp->expect - 1) & SIM_PSN);
        } else if (!qp->nak_sent) {
            qp->nak_sent = 1;
            refuse(qp, SIM_NAK_SEQUENCE, qp->expect);
        }
        return;
    }
    if (!knows(qp, p->op)) {
        refuse_for_good(qp, SIM_NAK_INVALID, p->psn);
        return;
    }
    switch (p->op) {
    case SIM_SEND: on_send(qp, p, payload, len); break;
    case SIM_WRITE: on_write(qp, p, payload, len); break;
    case SIM_READ: on_read(qp, p); break;
    default: on_atomic(qp, p); break;
    }
}

/* sim_req.c - the requester of the simulated device: packets out, acknowledgements and data in. */

#include <string.h>

#include "providers/verbs/sim.h"

static const int64_t rnr_pause = 1000000; /* what min_rnr_timer asks for is of that order */

static struct sim_wqe *wqe_at(struct sim_qp *qp, uint32_t i) { return &qp->sq[i % qp->cap.max_send_wr]; }

static int expects_data(const struct sim_wqe *wqe) { return wqe->wr.opcode >= IBV_WR_RDMA_READ; }

/* ---- out ---- */

/* The next packet of a send or write: where it stands in its message is at_off. */
static enum ibv_wc_status fill_data(struct sim_qp *qp, const struct sim_wqe *wqe, struct sim_packet *p,
                                    uint8_t *payload, size_t *len_p) {
    size_t left = wqe->len - qp->at_off, len = left < SIM_MTU ? left : SIM_MTU;
    int is_send = wqe->wr.opcode == IBV_WR_SEND || wqe->wr.opcode == IBV_WR_SEND_WITH_IMM;
    p->op = is_send ? SIM_SEND : SIM_WRITE;
    p->flags = (uint8_t)((qp->at_off ? 0 : SIM_FIRST) | (len == left ? SIM_LAST : 0));
    if (p->flags & SIM_LAST &&
        (wqe->wr.opcode == IBV_WR_SEND_WITH_IMM || wqe->wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM)) {
        p->flags |= SIM_IMM;
        p->imm = wqe->wr.imm_data;
    }
    p->psn = (wqe->first + qp->at_off / SIM_MTU) & SIM_PSN;
    if (!is_send) {
        p->addr = wqe->wr.wr.rdma.remote_addr;
        p->rkey = wqe->wr.wr.rdma.rkey;
    }
    *len_p = len;
    if (!(wqe->wr.send_flags & IBV_SEND_INLINE))
        return sim_gather(qp, wqe->sge, wqe->wr.num_sge, qp->at_off, payload, len);
    memcpy(payload, wqe->data + qp->at_off, len);
    return IBV_WC_SUCCESS;
}

static enum ibv_wc_status fill(struct sim_qp *qp, const struct sim_wqe *wqe, struct sim_packet *p, uint8_t *payload,
                               size_t *len_p) {
    *p = (struct sim_packet){.psn = wqe->first, .flags = SIM_FIRST | SIM_LAST, .len = wqe->len};
    *len_p = 0;
    switch (wqe->wr.opcode) {
    case IBV_WR_RDMA_READ:
        p->op = SIM_READ;
        p->psn = (wqe->first + wqe->have / SIM_MTU) & SIM_PSN; /* what came before a repeat is not asked for again */
        p->addr = wqe->wr.wr.rdma.remote_addr + wqe->have;
        p->len = wqe->len - wqe->have;
        p->rkey = wqe->wr.wr.rdma.rkey;
        return IBV_WC_SUCCESS;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        p->op = wqe->wr.opcode == IBV_WR_ATOMIC_CMP_AND_SWP ? SIM_CAS : SIM_ADD;
        p->addr = wqe->wr.wr.atomic.remote_addr;
        p->rkey = wqe->wr.wr.atomic.rkey;
        p->operand = p->op == SIM_CAS ? wqe->wr.wr.atomic.swap : wqe->wr.wr.atomic.compare_add;
        p->compare = wqe->wr.wr.atomic.compare_add;
        return IBV_WC_SUCCESS;
    default: return fill_data(qp, wqe, p, payload, len_p);
    }
}

/* Sends what may go: until the socket is full, a pause is on, or too many reads are unanswered. */
void sim_transmit(struct sim_qp *qp) {
    uint8_t payload[SIM_MTU];
    struct sim_packet packet;
    size_t len;
    if (sim_of(qp->base.context)->mute) return;
    while (qp->base.state == IBV_QPS_RTS && qp->sq_at != qp->sq_tail && !qp->resume && !qp->out_waits) {
        struct sim_wqe *wqe = wqe_at(qp, qp->sq_at);
        if (qp->gone) {
            sim_on_gone(qp);
            return;
        }
        if (qp->out < 0) return; /* dialled again by the device's thread */
        if (expects_data(wqe) && qp->reads >= qp->attr.max_rd_atomic) return;
        enum ibv_wc_status status = fill(qp, wqe, &packet, payload, &len);
        if (status != IBV_WC_SUCCESS) {
            if (qp->sq_at != qp->sq_head) return; /* those before it end first */
            sim_complete(qp, status);
            sim_qp_error(qp);
            return;
        }
        int sent = sim_wire_send(qp, 1, &packet, payload, len);
        if (sent < 0) sim_wire_end(qp);
        if (sent <= 0) return;
        if (expects_data(wqe)) qp->reads++;
        qp->at_off += (uint32_t)len;
        if (!(packet.flags & SIM_LAST)) continue;
        qp->at_off = 0;
        qp->sq_at++;
    }
}

/* ---- in ---- */

/* Everything up to this PSN was executed. What still waits for data stops it: data comes in order, so cannot be late.
 */
static void acknowledged(struct sim_qp *qp, uint32_t psn) {
    while (qp->sq_head != qp->sq_at) {
        struct sim_wqe *wqe = wqe_at(qp, qp->sq_head);
        if (sim_psn_before(psn, wqe->last) || (expects_data(wqe) && !wqe->answered)) return;
        qp->rnr_left = qp->attr.rnr_retry;
        qp->retry_left = qp->attr.retry_cnt;
        sim_complete(qp, IBV_WC_SUCCESS);
    }
}

static struct sim_wqe *find(struct sim_qp *qp, uint32_t psn, uint32_t *at_p) {
    uint32_t end = qp->sq_at + (qp->at_off ? 1 : 0);
    for (uint32_t i = qp->sq_head; i != end; i++) {
        struct sim_wqe *wqe = wqe_at(qp, i);
        if (sim_psn_before(psn, wqe->first) || sim_psn_before(wqe->last, psn)) continue;
        *at_p = i;
        return wqe;
    }
    return NULL;
}

static void fail(struct sim_qp *qp, enum ibv_wc_status status) {
    if (qp->sq_head != qp->sq_tail) sim_complete(qp, status);
    sim_qp_error(qp);
}

/* Goes back to that packet. */
static void rewind_to(struct sim_qp *qp, uint32_t at, struct sim_wqe *wqe, uint32_t psn) {
    for (uint32_t i = at; i != qp->sq_at; i++)
        if (expects_data(wqe_at(qp, i)) && !wqe_at(qp, i)->answered) qp->reads--;
    qp->sq_at = at;
    qp->at_off = expects_data(wqe) ? 0 : sim_psn_sub(psn, wqe->first) * SIM_MTU;
}

static void on_nak(struct sim_qp *qp, const struct sim_packet *p) {
    static const enum ibv_wc_status status[] = {[SIM_NAK_INVALID] = IBV_WC_REM_INV_REQ_ERR,
                                                [SIM_NAK_ACCESS] = IBV_WC_REM_ACCESS_ERR,
                                                [SIM_NAK_OPERATION] = IBV_WC_REM_OP_ERR};
    uint32_t at;
    acknowledged(qp, (p->psn - 1) & SIM_PSN);
    struct sim_wqe *wqe = find(qp, p->psn, &at);
    if (!wqe) return;
    if (p->nak == SIM_NAK_RNR || p->nak == SIM_NAK_SEQUENCE) {
        int *left = p->nak == SIM_NAK_RNR ? &qp->rnr_left : &qp->retry_left;
        if (*left == 0) {
            fail(qp, p->nak == SIM_NAK_RNR ? IBV_WC_RNR_RETRY_EXC_ERR : IBV_WC_RETRY_EXC_ERR);
            return;
        }
        if (!(p->nak == SIM_NAK_RNR && *left == 7)) --*left; /* 7: for ever */
        rewind_to(qp, at, wqe, p->psn);
        if (p->nak == SIM_NAK_RNR) {
            qp->resume = hr_now() + rnr_pause;
            sim_look_again(sim_of(qp->base.context));
        }
        return;
    }
    fail(qp, p->nak <= SIM_NAK_OPERATION && p->nak >= SIM_NAK_INVALID ? status[p->nak] : IBV_WC_BAD_RESP_ERR);
}

static void on_data(struct sim_qp *qp, const struct sim_packet *p, const void *payload, size_t len) {
    uint32_t at;
    struct sim_wqe *wqe = find(qp, p->psn, &at);
    int ok;
    if (!wqe || !expects_data(wqe) || wqe->answered) return;
    acknowledged(qp, (wqe->first - 1) & SIM_PSN);
    if (p->op == SIM_OLD) {
        ok = sim_scatter(qp, wqe->sge, wqe->wr.num_sge, 0, &p->addr, sizeof p->addr);
        wqe->answered = 1;
    } else {
        if (sim_psn_sub(p->psn, wqe->first) != wqe->have / SIM_MTU || len > wqe->len - wqe->have) return;
        ok = sim_scatter(qp, wqe->sge, wqe->wr.num_sge, wqe->have, payload, len);
        wqe->have += (uint32_t)len;
        wqe->answered = wqe->have == wqe->len;
    }
    if (!ok) {
        fail(qp, IBV_WC_LOC_PROT_ERR);
        return;
    }
    if (!wqe->answered) return;
    qp->reads--;
    acknowledged(qp, wqe->last);
}

void sim_on_answer(struct sim_qp *qp, const struct sim_packet *p, const void *payload, size_t len) {
    if (qp->base.state != IBV_QPS_RTS) return;
    switch (p->op) {
    case SIM_ACK: acknowledged(qp, p->psn); break;
    case SIM_NAK: on_nak(qp, p); break;
    case SIM_DATA:
    case SIM_OLD: on_data(qp, p, payload, len); break;
    default: fail(qp, IBV_WC_BAD_RESP_ERR); break;
    }
    if (qp->base.state == IBV_QPS_RTS) sim_transmit(qp);
}

/* Silence on the wire is found out only by who waits for an answer. */
void sim_on_gone(struct sim_qp *qp) {
    qp->gone = 1;
    if (qp->base.state == IBV_QPS_RTS && qp->sq_head != qp->sq_tail) fail(qp, IBV_WC_RETRY_EXC_ERR);
}

/* sim_srq.c - shared receive queues of the simulated device: receives that belong to whichever queue pair needs one. */

/*
 * A queue pair takes the oldest receive when the first packet of a message comes, or the last one of a write with
 * immediate data, and keeps it until that message is complete: messages of two queue pairs never share one. What a
 * queue pair has taken when it breaks is flushed with it; the others stay here.
 *
 * Some devices are not as kind: what was taken never comes back, nor do receives whose completions nobody had fetched
 * when the queue pair was destroyed. Those that are told to (`keeps`) are like them.
 */

#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>

#include "providers/verbs/sim.h"

struct ibv_srq *sim_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *init) {
    struct sim_context *ctx = sim_of(pd->context);
    struct sim_srq *srq = NULL;
    if (init->attr.max_wr < 1 || init->attr.max_wr > SIM_MAX_WR || init->attr.max_sge > SIM_SGE) {
        errno = EINVAL;
        return NULL;
    }
    srq = calloc(1, sizeof *srq);
    if (srq) srq->ring = calloc(init->attr.max_wr, sizeof *srq->ring);
    if (!srq || !srq->ring) {
        free(srq);
        errno = ENOMEM;
        return NULL;
    }
    srq->base = (struct ibv_srq){.context = pd->context, .srq_context = init->srq_context, .pd = pd};
    srq->cap = init->attr.max_wr;
    pthread_mutex_lock(&ctx->lock);
    srq->next = ctx->srqs;
    ctx->srqs = srq;
    pthread_mutex_unlock(&ctx->lock);
    return &srq->base;
}

int sim_destroy_srq(struct ibv_srq *base) {
    struct sim_context *ctx = sim_of(base->context);
    struct sim_srq *srq = (struct sim_srq *)base, **at = &ctx->srqs;
    int used = 0;
    pthread_mutex_lock(&ctx->lock);
    for (int i = 0; i < SIM_MAX_QP; i++) used |= ctx->qps[i] && ctx->qps[i]->base.srq == base;
    if (!used) {
        while (*at != srq) at = &(*at)->next;
        *at = srq->next;
    }
    pthread_mutex_unlock(&ctx->lock);
    if (used) return EBUSY;
    free(srq->ring);
    free(srq);
    return 0;
}

int sim_post_srq_recv(struct ibv_srq *base, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr) {
    struct sim_srq *srq = (struct sim_srq *)base;
    struct sim_context *ctx = sim_of(base->context);
    int rc = 0;
    pthread_mutex_lock(&ctx->lock);
    for (; wr; wr = wr->next, srq->tail++) {
        rc = sim_rwqe_fill(&srq->ring[srq->tail % srq->cap], wr, srq->tail - srq->head, srq->cap);
        if (rc) break;
    }
    if (rc) *bad_wr = wr;
    pthread_mutex_unlock(&ctx->lock);
    return rc;
}

void sim_srq_take(struct sim_qp *qp) {
    struct sim_srq *srq = (struct sim_srq *)qp->base.srq;
    if (srq->head == srq->tail) return;
    qp->rq[qp->rq_tail++ % qp->cap.max_recv_wr] = srq->ring[srq->head++ % srq->cap];
}

void sim_srq_last(struct sim_qp *qp) {
    qp->last = 1;
    eventfd_write(qp->base.context->async_fd, 1);
}

void sim_srq_clean(struct sim_qp *qp) {
    struct sim_cq *cq = (struct sim_cq *)qp->base.recv_cq;
    int kept = 0, n = cq->count;
    if (!sim_of(qp->base.context)->keeps || !qp->base.srq) return;
    for (int i = 0; i < n; i++) {
        struct ibv_wc wc = cq->ring[(cq->head + i) % cq->cap];
        if (wc.qp_num == qp->base.qp_num && wc.opcode >= IBV_WC_RECV) continue;
        cq->ring[(cq->head + kept++) % cq->cap] = wc;
    }
    cq->count = kept;
}

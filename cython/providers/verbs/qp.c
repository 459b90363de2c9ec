/* qp.c - queue pairs: made, brought up, broken, closed. */

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>

#include "providers/verbs/verbs.h"

enum {
    SENDS = HR_VERBS_SENDS + HR_VERBS_CTL,
    SLAB = HR_VERBS_SLOTS * HR_VERBS_STRIDE + HR_VERBS_CTL * HR_VERBS_CTL_BYTES
};

int hr_verbs_completions_reserve(struct hr_verbs_domain *d, uint32_t n) {
    uint32_t want = d->cq_used + n, size = (uint32_t)d->cq->cqe;
    while (size < want) size *= 2;
    if (size > (uint32_t)d->cq->cqe) {
        if (size > (uint32_t)d->attr.max_cqe) size = (uint32_t)d->attr.max_cqe;
        int rc = size < want ? ENOMEM : d->verbs->resize_cq(d->cq, (int)size);
        if (rc) {
            errno = rc;
            return 0;
        }
    }
    d->cq_used += n;
    return 1;
}

const char *hr_verbs_memlock_text(int error, char text[120]) {
    struct rlimit limit = {0};
    text[0] = 0;
    getrlimit(RLIMIT_MEMLOCK, &limit);
    if ((error == ENOMEM || error == EAGAIN || error == EPERM) && limit.rlim_cur != RLIM_INFINITY)
        snprintf(text, 120, "; the memlock limit is %llu bytes, raise it: ulimit -l unlimited",
                 (unsigned long long)limit.rlim_cur);
    return text;
}

/* The memory of an endpoint: made once, whatever becomes of its queue pairs. */
static hr_status slab_open(struct hr_verbs_ep *ep, char why[160]) {
    struct hr_verbs_domain *d = hr_verbs_domain_of(&ep->base);
    char limit[120];
    if (ep->slab_mr) return HR_OK;
    errno = hr_verbs_inject_register(&d->inject);
    ep->slab_len = SLAB;
    if (!errno) ep->slab = hr_verbs_pages(SLAB);
    if (ep->slab) ep->slab_mr = hr_verbs_pin(d, ep->slab, SLAB, IBV_ACCESS_LOCAL_WRITE);
    if (ep->slab_mr) {
        hr_verbs_mem_held(d, SLAB);
        return HR_OK;
    }
    int error = errno;
    snprintf(why, 160, "cannot register %d KiB for a connection: %s%s", SLAB >> 10, strerror(error),
             hr_verbs_memlock_text(error, limit));
    return HR_ERR_NOMEM;
}

static struct ibv_qp *create(struct hr_verbs_domain *d, struct hr_verbs_ep *ep) {
    struct ibv_qp_init_attr init = {.qp_context = ep, .send_cq = d->cq, .recv_cq = d->cq, .srq = ep->pool->srq};
    init.qp_type = IBV_QPT_RC;
    init.cap = (struct ibv_qp_cap){.max_send_wr = SENDS,
                                   .max_recv_wr = ep->pool->srq ? 0 : ep->pool->most,
                                   .max_send_sge = 1,
                                   .max_recv_sge = 1,
                                   .max_inline_data = HR_VERBS_INLINE};
    struct ibv_qp *qp = d->verbs->create_qp(d->pd, &init);
    if (!qp && errno == EINVAL) { /* a device without inline data */
        init.cap.max_inline_data = 0;
        qp = d->verbs->create_qp(d->pd, &init);
    }
    ep->inline_max = init.cap.max_inline_data < HR_VERBS_INLINE ? init.cap.max_inline_data : HR_VERBS_INLINE;
    return qp;
}

hr_status hr_verbs_qp_open(struct hr_verbs_ep *ep, const struct hr_verbs_path *path, char why[160]) {
    struct hr_verbs_domain *d = hr_verbs_domain_of(&ep->base);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = path->port};
    hr_status status = slab_open(ep, why);
    int rc;
    if (status == HR_OK) status = hr_verbs_pool_join(ep, why);
    if (status != HR_OK) return status;
    ep->head = ep->tail = ep->ctl = ep->ctl_turn = ep->slot_head = ep->slot_tail = ep->signaled = 0;
    ep->hungry = 0;
    ep->upper_out = ep->upper_in = 0;
    ep->unsent = 0;
    attr.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE |
                           (d->base.caps.flags & HR_CAP_ATOMIC ? IBV_ACCESS_REMOTE_ATOMIC : 0);
    if (getrandom(&ep->psn, sizeof ep->psn, 0) != sizeof ep->psn) ep->psn = (uint32_t)hr_now();
    ep->psn &= 0xffffff;
    if (!hr_verbs_completions_reserve(d, SENDS)) {
        snprintf(why, 160, "the completion queue cannot grow beyond %d entries: %s", d->cq->cqe, strerror(errno));
        return HR_ERR_NOMEM;
    }
    ep->qp = create(d, ep);
    if (!ep->qp) {
        int error = errno;
        char limit[120];
        snprintf(why, 160, "cannot create a queue pair: %s (the device has %d)%s", strerror(error), d->attr.max_qp,
                 hr_verbs_memlock_text(error, limit));
        d->cq_stale += SENDS;
        return HR_ERR_NOMEM;
    }
    struct hr_verbs_ep **list = &d->numbers[ep->qp->qp_num % HR_VERBS_NUMBERS];
    ep->next = *list;
    *list = ep;
    rc = d->verbs->modify_qp(ep->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    if (rc) {
        snprintf(why, 160, "the queue pair does not get to INIT: %s", strerror(rc));
        return HR_ERR_IO;
    }
    return hr_verbs_pool_start(ep, why);
}

int hr_verbs_rd_atomic(const struct hr_verbs_domain *d) {
    int n = d->attr.max_qp_rd_atom < HR_VERBS_READS ? d->attr.max_qp_rd_atom : HR_VERBS_READS;
    return n > 0 ? n : 1;
}

static void fill_path(struct hr_verbs_ep *ep, const struct hr_verbs_path *path, const struct hr_verbs_end *end,
                      struct ibv_ah_attr *ah) {
    ah->port_num = path->port;
    ah->dlid = end->lid;
    if (ep->priority >= 0) ah->sl = (uint8_t)(7 - ep->priority); /* the higher service level is the more urgent one */
    if (!path->ethernet) return;
    ah->is_global = 1;
    ah->grh.dgid = end->gid;
    ah->grh.sgid_index = path->index;
    ah->grh.hop_limit = HR_VERBS_HOPS;
    if (ep->dscp >= 0) ah->grh.traffic_class = (uint8_t)(ep->dscp << 2);
}

/* Whether the device has the class that it was given. Over Ethernet packets carry the traffic class; the service level
 * is at most the priority of a VLAN, and soft-RoCE forgets it. */
static int took_class(struct hr_verbs_ep *ep, const struct ibv_ah_attr *given) {
    struct ibv_qp_attr attr = {0};
    struct ibv_qp_init_attr init;
    if (ep->dscp < 0) return 1;
    if (hr_verbs_domain_of(&ep->base)->verbs->query_qp(ep->qp, &attr, IBV_QP_AV, &init)) return 0;
    if (given->is_global) return attr.ah_attr.grh.traffic_class == given->grh.traffic_class;
    return attr.ah_attr.sl == given->sl;
}

/* So that retries last longer than a peer may be silent: who keeps the job together then says first that it is lost, of
 * a link that was down for a moment nobody hears, and a device that waits longer than it was told, as it may, is no
 * matter. An exponent, of 4.096 us. */
static uint8_t ack_timeout(int64_t silence) {
    uint8_t exponent = HR_VERBS_ACK_TIMEOUT;
    while (exponent < 31 && (4096LL << exponent) * (HR_VERBS_RETRIES + 1) < HR_VERBS_OUTLASTS(silence)) exponent++;
    return exponent;
}

/* A lane's end is told by bond_watch.c, so soft-RoCE, which counts no retries if asked, may repeat often: it loses
 * packets. */
static void set_retries(struct hr_verbs_ep *ep, struct ibv_qp_attr *attr) {
    const struct hr_verbs_domain *d = hr_verbs_domain_of(&ep->base);
    int endless = ep->bond && d->software && d->silence && !d->ack_timeout;
    attr->retry_cnt = endless ? HR_VERBS_ENDLESS : HR_VERBS_RETRIES;
    attr->timeout = d->ack_timeout ? (uint8_t)d->ack_timeout : ack_timeout(endless ? 0 : d->silence);
}

hr_status hr_verbs_qp_up(struct hr_verbs_ep *ep, const struct hr_verbs_path *path, const struct hr_verbs_open *peer,
                         const struct hr_verbs_end *end, const struct hr_verbs_word *word, char why[160]) {
    struct hr_verbs_domain *d = hr_verbs_domain_of(&ep->base);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR};
    int rc;
    ep->room = word->room;
    attr.path_mtu = (enum ibv_mtu)(end->mtu < path->mtu ? end->mtu : path->mtu);
    attr.dest_qp_num = word->qpn;
    attr.rq_psn = word->psn;
    attr.max_dest_rd_atomic = (uint8_t)hr_verbs_rd_atomic(d);
    attr.min_rnr_timer = HR_VERBS_RNR_TIMER;
    fill_path(ep, path, end, &attr.ah_attr);
    rc = d->verbs->modify_qp(ep->qp, &attr,
                             IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                 IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    if (rc) {
        snprintf(why, 160, "the device knows no way there: %s; is it in a network of ours? ip route get ...",
                 strerror(rc));
        return HR_ERR_UNREACHABLE;
    }
    ep->classless = !took_class(ep, &attr.ah_attr);
    memset(&attr, 0, sizeof attr);
    attr.qp_state = IBV_QPS_RTS;
    set_retries(ep, &attr);
    attr.rnr_retry = HR_VERBS_RETRIES;
    attr.sq_psn = ep->psn;
    attr.max_rd_atomic = (uint8_t)(peer->rd_atomic < hr_verbs_rd_atomic(d) ? peer->rd_atomic : hr_verbs_rd_atomic(d));
    rc = d->verbs->modify_qp(ep->qp, &attr,
                             IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                 IBV_QP_MAX_QP_RD_ATOMIC);
    if (!rc) return HR_OK;
    snprintf(why, 160, "the queue pair does not get ready to send: %s", strerror(rc));
    return HR_ERR_UNREACHABLE;
}

void hr_verbs_qp_break(struct hr_verbs_ep *ep) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
    if (ep->qp) hr_verbs_domain_of(&ep->base)->verbs->modify_qp(ep->qp, &attr, IBV_QP_STATE);
}

void hr_verbs_qp_drop(struct hr_verbs_ep *ep) {
    struct hr_verbs_domain *d = hr_verbs_domain_of(&ep->base);
    if (!ep->qp) return;
    uint32_t number = ep->qp->qp_num;
    struct hr_verbs_ep **list = &d->numbers[number % HR_VERBS_NUMBERS];
    hr_verbs_qp_break(ep);
    hr_verbs_fetch_all(d); /* some devices throw away what is left when the queue pair is destroyed */
    while (*list != ep) list = &(*list)->next;
    *list = ep->next;
    d->verbs->destroy_qp(ep->qp);
    ep->qp = NULL;
    d->cq_stale += SENDS;
    hr_verbs_fetch_all(d);
    hr_verbs_disown(ep, number); /* before there is another of that number */
    hr_verbs_pool_stop(ep);
}

void hr_verbs_qp_close(struct hr_verbs_ep *ep) {
    struct hr_verbs_domain *d = hr_verbs_domain_of(&ep->base);
    hr_verbs_qp_drop(ep);
    hr_verbs_pool_leave(ep);
    if (ep->slab_mr) {
        hr_verbs_mem_held(d, -SLAB);
        d->verbs->dereg_mr(ep->slab_mr);
    }
    if (ep->slab) munmap(ep->slab, ep->slab_len);
    ep->slab_mr = NULL;
    ep->slab = NULL;
}

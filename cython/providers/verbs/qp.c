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
    RECVS = HR_VERBS_RECVS + HR_VERBS_SPARE,
    COMPLETIONS = SENDS + RECVS,
    SLAB = (RECVS + HR_VERBS_SLOTS) * HR_VERBS_STRIDE + HR_VERBS_CTL * HR_VERBS_CTL_BYTES
};

/* Room for all that may come for one more queue pair. */
static int reserve_completions(struct hr_verbs_domain *d) {
    uint32_t want = d->cq_used + COMPLETIONS, size = (uint32_t)d->cq->cqe;
    while (size < want) size *= 2;
    if (size > (uint32_t)d->cq->cqe) {
        if (size > (uint32_t)d->attr.max_cqe) size = (uint32_t)d->attr.max_cqe;
        int rc = size < want ? ENOMEM : d->verbs->resize_cq(d->cq, (int)size);
        if (rc) {
            errno = rc;
            return 0;
        }
    }
    d->cq_used += COMPLETIONS;
    return 1;
}

static void why_memory(char why[160]) {
    struct rlimit limit = {0};
    int error = errno;
    getrlimit(RLIMIT_MEMLOCK, &limit);
    snprintf(
        why, 160,
        "cannot register %d KiB for a connection: %s; the memlock limit is %llu KiB, raise it: ulimit -l unlimited",
        SLAB >> 10, strerror(error), (unsigned long long)limit.rlim_cur >> 10);
}

static struct ibv_qp *create(struct hr_verbs_domain *d, struct hr_verbs_ep *ep) {
    struct ibv_qp_init_attr init = {.qp_context = ep, .send_cq = d->cq, .recv_cq = d->cq, .qp_type = IBV_QPT_RC};
    init.cap = (struct ibv_qp_cap){.max_send_wr = SENDS,
                                   .max_recv_wr = RECVS,
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

hr_status hr_verbs_qp_open(struct hr_verbs_ep *ep, char why[160]) {
    struct hr_verbs_domain *d = hr_verbs_domain_of(&ep->base);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = d->port};
    uint64_t secret[2];
    int rc;
    attr.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE |
                           (d->base.caps.flags & HR_CAP_ATOMIC ? IBV_ACCESS_REMOTE_ATOMIC : 0);
    if (getrandom(secret, sizeof secret, 0) != sizeof secret) secret[0] = secret[1] = (uint64_t)hr_now();
    ep->psn = (uint32_t)secret[0] & 0xffffff;
    ep->nonce = secret[1];
    ep->slab_len = SLAB;
    ep->slab = hr_verbs_pages(SLAB);
    if (ep->slab) ep->slab_mr = d->verbs->reg_mr(d->pd, ep->slab, SLAB, IBV_ACCESS_LOCAL_WRITE);
    if (!ep->slab_mr) {
        why_memory(why);
        return HR_ERR_NOMEM;
    }
    if (!reserve_completions(d)) {
        snprintf(why, 160, "the completion queue cannot grow beyond %d entries: %s", d->cq->cqe, strerror(errno));
        return HR_ERR_NOMEM;
    }
    ep->qp = create(d, ep);
    if (!ep->qp) {
        snprintf(why, 160, "cannot create a queue pair: %s (the device has %d)", strerror(errno), d->attr.max_qp);
        d->cq_stale += COMPLETIONS;
        return HR_ERR_NOMEM;
    }
    rc = d->verbs->modify_qp(ep->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    if (rc) {
        snprintf(why, 160, "the queue pair does not get to INIT: %s", strerror(rc));
        return HR_ERR_IO;
    }
    return HR_OK;
}

static int rd_atomic(const struct hr_verbs_domain *d) {
    int n = d->attr.max_qp_rd_atom < HR_VERBS_READS ? d->attr.max_qp_rd_atom : HR_VERBS_READS;
    return n > 0 ? n : 1;
}

void hr_verbs_qp_describe(struct hr_verbs_ep *ep, struct hr_verbs_open *open_p) {
    struct hr_verbs_domain *d = hr_verbs_domain_of(&ep->base);
    open_p->qpn = ep->qp->qp_num;
    open_p->psn = ep->psn;
    open_p->gid = d->gid;
    open_p->lid = d->port_attr.lid;
    open_p->mtu = (uint8_t)d->port_attr.active_mtu;
    open_p->rd_atomic = (uint8_t)rd_atomic(d);
    open_p->nonce = ep->nonce;
}

static void fill_path(struct hr_verbs_ep *ep, const struct hr_verbs_open *peer, struct ibv_ah_attr *ah) {
    struct hr_verbs_domain *d = hr_verbs_domain_of(&ep->base);
    ah->port_num = d->port;
    ah->dlid = peer->lid;
    if (ep->priority >= 0) ah->sl = (uint8_t)(7 - ep->priority); /* the higher service level is the more urgent one */
    if (d->port_attr.link_layer != IBV_LINK_LAYER_ETHERNET) return;
    ah->is_global = 1;
    ah->grh.dgid = peer->gid;
    ah->grh.sgid_index = (uint8_t)d->gid_index;
    ah->grh.hop_limit = HR_VERBS_HOPS;
    if (ep->dscp >= 0) ah->grh.traffic_class = (uint8_t)(ep->dscp << 2);
}

hr_status hr_verbs_qp_up(struct hr_verbs_ep *ep, const struct hr_verbs_open *peer, char why[160]) {
    struct hr_verbs_domain *d = hr_verbs_domain_of(&ep->base);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR};
    char gid[64];
    int rc;
    ep->peer_nonce = peer->nonce;
    ep->room = HR_VERBS_RECVS;
    for (uint32_t i = 0; i < RECVS; i++) ep->unposted[ep->nunposted++] = (uint16_t)i;
    hr_verbs_repost(ep);
    if (ep->nunposted) {
        snprintf(why, 160, "the queue pair takes %u of %d receives", RECVS - ep->nunposted, RECVS);
        return HR_ERR_NOMEM;
    }
    attr.path_mtu = peer->mtu < d->port_attr.active_mtu ? (enum ibv_mtu)peer->mtu : d->port_attr.active_mtu;
    attr.dest_qp_num = peer->qpn;
    attr.rq_psn = peer->psn;
    attr.max_dest_rd_atomic = (uint8_t)rd_atomic(d);
    attr.min_rnr_timer = HR_VERBS_RNR_TIMER;
    fill_path(ep, peer, &attr.ah_attr);
    rc = d->verbs->modify_qp(ep->qp, &attr,
                             IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                 IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    if (rc) {
        hr_verbs_gid_text(&peer->gid, gid);
        snprintf(why, 160, "no way to %s: %s (ready to receive)", gid, strerror(rc));
        return HR_ERR_UNREACHABLE;
    }
    memset(&attr, 0, sizeof attr);
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = HR_VERBS_ACK_TIMEOUT;
    attr.retry_cnt = HR_VERBS_RETRIES;
    attr.rnr_retry = HR_VERBS_RETRIES;
    attr.sq_psn = ep->psn;
    attr.max_rd_atomic = (uint8_t)(peer->rd_atomic < rd_atomic(d) ? peer->rd_atomic : rd_atomic(d));
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

void hr_verbs_qp_close(struct hr_verbs_ep *ep) {
    struct hr_verbs_domain *d = hr_verbs_domain_of(&ep->base);
    if (ep->qp) {
        hr_verbs_qp_break(ep);
        d->verbs->destroy_qp(ep->qp);
        d->cq_stale += COMPLETIONS; /* some may lie in the queue still */
        ep->qp = NULL;
    }
    if (ep->slab_mr) d->verbs->dereg_mr(ep->slab_mr);
    if (ep->slab) munmap(ep->slab, ep->slab_len);
    ep->slab_mr = NULL;
    ep->slab = NULL;
}

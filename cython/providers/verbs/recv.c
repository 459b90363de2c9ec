/* recv.c - what arrives: messages, notices, room; receives posted again. */

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>

#include "providers/verbs/verbs.h"

enum { TOGETHER = 8 }; /* receives are posted again so many at once */

void hr_verbs_repost(struct hr_verbs_ep *ep) {
    struct ibv_recv_wr wrs[HR_VERBS_RECVS + HR_VERBS_SPARE], *bad = NULL;
    struct ibv_sge sges[HR_VERBS_RECVS + HR_VERBS_SPARE];
    uint32_t n = ep->nunposted, taken = n;
    int rc;
    if (!n) return;
    for (uint32_t i = 0; i < n; i++) {
        sges[i] = (struct ibv_sge){.addr = (uintptr_t)(ep->slab + (size_t)ep->unposted[i] * HR_VERBS_STRIDE),
                                   .length = HR_VERBS_STRIDE,
                                   .lkey = ep->slab_mr->lkey};
        wrs[i] = (struct ibv_recv_wr){.wr_id = (uint64_t)ep->serial << 32 | 1u << 31 | ep->unposted[i],
                                      .next = i + 1 < n ? &wrs[i + 1] : NULL,
                                      .sg_list = &sges[i],
                                      .num_sge = 1};
    }
    rc = ibv_post_recv(ep->qp, wrs, &bad);
    if (rc) taken = (uint32_t)(bad - wrs);
    /* Those for control messages first: the peer hears only of room that is there. */
    uint32_t free_ones = n - ep->paid, paid = taken > free_ones ? taken - free_ones : 0;
    ep->paid -= paid;
    ep->owed += paid;
    ep->nunposted -= taken;
    memmove(ep->unposted, ep->unposted + taken, ep->nunposted * sizeof ep->unposted[0]);
    if (rc && rc != ENOMEM && rc != EAGAIN)
        hr_verbs_ep_fail(ep, HR_ERR_PEER_LOST, "the queue pair does not take receives", rc);
    else if (rc)
        hr_verbs_ep_ready(ep);
}

/* One for a control message is posted again at once: there are as many as may come, and not one more. */
void hr_verbs_give_back(struct hr_verbs_ep *ep, uint32_t buffer, int counted) {
    ep->unposted[ep->nunposted++] = (uint16_t)buffer;
    ep->paid += (uint32_t)counted;
    if (ep->state != HR_VERBS_UP) return;
    if (ep->nunposted >= TOGETHER || !counted) hr_verbs_repost(ep);
    if (ep->state == HR_VERBS_UP) hr_verbs_give_room(ep);
}

static int fits(const struct hr_verbs_prefix *prefix, size_t size, size_t most) {
    switch (prefix->kind) {
    case HR_VERBS_MSG:
        return prefix->hdr_len >= 8 && prefix->hdr_len <= most && prefix->hdr_len % 8 == 0 &&
               size == sizeof *prefix + prefix->hdr_len + prefix->len;
    case HR_VERBS_CREDIT:
    case HR_VERBS_REVOKE:
    case HR_VERBS_REVOKED: return size == sizeof *prefix;
    case HR_VERBS_NOTIFY: return size == sizeof *prefix + sizeof(struct hr_verbs_notice);
    default: return 0;
    }
}

static int deliver(struct hr_verbs_ep *ep, const uint8_t *bytes, size_t size, int *counted_p) {
    const struct hr_sink *sink = ep->base.domain->sink;
    struct hr_verbs_prefix prefix = {0};
    struct hr_verbs_notice notice;
    if (size >= sizeof prefix) memcpy(&prefix, bytes, sizeof prefix);
    if (!fits(&prefix, size, ep->bond ? HR_VERBS_HDR : HR_MAX_HDR) || prefix.credit > HR_VERBS_RECVS - ep->room) {
        hr_verbs_ep_fail(ep, HR_ERR_PROTOCOL, "the peer sent a message that cannot be", 0);
        return 0;
    }
    ep->room += prefix.credit;
    if (prefix.credit) hr_verbs_room_again(ep);
    *counted_p = prefix.kind < HR_VERBS_CREDIT;
    if (prefix.kind == HR_VERBS_REVOKE) hr_verbs_on_revoke(ep, prefix.len);
    if (prefix.kind == HR_VERBS_REVOKED) ep->answered = prefix.len;
    if (!*counted_p) return 0;
    bytes += sizeof prefix;
    if (prefix.kind == HR_VERBS_MSG) {
        sink->recv(&ep->base, bytes, prefix.hdr_len, bytes + prefix.hdr_len, prefix.len);
    } else {
        memcpy(&notice, bytes, sizeof notice);
        ep->upper_in = (uint32_t)(notice.value >> 32);
        sink->notify(&ep->base, notice.value, notice.nbytes);
    }
    return 1;
}

int hr_verbs_control(struct hr_verbs_ep *ep, const struct ibv_wc *wc) {
    uint32_t buffer = (uint32_t)wc->wr_id & 0x7fffffff;
    struct hr_verbs_prefix prefix;
    if (ep->state != HR_VERBS_UP || ep->told) return 0; /* what comes after that is told in its turn */
    if (wc->status != IBV_WC_SUCCESS || !(wc->wr_id >> 31 & 1) || wc->opcode != IBV_WC_RECV) return 0;
    if (buffer >= HR_VERBS_RECVS + HR_VERBS_SPARE || wc->byte_len < sizeof prefix) return 0;
    memcpy(&prefix, ep->slab + (size_t)buffer * HR_VERBS_STRIDE, sizeof prefix);
    if (prefix.kind < HR_VERBS_CREDIT) return 0;
    hr_verbs_received(ep, wc);
    return 1;
}

int hr_verbs_received(struct hr_verbs_ep *ep, const struct ibv_wc *wc) {
    uint32_t buffer = (uint32_t)wc->wr_id & 0x7fffffff;
    int n = 1, counted = 1;
    if (buffer >= HR_VERBS_RECVS + HR_VERBS_SPARE) return 0;
    if (wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM)
        ep->base.domain->sink->notify(&ep->base, (uint64_t)ep->upper_in << 32 | ntohl(wc->imm_data), wc->byte_len);
    else
        n = deliver(ep, ep->slab + (size_t)buffer * HR_VERBS_STRIDE, wc->byte_len, &counted);
    if (ep->state == HR_VERBS_UP || ep->state == HR_VERBS_ENDING) hr_verbs_give_back(ep, buffer, counted);
    if (!hr_list_empty(&ep->queue)) hr_verbs_ep_ready(ep); /* there may be room for it now */
    return n;
}

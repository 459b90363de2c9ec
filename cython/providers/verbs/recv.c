/* recv.c - what arrives: messages, notices, room; receives given back. */

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>

#include "providers/verbs/verbs.h"

void hr_verbs_repost(struct hr_verbs_ep *ep) {
    int rc = hr_verbs_pool_post(ep->pool);
    if (!rc) rc = hr_verbs_pool_promise(ep, 0);
    if (rc && rc != ENOMEM && rc != EAGAIN)
        hr_verbs_ep_fail(ep, HR_ERR_PEER_LOST, "the queue pair does not take receives", rc);
    else if (rc)
        hr_verbs_ep_ready(ep);
}

/* One for a control message is posted again at once: there are as many as may come, and not one more. */
void hr_verbs_give_back(struct hr_verbs_ep *ep, const struct ibv_wc *wc, int counted) {
    struct hr_verbs_pool *pool = ep->pool;
    hr_verbs_pool_back(ep, wc, 0);
    if (counted) hr_verbs_pool_used(ep);
    if (ep->state != HR_VERBS_UP) {
        if (pool->srq && pool->nunposted >= HR_VERBS_TOGETHER) hr_verbs_pool_post(pool); /* others need them */
        return;
    }
    int rc = pool->nunposted >= HR_VERBS_TOGETHER || !counted ? hr_verbs_pool_post(pool) : 0;
    if (!rc && (ep->promised + HR_VERBS_TOGETHER <= pool->base || ep->turn == pool->turn))
        rc = hr_verbs_pool_promise(ep, counted);
    if (rc) hr_verbs_repost(ep);
    if (ep->state == HR_VERBS_UP) hr_verbs_give_room(ep);
}

void hr_verbs_disown(struct hr_verbs_ep *ep, uint32_t number) {
    struct hr_verbs_domain *d = hr_verbs_domain_of(&ep->base);
    for (int i = d->stash_at; i < d->stashed; i++) {
        struct ibv_wc *wc = &d->stash[i];
        if (!hr_verbs_is_recv(wc) || wc->qp_num != number || wc->wr_id == HR_VERBS_NOBODY) continue;
        hr_verbs_pool_back(ep, wc, wc->status != IBV_WC_SUCCESS);
        wc->wr_id = HR_VERBS_NOBODY;
    }
}

const uint8_t *hr_verbs_message(const struct hr_verbs_ep *ep, const struct ibv_wc *wc) {
    if (!hr_verbs_is_recv(wc) || wc->status != IBV_WC_SUCCESS || wc->opcode != IBV_WC_RECV) return NULL;
    return ep->pool->buffers[hr_verbs_buffer_of(wc)].bytes;
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
    if (prefix.hungry) hr_verbs_pool_hungry(ep);
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
    const uint8_t *bytes = hr_verbs_message(ep, wc);
    struct hr_verbs_prefix prefix;
    if (ep->state != HR_VERBS_UP || ep->told) return 0; /* what comes after that is told in its turn */
    if (!bytes || wc->byte_len < sizeof prefix) return 0;
    memcpy(&prefix, bytes, sizeof prefix);
    if (prefix.kind < HR_VERBS_CREDIT) return 0;
    hr_verbs_received(ep, wc);
    return 1;
}

int hr_verbs_received(struct hr_verbs_ep *ep, const struct ibv_wc *wc) {
    const uint8_t *bytes = hr_verbs_message(ep, wc);
    struct hr_verbs_pool *pool = hr_verbs_pool_hold(ep);
    int n = 1, counted = 1;
    if (bytes)
        n = deliver(ep, bytes, wc->byte_len, &counted);
    else
        ep->base.domain->sink->notify(&ep->base, (uint64_t)ep->upper_in << 32 | ntohl(wc->imm_data), wc->byte_len);
    if (hr_verbs_pool_release(ep, pool, wc)) hr_verbs_give_back(ep, wc, counted);
    if (!hr_list_empty(&ep->queue)) hr_verbs_ep_ready(ep); /* there may be room for it now */
    return n;
}

/* send.c - messages, and the credits that keep the device from ever finding no receive. */

/*
 * A message is copied, into the work request where the device takes it inline, into a buffer otherwise, and is then the
 * provider's: posting says HR_OK. It uses one of the receives that the peer has promised (pool.h), as does a write with
 * immediate data. The peer says with its own messages how many it has promised since, and with a message of its own
 * when RECVS/2 of them have gathered, or TOGETHER where we were told of no more than FEW others.
 *
 * Such a message has its own receives, SPARE of them, posted again at once. Of those that we have not seen there are
 * two at most, as what they tell of is unused, and no more than RECVS in all: behind one there can be another of
 * RECVS/2, but none of TOGETHER, which is more than FEW.
 */

#include <string.h>

#include "providers/verbs/verbs.h"

enum { FEW = HR_VERBS_TOGETHER / 2 };

/* What every message says. */
static struct hr_verbs_prefix prefix_of(const struct hr_verbs_ep *ep, enum hr_verbs_kind kind, uint32_t len) {
    return (struct hr_verbs_prefix){
        .kind = (uint8_t)kind, .credit = (uint8_t)ep->owed, .hungry = (uint8_t)ep->hungry, .len = len};
}

static void said(struct hr_verbs_ep *ep) {
    ep->owed = 0;
    ep->hungry = 0;
}

static hr_status send_one(struct hr_verbs_ep *ep, enum hr_verbs_kind kind, const void *hdr, size_t hdr_len,
                          const void *payload, size_t len) {
    size_t total = HR_VERBS_PREFIX + hdr_len + len;
    uint8_t small[HR_VERBS_INLINE], *to = small;
    struct ibv_sge sge = {.length = (uint32_t)total};
    struct ibv_send_wr wr = {.opcode = IBV_WR_SEND, .sg_list = &sge, .num_sge = 1};
    struct hr_verbs_wqe wqe = {.work = HR_VERBS_W_COPY, .bytes = (uint32_t)total};
    ep->hungry |= !ep->room;
    if (!ep->room || !hr_verbs_sends_left(ep)) return hr_verbs_refuse(ep);
    if (total <= ep->inline_max) {
        wr.send_flags = IBV_SEND_INLINE;
    } else {
        if (!hr_verbs_slots_left(ep)) return hr_verbs_refuse(ep);
        to = hr_verbs_slot(ep, ep->slot_tail);
        sge.lkey = ep->slab_mr->lkey;
        wqe.slots = 1;
    }
    struct hr_verbs_prefix prefix = prefix_of(ep, kind, (uint32_t)len);
    prefix.hdr_len = (uint8_t)hdr_len;
    memcpy(to, &prefix, sizeof prefix);
    memcpy(to + sizeof prefix, hdr, hdr_len);
    if (len) memcpy(to + sizeof prefix + hdr_len, payload, len);
    sge.addr = (uintptr_t)to;
    if (hr_verbs_post(ep, &wr, &wqe, 1) == 1) {
        ep->room--;
        said(ep);
        return HR_OK;
    }
    return hr_verbs_refuse(ep);
}

hr_status hr_verbs_send(struct hr_verbs_ep *ep, const void *hdr, size_t hdr_len, const void *payload, size_t len) {
    if (!hr_list_empty(&ep->queue)) return hr_verbs_refuse(ep); /* what was posted before leaves first */
    return send_one(ep, HR_VERBS_MSG, hdr, hdr_len, payload, len);
}

hr_status hr_verbs_post_send(struct hr_ep *base, const struct hr_msg *msg) {
    struct hr_verbs_ep *ep = (struct hr_verbs_ep *)base;
    hr_status status = hr_verbs_usable(ep);
    if (msg->hdr_len < 8 || msg->hdr_len > HR_MAX_HDR || msg->hdr_len % 8 || msg->len > HR_VERBS_MESSAGE)
        return HR_ERR_INVALID;
    return status == HR_OK ? hr_verbs_send(ep, msg->hdr, msg->hdr_len, msg->payload, msg->len) : status;
}

int hr_verbs_send_notice(struct hr_verbs_ep *ep, uint64_t value, uint64_t nbytes) {
    struct hr_verbs_notice notice = {value, nbytes};
    if (send_one(ep, HR_VERBS_NOTIFY, &notice, sizeof notice, NULL, 0) != HR_OK) return 0;
    ep->upper_out = (uint32_t)(value >> 32);
    return 1;
}

int hr_verbs_send_control(struct hr_verbs_ep *ep, enum hr_verbs_kind kind, uint32_t word) {
    uint8_t *to = ep->slab + ep->slab_len - (size_t)(1 + ep->ctl_turn % HR_VERBS_CTL) * HR_VERBS_CTL_BYTES;
    struct hr_verbs_prefix prefix = prefix_of(ep, kind, word);
    struct ibv_sge sge = {.length = sizeof prefix};
    struct ibv_send_wr wr = {.opcode = IBV_WR_SEND, .sg_list = &sge, .num_sge = 1};
    struct hr_verbs_wqe wqe = {.work = HR_VERBS_W_COPY, .ctl = 1};
    if (ep->ctl >= HR_VERBS_CTL || hr_verbs_under_way(ep) >= HR_VERBS_ENTRIES) return 0;
    if (ep->inline_max >= sizeof prefix) {
        sge.addr = (uintptr_t)&prefix;
        wr.send_flags = IBV_SEND_INLINE;
    } else {
        memcpy(to, &prefix, sizeof prefix);
        sge.addr = (uintptr_t)to;
        sge.lkey = ep->slab_mr->lkey;
    }
    if (hr_verbs_post(ep, &wr, &wqe, 1) < 1) return 0;
    ep->ctl_turn++;
    said(ep);
    return 1;
}

/* It needs no room of the peer's, as nothing else is under way yet. */
int hr_verbs_send_hello(struct hr_verbs_ep *ep, uint32_t len) {
    struct hr_verbs_prefix prefix = {.kind = HR_VERBS_HELLO, .len = len};
    struct ibv_sge sge = {.length = (uint32_t)sizeof prefix + len, .lkey = ep->slab_mr->lkey};
    struct ibv_send_wr wr = {.opcode = IBV_WR_SEND, .sg_list = &sge, .num_sge = 1};
    struct hr_verbs_wqe wqe = {.work = HR_VERBS_W_COPY, .slots = 1, .ctl = 1};
    uint8_t *slot = hr_verbs_slot(ep, ep->slot_tail);
    memcpy(slot, &prefix, sizeof prefix);
    sge.addr = (uintptr_t)slot;
    return hr_verbs_post(ep, &wr, &wqe, 1) == 1;
}

void hr_verbs_give_room(struct hr_verbs_ep *ep) {
    int short_of = ep->owed >= HR_VERBS_TOGETHER && ep->promised - ep->owed <= FEW;
    if (short_of || ep->owed >= HR_VERBS_RECVS / 2) hr_verbs_send_control(ep, HR_VERBS_CREDIT, 0);
}

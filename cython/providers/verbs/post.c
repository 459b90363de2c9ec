/* post.c - work requests: out to the device in batches, and their ends. */

/*
 * The device ends the work requests of a queue pair in the order of posting, so the end of one is the end of all before
 * it. What somebody waits for is signaled; copies, which nobody waits for, only every SIGNAL_EVERY-th, which is often
 * enough that their buffers never run out without an end on its way.
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "providers/verbs/bond.h"

enum { SIGNAL_EVERY = 16, ENTRIES = HR_VERBS_ENTRIES };
_Static_assert(SIGNAL_EVERY * 2 <= HR_VERBS_SLOTS, "buffers run out only where the end of some is on its way");

uint32_t hr_verbs_sends_left(const struct hr_verbs_ep *ep) {
    uint32_t used = hr_verbs_under_way(ep) - ep->ctl;
    return used < HR_VERBS_SENDS ? HR_VERBS_SENDS - used : 0;
}

uint32_t hr_verbs_slots_left(const struct hr_verbs_ep *ep) { return HR_VERBS_SLOTS - (ep->slot_tail - ep->slot_head); }

uint8_t *hr_verbs_slot(struct hr_verbs_ep *ep, uint32_t i) {
    return ep->slab + (size_t)(i % HR_VERBS_SLOTS) * HR_VERBS_STRIDE;
}

hr_status hr_verbs_refuse(struct hr_verbs_ep *ep) {
    ep->refused = 1;
    return HR_AGAIN;
}

/* A pass of progress that only brought room has nothing to report, and would be followed by sleep. */
void hr_verbs_room_again(struct hr_verbs_ep *ep) {
    if (ep->refused) hr_verbs_domain_of(&ep->base)->room = 1;
    ep->refused = 0;
}

int hr_verbs_post(struct hr_verbs_ep *ep, struct ibv_send_wr *wrs, const struct hr_verbs_wqe *wqes, int n) {
    struct hr_verbs_domain *d = hr_verbs_domain_of(&ep->base);
    struct ibv_send_wr *bad = NULL;
    uint32_t signaled = ep->signaled;
    int rc = hr_verbs_inject_post(&d->inject, &ep->inject), taken = 0;
    for (int i = 0; i < n; i++) {
        uint32_t at = ep->tail + (uint32_t)i;
        wrs[i].wr_id = (uint64_t)ep->serial << 32 | (at & 0x7fffffff);
        wrs[i].next = i + 1 < n ? &wrs[i + 1] : NULL;
        if (wqes[i].work != HR_VERBS_W_COPY || wqes[i].ctl || at + 1 - signaled >= SIGNAL_EVERY) {
            wrs[i].send_flags |= IBV_SEND_SIGNALED;
            signaled = at + 1;
        }
    }
    if (!rc) {
        rc = ibv_post_send(ep->qp, wrs, &bad);
        taken = rc ? (int)(bad - wrs) : n;
    }
    for (int i = 0; i < taken; i++) {
        if (wrs[i].send_flags & IBV_SEND_SIGNALED) ep->signaled = ep->tail + 1;
        ep->wqes[ep->tail++ % ENTRIES] = wqes[i];
        ep->slot_tail += wqes[i].slots;
        ep->ctl += wqes[i].ctl;
        ep->unsent += wqes[i].bytes;
    }
    if (taken && ep->bond) hr_bond_posted(ep->bond);
    if (taken < n && rc != ENOMEM && rc != EAGAIN)
        hr_verbs_ep_fail(ep, HR_ERR_PEER_LOST, "the queue pair does not take work requests", rc);
    else if (taken < n)
        hr_verbs_ep_ready(ep); /* nothing may come that would wake us */
    return taken;
}

/* ---- ends ---- */

const char *hr_verbs_wc_text(enum ibv_wc_status status) {
    switch (status) {
    case IBV_WC_LOC_LEN_ERR: return "local length error: a message larger than its receive";
    case IBV_WC_LOC_QP_OP_ERR:
        return "local queue pair operation error: memory that is not registered; on soft-RoCE also a message larger "
               "than its receive";
    case IBV_WC_LOC_PROT_ERR: return "local protection error: memory that is not registered";
    case IBV_WC_WR_FLUSH_ERR: return "flushed: the queue pair is in its error state";
    case IBV_WC_LOC_ACCESS_ERR: return "local access error";
    case IBV_WC_REM_INV_REQ_ERR:
        return "remote invalid request: a message larger than its receive, or what that queue pair does not allow";
    case IBV_WC_REM_ACCESS_ERR: return "remote access error: the memory was deregistered, or never allowed this";
    case IBV_WC_REM_OP_ERR: return "remote operation error: the peer could not put a message where its receive said";
    case IBV_WC_RETRY_EXC_ERR: return "transport retries exceeded: the peer or the path to it is gone";
    case IBV_WC_RNR_RETRY_EXC_ERR: return "receiver-not-ready retries exceeded: the peer has posted no receive";
    case IBV_WC_FATAL_ERR: return "fatal device error";
    default: return "the device failed a work request";
    }
}

static hr_status status_of(enum ibv_wc_status status) {
    switch (status) {
    case IBV_WC_REM_ACCESS_ERR:
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_ACCESS_ERR: return HR_ERR_ACCESS;
    case IBV_WC_REM_INV_REQ_ERR: return HR_ERR_INVALID;
    default: return HR_ERR_PEER_LOST;
    }
}

/* Tells one end; the queue has moved on already, as a callback may post. */
static int ended(struct hr_verbs_ep *ep, const struct hr_verbs_wqe *wqe, uint32_t nbytes) {
    if (wqe->to) memcpy(wqe->to, wqe->from, nbytes);
    if (wqe->work == HR_VERBS_W_ATOMIC) {
        ep->base.domain->sink->done(&ep->base, wqe->cookie, HR_OK);
        return 1;
    }
    if (!wqe->op) return 0;
    wqe->op->open--;
    return hr_verbs_op_done(ep, wqe->op);
}

/* What to look at. */
static const char *advice(enum ibv_wc_status status) {
    switch (status) {
    case IBV_WC_RETRY_EXC_ERR: return "; nothing came back: is its link up?";
    case IBV_WC_REM_ACCESS_ERR: return "; the peer took that memory back, or lets us only read it";
    case IBV_WC_LOC_PROT_ERR: return "; memory that is not registered any more";
    default: return "";
    }
}

/* The operation that failed is told, where it is to blame; the connection is over in any case. */
static int failed(struct hr_verbs_ep *ep, const struct hr_verbs_wqe *wqe, const struct ibv_wc *wc) {
    hr_status status = status_of(wc->status);
    char text[240];
    int n = 0;
    if (wc->status == IBV_WC_RNR_RETRY_EXC_ERR) hr_verbs_domain_of(&ep->base)->counts.rnr++;
    snprintf(text, sizeof text, "%s (status %d, vendor code 0x%x)%s", hr_verbs_wc_text(wc->status), (int)wc->status,
             wc->vendor_err, advice(wc->status));
    hr_verbs_ep_fail(ep, HR_ERR_PEER_LOST, text, 0);
    if (wqe && !hr_is_peer_error(status)) {
        void *cookie = wqe->work == HR_VERBS_W_ATOMIC ? wqe->cookie : wqe->op ? wqe->op->cookie : NULL;
        if (cookie) {
            if (wqe->op) hr_verbs_op_free(ep, wqe->op);
            ep->base.domain->sink->done(&ep->base, cookie, status);
            n++;
        }
    }
    return n;
}

void hr_verbs_ended_early(struct hr_verbs_ep *ep, const struct ibv_wc *wc) {
    uint32_t n = (((uint32_t)wc->wr_id - ep->head) & 0x7fffffff) + 1;
    if (wc->status != IBV_WC_SUCCESS || hr_verbs_is_recv(wc) || n > hr_verbs_under_way(ep)) return;
    for (uint32_t i = 0; i < n; i++) {
        ep->ctl -= ep->wqes[(ep->head + i) % ENTRIES].ctl;
        ep->wqes[(ep->head + i) % ENTRIES].ctl = 0;
    }
}

int hr_verbs_sent(struct hr_verbs_ep *ep, const struct ibv_wc *wc) {
    uint32_t upto = ep->head + (((uint32_t)wc->wr_id - ep->head) & 0x7fffffff) + 1;
    int n = 0;
    if (hr_verbs_is_recv(wc)) return failed(ep, NULL, wc);
    if (upto - ep->head > hr_verbs_under_way(ep)) return 0;
    while (ep->head != upto && ep->state != HR_VERBS_LOST) {
        struct hr_verbs_wqe wqe = ep->wqes[ep->head++ % ENTRIES];
        int last = ep->head == upto;
        ep->slot_head += wqe.slots;
        ep->ctl -= wqe.ctl;
        ep->unsent -= wqe.bytes;
        n += last && wc->status != IBV_WC_SUCCESS ? failed(ep, &wqe, wc) : ended(ep, &wqe, wqe.bytes);
    }
    if (ep->state == HR_VERBS_UP) hr_verbs_answer(ep);
    if (ep->state == HR_VERBS_UP) hr_verbs_give_room(ep);
    hr_verbs_room_again(ep);
    if (!hr_list_empty(&ep->queue)) hr_verbs_ep_ready(ep);
    return n;
}

/* A write of nothing asks for no key and no receive at the peer. */
void hr_verbs_probe(struct hr_verbs_ep *ep) {
    struct ibv_send_wr wr = {.opcode = IBV_WR_RDMA_WRITE};
    struct hr_verbs_wqe wqe = {.work = HR_VERBS_W_COPY, .ctl = 1};
    if (ep->ctl < HR_VERBS_CTL && hr_verbs_under_way(ep) < ENTRIES) hr_verbs_post(ep, &wr, &wqe, 1);
}

void hr_verbs_flush(struct hr_verbs_ep *ep) {
    if (ep->signaled != ep->tail) hr_verbs_probe(ep);
}

/* serve.c - answers to a peer's reads and atomics. */

/*
 * A long read is answered in chunks, and only a few of them are in the send ring at a time: messages posted meanwhile
 * get between. Each chunk asks the table of regions anew, so a region that was revoked ends the read with an error.
 */

#include <errno.h>
#include <stdlib.h>

#include "providers/tcp/tcp.h"

#define ANSWERS 4 /* in a row: a receiver that keeps up would keep us here for all of a long read */

static struct hr_tcp_serve *add(struct hr_tcp_ep *ep) {
    if (!ep->serve && !(ep->serve = malloc(HR_TCP_READS * sizeof *ep->serve))) return NULL;
    return &ep->serve[(ep->serve_head + ep->serve_count++) % HR_TCP_READS];
}

/* A peer has at most HR_TCP_READS requests unanswered. */
static hr_status room(const struct hr_tcp_ep *ep) { return ep->serve_count < HR_TCP_READS ? HR_OK : HR_ERR_PROTOCOL; }

hr_status hr_tcp_serve_read(struct hr_tcp_ep *ep, const struct hr_tcp_read *read) {
    if (room(ep)) return HR_ERR_PROTOCOL;
    struct hr_tcp_serve *serve = add(ep);
    if (!serve) return HR_ERR_NOMEM;
    *serve = (struct hr_tcp_serve){.id = read->id, .key = read->key, .offset = read->offset, .left = read->nbytes};
    hr_tcp_serve_pump(ep);
    return HR_OK;
}

hr_status hr_tcp_serve_atomic(struct hr_tcp_ep *ep, const struct hr_tcp_atomic *atomic) {
    if (room(ep)) return HR_ERR_PROTOCOL;
    struct hr_tcp_serve *serve = add(ep);
    if (!serve) return HR_ERR_NOMEM;
    struct hr_tcp_region *region =
        hr_tcp_region_at(hr_tcp_domain_of(&ep->base), atomic->key, HR_ACCESS_REMOTE_ATOMIC, atomic->offset, 8);
    *serve = (struct hr_tcp_serve){.id = atomic->id, .atomic = 1, .status = HR_ERR_ACCESS};
    if (region && (uintptr_t)(region->addr + atomic->offset) % 8 == 0) {
        uint64_t *at = (uint64_t *)(void *)(region->addr + atomic->offset);
        serve->status = HR_OK;
        if (atomic->op == HR_ATOMIC_FETCH_ADD) {
            serve->value = __atomic_fetch_add(at, atomic->operand, __ATOMIC_SEQ_CST);
        } else if (atomic->op == HR_ATOMIC_CMP_SWAP) {
            serve->value = atomic->compare; /* left as it is when equal, replaced by what was there otherwise */
            __atomic_compare_exchange_n(at, &serve->value, atomic->operand, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
        } else {
            serve->status = HR_ERR_INVALID;
        }
    }
    hr_tcp_serve_pump(ep);
    return HR_OK;
}

static hr_status answer_atomic(struct hr_tcp_ep *ep, struct hr_tcp_serve *serve) {
    struct hr_tcp_atomic_data data = {serve->id, serve->status, serve->value};
    struct hr_tcp_frame frame = {HR_TCP_ATOMIC_DATA, sizeof data, 0, HR_TCP_GUARD, 0};
    serve->left = 0;
    return hr_tcp_push(ep, HR_TCP_OP_ANSWER, &frame, &data, NULL, NULL, 0);
}

static hr_status answer_read(struct hr_tcp_ep *ep, struct hr_tcp_serve *serve) {
    struct hr_tcp_domain *d = hr_tcp_domain_of(&ep->base);
    uint64_t len = serve->left < HR_TCP_CHUNK ? serve->left : HR_TCP_CHUNK;
    /* The whole rest must be good, so that a range that is not is refused before any of it is sent. */
    struct hr_tcp_region *region = hr_tcp_region_at(d, serve->key, HR_ACCESS_REMOTE_READ, serve->offset, serve->left);
    struct hr_tcp_read_data data = {serve->id, region ? HR_OK : HR_ERR_ACCESS};
    struct hr_tcp_frame frame = {HR_TCP_READ_DATA, sizeof data, 0, HR_TCP_GUARD, region ? len : 0};
    enum hr_tcp_op_kind kind = region && len ? HR_TCP_OP_CHUNK : HR_TCP_OP_ANSWER;
    const uint8_t *from = region ? region->addr + serve->offset : NULL;
    if (frame.len >= HR_TCP_BULK) hr_tcp_one_way_sends(ep, frame.len, 0);
    hr_status status = hr_tcp_push(ep, kind, &frame, &data, from, NULL, serve->key);
    if (status == HR_INPROGRESS && kind == HR_TCP_OP_CHUNK) {
        ep->tx_chunks++;
        region->serving++;
    }
    serve->offset += len;
    serve->left = region ? serve->left - len : 0;
    return status;
}

void hr_tcp_serve_pump(struct hr_tcp_ep *ep) {
    for (int i = 0; i < ANSWERS && ep->serve_count && !ep->tx_errno; i++) {
        if (ep->tx_chunks >= HR_TCP_CHUNKS || ep->tx_count >= HR_TCP_RING) break;
        struct hr_tcp_serve *serve = &ep->serve[ep->serve_head];
        hr_status status = serve->atomic ? answer_atomic(ep, serve) : answer_read(ep, serve);
        if (status != HR_OK && status != HR_INPROGRESS) {
            /* Memory of ours that cannot be read, or none for the ring: the peer must not wait for the answer. */
            hr_tcp_tx_fail(ep, EFAULT);
            return;
        }
        if (serve->left) continue;
        ep->serve_head = (ep->serve_head + 1) % HR_TCP_READS;
        ep->serve_count--;
    }
    if (ep->serve_count) hr_poll_watch(&hr_tcp_domain_of(&ep->base)->poll, &ep->source, EPOLLIN | EPOLLOUT);
}

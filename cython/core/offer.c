/* offer.c - the sender's side of a rendezvous, until it is answered: what may be done with the memory that it
 * announces.
 */

#include "core/engine.h"
#include "hr/memory.h"

#define SHORT (1u << 20) /* what is changed and shorter goes in messages */

/* Pulling is for providers that map memory, or that cannot be written to. */
static int conn_pulls(struct hr_conn *conn) {
    return (conn->caps->flags & HR_CAP_READ) &&
           ((conn->caps->flags & HR_CAP_MAP) || !(conn->caps->flags & HR_CAP_WRITE));
}

/* What a core has just written takes another longer to read than to get it sent; where both send, neither waits. */
static int in_messages(const struct hr_conn *conn, const struct hr_request *req) {
    struct hr_arena_info arena;
    if (req->flags & HR_REQ_STAGED) return 1;
    return req->flags & HR_REQ_CHANGED && conn->caps->flags & HR_CAP_RELAYS && req->len < SHORT &&
           !hr_arena_find(req->buf, req->len, &arena);
}

/* Pages that are mapped may have to be left to the peer: nothing else may be on them, nor may anybody be shown them. */
uint32_t hr_xfer_opens(const struct hr_conn *conn, const struct hr_request *req) {
    struct hr_arena_info arena;
    uint32_t caps = conn->caps->flags;
    if (!(req->flags & HR_REQ_OPEN)) return 0;
    if (!hr_arena_find(req->buf, req->len, &arena))
        return conn->lanes[0].ep->puts && req->len >= HR_PUT_MIN ? HR_ACCESS_REMOTE_PUT : 0;
    uintptr_t begin = hr_page_down((uintptr_t)req->buf), end = hr_page_up((uintptr_t)req->buf + req->len);
    int opens = caps & HR_CAP_MAP_WRITE && req->flags & HR_REQ_ALONE && arena.flags & HR_ARENA_WRITABLE_BY_PEERS &&
                !hr_exposes(conn->engine, (void *)begin, end - begin);
    return opens ? HR_ACCESS_REMOTE_MAP : 0;
}

hr_status hr_xfer_offer(struct hr_conn *conn, struct hr_request *req, struct hr_hdr_long *rts) {
    struct hr_ep *ep = conn->lanes[0].ep;
    uint32_t open = hr_xfer_opens(conn, req), access = HR_ACCESS_REMOTE_READ | open;
    struct hr_xfer *x = hr_xfer_new(conn->engine, req, conn, HR_XFER_SEND);
    if (!x) return HR_ERR_NOMEM;
    rts->h.sreq = x->id;
    if (hr_xfer_confirms(conn)) rts->h.flags |= HR_HDR_SURE;
    if (!conn_pulls(conn) || (!open && in_messages(conn, req))) return HR_OK;
    hr_status status = conn->caps->flags & HR_CAP_MAP ? hr_ledger_enter(x) : HR_OK;
    if (status == HR_AGAIN || conn->state == HR_CONN_LOST) {
        hr_xfer_free(conn->engine, x);
        return status;
    }
    if (status != HR_OK) return HR_OK;
    if (ep->domain->ops->mem_register(ep->domain, x->buf, x->len, access, &x->mem) != HR_OK) return HR_OK;
    x->has_mem = 1;
    status = ep->domain->ops->mem_export(ep, &x->mem, x->buf, x->len, &rts->desc);
    if (status == HR_OK) rts->h.flags |= HR_HDR_DESC | hr_read_flags(conn, x->len);
    if (status == HR_OK && open) rts->h.flags |= HR_HDR_OPEN;
    rts->key = x->key;
    x->open = status == HR_OK && open;
    if (status == HR_AGAIN) {
        hr_xfer_free(conn->engine, x);
        return HR_AGAIN;
    }
    return HR_OK; /* not reachable by this peer: it will ask for segments */
}

void hr_xfer_called(const struct hr_xfer *x, int called) {
    unsigned class = 1u << hr_relay_class(x->len), all = x->conn->reading.called;
    if (x->has_mem) x->conn->reading.called = (uint8_t)(called ? all | class : all & ~class);
}

/*
 * What will be called for in segments begins to go with the RTS: two copies of it take place at once (HR_CAP_RELAYS),
 * and the one would otherwise wait for the other's end, an answer, and a piece. So much as goes on while the answer
 * comes: of what is short half. One transfer at a time, as others keep both sides busy; and where a provider takes a
 * message at once or not at all, so that none refers to a buffer that is given up.
 */
uint32_t hr_xfer_head(const struct hr_xfer *x) {
    const struct hr_conn *conn = x->conn;
    const struct hr_caps *caps = conn->caps;
    struct hr_arena_info arena;
    uint64_t n = x->len < SHORT ? caps->piece / 2 : caps->piece;
    if (!(caps->flags & HR_CAP_RELAYS) || !(caps->flags & HR_CAP_FILLS) || conn->reading.heads || x->open) return 0;
    if (x->has_mem && !(conn->reading.called >> hr_relay_class(x->len) & 1)) return 0;
    if (x->has_mem && hr_arena_find(x->buf, x->len, &arena)) return 0;
    if (n > caps->max_send) n = caps->max_send;
    if (n > x->len / 2) n = x->len / 2 & ~(uint64_t)63;
    return hr_conn_may_hold(conn, n) ? (uint32_t)n : 0;
}

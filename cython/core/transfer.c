/* transfer.c - rendezvous: how a message that is too large to be copied along gets from buffer to buffer. */

/*
 * The receiver decides, when its receive matches the sender's RTS:
 *   lent     the borrower reads the sender's memory, in place where it is mapped, and says FIN when it is through
 *   pull     the RTS has a descriptor that this side can read: it reads (or reduces) piece by piece, then FIN
 *   push     this side's buffer can be written by the peer: CTS with a descriptor; the sender writes with notification,
 *            of the last write alone where its provider says of each when it has arrived
 *   segments CTS without one: the sender sends the bytes as messages; they are copied or reduced as they arrive
 * Either side may give up at any time: FIN with an error from the receiver, CANCEL from the sender. Transfers are named
 * on the wire by an id that carries a generation, so that what comes late for one that is over is recognised and
 * dropped.
 *
 * A buffer is free for its owner as soon as its request is finished: pulled buffers after FIN, pushed ones when the
 * provider has let go of them; a buffer that the peer may be writing to when the provider says that it will be quiet
 * (mem_quiet), or when the connection is cut.
 */

#include <stdlib.h>
#include <string.h>

#include "core/program.h"
#include "hr/memory.h"

#define SHORT (1u << 20)  /* what has but a few pieces comes in shorter ones */
#define WAITED (2u << 20) /* where the thread has nothing else to do: a piece takes a quarter of a millisecond */

/* Arenas are what peers read in place. */
hr_store hr_store_into(const void *dst, uint64_t len, int unread) {
    struct hr_arena_info arena;
    if (unread) return HR_STORE_UNREAD;
    return len >= HR_SHARED_MIN && hr_arena_find(dst, len, &arena) ? HR_STORE_SHARED : HR_STORE_CACHED;
}

/* Offsets of reductions are multiples of the element size. */
void hr_consume_to(struct hr_request *req, const void *data, uint64_t offset, size_t len, void *back, void *on) {
    char *own = (char *)req->buf + offset, *dst = on ? on : own;
    void *also = on ? own : back;
    const void *src[2] = {own, data};
    if (req->rflags & HR_RECV_SWAP) {
        src[0] = data;
        src[1] = own;
    }
    double scale = req->rflags & HR_RECV_SCALE ? hr_run_scale(req) : 1.0;
    int unread = req->rflags & HR_RECV_NT;
    hr_store store = on ? HR_STORE_SHARED : back && !unread ? HR_STORE_CACHED : hr_store_into(own, len, unread);
    hr_reduce_to_all(req->op, req->dtype, dst, &also, also != NULL, src, 2, len / hr_dtype_size(req->dtype), scale,
                     store);
}

/* Copies or reduces what came into its place. */
int hr_consume(struct hr_request *req, const void *data, uint64_t offset, size_t len) {
    char *dst = (char *)req->buf + offset;
    int folded = len && req->rflags & HR_RECV_FOLD ? hr_run_fold(req, data, len) : 0;
    if (folded || !len) return folded == HR_FUSED;
    if (req->rflags & HR_RECV_REDUCE)
        hr_consume_to(req, data, offset, len, NULL, NULL);
    else
        hr_copy(dst, data, len, hr_store_into(dst, len, req->rflags & HR_RECV_NT));
    return 0;
}

/* Pieces of a segment: whole elements, whole cache lines. What is confirmed costs the peer nothing, and each piece this
 * side a system call: so they are long, and less than twice the window is on its way. Of what both sides copy at once,
 * short pieces let the peer begin early, which is nothing beside the length of what fills the caches. */
static uint64_t segment_size(struct hr_conn *conn, const struct hr_xfer *x) {
    const struct hr_caps *caps = conn->caps;
    int message = x->mode == HR_XFER_SEND_SEG;
    uint64_t n = message && caps->piece ? caps->piece : caps->segment;
    int both = message && caps->piece && caps->flags & HR_CAP_MAP; /* elsewhere a piece costs a system call */
    if (both && x->len < SHORT) n = caps->piece / (x->req->flags & HR_REQ_CHANGED ? 2 : 4);
    if (message && caps->flags & HR_CAP_RELAYS && x->len >= HR_UNREAD_MIN) n = caps->max_send;
    if (x->open && x->rmem.out && hr_run_waits(x->req)) n = WAITED;
    if (caps->window) {
        uint64_t share = conn->window / (conn->lanes[conn->nlanes > 1].ep->one_way ? 2 : 4);
        if (x->sure && conn->rate > 0) share = conn->window;
        if (n > share) n = share;
        if (n < HR_SEGMENT_MIN) n = HR_SEGMENT_MIN;
    }
    if (message && n > caps->max_send) n = caps->max_send;
    if (x->scratch && n > hr_read_most(x->len)) n = hr_read_most(x->len);
    return n & ~63ull;
}

/* --- the sender's side
 * --------------------------------------------------------------------------------------------------- */

/* Whether bulk goes by one endpoint, which says of writes when they have arrived. */
int hr_xfer_confirms(const struct hr_conn *conn) { return conn->caps->flags & HR_CAP_CONFIRMS && conn->nlanes <= 2; }

void hr_xfer_on_cts(struct hr_conn *conn, const struct hr_hdr_long *cts) {
    struct hr_xfer *x = hr_xfer_find(conn, cts->h.sreq);
    struct hr_ep *ep = conn->lanes[0].ep;
    if (x && x->shared) {
        hr_conn_lost(conn, HR_ERR_PROTOCOL, "a call for segments of what it has asked help with");
        return;
    }
    if (!x || x->mode != HR_XFER_SEND) {
        struct hr_hdr h = {.kind = HR_MSG_CANCEL, .status = HR_ERR_CANCELED, .comm = cts->h.comm, .rreq = cts->h.rreq};
        hr_conn_send_ctl(conn, &h, sizeof h);
        return;
    }
    x->remote = cts->h.rreq;
    x->mode = HR_XFER_SEND_SEG;
    if (cts->h.flags & HR_HDR_DESC) {
        hr_status status = ep->domain->ops->mem_import(ep, &cts->desc, &x->rmem);
        if (status != HR_OK || x->rmem.len < x->len) {
            hr_conn_no_import(conn, status, "a memory descriptor that cannot be used");
            return;
        }
        x->has_rmem = 1;
        x->sure = cts->h.flags & HR_HDR_SURE && hr_xfer_confirms(conn);
        x->mode = HR_XFER_SEND_PUSH;
        HR_COUNT(conn->engine, push);
    } else {
        HR_COUNT(conn->engine, seg);
        if (cts->h.aux && cts->h.aux != x->head) {
            hr_conn_lost(conn, HR_ERR_PROTOCOL, "an answer to what was not sent");
            return;
        }
        x->posted = cts->h.aux;
        hr_xfer_called(x, 1);
    }
    hr_list_push(&conn->bulk[x->req->priority], &x->work.link);
    conn->nbulk++;
    hr_conn_activate(conn);
}

static void send_finished(struct hr_conn *conn, struct hr_xfer *x) {
    struct hr_request *req = x->req;
    hr_xfer_free(conn->engine, x);
    hr_finish(conn->engine, req, HR_OK);
}

/* Where there are several streams no segments and writes go by the first: acknowledgements and urgent messages, which
 * go there, then stand behind none of them (though behind eager payloads). The others take turns; one that is full is
 * passed over. */
static hr_status write_segment(struct hr_conn *conn, struct hr_rma *rma) {
    hr_status status = HR_AGAIN;
    uint32_t first = conn->nlanes > 1, n = (uint32_t)conn->nlanes - first;
    for (uint32_t i = 0; i < n && status == HR_AGAIN; i++) {
        struct hr_lane *lane = &conn->lanes[first + conn->next_lane++ % n];
        status = hr_lane_posted(lane, lane->ep->domain->ops->post_write(lane->ep, rma));
    }
    return status;
}

hr_status hr_xfer_send_segment(struct hr_conn *conn, struct hr_xfer *x, uint64_t *nbytes_p) {
    if (x->mode == HR_XFER_RMA) return hr_rma_segment(conn, x);
    uint64_t left = x->len - x->posted, n = segment_size(conn, x);
    hr_status status;
    if (x->sure && x->outstanding == HR_WRITES) return HR_AGAIN;
    if (n > left) n = left;
    if (x->mode == HR_XFER_SEND_PUSH) {
        struct hr_rma rma = {.local = x->buf + x->posted,
                             .len = n,
                             .remote = &x->rmem,
                             .offset = x->posted,
                             .with_notify = !x->sure || n == left, /* the last comes behind all others */
                             .value = x->remote,
                             .cookie = HR_XFER_COOKIE(x),
                             .one_way = conn->caps->window && hr_window_one_way(conn, x->req->priority)};
        status = write_segment(conn, &rma);
    } else {
        struct hr_hdr h = {.kind = HR_MSG_SEG, .comm = x->req->comm->id, .aux = x->posted, .rreq = x->remote};
        status = hr_read_send(x, &h, n);
    }
    if (status == HR_AGAIN) return status;
    if (hr_is_error(status)) {
        hr_conn_lost(conn, hr_is_peer_error(status) ? status : HR_ERR_PEER_LOST, "a segment could not be sent");
        return status;
    }
    *nbytes_p = x->sure ? 0 : n;
    if (x->mode == HR_XFER_SEND_PUSH) conn->tx_bytes += n;
    x->posted += n;
    if (x->sure && status == HR_INPROGRESS) {
        x->writes[(x->first + x->outstanding) % HR_WRITES] = (uint32_t)n;
        hr_window_writes(conn, n);
    } else if (x->sure) {
        x->completed += n;
    }
    if (status == HR_INPROGRESS) x->outstanding++;
    if (x->posted == x->len) {
        hr_list_remove(&x->work.link);
        conn->nbulk--;
        if (!x->outstanding) send_finished(conn, x);
    }
    return HR_OK;
}

void hr_xfer_on_fin(struct hr_conn *conn, const struct hr_hdr *h) {
    struct hr_xfer *x = hr_xfer_find(conn, h->rreq);
    if (h->status != HR_OK) hr_window_probe(conn); /* what is on its way there may be dropped without a word */
    if (!x || (x->mode != HR_XFER_SEND && x->mode != HR_XFER_SEND_PUSH && x->mode != HR_XFER_SEND_SEG)) return;
    struct hr_request *req = x->req;
    if (x->head && x->mode == HR_XFER_SEND) hr_xfer_called(x, 0);
    if (h->flags & HR_HDR_OPEN && x->open) req->flags |= HR_REQ_RETURNED;
    x->open = conn->stopped = 0; /* the peer is through with it */
    if (h->status == HR_OK) {
        if (x->mode == HR_XFER_SEND) {
            hr_read_heard(x, h);
            conn->tx_bytes += x->len; /* the peer has read them */
            send_finished(conn, x);
        } else
            hr_conn_lost(conn, HR_ERR_PROTOCOL, "the end of a transfer that is not the peer's to end");
        return;
    }
    hr_xfer_abort(conn->engine, x, 0); /* the receiver does not want it: nothing to tell it */
    /* had it broken there, we would have heard of that before: the peer has closed the communicator */
    hr_status status = h->status == HR_ERR_BROKEN ? HR_ERR_CLOSED : h->status;
    if (status == HR_ERR_MISMATCH || status == HR_ERR_CLOSED)
        hr_fail(conn->engine, req, status, hr_comm_rank_of(req->comm, conn), HR_PHASE_MATCH, conn);
    else
        hr_finish(conn->engine, req,
                  HR_OK); /* truncated or withdrawn there: delivered as far as this side is concerned */
}

/* --- the receiver's side
 * --------------------------------------------------------------------------------------------------- */

static void put_back(struct hr_engine *engine, struct hr_request *req) {
    req->flags |= HR_REQ_RETURNED;
    HR_COUNT(engine, returned);
}

static struct hr_hdr fin_of(const struct hr_xfer *x) {
    struct hr_hdr fin = {.kind = HR_MSG_FIN, .comm = x->req->comm->id, .rreq = x->remote};
    if (x->open) fin.flags = HR_HDR_OPEN;
    hr_read_tells(x, &fin);
    return fin;
}

static void recv_finished(struct hr_conn *conn, struct hr_xfer *x, int tell) {
    struct hr_request *req = x->req;
    struct hr_hdr fin = fin_of(x);
    req->nbytes = x->len;
    if (x->open) put_back(conn->engine, req);
    hr_xfer_free(conn->engine, x);
    if (tell) hr_conn_send_ctl(conn, &fin, sizeof fin);
    hr_finish(conn->engine, req, HR_OK);
}

/* Where the sender has taken it back, the transfer stays as it is: a CANCEL is coming. */
void hr_xfer_pulled(struct hr_xfer *x) {
    if (hr_ledger_stands(x)) recv_finished(x->conn, x, 1);
}

/* Takes what is mapped, and where it is open puts the result there, too. 0: the sender has taken it back. */
static int consume_mapped(struct hr_xfer *x, uint64_t len) {
    if (x->open && !hr_ledger_hold(x)) return 0;
    const char *data = (const char *)x->rmem.ptr + x->posted;
    if (x->open)
        hr_consume_to(x->req, data, x->posted, len, (char *)x->rmem.out + x->posted, NULL);
    else
        hr_consume(x->req, data, x->posted, len);
    if (x->open && x->posted + len < x->len) hr_ledger_let_go(x); /* of the last one FIN does */
    return 1;
}

void hr_xfer_pull_failed(struct hr_engine *engine, struct hr_xfer *x, hr_status status) {
    struct hr_conn *conn = x->conn;
    struct hr_request *req = x->req;
    hr_xfer_send_fin(conn, req->comm->id, x->remote, status);
    hr_xfer_abort(engine, x, 0);
    hr_fail(engine, req, status, req->peer, HR_PHASE_TRANSFER, conn);
}

/* One piece of a pull. */
static int pull_step(struct hr_engine *engine, struct hr_work *work) {
    struct hr_xfer *x = hr_container(work, struct hr_xfer, work);
    struct hr_conn *conn = x->conn;
    uint64_t n = segment_size(conn, x), left = x->len - x->posted;
    if (n > left) n = left;
    if ((!(x->open && x->rmem.out) && !hr_ledger_stands(x)) || (x->rmem.ptr && !consume_mapped(x, n))) {
        hr_work_remove(engine, work); /* in the same process the memory may even be gone */
        return 0;
    }
    if (!x->rmem.ptr) {
        hr_status status = hr_read_piece(x, n);
        if (status == HR_AGAIN) return 1;
        if (status == HR_ERR_CANCELED) { /* a CANCEL is coming */
            hr_work_remove(engine, work);
            return 0;
        }
        if (status == HR_ERR_ACCESS && !hr_ledger_stands(x)) return 1;
        if (hr_is_error(status)) {
            hr_xfer_pull_failed(engine, x, status);
            return 0;
        }
    }
    conn->rx_bytes += n;
    x->posted += n;
    int waits = x->scratch && x->outstanding; /* there is one scratch */
    if (x->posted < x->len && !waits) return 1;
    hr_work_remove(engine, work);
    if (x->posted < x->len) return 0;
    if (!x->outstanding) hr_xfer_pulled(x);
    return 0;
}

static void ask(struct hr_conn *conn, struct hr_xfer *x, struct hr_hdr_long *cts) {
    cts->h.kind = HR_MSG_CTS;
    cts->h.comm = x->req->comm->id;
    cts->h.sreq = x->remote;
    cts->h.rreq = x->id;
    hr_conn_send_ctl(conn, &cts->h, sizeof *cts);
}

void hr_xfer_accept(struct hr_request *req, struct hr_conn *conn, const struct hr_hdr_long *rts, const void *head,
                    size_t len) {
    struct hr_engine *engine = conn->engine;
    struct hr_ep *ep = conn->lanes[0].ep;
    const struct hr_provider *ops = ep->domain->ops;
    struct hr_hdr_long cts = {0};
    hr_status status = HR_OK;
    if (conn->state != HR_CONN_UP)
        status = hr_is_error(conn->why) ? conn->why : HR_ERR_PEER_LOST;
    else if (rts->size > req->len)
        status = HR_ERR_TRUNCATED;
    struct hr_xfer *x = status == HR_OK ? hr_xfer_new(engine, req, conn, HR_XFER_SEG) : NULL;
    if (!x) {
        if (status == HR_OK) status = HR_ERR_NOMEM;
        req->nbytes = rts->size;
        hr_xfer_send_fin(conn, rts->h.comm, rts->h.sreq, status);
        hr_fail(engine, req, status, req->peer, HR_PHASE_MATCH, conn);
        return;
    }
    x->len = rts->size;
    if ((len && len >= x->len) || (req->rflags & HR_RECV_REDUCE && len % hr_dtype_size(req->dtype))) {
        hr_conn_lost(conn, HR_ERR_PROTOCOL, "a beginning that does not fit its transfer");
        return;
    }
    x->remote = rts->h.sreq;
    x->key = rts->key;
    if (x->len >= HR_UNREAD_MIN) req->rflags |= HR_RECV_NT;
    if ((rts->h.flags & HR_HDR_DESC) && (!(conn->caps->flags & HR_CAP_MAP) || hr_ledger_covers(x)) &&
        ops->mem_import(ep, &rts->desc, &x->rmem) == HR_OK) {
        x->has_rmem = 1;
        if (x->rmem.len < x->len) {
            hr_conn_lost(conn, HR_ERR_PROTOCOL, "a memory descriptor that is too short");
            return;
        }
        int borrow = req->rflags & HR_RECV_BORROW, read = !x->rmem.ptr && hr_read_chosen(x, rts->h.flags);
        x->open = hr_read_returns(x, rts->h.flags) && (x->rmem.out || (x->rmem.puts && x->scratch));
        if (x->open && x->rmem.out && hr_run_bytes(req) >= HR_UNREAD_MIN) req->rflags |= HR_RECV_NT;
        if (borrow && (x->rmem.ptr || x->scratch)) {
            x->mode = HR_XFER_LENT;
            HR_COUNT(engine, lent);
            req->nbytes = x->len;
            hr_finish(engine, req, HR_OK);
            return;
        }
        if (x->rmem.ptr || read) {
            x->mode = HR_XFER_PULL;
            x->work.step = pull_step;
            HR_COUNT(engine, pull);
            if (x->rmem.ptr && x->len <= HR_INLINE_WORK && (x->open || hr_ledger_stands(x))) {
                if (!consume_mapped(x, x->len)) return;
                conn->rx_bytes += x->len;
                hr_xfer_pulled(x);
            } else if (x->scratch || x->open || !hr_share_ask(x)) {
                hr_work_add(engine, &x->work, req->priority);
            }
            return;
        }
    }
    if ((conn->caps->flags & HR_CAP_WRITE) && !(req->rflags & HR_RECV_REDUCE) && !(conn->caps->flags & HR_CAP_MAP) &&
        ops->mem_register(ep->domain, x->buf, x->len, HR_ACCESS_REMOTE_WRITE, &x->mem) == HR_OK) {
        x->has_mem = 1;
        if (ops->mem_export(ep, &x->mem, x->buf, x->len, &cts.desc) == HR_OK) {
            x->mode = HR_XFER_PUSH;
            x->sure = rts->h.flags & HR_HDR_SURE && hr_xfer_confirms(conn);
            cts.h.flags = HR_HDR_DESC | (x->sure ? HR_HDR_SURE : 0);
        }
    }
    if (x->mode == HR_XFER_SEG) cts.h.aux = x->begun = (uint32_t)len;
    ask(conn, x, &cts);
    if (x->begun) hr_read_arrived(x, head, len);
}

void hr_xfer_on_seg(struct hr_conn *conn, const struct hr_hdr *h, const void *payload, size_t len) {
    hr_conn_owe(conn, 0, (uint32_t)len);
    struct hr_xfer *x = hr_xfer_find(conn, h->rreq);
    if (!x) return; /* it was given up here; the sender will hear */
    int ragged = (x->req->rflags & HR_RECV_REDUCE) && len % hr_dtype_size(x->req->dtype);
    if (x->mode != HR_XFER_SEG || h->aux != x->completed || len > x->len - x->completed || ragged) {
        hr_conn_lost(conn, HR_ERR_PROTOCOL, "a segment that does not fit its transfer");
        return;
    }
    hr_read_arrived(x, payload, len);
    if (x->completed == x->len) recv_finished(conn, x, 0);
}

void hr_xfer_on_notify(struct hr_conn *conn, uint64_t value, size_t nbytes) {
    if (HR_IS_NOTE(value)) {
        hr_note_arrived(conn, value);
        return;
    }
    struct hr_xfer *x = value <= UINT32_MAX ? hr_xfer_find(conn, (uint32_t)value) : NULL;
    int sure = x ? x->sure : hr_xfer_confirms(conn); /* nobody waits to hear of those */
    if (!sure) hr_conn_owe(conn, 0, (uint32_t)nbytes);
    if (!x) return;
    if (x->mode != HR_XFER_PUSH || nbytes > x->len - x->completed) {
        hr_conn_lost(conn, HR_ERR_PROTOCOL, "a notification that does not fit its transfer");
        return;
    }
    if (x->sure) conn->rx_bytes += x->len - nbytes;
    x->completed = x->sure ? x->len : x->completed + nbytes; /* it came behind all others */
    if (x->completed == x->len) recv_finished(conn, x, 0);
}

void hr_xfer_on_cancel(struct hr_conn *conn, const struct hr_hdr *h) {
    struct hr_engine *engine = conn->engine;
    struct hr_xfer *x = NULL;
    if (h->rreq)
        x = hr_xfer_find(conn, h->rreq);
    else
        for (uint32_t i = 0; i < engine->nxfers && !x; i++) { /* matched here, but the sender never heard of it */
            struct hr_xfer *y = engine->xfers[i];
            if (y->conn == conn && y->remote == h->sreq && y->mode >= HR_XFER_PULL) x = y;
        }
    if (!x) {
        hr_match_cancel(conn, h->sreq, h->comm, h->tag);
        return;
    }
    if (x->mode < HR_XFER_PULL) {
        hr_conn_lost(conn, HR_ERR_PROTOCOL, "a withdrawal of what it does not send");
        return;
    }
    struct hr_request *req = x->req;
    if (x->mode == HR_XFER_LENT) { /* the borrower has finished its receive and may be reading: its run is spoilt */
        hr_comm_break_locked(req->comm, HR_ERR_CLOSED, hr_comm_rank_of(req->comm, conn), HR_PHASE_TRANSFER,
                             conn->provider->name, NULL, 1);
        return;
    }
    hr_xfer_abort(engine, x, 0);
    if (req->then) /* part of a collective: the peer has closed the communicator, no other message will come */
        hr_fail(engine, req, HR_ERR_CLOSED, req->peer, HR_PHASE_TRANSFER, conn);
    else
        hr_match_again(engine, req); /* what was withdrawn was never sent */
}

/* A read or write has left the provider. */
void hr_xfer_on_done(struct hr_xfer *x, hr_status status) {
    struct hr_conn *conn = x->conn;
    if (x->sure && x->mode == HR_XFER_SEND_PUSH) {
        uint32_t n = x->writes[x->first++ % HR_WRITES];
        x->completed += n;
        hr_window_wrote(conn, n);
    }
    x->outstanding--;
    if (x->mode == HR_XFER_LENT) {
        hr_read_lent_done(x, status);
        return;
    }
    if (!hr_is_error(status) && x->mode == HR_XFER_PULL && x->shared) {
        hr_share_piece_read(x);
        return;
    }
    if (!hr_is_error(status) && (status = hr_read_done(x)) == HR_ERR_CANCELED) return;
    if (status == HR_ERR_ACCESS && x->mode == HR_XFER_PULL && !hr_ledger_stands(x)) return;
    if (hr_is_error(status)) {
        struct hr_request *req = x->req;
        if (x->mode == HR_XFER_SEND_SEG) { /* the segments behind it do not fit any more */
            hr_conn_lost(conn, status, "a segment could not be sent");
            return;
        }
        if (x->mode == HR_XFER_PULL) hr_xfer_send_fin(conn, req->comm->id, x->remote, status);
        hr_xfer_abort(conn->engine, x, x->mode != HR_XFER_PULL);
        hr_fail(conn->engine, req, status, hr_comm_rank_of(req->comm, conn), HR_PHASE_TRANSFER, conn);
        return;
    }
    if (x->posted < x->len || x->outstanding) return;
    if (x->mode == HR_XFER_PULL)
        hr_xfer_pulled(x);
    else
        send_finished(conn, x);
}

/* --- endings
 * ------------------------------------------------------------------------------------------------------------------ */

void hr_xfer_return(struct hr_engine *engine, struct hr_xfer *x) {
    struct hr_conn *conn = x->conn;
    struct hr_hdr fin = fin_of(x);
    conn->rx_bytes += x->len;
    if (x->open) put_back(engine, x->req);
    hr_xfer_free(engine, x);
    hr_conn_send_ctl(conn, &fin, sizeof fin);
}

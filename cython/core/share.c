/* share.c - a long message that both ends copy: the receiver from one piece to the next, the sender those in between.
 */

/*
 * A core moves what a core can, and while one pulls a message out of the other's memory the other waits for it. So the
 * receiver of a message in memory that it can read, whose own buffer the sender can write to, asks for a hand (HELP).
 * Who has time takes the next piece, by counting up in the sender's ledger; so nobody waits for a sender that computes:
 * what is done is the sender's thread's, if it waits in a call, and never the background thread's. When no piece is
 * left the sender says how many it has copied (HELPED), and the receiver that all are there (FIN).
 *
 * The sender holds the entry for each piece. A receiver that gives up strikes it there; if a sender that was stopped
 * holds it, mapped pages are left to it (mem_quiet). Nothing else may be on these: what is on the first and on the last
 * beside the buffer is the receiver's, which copies the ends of the message there alone. Into memory that is not mapped
 * the kernel writes for the sender (post_put), and mem_quiet takes that away from it; a piece that it will not write,
 * as into a device's memory, goes back to the receiver, which then asks no more.
 */

#include "core/engine.h"
#include "hr/memory.h"

#define SHARED_FROM (768u << 10) /* below it the other end hears too late */
#define PUT_FROM (512u << 10)    /* the same, where the kernel copies, which is slower */
#define PIECES 8                 /* of a message, at least, so that both are through at the same time */
#define LEAST (64u << 10)
#define MOST (512u << 10)
#define COUNTED (1u << 14) /* of pieces; the ledger counts to twice as many */

/* Both ends cut alike. */
static uint64_t piece_of(uint64_t len) {
    uint64_t n = len / PIECES;
    n = n < LEAST ? LEAST : n > MOST ? MOST : n;
    return ((len / COUNTED > n ? len / COUNTED : n) + 4095) & ~4095ull;
}

static uint32_t pieces(uint64_t len) { return (uint32_t)((len + piece_of(len) - 1) / piece_of(len)); }

/* Piece i of what is shared: its length; where it begins. */
static uint64_t piece(const struct hr_xfer *x, uint32_t i, uint64_t *at_p) {
    uint64_t n = piece_of(x->shared), at = *at_p = i * n;
    return n > x->shared - at ? x->shared - at : n;
}

uint64_t hr_share_bytes(const struct hr_xfer *x) { return x->completed + x->helped == pieces(x->shared) ? x->len : 0; }

/* This side sends it, and has been asked to copy pieces of it. */
static int helps(const struct hr_xfer *x, int priority) {
    return x->mode == HR_XFER_SEND && x->work.priority == priority && !hr_list_empty(&x->work.link);
}

/* --- the receiver's side
 * --------------------------------------------------------------------------------------------------- */

static hr_status receive_piece(struct hr_xfer *x, uint32_t i) {
    struct hr_ep *ep = x->conn->lanes[0].ep;
    uint64_t at, n = piece(x, i, &at);
    char *to = x->buf + x->from + at;
    struct hr_rma rma = {.local = to, .len = n, .remote = &x->rmem, .offset = at, .cookie = HR_XFER_COOKIE(x)};
    hr_status status = HR_OK;
    if (x->rmem.ptr)
        hr_copy(to, (const char *)x->rmem.ptr + x->from + at, n, hr_store_into(to, n, x->shared >= HR_UNREAD_MIN));
    else
        status = ep->domain->ops->post_read(ep, &rma);
    if (status == HR_OK) {
        x->read += n;
        x->conn->rx_bytes += n;
        x->completed++;
    }
    return status;
}

static void finish_if_whole(struct hr_xfer *x) {
    if (!hr_list_empty(&x->work.link) || x->outstanding || !hr_share_bytes(x)) return;
    x->conn->rx_bytes += x->len - x->read;
    hr_xfer_pulled(x);
}

/* A piece more than there are: who counts has been interfered with. */
static int too_many(struct hr_xfer *x, uint64_t copied) {
    if (copied < pieces(x->shared)) return 0;
    hr_work_remove(x->conn->engine, &x->work);
    hr_conn_lost(x->conn, HR_ERR_PROTOCOL, "a ledger that counts backwards");
    return 1;
}

/* This side brings that peer what it copies anyway, and so does the peer: nobody fetches what the other has. */
static int goes_beside(const struct hr_xfer *x) {
    const struct hr_engine *engine = x->conn->engine;
    for (uint32_t i = 0; i < engine->nxfers; i++) {
        const struct hr_xfer *y = engine->xfers[i];
        if (y->conn == x->conn && y->beside && helps(y, x->work.priority)) return 1;
    }
    return 0;
}

static int receive_step(struct hr_engine *engine, struct hr_work *work) {
    struct hr_xfer *x = hr_container(work, struct hr_xfer, work);
    if (!x->posted && goes_beside(x)) { /* behind both */
        hr_work_remove(engine, work);
        hr_work_add(engine, work, work->priority);
        return 1;
    }
    int64_t i = x->posted ? (int64_t)x->posted - 1 : x->back ? x->back - 1 : hr_ledger_take(x, pieces(x->shared));
    if (i >= 0) {
        if (too_many(x, x->completed)) return 0;
        if (!x->posted) x->back = 0;
        hr_status status = receive_piece(x, (uint32_t)i);
        x->posted = status == HR_AGAIN ? (uint64_t)i + 1 : 0; /* it has that piece in hand */
        if (status == HR_INPROGRESS) {
            x->outstanding++;
            hr_work_remove(engine, work);
        }
        if (!hr_is_error(status)) return status != HR_INPROGRESS;
        if (status == HR_ERR_ACCESS && !hr_ledger_stands(x)) return 1;
        hr_xfer_pull_failed(engine, x, status);
        return 0;
    }
    hr_work_remove(engine, work);
    finish_if_whole(x); /* where it was taken back a CANCEL is coming */
    return 0;
}

void hr_share_piece_read(struct hr_xfer *x) {
    x->completed++;
    hr_work_add(x->conn->engine, &x->work, x->req->priority);
}

int hr_share_ask(struct hr_xfer *x) {
    struct hr_conn *conn = x->conn;
    struct hr_ep *ep = conn->lanes[0].ep;
    const struct hr_provider *ops = ep->domain->ops;
    struct hr_arena_info arena;
    uintptr_t buf = (uintptr_t)x->buf, end = buf + x->len;
    if (x->len < PUT_FROM || conn->engine->yield || !conn->peer_ledger.out || x->both ||
        x->req->rflags & (HR_RECV_REDUCE | HR_RECV_BORROW | HR_RECV_FOLD))
        return 0;
    int in_arena = hr_arena_find(x->buf, x->len, &arena), put = !in_arena && !conn->helpless;
    int maps = in_arena && x->rmem.ptr && conn->caps->flags & HR_CAP_MAP_WRITE &&
               arena.flags & HR_ARENA_WRITABLE_BY_PEERS && !hr_exposes(conn->engine, x->buf, x->len);
    if (put ? !ep->puts : !maps || x->len < SHARED_FROM) return 0;
    uintptr_t from = put ? buf : hr_page_up(buf), to = put || hr_arena_ends((void *)end) ? end : hr_page_down(end);
    struct hr_hdr_long help = {.h = {.kind = HR_MSG_HELP, .comm = x->req->comm->id, .sreq = x->remote, .rreq = x->id},
                               .size = to - from};
    x->from = help.h.aux = from - buf;
    uint32_t access = HR_ACCESS_REMOTE_READ | (put ? HR_ACCESS_REMOTE_PUT : HR_ACCESS_REMOTE_MAP);
    if (ops->mem_register(ep->domain, (void *)from, to - from, access, &x->mem) != HR_OK) return 0;
    x->has_mem = 1;
    if (ops->mem_export(ep, &x->mem, (void *)from, to - from, &help.desc) != HR_OK) return 0;
    x->shared = to - from;
    hr_conn_send_ctl(conn, &help.h, sizeof help);
    uint64_t rest = x->from + x->shared;
    if (x->from) hr_copy(x->buf, x->rmem.ptr, x->from, HR_STORE_CACHED);
    if (rest < x->len) hr_copy(x->buf + rest, (const char *)x->rmem.ptr + rest, x->len - rest, HR_STORE_CACHED);
    x->work.step = receive_step;
    hr_work_add(conn->engine, &x->work, x->req->priority);
    return 1;
}

void hr_share_on_helped(struct hr_conn *conn, const struct hr_hdr *h) {
    struct hr_xfer *x = hr_xfer_find(conn, h->rreq);
    if (!x) return;
    if (x->mode != HR_XFER_PULL || !x->shared || x->helped || x->back || h->sreq > pieces(x->shared) ||
        h->aux > pieces(x->shared) - x->completed || !(h->aux || h->sreq)) {
        hr_conn_lost(conn, HR_ERR_PROTOCOL, "help with what it was not asked for");
        return;
    }
    x->helped = (uint32_t)h->aux;
    if (x->helped) HR_COUNT(conn->engine, shared);
    if (h->sreq) { /* a piece that it took and could not write */
        conn->helpless = 1;
        x->back = h->sreq;
        if (hr_list_empty(&x->work.link) && !x->outstanding) hr_work_add(conn->engine, &x->work, x->req->priority);
    }
    finish_if_whole(x);
}

int hr_share_revoke(struct hr_xfer *x) { return !x->shared || x->mode != HR_XFER_PULL || hr_ledger_revoke(x); }

/* --- the sender's side
 * --------------------------------------------------------------------------------------------------- */

static int may(void *x) { return hr_ledger_stands_own(x); }

static hr_status help_with(struct hr_xfer *x, uint32_t i) {
    struct hr_ep *ep = x->conn->lanes[0].ep;
    uint64_t at, n = piece(x, i, &at);
    char *from = x->buf + x->from + at;
    if (x->rmem.out) {
        hr_copy((char *)x->rmem.out + at, from, n, x->shared >= HR_UNREAD_MIN ? HR_STORE_UNREAD : HR_STORE_SHARED);
        return HR_OK;
    }
    struct hr_rma rma = {.local = from, .len = n, .remote = &x->rmem, .offset = at};
    hr_status status = ep->domain->ops->post_put(ep, &rma, may, x);
    return status != HR_OK && !hr_ledger_stands_own(x) ? HR_ERR_CANCELED : status; /* it has given up, and says so */
}

/* failed: 1 + the piece that could not be written; 0: none. */
static void help_ends(struct hr_xfer *x, uint32_t failed) {
    struct hr_hdr h = {.kind = HR_MSG_HELPED, .comm = x->req->comm->id, .rreq = x->remote, .aux = x->helped};
    h.sreq = failed;
    hr_work_remove(x->conn->engine, &x->work);
    if (!x->helped && !failed) return;
    hr_conn_send_ctl(x->conn, &h, sizeof h);
    if (x->helped) HR_COUNT(x->conn->engine, shared);
}

/* What the waiting thread leaves behind when its call returns is the receiver's to copy. */
static int help_step(struct hr_engine *engine, struct hr_work *work) {
    struct hr_xfer *x = hr_container(work, struct hr_xfer, work);
    int64_t i = hr_in_background(engine) ? -1 : hr_ledger_take_own(x, pieces(x->shared));
    if (i >= 0) {
        int wrong = too_many(x, x->helped);
        hr_status status = wrong ? HR_OK : help_with(x, (uint32_t)i);
        hr_ledger_let_go_own(x);
        x->helped += status == HR_OK;
        x->reached = ((uint64_t)i + 1) * piece_of(x->shared);
        if (status == HR_OK && !wrong) {
            int last = x->reached >= x->shared;
            if (last) help_ends(x, 0);
            if (!last && x->beside) hr_work_turn(engine, work);
            return !last;
        }
        if (status == HR_OK) return 0;
        if (hr_is_peer_error(status)) hr_conn_lost(x->conn, status, "a piece could not be written");
        help_ends(x, status == HR_ERR_CANCELED || hr_is_peer_error(status) ? 0 : (uint32_t)i + 1);
        return 0;
    }
    help_ends(x, 0);
    return 0;
}

void hr_share_on_help(struct hr_conn *conn, const struct hr_hdr_long *help) {
    struct hr_xfer *x = hr_xfer_find(conn, help->h.sreq);
    struct hr_ep *ep = conn->lanes[0].ep;
    if (!x) return;
    if (x->mode != HR_XFER_SEND || x->shared || !x->key || !help->size || help->h.aux > x->len ||
        help->size > x->len - help->h.aux) {
        hr_conn_lost(conn, HR_ERR_PROTOCOL, "a call for help with what it was not sent");
        return;
    }
    x->remote = help->h.rreq;
    x->from = help->h.aux;
    x->shared = help->size;
    if (hr_in_background(conn->engine) || ep->domain->ops->mem_import(ep, &help->desc, &x->rmem) != HR_OK) return;
    x->has_rmem = 1;
    if (!(x->rmem.out || x->rmem.puts) || x->rmem.len < help->size) return;
    x->work.step = help_step;
    hr_work_add(conn->engine, &x->work, x->req->priority);
}

int hr_share_turn(struct hr_engine *engine, struct hr_work *copy, const char *src, uint64_t len) {
    for (uint32_t i = 0; i < engine->nxfers; i++) {
        struct hr_xfer *x = engine->xfers[i];
        if (!helps(x, copy->priority) || src < x->buf + x->from || src >= x->buf + x->from + x->shared) continue;
        const char *reached = x->buf + x->from + x->reached;
        x->beside = 1;
        if (src + len >= reached) hr_work_turn(engine, copy);
        return src > reached;
    }
    return 0;
}

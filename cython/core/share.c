/* share.c - a long message that both ends copy: the receiver from one piece to the next, the sender those in between.
 */

/*
 * A core moves what a core can, and while one pulls a message out of the other's memory the other waits for it. So the
 * receiver of a message in mapped memory, whose own buffer can be mapped for writing, asks the sender for a hand
 * (HELP). Who has time takes the next piece, by counting up in the sender's ledger; so nobody waits for a sender that
 * computes: what is done is the sender's thread's, if it waits in a call, and never the background thread's. When no
 * piece is left the sender says how many it has copied (HELPED), and the receiver that all are there (FIN).
 *
 * The sender holds the entry for each piece. A receiver that gives up strikes it there; if a sender that was stopped
 * holds it, the pages are left to it (mem_quiet). Nothing else may be on these pages: what is on the first and on the
 * last beside the buffer is the receiver's, which copies the ends of the message there alone.
 */

#include "core/engine.h"
#include "hr/memory.h"

#define SHARED_FROM (768u << 10) /* below it the other end hears too late */
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

/* Copies piece i of what is shared. */
static void copy_piece(char *to, const char *from, uint64_t len, uint32_t i) {
    uint64_t n = piece_of(len), at = i * n;
    if (n > len - at) n = len - at;
    hr_copy(to + at, from + at, n, len >= HR_UNREAD_MIN ? HR_STORE_UNREAD : HR_STORE_SHARED);
}

/* --- the receiver's side
 * --------------------------------------------------------------------------------------------------- */

static void finish_if_whole(struct hr_xfer *x) {
    if (!hr_list_empty(&x->work.link) || x->completed + x->helped != pieces(x->shared)) return;
    x->conn->rx_bytes += x->len;
    hr_xfer_pulled(x);
}

/* A piece more than there are: who counts has been interfered with. */
static int too_many(struct hr_xfer *x, uint64_t copied) {
    if (copied < pieces(x->shared)) return 0;
    hr_work_remove(x->conn->engine, &x->work);
    hr_conn_lost(x->conn, HR_ERR_PROTOCOL, "a ledger that counts backwards");
    return 1;
}

static int receive_step(struct hr_engine *engine, struct hr_work *work) {
    struct hr_xfer *x = hr_container(work, struct hr_xfer, work);
    int64_t i = hr_ledger_take(x, pieces(x->shared));
    if (i >= 0) {
        if (too_many(x, x->completed)) return 0;
        copy_piece(x->buf + x->from, (const char *)x->rmem.ptr + x->from, x->shared, (uint32_t)i);
        x->completed++;
        return 1;
    }
    hr_work_remove(engine, work);
    finish_if_whole(x); /* where it was taken back a CANCEL is coming */
    return 0;
}

int hr_share_ask(struct hr_xfer *x) {
    struct hr_conn *conn = x->conn;
    struct hr_ep *ep = conn->lanes[0].ep;
    const struct hr_provider *ops = ep->domain->ops;
    struct hr_arena_info arena;
    uintptr_t buf = (uintptr_t)x->buf, end = buf + x->len;
    if (x->len < SHARED_FROM || conn->engine->yield || !(conn->caps->flags & HR_CAP_MAP_WRITE) ||
        !conn->peer_ledger.out || x->req->rflags & (HR_RECV_REDUCE | HR_RECV_BORROW | HR_RECV_FOLD) ||
        !hr_arena_find(x->buf, x->len, &arena) || !(arena.flags & HR_ARENA_WRITABLE_BY_PEERS) ||
        hr_exposes(conn->engine, x->buf, x->len))
        return 0;
    uintptr_t from = hr_page_up(buf), to = hr_arena_ends((void *)end) ? end : hr_page_down(end);
    struct hr_hdr_long help = {.h = {.kind = HR_MSG_HELP, .comm = x->req->comm->id, .sreq = x->remote, .rreq = x->id},
                               .size = to - from};
    x->from = help.h.aux = from - buf;
    uint32_t access = HR_ACCESS_REMOTE_READ | HR_ACCESS_REMOTE_MAP;
    if (ops->mem_register(ep->domain, (void *)from, to - from, access, &x->mem) != HR_OK) return 0;
    x->has_mem = 1;
    if (ops->mem_export(ep, &x->mem, (void *)from, to - from, &help.desc) != HR_OK) return 0;
    x->shared = to - from;
    hr_conn_send_ctl(conn, &help.h, sizeof help);
    hr_copy(x->buf, x->rmem.ptr, x->from, HR_STORE_CACHED);
    uint64_t rest = x->from + x->shared;
    hr_copy(x->buf + rest, (const char *)x->rmem.ptr + rest, x->len - rest, HR_STORE_CACHED);
    x->work.step = receive_step;
    hr_work_add(conn->engine, &x->work, x->req->priority);
    return 1;
}

void hr_share_on_helped(struct hr_conn *conn, const struct hr_hdr *h) {
    struct hr_xfer *x = hr_xfer_find(conn, h->rreq);
    if (!x) return;
    if (x->mode != HR_XFER_PULL || !x->shared || x->helped || h->aux > pieces(x->shared) - x->completed) {
        hr_conn_lost(conn, HR_ERR_PROTOCOL, "help with what it was not asked for");
        return;
    }
    x->helped = (uint32_t)h->aux;
    HR_COUNT(conn->engine, shared);
    finish_if_whole(x);
}

int hr_share_revoke(struct hr_xfer *x) { return !x->shared || x->mode != HR_XFER_PULL || hr_ledger_revoke(x); }

/* --- the sender's side
 * --------------------------------------------------------------------------------------------------- */

/* What the waiting thread leaves behind when its call returns is the receiver's to copy. */
static int help_step(struct hr_engine *engine, struct hr_work *work) {
    struct hr_xfer *x = hr_container(work, struct hr_xfer, work);
    int64_t i = hr_in_background(engine) ? -1 : hr_ledger_take_own(x, pieces(x->shared));
    if (i >= 0) {
        int wrong = too_many(x, x->helped);
        if (!wrong) copy_piece(x->rmem.out, x->buf + x->from, x->shared, (uint32_t)i);
        hr_ledger_let_go_own(x);
        x->helped++;
        return !wrong;
    }
    hr_work_remove(engine, work);
    if (x->helped) {
        struct hr_hdr h = {.kind = HR_MSG_HELPED, .comm = x->req->comm->id, .rreq = x->remote, .aux = x->helped};
        hr_conn_send_ctl(x->conn, &h, sizeof h);
        HR_COUNT(engine, shared);
    }
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
    if (!x->rmem.out || x->rmem.len < help->size) return;
    x->work.step = help_step;
    hr_work_add(conn->engine, &x->work, x->req->priority);
}

/* xfer.c - the table of transfers: a slot and a generation make an id that is good on the wire until the transfer ends;
 * how one is given up. */

#include <stdlib.h>
#include <string.h>

#include "core/engine.h"

struct hr_xfer *hr_xfer_find(struct hr_conn *conn, uint32_t id) {
    struct hr_engine *engine = conn->engine;
    if (HR_ID_INDEX(id) >= engine->nxfers) return NULL;
    struct hr_xfer *x = engine->xfers[HR_ID_INDEX(id)];
    if (x->id == id && x->mode != HR_XFER_FREE && x->conn == conn) return x;
    HR_COUNT(engine, stale);
    return NULL;
}

struct hr_xfer *hr_xfer_new(struct hr_engine *engine, struct hr_request *req, struct hr_conn *conn, int mode) {
    if (!engine->xfer_free) {
        uint32_t old = engine->nxfers, n = old ? old * 2 : 64;
        if (n > 1u << HR_ID_INDEX_BITS) return NULL;
        struct hr_xfer **table = realloc(engine->xfers, n * sizeof *table);
        if (!table) return NULL;
        engine->xfers = table;
        for (uint32_t i = old; i < n; i++) {
            table[i] = calloc(1, sizeof **table);
            if (!table[i]) return NULL;
            engine->nxfers = i + 1;
            table[i]->id = i + (1u << HR_ID_INDEX_BITS);
            table[i]->remote = engine->xfer_free;
            engine->xfer_free = i + 1;
        }
    }
    struct hr_xfer *x = engine->xfers[engine->xfer_free - 1];
    uint32_t id = x->id;
    engine->xfer_free = x->remote;
    memset(x, 0, sizeof *x);
    x->id = id;
    x->mode = (uint8_t)mode;
    x->req = req;
    x->conn = conn;
    x->buf = req->buf;
    x->len = req->len;
    hr_list_init(&x->work.link);
    req->xfer = x;
    return x;
}

/* Off every list, memory let go, the id dead. */
void hr_xfer_free(struct hr_engine *engine, struct hr_xfer *x) {
    struct hr_conn *conn = x->conn;
    hr_ledger_strike(x);
    if (x->mode == HR_XFER_SEND_PUSH && x->sure) hr_window_forgets(conn, x->posted - x->completed);
    if (!hr_list_empty(&x->work.link)) {
        if (x->mode == HR_XFER_SEND_PUSH || x->mode == HR_XFER_SEND_SEG || x->mode == HR_XFER_RMA) {
            hr_list_remove(&x->work.link);
            conn->nbulk--;
        } else {
            hr_work_remove(engine, &x->work);
        }
    }
    hr_read_end(x);
    if (x->head) conn->reading.heads--;
    x->head = 0;
    if (x->has_rmem) conn->lanes[0].ep->domain->ops->mem_release(conn->lanes[0].ep, &x->rmem);
    if (x->has_mem) conn->lanes[0].ep->domain->ops->mem_deregister(conn->lanes[0].ep->domain, &x->mem);
    if (x->req && x->req->xfer == x) x->req->xfer = NULL;
    x->mode = HR_XFER_FREE;
    x->req = NULL;
    x->has_mem = x->has_rmem = 0;
    x->id += 1u << HR_ID_INDEX_BITS;
    if (!(x->id >> HR_ID_INDEX_BITS)) x->id += 1u << HR_ID_INDEX_BITS; /* no id is 0 */
    x->remote = engine->xfer_free;
    engine->xfer_free = HR_ID_INDEX(x->id) + 1;
}

void hr_xfer_send_fin(struct hr_conn *conn, uint64_t comm, uint32_t sreq, hr_status status) {
    struct hr_hdr h = {.kind = HR_MSG_FIN, .status = (int8_t)status, .comm = comm, .rreq = sreq};
    hr_conn_send_ctl(conn, &h, sizeof h);
}

/* Takes back what is in the provider; 0 where that cannot be. One cookie stands for all operations of a transfer. */
static int withdraw(struct hr_conn *conn, struct hr_xfer *x) {
    for (int i = 0; i < conn->nlanes; i++) {
        struct hr_ep *ep = conn->lanes[i].ep;
        if (!conn->lanes[i].up) continue; /* aborted */
        while (x->outstanding && ep->domain->ops->cancel(ep, HR_XFER_COOKIE(x)) == HR_OK) x->outstanding--;
    }
    return !x->outstanding;
}

/* Whether the sender's provider has stopped writing into this buffer for good. */
static int hushed(struct hr_conn *conn, struct hr_xfer *x) {
    for (int i = 0; i < conn->nlanes; i++) {
        struct hr_ep *ep = conn->lanes[i].ep;
        if (ep->domain->ops->mem_quiet(ep, &x->mem) != HR_OK) return 0;
    }
    return 1;
}

/* Gives up. tell: the peer does not know yet. On return neither side's provider touches the buffer any more, nor does
 * the peer that it was open to. */
void hr_xfer_abort(struct hr_engine *engine, struct hr_xfer *x, int tell) {
    struct hr_conn *conn = x->conn;
    int sender = x->mode == HR_XFER_SEND || x->mode == HR_XFER_SEND_PUSH || x->mode == HR_XFER_SEND_SEG;
    uint32_t posted = x->outstanding;
    int written = (sender && x->open && !hr_ledger_take_back(x)) || !hr_share_revoke(x);
    if (x->mode == HR_XFER_RMA) tell = 0; /* the peer knows nothing of it */
    int lost = conn->state == HR_CONN_LOST, cut = !withdraw(conn, x);
    if (written && !hushed(conn, x)) cut = 1;
    if (written && x->mem.access & HR_ACCESS_REMOTE_PUT) conn->stopped = 0; /* the provider has seen to that */
    /* A sender that has withdrawn said so behind the last of its writes, on the lane that they took. On a connection
     * that is lost nobody says anything: there only a dead endpoint keeps late writes out of the buffer. */
    if (x->mode == HR_XFER_PUSH && (lost || ((tell || conn->nlanes > 1) && !hushed(conn, x)))) cut = 1;
    if (!lost) {
        if (tell && sender) {
            struct hr_hdr h = {.kind = HR_MSG_CANCEL,
                               .status = HR_ERR_CANCELED,
                               .comm = x->req->comm->id,
                               .tag = x->req->tag,
                               .sreq = x->id,
                               .rreq = x->mode == HR_XFER_SEND ? 0 : x->remote};
            hr_conn_send_ctl(conn, &h, sizeof h);
        } else if (tell) {
            hr_xfer_send_fin(conn, x->req->comm->id, x->remote, HR_ERR_CANCELED);
        }
        if (posted && !tell) { /* what the withdrawn headers said must be said again */
            struct hr_hdr h = {.kind = HR_MSG_CREDIT};
            hr_conn_send_ctl(conn, &h, sizeof h);
        }
        if (sender && x->posted) hr_window_probe(conn);
    }
    hr_xfer_free(engine, x);
    if (cut) {
        hr_conn_cut(conn);
        hr_conn_lost(conn, HR_ERR_PEER_LOST, "cut off: an operation on this connection could not be withdrawn");
    }
}

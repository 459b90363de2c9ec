/* xfer.c - the table of transfers: a slot and a generation make an id that is good on the wire until the transfer ends.
 */

#include <stdlib.h>
#include <string.h>

#include "core/engine.h"

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
    hr_ledger_strike(engine, x->id);
    if (x->mode == HR_XFER_SEND_PUSH && x->sure) hr_window_forgets(conn, x->posted - x->completed);
    if (!hr_list_empty(&x->work.link)) {
        if (x->mode == HR_XFER_SEND_PUSH || x->mode == HR_XFER_SEND_SEG || x->mode == HR_XFER_RMA) {
            hr_list_remove(&x->work.link);
            conn->nbulk--;
        } else {
            hr_work_remove(engine, &x->work);
        }
    }
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

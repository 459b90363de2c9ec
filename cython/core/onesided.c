/* onesided.c - one-sided access for users: memory exposed to a peer; reads, writes and atomics there; notifications. */

/*
 * Exposed memory belongs to a communicator and one of its ranks, and is taken back when that is closed at the latest.
 * Its record belongs to whoever exposed it, who may be taking it back at that moment: hr_conceal alone frees it.
 * An operation is a request with a transfer of mode RMA, which leaves with the connection's bulk when it cannot leave
 * at once: in the order in which they were posted, segment by segment, always by the first stream. So the notification
 * that goes with the last segment of a write comes after all of it. They wait for the window as other bulk does, and
 * are not charged to it: no engine at the peer sees them arrive, so nobody would acknowledge them.
 *
 * Notifications share the provider's 64-bit values with the engine's own (transfer.c), which have 32 bits: bit 63, 31
 * bits of the communicator's id, and 32 of the user's; ids that are open at the same time differ in those bits. Each
 * rank's are kept, in order, until somebody asks; a peer that piles them up loses its connection.
 *
 * What an operation needs beyond its buffer is in its request: tag is the offset, sig the value or operand; what an
 * atomic compares with is in its transfer.
 */

#include <stdlib.h>
#include <string.h>

#include "core/engine.h"
#include "hr/memory.h"

#define NOTE (1ull << 63)
#define NOTE_ID(comm) ((uint64_t)((comm)->id & 0x7fffffff) << 32)
#define NOTES_MAX 65536u /* of one rank of a communicator, not taken yet */

enum { RMA_WRITE = 1, RMA_WRITE_NOTIFY, RMA_READ, RMA_FETCH_ADD, RMA_CMP_SWAP };

struct hr_exposed {
    struct hr_link link;  /* of the communicator */
    struct hr_conn *conn; /* NULL: taken back */
    struct hr_mem mem;
};

struct hr_note {
    struct hr_link link;
    uint32_t value;
};

/* ---- memory ---- */

/* Whoever may be writing there is asked to stop; where only the end of the connection makes sure, it ends. */
static void take_back(struct hr_exposed *exposed) {
    struct hr_conn *conn = exposed->conn;
    struct hr_ep *ep = conn->lanes[0].ep;
    int written = (exposed->mem.access & (HR_ACCESS_REMOTE_WRITE | HR_ACCESS_REMOTE_ATOMIC)) != 0;
    if (written && conn->state != HR_CONN_LOST && conn->lanes[0].up &&
        ep->domain->ops->mem_quiet(ep, &exposed->mem) != HR_OK) {
        hr_conn_cut(conn);
        hr_conn_lost(conn, HR_ERR_PEER_LOST, "cut off: memory that it may write to could not be taken back");
    }
    ep->domain->ops->mem_deregister(ep->domain, &exposed->mem);
    hr_list_remove(&exposed->link);
    exposed->conn = NULL;
}

static int overlap(uintptr_t a, uintptr_t a_end, uintptr_t b, uintptr_t b_end) { return a < b_end && b < a_end; }

/* A peer may be writing there for a transfer; if it is stopped its pages are exchanged. */
static int is_open(struct hr_engine *engine, const void *addr, size_t len) {
    uintptr_t begin = (uintptr_t)addr;
    for (uint32_t i = 0; i < engine->nxfers; i++) {
        const struct hr_xfer *x = engine->xfers[i];
        uintptr_t from = (uintptr_t)x->buf;
        if (x->mode == HR_XFER_FREE || !(x->open || (x->shared && x->mode == HR_XFER_PULL)) ||
            x->mem.access & HR_ACCESS_REMOTE_PUT)
            continue;
        if (overlap(begin, begin + len, hr_page_down(from), hr_page_up(from + x->len))) return 1;
    }
    return 0;
}

hr_status hr_expose(struct hr_comm *comm, int rank, void *addr, size_t len, uint32_t access, struct hr_desc *desc_p,
                    struct hr_exposed **exposed_p, char detail[256]) {
    struct hr_engine *engine = comm->engine;
    *detail = 0;
    if (rank < 0 || rank >= comm->size || !len) return HR_ERR_INVALID;
    struct hr_exposed *exposed = calloc(1, sizeof *exposed);
    if (!exposed) return HR_ERR_NOMEM;
    hr_lock(engine);
    struct hr_conn *conn = exposed->conn = comm->conns[rank];
    struct hr_ep *ep = conn->lanes[0].ep;
    hr_status status = comm->state.status != HR_OK ? HR_ERR_BROKEN : conn->state == HR_CONN_UP ? HR_OK : conn->why;
    if (status == HR_OK && is_open(engine, addr, len)) status = HR_AGAIN;
    if (status == HR_OK) {
        *ep->domain->refused = 0;
        status = ep->domain->ops->mem_register(ep->domain, addr, len, access, &exposed->mem);
        if (status == HR_ERR_NOMEM) memcpy(detail, ep->domain->refused, sizeof ep->domain->refused);
    }
    if (status == HR_OK) {
        status = ep->domain->ops->mem_export(ep, &exposed->mem, addr, len, desc_p);
        if (status != HR_OK) ep->domain->ops->mem_deregister(ep->domain, &exposed->mem);
    }
    if (status == HR_OK) hr_list_push(&comm->exposed, &exposed->link);
    hr_unlock(engine);
    if (status == HR_OK)
        *exposed_p = exposed;
    else
        free(exposed);
    return status;
}

int hr_exposes(struct hr_engine *engine, const void *addr, size_t len) {
    uintptr_t begin = (uintptr_t)addr;
    for (struct hr_link *c = engine->comms.next; c != &engine->comms; c = c->next) {
        struct hr_comm *comm = hr_container(c, struct hr_comm, link);
        for (struct hr_link *l = comm->exposed.next; l != &comm->exposed; l = l->next) {
            const struct hr_mem *mem = &hr_container(l, struct hr_exposed, link)->mem;
            if (overlap(begin, begin + len, (uintptr_t)mem->addr, (uintptr_t)mem->addr + mem->len)) return 1;
        }
    }
    return 0;
}

void hr_conceal(struct hr_engine *engine, struct hr_exposed *exposed) {
    if (engine) {
        hr_lock(engine);
        if (exposed->conn) take_back(exposed);
        hr_settle(engine);
        hr_unlock(engine);
    }
    free(exposed);
}

hr_status hr_import(struct hr_comm *comm, int rank, const struct hr_desc *desc, struct hr_rmem *rmem_p) {
    struct hr_engine *engine = comm->engine;
    if (rank < 0 || rank >= comm->size) return HR_ERR_INVALID;
    hr_lock(engine);
    struct hr_conn *conn = comm->conns[rank];
    struct hr_ep *ep = conn->lanes[0].ep;
    hr_status status = comm->state.status != HR_OK ? HR_ERR_BROKEN : conn->state == HR_CONN_UP ? HR_OK : conn->why;
    if (status == HR_OK) status = ep->domain->ops->mem_import(ep, desc, rmem_p);
    hr_unlock(engine);
    return status == HR_AGAIN ? HR_ERR_PEER_LOST : status; /* progress has yet to hear that it ended */
}

void hr_release(struct hr_comm *comm, int rank, struct hr_rmem *rmem) {
    hr_lock(comm->engine);
    struct hr_ep *ep = comm->conns[rank]->lanes[0].ep;
    ep->domain->ops->mem_release(ep, rmem);
    hr_unlock(comm->engine);
}

hr_status hr_onesided_open(struct hr_comm *comm) {
    for (struct hr_link *l = comm->engine->comms.next; l != &comm->engine->comms; l = l->next)
        if (NOTE_ID(hr_container(l, struct hr_comm, link)) == NOTE_ID(comm)) return HR_ERR_INVALID;
    comm->notes = calloc((size_t)comm->size, sizeof *comm->notes);
    if (!comm->notes) return HR_ERR_NOMEM;
    for (int i = 0; i < comm->size; i++) hr_list_init(&comm->notes[i].kept);
    hr_list_init(&comm->exposed);
    return HR_OK;
}

void hr_onesided_close(struct hr_comm *comm) {
    struct hr_link *l;
    while (!hr_list_empty(&comm->exposed)) take_back(hr_container(comm->exposed.next, struct hr_exposed, link));
    for (int i = 0; i < comm->size; i++)
        while ((l = hr_list_pop(&comm->notes[i].kept))) free(hr_container(l, struct hr_note, link));
    free(comm->notes);
}

/* ---- operations ---- */

static hr_status post(struct hr_conn *conn, struct hr_xfer *x, uint64_t n) {
    const struct hr_request *req = x->req;
    struct hr_ep *ep = conn->lanes[0].ep;
    const struct hr_provider *ops = ep->domain->ops;
    struct hr_rma rma = {.local = x->buf + x->posted,
                         .len = n,
                         .remote = &x->rmem,
                         .offset = req->tag + x->posted,
                         .cookie = HR_XFER_COOKIE(x)};
    struct hr_atomic atomic = {.op = req->op == RMA_FETCH_ADD ? HR_ATOMIC_FETCH_ADD : HR_ATOMIC_CMP_SWAP,
                               .result = (uint64_t *)(void *)x->buf,
                               .remote = &x->rmem,
                               .offset = req->tag,
                               .operand = req->sig,
                               .compare = x->completed,
                               .cookie = HR_XFER_COOKIE(x)};
    switch (req->op) {
    case RMA_READ: return ops->post_read(ep, &rma);
    case RMA_WRITE_NOTIFY:
        rma.with_notify = x->posted + n == x->len;
        rma.value = NOTE | NOTE_ID(req->comm) | req->sig;
        return ops->post_write(ep, &rma);
    case RMA_WRITE: return ops->post_write(ep, &rma);
    default: return ops->post_atomic(ep, &atomic);
    }
}

hr_status hr_rma_segment(struct hr_conn *conn, struct hr_xfer *x) {
    struct hr_request *req = x->req;
    uint64_t n = x->len - x->posted;
    if (n > conn->caps->segment) n = conn->caps->segment;
    hr_status status = hr_lane_posted(conn->lanes, post(conn, x, n));
    if (status == HR_AGAIN) return status;
    if (hr_is_peer_error(status) || hr_is_device_error(status)) {
        hr_conn_lost(conn, status, NULL); /* and the request with it */
        return status;
    }
    if (hr_is_error(status)) {
        hr_xfer_abort(conn->engine, x, 0);
        hr_fail(conn->engine, req, status, -1, HR_PHASE_TRANSFER, conn);
        return status;
    }
    if (req->op == RMA_READ)
        conn->rx_bytes += n;
    else
        conn->tx_bytes += n;
    x->posted += n;
    if (status == HR_INPROGRESS) x->outstanding++;
    if (x->posted < x->len) return HR_OK;
    if (!hr_list_empty(&x->work.link)) {
        hr_list_remove(&x->work.link);
        conn->nbulk--;
    }
    if (!x->outstanding) {
        hr_xfer_free(conn->engine, x);
        hr_finish(conn->engine, req, HR_OK);
    }
    return HR_OK;
}

static void start(struct hr_comm *comm, int rank, const struct hr_rmem *remote, uint64_t compare,
                  struct hr_request *req) {
    struct hr_engine *engine = comm->engine;
    struct hr_conn *conn = comm->conns[rank];
    if (!hr_request_begin(comm, req, HR_REQ_RMA)) return;
    req->conn = conn;
    if (conn->state == HR_CONN_CLOSED || conn->state == HR_CONN_LOST) {
        hr_fail(engine, req, conn->why, rank, HR_PHASE_POST, conn);
        return;
    }
    struct hr_xfer *x = hr_xfer_new(engine, req, conn, HR_XFER_RMA);
    if (!x) {
        hr_fail(engine, req, HR_ERR_NOMEM, rank, HR_PHASE_POST, conn);
        return;
    }
    x->rmem = *remote;
    x->completed = compare;
    int at_once = conn->state == HR_CONN_UP && !conn->nbulk && x->len <= HR_INLINE_WORK;
    if (at_once && hr_rma_segment(conn, x) != HR_AGAIN) return;
    hr_list_push(&conn->bulk[req->priority], &x->work.link);
    conn->nbulk++;
    hr_conn_activate(conn);
}

static hr_status launch(struct hr_comm *comm, int rank, int op, void *buf, size_t len, const struct hr_rmem *remote,
                        uint64_t offset, uint64_t value, uint64_t compare, struct hr_request *req) {
    struct hr_engine *engine = comm->engine;
    if (rank < 0 || rank >= comm->size) return HR_ERR_INVALID;
    if (offset > remote->len || len > remote->len - offset) return HR_ERR_ACCESS;
    req->then = NULL;
    req->state = NULL;
    req->buf = buf;
    req->len = len;
    req->tag = offset;
    req->sig = value;
    req->op = (uint8_t)op;
    hr_lock(engine);
    start(comm, rank, remote, compare, req);
    hr_settle(engine);
    hr_unlock(engine);
    return HR_OK;
}

hr_status hr_iwrite(struct hr_comm *comm, int rank, const void *buf, size_t len, const struct hr_rmem *remote,
                    uint64_t offset, const uint32_t *notify, struct hr_request *req) {
    return launch(comm, rank, notify ? RMA_WRITE_NOTIFY : RMA_WRITE, (void *)(uintptr_t)buf, len, remote, offset,
                  notify ? *notify : 0, 0, req);
}

hr_status hr_iread(struct hr_comm *comm, int rank, void *buf, size_t len, const struct hr_rmem *remote, uint64_t offset,
                   struct hr_request *req) {
    return launch(comm, rank, RMA_READ, buf, len, remote, offset, 0, 0, req);
}

hr_status hr_iatomic(struct hr_comm *comm, int rank, enum hr_atomic_op op, uint64_t *before, uint64_t operand,
                     uint64_t compare, const struct hr_rmem *remote, uint64_t offset, struct hr_request *req) {
    return launch(comm, rank, op == HR_ATOMIC_FETCH_ADD ? RMA_FETCH_ADD : RMA_CMP_SWAP, before, sizeof *before, remote,
                  offset, operand, compare, req);
}

/* ---- notifications ---- */

static void give(struct hr_engine *engine, struct hr_request *req, uint32_t value) {
    req->nbytes = value;
    hr_finish(engine, req, HR_OK);
}

hr_status hr_inotified(struct hr_comm *comm, int rank, struct hr_request *req) {
    struct hr_engine *engine = comm->engine;
    if (rank < 0 || rank >= comm->size) return HR_ERR_INVALID;
    req->then = NULL;
    req->state = NULL;
    req->buf = NULL;
    req->len = 0;
    hr_lock(engine);
    struct hr_conn *conn = comm->conns[rank];
    if (hr_request_begin(comm, req, HR_REQ_NOTE)) {
        struct hr_link *l = hr_list_pop(&comm->notes[rank].kept);
        req->conn = conn;
        if (l) {
            struct hr_note *note = hr_container(l, struct hr_note, link);
            uint32_t value = note->value;
            free(note);
            comm->notes[rank].n--;
            give(engine, req, value);
        } else if (conn->state == HR_CONN_CLOSED || conn->state == HR_CONN_LOST) {
            hr_fail(engine, req, conn->why, rank, HR_PHASE_MATCH, conn);
        }
    }
    hr_settle(engine);
    hr_unlock(engine);
    return HR_OK;
}

/* The oldest request that waits for this peer. */
static struct hr_request *asked(struct hr_comm *comm, struct hr_conn *conn) {
    struct hr_request *req = comm->pending;
    if (!req) return NULL;
    do {
        if (req->kind == HR_REQ_NOTE && req->conn == conn) return req;
        req = req->next;
    } while (req != comm->pending);
    return NULL;
}

void hr_note_arrived(struct hr_conn *conn, uint64_t value) {
    struct hr_engine *engine = conn->engine;
    for (struct hr_link *l = engine->comms.next; l != &engine->comms; l = l->next) {
        struct hr_comm *comm = hr_container(l, struct hr_comm, link);
        int rank = hr_comm_rank_of(comm, conn);
        if (NOTE_ID(comm) != (value & ~NOTE & ~(uint64_t)UINT32_MAX) || rank < 0) continue;
        if (comm->state.status != HR_OK) return;
        struct hr_request *req = asked(comm, conn);
        if (req) {
            give(engine, req, (uint32_t)value);
            return;
        }
        struct hr_notes *notes = &comm->notes[rank];
        struct hr_note *note = notes->n < NOTES_MAX ? malloc(sizeof *note) : NULL;
        if (!note) {
            hr_conn_lost(conn, HR_ERR_NOMEM, "more notifications than are kept: take them as they come");
            return;
        }
        note->value = (uint32_t)value;
        hr_list_push(&notes->kept, &note->link);
        notes->n++;
        return;
    }
}

/* request.c - point-to-point operations: start, finish, abort. */

#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "core/engine.h"

const char *hr_phase_name(enum hr_phase phase) {
    static const char *const names[] = {"", "connect", "post", "match", "transfer", "finish", "close"};
    return phase >= 0 && phase <= HR_PHASE_CLOSE ? names[phase] : "";
}

void hr_request_init(struct hr_comm *comm, struct hr_request *req, int kind) {
    req->done = 0;
    req->status = HR_OK;
    req->peer = -1;
    req->phase = HR_PHASE_NONE;
    req->nbytes = 0;
    req->provider = NULL;
    req->comm = comm;
    req->conn = NULL;
    req->xfer = NULL;
    req->queued = HR_QUEUED_NO;
    req->kind = (uint8_t)kind;
    if (req->priority < 0 || req->priority >= HR_PRIORITIES) req->priority = HR_PRIORITY_DEFAULT;
    if (!(req->flags & HR_REQ_ASYNC)) return;
    atomic_fetch_add(&comm->engine->nasync, 1);
    hr_bg_rouse(comm->engine);
}

static void pending_add(struct hr_request *req) {
    struct hr_request **head = &req->comm->pending;
    if (*head) {
        req->next = *head;
        req->prev = (*head)->prev;
        req->prev->next = req;
        (*head)->prev = req;
    } else {
        req->next = req->prev = req;
        *head = req;
    }
}

static void pending_remove(struct hr_request *req) {
    struct hr_request **head = &req->comm->pending;
    if (req->next == req)
        *head = NULL;
    else {
        req->prev->next = req->next;
        req->next->prev = req->prev;
        if (*head == req) *head = req->next;
    }
}

/* The last that the engine does with it. */
void hr_finish(struct hr_engine *engine, struct hr_request *req, hr_status status) {
    if (req->kind != HR_REQ_RUN) pending_remove(req);
    req->status = status;
    if (req->then) {
        req->then(req);
        return;
    }
    if (engine->sleeping) hr_kick(engine); /* ended from outside: the driver may be the one who waits for it */
    if (req->flags & HR_REQ_ASYNC) {
        atomic_fetch_sub_explicit(&engine->nasync, 1, memory_order_relaxed);
        req->next = NULL;
        if (engine->done_tail)
            engine->done_tail->next = req;
        else
            __atomic_store_n(&engine->done_head, req, __ATOMIC_RELAXED); /* hr_engine_reap looks without the lock */
        engine->done_tail = req;
        struct hr_waiter *waiter = req->state;
        if (engine->done_armed) (void)!eventfd_write(engine->donefd, 1);
        __atomic_store_n(&req->done, 1, __ATOMIC_RELEASE);
        if (waiter) hr_waiter_signal(engine, waiter);
    } else {
        struct hr_waiter *waiter = req->state;
        __atomic_store_n(&req->done, 1, __ATOMIC_RELEASE);
        if (waiter) hr_waiter_signal(engine, waiter);
    }
}

void hr_fail(struct hr_engine *engine, struct hr_request *req, hr_status status, int peer, int phase,
             struct hr_conn *conn) {
    if (peer < 0 && conn) peer = hr_comm_rank_of(req->comm, conn);
    req->peer = peer;
    req->phase = phase;
    req->provider = conn && conn->provider ? conn->provider->name : NULL;
    hr_finish(engine, req, status);
}

void hr_abort_request(struct hr_engine *engine, struct hr_request *req, hr_status status, int peer, int phase,
                      struct hr_conn *conn) {
    struct hr_conn *own = req->conn;
    switch (req->queued) {
    case HR_QUEUED_POSTED: hr_match_unpost(engine, req); break;
    case HR_QUEUED_SEND: hr_conn_unqueue_send(own, req); break;
    case HR_QUEUED_PROVIDER: {
        struct hr_ep *ep = own->lanes[0].ep;
        /* whether it still leaves only the provider knows: the peer will see */
        struct hr_hdr h = {.kind = HR_MSG_SKIP, .bucket = req->rflags, .order = req->index, .aux = req->len};
        if (own->lanes[0].up && ep->domain->ops->cancel(ep, req) != HR_OK) {
            hr_conn_cut(own);
            hr_conn_lost(own, HR_ERR_PEER_LOST, "cut off: a message on this connection could not be withdrawn");
        }
        hr_conn_send_ctl(own, &h, sizeof h);
        break;
    }
    default: break;
    }
    req->queued = HR_QUEUED_NO;
    if (req->xfer) hr_xfer_abort(engine, req->xfer, 1);
    hr_fail(engine, req, status, peer, phase, conn ? conn : own);
}

static int comm_refuses(struct hr_comm *comm, struct hr_request *req) {
    if (comm->state.status == HR_OK) return 0;
    req->peer = comm->state.peer;
    req->phase = comm->state.phase;
    req->provider = comm->state.provider;
    hr_finish(comm->engine, req, comm->state.status);
    return 1;
}

int hr_request_begin(struct hr_comm *comm, struct hr_request *req, int kind) {
    hr_request_init(comm, req, kind);
    pending_add(req);
    return !comm_refuses(comm, req);
}

void hr_send_start(struct hr_comm *comm, struct hr_request *req, int dst, unsigned lane) {
    struct hr_engine *engine = comm->engine;
    struct hr_conn *conn = hr_conn_rail(comm->conns[dst], lane);
    if (!hr_request_begin(comm, req, HR_REQ_SEND)) return;
    req->conn = conn;
    if (conn->state == HR_CONN_CLOSED || conn->state == HR_CONN_LOST) {
        hr_fail(engine, req, conn->why, dst, HR_PHASE_POST, conn);
        return;
    }
    req->rflags = hr_match_bucket(comm->id, req->tag);
    hr_status status = hr_conn_send(conn, req);
    if (status == HR_OK)
        hr_finish(engine, req, HR_OK);
    else if (hr_is_error(status))
        hr_fail(engine, req, status, dst, HR_PHASE_POST, conn);
}

void hr_recv_start(struct hr_comm *comm, struct hr_request *req, int src, unsigned lane) {
    if (!hr_request_begin(comm, req, HR_REQ_RECV)) return;
    struct hr_conn *conn = src == HR_ANY_SOURCE ? NULL : hr_conn_rail(comm->conns[src], lane);
    req->conn = conn;
    if (!conn) req->rflags |= HR_RECV_ANY;
    if (!hr_match_post(comm->engine, req)) return; /* ended, perhaps: it is not ours any more */
    /* what had arrived before the peer left may still be received, nothing else */
    if (conn && (conn->state == HR_CONN_CLOSED || conn->state == HR_CONN_LOST))
        hr_abort_request(comm->engine, req, conn->why, src, HR_PHASE_MATCH, conn);
    else if (!conn && comm->size > 1 && comm->nclosed == comm->size - 1)
        hr_abort_request(comm->engine, req, HR_ERR_CLOSED, -1, HR_PHASE_MATCH, NULL);
}

/* After a call from outside: connections found dead on the way, instructions set free, sleepers who must know. */
void hr_settle(struct hr_engine *engine) {
    while (!hr_list_empty(&engine->dead) || !hr_list_empty(&engine->ready)) {
        hr_conns_bury(engine);
        hr_runs_drain(engine);
    }
    if (!engine->nwork && hr_list_empty(&engine->active)) return;
    hr_kick(engine);
    hr_bg_rouse(engine);
}

static void settle_and_unlock(struct hr_engine *engine) {
    hr_settle(engine);
    hr_unlock(engine);
}

hr_status hr_isend(struct hr_comm *comm, const void *buf, size_t len, int dst, uint32_t tag, struct hr_request *req) {
    if (dst < 0 || dst >= comm->size || tag > INT32_MAX) return HR_ERR_INVALID;
    struct hr_engine *engine = comm->engine;
    req->then = NULL;
    req->state = NULL;
    req->buf = (void *)buf;
    req->len = len;
    req->tag = tag;
    req->sig = 0;
    hr_lock(engine);
    hr_send_start(comm, req, dst, 0);
    settle_and_unlock(engine);
    return HR_OK;
}

hr_status hr_irecv(struct hr_comm *comm, void *buf, size_t len, int src, uint32_t tag, struct hr_request *req) {
    if (src < HR_ANY_SOURCE || src >= comm->size || tag > INT32_MAX) return HR_ERR_INVALID;
    struct hr_engine *engine = comm->engine;
    req->then = NULL;
    req->state = NULL;
    req->buf = buf;
    req->len = len;
    req->tag = tag;
    req->sig = 0;
    req->rflags = 0;
    hr_lock(engine);
    hr_recv_start(comm, req, src, 0);
    settle_and_unlock(engine);
    return HR_OK;
}

void hr_cancel(struct hr_engine *engine, struct hr_request *req, hr_status status) {
    hr_lock(engine);
    if (!__atomic_load_n(&req->done, __ATOMIC_ACQUIRE)) {
        if (req->kind == HR_REQ_RUN)
            hr_comm_give_up(req->comm, status, hr_run_sequence(req));
        else
            hr_abort_request(engine, req, status, -1, req->xfer ? HR_PHASE_TRANSFER : HR_PHASE_MATCH, NULL);
    }
    settle_and_unlock(engine);
}

int hr_engine_done_fd(struct hr_engine *engine) {
    hr_lock(engine);
    engine->done_armed = 1;
    if (engine->done_head) (void)!eventfd_write(engine->donefd, 1);
    hr_unlock(engine);
    return engine->donefd;
}

struct hr_request *hr_engine_reap(struct hr_engine *engine) {
    if (!__atomic_load_n(&engine->done_head, __ATOMIC_RELAXED)) return NULL;
    hr_lock(engine);
    struct hr_request *head = engine->done_head;
    eventfd_t count;
    __atomic_store_n(&engine->done_head, NULL, __ATOMIC_RELAXED);
    engine->done_tail = NULL;
    if (engine->done_armed) (void)!eventfd_read(engine->donefd, &count);
    hr_unlock(engine);
    return head;
}

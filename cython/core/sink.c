/* sink.c - what providers tell the engine: messages, completions, and the end of connections. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#include "core/engine.h"

/* Of a class that cannot be had who asked for it hears, and nobody else is concerned. */
static int is_no_loss(const struct hr_conn *conn) { return conn->channel && !conn->settled; }

/* Only notes it: the endpoint may be in the middle of a callback, and a communicator in the middle of being broken. */
void hr_conn_lost(struct hr_conn *conn, hr_status why, const char *detail) {
    if (conn->state == HR_CONN_LOST) return;
    conn->was_closed = conn->state == HR_CONN_CLOSED;
    if (!conn->was_closed) {
        conn->why = hr_is_peer_error(why) || hr_is_device_error(why) ? why : HR_ERR_PEER_LOST;
        snprintf(conn->detail, sizeof conn->detail, "%s", detail ? detail : hr_status_text(why));
    }
    conn->state = HR_CONN_LOST;
    hr_list_remove(&conn->active);
    hr_list_push(&conn->engine->dead, &conn->active);
    /* a peer that has said goodbye by this way may still be saying it by the others */
    if (!conn->was_closed && !is_no_loss(conn))
        for (struct hr_link *l = conn->engine->conns.next; l != &conn->engine->conns; l = l->next) {
            struct hr_conn *other = hr_container(l, struct hr_conn, link);
            if (other->index == conn->index) hr_conn_lost(other, why, detail);
        }
    if (conn->engine->sleeping) hr_kick(conn->engine);
}

/* What the peer described could not be imported. It may have ended the connection since: that is no wrong of its own.
 */
void hr_conn_no_import(struct hr_conn *conn, hr_status why, const char *what) {
    int gone = why == HR_AGAIN || why == HR_ERR_PEER_LOST;
    hr_conn_lost(conn, gone ? HR_ERR_PEER_LOST : HR_ERR_PROTOCOL, gone ? "the peer has ended the connection" : what);
}

void hr_conn_cut(struct hr_conn *conn) {
    if (conn->cut) return;
    conn->cut = 1;
    for (int i = 0; i < HR_MAX_LANES + 1; i++) {
        if (!conn->lanes[i].ep) continue;
        conn->lanes[i].ep->domain->ops->ep_abort(conn->lanes[i].ep);
        conn->lanes[i].up = 0;
    }
}

/* All of it is with the provider: the peer may have it, and say goodbye before the provider says so here. */
static int has_left(const struct hr_request *req) {
    const struct hr_xfer *x = req->xfer;
    if (!x) return req->queued == HR_QUEUED_PROVIDER;
    return x->mode < HR_XFER_PULL && x->outstanding && x->posted == x->len;
}

/* Nothing will come by this way. alone: from nobody at all. */
static void end_waits(struct hr_comm *comm, struct hr_conn *conn, int rank, int alone) {
    struct hr_request *req = comm->pending, *last = req ? req->prev : NULL;
    while (req && comm->pending) {
        struct hr_request *next = req->next;
        int end = req == last;
        if (req->conn == conn ? conn->state == HR_CONN_LOST || !has_left(req) : alone && !req->conn) {
            hr_abort_request(comm->engine, req, HR_ERR_CLOSED, rank, HR_PHASE_MATCH, conn);
            req = comm->pending; /* a run may have broken the communicator: begin again */
            last = req ? req->prev : NULL;
            continue;
        }
        if (end) break;
        req = next;
    }
}

static void conn_bury(struct hr_conn *conn) {
    struct hr_engine *engine = conn->engine;
    struct hr_link *l;
    while ((l = hr_list_pop(&conn->ctl))) free(hr_container(l, struct hr_ctl, link));
    for (l = engine->comms.next; l != &engine->comms; l = l->next) {
        struct hr_comm *comm = hr_container(l, struct hr_comm, link);
        int rank = hr_comm_rank_of(comm, conn);
        if (rank >= 0 && conn->was_closed)
            end_waits(comm, conn, rank, 0); /* for what had left by it */
        else if (rank >= 0 && !is_no_loss(conn))
            hr_comm_break_locked(comm, conn->why, rank, HR_PHASE_TRANSFER, conn->provider->name, conn->detail, 1);
    }
    if (!conn->was_closed) hr_match_purge_conn(engine, conn);
}

/* All endpoints go before any request is finished: from then on these peers cannot reach this process's memory. Not one
 * by one, as the loss of the first rail breaks communicators, which finishes what lies on the others. */
void hr_conns_bury(struct hr_engine *engine) {
    while (!hr_list_empty(&engine->dead)) {
        for (struct hr_link *l = engine->dead.next; l != &engine->dead; l = l->next)
            hr_conn_cut(hr_container(l, struct hr_conn, active));
        conn_bury(hr_container(hr_list_pop(&engine->dead), struct hr_conn, active));
    }
}

/* The peer has nothing more to say: what still waits for it can only fail. */
static void conn_bye(struct hr_conn *conn) {
    struct hr_engine *engine = conn->engine;
    struct hr_hdr h = {.kind = HR_MSG_CREDIT}; /* so that it learns at once that all has arrived */
    hr_conn_send_ctl(conn, &h, sizeof h);
    if (conn->state == HR_CONN_LOST) return;
    conn->state = HR_CONN_CLOSED;
    conn->why = HR_ERR_CLOSED;
    snprintf(conn->detail, sizeof conn->detail, "the peer has closed its communicator or ended");
    for (struct hr_link *l = engine->comms.next; l != &engine->comms; l = l->next) {
        struct hr_comm *comm = hr_container(l, struct hr_comm, link);
        int rank = hr_comm_rank_of(comm, conn);
        if (rank < 0) continue;
        /* no other source is left for a receive from any, and those take the first rail of its channel */
        end_waits(comm, conn, rank, conn == comm->conns[rank] && ++comm->nclosed == comm->size - 1);
    }
}

static void conn_protocol_error(struct hr_conn *conn, const char *what) { hr_conn_lost(conn, HR_ERR_PROTOCOL, what); }

static void sink_recv(struct hr_ep *ep, const void *hdr, size_t hdr_len, const void *payload, size_t len) {
    struct hr_lane *lane = ep->ctx;
    struct hr_conn *conn = lane->conn;
    struct hr_hdr_long m;
    const struct hr_hdr *h = &m.h;
    int byes = 0;
    if (conn->state == HR_CONN_LOST || conn->state == HR_CONN_CLOSED) return;
    if (hdr_len < sizeof *h) {
        conn_protocol_error(conn, "a header that is too short");
        return;
    }
    memcpy(&m.h, hdr, sizeof m.h); /* the peer may still be able to write where it lies */
    if (h->kind == HR_MSG_RTS && h->flags & HR_HDR_OPEN) hr_ledger_claim(conn, h->sreq, 0);
    if (h->kind == HR_MSG_FIN && h->flags & HR_HDR_OPEN) hr_ledger_claim(conn, h->rreq, 1);
    conn->rx_msgs++;
    conn->rx_bytes += len;
    int32_t credit = 0, ack = 0;
    if (conn->nlanes == 1 || lane == conn->lanes) { /* one stream: its other end, where the peer is this process */
        credit = (int32_t)(h->credit - conn->heard_credit);
        ack = (int32_t)(h->ack - conn->heard_ack);
    }
    if (credit > 0) {
        conn->heard_credit = h->credit;
        conn->credit += credit;
        if (conn->credit > (int64_t)hr_credit_max(conn)) {
            conn_protocol_error(conn, "credit for what was never sent");
            return;
        }
        if (conn->nqueued) hr_conn_activate(conn);
    }
    if (ack > 0) {
        conn->heard_ack = h->ack;
        hr_window_acked(conn, (uint64_t)ack);
    }
    if (h->kind == HR_MSG_EAGER || h->kind == HR_MSG_RTS || h->kind == HR_MSG_CREDIT) hr_conn_asked(conn, h->rreq);
    switch (h->kind) {
    case HR_MSG_EAGER: hr_match_arrived(conn, h, payload, len); break;
    case HR_MSG_RTS:
    case HR_MSG_CTS:
    case HR_MSG_LEDGER:
    case HR_MSG_HELP:
        if (hdr_len < sizeof m) {
            conn_protocol_error(conn, "a rendezvous header that is too short");
            return;
        }
        memcpy(&m.size, (const char *)hdr + sizeof m.h, sizeof m - sizeof m.h);
        if (h->kind == HR_MSG_RTS)
            hr_match_arrived(conn, &m.h, payload, len);
        else if (h->kind == HR_MSG_CTS)
            hr_xfer_on_cts(conn, &m);
        else if (h->kind == HR_MSG_HELP)
            hr_share_on_help(conn, &m);
        else
            hr_ledger_arrived(conn, &m);
        break;
    case HR_MSG_SEG: hr_xfer_on_seg(conn, h, payload, len); break;
    case HR_MSG_HELPED: hr_share_on_helped(conn, h); break;
    case HR_MSG_FIN: hr_xfer_on_fin(conn, h); break;
    case HR_MSG_CANCEL: hr_xfer_on_cancel(conn, h); break;
    case HR_MSG_SKIP: hr_match_skip(conn, h); break;
    case HR_MSG_CREDIT:
        if (h->rreq) hr_conn_owe(conn, 0, 0); /* it may be waiting for just that */
        break;
    case HR_MSG_BREAK: {
        struct hr_comm *comm = hr_comm_find(conn->engine, h->comm);
        if (comm)
            hr_comm_on_break(comm, conn, h);
        else if (!hr_comm_retired(conn->engine, h->comm))
            hr_match_keep_break(conn, h);
        break;
    }
    case HR_MSG_BYE:
        lane->bye = 1;
        for (int i = 0; i < HR_MAX_LANES + 1; i++) byes += conn->lanes[i].bye;
        if (byes == conn->nlanes) conn_bye(conn);
        break;
    case HR_MSG_PROBE: hr_window_probed(conn, h); break;
    case HR_MSG_ECHO: hr_window_echoed(conn, h); break;
    default: conn_protocol_error(conn, "a message of unknown kind");
    }
}

static void sink_done(struct hr_ep *ep, void *cookie, hr_status status) {
    struct hr_lane *lane = ep->ctx;
    struct hr_conn *conn = lane->conn;
    if (conn->state == HR_CONN_LOST) return;
    if ((uintptr_t)cookie & 1) {
        hr_xfer_on_done((struct hr_xfer *)((uintptr_t)cookie & ~(uintptr_t)1), status);
    } else if (hr_is_error(status)) {
        hr_conn_lost(conn, status, "a message could not be sent"); /* the peer would wait for it, and for its place */
    } else if (cookie) {
        struct hr_request *req = cookie;
        req->queued = HR_QUEUED_NO;
        hr_finish(conn->engine, req, HR_OK);
    }
    if (conn->nqueued || conn->nbulk) hr_conn_activate(conn);
}

static void sink_notify(struct hr_ep *ep, uint64_t value, size_t nbytes) {
    struct hr_lane *lane = ep->ctx;
    if (lane->conn->state == HR_CONN_LOST) return;
    lane->conn->rx_bytes += nbytes;
    hr_xfer_on_notify(lane->conn, value, nbytes);
}

static void sink_state(struct hr_ep *ep, hr_status status, const char *detail) {
    struct hr_lane *lane = ep->ctx;
    struct hr_conn *conn = lane->conn;
    if (status != HR_OK) {
        /* of a stream that has said goodbye: what the others still bring counts, their goodbye too */
        if (!lane->bye || conn->state != HR_CONN_UP) hr_conn_lost(conn, status, detail);
        return;
    }
    lane->up = 1;
    if (conn->state != HR_CONN_CONNECTING) return;
    for (int i = 0; i < HR_MAX_LANES + 1; i++)
        if (conn->lanes[i].ep && !conn->lanes[i].up) return;
    conn->state = HR_CONN_UP;
    conn->window = conn->caps->window;
    if (conn->nqueued || !hr_list_empty(&conn->ctl)) hr_conn_activate(conn);
}

/* ---- what people should read of ---- */

void hr_remark_add(struct hr_engine *engine, enum hr_remark_kind kind, struct hr_conn *conn, const char *text) {
    if (engine->remark_tail - engine->remark_head == HR_REMARKS) engine->remark_head++;
    struct hr_remark *remark = &engine->remarks[engine->remark_tail++ % HR_REMARKS];
    *remark = (struct hr_remark){.kind = kind, .peer_id = conn ? conn->peer_id : engine->config.self_id};
    remark->provider = conn ? conn->provider->name : "";
    remark->by = conn ? conn->carrier : NULL;
    snprintf(remark->text, sizeof remark->text, "%s", text ? text : "");
    (void)!eventfd_write(engine->remarkfd, 1);
}

int hr_engine_remark_fd(struct hr_engine *engine) { return engine->remarkfd; }

int hr_engine_remark(struct hr_engine *engine, struct hr_remark *remark_p) {
    eventfd_t count;
    hr_lock(engine);
    int any = engine->remark_head != engine->remark_tail;
    if (any) *remark_p = engine->remarks[engine->remark_head++ % HR_REMARKS];
    if (engine->remark_head == engine->remark_tail) (void)!eventfd_read(engine->remarkfd, &count);
    hr_unlock(engine);
    return any;
}

static void sink_carrier(struct hr_ep *ep, const char *by, const char *detail) {
    struct hr_lane *lane = ep->ctx;
    struct hr_conn *conn = lane->conn;
    if (conn->state == HR_CONN_LOST) return;
    conn->carrier = by;
    conn->fell += by != NULL;
    hr_remark_add(conn->engine, by ? HR_REMARK_FELL : HR_REMARK_BACK, conn, detail);
}

static void sink_stranger(struct hr_domain *domain, const char *detail) {
    struct hr_engine *engine = domain->owner;
    char text[256];
    int i = 0;
    while (i + 1 < engine->ndomains && engine->domains[i] != domain) i++;
    snprintf(text, sizeof text, "%s: turned away a caller at %s", engine->names[i], detail);
    hr_remark_add(engine, HR_REMARK_STRANGER, NULL, text);
}

const struct hr_sink hr_engine_sink = {.recv = sink_recv,
                                       .done = sink_done,
                                       .notify = sink_notify,
                                       .state = sink_state,
                                       .carrier = sink_carrier,
                                       .stranger = sink_stranger};

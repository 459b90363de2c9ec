/* conn.c - connections: what waits to leave, in which order it leaves, credits, and the bound on bulk in flight. */

/*
 * Order of leaving: control messages first (they free buffers and room at the peer), then by priority; at equal
 * priority message headers (EAGER, RTS) before segments of transfers. Control has a list of its own, so that a full
 * queue of messages can never hold back the messages that would empty it. Messages of one bucket (match.c) leave in the
 * order in which they were posted: those that an urgent one finds queued before it leave with its urgency. Were it to
 * overtake them, it could lie at the peer, unmatched, on the very credit that they need.
 *
 * Two bounds keep memory and latency in hand. Credit: what the peer holds because no receive matched it yet, bytes and
 * headers. Window: bulk bytes (segments, writes, eager payloads) on their way and not acknowledged by the peer's
 * engine, kernel buffers and network included; it is max(64 KiB, (1 ms + round trip) x measured rate), so an urgent
 * message never has more than about 2 ms of bulk ahead of it on its connection. More urgent than the default ignores
 * the window.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/engine.h"

#define EAGER_CREDIT_DEFAULT (1u << 20)
#define EAGER_CREDIT_LEAST 1024
#define CTL_MAX (64u << 10) /* answers that wait for a peer who asks and does not read */
#define ACK_EVERY (16u << 10)
#define BULK_MIN 4096
#define LATENCY_NS 1000000.0 /* of bulk ahead of an urgent message; the bound promised is twice that */
#define ROUND_NS 1000000

static uint64_t conn_credit_max(struct hr_engine *engine) {
    uint64_t credit = engine->config.eager_credit ? engine->config.eager_credit : EAGER_CREDIT_DEFAULT;
    return credit > EAGER_CREDIT_LEAST ? credit : EAGER_CREDIT_LEAST;
}

struct hr_conn *hr_conn_find(struct hr_engine *engine, uint64_t peer_id) {
    for (struct hr_link *l = engine->conns.next; l != &engine->conns; l = l->next) {
        struct hr_conn *conn = hr_container(l, struct hr_conn, link);
        if (conn->peer_id == peer_id) return conn;
    }
    return NULL;
}

struct hr_conn *hr_conn_get(struct hr_engine *engine, uint64_t peer_id) {
    struct hr_conn *conn = hr_conn_find(engine, peer_id);
    if (conn) return conn;
    conn = calloc(1, sizeof *conn);
    if (!conn) return NULL;
    conn->engine = engine;
    conn->peer_id = peer_id;
    conn->credit = (int64_t)conn_credit_max(engine);
    hr_list_init(&conn->active);
    hr_list_init(&conn->ctl);
    for (int b = 0; b < HR_BUCKETS; b++) hr_list_init(&conn->early[b]);
    for (int p = 0; p < HR_PRIORITIES; p++) hr_list_init(&conn->bulk[p]);
    conn->index = engine->nconns++;
    hr_list_push(&engine->conns, &conn->link);
    return conn;
}

void hr_conn_free(struct hr_conn *conn) {
    struct hr_link *l;
    for (int i = 0; i < HR_MAX_LANES + 1; i++)
        if (conn->lanes[i].ep) conn->lanes[i].ep->domain->ops->ep_destroy(conn->lanes[i].ep);
    while ((l = hr_list_pop(&conn->ctl))) free(hr_container(l, struct hr_ctl, link));
    hr_match_forget(conn);
    hr_list_remove(&conn->active);
    hr_list_remove(&conn->link);
    free(conn);
}

void hr_conn_activate(struct hr_conn *conn) {
    if (hr_list_empty(&conn->active)) hr_list_push(&conn->engine->active, &conn->active);
}

/* Nothing queued here and nothing left in the host's buffers. */
int hr_conn_idle(struct hr_conn *conn) {
    if (conn->state != HR_CONN_UP) return 1;
    if (conn->nqueued || conn->nbulk || !hr_list_empty(&conn->ctl)) return 0;
    for (int i = 0; i < conn->nlanes; i++)
        if (conn->lanes[i].ep->domain->ops->ep_unsent(conn->lanes[i].ep)) return 0;
    return 1;
}

/* --- what every header carries ------------------------------------------------------------------------------------ */

static void conn_settle(struct hr_conn *conn, struct hr_hdr *h) {
    h->credit = conn->owed_credit;
    h->ack = conn->owed_ack;
}

static void conn_settled(struct hr_conn *conn, const struct hr_hdr *h) {
    conn->owed_credit -= h->credit;
    conn->held -= h->credit;
    conn->owed_ack -= h->ack;
    conn->tx_msgs++;
}

hr_status hr_conn_post(struct hr_conn *conn, struct hr_hdr *h, size_t hdr_len, const void *payload, size_t len,
                       void *cookie) {
    struct hr_ep *ep = conn->lanes[0].ep;
    struct hr_msg msg = {.hdr = h, .hdr_len = hdr_len, .payload = payload, .len = len, .cookie = cookie};
    conn_settle(conn, h);
    hr_status status = ep->domain->ops->post_send(ep, &msg);
    if (status == HR_OK || status == HR_INPROGRESS) {
        conn_settled(conn, h);
        conn->tx_bytes += len;
    } else if (hr_is_error(status)) {
        hr_conn_lost(conn, status, NULL);
        return conn->why;
    }
    return status;
}

/* Control messages have no payload, so whether the provider still holds one makes no difference: cookie NULL. */
void hr_conn_send_ctl(struct hr_conn *conn, struct hr_hdr *hdr, size_t len) {
    if (conn->state != HR_CONN_UP && conn->state != HR_CONN_CONNECTING) return;
    if (conn->state == HR_CONN_UP && hr_list_empty(&conn->ctl)) {
        hr_status status = hr_conn_post(conn, hdr, len, NULL, 0, NULL);
        if (status != HR_AGAIN) return;
    }
    if (conn->nctl == CTL_MAX) {
        hr_conn_lost(conn, HR_ERR_PROTOCOL, "the peer does not read what it is answered");
        return;
    }
    struct hr_ctl *ctl = malloc(sizeof *ctl);
    if (!ctl) {
        hr_conn_lost(conn, HR_ERR_NOMEM, "no memory for a control message");
        return;
    }
    memcpy(&ctl->hdr, hdr, len);
    ctl->len = (uint32_t)len;
    hr_list_push(&conn->ctl, &ctl->link);
    conn->nctl++;
    hr_conn_activate(conn);
}

/* A quarter of it has gathered, or as much as the peer has left: it may be waiting for just that. */
static int conn_credit_due(struct hr_conn *conn) {
    uint64_t max = conn_credit_max(conn->engine), left = max > conn->held ? max - conn->held : 0;
    return conn->owed_credit && (conn->owed_credit >= max / 4 || conn->owed_credit >= left);
}

int hr_conn_charge(struct hr_conn *conn, uint64_t cost) {
    conn->held += cost;
    if (conn->held > conn_credit_max(conn->engine) + HR_EAGER_COST) {
        hr_conn_lost(conn, HR_ERR_PROTOCOL, "the peer sent more than its credit allows");
        return 0;
    }
    hr_conn_owe(conn, 0, 0);
    return 1;
}

void hr_conn_owe(struct hr_conn *conn, uint32_t credit, uint32_t ack) {
    conn->owed_credit += credit;
    if (conn->caps->window && ack >= BULK_MIN) {
        conn->owed_ack += ack;
        conn->rx_bulk += ack;
    }
    if (conn->state != HR_CONN_UP) return;
    if (conn_credit_due(conn) || conn->owed_ack >= ACK_EVERY) {
        struct hr_hdr h = {.kind = HR_MSG_CREDIT};
        if (hr_list_empty(&conn->ctl))
            hr_conn_send_ctl(conn, &h, sizeof h);
        else
            hr_conn_activate(conn); /* something else will carry it */
    }
}

/* --- the window ----------------------------------------------------------------------------------------------------
 */

static void conn_round(struct hr_conn *conn, int64_t now) {
    conn->round_since = now;
    conn->round_bytes = 0;
    conn->round_mark = conn->inflight;
}

/* Both ends count what is at least BULK_MIN: small messages need no clock and no acknowledgement. */
static void conn_sent_bulk(struct hr_conn *conn, uint64_t nbytes) {
    if (!conn->caps->window || nbytes < BULK_MIN) return;
    if (!conn->inflight) {
        conn->busy_since = conn->alone_since = hr_now();
        conn_round(conn, conn->busy_since);
    }
    conn->inflight += nbytes;
    conn->tx_bulk += nbytes;
}

/* A round lasts until all that was in flight at its beginning has been acknowledged, and a millisecond at least:
 * acknowledgements that were only read late cannot pass for a fast network for long. */
static void conn_acked(struct hr_conn *conn, uint64_t nbytes) {
    if (nbytes > conn->inflight) nbytes = conn->inflight;
    conn->inflight -= nbytes;
    conn->round_bytes += nbytes;
    int64_t now = hr_now(), elapsed = now - conn->round_since;
    if (conn->alone_since) { /* the first answer since nothing was in flight: the round trip, with as little queue as
                                can be */
        if (!conn->rtt || now - conn->alone_since < conn->rtt) conn->rtt = now - conn->alone_since;
        conn->alone_since = 0;
    }
    if (conn->round_bytes >= conn->round_mark && elapsed >= ROUND_NS) {
        double rate = (double)conn->round_bytes * 1e9 / (double)elapsed;
        /* The rate at which the path drains when it drains: lower figures come from a peer that was not running, or
         * from too little to send, so they count slowly. Following them would shrink the window, and with it the next
         * figure. */
        if (rate > conn->rate)
            conn->rate = rate;
        else if (conn->nbulk || conn->nqueued)
            conn->rate -= (conn->rate - rate) / 32;
        double window = conn->rate * (LATENCY_NS + (double)conn->rtt) / 1e9;
        conn->window = window > (double)HR_WINDOW_MIN ? (uint64_t)window : HR_WINDOW_MIN;
        conn_round(conn, now);
    }
    if (!conn->inflight) conn->busy_ns += (uint64_t)(now - conn->busy_since);
    if (conn->nqueued || conn->nbulk) hr_conn_activate(conn);
}

static int conn_window_open(struct hr_conn *conn) { return !conn->caps->window || conn->inflight < conn->window; }

/* What a cancelled transfer had on its way may arrive and be acknowledged, or may not. The peer counts what has come:
 * its answer to a probe leaves behind all that was posted before, so the difference is lost for good. */
void hr_conn_probe(struct hr_conn *conn) {
    struct hr_hdr h = {.kind = HR_MSG_PROBE, .aux = conn->tx_bulk};
    if (conn->caps->window && conn->inflight) hr_conn_send_ctl(conn, &h, sizeof h);
}

static void conn_probed(struct hr_conn *conn, const struct hr_hdr *probe) {
    struct hr_hdr h = {.kind = HR_MSG_ECHO, .aux = probe->aux - conn->rx_bulk};
    hr_conn_send_ctl(conn, &h, sizeof h);
}

static void conn_echoed(struct hr_conn *conn, const struct hr_hdr *echo) {
    uint64_t lost = echo->aux - conn->tx_bulk_lost;
    conn->tx_bulk_lost = echo->aux;
    conn->inflight = lost < conn->inflight ? conn->inflight - lost : 0;
    conn_round(conn, hr_now());
    if (conn->nqueued || conn->nbulk) hr_conn_activate(conn);
}

/* --- headers of messages --------------------------------------------------------------------------------------------
 */

/* A quarter of the credit is for headers alone: when the peer holds much that it has not asked for yet, messages
 * announce themselves instead of coming along, so that the one it does wait for still gets through. */
static int conn_eager(struct hr_conn *conn, uint64_t len) {
    if (len > conn->caps->eager_max) return 0;
    return len <= HR_EAGER_COST || conn->credit >= HR_EAGER_COST + (int64_t)(len + conn_credit_max(conn->engine) / 4);
}

static hr_status send_header(struct hr_conn *conn, struct hr_request *req) {
    hr_status status;
    uint32_t *order = &conn->order_tx[req->rflags];
    struct hr_hdr_long m = {
        .h = {.bucket = req->rflags, .order = *order, .comm = req->comm->id, .tag = req->tag, .aux = req->sig}};
    if (conn_eager(conn, req->len)) {
        m.h.kind = HR_MSG_EAGER;
        status = hr_conn_post(conn, &m.h, sizeof m.h, req->buf, req->len, req);
        if (hr_is_error(status) || status == HR_AGAIN) return status;
        (*order)++;
        conn->credit -= HR_EAGER_COST + (int64_t)req->len;
        conn_sent_bulk(conn, req->len);
        HR_COUNT(conn->engine, eager);
        return status;
    }
    m.h.kind = HR_MSG_RTS;
    m.size = req->len;
    status = hr_xfer_offer(conn, req, &m);
    if (status != HR_OK) return status;
    status = hr_conn_post(conn, &m.h, sizeof m, NULL, 0, NULL);
    if (status == HR_AGAIN || hr_is_error(status)) {
        hr_xfer_free(conn->engine, req->xfer);
        return status;
    }
    (*order)++;
    conn->credit -= HR_EAGER_COST;
    return HR_INPROGRESS;
}

/* A header without payload is gone; a message is the provider's, and its place in the order is kept. */
static void conn_taken(struct hr_conn *conn, struct hr_request *req) {
    if (req->xfer) return;
    req->queued = HR_QUEUED_PROVIDER;
    req->index = conn->order_tx[req->rflags] - 1;
}

static int conn_may_send(struct hr_conn *conn, int priority) {
    if (conn->credit < HR_EAGER_COST) return 0;
    return priority < HR_PRIORITY_DEFAULT || conn_window_open(conn);
}

/* While it is queued, index says in which queue. */
static void sendq_push(struct hr_conn *conn, struct hr_request *req, int priority) {
    struct hr_request **head = &conn->sendq[priority];
    req->index = (uint32_t)priority;
    if (*head) {
        req->mnext = *head;
        req->mprev = (*head)->mprev;
        req->mprev->mnext = req;
        (*head)->mprev = req;
    } else {
        req->mnext = req->mprev = req;
        *head = req;
    }
}

static void sendq_remove(struct hr_conn *conn, struct hr_request *req) {
    struct hr_request **head = &conn->sendq[req->index];
    if (req->mnext == req)
        *head = NULL;
    else {
        req->mprev->mnext = req->mnext;
        req->mnext->mprev = req->mprev;
        if (*head == req) *head = req->mnext;
    }
}

/* What waits in less urgent queues of the same bucket was posted before. */
static void conn_promote(struct hr_conn *conn, uint8_t bucket, int priority) {
    for (int p = priority + 1; p < HR_PRIORITIES; p++) {
        struct hr_request *req = conn->sendq[p], *last = req ? req->mprev : NULL;
        for (int end = !req; !end;) {
            struct hr_request *next = req->mnext;
            end = req == last;
            if (req->rflags == bucket) {
                sendq_remove(conn, req);
                sendq_push(conn, req, priority);
            }
            req = next;
        }
    }
}

static void queue_send(struct hr_conn *conn, struct hr_request *req) {
    if (conn->bucket_queued[req->rflags]++) conn_promote(conn, req->rflags, req->priority);
    sendq_push(conn, req, req->priority);
    req->queued = HR_QUEUED_SEND;
    conn->nqueued++;
    hr_conn_activate(conn);
}

void hr_conn_unqueue_send(struct hr_conn *conn, struct hr_request *req) {
    sendq_remove(conn, req);
    req->queued = HR_QUEUED_NO;
    conn->nqueued--;
    conn->bucket_queued[req->rflags]--;
}

static int conn_more_urgent_waits(struct hr_conn *conn, int priority) {
    for (int p = 0; p <= priority; p++)
        if (conn->sendq[p]) return 1;
    return 0;
}

/* Sends the header now if nothing is in the way; queues it otherwise. HR_OK: the request may be finished. */
hr_status hr_conn_send(struct hr_conn *conn, struct hr_request *req) {
    hr_status status = HR_AGAIN;
    if (conn->state == HR_CONN_UP && hr_list_empty(&conn->ctl) &&
        (!conn->nqueued || (!conn->bucket_queued[req->rflags] && !conn_more_urgent_waits(conn, req->priority))) &&
        conn_may_send(conn, req->priority))
        status = send_header(conn, req);
    if (status == HR_AGAIN)
        queue_send(conn, req);
    else if (status == HR_INPROGRESS)
        conn_taken(conn, req);
    return status;
}

static hr_status conn_send_queued(struct hr_conn *conn, struct hr_request *req) {
    hr_status status = send_header(conn, req);
    if (status == HR_AGAIN) return status;
    hr_conn_unqueue_send(conn, req);
    if (status == HR_OK)
        hr_finish(conn->engine, req, HR_OK);
    else if (status == HR_INPROGRESS)
        conn_taken(conn, req);
    else
        hr_fail(conn->engine, req, status, -1, HR_PHASE_POST, conn);
    return status;
}

static hr_status conn_send_segment(struct hr_conn *conn, struct hr_xfer *x) {
    uint64_t nbytes = 0; /* x may be gone when this returns */
    hr_status status = hr_xfer_send_segment(conn, x, &nbytes);
    conn_sent_bulk(conn, nbytes);
    return status;
}

/* Sends what may go, in order, until there is no room. */
void hr_conn_pump(struct hr_conn *conn) {
    while (conn->state == HR_CONN_UP && !hr_list_empty(&conn->ctl)) {
        struct hr_ctl *ctl = hr_container(conn->ctl.next, struct hr_ctl, link);
        hr_status status = hr_conn_post(conn, &ctl->hdr.h, ctl->len, NULL, 0, NULL);
        if (status == HR_AGAIN) return;
        hr_list_remove(&ctl->link);
        conn->nctl--;
        free(ctl);
    }
    for (int p = 0; p < HR_PRIORITIES; p++) {
        while (conn->state == HR_CONN_UP) {
            if (conn->sendq[p] && conn_may_send(conn, p)) {
                if (conn_send_queued(conn, conn->sendq[p]) == HR_AGAIN) return;
            } else if (!hr_list_empty(&conn->bulk[p]) && conn_window_open(conn)) {
                if (conn_send_segment(conn, hr_container(conn->bulk[p].next, struct hr_xfer, work.link)) == HR_AGAIN)
                    return;
            } else
                break;
        }
    }
    /* What is left waits for credit or for the window: an arriving header wakes it. A lost one is on another list. */
    if (conn->state != HR_CONN_LOST) hr_list_remove(&conn->active);
}

/* --- events ----------------------------------------------------------------------------------------------------------
 */

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
    if (conn->engine->sleeping) hr_kick(conn->engine);
}

/* The endpoint goes before any request is finished: from then on the peer cannot reach this process's memory. */
static void conn_bury(struct hr_conn *conn) {
    struct hr_engine *engine = conn->engine;
    struct hr_link *l;
    for (int i = 0; i < HR_MAX_LANES + 1; i++) {
        if (!conn->lanes[i].ep) continue;
        conn->lanes[i].ep->domain->ops->ep_abort(conn->lanes[i].ep);
        conn->lanes[i].up = 0;
    }
    while ((l = hr_list_pop(&conn->ctl))) free(hr_container(l, struct hr_ctl, link));
    for (l = engine->comms.next; l != &engine->comms; l = l->next) {
        struct hr_comm *comm = hr_container(l, struct hr_comm, link);
        int rank = hr_comm_rank_of(comm, conn);
        if (rank >= 0 && !conn->was_closed)
            hr_comm_break_locked(comm, conn->why, rank, HR_PHASE_TRANSFER, conn->provider->name, conn->detail, 1);
    }
    if (!conn->was_closed) hr_match_purge_conn(engine, conn);
}

void hr_conns_bury(struct hr_engine *engine) {
    struct hr_link *l;
    while ((l = hr_list_pop(&engine->dead))) conn_bury(hr_container(l, struct hr_conn, active));
}

/* The peer has nothing more to say: what still waits for it can only fail. */
static void conn_bye(struct hr_conn *conn) {
    struct hr_engine *engine = conn->engine;
    conn->state = HR_CONN_CLOSED;
    conn->why = HR_ERR_CLOSED;
    snprintf(conn->detail, sizeof conn->detail, "the peer has closed its communicator or ended");
    for (struct hr_link *l = engine->comms.next; l != &engine->comms; l = l->next) {
        struct hr_comm *comm = hr_container(l, struct hr_comm, link);
        struct hr_request *req = comm->pending, *last = req ? req->prev : NULL;
        int rank = hr_comm_rank_of(comm, conn);
        if (rank < 0) continue;
        int alone = ++comm->nclosed == comm->size - 1; /* no other source is left for a receive from any */
        while (req && comm->pending) {
            struct hr_request *next = req->next;
            int end = req == last;
            if (req->conn == conn || (alone && !req->conn)) {
                hr_abort_request(engine, req, HR_ERR_CLOSED, rank, HR_PHASE_MATCH, conn);
                req = comm->pending; /* a run may have broken the communicator: begin again */
                last = req ? req->prev : NULL;
                continue;
            }
            if (end) break;
            req = next;
        }
    }
}

static void conn_protocol_error(struct hr_conn *conn, const char *what) { hr_conn_lost(conn, HR_ERR_PROTOCOL, what); }

static void sink_recv(struct hr_ep *ep, const void *hdr, size_t hdr_len, const void *payload, size_t len) {
    struct hr_lane *lane = ep->ctx;
    struct hr_conn *conn = lane->conn;
    struct hr_hdr_long m;
    const struct hr_hdr *h = &m.h;
    if (conn->state == HR_CONN_LOST || conn->state == HR_CONN_CLOSED) return;
    if (hdr_len < sizeof *h) {
        conn_protocol_error(conn, "a header that is too short");
        return;
    }
    memcpy(&m.h, hdr, sizeof m.h); /* the peer may still be able to write where it lies */
    conn->rx_msgs++;
    conn->rx_bytes += len;
    if (h->credit) {
        conn->credit += h->credit;
        if (conn->credit > (int64_t)conn_credit_max(conn->engine)) {
            conn_protocol_error(conn, "credit for what was never sent");
            return;
        }
        if (conn->nqueued) hr_conn_activate(conn);
    }
    if (h->ack) conn_acked(conn, h->ack);
    switch (h->kind) {
    case HR_MSG_EAGER: hr_match_arrived(conn, h, payload, len); break;
    case HR_MSG_RTS:
    case HR_MSG_CTS:
        if (hdr_len < sizeof m) {
            conn_protocol_error(conn, "a rendezvous header that is too short");
            return;
        }
        memcpy(&m.size, (const char *)hdr + sizeof m.h, sizeof m - sizeof m.h);
        if (h->kind == HR_MSG_RTS)
            hr_match_arrived(conn, &m.h, NULL, 0);
        else
            hr_xfer_on_cts(conn, &m);
        break;
    case HR_MSG_SEG: hr_xfer_on_seg(conn, h, payload, len); break;
    case HR_MSG_FIN: hr_xfer_on_fin(conn, h); break;
    case HR_MSG_CANCEL: hr_xfer_on_cancel(conn, h); break;
    case HR_MSG_SKIP: hr_match_skip(conn, h); break;
    case HR_MSG_CREDIT: break;
    case HR_MSG_BREAK: {
        struct hr_comm *comm = hr_comm_find(conn->engine, h->comm);
        if (comm)
            hr_comm_on_break(comm, conn, h);
        else if (!hr_comm_retired(conn->engine, h->comm))
            hr_match_keep_break(conn, h);
        break;
    }
    case HR_MSG_BYE: conn_bye(conn); break;
    case HR_MSG_PROBE: conn_probed(conn, h); break;
    case HR_MSG_ECHO: conn_echoed(conn, h); break;
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
        hr_conn_lost(conn, status, detail);
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

const struct hr_sink hr_engine_sink = {
    .recv = sink_recv, .done = sink_done, .notify = sink_notify, .state = sink_state};

/* conn.c - connections: what waits to leave, in which order it leaves, and credit. */

/*
 * Order of leaving: control messages first (they free buffers and room at the peer), then by priority; at equal
 * priority message headers (EAGER, RTS) before segments of transfers. Control has a list of its own, so that a full
 * queue of messages can never hold back the messages that would empty it. Messages of one bucket (match.c) leave in the
 * order in which they were posted: those that an urgent one finds queued before it leave with its urgency. Were it to
 * overtake them, it could lie at the peer, unmatched, on the very credit that they need.
 *
 * Credit bounds what the peer holds because no receive matched it yet, bytes and headers. The bound on bulk in flight
 * is window.c's; what is more urgent than the default ignores it.
 */

#include <stdlib.h>
#include <string.h>

#include "core/engine.h"
#include "hr/memory.h"

#define EAGER_CREDIT_DEFAULT (1u << 20)
#define EAGER_CREDIT_LEAST 1024
#define EAGER_CREDIT_MOST (1u << 30)
#define CTL_MAX (64u << 10)   /* answers that wait for a peer who asks and does not read */
#define ACK_EVERY (16u << 10) /* bulk; more where the peer says so */
#define ACK_MOST (1u << 20)

uint64_t hr_credit_max(const struct hr_conn *conn) {
    uint64_t credit = conn->engine->config.eager_credit;
    if (!credit) credit = conn->caps->credit ? conn->caps->credit : EAGER_CREDIT_DEFAULT;
    if (credit > EAGER_CREDIT_MOST) credit = EAGER_CREDIT_MOST;
    return credit > EAGER_CREDIT_LEAST ? credit : EAGER_CREDIT_LEAST;
}

struct hr_conn *hr_conn_find(struct hr_engine *engine, uint64_t peer_id, uint32_t channel) {
    for (struct hr_link *l = engine->conns.next; l != &engine->conns; l = l->next) {
        struct hr_conn *conn = hr_container(l, struct hr_conn, link);
        if (conn->peer_id == peer_id && conn->channel == channel && conn->first == conn) return conn;
    }
    return NULL;
}

struct hr_conn *hr_conn_get(struct hr_engine *engine, uint64_t peer_id, uint32_t channel, int rail) {
    struct hr_conn *first = hr_conn_find(engine, peer_id, channel), *conn;
    struct hr_conn *of_peer = first || !channel ? first : hr_conn_find(engine, peer_id, 0);
    if (channel && !of_peer) return NULL;
    if (first && rail < first->nrails) return first->rails[rail];
    if (rail != (first ? first->nrails : 0)) return NULL;
    conn = calloc(1, sizeof *conn);
    if (!conn) return NULL;
    conn->engine = engine;
    conn->peer_id = peer_id;
    conn->channel = channel;
    conn->ack_every = conn->asked_every = ACK_EVERY;
    conn->priority = HR_PRIORITY_DEFAULT;
    hr_list_init(&conn->active);
    hr_list_init(&conn->owing);
    hr_list_init(&conn->ctl);
    for (int b = 0; b < HR_BUCKETS; b++) hr_list_init(&conn->early[b]);
    for (int p = 0; p < HR_PRIORITIES; p++) hr_list_init(&conn->bulk[p]);
    if (!first) first = conn;
    conn->first = first;
    first->rails[first->nrails++] = conn;
    conn->index = of_peer ? of_peer->index : engine->nconns++;
    hr_list_push(&engine->conns, &conn->link);
    return conn;
}

void hr_conn_free(struct hr_conn *conn) {
    struct hr_link *l;
    hr_ledger_forget(conn);
    for (int i = 0; i < HR_MAX_LANES + 1; i++)
        if (conn->lanes[i].ep) conn->lanes[i].ep->domain->ops->ep_destroy(conn->lanes[i].ep);
    while ((l = hr_list_pop(&conn->ctl))) free(hr_container(l, struct hr_ctl, link));
    hr_match_forget(conn);
    hr_list_remove(&conn->active);
    hr_list_remove(&conn->owing);
    hr_list_remove(&conn->link);
    hr_reading_close(&conn->reading);
    free(conn);
}

void hr_conn_activate(struct hr_conn *conn) {
    if (hr_list_empty(&conn->active)) hr_list_push(&conn->engine->active, &conn->active);
}

/* Nothing is queued here, and with `delivered` nothing is on its way either. */
int hr_conn_idle(struct hr_conn *conn, int delivered) {
    if (conn->state != HR_CONN_UP) return 1;
    if (conn->nqueued || conn->nbulk || !hr_list_empty(&conn->ctl)) return 0;
    if (!delivered) return 1;
    for (int i = 0; i < conn->nlanes; i++)
        if (conn->lanes[i].ep->domain->ops->ep_unsent(conn->lanes[i].ep)) return 0;
    return 1;
}

/* --- what the headers of the first stream carry
 * ------------------------------------------------------------------------------------ */

static void conn_settle(struct hr_conn *conn, struct hr_hdr *h) {
    h->credit = conn->told_credit + conn->owed_credit;
    h->ack = conn->told_ack + conn->owed_ack;
}

static void conn_settled(struct hr_conn *conn, const struct hr_hdr *h) {
    conn->held -= h->credit - conn->told_credit;
    conn->owed_credit -= h->credit - conn->told_credit;
    conn->owed_ack -= h->ack - conn->told_ack;
    conn->told_credit = h->credit;
    conn->told_ack = h->ack;
}

/* Credit and acknowledgements are told by the first stream alone: by the others sums would come out of order. */
static hr_status conn_post_by(struct hr_conn *conn, struct hr_lane *lane, struct hr_hdr *h, const struct hr_msg *msg) {
    int first = lane == conn->lanes;
    if (first) conn_settle(conn, h);
    hr_status status = hr_lane_posted(lane, lane->ep->domain->ops->post_send(lane->ep, msg));
    if (status == HR_OK || status == HR_INPROGRESS) {
        if (first) conn_settled(conn, h);
        conn->tx_msgs++;
        conn->tx_bytes += msg->len;
    } else if (hr_is_error(status)) {
        hr_conn_lost(conn, status, NULL);
        return conn->why;
    }
    return status;
}

hr_status hr_conn_post(struct hr_conn *conn, struct hr_hdr *h, size_t hdr_len, const void *payload, size_t len,
                       void *cookie) {
    struct hr_msg msg = {.hdr = h, .hdr_len = hdr_len, .payload = payload, .len = len, .cookie = cookie};
    return conn_post_by(conn, conn->lanes, h, &msg);
}

/* All of a transfer by one stream, so that its segments stay in order. */
hr_status hr_conn_post_segment(struct hr_conn *conn, struct hr_hdr *h, uint32_t id, const void *payload, size_t len,
                               void *cookie) {
    uint32_t lane = conn->nlanes > 1 ? 1 + id % (uint32_t)(conn->nlanes - 1) : 0;
    struct hr_msg msg = {.hdr = h, .hdr_len = sizeof *h, .payload = payload, .len = len, .cookie = cookie};
    return conn_post_by(conn, &conn->lanes[lane], h, &msg);
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

/* Half of it has gathered, or as much as the peer has left: it may be waiting for just that. */
static int conn_credit_due(struct hr_conn *conn) {
    uint64_t max = hr_credit_max(conn), left = max > conn->held ? max - conn->held : 0;
    return conn->owed_credit && (conn->owed_credit >= max / 2 || conn->owed_credit >= left);
}

int hr_conn_charge(struct hr_conn *conn, uint64_t cost) {
    conn->held += cost;
    if (conn->held > hr_credit_max(conn) + HR_EAGER_COST) {
        hr_conn_lost(conn, HR_ERR_PROTOCOL, "the peer sent more than its credit allows");
        return 0;
    }
    hr_conn_owe(conn, 0, 0);
    return 1;
}

static void conn_tell(struct hr_conn *conn) {
    struct hr_hdr h = {.kind = HR_MSG_CREDIT};
    if (hr_list_empty(&conn->ctl))
        hr_conn_send_ctl(conn, &h, sizeof h);
    else
        hr_conn_activate(conn); /* something else will carry it */
}

void hr_conn_owe(struct hr_conn *conn, uint32_t credit, uint32_t ack) {
    conn->owed_credit += credit;
    if (conn->caps->window && ack >= HR_BULK_MIN) {
        conn->owed_ack += ack;
        conn->rx_bulk += ack;
        conn->engine->rx_bulk += ack;
    }
    if (conn->state != HR_CONN_UP) return;
    if (conn_credit_due(conn) || conn->owed_ack >= conn->ack_every)
        conn_tell(conn);
    else if (conn->owed_ack >= ACK_EVERY && hr_list_empty(&conn->owing))
        hr_list_push(&conn->engine->owing, &conn->owing);
}

/* Before going to sleep: what has come is then known to have come, and the peer's clocks stop. */
void hr_conns_acknowledge(struct hr_engine *engine) {
    struct hr_link *l;
    while ((l = hr_list_pop(&engine->owing))) {
        struct hr_conn *conn = hr_container(l, struct hr_conn, owing);
        if (conn->state == HR_CONN_UP && conn->owed_ack >= ACK_EVERY) conn_tell(conn);
    }
}

static uint32_t ack_bounds(uint64_t every) {
    return every < ACK_EVERY ? ACK_EVERY : every > ACK_MOST ? ACK_MOST : (uint32_t)every;
}

/* A quarter of the window: a sender that fills it has heard of the rest before it has to stop, and to one that sends
 * less nothing is said but by messages that go there anyway. Where ranks share cores the peer says nothing before it
 * has its turn, and then has three quarters to say. */
static uint32_t conn_ack_share(struct hr_conn *conn) {
    uint64_t quarter = conn->window / 4;
    return conn->caps->window ? ack_bounds(conn->engine->yield ? 3 * quarter : quarter) : 0;
}

void hr_conn_asked(struct hr_conn *conn, uint32_t every) {
    if (every) conn->ack_every = ack_bounds(every);
}

void hr_conn_ask_sooner(struct hr_conn *conn) {
    struct hr_hdr h = {.kind = HR_MSG_CREDIT};
    if (!conn->caps->window || conn->asked_every <= conn->window) return;
    h.rreq = conn->asked_every = conn_ack_share(conn);
    hr_conn_send_ctl(conn, &h, sizeof h);
}

/* --- headers of messages --------------------------------------------------------------------------------------------
 */

/* A quarter of the credit is for headers alone: when the peer holds much that it has not asked for yet, messages
 * announce themselves instead of coming along, so that the one it does wait for still gets through. */
int hr_conn_may_hold(const struct hr_conn *conn, uint64_t len) {
    return conn->credit >= HR_EAGER_COST + (int64_t)(len + hr_credit_max(conn) / 4);
}

static int conn_eager(struct hr_conn *conn, const struct hr_request *req) {
    const struct hr_caps *caps = conn->caps;
    struct hr_arena_info info;
    uint64_t len = req->len, mapped = req->flags & HR_REQ_SAME ? caps->eager_same : caps->eager_mapped;
    uint64_t most = req->flags & HR_REQ_CHANGED && caps->flags & HR_CAP_RELAYS ? caps->max_send : caps->eager_max;
    if (len > most || !hr_window_fits(conn, len)) return 0;
    uint32_t open = hr_xfer_opens(conn, req);
    if (open && (open != HR_ACCESS_REMOTE_PUT || hr_read_puts(conn, len))) return 0;
    if (conn->engine->yield && caps->eager_loose && len > caps->eager_loose && !(req->flags & HR_REQ_PACED)) return 0;
    if (caps->flags & HR_CAP_MAP && len > mapped && !(req->flags & HR_REQ_STAGED) &&
        hr_arena_find(req->buf, len, &info))
        return 0;
    return len <= HR_EAGER_COST || hr_conn_may_hold(conn, len);
}

static struct hr_hdr header_of(struct hr_conn *conn, struct hr_request *req, uint8_t kind) {
    struct hr_hdr h = {.kind = kind,
                       .bucket = req->rflags,
                       .order = conn->order_tx[req->rflags],
                       .comm = req->comm->id,
                       .tag = req->tag,
                       .aux = req->sig,
                       .rreq = conn_ack_share(conn)};
    if (h.rreq > conn->asked_every) conn->asked_every = h.rreq; /* less may be withdrawn with its message */
    if (req->flags & HR_REQ_OPEN) h.flags = hr_read_says(conn, req->len);
    if (req->flags & HR_REQ_WOULD) h.flags |= HR_HDR_WOULD;
    return h;
}

static hr_status send_eager(struct hr_conn *conn, struct hr_request *req, void (*fill)(void *, void *), void *cookie) {
    struct hr_hdr h = header_of(conn, req, HR_MSG_EAGER);
    struct hr_msg msg = {
        .hdr = &h, .hdr_len = sizeof h, .payload = req->buf, .len = req->len, .cookie = cookie, .fill = fill};
    if (req->flags & HR_REQ_SAME && !fill) msg.same = hr_run_same(req);
    hr_status status = conn_post_by(conn, conn->lanes, &h, &msg);
    if (hr_is_error(status) || status == HR_AGAIN) return status;
    conn->order_tx[req->rflags]++;
    conn->credit -= HR_EAGER_COST + (int64_t)req->len;
    hr_window_sent(conn, req->len);
    HR_COUNT(conn->engine, eager);
    return status;
}

static hr_status send_header(struct hr_conn *conn, struct hr_request *req) {
    if (conn_eager(conn, req)) return send_eager(conn, req, NULL, req);
    struct hr_hdr_long m = {.h = header_of(conn, req, HR_MSG_RTS), .size = req->len};
    hr_status status = hr_xfer_offer(conn, req, &m);
    if (status != HR_OK) return status;
    uint32_t head = hr_xfer_head(req->xfer);
    status = hr_conn_post(conn, &m.h, sizeof m, req->buf, head, NULL);
    if (status == HR_AGAIN && head) status = hr_conn_post(conn, &m.h, sizeof m, NULL, head = 0, NULL);
    if (status == HR_AGAIN || hr_is_error(status)) {
        hr_xfer_free(conn->engine, req->xfer);
        return status;
    }
    req->xfer->head = head;
    conn->reading.heads += head != 0;
    conn->order_tx[req->rflags]++;
    conn->credit -= HR_EAGER_COST + (int64_t)head;
    return HR_INPROGRESS;
}

/* An announcement is gone, with what went along; a message is the provider's, and its place in the order is kept. */
static void conn_taken(struct hr_conn *conn, struct hr_request *req) {
    if (req->xfer) return;
    req->queued = HR_QUEUED_PROVIDER;
    req->index = conn->order_tx[req->rflags] - 1;
}

static int conn_may_send(struct hr_conn *conn, int priority) {
    if (conn->credit < HR_EAGER_COST) return 0;
    return priority < HR_PRIORITY_DEFAULT || hr_window_open(conn);
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

static int nothing_in_the_way(struct hr_conn *conn, const struct hr_request *req) {
    return conn->state == HR_CONN_UP && hr_list_empty(&conn->ctl) &&
           (!conn->nqueued || (!conn->bucket_queued[req->rflags] && !conn_more_urgent_waits(conn, req->priority))) &&
           conn_may_send(conn, req->priority);
}

int hr_conn_send_made(struct hr_conn *conn, struct hr_request *req, void (*fill)(void *, void *), void *cookie) {
    return nothing_in_the_way(conn, req) && conn->caps->flags & HR_CAP_FILLS && conn_eager(conn, req) &&
           send_eager(conn, req, fill, cookie) == HR_OK;
}

/* Sends the header now if nothing is in the way; queues it otherwise. HR_OK: the request may be finished. */
hr_status hr_conn_send(struct hr_conn *conn, struct hr_request *req) {
    hr_status status = HR_AGAIN;
    if (req->priority != conn->priority) hr_window_mixed(conn, req->priority);
    if (nothing_in_the_way(conn, req)) status = send_header(conn, req);
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
    hr_window_sent(conn, nbytes);
    return status;
}

/* Sends what may go, in order, until there is no room; or, returning 1, until somebody waits for the lock: with
 * something more urgent, perhaps. */
int hr_conn_pump(struct hr_conn *conn) {
    while (conn->state == HR_CONN_UP && !hr_list_empty(&conn->ctl)) {
        struct hr_ctl *ctl = hr_container(conn->ctl.next, struct hr_ctl, link);
        hr_status status = hr_conn_post(conn, &ctl->hdr.h, ctl->len, NULL, 0, NULL);
        if (status == HR_AGAIN) return 0;
        hr_list_remove(&ctl->link);
        conn->nctl--;
        free(ctl);
    }
    for (int p = 0; p < HR_PRIORITIES; p++) {
        while (conn->state == HR_CONN_UP) {
            if (conn->sendq[p] && conn_may_send(conn, p)) {
                if (conn_send_queued(conn, conn->sendq[p]) == HR_AGAIN) return 0;
            } else if (!hr_list_empty(&conn->bulk[p]) && hr_window_open(conn)) {
                if (conn_send_segment(conn, hr_container(conn->bulk[p].next, struct hr_xfer, work.link)) == HR_AGAIN)
                    return 0;
                if (hr_contended(conn->engine)) return 1;
            } else
                break;
        }
    }
    /* What is left waits for credit or for the window: an arriving header wakes it. A lost one is on another list. */
    if (conn->state != HR_CONN_LOST) hr_list_remove(&conn->active);
    return 0;
}

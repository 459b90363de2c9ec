/* match.c - the order of arrival, posted receives, and messages that came before their receive. */

/*
 * Messages with the same (communicator, tag) from one peer match in the order in which they were posted there, whatever
 * their priority. The sender numbers messages, as they leave, within one of 64 buckets that (communicator, tag) hashes
 * to; the receiver lets a message pass when its bucket's turn has come and keeps it aside otherwise, which happens
 * where one was withdrawn. Messages of other buckets overtake freely.
 *
 * Posted receives and unexpected messages hang in chains by the same hash, in order of posting and of arrival. A
 * receive from any source has no connection set and takes the earliest arrival. Credits bound what can lie here.
 */

#include <stdlib.h>
#include <string.h>

#include "core/engine.h"

#define BREAKS_MAX 1024 /* of communicators not open here, from one peer */

static uint32_t match_chain(uint64_t comm, uint64_t tag) {
    uint64_t x = (comm ^ (tag * 0x9e3779b97f4a7c15ull)) * 0xd6e8feb86659fd93ull;
    return (uint32_t)(x >> 40) % HR_MATCH_CHAINS;
}

uint8_t hr_match_bucket(uint64_t comm, uint64_t tag) { return (uint8_t)(match_chain(comm, tag) % HR_BUCKETS); }

/* Of payload; 0: it is not kept. */
static size_t room_of(uint32_t kept) { return kept ? HR_SPARE_ROOM << (kept - 1) : 0; }

/*
 * Long ones are kept when they are free again: malloc would give their pages back to the system, and the next would be
 * made of new ones, which takes several times as long as to copy the message.
 */
static struct hr_umsg *umsg_alloc(struct hr_engine *engine, size_t len) {
    uint32_t kept = len >= HR_SPARE_MIN;
    while (kept && room_of(kept) < len) kept = kept < HR_SPARES ? kept + 1 : 0;
    struct hr_link *l = kept ? hr_list_pop(&engine->spare[kept - 1]) : NULL;
    struct hr_umsg *u = l ? hr_container(l, struct hr_umsg, link) : malloc(sizeof *u + (kept ? room_of(kept) : len));
    if (l) engine->spare_bytes -= room_of(kept);
    if (u) u->kept = kept;
    return u;
}

/* Of one length, until there is so much room for another: what was last in demand stays. */
static void spares_drop(struct hr_engine *engine, uint32_t k, size_t room) {
    while (!hr_list_empty(&engine->spare[k]) && engine->spare_bytes + room > HR_SPARE_MOST) {
        struct hr_link *last = engine->spare[k].prev;
        hr_list_remove(last);
        free(hr_container(last, struct hr_umsg, link));
        engine->spare_bytes -= HR_SPARE_ROOM << k;
    }
}

static void umsg_free(struct hr_umsg *u) {
    if (!u) return;
    struct hr_engine *engine = u->conn->engine;
    size_t room = room_of(u->kept);
    hr_list_remove(&u->stray);
    for (uint32_t k = 0; room && k < HR_SPARES && engine->spare_bytes + room > HR_SPARE_MOST; k++)
        if (k != u->kept - 1) spares_drop(engine, k, room);
    if (!room || engine->spare_bytes + room > HR_SPARE_MOST) {
        free(u);
        return;
    }
    engine->spare_bytes += room;
    hr_list_push(engine->spare[u->kept - 1].next, &u->link); /* first: the caches have it */
}

/* --- posted receives
 * -------------------------------------------------------------------------------------------------- */

static void posted_remove(struct hr_engine *engine, struct hr_request *req) {
    struct hr_request **head = &engine->posted[match_chain(req->comm->id, req->tag)];
    if (req->mnext == req)
        *head = NULL;
    else {
        req->mprev->mnext = req->mnext;
        req->mnext->mprev = req->mprev;
        if (*head == req) *head = req->mnext;
    }
    req->queued = HR_QUEUED_NO;
}

void hr_match_unpost(struct hr_engine *engine, struct hr_request *req) { posted_remove(engine, req); }

/* The message has its receive. */
static void match_start(struct hr_request *req, struct hr_conn *conn, const struct hr_hdr_long *m, const void *payload,
                        size_t len) {
    struct hr_engine *engine = conn->engine;
    const struct hr_hdr *h = &m->h;
    req->peer = hr_comm_rank_of(req->comm, conn);
    req->conn = conn;
    hr_conn_owe(conn, HR_EAGER_COST + (uint32_t)len, 0);
    /* within a collective both sides know the length */
    uint64_t size = h->kind == HR_MSG_RTS ? m->size : len;
    if (h->flags & HR_HDR_SAYS) hr_read_told(conn, size, h->flags);
    if (req->flags & HR_REQ_WOULD && !(h->flags & HR_HDR_WOULD)) hr_run_unheard(req);
    if (h->aux != req->sig || (req->then && size != req->len)) {
        if (h->kind == HR_MSG_RTS) {
            struct hr_hdr fin = {.kind = HR_MSG_FIN, .status = HR_ERR_MISMATCH, .comm = h->comm, .rreq = h->sreq};
            hr_conn_send_ctl(conn, &fin, sizeof fin);
        }
        hr_fail(engine, req, HR_ERR_MISMATCH, req->peer, HR_PHASE_MATCH, conn);
    } else if (h->kind == HR_MSG_RTS) {
        hr_xfer_accept(req, conn, m, payload, len);
    } else if (len > req->len) {
        req->nbytes = len;
        hr_fail(engine, req, HR_ERR_TRUNCATED, req->peer, HR_PHASE_MATCH, conn);
    } else {
        hr_read_unasked(req, payload, len);
        req->nbytes = len;
        hr_finish(engine, req, HR_OK);
    }
}

/* Only members may send to a communicator. */
static int match_fits(struct hr_request *req, struct hr_conn *conn, const struct hr_hdr *h) {
    return req->comm->id == h->comm && req->tag == h->tag &&
           (req->conn ? req->conn == conn : hr_comm_rank_of(req->comm, conn) >= 0);
}

/* Receives wait in the order of posting, which index holds. */
static int post(struct hr_engine *engine, struct hr_request *req) {
    uint32_t chain = match_chain(req->comm->id, req->tag);
    for (struct hr_link *l = engine->unexpected[chain].next; l != &engine->unexpected[chain]; l = l->next) {
        struct hr_umsg *u = hr_container(l, struct hr_umsg, link);
        if (u->hdr.h.kind == HR_MSG_BREAK || !match_fits(req, u->conn, &u->hdr.h)) continue;
        hr_list_remove(l);
        match_start(req, u->conn, &u->hdr, u->payload, u->len);
        umsg_free(u);
        return 0;
    }
    struct hr_request **head = &engine->posted[chain], *at = *head;
    if (at) {
        if ((int32_t)(at->mprev->index - req->index) > 0) /* posted again */
            while ((int32_t)(at->index - req->index) < 0) at = at->mnext;
        req->mnext = at;
        req->mprev = at->mprev;
        req->mprev->mnext = req;
        at->mprev = req;
        if ((int32_t)((*head)->index - req->index) > 0) *head = req;
    } else {
        req->mnext = req->mprev = req;
        *head = req;
    }
    req->queued = HR_QUEUED_POSTED;
    return 1;
}

int hr_match_post(struct hr_engine *engine, struct hr_request *req) {
    req->index = engine->nposted++;
    return post(engine, req);
}

void hr_match_again(struct hr_engine *engine, struct hr_request *req) {
    if (req->rflags & HR_RECV_ANY) req->conn = NULL;
    req->peer = -1;
    post(engine, req);
}

/* --- arrivals
 * ---------------------------------------------------------------------------------------------------------- */

static struct hr_umsg *umsg_new(struct hr_conn *conn, const struct hr_hdr *h, const void *payload, size_t len) {
    struct hr_umsg *u = umsg_alloc(conn->engine, len);
    if (!u) {
        hr_conn_lost(conn, HR_ERR_NOMEM, "no memory for an unexpected message");
        return NULL;
    }
    u->conn = conn;
    u->len = (uint32_t)len;
    hr_list_init(&u->stray);
    memcpy(&u->hdr, h, h->kind == HR_MSG_RTS ? sizeof u->hdr : sizeof *h);
    if (len) hr_copy(u->payload, payload, len, HR_STORE_CACHED);
    return u;
}

/* Its turn has come. u: the stored copy when it had waited, else NULL. */
static void match_deliver(struct hr_conn *conn, const struct hr_hdr *h, const void *payload, size_t len,
                          struct hr_umsg *u) {
    struct hr_engine *engine = conn->engine;
    uint32_t chain = match_chain(h->comm, h->tag);
    struct hr_request *first = engine->posted[chain], *req = first;
    if (first) do {
            if (match_fits(req, conn, h)) {
                posted_remove(engine, req);
                /* RTS headers arrive as hr_hdr_long, EAGER ones are read as far as struct hr_hdr */
                match_start(req, conn, (const struct hr_hdr_long *)h, payload, len);
                umsg_free(u);
                return;
            }
            req = req->mnext;
        } while (req != first);
    if (hr_comm_retired(engine, h->comm)) { /* a frame of an epoch that is over */
        HR_COUNT(engine, stale);
        hr_conn_owe(conn, HR_EAGER_COST + (uint32_t)len, 0);
        if (h->kind == HR_MSG_RTS) {
            struct hr_hdr fin = {.kind = HR_MSG_FIN, .status = HR_ERR_BROKEN, .comm = h->comm, .rreq = h->sreq};
            hr_conn_send_ctl(conn, &fin, sizeof fin);
        }
        umsg_free(u);
        return;
    }
    struct hr_comm *comm = h->tag & HR_COLL_TAG ? hr_comm_find(engine, h->comm) : NULL;
    if (comm && hr_comm_rank_of(comm, conn) < 0) {
        hr_conn_lost(conn, HR_ERR_PROTOCOL, "a collective of a communicator that it is no member of");
        umsg_free(u);
        return;
    }
    if (comm && HR_COLL_SEQ(h->tag) < comm->run_seq && !hr_run_active(comm, HR_COLL_SEQ(h->tag))) {
        umsg_free(u);
        hr_conn_owe(conn, HR_EAGER_COST + (uint32_t)len, 0);
        hr_match_strayed(comm, conn);
        return;
    }
    if (!u) u = umsg_new(conn, h, payload, len);
    if (!u) return;
    HR_COUNT(engine, unexpected);
    if (comm) hr_list_push(&comm->strays, &u->stray);
    hr_list_push(&engine->unexpected[chain], &u->link);
}

/* A finished collective had all the messages that it wanted: one more means that a rank ran something else. */
void hr_match_strayed(struct hr_comm *comm, struct hr_conn *conn) {
    hr_comm_break_locked(comm, HR_ERR_MISMATCH, hr_comm_rank_of(comm, conn), HR_PHASE_MATCH, conn->provider->name,
                         "a message that its collective here does not expect", 1);
}

struct hr_conn *hr_match_stray(struct hr_comm *comm, uint64_t seq) {
    for (struct hr_link *l = comm->strays.next; l != &comm->strays; l = l->next) {
        struct hr_umsg *u = hr_container(l, struct hr_umsg, stray);
        if (HR_COLL_SEQ(u->hdr.h.tag) == seq) return u->conn;
    }
    return NULL;
}

/* The place stays empty. */
static void match_skipped(struct hr_conn *conn, const struct hr_hdr *h) {
    hr_conn_owe(conn, HR_EAGER_COST + (uint32_t)h->aux, 0);
}

/* Whether the message in whose place this SKIP stands has come. */
static int match_has_come(struct hr_conn *conn, const struct hr_hdr *skip) {
    if ((int32_t)(skip->order - conn->order_rx[skip->bucket]) < 0) return 1;
    struct hr_link *head = &conn->early[skip->bucket];
    for (struct hr_link *l = head->prev; l != head; l = l->prev) { /* in order: what comes now is mostly the last */
        int32_t ahead = (int32_t)(hr_container(l, struct hr_umsg, link)->hdr.h.order - skip->order);
        if (ahead <= 0) return ahead == 0;
    }
    return 0;
}

static void match_out_of_order(struct hr_conn *conn) { hr_conn_lost(conn, HR_ERR_PROTOCOL, "a message out of order"); }

static void match_keep(struct hr_conn *conn, struct hr_umsg *u) {
    struct hr_link *head = &conn->early[u->hdr.h.bucket], *l = head->prev;
    while (l != head && (int32_t)(hr_container(l, struct hr_umsg, link)->hdr.h.order - u->hdr.h.order) > 0) l = l->prev;
    hr_list_push(l->next, &u->link);
}

/* Messages that had come too early and whose turn it is now. */
static void match_release(struct hr_conn *conn, uint8_t bucket) {
    struct hr_link *head = &conn->early[bucket];
    while (!hr_list_empty(head) && conn->state != HR_CONN_LOST) {
        struct hr_umsg *u = hr_container(head->next, struct hr_umsg, link);
        int32_t ahead = (int32_t)(u->hdr.h.order - conn->order_rx[bucket]);
        if (ahead > 0) return;
        if (ahead < 0) { /* twice */
            match_out_of_order(conn);
            return;
        }
        hr_list_remove(&u->link);
        conn->order_rx[bucket]++;
        if (u->hdr.h.kind == HR_MSG_SKIP) {
            match_skipped(conn, &u->hdr.h);
            umsg_free(u);
        } else {
            match_deliver(conn, &u->hdr.h, u->payload, u->len, u);
        }
    }
}

static void match_turn(struct hr_conn *conn, const struct hr_hdr *h, const void *payload, size_t len) {
    uint8_t bucket = h->bucket;
    if (bucket >= HR_BUCKETS || (int32_t)(h->order - conn->order_rx[bucket]) < 0) {
        match_out_of_order(conn);
        return;
    }
    if (h->order != conn->order_rx[bucket]) {
        struct hr_umsg *u = umsg_new(conn, h, payload, len);
        if (u) match_keep(conn, u);
        return;
    }
    conn->order_rx[bucket]++;
    if (h->kind == HR_MSG_SKIP)
        match_skipped(conn, h);
    else
        match_deliver(conn, h, payload, len, NULL);
    if (!hr_list_empty(&conn->early[bucket])) match_release(conn, bucket);
}

void hr_match_arrived(struct hr_conn *conn, const struct hr_hdr *h, const void *payload, size_t len) {
    if (!hr_conn_charge(conn, HR_EAGER_COST + len)) return;
    if (len) hr_conn_owe(conn, 0, (uint32_t)len);
    match_turn(conn, h, payload, len);
}

void hr_match_skip(struct hr_conn *conn, const struct hr_hdr *h) {
    if (h->bucket >= HR_BUCKETS || h->aux > UINT32_MAX)
        match_out_of_order(conn);
    else if (!match_has_come(conn, h) && hr_conn_charge(conn, HR_EAGER_COST + h->aux)) {
        hr_conn_owe(conn, 0, (uint32_t)h->aux); /* now, as of a message: a probe may come before its turn */
        match_turn(conn, h, NULL, 0);
    }
}

/* The sender withdrew a rendezvous that nobody had matched: a recent one, as a rule. */
static int match_cancel_list(struct hr_link *head, struct hr_conn *conn, uint32_t sreq, int early) {
    for (struct hr_link *l = head->prev; l != head; l = l->prev) {
        struct hr_umsg *u = hr_container(l, struct hr_umsg, link);
        if (u->conn != conn || u->hdr.h.kind != HR_MSG_RTS || u->hdr.h.sreq != sreq) continue;
        if (early) { /* keeps its place in the order, and its cost until then */
            u->hdr.h.kind = HR_MSG_SKIP;
            u->hdr.h.aux = u->len;
        } else {
            hr_list_remove(l);
            hr_conn_owe(conn, HR_EAGER_COST + u->len, 0);
            umsg_free(u);
        }
        return 1;
    }
    return 0;
}

void hr_match_cancel(struct hr_conn *conn, uint32_t sreq, uint64_t comm, uint64_t tag) {
    if (!match_cancel_list(&conn->early[hr_match_bucket(comm, tag)], conn, sreq, 1))
        match_cancel_list(&conn->engine->unexpected[match_chain(comm, tag)], conn, sreq, 0);
}

/* --- communicators that broke before they were opened here
 * ------------------------------------------------------------- */

void hr_match_keep_break(struct hr_conn *conn, const struct hr_hdr *h) {
    struct hr_umsg *u = conn->nbreaks < BREAKS_MAX ? umsg_new(conn, h, NULL, 0) : NULL;
    if (!u) return;
    conn->nbreaks++;
    hr_list_push(&conn->engine->unexpected[match_chain(h->comm, 0)], &u->link);
}

void hr_match_take_break(struct hr_comm *comm) {
    struct hr_link *head = &comm->engine->unexpected[match_chain(comm->id, 0)];
    for (struct hr_link *l = head->next; l != head; l = l->next) {
        struct hr_umsg *u = hr_container(l, struct hr_umsg, link);
        if (u->hdr.h.kind != HR_MSG_BREAK || u->hdr.h.comm != comm->id) continue;
        hr_list_remove(l);
        u->conn->nbreaks--;
        hr_comm_on_break(comm, u->conn, &u->hdr.h);
        umsg_free(u);
        return;
    }
}

static void match_purge(struct hr_engine *engine, uint64_t comm_id, struct hr_conn *conn) {
    for (int i = 0; i < HR_MATCH_CHAINS; i++) {
        struct hr_link *head = &engine->unexpected[i];
        for (struct hr_link *l = head->next, *next; l != head; l = next) {
            struct hr_umsg *u = hr_container(l, struct hr_umsg, link);
            next = l->next;
            if (conn ? u->conn != conn : u->hdr.h.comm != comm_id) continue;
            hr_list_remove(l);
            if (u->hdr.h.kind == HR_MSG_BREAK) {
                u->conn->nbreaks--;
            } else if (!conn) {
                hr_conn_owe(u->conn, HR_EAGER_COST + u->len, 0);
                if (u->hdr.h.kind == HR_MSG_RTS) {
                    struct hr_hdr fin = {
                        .kind = HR_MSG_FIN, .status = HR_ERR_BROKEN, .comm = comm_id, .rreq = u->hdr.h.sreq};
                    hr_conn_send_ctl(u->conn, &fin, sizeof fin);
                }
            }
            umsg_free(u);
        }
    }
}

void hr_match_purge_comm(struct hr_engine *engine, uint64_t comm_id) { match_purge(engine, comm_id, NULL); }
void hr_match_purge_conn(struct hr_engine *engine, struct hr_conn *conn) {
    match_purge(engine, 0, conn);
    hr_match_forget(conn);
}

void hr_match_forget(struct hr_conn *conn) {
    struct hr_link *l;
    for (int b = 0; b < HR_BUCKETS; b++)
        while ((l = hr_list_pop(&conn->early[b]))) free(hr_container(l, struct hr_umsg, link));
}

void hr_match_close(struct hr_engine *engine) {
    struct hr_link *l;
    for (int i = 0; i < HR_MATCH_CHAINS; i++)
        while ((l = hr_list_pop(&engine->unexpected[i]))) free(hr_container(l, struct hr_umsg, link));
    for (int k = 0; k < HR_SPARES; k++)
        while ((l = hr_list_pop(&engine->spare[k]))) free(hr_container(l, struct hr_umsg, link));
}

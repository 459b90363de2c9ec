/* reading.c - memory that nobody has mapped, read by calls of the provider: when, and how it is reduced. */

/*
 * What is reduced is read into a scratch, piece by piece, and each piece is reduced while the cache has it: by
 * RECV_REDUCE here, by REDUCE of what was borrowed in compute.c. So memory is gone through once, where what was
 * received whole into other memory would be gone through three times.
 */

#include <stdlib.h>

#include "core/engine.h"

#define TIMED 4               /* one of so many pieces that are sent is */
#define BUSY_MIN (256u << 10) /* a send that keeps this side's processor busy */
#define LENT_MIN (1u << 20)   /* what is shorter is not read in pieces: the cache has it still when it is reduced */

static int reduces(const struct hr_xfer *x) { return (x->req->rflags & HR_RECV_REDUCE) != 0; }

int hr_read_returns(const struct hr_xfer *x, uint8_t flags) {
    return flags & HR_HDR_OPEN && x->req->rflags & HR_RECV_RETURN && x->conn->peer_ledger.out != NULL;
}

static int puttable(const struct hr_xfer *x, uint8_t flags) { return x->rmem.puts && hr_read_returns(x, flags); }

static int lends(const struct hr_xfer *x, uint8_t flags) {
    return x->req->rflags & HR_RECV_BORROW && (x->len >= LENT_MIN || puttable(x, flags));
}

static struct hr_relay *relay_of(struct hr_xfer *x) { return &x->conn->reading.relay[x->relay - 1]; }

/* Where work counts, here or for the peer that leads: the clock, before and after it. */
static int64_t begin(const struct hr_xfer *x) { return x->both ? hr_now() : 0; }

static void end(struct hr_xfer *x, int64_t since) {
    if (x->both) x->busy += hr_now() - since;
}

/* One that the connection has, or another, which it keeps then: as many as transfers have been under way at once. */
static int take_scratch(struct hr_xfer *x) {
    void **kept = x->conn->reading.scratch;
    x->scratch = kept ? (char *)kept : malloc(HR_SCRATCH);
    if (kept) x->conn->reading.scratch = *kept;
    return x->scratch != NULL;
}

void hr_reading_close(struct hr_reading *reading) {
    while (reading->scratch) {
        void **kept = reading->scratch;
        reading->scratch = *kept;
        free(kept);
    }
}

/* Whether this side sends something long there meanwhile. In a collective it may be about to: what it is to send may be
 * made of what it receives now. */
static int sends(const struct hr_xfer *x) {
    struct hr_conn *conn = x->conn;
    const struct hr_engine *engine = conn->engine;
    if (x->len >= BUSY_MIN && ++conn->reading.unanswered <= 2 && x->req->then) return 1;
    for (uint32_t i = 0; i < engine->nxfers; i++) {
        const struct hr_xfer *y = engine->xfers[i];
        if (y->conn == conn && y->mode >= HR_XFER_SEND && y->mode <= HR_XFER_SEND_SEG && y->len >= BUSY_MIN) return 1;
    }
    return 0;
}

/* Where both send, one of them chooses for both: what one measures depends on what the other does. */
static int leads(const struct hr_conn *conn) { return conn->engine->config.self_id < conn->peer_id; }

uint8_t hr_read_flags(struct hr_conn *conn, uint64_t len) {
    if (len >= BUSY_MIN) conn->reading.unanswered = 0;
    struct hr_relay *copied = &conn->reading.relay[HR_RELAY_BOTH + hr_relay_class(len)];
    if (!(conn->caps->flags & HR_CAP_RELAYS) || !leads(conn)) return 0;
    int64_t now = hr_now();
    unsigned flags = 0;
    for (int made = 0; made < HR_RELAY_MADE - 1; made++)
        if (hr_relay_next(copied + made * HR_RELAY_LENGTHS, now) == HR_READ) flags |= HR_HDR_READ << made;
    return (uint8_t)flags;
}

/* Of what is so long, and whose result is put back if that is faster. */
static struct hr_relay *put_relay(struct hr_conn *conn, uint64_t len) {
    return &conn->reading.relay[HR_RELAYS - HR_RELAY_LENGTHS + hr_relay_class(len)];
}

/* Whether there are two ways, and this side chooses: unless who leads has said what it found. */
static int chooses_puts(const struct hr_conn *conn, uint64_t len) {
    return len >= HR_PUT_MIN && conn->lanes[0].ep->puts && conn->caps->flags & HR_CAP_RELAYS &&
           (leads(conn) || !conn->reading.told[hr_relay_class(len)]);
}

int hr_read_puts(struct hr_conn *conn, uint64_t len) {
    if (chooses_puts(conn, len)) return hr_relay_next(put_relay(conn, len), hr_now()) == HR_READ;
    return !(conn->caps->flags & HR_CAP_RELAYS) || conn->reading.told[hr_relay_class(len)] & HR_HDR_PUT;
}

uint8_t hr_read_says(struct hr_conn *conn, uint64_t len) {
    const struct hr_relay *relay = put_relay(conn, len);
    if (!leads(conn) || !chooses_puts(conn, len) || !(relay->cost[HR_RELAYED] || relay->cost[HR_READ])) return 0;
    return hr_read_puts(conn, len) ? HR_HDR_SAYS | HR_HDR_PUT : HR_HDR_SAYS;
}

void hr_read_told(struct hr_conn *conn, uint64_t len, uint8_t flags) {
    conn->reading.told[hr_relay_class(len)] = flags & (HR_HDR_SAYS | HR_HDR_PUT);
}

void hr_read_unasked(struct hr_request *req, const void *data, size_t len) {
    struct hr_conn *conn = req->conn;
    int counts = req->rflags & HR_RECV_RETURN && chooses_puts(conn, len);
    int64_t since = counts ? hr_now() : 0;
    if (counts) counts = hr_relay_next(put_relay(conn, len), since) == HR_RELAYED; /* else it is late */
    if (counts) hr_relay_begin(put_relay(conn, len), since);
    int fused = hr_consume(req, data, 0, len);
    if (!counts) return;
    int64_t now = hr_now();
    double ns = (double)(now - since) / (double)len;
    put_relay(conn, len)->busy += now - since;
    /* the operand is copied and summed, the result copied twice: this side has had one of four; fused, one and a half
     * of three and a half */
    struct hr_relay_work work = {.copying = fused ? ns * 4 / 3 : 0, .messages = fused ? 1 : 2};
    hr_relay_end(put_relay(conn, len), HR_RELAYED, len, now, &work);
}

/* Whether messages are not faster, and the transfer is one of those from which that is known: x->relay. */
static int is_faster(struct hr_xfer *x, uint8_t flags) {
    int back = puttable(x, flags), both = sends(x) || back, made = back ? HR_RELAY_MADE - 1 : reduces(x),
        kind = hr_relay_class(x->len) + made * HR_RELAY_LENGTHS + (both ? HR_RELAY_BOTH : 0);
    struct hr_relay *relay = &x->conn->reading.relay[kind];
    int64_t now = hr_now();
    x->both = (uint8_t)(both ? made + 1 : 0);
    if (reduces(x) && !back && (!both || x->len < LENT_MIN)) return 0;
    if (back && !chooses_puts(x->conn, x->len)) return hr_read_puts(x->conn, x->len);
    if (both && !back && !leads(x->conn)) return flags & HR_HDR_READ << made;
    if (!back && lends(x, flags) && hr_relay_next(relay, now) == HR_READ && !relay->trial)
        return 1; /* its end says little of reading */
    x->relay = (uint8_t)(kind + 1);
    return hr_relay_begin(relay, now) == HR_READ;
}

int hr_read_chosen(struct hr_xfer *x, uint8_t flags) {
    if (x->conn->caps->flags & HR_CAP_RELAYS && !is_faster(x, flags)) return 0;
    if (!reduces(x) && (!lends(x, flags) || (x->relay && !puttable(x, flags)))) return 1;
    x->req->rflags &= (uint8_t)~HR_RECV_NT;
    if (x->len >= HR_READ_LONG) x->req->rflags |= HR_RECV_NT; /* in place: that is in several pages side by side */
    return take_scratch(x);
}

static hr_status read_to(struct hr_xfer *x, char *to, uint64_t offset, uint64_t len) {
    struct hr_ep *ep = x->conn->lanes[0].ep;
    struct hr_rma rma = {.local = to, .len = len, .remote = &x->rmem, .offset = offset, .cookie = HR_XFER_COOKIE(x)};
    int64_t since = begin(x);
    hr_status status = ep->domain->ops->post_read(ep, &rma);
    if (status == HR_OK) end(x, since);
    return status;
}

static int may(void *x) { return hr_ledger_hold(x); }

/* Where it cannot be written to, the result is a message after all. */
int hr_read_put(struct hr_xfer *x, const void *result, uint64_t offset, uint64_t len) {
    struct hr_ep *ep = x->conn->lanes[0].ep;
    struct hr_rma rma = {.local = (void *)(uintptr_t)result, .len = len, .remote = &x->rmem, .offset = offset};
    int64_t since = begin(x);
    hr_status status = ep->domain->ops->post_put(ep, &rma, may, x);
    hr_ledger_let_go(x);
    end(x, since);
    if (status != HR_OK) x->open = 0;
    return x->open || hr_ledger_stands(x);
}

static hr_status have_read(struct hr_xfer *x, uint64_t len) {
    uint64_t offset = x->completed;
    int64_t since = begin(x);
    if (x->scratch) hr_consume(x->req, x->scratch, offset, len);
    end(x, since);
    x->completed += len;
    return !x->open || hr_read_put(x, x->buf + offset, offset, len) ? HR_OK : HR_ERR_CANCELED;
}

hr_status hr_read_piece(struct hr_xfer *x, uint64_t len) {
    hr_status status = read_to(x, x->scratch ? x->scratch : x->buf + x->posted, x->posted, len);
    if (status == HR_OK) return have_read(x, len);
    if (status == HR_INPROGRESS) x->outstanding++;
    return status;
}

hr_status hr_read_done(struct hr_xfer *x) {
    hr_status status = x->scratch ? have_read(x, x->posted - x->completed) : HR_OK;
    if (x->scratch && status == HR_OK && x->posted < x->len) hr_work_add(x->conn->engine, &x->work, x->req->priority);
    return status;
}

hr_status hr_read_lent(struct hr_xfer *x, uint64_t offset, uint64_t len) {
    if (x->posted == offset) {
        hr_status status = read_to(x, x->scratch, offset, len);
        if (status != HR_OK && status != HR_INPROGRESS) return status;
        x->posted += len;
        if (status == HR_OK) x->completed += len;
        if (status == HR_INPROGRESS) x->outstanding++;
    }
    return x->completed == offset + len ? HR_OK : HR_AGAIN;
}

void hr_read_lent_done(struct hr_xfer *x, hr_status status) {
    struct hr_request *req = x->req;
    if (!hr_is_error(status))
        x->completed = x->posted;
    else if (hr_ledger_stands(x)) /* else the lender has broken it, and says so */
        hr_comm_break_locked(req->comm, status, req->peer, HR_PHASE_TRANSFER, x->conn->provider->name, NULL, 1);
}

void hr_read_arrived(struct hr_xfer *x, const void *data, size_t len) {
    int64_t since = begin(x);
    hr_consume(x->req, data, x->completed, len);
    x->completed += len;
    end(x, since);
}

hr_status hr_read_send(struct hr_xfer *x, struct hr_hdr *h, size_t len) {
    int class = hr_relay_class(x->len), timed = class && x->conn->caps->flags & HR_CAP_RELAYS;
    timed = timed && x->posted / len % TIMED == 0;
    int64_t since = timed ? hr_now() : 0;
    hr_status status = hr_conn_post_segment(x->conn, h, x->id, x->buf + x->posted, len, HR_XFER_COOKIE(x));
    if (status == HR_OK && timed)
        hr_relay_learn(&x->conn->reading.copying[class], (double)(hr_now() - since) / (double)len);
    return status;
}

void hr_read_tells(const struct hr_xfer *x, struct hr_hdr *fin) {
    if (x->both < 2 || !x->busy) return;
    fin->bucket = x->both;
    fin->aux = (uint64_t)x->busy;
}

void hr_read_heard(const struct hr_xfer *x, const struct hr_hdr *fin) {
    if (fin->bucket < 2 || fin->bucket > HR_RELAY_MADE || !x->len) return;
    int kind = HR_RELAY_BOTH + (fin->bucket - 1) * HR_RELAY_LENGTHS + hr_relay_class(x->len);
    x->conn->reading.relay[kind].theirs = (double)fin->aux / (double)x->len;
}

void hr_read_end(struct hr_xfer *x) {
    int way = x->mode == HR_XFER_PULL || x->mode == HR_XFER_LENT ? HR_READ : HR_RELAYED;
    uint64_t bytes = x->shared ? hr_share_bytes(x) : x->completed;
    if (x->relay && x->relay <= HR_RELAY_BOTH) {
        if (bytes > x->begun) bytes -= x->begun / 2; /* of two copies one was made before */
        hr_relay_end(relay_of(x), way, bytes, hr_now(), NULL);
    } else if (x->relay) {
        struct hr_relay_work work = {.copying = x->conn->reading.copying[hr_relay_class(x->len)],
                                     .messages = x->both == HR_RELAY_MADE ? 2 : 1, /* the result is the other */
                                     .both = x->both > 1};
        relay_of(x)->busy += x->busy;
        hr_relay_end(relay_of(x), way, bytes, hr_now(), &work);
    }
    x->relay = 0;
    if (!x->scratch) return;
    void **kept = (void **)(void *)x->scratch;
    *kept = x->conn->reading.scratch;
    x->conn->reading.scratch = kept;
    x->scratch = NULL;
}

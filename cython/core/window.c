/* window.c - the bound on bulk in flight: how much may be on its way to a peer, and how fast that drains. */

/*
 * Bulk (segments, writes, eager payloads) is on its way until the peer's engine has acknowledged it, kernel buffers and
 * network included. Headers say how much is to be acknowledged at a time, a quarter of the window (three where ranks
 * share cores): one who fills it is told before it is full, and one who sends less is told by whatever goes there
 * anyway, or when the peer goes to sleep. (An acknowledgement for each message took a quarter of the time of four ranks
 * on two cores.)
 *
 * What may be is max(64 KiB, (0.5 ms + round trip) x measured rate), so an urgent message has less than a millisecond
 * of bulk ahead of it on its connection, on a path that is no slower than it was measured to be. The bound promised is
 * 2 ms: where processes share a core, the path is two to four times slower for a while. After a burst that met an idle
 * shaper's bucket that is not so for one round, which then takes the burst's place.
 *
 * Writes of which the device says that they have arrived (HR_CAP_CONFIRMS) are on their way until it does: neither
 * end's engine has a part in that, so a peer that is busy holds nothing up.
 *
 * Where the peer sends bulk too, its acknowledgements stand in line behind that, where there is one stream: a part of
 * what is not acknowledged has arrived long ago, and lies ahead of nobody. So as much more may be on its way as came
 * from there meanwhile, up to the same again. (Without this two ranks that exchange by one stream got half of a 100
 * Mbit/s link each, where one that sends gets all.) With several streams acknowledgements do not stand in that line,
 * and the addition is bulk ahead of an urgent message: up to twice as much while both sides send.
 */

#include "core/engine.h"

#define LATENCY_NS 500000.0 /* of bulk ahead of an urgent message, at the measured rate */
#define ROUND_NS 1000000
#define MIXED_NS 1000000000

static void conn_round(struct hr_conn *conn, int64_t now) {
    conn->round_since = now;
    conn->round_bytes = 0;
    conn->round_mark = conn->inflight;
    conn->round_rx = conn->rx_bulk;
    conn->round_rx_all = conn->engine->rx_bulk;
}

/* A probe goes by the first stream and overtakes what lies in the others: what was taken for lost then comes and is
 * acknowledged all the same. Where more has ended than was sent, that much was not lost. */
static void conn_inflight(struct hr_conn *conn) {
    uint64_t ended = conn->tx_bulk_acked + conn->tx_bulk_lost, more = ended > conn->tx_bulk ? ended - conn->tx_bulk : 0;
    conn->tx_bulk_lost -= more < conn->tx_bulk_lost ? more : conn->tx_bulk_lost;
    conn->inflight = (more ? 0 : conn->tx_bulk - ended) + conn->tx_writes;
}

static void conn_sends(struct hr_conn *conn) {
    if (conn->inflight) return;
    conn->busy_since = conn->alone_since = hr_now();
    conn_round(conn, conn->busy_since);
}

/* Both ends count what is at least HR_BULK_MIN: small messages need no clock and no acknowledgement. */
void hr_window_sent(struct hr_conn *conn, uint64_t nbytes) {
    if (!conn->caps->window || nbytes < HR_BULK_MIN) return;
    conn_sends(conn);
    conn->tx_bulk += nbytes;
    conn_inflight(conn);
}

void hr_window_writes(struct hr_conn *conn, uint64_t nbytes) {
    conn_sends(conn);
    conn->tx_writes += nbytes;
    conn_inflight(conn);
}

/*
 * A round lasts until something that was sent after its beginning has been acknowledged, and a millisecond at least, so
 * that it spans a round trip: acknowledgements that come in one go, because they were read late or stood behind the
 * peer's bulk, do not pass for a fast network. A burst that is over sooner is a
 * round too where it filled half the window, timed from its first byte to its last answer. But what is so short may
 * have met an idle shaper's bucket, so it at most doubles the window (before what came from the peer is added).
 */
static void conn_measure(struct hr_conn *conn, int64_t now) {
    int64_t elapsed = now - conn->round_since;
    int burst = !conn->inflight && conn->round_since == conn->busy_since && conn->round_bytes >= conn->window / 2;
    if (conn->round_bytes <= conn->round_mark || (elapsed < ROUND_NS && !burst)) return;
    double rate = (double)conn->round_bytes * 1e9 / (double)(elapsed ? elapsed : 1);
    double most = 2e9 * (double)conn->window / (LATENCY_NS + (double)conn->rtt);
    if (elapsed < ROUND_NS && rate > most) rate = most;
    /* The rate at which the path drains when it drains: lower figures come from a peer that was not running, or from
     * too little to send, so they count slowly. Following them would shrink the window, and with it the next figure. */
    int full = conn->nbulk || conn->nqueued, brief = elapsed < ROUND_NS;
    if (rate > conn->rate || (full && !brief && conn->rate_is_of_burst)) {
        conn->rate = rate;
        conn->rate_is_of_burst = brief;
    } else if (full) {
        conn->rate -= (conn->rate - rate) / 32;
    }
    double window = conn->rate * (LATENCY_NS + (double)conn->rtt) / 1e9;
    uint64_t came = conn->rx_bulk - conn->round_rx;
    conn->window = window > (double)HR_WINDOW_MIN ? (uint64_t)window : HR_WINDOW_MIN;
    conn->window += came < conn->window ? came : conn->window;
    hr_conn_ask_sooner(conn);
    conn_round(conn, now);
}

static void conn_arrived(struct hr_conn *conn, uint64_t nbytes) {
    int64_t now = hr_now();
    conn_inflight(conn);
    conn->round_bytes += nbytes;
    if (conn->alone_since) { /* the first answer since nothing was in flight: the round trip, with as little queue as
                                can be */
        if (!conn->rtt || now - conn->alone_since < conn->rtt) conn->rtt = now - conn->alone_since;
        conn->alone_since = 0;
    }
    conn_measure(conn, now);
    if (!conn->inflight) conn->busy_ns += (uint64_t)(now - conn->busy_since);
    if (conn->nqueued || conn->nbulk) hr_conn_activate(conn);
}

void hr_window_acked(struct hr_conn *conn, uint64_t nbytes) {
    conn->tx_bulk_acked += nbytes;
    conn_arrived(conn, nbytes);
}

void hr_window_wrote(struct hr_conn *conn, uint64_t nbytes) {
    conn->tx_writes -= nbytes;
    conn_arrived(conn, nbytes);
}

void hr_window_forgets(struct hr_conn *conn, uint64_t nbytes) {
    conn->tx_writes -= nbytes;
    conn_inflight(conn);
}

void hr_window_mixed(struct hr_conn *conn, int priority) {
    conn->priority = priority;
    conn->mixed_at = hr_now();
}

/* Somebody waits, so more is sent as soon as there is room; no bulk comes from anybody meanwhile, and nothing has gone
 * there for a while that was more urgent, or less. */
int hr_window_one_way(const struct hr_conn *conn, int priority) {
    const struct hr_engine *engine = conn->engine;
    return engine->driving == 1 && !engine->yield && engine->rx_bulk == conn->round_rx_all &&
           priority == conn->priority && hr_now() - conn->mixed_at > MIXED_NS;
}

/* What a cancelled transfer had on its way may arrive and be acknowledged, or may not. The peer counts what has come:
 * on one stream its answer to a probe leaves behind all that was posted before, so the difference is lost for good. On
 * several it may be too large, until all has been acknowledged (conn_inflight). */
void hr_window_probe(struct hr_conn *conn) {
    struct hr_hdr h = {.kind = HR_MSG_PROBE, .aux = conn->tx_bulk};
    if (conn->caps->window && conn->inflight) hr_conn_send_ctl(conn, &h, sizeof h);
}

void hr_window_probed(struct hr_conn *conn, const struct hr_hdr *probe) {
    struct hr_hdr h = {.kind = HR_MSG_ECHO, .aux = probe->aux - conn->rx_bulk};
    hr_conn_send_ctl(conn, &h, sizeof h);
}

void hr_window_echoed(struct hr_conn *conn, const struct hr_hdr *echo) {
    conn->tx_bulk_lost = echo->aux;
    conn_inflight(conn);
    conn_round(conn, hr_now());
    if (conn->nqueued || conn->nbulk) hr_conn_activate(conn);
}

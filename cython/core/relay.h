/* relay.h - which of two ways an array takes that nobody has mapped: read by this side's kernel, or copied by both
 * sides through messages (HR_CAP_RELAYS).
 *
 * Two copies at once are faster where the cores share a cache, and several times slower where they do not, which a
 * process is not told, and which changes under a virtual machine. So it is measured: periods in which something is on
 * its way go one way or the other, what was faster is taken, and now and then the other way is tried. What fits some
 * cache has times of its own, and so has what is reduced.
 *
 * Where one side sends, what counts is the time that passes. Where both do, the time of each depends on the way of the
 * other, so one chooses for both; and no core is idle, so work counts. Both copy as much through messages, but what the
 * kernel takes depends on the pages of the other side's memory, and the slower of the two lets the other wait: so of
 * sums in place each says what its work was (FIN). (Not of copies: through messages they take half as long again as
 * work says.)
 */
#ifndef HR_CORE_RELAY_H
#define HR_CORE_RELAY_H

#include <stddef.h>
#include <stdint.h>

#include "hr/status.h"

enum { HR_RELAYED, HR_READ, HR_WAYS };
enum { HR_RELAY_LENGTHS = 3, HR_RELAY_MADE = 3 }; /* of it is made: a copy, a sum, a sum that is put back, last */
enum { HR_RELAY_BOTH = HR_RELAY_LENGTHS * HR_RELAY_MADE, HR_RELAYS = 2 * HR_RELAY_BOTH }; /* alone; while both send */

#define HR_RELAY_PERIODS 8                   /* of a trial: caches have to get used to it; but for what is long: */
#define HR_RELAY_ENOUGH ((uint64_t)64 << 20) /* bytes, in two periods at least */
#define HR_RELAY_TRIAL 64                    /* after a trial, so many times as long passes until the next one, */
#define HR_RELAY_AGAIN 8                 /* or so many, if another way was left: its last measurement may be wrong, */
#define HR_RELAY_GAP ((int64_t)10000000) /* and not less than this, in ns */
#define HR_RELAY_PERIOD ((uint64_t)64 << 20) /* bytes, after which a period ends at the latest */

struct hr_relay {          /* what one connection receives, of one class */
    double cost[HR_WAYS];  /* ns for a byte; 0: not tried */
    int way, open, trial;  /* of this period; transfers that have begun and not ended; periods that a trial has left */
    int64_t since, busy;   /* when it began; ns of work in it */
    int best;              /* what was faster when it was last asked, of two that were tried */
    int64_t spent, next;   /* on the last trial, so far; when there may be one again */
    uint64_t bytes, tried; /* in this period, in the trial */
    double theirs;         /* ns for a byte that the peer has read last; 0: not heard since a trial of it began */
};

struct hr_reading { /* of one connection */
    struct hr_relay relay[HR_RELAYS];
    double copying[HR_RELAY_LENGTHS]; /* ns for a byte of a segment that is sent; 0: not known, or short */
    uint8_t told[HR_RELAY_LENGTHS];   /* by who leads: HR_HDR_SAYS, and HR_HDR_PUT if results are to be put back */
    uint8_t called, heads; /* classes for whose last the peer has called for segments; transfers with a head */
    int unanswered;        /* long messages that came since one was sent */
    void *scratch;         /* those that no transfer has: each begins with the next */
};

static inline int hr_relay_class(uint64_t len) { return len < 512 << 10 ? 0 : len < 4 << 20 ? 1 : 2; }

/* Good news is believed at once, bad news by half, and never that it is twice as bad: somebody may have been
 * interrupted. */
static inline void hr_relay_learn(double *cost, double new) {
    if (*cost && new > 2 * *cost) new = 2 * *cost;
    *cost = !*cost || new < *cost ? new : (*cost + new) / 2;
}

/* Times between messages are nobody's cost: a trial that was under way as a program did something else for a second
 * would keep the next one away for a minute. */
static inline int64_t hr_relay_rest(const struct hr_relay *r, int times) {
    return r->spent * times > HR_RELAY_GAP ? r->spent * times : HR_RELAY_GAP;
}

static inline void hr_relay_start(struct hr_relay *r, int64_t now) {
    if (!r->trial) {
        int untried = !r->cost[HR_RELAYED] || !r->cost[HR_READ];
        r->way = r->cost[HR_READ] < r->cost[HR_RELAYED] ? HR_READ : HR_RELAYED;
        if (!untried && r->way != r->best) {
            if (r->next > now + hr_relay_rest(r, HR_RELAY_AGAIN)) r->next = now + hr_relay_rest(r, HR_RELAY_AGAIN);
            r->best = r->way;
        }
        if (!untried && now >= r->next) r->way = !r->way;
        if (untried || now >= r->next) {
            r->trial = HR_RELAY_PERIODS;
            r->spent = 0;
            if (r->way == HR_READ) r->theirs = 0;
        }
        r->tried = 0;
    }
    r->since = now;
    r->bytes = 0;
    r->busy = 0;
}

/* The way of the next transfer. */
static inline int hr_relay_next(struct hr_relay *r, int64_t now) {
    if (!r->open) hr_relay_start(r, now);
    return r->way;
}

/* A transfer begins: its way. */
static inline int hr_relay_begin(struct hr_relay *r, int64_t now) {
    int way = hr_relay_next(r, now);
    r->open++;
    return way;
}

struct hr_relay_work { /* where work counts; how much of it this side had is in busy */
    double copying;    /* ns for a byte that the sender of a message copied; 0: as much as the receiver had with it */
    int messages;      /* so many does it take, each of so many bytes */
    int both;          /* the peer says what it had */
};

/* ns for a byte of this period; 0: not known, as the peer has not read before. */
static inline double hr_relay_cost(const struct hr_relay *r, const struct hr_relay_work *work, int64_t now) {
    double bytes = (double)r->bytes, mine = (double)r->busy / bytes;
    if (!work) return (double)(now - r->since) / bytes;
    if (r->way == HR_RELAYED) return work->messages * (mine + (work->copying ? work->copying : mine));
    if (!work->both) return mine;
    if (r->theirs == 0 && r->trial == HR_RELAY_PERIODS) return 0;
    return mine > r->theirs ? mine : r->theirs;
}

/* One that went this way ends, after so many bytes. work: NULL: time counts. What the way before has left only delays
 * the period. */
static inline void hr_relay_end(struct hr_relay *r, int way, uint64_t bytes, int64_t now,
                                const struct hr_relay_work *work) {
    if (way != r->way) {
        r->open--;
        r->since = now;
        r->bytes = 0;
        r->busy = 0;
        return;
    }
    r->bytes += bytes;
    if (--r->open && r->bytes < HR_RELAY_PERIOD) return;
    if (r->bytes) {
        double ns = hr_relay_cost(r, work, now);
        if (ns > 0) hr_relay_learn(&r->cost[r->way], ns);
        r->spent += r->trial ? now - r->since : 0;
        r->tried += r->bytes;
        if (r->trial && --r->trial < HR_RELAY_PERIODS - 1 && (!r->trial || r->tried >= HR_RELAY_ENOUGH)) {
            r->trial = 0;
            r->next = now + hr_relay_rest(r, HR_RELAY_TRIAL);
        }
    }
    if (r->open) hr_relay_start(r, now);
}

/* reading.c */
#define HR_SCRATCH (256u << 10) /* what is read to be reduced lies there, and in the cache */

#define HR_READ_LONG (4u << 20) /* more than the cache has of it */

/* So much at a time, of what is so long. */
static inline uint64_t hr_read_most(uint64_t len) { return len < HR_READ_LONG ? HR_SCRATCH : HR_SCRATCH / 2; }

struct hr_xfer;
struct hr_conn;
struct hr_hdr;
struct hr_request;
/* Whether a receive is read by calls of the provider; where it reduces it has a scratch then. flags: of its RTS. */
int hr_read_chosen(struct hr_xfer *x, uint8_t flags);
/* For an RTS: what the peer shall do with it if it sends as well. */
uint8_t hr_read_flags(struct hr_conn *conn, uint64_t len);
#define HR_PUT_MIN (16u << 10) /* below it messages are as fast as calls of the kernel */
/* Whether results are to be put back by post_put to what is sent from here, rather than that it goes unasked; of a
 * header that is sent and one that came: what who leads has found. */
int hr_read_puts(struct hr_conn *conn, uint64_t len);
uint8_t hr_read_says(struct hr_conn *conn, uint64_t len);
void hr_read_told(struct hr_conn *conn, uint64_t len, uint8_t flags);
/* Reads a piece of a PULL that is not mapped, and reduces it where it is to be, and puts it back where it is open; as
 * post_read. HR_ERR_CANCELED: it was taken back. */
hr_status hr_read_piece(struct hr_xfer *x, uint64_t len);
/* That has left the provider. */
hr_status hr_read_done(struct hr_xfer *x);
/* Puts a piece of the result back to where its operand came from. 0: it was taken back. */
int hr_read_put(struct hr_xfer *x, const void *result, uint64_t offset, uint64_t len);
/* Whether the RTS with these flags is of what may be put back, by post_put if it is not mapped. */
int hr_read_returns(const struct hr_xfer *x, uint8_t flags);
/* LENT and not mapped: HR_OK, this piece of it, hr_read_most, is in the scratch. HR_AGAIN: ask again. An error.
 */
hr_status hr_read_lent(struct hr_xfer *x, uint64_t offset, uint64_t len);
void hr_read_lent_done(struct hr_xfer *x, hr_status status);
/* Copies or reduces a message that came unasked; a segment that came. */
void hr_read_unasked(struct hr_request *req, const void *data, size_t len);
void hr_read_arrived(struct hr_xfer *x, const void *data, size_t len);
/* Sends the next segment; as hr_conn_post_segment. */
hr_status hr_read_send(struct hr_xfer *x, struct hr_hdr *h, size_t len);
/* The connection is over. */
void hr_reading_close(struct hr_reading *reading);
/* The end of a transfer that was read and reduced, for who leads: what work it was. Of one that the peer has read. */
void hr_read_tells(const struct hr_xfer *x, struct hr_hdr *fin);
void hr_read_heard(const struct hr_xfer *x, const struct hr_hdr *fin);
/* The transfer is over. */
void hr_read_end(struct hr_xfer *x);

#endif

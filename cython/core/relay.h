/* relay.h - which of two ways an array takes that nobody has mapped: read by this side's kernel, or copied by both
 * sides through messages (HR_CAP_RELAYS).
 *
 * Two copies at once are faster where the cores share a cache, and several times slower where they do not, which a
 * process is not told, and which changes under a virtual machine. So it is measured: periods in which something is on
 * its way go one way or the other, what was faster is taken, and now and then the other way is tried. What fits some
 * cache has times of its own.
 */
#ifndef HR_CORE_RELAY_H
#define HR_CORE_RELAY_H

#include <stdint.h>

enum { HR_RELAYED, HR_READ, HR_WAYS };
enum { HR_RELAY_CLASSES = 3 }; /* of lengths */

#define HR_RELAY_TRIAL 32                    /* after a trial, so many times as long passes until the next one, */
#define HR_RELAY_GAP ((int64_t)10000000)     /* and not less than this, in ns */
#define HR_RELAY_PERIOD ((uint64_t)64 << 20) /* bytes, after which a period ends at the latest */

struct hr_relay {         /* what one connection receives, of one class */
    double cost[HR_WAYS]; /* ns for a byte; 0: not tried */
    int way, open, trial; /* of this period; transfers that have begun and not ended */
    int64_t since, next;  /* when it began; when there may be a trial again */
    uint64_t bytes;
};

static inline int hr_relay_class(uint64_t len) { return len < 512 << 10 ? 0 : len < 4 << 20 ? 1 : 2; }

static inline void hr_relay_start(struct hr_relay *r, int64_t now) {
    int untried = !r->cost[HR_RELAYED] || !r->cost[HR_READ];
    r->way = r->cost[HR_READ] < r->cost[HR_RELAYED] ? HR_READ : HR_RELAYED;
    r->trial = !untried && now >= r->next;
    if (r->trial) r->way = !r->way;
    r->since = now;
    r->bytes = 0;
}

/* A transfer begins: its way. */
static inline int hr_relay_begin(struct hr_relay *r, int64_t now) {
    if (!r->open++) hr_relay_start(r, now);
    return r->way;
}

/* It ends, after so many bytes. Good news is believed at once, bad news by half, and never that it is twice as bad:
 * somebody may have been interrupted. */
static inline void hr_relay_end(struct hr_relay *r, uint64_t bytes, int64_t now) {
    r->bytes += bytes;
    if (--r->open && r->bytes < HR_RELAY_PERIOD) return;
    if (r->bytes) {
        double old = r->cost[r->way], new = (double)(now - r->since) / (double)r->bytes;
        if (old && new > 2 * old) new = 2 * old;
        r->cost[r->way] = !old || new < old ? new : (old + new) / 2;
        int64_t rest = (now - r->since) * HR_RELAY_TRIAL;
        if (r->trial || !r->next) r->next = now + (rest > HR_RELAY_GAP ? rest : HR_RELAY_GAP);
    }
    if (r->open) hr_relay_start(r, now);
}

#endif

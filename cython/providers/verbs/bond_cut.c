/* bond_cut.c - how an operation is cut into stripes: by the rates of the lanes, which are measured here. */

/*
 * Cut so that all lanes would end at once: by what they have under way and by their rates, which are measured as bytes
 * that ended while they were busy. A lane whose rate is not known, or was measured too long ago, is taken for as fast
 * as the fastest. Another lane than that of messages costs a round trip, as what follows waits for the end of its
 * stripe: it has one where that takes so much off the time, which is a few KiB of a slow link and more of a fast one.
 */

#include "providers/verbs/bond.h"

#define STALE (100 * HR_VERBS_MS)
#define SAMPLE 20000 /* ns: shorter ones tell more of how completions were looked at */
#define WORTH 20000  /* ns that another lane has to take off */
enum {
    PIECE = 16 << 10,   /* stripes are of so many bytes, or a multiple; the engine's segments are no shorter */
    UNKNOWN = 128 << 10 /* what is worth another lane where no rate is known */
};

void hr_bond_lane_busy(struct hr_bond_lane *lane, uint64_t len) {
    if (!lane->out) lane->moved = 0, lane->since = hr_now();
    lane->out += len;
}

void hr_bond_lane_moved(struct hr_bond_lane *lane, uint64_t len) {
    lane->out -= len;
    if (len < PIECE) return;
    lane->moved += len;
    lane->last = hr_now();
    if (lane->last - lane->since < SAMPLE) return;
    double rate = (double)lane->moved / (double)(lane->last - lane->since);
    lane->rate = lane->rate > 0 ? lane->rate + (rate - lane->rate) / 4 : rate;
    lane->moved = 0;
    lane->since = lane->last;
    hr_bond_watch_rate(lane);
}

/* As it is now; what is not known is as the best of them. Returns 0 where none is. */
static double rates(const struct hr_bond_ep *ep, double rate[HR_BOND_RAILS]) {
    double best = 0;
    int64_t now = hr_now();
    for (int i = 0; i < ep->n; i++) {
        rate[i] = ep->lanes[i].rate > 0 && now - ep->lanes[i].last < STALE ? ep->lanes[i].rate : 0;
        if (rate[i] > best) best = rate[i];
    }
    for (int i = 0; i < ep->n; i++)
        if (!(rate[i] > 0)) rate[i] = best > 0 ? best : 1;
    return best;
}

/* Bytes for each lane; those that are not up have none. */
static void shares(const struct hr_bond_ep *ep, uint64_t len, uint64_t share[HR_BOND_RAILS]) {
    double rate[HR_BOND_RAILS], part[HR_BOND_RAILS] = {0}, best = rates(ep, rate);
    int in[HR_BOND_RAILS] = {0}, worst = 0, most = ep->first;
    for (int i = 0; i < ep->n; i++) in[i] = hr_bond_lane_up(ep, i) && (i != HR_BOND_SPARE || ep->first == i);
    while (worst >= 0) { /* without those that would end later than the others do, or have too little to do */
        double bytes = (double)len, sum = 0;
        worst = -1;
        for (int i = 0; i < ep->n; i++)
            if (in[i]) bytes += (double)ep->lanes[i].out, sum += rate[i];
        for (int i = 0; i < ep->n; i++) {
            double least = best > 0 ? rate[i] * WORTH : UNKNOWN;
            if (least < PIECE) least = PIECE;
            if (i == ep->first || !in[ep->first]) least = 0;
            part[i] = in[i] ? bytes / sum * rate[i] - (double)ep->lanes[i].out : 0;
            int better = worst < 0 || worst == ep->first || (i != ep->first && part[i] < part[worst]);
            if (in[i] && part[i] < least && better) worst = i; /* that of messages goes last */
        }
        if (worst >= 0) in[worst] = 0;
    }
    uint64_t left = len;
    for (int i = 0; i < ep->n; i++) {
        uint64_t bytes = (uint64_t)part[i] / PIECE * PIECE;
        share[i] = bytes < left ? bytes : left;
        left -= share[i];
        if (part[i] > part[most]) most = i;
    }
    share[most] += left;
}

void hr_bond_cut(const struct hr_bond_ep *ep, struct hr_bond_op *op) {
    uint64_t share[HR_BOND_RAILS] = {0}, at = 0;
    if (op->len < PIECE || op->work == HR_BOND_ATOMIC)
        share[ep->first] = op->len;
    else
        shares(ep, op->len, share);
    for (int i = 0; i < ep->n; i++) {
        if (!share[i] && (op->len || i != ep->first)) continue;
        op->stripes[op->n++] =
            (struct hr_bond_stripe){.op = op, .part = HR_BOND_WAITS, .lane = i, .offset = at, .len = share[i]};
        at += share[i];
    }
}

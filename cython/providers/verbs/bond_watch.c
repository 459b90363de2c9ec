/* bond_watch.c - lanes on which nothing comes back: broken here while others carry, long before their queue pairs are.
 */

/*
 * Queue pairs try again for longer than the heartbeat takes to find a peer lost (qp.c), so that what is silent for a
 * moment goes on. A lane that is dead beside others is to be taken over sooner. So while anything is under way, all
 * lanes are looked at ten times a second. A lane is silent at a look when it waited for an end at the one before, and
 * none has come since. That counts against it if another lane to the same peer had an end in that time, which one that
 * has nothing to do is made to have by a probe. After PATIENCE such looks, about as long as a queue pair with the usual
 * time-out would try, it is broken, and what was under way goes by the others. Where all are silent nothing counts: the
 * peer is busy, or gone, which is for the heartbeat to say. Nor does a look that comes late, as this process was.
 *
 * The device hears of each packet, we of the end of a work request: so these are short, and a lane that is merely slow
 * ends some of them. What is taken as short is measured, and one that takes longer all the same has more looks. Copies,
 * whose ends are not told, are followed by a probe.
 *
 * A packet that was lost, with none behind it, is missed by the device when its time-out ends, which is longer than
 * PATIENCE: a probe on the same queue pair is out of order at the peer, which asks for what is missing at once. That
 * is so as well where all were silent, and another lane was the first to try again.
 *
 * A lane that is the last, or silent as all are, has the time that retries have (soft-RoCE's would not end).
 */

#include <stdio.h>

#include "providers/verbs/bond.h"

enum {
    PATIENCE = 4,      /* looks */
    LONGER = 50,       /* more of them, at most */
    CHUNK = 64 << 10,  /* bytes of a work request, at least; */
    SHORT_NS = 2000000 /* or what moves in this time */
};
#define ROOM 2 /* control messages that a probe leaves room for */

void hr_bond_posted(struct hr_bond_ep *ep) {
    if (hr_bond_of(&ep->base)->silence) hr_bond_tick_start(hr_bond_of(&ep->base));
}

void hr_bond_watch_rate(struct hr_bond_lane *lane) {
    double bytes = lane->rate * SHORT_NS;
    if (!hr_bond_of(&lane->bond->base)->silence || lane->index == HR_BOND_SPARE) return;
    lane->ep->longest = bytes < CHUNK ? CHUNK : bytes < (1u << 30) ? (uint32_t)bytes / CHUNK * CHUNK : 1u << 30;
}

void hr_bond_watch_start(struct hr_bond_lane *lane) {
    lane->ended = lane->ep->head;
    lane->waits = lane->silent = lane->missed = 0;
    hr_bond_watch_rate(lane);
}

static int ends_are_due(const struct hr_verbs_ep *ep) { return (int32_t)(ep->signaled - ep->head) > 0; }

/* The lane in use, or NULL. */
static struct hr_verbs_ep *in_use(const struct hr_bond_ep *ep, int i) {
    struct hr_verbs_ep *lane = hr_bond_lane_up(ep, i) ? ep->lanes[i].ep : NULL;
    return lane && lane->state == HR_VERBS_UP ? lane : NULL;
}

static int patience(const struct hr_bond_lane *lane) {
    double more = lane->rate > 0 ? 2 * CHUNK / lane->rate / HR_BOND_TICK : 0;
    return PATIENCE + (more < LONGER ? (int)more : LONGER);
}

/* It was silent at this look. others: another lane was not. */
static void judge(struct hr_bond_lane *lane, int others) {
    char text[120];
    lane->silent++;
    lane->missed += others;
    if (lane->index == HR_BOND_SPARE) return; /* TCP has a time of its own */
    const int64_t silence = lane->silent * HR_BOND_TICK;
    const int dead = lane->missed >= patience(lane);
    if (dead || silence >= HR_VERBS_OUTLASTS(hr_bond_of(&lane->bond->base)->silence)) {
        snprintf(text, sizeof text, "nothing came back for %.1f s%s: is its link up?", (double)silence * 1e-9,
                 dead ? ", while another rail carried" : "");
        hr_verbs_ep_fail(lane->ep, HR_ERR_PEER_LOST, text, 0);
    } else if ((others || lane->silent == 1) && lane->ep->ctl < HR_VERBS_CTL - ROOM) {
        hr_verbs_probe(lane->ep);
    }
}

int hr_bond_watch(struct hr_bond_ep *ep) {
    unsigned silent = 0;
    int answers = 0, under_way = 0;
    if (!hr_bond_of(&ep->base)->silence) return 0;
    for (int i = 0; i < ep->n; i++) {
        struct hr_bond_lane *lane = &ep->lanes[i];
        struct hr_verbs_ep *in = in_use(ep, i);
        if (!in) continue;
        if (in->head != lane->ended) {
            answers = 1;
            lane->ended = in->head;
            lane->silent = lane->missed = 0;
        } else if (lane->waits) {
            silent |= 1u << i;
        }
    }
    for (int i = 0; i < ep->n; i++) {
        struct hr_verbs_ep *in = in_use(ep, i);
        if (!in) continue;
        if (silent >> i & 1)
            judge(&ep->lanes[i], answers);
        else if (silent && !ends_are_due(in))
            hr_verbs_probe(in);
        if (in->state != HR_VERBS_UP) continue;
        if (!ends_are_due(in) && in->head != in->tail) hr_verbs_flush(in);
        ep->lanes[i].waits = ends_are_due(in);
        under_way |= in->head != in->tail;
    }
    return under_way;
}

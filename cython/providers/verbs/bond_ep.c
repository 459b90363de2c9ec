/* bond_ep.c - the life of a bonded endpoint: its lanes come up, are lost, handed over and called again. */

/*
 * Each life of a lane ends in the same way, whether it ever came up or not: this end breaks its queue pair and says so
 * on another lane, in a word that tells of all its lanes and of how many messages it has heard; the peer, when it hears
 * of it, breaks its own and says so in turn. Who has done the one and heard the other is sure that nothing of that life
 * is on its way any more, in either direction: what was under way on it is posted again, elsewhere, and the lane may be
 * called to its next life. The endpoint is over when no lane is up.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "providers/verbs/bond.h"

#define PORT_LOOK (500 * HR_VERBS_MS)
#define REST_FIRST (1000 * HR_VERBS_MS)
#define REST_MOST (16000 * HR_VERBS_MS)
#define CALL_LIMIT (10000 * HR_VERBS_MS)

/* ---- lanes ---- */

static uint32_t free_stream(struct hr_bond *bond, const struct hr_bond_ep *self, int active) {
    for (uint32_t stream = self->base.channel << 16;; stream++) {
        int used = 0;
        for (struct hr_link *l = bond->eps.next; l != &bond->eps && !used; l = l->next) {
            struct hr_bond_ep *ep = hr_container(l, struct hr_bond_ep, link);
            int lives = ep->state == HR_BOND_CONNECTING || ep->state == HR_BOND_OPEN;
            used = lives && ep->base.peer_id == self->base.peer_id && ep->active == active && ep->stream == stream;
        }
        if (!used) return stream;
    }
}

/* An endpoint of the rail, called or waiting. */
hr_status hr_bond_lane_open(struct hr_bond_lane *lane) {
    struct hr_bond_ep *ep = lane->bond;
    struct hr_verbs_domain *rail = hr_bond_of(&ep->base)->rails[lane->index];
    size_t len;
    const void *addr = ep->plain ? ep->addr : hr_verbs_address_rail(ep->addr, ep->addr_len, lane->index, &len);
    if (ep->plain) len = ep->addr_len;
    struct hr_ep *base;
    if (!rail || rail->gone || !addr || !len) return HR_ERR_UNREACHABLE;
    hr_status status = hr_verbs_ep_create(&rail->base, ep->base.peer_id, lane, &base);
    if (status != HR_OK) return status;
    struct hr_verbs_ep *inner = (struct hr_verbs_ep *)base;
    if (!ep->plain) {
        inner->bond = ep;
        inner->session = ep->session;
        inner->life = lane->life;
    }
    if (ep->dscp >= 0) hr_verbs_ep_set_class(base, ep->dscp, ep->priority);
    lane->ep = inner;
    lane->stage = HR_BOND_CALLING;
    status = hr_verbs_ep_call(inner, addr, len, ep->active, ep->stream);
    if (status == HR_OK) return status;
    hr_verbs_ep_destroy(base);
    lane->ep = NULL;
    return status;
}

void hr_bond_choose_first(struct hr_bond_ep *ep) {
    int nearest = hr_bond_of(&ep->base)->nearest, first = -1;
    if (nearest < ep->n && hr_bond_lane_up(ep, nearest)) first = nearest;
    for (int i = 0; i < ep->n && first < 0; i++)
        if (hr_bond_lane_up(ep, i)) first = i;
    hr_bond_set_first(ep, first);
}

static void rest(struct hr_bond_lane *lane) {
    lane->stage = HR_BOND_REST;
    lane->due = hr_now() + lane->pause;
    lane->pause = lane->pause < REST_MOST / 2 ? 2 * lane->pause : REST_MOST;
    hr_bond_tick_start(hr_bond_of(&lane->bond->base));
}

/* Its life has ended at both ends. Who is called waits at once, who calls takes a rest. */
static void handed_over(struct hr_bond_lane *lane) {
    struct hr_bond_ep *ep = lane->bond;
    hr_bond_ops_free(ep, lane->index);
    lane->life++;
    lane->their_down = 0;
    int owing = ep->owing >> lane->index & 1;
    ep->owing &= ~(1u << lane->index);
    if (owing && !ep->owing) {
        if (ep->logged - ep->landed > HR_BOND_LOG) {
            hr_bond_fail(ep, HR_ERR_PROTOCOL, "the peer has heard messages that were not sent");
            return;
        }
        ep->sent = ep->landed;
        hr_bond_of(&ep->base)->counts.resent += ep->logged - ep->sent;
    }
    if (ep->active || hr_bond_lane_open(lane) != HR_OK) rest(lane);
    if (owing && !ep->owing) hr_bond_tell_carrier(ep);
    hr_bond_pending(ep);
}

void hr_bond_break(struct hr_bond_lane *lane) {
    struct hr_bond_ep *ep = lane->bond;
    if (lane->ep) hr_verbs_ep_destroy(&lane->ep->base);
    lane->ep = NULL;
    lane->stage = HR_BOND_DOWN;
    lane->out = 0;
    lane->rate = 0;
    hr_bond_ops_stick(ep, lane->index);
    if (ep->first == lane->index) {
        ep->owing |= 1u << lane->index;
        hr_bond_choose_first(ep);
    }
    ep->word = 1;
    if (lane->their_down) handed_over(lane);
    hr_bond_pending(ep);
}

/* ---- what happens to lanes ---- */

static void lost(struct hr_bond_lane *lane) {
    hr_bond_of(&lane->bond->base)->counts.lost += lane->stage == HR_BOND_UP && lane->index != HR_BOND_SPARE;
    if (lane->bond->last < 0 && lane->index != HR_BOND_SPARE) lane->bond->last = lane->index;
    lane->stage = HR_BOND_LOST;
    hr_bond_pending(lane->bond);
}

void hr_bond_opened(struct hr_bond_ep *ep) {
    ep->state = HR_BOND_OPEN;
    for (int i = 0; i < ep->n; i++) ep->lanes[i].due = hr_now() + CALL_LIMIT; /* the engine looks at them no more */
    hr_bond_tick_start(hr_bond_of(&ep->base));
    ep->base.domain->sink->state(&ep->base, HR_OK, NULL);
    hr_bond_tell_carrier(ep);
}

static void came_up(struct hr_bond_lane *lane) {
    struct hr_bond_ep *ep = lane->bond;
    if (!ep->session) ep->session = lane->ep->session;
    if (ep->session != lane->ep->session) { /* of a bond that the peer has given up since */
        lost(lane);
        return;
    }
    lane->stage = HR_BOND_UP;
    lane->pause = REST_FIRST;
    hr_bond_watch_start(lane);
    if (lane->life > 1 && lane->index != HR_BOND_SPARE) hr_bond_of(&ep->base)->counts.back++;
    if (ep->first < 0 || !ep->logged) hr_bond_choose_first(ep);
    hr_bond_pending(ep);
    hr_bond_call_spare(ep);
    if (ep->state == HR_BOND_CONNECTING && !hr_bond_awaits_spare(ep)) hr_bond_opened(ep);
    if (ep->fell) hr_bond_tell_carrier(ep); /* nothing had been sent that would have to be handed over */
}

void hr_bond_on_state(struct hr_bond_lane *lane, hr_status status, const char *detail) {
    struct hr_bond_ep *ep = lane->bond;
    if (ep->plain) {
        ep->state = status == HR_OK ? HR_BOND_OPEN : HR_BOND_OVER;
        ep->told = status != HR_OK;
        ep->base.domain->sink->state(&ep->base, status, detail);
    } else if (status == HR_OK) {
        came_up(lane);
    } else {
        if (lane->index != HR_BOND_SPARE || ep->first == HR_BOND_SPARE || !*ep->detail) {
            ep->why = status;
            snprintf(ep->detail, sizeof ep->detail, "%s", detail ? detail : hr_status_text(status));
            ep->last = lane->index;
        }
        lost(lane);
    }
}

static const char *const closed = "the peer closed the connection";

/* The peer has broken this life of the lane. What it brought before is still taken, then it is lost here as well. */
static void theirs_is_down(struct hr_bond_lane *lane) {
    lane->their_down = 1;
    if (lane->stage == HR_BOND_DOWN) {
        handed_over(lane);
    } else if (lane->stage == HR_BOND_REST) { /* there is nothing to break */
        lane->bond->word = 1;
        handed_over(lane);
    } else if (lane->ep && lane->ep->state == HR_VERBS_UP) {
        hr_verbs_qp_break(lane->ep);
        hr_verbs_ep_end(lane->ep, closed);
    } else if (lane->stage == HR_BOND_CALLING) {
        lost(lane);
    }
}

void hr_bond_on_word(struct hr_bond_ep *ep, const struct hr_bond_word *word) {
    if (word->heard > ep->landed) ep->landed = word->heard;
    if (word->asks) ep->word = 1;
    if (ep->word || hr_bond_leaving(ep)) hr_bond_pending(ep);
    for (int i = 0; i < ep->n && ep->state == HR_BOND_OPEN; i++) {
        struct hr_bond_lane *lane = &ep->lanes[i];
        int32_t ahead = (int32_t)(word->lanes[i].life - lane->life);
        if (!lane->their_down && (ahead > 0 || (ahead == 0 && word->lanes[i].down))) theirs_is_down(lane);
    }
}

void hr_bond_fail(struct hr_bond_ep *ep, hr_status status, const char *what) {
    if (ep->state == HR_BOND_OVER || ep->state == HR_BOND_CLOSED) return;
    ep->state = HR_BOND_OVER;
    ep->why = status;
    if (what != ep->detail) snprintf(ep->detail, sizeof ep->detail, "%s", what);
    for (int i = 0; i < ep->n; i++)
        if (ep->lanes[i].ep) hr_verbs_qp_break(ep->lanes[i].ep);
    hr_bond_pending(ep);
}

/* ---- progress ---- */

static void break_lost(struct hr_bond_ep *ep) {
    int up = 0, calling = 0;
    for (int i = 0; i < ep->n; i++) {
        if (ep->lanes[i].stage == HR_BOND_LOST) hr_bond_break(&ep->lanes[i]);
        up += hr_bond_lane_up(ep, i);
        calling += ep->lanes[i].stage == HR_BOND_CALLING;
    }
    if (up && ep->state == HR_BOND_CONNECTING && !hr_bond_awaits_spare(ep)) hr_bond_opened(ep);
    if (up || (ep->state == HR_BOND_CONNECTING && (calling || hr_bond_call_spare(ep)))) return;
    int left = ep->state == HR_BOND_OPEN && ep->why == HR_ERR_UNREACHABLE; /* the last of its calls tells no more */
    hr_bond_fail(ep, left ? HR_ERR_PEER_LOST : ep->why, ep->detail);
}

/* Nothing of it is left on any lane when the engine hears of the end. */
static int tell_end(struct hr_bond_ep *ep) {
    if (ep->told) return 0;
    ep->told = 1;
    for (int i = 0; i < ep->n; i++)
        if (ep->lanes[i].ep) hr_verbs_ep_abort(&ep->lanes[i].ep->base);
    ep->base.domain->sink->state(&ep->base, ep->why, ep->detail);
    return 1;
}

static int any_lost(const struct hr_bond_ep *ep) {
    for (int i = 0; i < ep->n; i++)
        if (ep->lanes[i].stage == HR_BOND_LOST) return 1;
    return 0;
}

int hr_bond_run(struct hr_bond_ep *ep, int budget) {
    int n = 0;
    hr_list_remove(&ep->pending);
    if (any_lost(ep)) break_lost(ep);
    if (hr_bond_leaving(ep)) hr_bond_leave_spare(ep);
    if (ep->state == HR_BOND_OPEN && ep->word && hr_bond_send_word(ep)) ep->word = 0;
    if (ep->state == HR_BOND_OPEN) n += hr_bond_ops_run(ep, budget);
    if (ep->state == HR_BOND_OPEN) hr_bond_resend(ep);
    if (ep->state == HR_BOND_OVER) return n < budget ? n + tell_end(ep) : (hr_bond_pending(ep), n);
    int more = (hr_bond_leaving(ep) && !ep->asked) || ep->word || ep->sent != ep->logged || ep->owing || any_lost(ep) ||
               !hr_bond_ops_idle(ep);
    if (more && hr_list_empty(&ep->pending)) hr_list_push(&hr_bond_of(&ep->base)->pending, &ep->pending);
    return n;
}

/* Who calls does so when its port is active; who waits is called. */
int64_t hr_bond_tick(struct hr_bond_ep *ep, int64_t now) {
    int64_t next = INT64_MAX;
    if (ep->plain || ep->state != HR_BOND_OPEN)
        return ep->open_by && hr_bond_spare_is_late(ep, now) ? now + HR_BOND_TICK : next;
    if (ep->leave_by && hr_bond_leave_is_late(ep, now)) lost(&ep->lanes[HR_BOND_SPARE]);
    if (hr_bond_watch(ep) || ep->leave_by) next = now + HR_BOND_TICK;
    for (int i = 0; i < ep->n; i++) {
        struct hr_bond_lane *lane = &ep->lanes[i];
        struct hr_verbs_domain *rail = hr_bond_of(&ep->base)->rails[i];
        if (!rail) continue;
        if (lane->stage == HR_BOND_REST && now >= lane->due) {
            lane->due = now + (rail->paths.n ? CALL_LIMIT : PORT_LOOK);
            if (rail->paths.n && hr_bond_lane_open(lane) != HR_OK) rest(lane);
        } else if (lane->stage == HR_BOND_CALLING && ep->active && now >= lane->due) {
            lost(lane);
        }
        int waits = lane->stage == HR_BOND_REST || (lane->stage == HR_BOND_CALLING && ep->active);
        if (waits && lane->due < next) next = lane->due;
    }
    return next;
}

/* ---- slots of the vtable ---- */

hr_status hr_bond_usable(const struct hr_bond_ep *ep) {
    switch (ep->state) {
    case HR_BOND_OPEN:
    case HR_BOND_CONNECTING: return HR_OK;
    case HR_BOND_OVER: return ep->told ? HR_ERR_PEER_LOST : HR_AGAIN;
    case HR_BOND_CLOSED: return HR_ERR_PEER_LOST;
    default: return HR_ERR_INVALID;
    }
}

hr_status hr_bond_ep_create(struct hr_domain *domain, uint64_t peer_id, void *ctx, struct hr_ep **ep_p) {
    struct hr_bond *bond = (struct hr_bond *)domain;
    struct hr_bond_ep *ep = calloc(1, sizeof *ep);
    if (!ep) return HR_ERR_NOMEM;
    ep->base = (struct hr_ep){.domain = domain, .ctx = ctx, .peer_id = peer_id};
    ep->dscp = ep->priority = ep->first = ep->last = -1;
    ep->why = HR_ERR_UNREACHABLE;
    hr_list_init(&ep->pending);
    hr_bond_ops_init(ep);
    for (int i = 0; i < HR_BOND_RAILS; i++)
        ep->lanes[i] = (struct hr_bond_lane){
            .bond = ep, .stage = HR_BOND_REST, .index = i, .life = 1, .pause = REST_FIRST, .due = INT64_MAX};
    hr_list_push(&bond->eps, &ep->link);
    *ep_p = &ep->base;
    return HR_OK;
}

/* Rail i of an end and rail i of the other. Where the peer is no bond, our first one. Returns how many there are. */
static int pair_up(struct hr_bond_ep *ep) {
    const struct hr_bond *bond = hr_bond_of(&ep->base);
    int rails = hr_verbs_address_rails(ep->addr, ep->addr_len), found = 0;
    size_t len;
    ep->plain = !rails;
    for (int i = 0; i < bond->n && !(ep->plain && found); i++) {
        int ours = bond->rails[i] && !bond->rails[i]->gone && !(ep->plain && i == HR_BOND_SPARE);
        int theirs = ep->plain || hr_verbs_address_rail(ep->addr, ep->addr_len, i, &len) != NULL;
        if (!ours || !theirs)
            ep->lanes[i].stage = HR_BOND_NONE;
        else
            found++, ep->n = i + 1;
    }
    if (!found) ep->plain = 0; /* there is no endpoint of a rail that could take its place */
    if (ep->plain) hr_bond_set_first(ep, ep->n - 1);
    return found;
}

hr_status hr_bond_ep_connect(struct hr_ep *base, const void *addr, size_t addr_len, int active) {
    struct hr_bond_ep *ep = (struct hr_bond_ep *)base;
    hr_status status = HR_ERR_UNREACHABLE;
    union hr_sockaddr list[HR_VERBS_ADDRESSES];
    int opened = 0;
    if (ep->state != HR_BOND_NEW) return HR_ERR_INVALID;
    if (addr_len > sizeof ep->addr || hr_verbs_address_read(addr, addr_len, list) < 0) return HR_ERR_INVALID;
    memcpy(ep->addr, addr, addr_len);
    ep->addr_len = addr_len;
    if (!pair_up(ep)) return status;
    if (!ep->plain && !(ep->log = calloc(HR_BOND_LOG, sizeof *ep->log))) return HR_ERR_NOMEM;
    ep->active = active;
    ep->stream = free_stream(hr_bond_of(base), ep, active);
    while (active && !ep->plain && !ep->session)
        if (getrandom(&ep->session, sizeof ep->session, 0) != sizeof ep->session) ep->session = (uint64_t)hr_now();
    ep->state = HR_BOND_CONNECTING;
    for (int i = 0; i < ep->n; i++) {
        if (ep->lanes[i].stage == HR_BOND_NONE || (i == HR_BOND_SPARE && active)) continue;
        ep->lanes[i].due = INT64_MAX; /* the engine has a deadline for the first of them, until then for all */
        hr_status one = hr_bond_lane_open(&ep->lanes[i]);
        if (one == HR_OK)
            opened++;
        else
            lost(&ep->lanes[i]), status = one;
    }
    if (opened || hr_bond_call_spare(ep)) return HR_OK;
    ep->state = HR_BOND_NEW;
    ep->plain = 0;
    hr_bond_set_first(ep, -1);
    hr_list_remove(&ep->pending);
    return status;
}

void hr_bond_ep_abort(struct hr_ep *base) {
    struct hr_bond_ep *ep = (struct hr_bond_ep *)base;
    if (ep->state == HR_BOND_CLOSED) return;
    for (int i = 0; i < ep->n; i++)
        if (ep->lanes[i].ep) hr_verbs_ep_abort(&ep->lanes[i].ep->base);
    hr_bond_ops_drop(ep);
    if (!ep->plain) hr_bond_set_first(ep, -1);
    hr_list_remove(&ep->pending);
    ep->state = HR_BOND_CLOSED;
}

void hr_bond_ep_destroy(struct hr_ep *base) {
    struct hr_bond_ep *ep = (struct hr_bond_ep *)base;
    hr_bond_ep_abort(base);
    for (int i = 0; i < ep->n; i++)
        if (ep->lanes[i].ep) hr_verbs_ep_destroy(&ep->lanes[i].ep->base);
    hr_list_remove(&ep->link);
    free(ep->log);
    free(ep);
}

hr_status hr_bond_ep_set_class(struct hr_ep *base, int dscp, int priority) {
    struct hr_bond_ep *ep = (struct hr_bond_ep *)base;
    hr_status status = HR_OK;
    if (dscp < 0 || dscp > 63 || priority < 0 || priority > 7) return HR_ERR_INVALID;
    for (int i = 0; i < ep->n && status == HR_OK; i++)
        if (ep->lanes[i].ep) status = hr_verbs_ep_set_class(&ep->lanes[i].ep->base, dscp, priority);
    if (status != HR_OK) return status;
    ep->dscp = dscp;
    ep->priority = priority;
    return HR_OK;
}

uint64_t hr_bond_ep_unsent(struct hr_ep *base) {
    struct hr_bond_ep *ep = (struct hr_bond_ep *)base;
    uint64_t n = 0;
    if (ep->state != HR_BOND_OPEN) return 0;
    for (int i = 0; i < ep->n; i++) {
        const struct hr_bond_lane *lane = &ep->lanes[i];
        if (lane->ep) n += hr_verbs_ep_unsent(&lane->ep->base);
        n += lane->stage == HR_BOND_LOST || (lane->stage == HR_BOND_UP && lane->ep->state != HR_VERBS_UP);
    }
    return n + (ep->logged - ep->sent) + ep->owing + hr_bond_ops_waiting(ep);
}

/* bond_spare.c - the lane over tcp of a bonded endpoint: it stands by, is used while no rail is left, and is left. */

/*
 * It is called when the first rail is up, or when none can be, and the endpoint is open when it stands by. Then it is
 * one more lane: what holds for the others when they are lost holds for it, and for what moves to it. What is special
 * is that it has no stripes, and no messages, while a rail is up. When one is back, each end moves its messages to that
 * by itself: it posts nothing until the peer has said, behind the last of them, that it has heard all. What else was
 * posted on the spare lane ends there, so an atomic does not fail because a rail was mended, and the lane stands by
 * again from the first moment. A lane on which no answer comes is given up: the rail takes over as it would for any.
 *
 * The engine hears of it when the peer has answered on the spare lane: one that died is not said to be carried by tcp.
 */

#include <stdio.h>

#include "providers/verbs/bond.h"

#define PATIENCE (2000 * HR_VERBS_MS) /* then it is open without a lane that stands by: that may come later */
#define SILENCE (5000 * HR_VERBS_MS)  /* a lane that is being left, and on which nothing ends, is given up */

void hr_bond_set_first(struct hr_bond_ep *ep, int first) {
    struct hr_bond *bond = hr_bond_of(&ep->base);
    bond->on_spare += (first == HR_BOND_SPARE) - (ep->first == HR_BOND_SPARE);
    ep->first = first;
    ep->asked = 0;
    ep->leave_by = 0;
}

int hr_bond_rail_up(const struct hr_bond_ep *ep) {
    for (int i = 0; i < ep->n && i < HR_BOND_SPARE; i++)
        if (hr_bond_lane_up(ep, i)) return 1;
    return 0;
}

int hr_bond_call_spare(struct hr_bond_ep *ep) {
    struct hr_bond_lane *lane = &ep->lanes[HR_BOND_SPARE];
    if (!ep->active || ep->n <= HR_BOND_SPARE || lane->stage != HR_BOND_REST || lane->life > 1) return 0;
    if (ep->state != HR_BOND_CONNECTING) return 0;
    if (hr_bond_lane_open(lane) == HR_OK) return 1;
    lane->stage = HR_BOND_REST;
    return 0;
}

int hr_bond_awaits_spare(struct hr_bond_ep *ep) {
    if (ep->n <= HR_BOND_SPARE || ep->lanes[HR_BOND_SPARE].stage != HR_BOND_CALLING) return 0;
    if (!ep->open_by) ep->open_by = hr_now() + PATIENCE;
    hr_bond_tick_start(hr_bond_of(&ep->base));
    return hr_now() < ep->open_by;
}

int hr_bond_spare_is_late(struct hr_bond_ep *ep, int64_t now) {
    if (ep->state != HR_BOND_CONNECTING || !hr_bond_rail_up(ep)) return 0;
    if (now >= ep->open_by) hr_bond_opened(ep);
    return 1;
}

int hr_bond_leaving(const struct hr_bond_ep *ep) {
    return ep->first == HR_BOND_SPARE && ep->state == HR_BOND_OPEN && !ep->plain && hr_bond_rail_up(ep);
}

void hr_bond_leave_spare(struct hr_bond_ep *ep) {
    if (!ep->leave_by) ep->leave_by = hr_now() + SILENCE;
    hr_bond_tick_start(hr_bond_of(&ep->base));
    if (ep->owing || ep->sent != ep->logged) return; /* those that have to be sent again go by it first */
    if (ep->landed != ep->logged) {
        if (!ep->asked) ep->asked = hr_bond_ask_for_word(ep);
        return;
    }
    hr_bond_choose_first(ep);
    hr_bond_tell_carrier(ep);
    hr_bond_room_again(ep);
}

int hr_bond_leave_is_late(struct hr_bond_ep *ep, int64_t now) {
    if (!hr_bond_leaving(ep)) ep->leave_by = 0; /* the rail was lost again */
    return ep->leave_by && now >= ep->leave_by;
}

void hr_bond_leave_goes_on(struct hr_bond_lane *lane) {
    if (lane->bond->leave_by && lane->index == HR_BOND_SPARE) lane->bond->leave_by = hr_now() + SILENCE;
}

void hr_bond_tell_carrier(struct hr_bond_ep *ep) {
    struct hr_bond *bond = hr_bond_of(&ep->base);
    int fell = ep->first == HR_BOND_SPARE;
    const struct hr_verbs_domain *rail = NULL;
    char text[256];
    if (fell == ep->fell || ep->first < 0 || ep->state != HR_BOND_OPEN) return;
    ep->fell = fell;
    bond->counts.fell += (uint64_t)fell;
    int which = fell ? ep->last : ep->first;
    if (which >= 0) rail = bond->rails[which];
    snprintf(text, sizeof text, "%.60s%s%.180s", rail ? rail->name : "none", fell && *ep->detail ? ": " : "",
             fell ? ep->detail : "");
    const struct hr_sink *sink = ep->base.domain->sink;
    if (sink->carrier) sink->carrier(&ep->base, fell ? "tcp" : NULL, text);
}

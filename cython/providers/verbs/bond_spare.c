/* bond_spare.c - the lane over tcp of a bonded endpoint: it stands by, is used while no rail is left, and is left. */

/*
 * It is called when the first rail is up, or when none can be, and is then one more lane: what holds for the others
 * when they are lost holds for it, and for what moves to it. What is special is that it has no stripes, and no
 * messages, while a rail is up. When one is back, each end moves its messages to that by itself: it posts nothing until
 * the peer has said, behind the last of them, that it has heard all. What else was posted on the spare lane ends there,
 * so an atomic does not fail because a rail was mended, and the lane stands by again from the first moment.
 *
 * The engine hears of it when the peer has answered on the spare lane: one that died is not said to be carried by tcp.
 */

#include <stdio.h>

#include "providers/verbs/bond.h"

#define ALONE (2000 * HR_VERBS_MS) /* a connection without any lane: the time of a call */

void hr_bond_set_first(struct hr_bond_ep *ep, int first) {
    struct hr_bond *bond = hr_bond_of(&ep->base);
    bond->on_spare += (first == HR_BOND_SPARE) - (ep->first == HR_BOND_SPARE);
    ep->first = first;
    ep->asked = 0;
}

int hr_bond_rail_up(const struct hr_bond_ep *ep) {
    for (int i = 0; i < ep->n && i < HR_BOND_SPARE; i++)
        if (hr_bond_lane_up(ep, i)) return 1;
    return 0;
}

int hr_bond_call_spare(struct hr_bond_ep *ep) {
    struct hr_bond_lane *lane = &ep->lanes[HR_BOND_SPARE];
    if (!ep->active || ep->n <= HR_BOND_SPARE || lane->stage != HR_BOND_REST || lane->ep || ep->called_spare) return 0;
    ep->called_spare = 1;
    lane->due = hr_now();
    if (ep->state == HR_BOND_OPEN) {
        hr_bond_tick_start(hr_bond_of(&ep->base));
        return 1;
    }
    lane->due = INT64_MAX; /* the engine has a deadline */
    return hr_bond_lane_open(lane) == HR_OK;
}

int hr_bond_awaits_spare(struct hr_bond_ep *ep) {
    struct hr_bond_lane *lane = &ep->lanes[HR_BOND_SPARE];
    int soon = lane->stage == HR_BOND_CALLING || lane->stage == HR_BOND_REST;
    if (ep->state != HR_BOND_OPEN || !ep->awaited || !soon) return 0;
    if (!ep->alone) ep->alone = hr_now() + ALONE;
    if (ep->active && lane->stage == HR_BOND_REST) lane->due = hr_now();
    hr_bond_tick_start(hr_bond_of(&ep->base));
    return 1;
}

int hr_bond_leaving(const struct hr_bond_ep *ep) {
    return ep->first == HR_BOND_SPARE && ep->state == HR_BOND_OPEN && !ep->plain && hr_bond_rail_up(ep);
}

void hr_bond_leave_spare(struct hr_bond_ep *ep) {
    if (ep->owing || ep->sent != ep->logged) return; /* those that have to be sent again go by it first */
    if (ep->landed != ep->logged) {
        if (!ep->asked) ep->asked = hr_bond_ask_for_word(ep);
        return;
    }
    hr_bond_choose_first(ep);
    hr_bond_tell_carrier(ep);
    hr_bond_room_again(ep);
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
    snprintf(text, sizeof text, "%.60s%s%.180s", rail ? rail->ctx->device->name : "its device is gone",
             fell && *ep->detail ? ": " : "", fell ? ep->detail : "");
    const struct hr_sink *sink = ep->base.domain->sink;
    if (sink->carrier) sink->carrier(&ep->base, fell ? "tcp" : NULL, text);
}

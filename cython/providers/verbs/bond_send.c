/* bond_send.c - messages of a bonded endpoint: by one lane, kept until the peer has heard them; words about lanes. */

/*
 * All messages go by the first lane, in order. What of them the peer has not heard yet is no more than what it has
 * receives for, so the last LOG of them are kept, and nothing needs to tell that they arrived. When their lane is lost
 * they wait until it is handed over: the peer's word then says how many it has heard, and the others leave by the next
 * lane. Those that it heard are not said again, as it counts what it tells its engine, and not what its device took.
 */

#include <string.h>

#include "providers/verbs/bond.h"

static struct hr_bond_entry *entry(const struct hr_bond_ep *ep, uint64_t number) {
    return &ep->log[number % HR_BOND_LOG];
}

static hr_status post(struct hr_bond_ep *ep, const void *hdr, size_t hdr_len, const void *payload, size_t len) {
    struct hr_verbs_ep *lane = ep->lanes[ep->first].ep;
    hr_status status = hr_verbs_usable(lane);
    return status == HR_OK ? hr_verbs_send(lane, hdr, hdr_len, payload, len)
                           : HR_AGAIN; /* its end is about to be told */
}

/* In the order of what was posted before; kept when it has left. */
static hr_status send_kept(struct hr_bond_ep *ep, const void *hdr, size_t hdr_len, const void *payload, size_t len) {
    if (!hr_bond_lane_up(ep, ep->first) || ep->owing || ep->sent != ep->logged || hr_bond_leaving(ep)) return HR_AGAIN;
    ep->asked = 0;
    hr_status status = post(ep, hdr, hdr_len, payload, len);
    if (status != HR_OK) return status;
    struct hr_bond_entry *kept = entry(ep, ep->logged);
    kept->hdr_len = (uint32_t)hdr_len;
    kept->len = (uint32_t)len;
    memcpy(kept->bytes, hdr, hdr_len);
    if (len) memcpy(kept->bytes + hdr_len, payload, len);
    ep->logged++;
    ep->sent++;
    return HR_OK;
}

hr_status hr_bond_post_send(struct hr_ep *base, const struct hr_msg *msg) {
    struct hr_bond_ep *ep = (struct hr_bond_ep *)base;
    struct hr_bond_prefix prefix = {.kind = HR_BOND_MSG};
    uint8_t hdr[HR_VERBS_HDR];
    if (ep->plain) return hr_verbs_post_send(&ep->lanes[ep->first].ep->base, msg);
    hr_status status = hr_bond_usable(ep);
    if (msg->hdr_len < 8 || msg->hdr_len > HR_MAX_HDR || msg->hdr_len % 8 || msg->len > HR_VERBS_MESSAGE)
        return HR_ERR_INVALID;
    if (status != HR_OK) return status;
    memcpy(hdr, &prefix, sizeof prefix);
    memcpy(hdr + sizeof prefix, msg->hdr, msg->hdr_len);
    status = hr_bond_in_order(ep) ? send_kept(ep, hdr, sizeof prefix + msg->hdr_len, msg->payload, msg->len) : HR_AGAIN;
    if (status == HR_AGAIN) ep->refused = 1;
    if (status == HR_OK) hr_bond_told(ep);
    return status;
}

int hr_bond_send_notice(struct hr_bond_ep *ep, uint64_t value, uint64_t nbytes) {
    struct hr_bond_notice notice = {.prefix = {.kind = HR_BOND_NOTICE}, .value = value, .nbytes = nbytes};
    return send_kept(ep, &notice, sizeof notice, NULL, 0) == HR_OK;
}

void hr_bond_resend(struct hr_bond_ep *ep) {
    if (ep->owing || ep->sent == ep->logged || !hr_bond_lane_up(ep, ep->first) || !hr_bond_written(ep)) return;
    while (ep->sent != ep->logged) {
        const struct hr_bond_entry *kept = entry(ep, ep->sent);
        if (post(ep, kept->bytes, kept->hdr_len, kept->bytes + kept->hdr_len, kept->len) != HR_OK) return;
        ep->sent++;
    }
    hr_bond_room_again(ep);
}

static struct hr_bond_word word_of(const struct hr_bond_ep *ep) {
    struct hr_bond_word word = {.prefix = {.kind = HR_BOND_WORD}, .heard = ep->heard};
    for (int i = 0; i < ep->n; i++) {
        word.lanes[i].life = ep->lanes[i].life;
        word.lanes[i].down = ep->lanes[i].stage == HR_BOND_DOWN;
    }
    return word;
}

/* By the first lane that takes it. It is not kept: when that lane is lost, another word is due. */
int hr_bond_send_word(struct hr_bond_ep *ep) {
    struct hr_bond_word word = word_of(ep);
    for (int i = 0; i < ep->n; i++) {
        struct hr_verbs_ep *lane = hr_bond_lane_up(ep, i) ? ep->lanes[i].ep : NULL;
        if (lane && hr_verbs_usable(lane) == HR_OK && hr_verbs_send(lane, &word, sizeof word, NULL, 0) == HR_OK)
            return 1;
    }
    return 0;
}

int hr_bond_ask_for_word(struct hr_bond_ep *ep) {
    struct hr_bond_word word = word_of(ep);
    word.asks = 1;
    return post(ep, &word, sizeof word, NULL, 0) == HR_OK;
}

void hr_bond_on_recv(struct hr_bond_lane *lane, const uint8_t *hdr, size_t hdr_len, const void *payload, size_t len) {
    struct hr_bond_ep *ep = lane->bond;
    const struct hr_sink *sink = ep->base.domain->sink;
    struct hr_bond_prefix prefix;
    struct hr_bond_notice notice;
    struct hr_bond_word word;
    if (ep->plain) {
        sink->recv(&ep->base, hdr, hdr_len, payload, len);
        return;
    }
    memcpy(&prefix, hdr, sizeof prefix);
    if (ep->state == HR_BOND_CONNECTING && lane->stage == HR_BOND_UP) hr_bond_opened(ep); /* the peer's is */
    if (ep->state != HR_BOND_OPEN || lane->stage != HR_BOND_UP) return;
    if (prefix.kind == HR_BOND_MSG && hdr_len >= sizeof prefix + 8) {
        ep->heard++;
        sink->recv(&ep->base, hdr + sizeof prefix, hdr_len - sizeof prefix, payload, len);
    } else if (prefix.kind == HR_BOND_NOTICE && hdr_len == sizeof notice) {
        ep->heard++;
        memcpy(&notice, hdr, sizeof notice);
        sink->notify(&ep->base, notice.value, notice.nbytes);
    } else if (prefix.kind == HR_BOND_WORD && hdr_len == sizeof word) {
        memcpy(&word, hdr, sizeof word);
        hr_bond_on_word(ep, &word);
    } else {
        hr_bond_fail(ep, HR_ERR_PROTOCOL, "the peer sent a message that cannot be");
    }
}

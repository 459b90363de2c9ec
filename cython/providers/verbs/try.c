/* try.c - pairs of GIDs tried until one carries packets both ways: the last part of making a connection. */

/*
 * What a port says of itself does not tell whether its packets get anywhere: a firewall may drop RoCE where TCP
 * passes, a VLAN may end at a switch, a GID may be of an address that is gone. So a pair of paths is used when it was
 * seen to work. In each turn both ends, over the socket of the call:
 *
 *   TRY    my queue pair for this turn
 *   READY  it can receive and send, having heard TRY: now yours may greet it
 *   GOOD   it was greeted and its own greetings were taken, or
 *   BAD    it was not in time, or failed, and why: both go to the next turn, and can say the same of this one
 *
 * A greeting is two messages on the queue pair: a few bytes, and as many as a packet may have, which tells a network
 * that carries nothing from one that carries small packets only. The connection is open where both said GOOD; what the
 * peer's queue pair sends after its greetings is as good as the word GOOD, and may come before that does.
 *
 * Where another pair is left, packets have PATIENCE from when both ends are ready. The last pair, and a peer that says
 * nothing over the socket, which no other pair would mend, have the time that the engine gives; but for the packets of
 * a lane beside others, whose retries last longer than anybody waits.
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "providers/verbs/verbs.h"

#define PATIENCE (2000 * HR_VERBS_MS)
enum { GREETINGS = 2 };

static const char *const left = "the peer left before the connection was open";

static const struct hr_verbs_path *own_path(const struct hr_verbs_call *call) {
    const struct hr_verbs_pair *pair = &call->pairs[call->turn];
    return &call->paths.list[call->active ? pair->active : pair->passive];
}

static const struct hr_verbs_end *peers_end(const struct hr_verbs_call *call) {
    const struct hr_verbs_pair *pair = &call->pairs[call->turn];
    return &call->open.paths[call->active ? pair->passive : pair->active];
}

/* What a packet on this pair may carry. */
static uint32_t packet_bytes(const struct hr_verbs_call *call) {
    uint8_t here = own_path(call)->mtu, there = peers_end(call)->mtu;
    return 128u << (here < there ? here : there);
}

/* 0: the peer is gone, and the call with it. */
static int say_why(struct hr_verbs_call *call, enum hr_verbs_word_kind kind, uint32_t why) {
    struct hr_verbs_word word = {.kind = (uint16_t)kind, .turn = (uint16_t)call->turn, .why = why};
    if (kind == HR_VERBS_TRY) word.qpn = call->ep->qp->qp_num, word.psn = call->ep->psn, word.room = call->ep->promised;
    if (send(call->source.fd, &word, sizeof word, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof word) return 1;
    hr_verbs_ep_fail(call->ep, HR_ERR_UNREACHABLE, left, 0);
    return 0;
}

static int say(struct hr_verbs_call *call, enum hr_verbs_word_kind kind) { return say_why(call, kind, 0); }

/* The same at both ends, but for the name of the interface. */
static void cause(const struct hr_verbs_call *call, uint32_t why, char text[160]) {
    const char *ndev = own_path(call)->ndev;
    if (why == HR_VERBS_UNREACHABLE)
        snprintf(text, 160, "retries exceeded; TCP gets there, is UDP port 4791 open?");
    else if (why == HR_VERBS_NARROW)
        snprintf(text, 160, "packets of %u bytes do not get there, small ones do: ip link set %s mtu ...",
                 packet_bytes(call), *ndev ? ndev : "DEVICE");
    else if (why == HR_VERBS_SILENT)
        snprintf(text, 160, "no answer within %lld s; TCP gets there, is UDP port 4791 open?",
                 PATIENCE / (1000 * HR_VERBS_MS));
    else if (why == HR_VERBS_ONE_WAY)
        snprintf(text, 160, "packets get there, but none comes back");
    else if (why == HR_VERBS_NO_QP)
        snprintf(text, 160, "no queue pair can be brought up for it");
    else
        snprintf(text, 160, "%s", hr_verbs_wc_text((enum ibv_wc_status)(why - HR_VERBS_STATUS)));
}

static void note(struct hr_verbs_call *call, const char *what) {
    struct hr_verbs_domain *d = hr_verbs_domain_of(&call->ep->base);
    char to[64];
    hr_verbs_gid_text(&peers_end(call)->gid, to);
    snprintf(call->why, sizeof call->why, "GID %d: %.120s (to %s)", own_path(call)->index, what, to);
    memcpy(d->fallback, call->why, sizeof d->fallback);
}

static void start(struct hr_verbs_call *call);

/* This pair will not do. tell: why, of which the peer does not know yet; 0: it has said so. */
static void next(struct hr_verbs_call *call, const char *text, uint32_t tell) {
    struct hr_verbs_ep *ep = call->ep;
    note(call, text);
    if (tell && !say_why(call, HR_VERBS_BAD, tell)) return;
    if (++call->turn < call->npairs) {
        hr_verbs_qp_drop(ep);
        start(call);
        return;
    }
    char all[200];
    snprintf(all, sizeof all, "%.165s; the last of %d pairs", call->why, call->npairs);
    hr_verbs_ep_fail(ep, HR_ERR_UNREACHABLE, call->npairs > 1 ? all : call->why, 0);
}

static void start(struct hr_verbs_call *call) {
    char why[160];
    call->ready = call->acked = call->heard = call->greeted = call->good = call->their_good = 0;
    call->deadline = 0;
    hr_verbs_ep_renew(call->ep);
    hr_status status = hr_verbs_qp_open(call->ep, own_path(call), why);
    if (status == HR_OK)
        say(call, HR_VERBS_TRY);
    else if (status == HR_ERR_IO)
        next(call, why, HR_VERBS_NO_QP);
    else
        hr_verbs_ep_fail(call->ep, HR_ERR_UNREACHABLE, why, 0);
}

void hr_verbs_try(struct hr_verbs_call *call) {
    call->ep->peer_nonce = call->open.nonce;
    call->have = 0;
    call->npairs = call->active ? hr_verbs_pairs(&call->own, &call->open, call->pairs)
                                : hr_verbs_pairs(&call->open, &call->own, call->pairs);
    if (call->npairs)
        start(call);
    else
        hr_verbs_ep_fail(
            call->ep, HR_ERR_UNREACHABLE,
            "the two devices have no GIDs of one kind: give their interfaces addresses of one family (IPv4, "
            "or IPv6), or name a GID at both ends: HRDMA_VERBS=gid=...",
            0);
}

/* ---- greetings ---- */

static void judge(struct hr_verbs_call *call);

/* Device "tcp" has the socket on which this is said: that carries packets. It is given to it at the end. */
void hr_verbs_try_greet(struct hr_verbs_call *call) {
    if (call->ready == 2 && hr_verbs_domain_of(&call->ep->base)->is_tcp) {
        call->greeted = call->acked = call->heard = GREETINGS;
        judge(call);
        return;
    }
    while (call->ready == 2 && call->greeted < GREETINGS)
        if (hr_verbs_send_hello(call->ep, call->greeted ? packet_bytes(call) : 0))
            call->greeted++;
        else
            return; /* the endpoint is on the ready list */
}

static void open_at_both(struct hr_verbs_call *call) {
    hr_verbs_domain_of(&call->ep->base)->used = *own_path(call);
    hr_verbs_ep_up(call->ep);
}

static void judge(struct hr_verbs_call *call) {
    if (call->good || call->acked < GREETINGS || call->heard < GREETINGS) return;
    call->good = 1;
    call->deadline = 0;
    if (say(call, HR_VERBS_GOOD) && call->their_good) open_at_both(call);
}

static void failed(struct hr_verbs_call *call, enum ibv_wc_status status, uint32_t vendor) {
    struct hr_verbs_ep *ep = call->ep;
    int turn = call->turn;
    char text[160], all[200];
    if (call->good) {
        hr_verbs_ep_fail(ep, HR_ERR_UNREACHABLE, hr_verbs_wc_text(status), 0);
        return;
    }
    /* The peer may have found out first, and let go of its queue pair: then its reason counts. */
    hr_verbs_try_event(call);
    if (ep->call != call || call->turn != turn) return;
    uint32_t why = status != IBV_WC_RETRY_EXC_ERR ? HR_VERBS_STATUS + (uint32_t)status
                   : call->acked                  ? HR_VERBS_NARROW
                                                  : HR_VERBS_UNREACHABLE;
    cause(call, why, text);
    snprintf(all, sizeof all, why == HR_VERBS_NARROW ? "%s" : "%s (vendor code 0x%x)", text, vendor);
    next(call, all, why);
}

static int is_hello(const struct hr_verbs_ep *ep, const struct ibv_wc *wc) {
    const uint8_t *bytes = hr_verbs_message(ep, wc);
    struct hr_verbs_prefix prefix;
    if (!bytes || wc->byte_len < sizeof prefix) return 0;
    memcpy(&prefix, bytes, sizeof prefix);
    return prefix.kind == HR_VERBS_HELLO;
}

int hr_verbs_try_completion(struct hr_verbs_ep *ep, const struct ibv_wc *wc) {
    struct hr_verbs_call *call = ep->call;
    struct hr_verbs_inject *inject = &hr_verbs_domain_of(&ep->base)->inject;
    int received = hr_verbs_is_recv(wc);
    enum ibv_wc_status status = wc->status;
    if (!call || call->step != HR_VERBS_TRYING) return 1; /* there is no queue pair */
    if (status == IBV_WC_SUCCESS && !received && hr_verbs_inject_try(inject, call->turn, call->acked))
        status = IBV_WC_RETRY_EXC_ERR;
    if (status != IBV_WC_SUCCESS) {
        failed(call, status, wc->vendor_err);
    } else if (!received) {
        hr_verbs_sent(ep, wc);
        call->acked++;
        judge(call);
    } else if (is_hello(ep, wc)) {
        hr_verbs_give_back(ep, wc, 0);
        call->heard++;
        judge(call);
    } else if (call->good) {
        open_at_both(call);
        return 0;
    } else {
        hr_verbs_give_back(ep, wc, 0);
        hr_verbs_ep_fail(ep, HR_ERR_PROTOCOL, "the peer sent a message on a connection that is not open", 0);
    }
    return 1;
}

/* ---- words ---- */

static int sound(const struct hr_verbs_word *word) {
    int of_try = word->qpn || word->psn || word->room, known = word->why > 0 && word->why < HR_VERBS_BAD_END;
    if (word->kind == HR_VERBS_TRY) return word->room && word->room <= HR_VERBS_RECVS && !word->why;
    if (word->kind != HR_VERBS_BAD) return !of_try && !word->why;
    return !of_try && known && (word->why <= HR_VERBS_NO_QP || word->why > HR_VERBS_STATUS);
}

static void hear(struct hr_verbs_call *call) {
    struct hr_verbs_ep *ep = call->ep;
    const struct hr_verbs_word *word = &call->word;
    char why[160], all[200];
    int ours = word->turn == call->turn && sound(word);
    if (word->turn < call->turn) return; /* both found that pair bad */
    if (ours && word->kind == HR_VERBS_TRY && !call->ready) {
        hr_status status = hr_verbs_qp_up(ep, own_path(call), &call->open, peers_end(call), word, why);
        call->ready = 1;
        if (status != HR_OK)
            next(call, why, HR_VERBS_NO_QP);
        else
            say(call, HR_VERBS_READY);
    } else if (ours && word->kind == HR_VERBS_READY && call->ready == 1) {
        call->ready = 2;
        if (call->turn + 1 < call->npairs || ep->bond) call->deadline = hr_now() + PATIENCE;
        hr_verbs_try_greet(call);
    } else if (ours && word->kind == HR_VERBS_GOOD && call->ready == 2) {
        call->their_good = 1;
        if (call->good) open_at_both(call);
    } else if (ours && word->kind == HR_VERBS_BAD) {
        cause(call, word->why, why);
        snprintf(all, sizeof all, "the peer found: %s", why);
        next(call, all, 0);
    } else {
        hr_verbs_ep_fail(ep, HR_ERR_PROTOCOL, "the peer says what makes no sense while queue pairs are tried", 0);
    }
}

void hr_verbs_try_event(struct hr_verbs_call *call) {
    struct hr_verbs_ep *ep = call->ep;
    while (ep->call == call) {
        ssize_t n =
            recv(call->source.fd, (uint8_t *)&call->word + call->have, sizeof call->word - call->have, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (n <= 0) {
            hr_verbs_ep_fail(ep, HR_ERR_UNREACHABLE, *call->why ? call->why : left, 0);
            return;
        }
        call->have += (uint32_t)n;
        if (call->have < sizeof call->word) continue;
        call->have = 0;
        hear(call);
    }
}

void hr_verbs_try_late(struct hr_verbs_call *call) {
    uint32_t why = !call->acked ? HR_VERBS_SILENT : call->acked < GREETINGS ? HR_VERBS_NARROW : HR_VERBS_ONE_WAY;
    char text[160];
    if (call->acked == GREETINGS && call->turn + 1 == call->npairs) { /* the peer is busy */
        call->deadline = 0;
        return;
    }
    cause(call, why, text);
    next(call, text, why);
}

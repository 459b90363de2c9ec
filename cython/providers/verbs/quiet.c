/* quiet.c - memory taken back from a peer that may be writing to it, without breaking the connection. */

/*
 * The device cannot keep a peer's writes out of memory but by breaking the queue pair. So the peer's provider is asked:
 * REVOKE names the registration; it marks that, forgets what it has not posted, and answers REVOKED on the queue pair
 * on which its writes went: what it had posted lands before the answer does. Who asks waits for that, as the memory
 * must be safe when the caller's call returns. Meanwhile it answers whoever asks it, or two that ask each other would
 * wait in vain. All else that arrives is kept for progress. A peer that is dead cannot answer, and may have been told
 * of by another before its connection ends here: so the end of its socket is looked for as well.
 */

#define _GNU_SOURCE /* POLLRDHUP */
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <time.h>

#include "providers/verbs/bond.h"

#define PATIENCE (1000 * HR_VERBS_MS) /* with more threads than cores an answer can take a tenth of that */

int hr_verbs_is_revoked(const struct hr_verbs_ep *ep, uint32_t serial) {
    uint32_t n = ep->nrevoked < HR_VERBS_REVOCATIONS ? ep->nrevoked : HR_VERBS_REVOCATIONS;
    for (uint32_t i = 0; i < n; i++)
        if (ep->revoked[i] == serial) return 1;
    return 0;
}

void hr_verbs_answer(struct hr_verbs_ep *ep) {
    if (ep->answer && hr_verbs_send_control(ep, HR_VERBS_REVOKED, ep->answer)) ep->answer = 0;
}

/* An operation that waits in the queue is over as far as it goes; progress tells its end. */
void hr_verbs_on_revoke(struct hr_verbs_ep *ep, uint32_t serial) {
    ep->revoked[ep->nrevoked++ % HR_VERBS_REVOCATIONS] = serial;
    for (int i = 0; i < HR_VERBS_OPS; i++) {
        struct hr_verbs_op *op = &ep->ops[i];
        if (!op->in_use || op->posted_all || op->is_read || op->serial != serial) continue;
        op->posted = op->len;
        op->notify = 0;
        hr_verbs_ep_ready(ep);
    }
    if (ep->bond) hr_bond_on_revoke(ep->bond, serial);
    ep->answer = serial;
    hr_verbs_answer(ep);
}

/* Takes the control messages out of what was fetched. */
void hr_verbs_quiet_look(struct hr_verbs_domain *d) {
    for (int i = d->stash_at; i < d->stashed; i++) {
        struct ibv_wc wc = d->stash[i];
        struct hr_verbs_ep *ep = hr_verbs_ep_find(d, &wc);
        if (!ep || ep->state != HR_VERBS_UP) continue;
        if (hr_verbs_control(ep, &wc))
            d->stash[i].wr_id = HR_VERBS_NOBODY;
        else
            hr_verbs_ended_early(ep, &wc);
        hr_verbs_answer(ep);
    }
}

void hr_verbs_quiet_rest(int64_t start) {
    if (hr_now() - start < HR_VERBS_MS)
        sched_yield();
    else /* the peer computes, or is gone */
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
}

int hr_verbs_hung_up(const struct hr_verbs_ep *ep) {
    struct pollfd socket = {.fd = ep->source.fd, .events = POLLRDHUP};
    return poll(&socket, 1, 0) > 0;
}

hr_status hr_verbs_mem_quiet(struct hr_ep *base, const struct hr_mem *mem) {
    struct hr_verbs_ep *ep = (struct hr_verbs_ep *)base;
    struct hr_verbs_domain *d = hr_verbs_domain_of(base);
    int64_t start = hr_now(), limit = start + PATIENCE;
    uint32_t serial = (uint32_t)(mem->rkey >> 32);
    int asked = 0, over = 0;
    if (!(mem->access & (HR_ACCESS_REMOTE_WRITE | HR_ACCESS_REMOTE_ATOMIC))) return HR_OK;
    if (ep->state == HR_VERBS_LOST || ep->state == HR_VERBS_CLOSED) return HR_OK; /* its queue pair is broken */
    ep->answered = 0;
    while (ep->state == HR_VERBS_UP && ep->answered != serial && !over) {
        if (!asked) asked = hr_verbs_send_control(ep, HR_VERBS_REVOKE, serial);
        over = hr_verbs_hung_up(ep) || hr_now() > limit; /* what it answered before is there */
        if (hr_verbs_fetch(d) < 0) break;
        hr_verbs_quiet_look(d);
        if (ep->answered != serial) hr_verbs_quiet_rest(start);
    }
    return ep->answered == serial ? HR_OK : HR_ERR_UNSUPPORTED;
}

/* hold.c - operations that the fault provider has taken and does not let through yet. */

/*
 * Each endpoint has one queue, in order of posting. An operation is at the head until it is due; those behind it wait
 * for it whatever their own time, so that order holds, with one exception: an operation marked `overtaken` lets exactly
 * the next one pass. What is only to be reported, or never ends, does not hold up the others.
 */

#include "fault.h"

#include <stdlib.h>
#include <string.h>
#include <sys/timerfd.h>
#include <time.h>

enum { MAX_HELD = 64 }; /* on one endpoint; the engine keeps the rest */

hr_status hr_fault_post(struct fault_ep *ep, enum fault_op op, const void *args) {
    const struct hr_provider *ops = ep->inner->domain->ops;
    switch (op) {
    case FAULT_SEND: return ops->post_send(ep->inner, args);
    case FAULT_WRITE: return ops->post_write(ep->inner, args);
    case FAULT_QUIET:
    case FAULT_PUT: break; /* are not posted */
    case FAULT_READ: return ops->post_read(ep->inner, args);
    case FAULT_ATOMIC: return ops->post_atomic(ep->inner, args);
    }
    return HR_ERR_INVALID;
}

static void *cookie_of(const struct fault_held *held) {
    switch (held->op) {
    case FAULT_SEND: return held->msg.cookie;
    case FAULT_ATOMIC: return held->atomic.cookie;
    default: return held->rma.cookie;
    }
}

hr_status hr_fault_hold(struct fault_ep *ep, enum fault_op op, const void *args, enum fault_fate fate, int64_t due,
                        int overtaken) {
    struct fault_domain *domain = (struct fault_domain *)ep->base.domain;
    struct fault_held *held;
    const struct hr_mem **mem_p;

    if (ep->nheld == MAX_HELD) return HR_AGAIN;
    held = calloc(1, sizeof *held);
    if (!held) return HR_ERR_NOMEM;
    held->op = op;
    held->fate = fate;
    held->status = HR_ERR_IO;
    held->due = due;
    held->overtaken = overtaken;
    if (op == FAULT_SEND) {
        held->msg = *(const struct hr_msg *)args;
        memcpy(held->hdr, held->msg.hdr, held->msg.hdr_len);
        held->msg.hdr = held->hdr;
        mem_p = &held->msg.mem;
    } else if (op == FAULT_ATOMIC) {
        held->atomic = *(const struct hr_atomic *)args;
        held->remote = *held->atomic.remote;
        held->atomic.remote = &held->remote;
        mem_p = &held->atomic.mem;
    } else {
        held->rma = *(const struct hr_rma *)args;
        held->remote = *held->rma.remote;
        held->rma.remote = &held->remote;
        mem_p = &held->rma.mem;
    }
    if (*mem_p) {
        held->mem = **mem_p;
        *mem_p = &held->mem;
    }
    *ep->tail = held;
    ep->tail = &held->next;
    ep->nheld++;
    domain->pending++;
    if (domain->armed) hr_fault_set_timer(domain); /* somebody sleeps already */
    return HR_INPROGRESS;
}

struct fault_held *hr_fault_first(struct fault_ep *ep) {
    struct fault_held *held = ep->held;
    while (held && held->fate != HELD_ISSUE) held = held->next;
    return held;
}

static void unlink_held(struct fault_ep *ep, struct fault_held **at) {
    struct fault_held *held = *at;
    *at = held->next;
    if (!held->next) ep->tail = at;
    ep->nheld--;
    ((struct fault_domain *)ep->base.domain)->pending--;
    free(held);
}

/* What waits for nothing more but its time: the place in the queue of the next that may go, or NULL. */
static struct fault_held **next_due(struct fault_ep *ep, int64_t now) {
    int blocked = 0;
    for (struct fault_held **at = &ep->held; *at; at = &(*at)->next) {
        struct fault_held *held = *at;
        if (held->fate == HELD_NEVER || (blocked && held->fate == HELD_ISSUE)) continue;
        if (held->due <= now) return at;
        if (held->fate == HELD_ISSUE) blocked = 1;
    }
    return NULL;
}

static int run_ep(struct fault_ep *ep, int budget, int64_t now) {
    const struct hr_sink *sink = ep->base.domain->sink;
    struct fault_held **at;
    int n = 0;
    while (n < budget && !ep->lost && (at = next_due(ep, now))) {
        void *cookie = cookie_of(*at);
        hr_status status = (*at)->status;
        if ((*at)->fate == HELD_ISSUE) status = hr_fault_post(ep, (*at)->op, &(*at)->msg);
        ep->stalled = status == HR_AGAIN;
        if (ep->stalled) break;
        unlink_held(ep, at);
        n++;
        if (status != HR_INPROGRESS) sink->done(&ep->base, cookie, status);
    }
    return n;
}

int hr_fault_run(struct fault_domain *domain, int budget) {
    int64_t now = hr_now();
    int n = 0;
    for (struct fault_ep *ep = domain->eps; ep && n < budget; ep = ep->next)
        if (ep->held) n += run_ep(ep, budget - n, now);
    return n;
}

void hr_fault_overtaken(struct fault_ep *ep, struct fault_held *held) {
    struct fault_domain *domain = (struct fault_domain *)ep->base.domain;
    struct fault_held **at = &ep->held;
    hr_status status = hr_fault_post(ep, held->op, &held->msg);
    held->overtaken = 0;
    held->due = 0;
    if (status == HR_INPROGRESS) { /* the inner provider will report it */
        while (*at != held) at = &(*at)->next;
        unlink_held(ep, at);
        return;
    }
    if (status != HR_AGAIN) { /* ended, but a callback may only come from progress() */
        held->fate = HELD_REPORT;
        held->status = status;
    }
    if (domain->armed) hr_fault_set_timer(domain);
}

int hr_fault_withdraw(struct fault_ep *ep, void *cookie) {
    for (struct fault_held **at = &ep->held; *at; at = &(*at)->next) {
        if (cookie_of(*at) != cookie) continue;
        unlink_held(ep, at);
        return 1;
    }
    return 0;
}

void hr_fault_forget(struct fault_ep *ep) {
    while (ep->held) unlink_held(ep, &ep->held);
}

uint64_t hr_fault_bytes(const struct fault_ep *ep) {
    uint64_t bytes = 0;
    for (const struct fault_held *held = ep->held; held; held = held->next) {
        if (held->fate != HELD_ISSUE) continue;
        if (held->op == FAULT_SEND) bytes += held->msg.len + held->msg.hdr_len;
        if (held->op == FAULT_WRITE) bytes += held->rma.len;
    }
    return bytes;
}

int64_t hr_fault_due(const struct fault_domain *domain) {
    int64_t due = INT64_MAX;
    for (const struct fault_ep *ep = domain->eps; ep; ep = ep->next) {
        int blocked = ep->stalled;
        if (ep->killed && !ep->lost) return 0;
        for (const struct fault_held *held = ep->held; held && !ep->lost; held = held->next) {
            if (held->fate == HELD_NEVER || (blocked && held->fate == HELD_ISSUE)) continue;
            if (held->fate == HELD_ISSUE) blocked = 1;
            if (held->due < due) due = held->due;
        }
    }
    return due;
}

void hr_fault_set_timer(struct fault_domain *domain) {
    int64_t due = hr_fault_due(domain);
    struct itimerspec at = {0};
    if (due != INT64_MAX) {
        if (due <= 0) due = 1; /* long ago, and not "off" */
        at.it_value.tv_sec = due / 1000000000;
        at.it_value.tv_nsec = due % 1000000000;
    }
    timerfd_settime(domain->timer, TFD_TIMER_ABSTIME, &at, NULL);
}

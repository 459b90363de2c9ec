/* fault.c - a provider that wraps another and makes it fail, by plan: what a network does once a year, on every run. */

/*
 * What may happen to an operation (options as in "seed=7,drop=0.01,delay=0.05:2ms,ops=send+write"):
 *
 *   drop=P        a message or write vanishes though HR_OK was said; a read or atomic never ends; memory is called
 *                 quiet that is not
 *   delay=P:T     it leaves a time T later; what is posted after it on the endpoint waits behind it
 *   reorder=P     the next message or write on the endpoint leaves before this one
 *   truncate=P    only the first half of the bytes is moved
 *   error=P       HR_ERR_IO, returned by the call or by done, half of the time each
 *   kill=after:N  the endpoint of the operation after the N-th is aborted; kill=process:N sends SIGKILL
 *   stop=after:N  SIGSTOP
 *   ops=A+B       only these of send, write, read, atomic, quiet, put are hit and counted; without it the first four
 *   budget=N      at most N faults by chance
 *   seed=N        another course of events
 *
 * Each endpoint has a generator of its own, so what hits its n-th operation depends on seed, ids and n, not on timing.
 * Faults are counted when they take effect (a reorder when something did overtake), see hr/fault.h.
 *
 * The wrapper is the inner domain's sink and hands events on, with its own endpoints in place of the inner ones. What
 * it holds back needs a wake-up of its own: event_fd is an epoll descriptor over the inner one and a timer.
 */

#include "fault.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

/* How long an operation waits to be overtaken before it leaves after all. */
static const int64_t overtake_ns = 5000000;

static struct fault_domain *of_domain(struct hr_domain *domain) { return (struct fault_domain *)domain; }
static struct fault_ep *of_ep(struct hr_ep *ep) { return (struct fault_ep *)ep; }
static const struct hr_provider *inner_ops(struct hr_ep *ep) { return of_ep(ep)->inner->domain->ops; }

int hr_fault_counts(struct hr_domain *base, const char **names, uint64_t *values, int n) {
    if (base->ops != &hr_provider_fault) return 0;
    for (int i = 0; i < n && i < HR_FAULT_KINDS; i++) {
        names[i] = hr_fault_names[i];
        values[i] = of_domain(base)->counts[i];
    }
    return HR_FAULT_KINDS;
}

/* ---- events from the inner provider ---- */

static void on_recv(struct hr_ep *inner, const void *hdr, size_t hdr_len, const void *payload, size_t len) {
    struct hr_ep *ep = inner->ctx;
    ep->domain->sink->recv(ep, hdr, hdr_len, payload, len);
}

static void on_done(struct hr_ep *inner, void *cookie, hr_status status) {
    struct hr_ep *ep = inner->ctx;
    ep->domain->sink->done(ep, cookie, status);
}

static void on_notify(struct hr_ep *inner, uint64_t value, size_t nbytes) {
    struct hr_ep *ep = inner->ctx;
    ep->domain->sink->notify(ep, value, nbytes);
}

static void lose(struct fault_ep *ep, hr_status status, const char *detail) {
    hr_fault_forget(ep);
    ep->lost = 1;
    ep->base.domain->sink->state(&ep->base, status, detail);
}

static void on_state(struct hr_ep *inner, hr_status status, const char *detail) {
    struct fault_ep *ep = inner->ctx;
    if (status != HR_OK) {
        lose(ep, status, detail);
        return;
    }
    ep->connected = 1;
    ep->base.puts = inner->puts;
    ep->base.domain->sink->state(&ep->base, status, detail);
}

static void on_carrier(struct hr_ep *inner, const char *by, const char *detail) {
    struct fault_ep *ep = inner->ctx;
    if (ep->base.domain->sink->carrier) ep->base.domain->sink->carrier(&ep->base, by, detail);
}

static void on_stranger(struct hr_domain *inner, const char *detail) {
    struct hr_domain *base = &((struct fault_domain *)inner->owner)->base;
    if (base->sink->stranger) base->sink->stranger(base, detail);
}

/* ---- device and domain ---- */

static int fault_device_count(const char **why_p) {
    *why_p = "wraps another provider and has no device of its own";
    return 0;
}

static hr_status open_events(struct fault_domain *domain) {
    int inner_fd = domain->inner->ops->event_fd(domain->inner);
    struct epoll_event event = {.events = EPOLLIN};
    if (inner_fd < 0) return HR_OK; /* the inner one must be polled, so must we */
    domain->epoll = epoll_create1(EPOLL_CLOEXEC);
    domain->timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (domain->epoll < 0 || domain->timer < 0) return HR_ERR_NOMEM;
    if (epoll_ctl(domain->epoll, EPOLL_CTL_ADD, inner_fd, &event) < 0) return HR_ERR_NOMEM;
    return epoll_ctl(domain->epoll, EPOLL_CTL_ADD, domain->timer, &event) < 0 ? HR_ERR_NOMEM : HR_OK;
}

static void fault_domain_close(struct hr_domain *base) {
    struct fault_domain *domain = of_domain(base);
    if (domain->timer >= 0) close(domain->timer);
    if (domain->epoll >= 0) close(domain->epoll);
    if (domain->inner) domain->inner->ops->domain_close(domain->inner);
    free(domain);
}

static hr_status fault_domain_open(const struct hr_provider *self, const struct hr_domain_params *params,
                                   struct hr_domain **domain_p, char detail[256]) {
    struct hr_domain_params inner_params = *params;
    struct fault_plan plan;
    struct fault_domain *domain;
    hr_status status = hr_fault_parse(params->options, &plan, detail);

    if (status != HR_OK) return status;
    if (!params->inner) {
        snprintf(detail, 256, "fault: no provider to wrap was given");
        return HR_ERR_INVALID;
    }
    domain = calloc(1, sizeof *domain);
    if (!domain) {
        snprintf(detail, 256, "fault: %s", strerror(ENOMEM));
        return HR_ERR_NOMEM;
    }
    domain->plan = plan;
    domain->epoll = domain->timer = -1;
    domain->sink = (struct hr_sink){on_recv, on_done, on_notify, on_state, on_carrier, on_stranger};
    inner_params.sink = &domain->sink;
    inner_params.owner = domain;
    inner_params.options = NULL; /* they were ours */
    inner_params.inner = NULL;
    status = params->inner->domain_open(params->inner, &inner_params, &domain->inner, detail);
    if (status == HR_OK && (status = open_events(domain)) != HR_OK)
        snprintf(detail, 256, "fault: cannot make a timer: %s", strerror(errno));
    if (status != HR_OK) {
        fault_domain_close(&domain->base);
        return status;
    }
    domain->plan.seed ^= params->self_id * 0x9e3779b97f4a7c15u; /* peers with one seed do not fail in step */
    domain->base = (struct hr_domain){.ops = self, .sink = params->sink, .owner = params->owner};
    memcpy(domain->base.left, domain->inner->left, sizeof domain->base.left);
    domain->base.caps = domain->inner->caps;
    domain->base.caps.flags &= ~(uint32_t)(HR_CAP_CONFIRMS | HR_CAP_FILLS); /* things vanish, overtake, are held back */
    *domain_p = &domain->base;
    return HR_OK;
}

static size_t fault_domain_address(struct hr_domain *base, void *addr) {
    struct hr_domain *inner = of_domain(base)->inner;
    return inner->ops->domain_address(inner, addr);
}

static void fault_domain_describe(struct hr_domain *base, char *text, size_t size) {
    struct hr_domain *inner = of_domain(base)->inner;
    char inner_text[HR_ABOUT];
    inner->ops->domain_describe(inner, inner_text, sizeof inner_text);
    snprintf(text, size, "fault(%s: %s)", inner->ops->name, inner_text);
}

/* ---- memory: the inner provider's throughout ---- */

static hr_status fault_mem_register(struct hr_domain *base, void *addr, size_t len, uint32_t access,
                                    struct hr_mem *mem_p) {
    struct hr_domain *inner = of_domain(base)->inner;
    hr_status status = inner->ops->mem_register(inner, addr, len, access, mem_p);
    if (status == HR_ERR_NOMEM) memcpy(base->refused, inner->refused, sizeof base->refused);
    return status;
}

static void fault_mem_deregister(struct hr_domain *base, struct hr_mem *mem) {
    struct hr_domain *inner = of_domain(base)->inner;
    inner->ops->mem_deregister(inner, mem);
}

static hr_status fault_mem_export(struct hr_ep *ep, const struct hr_mem *mem, void *addr, size_t len,
                                  struct hr_desc *desc_p) {
    return inner_ops(ep)->mem_export(of_ep(ep)->inner, mem, addr, len, desc_p);
}

static hr_status fault_mem_import(struct hr_ep *ep, const struct hr_desc *desc, struct hr_rmem *rmem_p) {
    return inner_ops(ep)->mem_import(of_ep(ep)->inner, desc, rmem_p);
}

static void fault_mem_release(struct hr_ep *ep, struct hr_rmem *rmem) {
    inner_ops(ep)->mem_release(of_ep(ep)->inner, rmem);
}

/* ---- endpoints ---- */

static hr_status fault_ep_create(struct hr_domain *base, uint64_t peer_id, void *ctx, struct hr_ep **ep_p) {
    struct fault_domain *domain = of_domain(base);
    struct fault_ep *ep = calloc(1, sizeof *ep);
    hr_status status;
    if (!ep) return HR_ERR_NOMEM;
    status = domain->inner->ops->ep_create(domain->inner, peer_id, ep, &ep->inner);
    if (status != HR_OK) {
        free(ep);
        return status;
    }
    ep->base = (struct hr_ep){.domain = base, .ctx = ctx, .peer_id = peer_id};
    ep->tail = &ep->held;
    hr_fault_seed(&ep->random, domain->plan.seed + (peer_id << 16) + domain->nth_ep++);
    ep->next = domain->eps;
    if (ep->next) ep->next->prev = ep;
    domain->eps = ep;
    *ep_p = &ep->base;
    return HR_OK;
}

static hr_status fault_ep_connect(struct hr_ep *ep, const void *addr, size_t addr_len, int active) {
    of_ep(ep)->inner->channel = ep->channel;
    return inner_ops(ep)->ep_connect(of_ep(ep)->inner, addr, addr_len, active);
}

static void fault_ep_abort(struct hr_ep *base) {
    struct fault_ep *ep = of_ep(base);
    hr_fault_forget(ep);
    ep->lost = 1;
    inner_ops(base)->ep_abort(ep->inner);
}

static void fault_ep_destroy(struct hr_ep *base) {
    struct fault_ep *ep = of_ep(base);
    struct fault_domain *domain = of_domain(base->domain);
    hr_fault_forget(ep);
    if (ep->killed) domain->pending--;
    if (ep->next) ep->next->prev = ep->prev;
    *(ep->prev ? &ep->prev->next : &domain->eps) = ep->next;
    inner_ops(base)->ep_destroy(ep->inner);
    free(ep);
}

static hr_status fault_ep_set_class(struct hr_ep *ep, int dscp, int priority) {
    return inner_ops(ep)->ep_set_class(of_ep(ep)->inner, dscp, priority);
}

static uint64_t fault_ep_unsent(struct hr_ep *ep) {
    return inner_ops(ep)->ep_unsent(of_ep(ep)->inner) + hr_fault_bytes(of_ep(ep));
}

/* ---- posting ---- */

static void count(struct fault_domain *domain, int kind) {
    domain->counts[kind]++;
    domain->injected += kind < FAULT_RATES;
    hr_fault_fired();
}

static int taken(hr_status status) { return status == HR_OK || status == HR_INPROGRESS; }

/* Past what is held, if that waits to be overtaken; behind it otherwise. */
static hr_status pass(struct fault_ep *ep, enum fault_op op, const void *args) {
    struct fault_domain *domain = of_domain(ep->base.domain);
    struct fault_held *first = hr_fault_first(ep);
    hr_status status;
    if (!first) return hr_fault_post(ep, op, args);
    if (!first->overtaken || !(op & (FAULT_SEND | FAULT_WRITE))) return hr_fault_hold(ep, op, args, HELD_ISSUE, 0, 0);
    status = hr_fault_post(ep, op, args);
    if (!taken(status)) return status;
    count(domain, FAULT_REORDER);
    hr_fault_overtaken(ep, first);
    return status;
}

/* Half of the bytes: a copy of the arguments, whose length is all that differs. */
static hr_status cut(struct fault_ep *ep, enum fault_op op, const void *args) {
    struct hr_msg msg;
    struct hr_rma rma;
    if (op == FAULT_SEND) {
        msg = *(const struct hr_msg *)args;
        msg.len /= 2;
        return pass(ep, op, &msg);
    }
    rma = *(const struct hr_rma *)args;
    rma.len /= 2;
    return pass(ep, op, &rma);
}

/* The fault that the draw means for this operation, or -1. */
static int choose(struct fault_ep *ep, enum fault_op op, size_t len) {
    const struct fault_domain *domain = of_domain(ep->base.domain);
    double at = (double)(ep->draw >> 11) * 0x1p-53, sum = 0;
    int kind = 0;

    if (!(domain->plan.ops & op) || domain->injected >= domain->plan.budget) return -1;
    for (; kind < FAULT_RATES; kind++) {
        sum += domain->plan.rate[kind];
        if (at < sum) break;
    }
    switch (kind) {
    case FAULT_RATES: return -1;
    case FAULT_TRUNCATE: return len ? kind : -1;
    case FAULT_REORDER: return op & (FAULT_SEND | FAULT_WRITE) && !hr_fault_first(ep) ? kind : -1;
    default: return kind;
    }
}

/* Of what is asked, not posted. */
static int befalls(struct fault_ep *ep, enum fault_op op, int kind) {
    struct fault_domain *domain = of_domain(ep->base.domain);
    if (!(domain->plan.ops & op)) return 0;
    ep->draw = hr_fault_next(&ep->random);
    if (choose(ep, op, 0) != kind) return 0;
    count(domain, kind);
    return 1;
}

/* drop: HR_OK, and nobody was asked. */
static hr_status fault_mem_quiet(struct hr_ep *base, const struct hr_mem *mem) {
    struct fault_ep *ep = of_ep(base);
    if (befalls(ep, FAULT_QUIET, FAULT_DROP)) return HR_OK;
    return inner_ops(base)->mem_quiet(ep->inner, mem);
}

static hr_status inject(struct fault_ep *ep, int kind, enum fault_op op, const void *args) {
    const struct fault_domain *domain = of_domain(ep->base.domain);
    switch (kind) {
    case FAULT_DROP:
        if (op & (FAULT_SEND | FAULT_WRITE)) return HR_OK;
        return hr_fault_hold(ep, op, args, HELD_NEVER, 0, 0);
    case FAULT_DELAY: return hr_fault_hold(ep, op, args, HELD_ISSUE, hr_now() + domain->plan.delay_ns, 0);
    case FAULT_REORDER: return hr_fault_hold(ep, op, args, HELD_ISSUE, hr_now() + overtake_ns, 1);
    case FAULT_TRUNCATE: return cut(ep, op, args);
    case FAULT_ERROR:
        if (ep->draw & 1) return HR_ERR_IO;
        return hr_fault_hold(ep, op, args, HELD_REPORT, 0, 0);
    default: return pass(ep, op, args);
    }
}

/* kill and stop. Returns whether the endpoint is dead by it: to abort it here might be inside the inner provider's
 * progress(), so that waits for ours. */
static int strike(struct fault_ep *ep) {
    struct fault_domain *domain = of_domain(ep->base.domain);
    if (domain->plan.stop_after && domain->operations == domain->plan.stop_after) {
        domain->plan.stop_after = 0;
        count(domain, FAULT_STOP);
        raise(SIGSTOP);
    }
    if (!domain->plan.kill_after || domain->operations != domain->plan.kill_after) return 0;
    domain->plan.kill_after = 0;
    count(domain, FAULT_KILL);
    if (domain->plan.kill_process) raise(SIGKILL);
    ep->killed = 1;
    domain->pending++;
    if (domain->armed) hr_fault_set_timer(domain);
    return 1;
}

static hr_status post(struct hr_ep *base, enum fault_op op, const void *args, size_t len) {
    struct fault_ep *ep = of_ep(base);
    struct fault_domain *domain = of_domain(base->domain);
    hr_status status;
    int kind;

    if (ep->killed) return ep->lost ? HR_ERR_PEER_LOST : HR_AGAIN;
    if (!ep->connected || ep->lost) return hr_fault_post(ep, op, args); /* the inner provider says what is wrong */
    if (domain->plan.ops & op && strike(ep)) return HR_AGAIN;
    if (!ep->drawn) ep->draw = hr_fault_next(&ep->random);
    kind = choose(ep, op, len);
    status = inject(ep, kind, op, args);
    ep->drawn = status == HR_AGAIN;
    if (ep->drawn) return status;
    if (domain->plan.ops & op) domain->operations++;
    /* A reorder counts when it has come about; an injected error is a refusal that counts. */
    if (kind >= 0 && kind != FAULT_REORDER && (taken(status) || kind == FAULT_ERROR)) count(domain, kind);
    return status;
}

static hr_status fault_post_send(struct hr_ep *ep, const struct hr_msg *msg) {
    if (msg->len > ep->domain->caps.max_send || msg->hdr_len > HR_MAX_HDR)
        return HR_ERR_INVALID; /* before it is held */
    return post(ep, FAULT_SEND, msg, msg->len);
}
static hr_status fault_post_write(struct hr_ep *ep, const struct hr_rma *rma) {
    if (!(ep->domain->caps.flags & HR_CAP_WRITE)) return HR_ERR_UNSUPPORTED;
    return post(ep, FAULT_WRITE, rma, rma->len);
}
static hr_status fault_post_read(struct hr_ep *ep, const struct hr_rma *rma) {
    if (!(ep->domain->caps.flags & HR_CAP_READ)) return HR_ERR_UNSUPPORTED;
    return post(ep, FAULT_READ, rma, rma->len);
}
static hr_status fault_post_atomic(struct hr_ep *ep, const struct hr_atomic *atomic) {
    if (!(ep->domain->caps.flags & HR_CAP_ATOMIC)) return HR_ERR_UNSUPPORTED;
    return post(ep, FAULT_ATOMIC, atomic, 0);
}

static hr_status fault_cancel(struct hr_ep *ep, void *cookie) {
    if (hr_fault_withdraw(of_ep(ep), cookie)) return HR_OK;
    return inner_ops(ep)->cancel(of_ep(ep)->inner, cookie);
}

/* The worst moment: it has been told that it may, and has not written yet. */
static int may_and_is_struck(void *arg) {
    struct fault_ep *ep = arg;
    int told = ep->may(ep->arg);
    if (told && of_domain(ep->base.domain)->plan.ops & FAULT_PUT) strike(ep);
    return told;
}

static hr_status fault_post_put(struct hr_ep *base, const struct hr_rma *rma, int (*may)(void *arg), void *arg) {
    struct fault_ep *ep = of_ep(base);
    struct fault_domain *domain = of_domain(base->domain);
    if (befalls(ep, FAULT_PUT, FAULT_ERROR)) return HR_ERR_IO;
    ep->may = may;
    ep->arg = arg;
    hr_status status = inner_ops(base)->post_put(ep->inner, rma, may_and_is_struck, ep);
    if (domain->plan.ops & FAULT_PUT) domain->operations++;
    return status;
}

/* ---- progress and sleeping ---- */

static int carry_out_kills(struct fault_domain *domain) {
    int n = 0;
    for (struct fault_ep *ep = domain->eps; ep; ep = ep->next) {
        if (!ep->killed || ep->lost) continue;
        ep->inner->domain->ops->ep_abort(ep->inner);
        lose(ep, HR_ERR_PEER_LOST, "fault: the endpoint was killed");
        n++;
    }
    return n;
}

static int fault_progress(struct hr_domain *base, int budget, struct hr_ep *hint) {
    struct fault_domain *domain = of_domain(base);
    int n = 0;
    if (domain->pending) {
        n = carry_out_kills(domain);
        n += hr_fault_run(domain, budget - n);
    }
    if (n >= budget) return n;
    return n + domain->inner->ops->progress(domain->inner, budget - n, hint ? of_ep(hint)->inner : NULL);
}

static int fault_event_fd(struct hr_domain *base) { return of_domain(base)->epoll; }

static void fault_event_disarm(struct hr_domain *base) {
    struct fault_domain *domain = of_domain(base);
    static const struct itimerspec off;
    domain->armed = 0;
    if (domain->timer >= 0) timerfd_settime(domain->timer, 0, &off, NULL);
    domain->inner->ops->event_disarm(domain->inner);
}

static hr_status fault_event_arm(struct hr_domain *base) {
    struct fault_domain *domain = of_domain(base);
    hr_status status;
    if (domain->pending && hr_fault_due(domain) <= hr_now()) return HR_AGAIN;
    status = domain->inner->ops->event_arm(domain->inner);
    if (status != HR_OK) return status;
    domain->armed = 1;
    if (domain->timer >= 0) hr_fault_set_timer(domain);
    return HR_OK;
}

const struct hr_provider hr_provider_fault = {
    .name = "fault",
    .device_count = fault_device_count,
    .domain_open = fault_domain_open,
    .domain_close = fault_domain_close,
    .domain_address = fault_domain_address,
    .domain_describe = fault_domain_describe,
    .mem_register = fault_mem_register,
    .mem_deregister = fault_mem_deregister,
    .mem_quiet = fault_mem_quiet,
    .mem_export = fault_mem_export,
    .mem_import = fault_mem_import,
    .mem_release = fault_mem_release,
    .ep_create = fault_ep_create,
    .ep_connect = fault_ep_connect,
    .ep_abort = fault_ep_abort,
    .ep_destroy = fault_ep_destroy,
    .ep_set_class = fault_ep_set_class,
    .ep_unsent = fault_ep_unsent,
    .post_send = fault_post_send,
    .post_write = fault_post_write,
    .post_read = fault_post_read,
    .post_atomic = fault_post_atomic,
    .post_put = fault_post_put,
    .cancel = fault_cancel,
    .progress = fault_progress,
    .event_fd = fault_event_fd,
    .event_arm = fault_event_arm,
    .event_disarm = fault_event_disarm,
};

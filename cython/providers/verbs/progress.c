/* progress.c - polling, what has become due, how to sleep. */

/*
 * The completion queue is asked first: one look at memory. The epoll over sockets and timers is a system call, and what
 * comes there is rare: it is asked every LOOK_EVERY-th time, and at once after a sleep or while connections are made.
 *
 * When a peer's socket ends, what it sent before may still be on its way from the device to the completion queue. The
 * end is told when the queue was found empty GRACE after it.
 *
 * Sleeping: event_arm fetches old events from the completion channel, asks the device for a new one and polls once
 * more. A completion before that poll is found by it and kept; one after it makes the channel readable, which is in the
 * epoll.
 */

#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "providers/verbs/verbs.h"

enum { LOOK_EVERY = 128 };
#define GRACE (2 * HR_VERBS_MS)
#define TICK (1 * HR_VERBS_MS)
#define SLOW_TICK (50 * HR_VERBS_MS)

const char *const hr_verbs_gone = "the RDMA device is gone";

/* ---- descriptors ---- */

void hr_verbs_unwatch(struct hr_verbs_domain *d, struct hr_source *source) {
    hr_poll_forget(&d->poll, source);
    if (source->fd >= 0) {
        shutdown(source->fd, SHUT_RDWR); /* a forked child may hold a copy: closing would not tell the peer */
        close(source->fd);
    }
    source->fd = -1;
}

/* Outside of progress somebody may be asleep who was told that nothing is pending. */
void hr_verbs_ep_ready(struct hr_verbs_ep *ep) {
    struct hr_verbs_domain *d = hr_verbs_domain_of(&ep->base);
    if (!hr_list_empty(&ep->ready)) return;
    hr_list_push(&d->ready, &ep->ready);
    if (!d->in_progress) eventfd_write(d->wake.fd, 1);
}

void hr_verbs_timer_update(struct hr_verbs_domain *d) {
    int64_t tick = !hr_list_empty(&d->ending) ? TICK : d->calling || hr_door_busy(&d->door) ? SLOW_TICK : 0;
    if (tick == d->tick) return;
    struct timespec every = {.tv_nsec = tick};
    struct itimerspec spec = {.it_interval = every, .it_value = every};
    timerfd_settime(d->timer.fd, 0, &spec, NULL);
    d->tick = tick;
}

/* Nothing is said on this socket any more, but for the word that was overtaken by the first message. */
static void ep_event(struct hr_verbs_ep *ep) {
    struct hr_verbs_domain *d = hr_verbs_domain_of(&ep->base);
    char bytes[16];
    ssize_t n = d->is_tcp ? 0 : read(ep->source.fd, bytes, sizeof bytes);
    if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR))) return;
    hr_poll_forget(&d->poll, &ep->source);
    hr_verbs_ep_end(ep, "the peer closed the connection");
}

/* Shared receives are not flushed when a queue pair breaks: who has nothing to send is told by this alone. */
static void broken(struct hr_verbs_domain *d, const struct ibv_async_event *event) {
    int queue = event->event_type == IBV_EVENT_SRQ_ERR;
    for (struct hr_link *l = d->eps.next; l != &d->eps; l = l->next) {
        struct hr_verbs_ep *ep = hr_container(l, struct hr_verbs_ep, link);
        if (queue ? ep->pool && ep->pool->srq == event->element.srq : ep->qp && ep->qp == event->element.qp)
            hr_verbs_ep_end(ep, queue ? "the shared receive queue has failed" : "the queue pair has failed");
    }
}

static void gone(struct hr_verbs_domain *d) {
    d->gone = 1;
    hr_verbs_calls_refuse(d);
    for (struct hr_link *l = d->eps.next; l != &d->eps; l = l->next) {
        struct hr_verbs_ep *ep = hr_container(l, struct hr_verbs_ep, link);
        if (ep->state != HR_VERBS_NEW) hr_verbs_ep_fail(ep, HR_ERR_PEER_LOST, hr_verbs_gone, 0);
    }
}

static void async_event(struct hr_verbs_domain *d) {
    struct ibv_async_event event;
    char ignored[256];
    if (d->verbs->get_async_event(d->ctx, &event)) return;
    enum ibv_event_type type = event.event_type;
    if (type == IBV_EVENT_QP_FATAL || type == IBV_EVENT_QP_REQ_ERR || type == IBV_EVENT_QP_ACCESS_ERR ||
        type == IBV_EVENT_QP_LAST_WQE_REACHED || type == IBV_EVENT_SRQ_ERR)
        broken(d, &event);
    d->verbs->ack_async_event(&event);
    if (type == IBV_EVENT_PORT_ACTIVE || type == IBV_EVENT_PORT_ERR || type == IBV_EVENT_LID_CHANGE ||
        type == IBV_EVENT_GID_CHANGE) /* for connections to come: those that stand are judged by their packets */
        hr_verbs_paths_scan(&d->wish, d->verbs, d->ctx, d->attr.phys_port_cnt, &d->paths, ignored);
    if (type == IBV_EVENT_DEVICE_FATAL) gone(d);
}

static void fetch_channel(struct hr_verbs_domain *d) {
    struct ibv_cq *cq;
    void *context;
    while (d->verbs->get_cq_event(d->channel, &cq, &context) == 0) d->verbs->ack_cq_events(cq, 1);
}

static void look(struct hr_verbs_domain *d) {
    struct hr_source *source;
    uint64_t count;
    uint32_t bits;
    hr_poll_fetch(&d->poll);
    while ((source = hr_poll_next(&d->poll, &bits))) {
        switch (source->kind) {
        case HR_VERBS_LISTENER: hr_door_accept(&d->door, hr_container(source, struct hr_listener, source)); break;
        case HR_VERBS_CALLER: hr_door_event(&d->door, hr_container(source, struct hr_caller, source)); break;
        case HR_VERBS_CALL: hr_verbs_call_event(d, hr_container(source, struct hr_verbs_call, source)); break;
        case HR_VERBS_EP: ep_event(hr_container(source, struct hr_verbs_ep, source)); break;
        case HR_VERBS_TIMER:
            if (read(source->fd, &count, sizeof count) > 0) hr_verbs_calls_tick(d, hr_now());
            break;
        case HR_VERBS_WAKE: eventfd_read(source->fd, &count); break;
        case HR_VERBS_CHANNEL: fetch_channel(d); break;
        case HR_VERBS_ASYNC: async_event(d); break;
        case HR_VERBS_REMOVED:
            if (hr_verbs_removed_event(d)) gone(d);
            break;
        }
    }
}

/* ---- completions ---- */

static int tell(struct hr_verbs_ep *ep) {
    if (!ep->told) return 0;
    ep->told = 0;
    ep->base.domain->sink->state(&ep->base, ep->tell, ep->tell == HR_OK ? NULL : ep->detail);
    return 1;
}

static int completion(struct hr_verbs_domain *d, struct hr_verbs_ep *ep, struct ibv_wc *wc) {
    if (hr_verbs_inject_wc(&d->inject, &ep->inject, wc)) {
        hr_verbs_qp_break(ep);
        if (hr_verbs_is_recv(wc)) hr_verbs_pool_back(ep, wc, 0);
    }
    if (wc->status == IBV_WC_SUCCESS && hr_verbs_is_recv(wc)) return hr_verbs_received(ep, wc);
    return hr_verbs_sent(ep, wc);
}

/* A receive that came to nothing is free at once; its end is told in its turn. */
static void spoilt(struct hr_verbs_domain *d, struct hr_verbs_ep *ep, const struct ibv_wc *wc) {
    if (!hr_verbs_is_recv(wc) || wc->status == IBV_WC_SUCCESS) return;
    hr_verbs_pool_back(ep, wc, 1);
    d->stash[d->stash_at].wr_id = HR_VERBS_NOBODY;
}

int hr_verbs_fetch(struct hr_verbs_domain *d) {
    if (!d->cq) return 0;
    if (d->stash_at == d->stashed) d->stash_at = d->stashed = 0;
    if (d->stashed + HR_VERBS_BATCH > d->stash_cap) {
        int cap = d->stash_cap ? 2 * d->stash_cap : HR_VERBS_BATCH;
        struct ibv_wc *stash = realloc(d->stash, (size_t)cap * sizeof *stash);
        if (!stash) return 0;
        d->stash = stash;
        d->stash_cap = cap;
    }
    int n = ibv_poll_cq(d->cq, HR_VERBS_BATCH, d->stash + d->stashed);
    if (n > 0) d->stashed += n;
    return n;
}

void hr_verbs_fetch_all(struct hr_verbs_domain *d) {
    while (hr_verbs_fetch(d) > 0) {}
}

/* Takes a batch when the last one is used up. Returns whether there is one. */
static int refill(struct hr_verbs_domain *d) {
    if (d->stash_at < d->stashed) return 1;
    int n = hr_verbs_fetch(d);
    if (n > 0) return 1;
    for (struct hr_link *l = d->eps.next; n < 0 && l != &d->eps; l = l->next)
        hr_verbs_ep_fail(hr_container(l, struct hr_verbs_ep, link), HR_ERR_PEER_LOST, "the completion queue has failed",
                         0);
    d->cq_used -= d->cq_stale; /* none of theirs can be left */
    d->cq_stale = 0;
    return 0;
}

static int run_completions(struct hr_verbs_domain *d, int budget) {
    int n = 0;
    while (n < budget && refill(d)) {
        struct ibv_wc found = d->stash[d->stash_at], *wc = &found; /* a callback may fetch more */
        struct hr_verbs_ep *ep = hr_verbs_ep_find(d, wc);
        if (ep && ep->told && ep->tell == HR_OK) { /* first things first; the completion comes next */
            n += tell(ep);
            continue;
        }
        if (ep) spoilt(d, ep, wc);
        if (ep && ep->state == HR_VERBS_CALLING) {
            d->stash_at += hr_verbs_try_completion(ep, wc);
            continue;
        }
        d->stash_at++;
        if (ep && (ep->state == HR_VERBS_UP || ep->state == HR_VERBS_ENDING))
            n += completion(d, ep, wc);
        else if (ep && hr_verbs_is_recv(wc) && wc->status == IBV_WC_SUCCESS)
            hr_verbs_pool_back(ep, wc, 0);
    }
    return n;
}

/* Who takes a device away is kept waiting until all who have it open have closed it. */
static int is_to_be_closed(const struct hr_verbs_domain *d) { return d->gone && d->ctx && hr_verbs_device_idle(d); }

/* ---- what endpoints could not say or finish before ---- */

static int run_one_ready(struct hr_verbs_ep *ep, int budget) {
    int n = 0;
    hr_list_remove(&ep->ready);
    n += tell(ep);
    if (ep->call && ep->call->step == HR_VERBS_TRYING) hr_verbs_try_greet(ep->call);
    if (ep->state != HR_VERBS_UP) return n;
    hr_verbs_repost(ep);
    if (ep->state == HR_VERBS_UP) hr_verbs_answer(ep);
    if (ep->state == HR_VERBS_UP) hr_verbs_give_room(ep);
    if (n < budget)
        n += hr_verbs_pump(ep, budget - n);
    else
        hr_verbs_ep_ready(ep);
    return n;
}

/* Each that is on the list now is served once; one that is put back waits for the next call. */
static int run_ready(struct hr_verbs_domain *d, int budget) {
    int n = 0;
    struct hr_link *last = d->ready.prev;
    while (!hr_list_empty(&d->ready) && n < budget) {
        struct hr_link *l = d->ready.next;
        n += run_one_ready(hr_container(l, struct hr_verbs_ep, ready), budget - n);
        if (l == last) break;
    }
    return n;
}

static void run_ending(struct hr_verbs_domain *d) {
    int64_t now = hr_now();
    for (struct hr_link *l = d->ending.next, *next; l != &d->ending; l = next) {
        struct hr_verbs_ep *ep = hr_container(l, struct hr_verbs_ep, end);
        next = l->next;
        if (now - ep->ended >= GRACE) hr_verbs_ep_fail(ep, HR_ERR_PEER_LOST, ep->end_why, 0);
    }
}

int hr_verbs_progress(struct hr_domain *domain, int budget, struct hr_ep *hint) {
    struct hr_verbs_domain *d = (struct hr_verbs_domain *)domain;
    int n = 0;
    (void)hint; /* all completions come in one queue, in the order in which they happened */
    d->in_progress = 1;
    hr_verbs_mem_tidy(d);
    if (!hr_list_empty(&d->ready)) n += run_ready(d, budget);
    if (n < budget) n += run_completions(d, budget - n);
    if (d->look || d->calling || d->door.half_open || d->door.parked || ++d->turn % LOOK_EVERY == 0) {
        d->look = 0;
        look(d);
        if (is_to_be_closed(d)) hr_verbs_device_close(d);
    }
    /* The queue was empty after the peer's end, or there would be no budget left. */
    if (n < budget && !hr_list_empty(&d->ending)) run_ending(d);
    d->in_progress = 0;
    return n;
}

/* ---- sleeping ---- */

int hr_verbs_event_fd(struct hr_domain *domain) { return ((struct hr_verbs_domain *)domain)->poll.fd; }

hr_status hr_verbs_event_arm(struct hr_domain *domain) {
    struct hr_verbs_domain *d = (struct hr_verbs_domain *)domain;
    d->look = 1;
    if (!hr_list_empty(&d->ready) || is_to_be_closed(d)) return HR_AGAIN;
    if (d->room) {
        d->room = 0; /* said once: the engine may have dropped what waited */
        return HR_AGAIN;
    }
    if (!d->cq) return HR_OK;
    fetch_channel(d);
    if (ibv_req_notify_cq(d->cq, 0)) return HR_AGAIN;
    return d->stash_at < d->stashed || hr_verbs_fetch(d) ? HR_AGAIN : HR_OK;
}

/* What the device still tells is fetched before the next sleep. */
void hr_verbs_event_disarm(struct hr_domain *domain) { ((struct hr_verbs_domain *)domain)->look = 1; }

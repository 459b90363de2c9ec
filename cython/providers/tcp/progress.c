/* progress.c - polling: whose turn it is, deadlines of connections being made, how to sleep. */

/*
 * A waiter names the endpoint it waits for: its socket is read directly, which costs one system call where asking the
 * epoll first would cost two. The epoll is asked when that gave nothing (every POLL_EVERY-th time, so that a spinning
 * waiter spends its time on its own socket; each time while something waits to be sent) and now and then when it gave
 * something. Every ALL_EVERY-th call the others go first, so a flood on the endpoint of the hint cannot starve them;
 * events that did not fit into the budget are kept and come first in the next call, so neither can one of the others.
 * No cost grows with the number of endpoints.
 *
 * Sleeping needs no arming, as epoll is level triggered: what is in the kernel keeps event_fd readable. What was
 * received and not delivered is known here only, and makes event_arm say so; what other calls note for progress to tell
 * writes an eventfd that is in the epoll too.
 */

#include <errno.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "providers/tcp/tcp.h"

#define POLL_EVERY 4
#define ALL_EVERY 16
#define TICK (50 * HR_TCP_MS)

void hr_tcp_unwatch(struct hr_tcp_domain *d, struct hr_source *source) {
    hr_poll_forget(&d->poll, source);
    if (source->fd >= 0) close(source->fd);
    source->fd = -1;
}

/* Outside of progress somebody may be asleep who was told that nothing is pending. */
void hr_tcp_ep_ready(struct hr_tcp_ep *ep) {
    struct hr_tcp_domain *d = hr_tcp_domain_of(&ep->base);
    if (!hr_list_empty(&ep->ready)) return;
    hr_list_push(&d->ready, &ep->ready);
    if (!d->in_progress) eventfd_write(d->wake.fd, 1);
}

void hr_tcp_timer_update(struct hr_tcp_domain *d) {
    int on = d->dialing || hr_door_busy(&d->door);
    if (on == d->timer_on) return;
    struct timespec tick = {.tv_nsec = on ? TICK : 0};
    struct itimerspec spec = {.it_interval = tick, .it_value = tick};
    timerfd_settime(d->timer.fd, 0, &spec, NULL);
    d->timer_on = on;
}

static void tick(struct hr_tcp_domain *d) {
    uint64_t expired;
    if (read(d->timer.fd, &expired, sizeof expired) < 0) return;
    int64_t now = hr_now();
    hr_door_tick(&d->door, now);
    if (!d->dialing) return;
    for (struct hr_link *l = d->eps.next; l != &d->eps; l = l->next)
        hr_tcp_dial_tick(hr_container(l, struct hr_tcp_ep, link), now);
}

static int ep_event(struct hr_tcp_ep *ep, uint32_t bits, int budget) {
    int n = 0;
    if (ep->state == HR_TCP_DIALING) {
        hr_tcp_dial_event(ep);
        return 0;
    }
    if (ep->told) return 0; /* first things first: it is on the ready list */
    if (ep->state == HR_TCP_UP && bits & EPOLLOUT) n += hr_tcp_flush(ep, budget);
    if (ep->state == HR_TCP_UP && bits & ~(uint32_t)EPOLLOUT) n += hr_tcp_receive(ep, budget - n);
    return n;
}

static int run_events(struct hr_tcp_domain *d, int budget) {
    struct hr_source *source;
    eventfd_t count;
    uint32_t bits;
    int n = 0;
    hr_poll_fetch(&d->poll);
    while (n < budget && (source = hr_poll_next(&d->poll, &bits))) {
        switch (source->kind) {
        case HR_TCP_EP: n += ep_event(hr_container(source, struct hr_tcp_ep, source), bits, budget - n); break;
        case HR_TCP_LISTENER: hr_door_accept(&d->door, hr_container(source, struct hr_listener, source)); break;
        case HR_TCP_CALLER: hr_door_event(&d->door, hr_container(source, struct hr_caller, source)); break;
        case HR_TCP_TIMER: tick(d); break;
        case HR_TCP_WAKE: eventfd_read(source->fd, &count); break;
        }
    }
    return n;
}

/* What an endpoint could not say or finish before. */
static int run_one_ready(struct hr_tcp_ep *ep, int budget) {
    int n = 0;
    hr_list_remove(&ep->ready);
    if (ep->told) {
        ep->told = 0;
        hr_tcp_domain_of(&ep->base)->base.sink->state(&ep->base, ep->tell, ep->tell == HR_OK ? NULL : ep->detail);
        n++;
    }
    if (ep->state == HR_TCP_UP) {
        if (n < budget)
            n += hr_tcp_receive(ep, budget - n);
        else
            hr_tcp_ep_ready(ep);
    }
    return n;
}

/* Each that is on the list now is served once; one that is put back waits for the next call. */
static int run_ready(struct hr_tcp_domain *d, int budget) {
    int n = 0;
    struct hr_link *last = d->ready.prev;
    while (!hr_list_empty(&d->ready) && n < budget) {
        struct hr_link *l = d->ready.next;
        n += run_one_ready(hr_container(l, struct hr_tcp_ep, ready), budget - n);
        if (l == last) break;
    }
    return n;
}

/* The kernel tells of room when a third of its buffer is free, and until then the receiver runs dry. */
static int run_hint(struct hr_tcp_ep *ep, int budget) {
    int n = ep->one_way.sending && ep->tx_count ? hr_tcp_flush(ep, budget) : 0;
    return n || ep->state != HR_TCP_UP ? n : hr_tcp_receive(ep, budget);
}

int hr_tcp_progress(struct hr_domain *domain, int budget, struct hr_ep *hint) {
    struct hr_tcp_domain *d = (struct hr_tcp_domain *)domain;
    struct hr_tcp_ep *ep = (struct hr_tcp_ep *)hint;
    int n = 0, others_first = d->turn++ % ALL_EVERY == 0;
    if (!ep || ep->state != HR_TCP_UP || !hr_list_empty(&ep->ready)) ep = NULL;
    d->in_progress = 1;
    if (others_first) n += run_events(d, budget);
    if (ep && n == 0) n += run_hint(ep, budget);
    if (n < budget && !hr_list_empty(&d->ready)) n += run_ready(d, budget - n);
    if (n == 0 && !others_first && (!ep || d->poll.writers || d->misses++ % POLL_EVERY == 0))
        n += run_events(d, budget);
    d->in_progress = 0;
    return n;
}

int hr_tcp_event_fd(struct hr_domain *domain) { return ((struct hr_tcp_domain *)domain)->poll.fd; }

hr_status hr_tcp_event_arm(struct hr_domain *domain) {
    struct hr_tcp_domain *d = (struct hr_tcp_domain *)domain;
    if (!hr_list_empty(&d->ready) || d->poll.next != d->poll.count) return HR_AGAIN;
    hr_tcp_tx_slept(d);
    return HR_OK;
}

void hr_tcp_event_disarm(struct hr_domain *domain) { (void)domain; }

/* progress.c - going round the endpoints, the slow part that looks at sockets, sleeping and waking. */

/*
 * A pass looks at the hint's ring and at a few others in turn: no system call. The slow part (one epoll_wait that does
 * not wait) runs when something asked for it (attend), when the rings are silent while a connection is being made or
 * somebody sleeps, and every 20 ms: that is how a dead peer is found while polling. While sleeping, all of it is behind
 * one epoll descriptor: the domain's eventfd, which peers write when a ring's flag says that its consumer sleeps
 * (ring.h argues why none is lost), the listening socket, each peer's socket and its pidfd. The socket alone would not
 * do: a child that the peer forked keeps it open.
 */

#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#include "providers/shm/shm.h"

enum {
    VISITS = 4,       /* endpoints besides the hint in one pass */
    CLOCK_EVERY = 32, /* passes between two looks at the clock; a power of two */
    EVENTS = 32,
};
#define ATTEND_NS 20000000
#define SWEEP_NS 200000000

static void kick(struct shm_domain *dom) {
    uint64_t one = 1;
    if (write(dom->wakefd, &one, sizeof one) < 0) return; /* the counter is at its end: readable all the same */
}

void hr_shm_kick(struct shm_domain *dom) {
    if (dom->armed) kick(dom);
}

void hr_shm_attend(struct shm_domain *dom) {
    dom->attend = 1;
    hr_shm_kick(dom);
}

/* Raised flags were taken down by those who woke us. The sleeper may be another thread than this one and has perhaps
 * not seen the event yet, so either the flags go up again or it gets an event of its own. */
static void on_wake(struct shm_domain *dom) {
    dom->scan = 1;
    if (dom->armed && hr_shm_event_arm(&dom->base) != HR_OK) kick(dom);
}

static void on_event(struct shm_domain *dom, struct shm_watch *watch) {
    struct shm_ep *e = watch->owner;
    switch (watch->source) {
    case SHM_ON_WAKE: on_wake(dom); break;
    case SHM_ON_LISTEN: hr_shm_accept(dom); break;
    case SHM_ON_CALL: break; /* calls are stepped in the order of their arrival, below */
    case SHM_ON_SOCKET: hr_shm_on_socket(e); break;
    case SHM_ON_PIDFD: hr_shm_lose(e, HR_ERR_PEER_LOST, "process %d has ended", (int)e->pid); break;
    }
}

/* What became of an endpoint outside of its ring. */
static int report(struct shm_domain *dom, struct shm_ep *e) {
    if (e->state == SHM_LOST || e->state == SHM_ABORTED) return 0;
    if (e->counted && e->state == SHM_UP) {
        e->counted = 0;
        dom->connecting--;
        hr_shm_kick(dom); /* its flag is down: the sleeper has to arm again */
        dom->base.sink->state(&e->base, HR_OK, NULL);
        return 1;
    }
    if (!e->lost) return 0;
    if (e->state == SHM_UP) { /* after what is still in the ring */
        dom->scan = 1;
        return 0;
    }
    hr_shm_report(e);
    return 1;
}

/* All that is not looking at rings. Returns how many events it delivered. */
static int attend(struct shm_domain *dom, int budget, int64_t now) {
    struct epoll_event events[EVENTS];
    int delivered = 0, n;

    dom->attended_at = now;
    dom->attend = 0;
    n = epoll_wait(dom->epfd, events, EVENTS, 0);
    for (int i = 0; i < n; i++) on_event(dom, events[i].data.ptr);
    if (n == EVENTS) dom->attend = 1;
    hr_shm_calls_step(dom);
    for (struct shm_ep *e = dom->eps; e; e = e->next) {
        if (e->state == SHM_DIALING) hr_shm_dial(e);
        if (e->state == SHM_UP) hr_shm_board_say(e);
        if (delivered < budget)
            delivered += report(dom, e);
        else
            dom->attend = 1;
    }
    if (now - dom->swept_at > SWEEP_NS) {
        dom->swept_at = now;
        hr_shm_arenas_sweep(dom);
    }
    return delivered;
}

/* The others in turn, from where the last pass ended. */
static int visit(struct shm_domain *dom, int budget, struct shm_ep *hint) {
    uint32_t left = dom->scan || dom->nlive < VISITS ? dom->nlive : VISITS;
    int n = 0;
    while (left && n < budget) {
        struct shm_ep *e = dom->live[dom->cursor];
        dom->cursor = dom->cursor + 1 < dom->nlive ? dom->cursor + 1 : 0;
        left--;
        if (e != hint) n += hr_shm_ep_poll(e, budget - n);
    }
    if (!left) dom->scan = 0;
    return n;
}

int hr_shm_progress(struct hr_domain *domain, int budget, struct hr_ep *hint) {
    struct shm_domain *dom = shm_domain(domain);
    uint32_t turn = dom->turn++;
    int others_first = turn % 8 == 7; /* a hint that uses up every budget would starve them */
    int n = 0, rings;
    int due = dom->attend || (dom->idle && (dom->connecting || dom->armed));

    if (due || turn % CLOCK_EVERY == 0) {
        int64_t now = hr_now();
        if (due || now - dom->attended_at > ATTEND_NS) n = attend(dom, budget, now);
    }
    rings = n;
    if (hint && !others_first && n < budget) n += hr_shm_ep_poll(shm_ep(hint), budget - n);
    if (dom->nlive && n < budget) n += visit(dom, budget - n, others_first ? NULL : shm_ep(hint));
    dom->idle = n == rings;
    return n;
}

int hr_shm_event_fd(struct hr_domain *domain) { return shm_domain(domain)->epfd; }

/* Something for this endpoint that no event would tell of? */
static int pending(struct shm_ep *e) {
    if (ring_rx_look(&e->rx) || e->lost || e->pushing == SHM_PUSHED) return 1;
    if (!e->blocked || (ring_tx_look(&e->tx) && !ring_tx_fits(&e->tx, e->blocked))) return 0;
    if (e->pushing != SHM_PUSHING) e->blocked = 0; /* said once: the engine may have dropped what waited */
    return 1;
}

hr_status hr_shm_event_arm(struct hr_domain *domain) {
    struct shm_domain *dom = shm_domain(domain);
    if (dom->attend) return HR_AGAIN;
    for (struct shm_ep *e = dom->eps; e; e = e->next)
        if (e->state == SHM_DIALING) return HR_AGAIN; /* a full backlog gives no event when it is no longer full */
    dom->armed = 1;
    for (uint32_t i = 0; i < dom->nlive; i++) {
        ring_rx_sleep(&dom->live[i]->rx);
        hr_shm_board_say(dom->live[i]);
        if (dom->live[i]->blocked) atomic_store(&dom->live[i]->tx.ctl->want, 1);
    }
    for (uint32_t i = 0; i < dom->nlive; i++) {
        struct shm_ep *e = dom->live[i];
        if (e->state != SHM_UP || !pending(e)) continue;
        hr_shm_event_disarm(domain);
        dom->scan = 1;
        return HR_AGAIN;
    }
    return HR_OK;
}

void hr_shm_event_disarm(struct hr_domain *domain) {
    struct shm_domain *dom = shm_domain(domain);
    if (!dom->armed) return;
    dom->armed = 0;
    dom->attend = 1; /* the descriptor may be readable: it is emptied by the next pass */
    for (uint32_t i = 0; i < dom->nlive; i++) ring_rx_awake(&dom->live[i]->rx);
}

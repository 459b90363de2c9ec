/* progress.c - the progress role: one pass, waiting for a request, and the background thread. */

/*
 * Whoever waits, drives. A caller of hr_wait takes the role when it is free, polls, and returns as soon as its own
 * request is done, without a thread switch. It spins for a bounded time that adapts to what waits turn out to be,
 * offers the processor between polls (soon; at once where ranks outnumber cores), then arms the domains and sleeps in
 * epoll_wait. Others who wait meanwhile sleep on a condition; the one who leaves wakes the next.
 *
 * The background thread serves when nobody has driven for a tick: requests that nobody waits for, and what peers need
 * of a rank that computes. While callers come and go it only watches (watch.c). Once nothing was driven for a second it
 * sleeps without a limit, armed, and costs nothing. A caller who begins to poll disarms (so that peers need not wake
 * anybody) and, if the thread sleeps without a limit, kicks it back to ticking.
 */

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "core/engine.h"

#define BUDGET 16
#define RECENT_NS 1000000000
#define ROLE_SPIN_NS 100000
#define SLICE_NS 100000000
#define POLITE_NS 10000 /* of spinning, before the processor is offered between polls */
#define SPIN_LEAST_NS 20000
#define STEP_BACK_NS 200000
#define HINT_MOST 4            /* requests that are looked at for a hint */
#define HINT_BYTES (68u << 10) /* 64 KiB, and what blocks of whole packets leave to the last */

void hr_work_add(struct hr_engine *engine, struct hr_work *work, int priority) {
    work->priority = priority;
    hr_list_push(&engine->work[priority], &work->link);
    engine->nwork++;
}

void hr_work_remove(struct hr_engine *engine, struct hr_work *work) {
    hr_list_remove(&work->link);
    engine->nwork--;
}

/* The next of its priority comes first. */
void hr_work_turn(struct hr_engine *engine, struct hr_work *work) {
    struct hr_link *next = work->link.next;
    if (next == &engine->work[work->priority]) return;
    hr_list_remove(&work->link);
    hr_list_push(next->next, &work->link);
}

/* Every connection that is active now, once. One that pumps may break communicators and so lose any other. */
static int pump_all(struct hr_engine *engine) {
    struct hr_link turn, *l;
    int n = 0;
    if (hr_list_empty(&engine->active)) return 0;
    turn = engine->active;
    turn.next->prev = turn.prev->next = &turn;
    hr_list_init(&engine->active);
    while ((l = hr_list_pop(&turn))) {
        hr_list_push(&engine->active, l);
        n += hr_conn_pump(hr_container(l, struct hr_conn, active));
    }
    return n;
}

/* On a host a provider stops at a long message; where work waits it is not to be one message for each piece of that. */
static int poll_domain(struct hr_engine *engine, struct hr_domain *domain, struct hr_ep *hint) {
    int n = 0, more;
    do {
        more = domain->ops->progress(domain, BUDGET - n, hint);
        n += more;
    } while (more && n < BUDGET && engine->nwork && domain->caps.flags & HR_CAP_LOCAL && !hr_contended(engine));
    return n;
}

/* Polls every domain, sends what may go, and does one piece of work. Returns how much happened. */
int hr_pass(struct hr_engine *engine, struct hr_conn *hint) {
    int n = 0;
    struct hr_ep *ep = hint && hint->state == HR_CONN_UP ? hint->lanes[0].ep : NULL;
    engine->pass++;
    for (int d = 0; d < engine->ndomains; d++) {
        struct hr_domain *domain = engine->domains[d];
        int mine = ep && ep->domain == domain;
        /* Nobody to hear from, or the message comes elsewhere, and a poll may be a system call: look now and then. */
        if (!engine->domain_conns[d] && (engine->pass & 63)) continue;
        if (ep && !mine && (engine->pass & (domain->caps.flags & HR_CAP_LOCAL ? 3 : 15))) continue;
        n += poll_domain(engine, domain, mine ? ep : NULL);
    }
    while (!hr_list_empty(&engine->dead) || !hr_list_empty(&engine->ready)) {
        hr_conns_bury(engine);
        hr_runs_drain(engine);
    }
    n += pump_all(engine);
    if (engine->nwork) {
        int p = 0;
        while (hr_list_empty(&engine->work[p])) p++;
        struct hr_work *work = hr_container(engine->work[p].next, struct hr_work, link);
        work->step(engine, work);
        n++;
    }
    while (!hr_list_empty(&engine->dead) || !hr_list_empty(&engine->ready)) {
        hr_conns_bury(engine);
        hr_runs_drain(engine);
    }
    return n;
}

int hr_progress(struct hr_engine *engine) {
    hr_lock(engine);
    int n = hr_pass(engine, NULL);
    if (n && engine->sleeping) hr_kick(engine); /* part of it may be left to do, and the event is gone */
    hr_unlock(engine);
    return n;
}

/* --- sleeping
 * ---------------------------------------------------------------------------------------------------------------- */

static void disarm(struct hr_engine *engine) {
    if (!engine->armed) return;
    engine->armed = 0;
    for (int d = 0; d < engine->ndomains; d++) engine->domains[d]->ops->event_disarm(engine->domains[d]);
    if (engine->bg_forever) (void)!eventfd_write(engine->kickfd, 1);
}

/* 1: nothing to do, and whatever comes will wake us. */
static int arm(struct hr_engine *engine) {
    hr_conns_acknowledge(engine);
    if (engine->nwork || !hr_list_empty(&engine->ready) || !hr_list_empty(&engine->dead)) return 0;
    engine->armed = 1;
    for (int d = 0; d < engine->ndomains; d++)
        if (engine->domains[d]->ops->event_arm(engine->domains[d]) != HR_OK) return 0;
    return 1;
}

/* Lock held on entry and return, not while asleep. HR_INTERRUPTED on a signal. Driver and background thread may sleep
 * here at once: a kick that is meant for the driver is left to it. */
static hr_status nap(struct hr_engine *engine, int timeout_ms, int driver) {
    struct epoll_event events[8];
    eventfd_t count;
    HR_COUNT(engine, sleeps);
    hr_unlock(engine);
    int n = epoll_wait(engine->epfd, events, 8, timeout_ms);
    int interrupted = n < 0 && errno == EINTR;
    hr_lock(engine);
    for (int i = 0; i < n; i++)
        if (events[i].data.fd == engine->kickfd && (driver || !engine->sleeping))
            (void)!eventfd_read(engine->kickfd, &count);
    return interrupted ? HR_INTERRUPTED : HR_OK;
}

void hr_kick(struct hr_engine *engine) {
    if (engine->sleeping || engine->bg_forever) (void)!eventfd_write(engine->kickfd, 1);
}

static int ms_until(int64_t deadline, int64_t now) {
    int64_t left = deadline - now;
    if (left <= 0) return 0;
    if (left > 1000 * (int64_t)SLICE_NS) left = 1000 * (int64_t)SLICE_NS;
    return (int)((left + 999999) / 1000000);
}

/* --- driving
 * ------------------------------------------------------------------------------------------------------------------ */

struct drive {
    int (*done)(struct hr_engine *, void *);
    void *arg;
    struct hr_request *req; /* for the hint */
    int64_t deadline;
    int polls;
};

/* The condition's own locking is not counted as waiting for the lock: it is from here. */
void hr_waiter_signal(struct hr_engine *engine, struct hr_waiter *waiter) {
    if (waiter->signalled) return;
    waiter->signalled = 1;
    atomic_fetch_add(&engine->contenders, 1);
    pthread_cond_signal(&waiter->cond);
}

/* The role is free. Who was signalled already may have been so because its request is done. */
static void hand_over(struct hr_engine *engine) {
    for (struct hr_link *l = engine->waiters.next; l != &engine->waiters; l = l->next) {
        struct hr_waiter *waiter = hr_container(l, struct hr_waiter, link);
        if (waiter->signalled) continue;
        hr_waiter_signal(engine, waiter);
        return;
    }
    if (engine->bg_deep) hr_watch_left(engine);
}

static void set_driving(struct hr_engine *engine, int by) {
    atomic_store_explicit(&engine->driving, by, memory_order_relaxed);
}

static void release_role(struct hr_engine *engine) {
    set_driving(engine, 0);
    HR_ADD(engine->drive_seq, 1);
    if (engine->nwork || !hr_list_empty(&engine->active)) hr_bg_rouse(engine);
    hand_over(engine);
}

/* Somebody wants the lock: stay away from it until he has had it, or is not running anyway. */
static void step_back(struct hr_engine *engine) {
    uint32_t before = atomic_load_explicit(&engine->let_in, memory_order_relaxed);
    int64_t until = 0;
    hr_unlock(engine);
    for (int i = 1; atomic_load_explicit(&engine->contenders, memory_order_relaxed) &&
                    atomic_load_explicit(&engine->let_in, memory_order_relaxed) == before;
         i++) {
        hr_relax();
        if (i & 63) continue;
        int64_t now = hr_now();
        if (!until) until = now + STEP_BACK_NS;
        if (now > until) break;
        sched_yield();
    }
    hr_lock(engine);
}

/* Between two polls that brought nothing. */
static void breathe(struct hr_engine *engine, int polite) {
    if (hr_contended(engine)) {
        step_back(engine);
    } else if (polite) {
        hr_unlock(engine);
        sched_yield();
        hr_lock(engine);
    } else {
        hr_relax();
    }
}

/* A wait of this length has ended in sleep: spin longer if that would have caught it, shorter if it was hopeless. */
static void spin_learn(struct hr_engine *engine, int64_t waited) {
    engine->spin_now = waited <= engine->spin_ns ? engine->spin_ns : engine->spin_now / 2;
    if (engine->spin_now < SPIN_LEAST_NS)
        engine->spin_now = SPIN_LEAST_NS < engine->spin_ns ? SPIN_LEAST_NS : engine->spin_ns;
}

/* The connection that a wait is about. Of a collective, where it saves system calls: that of the first that its
 * communicator waits for, where all is short and comes from that peer; or, in a program that sends to one peer at most
 * before something has come (doubling, halving, rings: it goes on with the first), where all comes by that provider.
 * One that has ended may have lost its communicator. */
static struct hr_conn *hint_of(const struct hr_request *req) {
    if (!req || req->done) return NULL;
    if (req->kind != HR_REQ_RUN) return req->conn;
    const struct hr_request *first = req->comm->pending, *r = first;
    int n = 0;
    if (!first || !first->conn || !(first->conn->caps->flags & HR_CAP_HINTS)) return NULL;
    int paced = first->flags & HR_REQ_PACED;
    do {
        if (!r->conn || r->conn->caps != first->conn->caps || ++n > HINT_MOST) return NULL;
        if (paced ? first->len > HINT_BYTES : r->conn != first->conn || r->len > HINT_BYTES) return NULL;
        r = r->next;
    } while (r != first);
    return first->conn;
}

static hr_status drive(struct hr_engine *engine, const struct drive *d) {
    hr_status status = HR_OK;
    int idle = 0, polite = 0, passes = 0, woken = 0;
    int64_t since = 0;
    set_driving(engine, 1);
    disarm(engine);
    if (engine->bg_deep) hr_watch_driven(engine);
    for (;;) {
        int n = hr_pass(engine, woken ? NULL : hint_of(d->req)); /* whoever woke this one */
        woken = 0;
        if (d->done(engine, d->arg)) break;
        if (d->polls > 0 && ++passes >= d->polls) { /* of whatever kind: others may be kept waiting by the caller */
            status = HR_INTERRUPTED;
            break;
        }
        if (n) {
            idle = polite = 0;
            since = 0;
            if (hr_contended(engine)) step_back(engine);
            if ((engine->pass & 15) == 0 && d->polls <= 0 && hr_now() >= d->deadline) {
                status = HR_ERR_TIMEOUT;
                break;
            }
            continue;
        }
        idle++;
        if (d->polls > 0 && engine->yield && idle >= 2) {
            status = HR_INTERRUPTED;
            break;
        }
        if (!engine->yield && !polite && engine->spin_now && idle & 31) {
            breathe(engine, 0);
            continue;
        }
        int64_t now = hr_now();
        if (now >= d->deadline) {
            status = HR_ERR_TIMEOUT;
            break;
        }
        if (!since) since = now;
        /* whoever we wait for may need this very processor */
        if (now - since > POLITE_NS) polite = 1;
        if (now - since < engine->spin_now) {
            breathe(engine, engine->yield || polite);
            continue;
        }
        if (d->polls > 0) { /* never asleep */
            status = HR_INTERRUPTED;
            break;
        }
        if (hr_contended(engine)) {
            step_back(engine);
            continue;
        }
        /* The lock was held since the pass: what others did before that was seen, and what they do from now on wakes.
         */
        if (arm(engine)) {
            engine->sleeping = 1;
            status = nap(engine, ms_until(d->deadline, now), 1);
            engine->sleeping = 0;
            woken = 1;
            if (status != HR_OK && !d->done(engine, d->arg)) break;
            status = HR_OK;
            spin_learn(engine, hr_now() - since);
        }
        disarm(engine);
        since = 0;
        if (d->done(engine, d->arg)) break;
    }
    release_role(engine);
    return status;
}

static int request_done(struct hr_engine *engine, void *arg) {
    (void)engine;
    return ((struct hr_request *)arg)->done;
}

/* The background thread gives the role up within one pass. */
static void claim_role(struct hr_engine *engine) {
    int64_t until = hr_now() + ROLE_SPIN_NS;
    atomic_fetch_add(&engine->want_role, 1);
    hr_unlock(engine);
    while (atomic_load_explicit(&engine->driving, memory_order_relaxed) == 2 && hr_now() < until) hr_relax();
    hr_lock(engine);
    atomic_fetch_sub(&engine->want_role, 1);
}

static hr_status wait_in_line(struct hr_engine *engine, struct hr_request *req, int64_t deadline) {
    struct hr_waiter waiter;
    pthread_condattr_t attr;
    struct timespec at;
    int64_t until = hr_now() + SLICE_NS;
    hr_status status = HR_OK;
    if (until > deadline) until = deadline;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&waiter.cond, &attr);
    pthread_condattr_destroy(&attr);
    waiter.signalled = 0;
    hr_list_push(&engine->waiters, &waiter.link);
    if (req) req->state = &waiter;
    at.tv_sec = until / 1000000000;
    at.tv_nsec = until % 1000000000;
    if (pthread_cond_timedwait(&waiter.cond, &engine->mutex, &at) == ETIMEDOUT)
        status = until >= deadline ? HR_ERR_TIMEOUT : HR_INTERRUPTED;
    if (waiter.signalled) hr_let_in(engine);
    if (req && !req->done) req->state = NULL;
    hr_list_remove(&waiter.link);
    pthread_cond_destroy(&waiter.cond);
    return status;
}

static hr_status drive_or_wait(struct hr_engine *engine, const struct drive *d) {
    hr_status status = HR_OK;
    for (int waited = 0;; waited = 1) {
        if (status != HR_OK || d->done(engine, d->arg)) {
            if (waited && !engine->driving) hand_over(engine); /* it may have been handed to this one */
            return status;
        }
        if (engine->driving == 2) {
            claim_role(engine);
            if (d->done(engine, d->arg)) continue;
        }
        if (!engine->driving) return drive(engine, d);
        if (d->polls > 0) return HR_INTERRUPTED;
        status = wait_in_line(engine, d->req, d->deadline);
        if (d->done(engine, d->arg)) status = HR_OK;
    }
}

hr_status hr_drive_until(struct hr_engine *engine, int (*done)(struct hr_engine *, void *), void *arg,
                         int64_t deadline) {
    struct drive d = {.done = done, .arg = arg, .deadline = deadline};
    hr_status status;
    do status = drive_or_wait(engine, &d);
    while (status == HR_INTERRUPTED && hr_now() < deadline);
    return status == HR_INTERRUPTED ? HR_ERR_TIMEOUT : status;
}

hr_status hr_wait(struct hr_engine *engine, struct hr_request *req, int64_t deadline, int polls) {
    if (__atomic_load_n(&req->done, __ATOMIC_ACQUIRE)) return HR_OK;
    struct drive d = {.done = request_done, .arg = req, .req = req, .deadline = deadline, .polls = polls};
    hr_lock(engine);
    hr_status status = drive_or_wait(engine, &d);
    hr_unlock(engine);
    return status;
}

/* --- the background thread
 * ------------------------------------------------------------------------------------------------------ */

static int bg_must_yield(struct hr_engine *engine) {
    return engine->stop || atomic_load(&engine->want_role) || !hr_list_empty(&engine->waiters);
}

static void *bg_main(void *arg) {
    struct hr_engine *engine = arg;
    int64_t recent = hr_now() + RECENT_NS;
    prctl(PR_SET_NAME, "hrdma-progress");
    hr_lock(engine);
    uint64_t seen = engine->drive_seq;
    int brought = 0;
    while (!engine->stop) {
        if (engine->drive_seq != seen) {
            hr_turns_stop(&engine->turns);
            hr_watch(engine, &seen);
            recent = hr_now() + RECENT_NS;
            continue;
        }
        if (engine->driving) {
            hr_turns_stop(&engine->turns);
            hr_watch_deep(engine, &seen);
            recent = hr_now() + RECENT_NS;
            continue;
        }
        if (hr_turns_due(&engine->turns, hr_now(), brought)) {
            hr_unlock(engine);
            hr_turns_take(&engine->turns, hr_now());
            hr_lock(engine);
            continue;
        }
        set_driving(engine, 2);
        int quiet = 0, stepped = 0;
        brought = 0;
        while (!bg_must_yield(engine) && quiet < 4) {
            quiet = hr_pass(engine, NULL) ? 0 : quiet + 1;
            brought |= !quiet;
            stepped = hr_contended(engine);
            if (stepped) step_back(engine);
        }
        if (stepped) brought |= hr_pass(engine, NULL) > 0; /* who had the lock meanwhile kicks only who sleeps */
        int sleep = !bg_must_yield(engine) && arm(engine);
        set_driving(engine, 0);
        if (!hr_list_empty(&engine->waiters)) hand_over(engine);
        if (!sleep) {
            if (bg_must_yield(engine)) hr_watch_rest(engine, HR_TICK_MS);
            continue;
        }
        int64_t now = hr_now();
        engine->bg_forever = now > recent && !engine->turns.bound;
        nap(engine, engine->bg_forever ? -1 : HR_TICK_MS, 0);
        engine->bg_forever = 0;
        engine->turns.slept += hr_now() - now;
    }
    hr_unlock(engine);
    return NULL;
}

/* Signals are for the threads of Python. */
int hr_in_background(struct hr_engine *engine) {
    return engine->bg_running && pthread_equal(pthread_self(), engine->bg);
}

hr_status hr_bg_start(struct hr_engine *engine) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = pthread_create(&engine->bg, NULL, bg_main, engine);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    engine->bg_running = !rc;
    return rc ? HR_ERR_NOMEM : HR_OK;
}

void hr_bg_stop(struct hr_engine *engine) {
    if (!engine->bg_running) return;
    hr_lock(engine);
    engine->stop = 1;
    (void)!eventfd_write(engine->kickfd, 1);
    hr_watch_end(engine);
    hr_unlock(engine);
    pthread_join(engine->bg, NULL);
    engine->bg_running = 0;
}

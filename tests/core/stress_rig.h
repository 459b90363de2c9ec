/* stress_rig.h - what must be true of engines at rest, for tests that put them under load. */
#ifndef HR_TESTS_STRESS_RIG_H
#define HR_TESTS_STRESS_RIG_H

#include <time.h>

#include "core/engine.h"
#include "world.h"

static inline uint64_t rnd(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}
static inline double stress_seconds(void) { return getenv("STRESS_SECONDS") ? atof(getenv("STRESS_SECONDS")) : 1.0; }
static inline uint64_t stress_seed(void) {
    return getenv("STRESS_SEED") ? strtoull(getenv("STRESS_SEED"), NULL, 0) : 1;
}

static inline int is_done(struct hr_request *req) { return __atomic_load_n(&req->done, __ATOMIC_ACQUIRE); }
static inline void nap_ms(int ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&t, NULL);
}

/* --- what must be true of engines at rest
 * ----------------------------------------------------------------------------------------------------- */

static inline struct hr_conn *conn_between(struct world *w, int from, int to) {
    return hr_conn_find(w->ranks[from].engine, (uint64_t)to, 0);
}

/* The first thing that is not as it should be, or NULL. */
static inline const char *unrest(struct world *w) {
    for (int i = 0; i < w->n; i++) {
        struct hr_engine *e = w->ranks[i].engine;
        for (int j = 0; j < w->n; j++) {
            struct hr_conn *a = conn_between(w, i, j), *b = conn_between(w, j, i);
            if (a->state != HR_CONN_UP) return "a connection is down";
            if (a->nqueued || a->nbulk || !hr_list_empty(&a->ctl)) return "something is queued";
            if ((uint64_t)a->credit + b->held != hr_credit_max(a)) return "credit is lost, or was made";
            if (b->held != b->owed_credit) return "credit is held for nothing";
            if (a->inflight != b->owed_ack) return "bulk is in flight for ever";
            for (int k = 0; k < HR_BUCKETS; k++)
                if (!hr_list_empty(&a->early[k]) || a->bucket_queued[k]) return "a message waits for its turn";
        }
        for (int k = 0; k < HR_MATCH_CHAINS; k++) {
            if (e->posted[k]) return "a receive is posted";
            if (!hr_list_empty(&e->unexpected[k])) return "a message lies unmatched";
        }
        for (uint32_t k = 0; k < e->nxfers; k++)
            if (e->xfers[k]->mode != HR_XFER_FREE) return "a transfer is open";
        if (e->nwork || !hr_list_empty(&e->ready) || !hr_list_empty(&e->waiters)) return "work is left";
        if (atomic_load(&e->nasync)) return "a request is counted that nobody may be waiting for";
        if (atomic_load(&e->contenders)) return "somebody is counted who wants the lock";
        for (struct hr_link *l = e->comms.next; l != &e->comms; l = l->next)
            if (hr_container(l, struct hr_comm, link)->pending) return "a request is pending";
    }
    return NULL;
}
static inline void check_rest(struct world *w) {
    const char *what = "";
    int64_t until = hr_now() + SECONDS(5);
    while (what && hr_now() < until) {
        for (int i = 0; i < w->n; i++) hr_progress(w->ranks[i].engine);
        for (int i = 0; i < w->n; i++) hr_lock(w->ranks[i].engine);
        what = unrest(w);
        for (int i = 0; i < w->n; i++) hr_unlock(w->ranks[i].engine);
    }
    CHECK_STR(what ? what : "at rest", "at rest");
}

#endif

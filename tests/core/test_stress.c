/* test_stress.c - many threads, many engines, everything at once, and cases that only show under load.
 *
 * What must hold: contents, order per tag, every request ended exactly once and before its deadline, nothing touched
 * after its end, and at the end all credit back and nothing left. HR_TEST_PROVIDER chooses the provider,
 * STRESS_SECONDS the length of each random part, STRESS_SEED another course of events.
 */

#include <time.h>

#include "core/engine.h"
#include "world.h"

static uint64_t rnd(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}
static double stress_seconds(void) { return getenv("STRESS_SECONDS") ? atof(getenv("STRESS_SECONDS")) : 1.0; }
static uint64_t stress_seed(void) { return getenv("STRESS_SEED") ? strtoull(getenv("STRESS_SEED"), NULL, 0) : 1; }

static int is_done(struct hr_request *req) { return __atomic_load_n(&req->done, __ATOMIC_ACQUIRE); }
static void nap_ms(int ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&t, NULL);
}

/* --- what must be true of engines at rest
 * ----------------------------------------------------------------------------------------------------- */

static struct hr_conn *conn_between(struct world *w, int from, int to) {
    return hr_conn_find(w->ranks[from].engine, (uint64_t)to);
}
static uint64_t credit_of(struct hr_conn *conn) { return (uint64_t)conn->credit; }

/* The first thing that is not as it should be, or NULL. */
static const char *unrest(struct world *w, uint64_t full) {
    for (int i = 0; i < w->n; i++) {
        struct hr_engine *e = w->ranks[i].engine;
        for (int j = 0; j < w->n; j++) {
            struct hr_conn *a = conn_between(w, i, j), *b = conn_between(w, j, i);
            if (a->state != HR_CONN_UP) return "a connection is down";
            if (a->nqueued || a->nbulk || !hr_list_empty(&a->ctl)) return "something is queued";
            if (credit_of(a) + b->held != full) return "credit is lost, or was made";
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
        if (atomic_load(&e->contenders)) return "somebody is counted who wants the lock";
        for (struct hr_link *l = e->comms.next; l != &e->comms; l = l->next)
            if (hr_container(l, struct hr_comm, link)->pending) return "a request is pending";
    }
    return NULL;
}
static void check_rest(struct world *w, uint64_t full) {
    const char *what = "";
    int64_t until = hr_now() + SECONDS(5);
    while (what && hr_now() < until) {
        for (int i = 0; i < w->n; i++) hr_progress(w->ranks[i].engine);
        for (int i = 0; i < w->n; i++) hr_lock(w->ranks[i].engine);
        what = unrest(w, full);
        for (int i = 0; i < w->n; i++) hr_unlock(w->ranks[i].engine);
    }
    CHECK_STR(what ? what : "at rest", "at rest");
}
static uint64_t full_credit(struct world *w) { /* of a world that nothing was sent in */
    return credit_of(conn_between(w, 0, 0));
}

/* --- credit and order
 * ------------------------------------------------------------------------------------------------------------------------
 */

enum { FLOOD = 40000 };
static struct hr_request flood_reqs[FLOOD];

/* Sends small messages until no more leave; how many are on their way or wait. */
static int flood(struct rank *r, const uint32_t *value, uint32_t tag, int dst) {
    int n = 0;
    memset(flood_reqs, 0, sizeof flood_reqs);
    for (; n < FLOOD; n++) {
        flood_reqs[n].priority = HR_PRIORITY_DEFAULT;
        CHECK_EQ(hr_isend(r->comm, value, 4, dst, tag, &flood_reqs[n]), HR_OK);
        if (is_done(&flood_reqs[n])) continue;
        if (finish(r, &flood_reqs[n], 0.05) != HR_OK) break; /* out of credit: taken back */
    }
    CHECK(n > 1000 && n < FLOOD);
    return n;
}

/* Urgent messages of the same tag may not use up the credit that an earlier one still needs. */
TEST(urgent_messages_leave_room_for_those_before) {
    struct world w;
    enum { URGENT = 20000 };
    static struct hr_request urgent[URGENT];
    struct hr_request bulk = {.priority = HR_PRIORITIES - 1};
    uint32_t zero = 0, one = 1, x;
    world_open(&w, 2, NULL);
    uint64_t full = full_credit(&w);
    struct rank *a = &w.ranks[0], *b = &w.ranks[1];
    int n = flood(a, &zero, 1, 1);
    CHECK_EQ(hr_isend(a->comm, &zero, 4, 1, 2, &bulk), HR_OK);
    memset(urgent, 0, sizeof urgent); /* priority 0 */
    for (int i = 0; i < URGENT; i++) CHECK_EQ(hr_isend(a->comm, &one, 4, 1, 2, &urgent[i]), HR_OK);
    for (int i = 0; i < n; i++) CHECK_EQ(recv_from(b, &x, 4, 0, 1, NULL), HR_OK);
    for (int i = 0; i <= URGENT; i++) {
        struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
        CHECK_EQ(hr_irecv(b->comm, &x, 4, 0, 2, &req), HR_OK);
        hr_status status = finish(b, &req, 5);
        CHECK_EQ(status, HR_OK);
        CHECK_EQ(x, i > 0);
        if (status != HR_OK) break;
    }
    CHECK_EQ(finish(a, &bulk, 1), HR_OK);
    for (int i = 0; i < URGENT; i++) CHECK_EQ(finish(a, &urgent[i], 1), HR_OK);
    check_rest(&w, full);
    world_close(&w);
}

/* Three quarters of the credit lie unmatched; what goes on beside that must not get stuck on credit that is owed. */
TEST(credit_returns_before_the_peer_starves) {
    struct world w;
    uint32_t zero = 0, x;
    world_open(&w, 2, NULL);
    uint64_t full = full_credit(&w), cost = HR_EAGER_COST + 4;
    int aside = (int)(full * 78 / 100 / cost), beside = (int)((full - (uint64_t)aside * cost) / cost);
    struct rank *a = &w.ranks[0], *b = &w.ranks[1];
    for (int i = 0; i < aside; i++) CHECK_EQ(send_to(a, &zero, 4, 1, 1), HR_OK);
    for (int i = 0; i < beside; i++) CHECK_EQ(send_to(a, &zero, 4, 1, 2), HR_OK);
    for (int i = 0; i < beside; i++) CHECK_EQ(recv_from(b, &x, 4, 0, 2, NULL), HR_OK);
    for (int i = 0; i < 100; i++) { /* one by one, nearly without credit */
        struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
        CHECK_EQ(hr_isend(a->comm, &zero, 4, 1, 2, &req), HR_OK);
        CHECK_EQ(recv_from(b, &x, 4, 0, 2, NULL), HR_OK);
        hr_status status = finish(a, &req, 2);
        CHECK_EQ(status, HR_OK);
        if (status != HR_OK) break;
    }
    for (int i = 0; i < aside; i++) CHECK_EQ(recv_from(b, &x, 4, 0, 1, NULL), HR_OK);
    check_rest(&w, full);
    world_close(&w);
}

/* Thousands of sends withdrawn while they wait for credit leave nothing behind, here or there. */
TEST(withdrawn_in_the_queue) {
    struct world w;
    enum { WAITING = 5000 };
    static struct hr_request waiting[WAITING];
    uint32_t zero = 0, x = 0;
    world_open(&w, 2, NULL);
    uint64_t full = full_credit(&w);
    struct rank *a = &w.ranks[0], *b = &w.ranks[1];
    int n = flood(a, &zero, 1, 1);
    memset(waiting, 0, sizeof waiting);
    static uint32_t values[WAITING];
    for (int i = 0; i < WAITING; i++) {
        values[i] = (uint32_t)i;
        waiting[i].priority = i % HR_PRIORITIES;
        CHECK_EQ(hr_isend(a->comm, &values[i], 4, 1, (uint32_t)(i % 3), &waiting[i]), HR_OK);
    }
    for (int i = 0; i < WAITING; i++)
        if (i % 10) hr_cancel(a->engine, &waiting[i], HR_ERR_CANCELED);
    for (int i = 0; i < n; i++) CHECK_EQ(recv_from(b, &x, 4, 0, 1, NULL), HR_OK);
    for (int tag = 0; tag < 3; tag++)
        for (int i = 0; i < WAITING; i += 10) {
            if (i % 3 != tag) continue;
            CHECK_EQ(recv_from(b, &x, 4, 0, (uint32_t)tag, NULL), HR_OK);
            CHECK_EQ(x, i);
        }
    for (int i = 0; i < WAITING; i++) CHECK_EQ(waiting[i].status, i % 10 ? HR_ERR_CANCELED : HR_OK);
    check_rest(&w, full);
    world_close(&w);
}

/* A receive whose message was withdrawn takes its old place again, not the place of one that was posted before. */
TEST(posted_again_in_its_place) {
    struct world w;
    world_open(&w, 3, NULL);
    struct rank *r = w.ranks;
    size_t n = 256u << 20;
    char *big = malloc(n), *any = malloc(n);
    uint32_t x = 4711, first = 0;
    struct hr_request req[2] = {{.priority = HR_PRIORITY_DEFAULT}, {.priority = HR_PRIORITY_DEFAULT}}, send = req[0];
    CHECK_EQ(hr_irecv(r[0].comm, &first, 4, 1, 4, &req[0]), HR_OK);
    CHECK_EQ(hr_irecv(r[0].comm, any, n, HR_ANY_SOURCE, 4, &req[1]), HR_OK);
    memset(big, 1, 4096);
    CHECK_EQ(hr_isend(r[2].comm, big, n, 0, 4, &send), HR_OK);
    int64_t until = hr_now() + SECONDS(5);
    int matched = 0;
    while (!matched && hr_now() < until) {
        hr_lock(r[0].engine);
        matched = req[1].xfer != NULL || req[1].done;
        hr_unlock(r[0].engine);
    }
    hr_cancel(r[2].engine, &send, HR_ERR_CANCELED);
    int withdrawn = send.status == HR_ERR_CANCELED;
    while (withdrawn && matched && hr_now() < until) {
        hr_lock(r[0].engine);
        matched = req[1].xfer != NULL;
        hr_unlock(r[0].engine);
    }
    CHECK(withdrawn && !matched && !is_done(&req[1]));
    CHECK_EQ(send_to(&r[1], &x, 4, 0, 4), HR_OK);
    CHECK_EQ(finish(&r[0], &req[0], 5), HR_OK);
    CHECK_EQ(first, 4711);
    hr_cancel(r[0].engine, &req[1], HR_ERR_CANCELED);
    world_close(&w);
    free(big);
    free(any);
}

/* --- who waits, and who wakes whom
 * ------------------------------------------------------------------------------------------------------------- */

struct sleeper {
    struct rank *r;
    struct hr_request req;
    double seconds;
    int64_t took;
    hr_status status;
};
static void *sleeper_main(void *arg) {
    struct sleeper *s = arg;
    int64_t since = hr_now();
    s->status = finish(s->r, &s->req, s->seconds);
    s->took = hr_now() - since;
    return NULL;
}
static void sleep_on(struct sleeper *s, pthread_t *thread, struct rank *r, void *buf, int src, uint32_t tag) {
    *s = (struct sleeper){.r = r, .req = {.priority = HR_PRIORITY_DEFAULT}, .seconds = 20};
    CHECK_EQ(hr_irecv(r->comm, buf, 4, src, tag, &s->req), HR_OK);
    CHECK_EQ(pthread_create(thread, NULL, sleeper_main, s), 0);
}

/* What another thread ends, its waiter hears of at once, though it sleeps as the driver. */
TEST(ended_by_another_thread) {
    for (int how = 0; how < 3; how++) {
        struct world w;
        struct sleeper s;
        pthread_t thread;
        uint32_t x;
        world_open(&w, 3, NULL);
        sleep_on(&s, &thread, &w.ranks[0], &x, 1, 1);
        nap_ms(30);
        switch (how) {
        case 0: hr_cancel(w.ranks[0].engine, &s.req, HR_ERR_CANCELED); break;
        case 1: hr_peer_lost(w.ranks[0].engine, 1, HR_ERR_PEER_LOST, "told so"); break;
        default: hr_comm_break(w.ranks[0].comm, HR_ERR_BROKEN, 0, HR_PHASE_NONE, "told so", 0);
        }
        pthread_join(thread, NULL);
        CHECK(s.took < SECONDS(2));
        CHECK(hr_is_error(s.status) && s.status != HR_ERR_TIMEOUT);
        world_close(&w);
    }
}

/* The driver leaves together with a waiter whose request has ended too: the next in line must take over. */
TEST(the_role_is_handed_on) {
    struct world w;
    enum { TIMES = 15 };
    int slow = 0;
    world_open(&w, 2, NULL);
    for (int i = 0; i < TIMES; i++) {
        struct sleeper s[4];
        pthread_t threads[4];
        uint32_t x[4];
        for (uint32_t k = 0; k < 4; k++) {
            sleep_on(&s[k], &threads[k], &w.ranks[0], &x[k], 1, k);
            nap_ms(3);
        }
        for (uint32_t k = 3; k > 0; k--) { /* the driver's own is the last but one, the last in line still waits */
            uint32_t tag = k == 3 ? 1 : k == 2 ? 2 : 0;
            CHECK_EQ(send_to(&w.ranks[1], &tag, 4, 0, tag), HR_OK);
        }
        nap_ms(5);
        int64_t since = hr_now();
        CHECK_EQ(send_to(&w.ranks[1], &x[3], 4, 0, 3), HR_OK);
        for (int k = 0; k < 4; k++) {
            pthread_join(threads[k], NULL);
            CHECK_EQ(s[k].status, HR_OK);
        }
        slow += hr_now() - since > 50000000;
    }
    CHECK(slow < TIMES / 3);
    world_close(&w);
}

/* A caller that holds the GIL comes back after so many polls, though something happens in each. */
TEST(polls_are_bounded_under_load) {
    struct world w;
    enum { N = 20000 };
    static struct hr_request sends[N], recvs[N];
    static uint32_t x[N], value;
    world_open(&w, 2, NULL);
    struct hr_request never = {.priority = HR_PRIORITY_DEFAULT};
    uint32_t y;
    CHECK_EQ(hr_irecv(w.ranks[1].comm, &y, 4, 0, 9, &never), HR_OK);
    memset(sends, 0, sizeof sends);
    memset(recvs, 0, sizeof recvs);
    hr_lock(w.ranks[1].engine); /* nobody takes anything out before the caller does */
    for (int i = 0; i < N; i++) CHECK_EQ(hr_isend(w.ranks[0].comm, &value, 4, 1, 1, &sends[i]), HR_OK);
    hr_unlock(w.ranks[1].engine);
    for (int i = 0; i < N; i++) CHECK_EQ(hr_irecv(w.ranks[1].comm, &x[i], 4, 0, 1, &recvs[i]), HR_OK);
    for (int rounds = 0; rounds < 20; rounds++) {
        uint32_t before = w.ranks[1].engine->pass;
        CHECK_EQ(hr_wait(w.ranks[1].engine, &never, HR_FOREVER, 50), HR_INTERRUPTED);
        CHECK(w.ranks[1].engine->pass - before < 5000); /* the background thread makes some, too */
    }
    /* and a deadline that has passed is noticed, whatever happens */
    int64_t since = hr_now();
    CHECK_EQ(hr_wait(w.ranks[1].engine, &never, 0, 0), HR_ERR_TIMEOUT);
    CHECK(hr_now() - since < SECONDS(1));
    for (int i = 0; i < N; i++) {
        CHECK_EQ(finish(&w.ranks[1], &recvs[i], 10), HR_OK);
        CHECK_EQ(finish(&w.ranks[0], &sends[i], 10), HR_OK);
    }
    hr_cancel(w.ranks[1].engine, &never, HR_ERR_CANCELED);
    world_close(&w);
}

/* --- programs
 * -------------------------------------------------------------------------------------------------------------------------------
 */

static hr_status refused(const struct hr_instr *instrs, uint32_t n, const uint32_t *unlocks, uint32_t nunlock,
                         const struct hr_ref *refs, uint32_t nref, const char *expected) {
    struct hr_program *p = NULL;
    char detail[256] = "";
    hr_status status = hr_program_new(instrs, n, unlocks, nunlock, refs, nref, 64, 64, 64, 2, &p, detail);
    if (status == HR_OK) hr_program_put(p);
    CHECK_STR(strstr(detail, expected) ? expected : detail, expected);
    return status;
}

TEST(what_is_borrowed_is_read_once) {
    uint32_t unlocks[] = {1, 2, 3};
    struct hr_ref refs[] = {{HR_BUF_BORROWED, 0, 0}, {HR_BUF_BORROWED, 0, 0}};
    struct hr_instr borrow = {.op = HR_OP_BORROW, .peer = 1, .len = 64, .dst_buf = HR_BUF_TMP, .nunlock = 1},
                    reduce = {.op = HR_OP_REDUCE, .after = 1, .len = 64, .dst_buf = HR_BUF_OUT, .nref = 1},
                    nop = {.op = HR_OP_NOP, .after = 1, .unlock = 1, .nunlock = 1};
    struct hr_instr good[] = {borrow, nop, reduce}, idle[] = {borrow, nop}, twice[] = {borrow, reduce, reduce};
    CHECK_EQ(refused(good, 3, unlocks, 3, refs, 1, ""), HR_OK); /* by way of another */
    idle[1].nunlock = 0;
    CHECK_EQ(refused(idle, 2, unlocks, 1, refs, 0, "never given back"), HR_ERR_INVALID);
    twice[0].nunlock = 2;
    twice[2].ref = 1;
    CHECK_EQ(refused(twice, 3, unlocks, 2, refs, 2, "read by another"), HR_ERR_INVALID);
    good[1].nunlock = 0;
    good[2].after = 0;
    CHECK_EQ(refused(good, 3, unlocks, 1, refs, 1, "without waiting"), HR_ERR_INVALID);
}

/* --- everything at once
 * ------------------------------------------------------------------------------------------------------------------------
 */

enum { RANKS = 3, SLOTS = 6, SUM_ELEMENTS = 30000 };

struct stage {
    struct world w;
    int64_t until;
    int clean;               /* nothing may fail */
    struct hr_comm *pair[2]; /* of ranks 0 and 1 */
    _Atomic uint64_t received, ended_badly;
};
enum actor_kind { SENDER, RECEIVER, HASTY_SENDER, HASTY_RECEIVER, ANY_RECEIVER, SUMMER, OPENER };
struct actor {
    struct stage *stage;
    struct rank *r;
    struct hr_comm *comm;
    enum actor_kind kind;
    int peer, sources;
    int must; /* its communicator holds nobody who is lost: it may not fail */
    uint32_t tag;
    uint64_t random;
    pthread_t thread;
};

struct mark { /* begins each message */
    uint32_t src, tag, seq, len, last;
};

static size_t some_len(uint64_t *random) {
    static const uint32_t lens[] = {20, 24, 64, 65, 500, 4096, 8192, 16384, 17000, 70000, 300000, 1000000};
    uint64_t k = rnd(random) % 100;
    return lens[k < 90 ? k % 10 : k < 98 ? 10 : 11];
}
static void *some_memory(size_t n, uint64_t *random, int *arena_p) {
    *arena_p = rnd(random) % 2;
    return *arena_p ? hr_arena_alloc(n, 0) : malloc(n);
}
static void give_memory(void *p, int arena) {
    if (arena)
        hr_arena_free(p);
    else
        free(p);
}
static uint8_t body(uint32_t seq, uint32_t tag, size_t i) { return (uint8_t)(seq * 31 + tag + i * 7 + (i >> 9)); }

/* Waits as the binding does: a few polls, then for good; now and then somebody else is meant to drive. */
static hr_status wait_for(struct actor *a, struct hr_request *req, double seconds) {
    int64_t deadline = hr_now() + SECONDS(seconds);
    hr_status status = HR_INTERRUPTED;
    if (rnd(&a->random) % 2) status = hr_wait(a->r->engine, req, HR_FOREVER, 50);
    while (status == HR_INTERRUPTED) status = hr_wait(a->r->engine, req, deadline, 0);
    if (status == HR_ERR_TIMEOUT) hr_cancel(a->r->engine, req, HR_ERR_TIMEOUT);
    CHECK(is_done(req));
    return (hr_status)req->status;
}
/* Whether the actor goes on after this end of a request. */
static int goes_on(struct actor *a, hr_status status) {
    if (status == HR_OK) return 1;
    atomic_fetch_add(&a->stage->ended_badly, 1);
    if (a->stage->clean || a->must)
        CHECK_EQ(status, HR_OK);
    else
        CHECK(hr_is_peer_error(status) || status == HR_ERR_BROKEN || status == HR_ERR_MISMATCH);
    return 0;
}

struct slot {
    struct hr_request req;
    uint8_t *buf;
    size_t len;
    int arena;
};
static hr_status slot_send(struct actor *a, struct slot *s, uint32_t seq, int last) {
    s->len = last ? sizeof(struct mark) : some_len(&a->random);
    s->buf = some_memory(s->len, &a->random, &s->arena);
    memset(&s->req, 0, sizeof s->req);
    s->req.priority = (int)(rnd(&a->random) % HR_PRIORITIES);
    *(struct mark *)s->buf = (struct mark){(uint32_t)a->r->rank, a->tag, seq, (uint32_t)s->len, (uint32_t)last};
    for (size_t i = sizeof(struct mark); i < s->len; i++) s->buf[i] = body(seq, a->tag, i);
    return hr_isend(a->comm, s->buf, s->len, a->peer, a->tag, &s->req);
}
static void slot_end(struct slot *s) {
    if (s->buf) give_memory(s->buf, s->arena);
    s->buf = NULL;
}

/* Several at once; each of them arrives. */
static void send_all(struct actor *a) {
    struct slot slots[SLOTS] = {0};
    uint32_t seq = 0;
    int on = 1, last = 0;
    while (on && !last) {
        struct slot *s = &slots[seq % SLOTS];
        if (s->buf) on = goes_on(a, wait_for(a, &s->req, 30));
        slot_end(s);
        last = hr_now() > a->stage->until;
        if (on) CHECK_EQ(slot_send(a, s, seq++, last), HR_OK);
    }
    for (int i = 0; i < SLOTS; i++, seq++) {
        struct slot *s = &slots[seq % SLOTS];
        if (!s->buf) continue;
        hr_status status = wait_for(a, &s->req, 30);
        if (on) goes_on(a, status);
        slot_end(s);
    }
}
/* Each has a short deadline, so most are withdrawn at some point; what does arrive is whole and in order. */
static void send_hastily(struct actor *a) {
    uint32_t seq = 0;
    int on = 1;
    while (on && hr_now() < a->stage->until) {
        struct slot s = {0};
        CHECK_EQ(slot_send(a, &s, seq++, 0), HR_OK);
        hr_status status = wait_for(a, &s.req, 1e-6 * (double)(rnd(&a->random) % 3000));
        if (status != HR_ERR_TIMEOUT) on = goes_on(a, status);
        slot_end(&s);
    }
    struct slot s = {0};
    if (!on) return;
    CHECK_EQ(slot_send(a, &s, seq, 1), HR_OK);
    goes_on(a, wait_for(a, &s.req, 30));
    slot_end(&s);
}

/* What has come; 1 when it was the last. */
static int check_message(struct actor *a, const struct slot *s, uint32_t *next, int gaps) {
    const struct mark *m = (const struct mark *)s->buf;
    size_t wrong = 0;
    CHECK_EQ(m->src, s->req.peer);
    CHECK_EQ(m->tag, a->tag);
    CHECK_EQ(m->len, s->req.nbytes);
    if (gaps)
        CHECK(m->seq >= next[s->req.peer]);
    else
        CHECK_EQ(m->seq, next[s->req.peer]);
    next[s->req.peer] = m->seq + 1;
    for (size_t i = sizeof *m; i < m->len && i < s->len; i++) wrong += s->buf[i] != body(m->seq, m->tag, i);
    CHECK_EQ(wrong, 0);
    atomic_fetch_add(&a->stage->received, 1);
    return m->last != 0;
}
static void slot_receive(struct actor *a, struct slot *s) {
    s->len = 1000000;
    s->buf = some_memory(s->len, &a->random, &s->arena);
    memset(&s->req, 0, sizeof s->req);
    s->req.priority = HR_PRIORITY_DEFAULT;
    CHECK_EQ(hr_irecv(a->comm, s->buf, s->len, a->kind == ANY_RECEIVER ? HR_ANY_SOURCE : a->peer, a->tag, &s->req),
             HR_OK);
}
static void receive_all(struct actor *a, int hasty) {
    struct slot slots[SLOTS] = {0};
    uint32_t next[RANKS] = {0}, turn = 0;
    int depth = hasty ? 1 : SLOTS, left = a->sources;
    while (left) {
        struct slot *s = &slots[turn++ % (uint32_t)depth];
        if (!s->buf) {
            slot_receive(a, s);
            if (turn < (uint32_t)depth) continue;
            if (!hasty) s = &slots[turn % (uint32_t)depth];
        }
        hr_status status = wait_for(a, &s->req, hasty ? 1e-6 * (double)(rnd(&a->random) % 3000) : 30);
        if (status == HR_OK)
            left -= check_message(a, s, next, hasty);
        else if (!(hasty && status == HR_ERR_TIMEOUT) && !goes_on(a, status))
            break;
        slot_end(s);
        if (hasty && hr_now() > a->stage->until + SECONDS(30)) {
            CHECK(!"the last message never came");
            break;
        }
    }
    for (int i = 0; i < SLOTS; i++) {
        if (!slots[i].buf) continue;
        hr_cancel(a->r->engine, &slots[i].req, HR_ERR_CANCELED);
        slot_end(&slots[i]);
    }
}

/* Everybody borrows everything and adds it up in the order of ranks. */
static struct hr_program *sum_program(int rank, uint64_t len) {
    struct hr_instr instrs[2 * RANKS] = {0};
    uint32_t unlocks[RANKS], n = 0, k = 0;
    struct hr_ref refs[RANKS];
    struct hr_program *p = NULL;
    char detail[256] = "";
    for (int peer = 0; peer < RANKS; peer++) {
        refs[peer] = (struct hr_ref){HR_BUF_IN, 0, 0};
        if (peer == rank) continue;
        instrs[n++] = (struct hr_instr){.op = HR_OP_SEND, .peer = peer, .src_buf = HR_BUF_IN, .len = len};
        refs[peer] = (struct hr_ref){HR_BUF_BORROWED, 0, n};
        instrs[n++] = (struct hr_instr){.op = HR_OP_BORROW,
                                        .peer = peer,
                                        .dst_buf = HR_BUF_TMP,
                                        .dst_off = len * (uint64_t)peer,
                                        .len = len,
                                        .unlock = k,
                                        .nunlock = 1};
        unlocks[k++] = 2 * (RANKS - 1);
    }
    instrs[n++] = (struct hr_instr){
        .op = HR_OP_REDUCE, .peer = -1, .after = RANKS - 1, .dst_buf = HR_BUF_OUT, .len = len, .nref = RANKS};
    hr_status status = hr_program_new(instrs, n, unlocks, k, refs, RANKS, len, len, len * RANKS, RANKS, &p, detail);
    if (status != HR_OK) fprintf(stderr, "%s\n", detail);
    REQUIRE(p);
    return p;
}
static void sum_up(struct actor *a) {
    static const uint64_t sizes[] = {1, 100, 3000, SUM_ELEMENTS};
    struct hr_program *programs[4];
    int on = 1, arena;
    uint64_t shared = stress_seed(); /* all ranks choose alike */
    int32_t *in = some_memory(SUM_ELEMENTS * 4, &a->random, &arena), *out = malloc(SUM_ELEMENTS * 4);
    for (int i = 0; i < 4; i++) programs[i] = sum_program(a->r->rank, sizes[i] * 4);
    for (int32_t round = 0, stop = 0; on && !stop; round++) {
        uint64_t pick = rnd(&shared) % 4, wrong = 0, n = sizes[pick];
        struct hr_request req = {.priority = (int)(rnd(&shared) % HR_PRIORITIES)};
        for (uint64_t i = 0; i < n; i++) in[i] = (int32_t)i * RANKS + a->r->rank + round;
        in[0] = hr_now() > a->stage->until; /* whether to stop is decided together */
        CHECK_EQ(hr_run(a->comm, programs[pick], in, out, HR_INT32, HR_SUM, pick + 1, &req), HR_OK);
        on = goes_on(a, wait_for(a, &req, 30));
        if (!on) break;
        stop = out[0] != 0;
        for (uint64_t i = 1; i < n; i++)
            wrong += out[i] != ((int32_t)i * RANKS + round) * RANKS + RANKS * (RANKS - 1) / 2;
        CHECK_EQ(wrong, 0);
    }
    for (int i = 0; i < 4; i++) hr_program_put(programs[i]);
    give_memory(in, arena);
    free(out);
}

/* Communicators come and go; each serves one exchange, in which they also agree whether there will be another. */
static void open_and_close(struct actor *a) {
    uint64_t peers[RANKS] = {0, 1, 2}, shared = stress_seed() + 5;
    int on = 1;
    for (uint64_t id = 1000; on; id++) {
        struct hr_comm *comm;
        struct hr_request send[RANKS] = {0}, recv[RANKS] = {0};
        size_t n = some_len(&shared);
        uint8_t *out = malloc(n), *in[RANKS];
        CHECK_EQ(hr_comm_open(a->r->engine, id, peers, RANKS, a->r->rank, &comm), HR_OK);
        memset(out, (int)id, n);
        out[0] = hr_now() > a->stage->until;
        for (int p = 0; p < RANKS; p++) {
            in[p] = calloc(1, n);
            CHECK_EQ(hr_isend(comm, out, n, p, 1, &send[p]), HR_OK);
            CHECK_EQ(hr_irecv(comm, in[p], n, p, 1, &recv[p]), HR_OK);
        }
        for (int p = 0; p < RANKS; p++) {
            if (!goes_on(a, wait_for(a, &recv[p], 30))) {
                on = 0;
                continue;
            }
            if (in[p][0]) on = 0;
            CHECK_MEM(in[p] + 1, out + 1, n - 1);
        }
        for (int p = 0; p < RANKS; p++) goes_on(a, wait_for(a, &send[p], 30));
        hr_comm_close(comm);
        for (int p = 0; p < RANKS; p++) free(in[p]);
        free(out);
    }
}

static void *act(void *arg) {
    struct actor *a = arg;
    switch (a->kind) {
    case SENDER: send_all(a); break;
    case RECEIVER:
    case ANY_RECEIVER: receive_all(a, 0); break;
    case HASTY_SENDER: send_hastily(a); break;
    case HASTY_RECEIVER: receive_all(a, 1); break;
    case SUMMER: sum_up(a); break;
    case OPENER: open_and_close(a);
    }
    return NULL;
}

struct cast {
    struct actor actors[40];
    int n;
};
static void enter(struct cast *c, struct stage *stage, enum actor_kind kind, int rank, int peer, uint32_t tag,
                  struct hr_comm *comm) {
    struct actor *a = &c->actors[c->n++];
    *a = (struct actor){.stage = stage,
                        .r = &stage->w.ranks[rank],
                        .comm = comm ? comm : stage->w.ranks[rank].comm,
                        .kind = kind,
                        .peer = peer,
                        .sources = kind == ANY_RECEIVER ? RANKS - 1 : 1,
                        .must = comm != NULL,
                        .tag = tag,
                        .random = stress_seed() * 1000 + (uint64_t)c->n};
}
static void channel(struct cast *c, struct stage *stage, int from, int to, uint32_t tag, int hasty) {
    enter(c, stage, hasty ? HASTY_SENDER : SENDER, from, to, tag, NULL);
    enter(c, stage, hasty ? HASTY_RECEIVER : RECEIVER, to, from, tag, NULL);
}

/* lose: rank 0 is told in the middle that rank 2 is gone. */
static void perform(const char *fault, int clean, int lose) {
    struct stage *stage = calloc(1, sizeof *stage);
    struct cast *c = calloc(1, sizeof *c);
    uint64_t pair[2] = {0, 1}, full, random = stress_seed();
    world_open(&stage->w, RANKS, fault);
    full = full_credit(&stage->w);
    stage->clean = clean;
    stage->until = hr_now() + SECONDS(stress_seconds());
    for (int i = 0; i < 2; i++) CHECK_EQ(hr_comm_open(stage->w.ranks[i].engine, 2, pair, 2, i, &stage->pair[i]), HR_OK);
    channel(c, stage, 0, 1, 1, 0);
    channel(c, stage, 1, 2, 2, 0);
    channel(c, stage, 2, 0, 3, 0);
    channel(c, stage, 0, 0, 4, 0);
    channel(c, stage, 1, 0, 5, 1);
    channel(c, stage, 0, 2, 6, 1);
    channel(c, stage, 2, 2, 7, 1);
    enter(c, stage, SENDER, 1, 0, 8, NULL);
    enter(c, stage, SENDER, 2, 0, 8, NULL);
    enter(c, stage, ANY_RECEIVER, 0, HR_ANY_SOURCE, 8, NULL);
    for (int i = 0; i < RANKS; i++) enter(c, stage, SUMMER, i, 0, 0, NULL);
    for (int i = 0; i < RANKS; i++) enter(c, stage, OPENER, i, 0, 0, NULL);
    if (!fault) { /* two who are never lost */
        enter(c, stage, SENDER, 0, 1, 9, stage->pair[0]);
        enter(c, stage, RECEIVER, 1, 0, 9, stage->pair[1]);
        enter(c, stage, SENDER, 1, 0, 9, stage->pair[1]);
        enter(c, stage, RECEIVER, 0, 1, 9, stage->pair[0]);
    }
    for (int i = 0; i < c->n; i++) CHECK_EQ(pthread_create(&c->actors[i].thread, NULL, act, &c->actors[i]), 0);
    if (lose) {
        nap_ms((int)(rnd(&random) % (uint64_t)(1000 * stress_seconds())));
        hr_peer_lost(stage->w.ranks[0].engine, 2, HR_ERR_PEER_LOST, "lost on purpose");
    }
    for (int i = 0; i < c->n; i++) pthread_join(c->actors[i].thread, NULL);
    CHECK(stage->received > 0);
    if (clean) {
        CHECK_EQ(stage->ended_badly, 0);
        check_rest(&stage->w, full);
    } else {
        struct hr_comm_state state;
        hr_comm_state(stage->w.ranks[0].comm, &state);
        CHECK(hr_is_peer_error((hr_status)state.status) || state.status == HR_ERR_BROKEN);
        CHECK(stage->ended_badly > 0);
    }
    for (int i = 0; i < 2; i++) hr_comm_close(stage->pair[i]);
    world_close(&stage->w);
    free(c);
    free(stage);
}

TEST(everything_at_once) { perform(NULL, 1, 0); }
TEST(everything_while_a_peer_is_lost) {
    for (int i = 0; i < 3; i++) perform(NULL, 0, 1);
}

static void perform_with(const char *fault, int clean) {
    char text[128];
    snprintf(text, sizeof text, "%s:%s,seed=%llu", world_provider(), fault, (unsigned long long)stress_seed());
    perform(text, clean, 0);
}
TEST(everything_late) { perform_with("delay=0.02:500us", 1); }
TEST(everything_until_an_operation_fails) { perform_with("error=0.001,delay=0.01:300us", 0); }
TEST(everything_until_an_endpoint_dies) { perform_with("kill=after:800", 0); }

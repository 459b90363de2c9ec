/* test_waits.c - credit, order, withdrawal and waiting, in cases that only show under load. HR_TEST_PROVIDER chooses.
 */

#include "stress_rig.h"

/* --- credit and order
 * ------------------------------------------------------------------------------------------------------------------------
 */

enum { FLOOD = 80000 };
static struct hr_request flood_reqs[FLOOD];

/* Sends small messages until no more leave; how many are on their way or wait. */
static int flood(struct rank *r, const uint32_t *value, uint32_t tag, int dst) {
    int n = 0;
    memset(flood_reqs, 0, sizeof flood_reqs);
    for (; n < FLOOD; n++) {
        flood_reqs[n].priority = HR_PRIORITY_DEFAULT;
        CHECK_EQ(hr_isend(r->comm, value, 4, dst, tag, &flood_reqs[n]), HR_OK);
        if (is_done(&flood_reqs[n])) continue;
        if (finish(r, &flood_reqs[n], 1) != HR_OK)
            break; /* out of credit, as nothing else takes a second: taken back */
    }
    CHECK(n > 1000 && n < FLOOD);
    return n;
}

/* Urgent messages of the same tag may not use up the credit that an earlier one still needs. */
TEST(urgent_messages_leave_room_for_those_before) {
    struct world w;
    enum { URGENT = FLOOD }; /* more than all credit */
    static struct hr_request urgent[URGENT];
    struct hr_request bulk = {.priority = HR_PRIORITIES - 1};
    uint32_t zero = 0, one = 1, x;
    world_open(&w, 2, NULL);
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
    check_rest(&w);
    world_close(&w);
}

/* Three quarters of the credit lie unmatched; what goes on beside that must not get stuck on credit that is owed. */
TEST(credit_returns_before_the_peer_starves) {
    struct world w;
    uint32_t zero = 0, x;
    world_open(&w, 2, NULL);
    uint64_t full = hr_credit_max(conn_between(&w, 0, 1)), cost = HR_EAGER_COST + 4;
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
    check_rest(&w);
    world_close(&w);
}

/* Thousands of sends withdrawn while they wait for credit leave nothing behind, here or there. */
TEST(withdrawn_in_the_queue) {
    struct world w;
    enum { WAITING = 5000 };
    static struct hr_request waiting[WAITING];
    uint32_t zero = 0, x = 0;
    world_open(&w, 2, NULL);
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
    for (int i = 0; i < WAITING; i++) CHECK_EQ(finish(a, &waiting[i], 5), i % 10 ? HR_ERR_CANCELED : HR_OK);
    check_rest(&w);
    world_close(&w);
}

/* A send is withdrawn while the peer reads its memory, and the memory is used again at once: what the peer read is no
 * message. Whatever is received is whole. */
static void *take_all(void *arg) {
    struct rank *r = arg;
    size_t n = 8u << 20;
    uint8_t *in = malloc(n);
    for (int on = 1; on;) {
        struct hr_request req = {0};
        uint8_t first = 0;
        size_t wrong = 0;
        hr_status status = recv_from(r, in, n, 0, 4, &req);
        CHECK_EQ(status, HR_OK);
        if (status == HR_OK) first = in[0];
        for (size_t i = 0; status == HR_OK && i < req.nbytes; i++) wrong += in[i] != first;
        CHECK_EQ(wrong, 0);
        CHECK(first != 0xee);
        on = status == HR_OK && req.nbytes > 1;
    }
    free(in);
    return NULL;
}
TEST(withdrawn_while_it_is_read) {
    struct world w;
    pthread_t thread;
    size_t n = 8u << 20;
    uint64_t random = stress_seed();
    world_open(&w, 2, NULL);
    struct rank *a = &w.ranks[0];
    CHECK_EQ(pthread_create(&thread, NULL, take_all, &w.ranks[1]), 0);
    for (int i = 0; i < 60; i++) {
        uint8_t *out = i % 3 ? hr_arena_alloc(n, 0) : malloc(n);
        struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
        struct timespec nap = {0, (long)(rnd(&random) % 3000000)};
        memset(out, i + 1, n);
        CHECK_EQ(hr_isend(a->comm, out, n, 1, 4, &req), HR_OK);
        nanosleep(&nap, NULL);
        hr_cancel(a->engine, &req, HR_ERR_CANCELED);
        memset(out, 0xee, n);
        if (i % 3)
            hr_arena_free(out);
        else
            free(out);
    }
    uint8_t last = 1;
    CHECK_EQ(send_to(a, &last, 1, 1, 4), HR_OK);
    pthread_join(thread, NULL);
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
    int64_t until = hr_now() + SECONDS(20);
    int matched = 0, withdrawn = 0;
    while (!withdrawn && hr_now() < until) { /* in the middle, unless this thread was too late for that */
        if (is_done(&req[1])) {
            req[1] = (struct hr_request){.priority = HR_PRIORITY_DEFAULT};
            CHECK_EQ(hr_irecv(r[0].comm, any, n, HR_ANY_SOURCE, 4, &req[1]), HR_OK);
        }
        send = (struct hr_request){.priority = HR_PRIORITY_DEFAULT};
        CHECK_EQ(hr_isend(r[2].comm, big, n, 0, 4, &send), HR_OK);
        for (matched = 0; !matched && hr_now() < until;) {
            hr_lock(r[0].engine);
            matched = req[1].xfer != NULL || req[1].done;
            hr_unlock(r[0].engine);
        }
        hr_cancel(r[2].engine, &send, HR_ERR_CANCELED);
        withdrawn = send.status == HR_ERR_CANCELED;
        while (matched && !is_done(&req[1]) && hr_now() < until) {
            hr_lock(r[0].engine);
            matched = req[1].xfer != NULL;
            hr_unlock(r[0].engine);
        }
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
        CHECK(s.took < SECONDS(10)); /* else its deadline ends it, after 20 */
        CHECK(hr_is_error(s.status) && s.status != HR_ERR_TIMEOUT);
        world_close(&w);
    }
}

/* Whenever that is, and though it happen between the driver's last look and its sleep: the lock is let go there too. */
TEST(ended_at_any_moment) {
    struct world w;
    uint64_t random = stress_seed();
    int slow = 0;
    world_open(&w, 2, NULL);
    for (int i = 0; i < 1000 && !slow; i++) {
        struct sleeper s;
        pthread_t thread;
        uint32_t x;
        sleep_on(&s, &thread, &w.ranks[0], &x, 1, 1);
        struct timespec nap = {0, (long)(rnd(&random) % 400000)};
        nanosleep(&nap, NULL);
        hr_cancel(w.ranks[0].engine, &s.req, HR_ERR_CANCELED);
        pthread_join(thread, NULL);
        CHECK_EQ(s.status, HR_ERR_CANCELED);
        slow = s.took > SECONDS(10);
    }
    CHECK(!slow);
    world_close(&w);
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
        uint32_t x[4], last = 3;
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
        CHECK_EQ(send_to(&w.ranks[1], &last, 4, 0, last), HR_OK);
        for (int k = 0; k < 4; k++) {
            pthread_join(threads[k], NULL);
            CHECK_EQ(s[k].status, HR_OK);
        }
        slow += hr_now() - since > 50000000;
    }
    CHECK(slow < TIMES / 3);
    world_close(&w);
}

static uint32_t passes(struct hr_engine *engine) {
    hr_lock(engine);
    uint32_t n = engine->pass;
    hr_unlock(engine);
    return n;
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
        uint32_t before = passes(w.ranks[1].engine);
        CHECK_EQ(hr_wait(w.ranks[1].engine, &never, HR_FOREVER, 50), HR_INTERRUPTED);
        CHECK(passes(w.ranks[1].engine) - before < 5000); /* the background thread makes some, too */
    }
    /* and a deadline that has passed is noticed, whatever happens */
    int64_t since = hr_now();
    CHECK_EQ(hr_wait(w.ranks[1].engine, &never, 0, 0), HR_ERR_TIMEOUT);
    CHECK(hr_now() - since < SECONDS(5));
    for (int i = 0; i < N; i++) {
        CHECK_EQ(finish(&w.ranks[1], &recvs[i], 10), HR_OK);
        CHECK_EQ(finish(&w.ranks[0], &sends[i], 10), HR_OK);
    }
    hr_cancel(w.ranks[1].engine, &never, HR_ERR_CANCELED);
    world_close(&w);
}

static int deep(struct hr_engine *engine) {
    hr_lock(engine);
    int is = engine->bg_deep;
    hr_unlock(engine);
    return is;
}

static int seldom(struct hr_engine *engine) { return atomic_load(&engine->bg_lazy) || deep(engine); }

/* Calls come and go, for so long; 1: the background thread has become lazy meanwhile, or sleeps deep where calls last
 * long, as a sanitizer's do. */
static int come_and_go(struct hr_engine *engine, struct hr_request *never, int64_t ns) {
    for (int64_t end = hr_now() + ns; hr_now() < end;) {
        CHECK_EQ(hr_wait(engine, never, 0, 0), HR_ERR_TIMEOUT);
        if (seldom(engine)) return 1;
    }
    return 0;
}

/* Each of its looks takes a processor from somebody; a request that nobody may be waiting for is worth them. */
TEST(the_background_thread_looks_less_often_where_nothing_was_left_to_it) {
    struct world w;
    uint32_t x, y;
    world_open(&w, 2, NULL);
    struct hr_engine *engine = w.ranks[0].engine;
    struct hr_request never = {.priority = HR_PRIORITY_DEFAULT}, left = never;
    left.flags = HR_REQ_ASYNC;
    CHECK_EQ(hr_irecv(w.ranks[0].comm, &x, 4, 1, 9, &never), HR_OK);
    CHECK(come_and_go(engine, &never, SECONDS(20)));
    CHECK_EQ(hr_irecv(w.ranks[0].comm, &y, 4, 1, 8, &left), HR_OK);
    CHECK_EQ(atomic_load(&engine->nasync), 1);
    for (int64_t since = hr_now(); atomic_load(&engine->bg_lazy) && hr_now() - since < SECONDS(5);) nap_ms(1);
    come_and_go(engine, &never, SECONDS(0.2));
    CHECK_EQ(atomic_load(&engine->bg_lazy), 0);
    hr_cancel(engine, &left, HR_ERR_CANCELED);
    CHECK_EQ(atomic_load(&engine->nasync), 0);
    CHECK(come_and_go(engine, &never, SECONDS(20)));
    /* few calls, and long between them */
    for (int64_t since = hr_now(); seldom(engine) && hr_now() - since < SECONDS(20); nap_ms(6))
        CHECK_EQ(hr_wait(engine, &never, 0, 0), HR_ERR_TIMEOUT);
    CHECK(!seldom(engine));
    hr_cancel(engine, &never, HR_ERR_CANCELED);
    world_close(&w);
}

/* Calls of so many ns follow each other; 1: meanwhile the background thread has slept deep during 20 in a row. */
static int follow_each_other(struct hr_engine *engine, struct hr_request *never, int64_t each) {
    int in_a_row = 0;
    for (int64_t end = hr_now() + SECONDS(20); hr_now() < end && in_a_row < 20;) {
        CHECK_EQ(hr_wait(engine, never, hr_now() + each, 0), HR_ERR_TIMEOUT);
        in_a_row = deep(engine) ? in_a_row + 1 : 0;
    }
    return in_a_row == 20;
}

/* Calls that set the timer back again and again, too many for that; 1: it sleeps deep no more, or no two of them are
 * made in 20 us here. */
static int too_short(struct hr_engine *engine, struct hr_request *never) {
    int fast = 0;
    int64_t begin = hr_now();
    while (deep(engine) && hr_now() - begin < (fast ? SECONDS(20) : SECONDS(1))) {
        int64_t since = hr_now();
        for (int k = 0; k < 1000; k++) CHECK_EQ(hr_wait(engine, never, 0, 0), HR_ERR_TIMEOUT);
        fast |= hr_now() - since < 10000000;
    }
    return !fast || !deep(engine);
}

static int without_limit(struct hr_engine *engine) {
    hr_lock(engine);
    int is = engine->bg_forever;
    hr_unlock(engine);
    return is;
}

/* Whoever leaves last must be found to have left, with something for the thread to do or nothing. */
TEST(the_background_thread_sleeps_while_calls_follow_each_other) {
    struct world w;
    uint32_t x, y, value = 7;
    const int64_t lengths[] = {200000, 5000000, 40000000}; /* ns; the last are longer than it looks at one call */
    world_open(&w, 2, NULL);
    struct hr_engine *engine = w.ranks[0].engine;
    struct hr_request never = {.priority = HR_PRIORITY_DEFAULT};
    CHECK_EQ(hr_irecv(w.ranks[0].comm, &x, 4, 1, 9, &never), HR_OK);
    for (int i = 0; i < 3; i++) {
        struct hr_request left = {.priority = HR_PRIORITY_DEFAULT, .flags = HR_REQ_ASYNC};
        CHECK(follow_each_other(engine, &never, lengths[i]));
        CHECK_EQ(hr_irecv(w.ranks[0].comm, &y, 4, 1, 8, &left), HR_OK);
        CHECK_EQ(send_to(&w.ranks[1], &value, 4, 0, 8), HR_OK);
        for (int64_t since = hr_now();
             !__atomic_load_n(&left.done, __ATOMIC_ACQUIRE) && hr_now() - since < SECONDS(20);)
            nap_ms(1);
        CHECK(left.done && y == 7);
        CHECK(!deep(engine));
        CHECK(follow_each_other(engine, &never, lengths[i]));
        CHECK(too_short(engine, &never));
    }
    /* when they end it goes on looking for a second, and sleeps without a limit only then */
    for (int64_t since = hr_now(); hr_now() - since < SECONDS(1.2);)
        CHECK(follow_each_other(engine, &never, lengths[2]));
    int64_t since = hr_now();
    nap_ms(50);
    int forever = without_limit(engine);
    CHECK(!forever || hr_now() - since > SECONDS(0.8));
    while (!(forever = without_limit(engine)) && hr_now() - since < SECONDS(20)) nap_ms(20);
    CHECK(forever);
    CHECK(follow_each_other(engine, &never, lengths[1]));
    hr_cancel(engine, &never, HR_ERR_CANCELED);
    world_close(&w); /* while it sleeps */
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

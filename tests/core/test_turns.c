/* test_turns.c - where the background threads of two ranks work: one processor for both, another one each turn. */

#define _GNU_SOURCE
#include <sched.h>
#include <string.h>

#include "core/engine.h"
#include "world.h"

#define TURN ((int64_t)32000000)
#define MS ((int64_t)1000000)

static cpu_set_t all;

/* Whether there are two, so that there is a choice. */
static int two(void) { return !sched_getaffinity(0, sizeof all, &all) && CPU_COUNT(&all) > 1; }

/* The processor that this thread is bound to; -1: it is to none. */
static int bound_to(void) {
    cpu_set_t set;
    int cpu = 0;
    REQUIRE(sched_getaffinity(0, sizeof set, &set) == 0);
    if (CPU_EQUAL(&set, &all)) return -1;
    CHECK_EQ(CPU_COUNT(&set), 1);
    while (!CPU_ISSET(cpu, &set)) cpu++;
    return cpu;
}

static void let_go(void) { REQUIRE(sched_setaffinity(0, sizeof all, &all) == 0); }

/* A thread that had something to do at `now`. */
static struct hr_turns begun(int64_t now) {
    struct hr_turns turns = {.on = 1};
    CHECK_EQ(hr_turns_due(&turns, now - 1, 0), 0);
    CHECK_EQ(turns.since, 0);
    CHECK_EQ(hr_turns_due(&turns, now, 1), 0);
    return turns;
}

/* It had something to do until the turn that now ends, and slept so much of it. */
static void turn_ends(struct hr_turns *turns, int64_t now, int64_t slept) {
    CHECK_EQ(hr_turns_due(turns, now - 1, 1), 0);
    turns->slept += slept;
    REQUIRE(hr_turns_due(turns, now, 1));
    hr_turns_take(turns, now);
}

TEST(two_threads_share_a_processor_and_change_it_together) {
    if (!two()) SKIP("one processor");
    struct hr_turns mine = begun(5 * TURN - TURN / 2), other = begun(5 * TURN - TURN / 2 + 9);
    int at[2];
    CHECK_EQ(mine.next, 5 * TURN); /* it works wherever there is room for half a turn */
    CHECK_EQ(other.next, 5 * TURN + 9);
    for (int64_t turn = 5; turn < 7; turn++) {
        turn_ends(&mine, mine.next, TURN);
        at[turn - 5] = bound_to();
        CHECK(at[turn - 5] >= 0);
        CHECK_EQ(mine.next, (turn + 1) * TURN);
        let_go(); /* the other thread is this one, too */
        turn_ends(&other, other.next, TURN);
        CHECK_EQ(bound_to(), at[turn - 5]);
        let_go();
    }
    CHECK(at[0] != at[1]);
}

TEST(it_is_let_go_when_it_stops_and_when_it_has_nothing_to_do_or_much) {
    if (!two()) SKIP("one processor");
    struct hr_turns turns = begun(TURN);
    turn_ends(&turns, turns.next, TURN);
    CHECK(bound_to() >= 0);
    hr_turns_stop(&turns);
    CHECK_EQ(bound_to(), -1);
    CHECK_EQ(hr_turns_due(&turns, 9 * TURN, 0), 0);

    turns = begun(10 * TURN);
    turn_ends(&turns, turns.next, TURN);
    CHECK(bound_to() >= 0);
    CHECK_EQ(hr_turns_due(&turns, turns.last + 8 * MS, 0), 0);
    REQUIRE(hr_turns_due(&turns, turns.last + 8 * MS + 1, 0));
    hr_turns_take(&turns, turns.last + 8 * MS + 1);
    CHECK_EQ(bound_to(), -1);
    CHECK_EQ(turns.since, 0);

    turns = begun(20 * TURN);
    turn_ends(&turns, turns.next, TURN);
    CHECK(bound_to() >= 0);
    turn_ends(&turns, turns.next, MS); /* it slept for a moment */
    CHECK_EQ(bound_to(), -1);
    CHECK(turns.since > 0);
    turn_ends(&turns, turns.next, TURN / 4);
    CHECK(bound_to() >= 0);
    turns.on = 0;
    REQUIRE(hr_turns_due(&turns, turns.next, 1));
    hr_turns_take(&turns, turns.next);
    CHECK_EQ(bound_to(), -1);
}

TEST(where_a_user_binds_it_there_it_stays) {
    if (!two()) SKIP("one processor");
    struct hr_turns turns = begun(TURN);
    turn_ends(&turns, turns.next, TURN);
    int cpu = bound_to(), other = 0;
    cpu_set_t one;
    while (!CPU_ISSET(other, &all) || other == cpu) other++;
    CPU_ZERO(&one);
    CPU_SET(other, &one);
    REQUIRE(sched_setaffinity(0, sizeof one, &one) == 0);
    for (int turn = 0; turn < 3; turn++) {
        turn_ends(&turns, turns.next, TURN);
        CHECK_EQ(bound_to(), other);
    }
    hr_turns_stop(&turns);
    CHECK_EQ(bound_to(), other);
    let_go();
}

TEST(one_that_takes_no_turns_is_left_alone) {
    struct hr_turns turns = {.on = 0};
    for (int64_t now = TURN; now < 5 * TURN; now += MS) CHECK_EQ(hr_turns_due(&turns, now, 1), 0);
    hr_turns_stop(&turns);
}

/* --- in an engine
 * ---------------------------------------------------------------------------------------------------------------- */

static int is_bound(struct rank *r) { return atomic_load(&r->engine->turns.bound); }

static int done(struct hr_request *req) { return __atomic_load_n(&req->done, __ATOMIC_ACQUIRE); }

/* The background threads exchange messages until both are bound, nobody else drives; then there is nothing to do. */
static void *serves(void *arg) {
    struct rank *r = arg;
    int64_t deadline = hr_now() + SECONDS(60);
    uint64_t mine = 0, theirs = 0;
    while (!(mine && theirs) && hr_now() < deadline) {
        struct hr_request in = {.priority = HR_PRIORITY_DEFAULT}, out = {.priority = HR_PRIORITY_DEFAULT};
        mine = (uint64_t)is_bound(r) | mine;
        CHECK_EQ(hr_irecv(r->comm, &theirs, 8, 1 - r->rank, 3, &in), HR_OK);
        CHECK_EQ(hr_isend(r->comm, &mine, 8, 1 - r->rank, 3, &out), HR_OK);
        while (!(done(&in) && done(&out)) && hr_now() < deadline) usleep(500);
        REQUIRE(done(&in) && done(&out));
    }
    CHECK(mine && theirs);
    while (is_bound(r) && hr_now() < deadline) usleep(1000);
    CHECK(!is_bound(r));
    return NULL;
}

TEST(an_engine_takes_turns_while_its_background_thread_serves) {
    struct world w;
    if (!two()) SKIP("one processor");
    world_open(&w, 2, NULL);
    for (int i = 0; i < 2; i++) hr_engine_set_locality(w.ranks[i].engine, 2, 2, 1);
    world_run(&w, serves, NULL);
    world_close(&w);
    CHECK_EQ(bound_to(), -1);
}

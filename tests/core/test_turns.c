/* test_turns.c - where the background threads of two ranks work: one processor for both, another one each turn. */

#define _GNU_SOURCE
#include <sched.h>
#include <string.h>

#include "check.h"
#include "core/engine.h"

#define TURN ((int64_t)32000000)

static cpu_set_t here(void) {
    cpu_set_t set;
    REQUIRE(sched_getaffinity(0, sizeof set, &set) == 0);
    return set;
}

/* The processor that this thread is bound to; -1: it is to none. */
static int bound_to(void) {
    cpu_set_t set = here();
    int cpu = 0;
    if (CPU_COUNT(&set) != 1) return -1;
    while (!CPU_ISSET(cpu, &set)) cpu++;
    return cpu;
}

static struct hr_turns begun(int64_t now) {
    struct hr_turns turns = {.on = 1};
    hr_turns_begin(&turns, now);
    return turns;
}

TEST(two_threads_share_a_processor_and_change_it_together) {
    cpu_set_t all = here();
    if (CPU_COUNT(&all) < 2) SKIP("one processor");
    struct hr_turns mine = begun(5 * TURN + 7), other = begun(5 * TURN + 9);
    int at[2];
    CHECK_EQ(mine.next - (5 * TURN + 7), TURN / 2); /* it works wherever there is room for as long */
    for (int64_t turn = 6; turn < 8; turn++) {
        hr_turns_take(&mine, turn * TURN + 3);
        at[turn - 6] = bound_to();
        CHECK(at[turn - 6] >= 0);
        CHECK_EQ(mine.next, (turn + 1) * TURN);
        REQUIRE(sched_setaffinity(0, sizeof all, &all) == 0); /* the other thread is this one, too */
        hr_turns_take(&other, turn * TURN + TURN - 1);
        CHECK_EQ(bound_to(), at[turn - 6]);
        REQUIRE(sched_setaffinity(0, sizeof all, &all) == 0);
    }
    CHECK(at[0] != at[1]);
}

TEST(it_is_let_go_when_it_begins_anew_and_when_it_has_much_to_do) {
    cpu_set_t all = here(), now;
    if (CPU_COUNT(&all) < 2) SKIP("one processor");
    struct hr_turns turns = begun(TURN);
    hr_turns_take(&turns, 2 * TURN);
    CHECK(bound_to() >= 0);
    hr_turns_begin(&turns, 2 * TURN + 1);
    now = here();
    CHECK(CPU_EQUAL(&now, &all));

    hr_turns_take(&turns, 3 * TURN);
    CHECK(bound_to() >= 0);
    turns.worked -= TURN / 2; /* of the turn that now ends */
    hr_turns_take(&turns, 4 * TURN);
    now = here();
    CHECK(CPU_EQUAL(&now, &all));
    turns.worked -= TURN / 4;
    hr_turns_take(&turns, 5 * TURN);
    CHECK(bound_to() >= 0);
    hr_turns_begin(&turns, 6 * TURN);
}

TEST(where_a_user_binds_it_there_it_stays) {
    cpu_set_t all = here(), one;
    if (CPU_COUNT(&all) < 2) SKIP("one processor");
    struct hr_turns turns = begun(TURN);
    hr_turns_take(&turns, 2 * TURN);
    int cpu = bound_to(), other = 0;
    while (!CPU_ISSET(other, &all) || other == cpu) other++;
    CPU_ZERO(&one);
    CPU_SET(other, &one);
    REQUIRE(sched_setaffinity(0, sizeof one, &one) == 0);
    for (int64_t turn = 3; turn < 6; turn++) {
        hr_turns_take(&turns, turn * TURN);
        CHECK_EQ(bound_to(), other);
    }
    hr_turns_begin(&turns, 6 * TURN);
    CHECK_EQ(bound_to(), other);
    REQUIRE(sched_setaffinity(0, sizeof all, &all) == 0);
}

TEST(one_that_takes_no_turns_is_left_alone) {
    cpu_set_t all = here(), now;
    struct hr_turns turns = {.on = 0};
    hr_turns_begin(&turns, TURN);
    CHECK_EQ(turns.next, 0);
    now = here();
    CHECK(CPU_EQUAL(&now, &all));
}

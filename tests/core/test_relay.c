/* test_relay.c - which of two ways memory takes that nobody has mapped: what is measured, and what follows from it. */

#include "check.h"
#include "core/relay.h"

#define LEN ((uint64_t)256 << 10)

/* What the peer says each time that this side has read; 0: nothing. */
static double said;

/* A transfer in which this side works so many ns of each kilobyte, that takes twice as long; now is when it begins. */
static int one(struct hr_relay *r, int64_t *now, const int64_t cost[HR_WAYS], const struct hr_relay_work *work) {
    int way = hr_relay_begin(r, *now);
    r->busy += cost[way] * (int64_t)(LEN >> 10);
    *now += 2 * cost[way] * (int64_t)(LEN >> 10);
    hr_relay_end(r, way, LEN, *now, work);
    if (way == HR_READ && said > 0) r->theirs = said;
    return way;
}

/* Both ways are tried; then which one was taken, of so many transfers. */
static int chosen(struct hr_relay *r, int64_t *now, const int64_t cost[HR_WAYS], const struct hr_relay_work *work) {
    for (int i = 0; i < 2 * HR_RELAY_PERIODS; i++)
        CHECK_EQ(one(r, now, cost, work), i < HR_RELAY_PERIODS ? HR_RELAYED : HR_READ);
    int way = one(r, now, cost, work);
    for (int i = 0; i < HR_RELAY_PERIODS; i++) CHECK_EQ(one(r, now, cost, work), way);
    return way;
}

TEST(the_faster_of_both_is_taken_and_the_other_tried_again) {
    for (int faster = 0; faster < HR_WAYS; faster++) {
        struct hr_relay r = {0};
        int64_t now = 1, cost[HR_WAYS] = {100, 100};
        cost[faster] = 80;
        CHECK_EQ(chosen(&r, &now, cost, NULL), faster);
        int tried = 0;
        for (int i = 0; i < 20 * HR_RELAY_TRIAL * HR_RELAY_PERIODS; i++) tried += one(&r, &now, cost, NULL) != faster;
        CHECK(tried >= HR_RELAY_PERIODS && tried <= 20 * HR_RELAY_PERIODS);
        cost[!faster] = 60; /* which is found out by the next trial */
        int64_t until = now + 2 * HR_RELAY_TRIAL * HR_RELAY_PERIODS * 100 * (int64_t)(LEN >> 10);
        while (now < until) one(&r, &now, cost, NULL);
        CHECK_EQ(one(&r, &now, cost, NULL), !faster);
    }
}

TEST(where_both_send_the_slower_of_both_counts) {
    const int64_t cost[HR_WAYS] = {50, 90}; /* ns for 1024 bytes: a message is copied by the sender as well */
    struct hr_relay_work work = {.copying = 50. / 1024, .messages = 1, .both = 1};
    int64_t now = 1;
    struct hr_relay r = {0};
    said = 80. / 1024;
    CHECK_EQ(chosen(&r, &now, cost, &work), HR_READ);
    r = (struct hr_relay){0};
    said = 110. / 1024; /* its way to this side's pages is longer: this side would wait for it */
    CHECK_EQ(chosen(&r, &now, cost, &work), HR_RELAYED);
    r = (struct hr_relay){0};
    work.both = 0; /* it does not matter to copies */
    CHECK_EQ(chosen(&r, &now, cost, &work), HR_READ);
    r = (struct hr_relay){0};
    work.both = 1;
    work.messages = 2;
    CHECK_EQ(chosen(&r, &now, cost, &work), HR_READ);
}

TEST(what_the_peer_has_not_yet_said_is_waited_for) {
    const int64_t cost[HR_WAYS] = {50, 10};
    struct hr_relay_work work = {.copying = 50. / 1024, .messages = 1, .both = 1};
    int64_t now = 1;
    struct hr_relay r = {0};
    said = 0;
    for (int i = 0; i < HR_RELAY_PERIODS; i++) one(&r, &now, cost, &work);
    CHECK_EQ(one(&r, &now, cost, &work), HR_READ);
    CHECK(!r.cost[HR_READ]); /* not that it is that fast */
    said = 200. / 1024;
    for (int i = 1; i < HR_RELAY_PERIODS; i++) one(&r, &now, cost, &work);
    CHECK_EQ(one(&r, &now, cost, &work), HR_RELAYED);
    said = 0; /* it does not read any more: what it said is forgotten, */
    for (int i = 0; i < 8 * HR_RELAY_TRIAL * HR_RELAY_PERIODS; i++) one(&r, &now, cost, &work);
    CHECK_EQ(r.theirs, 0);
    CHECK_EQ(one(&r, &now, cost, &work), HR_READ); /* and not waited for for ever */
}

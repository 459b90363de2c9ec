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

/* --- time, and one side's work
 * --------------------------------------------------------------------------------------------- */

/* One transfer of a MiB, alone, which takes so many ns: the way that it went. */
static int moved(struct hr_relay *r, int64_t *now_p, int64_t relayed_ns, int64_t read_ns) {
    int way = hr_relay_begin(r, *now_p);
    *now_p += way == HR_READ ? read_ns : relayed_ns;
    hr_relay_end(r, way, 1 << 20, *now_p, NULL);
    CHECK_EQ(r->open, 0);
    return way;
}

enum { US = 1000, MS = 1000 * US };

/* Of transfers one after the other for so long: the time, in ms, in which they were read. */
static int64_t read_ms(struct hr_relay *r, int64_t *now_p, int64_t ms, int64_t relayed_ns, int64_t read_ns) {
    int64_t read = 0, end = *now_p + ms * MS;
    while (*now_p < end) {
        int64_t begin = *now_p;
        if (moved(r, now_p, relayed_ns, read_ns) == HR_READ) read += *now_p - begin;
    }
    return read / MS;
}

/* The two first trials. */
static void tried_both(struct hr_relay *r, int64_t *now_p, int64_t relayed_ns, int64_t read_ns) {
    for (int i = 0; i < 2 * HR_RELAY_PERIODS; i++)
        CHECK_EQ(moved(r, now_p, relayed_ns, read_ns), i < HR_RELAY_PERIODS ? HR_RELAYED : HR_READ);
}

TEST(the_faster_way_is_taken_and_the_other_tried_now_and_then) {
    struct hr_relay r = {0};
    int64_t now = 1000, trial = 2 * HR_RELAY_PERIODS; /* ms */
    tried_both(&r, &now, MS, 2 * MS);
    CHECK_EQ(read_ms(&r, &now, HR_RELAY_TRIAL * trial - 2, MS, 2 * MS), 0);
    int64_t read = read_ms(&r, &now, 10 * HR_RELAY_TRIAL * trial, MS, 2 * MS); /* a part in 64 */
    CHECK(read >= 9 * trial && read <= 10 * trial);
    /* the caches have come apart: the first few say so, and what was tried while it lasts does not change that */
    CHECK(read_ms(&r, &now, 10000, 10 * MS, 2 * MS) > 9700);
    /* and are together again: the next trial says so */
    CHECK(read_ms(&r, &now, 10000, MS, 2 * MS) <= (HR_RELAY_TRIAL + 2) * 10 * HR_RELAY_PERIODS);
    CHECK(read_ms(&r, &now, 10000, MS, 2 * MS) <= 10 * trial);
}

TEST(a_trial_of_short_ones_comes_no_sooner_than_it_has_to) {
    struct hr_relay r = {0};
    int64_t now = 1000;
    int reads = 0;
    while (now < 1000 * MS) reads += moved(&r, &now, 4 * US, 6 * US) == HR_READ;
    CHECK(reads >= 90 * HR_RELAY_PERIODS && reads <= 102 * HR_RELAY_PERIODS); /* of a quarter of a million */
}

TEST(a_trial_is_long_enough_for_caches_to_get_used_to_it) {
    struct hr_relay r = {0};
    int64_t now = 1000;
    for (int i = 0; i < HR_RELAY_PERIODS; i++) moved(&r, &now, 2 * MS, 0);
    for (int i = 0; i < HR_RELAY_PERIODS; i++) moved(&r, &now, 0, i < HR_RELAY_PERIODS / 2 ? 3 * MS : MS);
    CHECK_EQ(moved(&r, &now, 2 * MS, MS), HR_READ);
}

TEST(a_trial_of_long_ones_is_two) {
    struct hr_relay r = {0};
    int64_t now = 1000;
    for (int i = 0; i < 4; i++) { /* the first touches memory that nobody has touched */
        CHECK_EQ(hr_relay_begin(&r, now), i < 2 ? HR_RELAYED : HR_READ);
        hr_relay_end(&r, r.way, HR_RELAY_ENOUGH, now += i ? i < 2 ? MS : 2 * MS : 10 * MS, NULL);
        CHECK_EQ(r.trial, i % 2 ? 0 : HR_RELAY_PERIODS - 1);
    }
    CHECK_EQ(r.next - now, HR_RELAY_TRIAL * 4 * MS);
    CHECK_EQ(hr_relay_begin(&r, now), HR_RELAYED);
}

TEST(what_the_way_before_has_left_says_nothing_of_this_one) {
    struct hr_relay r = {0};
    for (int i = 0; i < 4; i++) CHECK_EQ(hr_relay_begin(&r, 1000), HR_RELAYED);
    for (int i = 1; i < 3; i++) hr_relay_end(&r, HR_RELAYED, HR_RELAY_PERIOD, 1000 + i * MS, NULL);
    CHECK_EQ(hr_relay_begin(&r, 1000 + 2 * MS), HR_READ); /* two of those are on their way still */
    for (int i = 3; i < 5; i++) hr_relay_end(&r, HR_RELAYED, HR_RELAY_PERIOD, 1000 + i * MS, NULL);
    CHECK(r.cost[HR_READ] == 0 && r.open == 1);
    hr_relay_end(&r, HR_READ, HR_RELAY_PERIOD, 1000 + 7 * MS, NULL); /* alone since 4 */
    CHECK_EQ(r.cost[HR_READ], 3.0 * MS / (double)HR_RELAY_PERIOD);
}

TEST(where_both_send_work_counts_and_the_senders_as_well) {
    struct hr_relay r = {0};
    const double copying[] = {0.5, 0};
    for (int i = 0; i < 2; i++) { /* of what nobody knows the sender's part it is taken to be as much */
        r = (struct hr_relay){0};
        CHECK_EQ(hr_relay_begin(&r, 1000), HR_RELAYED);
        r.busy = 100;
        hr_relay_end(&r, r.way, 100, 900000, &(struct hr_relay_work){.copying = copying[i], .messages = 1});
        CHECK(r.cost[HR_RELAYED] == (i ? 2 : 1.5));
    }
    struct hr_relay answered = {0}; /* a result that is put back is another message, if it is not */
    CHECK_EQ(hr_relay_begin(&answered, 1000), HR_RELAYED);
    answered.busy = 100;
    hr_relay_end(&answered, HR_RELAYED, 100, 900000, &(struct hr_relay_work){.copying = 0.5, .messages = 2});
    CHECK(answered.cost[HR_RELAYED] == 3);
    r.trial = 0;
    CHECK_EQ(hr_relay_begin(&r, 1000), HR_READ);
    CHECK_EQ(r.busy, 0);
    r.busy = 150;
    hr_relay_end(&r, r.way, 100, 900000, &(struct hr_relay_work){.copying = 0.5, .messages = 1});
    CHECK(r.cost[HR_READ] == 1.5);
}

TEST(somebody_who_was_interrupted_once_is_forgiven) {
    struct hr_relay r = {0};
    int64_t now = 1000;
    tried_both(&r, &now, MS, 2 * MS);
    CHECK_EQ(moved(&r, &now, 1000 * MS, 1000 * MS), HR_RELAYED);
    CHECK(read_ms(&r, &now, 20, MS, 2 * MS) <= 2); /* at once: it was not that bad */
    /* soon: a trial of what was left comes after eight times as long as the last one took */
    struct hr_relay close = {0};
    tried_both(&close, &now, MS, MS + MS / 4);
    CHECK_EQ(moved(&close, &now, 100 * MS, 100 * MS), HR_RELAYED);
    int64_t trial = HR_RELAY_PERIODS * 5 / 4, soon = HR_RELAY_AGAIN * trial;
    int64_t read = read_ms(&close, &now, soon + 2 * trial, MS, MS + MS / 4);
    CHECK(read >= soon - 2 && read <= soon + 2);
    CHECK_EQ(close.cost[HR_RELAYED], (double)MS / (1 << 20));
}

TEST(what_passes_between_messages_is_nobodys_time) {
    struct hr_relay r = {0};
    int64_t now = 1000;
    for (int i = 0; i < 2 * HR_RELAY_PERIODS; i++) {
        now += 1000 * MS;
        moved(&r, &now, MS, 2 * MS);
    }
    CHECK(!r.trial);
    CHECK_EQ(r.next - now, (int64_t)HR_RELAY_TRIAL * HR_RELAY_PERIODS * 2 * MS);
}

TEST(what_is_on_its_way_together_goes_one_way_and_is_measured_as_one) {
    struct hr_relay r = {0};
    for (int i = 0; i < 3; i++) CHECK_EQ(hr_relay_begin(&r, 1000), HR_RELAYED);
    hr_relay_end(&r, r.way, 100, 1100, NULL);
    CHECK_EQ(hr_relay_begin(&r, 1100), HR_RELAYED);
    hr_relay_end(&r, r.way, 100, 1200, NULL);
    hr_relay_end(&r, r.way, 100, 1300, NULL);
    CHECK(r.cost[HR_RELAYED] == 0);
    hr_relay_end(&r, r.way, 100, 1800, NULL);
    CHECK(r.cost[HR_RELAYED] == 2 && !r.open && r.trial == HR_RELAY_PERIODS - 1);
    r.trial = 0;
    /* one that came to nothing says nothing */
    CHECK_EQ(hr_relay_begin(&r, 2000), HR_READ);
    hr_relay_end(&r, r.way, 0, 9000, NULL);
    CHECK(r.cost[HR_READ] == 0 && !r.open && r.trial == HR_RELAY_PERIODS);
    /* a stream without a pause is judged all the same */
    CHECK_EQ(hr_relay_begin(&r, 10000), HR_READ);
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(hr_relay_begin(&r, 10000), HR_READ);
        hr_relay_end(&r, r.way, HR_RELAY_PERIOD / 4, 10000 + (int64_t)HR_RELAY_PERIOD, NULL);
    }
    CHECK(r.cost[HR_READ] == 1 && r.open == 1 && r.bytes == 0);
    CHECK(r.trial && r.way == HR_READ);
}

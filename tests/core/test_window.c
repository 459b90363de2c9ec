/* test_window.c - what is learned from how fast bulk was: the bound on what is in flight, on a path of a chosen speed;
 * the way of long arrays (core/relay.h). */

#include "check.h"
#include "core/engine.h"

/* Waits without sleeping: a sleep may take a millisecond more. */
static void pass_us(int64_t us) {
    int64_t end = hr_now() + us * 1000;
    while (hr_now() < end);
}

static const struct hr_caps caps = {.window = HR_WINDOW_MIN};

static struct hr_engine nobody;

static struct hr_conn idle_conn(void) {
    return (struct hr_conn){.engine = &nobody, .caps = &caps, .window = caps.window};
}

/* Sends n bytes into an empty path, as far as the window lets it, and has them acknowledged after us microseconds. */
static void burst(struct hr_conn *conn, uint64_t n, int64_t us) {
    CHECK_EQ(conn->inflight, 0);
    hr_window_sent(conn, n);
    CHECK_EQ(conn->inflight, n);
    pass_us(us);
    hr_window_acked(conn, n);
    CHECK_EQ(conn->inflight, 0);
}

/* Again, up to ten times, where the machine stopped in the middle, so that a path seemed slow. */
static void unless_stopped(int (*good)(void)) {
    for (int turn = 0; turn < 10; turn++)
        if (good()) return;
    CHECK(!"one of ten turns is good");
}

static int widened(void) {
    struct hr_conn conn = idle_conn();
    CHECK(hr_window_fits(&conn, HR_WINDOW_MIN) && !hr_window_fits(&conn, HR_WINDOW_MIN + 1));
    for (int i = 0; i < 12; i++) burst(&conn, conn.window, 20);
    return conn.window > 1 << 20 &&
           hr_window_fits(&conn, 1 << 20); /* 64 KiB in 20 us is 3 GB/s, of which half a millisecond is 1.6 MB */
}

TEST(bursts_that_fill_the_window_widen_it) { unless_stopped(widened); }

/* What bulk may count on more of: somebody waits for it on a core of his own, the peer sends none, and all messages of
 * the last second had one priority. */
TEST(bulk_goes_one_way_where_nothing_else_does) {
    struct hr_engine engine = {0};
    struct hr_conn conn = idle_conn();
    conn.engine = &engine;
    conn.priority = HR_PRIORITY_DEFAULT;
    engine.driving = 1;
    CHECK(hr_window_one_way(&conn, HR_PRIORITY_DEFAULT));
    engine.driving = 2; /* the background thread */
    CHECK(!hr_window_one_way(&conn, HR_PRIORITY_DEFAULT));
    engine.driving = 1;
    engine.yield = 1;
    CHECK(!hr_window_one_way(&conn, HR_PRIORITY_DEFAULT));
    engine.yield = 0;
    engine.rx_bulk = conn.round_rx_all + 1;
    CHECK(!hr_window_one_way(&conn, HR_PRIORITY_DEFAULT));
    conn.round_rx_all = engine.rx_bulk;
    CHECK(hr_window_one_way(&conn, HR_PRIORITY_DEFAULT));
    hr_window_mixed(&conn, 0);
    CHECK(!hr_window_one_way(&conn, HR_PRIORITY_DEFAULT));
    conn.mixed_at -= 2000000000; /* only urgent ones since, beside bulk that goes on */
    CHECK(!hr_window_one_way(&conn, HR_PRIORITY_DEFAULT));
    conn.priority = HR_PRIORITY_DEFAULT;
    CHECK(hr_window_one_way(&conn, HR_PRIORITY_DEFAULT));
}

static int believed_for_a_round(void) {
    struct hr_engine engine = {0};
    struct hr_conn conn = idle_conn();
    hr_list_init(&engine.active);
    hr_list_init(&conn.active);
    conn.engine = &engine;
    for (int i = 0; i < 6; i++) burst(&conn, conn.window, 20);
    int wide = conn.window > 1 << 20;
    conn.nbulk = 1; /* more waits to be sent */
    hr_window_sent(&conn, 2 * HR_WINDOW_MIN);
    pass_us(5200);
    hr_window_acked(&conn, HR_WINDOW_MIN); /* 100 Mbit/s */
    CHECK(conn.window < HR_WINDOW_MIN * 3 / 2);
    return wide;
}

/* An idle shaper lets a bucket through at once. The first round of a path that is kept full shows what it does. */
TEST(a_bucket_is_believed_for_one_round) { unless_stopped(believed_for_a_round); }

TEST(a_short_burst_doubles_it_at_most) {
    struct hr_conn conn = idle_conn();
    for (uint64_t before = conn.window; before < 1 << 20; before = conn.window) {
        int64_t begin = hr_now();
        burst(&conn, conn.window, 5);
        int stopped = hr_now() - begin > 20000; /* by the machine, so that it seemed slow */
        CHECK(conn.window > before || stopped);
        CHECK(conn.window <= 2 * before + 1);
    }
}

TEST(a_slow_path_keeps_the_least) {
    struct hr_conn conn = idle_conn();
    for (int i = 0; i < 8; i++) burst(&conn, HR_WINDOW_MIN, 5200); /* 100 Mbit/s */
    CHECK(conn.window < HR_WINDOW_MIN * 3 / 2);                    /* 12.6 MB/s, for a millisecond and the round trip */
}

TEST(what_is_small_says_nothing) {
    struct hr_conn conn = idle_conn();
    for (int i = 0; i < 50; i++) burst(&conn, HR_WINDOW_MIN / 4, 5);
    CHECK_EQ(conn.window, HR_WINDOW_MIN);
}

static int measured_by_rounds(void) {
    struct hr_conn conn = idle_conn();
    hr_window_sent(&conn, 32768);
    for (int i = 0; i < 200; i++) {
        hr_window_sent(&conn, 32768);
        pass_us(20);
        hr_window_acked(&conn, 32768);
    }
    CHECK(conn.rate < 1.7e9);
    return conn.window > 512 << 10;
}

/* A millisecond of acknowledgements measures without a burst: what is sent again keeps the path full. */
TEST(rounds_measure_a_full_path) { unless_stopped(measured_by_rounds); }

/* An answer to a probe that overtook bulk in another stream takes it for lost; then it comes after all. */
TEST(what_was_taken_for_lost_may_come) {
    struct hr_engine engine = {0};
    struct hr_conn conn = idle_conn();
    struct hr_hdr echo = {.kind = HR_MSG_ECHO, .aux = 2 * HR_WINDOW_MIN};
    hr_list_init(&engine.active);
    hr_list_init(&conn.active);
    conn.engine = &engine;
    hr_window_sent(&conn, 3 * HR_WINDOW_MIN);
    hr_window_echoed(&conn, &echo);
    CHECK_EQ(conn.inflight, HR_WINDOW_MIN);
    hr_window_acked(&conn, 2 * HR_WINDOW_MIN); /* a third is lost */
    CHECK_EQ(conn.inflight, 0);
    CHECK_EQ(conn.tx_bulk_lost, HR_WINDOW_MIN);
    hr_window_sent(&conn, HR_WINDOW_MIN);
    CHECK_EQ(conn.inflight, HR_WINDOW_MIN);
}

/* ---- the way of long arrays ---- */

/* One transfer of a MiB, alone, which takes so many ns: the way that it went. */
static int moved(struct hr_relay *r, int64_t *now_p, int64_t relayed_ns, int64_t read_ns) {
    int way = hr_relay_begin(r, *now_p);
    *now_p += way == HR_READ ? read_ns : relayed_ns;
    hr_relay_end(r, way, 1 << 20, *now_p, -1, 1);
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
        hr_relay_end(&r, r.way, HR_RELAY_ENOUGH, now += i ? i < 2 ? MS : 2 * MS : 10 * MS, -1, 1);
        CHECK_EQ(r.trial, i % 2 ? 0 : HR_RELAY_PERIODS - 1);
    }
    CHECK_EQ(r.next - now, HR_RELAY_TRIAL * 4 * MS);
    CHECK_EQ(hr_relay_begin(&r, now), HR_RELAYED);
}

TEST(what_the_way_before_has_left_says_nothing_of_this_one) {
    struct hr_relay r = {0};
    for (int i = 0; i < 4; i++) CHECK_EQ(hr_relay_begin(&r, 1000), HR_RELAYED);
    for (int i = 1; i < 3; i++) hr_relay_end(&r, HR_RELAYED, HR_RELAY_PERIOD, 1000 + i * MS, -1, 1);
    CHECK_EQ(hr_relay_begin(&r, 1000 + 2 * MS), HR_READ); /* two of those are on their way still */
    for (int i = 3; i < 5; i++) hr_relay_end(&r, HR_RELAYED, HR_RELAY_PERIOD, 1000 + i * MS, -1, 1);
    CHECK(r.cost[HR_READ] == 0 && r.open == 1);
    hr_relay_end(&r, HR_READ, HR_RELAY_PERIOD, 1000 + 7 * MS, -1, 1); /* alone since 4 */
    CHECK_EQ(r.cost[HR_READ], 3.0 * MS / (double)HR_RELAY_PERIOD);
}

TEST(where_both_send_work_counts_and_the_senders_as_well) {
    struct hr_relay r = {0};
    const double copying[] = {0.5, 0};
    for (int i = 0; i < 2; i++) { /* of what nobody knows the sender's part it is taken to be as much */
        r = (struct hr_relay){0};
        CHECK_EQ(hr_relay_begin(&r, 1000), HR_RELAYED);
        r.busy = 100;
        hr_relay_end(&r, r.way, 100, 900000, copying[i], 1);
        CHECK(r.cost[HR_RELAYED] == (i ? 2 : 1.5));
    }
    struct hr_relay answered = {0}; /* a result that is put back is another message, if it is not */
    CHECK_EQ(hr_relay_begin(&answered, 1000), HR_RELAYED);
    answered.busy = 100;
    hr_relay_end(&answered, HR_RELAYED, 100, 900000, 0.5, 2);
    CHECK(answered.cost[HR_RELAYED] == 3);
    r.trial = 0;
    CHECK_EQ(hr_relay_begin(&r, 1000), HR_READ);
    CHECK_EQ(r.busy, 0);
    r.busy = 150;
    hr_relay_end(&r, r.way, 100, 900000, 0.5, 1);
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
    hr_relay_end(&r, r.way, 100, 1100, -1, 1);
    CHECK_EQ(hr_relay_begin(&r, 1100), HR_RELAYED);
    hr_relay_end(&r, r.way, 100, 1200, -1, 1);
    hr_relay_end(&r, r.way, 100, 1300, -1, 1);
    CHECK(r.cost[HR_RELAYED] == 0);
    hr_relay_end(&r, r.way, 100, 1800, -1, 1);
    CHECK(r.cost[HR_RELAYED] == 2 && !r.open && r.trial == HR_RELAY_PERIODS - 1);
    r.trial = 0;
    /* one that came to nothing says nothing */
    CHECK_EQ(hr_relay_begin(&r, 2000), HR_READ);
    hr_relay_end(&r, r.way, 0, 9000, -1, 1);
    CHECK(r.cost[HR_READ] == 0 && !r.open && r.trial == HR_RELAY_PERIODS);
    /* a stream without a pause is judged all the same */
    CHECK_EQ(hr_relay_begin(&r, 10000), HR_READ);
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(hr_relay_begin(&r, 10000), HR_READ);
        hr_relay_end(&r, r.way, HR_RELAY_PERIOD / 4, 10000 + (int64_t)HR_RELAY_PERIOD, -1, 1);
    }
    CHECK(r.cost[HR_READ] == 1 && r.open == 1 && r.bytes == 0);
    CHECK(r.trial && r.way == HR_READ);
}

/* test_window.c - what is learned from how fast bulk was: the bound on what is in flight, on a path of a chosen speed.
 */

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

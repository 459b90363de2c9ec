/* conformance_sleep.c - event_fd, event_arm and event_disarm: no wake-up is lost, and idle means asleep. */

#include "conformance.h"

#include <poll.h>

/* Both sides sleep and wake by hand here, so these checks drive the domains themselves: one thread, in either mode. */
#define ONE_THREAD(rig)             \
    int threads = settings.threads; \
    settings.threads = 0;           \
    RIG(rig);                       \
    settings.threads = threads;     \
    if (rig.side[0].domain->ops->event_fd(rig.side[0].domain) < 0) SKIP("the provider must be polled")

static int readable(struct side *side, int ms) {
    struct pollfd fd = {.fd = side->domain->ops->event_fd(side->domain), .events = POLLIN};
    return poll(&fd, 1, ms) == 1;
}

static void pump_side(struct side *side) {
    side->in_progress = 1;
    side->domain->ops->progress(side->domain, BUDGET, NULL);
    side->in_progress = 0;
}

/* Polls until there is nothing to do, then arms: the state of an engine that goes to sleep. Returns 0 when the side
 * never comes to rest, which is an idle process that burns a core. */
static int fall_asleep(struct side *side) {
    for (int i = 0; i < 1000; i++) {
        if (side->domain->ops->event_arm(side->domain) == HR_OK && !readable(side, 0)) return 1;
        pump_side(side);
    }
    CHECK(!"it comes to rest");
    return 0;
}

/* One sleep of a side that something must end. */
static int woken(struct side *side) {
    int ok = readable(side, 2000);
    CHECK(ok); /* a lost wake-up */
    side->domain->ops->event_disarm(side->domain);
    return ok;
}

TEST(every_message_wakes) {
    ONE_THREAD(rig);
    PAIR(rig, a, b);
    struct op *op = op_new(100);
    for (uint64_t i = 0; i < 1000; i++) {
        struct end *from = i & 1 ? b : a, *to = i & 1 ? a : b;
        uint64_t before = to->next_rx;
        if (!fall_asleep(to->side)) return;
        CHECK(end_send(from, i % 100, op) == HR_OK);
        if (!woken(to->side)) return;
        for (int n = 0; to->next_rx == before && n < 1000; n++) pump_side(to->side);
        CHECK_EQ(to->next_rx, before + 1);
    }
}

/* Armed again while it is armed. Something else may come between, as the provider's own messages do: then once more. */
static int fall_asleep_twice(struct side *side) {
    for (int i = 0; i < 100 && fall_asleep(side); i++)
        if (side->domain->ops->event_arm(side->domain) == HR_OK) return 1;
    CHECK(!"what is armed can be armed");
    return 0;
}

TEST(arming_twice_is_harmless) {
    ONE_THREAD(rig);
    PAIR(rig, a, b);
    struct op *op = op_new(8);
    for (uint64_t i = 1; i <= 100; i++) {
        if (!fall_asleep_twice(b->side)) return;
        CHECK_EQ(end_send(a, 8, op), HR_OK);
        /* Armed again after it came: it is there already, or the descriptor says so. */
        if (b->side->domain->ops->event_arm(b->side->domain) == HR_OK && !woken(b->side)) return;
        WAIT(rig, b->next_rx == i);
    }
}

TEST(what_is_pending_prevents_sleep) {
    ONE_THREAD(rig);
    PAIR(rig, a, b);
    struct op *op = op_new(8);
    for (uint64_t i = 1; i <= 100; i++) {
        CHECK_EQ(end_send(a, 8, op), HR_OK);
        CHECK(b->side->domain->ops->event_arm(b->side->domain) == HR_AGAIN || woken(b->side));
        WAIT(rig, b->next_rx == i);
    }
}

TEST(a_notification_wakes) {
    ONE_THREAD(rig);
    PAIR(rig, a, b);
    NEED_CAP(rig, HR_CAP_WRITE);
    WINDOW(window);
    char local[64] = {0};
    REQUIRE(window_open(&rig, &window, b, a, 4096, HR_ACCESS_REMOTE_WRITE) == HR_OK);
    for (uint64_t i = 1; i <= 100; i++) {
        struct hr_rma rma = {.local = local, .len = sizeof local, .remote = &window.rmem, .with_notify = 1, .value = i};
        if (!fall_asleep(b->side)) return;
        b->side->paused = 1;
        CHECK_EQ(rma_run(&rig, a, RMA_WRITE, &rma), HR_OK);
        b->side->paused = 0;
        if (!woken(b->side)) return;
        WAIT(rig, b->notifies == i && b->notify_value == i);
    }
}

/* Who was told HR_AGAIN sleeps until there is room. */
TEST(room_wakes_the_sender) {
    ONE_THREAD(rig);
    PAIR(rig, a, b);
    for (int round = 0; round < 30; round++) {
        struct op *ops[4096];
        struct op *extra = op_new(4096);
        int n = 0;
        b->side->paused = 1;
        for (int idle = 0; idle < 20 && n < 4096;) {
            ops[n] = op_new(4096);
            if (end_send(a, 4096, ops[n]) == HR_AGAIN) {
                idle++;
                rig_pump(&rig);
            } else {
                n++;
            }
        }
        if (n == 4096) SKIP("the provider took 4096 messages of 4096 bytes");
        if (!fall_asleep(a->side)) return;
        b->side->paused = 0;
        for (int i = 0; i < 100000 && b->next_rx < a->next_tx && !readable(a->side, 0); i++) pump_side(b->side);
        if (!woken(a->side)) return;
        WAIT(rig, end_send(a, 4096, extra) != HR_AGAIN);
        WAIT(rig, b->next_rx == a->next_tx);
        for (int i = 0; i < n; i++) WAIT(rig, ops[i]->state != OP_OPEN);
        WAIT(rig, extra->state != OP_OPEN);
    }
}

TEST(connecting_and_losing_wake) {
    ONE_THREAD(rig);
    for (int round = 0; round < 10; round++) {
        struct end *a = end_new(&rig.side[0], rig.side[1].id), *b = end_new(&rig.side[1], rig.side[0].id);
        int64_t limit = rig_now() + settings.limit;
        CHECK(!hr_is_error(end_connect(b, &rig.side[0], 0)));
        CHECK(!hr_is_error(end_connect(a, &rig.side[1], 1)));
        /* Progress only where the descriptor asks for it. */
        while (!(a->connected && b->connected) && rig_now() < limit) {
            int stirred = 0;
            for (int i = 0; i < 2; i++) {
                struct side *side = &rig.side[i];
                if (side->domain->ops->event_arm(side->domain) != HR_AGAIN && !readable(side, 5)) continue;
                pump_side(side);
                stirred = 1;
            }
            if (!stirred && !(a->connected && b->connected)) {
                struct pollfd fds[2];
                for (int i = 0; i < 2; i++)
                    fds[i] =
                        (struct pollfd){.fd = rig.side[i].domain->ops->event_fd(rig.side[i].domain), .events = POLLIN};
                CHECK(poll(fds, 2, 2000) > 0);
            }
        }
        CHECK(a->connected && b->connected);
        if (!fall_asleep(b->side)) return;
        end_destroy(a);
        if (!woken(b->side)) return;
        WAIT(rig, b->losses);
        end_destroy(b);
    }
}

/* What a connection and a message leave behind may wake them for a while. Then for 0.4 s nothing does. */
TEST(idle_is_asleep) {
    ONE_THREAD(rig);
    PAIR(rig, a, b);
    struct op *op = op_new(64);
    CHECK_EQ(end_send(a, 64, op), HR_OK);
    WAIT(rig, b->next_rx == 1);
    int64_t limit = rig_now() + settings.limit;
    for (int quiet = 0; quiet <= 20; quiet++) {
        for (int i = 0; i < 2; i++) {
            if (quiet && !readable(&rig.side[i], 10)) continue;
            if (!fall_asleep(&rig.side[i])) return;
            quiet = 0;
        }
        if (rig_now() > limit) {
            CHECK(!"it stays asleep");
            return;
        }
    }
}

/* The thread of each side sleeps on its descriptor whenever it has nothing to do; a wake-up that is lost costs a second
 * and is noted when the rig closes. */
static void bounce(struct end *end, uint64_t seq) {
    if (seq % 64 == 63) usleep(200); /* lets the other side fall asleep for sure */
    CHECK(end_send(end, 8, end->arg) != HR_AGAIN);
}

TEST(two_sleepers_wake_each_other) {
    if (!settings.threads) SKIP("one thread: run with --threads");
    RIG(rig);
    PAIR(rig, a, b);
    if (a->side->domain->ops->event_fd(a->side->domain) < 0) SKIP("the provider must be polled");
    a->arg = op_new(8);
    b->arg = op_new(8);
    a->on_recv = b->on_recv = bounce;
    CHECK_EQ(end_send(a, 8, op_new(8)), HR_OK);
    WAIT(rig, a->next_rx > 3000);
    a->on_recv = b->on_recv = NULL;
    rig_pump_for(&rig, 20);
}

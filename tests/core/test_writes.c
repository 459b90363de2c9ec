/* test_writes.c - long messages that a device writes: nobody at the other end has a part in them, and all is counted.
 */

#include "core/engine.h"
#include "world.h"

#define BYTES (16u << 20)

static struct hr_conn *conn_of(struct rank *r, int peer) { return hr_conn_find(r->engine, (uint64_t)peer, 0); }

static int is_up(struct rank *r) {
    hr_lock(r->engine);
    int up = conn_of(r, 1)->state == HR_CONN_UP;
    hr_unlock(r->engine);
    return up;
}

static void nap(void) { nanosleep(&(struct timespec){0, 200000}, NULL); }

/* The receiver has asked for the bytes, and its engine does nothing from now on: its lock is held on return. 0: the
 * machine stopped this thread, and all of it has come. */
static int hold_once_asked(struct rank *r, struct hr_request *recv) {
    for (int done = 0; !done; nap()) {
        hr_lock(r->engine);
        done = recv->done;
        if (recv->xfer && recv->xfer->mode == HR_XFER_PUSH && hr_list_empty(&conn_of(r, 0)->ctl)) return 1;
        hr_unlock(r->engine);
    }
    return 0;
}

TEST(a_receiver_that_is_away_holds_nothing_up) {
    struct world w;
    world_open(&w, 2, NULL);
    struct rank *from = &w.ranks[0], *to = &w.ranks[1];
    if (!(conn_of(from, 1)->caps->flags & HR_CAP_CONFIRMS)) {
        world_close(&w);
        SKIP("the provider does not have HR_CAP_CONFIRMS");
    }
    uint8_t *buf = hr_arena_alloc(BYTES, 0), *out = hr_arena_alloc(BYTES, 0);
    REQUIRE(buf && out);
    for (uint32_t i = 0; i < BYTES; i++) buf[i] = (uint8_t)(i * 7 + (i >> 12));
    memset(out, 0, BYTES);
    int turns = 0;
    for (int turn = 0; turn < 100 && turns < 3; turn++) { /* before the window is known, and after */
        struct hr_request send = {.priority = HR_PRIORITY_DEFAULT}, recv = send;
        CHECK_EQ(hr_isend(from->comm, buf, BYTES, 1, 3, &send), HR_OK);
        CHECK_EQ(hr_irecv(to->comm, out, BYTES, 0, 3, &recv), HR_OK);
        int held = hold_once_asked(to, &recv);
        CHECK_EQ(finish(from, &send, 10), HR_OK);
        CHECK_EQ(memcmp(buf, out, BYTES), 0);
        turns += held;
        if (held) {
            CHECK(!recv.done);
            hr_unlock(to->engine);
        }
        CHECK_EQ(finish(to, &recv, 10), HR_OK);
        CHECK_EQ(recv.nbytes, BYTES);
        memset(out, 0, BYTES);
    }
    CHECK_EQ(turns, 3);
    hr_lock(from->engine);
    CHECK_EQ(conn_of(from, 1)->tx_bulk, 0);
    CHECK_EQ(conn_of(from, 1)->inflight, 0);
    CHECK(conn_of(from, 1)->rate > 0);
    hr_unlock(from->engine);
    hr_lock(to->engine);
    CHECK_EQ(conn_of(to, 0)->rx_bulk, 0);
    CHECK(conn_of(to, 0)->rx_bytes >= 3 * (uint64_t)BYTES);
    hr_unlock(to->engine);
    hr_arena_free(buf);
    hr_arena_free(out);
    world_close(&w);
}

static int matched(struct rank *r, struct hr_request *recv) {
    int yes = 0;
    for (int64_t end = hr_now() + SECONDS(5); !yes && hr_now() < end; nap()) {
        hr_lock(r->engine);
        yes = recv->done || recv->xfer;
        hr_unlock(r->engine);
    }
    return yes;
}

/* Given up by either side in the middle: in the end nothing is on its way, and the next message comes whole. */
TEST(what_is_given_up_is_not_on_its_way) {
    struct world w;
    world_open(&w, 2, NULL);
    struct rank *from = &w.ranks[0], *to = &w.ranks[1];
    uint8_t *buf = hr_arena_alloc(BYTES, 0), *out = hr_arena_alloc(BYTES, 0);
    REQUIRE(buf && out);
    memset(buf, 5, BYTES);
    for (int turn = 0; turn < 20; turn++) {
        struct hr_request send = {.priority = HR_PRIORITY_DEFAULT}, recv = send;
        CHECK_EQ(hr_irecv(to->comm, out, BYTES, 0, 3, &recv), HR_OK);
        CHECK_EQ(hr_isend(from->comm, buf, BYTES, 1, 3, &send), HR_OK);
        REQUIRE(matched(to, &recv));
        for (int k = 0; k < turn % 5; k++) nap();
        if (turn % 2) {
            hr_cancel(to->engine, &recv, HR_ERR_CANCELED);
            CHECK_EQ(finish(from, &send, 10), HR_OK); /* delivered, as far as that side is concerned */
        } else {
            hr_cancel(from->engine, &send, HR_ERR_CANCELED);
            if (send.status != HR_OK) hr_cancel(to->engine, &recv, HR_ERR_CANCELED);
            hr_status status = finish(to, &recv, 10);
            CHECK(status == HR_OK || status == HR_ERR_CANCELED);
        }
        if (!is_up(from)) break; /* a device that cannot take back what it has was cut off: that is its way out */
    }
    if (is_up(from)) {
        memset(out, 0, BYTES);
        struct hr_request send = {.priority = HR_PRIORITY_DEFAULT};
        CHECK_EQ(hr_isend(from->comm, buf, BYTES, 1, 4, &send), HR_OK);
        CHECK_EQ(recv_from(to, out, BYTES, 0, 4, NULL), HR_OK);
        CHECK_EQ(finish(from, &send, 10), HR_OK);
        CHECK_EQ(memcmp(buf, out, BYTES), 0);
        hr_lock(from->engine);
        CHECK_EQ(conn_of(from, 1)->tx_writes, 0);
        hr_unlock(from->engine);
    }
    hr_arena_free(buf);
    hr_arena_free(out);
    world_close(&w);
}

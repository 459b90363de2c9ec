/* test_share.c - long messages that both ends copy: whole and in their place, withdrawn, given up, with a sender that
 * is stopped; over a provider that maps memory for writing, or without that. HR_TEST_PROVIDER chooses the provider. */

#include "core/engine.h"
#include "world.h"

enum { MIB = 1 << 20, PAGE = 4096 };

static uint64_t shared(struct hr_engine *engine) { return engine->count_shared; }

static int maps_for_writing(struct rank *r) { return (world_caps(r) & HR_CAP_MAP_WRITE) != 0; }

static void fill(uint8_t *x, size_t n, unsigned seed) {
    for (size_t i = 0; i < n; i++) x[i] = (uint8_t)(i * 7 + (i >> 11) + seed);
}
static size_t differing(const uint8_t *x, size_t n, unsigned seed) {
    size_t wrong = 0;
    for (size_t i = 0; i < n; i++) wrong += x[i] != (uint8_t)(i * 7 + (i >> 11) + seed);
    return wrong;
}

struct job {
    size_t len, before; /* bytes in front of it in its block, and behind */
    int plain;          /* 1: the sender's memory, 2: the receiver's */
    int rounds;
};

static void *moves(void *arg) {
    struct rank *r = arg;
    struct job *j = r->arg;
    size_t all = j->before * 2 + j->len, spoilt = 0;
    int plain = j->plain == 1 + r->rank;
    uint8_t *block = plain ? malloc(all) : hr_arena_alloc(all, HR_ARENA_WRITABLE_BY_PEERS), *x = block + j->before;
    uint64_t seen = shared(r->engine);
    memset(block, 9, all);
    for (int round = 0; round < j->rounds; round++) {
        if (r->rank == 0) {
            fill(x, j->len, (unsigned)round);
            CHECK_EQ(send_to(r, x, j->len, 1, 3), HR_OK);
        } else {
            CHECK_EQ(recv_from(r, x, j->len, 0, 3, NULL), HR_OK);
            CHECK_EQ(differing(x, j->len, (unsigned)round), 0);
        }
        for (size_t i = 0; i < j->before; i++) spoilt += block[i] != 9 || x[j->len + i] != 9;
    }
    CHECK_EQ(spoilt, 0);
    seen = shared(r->engine) - seen;
    if (j->plain || !maps_for_writing(r)) CHECK_EQ(seen, 0);
    if (j->rounds >= 100 && maps_for_writing(r)) CHECK(seen > 0); /* in a blocking call it has time, now and then */
    if (plain)
        free(block);
    else
        hr_arena_free(block);
    return NULL;
}
static void move(struct job job) { world_of(2, moves, &job); }

TEST(both_ends_copy_a_long_message) { move((struct job){.len = 2 * MIB, .rounds = 100}); }
TEST(of_any_length) {
    for (size_t len = 768 << 10; len < 3 * MIB; len += 300001) move((struct job){.len = len, .rounds = 10});
}
TEST(what_lies_on_the_same_pages_is_left_alone) {
    for (size_t before = 1; before < 3 * PAGE; before += 1777)
        move((struct job){.len = 16 * MIB, .before = before, .rounds = 3});
}
TEST(plain_memory_is_not_shared) {
    for (int plain = 1; plain <= 2; plain++) move((struct job){.len = 4 * MIB, .plain = plain, .rounds = 5});
}

/* --- given up
 * ---------------------------------------------------------------------------------------------------------------- */

/* Sends that are withdrawn at any moment: each receive gets one that was not, whole. */
enum { TRIES = 60 };
static void *withdraws(void *arg) {
    struct rank *r = arg;
    size_t len = 8 * MIB;
    uint8_t *x = hr_arena_alloc(len, HR_ARENA_WRITABLE_BY_PEERS), last = 0xff;
    if (r->rank == 0) {
        for (int i = 0; i < TRIES; i++) {
            struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
            fill(x, len, (unsigned)i);
            CHECK_EQ(hr_isend(r->comm, x, len, 1, 3, &req), HR_OK);
            hr_wait(r->engine, &req, hr_now() + i % 20 * 50000, 0);
            hr_cancel(r->engine, &req, HR_ERR_CANCELED);
            memset(x, 0xee, len); /* ours again */
        }
        fill(x, len, TRIES);
        CHECK_EQ(send_to(r, x, len, 1, 3), HR_OK);
    } else {
        for (last = 0; last != TRIES;) {
            CHECK_EQ(recv_from(r, x, len, 0, 3, NULL), HR_OK);
            last = x[0];
            CHECK_EQ(differing(x, len, last), 0);
        }
    }
    hr_arena_free(x);
    return NULL;
}
TEST(a_send_that_is_withdrawn_is_not_received_in_part) { world_of(2, withdraws, NULL); }

/* The sender is stopped with a piece in its hands, or lets go of it in time, as the receiver gives up. */
static _Atomic int held, giving_up, over;
static void *gives_up(void *arg) {
    struct rank *r = arg;
    int stopped = *(int *)r->arg;
    size_t len = 4 * MIB, before = 1000, all = len + 2 * before; /* what is before it, and behind, is on its pages */
    uint8_t *block = hr_arena_alloc(all, HR_ARENA_WRITABLE_BY_PEERS), *x = block + before;
    struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
    memset(block, 1, all);
    if (r->rank == 0) {
        CHECK_EQ(hr_isend(r->comm, x, len, 1, 3, &req), HR_OK);
        hr_lock(r->engine);
        struct hr_xfer *mine = req.xfer;
        REQUIRE(mine);
        CHECK_EQ(hr_ledger_take_own(mine, 16), 0);
        held = 1;
        if (!stopped) {
            world_await(&giving_up, 1);
            usleep(1000);
            hr_ledger_let_go_own(mine);
        }
        world_await(&over, 1);
        CHECK_EQ(hr_ledger_take_own(mine, 16), -1); /* it was struck */
        if (stopped) hr_ledger_let_go_own(mine);
        hr_unlock(r->engine);
        over = 2;
        CHECK_EQ(finish(r, &req, 20), HR_OK); /* withdrawn there: delivered as far as this side is concerned */
    } else {
        struct hr_arena_info arena;
        world_await(&held, 1);
        CHECK_EQ(hr_irecv(r->comm, x, len, 0, 3, &req), HR_OK);
        CHECK_EQ(hr_wait(r->engine, &req, hr_now() + SECONDS(0.2), 0), HR_ERR_TIMEOUT); /* a piece is missing */
        hr_lock(r->engine);
        REQUIRE(req.xfer);
        CHECK(req.xfer->completed >= 7);
        CHECK((uint8_t *)req.xfer->mem.addr >= x && (uint8_t *)req.xfer->mem.addr + req.xfer->mem.len <= x + len);
        hr_unlock(r->engine);
        struct hr_exposed *exposed;
        struct hr_desc desc;
        char detail[256]; /* its pages may have to be left to the sender: nobody is shown them now */
        CHECK_EQ(hr_expose(r->comm, 0, x + 100, 8, HR_ACCESS_REMOTE_READ, &desc, &exposed, detail), HR_AGAIN);
        giving_up = 1;
        hr_cancel(r->engine, &req, HR_ERR_TIMEOUT);
        CHECK_EQ(req.status, HR_ERR_TIMEOUT);
        if (stopped) CHECK(!hr_arena_find(block, all, &arena)); /* those pages are the other's now */
        for (size_t i = 0; i < before; i++) REQUIRE(block[i] == 1 && x[len + i] == 1);
        memset(block, 5, all);
        over = 1;
        world_await(&over, 2);
        for (size_t i = 0; i < all; i++) REQUIRE(block[i] == 5);
    }
    hr_arena_free(block);
    return NULL;
}
static void give_up(int stopped) {
    struct world w;
    held = giving_up = over = 0;
    world_open(&w, 2, NULL);
    int maps = maps_for_writing(&w.ranks[0]);
    if (maps) world_run(&w, gives_up, &stopped);
    world_close(&w);
    if (!maps) SKIP("the provider does not have HR_CAP_MAP_WRITE");
}
TEST(a_sender_that_is_stopped_as_it_helps_changes_nothing) { give_up(1); }
TEST(a_sender_that_lets_go_changes_nothing) { give_up(0); }

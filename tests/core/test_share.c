/* test_share.c - long messages that both ends copy: whole and in their place, withdrawn, given up, with a sender that
 * is stopped; over a provider that maps memory for writing, or puts into memory that it does not map, or without that.
 * HR_TEST_PROVIDER chooses the provider. */

#include "core/engine.h"
#include "hr/fault.h"
#include "programs.h"
#include "world.h"

enum { MIB = 1 << 20, PAGE = 4096 };

static uint64_t shared(struct hr_engine *engine) { return engine->count_shared; }

static int maps_for_writing(struct rank *r) { return (world_caps(r) & HR_CAP_MAP_WRITE) != 0; }

static int puts_there(struct rank *r) {
    for (struct hr_link *l = r->engine->conns.next; l != &r->engine->conns; l = l->next) {
        struct hr_conn *conn = hr_container(l, struct hr_conn, link);
        if (conn->peer_id != r->engine->config.self_id && conn->lanes[0].ep) return conn->lanes[0].ep->puts;
    }
    return 0;
}

/* Whose memory is plain. */
enum { SENDERS = 1, RECEIVERS = 2 };

static uint8_t *memory(struct rank *r, int plain, size_t n) {
    return plain >> r->rank & 1 ? malloc(n) : hr_arena_alloc(n, HR_ARENA_WRITABLE_BY_PEERS);
}
static void memory_free(struct rank *r, int plain, void *x) {
    if (plain >> r->rank & 1)
        free(x);
    else
        hr_arena_free(x);
}
/* Whether the sender can write into what the receiver has. */
static int can_help(struct rank *r, int plain) {
    return plain & RECEIVERS ? puts_there(r) : !plain && maps_for_writing(r);
}

/* Byte i is 7 i and the number of its block, and seed: of each block a part of one row. Whole blocks at a time, as
 * sanitizers take a minute for as many bytes one by one. */
enum { BLOCK = 2048 };
static uint8_t row[BLOCK + 256];
__attribute__((constructor)) static void make_row(void) {
    for (size_t i = 0; i < sizeof row; i++) row[i] = (uint8_t)(i * 7);
}
static const uint8_t *block_of(size_t at, unsigned seed) {
    return row + (uint8_t)((at / BLOCK + seed) * 183); /* 7 * 183 is 1, modulo 256 */
}
static void fill(uint8_t *x, size_t n, unsigned seed) {
    for (size_t at = 0; at < n; at += BLOCK) memcpy(x + at, block_of(at, seed), n - at < BLOCK ? n - at : BLOCK);
}
static size_t differing(const uint8_t *x, size_t n, unsigned seed) {
    size_t wrong = 0;
    for (size_t at = 0; at < n; at += BLOCK) {
        const uint8_t *right = block_of(at, seed);
        size_t m = n - at < BLOCK ? n - at : BLOCK;
        if (!memcmp(x + at, right, m)) continue;
        for (size_t i = 0; i < m; i++) wrong += x[at + i] != right[i];
    }
    return wrong;
}

struct job {
    size_t len, before; /* bytes in front of it in its block, and behind */
    int plain;
    int rounds;
    int from;   /* who sends */
    int faulty; /* how often it is shared cannot be said */
};

/* Whether both ranks have seen what they look for, or one of them has no more time. */
static int both_have(struct rank *r, int seen, int64_t until) {
    uint8_t mine = seen ? 1 : hr_now() > until ? 2 : 0, other = 0;
    CHECK_EQ(send_to(r, &mine, 1, 1 - r->rank, 4), HR_OK);
    CHECK_EQ(recv_from(r, &other, 1, 1 - r->rank, 4, NULL), HR_OK);
    return (mine == 1 && other == 1) || mine == 2 || other == 2;
}

static void *moves(void *arg) {
    struct rank *r = arg;
    struct job *j = r->arg;
    size_t all = j->before * 2 + j->len, spoilt = 0;
    int plain = j->from ? (j->plain & 1) << 1 | j->plain >> 1 : j->plain; /* whose, by rank */
    uint8_t *block = memory(r, plain, all), *x = block + j->before;
    uint64_t seen = shared(r->engine);
    int looks = j->rounds >= 100 && !j->faulty && !(j->plain & SENDERS), helps = can_help(r, j->plain);
    int64_t until = hr_now() + SECONDS(20);
    memset(block, 9, all);
    for (int round = 0, last = 0; !last; round++) {
        last = round + 1 >= j->rounds;
        if (r->rank == j->from) {
            fill(x, j->len, (unsigned)round);
            CHECK_EQ(send_to(r, x, j->len, 1 - r->rank, 3), HR_OK);
        } else {
            CHECK_EQ(recv_from(r, x, j->len, j->from, 3, NULL), HR_OK);
            CHECK_EQ(differing(x, j->len, (unsigned)round), 0);
        }
        for (size_t i = 0; i < j->before; i++) spoilt += block[i] != 9 || x[j->len + i] != 9;
        if (last && looks) last = both_have(r, !helps || shared(r->engine) > seen, until);
    }
    CHECK_EQ(spoilt, 0);
    seen = shared(r->engine) - seen;
    if (!helps) CHECK_EQ(seen, 0);
    /* In a blocking call it has time, now and then; what is not mapped is read now and then. */
    if (looks && helps) CHECK(seen > 0);
    memory_free(r, plain, block);
    return NULL;
}
static void move(struct job job) { world_of(2, moves, &job); }

TEST(both_ends_copy_a_long_message) { move((struct job){.len = 2 * MIB, .rounds = 100}); }
TEST(into_plain_memory_too) {
    move((struct job){.len = 2 * MIB, .plain = RECEIVERS, .rounds = 100});
    move((struct job){.len = 2 * MIB, .plain = SENDERS | RECEIVERS, .rounds = 100});
}
TEST(of_any_length) {
    for (size_t len = 512 << 10, i = 0; len < 3 * MIB; len += 200001, i++)
        move((struct job){.len = len, .plain = i % 2 ? SENDERS | RECEIVERS : 0, .rounds = 10});
}
TEST(what_lies_on_the_same_pages_is_left_alone) {
    for (size_t before = 1, i = 0; before < 3 * PAGE; before += 1777, i++)
        move((struct job){.len = 16 * MIB, .before = before, .plain = i % 2 ? RECEIVERS : 0, .rounds = 3});
}
TEST(plain_memory_is_not_shared_with_an_arena) { move((struct job){.len = 4 * MIB, .plain = SENDERS, .rounds = 5}); }

/* The first rank's puts fail, and reads are late: it is who sends in one world, and who receives in the other. */
static void move_with(const char *fault, int sender) {
    struct job job = {.len = 3 * MIB + 5, .plain = sender ? RECEIVERS : SENDERS | RECEIVERS, .rounds = 60, .faulty = 1};
    struct world w;
    char text[64];
    uint64_t before = hr_faults_fired();
    snprintf(text, sizeof text, "%s:%s", world_provider(), fault);
    world_open(&w, 2, text);
    job.from = !sender;
    int helps = can_help(&w.ranks[0], RECEIVERS);
    int64_t until = hr_now() + SECONDS(20);
    if (helps) do
            world_run(&w, moves, &job);
        while (hr_faults_fired() == before && hr_now() < until);
    world_close(&w);
    if (!helps) SKIP("the provider does not have HR_CAP_PUT");
    CHECK(hr_faults_fired() > before);
}
TEST(a_piece_that_cannot_be_put_is_the_receivers) { move_with("error=0.3,ops=put", 1); }
TEST(pieces_that_are_read_late_are_waited_for) { move_with("delay=0.2:300us,ops=read", 0); }

/* --- beside a copy of the program's own
 * ---------------------------------------------------------------------------------------------------------------- */

/* What each rank has goes to all, itself included. other: what it sends is not what it copies. */
struct gathering {
    size_t len;
    int size, plain, other;
};

static struct hr_program *gather(int rank, const struct gathering *g) {
    struct builder *b = calloc(1, sizeof *b);
    uint64_t len = g->len, own = len * (uint64_t)rank, all = len * (uint64_t)g->size;
    struct hr_instr copy = {.op = HR_OP_COPY, .peer = -1, .src_buf = HR_BUF_IN, .src_off = own, .dst_buf = HR_BUF_OUT};
    struct hr_instr send = {.op = HR_OP_SEND, .src_buf = HR_BUF_IN, .src_off = g->other ? (own + len) % all : own};
    struct hr_instr recv = {.op = HR_OP_RECV, .dst_buf = HR_BUF_OUT, .len = len};
    copy.dst_off = own;
    copy.len = send.len = len;
    for (int peer = 0; peer < g->size; peer++) {
        if (peer == rank) continue;
        send.peer = recv.peer = peer;
        recv.dst_off = len * (uint64_t)peer;
        add(b, send), add(b, recv);
    }
    add(b, copy);
    struct hr_program *p = build(b, all, 0, g->size);
    free(b);
    return p;
}

/* Transfers that have gone beside one, as their slots still say. */
static uint32_t beside(struct hr_engine *engine) {
    uint32_t n = 0;
    hr_lock(engine);
    for (uint32_t i = 0; i < engine->nxfers; i++) n += engine->xfers[i]->beside;
    hr_unlock(engine);
    return n;
}

static _Atomic int gathered; /* by who can help: 1 each, and together */

static void *gathers(void *arg) {
    struct rank *r = arg;
    const struct gathering *g = r->arg;
    size_t all = g->len * (size_t)g->size, wrong = 0;
    uint8_t *x = memory(r, g->plain, all), *y = memory(r, g->plain, all);
    struct hr_program *p = gather(r->rank, g);
    uint32_t together = 0;
    for (int round = 0; round < 60; round++) {
        struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
        for (int k = 0; k < g->size; k++)
            fill(x + (size_t)k * g->len, g->len, (unsigned)(round + r->rank * 10 + (k != r->rank)));
        memset(y, 0, all);
        CHECK_EQ(hr_run(r->comm, p, x, y, HR_UINT8, HR_SUM, 7, &req), HR_OK);
        CHECK_EQ(finish(r, &req, 30), HR_OK);
        for (int k = 0; k < g->size; k++)
            wrong += differing(y + (size_t)k * g->len, g->len, (unsigned)(round + k * 10 + (g->other && k != r->rank)));
        together += beside(r->engine);
    }
    CHECK_EQ(wrong, 0);
    if (g->other || !can_help(r, g->plain)) CHECK_EQ(together, 0);
    if (can_help(r, g->plain)) gathered += 1 + together;
    memory_free(r, g->plain, x);
    memory_free(r, g->plain, y);
    hr_program_put(p);
    return NULL;
}
/* much: of each, so that the peer has asked before all of it is copied. */
static void gather_all(struct gathering g, int much) {
    int64_t until = hr_now() + SECONDS(20); /* chance: a rank that gets no core asks too late */
    do {
        gathered = 0;
        world_of(g.size, gathers, &g);
    } while (much && gathered && gathered <= g.size && hr_now() < until);
    if (much && gathered) CHECK(gathered > g.size);
}

TEST(what_is_sent_and_copied_is_fetched_once) {
    gather_all((struct gathering){.len = 6 * MIB, .size = 2}, 1);
    gather_all((struct gathering){.len = 3 * MIB + 12345, .size = 2}, 0);
    gather_all((struct gathering){.len = 2 * MIB, .size = 3}, 0);
}
TEST(plain_memory_too) { gather_all((struct gathering){.len = 3 * MIB, .size = 2, .plain = SENDERS | RECEIVERS}, 0); }
TEST(what_is_only_sent_goes_by_itself) { gather_all((struct gathering){.len = 3 * MIB, .size = 2, .other = 1}, 0); }

/* --- given up
 * ---------------------------------------------------------------------------------------------------------------- */

/* Sends that are withdrawn at any moment: each receive gets one that was not, whole. */
enum { TRIES = 60 };
static void *withdraws(void *arg) {
    struct rank *r = arg;
    int plain = *(int *)r->arg;
    size_t len = 3 * MIB; /* short enough for the sanitizers */
    uint8_t *x = memory(r, plain, len), last = 0xff;
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
    memory_free(r, plain, x);
    return NULL;
}
TEST(a_send_that_is_withdrawn_is_not_received_in_part) {
    for (int plain = 0; plain <= (SENDERS | RECEIVERS); plain += SENDERS | RECEIVERS) world_of(2, withdraws, &plain);
}

/* The sender is stopped with a piece in its hands, or lets go of it in time, as the receiver gives up. */
static _Atomic int held, giving_up, over;
struct giving {
    int stopped, plain;
};
static void *gives_up(void *arg) {
    struct rank *r = arg;
    const struct giving *giving = r->arg;
    int stopped = giving->stopped, mapped = !giving->plain;
    size_t len = 4 * MIB, before = 1000, all = len + 2 * before; /* what is before it, and behind, is on its pages */
    uint8_t *block = memory(r, giving->plain, all), *x = block + before;
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
        if (mapped)
            CHECK_EQ(hr_expose(r->comm, 0, x + 100, 8, HR_ACCESS_REMOTE_READ, &desc, &exposed, detail), HR_AGAIN);
        giving_up = 1;
        hr_cancel(r->engine, &req, HR_ERR_TIMEOUT);
        CHECK_EQ(req.status, HR_ERR_TIMEOUT);
        if (stopped && mapped) CHECK(!hr_arena_find(block, all, &arena)); /* those pages are the other's now */
        for (size_t i = 0; i < before; i++) REQUIRE(block[i] == 1 && x[len + i] == 1);
        memset(block, 5, all);
        over = 1;
        world_await(&over, 2);
        for (size_t i = 0; i < all; i++) REQUIRE(block[i] == 5);
    }
    memory_free(r, giving->plain, block);
    return NULL;
}
static void give_up(int stopped, int plain) {
    struct world w;
    struct giving giving = {stopped, plain};
    held = giving_up = over = 0;
    world_open(&w, 2, NULL);
    int helps = can_help(&w.ranks[0], plain);
    if (helps) world_run(&w, gives_up, &giving);
    world_close(&w);
    if (!helps) SKIP("the provider does not have HR_CAP_MAP_WRITE, or HR_CAP_PUT");
}
TEST(a_sender_that_is_stopped_as_it_helps_changes_nothing) { give_up(1, 0); }
TEST(a_sender_that_lets_go_changes_nothing) { give_up(0, 0); }
TEST(a_sender_that_is_stopped_as_it_puts_changes_nothing) { give_up(1, RECEIVERS); }
TEST(a_sender_that_lets_go_as_it_puts_changes_nothing) { give_up(0, RECEIVERS); }

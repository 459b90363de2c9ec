/* test_returns.c - results that are written back to where a peer's operand lies, and messages that both ends copy; over
 * a provider that maps memory for writing, or without that. HR_TEST_PROVIDER chooses the provider. */

#include <sys/mman.h>

#include "hr/fault.h"
#include "programs.h"
#include "world.h"

enum { PAGE = 4096, ROUNDS = 20, WAIT = 30 };

static int maps_for_writing(struct rank *r) { return (world_caps(r) & HR_CAP_MAP_WRITE) != 0; }
/* Where the kernel permits it; all are of one host. */
static int puts_unmapped(struct rank *r) { return r->comm->conns[!r->rank]->lanes[0].ep->puts; }

/* --- allreduces
 * ---------------------------------------------------------------------------------------------------------- */

enum { REGISTERED, PLAIN, MIXED, COPIED };
struct job {
    uint64_t elements;
    int arriving, memory;
    uint64_t before;  /* elements in the same block that are not part of it, as many as behind */
    int keeps;        /* all answers end without a message, where memory is mapped for writing */
    uint64_t exposed; /* peers may read this element, but the first, at any time */
    int faulty;       /* puts fail now and then */
};

static void *allreduce(void *arg) {
    struct rank *r = arg;
    struct job *j = r->arg;
    struct hr_program *p = j->arriving ? halves(r->rank, j->elements, 1)
                                       : direct_on(r->rank, r->size, j->elements, 1, j->memory == COPIED);
    int plain = j->memory == PLAIN || j->memory == COPIED || (j->memory == MIXED && r->rank % 2);
    uint64_t all = j->elements + 2 * j->before, n = (uint64_t)r->size, wrong = 0, spoilt = 0, most = 0;
    float *block = plain ? malloc(all * 4) : hr_arena_alloc(all * 4, HR_ARENA_WRITABLE_BY_PEERS),
          *x = block + j->before;
    struct hr_exposed *exposed = NULL;
    struct hr_desc desc;
    char detail[256];
    for (uint64_t i = 0; i < all; i++) block[i] = -1;
    for (hr_status status = HR_AGAIN; j->exposed && status == HR_AGAIN; hr_progress(r->engine)) {
        status = hr_expose(r->comm, 1 - r->rank, x + j->exposed, 4, HR_ACCESS_REMOTE_READ, &desc, &exposed, detail);
        CHECK(status == HR_OK || status == HR_AGAIN || status == HR_ERR_UNSUPPORTED);
    }
    for (int round = 0; round < ROUNDS; round++) {
        struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
        for (uint64_t i = 0; i < j->elements; i++) x[i] = (float)(i % 1000 * n + (uint64_t)r->rank + (uint64_t)round);
        uint64_t put_back = counted(r->engine, "transfers_returned");
        CHECK_EQ(hr_run(r->comm, p, x, x, HR_FLOAT32, HR_SUM, 99, &req), HR_OK);
        CHECK_EQ(finish(r, &req, WAIT), HR_OK);
        put_back = counted(r->engine, "transfers_returned") - put_back;
        if (j->memory != PLAIN && j->keeps && maps_for_writing(r)) CHECK_EQ(put_back, n - 1);
        if (exposed) CHECK(!put_back || (r->rank == 1 && j->exposed < 1000)); /* one of the two is in the first half */
        int puts = plain && j->memory != COPIED ? puts_unmapped(r) : maps_for_writing(r);
        if (!puts) CHECK(!put_back || j->memory == MIXED);
        most = put_back > most ? put_back : most;
        for (uint64_t i = 0; i < j->elements; i++)
            wrong += x[i] != (float)(i % 1000 * n * n + n * (n - 1) / 2 + n * (uint64_t)round);
        for (uint64_t i = 0; i < j->before; i++) spoilt += block[i] != -1 || x[j->elements + i] != -1;
    }
    CHECK_EQ(wrong, 0);
    CHECK_EQ(spoilt, 0);
    if (j->memory == PLAIN && j->keeps && puts_unmapped(r)) CHECK_EQ(most, n - 1); /* not each time: it is tried */
    if (exposed) hr_conceal(r->engine, exposed);
    if (plain)
        free(block);
    else
        hr_arena_free(block);
    hr_program_put(p);
    return NULL;
}
static void allreduce_world(int n, struct job job) { world_of(n, allreduce, &job); }

TEST(results_are_put_back_as_they_arrive) {
    allreduce_world(2, (struct job){.elements = 1 << 20, .arriving = 1, .keeps = 1});
}
TEST(results_are_put_back_into_what_was_borrowed) {
    allreduce_world(2, (struct job){.elements = 1 << 20, .keeps = 1});
    allreduce_world(4, (struct job){.elements = 1 << 18, .keeps = 1});
}
TEST(short_results_are_put_back) {
    allreduce_world(2, (struct job){.elements = 4096, .arriving = 1, .keeps = 1});
    allreduce_world(4, (struct job){.elements = 8192, .keeps = 1});
}
/* The last page has room behind the end, which is nobody's. */
TEST(the_end_of_a_block_needs_no_whole_page) {
    allreduce_world(2, (struct job){.elements = 100002, .arriving = 1, .keeps = 1});
    allreduce_world(3, (struct job){.elements = 100002, .keeps = 1});
}
TEST(results_are_put_back_into_copies_in_scratch) {
    static const uint64_t lengths[] = {8192, 100002, 1 << 18};
    for (int n = 2; n <= 4; n++)
        allreduce_world(n, (struct job){.elements = lengths[n - 2], .memory = COPIED, .before = 111, .keeps = 1});
}
TEST(short_plain_memory_gets_messages) {
    for (int memory = PLAIN; memory <= MIXED; memory++) {
        allreduce_world(2, (struct job){.elements = 6000, .arriving = 1, .memory = memory});
        allreduce_world(4, (struct job){.elements = 12000, .memory = memory});
    }
}
/* By the kernel, if messages are not faster. */
TEST(results_are_put_back_into_plain_memory) {
    static const uint64_t lengths[] = {8192, 10000, 1 << 16, 1 << 18};
    for (int i = 0; i < 8; i++) {
        struct job job = {.elements = lengths[i / 2], .memory = i % 2 ? MIXED : PLAIN, .keeps = i % 2 == 0};
        job.before = (uint64_t)i * 111;
        allreduce_world(2, job);
        job.arriving = 1;
        allreduce_world(2, job);
        job.arriving = 0;
        job.elements *= 2;
        allreduce_world(4, job);
    }
}
TEST(long_results_are_put_back_into_plain_memory) {
    allreduce_world(2, (struct job){.elements = 3 << 19, .arriving = 1, .memory = PLAIN, .before = 5, .keeps = 1});
}
/* What the rank that is no root has in scratch for the answer alone: where memory is mapped it comes only where that
 * would go. */
static void *reduce(void *arg) {
    struct rank *r = arg;
    struct job *j = r->arg;
    int root = j->faulty, other = r->rank != root; /* faults strike rank 0 */
    struct hr_program *p = for_root(r->rank, root, j->elements, j->keeps);
    int plain = j->memory == PLAIN || (j->memory == MIXED && other);
    uint64_t wrong = 0, most = 0;
    float *x = plain ? malloc(j->elements * 4) : hr_arena_alloc(j->elements * 4, HR_ARENA_WRITABLE_BY_PEERS);
    for (int round = 0; round < ROUNDS; round++) {
        struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
        for (uint64_t i = 0; i < j->elements; i++) x[i] = (float)(i % 1000 + (uint64_t)(round + other * 5));
        uint64_t put_back = counted(r->engine, "transfers_returned");
        CHECK_EQ(hr_run(r->comm, p, x, x, HR_FLOAT32, HR_SUM, 99, &req), HR_OK);
        CHECK_EQ(finish(r, &req, WAIT), HR_OK);
        put_back = counted(r->engine, "transfers_returned") - put_back;
        CHECK(!put_back || (other && j->keeps));
        if (other && j->keeps && j->memory != PLAIN && maps_for_writing(r)) CHECK_EQ(put_back, 1);
        most = put_back > most ? put_back : most;
        for (uint64_t i = 0; i < j->elements; i++) {
            uint64_t sum = other ? i % 1000 + (uint64_t)round + 5 : 2 * (i % 1000 + (uint64_t)round) + 5;
            wrong += x[i] != (float)sum;
        }
    }
    CHECK_EQ(wrong, 0);
    if (other && j->keeps && j->memory == PLAIN && puts_unmapped(r) && !j->faulty) CHECK_EQ(most, 1); /* is tried */
    if (plain)
        free(x);
    else
        hr_arena_free(x);
    hr_program_put(p);
    return NULL;
}
TEST(results_that_pass_through_are_put_back) {
    static const uint64_t lengths[] = {1000, 10000, 1 << 18, 1 << 20};
    for (int i = 0; i < 12; i++) {
        struct job job = {.elements = lengths[i / 3], .memory = i % 3, .keeps = lengths[i / 3] > 5000};
        world_of(2, reduce, &job);
    }
}

/* A put that fails: then all of the result is sent, what was put before as well. */
TEST(results_that_pass_through_are_sent_where_a_put_fails) {
    struct job job = {.elements = 1 << 20, .memory = PLAIN, .keeps = 1};
    char text[64];
    struct world w;
    uint64_t before = hr_faults_fired();
    snprintf(text, sizeof text, "%s:error=0.3,ops=put", world_provider());
    world_open(&w, 2, text);
    int able = w.ranks[0].comm->conns[1]->lanes[0].ep->puts;
    job.faulty = 1;
    world_run(&w, reduce, &job);
    world_close(&w);
    CHECK(!able || hr_faults_fired() > before);
}

/* Rank 0 leads: it is as if messages had been faster whenever that was tried. */
static void *unasked(void *arg) {
    struct rank *r = arg;
    uint64_t elements = 1 << 15;
    struct hr_program *p = halves(r->rank, elements, 1);
    float *x = malloc(elements * 4);
    struct hr_reading *reading = &r->comm->conns[1 - r->rank]->reading;
    for (int i = 0; i < HR_RELAYS; i++)
        reading->relay[i] = (struct hr_relay){.cost = {[HR_RELAYED] = 1, [HR_READ] = 9}, .next = INT64_MAX};
    for (int round = 0; round < ROUNDS; round++) {
        struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
        uint64_t before[3], after[3];
        const char *const names[] = {"messages_eager", "transfers_segments", "transfers_returned"};
        for (uint64_t i = 0; i < elements; i++) x[i] = (float)i;
        for (int i = 0; i < 3; i++) before[i] = counted(r->engine, names[i]);
        CHECK_EQ(hr_run(r->comm, p, x, x, HR_FLOAT32, HR_SUM, 99, &req), HR_OK);
        CHECK_EQ(finish(r, &req, WAIT), HR_OK);
        for (int i = 0; i < 3; i++) after[i] = counted(r->engine, names[i]) - before[i];
        if (world_caps(r) & HR_CAP_RELAYS) CHECK(after[0] == 2 && after[1] == 0 && after[2] == 0);
        CHECK_EQ(x[elements - 1], 2 * (float)(elements - 1));
    }
    free(x);
    hr_program_put(p);
    return NULL;
}
TEST(where_messages_are_faster_nobody_asks) { world_of(2, unasked, NULL); }

/* It is as if reading had been faster: what work it was for the other, rank 0, which leads, hears each time. */
static void *told(void *arg) {
    struct rank *r = arg;
    uint64_t elements = 1 << 20;
    struct hr_program *p = halves(r->rank, elements, 1);
    float *x = malloc(elements * 4);
    struct hr_reading *reading = &r->comm->conns[1 - r->rank]->reading;
    struct hr_relay *put = &reading->relay[HR_RELAYS - HR_RELAY_LENGTHS + hr_relay_class(elements * 2)];
    for (int i = 0; i < HR_RELAYS; i++)
        reading->relay[i] = (struct hr_relay){.cost = {[HR_RELAYED] = 9, [HR_READ] = 1}, .next = INT64_MAX};
    for (int round = 0; round < ROUNDS; round++) {
        struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
        put->theirs = 0;
        for (uint64_t i = 0; i < elements; i++) x[i] = (float)i;
        CHECK_EQ(hr_run(r->comm, p, x, x, HR_FLOAT32, HR_SUM, 99, &req), HR_OK);
        CHECK_EQ(finish(r, &req, WAIT), HR_OK);
        if (world_caps(r) & HR_CAP_RELAYS && puts_unmapped(r)) CHECK(put->theirs > 0 && put->theirs < 1e3);
        CHECK_EQ(x[elements - 1], 2 * (float)(elements - 1));
    }
    for (int i = 0; i < HR_RELAYS; i++)
        if (&reading->relay[i] != put) CHECK_EQ(reading->relay[i].theirs, 0);
    if (world_caps(r) & HR_CAP_RELAYS && puts_unmapped(r)) CHECK((put->cost[HR_READ] < 1) == (r->rank == 0));
    free(x);
    hr_program_put(p);
    return NULL;
}
TEST(each_says_what_work_the_kernel_was) { world_of(2, told, NULL); }

/* Were its pages left to somebody, those who read it where it is mapped would see the old ones for good. */
TEST(what_is_exposed_gets_messages) {
    allreduce_world(2, (struct job){.elements = 1 << 20, .arriving = 1, .exposed = 100});
    allreduce_world(2,
                    (struct job){.elements = 100002, .arriving = 1, .exposed = 50000}); /* on a page of both halves */
}
/* Only chunks whose pages are the buffer's alone are open: those in the middle. */
TEST(what_lies_on_the_same_pages_is_left_alone) {
    for (uint64_t before = 1; before < 2000; before += 777) {
        allreduce_world(2, (struct job){.elements = 100002, .arriving = 1, .before = before});
        allreduce_world(4, (struct job){.elements = 100000, .before = before});
    }
}

/* --- given up
 * ---------------------------------------------------------------------------------------------------------------- */

static struct hr_xfer *lent_to(struct rank *r, struct hr_request *req) {
    struct hr_xfer *found = NULL;
    for (int64_t until = hr_now() + SECONDS(5); !found && hr_now() < until;) {
        hr_lock(r->engine);
        for (uint32_t i = 0; i < r->engine->nxfers; i++)
            if (r->engine->xfers[i]->mode == HR_XFER_LENT) found = r->engine->xfers[i];
        hr_unlock(r->engine);
        hr_wait(r->engine, req, hr_now() + SECONDS(0.001), 0);
    }
    return found;
}

static _Atomic int held, over;

/* Rank 1 has rank 0's chunk, and its hands on it, as rank 0 gives up: it is stopped there, or lets go in time. Rank 0
 * sends to both others, and rank 2 never comes, so that nothing is reduced. */
struct given_up {
    int stopped, copy; /* it is a copy of plain memory: made for the run, or by the program */
};
enum { NO_COPY, ASIDE, WITHIN };
static void *gives_up(void *arg) {
    struct rank *r = arg;
    struct given_up *g = r->arg;
    uint64_t elements = 3 * (1 << 16);
    struct hr_program *p = direct_on(r->rank, r->size, elements, 1, g->copy == WITHIN);
    uint8_t *x = g->copy ? malloc(elements * 4) : hr_arena_alloc(elements * 4, HR_ARENA_WRITABLE_BY_PEERS);
    struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
    struct hr_arena_info arena;
    if (g->copy == ASIDE) hr_program_set_aside(p, HR_ASIDE_IN | HR_ASIDE_OUT);
    memset(x, 1, elements * 4);
    if (r->rank < 2) CHECK_EQ(hr_run(r->comm, p, x, x, HR_UINT8, HR_SUM, 99, &req), HR_OK);
    if (r->rank == 1) {
        struct hr_xfer *lent = lent_to(r, &req);
        REQUIRE(lent && lent->open);
        CHECK(hr_ledger_hold(lent));
        uint8_t *theirs = lent->rmem.out;
        hr_lock(r->engine); /* which keeps what was lent, whatever comes */
        held = 1;
        if (!g->stopped) {
            usleep(2000);
            theirs[0] = 77;
            hr_ledger_let_go(lent);
        }
        world_await(&over, 1);
        if (g->stopped) {
            memset(theirs, 77, elements / 3 * 4); /* it goes on */
            hr_ledger_let_go(lent);
        }
        CHECK(!hr_ledger_hold(lent)); /* it was struck */
        hr_unlock(r->engine);
        over = 2;
        CHECK(finish(r, &req, WAIT) != HR_OK);
    } else if (r->rank == 0) {
        world_await(&held, 1);
        hr_cancel(r->engine, &req, HR_ERR_TIMEOUT);
        CHECK_EQ(req.status, HR_ERR_TIMEOUT);
        if (g->stopped) CHECK(!hr_arena_find(x, elements * 4, &arena)); /* nobody is shown those pages any more */
        /* where the next copy would be */
        uint64_t room = elements * 4 * (g->copy == WITHIN ? 2 : 1);
        uint8_t *next = hr_arena_alloc(room, HR_ASIDE_ROOM);
        memset(next, 5, room);
        memset(x, 5, elements * 4);
        over = 1;
        world_await(&over, 2);
        uint64_t changed = 0;
        for (uint64_t i = 0; i < room; i++) changed += x[i % (elements * 4)] != 5 || next[i] != 5;
        CHECK_EQ(changed, 0);
        hr_arena_free(next);
    } else {
        world_await(&over, 2);
    }
    g->copy ? free(x) : hr_arena_free(x);
    hr_program_put(p);
    return NULL;
}
static void where_mapped(int n, void *(*body)(void *), void *arg) {
    struct world w;
    held = over = 0;
    world_open(&w, n, NULL);
    int maps = maps_for_writing(&w.ranks[0]);
    if (maps) world_run(&w, body, arg);
    world_close(&w);
    if (!maps) SKIP("the provider does not have HR_CAP_MAP_WRITE");
}
TEST(who_was_stopped_with_a_chunk_in_its_hands_changes_nothing) {
    for (int copy = NO_COPY; copy <= WITHIN; copy++)
        where_mapped(3, gives_up, &(struct given_up){.stopped = 1, .copy = copy});
}
TEST(who_lets_go_changes_nothing) {
    for (int copy = NO_COPY; copy <= WITHIN; copy++)
        where_mapped(3, gives_up, &(struct given_up){.stopped = 0, .copy = copy});
}

/* Rank 1 has put its result back and has said so, which ends its hold; rank 0 gives up before it hears that. */
static void *unheard(void *arg) {
    struct rank *r = arg;
    const int *arriving = r->arg;
    uint64_t elements = 4096, holds = 0, changed = 0;
    struct hr_program *p = *arriving ? halves(r->rank, elements, 1) : direct(r->rank, r->size, elements, 1);
    uint8_t *x = hr_arena_alloc(elements * 4, HR_ARENA_WRITABLE_BY_PEERS);
    struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
    memset(x, 1, elements * 4);
    if (r->rank == 0) {
        CHECK_EQ(hr_run(r->comm, p, x, x, HR_UINT8, HR_SUM, 99, &req), HR_OK);
        hr_lock(r->engine); /* so that it hears nothing */
        held = 1;
        world_await(&over, 1);
        for (uint32_t i = 0; i < r->engine->nxfers; i++) {
            const struct hr_xfer *offer = r->engine->xfers[i];
            holds += offer->mode == HR_XFER_SEND && offer->open && r->engine->ledger[HR_ID_INDEX(offer->id)] & 1;
        }
        hr_unlock(r->engine);
        CHECK_EQ(holds, 1);
        int64_t since = hr_now();
        hr_cancel(r->engine, &req, HR_ERR_TIMEOUT);
        CHECK(hr_now() - since < SECONDS(1));
        CHECK(req.status == HR_ERR_TIMEOUT || req.status == HR_OK); /* the background thread may have heard it */
        memset(x, 5, elements * 4);
        over = 2;
        world_await(&over, 3);
        for (uint64_t i = 0; i < elements * 4; i++) changed += x[i] != 5;
        CHECK_EQ(changed, 0);
    } else {
        world_await(&held, 1);
        CHECK_EQ(hr_run(r->comm, p, x, x, HR_UINT8, HR_SUM, 99, &req), HR_OK);
        while (!counted(r->engine, "transfers_returned")) hr_wait(r->engine, &req, hr_now() + SECONDS(0.001), 0);
        over = 1;
        world_await(&over, 2);
        finish(r, &req, WAIT);
        over = 3;
    }
    hr_arena_free(x);
    hr_program_put(p);
    return NULL;
}
TEST(who_has_said_that_it_is_through_is_waited_for_a_while) {
    for (int arriving = 0; arriving < 2; arriving++) where_mapped(2, unheard, &arriving);
}

/* Whoever was stopped may look for its entry at any time later, however many offers have had its place since. */
static void *offers(void *arg) {
    struct rank *r = arg;
    uint8_t *x = hr_arena_alloc(1 << 20, HR_ARENA_WRITABLE_BY_PEERS);
    struct hr_xfer old = {0};
    int places = 0, seen = 0; /* an id comes again after 4096; not all are offered at once, for want of credit */
    int64_t until = hr_now() + SECONDS(20);
    for (int i = 0; r->rank == 0 && places < 4200 && (seen || i < 100) && hr_now() < until; i++) {
        struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
        CHECK_EQ(hr_isend(r->comm, x, 1 << 20, 1, 3, &req), HR_OK);
        hr_lock(r->engine);
        if (req.xfer && req.xfer->key) {
            seen++;
            if (!old.key) old = *req.xfer;
            places += HR_ID_INDEX(old.id) == HR_ID_INDEX(req.xfer->id);
            CHECK_EQ(hr_ledger_take_own(&old, 9), old.key == req.xfer->key ? 0 : -1);
            if (old.key == req.xfer->key) hr_ledger_let_go_own(&old);
        }
        hr_unlock(r->engine);
        hr_cancel(r->engine, &req, HR_ERR_CANCELED);
    }
    CHECK(r->rank || !seen || places > 4096);
    over++;
    world_await(&over, 2);
    hr_arena_free(x);
    return NULL;
}
TEST(no_offer_is_taken_for_an_older_one) {
    over = 0;
    world_of(2, offers, NULL);
}

/* test_run.c - programs: validation, and the interpreter on several engines. HR_TEST_PROVIDER chooses the provider. */

#include "core/engine.h"
#include "core/program.h"
#include "hr/fault.h"
#include "programs.h"
#include "world.h"

/* --- validation
 * --------------------------------------------------------------------------------------------------------- */

static hr_status check_program(const struct hr_instr *instrs, uint32_t n, const uint32_t *unlocks, uint32_t nunlock,
                               const struct hr_ref *refs, uint32_t nref, const char *expected) {
    struct hr_program *p = NULL;
    char detail[256] = "";
    hr_status status = hr_program_new(instrs, n, unlocks, nunlock, refs, nref, 64, 64, 64, 2, &p, detail);
    if (status == HR_OK)
        hr_program_put(p);
    else
        CHECK_STR(strstr(detail, expected) ? expected : detail, expected);
    return status;
}

TEST(wrong_programs_are_refused) {
    uint32_t unlocks[] = {1, 0};
    struct hr_ref borrowed = {HR_BUF_BORROWED, 0, 0};
    struct hr_instr send = {.op = HR_OP_SEND, .peer = 1, .len = 64},
                    recv = {.op = HR_OP_RECV, .peer = 1, .len = 64, .dst_buf = HR_BUF_OUT};
    struct hr_instr reduce = {.op = HR_OP_REDUCE, .len = 64, .dst_buf = HR_BUF_OUT, .nref = 1}, bad = send, two[2];
    CHECK_EQ(check_program(&send, 1, NULL, 0, NULL, 0, ""), HR_OK);
    bad.peer = 2;
    CHECK_EQ(check_program(&bad, 1, NULL, 0, NULL, 0, "peer 2 of 2"), HR_ERR_INVALID);
    bad = send;
    bad.op = HR_OPCODES;
    CHECK_EQ(check_program(&bad, 1, NULL, 0, NULL, 0, "unknown operation"), HR_ERR_INVALID);
    bad = send;
    bad.src_off = 1;
    CHECK_EQ(check_program(&bad, 1, NULL, 0, NULL, 0, "outside the in buffer"), HR_ERR_INVALID);
    bad = recv;
    bad.dst_off = UINT64_MAX - 10;
    CHECK_EQ(check_program(&bad, 1, NULL, 0, NULL, 0, "outside the out buffer"), HR_ERR_INVALID);
    bad = recv;
    bad.dst_buf = 3;
    CHECK_EQ(check_program(&bad, 1, NULL, 0, NULL, 0, "names buffer 3"), HR_ERR_INVALID);
    CHECK_EQ(check_program(&reduce, 1, NULL, 0, &borrowed, 1, "not a BORROW"), HR_ERR_INVALID);
    CHECK_EQ(check_program(&reduce, 1, NULL, 0, NULL, 0, "operands outside"), HR_ERR_INVALID);
    bad = send;
    bad.after = 1;
    CHECK_EQ(check_program(&bad, 1, NULL, 0, NULL, 0, "waits for 1 others, 0 unlock"), HR_ERR_INVALID);
    two[0] = two[1] = send; /* each waits for the other */
    for (int i = 0; i < 2; i++) {
        two[i].after = 1;
        two[i].unlock = (uint32_t)i;
        two[i].nunlock = 1;
    }
    CHECK_EQ(check_program(two, 2, unlocks, 2, NULL, 0, "in a circle"), HR_ERR_INVALID);
    two[0].nunlock = 3;
    CHECK_EQ(check_program(two, 2, unlocks, 2, NULL, 0, "out of bounds"), HR_ERR_INVALID);
}

/* --- a direct allreduce
 * ------------------------------------------------------------------------------------------------------------ */

struct job {
    uint64_t elements;
    int arena, rounds;
    uint64_t odd_sig; /* rank 1 signs differently */
    int arriving;     /* reduced as it arrives */
    int fails;        /* until it does */
    int returns;      /* results are put back, where they may be */
};
static hr_status run_once(struct rank *r, struct hr_program *p, float *x, uint64_t sig, struct hr_request *req,
                          double seconds) {
    memset(req, 0, sizeof *req);
    req->priority = HR_PRIORITY_DEFAULT;
    CHECK_EQ(hr_run(r->comm, p, x, x, HR_FLOAT32, HR_SUM, sig, req), HR_OK);
    return finish(r, req, seconds);
}
static void *allreduce(void *arg) {
    struct rank *r = arg;
    struct job *j = r->arg;
    struct hr_program *p =
        j->arriving ? halves(r->rank, j->elements, j->returns) : direct(r->rank, r->size, j->elements, j->returns);
    float *x = j->arena ? hr_arena_alloc(j->elements * 4, 0) : malloc(j->elements * 4);
    for (int round = 0; round < j->rounds; round++) {
        struct hr_request req;
        for (uint64_t i = 0; i < j->elements; i++) x[i] = (float)(i % 1000 * (uint64_t)r->size + (uint64_t)r->rank);
        hr_status status = run_once(r, p, x, 99, &req, 30);
        if (j->fails && status != HR_OK) break;
        CHECK_EQ(status, HR_OK);
        CHECK(!j->fails || round + 1 < j->rounds);
        uint64_t wrong = 0;
        for (uint64_t i = 0; i < j->elements; i++)
            wrong +=
                x[i] != (float)(i % 1000 * (uint64_t)(r->size * r->size) + (uint64_t)(r->size * (r->size - 1) / 2));
        CHECK_EQ(wrong, 0);
    }
    if (j->arena)
        hr_arena_free(x);
    else
        free(x);
    hr_program_put(p);
    return NULL;
}
/* Several runs of one program at once, of which its owner lets it go: they end as they would have. */
static void *let_go(void *arg) {
    struct rank *r = arg;
    enum { RUNS = 3, ELEMENTS = 1000 };
    struct hr_program *p = direct(r->rank, r->size, ELEMENTS, 0);
    float x[RUNS][ELEMENTS];
    struct hr_request reqs[RUNS];
    for (int i = 0; i < RUNS; i++) {
        for (int e = 0; e < ELEMENTS; e++) x[i][e] = (float)(i + e);
        reqs[i] = (struct hr_request){.priority = HR_PRIORITY_DEFAULT};
        CHECK_EQ(hr_run(r->comm, p, x[i], x[i], HR_FLOAT32, HR_SUM, 1, &reqs[i]), HR_OK);
    }
    hr_program_put(p);
    for (int i = 0; i < RUNS; i++) {
        CHECK_EQ(finish(r, &reqs[i], 10), HR_OK);
        for (int e = 0; e < ELEMENTS; e++) CHECK_EQ(x[i][e], (float)(r->size * (i + e)));
    }
    return NULL;
}
TEST(a_program_is_kept_by_its_runs) { world_of(2, let_go, NULL); }

static void allreduce_world(int n, struct job job) { world_of(n, allreduce, &job); }
TEST(direct_allreduce_small) { allreduce_world(2, (struct job){.elements = 1000, .rounds = 200}); }
TEST(direct_allreduce_lent) { allreduce_world(3, (struct job){.elements = 300000, .arena = 1, .rounds = 10}); }
TEST(direct_allreduce_copied) { allreduce_world(3, (struct job){.elements = 300000, .rounds = 10}); }
/* Chunks above a MiB, no multiple of a piece: where memory is not mapped they are read when they are reduced, or sent
 * in segments, whichever was faster; each is tried. */
enum { HALF = 300001, TURNS = 40 };
TEST(allreduce_of_long_plain_memory) {
    for (int arriving = 0; arriving < 2; arriving++)
        allreduce_world(2, (struct job){.elements = 2 * HALF, .rounds = TURNS, .arriving = arriving});
}

/* A read that is late, or fails; or a put, of what is reduced in place. */
static void read_with(const char *fault, int fails, uint32_t cap, const char *ops) {
    for (int arriving = 0; arriving < 2; arriving++) {
        struct job job = {.elements = 2 * HALF, .rounds = fails ? 1000 : TURNS, .arriving = arriving, .fails = fails};
        struct world w;
        char text[64];
        uint64_t before = hr_faults_fired();
        snprintf(text, sizeof text, "%s:%s,ops=%s", world_provider(), fault, ops);
        job.returns = cap == HR_CAP_PUT;
        world_open(&w, 2, text);
        int able =
            cap == HR_CAP_PUT ? w.ranks[0].comm->conns[1]->lanes[0].ep->puts : (world_caps(&w.ranks[0]) & cap) != 0;
        if (able) world_run(&w, allreduce, &job);
        world_close(&w);
        if (!able)
            SKIP(cap == HR_CAP_PUT ? "the provider does not have HR_CAP_PUT" : "the provider does not have HR_CAP_MAP");
        CHECK(hr_faults_fired() > before);
    }
}
TEST(reads_that_are_late_are_waited_for) { read_with("delay=0.2:300us", 0, HR_CAP_MAP, "read"); }
TEST(a_read_that_fails_ends_the_collective_on_all_ranks) { read_with("error=0.05", 1, HR_CAP_MAP, "read"); }
TEST(a_put_that_fails_is_a_message_instead) { read_with("error=0.3", 0, HR_CAP_PUT, "put"); }

TEST(direct_allreduce_eight) { allreduce_world(8, (struct job){.elements = 80000, .arena = 1, .rounds = 10}); }

/* --- reduced out of the message
 * ---------------------------------------------------------------------------------------------------------- */

enum { FEW = 600, MANY = 300000, EXCHANGES = 200 };
enum { COMES_FOR_ONE, SENT_ON_TOO, USED_TWICE, COMES_ELSEWHERE };

/* Each of two ranks brings `elements`, and both get the sums. The second half of OUT shows what scratch, which had the
 * rank's own before, holds in the end: a look that hr/program.h forbids, as it waits for the REDUCE alone. */
static struct hr_program *exchange(int rank, uint64_t elements, int how) {
    struct builder *b = calloc(1, sizeof *b);
    uint64_t bytes = elements * 4;
    uint8_t place = how == COMES_ELSEWHERE ? HR_BUF_OUT : HR_BUF_TMP;
    struct hr_instr talk = {.peer = 1 - rank, .len = bytes}, copy = {.op = HR_OP_COPY, .peer = -1, .len = bytes};
    talk.op = HR_OP_SEND;
    uint32_t sent = add(b, talk);
    copy.dst_buf = place;
    uint32_t own = add(b, copy);
    talk.op = HR_OP_RECV;
    talk.dst_buf = place;
    uint32_t came = add(b, talk);
    uint32_t reduce =
        add(b, (struct hr_instr){.op = HR_OP_REDUCE, .peer = -1, .len = bytes, .dst_buf = HR_BUF_IN, .nref = 2});
    copy.src_buf = place;
    copy.dst_buf = HR_BUF_OUT;
    copy.dst_off = bytes;
    uint32_t shown = add(b, copy);
    b->refs[b->nref++] = (struct hr_ref){how == USED_TWICE ? place : HR_BUF_IN, 0, 0};
    b->refs[b->nref++] = (struct hr_ref){place, 0, 0};
    after(b, own, came);
    after(b, sent, reduce);
    after(b, came, reduce);
    after(b, reduce, shown);
    if (how == SENT_ON_TOO) after(b, came, shown);
    struct hr_program *program = build(b, 2 * bytes, bytes, 2);
    free(b);
    return program;
}
TEST(what_comes_for_one_reduction_is_known) {
    for (int how = COMES_FOR_ONE; how <= COMES_ELSEWHERE; how++) {
        struct hr_program *p = exchange(0, FEW, how);
        CHECK_EQ(p->folds[2], how == COMES_FOR_ONE ? 3 + 1 : 0);
        hr_program_put(p);
    }
}

static void *exchanges(void *arg) {
    struct rank *r = arg;
    uint64_t n = *(uint64_t *)r->arg, folded = 0, wrong = 0;
    int rounds = n == FEW ? EXCHANGES : EXCHANGES / 20;
    struct hr_program *p = exchange(r->rank, n, COMES_FOR_ONE);
    float *x = malloc(2 * n * 4);
    for (int round = 0; round < rounds; round++) {
        struct hr_request req;
        for (uint64_t i = 0; i < n; i++) x[i] = (float)(i % 1000 * 2 + (uint64_t)r->rank);
        CHECK_EQ(run_once(r, p, x, 7, &req, 30), HR_OK);
        int kept = x[n] == (float)r->rank;
        for (uint64_t i = 0; i < n; i++) {
            wrong += x[i] != (float)(i % 1000 * 4 + 1);
            wrong += x[n + i] != (float)(i % 1000 * 2 + (uint64_t)(kept ? r->rank : 1 - r->rank));
        }
        folded += (uint64_t)kept;
    }
    CHECK_EQ(wrong, 0);
    if (n == FEW) CHECK(folded > 0); /* all, unless a send has to wait */
    free(x);
    hr_program_put(p);
    return NULL;
}
TEST(what_comes_is_reduced_out_of_the_message) {
    for (uint64_t n = FEW; n <= MANY; n += MANY - FEW) {
        struct world w;
        world_open(&w, 2, NULL);
        world_run(&w, exchanges, &n);
        world_close(&w);
    }
}

/* --- what goes unasked
 * ------------------------------------------------------------------------------------------------------- */

enum { LOOSE = 4096, LONGER = 4800 }; /* every provider sends so much unasked where nothing else is said */

enum { AT_ONCE, BEHIND_A_COPY, AFTER_AN_ANSWER, FANS };

/* Rank 0 sends to ranks 1 and 2. */
static struct hr_program *fan(int rank, int how) {
    struct builder *b = calloc(1, sizeof *b);
    struct hr_instr send = {.op = HR_OP_SEND, .src_buf = HR_BUF_IN, .len = LONGER},
                    recv = {.op = HR_OP_RECV, .dst_buf = HR_BUF_TMP, .len = rank ? LONGER : 0, .tag = rank ? 0 : 1},
                    copy = {.op = HR_OP_COPY, .src_buf = HR_BUF_IN, .dst_buf = HR_BUF_TMP, .len = LONGER};
    if (rank) {
        uint32_t came = add(b, recv);
        if (rank == 1 && how == AFTER_AN_ANSWER) after(b, came, add(b, (struct hr_instr){.op = HR_OP_SEND, .tag = 1}));
    } else {
        for (int p = 1; p < 3; p++) {
            send.peer = recv.peer = p;
            uint32_t first = how == BEHIND_A_COPY && p == 1 ? add(b, copy) : 0, sent = add(b, send);
            if (how == BEHIND_A_COPY) after(b, first, sent);
            if (how == AFTER_AN_ANSWER && p == 1) add(b, recv);
            if (how == AFTER_AN_ANSWER && p == 2) after(b, 1, sent);
        }
    }
    struct hr_program *program = build(b, LONGER, LONGER, 3);
    free(b);
    return program;
}

static uint64_t unasked(struct rank *r) {
    hr_lock(r->engine);
    uint64_t found = r->engine->count_eager;
    hr_unlock(r->engine);
    return found;
}

static void *fans(void *arg) {
    struct rank *r = arg;
    char x[LONGER] = {0};
    struct hr_request req;
    for (int how = 0; how < FANS; how++) {
        struct hr_program *p = fan(r->rank, how);
        int paced = how == AFTER_AN_ANSWER;
        uint64_t before = unasked(r);
        CHECK_EQ(run_once(r, p, (float *)x, 1, &req, 10), HR_OK);
        if (!r->rank) CHECK_EQ(p->paced, paced);
        if (!r->rank) CHECK_EQ(unasked(r) - before, paced ? 2 : 0);
        hr_program_put(p);
    }
    if (r->rank == 2) return NULL;
    for (int len = LOOSE; len <= LONGER; len += LONGER - LOOSE) { /* messages alone */
        uint64_t before = unasked(r);
        CHECK_EQ(r->rank ? recv_from(r, x, (size_t)len, 0, 7, NULL) : send_to(r, x, (size_t)len, 1, 7), HR_OK);
        if (!r->rank) CHECK_EQ(unasked(r) - before, len == LOOSE);
    }
    return NULL;
}
TEST(what_is_long_goes_unasked_where_something_paces_it) {
    struct world w;
    world_open(&w, 3, NULL);
    hr_lock(w.ranks[0].engine);
    for (int i = 0; i < w.ranks[0].engine->ndomains; i++) w.ranks[0].engine->domains[i]->caps.eager_loose = LOOSE;
    hr_unlock(w.ranks[0].engine);
    world_run(&w, fans, NULL);
    world_close(&w);
}

/* --- failures
 * ------------------------------------------------------------------------------------------------------------------ */

static void *mismatched(void *arg) {
    struct rank *r = arg;
    struct job *j = r->arg;
    struct hr_program *p = direct(r->rank, r->size, j->elements, 0);
    float *x = calloc(j->elements, 4);
    struct hr_request req;
    hr_status status = run_once(r, p, x, r->rank == 1 ? 1 : 2, &req, 10);
    CHECK(status == HR_ERR_MISMATCH);
    status = run_once(r, p, x, 2, &req, 10); /* and it stays broken */
    CHECK(status == HR_ERR_MISMATCH);
    free(x);
    hr_program_put(p);
    return NULL;
}
TEST(signatures_that_differ) {
    for (uint64_t n = 30; n < 1000000; n *= 1000) {
        struct job job = {.elements = n};
        struct world w;
        world_open(&w, 3, NULL);
        world_run(&w, mismatched, &job);
        world_close(&w);
    }
}

/* One rank does not come: the others time out, their communicator is broken, and rank 0 hears of it on its next call.
 */
static void *absent(void *arg) {
    struct rank *r = arg;
    struct job *j = r->arg;
    struct hr_program *p = direct(r->rank, r->size, j->elements, 0);
    float *x = calloc(j->elements, 4);
    struct hr_request req;
    if (r->rank) {
        hr_status status = run_once(r, p, x, 2, &req, 0.1);
        CHECK(status == HR_ERR_TIMEOUT || status == HR_ERR_BROKEN); /* the other one's deadline may come first */
    } else {
        struct timespec nap = {0, 400000000};
        nanosleep(&nap, NULL);
        CHECK_EQ(run_once(r, p, x, 2, &req, 5), HR_ERR_BROKEN);
        CHECK(req.peer == 1 || req.peer == 2);
    }
    free(x);
    hr_program_put(p);
    return NULL;
}
TEST(absent_rank) {
    for (uint64_t n = 300; n < 1000000; n *= 1000) {
        struct job job = {.elements = n};
        struct world w;
        world_open(&w, 3, NULL);
        world_run(&w, absent, &job);
        world_close(&w);
    }
}

/* A peer is lost in the middle: at whatever point, every rank gets an error and nobody hangs. */
static void *victim(void *arg) {
    struct rank *r = arg;
    struct job *j = r->arg;
    struct hr_program *p = direct(r->rank, r->size, j->elements, 0);
    float *x = hr_arena_alloc(j->elements * 4, 0);
    memset(x, 0, j->elements * 4);
    struct hr_request req;
    for (int i = 0; i < 1000; i++) {
        if (r->rank == 0 && i == j->rounds) hr_peer_lost(r->engine, 2, HR_ERR_PEER_LOST, "test");
        hr_status status = run_once(r, p, x, 2, &req, 10);
        if (status == HR_OK) continue;
        CHECK_EQ(status, HR_ERR_PEER_LOST);
        /* the lost one lives on here: it sees rank 0 gone, and rank 1 believes whom it hears first */
        if (r->rank == 0) CHECK_EQ(req.peer, 2);
        if (r->rank == 1) CHECK(req.peer == 0 || req.peer == 2);
        break;
    }
    hr_arena_free(x);
    hr_program_put(p);
    return NULL;
}
TEST(peer_lost_in_the_middle) {
    for (int i = 0; i < 20; i++) {
        struct job job = {.elements = i % 2 ? 300 : 300000, .rounds = i};
        struct world w;
        world_open(&w, 3, NULL);
        world_run(&w, victim, &job);
        world_close(&w);
    }
}

/* Each rank thinks that it is the root: all send, nobody receives, everybody is done at once. The stray messages tell.
 */
static void *rootless(void *arg) {
    struct rank *r = arg;
    struct builder *b = calloc(1, sizeof *b);
    float x[4] = {0};
    struct hr_request req;
    for (int p = 0; p < r->size; p++)
        if (p != r->rank) add(b, (struct hr_instr){.op = HR_OP_SEND, .peer = p, .src_buf = HR_BUF_IN, .len = sizeof x});
    struct hr_program *p = build(b, sizeof x, 0, r->size);
    hr_status status = run_once(r, p, x, (uint64_t)r->rank, &req, 5);
    int64_t until = hr_now() + SECONDS(5);
    struct timespec nap = {0, 1000000};
    struct hr_comm_state state = {0};
    while (status == HR_OK && hr_now() < until) {
        hr_comm_state(r->comm, &state);
        status = state.status;
        nanosleep(&nap, NULL);
    }
    CHECK_EQ(status, HR_ERR_MISMATCH);
    hr_program_put(p);
    free(b);
    return NULL;
}
TEST(messages_that_nobody_expects) { world_of(3, rootless, NULL); }

/* Another thread closes the communicator of a run while this one looks for what comes next. */
static void *closes(void *comm) {
    for (int64_t until = hr_now() + 10000; hr_now() < until;) {} /* it looks for so long before it sleeps */
    hr_comm_close(comm);
    return NULL;
}
static void *closed_meanwhile(void *arg) {
    struct rank *r = arg;
    uint64_t pair[2] = {0, 1};
    float x[16] = {0};
    for (uint64_t round = 0; r->rank == 0 && round < 200; round++) {
        struct hr_program *p = direct(0, 2, 16, 0);
        struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
        struct hr_comm *comm = NULL;
        pthread_t closer;
        CHECK_EQ(hr_comm_open(r->engine, 100 + round, pair, 2, 0, &comm), HR_OK);
        CHECK_EQ(hr_run(comm, p, x, x, HR_FLOAT32, HR_SUM, 99, &req), HR_OK);
        CHECK_EQ(pthread_create(&closer, NULL, closes, comm), 0);
        CHECK_EQ(finish(r, &req, 20), HR_ERR_BROKEN);
        pthread_join(closer, NULL);
        hr_program_put(p);
    }
    return NULL;
}
TEST(a_communicator_that_is_closed_under_its_run) { world_of(2, closed_meanwhile, NULL); }
